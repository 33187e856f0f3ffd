r"""BranchGRPO (2509.06040): the samples of a group are leaves of a tree, and every denoising step
has an advantage of its own.

    R(node) = mean of R over the leaves of the node
    A(node) = z(R(node))      among the nodes after the same denoising step, of one prompt
    L       = mean max(-A rho, -A clip(rho, 1 - eps, 1 + eps))

over the rows, one per (node, trained step): a step that several samples share is generated and
trained once. So the steps before a split learn what all that follows from them is worth. The tree
is a key of the stage (``TreeConfig``), its advantages are
``ebbflow.algorithms.advantages.compute_tree_advantages``.

Pruning: ``advantages.keep_extremes`` (width) trains the best and the worst nodes of each denoising
step alone, ``window`` of kind ``share`` (depth) a random share of the steps. With a window of some
steps all others but the splits are deterministic, which is BranchGRPO-Mix.

Deviations: the public code can weigh the children of a node by a softmax of their log-probs (off in
its script), which, as means over a latent, are nearly equal; it prunes the last level alone, and
moves the window of steps that it leaves out every 30 steps.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.base import Algorithm
from ebbflow.algorithms.built_in import flow_grpo
from ebbflow.algorithms.built_in.flow_grpo import ClippedConfig
from ebbflow.recipe.algorithms import PublishedSetting

SCRIPT = "Fredreic1849/BranchGRPO scripts/finetune/finetune_flux_branchgrpo_8gpus.sh"
CODE = "Fredreic1849/BranchGRPO fastvideo/train_branchgrpo_flux.py"


class BranchGRPOConfig(ClippedConfig):
    """Clipped policy gradient on a tree: samples of a prompt share the steps before they branch,
    each with its own advantage.
    """

    paper: ClassVar = "2509.06040"
    stage_defaults: ClassVar = {
        "shared_initial_noise": True,
        "tree": {"splits": [0, 3, 6, 9]},
        "sampler": {"name": "dance_sde", "steps": 20},
        "window": {"kind": "all"},
        "advantages": {"std": "group"},
        "optimizer": {"lr": 1e-5},
        "updates_per_step": 4,
    }
    published: ClassVar = {
        "algorithm.clip_range": PublishedSetting(1e-3, SCRIPT),
        "tree.splits": PublishedSetting([0, 3, 6, 9], SCRIPT, "--tree_split_points"),
        "tree.branches": PublishedSetting(2, CODE, "num_splits"),
        "noise of the splits": PublishedSetting(
            4.0,
            SCRIPT,
            "--tree_split_noise_scale, times the standard deviation of the step",
            deviation=(
                "samples drawn with four times the noise are not of the policy that the ratio is"
                " against"
            ),
            ours="that of every step",
        ),
        "sampler.name": PublishedSetting("dance_sde", SCRIPT, "eta .3"),
        "sampler.steps": PublishedSetting(20, SCRIPT),
        "shared_initial_noise": PublishedSetting(True, SCRIPT, "--init_same_noise"),
        "window.kind": PublishedSetting(
            "all", SCRIPT, "--mix_ode_sde_tree off, no depth is pruned"
        ),
        "advantages.std": PublishedSetting("group", CODE, "of the nodes of a depth"),
        "advantages.combine": PublishedSetting("per_reward", CODE, "one reward, HPSv2"),
        "advantages.keep_extremes": PublishedSetting(None, SCRIPT, "--width_pruning_mode 0"),
        "advantages.clip": PublishedSetting(5.0, SCRIPT),
        "reference.weight": PublishedSetting(0.0, SCRIPT),
        "optimizer.lr": PublishedSetting(1e-5, SCRIPT, "of all parameters"),
        "optimizer.weight_decay": PublishedSetting(1e-4, SCRIPT),
        "optimizer.max_grad_norm": PublishedSetting(1.0, SCRIPT),
        "updates_per_step": PublishedSetting(
            "one for 12 rows",
            SCRIPT,
            "--gradient_accumulation_steps on each GPU, in the order of the tree",
            deviation="each update would see few of its depths",
            ours="4, each on a quarter of the samples",
        ),
        "group_size": PublishedSetting(16, SCRIPT),
    }

    name: Literal["branch_grpo"] = "branch_grpo"
    clip_range: float = Field(1e-3, gt=0, lt=1)
    """Clip range of the ratio. Log-probs are means over the latent's elements, so a model with
    fewer elements needs a wider range.
    """


# The loss is Flow-GRPO's. What makes it BranchGRPO comes with the rows: a node's advantage stands
# at its first sample alone, so that every (node, step) is one row.
ALGORITHM = Algorithm(BranchGRPOConfig, flow_grpo.compute_loss)
