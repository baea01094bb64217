"""What callers pass, as compile-time options of the kernels; plain Python, no torch, no DSL.

A default :class:`Options` is the plain form: activated fp32 gates, write strengths in [0, 1],
normalised q and k, fp32 states, int32 offsets, contiguous tensors.  Every other form compiles
another variant of the same kernel, when it is first called.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["GATES", "L2NORM_EPS", "LOWEST_BOUND", "PLAIN", "Options"]

GATES = ("log", "safe", "softplus")

L2NORM_EPS = 1e-6
"""Added to the sum of squares of q and of k before its root, as other kernels do."""

LOWEST_BOUND = -100.0
"""Lowest ``lower_bound`` of a safe gate: kernels read gates below as this."""

_FLOATS = ("float32", "bfloat16")


@dataclass(frozen=True)
class Options:
    """The form of one call's inputs and outputs.

    Parameters
    ----------
    gate : str
        ``log``: g is the gate.  ``safe``: it is ``lower_bound sigmoid(exp(A_log) (g + dt_bias))``.
        ``softplus``: it is ``-exp(A_log) softplus(g + dt_bias)``.
    gate_dtype, beta_dtype : str
        ``float32`` or ``bfloat16``.
    bias : bool
        Whether dt_bias is given; only beside a gate that is not ``log``.
    beta_logits : bool
        Whether beta is a logit.
    l2norm : bool
        Whether q and k are divided by ``sqrt(|x|^2 + L2NORM_EPS)``.
    initial_state : str
        Its dtype, where there is one.
    final_state : str or None
        Its dtype; None is not wanted.
    offsets : str
        ``int32`` or ``int64`` cu_seqlens, or ``equal``: tensors are [B, T, H, ...], without
        offsets.
    compact : bool
        Whether q, k, v, g and beta are contiguous; where gates have channels, whether there are as
        many value heads as key heads, too.  Else strides are read from the tensors.

    Raises
    ------
    ValueError
        If a value is unknown.
    """

    gate: str = "log"
    gate_dtype: str = "float32"
    bias: bool = False
    beta_dtype: str = "float32"
    beta_logits: bool = False
    l2norm: bool = False
    initial_state: str = "float32"
    final_state: str | None = "float32"
    offsets: str = "int32"
    compact: bool = True

    def __post_init__(self) -> None:
        for name, known in (
            ("gate", GATES),
            ("gate_dtype", _FLOATS),
            ("beta_dtype", _FLOATS),
            ("initial_state", _FLOATS),
            ("final_state", (*_FLOATS, None)),
            ("offsets", ("int32", "int64", "equal")),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {list(known)}")
        if self.bias and self.gate == "log":
            raise ValueError("bias goes with gate='safe' and gate='softplus'")

    @property
    def raw_gate(self) -> bool:
        """Whether the kernel activates the gate."""
        return self.gate != "log"

    @property
    def gate_bytes(self) -> int:
        """Of one element of g."""
        return 2 if self.gate_dtype == "bfloat16" else 4

    @property
    def suffix(self) -> str:
        """What tells the kernel's name from the plain one's; empty for the plain form."""
        said = [self.gate] if self.raw_gate else []
        said += ["g16"] if self.gate_dtype == "bfloat16" else []
        said += ["b16"] if self.beta_dtype == "bfloat16" else []
        said += ["logits"] if self.beta_logits else []
        said += ["l2"] if self.l2norm else []
        said += ["" if self.compact else "strided"]
        return "".join(f"_{x}" for x in said if x)


PLAIN = Options()
