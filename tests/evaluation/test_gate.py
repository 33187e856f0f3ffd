"""The gate's truth table: every rule alone can keep a candidate back, and every rule explains
itself.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from gate_cases import BEFORE, MANY, PROMPTS, decision, evaluation, samples

from ebbflow.data.records import GateDecision, Look
from ebbflow.data.schema import build_evaluation_schema
from ebbflow.evaluation.gate import REFUSED, decide_by_gate
from ebbflow.evaluation.look import compute_look_error
from ebbflow.recipe import Recipe
from ebbflow.recipe.guardrails import MIN_PROMPTS
from ebbflow.recipe.promotion import PromotionConfig


@pytest.mark.parametrize(
    ("reward", "guardrails", "promote", "sentence"),
    [
        (0.9, {"tesseract": 0.35, "similarity": 0.85}, True, "a proven gain"),
        (0.5, {"tesseract": 0.35, "similarity": 0.85}, False, "no proven gain"),
        (0.4, {"tesseract": 0.35, "similarity": 0.85}, False, "no proven gain"),
        (
            0.9,
            {"tesseract": 0.281, "similarity": 0.85},
            True,
            "a fall of 0.0200 or more is ruled out",
        ),
        (0.9, {"tesseract": 0.27, "similarity": 0.85}, False, "0.0200 or more is not ruled out"),
        (
            0.9,
            {"tesseract": 0.35, "similarity": 0.70},
            False,
            "Guardrail similarity went from 0.800 to 0.700",
        ),
    ],
)
def test_target_and_guardrails_decide(
    reward: float, guardrails: dict[str, float], promote: bool, sentence: str
) -> None:
    result = decision(samples(reward, **guardrails), samples(0.5, **BEFORE))
    assert result.promote is promote
    assert sentence in " ".join(result.reasons)
    assert len(result.reasons) == 6, (
        "coverage, target, disasters, two guardrails and the statistics each give a reason"
    )
    refused = [reason for reason in result.reasons if reason.startswith(REFUSED)]
    # Without a gain the disasters are not ruled out either.
    assert len(refused) == (0 if promote else 2 if reward < 0.9 else 1)
    assert {guardrail.metric for guardrail in result.guardrails} == {"tesseract", "similarity"}


def test_a_missing_prompt_refuses() -> None:
    result = decision(samples(0.9, PROMPTS - 1, **BEFORE), samples(0.5, **BEFORE))
    assert not result.promote
    assert result.coverage == pytest.approx((PROMPTS - 1) / PROMPTS)
    assert "the candidate has no reward for 1 and the champion for 0" in " ".join(result.reasons)


def test_a_reward_that_failed_refuses() -> None:
    champion = samples(0.5, **BEFORE)
    rewards = champion["reward"].to_pylist()
    failed = champion.set_column(
        champion.schema.get_field_index("reward"),
        "reward",
        pa.array([None, *rewards[1:]], pa.float64()),
    )
    result = decision(samples(0.9, **BEFORE), failed)
    assert not result.promote
    assert "the candidate has no reward for 0 and the champion for 1" in " ".join(result.reasons)


def test_prompts_that_are_missing_from_both_tables_refuse() -> None:
    result = decision(samples(0.9, **BEFORE), samples(0.5, **BEFORE), coverage=0.5)
    assert not result.promote
    assert result.coverage == 0.5


def test_a_full_win_names_its_sides_and_numbers() -> None:
    result = decision(samples(0.9, **BEFORE), samples(0.5, **BEFORE))
    assert (result.candidate, result.champion, result.coverage) == ("1.1 online", "before", 1.0)
    assert result.target.low > 0
    assert result.target.p_value is not None
    assert result.target.p_value < 1e-6
    assert "below 0.0250: a proven gain" in result.reasons[1]
    assert GateDecision.model_validate_json(result.model_dump_json()) == result


@pytest.mark.parametrize(("prompts", "promote"), [(MIN_PROMPTS - 1, False), (MIN_PROMPTS, True)])
def test_too_few_prompts_refuse_however_large_the_gain(prompts: int, promote: bool) -> None:
    recipe = Recipe.model_validate({"guardrails": []})
    sides = samples(1.5, prompts), samples(0.5, prompts)
    result = decide_by_gate(recipe, evaluation("1.1 online"), evaluation("before"), *sides)
    assert result.promote is promote
    assert ("Refused: Too few held-out prompts" in result.reasons[0]) is not promote


@pytest.mark.parametrize(("error", "promote"), [(0.025, True), (1e-12, False)])
def test_a_look_decides_at_its_share_of_the_budget(error: float, promote: bool) -> None:
    recipe = Recipe.model_validate({"guardrails": []})
    look = Look(number=3, error=error, spent=0.03, budget=0.05)
    generator = np.random.default_rng(1)
    rows = samples(0.5, MANY).to_pylist()
    sides = [
        pa.Table.from_pylist(
            [row | {"reward": 0.5 + shift + 0.1 * generator.normal()} for row in rows],
            schema=build_evaluation_schema(["reward"]),
        )
        for shift in (0.06, 0.0)
    ]
    result = decide_by_gate(
        recipe, evaluation("1.1 online"), evaluation("before"), *sides, look=look
    )
    assert result.promote is promote
    assert result.look == look
    assert (
        "look 3 in the error budget of the model (spent with it: 0.0300 of 0.05"
        in (result.reasons[1])
    )


@pytest.mark.parametrize("looks_per_year", [1, 4, 52])
def test_a_look_after_those_of_a_year_says_what_to_do(looks_per_year: int) -> None:
    promotion = PromotionConfig(looks_per_year=looks_per_year)
    recipe = Recipe.model_validate({"guardrails": [], "promotion": promotion.model_dump()})
    spent = 0.0
    said = []
    for number in range(1, looks_per_year + 3):
        error = compute_look_error(promotion, spent)
        spent += error
        look = Look(number=number, error=error, spent=spent, budget=promotion.error_budget)
        sides = samples(0.5), samples(0.5)
        result = decide_by_gate(
            recipe, evaluation("1.1 online"), evaluation("before"), *sides, look=look
        )
        reason = next(one for one in result.reasons if "The reward went" in one)
        said.append("The error budget is spent" in reason)
        assert ("`ebbflow rollback RECIPE --to VERSION`" in reason) is said[-1]
    assert said == [False] * looks_per_year + [True, True]


def test_a_gain_without_a_disaster_in_the_sample_is_no_proof() -> None:
    """All of 24 prompts rise by .01. Disasters on 5 % of prompts would outweigh that, and 29 % of
    samples of 24 prompts have none.
    """
    keys = {"rewards": [{"name": "ocr"}], "guardrails": []}
    sides = [
        pa.Table.from_pylist(
            [row | {"reward": reward, "ocr": reward} for row in samples(0.5).to_pylist()],
            schema=build_evaluation_schema(["reward", "ocr"]),
        )
        for reward in (0.51, 0.5)
    ]
    result = decide_by_gate(
        Recipe.model_validate(keys), evaluation("1.1 online"), evaluation("before"), *sides
    )
    assert not result.promote
    assert [reason for reason in result.reasons if reason.startswith(REFUSED)] == [
        result.reasons[2]
    ]
    assert (
        "fell to 0, the gain would not be proven (p = 0.622, needed: 0.0250)" in result.reasons[2]
    )


def test_the_luck_of_the_champion_is_said() -> None:
    recipe = Recipe.model_validate({"guardrails": []})
    result = decide_by_gate(
        recipe,
        evaluation("1.1 online"),
        evaluation("champion v9"),
        samples(0.9),
        samples(0.5),
        promoted_reward=0.53,
    )
    assert result.promoted_reward == 0.53
    assert (
        "scored 0.530 in the look that promoted it, +0.0300 to its new samples"
        in (result.reasons[1])
    )
