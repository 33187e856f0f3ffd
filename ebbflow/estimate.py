r"""What a recipe needs: memory of each kind of process, evaluations of the network, bytes stored. No weights are loaded.

With P parameters and B buffer elements in the transformer, A trained parameters (all P, or a LoRA's), b bytes per element in
``model.precision``, n samples or loss rows per pass, s tokens of width h in each of L blocks, and D elements in a sample's
latents, a process holds these bytes:

=============  =================================================================================================
weights        LoRA: b (P + B) + 4 A. Full: 4 (P + B), and 2 P of casts that autocast keeps where b = 2
optimiser      8 A of AdamW (1711.05101), and 4 A of gradients. While a copy is swapped in, the swapped-out parameters
               take the gradients' place
copies         4 A each (``ebbflow.training.policy``): the reference always, old, sampling, rollout, ema and teacher where
               a stage has them; where nothing trains, also the swapped-out parameters
activations    n s h L 34 b / 2 (2205.05198, without the scores that flash attention never stores), times 1.5:
               modulation and gates, which that transformer lacks. With ``gradient_checkpointing``
               n s h (L b + 34 1.5 b / 2). Twice with classifier-free guidance in training. Without
               gradients n s h 10 b: a token's residual, its modulated copy, and the 4 h of the feed-forward
               layer before and after its nonlinearity; or the VAE while it decodes, if that is more
samples        4 D for each latent, and the encoded prompts; of a trajectory three latents for each trained step
others         text encoders, VAE or reward networks that are loaded at the same time
=============  =================================================================================================

In offline stages FSDP2 shards the first three over the processes; a block is gathered while it computes, and every process loads
all weights first. The activations are an estimate: in small models of all families autograd saved .7 to 1.8 times as much
(``tests/test_estimate.py``). CUDA's context and fragmentation are not counted: leave a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ebbflow.evaluation.evaluate import DRIFT_SIGMAS
from ebbflow.flow.dpm_solver import shorter_schedule
from ebbflow.flow.windows import plan
from ebbflow.models.pipeline import ENCODED_AT_ONCE, PIXELS_AT_ONCE
from ebbflow.models.sizes import Sample, Sizes, lora_parameters, measure
from ebbflow.recipe import Recipe
from ebbflow.recipe.algorithms import ForwardConfig
from ebbflow.recipe.model import Precision
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.stage import StageContext
from ebbflow.training.rollout_correction import correction_of

BYTES: dict[Precision, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
BLOCK_BYTES = 34
"""Bytes that a block saves per token and unit of width, in 16 bits (2205.05198, equation 2 without 5 a s / h)."""
MODULATION = 1.5
"""Factor for blocks whose norms are shifted, scaled and gated; measured (``tests/test_estimate.py``)."""
INFERENCE_NUMBERS = 10
"""Elements alive per token and unit of width in a pass without gradients."""
PNG_BYTES_PER_PIXEL = 3
"""At most: noise; photographs take about half."""
KEY_BYTES = 3 * 8
REWARD_PARAMETERS = {
    "pickscore": 986_109_441,
    "hps": 986_109_441,
    "clipscore": 427_616_513,
    "aesthetic": 427_616_513,
    "imagereward": 445_278_720,
}
"""Of networks that rewards load in float32: CLIP-H, CLIP-L and BLIP as transformers builds them."""
GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes of one process by their use, as the docstring of this module defines them.

    Attributes:
        loading: needed before the model is sharded; 0 where it is not.
    """

    weights: int = 0
    optimizer: int = 0
    copies: int = 0
    activations: int = 0
    samples: int = 0
    others: int = 0
    loading: int = 0

    @property
    def total(self) -> int:
        """The peak."""
        return max(self.weights + self.optimizer + self.copies + self.activations + self.samples + self.others, self.loading)


@dataclass(frozen=True)
class Work:
    """The work of a stage in a round, at most: keys that select samples can only lower it.

    Attributes:
        samples: that are generated.
        denoising: evaluations of the network to generate them, of one sample each.
        training: evaluations with a gradient, forward and backward.
        comparing: further evaluations without one: of copies, of the rollout under the training policy, of the drift.
        shards: bytes of rollouts that are kept.
        policy: bytes of the policy folder that it leaves.
    """

    samples: int
    denoising: int
    training: int
    comparing: int
    shards: int
    policy: int


@dataclass(frozen=True)
class Estimate:
    """What a recipe takes.

    Attributes:
        trained: parameters.
        processes: of the training of an offline stage.
        memory: of one process, by what it does.
        work: of each stage, by its label in the first round.
        evaluation: evaluations of the network in one evaluation of a policy.
        stored: bytes that a whole run leaves in the artifact store, by kind.
        main_memory: bytes of the parts that wait on the CPU.
        prompt: bytes of one encoded prompt; each different prompt waits on the CPU.
    """

    recipe: Recipe
    sizes: Sizes
    sample: Sample
    trained: int
    processes: int
    memory: dict[str, Memory]
    work: dict[str, Work]
    evaluation: int
    stored: dict[str, int]
    main_memory: int
    prompt: int


def estimate(recipe: Recipe, processes: int = 2) -> Estimate:
    """What a recipe needs, with ``processes`` in the training of an offline stage.

    Raises:
        SizeError: the base model's sizes are not known.
        ModelError: the family cannot draw the recipe's size.
        ValueError: fewer processes than one.
    """
    if processes < 1:
        raise ValueError(f"processes = {processes}: an offline stage trains with at least one")
    sizes, sample = measure(recipe.model)
    facts = _Facts(recipe, sizes, sample, trained_parameters(recipe, sizes))
    contexts = [StageContext(recipe, 0, index) for index, stage in enumerate(recipe.stages) if stage.kind != "custom"]
    work = {ctx.label: _work(facts, ctx) for ctx in contexts}
    judged = recipe.num_evaluated
    compared = recipe.prompts.validation + recipe.prompts.held_out
    evaluations = 2 + recipe.rounds * len(recipe.stages)  # of the base model, the champion, and after every stage
    return Estimate(
        recipe=recipe,
        sizes=sizes,
        sample=facts.sample,
        trained=facts.trained,
        processes=processes,
        memory={"text encoding": facts.encoding(), "evaluation": facts.evaluation()} | _stages(facts, contexts, processes),
        work=work,
        evaluation=facts.sample.passes * (judged * recipe.evaluation.steps + compared * 2 * len(DRIFT_SIGMAS)),
        stored={
            "base model": sizes.stored,
            "rollout shards": recipe.rounds * sum(done.shards for done in work.values()),
            "policies": recipe.rounds * sum(done.policy for done in work.values()),
            "evaluations": evaluations * judged * PNG_BYTES_PER_PIXEL * facts.sample.pixels,
        },
        main_memory=BYTES[recipe.model.precision] * sizes.text_encoders + 4 * sizes.vae,
        prompt=facts.prompt_bytes,
    )


def trained_parameters(recipe: Recipe, sizes: Sizes) -> int:
    """Parameters that the recipe trains.

    Raises:
        SizeError: no layer is called as ``policy.targets`` says.
    """
    if recipe.policy.train == "full":
        return sizes.parameters
    return lora_parameters(sizes.linears, recipe.policy.targets or sizes.lora_targets, recipe.policy.rank)


def activation_bytes(sizes: Sizes, tokens: int, precision: Precision, checkpointing: bool) -> int:
    """Bytes that a forward pass of one sample saves for the backward pass."""
    number = tokens * sizes.width * BYTES[precision]
    if checkpointing:
        return number * sizes.blocks + block_bytes(sizes.width, tokens, precision)
    return sizes.blocks * block_bytes(sizes.width, tokens, precision)


def block_bytes(width: int, tokens: int, precision: Precision) -> int:
    """Bytes that one block saves of one sample for the backward pass."""
    return int(MODULATION * BLOCK_BYTES * tokens * width * BYTES[precision] / 2)


def inference_bytes(width: int, tokens: int, precision: Precision) -> int:
    """Bytes alive at once in a forward pass of one sample without gradients."""
    return INFERENCE_NUMBERS * tokens * width * BYTES[precision]


def shard_bytes(sample: Sample, samples: int) -> int:
    """Bytes of a rollout shard: of each sample its keys, its float32 latents and its image."""
    return samples * (KEY_BYTES + 4 * sample.elements + PNG_BYTES_PER_PIXEL * sample.pixels)


def _stages(facts: _Facts, contexts: Sequence[StageContext], processes: int) -> dict[str, Memory]:
    """The memory of every process of every stage."""
    found: dict[str, Memory] = {}
    for ctx in contexts:
        if ctx.config.kind == "online":
            found |= _online(facts, ctx)
            continue
        if not ctx.offline.pairs:
            found[f"{ctx.label} rollout"] = facts.rollout(ctx)
        found[f"{ctx.label} training"] = facts.offline(ctx, processes)
    return found


def _online(facts: _Facts, ctx: StageContext) -> dict[str, Memory]:
    """Everything in one process; or a rank of training, a rollout worker and a reward worker under Ray."""
    if ctx.online.placement == "in_process":
        return {f"{ctx.label} training": facts.online(ctx)}
    return {
        f"{ctx.label} training": facts.online_rank(ctx),
        f"{ctx.label} rollout": facts.rollout(ctx),
        f"{ctx.label} rewards": Memory(others=facts.judging(ctx)),
    }


@dataclass(frozen=True)
class _Facts:
    """What the memory of every kind of process follows from."""

    recipe: Recipe
    sizes: Sizes
    sample: Sample
    trained: int

    @property
    def prompt_bytes(self) -> int:
        guided = any(stage.reference.guided for stage in self.recipe.stages)
        return BYTES[self.recipe.model.precision] * self.sample.conditioning * max(self.sample.passes, 1 + guided)

    @property
    def latents(self) -> int:
        return 4 * self.sample.elements

    def weights(self, precision: Precision) -> int:
        numbers = self.sizes.parameters + self.sizes.buffers
        if self.recipe.policy.train == "lora":
            return BYTES[self.recipe.model.precision] * numbers + 4 * self.trained
        return 4 * numbers + (2 * self.sizes.parameters if precision != "float32" else 0)

    def copies(self, ctx: StageContext) -> int:
        """Of the copies that the policy of a stage has."""
        made_rollouts = "rollout" in ctx.algorithm.copies(ctx.config.hyper)
        further = len(ctx.following) + made_rollouts + bool(self.recipe.policy.ema) + bool(ctx.teacher)
        return 4 * self.trained * (1 + further)

    def encoding(self) -> Memory:
        """The text encoders are loaded with the policy."""
        precision, sizes = self.recipe.model.precision, self.sizes
        return Memory(
            weights=self.weights("float32"),
            copies=4 * self.trained,
            activations=ENCODED_AT_ONCE * inference_bytes(sizes.text_width, self.sample.text_tokens, precision),
            samples=ENCODED_AT_ONCE * self.prompt_bytes,
            others=BYTES[precision] * sizes.text_encoders + (4 * sizes.vae if sizes.vae_encodes_prompts else 0),
        )

    def evaluation(self) -> Memory:
        """All samples at once; the drift takes two velocities for each of its noise levels, of one sample of every prompt."""
        prompts, samples = self.recipe.prompts.validation + self.recipe.prompts.held_out, self.recipe.num_evaluated
        return Memory(
            weights=self.weights(self.recipe.model.precision),
            copies=2 * 4 * self.trained,
            activations=self._generating(samples, self.recipe.evaluation.micro_batch, self.recipe.model.precision),
            samples=prompts * (self.prompt_bytes + self.latents * 2 * len(DRIFT_SIGMAS)) + samples * self.latents * 2,
            others=_reward_bytes([*self.recipe.rewards, *self.recipe.guardrails]),
        )

    def rollout(self, ctx: StageContext) -> Memory:
        """Of a shard: whole groups, as many as fit into ``micro_batch``, at a time."""
        config = ctx.config
        precision = config.rollout_precision or self.recipe.model.precision
        samples = max(1, config.micro_batch // config.group_size) * config.group_size
        swapped = 4 * self.trained if ctx.algorithm.generates != "current" else 0
        return Memory(
            weights=self.weights(precision),
            copies=self.copies(ctx) + swapped,
            activations=self._generating(samples, config.micro_batch, precision),
            samples=samples * (self.prompt_bytes + self.latents),
        )

    def online(self, ctx: StageContext) -> Memory:
        """Rollout, rewards and training take turns in one process; the samples of a step stay."""
        alone, config = self.online_rank(ctx), ctx.online
        samples = config.prompts_per_step * config.group_size
        generating = self._generating(samples, config.micro_batch, config.rollout_precision or self.recipe.model.precision)
        return replace(
            alone,
            activations=max(generating, alone.activations),
            others=self.judging(ctx),
        )

    def judging(self, ctx: StageContext) -> int:
        """The networks that an online stage scores with: guardrails are only loaded for a validation."""
        return _reward_bytes([*self.recipe.rewards, *(self.recipe.guardrails if ctx.online.validation else ())])

    def online_rank(self, ctx: StageContext) -> Memory:
        """A process that only trains, on the samples of a step; one of several shards the model and gets its share of them."""
        config, ranks = ctx.online, ctx.online.resources.training.count
        weights, (kept, _) = self.weights(self.recipe.model.precision), units_of(ctx)
        share = math.ceil(kept / config.updates_per_step / ranks)  # of the samples, in an update
        recorded = 3 * trained_steps(ctx) if ctx.config.hyper.kind == "trajectory" else 0
        samples = config.prompts_per_step * config.group_size
        return Memory(
            weights=weights // ranks + (weights // self.sizes.blocks if ranks > 1 else 0),
            optimizer=12 * self.trained // ranks,
            copies=self.copies(ctx) // ranks,
            activations=self._training(ctx),
            samples=samples * (self.prompt_bytes + self.latents * (1 + recorded)) + self._update(ctx, share),
            loading=self.weights("float32") if ranks > 1 else 0,
        )

    def offline(self, ctx: StageContext, processes: int) -> Memory:
        precision, config = self.recipe.model.precision, ctx.offline
        weights, copies = self.weights(precision), self.copies(ctx)
        whole = 0 if processes == 1 else weights // self.sizes.blocks
        return Memory(
            weights=weights // processes + whole,
            optimizer=12 * self.trained // processes,
            copies=copies // processes,
            activations=self._training(ctx),
            samples=self._update(ctx, math.ceil(config.batch_size / processes)),
            loading=0 if processes == 1 else self.weights("float32"),
        )

    def _update(self, ctx: StageContext, samples: int) -> int:
        """Of one optimiser step: three latents and a prediction of every copy for each term, and the encoded prompts."""
        predictions = len(compared_copies(ctx)) + ctx.config.reference.guided
        return samples * (self.prompt_bytes + trained_steps(ctx) * self.latents * (3 + predictions))

    def _generating(self, samples: int, at_once: int, precision: Precision) -> int:
        """The network's, or the VAE's after it."""
        network = min(samples, at_once) * inference_bytes(self.sizes.width, self.sample.tokens, precision)
        decoded = min(samples, max(1, PIXELS_AT_ONCE // self.sample.pixels)) * self.sample.pixels
        frames = self.recipe.model.frames
        decoded = decoded * min(frames, self.sizes.frames_per_latent) // frames  # a latent's at a time
        return max(network, 4 * self.sizes.vae + self.sizes.decoding * decoded if self.sizes.vae else 0)

    def _training(self, ctx: StageContext) -> int:
        """Of one forward and backward pass."""
        model = self.recipe.model
        rows = max(ctx.config.micro_batch, units_of(ctx)[1])
        kept = activation_bytes(self.sizes, self.sample.tokens, model.precision, model.gradient_checkpointing)
        return rows * kept * self._passes(ctx)

    def _passes(self, ctx: StageContext) -> int:
        """Of the network for a term: losses on final latents are without guidance, others where the stage says so."""
        return self.sample.passes if ctx.config.hyper.kind == "trajectory" and ctx.config.guidance_in_loss else 1


def _work(facts: _Facts, ctx: StageContext) -> Work:
    config, passes = ctx.config, facts._passes(ctx)
    samples, repeats, updates = _amounts(ctx)
    kept, group_index = units_of(ctx)
    rows = repeats * kept * trained_steps(ctx)
    anchored = config.hyper.kind == "trajectory" and correction_of(config, facts.recipe.model.precision)
    comparing = rows * len(compared_copies(ctx)) + (samples * trained_steps(ctx) if anchored else 0)
    comparing += 2 * rows * config.reference.guided  # only on final latents, where ``passes`` is 1
    if "rollout" in compared_copies(ctx):  # which is the policy itself in the first update on new samples
        comparing -= rows * (config.steps if config.kind == "online" else 1) // updates
    if "reference" not in compared_copies(ctx):  # then the drift is measured on the first pass of every update
        comparing += updates * min(max(config.micro_batch, group_index), math.ceil(rows / updates))
    return Work(
        samples=samples,
        denoising=round(denoising_steps(ctx) * samples) * facts.sample.passes,
        training=rows * passes,
        comparing=comparing * passes,
        shards=shard_bytes(facts.sample, samples) if config.kind == "offline" else 0,
        policy=4 * (facts.trained * (1 + len(ctx.following) + bool(facts.recipe.policy.ema)) + _buffers(facts)),
    )


def _amounts(ctx: StageContext) -> tuple[int, int, int]:
    """(samples that a stage generates in a round, how often it trains on what it selects, its optimiser steps).

    A stage on a file of pairs counts as none: the file is not read.
    """
    config = ctx.config
    if config.kind == "online":
        samples = config.steps * config.prompts_per_step * config.group_size
        return samples, config.steps, config.steps * config.updates_per_step
    offline = ctx.offline
    samples = 0 if offline.pairs else offline.prompts * offline.group_size
    return samples, 0 if offline.pairs else offline.epochs, offline.epochs * max(1, math.ceil(samples / offline.batch_size))


def units_of(ctx: StageContext) -> tuple[int, int]:
    """(samples that the algorithm selects of a step or a stage at most, the largest number that must stay together)."""
    config = ctx.config
    prompts = config.prompts_per_step if config.kind == "online" else ctx.offline.prompts
    advantage = np.tile(np.linspace(1, -1, config.group_size), prompts)
    rank = np.tile(np.arange(config.group_size), prompts)
    extremes = config.advantages.keep_extremes or config.group_size
    keep = (rank < extremes) | (rank >= config.group_size - extremes)
    groups = ctx.algorithm.select(advantage, keep, np.repeat(np.arange(prompts), config.group_size), config.hyper)
    return sum(map(len, groups)), max(map(len, groups))


def trained_steps(ctx: StageContext) -> int:
    """Rows of the loss per sample: denoising steps of its trajectory, or draws of noise."""
    hyper, window = ctx.config.hyper, ctx.config.window
    if isinstance(hyper, ForwardConfig):
        return hyper.noise_levels
    assert window
    return len(plan(window, ctx.config.sampler.steps, 0, ctx.seed).trained)


def denoising_steps(ctx: StageContext) -> float:
    """Of a sample; on average over the steps of the stage's first round where a window's tail shortens the schedule."""
    config, steps = ctx.config, ctx.config.sampler.steps
    if config.kind != "online" or config.window is None or config.window.tail is None:
        return steps
    sigmas = torch.linspace(1, 0, steps + 1)
    ends = [plan(config.window, steps, step, ctx.seed).stochastic[-1] + 1 for step in range(config.steps)]
    return sum(end + len(shorter_schedule(sigmas[end:], config.window.tail)) - 1 for end in ends) / len(ends)


def compared_copies(ctx: StageContext) -> set[str]:
    """The copies whose predictions an update needs for every row, apart from a reference under guidance."""
    reference = ctx.config.reference
    anchor = {"reference"} if reference.weight and not reference.guided else set()
    return set(ctx.algorithm.copies(ctx.config.hyper)) | anchor


def _buffers(facts: _Facts) -> int:
    return facts.sizes.buffers if facts.recipe.policy.train == "full" else 0


def _reward_bytes(rewards: Iterable[RewardConfig]) -> int:
    return 4 * sum(REWARD_PARAMETERS.get(reward.name, 0) for reward in rewards)


def describe(made: Estimate) -> str:
    """The estimate as text for people."""
    sizes, sample, recipe = made.sizes, made.sample, made.recipe
    share = f"a LoRA of rank {recipe.policy.rank}" if recipe.policy.train == "lora" else "all"
    text = f"{sample.text_tokens} of text" + (", which are among them" if sample.joint else "")
    kept = sum(made.stored.values())
    lines = [
        f"{recipe.name}: {recipe.model.path or 'the glyph model'} ({recipe.model.family})",
        f"  transformer: {sizes.parameters:,} parameters in {sizes.blocks} blocks of width {sizes.width}",
        f"  trained: {made.trained:,} ({share})",
        f"  a sample: latents {' x '.join(map(str, sample.latent_shape))}, {sample.tokens} tokens, {text}",
        f"  evaluations of the network for a denoising step: {sample.passes}",
        f"  processes in the training of an offline stage: {made.processes}",
        "",
        "GiB of a process, at most",
        *_table(
            ["", "weights", "optimiser", "copies", "activations", "samples", "others", "total"],
            [[name, *_gib(memory)] for name, memory in made.memory.items()],
        ),
        f"  Beside it, in main memory: {made.main_memory / GIB:.1f} GiB of text encoders and VAE, and "
        f"{made.prompt / 2**20:.2f} MiB for each different prompt.",
        "",
        f"evaluations of the network for one sample each, at most, in every one of rounds: {recipe.rounds}",
        *_table(
            ["", "samples", "denoising", "training", "comparing"],
            [
                [label, *(f"{value:,}" for value in (done.samples, done.denoising, done.training, done.comparing))]
                for label, done in made.work.items()
            ],
        ),
        f"  {made.evaluation:,} in the evaluation after each stage, of the base model and of the champion.",
        *["  Pairs from a file are not counted."] * any(stage.kind == "offline" and bool(stage.pairs) for stage in recipe.stages),
        *["  Stages of your own kinds are not counted."] * any(stage.kind == "custom" for stage in recipe.stages),
        "",
        f"GiB that a whole run keeps, at most: {kept / GIB:.3g}",
        *_table(["", "GiB"], [[kind, f"{size / GIB:.3g}"] for kind, size in made.stored.items()]),
    ]
    return "\n".join(lines)


def _gib(memory: Memory) -> list[str]:
    parts = (memory.weights, memory.optimizer, memory.copies, memory.activations, memory.samples, memory.others, memory.total)
    return [f"{part / GIB:.2f}" for part in parts]


def _table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Aligned lines: names to the left, numbers to the right."""
    wide = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for name, *numbers in (header, *rows):
        cells = [name.ljust(wide[0]), *(number.rjust(width) for number, width in zip(numbers, wide[1:], strict=True))]
        lines.append("  " + "  ".join(cells))
    return lines
