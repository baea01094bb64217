"""What the gated delta rules have in common: shapes, draws, oracle, comparison and probes.

Kimi Delta Attention and Gated DeltaNet differ in their gate (one per key channel, one per value
head) and in whether value heads share a key head.  All else is the same operation and is here
once; what a gate is and where it comes from is each operation's own business.
"""
