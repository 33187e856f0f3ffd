r"""TempFlow-GRPO (2508.04324): branches of one trajectory at one step, and steps weighed by the
noise that they explore with.

    L = w b max(-A rho, -A clip(rho, 1 - eps, 1 + eps)),   b = s sqrt|dt|

b: the true standard deviation of the step; w: ``noise_weight``. All samples of a prompt start from
one noise and are the same until the one stochastic step, so their rewards differ by its noise
alone: the advantage is that of this step.

Deviations: the public code branches at every step of a trajectory in turn, six samples at each;
here a rollout step has one branch point, drawn at random, and the next one another. The samples of
a group repeat the steps before it, which are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm, RowMetrics, TrajectoryRows
from ebbflow.algorithms.built_in import flow_grpo
from ebbflow.algorithms.built_in.flow_grpo import ClippedConfig
from ebbflow.algorithms.loss_terms import BASE
from ebbflow.recipe.algorithms import GROUP_SIZE, SUM_OF_REWARDS, PublishedSetting

if TYPE_CHECKING:
    from torch import Tensor

SETTINGS = "Shredded-Pork/TempFlow-GRPO config/dgx.py pickscore_sd3_pr"
SCRIPT = "Shredded-Pork/TempFlow-GRPO scripts/train_sd3_pr.py"
SAMPLER = "Shredded-Pork/TempFlow-GRPO flow_grpo/diffusers_patch/sd3_sde_with_logprob_perstep.py"


class TempFlowGRPOConfig(ClippedConfig):
    """Flow-GRPO on branches of one trajectory at one random step, weighed by the noise of that
    step.
    """

    paper: ClassVar = "2508.04324"
    stage_defaults: ClassVar = {
        "shared_initial_noise": True,
        "sampler": {"name": "flow_sde", "steps": 10},
        "window": {"kind": "random", "size": 1, "limit": 1.0},
        "advantages": {"std": "group"},
        "reference": {"weight": 0.001, "penalty": "kl"},
        "updates_per_step": 2,
    }
    published: ClassVar = {
        "algorithm.noise_weight": PublishedSetting(
            2.25, SCRIPT, "times std_dev_t, which is s sqrt|dt|"
        ),
        "algorithm.clip_range": PublishedSetting(1e-4, BASE, "whose settings it imports"),
        "sampler.name": PublishedSetting("flow_sde", SAMPLER, "eta .7; .9 for FLUX"),
        "sampler.steps": PublishedSetting(10, SETTINGS),
        "shared_initial_noise": PublishedSetting(True, SAMPLER, "the branches of a trajectory"),
        "window.kind": PublishedSetting(
            "all",
            SCRIPT,
            "one after the other",
            deviation=(
                "all samples of a rollout step branch at the same denoising step, another one at"
                " each"
            ),
        ),
        "window.size": PublishedSetting(1, SAMPLER, "one stochastic step for each branch"),
        "window.limit": PublishedSetting(
            1.0, SCRIPT, "timestep_fraction .99: every step but the last"
        ),
        "advantages.std": PublishedSetting("group", SETTINGS, "the whole batch in general_ocr_sd3"),
        "advantages.combine": PublishedSetting(
            "sum", "yifan123/flow_grpo flow_grpo/rewards.py", deviation=SUM_OF_REWARDS
        ),
        "advantages.clip": PublishedSetting(5.0, BASE, "whose settings it imports"),
        "reference.weight": PublishedSetting(0.001, SETTINGS, ".004 for GenEval and OCR"),
        "reference.penalty": PublishedSetting("kl", SCRIPT, "over 2 std_dev_t^2"),
        "optimizer.lr": PublishedSetting(3e-4, BASE, "of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, BASE),
        "optimizer.max_grad_norm": PublishedSetting(1.0, BASE),
        "updates_per_step": PublishedSetting(2, SETTINGS),
        "group_size": PublishedSetting(6, SCRIPT, "exploration_k", deviation=GROUP_SIZE),
    }

    name: Literal["tempflow_grpo"] = "tempflow_grpo"
    noise_weight: float = Field(2.25, gt=0)
    """Factor of a step's weight, which is this times the step's standard deviation. With the
    default the weight is near 1 for the first steps of a published schedule.
    """


def compute_loss(rows: TrajectoryRows, config: TempFlowGRPOConfig) -> tuple[Tensor, RowMetrics]:
    """Compute the loss and the metrics of each row, [M]."""
    clipped, metrics = flow_grpo.compute_loss(rows, config)
    # w b, with b = s sqrt|dt|: a step that adds little noise explores little, and counts little.
    # The std of a transition may be a scalar, and a metric needs a value for each row.
    weight = (config.noise_weight * rows.transition.std).expand_as(clipped)
    return weight * clipped, metrics | {"tempflow/weight": weight}


ALGORITHM = Algorithm(TempFlowGRPOConfig, compute_loss)
