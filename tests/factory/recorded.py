"""A synthetic recorded campaign: a conditional space whose every score, and best, is known."""

from __future__ import annotations

import record_makers as make

import operations
from candidates import Family, Parameter, Schedule
from factory.plan import modelled_order
from factory.replay import Recording
from factory.search import Outcome
from leaderboard.records import (
    CampaignStatus,
    Clock,
    JobStatus,
    StageStatus,
    TrialStatus,
)

FLAT = {"form": ("flat",)}
TREE = {"form": ("tree",)}


class Synthetic(Family):
    """168 schedules in two forms; the best is ``form=flat tile=64 depth=4 order=b``."""

    name = "synthetic"
    operation = "toy_scale"
    parameters = (
        Parameter("form", ("flat", "tree"), "which knobs there are"),
        Parameter("tile", (8, 16, 32, 64, 128, 256), "has a best", FLAT),
        Parameter("depth", (1, 2, 3, 4, 5, 6), "has a best", FLAT),
        Parameter("order", ("a", "b", "c"), "b is best, c is wrong", FLAT),
        Parameter("arity", (2, 3, 4, 5, 6, 7, 8, 9, 10, 11), "hardly matters", TREE),
        Parameter("root", (1, 2, 3, 4, 5, 6), "hardly matters", TREE),
    )

    def presets(self):
        return ("all",)

    def offered(self, preset):
        flat = [
            {"form": "flat", "tile": t, "depth": d, "order": o}
            for t in self.parameters[1].choices
            for d in self.parameters[2].choices
            for o in self.parameters[3].choices
        ]
        tree = [
            {"form": "tree", "arity": a, "root": r}
            for a in self.parameters[4].choices
            for r in self.parameters[5].choices
        ]
        return tuple(self.schedule(v) for v in (*tree, *flat))

    def problems(self, schedule):
        return ()

    def gate_bound(self, schedule):
        return None

    def emulate(self, schedule, inputs):
        raise NotImplementedError("recorded only")

    def compile(self, schedule):
        raise NotImplementedError("recorded only")

    def load(self, schedule):
        raise NotImplementedError("recorded only")

    def modelled_us(self, schedule, workload):
        """Right but for the depth, which it takes to matter more and to be best at 3."""
        us = score(schedule)
        if schedule["form"] == "tree":
            return us
        depth = int(schedule["depth"])
        return us - 4.0 * abs(depth - 4) + 5.0 * abs(depth - 3)

    def source_hash(self):
        return "5" * 64


FAMILY = Synthetic()
BEST = FAMILY.schedule({"form": "flat", "tile": 64, "depth": 4, "order": "b"})


def score(schedule: Schedule) -> float:
    """Microseconds."""
    if schedule["form"] == "tree":
        return 150.0 + int(schedule["arity"]) + int(schedule["root"])
    tile = abs(int(schedule["tile"]).bit_length() - (64).bit_length())
    depth = abs(int(schedule["depth"]) - 4)
    return 100.0 + 12.0 * tile + 4.0 * depth + (0.0 if schedule["order"] == "b" else 9.0)


def recording():
    """The whole of it, without a database."""
    offered = FAMILY.offered("all")
    return Recording(
        campaigns=("recorded-1",),
        parameters=FAMILY.parameters,
        outcomes={s: outcome(s) for s in offered},
        measured=frozenset(s for s in offered if s.get("order") != "c"),
        modelled=modelled_order(operations.get("toy_scale"), FAMILY, offered),
        whole=len(offered),
        missing=0,
        clock=Clock.MODELLED,
    )


def outcome(schedule: Schedule) -> Outcome:
    if schedule.get("order") == "c":
        return Outcome(schedule, TrialStatus.REJECTED)
    return Outcome(schedule, TrialStatus.PASSED, score(schedule))


def record(store, name="recorded", schedules=None):
    """Write the campaign with all verdicts; returns its record."""
    schedules = FAMILY.offered("all") if schedules is None else schedules
    campaign = store.create_campaign(
        make.campaign(
            f"{name}-1",
            name=name,
            operation="toy_scale",
            family=FAMILY.name,
            source_hash=FAMILY.source_hash(),
            budget=len(schedules),
            clock=Clock.MODELLED,
            workloads=(),
        )
    )
    store.acquire(campaign.id)
    store.put_fingerprint(make.FINGERPRINT)
    job = f"job-{name}"
    store.open_job(make.job(job, campaign.id, gpu="none"))
    for number, schedule in enumerate(schedules):
        wrong = schedule.get("order") == "c"
        trial = store.begin_trial(
            campaign.id,
            number=number,
            schedule_key=schedule.key,
            schedule=schedule.as_dict(),
            source_hash=campaign.source_hash,
        )
        status = StageStatus.REJECTED if wrong else StageStatus.PASSED
        for stage in ("emulate",) if wrong else ("emulate", "compile"):
            store.record_stage(trial.id, make.stage(stage, status, reason="off" * wrong))
        if wrong:
            store.finish_trial(trial.id, TrialStatus.REJECTED, reason="off")
        else:
            store.finish_trial(
                trial.id,
                TrialStatus.PASSED,
                clock=Clock.MODELLED,
                score_us=score(schedule),
                job_id=job,
            )
    store.close_job(job, JobStatus.VALID)
    campaign = store.set_campaign_status(campaign.id, CampaignStatus.FINISHED)
    store.release(campaign.id)
    return campaign
