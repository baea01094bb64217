"""``factory check``: user files through the real job on the CPU and a simulated GPU."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

import check_fakes as fakes
import pytest
from answers import Answer, ask

import operations
from candidates.user import read_user_file
from factory.check import STAGES, Checked, CheckedStage, against, check
from factory.device import Limits
from factory.device.bank import seed_of
from factory.device.simulated import SimulatedDevice
from factory.stages.base import HarnessError
from leaderboard import Verdict
from leaderboard.records import Clock, JobStatus, StageStatus

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
LIMITS = Limits(load_s=30.0, gate_s=20.0, screen_s=20.0, time_s=20.0, control_s=20.0)
GPU = SimulatedDevice(gpu="SIM GPU")

Check = Callable[..., Checked]


@pytest.fixture
def checked(tmp_path: Path) -> Check:
    """Checks one of the fakes; without a device only the CPU is there."""

    def run(name: str, device: SimulatedDevice | None = None, **options) -> Checked:
        options.setdefault("baselines", (fakes.Control(),))
        return check(
            read_user_file(fakes.written(tmp_path, name)),
            operations.get("toy_scale"),
            device=device,
            seed=options.pop("seed", 7),
            log_dir=tmp_path / "logs",
            limits=options.pop("limits", LIMITS),
            **options,
        )

    return run


def by_stage(found: Checked) -> dict[str, CheckedStage]:
    assert [s.stage for s in found.stages] == list(STAGES)
    return {s.stage: s for s in found.stages}


def verdicts(found: Checked) -> dict[str, str]:
    return {name: s.verdict for name, s in by_stage(found).items()}


# -- on a machine without a GPU ------------------------------------------------------------


def test_without_a_gpu_what_can_run_on_the_cpu_is_gated_there(checked: Check) -> None:
    found = checked("emulates")
    seen = by_stage(found)
    assert found.passed
    assert [n for n, v in verdicts(found).items() if v == "passed"] == [
        "declaration",
        "load",
        "emulate",
        "gate",
    ]
    assert seen["gate"].where == seen["emulate"].where == "cpu"
    assert all("no sm90 GPU is visible" in seen[s].reason for s in ("screen", "time", "finals"))
    assert {e.workload for e in found.errors if not e.out_of_contract} == {"r3", "r5"}, "reduced"
    assert {e.stage for e in found.errors} == {"emulate", "gate"}
    assert found.job is None
    assert found.score_us is None
    assert not found.measurements


def test_a_gpu_kernel_is_imported_but_not_judged_without_a_gpu(checked: Check) -> None:
    found = checked("cuda only")
    assert found.passed
    assert verdicts(found)["load"] == "passed"
    assert verdicts(found)["gate"] == "not run"
    assert not found.errors


def test_a_cpu_candidate_is_never_timed(checked: Check) -> None:
    found = checked("cpu only", device=GPU)
    assert verdicts(found)["gate"] == "passed"
    assert "nothing to measure" in by_stage(found)["time"].reason


@pytest.mark.parametrize(
    ("name", "stage", "status", "said"),
    [
        ("wrong", "gate", StageStatus.REJECTED, "y is off by max"),
        ("aborts", "gate", StageStatus.CRASHED, "SIGABRT"),
        ("emulates wrongly", "emulate", StageStatus.REJECTED, "y is off by max"),
        ("raises on import", "load", StageStatus.CRASHED, "ValueError: not today"),
        ("blames the toolchain", "load", StageStatus.CRASHED, "buy another compiler"),
        ("blames the profiler", "load", StageStatus.CRASHED, "blind (the smoke kernel works"),
        ("renames its kernels", "load", StageStatus.REJECTED, "declares other kernels: ('any',)"),
    ],
)
def test_a_refused_candidate_is_refused_at_the_stage_that_saw_it(
    checked: Check, name: str, stage: str, status: StageStatus, said: str
) -> None:
    found = checked(name)
    assert not found.passed
    failed = by_stage(found)[stage]
    assert (failed.verdict, failed.status) == ("failed", status)
    assert said in failed.reason
    assert Path(failed.log).is_file(), "what its process said is kept"
    after = STAGES[STAGES.index(stage) + 1 :]
    assert all(verdicts(found)[s] == "not run" for s in after)
    assert by_stage(found)["finals"].reason == f"{stage} failed"


def test_what_the_machine_lacks_is_no_verdict_on_the_candidate(checked: Check) -> None:
    with pytest.raises(HarnessError, match=r"no_such_distribution.*not installed; install it"):
        checked("needs a distribution")


def test_a_regime_can_be_picked_and_the_seed_fixes_all_inputs(checked: Check) -> None:
    found = checked("right", seed=3, regimes=["constant"])
    assert {e.regime for e in found.errors} == {"constant", "production"}, "always production"
    assert all(e.seed == seed_of(3, e.regime, e.workload, 0) for e in found.errors)


# -- with a GPU, simulated -----------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """A right candidate through all stages."""
    folder = tmp_path_factory.mktemp("whole")
    return check(
        read_user_file(fakes.written(folder, "emulates")),
        operations.get("toy_scale"),
        device=GPU,
        seed=5,
        log_dir=folder,
        limits=LIMITS,
        baselines=(fakes.Control(),),
    )


def test_on_a_gpu_a_right_candidate_passes_every_stage(whole: Checked) -> None:
    assert set(verdicts(whole).values()) == {"passed"}
    seen = by_stage(whole)
    assert seen["emulate"].where == "cpu"
    assert {seen[s].where for s in ("gate", "screen", "time", "finals")} == {"SIM GPU"}
    assert whole.passed
    assert not whole.void
    assert whole.job is not None
    assert whole.job.status is JobStatus.VALID
    assert whole.fingerprint is not None


def test_its_times_stand_beside_those_of_the_controls_of_the_same_job(whole: Checked) -> None:
    mine = [m for m in whole.measurements if m.clock is Clock.GPU]
    assert {m.workload for m in mine} == {"64", "256", "17"}, "held-out ones too"
    assert {m.regime for m in mine} == {"production", "slow"}
    assert {m.kernels for m in mine} == {("mine_main",)}
    assert {m.phase for m in whole.controls} >= {"before", "after", "final"}
    assert {m.job_id for m in (*mine, *whole.controls)} == {whole.job.id}
    assert whole.score_us == pytest.approx(11.5, abs=0.5)
    (compared,) = against(whole)
    assert (compared.control, compared.regime) == ("steady", "production")
    assert set(compared.shapes) == {"64", "256"}, "the control was not timed on held-out shapes"
    assert compared.all_shapes is not None
    assert compared.all_shapes.ratio == pytest.approx(11.55 / 20.0, abs=0.01)
    assert compared.all_shapes.verdict is Verdict.FASTER


def test_an_undeclared_kernel_leaves_no_time(checked: Check) -> None:
    found = checked("undeclared", device=GPU)
    assert (
        "kernel identity: launched 'library_gemm', undeclared" in by_stage(found)["screen"].reason
    )
    assert verdicts(found)["gate"] == "passed"
    assert found.score_us is None
    assert not found.measurements


def test_replayed_results_are_met_by_new_data(checked: Check) -> None:
    found = checked("replays", device=GPU)
    assert "outputs of timed calls are wrong" in by_stage(found)["screen"].reason


@pytest.fixture(scope="module")
def drifted(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """A right candidate on one workload, beside a control that slows down."""
    folder = tmp_path_factory.mktemp("drifted")
    return check(
        read_user_file(fakes.written(folder, "right")),
        operations.get("toy_scale"),
        device=GPU,
        seed=5,
        log_dir=folder,
        limits=LIMITS,
        workloads=["64"],
        baselines=(fakes.Control(later_us=30.0),),
    )


def test_times_of_a_machine_that_did_not_hold_still_are_void(drifted: Checked) -> None:
    assert drifted.passed, "the candidate did nothing wrong"
    assert "controls drifted by" in drifted.void


def test_finals_need_all_workloads(drifted: Checked) -> None:
    assert verdicts(drifted)["time"] == "passed"
    assert {m.workload for m in drifted.measurements} == {"64"}
    assert by_stage(drifted)["finals"].reason == "only some workloads or regimes were asked for"


def test_nothing_of_the_file_runs_in_the_checking_process(
    checked: Check, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = tmp_path / "pids"
    text = f"\nimport os\nopen({str(seen)!r}, 'a').write(f'{{os.getpid()}} ')\n"
    monkeypatch.setitem(fakes.FILES, "tells", fakes.FILES["emulates"] + text)
    assert checked("tells").passed
    pids = seen.read_text().split()
    assert pids
    assert str(os.getpid()) not in pids


def test_on_a_cpu_a_candidate_computes_on_one_thread_unless_the_user_says_otherwise(
    checked: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many wait for each other: minutes, where the cores have other work."""
    monkeypatch.setitem(
        fakes.FILES,
        "counts threads",
        fakes.RIGHT + "    import torch\n    print('threads', torch.get_num_threads())\n",
    )

    def threads() -> set[str]:
        log = Path(by_stage(checked("counts threads"))["gate"].log)
        return {line for line in log.read_text().splitlines() if line.startswith("threads")}

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads() == {"threads 1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "threads 2" in threads()


# -- the command ---------------------------------------------------------------------------


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """``factory check`` in an empty folder, on a machine that shows no GPU."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    return partial(ask, capsys, "check")


def test_the_example_that_is_right_passes(command: Callable[..., Answer]) -> None:
    done = command(EXAMPLES / "kda_token_by_token.py", "--seed", "11")
    assert done.code == 0, done.out + done.err
    assert "passed; not run: emulate, screen, time, finals" in done.out
    assert "seed 11" in done.out


def test_the_example_that_is_wrong_is_refused_with_its_first_breach(
    command: Callable[..., Answer],
) -> None:
    done = command(EXAMPLES / "kda_one_anchor.py", "--json")
    assert done.code == 1, done.out + done.err
    answer = json.loads(done.out)
    gate = next(s for s in answer["stages"] if s["id"] == "gate")
    assert answer["verdict"] == "rejected"
    assert gate["status"] == "rejected"
    assert gate["details"]["first_breach"] == "sweep_lb3", "right at -1 and -2, NaN from -3 on"
    assert "non-finite" in gate["reason"]


def test_one_word_for_what_is_wrong_and_its_reason_in_full(
    command: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("factory.cli.table.line_width", lambda: 80)
    done = command(fakes.written(tmp_path, "wrong"))
    assert done.code == 1
    assert max(map(len, done.out.splitlines()[1:-1])) <= 80  # but for the names of files
    said = next(line for line in done.err.splitlines() if line.startswith("gate: "))
    assert said.startswith("gate: rejected: ")
    reason = said.removeprefix("gate: rejected: ")
    assert reason in " ".join(done.out.split())
    assert "rejected at gate; log " in done.out.splitlines()[-1]
    for other in ("failed:", "refused"):
        assert other not in done.out + done.err
    assert "accepted" in done.out
    assert "max, rms" in done.out, "it says what the two numbers are"
    assert "of the controls" not in done.out, "there are none without a GPU"


@pytest.mark.parametrize(
    ("text", "arguments", "said"),
    [
        ("def run(inputs, outputs): ...", (), "declare what it computes"),
        (fakes.RIGHT, ("--operation", "kda_prefill"), "'kda_prefill' was asked for"),
        (fakes.RIGHT.replace("toy_scale", "toy_scales"), (), "did you mean 'toy_scale'?"),
        (fakes.RIGHT, ("--regime", "prodution"), "did you mean 'production'?"),
        (fakes.RIGHT, ("--workload", "64"), "unknown workload '64'; known without a GPU: r5, r3"),
        (fakes.RIGHT, ("--seed", "-1"), "--seed"),
        (None, (), "cannot read"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    command: Callable[..., Answer],
    tmp_path: Path,
    text: str | None,
    arguments: tuple[str, ...],
    said: str,
) -> None:
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    done = command(file, *arguments)
    assert done.code == 2, done.out + done.err
    assert said in done.err
    assert len(done.err.splitlines()) == 1
    assert not done.out
    assert not list((tmp_path / "here").iterdir()), "nothing was begun"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("clears its outputs", "output 'y' is missing: there is nothing"),
        ("returns another", "output 'y' is missing: there is 'z'"),
        ("returns a long name", "output 'y' is missing: there is 'zzz"),
    ],
)
def test_an_output_that_is_not_there_is_named(checked: Check, name: str, said: str) -> None:
    gate = by_stage(checked(name))["gate"]
    assert gate.status is StageStatus.REJECTED
    assert said in gate.reason


def test_of_a_long_log_both_ends_are_kept(checked: Check) -> None:
    log = Path(by_stage(checked("prints much"))["gate"].log)
    text = log.read_text("utf-8")
    assert 4 << 20 <= len(text) < 5 << 20
    assert text.startswith("first\n")
    assert text.endswith("last\n")
    assert "bytes left out" in text


def test_a_candidate_that_ends_the_check_gets_no_verdict(
    command: Callable[..., Answer], tmp_path: Path
) -> None:
    def missed(number: int, frame: object) -> None:
        raise AssertionError("nobody took the signal")

    earlier = signal.signal(signal.SIGTERM, missed)
    try:
        done = command(fakes.written(tmp_path, "ends its parent"))
        assert signal.getsignal(signal.SIGTERM) is missed
    finally:
        signal.signal(signal.SIGTERM, earlier)
    assert done.code == 130, done.out + done.err
    assert "SIGTERM: stopping; there is no verdict" in done.err
    assert not done.out


def test_a_machine_fault_is_one_line_and_exit_code_3(
    command: Callable[..., Answer], tmp_path: Path
) -> None:
    done = command(fakes.written(tmp_path, "needs a distribution"))
    assert done.code == 3, done.out + done.err
    assert "not installed; install it" in done.err.splitlines()[-1]
    assert "Traceback" not in done.err


def test_the_table_names_what_was_launched_and_how_it_stands_to_controls(
    command: Callable[..., Answer], whole: Checked, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("factory.check.check", lambda *_, **__: whole)
    done = command(fakes.written(tmp_path, "emulates"))
    assert done.code == 0
    assert "passed every stage" in done.out
    assert "launched: mine_main" in done.out
    assert "over steady's time on all shapes: 0.578 (0.578 to 0.578): faster" in done.out


def test_void_times_are_exit_code_3_and_no_verdict(
    command: Callable[..., Answer],
    drifted: Checked,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr("factory.check.check", lambda *_, **__: drifted)
    file = fakes.written(tmp_path, "right")
    done = command(file)
    assert done.code == 3
    assert "right, but its times do not count: controls drifted by" in done.out
    assert json.loads(command(file, "--json").out)["verdict"] == "void"
