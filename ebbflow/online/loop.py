"""The hot loop of an online stage: rollout, score, advantages, update, with every model in memory.

One loop for every mode and every placement. Sync begins the rollouts of a step when it is that step's turn. One-step-off begins
those of the next step before it trains, with the weights that the step starts from. Async begins up to ``staleness`` steps early,
and each part of them is generated with the newest weights when a worker takes it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
from tqdm import tqdm

from ebbflow.algorithms.advantages import AdvantageResult, PromptStatistics, compute_advantages
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.sampling import prompt_batch
from ebbflow.online.ahead import Ahead, Step, lesson_of
from ebbflow.online.placement import InProcess, Placement
from ebbflow.online.pool import Desk
from ebbflow.online.roles import Generator, Trainer
from ebbflow.online.work import Busy, Lesson, Trained
from ebbflow.records import StageRecord
from ebbflow.rewards.combine import Scorer, ScoreTable, load_scorer, require_scored
from ebbflow.rollouts.engine import Diffusers
from ebbflow.stage import Log, Place, open_model, open_policy, read_history
from ebbflow.timing import Clock
from ebbflow.training.update import Learner

FIRST_RATIO = 1e-5
"""The first ratio of a policy gradient may be this far from 1 by rounding; a clip range is rarely below 1e-4."""


def train_online_folder(
    place: Place, base: Path, folder: Path, prompts: Path, trained: Path, log: Log, teacher: Path | None = None
) -> StageRecord:
    """Run the stage on the policy of ``folder`` and leave the trained one at ``trained``."""
    policy, card = open_policy(place, open_model(place.recipe, base), folder, teacher)
    learner, history = Learner(policy, place.online, card), read_history(place, card, folder)
    placement = in_process(place, learner, load_scorer(place.recipe.rewards.terms, ()), Trainer(place, learner, card))
    record = run_online_stage(place, placement, read_prompts(prompts, "train"), log, history)
    placement.save(trained, record, history)
    return record


def in_process(place: Place, learner: Learner, scorer: Scorer, trainer: Trainer | None = None) -> InProcess:
    """Everything in this process: rollouts with the trainer's own weights, rewards in threads."""
    generator = Generator(Diffusers(place, learner.policy, learner.algorithm.generates))
    return InProcess(trainer or Trainer(place, learner), generator, scorer)


def run_online_stage(
    place: Place, placement: Placement, prompts: list[Prompt], log: Log, history: PromptStatistics | None = None
) -> StageRecord:
    """Train the placement's policy for the stage's number of steps.

    Args:
        prompts: the training split.
        log: called with the metrics of every step and its number, from zero.
        history: the rewards of each prompt so far, where ``advantages.running`` wants them; updated in place.
    """
    config, clock = place.online, Clock()
    history = PromptStatistics() if history is None else history
    with clock.phase("encoding"):
        embeddings = placement.encode(_all_prompts(place, prompts))
    ahead = Ahead(place, placement, prompts, embeddings)
    trained, timeline, samples, alarms = Trained({}, 0, [], []), [], 0, []
    progress = tqdm(range(config.steps), desc=f"{place.label} {config.algorithm_name}", unit="step", disable=None)
    for number in progress:
        start = time.perf_counter()
        pushed = _push(placement, ahead, number)
        ahead.fill(at_least=1)
        step = ahead.take(number)
        ahead.fill()
        scores = step.scores
        require_scored(scores, place.recipe.rewards.max_failed_share)
        advantages = _advantages(place, placement.weights, step, history)
        trained = _train(placement, ahead.desk, lesson_of(step, advantages.values, advantages.keep), step)
        busy = [*step.busy, *trained.busy]
        timeline += busy
        samples += len(scores.reward)
        metrics = advantages.metrics | _means(scores) | trained.metrics | {"updates": trained.updates}
        metrics |= pushed | _freshness(step, number) | {"workers/replaced": ahead.replaced}
        metrics |= _speed(busy, len(scores.reward), time.perf_counter() - start)
        log(metrics, number)
        alarms += _first_ratio(place, metrics) if number == 0 else []
        progress.set_postfix(reward=f"{metrics.get('reward/mean', float('nan')):.3f}")
    return StageRecord(
        label=place.label,
        algorithm=config.algorithm_name,
        samples=samples,
        optimizer_steps=trained.updates,
        seconds={**clock.seconds, **_seconds(timeline)},
        alarms=[*trained.alarms, *alarms],
    )


def _all_prompts(place: Place, prompts: list[Prompt]) -> Iterator[Prompt]:
    for step in range(place.online.steps):
        yield from prompt_batch(prompts, place.online.prompts_per_step, step, place.seed)


def _push(placement: Placement, ahead: Ahead, version: int) -> dict[str, float]:
    """Let new rollouts be generated with the weights as they are; what that took."""
    start = time.perf_counter()
    ahead.newest = placement.publish(version)
    return {"push/bytes": ahead.newest.size, "push/seconds": time.perf_counter() - start}


def _advantages(place: Place, weights: dict[str, float], step: Step, history: PromptStatistics) -> AdvantageResult:
    scores, prompt_ids = step.scores.metrics, [prompt.prompt_id for prompt in step.prompts]
    rewards = {name: scores[name] for name in weights}
    return compute_advantages(rewards, weights, np.array(prompt_ids), place.config.advantages, history)


def _train(placement: Placement, desk: Desk, lesson: Lesson, step: Step) -> Trained:
    """The updates of a step, on all ranks, while rollouts and rewards go on."""
    rollouts = [harvest.rollouts for harvest in step.rows]
    calls = [rank.start("train", lesson, *rollouts) for rank in placement.training]
    desk.until_ended(calls)
    told: list[Trained] = [placement.report(call) for call in calls]
    return replace(told[0], busy=[busy for one in told for busy in one.busy])


def _freshness(step: Step, version: int) -> dict[str, float]:
    """How old the samples are, in training steps, how many were too old, and what it took to bring the weights to them."""
    ages = step.staleness(version)
    received = max(harvest.generated.received for harvest in step.rows)
    return {
        "staleness/mean": fmean(ages),
        "staleness/max": max(ages),
        "staleness/dropped_samples": step.dropped,
        "push/receive_seconds": received,
    }


def _means(scores: ScoreTable) -> dict[str, float]:
    return {f"score/{name}": float(np.nanmean(values)) for name, values in scores.metrics.items() if np.isfinite(values).any()}


def _seconds(timeline: list[Busy]) -> dict[str, float]:
    """Seconds that the workers were busy, by what with."""
    names = dict.fromkeys(busy.task for busy in timeline)
    return {name: sum(busy.seconds for busy in timeline if busy.task == name) for name in names}


def _speed(busy: list[Busy], images: int, seconds: float) -> dict[str, float]:
    """Seconds and milliseconds per image of each phase of a step, and of the step itself, in which phases may overlap."""
    spent = _seconds(busy) | {"step": seconds}
    metrics = {f"seconds/{phase}": value for phase, value in spent.items()}
    metrics |= {f"ms_per_image/{phase}": 1000 * value / images for phase, value in spent.items()}
    return metrics | {"images_per_second": images / seconds}


def _first_ratio(place: Place, metrics: dict[str, float]) -> list[str]:
    """An alarm where rollouts and training see different micro-batches and their arithmetic differs for it."""
    off = metrics.get("ratio/first_deviation", 0.0)
    if off <= FIRST_RATIO or place.config.correction or place.config.rollout_precision or place.online.engine != "diffusers":
        return []
    alarm = (
        f"the first ratio is off 1 by {off:.2g}: rollouts and training see micro-batches of different sizes; "
        "choose a micro_batch that divides the samples of a step and of an update"
    )
    warnings.warn(alarm, stacklevel=3)
    return [alarm]
