"""What families of gated delta rules have in common.

They import from here, never from each other; nothing here knows one of them.  Importing this
package loads neither torch nor the DSL.
"""
