"""What the exports of gated delta rules have in common: arguments, kernels' surface, interchange.

An operation of this kind takes ``q, k, v, g, beta, cu_seqlens, initial_state, scale`` and gives
``o`` and ``final_state``; its kernel package has the modules ``entry``, ``host``, ``config`` and
``launch``.  What of these is shared with another operation's kernels lies among the latter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

from candidates import Schedule
from factory.export.exporter import Exporter, Form, Interchange
from operations import Workload

__all__ = ["SHARED", "DeltaRuleExporter", "with_offsets"]

SHARED = "candidates._delta_rule.kernel"
"""Modules that the kernels of gated delta rules have in common."""

_AXES: dict[str, dict[str, Any]] = {
    "num_offsets": {"type": "var", "description": "N + 1"},
    "D": {"type": "const", "value": 128, "description": "channels of keys and of values"},
}

_MAIN = '''"""The exported folder as a function of a FlashInfer-Bench solution."""

from .any_prefill import any_prefill


def run(q, k, v, g, beta, cu_seqlens, initial_state, scale, o, final_state):
    any_prefill(
        q, k, v, g, beta, cu_seqlens, initial_state, scale=scale, out=o, final_state=final_state
    )
'''

_RUN = """

def run(q, k, v, g, beta, cu_seqlens, initial_state, scale):
    o, state = oracle(q, k, v, g, beta, cu_seqlens, initial_state, scale)
    return o.to(torch.bfloat16), state.to(torch.float32)
"""


def with_offsets(forms: Iterable[Any], offsets: Sequence[str]) -> tuple[Any, ...]:
    """Each of the forms of arguments with each form of offsets."""
    return tuple(replace(form, offsets=one) for form in forms for one in offsets)


class DeltaRuleExporter(Exporter):
    """An :class:`.exporter.Exporter` but for what tells one gated delta rule from another.

    Attributes
    ----------
    package, options, toolchain : str
        Package of the kernels, and the modules that have the form of a call's arguments and the
        check of the DSL.
    sizes : Mapping[str, str]
        Symbolic sizes of the operation's tensors, in the order of a shape of the dispatch table,
        with what they count.
    """

    package: str
    options = f"{SHARED}.options"
    toolchain = f"{SHARED}.toolchain"
    sizes: Mapping[str, str]
    configs = {"split": "Config", "fused": "FusedConfig"}  # noqa: RUF012
    outputs = (("o", "out"), ("final_state", "final_state"))
    homes = ("fla_backend.py",)

    @property
    def interchange(self) -> Interchange:
        """Its sizes, and what is the same for all gated delta rules."""
        varying = {n: {"type": "var", "description": said} for n, said in self.sizes.items()}
        return Interchange(
            axes={**varying, **_AXES},
            named={"N+1": "num_offsets", "128": "D"},
            constraints=("num_offsets == N + 1",),
            tags=("stage:prefill", "linear-attention"),
            scalars={"scale": "factor of the output"},
            drawn="gates are negative, keys have unit norm",
            oracle=(f"tests/{self.operation}_oracle.py", "def assert_close"),
            run=_RUN,
            main=self.filled(_MAIN),
        )

    def axes(self, workload: Workload) -> dict[str, int]:
        N = workload.sequences  # type: ignore[attr-defined]
        return {**dict(zip(self.sizes, self.shape(workload), strict=True)), "num_offsets": N + 1}

    def scalars(self, workload: Workload) -> dict[str, float]:
        return {"scale": workload.scale}  # type: ignore[attr-defined]

    def launched(self, schedule: Schedule) -> tuple[tuple[str, ...], int]:
        launch = self._module("launch")
        loaded = launch.LoadedSchedule(launch.config_of(schedule))
        return tuple(loaded.kernel_names), int(loaded.chunk_tokens)

    def notes(self, bound: float | None) -> tuple[str, ...]:
        return (
            self.gates(bound),
            "Forward only: an input that requires grad is refused while gradients are enabled. "
            " Under ``torch.compile`` the call is one operator of the graph, on the current"
            " stream.  The first call for a schedule and a form of arguments compiles it (seconds)"
            " and loads it: make one before a CUDA graph capture.",
        )

    def gates(self, bound: float | None) -> str:
        """Which gates are served, and what becomes of others."""
        if bound is None:
            return "Right for every gate at or below 0, however strong."
        return (
            f"Right for gates from {bound:g} (included) to 0 a token.  Stronger ones are outside"
            " of this export's contract: with ``gate='safe'`` a ``lower_bound`` past that is"
            " refused, and so is ``gate='softplus'``; with ``gate='log'`` they cannot be seen from"
            " shapes, and ``validate=True`` reads the gates and refuses them."
        )

    def require_dsl(self) -> str:
        version: str = import_module(self.toolchain).require_dsl()
        return version

    def forms(self, schedules: Sequence[Schedule]) -> tuple[Form, ...]:
        """Those of :meth:`options_of`, with and without an initial and a final state."""
        found: dict[Form, None] = {}
        for schedule in schedules:
            config = self._module("launch").config_of(schedule)
            if hasattr(config, "waves"):  # a number at the launch
                config = replace(config, waves=1)
            for options in self.options_of(config, import_module(self.options)):
                for with_state in (True, False):
                    for form in (options, replace(options, final_state=None)):
                        found.setdefault(Form(config, with_state, form))
        return tuple(found)

    @abstractmethod
    def options_of(self, config: Any, options: Any) -> tuple[Any, ...]:
        """What is compiled ahead of time for a configuration, with a final state.

        Parameters
        ----------
        config : object
            Of the kernel package.
        options : module
            Which holds ``Options`` and the plain ones, ``PLAIN``.
        """

    def compile(self, form: Form) -> Any:
        host = self._module("host")
        return host.compile_function(*host.call_job(form.config, form.with_state, form.options))[0]

    def _module(self, name: str) -> Any:
        return import_module(f"{self.package}.{name}")
