"""The entry point as a traced program calls it: a break in its graph.

Kernels and addresses of tensors are nothing that torch.compile could trace.  A module of its own,
because what it calls imports torch's compiler, for seconds, and its wrapper takes microseconds of
an eager call.
"""

from __future__ import annotations

import torch

from . import entry

__all__ = ["prefill"]

prefill = torch.compiler.disable(entry.kda_prefill)
""":func:`.entry.kda_prefill`, which finds that it is not traced."""
