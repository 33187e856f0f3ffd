r"""The memory of each kind of process, at most. No weights are loaded.

With P parameters and B buffer elements in the transformer, A trained parameters (all P, or a
LoRA's), b bytes per element in ``model.precision``, n samples or loss rows per pass, s tokens of
width h in each of L blocks, and D elements in a sample's latents, a process holds these bytes:

=============  ====================================================================================
weights        LoRA: b (P + B) + 4 A. Full: 4 (P + B), and 2 P of casts that autocast keeps where b
               = 2
optimiser      8 A of AdamW (1711.05101), and 4 A of gradients; 8 A more for a fake score (``dmd2``,
               ``tdm``). While a copy is swapped in, the swapped-out parameters take the gradients'
               place. ``adamw_8bit`` has 2 A and a scale of 4 bytes for each 256 numbers of them
               instead of 8 A, but for parameters of fewer than 4,096 elements
copies         4 A each (``ebbflow.training.policy``): the reference always, old, sampling, rollout,
               fake, ema and teacher where a stage has them; where nothing trains, also the
               swapped-out parameters, and while a fake score is trained that is sharded or
               offloaded
activations    n s h L 34 b / 2 (2205.05198, without the scores that flash attention never stores),
               times 1.5: modulation and gates, which that transformer lacks. With
               ``gradient_checkpointing`` n s h (L b + 34 1.5 b / 2); with
               ``gradient_checkpointing_every`` some blocks keep theirs. Twice with classifier-free
               guidance in training; a share of it where processes share the tokens. Without
               gradients n s h 10 b: a token's residual, its modulated copy, and the 4 h of the
               feed-forward layer before and after its nonlinearity; or the VAE while it decodes, if
               that is more. Where adapters are merged to generate
               (``Policy.merged_weight_bytes``), 4 bytes for each element of the weights that they
               adapt. On the gradient of the reward also the VAE while
               it decodes with gradient, and of the network of each reward n s h L 34 b / 2 for the
               image; of several steps with gradient, which are repeated, the larger of
               the two. With ``reuse_rollout_forward`` what is kept for all trained steps of all
               samples of a step at once, and where full weights are cast to 16 bits, 2 P for each
               of the forward passes
samples        4 D for each latent, and the encoded prompts; of a trajectory three latents for each
               trained step, of a few-step student two for each step
others         text encoders, VAE or reward networks that are loaded at the same time; on the
               gradient of the reward every process that trains has the reward networks
=============  ====================================================================================

With ``model.cpu_offload`` the copies and AdamW's 8 A are in main memory, and where a model is
sharded, its shard of the weights and the gradients too.

In offline stages FSDP2 shards the first three over the processes, or over those of a node (HSDP); a
block is gathered while it computes (``model.fsdp`` changes that), and every process loads all
weights first. A network that is never trained lies whole on each of them. The activations are an
estimate: in small models autograd saved .7 to 1.8 times as much
(``tests/estimate/test_activations.py``). CUDA's context and fragmentation are not counted: leave a
tenth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ebbflow.data.model_sizes import (
    BLOCK_BYTES,
    BYTES,
    ENCODED_AT_ONCE,
    PIXELS_AT_ONCE,
    ModelSizes,
    SampleSize,
)
from ebbflow.estimate.work import (
    count_passes_per_term,
    count_rows_per_sample,
    count_selected_samples,
    list_compared_copies,
)
from ebbflow.recipe import Recipe
from ebbflow.recipe.evaluation import DRIFT_SIGMAS
from ebbflow.recipe.model import Precision
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.rewards.videos import select_scored_frames
from ebbflow.stage import StageContext

MODULATION = 1.5
"""Factor for blocks whose norms are shifted, scaled and gated; measured
(``tests/estimate/test_activations.py``).
"""
INFERENCE_NUMBERS = 10
"""Elements alive per token and unit of width in a pass without gradients."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one process by their use, as the docstring of this module defines them.

    Attributes:
        loading: needed before the model is sharded; 0 where it is not.
        offloaded: what waits in main memory, and not on the GPU.
    """

    weights: int = 0
    optimizer: int = 0
    copies: int = 0
    activations: int = 0
    samples: int = 0
    others: int = 0
    loading: int = 0
    offloaded: int = 0

    @property
    def peak_bytes(self) -> int:
        """The peak."""
        return max(
            self.weights
            + self.optimizer
            + self.copies
            + self.activations
            + self.samples
            + self.others,
            self.loading,
        )


def activation_bytes(
    sizes: ModelSizes, tokens: int, precision: Precision, checkpointing: bool, every: int = 1
) -> int:
    """Bytes that a forward pass of one sample saves for the backward pass; ``every``: n-th block
    recomputes its own.
    """
    block = block_bytes(sizes.width, tokens, precision)
    recomputed = math.ceil(sizes.blocks / every) if checkpointing else 0
    kept = sizes.blocks - recomputed + bool(recomputed)  # one at a time is there again
    return recomputed * tokens * sizes.width * BYTES[precision] + kept * block


def block_bytes(width: int, tokens: int, precision: Precision) -> int:
    """Bytes that one block saves of one sample for the backward pass."""
    return int(MODULATION * BLOCK_BYTES * tokens * width * BYTES[precision] / 2)


def inference_bytes(width: int, tokens: int, precision: Precision) -> int:
    """Bytes alive at once in a forward pass of one sample without gradients."""
    return INFERENCE_NUMBERS * tokens * width * BYTES[precision]


def estimate_stage_memory(
    memory: ProcessMemory,
    contexts: Sequence[StageContext],
    processes: int,
    shards: int | None = None,
    context_parallel: int = 1,
) -> dict[str, Memory]:
    """The memory of every process of every stage.

    Args:
        processes: of the training of an offline stage.
        shards: of them, those that the model is sharded over; left out, all.
        context_parallel: of them, those that share the tokens of a sample.
    """
    found: dict[str, Memory] = {}
    for ctx in contexts:
        if ctx.config.kind == "online":
            found |= _online_stage_memory(memory, ctx)
            continue
        if not ctx.offline_config.pairs:
            found[f"{ctx.stage_label} rollout"] = memory.rollout_memory(ctx)
        found[f"{ctx.stage_label} training"] = memory.offline_rank_memory(
            ctx, processes, shards or processes, context_parallel
        )
    return found


def _online_stage_memory(memory: ProcessMemory, ctx: StageContext) -> dict[str, Memory]:
    """Everything in one process; or a rank of training, a rollout worker and a reward worker under
    Ray.
    """
    if ctx.online_config.placement == "in_process":
        return {f"{ctx.stage_label} training": memory.in_process_memory(ctx)}
    return {
        f"{ctx.stage_label} training": memory.online_rank_memory(ctx),
        f"{ctx.stage_label} rollout": memory.rollout_memory(ctx),
        f"{ctx.stage_label} rewards": Memory(others=memory.reward_network_bytes(ctx)),
    }


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of every kind of process of a recipe.

    Attributes:
        trained: parameters.
        adapted: elements of the weights that a LoRA adapts.
    """

    recipe: Recipe
    sizes: ModelSizes
    sample: SampleSize
    trained: int
    adapted: int

    @property
    def prompt_bytes(self) -> int:
        guided = any(stage.needs_guided_copy for stage in self.recipe.stages)
        return (
            BYTES[self.recipe.model.precision]
            * self.sample.conditioning
            * max(self.sample.passes, 1 + guided)
        )

    @property
    def latent_bytes(self) -> int:
        return 4 * self.sample.num_elements

    @property
    def frozen_bytes(self) -> int:
        """The weights of a network that also denoises and is never trained."""
        return BYTES[self.recipe.model.precision] * self.sizes.frozen

    def weight_bytes(self, precision: Precision) -> int:
        numbers = self.sizes.parameters + self.sizes.buffers
        if self.recipe.policy.train == "lora":
            return (
                self.frozen_bytes + BYTES[self.recipe.model.precision] * numbers + 4 * self.trained
            )
        return (
            self.frozen_bytes
            + 4 * numbers
            + (2 * (self.sizes.parameters - self.sizes.unused) if precision != "float32" else 0)
        )

    def sharded_weight_bytes(self, processes: int, shards: int) -> int:
        """Of one of several processes that train: its shard and what it gathers of what is trained,
        and all of the rest.
        """
        return (
            self.frozen_bytes
            + self.weight_shard_bytes(shards)
            + (self._gathered_bytes() if processes > 1 else 0)
        )

    def weight_shard_bytes(self, shards: int) -> int:
        """Of the weights that processes share."""
        weights = self.weight_bytes(
            "float32" if self._gathers_16_bit else self.recipe.model.precision
        )
        return (weights - self.frozen_bytes) // shards

    def _gathered_bytes(self) -> int:
        """A block of the weights that processes share, the next one with ``prefetch``, or all with
        ``keep_gathered``.
        """
        fsdp = self.recipe.model.fsdp
        blocks = self.sizes.blocks
        whole = 2 * self.sizes.parameters if self._gathers_16_bit else self.weight_shard_bytes(1)
        return whole * (blocks if fsdp.keep_gathered else min(1 + fsdp.prefetch, blocks)) // blocks

    @property
    def _gathers_16_bit(self) -> bool:
        """Whether full weights are gathered in 16 bits, so that autocast keeps no casts."""
        return self.recipe.model.fsdp.gather == "bfloat16" and self.recipe.policy.train == "full"

    def merged_weight_bytes(self, precision: Precision) -> int:
        """The weights that stand in for the adapted ones while adapters are merged, to generate in
        a precision.
        """
        merges = (
            precision == self.recipe.model.precision == "float32" and not self.recipe.policy.dora
        )
        return 4 * self.adapted if merges else 0

    def policy_copy_bytes(self, ctx: StageContext) -> int:
        """Of the copies that the policy of a stage has."""
        made_rollouts = "rollout" in ctx.algorithm.copies(ctx.config.hyper_parameters)
        teachers = len(ctx.teacher_folders) + ctx.starts_as_teacher
        further = (
            len(ctx.following_copies) + made_rollouts + bool(self.recipe.policy.ema) + teachers
        )
        return 4 * self.trained * (1 + further)

    def encoding_memory(self) -> Memory:
        """The text encoders are loaded with the policy."""
        precision = self.recipe.model.precision
        sizes = self.sizes
        return Memory(
            weights=self.weight_bytes("float32"),
            copies=4 * self.trained,
            activations=ENCODED_AT_ONCE
            * inference_bytes(sizes.text_width, self.sample.text_tokens, precision),
            samples=ENCODED_AT_ONCE * self.prompt_bytes,
            others=BYTES[precision] * sizes.text_encoders
            + (4 * sizes.vae if sizes.vae_encodes_prompts else 0),
        )

    def evaluation_memory(self) -> Memory:
        """All samples at once; the drift takes two velocities for each of its noise levels, of one
        sample of every prompt.

        The policies of a branch are scored with its rewards: the largest count.
        """
        prompts = self.recipe.prompts.validation + self.recipe.prompts.held_out
        samples = self.recipe.num_evaluated
        precision = self.recipe.model.precision
        rewards = [
            self.recipe.select_branch(branch).rewards for branch in (None, *self.recipe.branches)
        ]
        return Memory(
            weights=self.weight_bytes(precision),
            copies=2 * 4 * self.trained,
            activations=self._generation_bytes(
                samples, self.recipe.evaluation.micro_batch, precision
            )
            + self.merged_weight_bytes(precision),
            samples=prompts * (self.prompt_bytes + self.latent_bytes * 2 * len(DRIFT_SIGMAS))
            + samples * self.latent_bytes * 2,
            others=max(map(_reward_weight_bytes, rewards))
            + _reward_weight_bytes(self.recipe.guardrails),
        )

    def rollout_memory(self, ctx: StageContext) -> Memory:
        """Of a shard: whole groups, as many as fit into ``micro_batch``, at a time."""
        config = ctx.config
        samples = max(1, config.micro_batch // config.group_size) * config.group_size
        swapped = 4 * self.trained if ctx.algorithm.generates != "current" else 0
        copies = self.policy_copy_bytes(ctx) + swapped
        offload = self.recipe.model.cpu_offload
        return Memory(
            weights=self.weight_bytes(config.rollout_precision or self.recipe.model.precision),
            copies=0 if offload else copies,
            offloaded=copies if offload else 0,
            activations=self._rollout_activation_bytes(ctx, samples),
            samples=samples * (self.prompt_bytes + self.latent_bytes),
        )

    def in_process_memory(self, ctx: StageContext) -> Memory:
        """Rollout, rewards and training take turns in one process; the samples of a step stay."""
        alone = self.online_rank_memory(ctx)
        config = ctx.online_config
        samples = config.prompts_per_step * config.group_size
        activations = max(
            self._rollout_activation_bytes(ctx, samples), alone.activations
        ) + self._reused_graph_bytes(ctx)
        return replace(alone, activations=activations, others=self.reward_network_bytes(ctx))

    def _reused_graph_bytes(self, ctx: StageContext) -> int:
        """The graphs of the rollout's forward passes, until the update has gone back through
        them."""
        config = ctx.online_config
        if not config.reuse_rollout_forward:
            return 0
        prompts = config.prompts_per_step * (1 + config.refill_rounds)
        requests = math.ceil(prompts / max(1, config.micro_batch // config.group_size))
        passes = (
            requests
            * math.ceil(config.group_size / config.micro_batch)
            * count_rows_per_sample(ctx)
        )
        cast = self.recipe.policy.train == "full" and self.recipe.model.precision != "float32"
        casts = 2 * (self.sizes.parameters - self.sizes.unused) * passes * cast
        return (
            prompts
            * config.group_size
            * count_rows_per_sample(ctx)
            * self._saved_activation_bytes(ctx, recomputing=False)
            + casts
        )

    def reward_network_bytes(self, ctx: StageContext) -> int:
        """The networks that an online stage scores with: guardrails are only loaded for a
        validation.
        """
        return _reward_weight_bytes(
            [
                *ctx.branch_recipe.rewards,
                *(self.recipe.guardrails if ctx.online_config.validation else ()),
            ]
        )

    def online_rank_memory(self, ctx: StageContext) -> Memory:
        """A process that only trains, on the samples of a step; one of several shards the model and
        gets its share of them.
        """
        config = ctx.online_config
        ranks = ctx.online_config.resources.training.count
        share = math.ceil(
            count_selected_samples(ctx)[0] / config.updates_per_step / ranks
        )  # of the samples, in an update
        kind = ctx.config.algorithm_kind
        recorded = 3 * count_rows_per_sample(ctx) if kind.records_trajectory else 0
        samples = config.prompts_per_step * config.group_size
        return replace(
            self._training_state_memory(ctx, ranks, ranks),
            activations=self._training_activation_bytes(ctx),
            others=_reward_weight_bytes(ctx.branch_recipe.rewards)
            if kind.needs_reward_gradient
            else 0,
            samples=samples * (self.prompt_bytes + self.latent_bytes * (1 + recorded))
            + self._update_bytes(ctx, share),
        )

    def offline_rank_memory(
        self, ctx: StageContext, processes: int, shards: int, context_parallel: int
    ) -> Memory:
        samples = math.ceil(ctx.offline_config.batch_size * context_parallel / processes)
        return replace(
            self._training_state_memory(ctx, processes, shards),
            activations=math.ceil(self._training_activation_bytes(ctx) / context_parallel),
            samples=self._update_bytes(ctx, samples),
        )

    def _training_state_memory(self, ctx: StageContext, processes: int, shards: int) -> Memory:
        """Weights, optimiser and copies of one of several processes that train, and where they
        are."""
        fake = ctx.config.algorithm_kind.trains_student
        swapped = (
            4 * self.trained if fake and (processes > 1 or self.recipe.model.cpu_offload) else 0
        )
        state = Memory(
            weights=self.sharded_weight_bytes(processes, shards),
            optimizer=(4 * self.trained + (1 + fake) * self._moment_bytes(ctx)) // shards,
            copies=(self.policy_copy_bytes(ctx) + swapped) // shards,
            loading=self.weight_bytes("float32") if processes > 1 else 0,
        )
        if not self.recipe.model.cpu_offload:
            return state
        if processes == 1:
            gradients = 4 * self.trained
            return replace(
                state,
                optimizer=gradients,
                copies=0,
                offloaded=state.optimizer - gradients + state.copies,
            )
        shard = self.weight_shard_bytes(shards)
        offloaded = shard + state.optimizer + state.copies
        return replace(
            state, weights=state.weights - shard, optimizer=0, copies=0, offloaded=offloaded
        )

    def _moment_bytes(self, ctx: StageContext) -> int:
        """Bytes of the state of one optimiser."""
        return ctx.config.optimizer.factory.count_state_bytes(self.trained)

    def _update_bytes(self, ctx: StageContext, samples: int) -> int:
        """Of an optimiser step: three latents and a prediction of every copy for each term, a
        student's steps, and prompts.
        """
        predictions = len(list_compared_copies(ctx)) + ctx.config.reference.needs_guidance
        of_student = ctx.config.algorithm_kind.latents_per_row(ctx.config.sampler.steps)
        return samples * (
            self.prompt_bytes
            + count_rows_per_sample(ctx) * self.latent_bytes * (3 + predictions + of_student)
        )

    def _rollout_activation_bytes(self, ctx: StageContext, samples: int) -> int:
        """Our engine merges adapters for samples without a trajectory: those of final latents, and
        of a validation.
        """
        config = ctx.config
        precision = config.rollout_precision or self.recipe.model.precision
        merges = config.engine == "diffusers" and (
            config.kind != "online" or not config.window or bool(config.validation)
        )
        return self._generation_bytes(
            samples,
            config.micro_batch,
            precision,
            self.merged_weight_bytes(precision) if merges else 0,
        )

    def _generation_bytes(
        self, samples: int, at_once: int, precision: Precision, merged: int = 0
    ) -> int:
        """The network's with ``merged`` bytes of weights, or the VAE's after it."""
        network = merged + min(samples, at_once) * inference_bytes(
            self.sizes.width, self.sample.tokens, precision
        )
        decoded = min(samples, max(1, PIXELS_AT_ONCE // self.sample.pixels)) * self.sample.pixels
        frames = self.recipe.model.frames
        decoded = decoded * min(frames, self.sizes.decoded_frames) // frames
        return max(
            network, 4 * self.sizes.vae + self.sizes.decoding * decoded if self.sizes.vae else 0
        )

    def _training_activation_bytes(self, ctx: StageContext) -> int:
        """Of one forward and backward pass; on the gradient of the reward, of what decodes and
        scores the images, too.
        """
        kind = ctx.config.algorithm_kind
        cost = kind.row_cost(ctx.config.hyper_parameters, ctx.config.sampler.steps)
        rows = max(ctx.config.micro_batch, count_selected_samples(ctx)[1])
        network = rows * self._saved_activation_bytes(ctx)
        if not kind.needs_reward_gradient or all(
            reward.scores == "latents" for reward in ctx.branch_recipe.rewards
        ):
            return network
        images = rows * (
            self.sizes.decoding_with_gradient * self.sample.pixels
            + self._scoring_activation_bytes(ctx)
        )
        # Several steps are repeated in the backward pass, when nothing of the images is left.
        return 4 * self.sizes.vae + (
            max(network, images) if cost.with_gradient > 1 else network + images
        )

    def _saved_activation_bytes(self, ctx: StageContext, recomputing: bool = True) -> int:
        """Of one row, for its backward pass; ``recomputing``: with the block whose activations are
        there again.
        """
        model = self.recipe.model
        tokens = self.sample.tokens
        checkpointing = model.gradient_checkpointing
        every = model.gradient_checkpointing_every
        kept = activation_bytes(self.sizes, tokens, model.precision, checkpointing, every)
        if checkpointing and not recomputing:
            kept -= block_bytes(self.sizes.width, tokens, model.precision)
        return kept * count_passes_per_term(ctx, self.sample)

    def _scoring_activation_bytes(self, ctx: StageContext) -> int:
        """What the reward networks keep of an image, or of the scored frames of a video, for the
        backward pass.
        """
        frames = len(select_scored_frames(self.recipe.model.frames))
        return frames * sum(reward.gradient_bytes for reward in ctx.branch_recipe.rewards)


def _reward_weight_bytes(rewards: Iterable[RewardConfig]) -> int:
    return sum(reward.network_bytes for reward in rewards)
