"""The memory of processes that share weights, samples or tokens."""

from __future__ import annotations

import dataclasses

import pytest

from ebbflow.estimate.hours import estimate_hours
from ebbflow.estimate.run import estimate_from_sizes, estimate_recipe
from ebbflow.estimate.text import describe_estimate
from ebbflow.models.sizes import measure_model


def test_processes_share_weights_and_optimiser_and_hold_one_block(tiny_recipe):
    recipe = tiny_recipe("sd3", stages=[{"kind": "offline", "batch_size": 64}])
    alone, four = (
        estimate_recipe(recipe, count).memory["1.1 offline training"] for count in (1, 4)
    )
    block = alone.weights // measure_model(recipe.model)[0].blocks
    assert four.weights == alone.weights // 4 + block
    assert (four.optimizer, four.copies) == (alone.optimizer // 4, alone.copies // 4)
    assert four.samples == alone.samples // 4
    loaded = (alone.weights, alone.weights // 4)
    assert (alone.loading, four.loading) == loaded, "a process reads its shard"


def test_what_is_offloaded_waits_in_main_memory(tiny_recipe):
    stages = [{"kind": "offline", "batch_size": 64}]
    recipes = [tiny_recipe("sd3", model, stages=stages) for model in ({}, {"cpu_offload": True})]
    sizes, _ = measure_model(recipes[0].model)
    for processes in (1, 4):
        held, waiting = (
            estimate_recipe(recipe, processes).memory["1.1 offline training"] for recipe in recipes
        )
        assert held.offloaded == 0
        moved = [
            getattr(held, use) - getattr(waiting, use) for use in ("weights", "optimizer", "copies")
        ]
        assert sum(moved) == waiting.offloaded
        shard = sizes.parameters // processes
        whole = 4 * (sizes.parameters + sizes.buffers) // processes
        assert moved == (
            [0, 8 * shard, held.copies] if processes == 1 else [whole, 12 * shard, held.copies]
        )
    assert f"{waiting.offloaded / 2**30:.2f} GiB more in each" in describe_estimate(
        estimate_recipe(recipes[1], 4)
    )
    assert "cpu_offload" not in describe_estimate(estimate_recipe(recipes[0], 4))


def test_what_is_gathered_at_once_counts(tiny_recipe):
    """Of the weights alone: blocks in 32 or 16 bits, one, two or all."""
    stages = [{"kind": "offline", "batch_size": 64}]

    def weights(processes, **fsdp):
        recipe = tiny_recipe("sd3", {"precision": "bfloat16", "fsdp": fsdp}, stages=stages)
        sizes, _ = measure_model(recipe.model)
        return estimate_recipe(recipe, processes).memory["1.1 offline training"].weights, sizes

    plain, sizes = weights(4)
    numbers = sizes.parameters + sizes.buffers
    blocks = sizes.blocks
    whole = 4 * numbers + 2 * sizes.parameters  # and autocast's casts
    assert plain == whole // 4 + whole // blocks
    assert weights(4, prefetch=True)[0] == whole // 4 + whole * 2 // blocks
    assert weights(4, keep_gathered=True)[0] == whole // 4 + whole
    assert weights(4, gather="bfloat16")[0] == numbers + 2 * sizes.parameters // blocks
    assert weights(1, keep_gathered=True)[0] == whole


def test_processes_that_share_tokens_have_a_share_of_the_activations_of_more_samples(make_recipe):
    recipe = make_recipe(offline={"batch_size": 16})
    four, shared = (estimate_recipe(recipe, 4, context_parallel=count) for count in (1, 2))
    memory, other = (made.memory["1.2 offline training"] for made in (four, shared))
    assert (other.activations, other.samples) == (memory.activations / 2, memory.samples * 2)
    assert dataclasses.replace(other, activations=0, samples=0) == dataclasses.replace(
        memory, activations=0, samples=0
    )
    assert "stage: 4, 2 of them for each sample" in describe_estimate(shared)
    alone = {name: value for name, value in four.memory.items() if name != "1.2 offline training"}
    assert alone.items() <= shared.memory.items()


def test_colocated_processes_that_share_tokens_have_a_share_of_them(make_recipe):
    stage = {"placement": "colocated", "prompts_per_step": 8}
    recipe = make_recipe(online=stage)
    four, shared = (estimate_recipe(recipe, 4, context_parallel=count) for count in (1, 2))
    memory, other = (made.memory["1.1 online training"] for made in (four, shared))
    # A pass of training needs more than one of rollouts here, and all of it is of tokens.
    assert other.activations == pytest.approx(memory.activations / 2, rel=0.01)
    # Twice as many rows of an update, and as many prompts of a pass.
    assert memory.samples < other.samples < 2 * memory.samples
    assert other.waiting > memory.waiting, "both have the samples that they share"
    differing = {"activations": 0, "samples": 0, "waiting": 0}
    assert dataclasses.replace(other, **differing) == dataclasses.replace(memory, **differing)
    # An online stage in one process shares nothing.
    alone = make_recipe(online={"prompts_per_step": 8})
    assert (
        estimate_recipe(alone, 4, context_parallel=2).memory["1.1 online training"]
        == estimate_recipe(alone, 4).memory["1.1 online training"]
    )


def test_a_training_group_on_ray_shares_tokens_and_rollout_workers_do_not(make_recipe):
    stage = {"placement": "ray", "resources": {"training": {"count": 4}}, "prompts_per_step": 8}
    recipe = make_recipe(online=stage)
    four, shared = (estimate_recipe(recipe, 2, context_parallel=count) for count in (1, 2))
    memory, other = (made.memory["1.1 online training"] for made in (four, shared))
    assert other.activations == pytest.approx(memory.activations / 2, rel=0.01)
    assert other.samples > memory.samples
    for name in ("1.1 online rollout", "1.1 online rewards"):
        assert shared.memory[name] == four.memory[name]


def test_a_network_that_is_never_trained_lies_whole_on_every_process(tiny_recipe):
    """FSDP2 shards the trained one alone."""
    stages = [
        {"kind": "offline"},
        {"kind": "online", "placement": "ray", "resources": {"training": {"count": 4}}},
    ]
    recipe = tiny_recipe("sd3", stages=stages)
    sizes, sample = measure_model(recipe.model)
    without, with_frozen = (
        estimate_from_sizes(recipe, 4, dataclasses.replace(sizes, frozen=frozen), sample).memory
        for frozen in (0, 1000)
    )
    for label in ("1.1 offline training", "1.2 online training"):
        more = {use: getattr(without[label], use) + 4 * 1000 for use in ("weights", "loading")}
        # Encoders come beside it, unless they take the place of weights that are whole.
        assert with_frozen[label].encoding >= without[label].encoding
        more["encoding"] = with_frozen[label].encoding
        assert with_frozen[label] == dataclasses.replace(without[label], **more)


def test_nodes_share_the_model_or_have_a_replica_each(make_recipe):
    recipe = make_recipe()
    four, two = (estimate_recipe(recipe, count).memory["1.2 offline training"] for count in (4, 2))
    on_two_nodes = estimate_recipe(recipe, 2, nodes=2)
    assert on_two_nodes.memory["1.2 offline training"] == four
    replicas = estimate_recipe(recipe, 2, nodes=2, sharding="hybrid")
    assert replicas.memory["1.2 offline training"] == dataclasses.replace(two, samples=four.samples)
    assert "stage: 2 on each of 2 nodes, with a replica of the model each" in describe_estimate(
        replicas
    )
    alone = estimate_hours(estimate_recipe(recipe, 2), 100)["1.2 offline"]
    assert estimate_hours(on_two_nodes, 100)["1.2 offline"].wall < alone.wall
