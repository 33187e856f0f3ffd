"""The call of a loss on random rows, before a run: what comes with Ebbflow passes, and each mistake
is named.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ebbflow.algorithms.base import (
    Algorithm,
    ForwardRows,
    TrajectoryRows,
    compute_flow_matching_error,
    mean_per_row,
)
from ebbflow.algorithms.built_in import tdm_r1
from ebbflow.algorithms.built_in.tdm_r1 import TDMR1Config
from ebbflow.algorithms.registry import BUILT_IN
from ebbflow.recipe.algorithms import ForwardConfig, TrajectoryConfig
from ebbflow.recipe.base import RecipeError
from ebbflow.training.kinds.base import trainable_kind
from ebbflow.training.trial import try_loss


@pytest.mark.parametrize(
    "algorithm", BUILT_IN.values(), ids=lambda algorithm: algorithm.config.__name__
)
def test_loss_trial_accepts_every_built_in_algorithm(algorithm: Algorithm) -> None:
    needed = {"teacher": "elsewhere"} if "teacher" in algorithm.config.model_fields else {}
    try_loss("mine:ALGORITHM", algorithm, algorithm.config.model_validate(needed))


@pytest.mark.parametrize(
    "algorithm", BUILT_IN.values(), ids=lambda algorithm: algorithm.config.__name__
)
def test_an_algorithm_says_whether_rewards_only_choose_its_samples(algorithm: Algorithm) -> None:
    needed = {"teacher": "elsewhere"} if "teacher" in algorithm.config.model_fields else {}
    hyper = algorithm.config.model_validate(needed)
    ids = np.repeat([0, 1], 4)
    falling = np.tile(np.linspace(1, -1, 4), 2)
    chosen = algorithm.select(falling, np.ones(8, bool), ids, hyper)
    others = algorithm.select(-falling, np.ones(8, bool), ids, hyper)
    rows, _ = trainable_kind(hyper.kind).build_trial_rows(chosen, algorithm, hyper)
    weighed = [
        algorithm.loss(replace(rows, advantage=factor * rows.advantage), hyper)[0]
        for factor in (1.0, -0.5)
    ]
    chooses = [group.tolist() for group in chosen] != [group.tolist() for group in others]
    assert hyper.only_selects == (chooses and torch.equal(*weighed))


@pytest.mark.parametrize(
    ("surrogate_loss", "words"),
    [
        (lambda rows, config: (rows.velocity.mean(), {}), r"the loss as a tensor of shape \[\]"),
        (lambda rows, config: (mean_per_row(rows.target), {}), "gives the prediction no gradient"),
    ],
)
def test_the_loss_of_a_surrogate_is_tried_as_well(surrogate_loss: Any, words: str) -> None:
    algorithm = replace(tdm_r1.ALGORITHM, surrogate_loss=surrogate_loss)
    with pytest.raises(RecipeError, match=f"the surrogate loss of mine:R1, .*{words}"):
        try_loss("mine:R1", algorithm, TDMR1Config())


def mse(rows: ForwardRows) -> torch.Tensor:
    return compute_flow_matching_error(rows, rows.velocity)


def raising(rows: ForwardRows, config: Any) -> Any:
    return rows.copies["old"]


FORWARD = {
    "another signature": (lambda rows: (mse(rows), {}), "fails on 8 random rows: TypeError"),
    "a copy that it did not ask for": (
        raising,
        r"test_loss_trial:raising, fails on 8 random rows: KeyError: 'old'",
    ),
    "no metrics": (
        lambda rows, config: mse(rows),
        r"returned a tensor of shape \[8\]; return \(loss of each row \[M\], metrics",
    ),
    "a mean": (
        lambda rows, config: (mse(rows).mean(), {}),
        r"returned the loss as a tensor of shape \[\]; return a number for each",
    ),
    "a metric that is a mean": (
        lambda rows, config: (mse(rows), {"mse": 0.5}),
        "returned mse as a float",
    ),
    "a detached prediction": (
        lambda rows, config: (compute_flow_matching_error(rows, rows.velocity.detach()), {}),
        "gives the prediction no gradient; compute it from rows.velocity",
    ),
    "a logarithm of 0": (
        lambda rows, config: (mse(rows) + (0 * rows.sigma).log(), {}),
        "is not finite in 8 of 8 random rows",
    ),
    "the root of 0": (
        lambda rows, config: ((0 * mse(rows)).sqrt(), {}),
        "a gradient that is not finite",
    ),
}


@pytest.mark.parametrize(("loss", "says"), FORWARD.values(), ids=FORWARD)
def test_a_mistake_in_a_loss_is_named_with_the_function(loss: Any, says: str) -> None:
    with pytest.raises(RecipeError, match=says) as error:
        try_loss("mine:ALGORITHM", Algorithm(ForwardConfig, loss), ForwardConfig())
    assert str(error.value).startswith("the loss of mine:ALGORITHM, ")


def test_a_trajectory_loss_has_the_ratio_one() -> None:
    seen: list[TrajectoryRows] = []

    def loss(rows: TrajectoryRows, config: Any) -> Any:
        seen.append(rows)
        return -rows.advantage * rows.log_prob, {}

    try_loss(
        "mine:ALGORITHM",
        Algorithm(TrajectoryConfig, loss, copies=lambda config: frozenset({"reference"})),
        TrajectoryConfig(),
    )
    (rows,) = seen
    torch.testing.assert_close(rows.log_prob.detach(), rows.old_log_prob)
    assert set(rows.copies) == {"reference"}
    assert {-1, 1} <= set(rows.advantage.tolist())


def test_a_selection_is_tried_too() -> None:
    def beyond(
        advantage: np.ndarray, keep: np.ndarray, ids: np.ndarray, config: Any
    ) -> list[np.ndarray]:
        return [np.array([0, 99])]

    wrong = Algorithm(ForwardConfig, lambda rows, config: (mse(rows), {}), select=beyond)
    with pytest.raises(
        RecipeError,
        match=r"the selection of mine:ALGORITHM, .*beyond, returned \[0, 99\]; .* of the 8 samples",
    ):
        try_loss("mine:ALGORITHM", wrong, ForwardConfig())
