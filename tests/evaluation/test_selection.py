import pytest
from hypothesis import given
from hypothesis import strategies as st

from ebbflow.data.records import Evaluation
from ebbflow.evaluation.selection import find_best_policy, find_stop_reason
from ebbflow.recipe import Recipe


def history(*rewards, held_out=None):
    held_out = held_out or [0.0] * len(rewards)
    return [
        Evaluation(
            label=str(index),
            policy_version=index,
            held_out={"reward": hidden},
            validation={"reward": reward, "ocr": 1 - reward},
            coverage=1,
            velocity_drift=0,
            seconds={},
        )
        for index, (reward, hidden) in enumerate(zip(rewards, held_out, strict=True))
    ]


def recipe(rounds=9, stages=1, patience=2, min_delta=0.0):
    return Recipe.model_validate(
        {
            "rounds": rounds,
            "stages": [{"kind": "online"}] * stages,
            "stop": {"patience": patience, "min_delta": min_delta},
        }
    )


def test_the_best_has_the_highest_validation_reward():
    assert find_best_policy(history(0.1, 0.4, 0.6, 0.5)) == 2
    assert find_best_policy(history(0.1, 0.6, 0.4, 0.6)) in (1, 3)


def test_the_held_out_prompts_do_not_choose():
    assert find_best_policy(history(0.1, 0.3, 0.5, held_out=[0, 1, 0])) == 2


def test_the_untrained_policy_is_never_chosen():
    assert find_best_policy(history(0.9, 0.1, 0.2)) == 2


@given(st.lists(st.floats(0, 1), min_size=2, max_size=12))
def test_nothing_trained_is_better_than_the_best(rewards):
    chosen = find_best_policy(history(*rewards))
    assert chosen >= 1
    assert rewards[chosen] == max(rewards[1:])


def test_stages_of_branches_are_not_in_the_history():
    """Their policies are evaluated on other prompts."""
    merge = {"kind": "online", "algorithm": {"name": "distillation", "teacher": "branch:a"}}
    stages = [{"kind": "online", "branch": "a"}, {"kind": "online", "branch": "a"}, merge]
    branched = Recipe.model_validate(
        {"rounds": 9, "branches": {"a": {}}, "stages": stages, "stop": {"patience": 2}}
    )
    assert find_stop_reason(branched, history(0.1, 0.2, 0.3, 0.2), 3) is None
    assert "stop after 4 of 9 rounds" in (
        find_stop_reason(branched, history(0.1, 0.2, 0.3, 0.2, 0.3), 4) or ""
    )


def test_it_stops_when_the_rounds_are_done():
    assert (
        find_stop_reason(recipe(rounds=2), history(0.1, 0.2, 0.3), 2)
        == "stop: all 2 rounds are done"
    )
    assert find_stop_reason(recipe(rounds=3), history(0.1, 0.2, 0.3), 2) is None


def test_it_stops_when_patience_is_over():
    plan = recipe(patience=2)
    assert find_stop_reason(plan, history(0.5, 0.6, 0.6), 2) is None
    reason = find_stop_reason(plan, history(0.5, 0.6, 0.55, 0.6), 3)
    assert "stop after 3 of 9 rounds" in reason
    assert "0.600" in reason
    assert find_stop_reason(plan, history(0.5, 0.6, 0.55, 0.61), 3) is None


def test_patience_starts_with_the_untrained_policy():
    plan = recipe(patience=2)
    assert find_stop_reason(plan, history(0.5, 0.4), 1) is None
    assert find_stop_reason(plan, history(0.5, 0.4, 0.45), 2) is not None


@pytest.mark.parametrize(("reward", "stops"), [(0.64, True), (0.66, False)])
def test_growth_below_the_least_counts_as_none(reward, stops):
    plan = recipe(patience=1, min_delta=0.05)
    assert (find_stop_reason(plan, history(0.5, 0.6, reward), 2) is not None) == stops


def test_rounds_are_compared_at_their_ends():
    # Two stages a round: the entries between the ends may be better or worse without counting.
    plan = recipe(stages=2, patience=1)
    assert find_stop_reason(plan, history(0.1, 0.9, 0.2, 0.1, 0.3), 2) is None
    assert find_stop_reason(plan, history(0.1, 0.0, 0.3, 0.9, 0.2), 2) is not None


@given(st.lists(st.floats(0, 1), min_size=2, max_size=9), st.integers(1, 3))
def test_it_never_stops_while_the_reward_grows(rewards, patience):
    rising = sorted(set(rewards))
    assert (
        find_stop_reason(recipe(rounds=20, patience=patience), history(*rising), len(rising) - 1)
        is None
    )


def test_a_policy_without_a_validation_reward_is_never_best() -> None:
    def evaluation(**validation: float) -> Evaluation:
        return Evaluation(
            label="x",
            policy_version=0,
            held_out={},
            validation=validation,
            coverage=1.0,
            velocity_drift=0.0,
            seconds={},
        )

    history = [evaluation(reward=0.9), evaluation(), evaluation(reward=0.1)]
    assert find_best_policy(history) == 2
    assert find_stop_reason(Recipe(rounds=5), history, 1) is None


def test_a_stage_of_the_first_round_alone_is_no_end_of_a_round():
    """Rewards after the rounds: .5, .55, .6; the fine-tuning before the first had .7."""
    stages = [{"kind": "offline", "only_from_base": True}, {"kind": "online"}]
    plan = Recipe.model_validate({"rounds": 9, "stages": stages, "stop": {"patience": 2}})
    assert find_stop_reason(plan, history(0.4, 0.7, 0.5, 0.55, 0.6), 3) is None
    # A run that skipped it has the same ends.
    assert find_stop_reason(plan, history(0.4, 0.5, 0.55, 0.6), 3) is None
    assert "stop after 3" in (find_stop_reason(plan, history(0.4, 0.1, 0.5, 0.5, 0.5), 3) or "")
