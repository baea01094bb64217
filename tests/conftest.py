"""What holds for every test."""

import os

# The DSL reads it once, when it is first imported, by whichever test comes first.
os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
