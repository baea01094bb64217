"""Views for those who write SQL; docs/leaderboard.md describes their columns.

The same text serves SQLite and PostgreSQL: standard joins, window functions and CASE only.
"""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_VIEWS = {
    # One row for each trial, whatever became of it.
    "kf_view_trials": """
        SELECT t.id, t.uid, c.operation, c.operation_version, c.family, c.id AS campaign_id,
               c.name AS campaign, t.number, t.attempt, t.schedule_key, t.status, t.stage,
               t.reason, t.clock, t.score_us, t.slow_us, t.method, t.cache, t.job_id,
               CASE WHEN t.clock = 'modelled' THEN NULL ELSE j.gpu END AS gpu,
               j.status AS job_status, t.source_hash, t.started_at, t.ended_at
        FROM kf_trials t
        JOIN kf_campaigns c ON c.id = t.campaign_id
        LEFT JOIN kf_jobs j ON j.id = t.job_id
    """,
    # Passed trials that count, ranked within their job (modelled ones within their campaign).
    "kf_view_ranking": """
        SELECT v.id, v.operation, v.operation_version, v.campaign_id, v.campaign, v.job_id, v.gpu,
               v.clock, v.method, v.cache, v.schedule_key, v.score_us, v.slow_us,
               ROW_NUMBER() OVER (
                   PARTITION BY v.campaign_id, v.clock, v.method, v.cache,
                                CASE WHEN v.clock = 'modelled' THEN '' ELSE v.job_id END
                   ORDER BY v.score_us, v.id
               ) AS job_rank
        FROM kf_view_trials v
        WHERE v.status = 'passed' AND (v.clock = 'modelled' OR v.job_status = 'valid')
    """,
    # Each control of a job on each workload, over its readings of the search.
    "kf_view_controls": """
        SELECT m.job_id, j.gpu, j.status AS job_status, m.control, m.input_form, m.workload,
               m.regime, m.clock, m.method, m.cache, AVG(m.median_us) AS us,
               MIN(m.low_us) AS low_us, MAX(m.high_us) AS high_us, COUNT(*) AS readings
        FROM kf_measurements m
        JOIN kf_jobs j ON j.id = m.job_id
        WHERE m.control IS NOT NULL AND m.phase <> 'final'
        GROUP BY m.job_id, j.gpu, j.status, m.control, m.input_form, m.workload, m.regime,
                 m.clock, m.method, m.cache
    """,
    # Each time of a passed trial's search; of several readings of one cell the last.
    "kf_view_times": """
        SELECT m.trial_id, m.job_id, j.gpu, j.status AS job_status, m.workload, m.regime, m.clock,
               m.method, m.cache, m.median_us AS us, m.low_us, m.high_us
        FROM kf_measurements m
        JOIN kf_jobs j ON j.id = m.job_id
        WHERE m.id IN (
            SELECT MAX(n.id) FROM kf_measurements n
            JOIN kf_trials t ON t.id = n.trial_id AND t.status = 'passed' AND t.job_id = n.job_id
            WHERE n.phase = 'search' AND NOT n.held_out
            GROUP BY n.trial_id, n.workload, n.regime, n.clock, n.method, n.cache
        )
    """,
    # Those times beside every control of the same job: no ratio ever leaves a job.
    "kf_view_shapes": """
        SELECT t.trial_id, t.job_id, t.gpu, t.job_status, t.workload, t.regime, t.clock, t.method,
               t.cache, t.us, c.control, c.input_form, c.us AS control_us, t.us / c.us AS ratio,
               CASE WHEN t.us > c.us THEN 1 ELSE 0 END AS lost
        FROM kf_view_times t
        JOIN kf_view_controls c
          ON c.job_id = t.job_id AND c.workload = t.workload AND c.regime = t.regime
         AND c.clock = t.clock AND c.method = t.method AND c.cache = t.cache
    """,
    # Finished trials that did not pass, and why.
    "kf_view_failures": """
        SELECT v.id, v.operation, v.campaign_id, v.campaign, v.number, v.schedule_key, v.status,
               v.stage, v.reason
        FROM kf_view_trials v
        WHERE v.status IN ('rejected', 'infeasible', 'crashed', 'timeout', 'slow')
    """,
}


def upgrade() -> None:
    for name, query in _VIEWS.items():
        op.execute(f"CREATE VIEW {name} AS {query}")


def downgrade() -> None:
    for name in reversed(_VIEWS):
        op.execute(f"DROP VIEW {name}")
