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
is (1 - t)^2 of the velocity's where SNR = ((1 - t) / t)^2 is below 5. The loss is squared, where
the published command has ``--use_huber`` of width 1e-3: for errors far above it, the gradient is
the sign of the square's. No number of steps as an input (TDM-unify).

Settings are those of the published command (README.md), for PixArt-alpha; its script has other
defaults.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ebbflow.algorithms.distribution_matching import build_matching_algorithm
from ebbflow.recipe.algorithms import GROUP_SIZE, TEACHER_GUIDANCE, MatchingConfig, PublishedSetting

SCRIPT = "Luo-Yihong/TDM train_tdm_demo.py"
COMMAND = "Luo-Yihong/TDM README.md"


class TDMConfig(MatchingConfig):
    """TDM: as DMD2, but at the end of each of the student's deterministic steps, over the noise
    levels of that step.
    """

    paper: ClassVar = "2503.06674"
    stage_defaults: ClassVar = {
        "sampler": {"name": "ode", "steps": 4},
        "optimizer": {"lr": 4e-6, "weight_decay": 0.01, "betas": [0.0, 0.95]},
        "updates_per_step": 1,
    }
    along_trajectory: ClassVar = True
    published: ClassVar = {
        "algorithm.guidance": PublishedSetting(
            4.5, COMMAND, "--cfg, of PixArt-alpha", TEACHER_GUIDANCE
        ),
        "algorithm.fake_updates": PublishedSetting(1, SCRIPT),
        "algorithm.fake_lr_factor": PublishedSetting(
            5.0, SCRIPT, "learning_rate / 5 for the student"
        ),
        "algorithm.sigma.kind": PublishedSetting(
            "uniform", COMMAND, "of the times of the step: --use_separate"
        ),
        "algorithm.sigma.min": PublishedSetting(0.02, SCRIPT, "20 of 1000 times"),
        "algorithm.sigma.max": PublishedSetting(
            "10 of 1000 times below the start of the step",
            SCRIPT,
            deviation="a bound for the first step is enough",
            ours="0.98",
        ),
        "start of the student": PublishedSetting(
            900,
            COMMAND,
            "--total_steps, of 1000 times",
            "it starts where the model's schedule does, at pure noise",
            "sigma 1",
        ),
        "sampler.name": PublishedSetting("ode", SCRIPT, "generate_new"),
        "sampler.steps": PublishedSetting(4, SCRIPT),
        "reference.weight": PublishedSetting(0.0, SCRIPT),
        "loss of the student": PublishedSetting(
            True,
            COMMAND,
            "--use_huber, of width 1e-3",
            "the gradient of the square is that of the KL, and Huber's is its sign",
            "the square",
        ),
        "optimizer.lr": PublishedSetting(
            4e-6, COMMAND, "--learning_rate 2e-05 is the fake score's; a fifth is the student's"
        ),
        "optimizer.name": PublishedSetting(
            "adamw_8bit",
            COMMAND,
            "--use_8bit_adam",
            "it needs a GPU and bitsandbytes, and saves memory alone",
        ),
        "optimizer.schedule.kind": PublishedSetting(
            "cosine_with_restarts",
            COMMAND,
            "of the student alone; one cycle over --max_train_steps 10001",
            "the end of a stage is not that of its training",
        ),
        "optimizer.schedule.warmup": PublishedSetting(
            50,
            COMMAND,
            "--lr_warmup_steps, of the student alone",
            "that of the stage's schedule, which would delay the fake score, too",
        ),
        "optimizer.weight_decay": PublishedSetting(0.01, SCRIPT),
        "optimizer.betas": PublishedSetting([0.0, 0.95], SCRIPT),
        "optimizer.max_grad_norm": PublishedSetting(1.0, COMMAND, "of the student alone"),
        "updates_per_step": PublishedSetting(1, COMMAND),
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
