"""What raw inputs of KDA prefill mean: see :mod:`operations._delta_rule.raw`."""

from __future__ import annotations

from operations._delta_rule.raw import L2NORM_EPS, activated_gate, plain

__all__ = ["L2NORM_EPS", "activated_gate", "plain"]
