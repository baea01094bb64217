"""any_title (any_method, forward) for NVIDIA Hopper, as one folder to vendor.

The kernel is written in CuTe DSL (``kernel/``) and compiled to sm_90a when it is first called.
It needs torch, nvidia-cutlass-dsl and apache-tvm-ffi, no network and no environment variables.
``dispatch.py`` says which schedule serves which shape, and on what measurements that rests.
"""

from .api import Support, any_prefill, support
from .dispatch import EXPORT_ID, GATE_BOUND, ROWS, SOURCE_SHA256

__all__ = ["EXPORT_ID", "GATE_BOUND", "ROWS", "SOURCE_SHA256", "Support", "any_prefill", "support"]
