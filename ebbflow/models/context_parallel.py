"""Context parallelism: ranks that follow each other share the tokens of a sample (2309.14509), as
diffusers has it.

Each has its share of the tokens everywhere but in attention. For it they exchange tokens for a
share of the heads (Ulysses), or gather all keys (``models.gathered_keys``) where numbers do not
divide or keys are not the queries' tokens. All of them have the whole prediction, and each the
gradient of its own tokens: the gradient of a parameter is the sum over these ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch.distributed as dist
from diffusers import ContextParallelConfig, ParallelConfig
from diffusers.hooks.context_parallel import apply_context_parallel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from torch.distributed.device_mesh import DeviceMesh

from ebbflow.models.base import Model, ModelError, device_of
from ebbflow.models.gathered_keys import GatheredKeys, let_backends_gather_keys
from ebbflow.models.pipeline import PipelineModel
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.stages import OnlineStageConfig, StageConfig

ATTENTION_TO_TEXT = "attn2"
"""End of the names of a network's layers of attention to text that does not go through the blocks,
in all networks of diffusers with such a text.
"""


def share_tokens(model: Model, mesh: DeviceMesh) -> dist.ProcessGroup:
    """Have the ranks of the dimension ``ulysses`` compute each sample together, of a model that
    ``require_shareable_tokens`` accepts; return their group.

    diffusers' ``enable_parallelism`` does the same on GPUs alone: it numbers them, and divides by
    zero where there are none.
    """
    adapter = cast("PipelineModel", model)
    group: dist.ProcessGroup = mesh["ulysses"].get_group()
    exchanges_heads = fits_ulysses(model, group.size())
    # With "anything", shares differ by a token where their number does not divide.
    config = ContextParallelConfig(
        ulysses_degree=group.size(), mesh=mesh, ulysses_anything=not exchanges_heads
    )
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(dist.get_rank(), dist.get_world_size(), device_of(model), mesh=mesh)
    gathered = None if exchanges_heads else GatheredKeys(group)
    let_backends_gather_keys()
    for processor in _attention_processors(model):
        processor._parallel_config = gathered or parallel
    for network in adapter.list_networks():
        plan = adapter.plan_shared_tokens(network)
        if gathered:
            # diffusers' own gathering of unequal shares works on GPUs alone: it exchanges their
            # sizes there, with gloo as well.
            for name in [name for name, part in plan.items() if not isinstance(part, dict)]:
                network.get_submodule(name).register_forward_hook(gathered.gather_output)
                del plan[name]
        apply_context_parallel(network, config, plan)
    # A family that does not fix the length of its prompts pads them to a multiple of the ranks, or
    # the tokens of a prompt could not be exchanged for heads.
    if adapter.text_multiple and exchanges_heads:
        adapter.text_multiple = config.ulysses_degree
    return group


def fits_ulysses(model: Model, ranks: int) -> bool:
    """Whether so many ranks can exchange tokens for attention heads (Ulysses, 2309.14509), the
    cheaper way: each then has all tokens of a share of the heads inside attention. The others
    gather keys.
    """
    adapter = cast("PipelineModel", model)
    # Images to edit have any number of tokens. Ulysses' backward pass takes as many keys as queries
    # (diffusers 0.42.1, TemplatedUlyssesAttention), and sound is not as long as its video.
    if adapter.count_tokens().edited or adapter.sound_parts:
        return False
    heads = adapter.list_networks()[0].config.num_attention_heads
    return all(count % ranks == 0 for count in (heads, *adapter.count_shared_tokens().values()))


def require_shareable_family(family: Any, config: ModelConfig, ranks: int) -> None:
    """Check what is known without the model: that the family's tokens can be shared, and that its
    network is not compiled.

    Raises:
        ModelError: they cannot be shared.
    """
    asked = f"train_context_parallel = {ranks}"
    if not (issubclass(family, PipelineModel) and family.shares_tokens):
        raise ModelError(
            f"{asked}: the tokens of {family.__name__} cannot be shared, as diffusers"
            " has no plan of its network for it; leave it out of the deployment, or take a family"
            " of docs/nodes.md"
        )
    if config.compile == "blocks":
        raise ModelError(
            f"{asked} is for a network that is not compiled; set model.compile: off, or leave"
            " it out"
        )


def require_shareable_stage(stage: StageConfig, ranks: int) -> None:
    """Check that the processes that train a stage can share the tokens of a sample, as far as the
    stage says it: its samples have one size, a colocated stage's rollouts no cache, and the
    training group of a stage on Ray can be divided.

    Raises:
        ModelError: they cannot.
    """
    if ranks > 1 and isinstance(stage, OnlineStageConfig) and stage.placement == "ray":
        # Rollout workers have a GPU and a whole sample each: the training group alone shares.
        count = stage.resources.training.count
        if count % ranks:
            raise ModelError(
                f"train_context_parallel = {ranks} does not divide resources.training.count ="
                f" {count} of a stage with placement: ray; take a multiple, or leave it out of the"
                " deployment"
            )
    elif ranks > 1 and isinstance(stage, OnlineStageConfig) and stage.rollout_cache:
        # A cache looks at the tokens that a rank has, and a rank that skips blocks would leave the
        # others alone in the attention of these blocks.
        raise ModelError(
            f"train_context_parallel = {ranks}: each process would decide by its own tokens when"
            f" rollout_cache.name = {stage.rollout_cache.name!r} skips blocks; leave one of them"
            " out"
        )
    captioned = stage.captioned_data  # the stage's own, or its anchor's
    if ranks > 1 and (stage.sizes or (captioned and captioned.buckets)):
        raise ModelError(
            f"train_context_parallel = {ranks} is for stages of one size; leave it, or 'sizes' and"
            " the 'buckets' of data, out"
        )


def require_shareable_tokens(model: Model, ranks: int) -> None:
    """Check that so many ranks can share the tokens of a sample.

    Raises:
        ModelError: the family, a compiled network, its attention, or the number of its tokens do
            not allow it.
    """
    asked = f"train_context_parallel = {ranks}"
    adapter = cast("PipelineModel", model)
    require_shareable_family(type(model), adapter.config, ranks)
    # The recipe's, that of the network, or that of diffusers (DIFFUSERS_ATTN_BACKEND), as diffusers
    # itself looks them up.
    default, _ = _AttentionBackendRegistry.get_active_backend()
    backend = (
        adapter.config.attention or _attention_processors(model)[0]._attention_backend or default
    )
    shareable_backends = filter(
        _AttentionBackendRegistry._is_context_parallel_available, AttentionBackendName
    )
    if backend not in shareable_backends:
        raise ModelError(
            f"{asked}: attention {getattr(backend, 'value', backend)!r} cannot share tokens; set"
            " model.attention to native"
        )
    for what, count in adapter.count_shared_tokens().items():
        if count < ranks:
            raise ModelError(
                f"{asked}: the {what} has {count} tokens, fewer than processes; take fewer, or"
                " another size, model.frames or model.max_tokens"
            )


def _attention_processors(model: Model) -> list[Any]:
    """The processors of the attention layers that compute with other ranks."""
    # Text that is only attended to is whole on every rank: there each rank has all that its tokens
    # attend to.
    joint = cast("PipelineModel", model).count_tokens().joint
    processors = [
        getattr(module, "processor", None)
        for network in cast("PipelineModel", model).list_networks()
        for name, module in network.named_modules()
        if joint or not name.endswith(ATTENTION_TO_TEXT)
    ]
    return [processor for processor in processors if hasattr(processor, "_parallel_config")]
