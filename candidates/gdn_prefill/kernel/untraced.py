"""The entry point as a traced program calls it: a break in its graph.

Kernels and addresses of tensors are nothing that torch.compile could trace.  A module of its own,
because what it calls imports torch's compiler, for seconds.
"""

from __future__ import annotations

import torch

from candidates.gdn_prefill.kernel import entry

__all__ = ["prefill"]

prefill = torch.compiler.disable(entry.gdn_prefill)
""":func:`.entry.gdn_prefill`, which finds that it is not traced."""
