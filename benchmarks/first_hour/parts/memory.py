"""The most memory that a process of ``ebbflow estimate``'s table takes, against its estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.first_hour.lines import Line, Setting, judge, skip
from benchmarks.first_hour.model_folder import describe_model, find_model_folder
from benchmarks.gpu_sides import LORA, SIZES
from ebbflow.data.prompts import Prompt
from ebbflow.estimate.run import estimate_recipe
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import plan_steps
from ebbflow.models import load_model
from ebbflow.models.encoding import build_prompt_lookup
from ebbflow.recipe import Recipe
from ebbflow.rollouts.generate import generate_samples
from ebbflow.stage import StageContext
from ebbflow.training.batches import build_trajectory_batch, count_micro_batches
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

GIB = 2**30
MOST = 1.1
"""Of the estimate: more, and a run that was planned by it may end without memory."""
LEAST = 0.5
"""Of the estimate: less, and it asks for GPUs that nobody needs."""
PROMPTS = 2
GROUP_SIZE = 4


def build_recipe(setting: Setting) -> Recipe:
    """Build the recipe of a LoRA of the size, whose step is one rollout and one update."""
    size = SIZES[setting.size]
    model = describe_model(find_model_folder(setting.folder, setting.size), setting.size)
    return Recipe.model_validate(
        {
            "model": model.model_dump(),
            "policy": LORA.model_dump(),
            "rewards": [{"name": "jpeg_compressibility"}],
            "stages": [
                {
                    "kind": "online",
                    "algorithm": {"name": "flow_grpo", "clip_range": 1e-3},
                    "steps": 1,
                    "prompts_per_step": PROMPTS,
                    "group_size": GROUP_SIZE,
                    "micro_batch": size.training_micro_batch,
                    "sampler": {"name": "flow_sde", "steps": 10},
                    "window": {"kind": "fixed", "size": 3},
                    "reference": {"weight": 0.0},
                }
            ],
        }
    )


def measure(setting: Setting) -> Iterator[Line]:
    recipe = build_recipe(setting)
    estimate = estimate_recipe(recipe, processes=1)
    training = estimate.memory["1.1 online training"]
    without_optimizer = replace(training, optimizer=0)
    expected = {
        "loading": replace(without_optimizer, activations=0, samples=0, others=0).peak_bytes,
        "encoding prompts": estimate.memory["text encoding"].peak_bytes,
        "a rollout with its pictures": without_optimizer.peak_bytes,
        "training": training.peak_bytes,
    }
    for phase, peak in run_phases(recipe):
        claim = f"{phase} takes the memory of the estimate"
        estimated = expected[phase] / GIB
        if peak is None:
            yield skip(claim, "nobody counts memory on a CPU", f"estimate {estimated:.3f} GiB")
            continue
        share = peak / expected[phase]
        yield judge(
            claim,
            LEAST <= share <= MOST,
            f"{peak / GIB:.1f} GiB of {estimated:.1f}, {share:.2f}",
            f"{LEAST} to {MOST}",
        )


def run_phases(recipe: Recipe) -> Iterator[tuple[str, int | None]]:
    """Load, encode, generate and train; yield each phase with the most bytes of the device."""
    stage = StageContext(recipe, 0, 0).online_config
    texts = [f"a sign that says {number}" for number in range(PROMPTS)]
    prompts = [Prompt(n, text, "", None, "", "train", "{}") for n, text in enumerate(texts)]
    rows = [prompt for prompt in prompts for _ in range(GROUP_SIZE)]
    keys = SampleKeys(0, [p.prompt_id for p in rows], list(range(GROUP_SIZE)) * PROMPTS)

    reset_peak()
    model = load_model(Path(recipe.model.path or ""), recipe.model, weights_later=True)
    policy = Policy(model, recipe.policy, 0)
    yield "loading", read_peak()

    lookup = build_prompt_lookup(model, prompts)
    yield "encoding prompts", read_peak()

    conditioning = lookup(rows)
    plan = plan_steps(stage.window, stage.sampler.steps, optimisation_step=0, seed=0)
    rollouts = generate_samples(model, conditioning, keys, stage.sampler, plan, stage.micro_batch)
    model.decode_latents(rollouts.latents)
    yield "a rollout with its pictures", read_peak()

    assert rollouts.trajectory
    advantage = torch.randn(len(rows), device=rollouts.latents.device)
    batch = build_trajectory_batch(
        rollouts.trajectory, conditioning, advantage, keys, stage.sampler
    )
    passes = count_micro_batches(batch.group_index, stage.micro_batch)
    PolicyUpdater(policy, stage).update_policy(batch, passes)
    yield "training", read_peak()


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def read_peak() -> int | None:
    """Return the most bytes since the last call, and begin again; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    peak = torch.cuda.max_memory_allocated()
    reset_peak()
    return peak
