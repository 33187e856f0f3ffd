"""The alarms on a stage's first update, before any weight has moved: its ratio should be 1, no term
should be clipped, and rollouts of another policy should be corrected.

Where the log-probs of rollouts and training differ by N(0, s^2), a clip range e leaves the share
Q(e / s) of the terms without a gradient from the start (Q: the upper tail of N(0, 1)): 31 % for s =
2e-4 and e = 1e-4. So no tolerance holds for all clip ranges.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from ebbflow.recipe.correction_rules import lacks_correction
from ebbflow.recipe.model import Precision
from ebbflow.recipe.stages import OnlineStageConfig

MAX_DEVIATION = 0.1
"""Of the mean |ratio - 1|, as a share of the clip range: then e / s = 8, and rounding leaves no
term without a gradient.
"""
MAX_UNCLIPPED_DEVIATION = 1e-5
"""The same where nothing is clipped: rounding alone stays below."""
MAX_DEAD_SHARE = 0.01
"""Of the terms that are clipped before any weight has moved."""


def find_first_update_alarms(
    stage: OnlineStageConfig, precision: Precision, metrics: Mapping[str, float], dims: int
) -> list[str]:
    """What is wrong with a first update, a line each; every line is a warning, too.

    Args:
        precision: of the network in training.
        metrics: ``ratio/first_deviation`` and ``ratio/first_dead_share``, where the algorithm has
            them.
        dims: D, the elements of a latent.
    """
    alarms = []
    # Losses without a ratio report neither; then only the last alarm can go off.
    deviation = metrics.get("ratio/first_deviation", 0.0)
    dead = metrics.get("ratio/first_dead_share", 0.0)
    clip_range = stage.hyper_parameters.ratio_range(dims)
    # With one of these a ratio off 1 is expected, or is what the correction is for.
    known = stage.correction or stage.rollout_precision or stage.engine != "diffusers"
    if not known and deviation > (
        MAX_DEVIATION * clip_range if clip_range else MAX_UNCLIPPED_DEVIATION
    ):
        alarms.append(
            f"the first ratio is off 1 by {deviation:.2g}: rollouts and training see micro-batches"
            " of different sizes; choose a micro_batch that divides the samples of a step and of"
            " an update"
        )
    if dead > MAX_DEAD_SHARE:
        alarms.append(
            f"{100 * dead:.1f} % of the terms of the first update have no gradient: before any"
            " weight has moved, their ratio is outside the clip range (|ratio - 1| ="
            f" {deviation:.2g} on average); set correction: {{mode: decoupled}}, generate in the"
            " precision and with the engine of training, or raise algorithm.clip_range (of"
            " flow_dppo divergence_limit)"
        )
    if lacks_correction(stage, precision):
        alarms.append(
            "the rollouts are of another policy or precision than training, and nothing"
            " corrects them: a ratio of mean log-probs is the true one to the power 1 / D. Set"
            " correction: {mode: decoupled, level: trajectory}, or, to train on them as they are,"
            " correction: {mode: bypass}"
        )
    for alarm in alarms:
        warnings.warn(alarm, stacklevel=3)
    return alarms
