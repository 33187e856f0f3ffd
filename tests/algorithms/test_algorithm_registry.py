"""What every algorithm owes: a place in the registry, a line about itself, and a loss of every term
by its own unit alone.
"""

import textwrap
from dataclasses import replace
from typing import get_args

import pytest
import torch
from algorithm_rows import (
    SHAPE,
    direct_align_rows,
    doubles,
    forward_rows,
    gradient_rows,
    matching_rows,
    moved,
    normal,
    rollout,
)

from ebbflow.algorithms import registry
from ebbflow.algorithms.base import (
    DirectAlignRows,
    ForwardRows,
    GradientRows,
    MatchingRows,
    TrajectoryRows,
    compute_group_mean,
)
from ebbflow.algorithms.built_in import awm
from ebbflow.algorithms.built_in.awm import AWMConfig
from ebbflow.algorithms.built_in.crd import CRDConfig
from ebbflow.algorithms.built_in.diffusion_nft import DiffusionNFTConfig
from ebbflow.algorithms.built_in.distillation import DistillationConfig
from ebbflow.algorithms.registry import find_algorithm
from ebbflow.flow.sampler import Transition
from ebbflow.formatting import first_doc_paragraph
from ebbflow.recipe.algorithms import (
    CustomAlgorithmConfig,
    DirectAlignConfig,
    ForwardConfig,
    GradientConfig,
    MatchingConfig,
    TrajectoryConfig,
)
from ebbflow.recipe.registry import ALGORITHMS, AnyAlgorithmConfig
from ebbflow.recipe.stages import OfflineStageConfig, OnlineStageConfig

CLASSES = list(ALGORITHMS.values())


def config_of(of_class):
    return DistillationConfig(teacher="somewhere") if of_class is DistillationConfig else of_class()


every = pytest.mark.parametrize("of_class", CLASSES, ids=lambda of_class: of_class.__name__)


def test_what_a_recipe_may_name_is_what_the_registry_knows():
    union, _ = get_args(AnyAlgorithmConfig)
    assert set(registry.BUILT_IN) == set(CLASSES) == set(get_args(union)) - {CustomAlgorithmConfig}
    names = [of_class.model_fields["name"].default for of_class in CLASSES]
    assert len(set(names)) == len(CLASSES)
    assert "custom" not in names


@every
def test_every_built_in_algorithm_is_found_and_introduces_itself(of_class):
    algorithm = find_algorithm(config_of(of_class))
    assert algorithm.config is of_class
    # `ebbflow list` prints the first paragraph of the class's own docstring.
    summary = first_doc_paragraph(of_class.__dict__["__doc__"])
    assert summary.endswith(".")
    assert 20 < len(summary) < 130
    configs = {
        "trajectory": TrajectoryConfig,
        "forward": ForwardConfig,
        "gradient": GradientConfig,
        "direct_align": DirectAlignConfig,
        "matching": MatchingConfig,
    }
    assert issubclass(of_class, configs[of_class.kind])


@every
def test_a_stage_needs_nothing_but_the_algorithm_s_name(of_class):
    stages = {"online": OnlineStageConfig, "offline": OfflineStageConfig}
    for kind in of_class.stages:
        stage = stages[kind](kind=kind, algorithm=config_of(of_class))
        assert type(stage.hyper_parameters) is of_class
        assert (stage.window is not None) == (of_class.kind == "trajectory")
    assert ("offline" in of_class.stages) == (of_class.kind == "forward")


def test_the_implicit_policies_learn_from_the_old_one_s_samples():
    from_copies = {
        of_class: algorithm
        for of_class, algorithm in registry.BUILT_IN.items()
        if algorithm.generates != "current"
    }
    assert from_copies.keys() == {DiffusionNFTConfig, CRDConfig}
    for of_class, algorithm in from_copies.items():
        assert "old" in algorithm.copies(of_class())
        assert algorithm.generates in algorithm.follows.keys() & algorithm.list_following_copies(
            of_class()
        )


def rows_of(of_class):
    """Six rows in three groups of two, with the copies that the algorithm asks for and no
    others."""
    config = config_of(of_class)
    needed = find_algorithm(config).copies(config)
    if of_class.kind == "forward":
        rows = forward_rows([1.0, -0.4, 0.3, -2.0, 1.2, 0.8], group_index=[0, 0, 1, 1, 2, 2])
        return replace(rows, copies={name: rows.copies[name] for name in needed}), rows.velocity
    if of_class.kind == "direct_align":
        leaf = normal(6, *SHAPE, seed=7).requires_grad_()
        sigma = doubles([0.8, 0.75, 0.9, 0.85, 0.95, 0.8])
        end = doubles([0.78, 0.77, 0.88, 0.87, 0.94, 0.81])
        rows = direct_align_rows(
            normal(6, *SHAPE, seed=8),
            normal(6, *SHAPE, seed=9),
            sigma,
            end,
            leaf,
            doubles([1.0] * 6),
        )
        return rows, leaf
    if of_class.kind == "gradient":
        leaf = normal(6, *SHAPE, seed=7).requires_grad_()
        rows = gradient_rows(
            normal(6, *SHAPE, seed=8),
            doubles([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]),
            leaf,
            doubles([1.0] * 6),
        )
        return rows, leaf
    if of_class.kind == "matching":
        rows = matching_rows(doubles([0.1, 0.2, 0.3, 0.4, 0.5, 0.6]))
        return rows, rows.velocity
    made = rollout(rows=6)
    leaf = moved(made)
    return made.rows(leaf, **{name: normal(*leaf.shape, seed=9) for name in needed}), leaf


def part_of(rows, part):
    """Some of the rows, as a micro-batch has them."""
    if isinstance(rows, Transition):
        return replace(
            rows, **{name: getattr(rows, name)[part] for name in ("mean", "std", "scale", "dt")}
        )
    copies = {
        name: part_of(value, part) if isinstance(value, Transition) else value[part]
        for name, value in rows.copies.items()
    }
    if isinstance(rows, ForwardRows):
        names = ("clean", "noise", "sigma", "velocity", "advantage", "group_index")
        return ForwardRows(copies=copies, **{name: getattr(rows, name)[part] for name in names})
    if isinstance(rows, DirectAlignRows):
        names = ("clean", "noise", "sigma", "end_sigma", "velocity", "advantage")
        return direct_align_rows(*(getattr(rows, name)[part] for name in names), copies)
    if isinstance(rows, GradientRows):
        return gradient_rows(
            *(getattr(rows, name)[part] for name in ("latents", "sigma", "velocity", "advantage")),
            copies,
        )
    if isinstance(rows, MatchingRows):
        names = ("latents", "sigma", "velocity", "noised", "noised_sigma", "advantage")
        names = (*names, "rewarded_clean", "base_clean")
        return MatchingRows(copies=copies, **{name: getattr(rows, name)[part] for name in names})
    names = ("log_prob", "old_log_prob", "advantage")
    rest = {name: getattr(rows, name)[part] for name in names}
    old_mean = None if rows.old_mean is None else rows.old_mean[part]
    transition = part_of(rows.transition, part)
    return TrajectoryRows(transition=transition, old_mean=old_mean, copies=copies, **rest)


@every
def test_losses_and_metrics_are_rows_that_depend_on_their_own_unit_alone(of_class):
    config = config_of(of_class)
    algorithm, (rows, leaf) = find_algorithm(config), rows_of(of_class)
    loss, metrics = algorithm.loss(rows, config)
    assert loss.shape == (6,)
    assert all(values.shape == (6,) for values in metrics.values())
    assert all(values.isfinite().all() for values in (loss, *metrics.values()))
    (gradient,) = torch.autograd.grad(loss.sum(), leaf, retain_graph=True)
    for part in (slice(0, 2), slice(2, 4), slice(2, 6)):
        found, some = algorithm.loss(part_of(rows, part), config)
        torch.testing.assert_close(found, loss[part], rtol=1e-12, atol=1e-14)
        for name, values in some.items():
            torch.testing.assert_close(values, metrics[name][part], rtol=1e-12, atol=1e-14)
        (alone,) = torch.autograd.grad(found.sum(), leaf, retain_graph=True)
        torch.testing.assert_close(alone[part], gradient[part], rtol=1e-10, atol=1e-13)
        others = torch.ones(6, dtype=torch.bool)
        others[part] = False
        assert (alone[others] == 0).all()


def test_the_mean_of_a_unit_stands_at_each_of_its_rows():
    values = torch.tensor([1.0, 3.0, 10.0, 2.0, 4.0, 6.0], dtype=torch.float64, requires_grad=True)
    group_index = torch.tensor([4, 4, 7, 9, 9, 9])
    found = compute_group_mean(values, group_index)
    assert found.tolist() == [2, 2, 10, 4, 4, 4]
    (gradient,) = torch.autograd.grad(found[3], values)
    assert gradient.tolist() == pytest.approx([0, 0, 0, 1 / 3, 1 / 3, 1 / 3])


# A user's own


def test_a_path_leads_to_the_algorithm_with_its_options():
    custom = CustomAlgorithmConfig(
        path="ebbflow.algorithms.built_in.awm:ALGORITHM", options={"power": 0.5}
    )
    assert find_algorithm(custom) is awm.ALGORITHM
    assert custom.load_algorithm() == (awm.ALGORITHM, AWMConfig(power=0.5))


def test_a_user_s_own_algorithm_is_one_like_any_other(tmp_path, monkeypatch):
    source = '''
        """Flow matching, scaled."""
        from ebbflow.algorithms.base import Algorithm, compute_flow_matching_error
        from ebbflow.recipe.algorithms import ForwardConfig

        class Scaled(ForwardConfig):
            """Flow matching times a factor."""
            factor: float = 1.0

        def loss(rows, config):
            return config.factor * compute_flow_matching_error(rows, rows.velocity), {}

        SCALED = Algorithm(Scaled, loss)
    '''
    (tmp_path / "scaled_matching.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    stage = OnlineStageConfig(
        kind="online",
        algorithm={"name": "custom", "path": "scaled_matching:SCALED", "options": {"factor": 3.0}},
    )
    algorithm = find_algorithm(stage.algorithm)
    assert algorithm.config.__name__ == "Scaled"
    assert algorithm.copies(stage.hyper_parameters) == set()
    assert algorithm.generates == "current"
    rows = forward_rows([1.0, 2.0])
    loss, _ = algorithm.loss(rows, stage.hyper_parameters)
    expected = 3 * ((rows.velocity - rows.noise + rows.clean) ** 2).mean((1, 2))
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
