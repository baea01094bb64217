"""Campaigns, jobs, fingerprints, trials and what was seen of them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

# Types are spelled out rather than imported from the models: a migration must
# keep its meaning when the models move on.
_ROW_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")
_MOMENT = sa.DateTime(timezone=True)


def upgrade() -> None:
    op.create_table(
        "kf_fingerprints",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("contents", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kf_fingerprints"),
    )
    op.create_table(
        "kf_campaigns",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("name", sa.String(128), nullable=False),
        sa.Column("operation", sa.String(128), nullable=False),
        sa.Column("operation_version", sa.String(64), nullable=False),
        sa.Column("family", sa.String(128), nullable=False),
        sa.Column("source_hash", sa.String(64), nullable=False),
        sa.Column("config", sa.JSON, nullable=False),
        sa.Column("space_hash", sa.String(64), nullable=False),
        sa.Column("space", sa.JSON, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("budget", sa.Integer, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("clock", sa.String(16), nullable=False),
        sa.Column("workloads", sa.JSON, nullable=False),
        sa.Column("ranking_regime", sa.String(64), nullable=False),
        sa.Column("slow_regime", sa.String(64)),
        sa.Column("created_at", _MOMENT, nullable=False),
        sa.Column("updated_at", _MOMENT, nullable=False),
        sa.Column("driver", sa.Text),
        sa.Column("heartbeat_at", _MOMENT),
        sa.PrimaryKeyConstraint("id", name="pk_kf_campaigns"),
        sa.CheckConstraint("budget >= 1", name=op.f("ck_kf_campaigns_budget")),
    )
    op.create_index("ix_kf_campaigns_name", "kf_campaigns", ["name"])
    op.create_index("ix_kf_campaigns_operation", "kf_campaigns", ["operation"])
    op.create_table(
        "kf_jobs",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("campaign_id", sa.String(128)),
        sa.Column("fingerprint_id", sa.String(64), nullable=False),
        sa.Column("gpu", sa.String(128), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("started_at", _MOMENT, nullable=False),
        sa.Column("ended_at", _MOMENT),
        sa.Column("drift", sa.Double),
        sa.Column("note", sa.Text, nullable=False),
        sa.Column("seed", sa.BigInteger),
        sa.Column("details", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kf_jobs"),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["kf_campaigns.id"], name="fk_kf_jobs_campaign_id"
        ),
        sa.ForeignKeyConstraint(
            ["fingerprint_id"], ["kf_fingerprints.id"], name="fk_kf_jobs_fingerprint_id"
        ),
    )
    op.create_index("ix_kf_jobs_campaign_id", "kf_jobs", ["campaign_id"])
    op.create_table(
        "kf_trials",
        sa.Column("id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("uid", sa.String(32), nullable=False),
        sa.Column("campaign_id", sa.String(128), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("schedule_key", sa.String(512), nullable=False),
        sa.Column("schedule", sa.JSON, nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("stage", sa.String(32), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("finished", sa.Boolean),
        sa.Column("clock", sa.String(16)),
        sa.Column("score_us", sa.Double),
        sa.Column("slow_us", sa.Double),
        sa.Column("method", sa.String(64)),
        sa.Column("cache", sa.String(16)),
        sa.Column("job_id", sa.String(128)),
        sa.Column("source_hash", sa.String(64), nullable=False),
        sa.Column("gate_bound", sa.Double),
        sa.Column("started_at", _MOMENT, nullable=False),
        sa.Column("ended_at", _MOMENT),
        sa.Column("log_path", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_kf_trials"),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["kf_campaigns.id"], name="fk_kf_trials_campaign_id"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["kf_jobs.id"], name="fk_kf_trials_job_id"),
        sa.UniqueConstraint("uid", name="uq_kf_trials_uid"),
        sa.UniqueConstraint(
            "campaign_id",
            "schedule_key",
            "finished",
            name="uq_kf_trials_campaign_id_schedule_key_finished",
        ),
        sa.UniqueConstraint(
            "campaign_id",
            "schedule_key",
            "attempt",
            name="uq_kf_trials_campaign_id_schedule_key_attempt",
        ),
        sa.UniqueConstraint(
            "campaign_id", "number", "attempt", name="uq_kf_trials_campaign_id_number_attempt"
        ),
        sa.CheckConstraint(
            "(status = 'passed' AND score_us IS NOT NULL AND score_us > 0 AND clock IS NOT NULL)"
            " OR (status <> 'passed' AND score_us IS NULL AND slow_us IS NULL)",
            name=op.f("ck_kf_trials_only_passed_has_time"),
        ),
        sa.CheckConstraint(
            "(status IN ('running', 'abandoned')) = (finished IS NULL)",
            name=op.f("ck_kf_trials_finished"),
        ),
    )
    op.create_index("ix_kf_trials_campaign_id_status", "kf_trials", ["campaign_id", "status"])
    op.create_index("ix_kf_trials_job_id", "kf_trials", ["job_id"])
    op.create_table(
        "kf_stages",
        sa.Column("id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("trial_id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("position", sa.Integer, nullable=False),
        sa.Column("stage", sa.String(32), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("seconds", sa.Double, nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kf_stages"),
        sa.ForeignKeyConstraint(["trial_id"], ["kf_trials.id"], name="fk_kf_stages_trial_id"),
        sa.UniqueConstraint("trial_id", "stage", name="uq_kf_stages_trial_id_stage"),
    )
    op.create_table(
        "kf_errors",
        sa.Column("id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("trial_id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), nullable=False),
        sa.Column("stage", sa.String(32), nullable=False),
        sa.Column("regime", sa.String(64), nullable=False),
        sa.Column("workload", sa.String(128), nullable=False),
        sa.Column("tensor", sa.String(64), nullable=False),
        sa.Column("scope", sa.String(64), nullable=False),
        sa.Column("max_rel", sa.Double),
        sa.Column("rms_rel", sa.Double),
        sa.Column("finite", sa.Boolean, nullable=False),
        sa.Column("within", sa.Boolean, nullable=False),
        sa.Column("seed", sa.BigInteger, nullable=False),
        sa.Column("out_of_contract", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kf_errors"),
        sa.ForeignKeyConstraint(["trial_id"], ["kf_trials.id"], name="fk_kf_errors_trial_id"),
    )
    op.create_index("ix_kf_errors_trial_id", "kf_errors", ["trial_id"])
    op.create_table(
        "kf_measurements",
        sa.Column("id", _ROW_ID, autoincrement=True, nullable=False),
        sa.Column("uid", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(128), nullable=False),
        sa.Column("trial_id", sa.BigInteger().with_variant(sa.Integer, "sqlite")),
        sa.Column("control", sa.String(128)),
        sa.Column("workload", sa.String(128), nullable=False),
        sa.Column("regime", sa.String(64), nullable=False),
        sa.Column("clock", sa.String(16), nullable=False),
        sa.Column("cache", sa.String(16), nullable=False),
        sa.Column("method", sa.String(64), nullable=False),
        sa.Column("input_form", sa.String(16), nullable=False),
        sa.Column("median_us", sa.Double, nullable=False),
        sa.Column("low_us", sa.Double, nullable=False),
        sa.Column("high_us", sa.Double, nullable=False),
        sa.Column("samples_us", sa.JSON, nullable=False),
        sa.Column("kernels", sa.JSON, nullable=False),
        sa.Column("held_out", sa.Boolean, nullable=False),
        sa.Column("phase", sa.String(16), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kf_measurements"),
        sa.ForeignKeyConstraint(["job_id"], ["kf_jobs.id"], name="fk_kf_measurements_job_id"),
        sa.ForeignKeyConstraint(["trial_id"], ["kf_trials.id"], name="fk_kf_measurements_trial_id"),
        sa.UniqueConstraint("uid", name="uq_kf_measurements_uid"),
        sa.CheckConstraint(
            "(trial_id IS NULL) <> (control IS NULL)", name=op.f("ck_kf_measurements_one_owner")
        ),
        sa.CheckConstraint(
            "0 < low_us AND low_us <= median_us AND median_us <= high_us",
            name=op.f("ck_kf_measurements_ordered"),
        ),
    )
    op.create_index("ix_kf_measurements_trial_id", "kf_measurements", ["trial_id"])
    op.create_index("ix_kf_measurements_job_id_control", "kf_measurements", ["job_id", "control"])


def downgrade() -> None:
    for table in ("measurements", "errors", "stages", "trials", "jobs", "campaigns"):
        op.drop_table(f"kf_{table}")
    op.drop_table("kf_fingerprints")
