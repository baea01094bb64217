from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable
from pathlib import Path

import board
import pytest

from leaderboard import (
    CampaignStatus,
    JobStatus,
    StageStatus,
    Store,
    TransferError,
    TrialStatus,
    UnknownError,
    export_file,
    export_lines,
    funnel,
    import_file,
    import_lines,
    open_store,
    ranked,
    shipped_store,
)
from leaderboard import shipped as shipped_module
from leaderboard.shipped import open_for_reading


@pytest.fixture
def full(store: Store) -> Store:
    """Every kind of row: passed, failed, abandoned, retried, modelled, controls, finals."""
    store.add_measurements(board.controls("job-1", 20.0))
    trial = board.passed(store, 0, "job-1", 10.0, gate_bound=-math.inf)
    board.failed(store, 1, TrialStatus.REJECTED, "NaN at -5: 100%, été")
    board.begin(store, 2)
    store.abandon_open_trials("kda-1")
    again = board.begin(store, 2)
    store.record_stage(again.id, board.stage("gate", details={"worst": math.inf, "list": [1]}))
    store.finish_trial(again.id, TrialStatus.CRASHED, reason="illegal address", job_id="job-1")
    store.add_measurements(board.times("job-1", trial.id, 11.0, 51.0, phase="final"))
    store.close_job("job-1", JobStatus.VALID, drift=0.01)
    store.create_campaign(board.campaign("kda-2", minutes=3))
    board.modelled(store, 0, 3.0, "kda-2")
    return store


@pytest.fixture
def other(tmp_path: Path) -> Store:
    return open_store(f"sqlite:///{tmp_path / 'other.db'}")


def without_ids(store: Store, campaign_id: str) -> list[dict[str, object]]:
    return [
        t.model_dump(exclude={"id": True, "measurements": {"__all__": {"trial_id"}}})
        for t in store.load_trials(campaign_id)
    ]


def test_what_is_exported_is_imported_whole(full: Store, other: Store) -> None:
    board_before = other.create_campaign(board.campaign("kda-0"))
    board.modelled(other, 0, 1.0, "kda-0")  # row numbers differ from here on
    result = import_lines(other, export_lines(full))
    assert result.added == {
        "fingerprint": 1,
        "campaign": 2,
        "job": 1,
        "trial": 5,
        "measurement": 12,
    }
    assert result.skipped == {}
    for campaign in full.list_campaigns():
        assert other.get_campaign(campaign.id) == campaign
        assert without_ids(other, campaign.id) == without_ids(full, campaign.id)
        assert funnel(other, campaign.id) == funnel(full, campaign.id)
    assert other.get_job("job-1") == full.get_job("job-1")
    assert [r.model_dump(exclude={"id"}) for r in ranked(other, campaign_id="kda-1")] == [
        r.model_dump(exclude={"id"}) for r in ranked(full, campaign_id="kda-1")
    ]
    assert other.get_campaign("kda-0") == board_before


def test_importing_twice_changes_nothing(full: Store, other: Store) -> None:
    lines = list(export_lines(full))
    first = import_lines(other, lines)
    again = import_lines(other, lines)
    assert again.added == {}
    assert again.skipped == first.added
    assert list(export_lines(other)) == lines
    assert import_lines(full, lines).added == {}  # nor into where it came from


def test_what_holds_a_nan_can_be_imported_twice(full: Store, other: Store) -> None:
    job = board.job("job-nan", details={"errors": {"control": math.nan}})
    full.open_job(job)
    full.close_job(job.id, JobStatus.VOID, details=job.details)
    lines = list(export_lines(full))
    import_lines(other, lines)
    again = import_lines(other, lines)
    assert again.added == {}
    assert math.isnan(other.get_job("job-nan").details["errors"]["control"])
    with pytest.raises(TransferError, match="job job-nan is stored as void and comes as valid"):
        import_lines(
            other,
            edited(lines, lambda items: of_id(items, "job-nan").update(status="valid")),
        )


def test_every_line_is_strict_json_of_one_object(full: Store) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    items = [json.loads(line, parse_constant=refuse) for line in export_lines(full)]
    kinds = [item["kind"] for item in items]
    assert kinds[0] == "header"
    assert kinds[-1] == "end"
    assert items[-1]["lines"] == len(items) - 2
    assert all("\n" not in line for line in export_lines(full))


def test_chosen_campaigns_bring_only_their_own(full: Store, other: Store) -> None:
    import_lines(other, export_lines(full, ["kda-2"]))
    assert [c.id for c in other.list_campaigns()] == ["kda-2"]
    assert len(other.list_trials("kda-2")) == 1
    import_lines(other, export_lines(full, ["kda-1"]))
    assert without_ids(other, "kda-1") == without_ids(full, "kda-1")
    with pytest.raises(UnknownError, match="no campaign 'nope'"):
        list(export_lines(full, ["nope"]))


def test_running_trials_and_leases_stay_behind(full: Store, other: Store) -> None:
    full.acquire("kda-2")
    board.begin(full, 1, "kda-2")
    import_lines(other, export_lines(full))
    assert [t.number for t in other.list_trials("kda-2")] == [0]
    assert other.get_campaign("kda-2").driver is None
    other.acquire("kda-2", "elsewhere:1")


def test_a_later_export_of_a_grown_campaign_adds_what_is_new(store: Store, other: Store) -> None:
    store.add_measurements(board.controls("job-1", 20.0))
    board.passed(store, 0, "job-1", 10.0)
    import_lines(other, export_lines(store))
    assert ranked(other) == []  # the job was open
    board.passed(store, 1, "job-1", 9.0)
    store.add_measurements(board.controls("job-1", 21.0))
    store.close_job("job-1", JobStatus.VALID)
    store.set_campaign_status("kda-1", CampaignStatus.FINISHED)
    result = import_lines(other, export_lines(store))
    assert result.added == {"trial": 1, "measurement": 8}
    assert [r.number for r in ranked(other)] == [1, 0]
    assert other.get_campaign("kda-1").status is CampaignStatus.FINISHED
    assert list(export_lines(other)) == list(export_lines(store))


def test_a_campaign_that_went_on_is_imported_again(store: Store, other: Store) -> None:
    """With another budget and executor, and with finals, one of which was lost."""
    store.add_measurements(board.controls("job-1", 20.0))
    won, lost = (board.passed(store, n, "job-1", us) for n, us in ((0, 10.0), (1, 9.0)))
    before = list(export_lines(store))
    import_lines(other, before)
    config = {**store.get_campaign("kda-1").config, "budget": 30, "executor": {"workers": 3}}
    store.set_campaign_status("kda-1", CampaignStatus.RUNNING, budget=30, config=config)
    final = board.times("job-1", won.id, 11.0, 51.0, phase="final")
    store.record_finals(won.id, board.stage("finals"), errors=[board.error()], measurements=final)
    wrong = board.stage("finals", StageStatus.REJECTED, reason="o off on a held-out shape")
    store.record_finals(lost.id, wrong, errors=[board.error(within=False)])
    midway = list(export_lines(store))
    import_lines(other, midway)
    assert list(export_lines(other)) == midway
    store.record_finals(won.id, board.stage("finals", seconds=7.0))  # run again
    store.set_campaign_status("kda-1", CampaignStatus.FINISHED)
    after = list(export_lines(store))
    for lines in (after, before, midway):
        import_lines(other, lines)
        assert list(export_lines(other)) == after
    changed = edited(after, lambda items: of_kind(items, "campaign")["config"].update(seed=1))
    with pytest.raises(TransferError, match="kda-1 is stored with another config"):
        import_lines(other, changed)


def test_an_older_export_does_not_turn_time_back(store: Store, other: Store) -> None:
    old = list(export_lines(store))
    store.close_job("job-1", JobStatus.VALID)
    store.set_campaign_status("kda-1", CampaignStatus.FINISHED)
    new = list(export_lines(store))
    import_lines(other, new)
    import_lines(other, old)
    assert list(export_lines(other)) == new


Edit = Callable[[list[dict[str, object]]], None]


def edited(lines: list[str], edit: Edit) -> list[str]:
    items = [json.loads(line) for line in lines]
    edit(items)
    return [json.dumps(item) for item in items]


def of_kind(items: list[dict[str, object]], kind: str) -> dict[str, object]:
    return next(item for item in items if item["kind"] == kind)


def of_id(items: list[dict[str, object]], name: str) -> dict[str, object]:
    return next(item for item in items if item.get("id") == name)


BAD: dict[str, tuple[Edit, str]] = {
    "empty": (lambda items: items.clear(), "no end line"),
    "cut short": (lambda items: items.pop(), "cut short: it has no end line"),
    "a line lost": (lambda items: items.pop(-2) and None, "lines where its end line counts"),
    "no header": (lambda items: items.pop(0) and None, "first line is no header"),
    "foreign": (lambda items: items[0].update(format="optuna"), "not a leaderboard export"),
    "newer": (lambda items: items[0].update(version=3), "newer version"),
    "more after the end": (lambda items: items.append(items[1]), "follows the end line"),
    "unknown kind": (lambda items: items[1].update(kind="claim?"), "unknown kind 'claim.'"),
    "unknown field": (lambda items: items[1].update(speedup=3.9), "speedup"),
    "a field lost": (lambda items: of_kind(items, "job").pop("gpu") and None, "gpu"),
    "no uid": (lambda items: of_kind(items, "measurement").pop("uid") and None, "uid is missing"),
    "a uid of nothing": (
        lambda items: of_kind(items, "measurement").update(uid=None),
        "a measurement has no uid",
    ),
    "half a character": (
        lambda items: of_kind(items, "measurement").update(kernels=["\ud800"]),
        "line .* holds half a character",
    ),
    "a number past all numbers": (
        lambda items: of_kind(items, "campaign")["config"].update(device={"drift": 10**400}),
        "too large",
    ),
    "a time on a failure": (
        lambda items: of_kind(items, "trial").update(status="rejected"),
        "a rejected trial cannot carry a time",
    ),
    "a flattering score": (
        lambda items: of_kind(items, "trial").update(score_us=1.0),
        "is not the geomean of its times",
    ),
    "a time of no trial": (
        lambda items: of_kind(items, "measurement").update(trial_uid="f" * 32),
        "which is not here",
    ),
    "a trial of no campaign": (
        lambda items: of_kind(items, "trial").update(campaign_id="nope"),
        "line .* is of campaign nope, which is not here",
    ),
    "a trial of no job": (
        lambda items: of_kind(items, "trial").update(job_id="nope"),
        "line .* is of job nope, which is not here",
    ),
    "passed by no gate": (
        lambda items: of_kind(items, "trial")["stages"].pop(0) and None,
        "it is measured and passed, and no gate let it pass",
    ),
    "passed against its gate": (
        lambda items: of_kind(items, "trial")["stages"][0].update(status="rejected"),
        "stage gate is rejected, and the trial's status is passed",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_whole_in_one_line(full: Store, other: Store, case: str) -> None:
    edit, message = BAD[case]
    lines = edited(list(export_lines(full)), edit)
    with pytest.raises(Exception, match=message) as caught:
        import_lines(other, lines, name="results.jsonl")
    assert "\n" not in str(caught.value)
    assert list(export_lines(other)) == list(export_lines(open_store("sqlite://")))


@pytest.mark.parametrize("name", ["long.jsonl", "long.jsonl.xz"])
def test_a_line_without_end_does_not_fill_the_memory(
    full: Store, other: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    longest = max(map(len, export_lines(full))) + 1  # with its end
    path = tmp_path / name
    export_file(full, path)
    monkeypatch.setattr("leaderboard.transfer._LINE", longest - 1)
    with pytest.raises(TransferError, match=f"{name} line .* is longer than"):
        import_file(other, path)
    monkeypatch.setattr("leaderboard.transfer._LINE", longest)
    assert import_file(other, path).added


def test_a_passed_trial_without_its_times_is_refused(full: Store, other: Store) -> None:
    def drop(items: list[dict[str, object]]) -> None:
        items[:] = [i for i in items if i["kind"] != "measurement"]
        items[-1]["lines"] = len(items) - 2

    with pytest.raises(TransferError, match="0 of 4 gpu times are there"):
        import_lines(other, edited(list(export_lines(full)), drop))
    assert other.list_campaigns() == []


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("campaign", {"seed": 8}, "campaign kda-1 is stored with another seed"),
        ("job", {"seed": 8}, "job job-1 is stored with other contents"),
        ("job", {"status": "void"}, "job job-1 is stored as valid and comes as void"),
        ("trial", {"reason": "?"}, "is stored with other contents"),
        ("trial", {"uid": "0" * 32}, "it went on in two places"),
        ("measurement", {"regime": "other"}, "is stored with other contents"),
    ],
)
def test_what_contradicts_the_stored_is_refused(
    full: Store, kind: str, change: dict[str, object], message: str
) -> None:
    before = list(export_lines(full))
    lines = edited(before, lambda items: of_kind(items, kind).update(change))
    with pytest.raises(TransferError, match=f"x.* .*{message}"):
        import_lines(full, lines, name="x")
    assert list(export_lines(full)) == before


SHIPPED = sorted(Path(shipped_module.__file__).with_name("shipped").glob("*.jsonl.xz"))


@pytest.fixture(scope="module")
def shipped_items() -> list[dict[str, object]]:
    """One campaign as shipped, cut to the first trial that passed and its times."""
    items = [json.loads(line) for line in lzma.decompress(SHIPPED[0].read_bytes()).splitlines()]
    trial = next(i for i in items if i["kind"] == "trial" and i["status"] == "passed")
    kept = [
        i
        for i in items
        if i["kind"] not in ("trial", "measurement", "claim")
        or i is trial
        or i.get("trial_uid") == trial["uid"]
    ]
    kept[-1]["lines"] = len(kept) - 2
    return kept


def test_a_shipped_file_goes_round(other: Store) -> None:
    import_file(other, SHIPPED[0])
    lines = list(export_lines(other))
    assert import_lines(open_store("sqlite://"), lines).added["trial"] > 0
    assert import_lines(other, lines).added == {}


def first_error(items: list[dict[str, object]], **changes: object) -> None:
    errors = of_kind(items, "trial")["errors"]
    assert isinstance(errors, list)
    next(e for e in errors if e["within"]).update(changes)


def sampled(items: list[dict[str, object]]) -> dict[str, object]:
    return next(i for i in items if i["kind"] == "measurement" and i["clock"] == "gpu")


CONTRADICTIONS: dict[str, tuple[Edit, str]] = {
    "median": (
        lambda items: sampled(items).update(median_us=sampled(items)["low_us"]),
        r"measurement \w+: median_us is .*by its samples_us",
    ),
    "low": (lambda items: sampled(items).update(low_us=1.0), r"measurement \w+: low_us"),
    "high": (lambda items: sampled(items).update(high_us=1e6), r"measurement \w+: high_us"),
    "samples": (
        lambda items: sampled(items).update(samples_us=[1.0, 1.0, 1.0]),
        r"measurement \w+: median_us",
    ),
    "an infinite sample": (
        lambda items: sampled(items).update(samples_us=[{"$float": "inf"}]),
        "samples_us holds what is no time",
    ),
    "score": (lambda items: of_kind(items, "trial").update(score_us=9.0), "its score 9 us"),
    "slow score": (lambda items: of_kind(items, "trial").update(slow_us=9.0), r"\(slow 9 us\)"),
    "beyond": (lambda items: first_error(items, within=False), "not within, and .* is passed"),
    "not finite": (lambda items: first_error(items, finite=False), "is within and not finite"),
    "no error": (lambda items: first_error(items, max_rel=None), "within with max_rel None"),
    "drift": (lambda items: of_kind(items, "job").update(drift=0.5), "drift of 0.5, beyond 0.03"),
    "gpu": (lambda items: of_kind(items, "job").update(gpu="NVIDIA B200"), "its fingerprint's"),
    "fingerprint": (
        lambda items: of_kind(items, "fingerprint").update(values={"gpu": "NVIDIA B200"}),
        "id is not the sha256 of its values",
    ),
    "key": (
        lambda items: of_kind(items, "trial").update(schedule_key="bt=1"),
        "schedule_key 'bt=1' is not its schedule",
    ),
    "NaN": (lambda items: of_kind(items, "job").update(drift=math.nan), "NaN is no number"),
    "infinity": (lambda items: sampled(items).update(high_us=math.inf), "Infinity is no number"),
    "an encoded infinity": (
        lambda items: sampled(items).update(high_us={"$float": "inf"}),
        "high_us: Input should be a finite number",
    ),
    "a huge seed": (lambda items: of_kind(items, "job").update(seed=2**63), "seed: Input should"),
    "version": (lambda items: items[0].update(version="2"), "'2' is no whole number"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_a_shipped_file_that_was_edited_is_refused(
    shipped_items: list[dict[str, object]], other: Store, case: str
) -> None:
    lines = [json.dumps(item) for item in shipped_items]
    edit, message = CONTRADICTIONS[case]
    with pytest.raises(TransferError, match=message) as caught:
        import_lines(other, edited(lines, edit))
    assert "\n" not in str(caught.value)
    assert "pydantic" not in str(caught.value)
    assert other.list_campaigns() == []
    import_lines(other, lines)  # as it was, it is taken


def test_times_without_samples_and_modelled_scores(full: Store, other: Store) -> None:
    def bare(items: list[dict[str, object]]) -> None:
        for item in items:
            if item["kind"] == "measurement":
                item["samples_us"] = []

    import_lines(other, edited(list(export_lines(full)), bare))

    def modelled(items: list[dict[str, object]]) -> None:
        mine = next(i for i in items if i.get("clock") == "modelled" and i["kind"] == "trial")
        assert isinstance(mine["stages"], list)
        mine["stages"][0]["details"] = {"modelled_us": {"a": 2.0, "b": 8.0}}

    with pytest.raises(TransferError, match="score_us is 3, the geomean of its modelled_us 4"):
        import_lines(open_store("sqlite://"), edited(list(export_lines(full)), modelled))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"kind": "job", "drift": 1e999}', "1e999 is too large"),
        ("9" * 5000, "is not JSON"),
        ('{"kind": "job", "details": {"\\u0024float": "abc"}}', "could not convert"),
    ],
)
def test_a_hostile_line_is_one_message(other: Store, line: str, message: str) -> None:
    with pytest.raises(TransferError, match=message) as caught:
        import_lines(other, [line])
    assert len(str(caught.value)) < 200


def test_files_go_out_whole_and_come_in(full: Store, other: Store, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert export_file(full, path) == len(path.read_text().splitlines())
    assert import_file(other, path).added["trial"] == 5
    again = tmp_path / "again.jsonl"
    export_file(other, again)
    assert again.read_bytes() == path.read_bytes()
    assert sorted(p.suffix for p in tmp_path.iterdir() if "partial" in p.name) == []


def test_a_failed_export_leaves_the_old_file(full: Store, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("kept")
    with pytest.raises(UnknownError):
        export_file(full, path, ["nope"])
    assert path.read_text() == "kept"
    assert [p.name for p in tmp_path.glob("*partial*")] == []
    with pytest.raises(TransferError, match="cannot write"):
        export_file(full, tmp_path / "no" / "folder.jsonl")


def test_a_file_that_cannot_be_read_is_named(store: Store, tmp_path: Path) -> None:
    with pytest.raises(TransferError, match=r"cannot read .*absent.jsonl: No such file"):
        import_file(store, tmp_path / "absent.jsonl")
    (tmp_path / "x.bin").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TransferError, match="is not text"):
        import_file(store, tmp_path / "x.bin")
    (tmp_path / "x.txt").write_text("hello\n")
    with pytest.raises(TransferError, match=r"x.txt line 1 is not JSON"):
        import_file(store, tmp_path / "x.txt")


def test_a_name_that_says_so_is_a_compressed_file(
    full: Store, other: Store, tmp_path: Path
) -> None:
    export_file(full, tmp_path / "all.jsonl")
    packed = tmp_path / "all.jsonl.xz"
    export_file(full, packed)
    assert lzma.decompress(packed.read_bytes()) == (tmp_path / "all.jsonl").read_bytes()
    assert import_file(other, packed).added["trial"] > 0
    assert [f.name for f in tmp_path.iterdir() if f.name.startswith(".")] == []


@pytest.mark.parametrize("damage", [lambda x: x[:-40], lambda x: b"plain" + x])
def test_a_damaged_compressed_file_is_refused_and_changes_nothing(
    damage: Callable[[bytes], bytes], full: Store, other: Store, tmp_path: Path
) -> None:
    packed = tmp_path / "all.jsonl.xz"
    export_file(full, packed)
    packed.write_bytes(damage(packed.read_bytes()))
    before = list(export_lines(other))
    with pytest.raises(TransferError, match=r"all.jsonl.xz is not a whole .xz file"):
        import_file(other, packed)
    assert list(export_lines(other)) == before


# Shipped results


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.xz"])
def test_shipped_results_open_read_only_under_their_gpu(
    suffix: str, full: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shipped").mkdir()
    export_file(full, tmp_path / "shipped" / f"h200{suffix}", ["kda-1"])
    monkeypatch.setattr(shipped_module, "files", lambda package: tmp_path)
    with shipped_store() as results:
        assert results.name == "the shipped results"
        assert [(r.gpu, r.score_us) for r in ranked(results)] == [("NVIDIA H200", 10.0)]
        with pytest.raises(Exception, match="read-only"):
            results.create_campaign(board.campaign("mine"))
        with pytest.raises(Exception, match="readonly"), results.reading() as session:
            session.connection().exec_driver_sql("DELETE FROM kf_trials")


def test_shipped_results_are_imported_once_in_a_process(
    full: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shipped").mkdir()
    export_file(full, tmp_path / "shipped" / "h200.jsonl.xz", ["kda-1"])
    monkeypatch.setattr(shipped_module, "files", lambda package: tmp_path)
    imported: list[str] = []
    real = shipped_module.import_open
    monkeypatch.setattr(
        shipped_module,
        "import_open",
        lambda *args, name: imported.append(name) or real(*args, name=name),
    )
    with shipped_store() as first, shipped_store() as second:
        rows = [(r.schedule_key, r.score_us) for r in ranked(first)]
        assert rows
        assert [(r.schedule_key, r.score_us) for r in ranked(second)] == rows
        assert len(imported) == 1
        with pytest.raises(Exception, match="readonly"), second.reading() as session:
            session.connection().exec_driver_sql("DELETE FROM kf_trials")
    export_file(full, tmp_path / "shipped" / "h200.jsonl.xz")  # another content, the same name
    with shipped_store() as third:
        assert len(third.list_campaigns()) > 1
        assert len(imported) == 2


def test_a_damaged_shipped_file_is_named(
    full: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shipped").mkdir()
    packed = tmp_path / "shipped" / "h200.jsonl.xz"
    export_file(full, packed)
    packed.write_bytes(packed.read_bytes()[:-40])
    monkeypatch.setattr(shipped_module, "files", lambda package: tmp_path)
    with pytest.raises(TransferError, match=r"shipped h200.jsonl.xz is not a whole .xz file"):
        shipped_store()


def test_without_shipped_results_the_board_is_empty_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shipped_module, "files", lambda package: tmp_path)
    with shipped_store() as results:
        assert results.name == "the shipped results (none in this version)"
        assert ranked(results) == []
        with pytest.raises(UnknownError, match=r"\(none in this version\) holds no campaign"):
            results.get_campaign()


def test_the_packages_own_shipped_results_load() -> None:
    with shipped_store() as results:
        for campaign in results.list_campaigns():
            assert funnel(results, campaign.id).finished > 0


def test_reading_prefers_the_url_then_the_folders_database_then_the_shipped(
    store: Store, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_for_reading().name.startswith("the shipped results")
    open_store("sqlite:///factory.db").create_campaign(board.campaign("mine"))
    assert [c.id for c in open_for_reading().list_campaigns()] == ["mine"]
    assert [c.id for c in open_for_reading(url).list_campaigns()] == ["kda-1"]
    assert open_for_reading(url).read_only
