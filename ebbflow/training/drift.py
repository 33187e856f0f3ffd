"""How often training measures how far the policy has drifted from the base model.

Measuring costs a forward pass of the base model at the rows that are watched. No torch is imported
here, because an estimate of a stage's work counts these passes, too.
"""

from __future__ import annotations

WATCHED_ROWS = 17
"""Every so many rows are compared with the base model where nothing else does. It is prime: every
noise level has its turn.
"""
WATCHED_FIRST = 8
WATCHED_EVERY = 4
"""So many updates of a stage are watched one by one, then every so many: on a small network another
pass is felt.
"""


def choose_drift_stride(updates: int, passes: int) -> int | None:
    """Choose every how many rows of an update, which follows ``updates`` others, the drift is
    measured; None: at none of them.

    They are few enough for one pass, where the rows take ``passes``.
    """
    watched = updates < WATCHED_FIRST or updates % WATCHED_EVERY == 0
    # At least every ``passes``-th row, so that the watched ones fit into one pass. Odd, because an
    # even stride would never meet every other one of an even number of noise levels.
    return max(WATCHED_ROWS, passes | 1) if watched else None
