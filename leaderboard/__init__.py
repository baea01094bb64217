"""What campaigns saw: records, one writer, queries by the rules of comparison.

The leaderboard is the only truth about a campaign.  It imports nothing of
``operations``, ``candidates`` or ``factory``, and neither torch nor CUDA.

Names load on first use: whoever needs only :mod:`leaderboard.records` loads no
database.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from leaderboard._errors import (
        AbsentError,
        HeldError,
        OlderError,
        QueryError,
        StoreError,
        TransferError,
        UnknownError,
        UnreachableError,
    )
    from leaderboard._lease import LEASE_SECONDS, driver_name, is_held
    from leaderboard._query import Results, query
    from leaderboard._query_shapes import query_shapes
    from leaderboard._scores import interval
    from leaderboard._verdicts import Contrast, Verdict, compare_samples, contrast, in_groups
    from leaderboard.queries import (
        best_so_far,
        claim_of,
        claims,
        compare,
        control_spans,
        finals,
        funnel,
        named_times,
        ranked,
        ratio,
        rejected,
        shapes,
        trial_errors,
        trial_seconds,
        unranked,
        winner,
        worst_errors,
    )
    from leaderboard.records import (
        CampaignRecord,
        CampaignStatus,
        ClaimRecord,
        Clock,
        ErrorRecord,
        FingerprintRecord,
        JobRecord,
        JobStatus,
        MeasurementRecord,
        StageRecord,
        StageStatus,
        TrialRecord,
        TrialStatus,
    )
    from leaderboard.shipped import open_for_reading, shipped_store
    from leaderboard.store import DEFAULT_URL, Store, open_store
    from leaderboard.transfer import (
        ImportResult,
        export_file,
        export_lines,
        import_file,
        import_lines,
    )
    from leaderboard.views import (
        BestPoint,
        ClaimView,
        Comparison,
        ControlSpan,
        ControlTime,
        FinalRow,
        Funnel,
        LeaderboardRow,
        NamedTime,
        Ratio,
        RejectedRow,
        ResultRow,
        ShapeRatio,
        ShapeResult,
        ShapeRow,
        StageCount,
        TrialError,
        UnrankedRow,
        WorstError,
    )

__all__ = [
    "DEFAULT_URL",
    "LEASE_SECONDS",
    "AbsentError",
    "BestPoint",
    "CampaignRecord",
    "CampaignStatus",
    "ClaimRecord",
    "ClaimView",
    "Clock",
    "Comparison",
    "Contrast",
    "ControlSpan",
    "ControlTime",
    "ErrorRecord",
    "FinalRow",
    "FingerprintRecord",
    "Funnel",
    "HeldError",
    "ImportResult",
    "JobRecord",
    "JobStatus",
    "LeaderboardRow",
    "MeasurementRecord",
    "NamedTime",
    "OlderError",
    "QueryError",
    "Ratio",
    "RejectedRow",
    "ResultRow",
    "Results",
    "ShapeRatio",
    "ShapeResult",
    "ShapeRow",
    "StageCount",
    "StageRecord",
    "StageStatus",
    "Store",
    "StoreError",
    "TransferError",
    "TrialError",
    "TrialRecord",
    "TrialStatus",
    "UnknownError",
    "UnrankedRow",
    "UnreachableError",
    "Verdict",
    "WorstError",
    "best_so_far",
    "claim_of",
    "claims",
    "compare",
    "compare_samples",
    "contrast",
    "control_spans",
    "driver_name",
    "export_file",
    "export_lines",
    "finals",
    "funnel",
    "import_file",
    "import_lines",
    "in_groups",
    "interval",
    "is_held",
    "named_times",
    "open_for_reading",
    "open_store",
    "query",
    "query_shapes",
    "ranked",
    "ratio",
    "rejected",
    "shapes",
    "shipped_store",
    "trial_errors",
    "trial_seconds",
    "unranked",
    "winner",
    "worst_errors",
]

_HOMES = {
    "leaderboard._errors": (
        "AbsentError",
        "OlderError",
        "HeldError",
        "QueryError",
        "StoreError",
        "TransferError",
        "UnknownError",
        "UnreachableError",
    ),
    "leaderboard._scores": ("interval",),
    "leaderboard._verdicts": (
        "Contrast",
        "Verdict",
        "compare_samples",
        "contrast",
        "in_groups",
    ),
    "leaderboard._query": ("Results", "query"),
    "leaderboard._query_shapes": ("query_shapes",),
    "leaderboard._lease": ("LEASE_SECONDS", "driver_name", "is_held"),
    "leaderboard.queries": (
        "best_so_far",
        "claim_of",
        "claims",
        "compare",
        "control_spans",
        "finals",
        "funnel",
        "named_times",
        "ranked",
        "ratio",
        "rejected",
        "shapes",
        "trial_errors",
        "trial_seconds",
        "unranked",
        "winner",
        "worst_errors",
    ),
    "leaderboard.shipped": ("open_for_reading", "shipped_store"),
    "leaderboard.store": ("DEFAULT_URL", "Store", "open_store"),
    "leaderboard.transfer": (
        "ImportResult",
        "export_file",
        "export_lines",
        "import_file",
        "import_lines",
    ),
    "leaderboard.views": (
        "BestPoint",
        "ClaimView",
        "Comparison",
        "ControlSpan",
        "ControlTime",
        "FinalRow",
        "Funnel",
        "LeaderboardRow",
        "NamedTime",
        "Ratio",
        "RejectedRow",
        "ResultRow",
        "ShapeRatio",
        "ShapeResult",
        "ShapeRow",
        "StageCount",
        "TrialError",
        "UnrankedRow",
        "WorstError",
    ),
    "leaderboard.records": (
        "CampaignRecord",
        "CampaignStatus",
        "ClaimRecord",
        "Clock",
        "ErrorRecord",
        "FingerprintRecord",
        "JobRecord",
        "JobStatus",
        "MeasurementRecord",
        "StageRecord",
        "StageStatus",
        "TrialRecord",
        "TrialStatus",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
