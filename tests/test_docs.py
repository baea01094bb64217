"""What README and docs say is so: links lead somewhere, commands exist, tables equal the code.

Tables that are a copy of data are rendered by ``docs/data``: see ``test_docs_data.py``.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from pydantic import BaseModel

import candidates
import leaderboard
import operations
from candidates.kda_prefill import space
from factory.cli import _run as run_command
from factory.cli import cli
from factory.config import CampaignConfig, load_campaign, preset_names
from factory.stages.model import model

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]
NAMES = [page.name for page in PAGES]
OPERATION = operations.get("kda_prefill")
FAMILY = candidates.get("kda_prefill")

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)


def page(name: str) -> str:
    return next(p for p in PAGES if p.name == name).read_text("utf-8")


def section(text: str, title: str) -> str:
    """A section without its heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n", text, re.M)
    assert found, f"no section {title!r}"
    rest = text[found.end() :]
    without_code = _FENCE.sub(lambda block: " " * len(block[0]), rest)
    end = re.search(rf"^#{{1,{len(found[1])}}} ", without_code, re.M)
    return rest[: end.start()] if end else rest


def rows(text: str, *head: str) -> list[list[str]]:
    """Cells of the table whose first columns are called ``head``."""
    lines = text.splitlines()
    start = next(
        (i for i, line in enumerate(lines) if line.startswith("| " + " | ".join(head))), None
    )
    assert start is not None, f"no table {head}"
    found = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def printed_by(example: str, folder: Path) -> str:
    """What a page's Python prints, run in a folder without a database."""
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------------------------- links


def anchors(text: str) -> set[str]:
    """Fragments of a page's headings, as they are commonly made."""
    plain = _FENCE.sub("", text)
    heads = re.findall(r"^#+ (.+)$", plain, re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}


@pytest.mark.parametrize("name", NAMES)
def test_relative_links_lead_to_a_file_and_a_heading(name: str) -> None:
    source = next(p for p in PAGES if p.name == name)
    text = _FENCE.sub("", page(name))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (source.parent / path).resolve() if path else source
        assert file.exists(), f"{name}: {target} leads nowhere"
        if fragment:
            assert fragment in anchors(file.read_text("utf-8")), f"{name}: no heading {target}"


def test_every_page_is_reached_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/([^)#\s]+)", page("README.md")))
    assert {p.name for p in PAGES if p.parent.name == "docs"} <= linked


# ------------------------------------------------------------------------------- commands


def command_lines(text: str) -> Iterator[str]:
    """Command lines of ``factory`` in fenced blocks and in code spans."""
    for _, block in _FENCE.findall(text):
        for line in block.splitlines():
            if line.startswith("$ factory "):
                yield line[2:].partition("  #")[0]
    yield from re.findall(r"`(factory [a-z-][^`]*)`", _FENCE.sub("", text))


def problem(line: str) -> str | None:
    """What is wrong with a command line, capital words standing for any argument."""
    words = shlex.split(line)[1:]
    command: click.Command = cli
    context = click.Context(cli, info_name="factory")
    index = 0
    positional = 0
    while index < len(words):
        word = words[index]
        index += 1
        if word.startswith("-"):
            option = next((p for p in command.get_params(context) if word in p.opts), None)
            if option is None:
                return f"{context.command_path} has no option {word}"
            if isinstance(option, click.Option) and not option.is_flag:
                if index == len(words):
                    return f"{word} takes a value"
                value = words[index]
                index += 1
                choices = getattr(option.type, "choices", None)
                if choices and not value.isupper() and value not in choices:
                    return f"{word} is one of {choices}"
        elif isinstance(command, click.Group) and (
            (found := command.get_command(context, word)) is not None
        ):
            command = found
            context = click.Context(command, info_name=word, parent=context)
        else:
            positional += 1
            taken = [p for p in command.get_params(context) if isinstance(p, click.Argument)]
            if positional > len(taken) and not any(p.nargs < 0 for p in taken):
                return f"{context.command_path} takes no {word!r}"
    return None


@pytest.mark.parametrize("name", NAMES)
def test_command_lines_exist(name: str) -> None:
    for line in command_lines(page(name)):
        assert problem(line) is None, f"{name}: {line}: {problem(line)}"


def test_a_command_line_that_does_not_exist_is_noticed() -> None:
    for wrong in (
        "factory lunch quickstart",
        "factory launch quickstart --bugdet 3",
        "factory launch quickstart --clock host",
        "factory leaderboard --campaign",
        "factory doctor everything",
    ):
        assert problem(wrong) is not None, wrong


def test_the_readme_has_every_command() -> None:
    listed = {line.split()[1] for line in command_lines(page("README.md"))}
    assert set(cli.list_commands(click.Context(cli))) <= listed


def test_campaigns_has_every_option_of_launch() -> None:
    launch = cli.get_command(click.Context(cli), "launch")
    assert launch is not None
    options = {o for p in launch.params if isinstance(p, click.Option) for o in p.opts}
    shown = {
        c.split()[0]
        for r in rows(page("campaigns.md"), "option of `factory launch`")
        for c in code(r[0])
    }
    assert shown == options


def test_bench_has_every_option_of_its_command() -> None:
    bench = cli.get_command(click.Context(cli), "bench")
    assert bench is not None
    options = {o for p in bench.params if isinstance(p, click.Option) for o in p.opts}
    shown = {code(r[0])[0].split()[0] for r in rows(page("bench.md"), "option of `factory bench`")}
    assert shown == options


@pytest.mark.parametrize("name", NAMES)
def test_make_targets_exist(name: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M))
    assert set(re.findall(r"(?:`|\$ )make ([\w-]+)", page(name))) <= targets


# --------------------------------------------------------------------------------- config


def config_keys(config: type[BaseModel], prefix: str = "") -> dict[str, object]:
    """Dotted key to its default, or ``...`` where there is none."""
    found: dict[str, object] = {}
    for name, info in config.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            found |= config_keys(info.annotation, f"{prefix}{name}.")
        else:
            found[prefix + name] = ... if info.is_required() else info.default
    return found


def test_campaigns_has_every_key_with_its_default() -> None:
    shown: dict[str, object] = {}
    for key, _, default, _ in rows(page("campaigns.md"), "key", "type", "default"):
        value = code(default)
        if value:
            shown[code(key)[0]] = tomllib.loads(f"x = {value[0]}")["x"]
        else:
            shown[code(key)[0]] = {"required": ..., "absent": None}[default]
    assert shown == config_keys(CampaignConfig)


def test_campaigns_has_every_preset_and_its_size() -> None:
    table = rows(page("campaigns.md"), "preset", "runs")
    assert {code(r[0])[0] for r in table} == set(preset_names())
    for row in table:
        config = load_campaign(code(row[0])[0])
        assert config.space is not None
        offered = len(candidates.get(config.operation).offered(config.space))
        assert re.search(rf"\b{offered} schedules", row[1]), f"{row[0]} offers {offered}"


def test_campaigns_names_every_baseline() -> None:
    operations = ("kda_prefill", "gdn_prefill")
    names = [b.name for operation in operations for b in candidates.baselines(operation)]
    row = next(r for r in rows(page("campaigns.md"), "key", "type") if r[0] == "`controls`")
    assert code(row[3]) == names


# ---------------------------------------------------------------------------- leaderboard


def test_database_has_every_table_and_column() -> None:
    from leaderboard.models import Base

    shown = {
        code(r[0])[0]: code(r[2]) for r in rows(page("database.md"), "table", "holds", "columns")
    }
    assert shown == {
        name: [c.name for c in table.columns] for name, table in Base.metadata.tables.items()
    }
    for row in rows(page("database.md"), "column", "meaning"):
        table, _, column = code(row[0])[0].partition(".")
        assert {column, *code(row[0])[1:]} <= set(shown[table])


def test_leaderboard_has_every_option_of_its_command() -> None:
    command = cli.get_command(click.Context(cli), "leaderboard")
    assert command is not None
    options = {o for p in command.params if isinstance(p, click.Option) for o in p.opts}
    head = "option of `factory leaderboard`"
    shown = {c.split()[0] for r in rows(page("leaderboard.md"), head) for c in code(r[0])}
    assert shown == options


def test_leaderboard_has_every_public_name() -> None:
    words = set(re.findall(r"\w+", section(page("leaderboard.md"), "Python")))
    assert set(leaderboard.__all__) <= words


def test_the_questions_of_leaderboard_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = (
        text
        for language, text in _FENCE.findall(page("leaderboard.md"))
        if language == "console" and "--where" in text
    )
    for line in block.splitlines():
        assert run_command(shlex.split(line)[2:]) == 0, line
        assert len(capsys.readouterr().out.splitlines()) > 2, line


def test_the_example_of_leaderboard_runs(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    (example,) = (text for _, text in _FENCE.findall(section(page("leaderboard.md"), "Python")))
    assert "1 NVIDIA H200 form=" in printed_by(example, tmp_path)


# --------------------------------------------------------------------------------- kernel


def test_gate_bounds_of_kernel_equal_the_code() -> None:
    for anchor, tokens, steps, bound in rows(page("kernel.md"), "anchor", "over tokens"):
        name = code(anchor)[0]
        for bt in (16, 32, 64) if tokens == "any" else (int(tokens),):
            view = space.KdaSchedule(bt, name, None, None, 1, 64)
            own = space.own_bound(view)
            assert space.exponent_steps(view) == int(steps)
            assert bound == ("any gate" if own is None else f"{own:.3g}")


@pytest.mark.soak
def test_resources_of_kernel_equal_the_compiler() -> None:
    spaces = ("kda_prefill", "fused")
    offered = {s.key: s for space in spaces for s in FAMILY.offered(space)}
    shown: dict[str, list[list[str]]] = {}
    for schedule, kernel, *numbers in rows(page("kernel.md"), "schedule", "kernel", "registers"):
        shown.setdefault(code(schedule)[0], []).append([code(kernel)[0], *numbers])
    assert shown
    for key, kernels in shown.items():
        found = [
            [
                re.sub(r"_\d+$", "", k.name),
                *map(str, (k.registers, k.dynamic_smem_bytes, k.threads)),
            ]
            for k in FAMILY.compile(offered[key]).kernels
        ]
        assert found == kernels, key


# ---------------------------------------------------------------------------- shown output


@pytest.mark.parametrize("name", ["README.md", "tutorial.md"])
def test_modelled_times_shown_are_those_of_the_model(name: str) -> None:
    offered = {s.key: s for s in FAMILY.offered("kda_prefill")}
    row = r"^ +\d+ +\d+ +([\d.]+) +(form=(?:split .*?rows|fused .*?waves)=\d+) *$"
    shown = re.findall(row, page(name), re.M)
    assert shown
    for us, key in shown:
        score = model(OPERATION, FAMILY, offered[key]).score_us
        assert score is not None
        assert us == f"{score:.4g}", f"{name}: {key} is now {score:.4g} us"


def test_the_readme_counts_what_is_offered() -> None:
    offered = len(FAMILY.offered("kda_prefill"))
    assert f"all {offered} offered schedules" in page("README.md")
    assert f"finished: {offered} trials" in page("README.md")


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    blocks = _FENCE.findall(section(page("README.md"), "Python"))
    (example,) = (text for language, text in blocks if language == "python")
    (shown,) = (text for language, text in blocks if not language)
    # The last digit of an error may differ between builds of torch; what it decides may not.
    said, promised = (
        [re.sub(r"\d\.\de-", "e-", line) for line in text.splitlines()]
        for text in (printed_by(example, tmp_path), shown)
    )
    assert said == promised
