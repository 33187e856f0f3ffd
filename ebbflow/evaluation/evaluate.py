"""Evaluate a policy with fixed prompts, fixed noise and the sampler and size of the recipe."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from ebbflow.compute import set_up_process
from ebbflow.data.images import encode_pngs
from ebbflow.data.prompt_windows import build_prompt_windows
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import Evaluation
from ebbflow.data.schema import build_evaluation_schema, name_statistic_column
from ebbflow.data.sounds import attach_sounds
from ebbflow.evaluation.distribution import average_per_prompt
from ebbflow.evaluation.drift import sum_drift
from ebbflow.evaluation.gate_inputs import list_evaluated_prompts, list_repeats
from ebbflow.evaluation.held_out import summarize_held_out
from ebbflow.evaluation.image_statistics import (
    compute_image_statistics,
    make_thumbnails,
    measure_diversity_across,
    measure_diversity_within,
)
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import Model, load_model
from ebbflow.models.encoding import Encode
from ebbflow.models.sound import decode_sounds
from ebbflow.progress import show_progress
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import ModelConfig
from ebbflow.rewards.combine import Scorer, ScoreTable, load_scorer
from ebbflow.rollouts.generate import find_finite_rows, generate_samples
from ebbflow.seeding import derive_seed
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.tables import nan_to_null, write_table
from ebbflow.timing import Clock
from ebbflow.training.distributed import Ranks
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import (
    read_policy_metadata,
    require_allowed_code,
    require_base,
)
from ebbflow.training.rounds import call_on_first, collect_rounds, deal_in_rounds
from ebbflow.training.shared_prompts import build_shared_lookup
from ebbflow.watchdog import watch

SAMPLES_PER_LOOK = 2**20
"""Numbers of a prompt's samples that a look has for itself."""

logger = logging.getLogger(__name__)


class EvaluationError(Exception):
    """An error about policies that cannot be compared or evaluated: what is wrong and the fix."""


def evaluate_folder(
    recipe: Recipe,
    base: Path,
    folder: Path,
    prompts: Path,
    label: str,
    samples: Path,
    look: int = 0,
) -> Evaluation:
    """Evaluate the policy of a folder with the guardrails of the recipe, and all of its rewards
    that score single images. In a process group every rank generates and scores its rounds of
    micro-batches, rank 0 writes the samples, and all return the same.

    The policy may be a champion of another recipe: its card says what it is, what it was trained
    from and how that generates. The sampler, and the size where ``evaluation`` has one, are this
    recipe's.

    Args:
        base: its base model's folder.
        folder: its policy folder.
        prompts: the prompt table; the training split is left out.
        samples: where the evaluated samples go (``build_evaluation_schema``).
        look: looks that the gate took at the registered model before this run; each has new noise
            for the held-out prompts.

    Raises:
        ArtifactError: a folder is not what was committed.
        PolicyError: the policy was trained from another base model, or names code that the recipe
            does not.
    """
    set_up_process(recipe)
    metadata = read_policy_metadata(folder)
    require_base(metadata, base, folder)
    require_allowed_code(metadata, folder, (*recipe.plugin_paths, recipe.model.attention))
    model = load_model(
        base, recipe.evaluation.evaluated_model(metadata.served_model), weights_later=True
    )
    policy = Policy(model, metadata.config, recipe.seed)
    policy.load_folder(folder)
    evaluated = list_evaluated_prompts(prompts)
    num_texts = sum(
        prompt.split == "held_out" and prompt.target is not None for prompt in evaluated
    )
    # The same prompts judge the champion, so that both sides have the same guardrails.
    scorer = load_scorer(recipe.evaluated_rewards, recipe.select_scorable_guardrails(num_texts))
    evaluation = evaluate_on_prompts(
        recipe, model, policy, metadata.version, scorer, evaluated, label, samples, look
    )
    return evaluation.model_copy(update={"policy_digest": verify_folder(folder)})


def require_same_image_size(recipe: Recipe, champion: Path) -> None:
    """Check that a champion is served in the size that the recipe evaluates: scores of other sizes
    cannot be compared.

    Raises:
        EvaluationError: it does not; names both sizes.
    """
    champion_size = describe_image_size(read_policy_metadata(champion).served_model)
    recipe_size = describe_image_size(recipe.evaluation.evaluated_model(recipe.model))
    if champion_size != recipe_size:
        raise EvaluationError(
            f"champion of {recipe.promotion.model_name!r} generates {champion_size}, this recipe"
            f" {recipe_size}:"
            " scores are not comparable; rename promotion.model_name, or use the champion's size"
        )


def describe_image_size(model: ModelConfig) -> str:
    """Describe how large the images and how long the videos of a model are."""
    height = model.height or "default"
    width = model.width or "default"
    return f"{model.frames} frame(s) of {height} x {width} (height x width)"


@dataclass(frozen=True)
class _Samples:
    """Generated and scored samples.

    Example:
        200 prompts, of which the first 20 held-out ones have 4 samples: N = 200 + 20 * 3 = 260. The
        first 200 rows have ``indices`` 0, the other 60 have 1, 2, 3, 1, 2, 3, ...

    Attributes:
        prompts: [N], of each sample.
        indices: [N], which sample of its prompt each is.
        latents: fp32 [N, ...], on the CPU.
        pngs: [N].
        scores: of N rows.
        statistics: float64 [N] columns of what the images look like.
        thumbnails: [N, D] (``image_statistics.make_thumbnails``).
        features: [N, D] of a reward's network, where there is one and prompts are sampled more than
            once.
    """

    prompts: list[Prompt]
    indices: list[int]
    latents: Tensor
    pngs: list[bytes]
    scores: ScoreTable
    statistics: dict[str, np.ndarray]
    thumbnails: np.ndarray
    features: np.ndarray | None

    @property
    def prompt_ids(self) -> np.ndarray:
        return np.array([prompt.prompt_id for prompt in self.prompts])

    @property
    def is_held_out(self) -> np.ndarray:
        """Whether each sample is of the held-out split, bool [N]."""
        return np.array([prompt.split == "held_out" for prompt in self.prompts])

    @staticmethod
    def concatenate(parts: list[_Samples]) -> _Samples:
        # A batch whose features could not be computed leaves all of them out: a diversity over some
        # samples is not comparable.
        features = [part.features for part in parts if part.features is not None]
        return _Samples(
            prompts=[prompt for part in parts for prompt in part.prompts],
            indices=[index for part in parts for index in part.indices],
            latents=torch.cat([part.latents for part in parts]),
            pngs=[png for part in parts for png in part.pngs],
            scores=ScoreTable.concatenate([part.scores for part in parts]),
            statistics={
                name: np.concatenate([part.statistics[name] for part in parts])
                for name in parts[0].statistics
            },
            thumbnails=np.concatenate([part.thumbnails for part in parts]),
            features=np.concatenate(features) if len(features) == len(parts) else None,
        )


def evaluate_on_prompts(
    recipe: Recipe,
    model: Model,
    policy: Policy,
    version: int,
    scorer: Scorer,
    prompts: list[Prompt],
    label: str,
    path: Path,
    look: int = 0,
) -> Evaluation:
    """Evaluate on validation and held-out prompts; the samples go to ``path``
    (``build_evaluation_schema``).

    Every validation prompt has one sample, and every held-out prompt ``evaluation.samples``, or the
    first ``evaluation.repeated_prompts`` of them.

    Raises:
        EvaluationError: no sample is finite.
    """
    clock = Clock()
    # The further samples have micro-batches of their own: the first ones are the same bytes however
    # many there are.
    wanted = [(prompt, 0) for prompt in prompts]
    batches = _split_into_micro_batches(recipe, wanted)
    batches += _split_into_micro_batches(recipe, list_repeats(recipe, prompts))
    prompts_of_batches = [[prompt for prompt, _ in batch] for batch in batches]
    # Empty on all ranks but the first.
    samples: list[_Samples] = []
    squares: list[tuple[float, int]] = []
    for window in build_prompt_windows(prompts_of_batches):
        with clock.measure_phase("sampling"):
            encode = build_shared_lookup(model, window.list_prompts())
        rounds = deal_in_rounds(batches[window.steps.start : window.steps.stop])
        # Merged adapters save their products in every pass.
        with policy.merge_adapters():
            parts = _generate_and_score(recipe, model, scorer, rounds, encode, label, clock, look)
        samples += collect_rounds(parts)
        # Not with merged adapters: the base model is the policy with its adapters off.
        squares += collect_rounds(_sum_drifts(model, policy, parts, encode))
    return call_on_first(
        lambda: _write_evaluation(
            recipe, _Samples.concatenate(samples), squares, label, version, clock, path, look
        )
    )


def _sum_drifts(
    model: Model, policy: Policy, parts: list[_Samples | None], encode: Encode
) -> list[tuple[float, int] | None]:
    """``sum_drift`` of the first samples; None for further ones, and where there are none."""
    return [
        sum_drift(
            model,
            policy,
            build_evaluation_keys(part.prompts),
            part.latents,
            encode(part.prompts),
        )
        if part is not None and part.indices[0] == 0
        else None
        for part in parts
    ]


def _write_evaluation(
    recipe: Recipe,
    samples: _Samples,
    squares: list[tuple[float, int]],
    label: str,
    version: int,
    clock: Clock,
    path: Path,
    look: int,
) -> Evaluation:
    """Write the table of samples, and summarise them.

    Args:
        squares: of the micro-batches of the first samples (``sum_drift``).
    """
    statistics = samples.statistics | _measure_diversity(samples)
    schema = build_evaluation_schema(["reward", *sorted(samples.scores.metrics)], list(statistics))
    rows = _build_rows(schema, samples, statistics)
    write_table(path, schema, rows.to_batches(), {"label": label, "recipe_digest": recipe.digest})
    drift = _average_drift(squares)
    evaluation = _summarize_samples(samples, statistics, label, version, drift, clock)
    updated = {"look": look, "samples_digest": sha256_of_file(path)}
    evaluation = evaluation.model_copy(update=updated)
    logger.info("%s", evaluation)
    return evaluation


def _summarize_samples(
    samples: _Samples,
    statistics: dict[str, np.ndarray],
    label: str,
    version: int,
    drift: float,
    clock: Clock,
) -> Evaluation:
    """Average the samples of the two splits; ``statistics`` are columns of N values."""
    held_out = samples.is_held_out
    columns = {"reward": samples.scores.reward, **samples.scores.metrics}
    return Evaluation(
        label=label,
        policy_version=version,
        # Validation prompts have one sample each, so their mean is the mean over prompts.
        validation=average_metrics(samples.scores, ~held_out),
        velocity_drift=drift,
        seconds=dict(clock.seconds),
        statistics=_average_over_prompts(samples, statistics, held_out),
        **summarize_held_out(
            [prompt for prompt in samples.prompts if prompt.split == "held_out"],
            {name: values[held_out] for name, values in columns.items()},
        ),
    )


def build_evaluation_keys(
    prompts: list[Prompt], samples: list[int] | None = None, look: int = 0
) -> SampleKeys:
    """Return the keys of the noise that each sample starts from: it depends on the evaluation's own
    seed and on the look, so both sides of a look have the same.

    A champion was chosen for its luck with the noise of its look. With the same noise again, the
    luck would stay with it, and every later candidate would have to beat that, too.

    Args:
        samples: which sample of its prompt each is; default: the first.
        look: new noise for held-out prompts. Validation prompts, which steer training, keep theirs.
    """
    numbers = samples or [0 for _ in prompts]
    return SampleKeys(
        derive_seed(0, "evaluation"),
        [prompt.prompt_id for prompt in prompts],
        [
            number + (SAMPLES_PER_LOOK * look if prompt.split == "held_out" else 0)
            for prompt, number in zip(prompts, numbers, strict=True)
        ],
    )


def _generate_and_score(
    recipe: Recipe,
    model: Model,
    scorer: Scorer,
    rounds: Sequence[Sequence[tuple[Prompt, int]] | None],
    encode: Encode,
    label: str,
    clock: Clock,
    look: int,
) -> list[_Samples | None]:
    """Generate, score and describe the samples of this rank's rounds in batches, as the
    uncompressed videos of all prompts would not fit in memory; None in a last round that has none
    for it.

    Args:
        rounds: the samples of each batch, as prompts and which sample of its prompt each is.
    """
    sampler = recipe.evaluation.sampler_with_steps
    parts: list[_Samples | None] = []
    quiet = Ranks.current().rank > 0
    for wanted in show_progress(f"evaluating {label}", "batch", rounds, quiet=quiet):
        if wanted is None:
            parts.append(None)
            continue
        batch = [prompt for prompt, _ in wanted]
        indices = [index for _, index in wanted]
        with clock.measure_phase("sampling"):
            keys = build_evaluation_keys(batch, indices, look)
            with watch(f"evaluating {label}: generating {len(batch)} samples"):
                latents = generate_samples(
                    model, encode(batch), keys, sampler, micro_batch=len(batch)
                ).latents
                images = model.decode_latents(latents)
                sounds = decode_sounds(model, latents)
        finite = find_finite_rows(latents)
        with clock.measure_phase("scoring"):
            # A copy, as a reward may write into its images.
            scores = scorer(images.copy(), batch, latents.cpu().numpy(), sounds)
            scores = scores.fail_broken_latents(finite)
            features = scorer.compute_features(images) if recipe.evaluation.samples > 1 else None
        # Latents that are not finite decode to some picture, whose statistics mean nothing.
        statistics = {
            name: np.where(finite, values, np.nan)
            for name, values in compute_image_statistics(images).items()
        }
        pngs = attach_sounds(encode_pngs(images), sounds)
        parts.append(
            _Samples(
                batch,
                indices,
                latents.cpu(),
                pngs,
                scores,
                statistics,
                make_thumbnails(images),
                features,
            )
        )
    return parts


def _measure_diversity(samples: _Samples) -> dict[str, np.ndarray]:
    """Measure how far the samples of a prompt lie apart, and the first ones of different held-out
    prompts; NaN for all others.
    """
    finite = find_finite_rows(samples.latents)
    ids = samples.prompt_ids
    points = {"latents": samples.latents.numpy(), "pixels": samples.thumbnails}
    if samples.features is not None:
        points["features"] = samples.features
    columns = {}
    for name, values in points.items():
        column = np.full(len(ids), np.nan)
        column[finite] = measure_diversity_within(ids[finite], values[finite])
        columns[f"diversity_{name}"] = column
    # One sample of each prompt, so that a prompt's own samples are not its nearest ones; held out
    # only, as the distance to the nearest shrinks with the number of pictures.
    first = finite & samples.is_held_out & (np.array(samples.indices) == 0)
    columns["diversity_across_prompts"] = np.full(len(ids), np.nan)
    columns["diversity_across_prompts"][first] = measure_diversity_across(samples.thumbnails[first])
    return columns


def _average_over_prompts(
    samples: _Samples, columns: dict[str, np.ndarray], rows: np.ndarray
) -> dict[str, float]:
    """Average over prompts the means over their samples; a column without any finite value there is
    left out.
    """
    averages = {}
    for name, values in columns.items():
        prompt_means = average_per_prompt(samples.prompt_ids[rows], values[rows])
        if len(prompt_means):
            averages[name] = float(prompt_means.mean())
    return averages


def _split_into_micro_batches(
    recipe: Recipe, wanted: Sequence[tuple[Prompt, int]]
) -> list[Sequence[tuple[Prompt, int]]]:
    """Split samples into batches of ``evaluation.micro_batch``."""
    size = recipe.evaluation.micro_batch
    return [wanted[start : start + size] for start in range(0, len(wanted), size)]


def _average_drift(sums: list[tuple[float, int]]) -> float:
    """Average the sums of micro-batches, in their order.

    Raises:
        EvaluationError: nothing is finite.
    """
    total = 0.0
    num_finite = 0
    for part_total, count in sums:
        total += part_total
        num_finite += count
    if not num_finite:
        raise EvaluationError(
            "the policy is not finite on any prompt; go back to the one before it, or lower"
            " optimizer.lr"
        )
    return total / num_finite


def average_metrics(scores: ScoreTable, rows: np.ndarray | slice = slice(None)) -> dict[str, float]:
    """Average every metric over the given rows; a metric without any finite value there is left
    out.
    """
    columns = {"reward": scores.reward, **scores.metrics}
    return {
        name: float(np.nanmean(values[rows]))
        for name, values in columns.items()
        if np.isfinite(values[rows]).any()
    }


def _build_rows(
    schema: pa.Schema, samples: _Samples, statistics: dict[str, np.ndarray]
) -> pa.Table:
    """Build the table of samples, a row for each."""
    prompts = samples.prompts
    scores = samples.scores
    columns = {
        "prompt_id": pa.array([prompt.prompt_id for prompt in prompts], pa.int64()),
        "sample": pa.array(samples.indices, pa.int64()),
        "split": pa.array([prompt.split for prompt in prompts]),
        "source": pa.array([prompt.source for prompt in prompts], pa.string()),
        "prompt": pa.array([prompt.prompt for prompt in prompts]),
        "target": pa.array([prompt.target for prompt in prompts], pa.string()),
        # pyarrow makes chunks of it above the 2 GiB that one array holds.
        "image": pa.array(samples.pngs, pa.binary()),
        "reward": nan_to_null(scores.reward),
        **{name: nan_to_null(values) for name, values in scores.metrics.items()},
        **{name_statistic_column(name): nan_to_null(values) for name, values in statistics.items()},
        "failure": pa.array(scores.failures, pa.string()),
    }
    return pa.table([columns[name] for name in schema.names], schema=schema)
