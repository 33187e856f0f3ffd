"""How long a run takes, from the throughput of a GPU.

A linear layer takes 2 floating-point operations for each weight and token, attention 4 h for each
pair of tokens of width h in a block (2001.08361, 2104.04473). A backward pass takes as many for the
gradients of all inputs, and as many again for those of the weights that are trained
(``training_pass_cost``); ``gradient_checkpointing`` repeats the forward pass of its blocks. Text
encoders, VAE, rewards, downloads and the start of pods are not counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ebbflow.data.model_sizes import ModelSizes, SampleSize, Shape, is_layer_adapted
from ebbflow.estimate.run import Estimate, find_trained_layers
from ebbflow.estimate.work import Work
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.stages import CustomStageConfig, OnlineStageConfig
from ebbflow.stage import StageContext

TERA = 1e12
# Layers are told apart by their names in diffusers.
OF_A_SAMPLE = re.compile(r"norm|time|pooled|guidance|_mod\.")
"""Layers that work on the time and on pooled prompts: one vector for each sample."""
OF_TEXT = re.compile(r"add_|context|txt|text")
OF_CROSS_ATTENTION = re.compile(r"attn2\.to_[kv]")


@dataclass(frozen=True)
class Hours:
    """The duration of a run or of a part of it.

    Example:
        Two rollout workers and one training rank that are busy for 3 hours::

            Hours(wall=3.0, gpu=9.0)

    Attributes:
        wall: hours from its start to its end, if everything that can run in parallel does.
        gpu: hours of all its processes together, including the time in which they wait.
    """

    wall: float
    gpu: float

    def multiplied_by(self, count: int) -> Hours:
        return Hours(self.wall * count, self.gpu * count)

    def __add__(self, other: Hours) -> Hours:
        return Hours(self.wall + other.wall, self.gpu + other.gpu)


def count_forward_operations(sizes: ModelSizes, sample: SampleSize) -> int:
    """Return the floating-point operations of one evaluation of the network for one sample."""
    linear = _count_linear_operations(sizes.linears, sample)
    return linear + _count_attention_operations(sizes, sample)


def _count_linear_operations(linears: Mapping[str, Shape], sample: SampleSize) -> int:
    return 2 * sum(
        inputs * outputs * _tokens_through_layer(name, sample)
        for name, (inputs, outputs) in linears.items()
    )


def _count_attention_operations(sizes: ModelSizes, sample: SampleSize) -> int:
    # Joint attention: every token attends to every token, text included. Otherwise image tokens
    # attend to each other (self-attention) and to the text (cross-attention).
    pairs = sample.tokens * (sample.tokens + (0 if sample.joint else sample.text_tokens))
    return 4 * sizes.blocks * sizes.width * pairs


def _tokens_through_layer(layer: str, sample: SampleSize) -> int:
    """Return how many tokens go through a linear layer, by its name in diffusers."""
    if OF_A_SAMPLE.search(layer):
        return 1
    if OF_TEXT.search(layer) or (not sample.joint and OF_CROSS_ATTENTION.search(layer)):
        return sample.text_tokens
    # ``tokens`` includes the text where attention is joint. Single-stream blocks take both; in
    # double-stream blocks, layers of the image stream have the image tokens alone.
    all_tokens = not sample.joint or "single" in layer
    return sample.tokens if all_tokens else sample.tokens - sample.text_tokens


def training_pass_cost(estimate: Estimate) -> float:
    """Return the cost of a forward and a backward pass, in forward passes.

    The backward pass computes the gradient of every layer's inputs, which takes as long as the
    forward pass, and that of the weights that are trained: as long again for all of them, and next
    to nothing for a LoRA. Attention has two such products for each of its own.
    """
    sizes = estimate.sizes
    sample = estimate.sample
    linear = _count_linear_operations(sizes.linears, sample)
    attention = _count_attention_operations(sizes, sample)
    trained = find_trained_layers(estimate.recipe, sizes)
    policy = estimate.recipe.policy
    if policy.train == "lora":
        targets = policy.targets or sizes.lora_targets
        adapters = {
            f"{name}.{factor}": shape
            for name, (inputs, outputs) in trained.items()
            if is_layer_adapted(name, targets)
            for factor, shape in (("A", (inputs, policy.rank)), ("B", (policy.rank, outputs)))
        }
        # The products of the adapters themselves: forwards, and twice backwards.
        of_weights = 3 * _count_linear_operations(adapters, sample)
    else:
        of_weights = _count_linear_operations(trained, sample)
    backward = linear + 2 * attention + of_weights
    recomputed = count_recomputed_passes(estimate.recipe.model)
    return 1 + backward / (linear + attention) + recomputed


def count_recomputed_passes(model: ModelConfig) -> float:
    """Return the forward passes that a backward pass repeats: those of the blocks that recompute
    their activations.
    """
    return model.gradient_checkpointing / model.gradient_checkpointing_every


def estimate_hours(estimate: Estimate, tflops: float) -> dict[str, Hours]:
    """Return the hours of each stage in all rounds, by its label in the first round, and those of
    all evaluations.

    Args:
        tflops: 10^12 operations per second that a process sustains: a third to a half of the peak
            of its GPU.

    Raises:
        ValueError: ``tflops`` is not above 0.
    """
    if not tflops > 0:
        raise ValueError(f"tflops = {tflops}: a process sustains more than 0")
    recipe = estimate.recipe
    # Hours of one evaluation of the network for one sample.
    forward = count_forward_operations(estimate.sizes, estimate.sample) / TERA / tflops / 3600
    contexts = [StageContext(recipe, 0, index) for index, stage in enumerate(recipe.stages)]
    hours = {
        ctx.stage_label: _stage_hours(
            estimate, ctx, estimate.work[ctx.stage_label], forward
        ).multiplied_by(recipe.count_rounds(ctx.stage))
        for ctx in contexts
        if not isinstance(ctx.config, CustomStageConfig)
    }
    evaluated = count_forward_operations(estimate.sizes, estimate.evaluated)
    evaluation = estimate.evaluation * evaluated / TERA / tflops / 3600
    hours["evaluations"] = Hours(evaluation, evaluation).multiplied_by(estimate.evaluations)
    return hours


def _stage_hours(estimate: Estimate, ctx: StageContext, work: Work, forward: float) -> Hours:
    """Return the hours of a stage in one round.

    Args:
        forward: hours of one evaluation of the network for one sample.
    """
    generating = work.denoising * forward
    # The rollout's forward pass is then that of training, too.
    reused = isinstance(ctx.config, OnlineStageConfig) and ctx.config.reuse_rollout_forward
    training = (work.training * (training_pass_cost(estimate) - reused) + work.comparing) * forward
    # Shards are generated in parallel, then all processes of all nodes train.
    if not isinstance(ctx.config, OnlineStageConfig):
        return Hours(
            generating / ctx.offline_config.shards + training / estimate.processes / estimate.nodes,
            generating + training,
        )
    if ctx.config.placement == "in_process":
        return Hours(generating + training, generating + training)
    if ctx.config.placement == "colocated":
        processes = estimate.processes * estimate.nodes
        return Hours((generating + training) / processes, generating + training)
    resources = ctx.config.resources
    rolling = generating / resources.rollout.count
    updating = training / resources.training.count
    # Other modes than ``sync`` generate the next rollouts while a step trains.
    wall = rolling + updating if ctx.config.mode == "sync" else max(rolling, updating)
    return Hours(wall, wall * (resources.rollout.count + resources.training.count))
