r"""The memory of each kind of process, at most. No weights are loaded.

With P parameters and B buffer elements in the transformer, A trained parameters (all P, or a
LoRA's), b bytes per element in ``model.precision``, n samples or loss rows per pass, s tokens of
width h in each of L blocks, and D elements in a sample's latents, a process holds these bytes:

=============  ====================================================================================
weights        LoRA: b (P + B) + 4 A. Full: 4 (P + B), and 2 P of casts that autocast keeps where b
               = 2
optimiser      8 A of AdamW (1711.05101), and 4 A of gradients; 8 A more for a fake score (``dmd2``,
               ``tdm``) and for a surrogate (``tdm_r1``). While a copy is swapped in, the
               swapped-out parameters take the gradients' place. ``adamw_8bit`` has 2 A and a scale
               of 4 bytes for each 256 numbers of them instead of 8 A, but for parameters of fewer
               than 4,096 elements
copies         4 A each (``ebbflow.training.policy``): the reference always, old, sampling, rollout,
               fake, surrogate and its average, ema and teacher where a stage has them; where
               nothing trains, also the swapped-out parameters, and while a copy is trained that is
               sharded or offloaded
activations    n s h L 34 b / 2 (2205.05198, without the scores that flash attention never stores),
               times 1.5: modulation and gates, which that transformer lacks; not under a LoRA in
               16 bits, where frozen layers keep no inputs. With ``gradient_checkpointing``
               n s h (L b + 34 1.5 b / 2); with ``gradient_checkpointing_every`` some blocks keep
               theirs. Twice with classifier-free guidance in training, or with
               ``negative_gradient: false`` once, beside a pass without gradients; a share of it
               where processes share the tokens. Without gradients n s h 10 b: a token's residual,
               its modulated copy, and the 4 h of the feed-forward layer before and after its
               nonlinearity; or the VAE while it decodes, if that is more. Where adapters are merged
               to generate (``Policy.merged_weight_bytes``), 4 bytes for each element of the weights
               that they adapt. With ``rollout_cache`` n s h b for each output that it keeps: 2 or
               3, and of ``taylor_seer`` order + 1 for each attention layer. On the gradient of the
               reward also the VAE while it decodes with gradient, and of the network of each reward
               n s h L 34 b / 2 for the image; of several steps with gradient, which are repeated,
               the larger of the two. With ``reuse_rollout_forward`` what is kept for all trained
               steps of all samples at once, and where full weights are cast to 16 bits, 2 P a pass
samples        4 D for each latent of the rows of an update, of a few-step student two latents for
               each step; the encoded prompts of a step, and those of a pass once more. Trajectories
               wait in main memory (``ebbflow.estimate.main_memory``)
others         text encoders, VAE or reward networks that are loaded at the same time; on the
               gradient of the reward every process that trains has the reward networks
=============  ====================================================================================

With ``model.cpu_offload`` the copies and AdamW's 8 A are in main memory, and where a model is
sharded, its shard of the weights and the gradients too.

In offline stages FSDP2 shards the first three over the processes, or over those of a node (HSDP); a
block is gathered while it computes (``model.fsdp`` changes that). A process reads its own rows of
the weights; of the glyph model, all of them first. A network that is never trained lies whole on
each of them. The activations are an estimate: in small models autograd saved .7 to 1.8 times as
much (``tests/estimate/test_activations.py``). CUDA's context and fragmentation are not counted:
leave a tenth.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ebbflow.data.model_sizes import (
    BYTES,
    ENCODED_AT_ONCE,
    PIXELS_AT_ONCE,
    ModelSizes,
    SampleSize,
)
from ebbflow.estimate.activations import activation_bytes, block_bytes, inference_bytes
from ebbflow.estimate.work import (
    count_passes_per_term,
    count_passes_with_gradient,
    count_rows_per_sample,
    count_selected_samples,
    list_compared_copies,
)
from ebbflow.recipe import Recipe
from ebbflow.recipe.evaluation import DRIFT_SIGMAS
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import Precision
from ebbflow.recipe.rewards import RewardConfig, select_trained
from ebbflow.rewards.videos import select_scored_frames
from ebbflow.stage import StageContext


@dataclass(frozen=True)
class Memory:
    """Bytes of one process by their use, as the docstring of this module defines them.

    Attributes:
        loading: on the GPU while the model is loaded. It is no part of a sum, nor is the next: a
            process allocates the rest afterwards.
        encoding: on the GPU while the process encodes its prompts; 0 where it encodes none.
        offloaded: bytes in main memory instead of on the GPU (``model.cpu_offload``).
        waiting: bytes in main memory of a process with a GPU beside ``offloaded``: text encoders
            and VAE, samples with their trajectories and pictures, weights to send.

    Example:
        A rank of two that trains a LoRA of 1 M parameters beside a sharded model of 100 M::

            Memory(weights=204_000_000, optimizer=6_000_000, copies=2_000_000,
                   activations=900_000_000, samples=40_000_000, loading=102_000_000)
    """

    weights: int = 0
    optimizer: int = 0
    copies: int = 0
    activations: int = 0
    samples: int = 0
    others: int = 0
    loading: int = 0
    encoding: int = 0
    offloaded: int = 0
    waiting: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that the process has on its GPU at one time."""
        trained = self.weights + self.optimizer + self.copies
        working = trained + self.activations + self.samples + self.others
        return max(working, self.loading, self.encoding)

    @property
    def main_memory_bytes(self) -> int:
        """The most that a process with a GPU has in main memory."""
        return self.offloaded + self.waiting


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of every kind of process of a recipe.

    Attributes:
        trained: number of trained parameters.
        adapted: number of elements of the weights that a LoRA adapts.
    """

    recipe: Recipe
    sizes: ModelSizes
    sample: SampleSize
    trained: int
    adapted: int

    def share_tokens(self, context_parallel: int) -> ProcessMemory:
        """Return the memory of processes of which so many share the tokens of each sample."""
        tokens = math.ceil(self.sample.tokens / context_parallel)
        return replace(self, sample=replace(self.sample, tokens=tokens))

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

    def sharded_weight_bytes(self, shards: int) -> int:
        """Return the bytes of weights in one of several processes that train: its shard, the blocks
        that it gathers, and networks that are never trained.
        """
        # A replica in one process gathers nothing.
        gathered = self._gathered_bytes() if shards > 1 else 0
        return self.frozen_bytes + self.weight_shard_bytes(shards) + gathered

    def weight_shard_bytes(self, shards: int) -> int:
        """Return the bytes of one shard of the weights that processes share."""
        # With weights in float32, ``weight_bytes`` counts no casts: gathering in 16 bits makes
        # them superfluous.
        precision = "float32" if self._gathers_16_bit else self.recipe.model.precision
        return (self.weight_bytes(precision) - self.frozen_bytes) // shards

    def _gathered_bytes(self) -> int:
        """Return the bytes of the blocks that a process has gathered at one time."""
        fsdp = self.recipe.model.fsdp
        num_blocks = self.sizes.blocks
        if fsdp.keep_gathered:
            num_gathered = num_blocks
        else:
            # The block that computes, and with ``prefetch`` the next one.
            num_gathered = min(2 if fsdp.prefetch else 1, num_blocks)
        whole = 2 * self.sizes.parameters if self._gathers_16_bit else self.weight_shard_bytes(1)
        return whole * num_gathered // num_blocks

    @property
    def _gathers_16_bit(self) -> bool:
        """Whether full weights are gathered in 16 bits, so that autocast keeps no casts."""
        return self.recipe.model.fsdp.gather == "bfloat16" and self.recipe.policy.train == "full"

    def merged_weight_bytes(self, precision: Precision) -> int:
        """Return the bytes of the weights that replace the adapted ones while adapters are merged
        for generation in a precision.
        """
        # ``Policy.merged_weight_bytes`` merges in float32 only, and never DoRA's magnitudes.
        merges = (
            precision == self.recipe.model.precision == "float32" and not self.recipe.policy.dora
        )
        return 4 * self.adapted if merges else 0

    def policy_copy_bytes(self, ctx: StageContext) -> int:
        """Return the bytes of the copies of the policy that a stage has."""
        num_copies = 1  # the reference, which every policy has
        num_copies += len(ctx.following_copies)
        if "rollout" in ctx.algorithm.copies(ctx.config.hyper_parameters):
            num_copies += 1
        if self.recipe.policy.ema:
            num_copies += 1
        num_copies += len(ctx.teacher_folders) + ctx.starts_as_teacher
        return 4 * self.trained * num_copies

    def encoding_memory(self) -> Memory:
        """Return the memory of the task that encodes prompts; it loads the policy as well."""
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
            loading=self._loading_bytes(1),
        )

    def evaluation_memory(self) -> Memory:
        """Return the memory of an evaluation, which has a micro-batch on the GPU at a time."""
        samples = min(self.recipe.num_evaluated, self.recipe.evaluation.micro_batch)
        precision = self.recipe.model.precision
        # Each branch is evaluated with its own rewards; the largest networks count.
        rewards = [
            self.recipe.select_branch(branch).rewards for branch in (None, *self.recipe.branches)
        ]
        # Latents before and after a step. The drift takes two velocities (of the policy and of the
        # base model) and their squared difference for each of its noise levels.
        num_latents = 2 + 3 * len(DRIFT_SIGMAS)
        return Memory(
            weights=self.weight_bytes(precision),
            copies=2 * 4 * self.trained,
            activations=self._generation_bytes(samples, samples, precision)
            + self.merged_weight_bytes(precision),
            samples=samples * (self.prompt_bytes + num_latents * self.latent_bytes),
            others=max(map(_reward_weight_bytes, rewards))
            + _reward_weight_bytes(self.recipe.guardrails),
            loading=self._loading_bytes(1),
        )

    def rollout_memory(self, ctx: StageContext) -> Memory:
        """Return the memory of a rollout worker."""
        config = ctx.config
        # Whole groups are generated at a time: as many as fit into ``micro_batch``.
        samples = max(1, config.micro_batch // config.group_size) * config.group_size
        # A copy that generates takes the policy's place, whose parameters wait meanwhile.
        swapped = 4 * self.trained if ctx.algorithm.generates != "current" else 0
        copies = self.policy_copy_bytes(ctx) + swapped
        offload = self.recipe.model.cpu_offload
        return Memory(
            weights=self.weight_bytes(config.rollout_precision or self.recipe.model.precision),
            copies=0 if offload else copies,
            offloaded=copies if offload else 0,
            activations=self._rollout_activation_bytes(ctx, samples),
            samples=samples * (self.prompt_bytes + self.latent_bytes),
            loading=self._loading_bytes(1),
        )

    def equal_process_memory(self, ctx: StageContext, processes: int, shards: int) -> Memory:
        """Return the memory of a process in which rollouts, rewards and training take turns, one of
        several that share the samples of a step; processes that share tokens count as one.
        """
        training = self.online_rank_memory(ctx, processes, shards)
        config = ctx.online_config
        samples = math.ceil(config.prompts_per_step / processes) * config.group_size
        # Activations of rollouts and of training are never there at the same time, unless training
        # goes back through the rollout's own graphs.
        activations = max(self._rollout_activation_bytes(ctx, samples), training.activations)
        activations += self._reused_graph_bytes(ctx)
        return replace(training, activations=activations, others=self.reward_network_bytes(ctx))

    def _reused_graph_bytes(self, ctx: StageContext) -> int:
        """Return the bytes of the graphs of the rollout's forward passes, which stay until the
        update has gone back through them.
        """
        config = ctx.online_config
        if not config.reuse_rollout_forward:
            return 0
        prompts = config.prompts_per_step * (1 + config.refill_rounds)
        requests = math.ceil(prompts / max(1, config.micro_batch // config.group_size))
        passes_of_request = math.ceil(config.group_size / config.micro_batch)
        passes = requests * passes_of_request * count_rows_per_sample(ctx)
        # Autocast keeps a cast of all weights in the graph of each forward pass.
        cast = self.recipe.policy.train == "full" and self.recipe.model.precision != "float32"
        casts = 2 * (self.sizes.parameters - self.sizes.unused) * passes * cast
        rows = prompts * config.group_size * count_rows_per_sample(ctx)
        return rows * self._saved_activation_bytes(ctx, recomputing=False) + casts

    def reward_network_bytes(self, ctx: StageContext) -> int:
        """Return the bytes of the networks that an online stage scores with."""
        rewards = list(ctx.branch_recipe.rewards)
        # Guardrails score the samples of a validation only.
        if ctx.online_config.validation:
            rewards += self.recipe.guardrails
        return _reward_weight_bytes(rewards)

    def online_rank_memory(self, ctx: StageContext, ranks: int, shards: int) -> Memory:
        """Return the memory of a process that trains on its share of a step's samples.

        Args:
            ranks, shards: processes that train, and those that share one copy of the model.
        """
        config = ctx.online_config
        kind = config.algorithm_kind
        num_selected, _ = count_selected_samples(ctx)
        samples_of_update = math.ceil(num_selected / config.updates_per_step / ranks)
        # The samples themselves wait in main memory (``ebbflow.estimate.main_memory``). On the GPU
        # are a row for each prompt of the step, and those of the rows of a pass.
        prompts_on_gpu = config.prompts_per_step * (1 + config.refill_rounds) + config.pass_size
        rewards = ctx.branch_recipe.rewards if kind.needs_reward_gradient else []
        return replace(
            self._training_state_memory(ctx, shards),
            activations=self._training_activation_bytes(ctx),
            others=_reward_weight_bytes(rewards),
            samples=prompts_on_gpu * self.prompt_bytes
            + self._row_latent_bytes(ctx, samples_of_update),
        )

    def offline_rank_memory(
        self, ctx: StageContext, processes: int, shards: int, context_parallel: int
    ) -> Memory:
        samples = math.ceil(ctx.offline_config.batch_size * context_parallel / processes)
        return replace(
            self._training_state_memory(ctx, shards),
            activations=math.ceil(self._training_activation_bytes(ctx) / context_parallel),
            samples=samples * self.prompt_bytes + self._row_latent_bytes(ctx, samples),
        )

    def _training_state_memory(self, ctx: StageContext, shards: int) -> Memory:
        """Return the bytes of weights, optimiser and copies of one of the processes that share a
        copy of the model, on the GPU and in main memory.
        """
        kind = ctx.config.algorithm_kind
        # Each trained copy has an optimiser of its own beside the policy's.
        num_optimizers = 1 + len(
            kind.list_trained_copies(ctx.config.hyper_parameters, ctx.config.optimizer)
        )
        # One process alone puts swapped-out parameters where the gradients were; sharded or
        # offloaded parameters need a place of their own.
        needs_place = shards > 1 or self.recipe.model.cpu_offload
        swapped = 4 * self.trained if num_optimizers > 1 and needs_place else 0
        state = Memory(
            weights=self.sharded_weight_bytes(shards),
            optimizer=(4 * self.trained + num_optimizers * self._moment_bytes(ctx)) // shards,
            copies=(self.policy_copy_bytes(ctx) + swapped) // shards,
            loading=self._loading_bytes(shards),
        )
        if not self.recipe.model.cpu_offload:
            return state
        if shards == 1:
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

    def _loading_bytes(self, shards: int) -> int:
        """Return the bytes on the GPU of a process while it loads the model."""
        whole = self.weight_bytes("float32")
        if not FAMILIES[self.recipe.model.family].diffusers:
            return whole
        # It reads its own rows of each weight (``ebbflow.training.loading``), where they stay.
        on_gpu = 0 if self.recipe.model.cpu_offload and shards > 1 else whole - self.frozen_bytes
        return self.frozen_bytes + on_gpu // shards

    def _moment_bytes(self, ctx: StageContext) -> int:
        """Bytes of the state of one optimiser."""
        return ctx.config.optimizer.factory.count_state_bytes(self.trained)

    def _row_latent_bytes(self, ctx: StageContext, samples: int) -> int:
        """Return the bytes of the rows of an optimiser step, without their prompts."""
        # For each row: its latent, noise and target, a prediction of every copy, and the steps of
        # a few-step student.
        num_latents = 3 + len(list_compared_copies(ctx)) + ctx.config.reference.needs_guidance
        num_latents += ctx.config.algorithm_kind.latents_per_row(
            ctx.config.hyper_parameters, ctx.config.sampler.steps
        )
        return samples * count_rows_per_sample(ctx) * self.latent_bytes * num_latents

    def _rollout_activation_bytes(self, ctx: StageContext, samples: int) -> int:
        config = ctx.config
        precision = config.rollout_precision or self.recipe.model.precision
        # The engine ``diffusers`` merges adapters for samples without a trajectory: those of
        # algorithms on final latents, and those of a validation.
        merges = config.engine == "diffusers" and (
            config.kind != "online" or not config.window or bool(config.validation)
        )
        extra = self.merged_weight_bytes(precision) if merges else 0
        if config.rollout_quantization:
            # Beside the weights, which are there as they were after the rollout: a byte of each.
            extra += sum(inputs * outputs for inputs, outputs in self.sizes.linears.values())
        if config.rollout_cache:
            # Blocks with attention to the text of their own, as Wan's, have two layers.
            attention_layers = sum(name.endswith(".to_q") for name in self.sizes.linears)
            kept = config.rollout_cache.count_kept_outputs(attention_layers)
            outputs = self.sample.tokens * self.sizes.width * BYTES[precision] * kept
            extra += min(samples, config.micro_batch) * self.sample.passes * outputs
        return self._generation_bytes(samples, config.micro_batch, precision, extra)

    def _generation_bytes(
        self, samples: int, at_once: int, precision: Precision, extra: int = 0
    ) -> int:
        """Return the bytes of the denoising network with ``extra`` bytes of merged weights and
        kept features, or of the VAE that decodes after it, whichever is more.
        """
        network = extra + min(samples, at_once) * inference_bytes(
            self.sizes.width, self.sample.tokens, precision
        )
        decoded = min(samples, max(1, PIXELS_AT_ONCE // self.sample.pixels)) * self.sample.pixels
        frames = self.recipe.model.frames
        decoded = decoded * min(frames, self.sizes.decoded_frames) // frames
        vae = 4 * self.sizes.vae + self.sizes.decoding * decoded if self.sizes.vae else 0
        return max(network, vae)

    def _training_activation_bytes(self, ctx: StageContext) -> int:
        """Return the bytes of one forward and backward pass. For algorithms on the gradient of the
        reward they include the decoding and the scoring of the images.
        """
        kind = ctx.config.algorithm_kind
        cost = kind.row_cost(ctx.config.hyper_parameters, ctx.config.sampler.steps)
        is_online = ctx.config.kind == "online"
        at_once = ctx.online_config.pass_size if is_online else ctx.config.micro_batch
        rows = max(at_once, count_selected_samples(ctx)[1])
        network = rows * self._saved_activation_bytes(ctx)
        if count_passes_with_gradient(ctx, self.sample) < count_passes_per_term(ctx, self.sample):
            # The negative prompts' pass comes last, beside what the prompts' pass has kept.
            precision = self.recipe.model.precision
            network += rows * inference_bytes(self.sizes.width, self.sample.tokens, precision)
        if not kind.needs_reward_gradient or all(
            reward.scores == "latents" for reward in select_trained(ctx.branch_recipe.rewards)
        ):
            return network
        # What the reward networks keep of an image, or of the scored frames of a video.
        frames = len(select_scored_frames(self.recipe.model.frames))
        trained = select_trained(ctx.branch_recipe.rewards)
        scoring = frames * sum(reward.gradient_bytes for reward in trained)
        images = rows * (self.sizes.decoding_with_gradient * self.sample.pixels + scoring)
        # Several steps are repeated in the backward pass, when nothing of the images is left.
        return 4 * self.sizes.vae + (
            max(network, images) if cost.with_gradient > 1 else network + images
        )

    def _saved_activation_bytes(self, ctx: StageContext, recomputing: bool = True) -> int:
        """Return the bytes that one row keeps for its backward pass.

        Args:
            recomputing: count the block that checkpointing recomputes at the moment.
        """
        model = self.recipe.model
        tokens = self.sample.tokens
        checkpointing = model.gradient_checkpointing
        every = model.gradient_checkpointing_every
        adapted = self.recipe.policy.train == "lora"
        saved = activation_bytes(self.sizes, tokens, model.precision, checkpointing, every, adapted)
        if checkpointing and not recomputing:
            saved -= block_bytes(self.sizes.width, tokens, model.precision, adapted)
        return saved * count_passes_with_gradient(ctx, self.sample)


def _reward_weight_bytes(rewards: Iterable[RewardConfig]) -> int:
    return sum(reward.network_bytes for reward in rewards)
