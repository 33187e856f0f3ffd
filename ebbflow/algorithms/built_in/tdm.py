r"""TDM, trajectory distribution matching (2503.06674): a teacher's distribution at each of a
student's deterministic steps.

As DMD2 (``ebbflow.algorithms.built_in.dmd2``), but fresh noise is added where the drawn step of the
student ends, x' at sigma', up to a noise level t between sigma' and the sigma where the step
begins. So each noise level belongs to one step, and one fake score can tell the distributions of
all steps apart. The last step has sigma' = 0, as DMD2 has at all of them.

Deviations: the fake score learns from the fresh noise (``ebbflow.flow.renoising``). The published
code regresses it to x0_hat, which is not independent of the noise that a deterministic step leaves
in x', and corrects that by importance weights. Rows weigh (1 - sigma')^2 here, since that noise
makes the target of the first steps noisier; the published weight, min(SNR, 5) of the error of x0,
is (1 - t)^2 of the velocity's where SNR = ((1 - t) / t)^2 is below 5. The loss is squared, as in
the published code without ``--use_huber``. No number of steps as an input (TDM-unify).
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.distribution_matching import build_matching_algorithm
from ebbflow.recipe.algorithms import GROUP_SIZE, TEACHER_GUIDANCE, MatchingConfig, PublishedSetting

SCRIPT = "Luo-Yihong/TDM train_tdm_demo.py"


class TDMConfig(MatchingConfig):
    """TDM: as DMD2, but at the end of each of the student's deterministic steps, over the noise
    levels of that step.
    """

    paper: ClassVar = "2503.06674"
    stage_defaults: ClassVar = {
        "sampler": {"name": "ode", "steps": 4},
        "optimizer": {"lr": 2e-5, "weight_decay": 0.01, "betas": [0.0, 0.95]},
        "updates_per_step": 1,
    }
    along_trajectory: ClassVar = True
    published: ClassVar = {
        "algorithm.guidance": PublishedSetting(
            2.0, SCRIPT, "cfg, of PixArt-alpha", TEACHER_GUIDANCE
        ),
        "algorithm.fake_updates": PublishedSetting(1, SCRIPT),
        "algorithm.fake_lr_factor": PublishedSetting(
            5.0, SCRIPT, "learning_rate / 5 for the student"
        ),
        "algorithm.sigma.kind": PublishedSetting(
            "uniform", SCRIPT, "of the times of the step, with use_separate"
        ),
        "algorithm.sigma.min": PublishedSetting(0.02, SCRIPT, "20 of 1000 times"),
        "algorithm.sigma.max": PublishedSetting(
            "10 of 1000 times below the start of the step",
            SCRIPT,
            deviation="a bound for the first step is enough",
            ours="0.98",
        ),
        "sampler.name": PublishedSetting("ode", SCRIPT, "generate_new"),
        "sampler.steps": PublishedSetting(4, SCRIPT),
        "reference.weight": PublishedSetting(0.0, SCRIPT),
        "optimizer.lr": PublishedSetting(2e-5, SCRIPT, "of all parameters"),
        "optimizer.weight_decay": PublishedSetting(0.01, SCRIPT),
        "optimizer.betas": PublishedSetting([0.0, 0.95], SCRIPT),
        "optimizer.max_grad_norm": PublishedSetting(1.0, SCRIPT),
        "updates_per_step": PublishedSetting(1, SCRIPT),
        "group_size": PublishedSetting(1, SCRIPT, deviation=GROUP_SIZE),
        "target of the fake score": PublishedSetting(
            "x0_hat, with importance weights",
            SCRIPT,
            deviation="denoising score matching has no bias that would need weights",
            ours="the fresh noise",
        ),
        "weight in the fake score": PublishedSetting(
            "min(((1 - t) / t)^2, 5) of the error of x0",
            SCRIPT,
            deviation=(
                "the noise of a step's end is in the target, and would make the first steps"
                " outweigh the others"
            ),
            ours="(1 - sigma')^2 of the velocity's, of a step that ends at sigma'",
        ),
    }

    name: Literal["tdm"] = "tdm"
    fake_updates: int = Field(1, ge=1)
    """Optimiser steps of the fake score before each optimiser step of the student, on the same
    samples with other noise.
    """
    fake_lr_factor: float = Field(5.0, gt=0)
    """Learning rate of the fake score, relative to the student's. The rest of its optimiser is the
    same."""


ALGORITHM = build_matching_algorithm(TDMConfig)
