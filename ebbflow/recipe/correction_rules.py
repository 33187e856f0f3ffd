"""Which rollout correction a stage computes, and where rollouts lack one."""

from __future__ import annotations

from ebbflow.recipe.choices import CorrectionConfig
from ebbflow.recipe.model import Precision
from ebbflow.recipe.stages import OnlineStageConfig, StageConfig


def resolve_correction(stage: StageConfig, precision: Precision) -> CorrectionConfig | None:
    """Return the correction that a stage computes: that of the recipe, or one without effect on
    the loss, whose metrics and alarm show how far rollouts are from the policy in training.

    Args:
        precision: ``model.precision``.
    """
    if not stage.guidance_in_loss:
        # Rollouts are guided and the loss is not. The ratio is against the unguided prediction
        # (``decoupled``). Weights would correct for guidance, which the two differ in on purpose.
        return CorrectionConfig(mode="decoupled", weights="none")
    if _is_another_engine(stage) and stage.correction is None:
        # Another engine rounds in its own way. A ratio against its log-probs would start off 1, and
        # weights from their sum over D elements would be mostly that rounding.
        return CorrectionConfig(mode="decoupled", weights="none")
    if lacks_correction(stage, precision):
        return CorrectionConfig(mode="bypass", weights="none")
    return stage.correction


def _is_another_engine(stage: StageConfig) -> bool:
    return isinstance(stage, OnlineStageConfig) and stage.engine != "diffusers"


def lacks_correction(stage: StageConfig, precision: Precision) -> bool:
    """Return whether rollouts are of another policy or precision than training, and nothing
    corrects them: neither the recipe's ``correction`` nor the default of another engine.

    Args:
        precision: ``model.precision``.
    """
    if _is_another_engine(stage):
        return False
    other_precision = (stage.rollout_precision or precision) != precision
    other_policy = isinstance(stage, OnlineStageConfig) and stage.mode != "sync"
    # In mode ``sync`` rollouts come from the policy in training itself.
    return stage.correction is None and (other_precision or other_policy)
