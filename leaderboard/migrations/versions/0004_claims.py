"""Claims of exported folders."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "kf_claims",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("operation", sa.String(128), nullable=False),
        sa.Column("operation_version", sa.String(64), nullable=False),
        sa.Column("family", sa.String(128), nullable=False),
        sa.Column("export_hash", sa.String(64), nullable=False),
        sa.Column("source_hash", sa.String(64), nullable=False),
        sa.Column("table", sa.JSON, nullable=False),
        sa.Column("campaign_id", sa.String(128), nullable=False),
        sa.Column("trial_uid", sa.String(32), nullable=False),
        sa.Column("job_id", sa.String(128), nullable=False),
        sa.Column("gpu", sa.String(128), nullable=False),
        sa.Column("score_us", sa.Double, nullable=False),
        sa.Column("slow_us", sa.Double),
        sa.Column("held_out_us", sa.Double),
        sa.Column("candidate_us", sa.Double, nullable=False),
        sa.Column("candidate_held_out_us", sa.Double),
        sa.Column("ratio", sa.Double, nullable=False),
        sa.Column("held_out_ratio", sa.Double),
        sa.Column("bound", sa.Double, nullable=False),
        sa.Column("control", sa.String(128)),
        sa.Column("control_form", sa.String(16)),
        sa.Column("control_us", sa.Double),
        sa.Column("control_ratio", sa.Double),
        sa.Column("kernels", sa.JSON, nullable=False),
        sa.Column("details", sa.JSON, nullable=False),
        sa.Column("supersedes", sa.String(64)),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_kf_claims"),
        sa.ForeignKeyConstraint(
            ["campaign_id"], ["kf_campaigns.id"], name="fk_kf_claims_campaign_id"
        ),
        sa.ForeignKeyConstraint(["trial_uid"], ["kf_trials.uid"], name="fk_kf_claims_trial_uid"),
        sa.ForeignKeyConstraint(["job_id"], ["kf_jobs.id"], name="fk_kf_claims_job_id"),
        sa.ForeignKeyConstraint(["supersedes"], ["kf_claims.id"], name="fk_kf_claims_supersedes"),
        sa.UniqueConstraint("export_hash", "job_id", name="uq_kf_claims_export_hash_job_id"),
        sa.CheckConstraint("0 < score_us AND 0 < candidate_us", name=op.f("ck_kf_claims_timed")),
        sa.CheckConstraint(
            "ratio <= bound AND (held_out_ratio IS NULL OR held_out_ratio <= bound)",
            name=op.f("ck_kf_claims_within"),
        ),
    )
    op.create_index("ix_kf_claims_operation", "kf_claims", ["operation"])
    op.create_index("ix_kf_claims_export_hash", "kf_claims", ["export_hash"])


def downgrade() -> None:
    op.drop_table("kf_claims")
