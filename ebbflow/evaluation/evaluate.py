"""Evaluation: fixed prompts, fixed noise, deterministic sampling; the same for every policy that is ever compared."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from tqdm import tqdm

from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.schema import evaluation_schema
from ebbflow.data.tables import nullable, write_table
from ebbflow.flow.noise import Stream, derive_seed, noise
from ebbflow.models import Conditioning, Model, load_model
from ebbflow.recipe import Recipe
from ebbflow.recipe.choices import Sampler
from ebbflow.records import Evaluation
from ebbflow.rewards.combine import Scorer, ScoreTable, load_scorer
from ebbflow.rollouts.generate import SampleKeys, generate
from ebbflow.rollouts.images import encode_png
from ebbflow.timing import Clock
from ebbflow.training.policy import Policy, read_card

MICRO_BATCH = 64
DRIFT_SIGMAS = (0.25, 0.5, 0.75, 1.0)


def evaluate_folder(recipe: Recipe, base: Path, folder: Path, prompts: Path, label: str, samples: Path) -> Evaluation:
    """Evaluate the policy of a folder with everything the recipe scores with, guards included.

    The policy may be a champion of another recipe: what it is and the family of its base model are those of its card.
    """
    torch.set_num_threads(recipe.threads)
    card = read_card(folder)
    model = load_model(base, card.family)
    policy = Policy(model, card.config, recipe.seed)
    policy.load(folder)
    scorer = load_scorer(recipe.rewards.terms, recipe.rewards.guards)
    chosen = [prompt for prompt in read_prompts(prompts) if prompt.split != "train"]
    return evaluate(recipe, model, policy, card.version, scorer, chosen, label, samples)


def evaluate(
    recipe: Recipe, model: Model, policy: Policy, version: int, scorer: Scorer, prompts: list[Prompt], label: str, path: Path
) -> Evaluation:
    """Evaluate on the validation and the held-out prompts; the samples go to ``path`` (``evaluation_schema``)."""
    clock = Clock()
    with clock.phase("sampling"):
        latents = _sample(recipe, model, prompts, label)
        images = model.decode(latents)
    with clock.phase("scoring"):
        scores = scorer(images, prompts)
    held_out = np.array([prompt.split == "held_out" for prompt in prompts])
    schema = evaluation_schema(["reward", *sorted(scores.metrics)])
    write_table(path, schema, [_rows(schema, prompts, images, scores)], {"label": label, "recipe_digest": recipe.digest})
    return Evaluation(
        label=label,
        policy_version=version,
        held_out=_means(scores, held_out),
        validation=_means(scores, ~held_out),
        coverage=float(np.isfinite(scores.reward[held_out]).mean()),
        velocity_drift=_drift(model, policy, prompts, latents),
        seconds=dict(clock.seconds),
    )


def evaluation_keys(prompts: list[Prompt]) -> SampleKeys:
    """One sample per prompt. The noise depends on the evaluation's own seed, so a later run meets the champion on equal terms."""
    return SampleKeys(derive_seed(0, "evaluation"), [prompt.prompt_id for prompt in prompts], [0] * len(prompts))


def _sample(recipe: Recipe, model: Model, prompts: list[Prompt], label: str) -> Tensor:
    sampler = Sampler(name="ode", steps=recipe.evaluation.steps)
    parts = []
    for start in tqdm(range(0, len(prompts), MICRO_BATCH), desc=f"evaluating {label}", unit="batch", disable=None):
        batch = prompts[start : start + MICRO_BATCH]
        conditioning = model.encode([prompt.prompt for prompt in batch])
        parts.append(generate(model, conditioning, evaluation_keys(batch), sampler, micro_batch=MICRO_BATCH).latents)
    return torch.cat(parts)


@torch.no_grad()
def _drift(model: Model, policy: Policy, prompts: list[Prompt], clean: Tensor) -> float:
    """Mean of (v - v_base)^2 on the policy's own samples, noised to fixed sigmas with fixed noise."""
    keys = evaluation_keys(prompts)
    eps = noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples, stream=Stream.TRAINING).to(clean)
    conditioning = model.encode([prompt.prompt for prompt in prompts])
    current = _velocities(model, clean, eps, conditioning)
    with policy.using("reference"):
        base = _velocities(model, clean, eps, conditioning)
    return float(((current - base) ** 2).mean())


def _velocities(model: Model, clean: Tensor, eps: Tensor, conditioning: Conditioning) -> Tensor:
    """[sigmas * N, ...]"""
    parts = []
    for sigma in DRIFT_SIGMAS:
        noisy = (1 - sigma) * clean + sigma * eps
        for start in range(0, len(clean), MICRO_BATCH):
            part = slice(start, start + MICRO_BATCH)
            level = torch.full((len(noisy[part]),), sigma, device=clean.device)
            parts.append(model.velocity(noisy[part], level, conditioning.rows(part)))
    return torch.cat(parts)


def _means(scores: ScoreTable, rows: np.ndarray) -> dict[str, float]:
    """Mean of every metric that was measured at all over the given rows."""
    columns = {"reward": scores.reward, **scores.metrics}
    return {name: float(np.nanmean(values[rows])) for name, values in columns.items() if np.isfinite(values[rows]).any()}


def _rows(schema: pa.Schema, prompts: list[Prompt], images: np.ndarray, scores: ScoreTable) -> pa.RecordBatch:
    columns = {
        "prompt_id": pa.array([prompt.prompt_id for prompt in prompts], pa.int64()),
        "sample": pa.array([0] * len(prompts), pa.int64()),
        "split": pa.array([prompt.split for prompt in prompts]),
        "prompt": pa.array([prompt.prompt for prompt in prompts]),
        "target": pa.array([prompt.target for prompt in prompts], pa.string()),
        "image": pa.array(encode_png(images), pa.binary()),
        "reward": nullable(scores.reward),
        **{name: nullable(values) for name, values in scores.metrics.items()},
        "failure": pa.array(scores.failures, pa.string()),
    }
    return pa.record_batch([columns[name] for name in schema.names], schema=schema)
