"""What other distributions declare and cannot be used is named in a line."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

MODULES = {
    "absent": None,
    "leaves": "raise SystemExit(5)",
    "broken": "1 / 0",
    "number": "OPERATION = 7",
}


@pytest.fixture
def plugged(tmp_path):
    """Declares an operation, and all that there is of one, each by a module's name."""

    def declare(module, code):
        if code is not None:
            (tmp_path / f"{module}.py").write_text(code + "\n")
        info = tmp_path / "someone-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: someone\nVersion: 1.0\n")
        kinds = ("operations", "families", "baselines", "fed_raw", "exporters")
        groups = (f"[kernel_factory.{kind}]\ntheirs = {module}:OPERATION\n" for kind in kinds)
        (info / "entry_points.txt").write_text("\n".join(groups))
        return tmp_path

    return declare


@pytest.mark.parametrize("module", MODULES)
def test_a_plugin_that_cannot_be_used_is_named(plugged, module):
    folder = plugged(module, MODULES[module])
    code = textwrap.dedent("""
        import candidates, operations
        from factory.export.exporter import exporter_of
        looks = (operations.get, candidates.get, candidates.baselines, candidates.fed_raw)
        for look in (*looks, exporter_of):
            try:
                look("theirs")
            except operations.PluginError as error:
                print(error)
    """)
    run = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    said = done.stdout.splitlines()
    assert len(said) == 5
    assert all(f"theirs = {module}:OPERATION of someone 1.0 " in line for line in said)


SAID = (
    "entry point kernel_factory.operations: theirs = absent:OPERATION of someone 1.0 cannot be "
    "loaded (ModuleNotFoundError: No module named 'absent'); mend or uninstall it"
)


def command(folder, *argv):
    code = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); from factory.cli import main; "
        f"main({list(argv)!r})"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_the_command_says_it_in_a_line(plugged):
    done = command(plugged("absent", None), "operations", "theirs")
    assert (done.returncode, done.stderr) == (3, f"factory: {SAID}\n")


def test_the_list_leaves_it_out_and_says_so(plugged):
    done = command(plugged("absent", None), "operations")
    assert (done.returncode, done.stderr) == (0, f"factory: left out: {SAID}\n")
    assert "kda_prefill" in done.stdout
