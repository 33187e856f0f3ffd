"""The hot loop of an online stage: rollout, score, advantages, update, with every model in memory.

One loop for every mode and every placement. Sync begins the rollouts of a step when it is that step's turn. One-step-off begins
those of the next step before it trains, with the weights that the step starts from. Async begins up to ``staleness`` steps early,
and each part of them is generated with the newest weights when a worker takes it.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from ebbflow.algorithms.advantages import AdvantageResult, PromptStatistics, compute_advantages
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import StageRecord
from ebbflow.data.sampling import prompt_batch
from ebbflow.online.ahead import Ahead, Step, lead, lesson_of
from ebbflow.online.gate import check_engine
from ebbflow.online.placement import InProcess, Placement
from ebbflow.online.pool import Desk
from ebbflow.online.roles import Generator, Trainer
from ebbflow.online.standing import Standing
from ebbflow.online.timeline import seconds_by_task
from ebbflow.online.under_way import read_under_way, write_under_way
from ebbflow.online.watch import Observer, validation_prompts
from ebbflow.online.work import Busy, Lesson, Trained
from ebbflow.rewards.combine import Scorer, ScoreTable, load_scorer, require_scored
from ebbflow.rollouts.engine import Diffusers
from ebbflow.rollouts.vllm_omni import VllmOmni
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.timing import Clock
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.limits import Preempted, Stop, StopConditions, handle_sigterm
from ebbflow.training.policy_io import open_model, open_policy, read_history
from ebbflow.training.policy_metadata import read_policy_metadata
from ebbflow.training.update import PolicyUpdater

if TYPE_CHECKING:
    from ebbflow.online.ray_actor import Folders

FIRST_RATIO = 1e-5
"""The first ratio of a policy gradient may be this far from 1 by rounding; a clip range is rarely below 1e-4."""


def train_online_folder(
    ctx: StageContext,
    base: Path,
    folder: Path,
    prompts: Path,
    trained: Path,
    recorder: MetricsRecorder,
    teacher: Path | None = None,
    actors: Folders | None = None,
    checkpoints: Checkpoints | None = None,
) -> StageRecord:
    """Run the stage on the policy of ``folder`` and leave the trained one at ``trained``.

    Args:
        actors: where workers under ``placement: ray`` find what they load; left out, at the same paths on every machine.
        checkpoints: those of an earlier attempt, from which the stage goes on, and of this one.

    Raises:
        Preempted: the machine is taken away; what was learnt so far is in the checkpoints.
    """
    validation, training = validation_prompts(ctx, prompts), read_prompts(prompts, "train")
    with handle_sigterm(), closing(_placement(ctx, base, folder, teacher, actors)) as placement:
        standing = Standing(read_history(ctx, read_policy_metadata(folder), folder))
        record = run_online_stage(ctx, placement, training, recorder, standing, validation, checkpoints)
        placement.write(trained, "save", record, standing.history)
    return record


def _placement(ctx: StageContext, base: Path, folder: Path, teacher: Path | None, actors: Folders | None) -> Placement:
    """The stage's workers, on the policy of ``folder``."""
    if ctx.online.placement == "ray":
        from ebbflow.online.ray_actor import Folders
        from ebbflow.online.ray_placement import RayPlacement

        return RayPlacement(ctx, actors or Folders.at(base, folder, teacher))
    policy, metadata = open_policy(ctx, open_model(ctx.recipe, base), folder, teacher)
    updater = PolicyUpdater(policy, ctx.online, metadata)
    guardrails = ctx.recipe.guardrails if ctx.online.validation else ()
    scorer, trainer = load_scorer(ctx.recipe.rewards, guardrails), Trainer(ctx, updater, metadata)
    if ctx.online.engine == "vllm_omni":
        return InProcess(trainer, Generator(VllmOmni(ctx, base)), scorer, shares=False)
    return in_process(ctx, updater, scorer, trainer)


def in_process(ctx: StageContext, updater: PolicyUpdater, scorer: Scorer, trainer: Trainer | None = None) -> InProcess:
    """Everything in this process: rollouts with the trainer's own weights, rewards in threads."""
    generator = Generator(Diffusers(ctx, updater.policy, updater.algorithm.generates))
    return InProcess(trainer or Trainer(ctx, updater), generator, scorer)


def run_online_stage(
    ctx: StageContext,
    placement: Placement,
    prompts: list[Prompt],
    recorder: MetricsRecorder,
    standing: Standing | None = None,
    validation: Sequence[Prompt] = (),
    checkpoints: Checkpoints | None = None,
) -> StageRecord:
    """Train the placement's policy for the stage's number of steps.

    Args:
        prompts: the training split.
        recorder: gets the metrics of every step and its number, from zero, and what the stage shows of itself beside.
        standing: where the stage begins; updated in place.
        validation: prompts that the policy is watched on, where the stage says how often.
        checkpoints: those of an earlier attempt, from which the stage goes on, and of this one.

    Raises:
        Preempted: the machine is taken away; what was learnt so far is in the checkpoints.
    """
    config, clock, standing = ctx.online, Clock(), standing or Standing()
    newest = checkpoints.newest() if checkpoints else None
    if newest:
        _resume(placement, standing, recorder, *newest)
    with clock.phase("encoding"):
        embeddings = placement.encode(_all_prompts(ctx, prompts))
        # Apart: prompts are padded to the longest of those encoded together, and what is only watched must not be felt.
        watched = placement.encode(validation) if validation else None
    first, before = standing.step, standing.seconds
    ahead = Ahead(ctx, placement, prompts, embeddings, first)
    if newest:
        read_under_way(newest[0], ahead)
    stop_conditions = StopConditions(config, _gpus(ctx), standing.elapsed, lead(config))
    progress = tqdm(range(first, config.steps), f"{ctx.label} {config.algorithm_name}", unit="step", disable=None)
    with handle_sigterm(), Observer(ctx, placement, ahead, recorder, validation, watched) as watch:
        for number in progress:
            start = time.time()
            pushed = _push(placement, ahead, number) | check_engine(ctx, placement, ahead, number, first)
            start += watch.validate(number)  # no time of the step
            if checkpoints and number > 0 and checkpoints.due(number) and (number > first or watch.score is not None):
                start += _keep(checkpoints, ahead, standing, recorder, watch.score)  # what was just loaded, only with a new score
            metrics = _step(ctx, placement, ahead, watch, standing, number, start)
            recorder.log_metrics(metrics | pushed, number)
            progress.set_postfix(reward=f"{metrics.get('reward/mean', float('nan')):.3f}")
            standing.elapsed, standing.seconds = stop_conditions.elapsed, _sum(before, clock.seconds, watch.timeline.seconds)
            if _ends_early(stop_conditions, checkpoints, ahead, standing, recorder):
                break
        if watch.validates(standing.step, last=True):
            _push(placement, ahead, standing.step)
            watch.validate(standing.step, last=True)
    if checkpoints and config.validation and config.validation.best:
        _go_back_to_best(placement, checkpoints, recorder, standing, watch.score)
    return StageRecord(
        label=ctx.label,
        algorithm=config.algorithm_name,
        samples=standing.samples,
        optimizer_steps=standing.updates,
        seconds=_sum(before, clock.seconds, watch.timeline.seconds),
        alarms=[*standing.training_alarms, *standing.alarms],
    )


def _resume(placement: Placement, standing: Standing, recorder: MetricsRecorder, checkpoint: Path, state: dict[str, Any]) -> None:
    """Put all of them where a checkpoint stands."""
    placement.restore(checkpoint)
    standing.take_over(state["standing"])
    recorder.resume(state["rows"])


def _keep(
    checkpoints: Checkpoints, ahead: Ahead, standing: Standing, recorder: MetricsRecorder, score: float | None = None
) -> float:
    """Save a checkpoint of the stage; seconds that it took. ``score``: of a validation of the policy as it is."""
    start = time.time()

    def write(folder: Path) -> None:
        write_under_way(folder, ahead)
        ahead.placement.checkpoint(folder)

    checkpoints.save(standing.step, write, {"standing": standing.state(), "rows": recorder.metrics}, score)
    return time.time() - start


def _ends_early(
    stop_conditions: StopConditions, checkpoints: Checkpoints | None, ahead: Ahead, standing: Standing, recorder: MetricsRecorder
) -> bool:
    """Whether the budget is spent, which becomes an alarm; when the machine goes, it saves and raises ``Preempted``."""
    stop, label, steps = stop_conditions.after_step(), ahead.ctx.label, ahead.ctx.online.steps
    if stop is Stop.LEAVE:
        if checkpoints:
            _keep(checkpoints, ahead, standing, recorder)
        raise Preempted(stop_conditions.preemption_message(label, standing.step, steps, saved=checkpoints is not None))
    if stop is Stop.NO or standing.step == steps:
        return False
    standing.alarms.append(stop_conditions.budget_message(standing.step, steps))
    return True


def _go_back_to_best(
    placement: Placement, checkpoints: Checkpoints, recorder: MetricsRecorder, standing: Standing, score: float | None
) -> None:
    """End with the policy that was validated best, and what was known then, unless the last one, with ``score``, is as good."""
    best, found = checkpoints.best(), standing.step
    if best and (score is None or best.score > score):
        placement.restore(best.folder)
        known = Standing()
        known.take_over(checkpoints.state(best.folder)["standing"])
        standing.history, found = known.history, best.step
    recorder.log_metrics({"validation/best_step": found}, standing.step)


def _gpus(ctx: StageContext) -> float:
    """Of all workers of the stage."""
    if ctx.online.placement == "ray":
        return sum(workers.count * workers.gpus for _, workers in ctx.online.resources)
    return float(torch.cuda.is_available())


def _step(
    ctx: StageContext, placement: Placement, ahead: Ahead, watch: Observer, standing: Standing, number: int, start: float
) -> dict[str, float]:
    """The metrics of one step, which began at ``start``: rollouts and rewards, advantages, updates."""
    ahead.fill(at_least=1)
    step = ahead.take(number)
    ahead.fill()
    scores = step.scores
    require_scored(scores, ctx.recipe.max_failed_share)
    advantages = _advantages(ctx, placement.reward_weights, step, standing.history)
    lesson = lesson_of(step, advantages.values, advantages.keep, ctx.online.traces("training", step.step))
    trained = _train(placement, ahead.desk, lesson, step)
    end = time.time()
    metrics = advantages.metrics | _means(scores) | trained.metrics | {"updates": trained.updates}
    metrics |= _freshness(step, number) | {"workers/replaced": ahead.replaced}
    metrics |= _speed([*step.busy, *trained.busy], len(scores.reward), end - start)
    metrics |= watch.after(number, step, advantages.values, trained.busy, start, end)
    standing.step, standing.samples = number + 1, standing.samples + len(scores.reward)
    standing.updates, standing.training_alarms = trained.updates, trained.alarms
    standing.alarms += _first_ratio(ctx, metrics) if number == 0 else []
    return metrics


def _sum(*spent: Mapping[str, float]) -> dict[str, float]:
    """Seconds by what they were spent on."""
    return {name: sum(part.get(name, 0.0) for part in spent) for name in dict.fromkeys(name for part in spent for name in part)}


def _all_prompts(ctx: StageContext, prompts: list[Prompt]) -> Iterator[Prompt]:
    for step in range(ctx.online.steps):
        yield from prompt_batch(prompts, ctx.online.prompts_per_step, step, ctx.seed)


def _push(placement: Placement, ahead: Ahead, version: int) -> dict[str, float]:
    """Let new rollouts be generated with the weights as they are; what that took."""
    start = time.perf_counter()
    ahead.newest = placement.publish(version)
    return {"push/bytes": ahead.newest.size, "push/seconds": time.perf_counter() - start}


def _advantages(ctx: StageContext, weights: dict[str, float], step: Step, history: PromptStatistics) -> AdvantageResult:
    scores, prompt_ids = step.scores.metrics, [prompt.prompt_id for prompt in step.prompts]
    rewards = {name: scores[name] for name in weights}
    return compute_advantages(rewards, weights, np.array(prompt_ids), ctx.config.advantages, history)


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


def _speed(busy: list[Busy], images: int, seconds: float) -> dict[str, float]:
    """Seconds and milliseconds per image of each phase of a step, and of the step itself, in which phases may overlap."""
    spent = seconds_by_task(busy) | {"step": seconds}
    metrics = {f"seconds/{phase}": value for phase, value in spent.items()}
    metrics |= {f"ms_per_image/{phase}": 1000 * value / images for phase, value in spent.items()}
    return metrics | {"images_per_second": images / seconds}


def _first_ratio(ctx: StageContext, metrics: dict[str, float]) -> list[str]:
    """An alarm where rollouts and training see different micro-batches and their arithmetic differs for it."""
    off = metrics.get("ratio/first_deviation", 0.0)
    if off <= FIRST_RATIO or ctx.config.correction or ctx.config.rollout_precision or ctx.online.engine != "diffusers":
        return []
    alarm = (
        f"the first ratio is off 1 by {off:.2g}: rollouts and training see micro-batches of different sizes; "
        "choose a micro_batch that divides the samples of a step and of an update"
    )
    warnings.warn(alarm, stacklevel=3)
    return [alarm]
