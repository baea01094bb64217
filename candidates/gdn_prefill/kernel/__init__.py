"""The GDN prefill kernels in CuTe DSL for sm_90a, in two forms.

Split: a PREP for scalar gates, then the SCAN of all delta rules.  A chunk's image, as
:mod:`candidates._delta_rule.kernel.image` lays it out, is what the two agree on.  With one gate
per token and value head its decay is the same in all key channels.

Fused: one kernel whose CTAs build two matrices a chunk and scan with the raw rows of q, k and v;
with 128 value rows sequences may be cut into pieces, which a fix-up joins.

Nothing here imports the DSL on import.
"""
