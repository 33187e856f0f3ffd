"""Which function of a library is run against each closed form.

A function takes a case, whose inputs (NumPy arrays) and settings are its attributes, and returns
any of the expected values by name. It leaves out what the library does not offer, and raises
``NotOffered`` for settings that the library cannot take.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from torch import Tensor

from ebbflow.algorithms.advantages import PromptStatistics, compute_advantages
from ebbflow.algorithms.base import (
    Algorithm,
    ForwardRows,
    TrajectoryRows,
    compute_flow_matching_error,
)
from ebbflow.algorithms.built_in import awm
from ebbflow.algorithms.correction import compute_correction, compute_diagnostics
from ebbflow.algorithms.loss_terms import compute_penalty
from ebbflow.algorithms.registry import BUILT_IN
from ebbflow.flow.sampler import (
    SolverHistory,
    Transition,
    compute_log_prob,
    compute_transition,
    find_sampler,
    sample_next_latents,
)
from ebbflow.recipe.choices import AdvantagesConfig, CorrectionConfig, ReferenceConfig

Function = Callable[[Any], Mapping[str, Any]]


class NotOffered(Exception):
    """A library cannot take these settings. Whatever else a function raises is a failure of it."""


@dataclass(frozen=True, eq=False)
class Library:
    """What is run against the vectors.

    Example:
        A library with a single function, run with ``--library my_package.adapter:LIBRARY``::

            def step(c):
                return {"next_latents": my_step(c.latents, c.velocity, c.sigmas, c.step)}

            LIBRARY = Library("mine", "1.2", {"ode_step": step})

    Attributes:
        version: release or commit, for the table.
        functions: by the closed form that each should equal.
        differences: by the name of a case or of a closed form, why the library differs there, where
            that is known.
    """

    name: str
    version: str
    functions: Mapping[str, Function]
    differences: Mapping[str, str] = field(default_factory=dict)


# Ebbflow, in float64: an error of 1e-7 would otherwise hide in float32's rounding

# a new algorithm is compared as soon as it is registered
LOSSES = {config.model_fields["name"].default: algorithm for config, algorithm in BUILT_IN.items()}


def build_ebbflow() -> Library:
    samplers = {
        f"{name}_step": lambda c, name=name: _build_step(name, c)
        for name in ("flow_sde", "dance_sde", "cps", "ode")
    }
    losses = {
        f"{name}_loss": lambda c, algorithm=algorithm: _build_loss(algorithm, c)
        for name, algorithm in LOSSES.items()
    }
    penalties = {
        f"reference_{kind}": lambda c, kind=kind: _build_penalty(kind, c)
        for kind in ("kl", "kl_without_dt", "velocity")
    }
    others = {
        "advantages": _compute_advantages,
        "rollout_correction": _compute_correction,
        "rollout_divergence": _compute_divergence,
    }
    functions = {
        **samplers,
        "dpm_solver_steps": _run_dpm_solver,
        **losses,
        "awm_loss": _compute_awm_loss,
        **penalties,
        **others,
    }
    return Library("ebbflow", importlib.metadata.version("ebbflow"), functions)


def _build_step(sampler: str, c: Any) -> Mapping[str, Any]:
    c = _convert_to_tensors(c)
    step = compute_transition(
        sampler, c.latents, c.velocity, c.sigmas, c.step, getattr(c, "eta", None)
    )
    if sampler == "ode":
        return {"next_latents": step.mean}
    log_prob = compute_log_prob(step, c.recorded)
    return {
        "mean": step.mean,
        "std": step.std,
        "next_latents": sample_next_latents(step, c.noise),
        "log_prob": log_prob,
    }


def _run_dpm_solver(c: Any) -> Mapping[str, Any]:
    c = _convert_to_tensors(c)
    latents = c.latents
    dpm_solver = find_sampler("dpm_solver")
    history: SolverHistory | None = None
    path = []
    for step, velocity in enumerate(c.velocities):
        latents, history = dpm_solver.advance(latents, velocity, c.sigmas, step, history)
        path.append(latents)
    return {"path": torch.stack(path)}


def _build_loss(algorithm: Algorithm, c: Any) -> Mapping[str, Any]:
    rows, at = build_loss_rows(c)
    loss, _ = algorithm.loss(rows, _build_config(algorithm, c))
    # Diffusion-DPO has a loss for each pair; here both rows of a pair carry it.
    if "diffusion_dpo" in algorithm.config.__module__:
        loss = loss[::2]
    return compute_loss_and_gradient(loss, at)


def _compute_awm_loss(c: Any) -> Mapping[str, Any]:
    rows, _ = build_loss_rows(c)
    # AWM's loss is a surrogate whose value says nothing, only its gradient does: the closed form
    # has no loss, and neither has this.
    surrogate = awm.compute_surrogate(
        compute_flow_matching_error(rows, rows.velocity),
        rows.sigma,
        _build_config(awm.ALGORITHM, c),
    )
    return {"surrogate": surrogate, "gradient": _build_loss(awm.ALGORITHM, c)["gradient"]}


def _build_config(algorithm: Algorithm, c: Any) -> Any:
    fields = algorithm.config.model_fields
    settings = {
        name: value
        for name, value in vars(c).items()
        if name in fields and not isinstance(value, np.ndarray)
    }
    # validated as a recipe's would be, so that a default that a case does not say is Ebbflow's
    fixed = {"teacher": "none", "refresh_every": 0}  # the copies come from the case
    return algorithm.config.model_validate(
        settings | {name: value for name, value in fixed.items() if name in fields}
    )


def _build_penalty(kind: Any, c: Any) -> Mapping[str, Any]:
    rows, at = build_loss_rows(c)
    reference = rows.copies["reference"]
    config = ReferenceConfig(penalty=kind)
    penalty, _ = compute_penalty(config, rows, at, reference, config.copy_name)
    return compute_loss_and_gradient(penalty, at)


def build_loss_rows(c: Any) -> tuple[Any, Tensor]:
    """The rows of a loss, and the leaf that its gradient is taken at."""
    c = _convert_to_tensors(c)
    # Losses on noised final latents have a velocity, [M, ...]; those on steps of a trajectory have
    # a mean, [M, ...].
    if hasattr(c, "velocity"):
        at = c.velocity.requires_grad_()
        copies: Mapping[Any, Any] = {
            "old": c.old_velocity,
            "reference": c.reference_velocity,
            "rollout": at.detach(),  # the ratio to it is 1, and only its gradient is left
        }
        return ForwardRows(c.clean, c.noise, c.sigma, at, copies, c.advantage, c.group_index), at
    at = c.mean.requires_grad_()
    flow_sde = find_sampler("flow_sde")
    # std [M] is that of the step, b = s sqrt|dt|; scale is s
    step = Transition(flow_sde, at, c.std, c.std / c.dt.abs().sqrt(), c.dt)
    old, teacher, reference = (
        replace(step, mean=mean) for mean in (c.old_mean, c.teacher_mean, c.reference_mean)
    )
    score, old_score = (compute_log_prob(each, c.next_latents) for each in (step, old))
    return TrajectoryRows(
        step, score, old.mean, old_score, {"teacher": teacher, "reference": reference}, c.advantage
    ), at


def _compute_advantages(c: Any) -> Mapping[str, Any]:
    settings = {
        name: getattr(c, name) for name in ("std", "combine", "trim", "keep_extremes", "clip")
    }
    config = AdvantagesConfig(running=bool(c.earlier_rewards.size), **settings)
    history = PromptStatistics()
    weights = {str(index): float(weight) for index, weight in enumerate(c.weights)}
    # the statistics of earlier steps are what an earlier call leaves in the history
    if config.running:
        compute_advantages(
            dict(zip(weights, c.earlier_rewards, strict=True)),
            weights,
            c.earlier_prompt_ids,
            config,
            history,
        )
    advantages = compute_advantages(
        dict(zip(weights, c.rewards, strict=True)), weights, c.prompt_ids, config, history
    )
    return {"advantages": advantages.values, "keep": advantages.keep}


def _compute_correction(c: Any) -> Mapping[str, Any]:
    names = (
        "unit",
        "weights",
        "level",
        "low",
        "high",
        "normalise",
        "reject",
        "reject_level",
        "reject_above",
    )
    config = CorrectionConfig(mode="decoupled", **{name: getattr(c, name) for name in names})
    weights, keep = compute_correction(torch.tensor(c.delta), c.dims, config)
    return {"weights": weights, "keep": keep}


def _compute_divergence(c: Any) -> Mapping[str, Any]:
    diagnostics = compute_diagnostics(torch.tensor(c.delta), torch.arange(c.delta.shape[1]), c.dims)
    return {name: diagnostics[f"rollout/{name}"] for name in ("k3", "chi2", "chi2_sum")}


# diffusers, whose schedulers are in float32


def build_diffusers() -> Library:
    functions = {
        "ode_step": _run_euler,
        "cps_step": _run_euler_with_new_noise,
        "dpm_solver_steps": _run_dpm_solver_multistep,
    }
    return Library("diffusers", importlib.metadata.version("diffusers"), functions)


def _run_euler(c: Any, **options: Any) -> Mapping[str, Any]:
    c, scheduler = (
        _convert_to_tensors(c, torch.float32),
        _build_scheduler(c, FlowMatchEulerDiscreteScheduler, **options),
    )
    scheduler.set_begin_index(c.step)
    return {
        "next_latents": scheduler.step(
            c.velocity, scheduler.timesteps[c.step], c.latents
        ).prev_sample
    }


def _run_euler_with_new_noise(c: Any) -> Mapping[str, Any]:
    if c.eta != 1:
        raise NotOffered("stochastic_sampling replaces all of the noise: CPS with eta = 1")
    # the scheduler draws its noise itself, so the case's is put in its place
    noise = torch.tensor(c.noise, dtype=torch.float32)
    with mock.patch(
        f"{FlowMatchEulerDiscreteScheduler.__module__}.randn_tensor", return_value=noise
    ):
        return _run_euler(c, stochastic_sampling=True)


def _run_dpm_solver_multistep(c: Any) -> Mapping[str, Any]:
    c = _convert_to_tensors(c, torch.float32)
    path = list[Tensor]()
    kind = {
        "algorithm_type": "dpmsolver++",
        "solver_type": "midpoint",
        "prediction_type": "flow_prediction",
    }
    scheduler = DPMSolverMultistepScheduler(**kind, use_flow_sigmas=True)
    scheduler.set_timesteps(len(c.velocities))
    # set by hand: set_timesteps computes a schedule of its own
    scheduler.sigmas = c.sigmas
    scheduler.set_begin_index(0)
    for velocity, timestep in zip(c.velocities, scheduler.timesteps, strict=True):
        path.append(scheduler.step(velocity, timestep, path[-1] if path else c.latents).prev_sample)
    return {"path": torch.stack(path)}


# Clones: single files of them are imported


def build_flow_grpo(clone: Path) -> Library:
    """github.com/yifan123/flow_grpo: its step with log-probs, and its statistics per prompt."""
    file = import_file(clone, "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py")
    tracker = import_file(clone, "flow_grpo/stat_tracking.py").PerPromptStatTracker

    def group_advantages(c: Any) -> Mapping[str, Any]:
        check_one_plain_reward(c, c.std == "none")
        statistics = tracker(global_std=c.std == "global")
        return {"advantages": statistics.update(c.prompt_ids, c.rewards[0])}

    call = file.sde_step_with_logprob
    has_cps = "sde_type" in inspect.signature(call).parameters  # commits of July 2025 have none
    names = ("flow_sde_step", "cps_step") if has_cps else ("flow_sde_step",)
    functions = {
        name: wrap_published_step(file, call, FlowMatchEulerDiscreteScheduler, name)
        for name in names
    }
    reason = "its std divides by n, the closed form's by n - 1"
    return Library(
        "flow_grpo",
        read_commit(clone),
        functions | {"advantages": group_advantages},
        {"advantages": reason},
    )


def wrap_published_step(
    file: Any, call: Callable[..., Any], scheduler_class: Any, name: str
) -> Function:
    """A step of Flow-GRPO's signature, which returns x', log-prob, mean and s (sde) or b (other
    kinds).
    """
    kind = {"flow_sde_step": "sde", "dance_sde_step": "dance_sde", "cps_step": "cps"}[name]
    kinds = {"sde_type": kind} if kind != "sde" else {}

    def run_step(c: Any) -> Mapping[str, Any]:
        c, scheduler = _convert_to_tensors(c, torch.float32), _build_scheduler(c, scheduler_class)
        # [N, 2, 3] to [N, 1, 2, 3]: these functions broadcast over the four axes of an image
        latents, velocity, noise, recorded = (
            value[:, None] for value in (c.latents, c.velocity, c.noise, c.recorded)
        )
        inputs = {
            "model_output": velocity,
            "sample": latents,
            "timestep": scheduler.timesteps[[c.step] * len(latents)],
        }
        # Two calls: given a next latent, the function scores it and samples none.
        with mock.patch.object(file, "randn_tensor", return_value=noise):
            after, _, mean, std = call(scheduler, **inputs, noise_level=c.eta, **kinds)
        log_prob = call(scheduler, **inputs, noise_level=c.eta, prev_sample=recorded, **kinds)[1]
        # of the SDE it returns s, of the other kinds b
        root = (c.sigmas[c.step] - c.sigmas[c.step + 1]).sqrt() if kind == "sde" else 1
        return {
            "mean": mean[:, 0],
            "std": std.flatten()[0] * root,
            "next_latents": after[:, 0],
            "log_prob": log_prob,
        }

    return run_step


def check_one_plain_reward(c: Any, refused: bool = False) -> None:
    # what only Ebbflow offers; the flag `refused` is for settings that the library lacks besides
    special = (
        c.trim
        or c.keep_extremes
        or c.clip < 5
        or c.earlier_rewards.size
        or np.isnan(c.rewards).any()
    )
    if refused or special or len(c.rewards) > 1:
        raise NotOffered("one reward, normalised inside the step")


def compute_loss_and_gradient(loss: Tensor, at: Tensor) -> dict[str, Tensor]:
    gradient = torch.autograd.grad(loss.mean(), at)[0]
    return ({"loss": loss} if loss.ndim else {}) | {"mean_loss": loss.mean(), "gradient": gradient}


def _convert_to_tensors(c: Any, dtype: torch.dtype = torch.float64) -> Any:
    """The case with its arrays as tensors, those of numbers in ``dtype``."""
    arrays = {
        name: torch.tensor(value)
        for name, value in vars(c).items()
        if isinstance(value, np.ndarray)
    }
    return SimpleNamespace(
        **vars(c)
        | {
            name: value.to(dtype) if value.is_floating_point() else value
            for name, value in arrays.items()
        }
    )


def _build_scheduler(c: Any, kind: Any, **options: Any) -> Any:
    scheduler = kind(**options)
    scheduler.set_timesteps(sigmas=c.sigmas[:-1].tolist())
    return scheduler


def import_file(clone: Path, path: str, stand_ins: Mapping[str, Any] | None = None) -> Any:
    """One file of a clone as a module; ``stand_ins`` take the place of packages that it names and
    does not call.
    """
    if not (clone / path).is_file():
        raise SystemExit(f"{clone} has no {path}; give the folder of a clone that has it")
    spec = importlib.util.spec_from_file_location(f"conformance_{Path(path).stem}", clone / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {spec.name: module, **(stand_ins or {})}):
        spec.loader.exec_module(module)
    return module


def read_commit(clone: Path) -> str:
    command = ["git", "-C", str(clone), "rev-parse", "--short=10", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "no commit"
