"""Errors that the command turns into one line and an exit code.

A user error names the thing and the fix; a machine error names what is
missing or broken.  Anything else that reaches the top is a bug and keeps its
traceback.
"""

from __future__ import annotations

__all__ = [
    "EXIT_DONE",
    "EXIT_INTERRUPTED",
    "EXIT_MACHINE",
    "EXIT_NOTHING_PASSED",
    "EXIT_USAGE",
    "CommandError",
    "MachineError",
    "UserError",
]

EXIT_DONE = 0
EXIT_NOTHING_PASSED = 1
EXIT_USAGE = 2
EXIT_MACHINE = 3
EXIT_INTERRUPTED = 130


class CommandError(Exception):
    """An error with an exit code; its message is one line."""

    exit_code: int = EXIT_NOTHING_PASSED


class UserError(CommandError):
    """Wrong usage: the message names the thing and the fix."""

    exit_code = EXIT_USAGE


class MachineError(CommandError):
    """The machine or the toolchain is at fault."""

    exit_code = EXIT_MACHINE
