"""VeRL-Omni, from a clone, against the closed forms of the conformance kit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.conformance_adapters import (
    Library,
    build_loss_rows,
    check_one_plain_reward,
    compute_loss_and_gradient,
    import_file,
    read_commit,
    wrap_published_step,
)

# ``file`` is the clone's diffusion_algos.py, imported, with the classes of its losses. Losses on
# steps of a trajectory want the step's scale s and sqrt|dt| apart, [M, 1, 1], and their settings
# from the actor's configuration.


def _compute_policy_loss(file: Any, c: Any) -> Mapping[str, Any]:
    rows, at = build_loss_rows(c)
    limits = {
        "clip_ratio": getattr(c, "clip_range", None),
        "kl_mask_threshold": getattr(c, "divergence_limit", None),
    }
    given = {
        "old_log_prob": rows.old_log_prob,
        "log_prob": rows.log_prob,
        "advantages": rows.advantage,
    }
    # Flow-GRPO's signature does not take the means, the others need them
    if c.function != "flow_grpo_loss":
        given |= {"old_prev_sample_mean": rows.old_mean, "prev_sample_mean": at}
        given |= {
            "std_dev_t": rows.transition.scale[:, None, None],
            "sqrt_dt": rows.transition.dt.abs().sqrt(),
        }
    loss = {
        "flow_grpo_loss": file.FlowGRPOLoss,
        "grpo_guard_loss": file.GRPOGuardLoss,
        "flow_dppo_loss": file.FlowDPPOLoss,
    }
    return compute_loss_and_gradient(
        loss[c.function].compute_loss(
            **given, config=_build_actor_config(adv_clip_max=5.0, **limits)
        )[0],
        at,
    )


def _compute_kl_loss(file: Any, c: Any) -> Mapping[str, Any]:
    rows, at = build_loss_rows(c)
    given = {"prev_sample_mean": at, "ref_prev_sample_mean": rows.copies["reference"].mean}
    return compute_loss_and_gradient(
        file.KLLoss.compute_loss(**given, std_dev_t=rows.transition.scale[:, None, None])[0], at
    )


# Losses on noised final latents: sigma is t, [M, 1, 1].


def _compute_nft_loss(file: Any, c: Any) -> Mapping[str, Any]:
    rows, at = build_loss_rows(c)
    t = rows.sigma[:, None, None]
    loss = file.DiffusionNFTLoss
    share = loss._advantage_to_reward_prob(rows.advantage, c.advantage_clip, c.advantages)
    config = _build_actor_config(
        mix_beta=c.beta,
        adv_clip_max=c.advantage_clip,
        adaptive_weight_min=1e-5,
        ref_kl_coef=0.0,  # the closed form is the loss alone
    )
    given = {
        "forward_prediction": at,
        "old_prediction": rows.copies["old"],
        "ref_forward_prediction": rows.copies["reference"],
    }
    given |= {
        "x0": rows.clean,
        "xt": (1 - t) * rows.clean + t * rows.noise,
        "t_expanded": t,
        "reward_prob": share,
    }
    return compute_loss_and_gradient(loss.compute_loss(**given, config=config)[0], at)


def _compute_dpo_loss(file: Any, c: Any) -> Mapping[str, Any]:
    rows, at = build_loss_rows(c)
    # rows 2i are the better and rows 2i + 1 the worse samples
    better_first = torch.tensor([1.0, 0.0]).repeat(len(at) // 2)
    given = (
        rows.noise,
        rows.clean,
        at,
        rows.copies["reference"],
        better_first,
        _build_actor_config(dpo_beta=c.beta),
    )
    found = compute_loss_and_gradient(file.DPOLoss.compute_loss(*given)[0], at)
    return {name: value.float() for name, value in found.items()}  # it computes in float32


def _compute_group_advantages(file: Any, c: Any) -> Mapping[str, Any]:
    check_one_plain_reward(c)
    options = {"norm_adv_by_std_in_grpo": c.std != "none", "global_std": c.std == "global"}
    found = file.compute_flow_grpo_outcome_advantage(
        torch.tensor(c.rewards[0])[:, None], c.prompt_ids, **options
    )
    return {"advantages": found[0][:, 0]}


def _call_scheduler(scheduler: Any, **inputs: Any) -> Any:
    # its scheduler has Flow-GRPO's function as a method
    return scheduler.sample_previous_step(**inputs)


def build_verl_omni(clone: Path) -> Library:
    """Adapt github.com/verl-project/verl-omni: its steps, losses and advantages. Packages that its
    files only name are not needed.
    """
    # What the files import from verl and tensordict is named in annotations only.
    named = {"verl": "DataProto", "verl.utils": "tensordict_utils", "tensordict": "TensorDict"}
    stand_ins = {package: SimpleNamespace(**{name: object}) for package, name in named.items()}
    stand_ins["verl_omni.workers.config"] = SimpleNamespace(DiffusionActorConfig=SimpleNamespace)
    file = import_file(clone, "verl_omni/trainer/diffusion/diffusion_algos.py", stand_ins)
    steps = import_file(clone, "verl_omni/pipelines/schedulers/flow_match_sde.py")

    names = ("flow_sde_step", "dance_sde_step", "cps_step")
    functions = {
        name: wrap_published_step(steps, _call_scheduler, steps.FlowMatchSDEDiscreteScheduler, name)
        for name in names
    }
    losses: dict[str, Callable[..., Mapping[str, Any]]] = dict.fromkeys(
        ("flow_grpo_loss", "grpo_guard_loss", "flow_dppo_loss"), _compute_policy_loss
    )
    losses |= {
        "diffusion_nft_loss": _compute_nft_loss,
        "diffusion_dpo_loss": _compute_dpo_loss,
        "reference_kl_without_dt": _compute_kl_loss,
        "advantages": _compute_group_advantages,
    }
    functions |= {name: partial(compute, file) for name, compute in losses.items()}
    reason = "it takes the means of std and dt over the batch; the closed form those of the row"
    # only where the rows of a case are of different steps; with one step they agree
    mixed = {f"grpo_guard_loss/steps_differ_clip_{clip}": reason for clip in (0.005, 0.5)}
    return Library("verl_omni", read_commit(clone), functions, mixed)


def _build_actor_config(**settings: Any) -> Any:
    return SimpleNamespace(diffusion_loss=SimpleNamespace(**settings))
