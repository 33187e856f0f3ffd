"""The alarm on what a stage's rollouts look like: it rings where a statistic of the images leaves
that of the first step, by more than a limit and what chance explains.

A policy that games its reward changes its images, and its velocity may stay near the base model's
(``drift_alarm``).
"""

from __future__ import annotations

import math
import warnings
from typing import NamedTuple

import numpy as np

from ebbflow.evaluation.image_statistics import compute_effect_size
from ebbflow.online.messages import RolloutBatch
from ebbflow.stage import StageContext
from ebbflow.training.stage_loop import StageState


def watch_statistics(ctx: StageContext, state: StageState, batch: RolloutBatch) -> dict[str, float]:
    """Compare a step's images with those of the stage's first step; the first time that a statistic
    rings becomes an alarm.

    Where steps have several sizes, a step is compared with the first one of its size.

    Args:
        state: has what the first steps looked like, and the alarms; updated in place.

    Returns:
        The mean of each statistic, ``statistic/<name>``, its effect size,
        ``statistic_shift/<name>``, and whether one rings.
    """
    size = "x".join(map(str, batch.size or ()))
    first_statistics = state.first_statistics.setdefault(size, {})
    # Samples that are not finite have no statistics; a statistic without any sample is left out.
    finite_rows = {
        name: np.isfinite(values)
        for name, values in batch.statistics.items()
        if np.isfinite(values).any()
    }
    current = {
        name: _summarize_statistic(batch.statistics[name][finite], batch.prompt_ids[finite])
        for name, finite in finite_rows.items()
    }
    # The first step that has a statistic is what later ones are compared with. It is kept as a
    # list, because the state goes into checkpoints as JSON.
    for name, statistic in current.items():
        first_statistics.setdefault(name, list(statistic))
    first = {name: _Statistic(*first_statistics[name]) for name in current}
    shifts = {
        name: compute_effect_size(
            batch.statistics[name][finite], first[name].mean, first[name].spread
        )
        for name, finite in finite_rows.items()
    }
    # Without an alarm the shifts are logged all the same.
    limit = ctx.online_config.statistics_alarm
    if limit is None:
        limit = math.inf
    ringing = [
        name
        for name, shift in shifts.items()
        if abs(shift) > limit + _compute_chance_shift(current[name], first[name])
    ]
    for name in ringing:
        if name not in state.statistic_alarms:
            state.statistic_alarms.append(name)
            _add_alarm(ctx, state, name, first[name].mean, current[name].mean, shifts[name])
    metrics = {f"statistic/{name}": statistic.mean for name, statistic in current.items()}
    metrics |= {f"statistic_shift/{name}": shift for name, shift in shifts.items()}
    return metrics | {"alarm/statistics": float(bool(ringing))}


class _Statistic(NamedTuple):
    """A statistic of the images of a step.

    Attributes:
        mean, spread: over its samples, mean and standard deviation.
        prompts: how many there are.
        squares: sum of the squared differences of their means from the mean of these.
    """

    mean: float
    spread: float
    prompts: float
    squares: float


def _summarize_statistic(values: np.ndarray, prompt_ids: np.ndarray) -> _Statistic:
    _, prompt_of_sample = np.unique(prompt_ids, return_inverse=True)  # [N]
    means = np.bincount(prompt_of_sample, values) / np.bincount(prompt_of_sample)  # [prompts]
    return _Statistic(
        float(values.mean()),
        float(values.std()),
        len(means),
        float(((means - means.mean()) ** 2).sum()),
    )


def _compute_chance_shift(current: _Statistic, first: _Statistic) -> float:
    """Effect size that chance rarely exceeds: that of two pooled standard errors of the difference
    of two means.

    The samples of a prompt are alike, all the more if they start from one noise: the means of
    prompts are what is independent. Of few prompts two becomes the quantile of Student's t, by
    Wallace's approximation (Annals of Mathematical Statistics 30, 1959).
    """
    freedom = current.prompts + first.prompts - 2
    # One prompt in each step says nothing of how prompts differ: chance may explain all.
    if freedom < 1:
        return math.inf
    if not first.spread:
        return 0.0
    variance = (current.squares + first.squares) / freedom
    quantile = math.sqrt(
        freedom * math.expm1((2 * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom)
    )
    return quantile * math.sqrt(variance * (1 / current.prompts + 1 / first.prompts)) / first.spread


def _add_alarm(
    ctx: StageContext, state: StageState, name: str, first: float, mean: float, shift: float
) -> None:
    state.alarms.append(
        f"{name} of the images went from {first:.3g} to {mean:.3g}, {shift:+.2g} standard"
        f" deviations, above statistics_alarm = {ctx.online_config.statistics_alarm:g}, in step"
        f" {state.step}"
    )
    warnings.warn(
        f"{ctx.stage_label}: {state.alarms[-1]}: images that change while the reward rises are how"
        " gamed rewards begin; look at the samples and the guardrails",
        stacklevel=3,
    )
