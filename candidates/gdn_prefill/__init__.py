"""GDN prefill on Hopper: KDA's chunked form where one gate a token and head leaves the channel sum.

Importing this package loads neither torch nor the DSL.
"""

from candidates.gdn_prefill._family import FAMILY, GdnPrefillFamily

__all__ = ["FAMILY", "GdnPrefillFamily"]
