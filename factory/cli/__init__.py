"""The ``factory`` command.

Importing this must stay cheap: commands are loaded when they are run, and
their listing is written here.  An error that a user can act on is one line;
``--debug`` (or ``FACTORY_DEBUG=1``) keeps the traceback.
"""

from __future__ import annotations

import errno
import os
import select
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NoReturn

import click

from factory import __version__
from factory.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_USAGE, CommandError

__all__ = ["cli", "main"]

_COMMANDS: dict[str, tuple[str, str]] = {
    "launch": ("factory.cli.launch:launch", "Run a campaign: a preset, a TOML file, an operation."),
    "status": ("factory.cli.status:status", "How campaigns stand."),
    "show": ("factory.cli.show:show", "All that was seen of one trial."),
    "leaderboard": ("factory.cli.board:leaderboard", "Ranked trials; import and export them."),
    "replay": ("factory.cli.replay:replay", "Samplers against a recorded campaign; no GPU."),
    "compare": ("factory.cli.compare:compare", "Two trials: faster, slower or not told apart."),
    "report": ("factory.cli.report:report", "A campaign as one web page that opens offline."),
    "check": ("factory.cli.check:check", "One candidate file through all stages."),
    "bench": ("factory.cli.bench:bench", "The winner and all baselines, shape by shape."),
    "export": ("factory.cli.export:export", "The winner as a folder that a repository commits."),
    "operations": ("factory.cli.listing:operations_", "What can be computed, and how it is gated."),
    "gc": ("factory.cli.gc:gc", "Make room in the store of compiled kernels."),
    "doctor": ("factory.cli.doctor:doctor", "Is this machine and its toolchain fit?"),
}
"""Name to where it lives and its one-line help, so that ``--help`` loads none of them."""


class _ReaderLeft(Exception):
    """Nobody reads standard output any more; not an error of the command."""


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Say so in a way of our own: click would take a broken pipe for itself and exit with 1."""
    try:
        yield
    except BrokenPipeError as error:
        if not _left(sys.stdout):
            raise RuntimeError("a pipe to another process broke") from error
        raise _ReaderLeft from error


def _left(stream: Any) -> bool:
    """Whether ``stream`` is a pipe whose other end is closed."""
    watched = select.poll()
    watched.register(stream.fileno(), 0)  # of an error one is told unasked
    return any(seen & select.POLLERR for _, seen in watched.poll(0))


class _Lazy(click.Group):
    """Loads a command only when it is run."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _reader_may_leave():  # it prints the help
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="factory")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
def cli(debug: bool) -> None:
    """Campaigns for the fastest correct GPU kernel of an operation."""
    if debug:
        os.environ["FACTORY_DEBUG"] = "1"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Console entry point.

    Exit codes: 0 done; 1 the work failed: nothing passed, or what was asked
    about was rejected; 2 wrong usage; 3 the machine or the toolchain is at
    fault; 130 interrupted, resumable.
    """
    _open_what_is_closed()
    sys.exit(_run(argv))


def _open_what_is_closed() -> None:
    """Give standard output and error a place, as after ``>&-``: else the next file is theirs."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            _lead_nowhere(number)
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115


def _lead_nowhere(number: int) -> None:
    """Discard what is written to a file descriptor from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)


def _run(argv: Sequence[str] | None) -> int:
    try:
        answer: Any = cli.main(
            args=None if argv is None else list(argv), prog_name="factory", standalone_mode=False
        )
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _complain("interrupted", EXIT_INTERRUPTED)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else ""
        said = " ".join(error.format_message().split())
        return _complain(said, EXIT_USAGE, where or "factory")
    except CommandError as error:
        _show_traceback()
        return _complain(str(error), error.exit_code)
    except _ReaderLeft:
        # As of ``factory leaderboard | head``; nobody is there to be told.
        _lead_nowhere(sys.stdout.fileno())
        return EXIT_DONE
    except Exception as error:
        code = _known(error)
        if code is None:
            raise
        _show_traceback()
        if isinstance(error, OSError):
            # What is still buffered would fail again when the interpreter ends.
            _lead_nowhere(sys.stdout.fileno())
            return _complain(f"cannot write: {error.strerror}", code)
        return _complain(str(error), code)
    return answer if isinstance(answer, int) else EXIT_DONE


_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Of a disk, or of whatever standard output was sent to."""


def _known(error: Exception) -> int | None:
    """Exit code of errors that other packages raise for users; None for bugs.

    Their modules are looked up, not imported: what was never imported did not raise.
    """
    if isinstance(error, OSError) and error.errno in _FULL:
        return EXIT_MACHINE
    codes = {
        ("leaderboard._errors", "UnreachableError"): EXIT_MACHINE,
        ("leaderboard._errors", "StoreError"): EXIT_USAGE,
        ("factory.stages.base", "HarnessError"): EXIT_MACHINE,
        ("candidates._base", "ToolchainError"): EXIT_MACHINE,
        ("operations.plugins", "PluginError"): EXIT_MACHINE,
    }
    for (module, name), code in codes.items():
        kind = getattr(sys.modules.get(module), name, None)
        if kind is not None and isinstance(error, kind):
            return code
    return None


def _complain(message: str, code: int, where: str = "factory") -> int:
    click.echo(f"{where}: {' '.join(message.split())}", err=True)
    return code


def _show_traceback() -> None:
    if os.environ.get("FACTORY_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exc()
