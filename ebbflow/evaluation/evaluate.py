"""Evaluate a policy with fixed prompts, fixed noise and the deterministic sampler."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor
from tqdm import tqdm

from ebbflow.data.images import encode_png
from ebbflow.data.prompts import Prompt, read_prompts
from ebbflow.data.records import Evaluation
from ebbflow.data.schema import evaluation_schema
from ebbflow.flow.noise import SampleKeys, noise
from ebbflow.models import Model, load_model, predict
from ebbflow.models.encoding import Encode, encode_once
from ebbflow.recipe import Recipe
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import ModelConfig
from ebbflow.rewards.combine import Scorer, ScoreTable, load_scorer
from ebbflow.rollouts.generate import finite_rows, generate
from ebbflow.seeding import Stream, derive_seed
from ebbflow.storage.tables import nan_to_null, write_table
from ebbflow.timing import Clock
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import read_policy_metadata, require_allowed_code, require_base

DRIFT_SIGMAS = (0.25, 0.5, 0.75, 1.0)

logger = logging.getLogger(__name__)


class EvaluationError(Exception):
    """Policies that cannot be compared or evaluated: names what is wrong and how to fix it."""


def evaluate_folder(recipe: Recipe, base: Path, folder: Path, prompts: Path, label: str, samples: Path) -> Evaluation:
    """Evaluate the policy of a folder with all rewards and guardrails of the recipe.

    The policy may be a champion of another recipe: its card says what it is, what it was trained from and how that generates.

    Args:
        base: its base model's folder.
        folder: its policy folder.
        prompts: the prompt table; the training split is left out.
        samples: where the evaluated samples go (``evaluation_schema``).

    Raises:
        ArtifactError: a folder is not what was committed.
        PolicyError: the policy was trained from another base model, or names code that the recipe does not.
    """
    torch.set_num_threads(recipe.threads)
    metadata = read_policy_metadata(folder)
    require_base(metadata, base, folder)
    require_allowed_code(metadata, folder, (*recipe.own_paths, recipe.model.attention))
    model = load_model(base, metadata.model)
    policy = Policy(model, metadata.config, recipe.seed)
    policy.load(folder)
    scorer = load_scorer(recipe.rewards, recipe.guardrails)
    chosen = [prompt for prompt in read_prompts(prompts) if prompt.split != "train"]
    return evaluate(recipe, model, policy, metadata.version, scorer, chosen, label, samples)


def require_same_image_size(recipe: Recipe, champion: Path) -> None:
    """Check that a champion generates images of the recipe's size: scores of other sizes cannot be compared.

    Raises:
        EvaluationError: it does not; names both sizes.
    """
    its, ours = (_size(model) for model in (read_policy_metadata(champion).model, recipe.model))
    if its != ours:
        raise EvaluationError(
            f"champion of {recipe.promotion.model_name!r} generates {its}, this recipe {ours}: scores are not comparable; "
            "rename promotion.model_name, or use the champion's size"
        )


def _size(model: ModelConfig) -> str:
    height, width = (size or "default" for size in (model.height, model.width))
    return f"{model.frames} frame(s) of {height} x {width} (height x width)"


def evaluate(
    recipe: Recipe, model: Model, policy: Policy, version: int, scorer: Scorer, prompts: list[Prompt], label: str, path: Path
) -> Evaluation:
    """Evaluate on validation and held-out prompts, one sample per prompt; the samples go to ``path`` (``evaluation_schema``).

    Raises:
        EvaluationError: no sample is finite.
    """
    clock = Clock()
    with clock.phase("sampling"):
        encode = encode_once(model, prompts)
        latents = _sample(recipe, model, prompts, encode, label)
    pngs, scores = _score(recipe, model, scorer, prompts, latents, clock)
    held_out = np.array([prompt.split == "held_out" for prompt in prompts])
    schema = evaluation_schema(["reward", *sorted(scores.metrics)])
    rows = _rows(schema, prompts, pngs, scores)
    write_table(path, schema, rows.to_batches(), {"label": label, "recipe_digest": recipe.digest})
    evaluation = Evaluation(
        label=label,
        policy_version=version,
        held_out=means(scores, held_out),
        validation=means(scores, ~held_out),
        coverage=float(np.isfinite(scores.reward[held_out]).mean()),
        velocity_drift=_drift(recipe, model, policy, prompts, encode, latents),
        seconds=dict(clock.seconds),
    )
    logger.info("%s", evaluation)
    return evaluation


def evaluation_keys(prompts: list[Prompt]) -> SampleKeys:
    """One sample per prompt. The noise depends on the evaluation's own seed, so every run draws the same."""
    return SampleKeys(derive_seed(0, "evaluation"), [prompt.prompt_id for prompt in prompts], [0] * len(prompts))


def _sample(recipe: Recipe, model: Model, prompts: list[Prompt], encode: Encode, label: str) -> Tensor:
    sampler = SamplerConfig(name="ode", steps=recipe.evaluation.steps)
    parts = []
    for part in tqdm(_micro_batches(recipe, len(prompts)), desc=f"evaluating {label}", unit="batch", disable=None):
        batch = prompts[part]
        parts.append(generate(model, encode(batch), evaluation_keys(batch), sampler, micro_batch=len(batch)).latents)
    return torch.cat(parts)


def _micro_batches(recipe: Recipe, count: int) -> list[slice]:
    size = recipe.evaluation.micro_batch
    return [slice(start, start + size) for start in range(0, count, size)]


def _score(
    recipe: Recipe, model: Model, scorer: Scorer, prompts: list[Prompt], latents: Tensor, clock: Clock
) -> tuple[list[bytes], ScoreTable]:
    """PNGs and scores of all samples. In batches: the uncompressed videos of all prompts would not fit in memory."""
    pngs: list[bytes] = []
    tables = []
    for part in _micro_batches(recipe, len(prompts)):
        with clock.phase("sampling"):
            images = model.decode(latents[part])
        with clock.phase("scoring"):
            tables.append(scorer(images, prompts[part]).where(finite_rows(latents[part])))
        pngs += encode_png(images)
    return pngs, ScoreTable.cat(tables)


@torch.no_grad()
def _drift(recipe: Recipe, model: Model, policy: Policy, prompts: list[Prompt], encode: Encode, clean: Tensor) -> float:
    """Mean of (v - v_base)^2 over the finite ones of the policy's own samples, noised to ``DRIFT_SIGMAS`` with fixed noise.

    Raises:
        EvaluationError: none is finite.
    """
    keys = evaluation_keys(prompts)
    eps = noise(model.latent_shape, keys.seed, keys.prompt_ids, keys.samples, stream=Stream.TRAINING).to(clean)
    current = _velocities(recipe, model, clean, eps, prompts, encode)
    with policy.using("reference"):
        base = _velocities(recipe, model, clean, eps, prompts, encode)
    squares = (current - base) ** 2
    if squares.isfinite().all():
        return float(squares.mean())
    if not (finite := squares[squares.isfinite()]).numel():  # the others are in the samples, as failures
        raise EvaluationError("the policy is not finite on any prompt; go back to the one before it, or lower optimizer.lr")
    return float(finite.mean())


def _velocities(recipe: Recipe, model: Model, clean: Tensor, eps: Tensor, prompts: list[Prompt], encode: Encode) -> Tensor:
    """[len(DRIFT_SIGMAS) * N, ...], on the CPU because those of videos are large."""
    parts = []
    for sigma in DRIFT_SIGMAS:
        noisy = (1 - sigma) * clean + sigma * eps
        for part in _micro_batches(recipe, len(clean)):
            level = torch.full((len(noisy[part]),), sigma, device=clean.device)
            parts.append(predict(model, noisy[part], level, encode(prompts[part])).cpu())
    return torch.cat(parts)


def means(scores: ScoreTable, rows: np.ndarray | slice = slice(None)) -> dict[str, float]:
    """Mean of every metric over the given rows; a metric without any finite value there is left out."""
    columns = {"reward": scores.reward, **scores.metrics}
    return {name: float(np.nanmean(values[rows])) for name, values in columns.items() if np.isfinite(values[rows]).any()}


def _rows(schema: pa.Schema, prompts: list[Prompt], pngs: list[bytes], scores: ScoreTable) -> pa.Table:
    columns = {
        "prompt_id": pa.array([prompt.prompt_id for prompt in prompts], pa.int64()),
        "sample": pa.array([0] * len(prompts), pa.int64()),
        "split": pa.array([prompt.split for prompt in prompts]),
        "prompt": pa.array([prompt.prompt for prompt in prompts]),
        "target": pa.array([prompt.target for prompt in prompts], pa.string()),
        "image": pa.array(pngs, pa.binary()),  # chunked above the 2 GiB that one array holds
        "reward": nan_to_null(scores.reward),
        **{name: nan_to_null(values) for name, values in scores.metrics.items()},
        "failure": pa.array(scores.failures, pa.string()),
    }
    return pa.table([columns[name] for name in schema.names], schema=schema)
