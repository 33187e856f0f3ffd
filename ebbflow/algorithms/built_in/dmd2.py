r"""DMD2, improved distribution matching distillation (2405.14867): a teacher's distribution in a
student's few steps.

A step of the student is drawn for each sample, among those of its own sampling ("backward
simulation"): x before it, without gradient. Its clean prediction x0_hat = x - sigma v, with
gradient, gets fresh noise of a level t in ``sigma``, where the teacher and the fake score are
compared (``ebbflow.algorithms.distribution_matching``). The fake score takes ``fake_updates``
optimiser steps before each of the student's ("two time-scale update rule").

The sampler of the student, ``cps`` with eta 1, is that of consistency models: each step predicts x0
and adds fresh noise of the next sigma.

Deviations: no GAN loss, which needs real images, and so no discriminator. The fake score trains on
the samples of the student's own update, with other draws of step, noise level and noise, where the
published code generates new ones, and at the noise levels of ``sigma``, where it has all. Its error
is that of the velocity; the published one, of the noise, is (1 - t)^2 of it.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from ebbflow.algorithms.distribution_matching import build_matching_algorithm
from ebbflow.recipe.algorithms import GROUP_SIZE, TEACHER_GUIDANCE, MatchingConfig, PublishedSetting

SCRIPT = (
    "tianweiy/DMD2"
    " experiments/sdxl/sdxl_cond999_8node_lr5e-7_denoising4step_(...)_backsim_scratch.sh"
)
GUIDANCE = "tianweiy/DMD2 main/sd_guidance.py"


class DMD2Config(MatchingConfig):
    """DMD2 without its GAN loss: trains a few-step student whose samples, noised again, get the
    scores of a many-step teacher.
    """

    paper: ClassVar = "2405.14867"
    stage_defaults: ClassVar = {
        "sampler": {"name": "cps", "eta": 1.0, "steps": 4},
        "optimizer": {"lr": 5e-7, "weight_decay": 0.01, "max_grad_norm": 10.0},
        "updates_per_step": 1,
    }
    published: ClassVar = {
        "algorithm.guidance": PublishedSetting(
            8.0, SCRIPT, "real_guidance_scale, of SDXL", TEACHER_GUIDANCE
        ),
        "algorithm.fake_updates": PublishedSetting(
            5, SCRIPT, "dfake_gen_update_ratio; 10 for SD 1.5"
        ),
        "algorithm.fake_lr_factor": PublishedSetting(1.0, SCRIPT, "guidance_lr over generator_lr"),
        "algorithm.sigma.kind": PublishedSetting("uniform", GUIDANCE, "of 1000 times of a DDPM"),
        "algorithm.sigma.min": PublishedSetting(
            0.02, "tianweiy/DMD2 main/train_sd.py", "min_step_percent"
        ),
        "algorithm.sigma.max": PublishedSetting(0.98, SCRIPT, "max_step_percent"),
        "sampler.name": PublishedSetting(
            "cps", SCRIPT, "num_denoising_step with fresh noise at each, as eta 1 of cps has it"
        ),
        "sampler.eta": PublishedSetting(1.0, SCRIPT),
        "sampler.steps": PublishedSetting(4, SCRIPT),
        "reference.weight": PublishedSetting(0.0, SCRIPT),
        "optimizer.lr": PublishedSetting(5e-7, SCRIPT, "of all parameters; 5e-5 of LoRA adapters"),
        "optimizer.weight_decay": PublishedSetting(0.01, "tianweiy/DMD2 main/train_sd.py"),
        "optimizer.max_grad_norm": PublishedSetting(10.0, SCRIPT),
        "updates_per_step": PublishedSetting(1, SCRIPT),
        "group_size": PublishedSetting(1, SCRIPT, deviation=GROUP_SIZE),
        "error of the fake score": PublishedSetting(
            "of the noise",
            GUIDANCE,
            "compute_loss_fake, of networks that predict noise",
            deviation="these networks predict a velocity, and are trained on its error",
            ours="of the velocity",
        ),
        "GAN loss": PublishedSetting(
            "5e-3 of it", SCRIPT, deviation="it needs real images, and a run has none", ours="none"
        ),
    }

    name: Literal["dmd2"] = "dmd2"


ALGORITHM = build_matching_algorithm(DMD2Config)
