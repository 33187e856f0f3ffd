"""The gate's inputs are what they claim, and both sides are scored by the same judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt, write_prompts
from ebbflow.data.records import Evaluation
from ebbflow.data.schema import PROMPTS, build_evaluation_schema
from ebbflow.data.sounds import SoundError
from ebbflow.evaluation import gate_scores
from ebbflow.evaluation.gate import REFUSED, decide_by_gate
from ebbflow.evaluation.gate_inputs import GateInputError, read_evaluated_samples
from ebbflow.evaluation.gate_scores import (
    refuse_unequal_scores,
    score_sides_together,
    score_tables_together,
    update_evaluation,
)
from ebbflow.recipe import Recipe
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import NO_PICTURE, Scorer
from ebbflow.storage.disk import sha256_of_file
from ebbflow.storage.tables import TableError, write_table

RECIPE = Recipe.model_validate(
    {
        "rewards": ["similarity"],
        "guardrails": [],
        "evaluation": {"resamples": 200, "samples": 2, "repeated_prompts": 3, "micro_batch": 4},
    }
)
HELD_OUT = 24


class Judge(Reward):
    """Scores brightness, plus what its server adds to the answer of each request or picture."""

    def __init__(self, per_call: float = 0.0, per_picture: float = 0.0) -> None:
        self.name = "similarity"
        self.per_call = per_call
        self.per_picture = per_picture
        self.calls = 0
        self.seen: list[int] = []

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        self.calls += 1
        self.seen += [int(image[0, 0, 0]) for image in images]
        drift = self.calls * self.per_call + np.arange(len(images)) * self.per_picture
        return RewardResult(images.mean((1, 2, 3)) / 255 + drift)


class Side(NamedTuple):
    evaluation: Evaluation
    path: Path
    table: pa.Table


@pytest.fixture
def prompts(make_prompts: Callable[..., list[Prompt]]) -> list[Prompt]:
    parts = [*make_prompts(2), *make_prompts(3, "validation"), *make_prompts(HELD_OUT, "held_out")]
    return [Prompt(**vars(prompt) | {"prompt_id": index}) for index, prompt in enumerate(parts)]


@pytest.fixture
def prompt_table(prompts: list[Prompt], tmp_path: Path) -> Path:
    path = tmp_path / "prompts.parquet"
    write_prompts(pa.Table.from_pylist([vars(prompt) for prompt in prompts], PROMPTS), path)
    return path


@pytest.fixture
def evaluate(prompts: list[Prompt], tmp_path: Path) -> Callable[..., Side]:
    """``evaluate(label, shade, drift)``: an evaluation whose pictures have grey levels from
    ``shade`` on, scored by a judge that adds ``drift``.
    """

    def run(label: str, shade: int, drift: float = 0.0, recipe: Recipe = RECIPE) -> Side:
        drawn = [prompt for prompt in prompts if prompt.split != "train"]
        held_out = [prompt for prompt in drawn if prompt.split == "held_out"]
        rows = [(prompt, 0) for prompt in drawn] + [(prompt, 1) for prompt in held_out[:3]]
        levels = np.array([shade + 3 * index for index in range(len(rows))], np.uint8)
        images = np.broadcast_to(levels[:, None, None, None], (len(rows), 8, 8, 3))
        table = pa.Table.from_pylist(
            [
                {key: vars(prompt)[key] for key in ("prompt_id", "split", "source", "prompt")}
                | {"target": prompt.target, "sample": sample, "image": picture, "failure": None}
                | {"similarity": level / 255 + drift, "reward": level / 255 + drift}
                for (prompt, sample), picture, level in zip(
                    rows, encode_pngs(images), levels.tolist(), strict=True
                )
            ],
            build_evaluation_schema(["reward", "similarity"]),
        )
        path = tmp_path / f"{label}.parquet"
        about = {"label": label, "recipe_digest": recipe.digest}
        write_table(path, table.schema, table.to_batches(), about)
        record = Evaluation(
            label=label,
            policy_version=1,
            held_out={},
            validation={},
            coverage=1.0,
            velocity_drift=0.0,
            seconds={},
            samples_digest=sha256_of_file(path),
        )
        return Side(update_evaluation(record, table, prompts), path, table)

    return run


def rescore(judge: Judge, sides: list[Side], prompts: list[Prompt]) -> list[pa.Table]:
    scorer = Scorer(((judge, 1.0),))
    return score_sides_together(RECIPE, scorer, [side.table for side in sides], prompts)


def test_samples_are_read_where_they_are_what_their_evaluation_says(
    evaluate: Callable[..., Side], prompt_table: Path
) -> None:
    side = evaluate("after", 60)
    table = read_evaluated_samples(RECIPE, side.evaluation, side.path, prompt_table)
    assert table.equals(side.table)


def test_the_table_of_another_evaluation_is_refused(
    evaluate: Callable[..., Side], prompt_table: Path
) -> None:
    """The evaluation of the base with the candidate's samples was promoted."""
    before = evaluate("before", 20)
    after = evaluate("after", 60)
    with pytest.raises(GateInputError, match="has the label 'after', and the evaluation 'before'"):
        read_evaluated_samples(RECIPE, before.evaluation, after.path, prompt_table)


def test_samples_of_another_recipe_are_refused(
    evaluate: Callable[..., Side], prompt_table: Path
) -> None:
    side = evaluate("after", 60, recipe=Recipe())
    with pytest.raises(GateInputError, match="has the recipe digest"):
        read_evaluated_samples(RECIPE, side.evaluation, side.path, prompt_table)


def rewrite(side: Side, table: pa.Table, follow: bool) -> Side:
    """Write another table with the same metadata; with ``follow`` the record has its sha256."""
    about = {"label": side.evaluation.label, "recipe_digest": RECIPE.digest}
    write_table(side.path, table.schema, table.to_batches(), about)
    digest = sha256_of_file(side.path) if follow else side.evaluation.samples_digest
    record = side.evaluation.model_copy(update={"samples_digest": digest})
    return Side(record, side.path, table)


def replace_rows(table: pa.Table, **values: Any) -> pa.Table:
    """The table with values of its first row replaced."""
    rows = table.to_pylist()
    rows[0].update(values)
    return pa.Table.from_pylist(rows, table.schema)


CHANGES = {
    "a score": (lambda table: replace_rows(table, reward=9.0), False, "has the sha256"),
    "a sample less": (lambda table: table.slice(1), True, "missing: \\[\\(2, 0\\)\\]"),
    "a sample twice": (
        lambda table: pa.concat_tables([table, table.slice(0, 1)]),
        True,
        "has 31 samples of 30 different",
    ),
    "an unknown prompt": (
        lambda table: replace_rows(table, prompt_id=99),
        True,
        "unknown: \\[\\(99, 0\\)\\]",
    ),
    "another text": (lambda table: replace_rows(table, prompt="x"), True, "drew another prompt"),
}


@pytest.mark.parametrize(("change", "follow", "message"), CHANGES.values(), ids=CHANGES)
def test_a_table_of_other_samples_is_refused(
    evaluate: Callable[..., Side],
    prompt_table: Path,
    change: Callable[[pa.Table], pa.Table],
    follow: bool,
    message: str,
) -> None:
    original = evaluate("after", 60)
    side = rewrite(original, change(original.table), follow)
    with pytest.raises(GateInputError, match=message):
        read_evaluated_samples(RECIPE, side.evaluation, side.path, prompt_table)


def test_a_reward_that_moved_between_the_evaluations_promotes_nothing(
    evaluate: Callable[..., Side], prompts: list[Prompt]
) -> None:
    """The scores of the two evaluations alone would promote byte-identical pictures."""
    before = evaluate("before", 40)
    after = evaluate("after", 40, drift=0.2)
    records = after.evaluation, before.evaluation
    assert decide_by_gate(RECIPE, *records, after.table, before.table).promote
    tables = score_sides_together(
        RECIPE, Scorer(((Judge(), 1.0),)), [after.table, before.table], prompts
    )
    decision = refuse_unequal_scores(decide_by_gate(RECIPE, *records, *tables), *tables)
    assert not decision.promote
    assert (decision.target.low, decision.target.high) == (0.0, 0.0)
    assert len(decision.reasons) == 5, "equal pictures have equal scores, which needs no reason"


def test_a_reward_that_moves_while_the_gate_scores_favours_no_side(
    evaluate: Callable[..., Side], prompts: list[Prompt]
) -> None:
    before = evaluate("before", 40)
    after = evaluate("after", 41)
    judge = Judge(per_call=1.0)
    tables = score_sides_together(
        RECIPE, Scorer(((judge, 1.0),)), [after.table, before.table], prompts
    )
    assert judge.calls == 14, "27 pairs of pictures, two in a batch of four"
    moved = np.array(tables[0]["reward"].to_pylist()) - np.array(tables[1]["reward"].to_pylist())
    held_out = np.array(before.table["split"].to_pylist()) == "held_out"
    assert moved[held_out] == pytest.approx(1 / 255)
    assert judge.seen != sorted(judge.seen), "the order within a pair is by chance"


def test_equal_pictures_with_unequal_scores_refuse(
    evaluate: Callable[..., Side], prompts: list[Prompt]
) -> None:
    side = evaluate("after", 40)
    judge = Judge(per_picture=0.01)
    tables = score_sides_together(
        RECIPE, Scorer(((judge, 1.0),)), [side.table, side.table], prompts
    )
    passed = decide_by_gate(RECIPE, side.evaluation, side.evaluation, *tables)
    decision = refuse_unequal_scores(passed, *tables)
    assert not decision.promote
    reason = decision.reasons[-1]
    assert reason.startswith(f"{REFUSED}27 held-out pictures are equal on both sides")
    assert "reward of 27 by up to 0.01, similarity of 27 by up to 0.01" in reason


def test_new_scores_are_those_of_the_pictures_and_failed_latents_stay_failed(
    evaluate: Callable[..., Side], prompts: list[Prompt]
) -> None:
    before = evaluate("before", 40, drift=0.5)
    rows = before.table.to_pylist()
    rows[5].update(reward=None, similarity=None, failure=NO_PICTURE)
    champion = pa.Table.from_pylist(rows, before.table.schema)
    after = evaluate("after", 60, drift=0.5)
    scored, other = score_sides_together(
        RECIPE, Scorer(((Judge(), 2.0),)), [after.table, champion], prompts
    )
    levels = [60 + 3 * index for index in range(30)]
    held_out = [row["split"] == "held_out" for row in scored.to_pylist()]
    expected = [level / 255 + 0.5 * (not own) for level, own in zip(levels, held_out, strict=True)]
    assert scored["similarity"].to_pylist() == pytest.approx(expected)
    assert other.to_pylist()[5]["reward"] is None
    assert other.to_pylist()[5]["failure"] == NO_PICTURE
    assert scored["failure"].null_count == scored.num_rows
    record = update_evaluation(before.evaluation, other, prompts)
    assert record.coverage == pytest.approx(26 / 27)


class LatentsJudge(Judge):
    """A reward of latents, which the gate does not have."""

    scores = "latents"


def test_guardrails_of_pictures_are_scored_anew_beside_rewards_of_latents(
    evaluate: Callable[..., Side], prompts: list[Prompt]
) -> None:
    """A guardrail's server moved by .3 between the evaluations of two equal policies."""
    guardrail = Judge()
    guardrail.name = "guardrail"
    scorer = Scorer(((LatentsJudge(), 1.0),), (guardrail,))
    tables = []
    for label, drift in (("1.1 online", 0.0), ("before", 0.3)):
        table = evaluate(label, 40).table
        values = table["similarity"].to_numpy() + drift
        schema = build_evaluation_schema(["reward", "guardrail", "similarity"])
        columns = {name: table[name] for name in schema.names if name in table.column_names}
        columns["guardrail"] = pa.array(values)
        tables.append(pa.table([columns[name] for name in schema.names], schema=schema))
    candidate, champion = score_sides_together(RECIPE, scorer, tables, prompts)
    held_out = [split == "held_out" for split in candidate["split"].to_pylist()]
    sides = [np.asarray(table["guardrail"].to_numpy())[held_out] for table in (candidate, champion)]
    assert np.array_equal(*sides)
    # Scores of latents stay as the evaluation has them, and so does their sum.
    for table, before in zip((candidate, champion), tables, strict=True):
        assert table["similarity"].equals(before["similarity"])
        assert table["reward"].equals(before["reward"])
    assert candidate["failure"].null_count == candidate.num_rows


class Listener(Reward):
    """A reward of sound that is never called."""

    name = "listener"
    scores = "sounds"

    def __call__(self, samples: Any, prompts: Sequence[Prompt]) -> RewardResult:
        raise AssertionError("it was called without sound")


def test_sound_that_cannot_be_read_names_the_files_of_its_samples(
    evaluate: Callable[..., Side],
    prompt_table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(pngs: list[bytes]) -> None:
        raise SoundError("is no WAV file that can be read; generate it again")

    monkeypatch.setattr(gate_scores, "read_sounds", fail)
    monkeypatch.setattr(gate_scores, "load_scorer", lambda *_: Scorer(((Listener(), 1.0),)))
    side = evaluate("candidate", 100)
    with pytest.raises(TableError) as refused:
        score_tables_together(
            RECIPE,
            prompt_table,
            {"candidate": side.evaluation},
            {"candidate": side.path},
            {"candidate": tmp_path / "scored.parquet"},
        )
    assert str(refused.value).startswith(f"{side.path}: the sound of a sample is no WAV")
