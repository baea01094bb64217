"""The GDN prefill kernels in CuTe DSL for sm_90a: a PREP for scalar gates, then KDA's SCAN.

A chunk's image (:mod:`candidates.kda_prefill.kernel.image`) is what the two agree on.  With one
gate per token and value head its decay is the same in all key channels, and everything behind
PREP is KDA's own, unchanged.  Nothing here imports the DSL on import.
"""
