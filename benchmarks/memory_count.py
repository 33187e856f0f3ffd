"""The bytes of a process of four published models, counted operation by operation, beside those of
``ebbflow estimate``: ``python -m benchmarks.memory_count [--write]``. It needs no GPU, no weights.

The networks are built at their published sizes on the meta device, whose tensors have no memory,
and the product's own code loads, encodes, generates, decodes and trains with them. A mode below
every operation books the bytes of each tensor when it is made and when it is freed. Nothing here
comes from the formulas of ``ebbflow.estimate``.
"""

from __future__ import annotations

import argparse
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.kernel_counts import attend, normalize
from ebbflow.data.model_sizes import ENCODED_AT_ONCE
from ebbflow.data.prompts import Prompt
from ebbflow.estimate.main_memory import count_sample_bytes
from ebbflow.estimate.memory import ProcessMemory
from ebbflow.estimate.run import estimate_recipe
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan, plan_window
from ebbflow.models.base import Conditioning
from ebbflow.models.meta_results import MetaResults
from ebbflow.models.sizes import _build_meta_pipeline
from ebbflow.models.weight_files import PendingWeights
from ebbflow.recipe import Recipe, load_recipe
from ebbflow.rollouts import generate as generating
from ebbflow.rollouts.generate import generate_samples
from ebbflow.stage import StageContext
from ebbflow.training import policy as policies
from ebbflow.training.batches import build_trajectory_batch
from ebbflow.training.loading import add_placeholders
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

aten = torch.ops.aten
GIB = 2**30
META = torch.device("meta")
RECIPES = Path(__file__).parents[1] / "workflows" / "recipes"
MODELS = {
    "SD3.5-medium": "sd35_medium_ocr_512",
    "FLUX.1-dev": "flux_dev",
    "Qwen-Image": "qwen_image_ocr",
    "Wan2.2-A14B": "wan22_a14b",
}


HEADER = """# The memory of a process, counted

One process of a recipe, whose GPU has everything: it loads, encodes prompts, generates and decodes,
and trains on two passes of rows. Its own code runs on the meta device at the
published sizes, and the bytes of each tensor are counted when it is made and when it is freed. The
estimate is what `ebbflow estimate` says of these phases, without the samples of a step. Nothing
here was measured on a GPU, whose allocator and kernels take more.
"""


class ByteCounter(TorchDispatchMode):
    """Counts the bytes of the meta tensors that are alive, and the most of them at one time.

    What the CPU asks of the device has no value: a number is 1, a mask is true everywhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.peak = 0
        self._storages: set[int] = set()
        self._results = MetaResults()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = self._answer(func, args, kwargs)
        if result is None:
            result = self._results.compute(func, args, kwargs)
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.is_meta:
                self.enter(leaf)
        return result

    def enter(self, tensor: Tensor) -> None:
        """Book the memory of a tensor, once for all its views, until it is freed."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._storages:
            return
        self._storages.add(key)
        num_bytes = storage.nbytes()
        self.alive += num_bytes
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._free, key, num_bytes)

    def enter_all(self, network: torch.nn.Module) -> None:
        """Book the weights of a network, as it comes to the device."""
        for tensor in network.state_dict().values():
            self.enter(tensor)

    def reset_peak(self) -> int:
        """Return the most bytes since the last call, and begin again."""
        peak = self.peak
        self.peak = self.alive
        return peak

    def release(self, num_bytes: int) -> int:
        """Book networks as gone to main memory, whose tensors stay: the most bytes until then."""
        peak = self.reset_peak()
        self.alive -= num_bytes
        self.peak = self.alive
        return peak

    def _free(self, key: int, num_bytes: int) -> None:
        self._storages.discard(key)
        self.alive -= num_bytes

    def _answer(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What has no answer on the meta device; None for all others."""
        packet = func.overloadpacket
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.is_meta:
            return None
        if packet is aten._local_scalar_dense:
            return True if first.dtype == torch.bool else 1
        if packet is aten.equal:
            return True
        if packet is aten._to_copy and torch.device(kwargs.get("device") or "meta") != META:
            dtype = kwargs.get("dtype") or first.dtype
            return torch.ones(first.shape, dtype=dtype)
        return None


class _Tokenizer:
    """Pads every text to the length that the pipeline asks for."""

    model_max_length = 77
    limit = 10_000

    def __call__(self, texts: Any, max_length: int | None = None, **_: Any) -> Any:
        rows = 1 if isinstance(texts, str) else len(texts)
        from transformers import BatchEncoding

        length = min(max_length or self.model_max_length, self.limit)
        ids = torch.ones(rows, length, dtype=torch.int64, device=META)
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def batch_decode(self, *_: Any) -> list[str]:
        return [""]

    def tokenize(self, text: str) -> list[str]:
        return []

    added_tokens_encoder: Mapping[str, int] = {}


@dataclass(frozen=True)
class NoFiles:
    """Stands for ``WeightFiles``: the weights of a network, without numbers."""

    shapes: Mapping[str, torch.Size]
    dtype: torch.dtype

    def read_tensor(self, name: str, rows: slice = slice(None)) -> Tensor:
        return torch.empty(self.shapes[name], dtype=self.dtype, device=META)[rows]


def build_model(recipe: Recipe) -> Any:
    """The adapter of a recipe's model on the meta device, its networks still to be read."""
    model, _ = _build_meta_pipeline(recipe.model)
    pipeline = model.pipeline
    for name in [name for name in pipeline.components if name.startswith("tokenizer")]:
        setattr(pipeline, name, _Tokenizer())
    # Published with Wan2.2-A14B; the other pipelines do not read it.
    if "boundary_ratio" in pipeline.config:
        pipeline.register_to_config(boundary_ratio=0.875)
    pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    if hasattr(pipeline, "_extract_masked_hidden"):
        # Qwen-Image takes the tokens of each prompt out of the padding: none is padded here.
        pipeline._extract_masked_hidden = lambda hidden, mask: list(hidden)
        pipeline.tokenizer.limit = model.max_tokens + pipeline.prompt_template_encode_start_idx
    published = type(model).published[recipe.model.path]
    for name in model.text_parts:
        getattr(pipeline, name).to(torch.bfloat16)
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False).eval()
    parts = type(model).trained_parts(recipe.model)
    files = {}
    for part in parts:
        network = getattr(pipeline, part)
        shapes = {name: value.shape for name, value in network.state_dict().items()}
        dtype = torch.float32 if published[part].bytes == 4 else torch.bfloat16
        files["" if len(parts) == 1 else f"{part}."] = NoFiles(shapes, dtype)
    model.pending_weights = PendingWeights(files)
    if recipe.model.gradient_checkpointing:
        model._recompute_activations()
    return model


@contextmanager
def count_bytes() -> Iterator[ByteCounter]:
    """Count the bytes on the meta device inside the block."""
    counter = ByteCounter()

    def add_placeholders_on_meta(*arguments: Any, **keys: Any) -> None:
        with META:
            add_placeholders(*arguments, **keys)

    with (
        patch.object(policies, "add_placeholders", add_placeholders_on_meta),
        # As attributes, not as a mode: a mode is off while checkpointing repeats a block.
        patch.object(functional, "scaled_dot_product_attention", attend),
        patch.object(functional, "rms_norm", normalize),
        patch.object(torch.fx.experimental._config, "meta_nonzero_assume_all_nonzero", True),
        counter,
    ):
        yield counter


def count_phases(recipe: Recipe) -> Iterator[tuple[str, int]]:
    """Load, encode, generate, decode and train in one process; yield the most bytes of each
    phase.
    """
    context = StageContext(recipe, 0, 0)
    stage = context.online_config
    model = build_model(recipe)
    with count_bytes() as counter:
        policy = Policy(model, recipe.policy, 0)
        for name in {*context.following_copies, *(["ema"] if recipe.policy.ema else [])}:
            policy.ensure_copy(name)
        yield "loading", counter.reset_peak()
        peak, conditioning = encode(model, counter)
        yield "text encoding", peak
        count = 2 * stage.pass_size
        keys = SampleKeys(0, [0] * count, list(range(count)))
        rows = conditioning.select_rows(torch.zeros(count, dtype=torch.int64))
        # One trained step of two instead of ten: a step takes the memory of any other.
        sampler = stage.sampler.model_copy(update={"steps": 2})
        plan = Plan((0,), (0,), with_means=stage.hyper_parameters.compares_means)
        rollouts = generate_samples(model, rows, keys, sampler, plan, stage.pass_size)
        yield "rollout", decode(model, rollouts.latents, counter)
        assert rollouts.trajectory
        batch = build_trajectory_batch(
            rollouts.trajectory,
            rows,
            torch.ones(count, device=META),
            keys,
            sampler,
            np.arange(count),
        )
        # The default, one kernel for all parameters, is not there on the meta device.
        optimizer = torch.optim.AdamW(policy.parameters.values(), foreach=False)
        updater = PolicyUpdater(policy, stage, optimizer=optimizer)
        updater.update_policy(replace(batch, group_index=torch.arange(count)), 2)
        yield "training", counter.reset_peak()
        with patch.object(
            generating, "predict", lambda model, latents, *_: torch.empty_like(latents)
        ):
            window = plan_window(stage, 0, 0, stage.hyper_parameters.compares_means)
            recorded = generate_samples(model, rows, keys, stage.sampler, window, stage.pass_size)
    assert recorded.trajectory
    columns = [recorded.latents, *recorded.trajectory.list_columns().values()]
    samples = stage.prompts_per_step * stage.group_size
    yield "main memory: trajectories of a step", sum(t.nbytes for t in columns) * samples // count
    parts = ByteCounter()
    for name in {*model.text_parts, "vae"}:
        parts.enter_all(getattr(model.pipeline, name))
    yield "main memory: text encoders and VAE", parts.alive


def encode(model: Any, counter: ByteCounter) -> tuple[int, Conditioning]:
    """Encode a batch of prompts with the text encoders on the device: the most bytes, and the
    conditioning.
    """
    prompts = [Prompt(n, "a sign", "", None, "", "train", "{}") for n in range(ENCODED_AT_ONCE)]
    networks = [getattr(model.pipeline, name) for name in model.text_parts]
    before = counter.alive
    for network in networks:
        counter.enter_all(network)
    entered = counter.alive - before
    with torch.no_grad():
        conditioning = model._encode_batch(prompts)
    return counter.release(entered), conditioning


def decode(model: Any, latents: Tensor, counter: ByteCounter) -> int:
    """Decode as many pictures as the VAE decodes at a time, with the VAE on the device: the most
    bytes.
    """
    before = counter.alive
    counter.enter_all(model.pipeline.vae)
    entered = counter.alive - before
    count = model._images_per_vae_call()
    with torch.no_grad():
        model._decode_batch(latents[:1].expand(count, *latents.shape[1:]))
    return counter.release(entered)


def estimate_phases(recipe: Recipe) -> dict[str, int]:
    """Return what ``ebbflow estimate`` says of the same phases of one process."""
    # On Ray rollout and training are rows of their own.
    ctx = StageContext(recipe, 0, 0)
    stages = [ctx.online_config.model_copy(update={"placement": "ray"}), *recipe.stages[1:]]
    made = estimate_recipe(recipe.model_copy(update={"stages": stages}))
    encoding = made.memory["text encoding"]
    rollout = made.memory[f"{ctx.stage_label} rollout"]
    training = made.memory[f"{ctx.stage_label} training"]
    loaded = training.loading + training.copies
    state = training.weights + training.optimizer + training.copies
    process = ProcessMemory(recipe, made.sizes, made.sample, made.trained, adapted=0)
    samples = ctx.online_config.prompts_per_step * ctx.online_config.group_size
    return {
        "loading": loaded,
        "text encoding": loaded + encoding.others + encoding.activations + encoding.samples,
        "rollout": rollout.weights + rollout.copies + rollout.activations,
        # The samples of a whole step, in the column of that name, are not there in two passes.
        "training": state + training.activations,
        "main memory: trajectories of a step": samples * count_sample_bytes(process, ctx),
        "main memory: text encoders and VAE": encoding.waiting,
    }


def build_report(names: Sequence[str]) -> str:
    """Build the page from the counts and the estimates of models."""
    lines = [HEADER, "| model | phase | counted, GiB | estimated, GiB | estimate / count |"]
    lines.append("|---|---|---|---|---|")
    for name in names:
        recipe = load_recipe(RECIPES / f"{MODELS[name]}.yaml")
        estimated = estimate_phases(recipe)
        for phase, counted in count_phases(recipe):
            ratio = estimated[phase] / counted
            sizes = f"{counted / GIB:.1f} | {estimated[phase] / GIB:.1f}"
            lines.append(f"| {name} | {phase} | {sizes} | {ratio:.2f} |")
    return "\n".join(
        [*lines, "", "`python -m benchmarks.memory_count --write`, on any machine.", ""]
    )


def main() -> None:
    """Print the table, or write it to ``benchmarks/results/memory_count.md``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write",
        action="store_true",
        help="write benchmarks/results/memory_count.md instead of printing",
    )
    written = parser.parse_args().write
    report = build_report(list(MODELS))
    if written:
        Path(__file__).with_name("results").joinpath("memory_count.md").write_text(report)
    else:
        print(report)


if __name__ == "__main__":
    main()
