"""The KDA prefill kernels in CuTe DSL for sm_90a: PREP, then SCAN, in one host call.

``image`` holds what both kernels and their models agree on, in plain Python.
``prep``, ``scan`` and ``segments`` hold device code and import the DSL; nothing
here does so on import, so that the family can be listed without it.
"""
