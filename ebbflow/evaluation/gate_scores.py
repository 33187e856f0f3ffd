"""The scores that the gate decides from: both sides' stored pictures, scored again together.

Hours lie between the evaluation of the champion and that of the candidate, and a reward on a server
may move in them: by .001 on every picture, and a policy beats itself. So the gate does not compare
the scores of the evaluations. It scores the held-out pictures of all sides in one pass, those of a
prompt in one batch and in a seeded order, so that whatever moves meanwhile moves all sides. All of
them are scored and no sample: it costs what scoring the evaluations costs, and generates nothing.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ebbflow.data.images import decode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.data.records import Evaluation, GateDecision
from ebbflow.data.schema import KEY, build_evaluation_schema, name_statistic_column
from ebbflow.data.sounds import SoundError, read_sounds
from ebbflow.evaluation.gate import REFUSED
from ebbflow.evaluation.gate_inputs import list_evaluated_prompts, read_evaluated_samples
from ebbflow.evaluation.held_out import summarize_held_out
from ebbflow.progress import show_progress
from ebbflow.recipe import Recipe
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.combine import NO_PICTURE, Scorer, ScoreTable, load_scorer
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.identity import digest_named_weights
from ebbflow.storage.tables import TableError, nan_to_null, read_table_metadata, write_table

PICTURE_DIGEST = "image_sha256"
"""The column of a table of scores that stands for the pictures, where those are not stored."""
SAME_SCORE = 1e-6
"""Relative difference that the scores of one picture may have in two places of a batch."""

logger = logging.getLogger(__name__)


def score_tables_together(
    recipe: Recipe,
    prompts: Path,
    evaluations: Mapping[str, Evaluation],
    samples: Mapping[str, Path],
    targets: Mapping[str, Path],
) -> dict[str, Evaluation]:
    """Check the tables of all sides, score them together and write them again; return the
    evaluations with the new means.

    Args:
        prompts: the prompt table of the run.
        evaluations, samples, targets: by side, such as ``candidate`` and ``champion``: the
            evaluation, its table, and where the new table goes.

    Raises:
        GateInputError, TableError: a table is not the one of its evaluation, or has sound that
            cannot be read.
        RewardError: a trained reward cannot run here.
    """
    shown = list_evaluated_prompts(prompts)
    tables = [
        read_evaluated_samples(recipe, evaluation, samples[side], prompts)
        for side, evaluation in evaluations.items()
    ]
    num_texts = sum(prompt.split == "held_out" and prompt.target is not None for prompt in shown)
    scorer = load_scorer(recipe.evaluated_rewards, recipe.select_scorable_guardrails(num_texts))
    try:
        scored = score_sides_together(recipe, scorer, tables, shown)
    except SoundError as error:
        files = ", ".join(str(samples[side]) for side in evaluations)
        raise TableError(f"{files}: the sound of a sample {error}") from None
    weights = digest_named_weights(
        {one.column: one.model_dump(mode="json") for one in (*recipe.rewards, *recipe.guardrails)}
    )
    updated = {}
    for (side, evaluation), table in zip(evaluations.items(), scored, strict=True):
        metadata = read_table_metadata(samples[side])
        write_table(targets[side], table.schema, table.to_batches(), metadata)
        digest = sha256_of_file(targets[side])
        updated[side] = update_evaluation(evaluation, table, shown).model_copy(
            update={"samples_digest": digest, "reward_weights": weights}
        )
    return updated


def score_sides_together(
    recipe: Recipe, scorer: Scorer, sides: Sequence[pa.Table], prompts: Sequence[Prompt]
) -> list[pa.Table]:
    """Score the held-out pictures of all sides in one pass; return their tables with the new
    scores.

    Rewards that score latents keep the scores of the evaluation: latents are not stored, and such
    rewards run in this process. The validation rows keep all of theirs.

    Args:
        scorer: of the recipe's rewards and guardrails.
        sides: samples of the same prompts (``build_evaluation_schema``).
        prompts: at least those of the samples.

    Raises:
        RewardError: a reward breaks its contract.
    """
    # Nothing looks at pictures, so nothing could have moved.
    if all(reward.scores == "latents" for reward in scorer.all_rewards):
        return list(sides)
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    order = _order_pictures(recipe, sides)
    # All pictures of a prompt in one batch, so that they are computed in one shape.
    size = max(1, recipe.evaluation.micro_batch // len(sides)) * len(sides)
    parts = []
    batches = [order[start : start + size] for start in range(0, len(order), size)]
    for batch in show_progress("scoring all sides for the gate", "batch", batches):
        rows = [sides[side].slice(row, 1).to_pylist()[0] for side, row in batch]
        pngs = [row["image"] for row in rows]
        sounds = read_sounds(pngs) if scorer.reads_sounds else None
        scores = scorer.score_pictures(
            decode_pngs(pngs), [by_id[row["prompt_id"]] for row in rows], sounds
        )
        finite = np.array([row["failure"] != NO_PICTURE for row in rows])
        parts.append(scores.fail_broken_latents(finite))
    scored = ScoreTable.concatenate(parts)
    rescored = []
    for side, table in enumerate(sides):
        places = {row: place for place, (one, row) in enumerate(order) if one == side}
        rescored.append(_replace_scores(recipe, scorer, table, scored, places))
    return rescored


def _order_pictures(recipe: Recipe, sides: Sequence[pa.Table]) -> list[tuple[int, int]]:
    """Return (side, row) of every held-out picture: sample by sample, the sides of each in an order
    by chance.
    """
    rows = [_index_held_out(table) for table in sides]
    keys = sorted(rows[0])
    # A place in a batch that scores higher than another must not favour a side.
    numbers = np.random.Philox(key=recipe.seed).random_raw((len(keys), len(sides)))
    orders = np.argsort(numbers, axis=1, kind="stable").tolist()
    return [
        (side, rows[side][key]) for key, order in zip(keys, orders, strict=True) for side in order
    ]


def _index_held_out(table: pa.Table) -> dict[tuple[int, int], int]:
    """Return the row of each held-out sample by its key."""
    keys = zip(*(table[name].to_pylist() for name in KEY), strict=True)
    splits = table["split"].to_pylist()
    return {key: row for row, key in enumerate(keys) if splits[row] == "held_out"}


def _replace_scores(
    recipe: Recipe, scorer: Scorer, table: pa.Table, scored: ScoreTable, places: Mapping[int, int]
) -> pa.Table:
    """Return a side's table with the scores of its held-out rows replaced.

    Args:
        scored: of both sides' pictures.
        places: where in ``scored`` each row of the table is.
    """
    statistics = [name for name in table.column_names if name.startswith(name_statistic_column(""))]
    fixed = {*build_evaluation_schema([]).names, "reward", *statistics}
    previous = [name for name in table.column_names if name not in fixed]
    # Of a reward of latents, the evaluation has the scores. Any other column that is not measured
    # any more is dropped: a reader must not take an old score for a new one.
    kept = previous if scorer.reads_latents else []
    names = sorted({*scored.metrics, *kept})
    rows = np.array(sorted(places))
    order = np.array([places[row] for row in rows])
    nothing = np.full(table.num_rows, np.nan)
    metrics = {}
    for name in names:
        values = _read_floats(table, name).copy() if name in previous else nothing.copy()
        if name in scored.metrics:
            values[rows] = scored.metrics[name][order]
        metrics[name] = values
    reward = _read_floats(table, "reward").copy()
    sources = table["source"].to_pylist()
    combined = combine_rewards(recipe.evaluated_rewards, metrics, sources)
    reward[rows] = combined[rows]
    failures = table["failure"].to_pylist()
    for row, place in places.items():
        failures[row] = _join_failures(scorer, scored.failures[place], failures[row])
    schema = build_evaluation_schema(
        ["reward", *names], [name.removeprefix(name_statistic_column("")) for name in statistics]
    )
    columns = {name: table[name] for name in schema.names if name in table.column_names}
    columns |= {name: nan_to_null(values) for name, values in metrics.items()}
    columns |= {"reward": nan_to_null(reward), "failure": pa.array(failures, pa.string())}
    return pa.table([columns[name] for name in schema.names], schema=schema)


def _join_failures(scorer: Scorer, scored: str | None, evaluated: str | None) -> str | None:
    """Join the failures of the new scores with those that the evaluation has of latents."""
    of_latents = [one.name for one in scorer.all_rewards if one.scores == "latents"]
    earlier = [
        reason for reason in (evaluated or "").split("; ") if reason.partition(":")[0] in of_latents
    ]
    return "; ".join([*filter(None, [scored]), *earlier]) or None


def combine_rewards(
    configs: Sequence[RewardConfig], columns: Mapping[str, np.ndarray], sources: Sequence[str]
) -> np.ndarray:
    """Return the weighted sum of the trained rewards of each sample, float64 [N]: NaN where one of
    its prompt set has no score, and where none scores the set.

    Args:
        columns: float64 [N] scores by the reward's column; a reward without one adds nothing.
        sources: [N], the prompt set of each sample.
    """
    total = np.zeros(len(sources))
    rewarded = np.zeros(len(sources), np.bool_)
    for config in configs:
        if config.column in columns:
            asked = np.array([config.applies_to(source or "") for source in sources], np.bool_)
            total += np.where(asked, config.weight * columns[config.column], 0.0)
            rewarded |= asked
    return np.where(rewarded, total, np.nan)


def update_evaluation(
    evaluation: Evaluation, table: pa.Table, prompts: Sequence[Prompt]
) -> Evaluation:
    """Return an evaluation with the held-out means of ``table``, the samples with new scores."""
    held_out = table.filter(pc.equal(table["split"], "held_out"))
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    ids = held_out["prompt_id"].to_pylist()
    statistics = name_statistic_column("")
    metrics = [
        field.name
        for field in held_out.schema
        if pa.types.is_floating(field.type) and not field.name.startswith(statistics)
    ]
    columns = {name: _read_floats(held_out, name) for name in metrics}
    return evaluation.model_copy(update=summarize_held_out([by_id[i] for i in ids], columns))


def refuse_unequal_scores(
    decision: GateDecision, candidate: pa.Table, champion: pa.Table
) -> GateDecision:
    """Return a decision that refuses where equal pictures have unequal scores: then the rewards
    measure something else than pictures.

    Args:
        candidate, champion: samples with their pictures, or with ``PICTURE_DIGEST``.
    """
    reason = explain_unequal_scores(candidate, champion)
    if reason is None:
        return decision
    logger.warning("gate: %s", reason)
    reasons = [*decision.reasons, REFUSED + reason]
    return decision.model_copy(update={"promote": False, "reasons": reasons})


def explain_unequal_scores(candidate: pa.Table, champion: pa.Table) -> str | None:
    """Explain which equal held-out pictures of the two sides have unequal scores, or return None.

    Args:
        candidate, champion: samples with their pictures, or with ``PICTURE_DIGEST``.
    """
    rows = _index_held_out(candidate)
    other_rows = _index_held_out(champion)
    digests = _list_picture_digests(candidate)
    other_digests = _list_picture_digests(champion)
    keys = [
        key
        for key in sorted(rows.keys() & other_rows)
        if digests[rows[key]] == other_digests[other_rows[key]]
    ]
    ours = [rows[key] for key in keys]
    theirs = [other_rows[key] for key in keys]
    statistics = name_statistic_column("")
    differing = {}
    for field in candidate.schema:
        name = field.name
        is_score = pa.types.is_floating(field.type) and not name.startswith(statistics)
        if is_score and name in champion.column_names:
            values = _read_floats(candidate, name)[ours]
            others = _read_floats(champion, name)[theirs]
            equal = np.isclose(values, others, SAME_SCORE, SAME_SCORE, equal_nan=True)
            if not equal.all():
                differing[name] = (int((~equal).sum()), float(np.abs(values - others).max()))
    if not differing:
        return None
    listed = ", ".join(
        f"{name} of {count} by up to {distance:.3g}"
        for name, (count, distance) in differing.items()
    )
    return (
        f"{len(keys)} held-out pictures are equal on both sides and their scores are not: {listed}."
        " A reward that gives one picture two scores cannot compare policies; make it deterministic"
        " (a judge: temperature 0), and see that nothing else changes its answers."
    )


def describe_drift(name: str, evaluated: Evaluation, scored: Evaluation) -> dict[str, float]:
    """Return how far a side's held-out means moved from its evaluation to the gate, by metric, for
    the log.
    """
    moved = {
        f"drift/{name}/{metric}": scored.held_out[metric] - mean
        for metric, mean in evaluated.held_out.items()
        if metric in scored.held_out
    }
    for metric, distance in moved.items():
        if abs(distance) > SAME_SCORE:
            logger.warning(
                "%s: the mean moved by %+.3g since the evaluation; the gate compares new scores of"
                " both sides",
                metric,
                distance,
            )
    return moved


def compute_picture_digests(samples: pa.Table) -> list[str]:
    """Compute the sha256 of every picture of an evaluation, in the order of its rows."""
    return [hashlib.sha256(picture).hexdigest() for picture in samples["image"].to_pylist()]


def _list_picture_digests(table: pa.Table) -> list[str]:
    if PICTURE_DIGEST not in table.column_names:
        return compute_picture_digests(table)
    digests: list[str] = table[PICTURE_DIGEST].to_pylist()
    return digests


def _read_floats(table: pa.Table, name: str) -> np.ndarray:
    return np.asarray(table[name].to_numpy(zero_copy_only=False), np.float64)
