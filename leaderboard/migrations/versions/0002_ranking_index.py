"""An index from which a ranking is read without looking at every trial."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COLUMNS = (
    "status",
    "campaign_id",
    "job_id",
    "clock",
    "method",
    "cache",
    "source_hash",
    "score_us",
    "id",
)


def upgrade() -> None:
    op.create_index("ix_kf_trials_ranking", "kf_trials", list(_COLUMNS))


def downgrade() -> None:
    op.drop_index("ix_kf_trials_ranking", "kf_trials")
