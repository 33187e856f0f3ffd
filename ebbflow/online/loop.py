"""The hot loop of an online stage: rollout, score, advantages, update, with every model in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from ebbflow.algorithms.advantages import AdvantageResult, compute_advantages
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.sampling import prompt_batch
from ebbflow.flow.noise import Stream, generator
from ebbflow.flow.windows import trained_steps
from ebbflow.models import Conditioning, Model
from ebbflow.records import StageRecord
from ebbflow.rewards.combine import Scorer, ScoreTable, load_scorer, require_scored
from ebbflow.rollouts.generate import Rollouts, SampleKeys, generate
from ebbflow.stage import Log, Place, open_model, open_policy, save_policy
from ebbflow.timing import Clock
from ebbflow.training.batches import TermBatch, forward_batch, trajectory_batch
from ebbflow.training.policy import Policy
from ebbflow.training.update import make_optimizer, micro_batches, optimise


@dataclass(frozen=True)
class Experience:
    """What one step generated: a row per sample."""

    conditioning: Conditioning
    keys: SampleKeys
    rollouts: Rollouts
    scores: ScoreTable


def train_online_folder(place: Place, base: Path, folder: Path, prompts: Path, trained: Path, log: Log) -> StageRecord:
    """Run the stage on the policy of ``folder`` and leave the trained one at ``trained``."""
    model = open_model(place.recipe, base)
    policy, card = open_policy(place, model, folder)
    scorer = load_scorer(place.recipe.rewards.terms, ())
    record = run_online_stage(place, model, policy, scorer, read_prompts(prompts, "train"), log)
    save_policy(place, policy, card, record, trained)
    return record


def run_online_stage(place: Place, model: Model, policy: Policy, scorer: Scorer, prompts: list[Prompt], log: Log) -> StageRecord:
    """Train ``policy`` in place for the stage's number of steps.

    Args:
        prompts: the training split.
        log: called with the metrics of every step and its number, from zero.
    """
    config, algorithm = place.online, place.algorithm
    optimizer = make_optimizer(policy, config.optimizer)
    clock, updates, samples = Clock(), 0, 0
    progress = tqdm(range(config.steps), desc=f"{place.label} {config.algorithm.name}", unit="step", disable=None)
    for step in progress:
        before = dict(clock.seconds)
        experience = collect(place, model, policy, scorer, prompts, step, clock)
        advantages = compute_advantages(experience.scores.reward, np.array(experience.keys.prompt_ids), config.advantages)
        metrics = advantages.metrics | _means(experience.scores)
        with clock.phase("training"):
            taken: list[dict[str, float]] = []
            for part in _split(advantages, config.updates_per_step, place.seed, step):
                batch = _terms(place, experience, torch.from_numpy(advantages.values), part)
                passes = micro_batches(batch, config.micro_batch)
                taken.append(optimise(policy, optimizer, algorithm, config.algorithm, batch, config.optimizer, passes))
                updates += 1
                if algorithm.old_decay:
                    policy.blend("old", algorithm.old_decay(config.algorithm, updates))
        samples += len(experience.keys)
        metrics |= _averages(taken)
        log(metrics | _speed(clock.seconds, before, len(experience.keys)) | {"updates": updates}, step)
        progress.set_postfix(reward=f"{metrics.get('reward/mean', float('nan')):.3f}")
    return StageRecord(
        label=place.label, algorithm=config.algorithm.name, samples=samples, optimizer_steps=updates, seconds=dict(clock.seconds)
    )


def collect(
    place: Place, model: Model, policy: Policy, scorer: Scorer, prompts: list[Prompt], step: int, clock: Clock
) -> Experience:
    """Generate and score the groups of one step."""
    config = place.online
    repeated, keys = place.groups(prompt_batch(prompts, config.prompts_per_step, step, place.seed), step)
    with clock.phase("rollout"), policy.using(place.rollout_copy):
        conditioning = model.encode([prompt.prompt for prompt in repeated])
        rollouts = generate(model, conditioning, keys, config.sampler, _window(place, step), config.micro_batch)
        images = model.decode(rollouts.latents)
    with clock.phase("scoring"):
        scores = scorer(images, repeated)
        require_scored(scores, place.recipe.rewards.max_failed_share)
    return Experience(conditioning, keys, rollouts, scores)


def _window(place: Place, step: int) -> range | None:
    window = place.config.window
    return trained_steps(window, place.config.sampler.steps, step, place.seed) if window else None


def _split(advantages: AdvantageResult, updates: int, seed: int, step: int) -> list[np.ndarray]:
    """The kept samples, shuffled and dealt out over the updates of a step; fewer parts when there are too few samples."""
    kept = np.flatnonzero(advantages.keep)
    order = generator(seed, prompt_id=0, sample=step, step=0, stream=Stream.ORDER).permutation(len(kept))
    return [part for part in np.array_split(kept[order], updates) if len(part)]


def _terms(place: Place, experience: Experience, advantage: Tensor, part: np.ndarray) -> TermBatch:
    samples = torch.from_numpy(part).to(experience.rollouts.latents.device)
    advantage = advantage.to(samples.device)
    if experience.rollouts.trajectory is not None:
        return trajectory_batch(experience.rollouts.trajectory, experience.conditioning, advantage, place.config.sampler, samples)
    return forward_batch(
        experience.rollouts.latents[samples],
        experience.conditioning.rows(samples),
        advantage[samples],
        experience.keys.take(part),
        place.algorithm.draws(place.config.algorithm),
        visit=0,
    )


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
