"""What is kept of earlier runs."""

from __future__ import annotations

from pydantic import Field

from ebbflow.recipe.base import Strict


class RetentionConfig(Strict):
    """What is kept of earlier runs; each run as it starts, and ``ebbflow clean``, delete the rest.
    The champion, its predecessor, the anchor and their runs are always kept."""

    keep_runs: int | None = Field(None, ge=1)
    """Number of finished runs of the recipe in a local ``output`` that keep all their files. Older
    ones keep their report, their summary and their resolved recipe. Default: all."""
    keep_rejected_days: float | None = Field(None, ge=0)
    """Days after which a registered version that was never champion loses its weights; its evidence
    and its tags stay. Default: never."""
