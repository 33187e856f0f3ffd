"""The ledger: hours and money from the clocks of the nodes."""

from __future__ import annotations

import pytest

from ebbflow.recipe import Recipe
from ebbflow.report.costs import Machines, Prices, build_ledger, find_part
from tasks.costs import find_machines, find_task_kind
from tasks.deployment import DeploymentConfig

STAGES = ["1.1 online", "1.2 offline"]
NODES = {
    "base model": (0.0, 360.0),
    "prompts": (0.0, 36.0),
    "1.1 online": (400.0, 2200.0),
    "1.2 offline rollout 0": (2200.0, 2560.0),
    "1.2 offline rollout 1": (2200.0, 2560.0),
    "before evaluation": (300.0, 660.0),
}


def occupy(node):
    return Machines(0, 1) if node == "prompts" else Machines(2, 8)


def test_hours_and_money_add_up_over_nodes_and_parts():
    ledger = build_ledger(NODES, STAGES, occupy, Prices(2.5, 0.05, "EUR"), gain=0.04)
    rows = {row.part: row for row in ledger.rows}
    assert rows["1.1 online"][1:] == pytest.approx((1.0, 4.0, 2.7))
    # Two shards side by side occupy two machines.
    assert rows["1.2 offline"][1:] == pytest.approx((0.4, 1.6, 1.08))
    assert rows["bookkeeping"][1:] == pytest.approx((0.0, 0.01, 0.0005))
    assert ledger.total.gpu_hours == pytest.approx(1.0 + 0.4 + 0.2 + 0.2)
    assert ledger.total.money == pytest.approx(sum(row.money for row in ledger.rows))
    per_point = ledger.divide_by_points()
    assert per_point.money == pytest.approx(ledger.total.money / 4)
    summary = ledger.summarise()
    assert summary["currency"] == "EUR"
    assert summary["parts"]["total"]["gpu_hours"] == pytest.approx(1.8)


def test_without_a_rise_or_a_price_there_is_no_cost_of_a_point_and_no_currency():
    ledger = build_ledger(NODES, STAGES, occupy, Prices(), gain=-0.1)
    assert ledger.divide_by_points() is None
    assert ledger.currency == ""
    assert "per point" not in ledger.summarise()["parts"]
    assert build_ledger({}, STAGES, occupy, Prices(), None).total.core_hours == 0


def test_nodes_belong_to_their_stages():
    assert find_part("1.2 offline scoring 0", STAGES) == "1.2 offline"
    assert find_part("1.2 offline evaluation", STAGES) == "evaluations"
    assert find_part("gate", STAGES) == "bookkeeping"
    # 1.1 is not the beginning of 1.10.
    assert find_part("1.10 online", ["1.1 online", "1.10 online"]) == "1.10 online"


def test_nodes_occupy_what_the_deployment_gives_their_tasks():
    recipe = Recipe()
    deployment = DeploymentConfig.model_validate(
        {
            "train_processes": 8,
            "train_nodes": 2,
            "accelerated": {"gpus": 1, "cpu": 12},
            "training_group": {"gpus": 1, "cpu": 5},
            "scorer": {"gpus": 1, "cpu": 4},
            "downloader": {"cpu": 7},
            "light": {"cpu": 3},
        }
    )
    assert find_machines(deployment, recipe, "1.1 online") == (1, 12)
    assert find_machines(deployment, recipe, "1.2 offline") == (16, 80)
    assert find_machines(deployment, recipe, "1.2 offline rollout 3") == (1, 12)
    assert find_machines(deployment, recipe, "1.2 offline advantages") == (0, 3)
    assert find_machines(deployment, recipe, "1.2 offline scoring 0") == (1, 4)
    assert find_machines(deployment, recipe, "1.2 offline latents") == (1, 12)
    assert find_machines(deployment, recipe, "1.1 online data") == (0, 7)
    assert find_machines(deployment, recipe, "gate") == (0, 3)
    assert find_machines(deployment, recipe, "gate scores") == (1, 4)
    assert find_machines(deployment, recipe, "1 letters gate") == (1, 4)
    assert find_task_kind(recipe, "1.2 offline scoring 0") == "scorer"
    # Pictures of the stage's data, or of its anchor, are encoded on a GPU.
    assert find_machines(deployment, recipe, "1.1 online latents") == (1, 12)
    assert find_task_kind(recipe, "1.2 offline data") == "downloader"
    assert find_task_kind(recipe, "before evaluation") == "accelerated"
