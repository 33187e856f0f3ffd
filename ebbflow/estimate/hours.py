"""How long a run takes, from the throughput of a GPU.

A linear layer takes 2 floating-point operations for each weight and token, attention 4 h for each
pair of tokens of width h in a block (2001.08361, 2104.04473). A backward pass takes twice as many
as a forward pass, and ``gradient_checkpointing`` repeats the forward pass of its blocks. Text
encoders, VAE, rewards, downloads and the start of pods are not counted.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ebbflow.data.model_sizes import ModelSizes, SampleSize
from ebbflow.estimate.run import Estimate
from ebbflow.estimate.work import Work
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.stages import CustomStageConfig, OnlineStageConfig
from ebbflow.stage import StageContext

TERA = 1e12
OF_A_SAMPLE = re.compile(r"norm|time|pooled|guidance|_mod\.")
"""Layers that work on the time and on pooled prompts: one vector for each sample."""
OF_TEXT = re.compile(r"add_|context|txt|text")
OF_CROSS_ATTENTION = re.compile(r"attn2\.to_[kv]")


@dataclass(frozen=True)
class Hours:
    """Of a run or a part of it.

    Attributes:
        wall: from its start to its end, where everything that can run at once does.
        gpu: hours of all its processes together, waiting included.
    """

    wall: float
    gpu: float

    def multiplied_by(self, count: int) -> Hours:
        return Hours(self.wall * count, self.gpu * count)

    def __add__(self, other: Hours) -> Hours:
        return Hours(self.wall + other.wall, self.gpu + other.gpu)


def count_forward_operations(sizes: ModelSizes, sample: SampleSize) -> int:
    """Floating-point operations of one evaluation of the network for one sample."""
    layers = sum(
        inputs * outputs * _tokens_through_layer(name, sample)
        for name, (inputs, outputs) in sizes.linears.items()
    )
    pairs = sample.tokens * (sample.tokens + (0 if sample.joint else sample.text_tokens))
    return 2 * layers + 4 * sizes.blocks * sizes.width * pairs


def _tokens_through_layer(layer: str, sample: SampleSize) -> int:
    """How many tokens go through a linear layer, by its name in diffusers."""
    if OF_A_SAMPLE.search(layer):
        return 1
    if OF_TEXT.search(layer) or (not sample.joint and OF_CROSS_ATTENTION.search(layer)):
        return sample.text_tokens
    both = not sample.joint or "single" in layer
    return sample.tokens if both else sample.tokens - sample.text_tokens


def training_pass_cost(model: ModelConfig) -> float:
    """How many forward passes a forward and a backward pass take as long as."""
    return 3 + model.gradient_checkpointing / model.gradient_checkpointing_every


def estimate_hours(made: Estimate, tflops: float) -> dict[str, Hours]:
    """The hours of each stage in all rounds by its label in the first, and of all evaluations.

    Args:
        tflops: 10^12 operations in a second that a process sustains, a third to a half of what its
            GPU is sold with.

    Raises:
        ValueError: ``tflops`` is not above 0.
    """
    if not tflops > 0:
        raise ValueError(f"tflops = {tflops}: a process sustains more than 0")
    recipe = made.recipe
    forward = count_forward_operations(made.sizes, made.sample) / TERA / tflops / 3600
    contexts = [StageContext(recipe, 0, index) for index, stage in enumerate(recipe.stages)]
    found = {
        ctx.stage_label: _stage_hours(made, ctx, made.work[ctx.stage_label], forward).multiplied_by(
            recipe.rounds
        )
        for ctx in contexts
        if not isinstance(ctx.config, CustomStageConfig)
    }
    evaluation = (
        made.evaluation
        * count_forward_operations(made.sizes, made.evaluated)
        / TERA
        / tflops
        / 3600
    )
    return found | {"evaluations": Hours(evaluation, evaluation).multiplied_by(made.evaluations)}


def _stage_hours(made: Estimate, ctx: StageContext, work: Work, forward: float) -> Hours:
    """Of a stage in a round; ``forward`` is the hours of an evaluation of the network for one
    sample.
    """
    generating = work.denoising * forward
    reused = isinstance(ctx.config, OnlineStageConfig) and ctx.config.reuse_rollout_forward
    training = (
        work.training * (training_pass_cost(made.recipe.model) - reused) + work.comparing
    ) * forward
    if not isinstance(ctx.config, OnlineStageConfig):
        return Hours(
            generating / ctx.offline_config.shards + training / made.processes / made.nodes,
            generating + training,
        )
    if ctx.config.placement == "in_process":
        return Hours(generating + training, generating + training)
    resources = ctx.config.resources
    rolling = generating / resources.rollout.count
    updating = training / resources.training.count
    wall = rolling + updating if ctx.config.mode == "sync" else max(rolling, updating)
    return Hours(wall, wall * (resources.rollout.count + resources.training.count))
