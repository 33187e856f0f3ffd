"""Kinds of algorithms: what the rows of a loss are made of, and what that asks of a stage.

An algorithm names its kind in ``AlgorithmConfig.kind``: one of ``ebbflow/training/kinds`` by its
name, or a user's own by ``package.module:NAME``. Nothing else in Ebbflow tests which kind it has:
it asks the object. The half of a kind that needs tensors is
``ebbflow.training.kinds.base.TrainableKind``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, NamedTuple

from ebbflow.recipe.base import RecipeError, Strict, suggest_name
from ebbflow.recipe.plugins import PATH, import_modules, import_object


class RowCost(NamedTuple):
    """Evaluations of the network for one row of the loss, apart from those of policy copies.

    Attributes:
        with_gradient: forward and backward.
        without_gradient: forward alone.
    """

    with_gradient: int = 1
    without_gradient: int = 0


class TrainedCopyConfig(NamedTuple):
    """How a policy copy is trained beside the policy.

    Attributes:
        optimizer: the ``OptimizerConfig``.
        average: the ``EmaScheduleConfig`` of its moving average; None for none.
    """

    optimizer: Any
    average: Any = None


class AlgorithmKind:
    """What recipes and estimates ask of the algorithms on one kind of rows. Methods take their
    hyper-parameters (``hyper``), or the stage.

    Example::

        kind = stage.algorithm_kind  # of DiffusionNFT: the forward process
        kind.rows_per_entry(stage.hyper_parameters)  # 9, its noise levels

    Attributes:
        name: what ``AlgorithmConfig.kind`` says.
        config_class: what the hyper-parameters of its algorithms derive from.
        default_penalty: ``reference.penalty`` where the recipe has none.
        can_be_offline: whether its rows can be built from what an offline stage stores: final
            latents and advantages.
        records_trajectory: rollouts record the steps of a window with their log-probs, and a row is
            a step of a sample instead of a sample.
        trains_on_any_samples: its losses take final latents as they are, whoever generated them, so
            that rollouts may approximate the policy (``ebbflow.recipe.rollout_cache``).
        is_unguided: its losses are on the prediction without classifier-free guidance.
        needs_reward_gradient: training loads the rewards, which must be differentiable.
        trains_student: it makes a student of few steps, with a fake score network beside the
            policy.
        splits_latents: its losses are means over the elements of a sample, so that a sample of
            several latents has one for each (``ebbflow.training.latent_losses``); its batches name
            in ``latent_fields`` what has these elements.
    """

    name: ClassVar[str]
    config_class: ClassVar[type[Strict]] = Strict
    default_penalty: ClassVar[str] = "velocity"
    can_be_offline: ClassVar[bool] = False
    records_trajectory: ClassVar[bool] = False
    trains_on_any_samples: ClassVar[bool] = False
    is_unguided: ClassVar[bool] = False
    needs_reward_gradient: ClassVar[bool] = False
    trains_student: ClassVar[bool] = False
    splits_latents: ClassVar[bool] = False

    def check_stage(self, stage: Any) -> None:
        """Check the keys of a stage (``StageConfig``) that do not suit every kind.

        Raises:
            ValueError: one of them does not suit this kind; names the key and the fix.
        """

    def rows_per_entry(self, hyper: Any) -> int:
        """Return the rows of the loss for each entry of a sample group: a sample, or where a
        trajectory is recorded one of its steps.
        """
        return 1

    def sigmas_to_draw(self, hyper: Any) -> Any:
        """Return the noise levels that training draws (``SigmaConfig``), None for none."""
        return None

    def guides_teacher(self, hyper: Any) -> bool:
        """Return whether a copy of the policy is evaluated with classifier-free guidance though the
        policy is not.
        """
        return False

    def row_cost(self, hyper: Any, sampler_steps: int) -> RowCost:
        """Return what a row costs, for the estimate."""
        return RowCost()

    def list_trained_copies(self, hyper: Any, optimizer: Any) -> dict[Any, TrainedCopyConfig]:
        """Return the policy copies that are trained beside the policy (the fake score), by name;
        none for most kinds.

        Args:
            optimizer: the policy's ``OptimizerConfig``, which those of the copies differ from.
        """
        return {}

    def latents_per_row(self, hyper: Any, sampler_steps: int) -> int:
        """Return the latents that a row keeps in memory beyond its own, noise and target."""
        return 0


@cache
def built_in_kinds() -> dict[str, AlgorithmKind]:
    """Return the kinds in the files of ``ebbflow/training/kinds``, by name."""
    # The files of the kinds import this module, so that the list cannot be made while it is
    # imported.
    return {
        kind.name: kind
        for module in import_modules("ebbflow.training.kinds")
        for kind in vars(module).values()
        if isinstance(kind, AlgorithmKind)
    }


def find_kind(name: str) -> AlgorithmKind:
    """Return a kind by its name, or by the path of a user's own.

    Raises:
        RecipeError: there is none.
    """
    if not PATH.fullmatch(name):
        kinds = built_in_kinds()
        if name not in kinds:
            raise RecipeError(
                f"kind = {name!r}: {suggest_name(name, kinds)}take {', '.join(kinds)}, or give"
                " package.module:NAME of your own"
            )
        return kinds[name]
    kind = import_object(name)
    if not isinstance(kind, AlgorithmKind):
        raise RecipeError(
            f"kind = {name!r} is a {type(kind).__name__}; make it an instance of a class that"
            " derives from ebbflow.training.kinds.base.TrainableKind"
        )
    return kind
