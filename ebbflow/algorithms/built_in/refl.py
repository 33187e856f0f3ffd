r"""ReFL, reward feedback learning (2304.05977): the gradient of the reward at one late denoising
step, which jumps to the end.

    L = w max(0, t - r(D(x - sigma v)))

x: the latent before a step drawn from the last ones, without gradient; v: the velocity there; D:
the decoder; r: the weighted sum of the rewards; t: ``target``; w: ``weight``.

Deviations: the paper adds its pre-training loss, which the public code lacks; here
``reference.weight`` pulls to the base model. The public code gives the network the number of the
step where its time belongs; here it gets the time. Its sampler is DDPM's.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, GradientRows, RowMetrics, compute_missing_reward
from ebbflow.recipe.algorithms import GROUP_SIZE, GradientConfig, PublishedSetting

if TYPE_CHECKING:
    from torch import Tensor

SCRIPT = "THUDM/ImageReward ImageReward/ReFL.py"


class ReFLConfig(GradientConfig):
    """Gradient of the reward of the image that one late denoising step predicts."""

    paper: ClassVar = "2304.05977"
    stage_defaults: ClassVar = {
        "sampler": {"name": "ode", "steps": 40},
        "optimizer": {"lr": 1e-5, "weight_decay": 1e-2},
        "updates_per_step": 1,
    }
    published: ClassVar = {
        "algorithm.last": PublishedSetting(
            0.25, SCRIPT, "mid_timestep: one of the last 10 of 40 steps"
        ),
        "algorithm.target": PublishedSetting(2.0, SCRIPT, "of ImageReward; F.relu(-rewards + 2)"),
        "algorithm.weight": PublishedSetting(1e-3, SCRIPT, "grad_scale"),
        "sampler.name": PublishedSetting(
            "ddpm",
            SCRIPT,
            deviation=(
                "flow matching has no such sampler; the deterministic one has the same gradient"
                " step"
            ),
        ),
        "sampler.steps": PublishedSetting(40, SCRIPT),
        "reference.weight": PublishedSetting(
            0.0, SCRIPT, "the paper adds the pre-training loss, which the code lacks"
        ),
        "optimizer.lr": PublishedSetting(1e-5, SCRIPT, "of all parameters"),
        "optimizer.weight_decay": PublishedSetting(1e-2, SCRIPT),
        "optimizer.max_grad_norm": PublishedSetting(1.0, SCRIPT),
        "updates_per_step": PublishedSetting(1, SCRIPT),
        "group_size": PublishedSetting(1, SCRIPT, deviation=GROUP_SIZE),
    }

    name: Literal["refl"] = "refl"
    last: float = Field(0.25, gt=0, le=1)
    """Share of the sampler's steps, at its end, among which each update samples its one step with
    gradient.
    """
    target: float | None = 2.0
    """Rewards above this value give no gradient. ``null``: all rewards do."""
    weight: float = Field(1e-3, gt=0)
    """Weight of the reward in the loss, next to ``reference.weight``."""

    def first_step(self, steps: int, draw: Any) -> int:
        # Without 1e-9 rounding may cost a step: (1 - .7) * 10 is 3.0000000000000004. At least the
        # last step is left to draw from.
        first = min(math.ceil((1 - self.last) * steps - 1e-9), steps - 1)
        return int(draw.integers(first, steps))


def compute_loss(rows: GradientRows, config: ReFLConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # r(D(x - sigma v)): the step jumps to the end, however noisy x is.
    reward = rows.reward(rows.predicted_clean)

    # max(0, t - r): a sample whose reward is above the target has no gradient.
    missing, active = compute_missing_reward(reward, config.target)
    return config.weight * missing, {"refl/reward": reward, "refl/active": active}


ALGORITHM = Algorithm(ReFLConfig, compute_loss)
