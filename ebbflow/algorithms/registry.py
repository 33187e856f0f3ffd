"""The algorithm of a recipe: one that Ebbflow ships, by the class of its hyper-parameters, or a
user's own, by its path.
"""

from __future__ import annotations

from ebbflow.algorithms.base import Algorithm
from ebbflow.recipe.algorithms import AlgorithmConfig, CustomAlgorithmConfig
from ebbflow.recipe.plugins import import_modules

# By the class of hyper-parameters, which pydantic has chosen by the recipe's ``algorithm.name``. A
# new file in ``built_in`` needs no entry anywhere.
BUILT_IN: dict[type[AlgorithmConfig], Algorithm] = {
    algorithm.config: algorithm
    for module in import_modules("ebbflow.algorithms.built_in")
    for algorithm in vars(module).values()
    if isinstance(algorithm, Algorithm)
}


def find_algorithm(config: AlgorithmConfig | CustomAlgorithmConfig) -> Algorithm:
    """Return the algorithm that a stage's ``algorithm`` key asks for."""
    if isinstance(config, CustomAlgorithmConfig):
        algorithm: Algorithm = config.load_algorithm()[0]
        return algorithm
    return BUILT_IN[type(config)]
