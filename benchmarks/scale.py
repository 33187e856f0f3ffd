"""What the offline path costs as samples grow: ``python -m benchmarks.scale [--samples 10000
100000] [--against CHECKOUT]``.

``run_stage``: a whole offline stage (prompt table, rollouts, scores, advantages, an epoch) of so
many samples in shards of 1,024, with latents of 1 x 4 x 4 and a network of one layer: CPU-seconds
and peak memory, which per 1,000 samples must not grow. ``measure_latents``: shards of the latents
of SD3.5 at 512 x 512 pixels: bytes and CPU-milliseconds of a sample, and the peak memory of an
epoch without its updates, in shards. With ``--against``, another checkout does the same. The tables
go to ``benchmarks/results/scale.md``. Rows of sizes that are not measured stay as they are in
``benchmarks/results/scale.json``.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor, nn

import ebbflow.offline.shards
import ebbflow.offline.training
from ebbflow.data.prompts import Prompt, PromptRow, read_prompts, split_prompts, write_prompts
from ebbflow.data.schema import ADVANTAGES
from ebbflow.flow.noise import SampleKeys
from ebbflow.models.base import Conditioning
from ebbflow.offline import rollouts
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.training import train_epochs
from ebbflow.recipe import Recipe
from ebbflow.rewards.base import Reward, RewardResult
from ebbflow.rewards.combine import Scorer
from ebbflow.rollouts.generate import Rollouts
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.tables import count_rows, read_column, write_table
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "scale.json"
# Shapes of a latent, (C, H, W). Tiny ones, so that a million samples fit a run and what is measured
# is the cost of a sample itself; those of SD3.5 at 512 x 512 pixels, 256 KiB in float32.
TINY = (1, 4, 4)
SD3 = (16, 64, 64)
GROUP = 16
SHARD = 1024
"""Samples of a prompt, and of a shard of ``run_stage``."""
# Several shards: an epoch must not keep more than it needs of them, which one shard cannot show.
SD3_SHARDS = 4
SD3_SHARD = 256
SD3_BATCH = 32
READS = 5
"""Of a shard; the fastest counts."""
PHASES = ["rollout", "scoring", "advantages", "training"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--here", nargs=2, metavar=("CASE", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    # in a process of one case, maybe with the library of another checkout
    if arguments.here:
        case, file = arguments.here
        Path(file).write_text(json.dumps(measure_case(json.loads(case))))
        return
    # imported here: a process of another checkout may not have it
    from benchmarks.machine import describe_machine

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name, tree in {
        "now": ROOT,
        **({"before": arguments.against.resolve()} if arguments.against else {}),
    }.items():
        # older checkouts have no key for the precision of latents
        precisions = ["float32", "bfloat16"] if name == "now" else ["float32"]
        cases: list[dict[str, Any]] = [
            {"case": "latents", "precision": precision} for precision in precisions
        ]
        cases += [{"case": "stage", "samples": samples} for samples in arguments.samples]
        for case in cases:
            key = f"{name} {case['case']} {case.get('precision', case.get('samples'))}"
            results[key] = measure_in_process(tree, case) | {"machine": describe_machine()}
            RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    written = format_report(results)
    RESULTS.with_suffix(".md").write_text(written)
    print(written)


def measure_in_process(tree: Path, case: dict[str, Any]) -> dict[str, Any]:
    """Measure a case with the library of a checkout.

    A process for each case: memory that an earlier one has left would hide in the peak. This file
    is run, not the other checkout's, so that both do the same.
    """
    with tempfile.NamedTemporaryFile() as file:
        command = [
            sys.executable,
            str(Path(__file__).resolve()),
            "--here",
            json.dumps(case),
            file.name,
        ]
        subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(tree)})
        measured: dict[str, Any] = json.loads(Path(file.name).read_text())
        return measured


def measure_case(case: dict[str, Any]) -> dict[str, Any]:
    """In this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ebbflow-scale-") as folder:
        if case["case"] == "latents":
            return measure_latents(Path(folder), case["precision"])
        return run_stage(Path(folder), case["samples"])


@contextmanager
def measure_block(measured: dict[str, Any], name: str) -> Iterator[None]:
    """The CPU-seconds of the block, all threads together, and how much its peak memory is above
    what there was, in MiB.
    """
    # Whatever Python, Arrow and the C library keep for later would be counted for this block.
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL(None).malloc_trim(0)
    # "5" resets VmHWM, the peak, to what is resident now (proc(5))
    Path("/proc/self/clear_refs").write_text("5")
    resident_before = _read_memory("VmRSS")
    start = time.process_time()
    yield
    measured[f"{name} seconds"] = time.process_time() - start
    measured[f"{name} MiB"] = _read_memory("VmHWM") - resident_before


def _read_memory(what: str) -> float:
    match = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1]) / 1024


class OneLayer:
    """A model whose network is a linear map of the rows of a latent, so that what is measured is
    the path around it.
    """

    precision = "float32"
    lora_targets: Sequence[str] = ()
    pipeline_class = None

    def __init__(self, latent_shape: tuple[int, ...]) -> None:
        torch.manual_seed(0)
        self.latent_shape = latent_shape
        self.transformer = nn.Linear(latent_shape[-1], latent_shape[-1])

    def compute_sigmas(self, steps: int) -> Tensor:
        return torch.linspace(1, 0, steps + 1)

    def encode_prompts(self, prompts: Sequence[Prompt]) -> Conditioning:
        return Conditioning(
            {"embeds": torch.tensor([[float(prompt.prompt_id)] for prompt in prompts])}
        )

    def predict_velocity(
        self, latents: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        velocity: Tensor = self.transformer(latents)
        return velocity

    # [N, C, H, W] to [N, h, w, 3] with h, w <= 8: a shard has the PNG as well, and it is the
    # latents that are measured
    def decode_latents(self, latents: Tensor) -> np.ndarray:
        grey = (latents[:, 0, :8, :8].clamp(-1, 1) * 127.5 + 127.5).byte()
        return grey.unsqueeze(-1).repeat(1, 1, 1, 3).numpy()

    def list_blocks(self) -> list[nn.Module]:
        return []


class Darkness(Reward):
    """Mean darkness of an image."""

    name = "darkness"

    def __call__(self, images: np.ndarray, prompts: Sequence[Prompt]) -> RewardResult:
        return RewardResult(1 - images.mean((1, 2, 3)) / 255)


def build_context(samples: int, shard: int, **keys: Any) -> StageContext:
    """An offline stage of so many samples, or a few more: whole shards."""
    shards = -(-samples // shard)  # rounded up
    one = {
        "kind": "offline",
        "algorithm": {"name": "diffusion_nft", "noise_levels": 1},
        "group_size": GROUP,
        "prompts": shards * shard // GROUP,
        "shards": shards,
        "epochs": 1,
        "sampler": {"name": "ode", "steps": 2},
    }
    return StageContext(Recipe.model_validate({"stages": [one | keys]}), 0, 0)


def run_stage(folder: Path, samples: int) -> dict[str, Any]:
    """A whole stage with tiny latents, as the tasks run it: every shard for itself, with the prompt
    table at hand.
    """
    model: Any = OneLayer(TINY)
    ctx = build_context(samples, SHARD, micro_batch=SHARD, batch_size=SHARD)
    policy = _build_policy(ctx, model)
    table = folder / "prompts.parquet"
    write_prompts(
        split_prompts(
            [PromptRow(f"prompt {n}") for n in range(ctx.offline_config.prompts + 1)], 1, 0, 0
        ),
        table,
    )
    shards = [folder / f"rollouts-{index}.parquet" for index in range(ctx.offline_config.shards)]
    scores = [path.with_name(f"scores-{path.name}") for path in shards]
    measured = {"samples": ctx.offline_config.shards * SHARD}
    scorer = Scorer(((Darkness(), 1.0),))
    # A block for each task of the pipeline, and shards one after another within it: what a task
    # keeps of a shard that it has finished shows as memory that grows with the samples.
    with measure_block(measured, "rollout"):
        for index, path in enumerate(shards):
            generate_rollout_shard(ctx, model, policy, table, index, path)
    with measure_block(measured, "scoring"):
        for path, score in zip(shards, scores, strict=True):
            score_shard(ctx, scorer, read_shard_prompts(table, path), path, score)
    with measure_block(measured, "advantages"):
        write_advantages(ctx, scores, folder / "advantages.parquet")
    with measure_block(measured, "training"):
        updater = PolicyUpdater(policy, ctx.offline_config)
        trained_on = read_prompts(table, "train")
        record = train_epochs(
            ctx,
            model,
            updater,
            trained_on,
            shards,
            folder / "advantages.parquet",
            MetricsRecorder(),
        )
    assert record.samples == measured["samples"]
    return measured


def generate_rollout_shard(
    ctx: StageContext, model: Any, policy: Policy, table: Path, index: int, path: Path
) -> None:
    """As ``generate_shard_from_folders``, but for loading the policy."""
    # reads only the prompts of the shard, unlike older checkouts
    if hasattr(rollouts, "write_shard"):
        from ebbflow.data.prompts import read_prompt_ids

        ids = rollouts.choose_shard_prompts(ctx, read_prompt_ids(table, "train"), index)
        by_id = {prompt.prompt_id: prompt for prompt in read_prompts(table, "train", ids)}
        rollouts.write_shard(ctx, model, policy, 0, [by_id[i] for i in ids], index, path)
    else:  # an older checkout
        rollouts.generate_shard(ctx, model, policy, 0, read_prompts(table, "train"), index, path)


def read_shard_prompts(table: Path, shard: Path) -> list[Prompt]:
    """As the task that scores a shard reads them."""
    if hasattr(rollouts, "write_shard"):
        return read_prompts(table, "train", set(read_column(shard, "prompt_id").to_pylist()))
    return read_prompts(table, "train")


def _build_policy(ctx: StageContext, model: Any) -> Policy:
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    return policy


class NoiseEngine:
    """An engine that returns noise as samples."""

    def load(self, weights: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def generate(
        self, conditioning: Any, keys: Any, sampler: Any, plan: Any = None
    ) -> tuple[Rollouts, np.ndarray]:
        latents = torch.randn(
            len(keys), *SD3, generator=torch.Generator().manual_seed(keys.prompt_ids[0])
        )
        return Rollouts(latents, None), OneLayer(SD3).decode_latents(latents)


def _write_advantages(path: Path, shards: list[Path]) -> None:
    """Write an advantage for each sample of the shards."""
    # prompt_id and sample of each row, in the order of the shards
    columns = [
        pa.chunked_array([c for shard in shards for c in read_column(shard, name).chunks])
        for name in ADVANTAGES.names[:2]
    ]
    values = pa.array(np.linspace(-1, 1, len(columns[0]), dtype=np.float32))
    batch = pa.record_batch(
        [*(column.combine_chunks() for column in columns), values], schema=ADVANTAGES
    )
    write_table(path, ADVANTAGES, [batch], {"seconds": {"scoring": 0.0}})


def measure_latents(folder: Path, precision: str) -> dict[str, Any]:
    """Shards of real size: what a sample takes to write and to read, and what an epoch keeps in
    memory.
    """
    keys = {"latent_precision": precision} if precision != "float32" else {}
    ctx = build_context(
        SD3_SHARDS * SD3_SHARD, SD3_SHARD, micro_batch=64, batch_size=SD3_BATCH, **keys
    )
    model: Any = OneLayer(SD3)
    prompts = [
        Prompt(number, f"prompt {number}", "", None, "", "train", "{}")
        for number in range(ctx.offline_config.prompts)
    ]
    policy = _build_policy(ctx, model)
    shards = [folder / f"{index}.parquet" for index in range(SD3_SHARDS)]
    measured: dict[str, Any] = {}
    # what making the samples costs, which is subtracted from what a shard takes to write
    with measure_block(measured, "noise"):
        for start in range(0, SD3_SHARD, 64):
            NoiseEngine().generate(None, SampleKeys(0, [start] * 64, [0] * 64), None)
    with measure_block(measured, "write"):
        for index, path in enumerate(shards):
            rollouts.generate_shard(ctx, model, policy, 0, prompts, index, path, NoiseEngine())
    reads = []
    for _ in range(READS):
        with measure_block(measured, "read"):
            assert sum(map(len, read_shuffled_latents(shards[0]))) == SD3_SHARD
        reads.append(measured["read seconds"])
    samples = SD3_SHARDS * SD3_SHARD
    measured["KiB"] = sum(path.stat().st_size for path in shards) / samples / 1024
    measured["write ms"] = 1000 * (
        measured["write seconds"] / samples - measured["noise seconds"] / SD3_SHARD
    )
    measured["read ms"] = 1000 * min(reads) / SD3_SHARD
    advantages = folder / "advantages.parquet"
    _write_advantages(advantages, shards)
    updater: Any = SimpleNamespace(
        alarms=[], updates=0, policy=SimpleNamespace(context_parallel=1, model=None)
    )
    # the first join loads libraries of Arrow, which are no samples
    pa.table({"key": [0]}).join(pa.table({"key": [0]}), "key")
    # An update would need memory of its own; the epoch here only reads, shuffles and batches.
    with (
        measure_block(measured, "epoch"),
        mock.patch.object(ebbflow.offline.training, "_update_policy", _skip_update),
    ):
        train_epochs(ctx, model, updater, prompts, shards, advantages, MetricsRecorder())
    # float32 has 4 bytes
    measured["epoch, shards"] = measured["epoch MiB"] / (
        4 * np.prod(SD3) * count_rows(shards[0]) / 2**20
    )
    return measured


def read_shuffled_latents(path: Path) -> Sequence[Tensor]:
    """The latents of a shard in a random order, as an epoch reads them."""
    if not hasattr(ebbflow.offline.shards, "read_latent_parts"):  # an older checkout
        return [ebbflow.offline.shards.read_latents(path)]
    order = np.random.default_rng(0).permutation(SD3_SHARD)
    return ebbflow.offline.shards.read_latent_parts(path, np.split(order, SD3_SHARD // SD3_BATCH))


def _skip_update(*_: object) -> dict[str, float]:
    return {"loss": 0.0}


def format_report(results: dict[str, Any]) -> str:
    """Format the tables as Markdown."""
    on = next(iter(results.values()))["machine"]
    lines = [
        "# What the offline path costs as samples grow",
        "",
        "`python -m benchmarks.scale --against CHECKOUT`",
        "",
        *_format_latents(results),
        "",
        *_format_stages(results),
        "",
        (
            "Peak memory is above that at the beginning of the phase. CPU-seconds are larger where"
            " others share the core:"
        ),
        "compare rows of one table.",
        "",
        f"{on['cpu']}, one of {on['cores']} cores, Python {on['python']}",
        "",
    ]
    return "\n".join(lines)


def _format_latents(results: dict[str, Any]) -> list[str]:
    """Format a line for each precision of ``measure_latents``."""
    lines = [
        (
            "Latents of SD3.5 at 512 x 512 pixels (16 x 64 x 64), a sample; an epoch without its"
            " updates:"
        ),
        "",
    ]
    lines += [
        "| | KiB | CPU-ms to write | CPU-ms to read | peak memory of an epoch, float32 shards |",
        "|---|---|---|---|---|",
    ]
    for name in ("before latents float32", "now latents float32", "now latents bfloat16"):
        row = results.get(name)
        if row:
            cells = [
                f"{row['KiB']:.0f}",
                f"{row['write ms']:.2f}",
                f"{row['read ms']:.2f}",
                f"{row['epoch, shards']:.1f}",
            ]
            lines.append(f"| {name.replace(' latents', ',')} | {' | '.join(cells)} |")
    return lines


def _format_stages(results: dict[str, Any]) -> list[str]:
    """Format a line for each size of ``run_stage``; per 1,000 samples nothing should grow."""
    lines = [
        (
            "A whole stage with latents of 1 x 4 x 4, in shards of 1,024 samples. CPU-seconds are"
            " of 1,000 samples:"
        ),
        "",
    ]
    heads = [
        "",
        "samples",
        *PHASES,
        "all",
        "MiB: " + PHASES[0],
        *PHASES[1:],
        "most, KiB per 1,000 samples",
    ]
    lines += [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for name in ("before", "now"):
        rows = [row for key, row in results.items() if key.startswith(f"{name} stage")]
        for row in sorted(rows, key=lambda row: int(row["samples"])):
            thousands = row["samples"] / 1000
            seconds = [row[f"{phase} seconds"] / thousands for phase in PHASES]
            memory = [row[f"{phase} MiB"] for phase in PHASES]
            cells = [f"{row['samples']:,}", *(f"{value:.3f}" for value in (*seconds, sum(seconds)))]
            cells += [
                *(f"{value:.0f}" for value in memory),
                f"{1024 * max(memory) / thousands:.0f}",
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
