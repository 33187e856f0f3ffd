"""What a process keeps in main memory, and what it takes while it encodes, against tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbflow.estimate.memory import Memory
from ebbflow.estimate.run import estimate_recipe
from ebbflow.estimate.text import describe_estimate
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import plan_window
from ebbflow.models import load_model
from ebbflow.rollouts.generate import Diffusers
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy

STAGE = {
    "kind": "online",
    "prompts_per_step": 4,
    "group_size": 2,
    "micro_batch": 4,
    "sampler": {"steps": 4},
    "window": {"size": 2},
}
LORA = {"train": "lora", "rank": 2}
TRAINING = "1.1 online training"


def bytes_on_the_host(recipe, prompts):
    """(text encoders and VAE, rollouts of a step, their pictures)."""
    ctx = StageContext(recipe, 0, 0)
    config = ctx.online_config
    policy = Policy(load_model(Path(recipe.model.path), recipe.model), recipe.policy, 0)
    model = policy.model
    parts = sum(
        parameter.nbytes
        for name in (*model.text_parts, "vae")
        for parameter in getattr(model.pipeline, name).parameters()
    )
    keys = SampleKeys.number_groups(
        ctx.stage_seed, [p.prompt_id for p in prompts], config.group_size, 0, config.noise_sharing
    )
    conditioning = model.encode_prompts(
        [prompt for prompt in prompts for _ in range(config.group_size)]
    )
    rollouts, pictures = Diffusers(ctx, policy).generate(
        conditioning,
        keys,
        config.sampler,
        plan_window(config, ctx.stage_seed, 0, config.hyper_parameters.compares_means),
    )
    columns = [rollouts.latents, *rollouts.trajectory.list_columns().values()]
    return parts, sum(value.nbytes for value in columns), pictures.nbytes


def test_parts_and_joined_rollouts_and_pictures_wait_in_main_memory(tiny_recipe, make_prompts):
    """2 % for log-probs, times and sigmas, which the estimate leaves out."""
    recipe = tiny_recipe("sd3", stages=[STAGE], policy=LORA)
    parts, rollouts, pictures = bytes_on_the_host(recipe, make_prompts(4))
    estimate = estimate_recipe(recipe)
    memory = estimate.memory[TRAINING]
    assert memory.main_memory_bytes == pytest.approx(parts + 2 * rollouts + pictures, rel=0.02)
    assert estimate.memory["text encoding"].main_memory_bytes == parts
    shared = tiny_recipe("sd3", stages=[STAGE | {"placement": "colocated"}], policy=LORA)
    of_four = estimate_recipe(shared, 4).memory[TRAINING].main_memory_bytes
    # Each has a quarter of the samples, which are copied once more to be exchanged.
    assert of_four == pytest.approx(parts + (3 * rollouts + pictures) / 4, rel=0.02)


def test_shards_stay_while_a_rank_encodes_and_whole_weights_may_wait(tiny_recipe):
    recipe = tiny_recipe("sd3", stages=[STAGE | {"placement": "colocated"}], policy=LORA)
    alone, four = (estimate_recipe(recipe, count) for count in (1, 4))
    encoding = alone.memory["text encoding"]
    encoders = encoding.others + encoding.activations + encoding.samples
    whole, shard = (estimate.memory[TRAINING] for estimate in (alone, four))
    assert shard.encoding == shard.loading + shard.copies + encoders
    assert whole.encoding == max(whole.loading + whole.copies, encoders)
    assert Memory(weights=10, loading=20, encoding=40).peak_bytes == 40
    (line,) = [
        line
        for line in describe_estimate(four).split("in main memory\n")[1].splitlines()
        if line.startswith(f"  {TRAINING}")
    ]
    values = (shard.loading, shard.encoding, shard.main_memory_bytes)
    assert line.split()[3:] == [f"{value / 2**30:.2f}" for value in values]


def test_offloaded_shards_are_read_into_main_memory(tiny_recipe):
    recipe = tiny_recipe(
        "sd3",
        {"cpu_offload": True},
        stages=[STAGE | {"placement": "colocated"}],
        policy={"train": "full"},
    )
    alone, four = (estimate_recipe(recipe, count).memory[TRAINING] for count in (1, 4))
    assert (alone.loading, four.loading) == (alone.weights, 0)
