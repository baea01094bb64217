"""The part of the kernels of gated delta rules that does not see the gate, for sm_90a.

``image`` holds what PREP and SCAN agree on, in plain Python.  ``scan`` walks the chunks, whatever
made them; the other modules have the instructions, fragments and offsets that all kernels use.

Nothing here imports the DSL on import of the package.
"""
