"""The algorithm of a recipe: one that Ebbflow ships, by the class of its hyper-parameters, or a
user's own, by its path.
"""

from __future__ import annotations

from ebbflow.algorithms.base import Algorithm
from ebbflow.recipe.algorithms import AlgorithmConfig, CustomAlgorithmConfig
from ebbflow.recipe.plugins import modules_of

BUILT_IN: dict[type[AlgorithmConfig], Algorithm] = {
    algorithm.config: algorithm
    for module in modules_of("ebbflow.algorithms.built_in")
    for algorithm in vars(module).values()
    if isinstance(algorithm, Algorithm)
}


def algorithm_of(config: AlgorithmConfig | CustomAlgorithmConfig) -> Algorithm:
    """The algorithm that a stage's ``algorithm`` key asks for."""
    return config.load()[0] if isinstance(config, CustomAlgorithmConfig) else BUILT_IN[type(config)]
