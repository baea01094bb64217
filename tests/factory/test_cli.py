"""The command: exit codes, one-line errors, JSON shapes, and what importing it costs."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import alembic.command
import pytest
import sqlalchemy
from answers import ask, one_line
from schema_steps import run_alembic
from waiting import HANG_S

import candidates
import operations
from leaderboard import open_store

TOY = """\
name = "toy"
operation = "toy_scale"
space = "six"
sampler = "grid"
[executor]
workers = 1
"""


@pytest.fixture
def factory(tmp_path, monkeypatch, capsys):
    """Run the command in an empty working directory; returns an ``Answer``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy.toml").write_text(TOY)
    (tmp_path / "warm.toml").write_text('warm_start = ["past"]\n' + TOY)

    return partial(ask, capsys)


# -- what goes wrong ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["launch", "nothing"], "unknown campaign 'nothing'"),
        (["launch", "kda_prefil"], "did you mean 'kda_prefill'?"),
        (["launch", "toy.toml", "--budget", "-1"], "budget should be greater than or equal to 1"),
        (["launch", "toy.toml", "--budget", "x"], "'x' is not a valid integer"),
        (["launch", "toy.toml", "--clock", "sundial"], "'sundial' is not one of"),
        (["launch", "toy.toml", "--db", "nonsense"], "'nonsense' is not a database URL"),
        (["launch", "toy.toml", "--db", "sqlite:////no/such/folder/x.db"], "does not exist"),
        (["launch", "toy.toml", "--db", "mysql://a/b"], "unsupported database 'mysql'"),
        (["launch", "toy.toml", "--db", "postgresql://u@h:notaport/x"], "is not a database URL"),
        (["launch", "toy.toml", "--db", "postgresql://[::1/x"], "is not a database URL"),
        (["launch", "toy.toml", "--db", "sqlite://"], "keeps nothing"),
        (["launch", "toy.toml", "--db", "sqlite:///:memory:"], "keeps nothing"),
        (["launch", "toy.toml", "--db", "sqlite:///x.db?mode=ro&bogus=1"], "bogus, mode"),
        (["launch", "toy.toml", "--seed", "1" + "0" * 22], "seed should be less than"),
        (["launch", "toy.toml", "--name", ""], "name should be 1 to 100 letters"),
        (["launch", "toy.toml", "--name", "n" * 101], "name should be 1 to 100 letters"),
        (["launch", "toy.toml", "--resume"], "nothing to resume"),
        (["launch", "warm.toml"], "warm_start: no campaign 'past': there is no database at"),
        (["leaderboard", "--rejected", "--shapes"], "--shapes and --rejected are two tables"),
        (["leaderboard", "--limit", str(2**63)], "is not in the range"),
        (["leaderboard", "--rejected", "--status", "passed"], "--rejected is --status failed"),
        (["launch", "missing.toml"], "missing.toml: No such file or directory"),
        (["launch"], "Missing argument 'CAMPAIGN'"),
        (["launch", "toy.toml", "--budgit", "3"], "Did you mean '--budget'?"),
        (["show", "999"], "no trial 999"),
        (["show", "ninety"], "no trial ninety"),
        (["status", "nobody"], "no campaign 'nobody'"),
        (["leaderboard", "--db", "sqlite:///absent.db"], "there is no database at absent.db"),
        (["leaderboard", "--campaign", "nobody"], "no campaign 'nobody'"),
        (["leaderboard", "import", "absent.jsonl"], "'absent.jsonl' does not exist"),
        (["operations", "kda_prefix"], "did you mean 'kda_prefill'?"),
        (["replay", "kda_prefill", "--within", "nan"], "--within nan: say how many percent"),
        (["frobnicate"], "No such command 'frobnicate'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(factory, argv, said):
    code, out, err = factory(*argv)
    assert code == 2
    assert said in one_line(err)
    assert out == ""
    assert not list(Path().glob("*.db")), "what is refused leaves no database"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TOY.replace("space", "spice"), "toy.toml: unknown key 'spice'; did you mean 'space'?"),
        (TOY.replace('"six"', "6"), "toy.toml: space should be a valid string, not 6 (int)"),
        (TOY.replace('"six"', '"sixx"'), "has no space 'sixx'; did you mean 'six'?"),
        (
            'name = "a"\noperation = "kda_prefill"\ncontrols = ["flashkd"]\n',
            "has no baseline 'flashkd'; did you mean 'flashkda'?",
        ),
        ('name = "a"\noperation = "kda_prefill"\ncontrols = "torch"\n', "controls should be"),
        (TOY.replace("toy_scale", "toy_scales"), "did you mean 'toy_scale'?"),
    ],
)
def test_a_wrong_campaign_file_is_one_line_and_exit_code_2(factory, tmp_path, text, said):
    (tmp_path / "toy.toml").write_text(text)
    code, _, err = factory("launch", "toy.toml")
    assert code == 2
    assert said in one_line(err)
    assert not list(tmp_path.glob("factory-runs/*"))


def test_ray_that_is_not_there_leaves_no_campaign(factory, monkeypatch):
    monkeypatch.setattr("factory.machine.installed", lambda name: None)
    code, _, err = factory("launch", "toy.toml", "--executor", "ray")
    assert code == 3
    assert "--executor ray needs ray" in one_line(err)
    assert not list(Path().glob("*.db"))


def test_a_leaderboard_of_an_earlier_version_is_resumed_and_warms_another(factory, tmp_path):
    def to_an_earlier_version():
        engine = sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'factory.db'}")
        run_alembic(engine, alembic.command.downgrade, "-1")
        engine.dispose()

    assert factory("launch", "toy.toml", "--name", "past", "--budget", "2")[0] == 0
    to_an_earlier_version()
    code, _, err = factory("status")
    assert code == 2
    assert "has the older schema" in one_line(err)
    code, out, _ = factory("launch", "toy.toml", "--name", "past", "--budget", "3", "--resume")
    assert code == 0
    assert "3 trials" in out
    to_an_earlier_version()
    assert factory("launch", "warm.toml", "--budget", "1")[0] == 0


def test_a_measured_clock_without_a_gpu_is_exit_code_3(factory, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, _, err = factory("launch", "toy.toml", "--clock", "gpu")
    assert code == 3
    assert "needs an sm90 GPU" in one_line(err)


def test_a_missing_toolchain_is_exit_code_3_and_resumable(factory, tmp_path):
    (tmp_path / "toy.toml").write_text(TOY.replace('"six"', '"no_dsl"'))
    code, _, err = factory("launch", "toy.toml")
    assert code == 3
    assert "nvidia-cutlass-dsl is not installed" in err.strip().splitlines()[-1]
    code, _, err = factory("launch", "toy.toml")
    assert code == 2
    assert "unfinished" in one_line(err)


def test_nothing_passed_is_exit_code_1(factory, tmp_path):
    (tmp_path / "toy.toml").write_text(TOY.replace('"six"', '"wrong"'))
    code, out, _ = factory("launch", "toy.toml")
    assert code == 1
    assert "2 trials, 0 passed" in out


def test_an_unwritable_log_folder_is_named(factory, tmp_path):
    (tmp_path / "factory-runs").write_text("a file")
    code, _, err = factory("launch", "toy.toml")
    assert code == 2
    assert "cannot write logs to factory-runs" in err.strip().splitlines()[-1]


def test_debug_keeps_the_traceback(factory, monkeypatch):
    monkeypatch.setenv("FACTORY_DEBUG", "0")
    assert "Traceback" not in factory("launch", "nothing")[2]
    assert "Traceback" in factory("--debug", "launch", "nothing")[2]


# -- what goes right ------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished toy campaign: folder, output of the launch."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "toy.toml").write_text(TOY)
    command = [sys.executable, "-c", "from factory.cli import main; main()"]
    done = subprocess.run(
        [*command, "launch", "toy.toml"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture
def inside(finished, factory, monkeypatch):
    monkeypatch.chdir(finished[0])
    return factory


def test_launch_ranks_and_names_the_rejected_with_reasons(finished):
    _, done = finished
    table = done.stdout.split("not ranked")
    assert table[0].index("block=3") < table[0].index("block=2") < table[0].index("block=1")
    assert "24 non-finite of 24 (largest exponent 103 > 88)" in table[1]
    assert "wants 300 KiB of 227" in table[1]
    assert "6 trials, 3 passed" in done.stdout


def test_standard_output_may_be_closed(tmp_path):
    command = f"{sys.executable} -m factory operations >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_progress_in_a_pipe_is_one_plain_line_an_event(finished):
    lines = finished[1].stderr.splitlines()
    assert lines[0].startswith("campaign toy-")
    assert "stages validate > emulate > compile" in lines[0]
    assert len(lines) == 7
    assert {line.split("]")[0] for line in lines[1:]} == {f"[{n}/6" for n in range(1, 7)}
    assert "\x1b" not in finished[1].stderr


def test_each_trial_has_a_log_that_show_names(inside, finished):
    for trial in range(1, 7):
        code, out, _ = inside("show", trial, "--json")
        shown = json.loads(out)
        assert (code, shown["id"]) == (0, trial)
        path = finished[0] / shown["log_path"]
        if shown["status"] != "infeasible":
            assert "== emulate" in path.read_text()
        assert (f"log {shown['log_path']}\n" in inside("show", trial)[1]) is path.exists()


def test_show_prints_the_errors_of_each_regime(inside):
    _, out, _ = inside("leaderboard", "--json")
    best = json.loads(out)[0]["id"]
    shown = inside("show", best)[1]
    assert "out of contract" in shown
    assert "declared for gates down to -5.5" in shown


def test_leaderboard_json_has_ids_and_filters(inside):
    rows = json.loads(inside("leaderboard", "--json")[1])
    assert [r["rank"] for r in rows] == [1, 2, 3]
    assert all(isinstance(r["id"], int) for r in rows)
    assert len(json.loads(inside("leaderboard", "--json", "--limit", 2)[1])) == 2
    assert json.loads(inside("leaderboard", "--json", "--clock", "gpu")[1]) == []
    assert len(json.loads(inside("leaderboard", "--json", "--operation", "toy_scale")[1])) == 3
    assert len(json.loads(inside("leaderboard", "--json", "--campaign", "toy")[1])) == 3


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--operation", "kda_prefill"], "no operation 'kda_prefill' in sqlite:///factory.db"),
        (["--gpu", "H100"], "no GPU 'H100'"),
        (["--control", "nope"], "no control 'nope'"),
        (["--regime", "nope"], "no regime 'nope'"),
        (["--status", "nope"], "no status 'nope'"),
        (["--clock", "nope"], "'nope' is not one of"),
        (["--columns", "id,scor_us"], "no column 'scor_us'; did you mean 'score_us'?"),
        (["--columns", ","], "--columns names none; there: "),
        (["claims", "--operation", "toy_scales"], "did you mean 'toy_scale'?"),
        (["--sort", "scor_us"], "did you mean 'score_us'?"),
        (["--where", "knd=exact"], "no column or parameter 'knd'; did you mean 'kind'?"),
        (["--where", "kind="], "it ends where a value should follow"),
        (["--json", "--csv"], "name one"),
        (["--shapes", "--columns", "id"], "goes with neither"),
    ],
)
def test_names_that_are_not_there_are_one_line_and_exit_code_2(inside, argv, said):
    code, out, err = inside("leaderboard", *argv)
    assert (code, out) == (2, "")
    assert said in one_line(err)


def test_leaderboard_answers_questions(inside):
    def asked(*argv):
        return json.loads(inside("leaderboard", *argv, "--json")[1])

    everything = asked("--status", "all")
    assert len(everything) == 6
    some = asked("--where", "kind=exact and us>0", "--sort", "-us", "--limit", 1)
    assert [r["schedule"]["kind"] for r in some] == ["exact"]
    assert some[0]["rank"] == max(r["rank"] for r in asked("--where", "kind=exact"))
    assert asked("--columns", "rank,us,kind", "--limit", 1) == [
        {k: asked("--limit", 1)[0][n] for k, n in (("id", "id"), ("rank", "rank"))}
        | {"score_us": asked("--limit", 1)[0]["score_us"]}
        | {"kind": asked("--limit", 1)[0]["schedule"]["kind"]}
    ]
    assert {r["status"] for r in asked("--status", "rejected")} == {"rejected"}
    shapes = asked("--shapes", "--limit", 1)
    assert {r["workload"] for r in shapes} == set(operations.get("toy_scale").workloads) & {
        r["workload"] for r in shapes
    }
    assert all(r["us"] > 0 and not r["lost"] for r in shapes)
    assert shapes


def test_what_other_source_measured_is_marked_and_stays(inside, monkeypatch):
    rows = json.loads(inside("leaderboard", "--json")[1])
    assert not any(r["superseded"] for r in rows)
    assert "superseded" not in inside("leaderboard")[1]
    monkeypatch.setenv("TOY_SOURCE", "1" * 64)
    later = json.loads(inside("leaderboard", "--json")[1])
    assert [r["id"] for r in later] == [r["id"] for r in rows]
    assert all(r["superseded"] for r in later)
    assert "(superseded source)" in inside("leaderboard")[1]


def test_leaderboard_prints_csv(inside):
    rows = list(csv.DictReader(io.StringIO(inside("leaderboard", "--csv")[1])))
    want = json.loads(inside("leaderboard", "--json")[1])
    assert [int(r["id"]) for r in rows] == [r["id"] for r in want]
    assert [r["kind"] for r in rows] == [r["schedule"]["kind"] for r in want]
    two = list(csv.reader(io.StringIO(inside("leaderboard", "--csv", "--columns", "id,us")[1])))
    assert two[0] == ["id", "score_us"]
    assert [float(r[1]) for r in two[1:]] == [r["score_us"] for r in want]


def test_show_runs_a_trial_again(inside):
    wrong = json.loads(inside("leaderboard", "--rejected", "--json")[1])
    trial = next(r["id"] for r in wrong if r["status"] == "rejected")
    shown = json.loads(inside("show", trial, "--json")[1])
    assert f"factory show {trial} --again" in shown["run_again"]
    assert f"factory show {trial} --again" in inside("show", trial)[1]
    code, out, _ = inside("show", trial, "--again", "--json")
    rows = json.loads(out)
    assert code == 0
    assert [(r["id"], r["then"], r["now"]) for r in rows] == [
        ("validate", "passed", "passed"),
        ("emulate", "rejected", "rejected"),
    ]
    assert rows[1]["reason"] == shown["reason"]


def test_show_again_notices_another_verdict(inside, monkeypatch):
    best = json.loads(inside("leaderboard", "--json", "--limit", 1)[1])[0]["id"]
    family = candidates.get("toy_scale")
    monkeypatch.setattr(type(family), "problems", lambda self, schedule: ("too large",))
    code, out, _ = inside("show", best, "--again")
    assert code == 1
    assert "too large" in out
    assert "not the same verdicts" in out


def test_rejected_are_listed_with_reasons(inside):
    rows = json.loads(inside("leaderboard", "--rejected", "--json")[1])
    assert {r["schedule_key"] for r in rows} == {"kind=offset", "kind=overflow", "kind=greedy"}
    assert all(r["reason"] and r["id"] for r in rows)
    assert "max error 1.00e-01" in inside("leaderboard", "--rejected")[1]


def test_status_lists_and_shows(inside):
    rows = json.loads(inside("status", "--json")[1])
    assert [(r["name"], r["status"], r["finished"]) for r in rows] == [("toy", "finished", 6)]
    one = json.loads(inside("status", "toy", "--json")[1])
    assert one["id"] == rows[0]["id"]
    assert [s["stage"] for s in one["stages"]] == ["validate", "emulate", "compile"]
    assert "6/6" in inside("status")[1]
    assert "1 infeasible" in inside("status", "toy")[1]


def test_export_and_import_carry_everything(inside, tmp_path):
    file, copy = tmp_path / "x.jsonl", f"sqlite:///{tmp_path}/copy.db"
    assert inside("leaderboard", "export", "-o", file)[0] == 0
    code, out, _ = inside("leaderboard", "import", file, "--db", copy, "--json")
    assert (code, json.loads(out)["added"]["trial"]) == (0, 6)
    code, out, _ = inside("leaderboard", "import", file, "--db", copy)
    assert "nothing new" in out
    ours = json.loads(inside("leaderboard", "--json")[1])
    theirs = json.loads(inside("leaderboard", "--json", "--db", copy)[1])
    assert [r["uid"] for r in ours] == [r["uid"] for r in theirs]


def test_reading_commands_create_no_database(factory, tmp_path):
    for argv in (["leaderboard"], ["status"], ["launch", "toy.toml", "--dry-run"]):
        assert factory(*argv)[0] == 0
    assert not list(tmp_path.glob("*.db"))


def test_a_dry_run_needs_no_database_and_makes_none(factory, tmp_path):
    code, out, _ = factory("launch", "toy.toml", "--dry-run", "--db", "sqlite:///new.db")
    assert code == 0
    assert "estimate: none" in out
    assert not (tmp_path / "new.db").exists()


def test_a_server_that_does_not_answer_is_exit_code_3(factory):
    url = "postgresql://user:hunter2@127.0.0.1:1/name"
    for argv in (["leaderboard"], ["launch", "toy.toml"], ["launch", "toy.toml", "--resume"]):
        code, _, err = factory(*argv, "--db", url)
        assert code == 3
        assert "hunter2" not in one_line(err)


def test_show_does_not_offer_what_would_be_refused(inside, monkeypatch):
    monkeypatch.setattr(operations.get("toy_scale"), "version", "other")
    code, out, _ = inside("show", "1")
    assert code == 0
    assert "--again" not in out
    assert "not run again here: it met version" in out
    assert json.loads(inside("show", "1", "--json")[1])["run_again"] == []
    code, _, err = inside("show", "1", "--again")
    assert code == 2
    assert "cannot be run again" in one_line(err)


def test_a_dry_run_counts_the_space_and_runs_nothing(factory, tmp_path):
    code, out, _ = factory("launch", "toy.toml", "--dry-run", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["offered"], found["target"], found["infeasible"]) == (6, 6, 1)
    assert found["combinations"] == 10 + 40
    assert found["cases"] == 4 * 2
    assert found["estimate_s"] is None
    assert not (tmp_path / "factory-runs").exists()


def test_a_dry_run_estimates_from_earlier_campaigns(inside):
    found = json.loads(inside("launch", "toy.toml", "--dry-run", "--json")[1])
    with open_store("sqlite:///factory.db", read_only=True) as store:
        (earlier,) = store.list_campaigns()
        taken = [s.seconds for t in store.load_trials(earlier.id) for s in t.stages]
    assert 0 < found["estimate_s"] == pytest.approx(sum(taken))  # as many trials again


def test_print_config_is_a_campaign_file(factory, tmp_path):
    code, out, _ = factory("launch", "toy.toml", "--seed", 7, "--print-config")
    assert code == 0
    (tmp_path / "again.toml").write_text(out)
    assert factory("launch", "again.toml", "--print-config")[1] == out
    assert "seed = 7" in out


def test_a_new_campaign_may_follow_a_finished_one(factory, finished, tmp_path):
    shutil.copytree(finished[0], tmp_path, dirs_exist_ok=True)  # others read the first alone
    code, out, _ = factory("launch", "toy.toml", "--json", "--budget", 1)
    assert (code, json.loads(out)["finished"]) == (0, 1)


def test_limits_on_the_command_line_end_a_campaign_and_a_resume_keeps_them(factory, tmp_path):
    many = TOY.replace('"six"', '"many"')
    (tmp_path / "many.toml").write_text('budget = 16\nstop_after = "emulate"\n' + many)
    code, out, _ = factory("launch", "many.toml", "--patience", "3", "--json")
    assert code == 0
    assert 10 <= json.loads(out)["finished"] < 16  # the seventh is the best
    code, _, err = factory("launch", "many.toml", "--resume")
    assert code == 2
    assert "brought no new best (--patience)" in one_line(err)
    code, out, _ = factory("launch", "many.toml", "--resume", "--patience", "0", "--json")
    assert (code, json.loads(out)["finished"]) == (0, 16)


def test_operations_are_listed_with_regimes_and_spaces(factory):
    rows = json.loads(factory("operations", "--json")[1])
    assert [r["id"] for r in rows] == ["gdn_prefill", "kda_prefill", "toy_scale", "toy_wide"]
    one = json.loads(factory("operations", "toy_scale", "--json")[1])
    assert {r["id"]: r["role"] for r in one["regimes"]}["mild"] == "mild"
    text = factory("operations", "toy_scale")[1]
    assert "space six: 6 schedules offered" in text


def test_doctor_names_package_version_and_fix(factory, monkeypatch):
    from factory import doctor

    real = doctor.installed
    monkeypatch.setattr(doctor, "installed", lambda name: None if "cutlass" in name else real(name))
    code, out, _ = factory("doctor", "--json")
    found = {f["id"]: f for f in json.loads(out)}
    assert code == 3
    dsl = found["nvidia-cutlass-dsl"]
    assert (dsl["status"], dsl["found"]) == ("fault", "not installed")
    assert "pip install 'nvidia-cutlass-dsl[cu13]" in dsl["fix"]
    assert found["torch"]["status"] == "ok"


def test_doctor_tells_a_wrong_cuda_flavour(factory, monkeypatch):
    from factory import doctor

    real = doctor.installed
    flavours = {"nvidia-cutlass-dsl-libs-cu12": "4.8.1", "nvidia-cutlass-dsl-libs-cu13": None}
    monkeypatch.setattr(doctor, "installed", lambda name: flavours.get(name, real(name)))
    code, out, _ = factory("doctor", "--json")
    found = {f["id"]: f for f in json.loads(out)}["nvidia-cutlass-dsl CUDA flavour"]
    assert code == 3
    assert (found["status"], found["found"]) == ("fault", "cu12 only")
    assert "--force-reinstall" in found["fix"]


# -- what importing costs -------------------------------------------------------------

_HEAVY = "torch ray cutlass optuna sqlalchemy numpy pydantic rich alembic"

_PROBE = """
import sys
from factory.cli import _run
code = _run(["--help"])
print(code, sorted(set("{heavy}".split()) & set(sys.modules)))
"""


def test_help_imports_nothing_heavy():  # what it costs is in test_architecture
    probe = _PROBE.format(heavy=_HEAVY)
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"


_WITHOUT = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from factory.cli import _run
sys.exit(_run(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "argv",
    [
        ["operations"],
        ["operations", "kda_prefill"],
        ["leaderboard"],
        ["status"],
        ["doctor"],
        ["launch", "kda_prefill", "--dry-run"],
        ["launch", "kda_prefill", "--print-config"],
        ["launch", "emulate.toml"],
    ],
)
def test_all_that_needs_no_kernel_works_without_the_dsl_and_ray(tmp_path, argv):
    (tmp_path / "emulate.toml").write_text('stop_after = "emulate"\n' + TOY)
    script = _WITHOUT.format(absent={"cutlass", "ray", "tvm_ffi", "cuda"})
    done = subprocess.run(
        [sys.executable, "-c", script, *argv],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
    )
    if argv == ["doctor"]:
        assert done.returncode == 3
        assert "'cutlass' is not importable" in done.stdout
    else:
        assert done.returncode == 0, done.stderr


def test_a_full_disk_under_the_output_is_one_line_and_exit_code_3():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "factory", "operations"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            check=False,
        )
    assert done.returncode == 3
    assert one_line(done.stderr) == "factory: cannot write: No space left on device"


def test_a_refused_launch_makes_no_database(factory, tmp_path):
    (tmp_path / "wrong.toml").write_text(TOY.replace("toy_scale", "toy_scales"))
    assert factory("launch", "wrong.toml")[0] == 2
    assert factory("launch", "toy.toml", "--resume")[0] == 2
    assert not list(tmp_path.glob("factory.db*"))


def test_results_are_stored_where_db_says(factory, tmp_path):
    url = f"sqlite:///{tmp_path}/elsewhere.db"
    assert factory("launch", "toy.toml", "--db", url, "--budget", 1)[0] == 0
    assert not (tmp_path / "factory.db").exists()
    with open_store(url, read_only=True) as store:
        assert store.get_campaign("toy").budget == 1
