"""Optimisers: what a recipe and an estimate ask of one, and what builds it.

``optimizer.name`` takes one of ``ebbflow/training/optimizers`` by its name, or a user's own by
``package.module:NAME``: an instance of a class that derives from ``OptimizerFactory``.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from functools import cache
from typing import Any, ClassVar

from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.plugins import PATH, import_modules, import_object


class OptimizerFactory(ABC):
    """Builds an optimiser, and says what it needs.

    Example::

        class SignDescent(OptimizerFactory):
            def build_optimizer(self, groups, config):
                return MySignDescent(groups, lr=config.lr)

        SIGN_DESCENT = SignDescent()   # optimizer: {name: "mine.sign_descent:SIGN_DESCENT"}

    Attributes:
        name: what ``optimizer.name`` takes, of a built-in one.
        summary: what it is, in the description of that key.
        uses_momentum: whether it reads ``optimizer.momentum``; the key is rejected elsewhere.
        package: the package that it needs beyond those of Ebbflow; empty: none.
        extra: the extra of Ebbflow that installs ``package``.
        state_is_divisible: whether its state can be divided among processes and wait in main
            memory: not in blocks that share a scale.
        shared_state: keys of its state whose tensors all parameters share; checkpoints store a copy
            for each.
    """

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""
    uses_momentum: ClassVar[bool] = False
    package: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    state_is_divisible: ClassVar[bool] = True
    shared_state: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def build_optimizer(self, groups: list[dict[str, Any]], config: Any) -> Any:
        """Build the optimiser (``torch.optim.Optimizer``, or a ``CombinedOptimizer`` of several).

        To keep its state in main memory (``model.cpu_offload``), Ebbflow also calls its class with
        one parameter group alone, which then has all its settings.

        Args:
            groups: parameter groups with ``params`` and their ``lr``.
            config: the stage's ``optimizer`` (``OptimizerConfig``).
        """

    def count_state_bytes(self, num_parameters: int) -> int:
        """Return the bytes of its state; by default two moments in float32."""
        # As AdamW has them: 4 bytes for each moment.
        return 8 * num_parameters

    def is_installed(self) -> bool:
        """Return whether its package can be imported."""
        return not self.package or importlib.util.find_spec(self.package) is not None


@cache
def built_in_optimizers() -> dict[str, OptimizerFactory]:
    """Return the optimisers in the files of ``ebbflow/training/optimizers``, by name."""
    return {
        factory.name: factory
        for module in import_modules("ebbflow.training.optimizers")
        for factory in vars(module).values()
        # A file may import the factory of another file, such as one that it wraps.
        if isinstance(factory, OptimizerFactory) and type(factory).__module__ == module.__name__
    }


def find_optimizer(name: str) -> OptimizerFactory:
    """Return a built-in optimiser by its name, or a user's own by its path.

    Raises:
        RecipeError: nothing can be imported from the path, or it is no ``OptimizerFactory``.
    """
    if not PATH.fullmatch(name):
        return built_in_optimizers()[name]
    factory = import_object(name)
    if not isinstance(factory, OptimizerFactory):
        raise RecipeError(
            f"{name} is a {type(factory).__name__}, not an instance of an"
            " ebbflow.recipe.optimizers.OptimizerFactory"
        )
    return factory
