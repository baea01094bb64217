"""When a campaign has had its share: of trials, of GPU minutes, or of trials without a new best.

What is under way when a limit is met is finished, so a campaign may go a little over it.
"""

from __future__ import annotations

from factory.config import CampaignConfig
from factory.tally import Tally

__all__ = ["used_up"]


def used_up(config: CampaignConfig, tally: Tally) -> str | None:
    """The limit that stops new trials, in words; None while there is none.

    Parameters
    ----------
    config : CampaignConfig
    tally : Tally
        Of all launches of the campaign.

    Returns
    -------
    str or None
        Names what is used up and the option that raises it.
    """
    if tally.finished >= tally.target:
        return f"its {tally.target} trials are used up (--budget)"
    if config.gpu_minutes and tally.gpu_s >= 60 * config.gpu_minutes:
        return f"{tally.gpu_s / 60:.1f} of {config.gpu_minutes:g} GPU minutes are used up \
(--gpu-minutes)"
    if config.patience and tally.stale >= config.patience:
        return f"{tally.stale} trials in a row brought no new best (--patience)"
    return None
