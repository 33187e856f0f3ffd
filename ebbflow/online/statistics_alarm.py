"""The alarm on what a stage's rollouts look like: it rings where a statistic of the images leaves that of the first step, by more
than a limit and what chance explains.

A policy that games its reward changes its images, and its velocity may stay near the base model's (``drift_alarm``).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping

import numpy as np

from ebbflow.evaluation.image_statistics import chance, effect_size
from ebbflow.stage import StageContext
from ebbflow.training.stage_loop import StageState


def watch_statistics(ctx: StageContext, state: StageState, statistics: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Compare a step's images with those of the stage's first step; the first time that a statistic rings becomes an alarm.

    Args:
        state: has the first step's means and standard deviations, and the alarms; updated in place.
        statistics: float64 [N] columns (``image_statistics``), NaN where a sample has no image.

    Returns:
        The mean of each statistic, ``statistic/<name>``, its effect size, ``statistic_shift/<name>``, and whether one rings.
    """
    known = {name: values[np.isfinite(values)] for name, values in statistics.items() if np.isfinite(values).any()}
    for name, values in known.items():
        state.first_statistics.setdefault(name, [float(values.mean()), float(values.std()), len(values)])
    shifts = {name: effect_size(values, *state.first_statistics[name][:2]) for name, values in known.items()}
    limit = math.inf if ctx.online.statistics_alarm is None else ctx.online.statistics_alarm
    by_chance = {name: chance(len(values), int(state.first_statistics[name][2])) for name, values in known.items()}
    ringing = [name for name, shift in shifts.items() if abs(shift) - by_chance[name] > limit]
    for name in ringing:
        if name not in state.statistic_alarms:
            state.statistic_alarms.append(name)
            _ring(ctx, state, name, float(known[name].mean()), shifts[name])
    metrics = {f"statistic/{name}": float(values.mean()) for name, values in known.items()}
    metrics |= {f"statistic_shift/{name}": shift for name, shift in shifts.items()}
    return metrics | {"alarm/statistics": float(bool(ringing))}


def _ring(ctx: StageContext, state: StageState, name: str, mean: float, shift: float) -> None:
    state.alarms.append(
        f"{name} of the images went from {state.first_statistics[name][0]:.3g} to {mean:.3g}, {shift:+.2g} standard deviations, "
        f"above statistics_alarm = {ctx.online.statistics_alarm:g}, in step {state.step}"
    )
    warnings.warn(
        f"{ctx.label}: {state.alarms[-1]}: images that change while the reward rises are how gamed rewards begin; look at "
        "the samples and the guardrails",
        stacklevel=3,
    )
