"""``factory export``: what is written, that it stands alone, and what is refused."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path

import clean_environment
import export_board as board
import pytest
from answers import ask, one_line

import leaderboard
from candidates._delta_rule import kernel as shared
from candidates.kda_prefill import kernel
from factory.errors import UserError
from factory.export import exporter as exporters
from factory.export import select, sources
from factory.export.exporter import SHIPPED, ExportError, exporter_of
from factory.export.folder import write
from factory.export.render import export_hash, render
from leaderboard import open_store

ROOT = Path(__file__).resolve().parents[2]
KERNEL = Path(kernel.__path__[0])
FOLDERS = {"kernel": KERNEL, "delta_rule": Path(shared.__path__[0])}


def add_to(module, text, folder, monkeypatch):
    """Export KDA's kernels from a copy in ``folder``, one of whose modules says more."""
    copied, real = folder / "copied", sources.package_folder
    copied.mkdir()
    for path in KERNEL.glob("*.py"):
        (copied / path.name).write_bytes(path.read_bytes())
    (copied / module).write_text((KERNEL / module).read_text() + text)
    home = {kernel.__name__: copied}
    monkeypatch.setattr(sources, "package_folder", lambda name: home.get(name) or real(name))


@pytest.fixture
def factory(tmp_path, monkeypatch, capsys):
    """Run the command beside a leaderboard that holds the campaign."""
    monkeypatch.chdir(tmp_path)
    with open_store("sqlite:///factory.db") as store:
        board.fill(store, board.FASTER)

    return partial(ask, capsys)


# -- which schedule for which shape ----------------------------------------------------


def test_the_winner_of_the_finals_serves_every_shape_where_nothing_is_told_faster():
    found = board.selected()
    assert [(row.workload, row.schedule) for row in found.rows] == [(None, board.SCHEDULES[0])]
    assert found.is_winner
    assert found.same_source
    assert {t.record.phase for t in found.default.times} == {"final"}
    assert len(found.default.times) == 4


def test_every_time_is_of_the_job_that_named_the_winner():
    changed = []
    for line in map(json.loads, board.lines()):
        if line["kind"] == "job":
            later = {**line, "id": "job-b", "started_at": "2026-12-01T07:45:40+00:00"}
            changed += [{**line, "status": "void"}, later]
        elif line.get("phase") == "final":
            changed += [line, {**line, "uid": line["uid"] + "-b", "job_id": "job-b"}]
        elif line["kind"] != "end":
            changed.append(line)
    changed.append({"kind": "end", "lines": len(changed) - 1})
    with open_store("sqlite://") as store:
        leaderboard.import_lines(store, map(json.dumps, changed))
        row = store.list_trials(board.CAMPAIGN)[0]
        found = select._named(board.OPERATION, board.FAMILY, store, str(row.id))
    assert found.job.id == "job-b"
    assert {t.record.job_id for t in found.default.times} == {"job-b"}
    assert len(found.default.times) == 4


def test_a_shape_on_which_another_trial_is_told_faster_gets_a_row_of_its_own():
    found = board.selected(board.FASTER)
    assert [row.workload for row in found.rows] == ["8192/12/4", None]
    row = found.rows[0]
    assert row.schedule == board.SCHEDULES[2]
    assert row.over_default["production"] == pytest.approx(90 / 95, abs=1e-3)
    assert row.over_default["slow"] == pytest.approx(97 / 95, abs=1e-3)
    assert {t.uid for t in row.times} == {
        board.uid("time", 2, "8192/12/4", regime, "search") for regime in ("production", "slow")
    }


@pytest.mark.parametrize(
    "times",
    [
        {(2, "8192/12/4", "production"): 94.5, (2, "8192/12/4", "slow"): 95.0},
        {(2, "8192/12/4", "production"): 90.0, (2, "8192/12/4", "slow"): 101.0},
    ],
    ids=["not told apart", "loses more at slow gates than it gains"],
)
def test_no_row_where_the_gain_is_none(times):
    assert [row.workload for row in board.selected({**board.EVEN, **times}).rows] == [None]


def test_a_schedule_that_bears_less_gets_no_row(monkeypatch):
    bounds = {board.SCHEDULES[0]: -10.0, board.SCHEDULES[1]: -10.0, board.SCHEDULES[2]: -5.0}
    monkeypatch.setattr(board.FAMILY, "gate_bound", bounds.get)
    found = board.selected(board.FASTER)
    assert [row.workload for row in found.rows] == [None]
    assert found.gate_bound == -10.0


def test_the_table_bears_what_its_weakest_row_bears(monkeypatch):
    bounds = {board.SCHEDULES[0]: -5.0, board.SCHEDULES[1]: -5.0, board.SCHEDULES[2]: None}
    monkeypatch.setattr(board.FAMILY, "gate_bound", bounds.get)
    found = board.selected(board.FASTER)
    assert len(found.rows) == 2
    assert found.gate_bound == -5.0


def test_without_finals_nothing_is_exported_as_the_winner():
    with pytest.raises(ExportError, match="has no finals, and only these name a winner"):
        board.selected(finals=False)


def test_winners_of_two_gpus_are_not_compared() -> None:
    """Nor does one whose campaign named none stand before one that did."""
    with open_store("sqlite://") as store:
        h100 = partial(board.on_another_gpu, gpu="NVIDIA H100")
        leaderboard.import_lines(store, h100(board.lines(finals=False)))
        board.fill(store)
        kda = (board.OPERATION, board.FAMILY, [store])
        assert select.select(*kda).campaign.id == board.CAMPAIGN
    with open_store("sqlite://") as store:
        leaderboard.import_lines(store, h100(board.lines()))
        board.fill(store)
        kda = (board.OPERATION, board.FAMILY, [store])
        said = "of 2 GPUs, .*: trial 1 on NVIDIA H100, trial 4 on NVIDIA H200; export one by"
        with pytest.raises(UserError, match=said):
            select.select(*kda)
        assert select.select(*kda, trial="4").campaign.id == board.CAMPAIGN


def test_scores_of_another_version_of_the_operation_do_not_count():
    with pytest.raises(ExportError, match="no winner of kda_prefill to export"):
        board.selected(version="0")


# -- what is written -------------------------------------------------------------------


def test_the_kernels_are_the_campaigns_but_for_the_prefix_of_their_imports():
    files = render(board.selected())
    names = [n for n in files if n.partition("/")[0] in FOLDERS]
    assert {"kernel/entry.py", "kernel/host.py", "kernel/fused.py"} <= set(names)
    assert {"delta_rule/scan.py", "delta_rule/image.py"} <= set(names)
    for name in names:
        folder, _, module = name.partition("/")
        ours = (FOLDERS[folder] / module).read_text("utf-8").splitlines()
        theirs = files[name].decode().splitlines()
        assert len(ours) == len(theirs)
        for was, now in zip(ours, theirs, strict=True):
            if was != now:
                assert re.search(r"candidates\.(kda_prefill|_delta_rule)\.kernel[. ]", was), was
                other = r"\.\.(kernel|delta_rule)(\.\w+)*"
                assert re.search(rf"(from |`)(\.\w*|{other})[. `\w]*", now), now


def test_two_exports_are_the_same_bytes_whatever_the_hash_seed(factory, tmp_path):
    assert factory("export", "kda_prefill", "--to", "one")[0] == 0
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    subprocess.run(
        [sys.executable, "-m", "factory", "export", "kda_prefill", "--to", "two"],
        check=True,
        capture_output=True,
        cwd=tmp_path,
        env=environment,
    )
    one, two = (
        {p.relative_to(d).as_posix(): p.read_bytes() for p in d.rglob("*") if p.is_file()}
        for d in (tmp_path / "one", tmp_path / "two")
    )
    assert one == two
    assert len(one) > 25


def test_the_manifest_names_files_trials_jobs_and_measurements(factory, tmp_path):
    factory("export", "kda_prefill", "--to", "kda")
    told = json.loads((tmp_path / "kda/MANIFEST.json").read_text())
    for name, said in told["files"].items():
        assert hashlib.sha256((tmp_path / "kda" / name).read_bytes()).hexdigest() == said
    assert set(told["files"]) == {
        p.relative_to(tmp_path / "kda").as_posix() for p in (tmp_path / "kda").rglob("*.*")
    } - {"MANIFEST.json"} | {"LICENSE"}
    with open_store("sqlite:///factory.db", read_only=True) as store:
        for row in told["rows"]:
            trial = store.get_trial(row["trial"])
            assert trial.schedule == row["schedule"]
            known = {t.uid: t.record for t in leaderboard.named_times(store, trial.id)}
            for time in row["measurements"]:
                assert known[time["uid"]].median_us == time["median_us"]
                assert known[time["uid"]].job_id == row["job"]
    assert told["claim"] is None
    assert told["source"]["same_as_measured"] is True
    assert told["largest_errors"]["o"]["max_rel"] == 0.006
    assert told["geomean_us"]["production"] == pytest.approx((26 * 95) ** 0.5, abs=1e-3)
    assert (tmp_path / "kda/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_a_changed_source_is_said_plainly():
    found = board.selected(source="0" * 64)
    files = render(found)
    assert not found.same_source
    assert "The kernels have changed since these times were read" in files["README.md"].decode()
    assert json.loads(files["MANIFEST.json"])["source"]["same_as_measured"] is False


def test_the_exported_call_takes_what_the_entry_point_takes_but_a_schedule():
    def parameters(text):
        (node,) = (
            n
            for n in ast.parse(text).body
            if isinstance(n, ast.FunctionDef) and n.name == "kda_prefill"
        )
        names = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
        return names, ast.get_docstring(node)

    files = render(board.selected())
    ours, contract = parameters(files["kernel/entry.py"].decode())
    theirs, exported = parameters(files["api.py"].decode())
    assert theirs == [n for n in ours if n != "schedule"]
    assert "schedule :" in contract
    assert "schedule :" not in exported
    for name in theirs:
        assert name in exported


def test_the_command_says_what_it_wrote_and_that_nothing_is_claimed(factory):
    code, out, _ = factory("export", "kda_prefill", "--to", "kda")
    assert code == 0
    assert "8192/12/4: form=fused" in out
    assert "all other shapes: form=" in out
    assert "of the campaign's trials in its finals" in Path("kda/README.md").read_text()
    assert "no claim was made: this folder itself has not passed the export gate" in out
    code, out, _ = factory("export", "kda_prefill", "--to", "kda", "--json")
    told = json.loads(out)
    assert told["claim"] is None
    assert told["winner"] is False
    assert [row["id"] for row in told["rows"]] == ["8192/12/4", "all other shapes"]


def test_one_trial_is_exported_by_its_number(factory, tmp_path):
    code, out, _ = factory("export", "2", "--to", "second")
    assert code == 0
    assert "this trial did not win its campaign" in out
    assert "  all shapes: form=" in out, "there are no others"
    told = json.loads((tmp_path / "second/MANIFEST.json").read_text())
    assert [row["trial"] for row in told["rows"]] == [board.uid("trial", 1)]
    assert told["is_winner_of_campaign"] is False


def test_the_shipped_results_are_exported_without_a_gpu_or_said_to_be_of_another_version(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    with leaderboard.shipped_store() as store:
        versions = {c.operation_version for c in store.list_campaigns()}
    code, out, err = ask(capsys, "export", "kda_prefill", "--to", "kda")
    if board.OPERATION.version in versions:
        assert code == 0, err
        assert "from the shipped results" in out
    else:
        assert code == 1
        assert "no measured trial" in one_line(err)


@pytest.mark.parametrize("operation", sorted(SHIPPED))
def test_what_templates_make_is_clean_source_without_holes(operation, tmp_path):
    """Templates are read by no checker as they lie: what they make is."""
    exporter = exporter_of(operation)
    for name, text in exporter.files().items():
        assert "# part: " not in text
        assert not [word for word in exporter.words if word in text or word in name]
        if name.endswith(".py"):
            ast.parse(text)
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
    config = ("--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path))
    for words in (("check",), ("format", "--check")):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *words, *config], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout


def test_an_operation_without_an_exporter_is_told_which_have_one():
    with pytest.raises(ExportError, match=r"no exporter for toy_scale; there is one for .*kda_pre"):
        exporter_of("toy_scale")


def test_an_exporter_of_another_distribution_is_found_by_its_entry_point(monkeypatch):
    plugged = EntryPoint("toy_scale", "factory.export.kda:EXPORTER", "kernel_factory.exporters")
    found = {"kernel_factory.exporters": [plugged]}
    monkeypatch.setattr(exporters, "entry_points", lambda group: found[group])
    assert exporter_of("toy_scale") is exporter_of("kda_prefill")
    with pytest.raises(ExportError, match="there is one for kda_prefill, gdn_prefill, toy_scale"):
        exporter_of("toy_wide")


def test_kernel_modules_of_two_packages_go_to_two_folders(tmp_path, monkeypatch):
    for package, name, text in (
        ("mine", "__init__", ""),
        ("mine", "entry", "from theirs.kernel import walk\nfrom theirs.kernel.walk import step\n"),
        ("theirs", "__init__", ""),
        (
            "theirs",
            "walk",
            "# See mine.kernel.entry\nfrom theirs.kernel.deep import one\n",
        ),
        ("theirs", "deep", "one = 1\n"),
        ("theirs", "unused", "import ray\n"),
    ):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / f"{name}.py").write_text(text)
    packages = {"mine.kernel": "kernel", "theirs.kernel": "walks"}
    monkeypatch.setattr(sources, "package_folder", lambda p: tmp_path / p.removesuffix(".kernel"))
    assert sources.kernel_sources(packages, ["entry"]) == {
        "kernel/__init__.py": "",
        "kernel/entry.py": "from ..walks import walk\nfrom ..walks.walk import step\n",
        "walks/__init__.py": "",
        "walks/walk.py": "# See ..kernel.entry\nfrom .deep import one\n",
        "walks/deep.py": "one = 1\n",
    }
    with pytest.raises(ExportError, match=r"entry.py imports theirs"):
        sources.kernel_sources({"mine.kernel": "kernel"}, ["entry"])
    (tmp_path / "mine" / "entry.py").write_text("import mine.kernel.entry\n")
    with pytest.raises(ExportError, match=r"entry.py imports mine,"):
        sources.kernel_sources({"mine.kernel": "kernel"}, ["entry"])


# -- what stands alone -----------------------------------------------------------------


@pytest.mark.parametrize("subject", [board.KDA, board.GDN], ids=lambda s: s.operation.name)
def test_in_a_clean_environment_the_folder_passes_its_own_tests_and_knows_nothing_of_us(
    factory, tmp_path, subject
):
    """Only torch, nvidia-cutlass-dsl, apache-tvm-ffi, pytest and what these require can be found
    there, no variable of ours is set, and the working directory is another."""
    with open_store("sqlite:///built.db") as store:
        board.fill(store, subject=subject, build=True)
    built = ("--db", "sqlite:///built.db")
    name = subject.operation.name
    factory("export", name, "--to", "vendored", *built)
    python = clean_environment.make(
        tmp_path / "env", ["torch", "nvidia-cutlass-dsl[cu13]", "apache-tvm-ffi", "pytest"]
    )
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def run(*argv):
        return subprocess.run(
            [str(python), "-I", *argv], capture_output=True, text=True, cwd=tmp_path, env=bare
        )

    gone = "factory candidates operations leaderboard ray optuna sqlalchemy click pydantic"
    probe = run(
        "-c",
        f"from importlib.util import find_spec as f; print([n for n in {gone.split()!r} if f(n)])",
    )
    assert probe.stdout.strip() == "[]", probe.stderr
    done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "vendored")
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 60, done.stdout[-500:]
    assert "timed as of another compiler" not in done.stdout
    code, out, _ = factory("export", name, "--check", "vendored", *built)
    assert (code, "fine" in out) == (0, True), "its own tests leave it as it was"


# -- what is refused, and what became of a folder --------------------------------------


def test_a_copy_of_another_operation_is_not_called_superseded(factory):
    assert factory("export", "kda_prefill", "--to", "kda")[0] == 0
    code, _, err = factory("export", "gdn_prefill", "--check", "kda")
    assert code == 2
    assert "kda is an export of kda_prefill, not of gdn_prefill" in one_line(err)


@pytest.mark.parametrize("where", ["/", "x" * 300])
def test_a_folder_that_cannot_be_one_is_one_line(factory, where):
    code, _, err = factory("export", "kda_prefill", "--to", where)
    assert code == 2
    assert where[:100] in one_line(err)


def test_only_an_export_that_nobody_touched_is_overwritten(factory, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("keep")
    code, _, err = factory("export", "kda_prefill", "--to", "mine")
    assert code == 2
    assert "holds files that no export wrote" in one_line(err)
    assert (mine / "notes.txt").read_text() == "keep"

    assert factory("export", "kda_prefill", "--to", "kda")[0] == 0
    assert factory("export", "kda_prefill", "--to", "kda")[0] == 0
    (tmp_path / "kda/api.py").write_text("# ours now\n")
    code, _, err = factory("export", "kda_prefill", "--to", "kda")
    assert code == 2
    assert "api.py was altered; nothing was overwritten" in one_line(err)
    assert (tmp_path / "kda/api.py").read_text() == "# ours now\n"

    assert factory("export", "kda_prefill", "--to", "other")[0] == 0
    manifest = tmp_path / "other/MANIFEST.json"
    told = json.loads(manifest.read_text())
    for said, forged in (
        ("MANIFEST.json was altered; nothing was overwritten", {"export_hash": "0" * 64}),
        ("names '../api.py'", {"files": {**told["files"], "../api.py": "0" * 64}}),
        ("names '/etc/passwd'", {"files": {**told["files"], "/etc/passwd": "0" * 64}}),
    ):
        manifest.write_text(json.dumps({**told, **forged}))
        code, _, err = factory("export", "kda_prefill", "--to", "other")
        assert code == 2
        assert said in one_line(err)
        assert json.loads(manifest.read_text()) == {**told, **forged}
    assert not [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["kda_prefill"], 2, "name a folder with --to"),
        (["kda_prefill", "--to", "a", "--check", "b"], 2, "name a folder with --to"),
        (["kda_prefill", "--to", "a", "--control", "x"], 2, "--control goes with --gate"),
        (["kda_prefill", "--to", "a", "--rounds", "3"], 2, "--rounds goes with --gate"),
        (
            ["kda_prefill", "--to", "a", "--gate", "--format", "flashinfer-trace"],
            2,
            "--gate goes with a folder, not with --format flashinfer-trace",
        ),
        (["nothing", "--to", "a"], 2, "nothing"),
        (["toy_scale", "--to", "a"], 1, "no winner of toy_scale"),
        (["99", "--to", "a"], 2, "no trial 99"),
        (["kda_prefill", "--to", "no/such/place"], 2, "does not exist; make it"),
        (["kda_prefill", "--to", "factory.db"], 2, "is no folder"),
        (["kda_prefill", "--check", "nowhere"], 2, "is no exported folder"),
        (["kda_prefill", "--to", "a", "--db", "nonsense"], 2, "not a database URL"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_refused_in_one_line(factory, argv, code, said):
    got, out, err = factory("export", *argv)
    assert got == code
    assert said in one_line(err)
    assert out == ""


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("no/such/place", "does not exist; make it"),
        ("factory.db", "is no folder"),
        (".", "holds files that no export wrote"),
        ("locked/kda", "locked is not writable"),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused_before_kernels_are_compiled(
    factory, tmp_path, monkeypatch, to, said
):
    (tmp_path / "locked").mkdir()
    access = os.access  # whoever runs this may be root, who may write everywhere
    monkeypatch.setattr(os, "access", lambda p, how: "locked" not in str(p) and access(p, how))
    monkeypatch.setattr("factory.export.aot.compile_library", lambda *_: pytest.fail("compiled"))
    code, out, err = factory("export", "kda_prefill", "--aot", "--to", to)
    assert code == 2
    assert said in one_line(err)
    assert out == ""


def test_check_tells_altered_from_superseded_from_fine(factory, tmp_path):
    factory("export", "kda_prefill", "--to", "kda")
    code, out, _ = factory("export", "kda_prefill", "--check", "kda")
    assert code == 0
    assert "fine" in out

    readme = tmp_path / "kda/README.md"
    text = readme.read_text()
    readme.write_text(text + "faster than light\n")
    (tmp_path / "kda/kernel/extra.py").write_text("x = 1\n")
    (tmp_path / "kda/_op.py").rename(tmp_path / "kept")
    code, out, _ = factory("export", "kda_prefill", "--check", "kda", "--json")
    told = json.loads(out)
    assert code == 1
    assert told["status"] == "altered"
    assert told["altered"] == ["README.md"]
    assert told["added"] == ["kernel/extra.py"]
    assert told["missing"] == ["_op.py"]


def test_a_forged_manifest_is_an_altered_one(factory, tmp_path):
    factory("export", "kda_prefill", "--to", "kda")
    path = tmp_path / "kda/MANIFEST.json"
    told = json.loads(path.read_text())
    api = tmp_path / "kda/api.py"
    api.write_text(api.read_text() + "# mine\n")
    told["files"]["api.py"] = hashlib.sha256(api.read_bytes()).hexdigest()
    path.write_text(json.dumps(told))
    code, out, _ = factory("export", "kda_prefill", "--check", "kda")
    assert code == 1
    assert "altered: MANIFEST.json" in out


def test_a_manifest_forged_in_one_piece_is_told_from_what_would_be_exported(factory, tmp_path):
    factory("export", "kda_prefill", "--to", "kda")
    path = tmp_path / "kda/MANIFEST.json"
    told = json.loads(path.read_text())
    told["geomean_us"]["production"] = 1.0
    told["rows"][0]["measurements"][0]["median_us"] = 1.0
    told["claim"] = {"id": "claim-of-mine"}
    test = tmp_path / "kda/tests/kda_prefill_oracle.py"
    test.write_text(test.read_text().replace("1.5e-2", "1.5e2"))
    told["files"]["tests/kda_prefill_oracle.py"] = hashlib.sha256(test.read_bytes()).hexdigest()
    path.write_text(json.dumps(told))
    code, out, _ = factory("export", "kda_prefill", "--check", "kda", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["status"] == "differs"
    assert found["differs"] == ["tests/kda_prefill_oracle.py", "MANIFEST.json"]


def test_check_without_a_winner_says_what_it_did_not_compare(factory, tmp_path):
    factory("export", "kda_prefill", "--to", "kda")
    with open_store("sqlite:///empty.db"):
        pass
    code, out, _ = factory("export", "kda_prefill", "--check", "kda", "--db", "sqlite:///empty.db")
    assert code == 1
    assert "unaltered, but not compared with what would be exported now" in out
    assert "no measured trial" in out


def test_a_trial_of_another_version_of_the_operation_is_not_exported(factory):
    with open_store("sqlite:///old.db") as store:
        board.fill(store, version="0")
    code, out, err = factory("export", "1", "--to", "old", "--db", "sqlite:///old.db")
    assert code == 1
    assert "was measured under version 0 of kda_prefill" in one_line(err)
    assert out == ""


def test_gates_are_refused_after_their_arguments_were_checked(tmp_path, monkeypatch):
    """By a table that has a bound: what is no number is refused as such."""
    import torch

    monkeypatch.setattr(board.FAMILY, "gate_bound", lambda schedule: -5.0)
    write(render(board.selected()), tmp_path / "bounded_export")
    monkeypatch.syspath_prepend(str(tmp_path))
    package = importlib.import_module("bounded_export")
    monkeypatch.setattr(sys.modules["bounded_export.kernel.arguments"], "on_gpu", lambda x: True)
    monkeypatch.setattr(sys.modules["bounded_export.api"], "_machine_problem", lambda index: "")
    x = torch.zeros(1, 4, 2, 128)
    call = {"q": x.bfloat16(), "k": x.bfloat16(), "v": x.bfloat16(), "g": x, "beta": x[..., 0]}
    call["beta"] = call["beta"].contiguous()
    raw = {"gate": "safe", "A_log": torch.zeros(2)}
    for bound, said in (("x", "lower_bound"), (-(10**400), "lower_bound"), (-6.0, "at least -5")):
        with pytest.raises((TypeError, ValueError), match=said) as caught:
            package.kda_prefill(**call, **raw, lower_bound=bound)
        assert package.support(**call, **raw, lower_bound=bound).reason == str(caught.value)


def test_another_table_and_another_source_supersede(factory, tmp_path, monkeypatch):
    factory("export", "kda_prefill", "--to", "kda")
    with open_store("sqlite:///other.db") as store:
        board.fill(store)
    code, out, _ = factory("export", "kda_prefill", "--check", "kda", "--db", "sqlite:///other.db")
    assert code == 1
    assert "superseded: changed table" in out

    add_to("fused.py", "\nFASTER = True\n", tmp_path, monkeypatch)
    code, out, _ = factory("export", "kda_prefill", "--check", "kda", "--json")
    told = json.loads(out)
    assert code == 1
    assert told["status"] == "superseded"
    assert told["changed"] == ["table", "source"]  # the table carries the export's own name


def test_the_hash_is_over_sources_and_table_alone():
    files = render(board.selected())
    bound = export_hash(files)
    assert json.loads(files["MANIFEST.json"])["export_hash"] == bound
    assert export_hash({**files, "README.md": b"", "tests/conftest.py": b""}) == bound
    for name in ("dispatch.py", "api.py", "delta_rule/step.py"):
        assert export_hash({**files, name: files[name] + b"\n"}) != bound


def test_a_source_that_needs_more_than_it_may_is_not_exported(tmp_path, monkeypatch):
    found = board.selected()
    add_to("entry.py", "\nimport ray\n", tmp_path, monkeypatch)
    with pytest.raises(ExportError, match=r"entry.py imports ray, which an export must do without"):
        render(found)
