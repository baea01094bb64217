"""What reading commands print with ``--json`` has the shape that docs/json.md promises."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from answers import ask

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import leaderboard  # noqa: E402
import operations  # noqa: E402
from docs.data.shapes import SHAPES  # noqa: E402
from factory.cli import cli  # noqa: E402

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory whose leaderboard holds the shipped results."""
    found = tmp_path_factory.mktemp("shapes")
    with leaderboard.open_store(f"sqlite:///{found}/factory.db") as store:
        for file in sorted((ROOT / "leaderboard" / "shipped").glob("*.jsonl.xz")):
            leaderboard.import_file(store, file)
    return found


@pytest.fixture
def printed(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Run:
    """Run a command there; returns what it printed."""
    monkeypatch.chdir(folder)
    # As if the operation were still the one that the shipped campaign met.
    with leaderboard.open_for_reading() as store:
        version = store.get_campaign("kda_prefill").operation_version
    monkeypatch.setattr(operations.get("kda_prefill"), "version", version)

    def run(*argv: object) -> Any:
        code, out, err = ask(capsys, *argv, "--json")
        assert code in (0, 3), err  # 3: doctor on a machine that lacks something
        return json.loads(out)

    return run


def trials(printed: Run) -> tuple[int, int, int]:
    """The two best of one job, and one that was rejected."""
    campaign = printed("status")[0]["id"]
    first, second = printed("leaderboard", "--campaign", campaign, "--limit", 2)[:2]
    wrong = printed("leaderboard", "--campaign", campaign, "--rejected")[0]
    return first["id"], second["id"], wrong["id"]


def objects(printed: Run, command: str, tmp_path: Path) -> list[Any]:
    """All objects that a command of docs/json.md printed, in each of its forms."""
    words = command.removesuffix(" --json").split()[1:]
    if words[:1] == ["show"]:
        best, _, wrong = trials(printed)
        if "--again" in words:
            return list(printed("show", wrong, "--again"))
        return [printed("show", best), printed("show", wrong)]
    if words[:1] == ["compare"]:
        return [printed("compare", *trials(printed)[:2])]
    if words[:1] == ["status"]:
        every = printed("status")
        return [*every, printed("status", every[0]["id"])]
    if words[:1] == ["operations"]:
        return [*printed("operations"), printed("operations", "kda_prefill")]
    if words[:2] == ["leaderboard", "import"]:
        file = min((ROOT / "leaderboard" / "shipped").glob("*.jsonl.xz"))
        return [printed("leaderboard", "import", file, "--db", f"sqlite:///{tmp_path}/x.db")]
    if words == ["gc"]:
        return [printed("gc")]
    if words[:2] == ["leaderboard", "claims"]:
        return list(printed(*words, "--db", claimed(tmp_path)))
    if words == ["leaderboard"]:
        return [*printed("leaderboard"), *printed("leaderboard", "--status", "all")]
    return list(printed(*words))


def claimed(folder: Path) -> str:
    """A leaderboard with a claim."""
    import export_board as board

    url = f"sqlite:///{folder}/claims.db"
    with leaderboard.open_store(url) as store:
        board.fill(store)
        store.add_claim(
            leaderboard.ClaimRecord(
                id="claim-1", operation="kda_prefill", operation_version="1", family="kda_prefill",
                export_hash="a" * 64, source_hash="b" * 64, table=[{"shape": None}],
                campaign_id=board.CAMPAIGN, trial_uid=board.uid("trial", 0), job_id=board.JOB,
                gpu="NVIDIA H200", score_us=50.0, candidate_us=50.0, ratio=1.0, bound=1.02,
                kernels=("kda_fused_0",), created_at="2026-11-30T11:00:00+00:00",
            )
        )  # fmt: skip
    return url


@pytest.mark.parametrize("command", SHAPES)
def test_json_has_its_shape(printed: Run, tmp_path: Path, command: str) -> None:
    found = objects(printed, command, tmp_path)
    assert found, "nothing was printed, so nothing was checked"
    shape = SHAPES[command][1]
    for one in found:
        assert set(one) == set(shape.model_fields)  # none is missing, defaults included
        shape.model_validate_json(json.dumps(one))


def test_every_reading_command_has_a_shape() -> None:
    reading = set()
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        assert command is not None
        if any("--json" in p.opts for p in command.params):
            reading.add(name)
    elsewhere = {
        "launch",
        "replay",
        "check",
        "bench",
        "export",
    }  # they run something; see their own pages
    assert {c.split()[1] for c in SHAPES} >= reading - elsewhere
