"""The text of a kernel as a list of instructions; knows nothing of what they do."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

__all__ = ["Instruction", "Program", "parsed"]

_WAIT = re.compile(
    r"\{ \.reg \.pred p; LAB_WAIT: mbarrier\.try_wait\.parity\.shared::cta"
    r"\.b64 p, (.*?); @!p bra LAB_WAIT; \}"
)


@dataclass(frozen=True)
class Instruction:
    """One statement; its predicate is a register and whether it must be false."""

    predicate: tuple[str, bool] | None
    opcode: str
    arguments: tuple[str, ...]
    text: str

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


class Program:
    """A parsed kernel.

    Parameters
    ----------
    text : str
        PTX.
    entry : str
        How the kernel's name begins.
    """

    def __init__(self, text: str, entry: str = "") -> None:
        body = text[text.index(f".visible .entry {entry}") :]
        body = body[: (body + ".visible .entry").index(".visible .entry", 1)]
        found = re.search(r"\.reqntid (\d+)", body)
        assert found is not None
        self.threads = int(found[1])
        body = re.sub(r"//.*", "", body[body.index("\n{") :])
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for line in _WAIT.sub(r"wait \1;", body).splitlines():
            label = re.match(r"^\s*(\$\w+):$", line)
            if label:
                self.labels[label[1]] = len(self.instructions)
                continue
            for statement in re.sub(r"^\s*\{(?!%)|\}\s*$", "", line).split(";"):
                bare = statement.strip()
                if bare and bare not in "{}" and not bare.startswith((".reg", ".pragma")):
                    self.instructions.append(_parse(bare))


@functools.lru_cache(maxsize=64)
def parsed(text: str, entry: str = "") -> Program:
    """A :class:`Program`, which nobody changes; most kernels are run many times."""
    return Program(text, entry)


def _parse(text: str) -> Instruction:
    predicate = None
    match = re.match(r"^@(!?)(%?\w+)\s+(.*)$", text, re.DOTALL)
    if match:
        predicate, text = (match[2], bool(match[1])), match[3]
    opcode, _, rest = text.partition(" ") if "\t" not in text else text.partition("\t")
    arguments, depth, current = [], 0, ""
    for char in rest:
        depth += (char in "{[") - (char in "}]")
        if char == "," and depth == 0:
            arguments.append(current.strip())
            current = ""
        else:
            current += char
    if current.strip():
        arguments.append(current.strip())
    return Instruction(predicate, opcode.strip(), tuple(arguments), text)
