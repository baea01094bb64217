"""The call of a traced program that cannot be part of its graph."""

from __future__ import annotations

import torch

from . import api

__all__ = ["run"]

run = torch.compiler.disable(api._run)
