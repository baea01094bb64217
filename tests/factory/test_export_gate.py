"""The export gate: a folder's own tests, a job on a simulated device, the claim that is stored."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import device_fakes as fakes
import export_board as board
import pytest
from process_tree import words_of
from pydantic import ValidationError
from waiting import until

import leaderboard
from factory import bench, check
from factory.cli import _run
from factory.device.protocol import TUNING_S, Limits
from factory.device.simulated import SimulatedDevice
from factory.export import gate as gating
from factory.export.contest import CANDIDATE, EXPORT, Contest, Vendored
from factory.export.folder import write
from factory.export.gate import Gated, OwnTests, claim_from, gate, own_tests, store_claim
from factory.export.render import FORMAT, VERSION, export_hash, sha256
from factory.stages.base import HarnessError, StageResult
from leaderboard import ClaimRecord, claim_of, claims, open_store
from leaderboard.records import (
    Clock,
    ErrorRecord,
    FingerprintRecord,
    JobRecord,
    JobStatus,
    MeasurementRecord,
    StageStatus,
)

SOURCE = """
def fake(g, v, initial, scale, o, total):
    from factory.device.simulated import launch  # the device itself, where there is no GPU
    {first}
    launch("{kernel}", {us} + 0.01 * len(v))
    found = scale * g.exp() * v * {wrong}
    o.copy_(found if initial is None else found + initial)
    total.copy_(o.sum(0))
"""
TESTS = """
import pytest
def test_this_project_is_not_there():
    for name in ("factory", "candidates", "leaderboard", "ray", "sqlalchemy"):
        with pytest.raises(ModuleNotFoundError):
            __import__(name)
{more}
"""
GOOD = fakes.FAMILY.schedule({"kind": "good"})

MACHINE = FingerprintRecord.of({"gpu": "NVIDIA H200"})


def vendored(
    base: Path,
    *,
    us: float = 10.0,
    kernel: str = "fake_main",
    wrong: float = 1.0,
    first: str = "pass",
    more: str = "",
) -> Vendored:
    """A folder like an exported one, for the fake operation."""
    texts = {
        "__init__.py": SOURCE.format(us=us, kernel=kernel, wrong=wrong, first=first),
        "tests/test_fake_gpu.py": TESTS.format(more=more),
    }
    files = {name: text.encode() for name, text in texts.items()}
    bound = export_hash(files)
    told = {
        "format": FORMAT,
        "version": VERSION,
        "export_hash": bound,
        "files": {name: sha256(data) for name, data in files.items()},
    }
    write({**files, "MANIFEST.json": json.dumps(told).encode()}, base / "vendored_fake")
    return Vendored(
        folder=str(base / "vendored_fake"),
        function="fake",
        outputs=(("o", "o"), ("total", "total")),
        kernels=("fake_",),
        chunk=None,
        export_hash=bound,
        foreign=("tokenize_of_ours",),
    )


def put(tmp_path: Path, folder: Vendored, *, baselines: Any = ()) -> Gated:
    return gate(
        fakes.OPERATION,
        Contest(folder, fakes.FAMILY, GOOD, None),
        device=SimulatedDevice(),
        baselines=baselines,
        log_dir=tmp_path,
        seed=1,
        rounds=2,
        many_rows=False,
    )


# -- a folder in a job -----------------------------------------------------------------


@pytest.fixture(scope="module")
def passed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Gated, Contest]:
    base = tmp_path_factory.mktemp("gate")
    folder = vendored(base)
    found = put(base, folder, baselines=(fakes.FakeBaseline(),))
    return found, Contest(folder, fakes.FAMILY, GOOD, None)


def test_a_folder_that_is_what_it_was_passes_with_its_candidate_beside_it(
    passed: tuple[Gated, Contest],
) -> None:
    found, contest = passed
    assert found.refused == ""
    assert found.void == ""
    assert (found.tested.passed, found.tested.on_gpu, found.tested.failed) == (1, 1, 0)
    assert found.job is not None
    for schedule in (EXPORT, CANDIDATE):
        met = {
            (m.workload, m.held_out)
            for m in found.results[schedule].measurements
            if m.regime == "production" and m.clock is Clock.GPU
        }
        assert met == {(w.name, w.held_out) for w in fakes.OPERATION.workloads.values()}
        assert {m.job_id for m in found.results[schedule].measurements} == {found.job.id}
    record = claim_from(found, fakes.OPERATION, contest, table=[], campaign_id="c", trial_uid="t")
    assert record.ratio == pytest.approx(1.0, abs=1e-6)
    assert record.held_out_ratio == pytest.approx(1.0, abs=1e-6)
    assert record.control == "steady"
    assert record.control_ratio == pytest.approx(record.score_us / record.control_us)
    assert record.export_hash == contest.vendored.export_hash
    assert record.kernels == ("fake_main",)
    assert record.details["own_tests"]["passed"] == 1
    assert record.details["largest_errors"]["o"]["max_rel"] < 1e-6


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"us": 10.6}, r"the folder takes 1\.0[45]\d of its candidate's time over the tuned"),
        (
            {"first": "import sys, types; sys.modules['tokenize_of_ours'] = types.ModuleType('x')"},
            r"brings in tokenize_of_ours",
        ),
    ],
    ids=["slower", "does not stand alone"],
)
def test_a_folder_that_is_not_what_was_tuned_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    found = put(tmp_path, vendored(tmp_path, **changes))
    assert found.refused
    with pytest.raises(ValueError, match=said):
        claim_from(
            found,
            fakes.OPERATION,
            Contest(vendored(tmp_path, **changes), fakes.FAMILY, GOOD, None),
            table=[],
            campaign_id="c",
            trial_uid="t",
        )


def test_a_folder_altered_since_it_was_written_is_not_even_loaded(tmp_path: Path) -> None:
    folder = vendored(tmp_path)
    path = Path(folder.folder) / "__init__.py"
    path.write_text(path.read_text() + "# faster\n")
    with pytest.raises(Exception, match="is not the export that is put to the gate any more"):
        folder.load()


# -- its own tests ---------------------------------------------------------------------


def test_a_failing_test_of_its_own_ends_it_before_any_job(tmp_path: Path) -> None:
    more = "def test_contract():\n    assert 1 == 2, 'o is wrong'\n"
    found = put(tmp_path, vendored(tmp_path, more=more))
    assert found.job is None
    assert found.refused.startswith("its own tests: 1 failed: test_contract: ")
    assert "o is wrong" in found.refused


def test_tests_that_a_gpu_would_run_and_did_not_are_no_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gating, "own_tests", lambda folder, log: OwnTests(40, 9, 0, 0))
    contest = Contest(vendored(tmp_path), fakes.FAMILY, GOOD, None)
    found = gate(
        fakes.OPERATION,
        contest,
        device=replace(SimulatedDevice(), real_time=True),
        baselines=(),
        log_dir=tmp_path,
    )
    assert found.refused == "its own tests: none of those for a GPU ran"


def test_a_control_may_tune_itself_wherever_all_of_them_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class _Opened(Exception):
        pass

    def opens(*_: Any, limits: Limits, **__: Any) -> None:
        assert limits.control_s == TUNING_S
        raise _Opened

    monkeypatch.setattr(gating, "own_tests", lambda folder, log: OwnTests(40, 9, 0, on_gpu=9))
    monkeypatch.setattr("factory.device.job.open_job", opens)
    with pytest.raises(_Opened):
        put(tmp_path, vendored(tmp_path))
    assert check._LIMITS.control_s == bench.LIMITS.control_s == TUNING_S


def test_tests_that_break_pytest_are_the_folders_fault_or_the_machines(tmp_path: Path) -> None:
    folder = vendored(tmp_path, more="import no_such_thing\n")
    found = own_tests(Path(folder.folder), tmp_path / "log")
    assert found.failed == 1
    assert "no_such_thing" in (tmp_path / "log").read_text()


def test_no_test_process_goes_on_when_one_ends_the_gate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(*given: Any) -> subprocess.Popen[bytes]:
        started.append(begin(*given))
        return started[-1]

    begin = gating._start
    folder = Path(vendored(tmp_path).folder)
    (folder / "tests/test_a.py").write_text("import os\nos._exit(3)\n")
    (folder / "tests/test_b.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setattr(gating, "_start", start)
    try:
        with pytest.raises(HarnessError, match="test_a"):
            own_tests(folder, tmp_path / "log")
        assert all(child.poll() is not None for child in started)
    finally:
        for child in started:
            child.kill()
            child.wait()


def test_what_a_test_started_ends_with_it_at_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gating, "_TESTS_S", 1.0)
    monkeypatch.setattr(gating, "_RUN_TESTS", "import os, time\nos.fork()\ntime.sleep(9)\n")
    folder = Path(vendored(tmp_path).folder)
    began = time.monotonic()
    assert "did not end within 1 s" in own_tests(folder, tmp_path / "log").first
    assert time.monotonic() - began < 6


def test_what_a_test_left_behind_ends_before_anything_is_timed(tmp_path: Path) -> None:
    left = """
import subprocess, sys
def test_leaves_one():
    up = "import time; print('up', flush=True); time.sleep(600)"
    child = subprocess.Popen(
        [sys.executable, "-c", up], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert child.stdout.readline() == b"up\\n"
    open({path!r}, "w").write(str(child.pid))
"""
    path = tmp_path / "pid"
    folder = Path(vendored(tmp_path).folder)
    (folder / "tests/test_a.py").write_text(left.format(path=str(path)))
    found = own_tests(folder, tmp_path / "log")
    assert (found.passed, found.failed) == (2, 0), found
    pid = int(path.read_text())
    try:
        until(lambda: not words_of(pid), "the end of what was left behind")
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- what may be claimed ---------------------------------------------------------------


def times(us: float, held: float) -> StageResult:
    """A result with flat times on the shapes of the board."""
    made = [
        MeasurementRecord(
            job_id="job-claim", trial_id=0, workload=shape, regime=regime, clock=Clock.GPU,
            cache="warm", method="cupti", median_us=taken, low_us=taken, high_us=taken,
            samples_us=(taken,), kernels=("kda_fused_0",), held_out=shape == board.KDA.held_out,
            phase="final",
        )
        for shape, taken in (*((s, us) for s in board.SHAPES), (board.KDA.held_out, held))
        for regime in ("production", "slow")
    ]  # fmt: skip
    error = ErrorRecord(
        stage="final", regime="production", workload=board.SHAPES[0], tensor="o", scope="all",
        max_rel=0.007, rms_rel=0.004, finite=True, within=True, seed=1,
    )  # fmt: skip
    return StageResult(
        StageStatus.PASSED, errors=(error,), measurements=tuple(made), score_us=us, slow_us=us
    )


def control(us: float) -> tuple[MeasurementRecord, ...]:
    shapes = [w.name for w in board.OPERATION.tuned()]
    return tuple(
        MeasurementRecord(
            job_id="job-claim", control="cudnn_fused", workload=shape, regime="production",
            clock=Clock.GPU, cache="warm", method="cupti", input_form="raw", median_us=us,
            low_us=us, high_us=us, phase="final",
        )
        for shape in shapes
    )  # fmt: skip


def gated(job: str, ours: float, theirs: float, over: float = 54.0, held: float = 20.0) -> Gated:
    def of(result: StageResult) -> StageResult:
        moved = [m.model_copy(update={"job_id": job}) for m in result.measurements]
        return replace(result, measurements=tuple(moved))

    moment = datetime(2026, 11, 30, 11, 0, tzinfo=UTC)
    return Gated(
        refused="",
        tested=OwnTests(80, 2, 0, 20),
        results={
            EXPORT: of(times(ours, held)),
            CANDIDATE: of(times(theirs, 20.0)),
        },
        controls=tuple(m.model_copy(update={"job_id": job}) for m in control(over)),
        job=JobRecord(
            id=job, campaign_id=None, fingerprint_id=MACHINE.id, gpu="NVIDIA H200",
            status=JobStatus.VALID, started_at=moment, ended_at=moment, drift=0.002,
        ),
        fingerprint=MACHINE,
    )  # fmt: skip


def contest_of(bound: str) -> Contest:
    folder = Vendored("/nowhere/kda", "kda_prefill", (), (), 16, bound)
    return Contest(folder, board.FAMILY, board.SCHEDULES[0], None)


def claim(store: leaderboard.Store, bound: str, found: Gated) -> ClaimRecord:
    record = claim_from(
        found,
        board.OPERATION,
        contest_of(bound),
        table=[{"shape": None, "schedule_key": board.SCHEDULES[0].key, "trial": "trial-0"}],
        campaign_id=board.CAMPAIGN,
        trial_uid=board.uid("trial", 0),
        standing=claims(store),
    )
    store_claim(store, found, record, store.get_trial(board.uid("trial", 0)).id)
    return record


@pytest.fixture
def store(tmp_path: Path):
    with open_store(f"sqlite:///{tmp_path / 'claims.db'}") as opened:
        yield board.fill(opened)


@pytest.mark.parametrize(
    ("found", "many_rows", "said"),
    [
        (gated("j", 50.0, 50.0), False, ""),
        (gated("j", 50.9, 50.0), False, ""),
        (gated("j", 51.1, 50.0), False, "takes 1.022 of its candidate's time over the tuned"),
        (
            gated("j", 50.0, 50.0, held=21.0),
            False,
            "takes 1.050 of its candidate's time over the h",
        ),
        (gated("j", 45.0, 50.0), False, "something else was timed"),
        (gated("j", 45.0, 50.0), True, ""),
    ],
)
def test_two_percent_are_allowed_on_tuned_and_on_held_out_shapes(
    found: Gated, many_rows: bool, said: str
) -> None:
    refused = gating._refused(found, many_rows)
    assert (said in refused) if said else refused == ""


def test_a_claim_is_stored_with_its_job_and_its_times_and_read_back(
    store: leaderboard.Store,
) -> None:
    before = leaderboard.finals(store, board.CAMPAIGN)
    record = claim(store, "a" * 64, gated("job-1", 50.5, 50.0))
    (view,) = claims(store, operation="kda_prefill")
    assert view.model_dump(include=set(ClaimRecord.model_fields)) == record.model_dump()
    assert (view.superseded_by, view.jobs, view.replicated) == (None, 1, False)
    assert view.ratio == pytest.approx(1.01)
    assert view.control_ratio == pytest.approx(50.5 / 54)
    assert claim_of(store, "a" * 64) == view
    assert claim_of(store, "b" * 64) is None
    trial = store.get_trial(board.uid("trial", 0))
    mine = [m for m in trial.measurements if m.phase == "claim"]
    assert {(m.workload, m.job_id) for m in mine} == {
        (shape, "job-1") for shape in (*board.SHAPES, board.KDA.held_out)
    }
    shown = [s for s in leaderboard.shapes(store, trial.id) if s.job_id == "job-1"]
    assert {c.control for s in shown for c in s.controls} >= {"export aaaaaaaaaaaa"}
    assert leaderboard.finals(store, board.CAMPAIGN) == before, "a claim is no final"


def test_a_better_claim_supersedes_by_reference_and_a_worse_one_does_not(
    store: leaderboard.Store,
) -> None:
    first = claim(store, "a" * 64, gated("job-1", 50.0, 50.0))
    worse = claim(store, "b" * 64, gated("job-2", 52.0, 52.0))
    better = claim(store, "c" * 64, gated("job-3", 46.0, 46.0, over=53.0))
    assert first.supersedes is None
    assert worse.supersedes is None
    assert better.supersedes in (first.id, worse.id)
    by_id = {c.id: c for c in claims(store)}
    assert by_id[better.supersedes].superseded_by == better.id
    assert by_id[better.id].superseded_by is None


def test_times_of_jobs_without_a_common_control_do_not_supersede(
    store: leaderboard.Store,
) -> None:
    claim(store, "a" * 64, gated("job-1", 50.0, 50.0))
    alone = replace(gated("job-2", 30.0, 30.0), controls=())
    assert claim(store, "b" * 64, alone).supersedes is None


def test_the_same_folder_in_a_second_job_is_replicated(store: leaderboard.Store) -> None:
    claim(store, "a" * 64, gated("job-1", 50.0, 50.0))
    again = claim(store, "a" * 64, gated("job-2", 49.0, 49.0))
    assert again.supersedes is None
    assert {(c.jobs, c.replicated) for c in claims(store)} == {(2, True)}


def test_claims_travel_with_their_campaign(store: leaderboard.Store, tmp_path: Path) -> None:
    claim(store, "a" * 64, gated("job-1", 50.0, 50.0))
    claim(store, "b" * 64, gated("job-2", 45.0, 45.0))
    lines = list(leaderboard.export_lines(store))
    with open_store(f"sqlite:///{tmp_path / 'other.db'}") as other:
        assert leaderboard.import_lines(other, lines).added["claim"] == 2
        assert leaderboard.import_lines(other, lines).skipped["claim"] == 2
        assert claims(other) == claims(store)
        assert list(leaderboard.export_lines(other)) == lines
    forged = [
        line.replace('"score_us":45.0', '"score_us":40.0') if '"kind":"claim"' in line else line
        for line in lines
    ]
    with pytest.raises(leaderboard.TransferError, match="is stored with other contents"):
        leaderboard.import_lines(store, forged)


def test_nothing_is_claimed_from_a_void_job_or_beyond_the_bound(
    store: leaderboard.Store,
) -> None:
    void = gated("job-1", 50.0, 50.0)
    assert void.job is not None
    job = void.job.model_copy(update={"status": JobStatus.VOID, "note": "controls drifted 5%"})
    with pytest.raises(ValueError, match="controls drifted 5%"):
        claim(store, "a" * 64, replace(void, job=job))
    with pytest.raises(ValidationError, match=r"ratio is 1\.100, beyond 1\.02: that is no claim"):
        claim(store, "a" * 64, gated("job-2", 55.0, 50.0))
    assert claims(store) == []
    record = claim(store, "a" * 64, gated("job-3", 50.0, 50.0))
    store.put_fingerprint(FingerprintRecord(id="h" * 64, values={}))
    for changes, said in (
        ({"id": "x", "job_id": "nowhere"}, "no job"),
        ({"id": "x", "trial_uid": "nobody"}, "no passed trial nobody"),
        ({"id": "x", "campaign_id": "another"}, "is not of another"),
        ({"id": "x", "supersedes": "nothing", "export_hash": "b" * 64}, "no claim 'nothing'"),
    ):
        with pytest.raises(leaderboard.StoreError, match=said):
            store.add_claim(record.model_copy(update=changes))


# -- the commands ----------------------------------------------------------------------


def test_the_command_lists_claims(
    store: leaderboard.Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = f"sqlite:///{tmp_path / 'claims.db'}"
    assert _run(["leaderboard", "claims", "--db", db]) == 0
    assert "no exported folder has passed the export gate" in capsys.readouterr().out
    old = claim(store, "a" * 64, gated("job-1", 50.0, 50.0))
    new = claim(store, "b" * 64, gated("job-2", 45.0, 45.0))
    assert _run(["leaderboard", "claims", "--db", db]) == 0
    out = capsys.readouterr().out
    assert f"superseded by {new.id}" in out
    assert "stands, unreplicated" in out
    assert _run(["leaderboard", "claims", "--db", db, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [c["id"] for c in told] == [new.id, old.id]


def test_the_gate_without_a_gpu_is_the_machines_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert _run(["export", "kda_prefill", "--to", "kda", "--gate"]) == 3
    assert "sm90" in capsys.readouterr().err
    assert not (tmp_path / "kda").exists()
    assert _run(["export", "kda_prefill", "--check", "kda", "--gate"]) == 2
    assert "--gate goes with --to" in capsys.readouterr().err


@pytest.mark.parametrize("db", ["sqlite://", "sqlite:///:memory:"])
def test_a_claim_is_not_stored_where_nothing_is_kept(
    db: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before a GPU is looked for."""
    monkeypatch.chdir(tmp_path)
    assert _run(["export", "kda_prefill", "--to", "kda", "--gate", "--db", db]) == 2
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"factory: {db} keeps nothing beyond this command; name a file: sqlite:///FILE"
    ]
    assert not out
    assert not (tmp_path / "kda").exists()


def test_a_claim_goes_to_a_leaderboard_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from factory.cli import export as command

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_gpu", SimulatedDevice)
    assert _run(["export", "kda_prefill", "--to", "kda", "--gate"]) == 2
    assert "--gate needs a leaderboard and there is no sqlite:///factory.db" in (
        capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_a_folder_that_passed_says_so_and_one_that_was_refused_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from factory.cli import export as command

    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///factory.db") as store:
        board.fill(store)
    monkeypatch.setattr(command, "_gpu", SimulatedDevice)
    answers = [replace(gated("job-1", 52.0, 50.0), refused="too slow"), gated("job-2", 50.0, 50.0)]
    monkeypatch.setattr(gating, "gate", lambda *_, **__: answers.pop(0))

    assert _run(["export", "kda_prefill", "--to", "kda", "--gate"]) == 1
    assert "no claim was made: too slow" in capsys.readouterr().out
    manifest = tmp_path / "kda/MANIFEST.json"
    assert json.loads(manifest.read_text())["claim"] is None

    assert _run(["export", "kda_prefill", "--to", "kda", "--gate", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["winner"] is True
    inside = json.loads(manifest.read_text())
    assert inside["claim"]["id"] == told["claim"]["id"]
    assert inside["export_hash"] == told["id"] == told["claim"]["export_hash"]
    assert told["claim"]["id"] in (tmp_path / "kda/README.md").read_text()

    # Without a GPU the same folder comes out again, with the claim that stands.
    assert _run(["export", "kda_prefill", "--to", "again"]) == 0
    assert f"claim {told['claim']['id']} stands" in capsys.readouterr().out
    assert (tmp_path / "again/MANIFEST.json").read_bytes() == manifest.read_bytes()
    assert _run(["export", "kda_prefill", "--check", "again"]) == 0
