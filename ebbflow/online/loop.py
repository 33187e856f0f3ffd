"""The hot loop of an online stage: rollout, score, advantages, update, with every model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ebbflow.algorithms.advantages import AdvantageResult, PromptStatistics, compute_advantages
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.sampling import prompt_batch
from ebbflow.flow.noise import Stream, generator
from ebbflow.flow.windows import Plan, plan
from ebbflow.models import Conditioning, Model
from ebbflow.models.encoding import Encode, encode_once
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.records import StageRecord
from ebbflow.rewards.combine import Scorer, ScoreTable, load_scorer, require_scored
from ebbflow.rollouts.generate import Rollouts, SampleKeys, generate
from ebbflow.stage import Log, Place, open_model, open_policy, read_history, save_policy
from ebbflow.timing import Clock
from ebbflow.training.anchor import corrected
from ebbflow.training.batches import Corrected, TermBatch, forward_batch, micro_batches, trajectory_batch
from ebbflow.training.update import Learner


@dataclass(frozen=True)
class Experience:
    """What one step generated: a row per sample."""

    conditioning: Conditioning
    keys: SampleKeys
    rollouts: Rollouts
    scores: ScoreTable


def train_online_folder(
    place: Place, base: Path, folder: Path, prompts: Path, trained: Path, log: Log, teacher: Path | None = None
) -> StageRecord:
    """Run the stage on the policy of ``folder`` and leave the trained one at ``trained``."""
    model = open_model(place.recipe, base)
    policy, card = open_policy(place, model, folder, teacher)
    learner, history = Learner(policy, place.online, card), read_history(place, card, folder)
    scorer = load_scorer(place.recipe.rewards.terms, ())
    record = run_online_stage(place, model, learner, scorer, read_prompts(prompts, "train"), log, history)
    save_policy(place, learner, card, record, trained, history=history)
    return record


def run_online_stage(
    place: Place,
    model: Model,
    learner: Learner,
    scorer: Scorer,
    prompts: list[Prompt],
    log: Log,
    history: PromptStatistics | None = None,
) -> StageRecord:
    """Train the learner's policy in place for the stage's number of steps.

    Args:
        prompts: the training split.
        log: called with the metrics of every step and its number, from zero.
        history: the rewards of each prompt so far, where ``advantages.running`` wants them; updated in place.
    """
    config, name = place.online, place.config.algorithm_name
    clock, samples = Clock(), 0
    history = PromptStatistics() if history is None else history
    with clock.phase("encoding"):
        encode = encode_once(model, (prompt for step in range(config.steps) for prompt in _prompts(place, prompts, step)))
    progress = tqdm(range(config.steps), desc=f"{place.label} {name}", unit="step", disable=None)
    for step in progress:
        before = dict(clock.seconds)
        experience = collect(place, model, learner, scorer, prompts, encode, step, clock)
        advantages = advantages_of(place, scorer, experience, history)
        metrics = advantages.metrics | _means(experience.scores)
        with clock.phase("training"):
            metrics |= _train(place, learner, experience, advantages, step)
            learner.finish_step()
        samples += len(experience.keys)
        log(metrics | _speed(clock.seconds, before, len(experience.keys)) | {"updates": learner.updates}, step)
        progress.set_postfix(reward=f"{metrics.get('reward/mean', float('nan')):.3f}")
    return StageRecord(
        label=place.label,
        algorithm=name,
        samples=samples,
        optimizer_steps=learner.updates,
        seconds=dict(clock.seconds),
        alarms=learner.alarms,
    )


def collect(
    place: Place, model: Model, learner: Learner, scorer: Scorer, prompts: list[Prompt], encode: Encode, step: int, clock: Clock
) -> Experience:
    """Generate and score the groups of one step."""
    config = place.online
    repeated, keys = place.groups(_prompts(place, prompts, step), step)
    with clock.phase("rollout"), learner.policy.using(place.algorithm.generates):
        conditioning = encode(repeated)
        chosen = _plan(place, learner.progress.steps)
        rollouts = generate(model, conditioning, keys, config.sampler, chosen, config.micro_batch, config.rollout_precision)
        images = model.decode(rollouts.latents)
    with clock.phase("scoring"):
        scores = scorer(images, repeated)
        require_scored(scores, place.recipe.rewards.max_failed_share)
    return Experience(conditioning, keys, rollouts, scores)


def _prompts(place: Place, prompts: list[Prompt], step: int) -> list[Prompt]:
    return prompt_batch(prompts, place.online.prompts_per_step, step, place.seed)


def _plan(place: Place, step: int) -> Plan | None:
    window = place.config.window
    return plan(window, place.config.sampler.steps, step, place.seed) if window else None


def advantages_of(place: Place, scorer: Scorer, experience: Experience, history: PromptStatistics) -> AdvantageResult:
    """The advantages of a step's samples."""
    scores = {name: experience.scores.metrics[name] for name in scorer.weights}
    return compute_advantages(scores, scorer.weights, np.array(experience.keys.prompt_ids), place.config.advantages, history)


def _train(place: Place, learner: Learner, experience: Experience, advantages: AdvantageResult, step: int) -> dict[str, float]:
    """The updates of a step on its samples; their metrics, averaged."""
    rollout: Corrected | None = None
    metrics: dict[str, float] = {}
    if experience.rollouts.trajectory is not None:
        trajectory, conditioning, keys = experience.rollouts.trajectory, experience.conditioning, experience.keys
        rollout, metrics = corrected(learner.policy, place.config, trajectory, conditioning, keys)
    taken = []
    for units in _split(place, experience, advantages, step):
        batch = _terms(place, experience, rollout, torch.from_numpy(advantages.values), units)
        if len(batch.points):
            taken.append(learner.update(batch, micro_batches(batch.unit, place.config.micro_batch)))
    return metrics | _averages(taken)


def _split(place: Place, experience: Experience, advantages: AdvantageResult, step: int) -> list[list[np.ndarray]]:
    """The algorithm's units, shuffled and dealt out over the updates of a step; fewer parts when there are too few."""
    prompt_ids = np.array(experience.keys.prompt_ids)
    units = place.algorithm.select(advantages.values, advantages.keep, prompt_ids, place.config.hyper)
    order = generator(place.seed, prompt_id=0, sample=step, step=0, stream=Stream.ORDER).permutation(len(units))
    return [[units[i] for i in part] for part in np.array_split(order, place.online.updates_per_step) if len(part)]


def _terms(
    place: Place, experience: Experience, rollout: Corrected | None, advantage: Tensor, units: list[np.ndarray]
) -> TermBatch:
    """The terms of some units of a step's samples."""
    chosen = np.concatenate(units)
    samples = torch.from_numpy(chosen).to(experience.rollouts.latents.device)
    keys, conditioning = experience.keys.take(chosen), experience.conditioning.rows(samples)
    advantage = advantage.to(samples.device)[samples]
    if rollout is not None:
        return trajectory_batch(rollout.take(samples), conditioning, advantage, keys, place.config.sampler)
    hyper = place.config.hyper
    assert isinstance(hyper, ForwardConfig)
    unit = np.repeat(np.arange(len(units)), [len(unit) for unit in units])
    return forward_batch(experience.rollouts.latents[samples], conditioning, advantage, keys, unit, hyper, visit=0)


def _averages(updates: list[dict[str, float]]) -> dict[str, float]:
    """Means over the updates of a step; each metric over the updates that have it."""
    names = dict.fromkeys(name for update in updates for name in update)
    return {name: fmean(update[name] for update in updates if name in update) for name in names}


def _means(scores: ScoreTable) -> dict[str, float]:
    return {f"score/{name}": float(np.nanmean(values)) for name, values in scores.metrics.items() if np.isfinite(values).any()}


def _speed(now: dict[str, float], before: dict[str, float], images: int) -> dict[str, float]:
    """Seconds and milliseconds per image of each phase of a step, and images per second over all of them."""
    spent = {phase: seconds - before.get(phase, 0.0) for phase, seconds in now.items()}
    metrics = {f"seconds/{phase}": seconds for phase, seconds in spent.items()}
    metrics |= {f"ms_per_image/{phase}": 1000 * seconds / images for phase, seconds in spent.items()}
    return metrics | {"images_per_second": images / sum(spent.values())}
