"""The gate's truth table: every rule alone can keep a candidate back, and every rule explains
itself.
"""

from __future__ import annotations

import pyarrow as pa
import pytest

from ebbflow.data.records import Evaluation, GateDecision
from ebbflow.data.schema import build_evaluation_schema
from ebbflow.evaluation.gate import REFUSED, decide_by_gate
from ebbflow.recipe import Recipe
from ebbflow.rewards.base import NO_TARGET

PROMPTS = 24
ABSOLUTE = {"guardrail_tolerance": {"absolute": {"tesseract": 0.02, "similarity": 0.02}}}
RECIPE = Recipe.model_validate({"evaluation": {"resamples": 500}, "promotion": ABSOLUTE})


def samples(reward: float, prompts: int = PROMPTS, **guardrails: float | None) -> pa.Table:
    """Rewards that vary around a mean, so that intervals have a width; guardrails are constant."""
    rows = [
        {
            "prompt_id": i,
            "sample": 0,
            "split": "held_out",
            "prompt": "p",
            "target": "T",
            "image": b"",
        }
        | {"reward": reward + 0.1 * (-1) ** i * (reward > 0.6), **guardrails}
        for i in range(prompts)
    ]
    return pa.Table.from_pylist(rows, schema=build_evaluation_schema(["reward", *guardrails]))


def evaluation(label: str, coverage: float = 1.0) -> Evaluation:
    return Evaluation(
        label=label,
        policy_version=0,
        held_out={},
        validation={},
        coverage=coverage,
        velocity_drift=0.0,
        seconds={},
    )


def decision(candidate: pa.Table, champion: pa.Table, coverage: float = 1.0) -> GateDecision:
    return decide_by_gate(
        RECIPE, evaluation("1.1 online", coverage), evaluation("before"), candidate, champion
    )


BEFORE = {"tesseract": 0.30, "similarity": 0.80}


@pytest.mark.parametrize(
    ("reward", "guardrails", "promote", "sentence"),
    [
        (0.9, {"tesseract": 0.35, "similarity": 0.85}, True, "lies above zero"),
        (0.5, {"tesseract": 0.35, "similarity": 0.85}, False, "does not lie above zero"),
        (0.4, {"tesseract": 0.35, "similarity": 0.85}, False, "does not lie above zero"),
        (0.9, {"tesseract": 0.28, "similarity": 0.85}, True, "within the allowed fall of 0.0200"),
        (0.9, {"tesseract": 0.27, "similarity": 0.85}, False, "beyond the allowed fall of 0.0200"),
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
    assert len(result.reasons) == 5, (
        "coverage, target, two guardrails and the statistics each give a reason"
    )
    assert sum(reason.startswith(REFUSED) for reason in result.reasons) == (not promote)
    assert {guardrail.metric for guardrail in result.guardrails} == {"tesseract", "similarity"}


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
        ({}, 0.1, 0.099, True),
        ({}, 0.1, 0.101, False),
        ({"default": 0.2}, 0.2, 0.19, True),
        ({"default": 0.2}, 0.2, 0.21, False),
        ({"default": 0.2, "standard_deviations": {"similarity": 0.1}}, 0.1, 0.11, False),
        ({"standard_deviations": {"similarity": 0.3}}, 0.3, 0.29, True),
        ({"standard_deviations": {"tesseract": 0.3}}, 0.1, 0.19, False),
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


def test_a_guardrail_that_nobody_measured_has_no_say_but_is_mentioned() -> None:
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
    assert len(result.reasons) == 4, "coverage, target, guardrails and statistics"
    assert result.reasons[2] == (
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


def test_a_missing_prompt_refuses() -> None:
    result = decision(samples(0.9, PROMPTS - 1, **BEFORE), samples(0.5, **BEFORE))
    assert not result.promote
    assert result.coverage == pytest.approx((PROMPTS - 1) / PROMPTS)
    assert "the candidate has no reward for 1 and the champion for 0" in result.reasons[0]


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
    assert "the candidate has no reward for 0 and the champion for 1" in result.reasons[0]


def test_prompts_that_are_missing_from_both_tables_refuse() -> None:
    result = decision(samples(0.9, **BEFORE), samples(0.5, **BEFORE), coverage=0.5)
    assert not result.promote
    assert result.coverage == 0.5


def test_a_full_win_names_its_sides_and_numbers() -> None:
    result = decision(samples(0.9, **BEFORE), samples(0.5, **BEFORE))
    assert (result.candidate, result.champion, result.coverage) == ("1.1 online", "before", 1.0)
    assert result.target.low > 0
    assert "95% interval [+0." in result.reasons[1]
    assert GateDecision.model_validate_json(result.model_dump_json()) == result


def without(
    table: pa.Table,
    metric: str,
    rows: int,
    failure: str = "tesseract: timed out",
    target: str | None = "T",
) -> pa.Table:
    """The first ``rows`` prompts failed the metric."""
    changed = [
        row | {metric: None, "failure": failure, "target": target} if index < rows else row
        for index, row in enumerate(table.to_pylist())
    ]
    return pa.Table.from_pylist(changed, schema=table.schema)


MANY = 128


@pytest.mark.parametrize(
    ("failed", "failed_before", "promote", "sentence"),
    [
        (0, 0, True, "within the allowed fall"),
        (
            126,
            126,
            False,
            "failed on 126 of 128 held-out samples of the candidate and on 126 of the champion",
        ),
        (7, 7, False, "more than max_failed_share = 5.0% allows"),
        (6, 6, True, "within the allowed fall"),
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
        (3, 4, True, "within the allowed fall"),
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
            row["source"] = "words" if row["prompt_id"] < 6 else "signs"
            row["similarity"] = (
                None if row["source"] == "signs" or row["prompt_id"] in failed else similarity
            )
        return pa.Table.from_pylist(rows, schema=build_evaluation_schema(["reward", "similarity"]))

    def decided(candidate: pa.Table) -> GateDecision:
        return decide_by_gate(
            recipe, evaluation("1.1 online"), evaluation("before"), candidate, side(0.5, 0.8)
        )

    better = decided(side(0.9, 0.9))
    assert better.promote
    assert better.guardrails[0].prompts == 6
    assert not decided(side(0.9, 0.7)).promote
    lost = decided(side(0.9, 0.9, failed=(0,)))
    assert not lost.promote
    assert "Guardrail similarity failed on 1 of 6 held-out samples" in " ".join(lost.reasons)
