"""The algorithm of a recipe: one that comes along, by its name, or a user's own, by its path."""

from __future__ import annotations

from ebbflow.algorithms import (
    awm,
    crd,
    dgpo,
    diffusion_dpo,
    diffusion_nft,
    distillation,
    flow_dppo,
    flow_grpo,
    grpo_guard,
    rwr,
    sft,
)
from ebbflow.algorithms.base import Algorithm
from ebbflow.recipe.algorithms import AlgorithmConfig, CustomAlgorithmConfig

BUILT_IN: dict[type[AlgorithmConfig], Algorithm] = {
    algorithm.config: algorithm
    for algorithm in (
        flow_grpo.FLOW_GRPO,
        flow_grpo.FLOW_GRPO_FAST,
        flow_grpo.MIX_GRPO,
        flow_grpo.DANCE_GRPO,
        grpo_guard.ALGORITHM,
        flow_dppo.ALGORITHM,
        distillation.ALGORITHM,
        diffusion_nft.ALGORITHM,
        awm.ALGORITHM,
        diffusion_dpo.ALGORITHM,
        dgpo.ALGORITHM,
        crd.ALGORITHM,
        sft.ALGORITHM,
        rwr.ALGORITHM,
    )
}
"""The loss to each hyper-parameters of ``ebbflow.recipe.algorithms.AnyAlgorithmConfig``, the list of what a recipe can name."""


def algorithm_of(config: AlgorithmConfig | CustomAlgorithmConfig) -> Algorithm:
    """The algorithm that a stage's ``algorithm`` key asks for."""
    return config.load()[0] if isinstance(config, CustomAlgorithmConfig) else BUILT_IN[type(config)]
