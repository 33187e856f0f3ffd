"""The memory of reward networks, and of the gradient that goes through them."""

from __future__ import annotations

from ebbflow.estimate.activations import activation_bytes
from ebbflow.estimate.run import estimate_recipe
from ebbflow.estimate.text import describe_estimate
from ebbflow.models.sizes import measure_model
from ebbflow.recipe.registry import REWARDS
from ebbflow.rewards.base import Reward


def gradient_stage(algorithm, **stage):
    return {
        "kind": "online",
        "algorithm": algorithm,
        "sampler": {"name": "ode", "steps": 3},
        "micro_batch": 3,
    } | stage


PICKSCORE = {"rewards": ["pickscore"], "guardrails": ["clipscore"]}
RAY = {"placement": "ray", "resources": {"training": {"count": 2}}}


def test_the_gradient_of_the_reward_goes_through_the_vae_and_the_reward_s_network(tiny_recipe):
    def activations(algorithm, **recipe):
        made = estimate_recipe(tiny_recipe("sd3", stages=[gradient_stage(algorithm)], **recipe))
        return made.memory["1.1 online training"].activations, made

    jumped, made = activations({"name": "refl"}, **PICKSCORE)
    sizes = made.sizes
    pixels = made.sample.pixels
    network = activation_bytes(sizes, made.sample.tokens, "float32", checkpointing=False) * 3
    images = 3 * (sizes.decoding_with_gradient * pixels + 34 * 2 * 257 * 1280 * 32)
    assert jumped == 4 * sizes.vae + network + images
    assert activations({"name": "draft", "last_steps": 2}, **PICKSCORE)[0] == 4 * sizes.vae + max(
        network, images
    )


class OfLatents(Reward):
    scores = "latents"

    def __call__(self, latents, prompts):
        raise NotImplementedError


class LargeReward(Reward):
    has_gradient = True
    network_bytes = 3 * 10**9
    gradient_bytes = 10**12

    def __call__(self, images, prompts):
        raise NotImplementedError

    def score_with_gradient(self, images, prompts):
        raise NotImplementedError


class UndeclaredReward(LargeReward):
    network_bytes = None
    gradient_bytes = None


class RewardWithoutNetwork(LargeReward):
    network_bytes = 0
    gradient_bytes = 0


def test_the_declared_memory_of_a_users_own_reward_is_counted(tiny_recipe):
    own = {"name": "custom", "path": f"{__name__}:LargeReward"}

    def training_memory(**keys):
        stages = [gradient_stage({"name": "refl"}, **RAY)]
        memory = estimate_recipe(tiny_recipe("sd3", stages=stages, **keys)).memory
        return memory["1.1 online training"], memory["evaluation"]

    with_own, evaluation_with_own = training_memory(rewards=[own, "recognizer"], guardrails=[])
    without, evaluation_without = training_memory(rewards=["recognizer"], guardrails=[])
    assert with_own.others - without.others == LargeReward.network_bytes
    assert evaluation_with_own.others - evaluation_without.others == LargeReward.network_bytes
    # The stage trains on micro-batches of three images.
    assert with_own.activations - without.activations == 3 * LargeReward.gradient_bytes


def test_a_users_own_reward_that_declares_no_memory_is_named(tiny_recipe):
    def describe(reward):
        rewards = [{"name": "custom", "path": f"{__name__}:{reward.__name__}"}]
        stages = [gradient_stage({"name": "refl"}, **RAY)]
        recipe = tiny_recipe("sd3", stages=stages, rewards=rewards)
        return describe_estimate(estimate_recipe(recipe))

    undeclared = "The reward UndeclaredReward declares no network_bytes and no gradient_bytes"
    assert describe(UndeclaredReward).count(undeclared) == 1
    assert "declares no" not in describe(LargeReward)
    assert "declares no" not in describe(RewardWithoutNetwork)


def test_a_reward_of_latents_needs_no_decoder(tiny_recipe):
    def activations(*rewards):
        stages = [gradient_stage({"name": "refl"}, **RAY)]
        return (
            estimate_recipe(tiny_recipe("sd3", stages=stages, rewards=list(rewards)))
            .memory["1.1 online training"]
            .activations
        )

    of_latents = {"name": "custom", "path": f"{__name__}:OfLatents"}
    sizes, sample = measure_model(tiny_recipe("sd3").model)
    assert activations(of_latents) == 3 * activation_bytes(
        sizes, sample.tokens, "float32", checkpointing=False
    )
    assert (
        activations(of_latents, "recognizer") == activations("recognizer") > activations(of_latents)
    )


def test_every_rank_that_learns_from_the_gradient_has_the_reward_networks(tiny_recipe):
    def others(algorithm, **stage):
        memory = estimate_recipe(
            tiny_recipe("sd3", stages=[gradient_stage(algorithm, **stage)], **PICKSCORE)
        ).memory
        return [memory[name].others for name in memory if name.startswith("1.1 online")]

    pickscore = 4 * REWARDS["pickscore"].num_parameters
    assert others({"name": "refl"}) == [pickscore]
    assert others({"name": "refl"}, **RAY) == [pickscore, 0, pickscore]
    assert others({"name": "dgpo"}, **RAY) == [0, 0, pickscore]


def test_every_scored_frame_of_a_video_counts(tiny_recipe):
    def activations(frames, **recipe):
        stages = [gradient_stage({"name": "refl"}, **RAY)]
        return (
            estimate_recipe(tiny_recipe("wan", {"frames": frames}, stages=stages, **recipe))
            .memory["1.1 online training"]
            .activations
        )

    for frames, scored in ((5, 5), (17, 8)):
        of_reward = activations(frames, **PICKSCORE) - activations(frames, rewards=["ocr"])
        assert of_reward == 3 * scored * 34 * 2 * 257 * 1280 * 32
