"""The ledger of looks: no look is lost, and none counts twice."""

from __future__ import annotations

import time

import pytest
from mlflow import MlflowClient

from ebbflow.recipe import Recipe
from ebbflow.recipe.promotion import PromotionConfig
from ebbflow.registry import looks
from ebbflow.registry.looks import PREFIX, YEAR, open_look, take_look
from ebbflow.tracking.parent_run import start_run


@pytest.fixture
def promotion(name: str) -> PromotionConfig:
    return PromotionConfig(model_name=name)


def test_every_run_takes_one_look_and_a_retry_takes_the_same(
    recipe: Recipe, client: MlflowClient, promotion: PromotionConfig
) -> None:
    first, second = (start_run(recipe, None) for _ in range(2))
    share = promotion.error_budget / promotion.looks_per_year
    taken = take_look(first, promotion)
    assert (taken.number, taken.error, taken.spent) == pytest.approx((1, share, share))
    later = take_look(second, promotion)
    assert (later.number, later.error, later.spent) == pytest.approx((2, share, 2 * share))
    assert take_look(first, promotion) == taken
    assert take_look(second, promotion) == later
    tags = client.get_registered_model(promotion.model_name).tags
    assert sorted(tags) == sorted(PREFIX + run.run_id for run in (first, second))


def test_a_look_that_was_killed_is_spent_and_its_retry_finishes_it(
    recipe: Recipe,
    client: MlflowClient,
    promotion: PromotionConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed, other = (start_run(recipe, None) for _ in range(2))

    def die(*_: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(looks, "compute_look_error", die)
        with pytest.raises(KeyboardInterrupt):
            take_look(killed, promotion)
    share = promotion.error_budget / promotion.looks_per_year
    taken = take_look(other, promotion)
    assert taken.spent == pytest.approx(2 * share)
    assert take_look(other, promotion) == taken, "a retry while the killed look has no number"
    assert take_look(killed, promotion).spent == pytest.approx(2 * share)
    assert take_look(other, promotion) == taken, "a retry after it"
    assert len(client.get_registered_model(promotion.model_name).tags) == 2


def test_the_budget_is_never_overspent_and_comes_back_after_a_year(
    recipe: Recipe,
    client: MlflowClient,
    promotion: PromotionConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few = promotion.model_copy(update={"looks_per_year": 3})
    taken = [take_look(start_run(recipe, None), few) for _ in range(6)]
    assert sum(look.error for look in taken) <= few.error_budget
    assert taken[-1].error < taken[0].error / 5
    after = time.time() + YEAR + 1
    monkeypatch.setattr(time, "time", lambda: after)
    fresh = take_look(start_run(recipe, None), few)
    assert (fresh.number, fresh.error) == pytest.approx((7, few.error_budget / 3))


def test_a_run_keeps_the_noise_that_it_began_with(
    recipe: Recipe, client: MlflowClient, promotion: PromotionConfig
) -> None:
    run, other = (start_run(recipe, None) for _ in range(2))
    assert open_look(run, promotion.model_name).look == 0
    take_look(other, promotion)
    assert open_look(run, promotion.model_name).look == 0, "resumed after another run's look"
    assert open_look(start_run(recipe, None), promotion.model_name).look == 1
