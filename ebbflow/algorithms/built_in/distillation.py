r"""On-policy distillation: on the policy's own trajectories, every trained step is pulled to the
teacher's.

    L = mean over the rows of mean((mu - mu_teacher)^2) / (2 b^2)

Of several teachers, a row has the one of its prompt's set.

b is the true standard deviation of a step, dt included (b^2 = s^2 |dt|), so this is the KL between
the two steps, as in the ``kl`` penalty. Code that follows Flow-GRPO's KL term divides by 2 s^2
instead (``kl_without_dt``): there a step counts |dt| times as much as here, and late steps, which
are the longest on a shifted schedule, relatively more.

The rewards are watched, not learnt from, so groups without variance are trained on as well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from ebbflow.algorithms.base import (
    Algorithm,
    RowMetrics,
    TrajectoryRows,
    compute_gaussian_kl,
    select_all_samples,
)
from ebbflow.algorithms.loss_terms import compute_ratio_metrics
from ebbflow.recipe.algorithms import TrajectoryConfig
from ebbflow.recipe.paths import PathText

if TYPE_CHECKING:
    from torch import Tensor


class DistillationConfig(TrajectoryConfig):
    """On-policy distillation: the policy's steps are pulled towards the teacher's. No reward is
    used.
    """

    name: Literal["distillation"] = "distillation"
    teacher: PathText | None = Field(None, min_length=1)
    """Policy folder (or URI) of the teacher. It must have the same base model and the same
    ``policy``.
    """
    teachers: dict[str, Annotated[PathText, Field(min_length=1)]] = {}
    """Several teachers: the name of each set of ``prompts.mixture``, with the policy folder of its
    teacher. Each teacher takes the memory of a policy copy.
    """

    @model_validator(mode="after")
    def _check_teachers(self) -> DistillationConfig:
        if self.teacher and self.teachers:
            raise ValueError(
                "teacher is of all prompts and teachers of each prompt set; leave one of them out"
            )
        if not self.teacher and not self.teachers:
            raise ValueError(
                "it has no teacher; give teacher a policy folder, or teachers one for each set of"
                " prompts.mixture"
            )
        return self


def compute_loss(rows: TrajectoryRows, config: DistillationConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # mean((mu - mu_teacher)^2) / (2 b^2), the KL between the step and the teacher's from the same
    # latents. The latents are the policy's own, so the mean is KL(policy || teacher): it says
    # nothing of what only the teacher generates.
    divergence = compute_gaussian_kl(rows.transition, rows.copies["teacher"].mean)
    return divergence, compute_ratio_metrics(rows) | {"kl/teacher": divergence}


ALGORITHM = Algorithm(
    DistillationConfig,
    compute_loss,
    copies=lambda config: frozenset({"teacher"}),
    # Not the default, which leaves out groups whose rewards are all equal: nothing here is learnt
    # from rewards.
    select=select_all_samples,
)
