r"""DRaFT-K, direct reward fine-tuning (2309.17400): the gradient of the reward through the last K
steps of the sampler.

    L = -r(D(x_0)),   x_0 from x_{S-K} by K Euler steps with gradient

S: ``sampler.steps``; K: ``last_steps``; D: the decoder; r: the weighted sum of the rewards. K = S
is DRaFT. With K > 1 each step is repeated in the backward pass instead of kept (gradient
checkpointing), so memory does not grow with K.

``reference.weight`` adds mean((v - v_ref)^2) at the first of these steps: DRaFT+ of NeMo-Aligner
has the same on predicted noise, at all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, GradientRows, RowMetrics
from ebbflow.recipe.algorithms import GROUP_SIZE, GradientConfig, PublishedSetting

if TYPE_CHECKING:
    from torch import Tensor

NEMO = "NVIDIA/NeMo-Aligner examples/mm/stable_diffusion/conf/draftp_sd.yaml"


class DRaFTConfig(GradientConfig):
    """Gradient of the reward through the last steps of the sampler."""

    paper: ClassVar = "2309.17400"
    stage_defaults: ClassVar = {
        "sampler": {"name": "ode", "steps": 50},
        "optimizer": {"lr": 1e-4, "weight_decay": 0.0, "max_grad_norm": 10.0},
        "updates_per_step": 1,
    }
    published: ClassVar = {
        "algorithm.last_steps": PublishedSetting(1, NEMO, "truncation_steps"),
        "sampler.name": PublishedSetting("ode", NEMO, "DDIM with eta 0"),
        "sampler.steps": PublishedSetting(50, NEMO, "25 in docs/user-guide/draftp.rst"),
        "reference.weight": PublishedSetting(
            1.0,
            NEMO,
            "kl_coeff of DRaFT+; .1 and .2 in docs/user-guide/draftp.rst",
            deviation="the paper has none; DRaFT+ of NeMo-Aligner adds it, on predicted noise",
        ),
        "optimizer.lr": PublishedSetting(1e-4, NEMO, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(0.0, NEMO),
        "optimizer.max_grad_norm": PublishedSetting(10.0, NEMO),
        "updates_per_step": PublishedSetting(1, NEMO),
        "group_size": PublishedSetting(1, NEMO, deviation=GROUP_SIZE),
    }

    name: Literal["draft"] = "draft"
    last_steps: int = Field(1, ge=1)
    """Number K of denoising steps with gradient; they are the last ones of the sampler."""

    @property
    def steps_with_gradient(self) -> int:
        return self.last_steps

    def first_step(self, steps: int, draw: Any) -> int:
        return steps - self.last_steps


def compute_loss(rows: GradientRows, config: DRaFTConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    # r(D(x_0)): ``denoise`` takes the K steps from the first velocity on, ``reward`` decodes.
    reward = rows.reward(rows.denoise(rows.velocity))
    return -reward, {"draft/reward": reward}


ALGORITHM = Algorithm(DRaFTConfig, compute_loss)
