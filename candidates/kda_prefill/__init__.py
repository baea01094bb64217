"""KDA prefill on Hopper: PREP makes each chunk's operands in parallel, SCAN walks the chunks.

Importing this package loads neither torch nor the DSL.
"""

from candidates.kda_prefill._family import FAMILY, KdaPrefillFamily

__all__ = ["FAMILY", "KdaPrefillFamily"]
