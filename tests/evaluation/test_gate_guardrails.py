"""What the gate says about guardrails: against the champion, and against the anchor."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from gate_cases import BEFORE, MANY, PROMPTS, decision, evaluation, samples, without

from ebbflow.data.records import GateDecision
from ebbflow.data.schema import build_evaluation_schema
from ebbflow.evaluation.gate import REFUSED, Anchor, decide_by_gate
from ebbflow.recipe import Recipe
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.rewards.base import NO_TARGET


def spread_samples(reward: float, shift: float, scale: float) -> pa.Table:
    """A guardrail whose prompts lie around 5 with a standard deviation of exactly ``scale``, moved
    by ``shift`` of them.
    """
    step = scale * ((PROMPTS - 1) / PROMPTS) ** 0.5
    rows = [
        row | {"reward": reward, "similarity": 5 * scale + step * (-1) ** index + shift * scale}
        for index, row in enumerate(samples(reward, similarity=0.0).to_pylist())
    ]
    return pa.Table.from_pylist(rows, schema=build_evaluation_schema(["reward", "similarity"]))


@pytest.mark.parametrize("scale", [0.01, 1.0, 1000.0])
@pytest.mark.parametrize(
    ("tolerance", "allowed", "fall", "promote"),
    [
        ({}, 0.4, 0.399, True),
        ({}, 0.4, 0.401, False),
        ({"default": 0.2}, 0.2, 0.19, True),
        ({"default": 0.2}, 0.2, 0.21, False),
        ({"default": 0.2, "standard_deviations": {"similarity": 0.1}}, 0.1, 0.11, False),
        ({"standard_deviations": {"similarity": 0.3}}, 0.3, 0.29, True),
        ({"standard_deviations": {"tesseract": 0.3}}, 0.4, 0.41, False),
    ],
)
def test_a_guardrail_may_fall_by_a_share_of_its_spread_on_any_scale(
    tolerance: dict[str, object], allowed: float, fall: float, promote: bool, scale: float
) -> None:
    recipe = Recipe.model_validate(
        {"evaluation": {"resamples": 100}, "promotion": {"guardrail_tolerance": tolerance}}
    )
    sides = spread_samples(0.9, -fall, scale), spread_samples(0.5, 0.0, scale)
    result = decide_by_gate(recipe, evaluation("1.1 online"), evaluation("before"), *sides)
    assert result.promote is promote
    (guardrail,) = result.guardrails
    assert guardrail.tolerance == pytest.approx(allowed * scale)
    assert "standard deviations of the champion's prompts" in " ".join(result.reasons)


@pytest.mark.parametrize(("scale", "promote"), [(0.01, True), (1.0, False)])
def test_an_absolute_tolerance_does_not_know_the_scale(scale: float, promote: bool) -> None:
    settings = {
        "evaluation": {"resamples": 100},
        "promotion": {"guardrail_tolerance": {"absolute": {"similarity": 0.02}}},
    }
    sides = spread_samples(0.9, -0.5, scale), spread_samples(0.5, 0.0, scale)
    result = decide_by_gate(
        Recipe.model_validate(settings), evaluation("1.1 online"), evaluation("before"), *sides
    )
    assert result.promote is promote
    assert result.guardrails[0].tolerance == 0.02


@pytest.mark.parametrize(("after", "promote"), [(1.0, True), (0.999, False)])
def test_prompts_that_do_not_differ_allow_no_fall_and_the_reason_says_so(
    after: float, promote: bool
) -> None:
    recipe = Recipe.model_validate({"evaluation": {"resamples": 100}})
    sides = samples(0.9, similarity=after), samples(0.5, similarity=1.0)
    result = decide_by_gate(recipe, evaluation("1.1 online"), evaluation("before"), *sides)
    assert result.promote is promote
    assert (
        "prompts all score the same; promotion.guardrail_tolerance.absolute can state more"
        in " ".join(result.reasons)
    )


def test_a_named_guardrail_that_nobody_measured_refuses() -> None:
    named = ["similarity", "tesseract", "jpeg_incompressibility"]
    recipe = Recipe.model_validate({"guardrails": named})
    sides = samples(0.9, similarity=0.85), samples(0.5, similarity=0.8)
    result = decide_by_gate(recipe, evaluation("1.1 online"), evaluation("before"), *sides)
    assert not result.promote
    refused = [reason for reason in result.reasons if reason.startswith(REFUSED)]
    assert [reason.split()[2] for reason in refused] == named[1:]


def test_a_default_guardrail_that_nobody_measured_has_no_say_but_is_mentioned() -> None:
    result = decision(samples(0.9, similarity=0.85), samples(0.5, similarity=0.8))
    assert result.promote
    assert [guardrail.metric for guardrail in result.guardrails] == ["similarity"]
    assert "Guardrail tesseract was measured on neither side" in " ".join(result.reasons)


def test_a_recipe_without_guardrails_is_told_from_one_whose_guardrails_held() -> None:
    result = decide_by_gate(
        Recipe.model_validate({"evaluation": {"resamples": 500}, "guardrails": []}),
        evaluation("1.1 online"),
        evaluation("before"),
        samples(0.9),
        samples(0.5),
    )
    assert result.promote
    assert result.guardrails == []
    assert len(result.reasons) == 5, "coverage, target, disasters, guardrails and statistics"
    assert result.reasons[3] == (
        "No guardrails are named: only the reward and the statistics of the images are compared."
    )


@pytest.mark.parametrize(
    ("candidate", "champion", "absent"),
    [({"similarity": 0.85}, BEFORE, "candidate"), (BEFORE, {"similarity": 0.8}, "champion")],
)
def test_a_guardrail_that_one_side_lacks_refuses(
    candidate: dict[str, float], champion: dict[str, float], absent: str
) -> None:
    result = decision(samples(0.9, **candidate), samples(0.5, **champion))
    assert not result.promote
    assert f"but not on the {absent}" in " ".join(result.reasons)


@pytest.mark.parametrize(
    ("failed", "failed_before", "promote", "sentence"),
    [
        (0, 0, True, "or more is ruled out"),
        (
            126,
            126,
            False,
            "failed on 126 of 128 held-out samples of the candidate and on 126 of the champion",
        ),
        (7, 7, False, "more than max_failed_share = 5.0% allows"),
        (6, 6, True, "or more is ruled out"),
        (0, 7, False, "more than max_failed_share = 5.0% allows"),
        (
            1,
            0,
            False,
            (
                "failed on 1 of 128 held-out samples of the candidate and on 0 of the champion: it"
                " fails more often"
            ),
        ),
        (4, 3, False, "it fails more often"),
        (3, 4, True, "or more is ruled out"),
    ],
)
def test_failures_of_a_guardrail_count_on_both_sides(
    failed: int, failed_before: int, promote: bool, sentence: str
) -> None:
    candidate = without(samples(0.9, MANY, tesseract=0.35, similarity=0.85), "tesseract", failed)
    champion = without(samples(0.5, MANY, **BEFORE), "tesseract", failed_before)
    result = decision(candidate, champion)
    assert result.promote is promote
    (about,) = [reason for reason in result.reasons if "Guardrail tesseract" in reason]
    assert sentence in about
    assert about.startswith(REFUSED) is not promote


def test_a_prompt_without_a_text_is_not_asked_of_a_guardrail_that_reads() -> None:
    silent = f"tesseract: {NO_TARGET}; similarity: {NO_TARGET}"
    sides = [samples(0.9, MANY, tesseract=0.35, similarity=0.85), samples(0.5, MANY, **BEFORE)]
    result = decision(*[without(side, "tesseract", 40, silent, None) for side in sides])
    assert result.promote
    assert "over 88 prompts" in " ".join(result.reasons)


@pytest.mark.parametrize(
    ("failure", "target"), [("tesseract: timed out", None), (f"tesseract: {NO_TARGET}", "T")]
)
def test_any_other_reason_or_a_prompt_with_a_text_is_a_failure(
    failure: str, target: str | None
) -> None:
    sides = [samples(0.9, MANY, tesseract=0.35, similarity=0.85), samples(0.5, MANY, **BEFORE)]
    assert not decision(
        *[without(side, "tesseract", 40, failure, target) for side in sides]
    ).promote


def test_a_guardrail_that_failed_everywhere_keeps_the_candidate_back() -> None:
    result = decision(
        samples(0.9, tesseract=None, similarity=0.85), samples(0.5, tesseract=None, similarity=0.80)
    )
    assert not result.promote
    assert "Guardrail tesseract failed on 24 of 24 held-out samples of the candidate" in " ".join(
        result.reasons
    )


def test_a_guardrail_of_a_prompt_set_is_compared_on_its_prompts_alone() -> None:
    """It has no value on the others: that is no failure. A failure on its own prompts still is."""
    sets = [{"name": name, "source": f"{name}.txt"} for name in ("words", "signs")]
    settings = {
        "prompts": {"mixture": sets},
        "guardrails": [{"name": "similarity", "prompts": ["words"]}],
    }
    recipe = Recipe.model_validate(settings | {"evaluation": {"resamples": 100}})

    def side(reward: float, similarity: float, failed: tuple[int, ...] = ()) -> pa.Table:
        rows = samples(reward, similarity=similarity).to_pylist()
        for row in rows:
            row["source"] = "words" if row["prompt_id"] < MIN_PROMPTS else "signs"
            row["similarity"] = (
                None if row["source"] == "signs" or row["prompt_id"] in failed else similarity
            )
        return pa.Table.from_pylist(rows, schema=build_evaluation_schema(["reward", "similarity"]))

    def decide(candidate: pa.Table) -> GateDecision:
        return decide_by_gate(
            recipe, evaluation("1.1 online"), evaluation("before"), candidate, side(0.5, 0.8)
        )

    better = decide(side(0.9, 0.9))
    assert better.promote
    assert better.guardrails[0].prompts == MIN_PROMPTS
    assert not decide(side(0.9, 0.7)).promote
    lost = decide(side(0.9, 0.9, failed=(0,)))
    assert not lost.promote
    failures = f"Guardrail similarity failed on 1 of {MIN_PROMPTS} held-out samples"
    assert failures in " ".join(lost.reasons)


def test_few_prompts_of_a_guardrail_refuse_too() -> None:
    keys = {"guardrails": ["similarity"], "promotion": {"margins": {}}}
    silent = f"similarity: {NO_TARGET}"
    sides = samples(0.9, similarity=0.9), samples(0.5, similarity=0.8)
    result = decide_by_gate(
        Recipe.model_validate(keys),
        evaluation("1.1 online"),
        evaluation("before"),
        *[without(side, "similarity", PROMPTS - 15, silent, None) for side in sides],
    )
    assert not result.promote
    assert "scored 15 held-out prompts on both sides, too few" in " ".join(result.reasons)


def shifted_samples(shift: float, seed: int, **guardrails: float) -> pa.Table:
    """Scores with a standard deviation of 1 over prompts, moved by ``shift``, and guardrails that
    are moved by theirs.
    """
    generator = np.random.default_rng(seed)
    easiness = np.random.default_rng(0).normal(size=MANY)
    rows = [
        row | {"reward": easiness[index] + shift + 0.1 * generator.normal()}
        for index, row in enumerate(
            samples(0.5, MANY, **dict.fromkeys(guardrails, 0.0)).to_pylist()
        )
    ]
    for name, moved in guardrails.items():
        for index, row in enumerate(rows):
            row[name] = easiness[index] + moved + 0.1 * generator.normal()
    schema = build_evaluation_schema(["reward", *guardrails])
    return pa.Table.from_pylist(rows, schema=schema)


@pytest.mark.parametrize(("fallen", "promote"), [(0.3, True), (0.4, True), (0.55, False)])
def test_falls_that_add_up_against_the_anchor_refuse(fallen: float, promote: bool) -> None:
    """Each step fell by .04 of a standard deviation, which the champion's tolerance allows."""
    recipe = Recipe.model_validate({"guardrails": ["similarity"]})
    result = decide_by_gate(
        recipe,
        evaluation("1.1 online"),
        evaluation("champion v9"),
        shifted_samples(1.0, 1, similarity=-fallen),
        shifted_samples(0.5, 2, similarity=-fallen + 0.04),
        anchor=Anchor("version 3, which a person chose", shifted_samples(0.0, 3, similarity=0.0)),
    )
    assert result.promote is promote
    assert result.anchor == "version 3, which a person chose"
    assert [one.metric for one in result.anchored] == ["reward", "similarity"]
    said = [reason for reason in result.reasons if "against the anchor, version 3" in reason]
    assert len(said) == 2
    assert ("The cumulative tolerance (promotion.anchor_tolerance) is used up" in said[1]) is (
        not promote
    )


def test_a_guardrail_without_prompts_in_common_with_the_anchor_refuses() -> None:
    """As where it failed on all of the anchor's pictures: a refusal, and no error of the task."""
    anchor = shifted_samples(0.0, 3, similarity=0.0)
    column = anchor.column_names.index("similarity")
    nothing = pa.nulls(anchor.num_rows, anchor["similarity"].type)
    result = decide_by_gate(
        Recipe.model_validate({"guardrails": ["similarity"]}),
        evaluation("1.1 online"),
        evaluation("champion v9"),
        shifted_samples(1.0, 1, similarity=0.0),
        shifted_samples(0.5, 2, similarity=0.0),
        anchor=Anchor("the base model", anchor.set_column(column, "similarity", nothing)),
    )
    assert not result.promote
    (refused,) = [reason for reason in result.reasons if reason.startswith(REFUSED)]
    assert "Guardrail similarity against the anchor, the base model, was scored on 0" in refused


@pytest.mark.parametrize(
    ("tolerance", "fallen", "promote", "reason"),
    [
        # .5 / .4 = 1.25 times its own tolerance, instead of half a standard deviation.
        ({"standard_deviations": {"similarity": 0.08}}, 0.2, False, "(0.1 standard deviations"),
        ({"standard_deviations": {"similarity": 0.08}}, 0.05, True, "(0.1 standard deviations"),
        ({"absolute": {"similarity": 0.6}}, 0.65, True, "0.750 (1.25 times its tolerance)"),
        ({"absolute": {"similarity": 0.6}}, 0.85, False, "0.750 (1.25 times its tolerance)"),
        ({"default": 0.0, "absolute": {"similarity": 0.6}}, 0.65, False, "0.600 (1 times its"),
    ],
)
def test_a_guardrail_with_its_own_tolerance_has_it_against_the_anchor(
    tolerance: dict[str, object], fallen: float, promote: bool, reason: str
) -> None:
    recipe = Recipe.model_validate(
        {"guardrails": ["similarity"], "promotion": {"guardrail_tolerance": tolerance}}
    )
    result = decide_by_gate(
        recipe,
        evaluation("1.1 online"),
        evaluation("champion v9"),
        shifted_samples(1.0, 1, similarity=-fallen),
        shifted_samples(0.5, 2, similarity=-fallen),
        anchor=Anchor("version 3, which a person chose", shifted_samples(0.0, 3, similarity=0.0)),
    )
    assert result.promote is promote
    said = [one for one in result.reasons if "Guardrail similarity against the anchor" in one]
    assert reason in said[0]
