"""Speed and memory of rollout and training at the size of SD3.5 medium: ``python -m benchmarks.gpu
[--compile] [--write]``.

The network has the size of Stable Diffusion 3.5 medium and random weights, so nothing is
downloaded. Without a GPU the same runs on the CPU with a tiny network, which proves the benchmark
and measures nothing of interest. Every phase is measured against plain diffusers, in turns and in
the same process: rollouts against the pipeline's own loop, updates against a plain training loop.
Before anything is timed, both sides have to draw the same latents. FLOPs are counted, and their
rate is compared with that of a large matrix product.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import diffusers
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_report import format_report
from benchmarks.gpu_sides import (
    LORA,
    SIZES,
    STAGE,
    STEPS,
    Bench,
    ModelSize,
    build_random_model,
    build_sides,
    build_training_batch,
    generate_random_prompts,
    generate_rollout,
    run_pipeline,
    run_plain_update,
    select_prompts,
)
from benchmarks.machine import describe_machine
from ebbflow.models.base import default_device, predict
from ebbflow.models.compile import configure_compiler
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import Precision
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.batches import TrajectoryBatch, count_micro_batches, split_into_passes
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater

RESULTS = Path(__file__).parent / "results" / "gpu"
GUIDANCE = 4.5
"""That of SD3.5's pipeline: a prediction is two rows through the network."""
TOLERANCE = 1e-3
"""Of the gate: the largest difference between the final latents of both sides in float32, as a
share of the largest latent.
"""


@dataclass(frozen=True)
class Flops:
    """Counted FLOPs: of a row through the transformer, and of an image through the VAE's
    decoder."""

    forward: int
    forward_and_backward: int
    decode: int


@dataclass(frozen=True)
class Case:
    """One thing that both sides do.

    Attributes:
        rows: images or rows of the loss per pass.
        images: of one call.
        loss_rows: of one call; none in a rollout.
        flops: that one call needs, whatever a side computes beyond that.
    """

    phase: str
    guidance: float
    rows: int
    images: int
    loss_rows: int | None
    flops: int
    ours: Callable[[], Any]
    peer: Callable[[], Any]


def main() -> None:
    arguments = _parse_arguments()
    diffusers.utils.logging.set_verbosity_error()
    # a CPU is slow in bfloat16, and the run there proves the benchmark only
    device = default_device()
    precision: Precision = "float32" if device.type == "cpu" else "bfloat16"
    if device.type == "cpu":
        torch.set_num_threads(1)  # the tiny network gains nothing from more
    overrides = {
        "resolution": arguments.resolution,
        "training_micro_batch": arguments.training_micro_batch,
    }
    overrides["micro_batches"] = arguments.micro_batches and tuple(arguments.micro_batches)
    size = replace(
        SIZES[arguments.size], **{name: value for name, value in overrides.items() if value}
    )
    command = {
        "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
        "size": arguments.size,
    }
    results = command | run_benchmark(size, device, precision, arguments.repeat, arguments.compile)
    print(format_report(results))
    if arguments.write:
        RESULTS.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(format_report(results))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = "medium" if torch.cuda.is_available() else "tiny"
    parser.add_argument(
        "--size",
        choices=SIZES,
        default=usual,
        help="of the network and of the work (on this machine: %(default)s)",
    )
    parser.add_argument(
        "--resolution", type=int, metavar="PIXELS", help="of the images (medium: 512)"
    )
    parser.add_argument(
        "--micro-batches",
        type=int,
        nargs="+",
        metavar="N",
        help="images per pass of a rollout (medium: 4 16)",
    )
    parser.add_argument(
        "--training-micro-batch",
        type=int,
        metavar="N",
        help="rows per pass of an update (medium: 4)",
    )
    parser.add_argument(
        "--repeat",
        type=int,
        default=5,
        metavar="N",
        help="timed calls of each side, after one to warm up (5)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="torch.compile of the transformer's blocks, for both sides; takes minutes",
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="keep the results in benchmarks/results/gpu.json and gpu.md",
    )
    return parser.parse_args()


def run_benchmark(
    size: ModelSize, device: torch.device, precision: Precision, repeat: int, compiled: bool = False
) -> dict[str, Any]:
    """All measurements, as the results file has them.

    Raises:
        SystemExit: the two sides do not draw the same latents.
    """
    # The order: FLOPs on a device without memory (meta), then the peak and the gate before anything
    # is compiled, the base model before adapters are put on it.
    torch.manual_seed(0)
    flops = count_flops(size)
    bench = build_sides(size, device, precision)
    peak = measure_matmul_peak(size.matrix, device, bench.dtype)
    _print_progress(f"a large matrix product in {precision}: {peak / 1e12:.3g} TFLOP/s")
    difference = check_same_latents(bench)
    _print_progress(f"both sides draw the same latents: largest difference {difference:.1e}")
    if compiled:
        compile_blocks(bench)
    measured = [
        time_both_sides(case, device, peak, repeat) for case in iterate_base_cases(bench, flops)
    ]
    policy = Policy(bench.model, LORA, seed=0)
    # before the updates below: the first log-ratio is of adapters that have changed nothing
    errors = measure_ratio_errors(bench)
    measured += [
        time_both_sides(case, device, peak, repeat)
        for case in iterate_policy_cases(bench, policy, flops)
    ]
    return {
        "machine": describe_machine() | _describe_device(device),
        "precision": precision,
        "compiled": compiled,
        "parameters": sum(
            p.numel() for p in bench.model.transformer.parameters() if not p.requires_grad
        ),
        "rank": LORA.rank,
        "resolution": size.resolution,
        "steps": STEPS,
        "peak_flops_per_second": peak,
        "flops": vars(flops),
        "latents_difference": difference,
        "measured": measured,
        "ratio_errors": errors,
    }


def _describe_device(device: torch.device) -> dict[str, Any]:
    """The device, and the versions that its speed depends on."""
    versions = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "diffusers": diffusers.__version__,
    }
    if device.type == "cpu":
        return versions | {"device": "cpu", "threads": torch.get_num_threads()}
    return versions | {
        "device": torch.cuda.get_device_name(device),
        "memory": torch.cuda.mem_get_info(device)[1],
    }


def compile_blocks(bench: Bench) -> None:
    """Compile block by block: the blocks are alike, so that a few graphs serve all of them."""
    configure_compiler()  # as the product's graphs, whose rounding costs time
    for block in bench.model.list_blocks():
        # dynamic: the second number of rows would get slower kernels than the first
        block.compile(dynamic=False)


# What is measured.


def iterate_base_cases(bench: Bench, flops: Flops) -> Iterator[Case]:
    """Rollouts of the base model: to the final latents with every micro-batch, and to images with
    the largest.
    """
    for guidance in (1.0, GUIDANCE):
        for rows in bench.size.micro_batches:
            yield build_rollout_case("rollout", bench, guidance, rows, flops)
    yield build_rollout_case(
        "rollout, images", bench, GUIDANCE, max(bench.size.micro_batches), flops, images=True
    )


def iterate_policy_cases(bench: Bench, policy: Policy, flops: Flops) -> Iterator[Case]:
    """Rollouts through the adapters, as training has them, and updates of the adapters."""
    yield build_rollout_case(
        "rollout, LoRA", bench, GUIDANCE, max(bench.size.micro_batches), flops, autocast=True
    )
    updater = PolicyUpdater(policy, STAGE)
    for guidance in (1.0, GUIDANCE):
        yield build_training_case(bench, updater, guidance, flops)


def build_rollout_case(
    phase: str,
    bench: Bench,
    guidance: float,
    rows: int,
    flops: Flops,
    images: bool = False,
    autocast: bool = False,
) -> Case:
    prompts = select_prompts(bench, guidance)
    count = len(bench.keys)

    def run_ours() -> Any:
        drawn = generate_rollout(bench, prompts, rows)
        return bench.model.decode_latents(drawn.latents) if images else drawn

    def run_peer() -> Any:
        return run_pipeline(bench, prompts, rows, "np" if images else "latent", autocast)

    # What the images need. A side that computes more, such as a pass twice, has a lower rate.
    work = count * (STEPS * _rows_per_prediction(guidance) * flops.forward + images * flops.decode)
    return Case(phase, guidance, rows, count, None, work, run_ours, run_peer)


def build_training_case(
    bench: Bench, updater: PolicyUpdater, guidance: float, flops: Flops
) -> Case:
    rows = bench.size.training_micro_batch
    # one batch for both sides, which train the same adapters with optimisers of their own
    batch = build_training_batch(bench, guidance, rows)
    optimizer = torch.optim.AdamW(updater.policy.parameters.values(), lr=STAGE.optimizer.lr)

    def run_ours() -> Any:
        return updater.update_policy(batch, count_micro_batches(batch.group_index, rows))

    def run_peer() -> Any:
        return run_plain_update(bench, optimizer, batch, rows)

    work = len(batch.inputs) * _rows_per_prediction(guidance) * flops.forward_and_backward
    return Case(
        "update, LoRA", guidance, rows, len(bench.keys), len(batch.inputs), work, run_ours, run_peer
    )


def _rows_per_prediction(guidance: float) -> int:
    """Rows through the network per prediction."""
    return 2 if guidance > 1 else 1


def measure_ratio_errors(bench: Bench) -> list[dict[str, Any]]:
    """``measure_ratio_error`` for rollouts with as many rows a pass as training has, and with
    others.
    """
    rows = bench.size.training_micro_batch
    return [
        measure_ratio_error(bench, rolled, rows)
        for rolled in dict.fromkeys((rows, *bench.size.micro_batches))
    ]


def measure_ratio_error(bench: Bench, rollout_rows: int, training_rows: int) -> dict[str, Any]:
    """How far the log-ratios before the first update are from 0 in bfloat16.

    Log-probs are means over the latent's elements; times their number they are log-densities.
    """
    # always bfloat16, on a CPU too: in float32 there is next to nothing to see
    batch = build_training_batch(bench, GUIDANCE, rollout_rows, "bfloat16")
    slices = split_into_passes(
        batch.group_index, count_micro_batches(batch.group_index, training_rows)
    )
    errors = torch.cat([_compute_log_ratio(bench, batch, part) for part in slices]).abs()
    elements = batch.inputs.latents[0].numel()
    return {
        "rollout_rows": rollout_rows,
        "training_rows": training_rows,
        "mean_log_prob": errors.mean().item(),
        "mean_log_density": errors.mean().item() * elements,
        "max_log_density": errors.max().item() * elements,
    }


def _compute_log_ratio(bench: Bench, batch: TrajectoryBatch, part: slice) -> Tensor:
    """Compute the log-ratios of some rows; predicted with gradient, as an update does it."""
    rows = batch.build_rows(
        part, predict(bench.model, *batch.inputs.model_arguments(part), "bfloat16"), {}
    )
    return (rows.log_prob - rows.old_log_prob).detach()


# How it is measured.


def check_same_latents(bench: Bench, count: int = 2) -> float:
    """The largest difference between the final latents of both sides as a share of the largest
    latent.

    In float32, so that nothing but a difference in what is computed is left, and with the
    deterministic sampler.

    Raises:
        SystemExit: it is above ``TOLERANCE``: the times of different work cannot be compared.
    """
    prompts = generate_random_prompts(bench.size, count, GUIDANCE, bench.device, torch.float32)
    keys = bench.keys.select_samples(slice(count))
    sampler = SamplerConfig(name="ode", steps=STEPS)
    bench.model.transformer.float()
    # cuDNN's convolutions of float32 round to TF32, which has 10 bits
    with torch.backends.cudnn.flags(enabled=False):
        ours = generate_samples(bench.model, prompts, keys, sampler, precision="float32").latents
        (peer,) = run_pipeline(bench, prompts, count, "latent")
    bench.model.transformer.to(bench.dtype)
    difference = ((ours - peer).abs().max() / peer.abs().max()).item()
    # "not <": NaN on either side is no agreement
    if not difference < TOLERANCE:
        raise SystemExit(
            f"the final latents of adapter and pipeline differ by {difference:.2e} of the largest,"
            f" more than {TOLERANCE:g}; find out why before their speed is compared: python -m"
            " pytest tests/models"
        )
    return difference


def time_both_sides(case: Case, device: torch.device, peak: float, repeat: int) -> dict[str, Any]:
    """Time both sides in turns, after a call of each to warm up."""
    sides = {"ours": case.ours, "peer": case.peer}
    # the first call allocates, chooses kernels and may compile
    for call in sides.values():
        call()
    taken: dict[str, list[tuple[float, int | None]]] = {name: [] for name in sides}
    for turn in range(repeat):
        # in turns: whoever is second meets a warmer chip
        for name in sorted(sides, reverse=turn % 2 == 1):
            taken[name].append(time_call(sides[name], device))
    speeds = {name: summarize_speed(case, peak, calls) for name, calls in taken.items()}
    ratio = speeds["ours"]["images_per_second"] / speeds["peer"]["images_per_second"]
    asked = {
        "phase": case.phase,
        "guidance": case.guidance,
        "rows_per_pass": case.rows,
        "images": case.images,
        "flops": case.flops,
    }
    _print_progress(
        f"{case.phase}, guidance {case.guidance}, {case.rows} rows a pass:"
        f" {speeds['ours']['seconds']:.3f} s, ratio {ratio:.2f}"
    )
    return asked | speeds | {"ratio": ratio}


def summarize_speed(
    case: Case, peak: float, calls: list[tuple[float, int | None]]
) -> dict[str, Any]:
    """What the median call amounts to, and the most bytes that any had allocated."""
    seconds = median(spent for spent, _ in calls)
    return {
        "seconds": seconds,
        "all_seconds": [spent for spent, _ in calls],
        "images_per_second": case.images / seconds,
        "rows_per_second": case.loss_rows / seconds if case.loss_rows else None,
        "flops_per_second": case.flops / seconds,
        "share_of_peak": case.flops / seconds / peak,
        "peak_memory": max((used for _, used in calls if used is not None), default=None),
    }


def time_call(call: Callable[[], Any], device: torch.device) -> tuple[float, int | None]:
    """(seconds until the device has finished, the most bytes allocated on it meanwhile: None on a
    CPU, which counts none).
    """
    if device.type == "cpu":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start, None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = time.perf_counter()
    call()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start, torch.cuda.max_memory_allocated(device)


def measure_matmul_peak(
    side: int, device: torch.device, dtype: torch.dtype, products: int = 20
) -> float:
    """FLOP/s of the fastest of five runs of square matrix products."""
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    result = torch.empty_like(left)

    def multiply_matrices() -> None:
        for _ in range(products):
            torch.mm(left, right, out=result)

    multiply_matrices()
    return products * 2 * side**3 / min(time_call(multiply_matrices, device)[0] for _ in range(5))


def count_flops(size: ModelSize) -> Flops:
    """Count on PyTorch's device without data: it takes no memory, and the count is the same
    wherever the benchmark runs.
    """
    device = torch.device("meta")
    model = build_random_model(size, device, "float32")
    latents = torch.empty(1, *model.latent_shape, device=device)
    sigma = torch.empty(1, device=device)
    prompts = generate_random_prompts(size, 1, 1.0, device, torch.float32)
    forward = count_flops_of_call(lambda: model.predict_velocity(latents, sigma, prompts))
    decode = count_flops_of_call(lambda: model.pipeline.vae.decode(latents))
    Policy(model, LORA, seed=0)
    both = count_flops_of_call(
        lambda: model.predict_velocity(latents, sigma, prompts).sum().backward()
    )
    return Flops(forward, both, decode)


def count_flops_of_call(call: Callable[[], Any]) -> int:
    """FLOPs of the matrix products and convolutions in a call; what attention computes twice to
    save memory counts once.
    """
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    return counter.get_total_flops()


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
