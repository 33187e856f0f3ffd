"""A kind of algorithm of a user's own: one file, examples/mine/first_step.py, and no change in
Ebbflow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from ebbflow.algorithms.registry import find_algorithm
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.kinds import built_in_kinds, find_kind
from ebbflow.recipe.stages import OfflineStageConfig, OnlineStageConfig
from ebbflow.training.kinds.base import StepSamples, TrainableKind, trainable_kind
from ebbflow.training.trial import try_loss
from tests.glyph_stages import small_stage
from tests.training.training_cases import samples, updater_of

EXAMPLES = Path(__file__).parents[2] / "examples"
FIRST_STEP = {"name": "custom", "path": "mine.first_step:ALGORITHM"}


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def first_step_stage(**keys):
    return OnlineStageConfig.model_validate(small_stage({**keys, "algorithm": FIRST_STEP}))


def test_a_stage_finds_the_kind_by_its_path():
    stage = first_step_stage()
    kind = stage.algorithm_kind
    assert isinstance(kind, TrainableKind)
    assert kind is trainable_kind("mine.first_step:FIRST_STEP")
    assert stage.reference.penalty == "velocity"
    assert stage.window is None


def test_an_own_kind_trains_a_step(model):
    updater = updater_of(model, FIRST_STEP)
    clean, conditioning, advantage, keys = samples(model)
    step = StepSamples(
        updater=updater,
        keys=keys,
        prompts=[],
        conditioning=conditioning,
        sample_index=np.arange(6),
        advantages=advantage.numpy(),
        latents=clean,
    )
    kind = trainable_kind(updater.hyper.kind)
    groups = kind.list_trained_groups(step, list(np.arange(6)[:, None]))
    parameters = {name: p.detach().clone() for name, p in updater.policy.parameters.items()}
    batch, _ = kind.build_batch(step, groups, passes=2)
    metrics = updater.update_policy(batch, 2)
    assert metrics["first_step/error"] > 0
    assert any(
        not torch.equal(p, parameters[name]) for name, p in updater.policy.parameters.items()
    )


def test_the_trial_of_an_own_kind_calls_its_loss_on_its_rows():
    algorithm = find_algorithm(first_step_stage().algorithm)
    try_loss("mine.first_step:ALGORITHM", algorithm, algorithm.config())


def test_an_own_kind_without_offline_rows_is_rejected_offline():
    with pytest.raises(ValueError, match="cannot run in an offline stage|fresh trajectories"):
        OfflineStageConfig.model_validate(small_stage({"kind": "offline", "algorithm": FIRST_STEP}))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gradiant", "did you mean 'gradient'"),
        ("mine.first_step:ALGORITHM", "is a Algorithm; make it an instance"),
    ],
)
def test_a_wrong_kind_is_an_error_that_names_the_fix(name, message):
    with pytest.raises(RecipeError, match=message):
        find_kind(name)


def test_every_file_of_kinds_defines_one_kind():
    kinds = built_in_kinds()
    assert set(kinds) == {"direct_align", "forward", "gradient", "matching", "trajectory"}
    assert all(isinstance(kind, TrainableKind) for kind in kinds.values())


def test_hyper_parameters_of_another_class_than_the_kinds_are_rejected(tmp_path, monkeypatch):
    (tmp_path / "strange.py").write_text(
        "from typing import ClassVar\n"
        "from ebbflow.algorithms.base import Algorithm\n"
        "from ebbflow.recipe.algorithms import AlgorithmConfig\n"
        "class StrangeConfig(AlgorithmConfig):\n"
        "    kind: ClassVar = 'gradient'\n"
        "    stages: ClassVar = ('online',)\n"
        "ALGORITHM = Algorithm(StrangeConfig, lambda rows, config: None)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    algorithm = {"name": "custom", "path": "strange:ALGORITHM"}
    with pytest.raises(ValueError, match="'gradient'.* GradientConfig; derive StrangeConfig from"):
        OnlineStageConfig.model_validate(small_stage({"algorithm": algorithm}))
