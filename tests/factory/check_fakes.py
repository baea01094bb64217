"""User files for the toy operation, and a control; the device under them is simulated.

``launch`` lets a simulated kernel of a name and a duration start.  Whatever a
file does beyond that is one way to be right, wrong or dishonest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from candidates import Baseline

RIGHT = """
from factory.device.simulated import launch
OPERATION = "toy_scale"
KERNELS = ("mine_",)
DEVICES = ("cpu", "cuda")

def compute(inputs, outputs, name="mine_main", us=10.0):
    launch(name, us + 0.01 * len(inputs["x"]))
    outputs["y"].copy_(inputs["x"] * inputs["g"].exp()[:, None])

def run(inputs, outputs):
    compute(inputs, outputs)
"""

RUN = "\ndef run(inputs, outputs):\n"

FILES: dict[str, str] = {
    "right": RIGHT,
    "cuda only": RIGHT.replace('("cpu", "cuda")', '("cuda",)'),
    "cpu only": RIGHT.replace('("cpu", "cuda")', '("cpu",)'),
    "emulates": RIGHT
    + "\ndef emulate(inputs):\n    return {'y': inputs['x'] * inputs['g'].exp()[:, None]}\n",
    "emulates wrongly": RIGHT + "\ndef emulate(inputs):\n    return {'y': inputs['x'] * 1.0}\n",
    "wrong": RIGHT + "    outputs['y'].mul_(1.1)\n",
    "undeclared": RIGHT + "    launch('library_gemm', 1.0)\n",
    "replays": RIGHT.partition(RUN)[0]
    + "\nKEPT = {}\n"
    + RUN
    + "    key = inputs['x'].data_ptr()\n"
    + "    if key not in KEPT:\n"
    + "        compute(inputs, outputs)\n"
    + "        KEPT[key] = outputs['y'].clone()\n"
    + "    launch('mine_main', 1.0)\n"
    + "    outputs['y'].copy_(KEPT[key])\n",
    "clears its outputs": RIGHT + "    outputs.clear()\n",
    "returns another": RIGHT + "    return {'z': outputs['y']}\n",
    "returns a long name": RIGHT + "    return {'z' * (9 << 20): outputs['y']}\n",
    "prints much": RIGHT + "    print('first\\n' + 'x' * (4 << 20) + '\\nlast')\n",
    "ends its parent": RIGHT + "    import os\n    os.kill(os.getppid(), 15)\n",
    "raises on import": RIGHT + "\nraise ValueError('not today')\n",
    "blames the toolchain": RIGHT
    + "\nimport candidates\nraise candidates.ToolchainError('buy another compiler')\n",
    "blames the profiler": RIGHT
    + "\nfrom factory.device.hardware import RecordingError\nraise RecordingError('blind')\n",
    "needs a distribution": RIGHT + "\nimport no_such_distribution\n",
    "aborts": RIGHT + "    import os\n    os.abort()\n",
    "renames its kernels": RIGHT
    + "\nimport candidates.user as u\n"
    + "u._Runnable.__init__ = lambda self, names, *rest: self.__dict__.update(\n"
    + "    kernel_names=('any',), chunk_tokens=None, bitwise_causal=False, binder=rest[-1])\n",
}


def written(folder: Path, name: str) -> Path:
    """The file of that name in ``folder``."""
    path = folder / f"{name.replace(' ', '_')}.py"
    path.write_text(FILES[name])
    return path


class Control(Baseline):
    """Takes 20 us, and after some loads ``later_us``."""

    name = "steady"
    operation = "toy_scale"
    input_form = "activated"

    def __init__(self, later_us: float = 20.0) -> None:
        self._later_us = later_us
        self._loads = 0

    def missing(self) -> str | None:
        return None

    def version(self) -> str:
        return "steady 1"

    def load(self, workload: Any, raw: Mapping[str, Any] | None) -> Any:
        self._loads += 1
        # The first reading loads three input sets of each workload in two regimes.
        return _Launch(20.0 if self._loads <= 6 else self._later_us)


class _Launch:
    kernel_names = ("control_",)

    def __init__(self, us: float) -> None:
        self._us = us

    def bind(self, inputs: Any, outputs: Any) -> Callable[[], Mapping[str, Any]]:
        from factory.device.simulated import launch

        def call() -> Mapping[str, Any]:
            launch("control_main", self._us)
            outputs["y"].copy_(inputs["x"] * inputs["g"].exp()[:, None])
            return outputs

        return call
