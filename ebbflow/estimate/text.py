"""An estimate as text for people."""

from __future__ import annotations

from ebbflow.data.model_sizes import SampleSize
from ebbflow.data.prompt_windows import PROMPTS_PER_WINDOW
from ebbflow.estimate.hours import Hours, estimate_hours
from ebbflow.estimate.memory import Memory
from ebbflow.estimate.run import Estimate
from ebbflow.recipe import Recipe

GIB = 2**30


def describe_estimate(estimate: Estimate, tflops: float | None = None) -> str:
    """Return the estimate as tables.

    Args:
        tflops: what a GPU sustains (``hours.estimate_hours``); without it the hours are left out.
    """
    lines = [
        *_describe_model(estimate),
        "",
        *_describe_memory(estimate),
        "",
        *_describe_work(estimate),
        "",
        *_describe_storage(estimate),
        "",
    ]
    if tflops:
        lines += _describe_hours(estimate, tflops)
    else:
        lines.append("For the hours, say what a GPU sustains: --tflops")
    return "\n".join(lines)


def _describe_undeclared_memory(recipe: Recipe) -> list[str]:
    # A user's own reward whose network counts as 0 bytes would make the table wrong in silence.
    names_by_column: dict[str, list[str]] = {}
    branch_rewards = [
        reward for branch in recipe.branches.values() for reward in branch.rewards or ()
    ]
    for config in (*recipe.rewards, *recipe.guardrails, *branch_rewards):
        if config.undeclared_memory:
            names_by_column[config.column] = config.undeclared_memory
    return [
        f"  The reward {column} declares no {' and no '.join(names)}: its network, if it has one,"
        " is not counted."
        for column, names in names_by_column.items()
    ]


def _describe_model(estimate: Estimate) -> list[str]:
    recipe = estimate.recipe
    sizes = estimate.sizes
    sample = estimate.sample
    trained = f"a LoRA of rank {recipe.policy.rank}" if recipe.policy.train == "lora" else "all"
    # Joint attention: text and image are one sequence, and ``tokens`` counts both.
    text = f"{sample.text_tokens} of text" + (", which are among them" if sample.joint else "")
    lines = [
        f"{recipe.name}: {recipe.model.path or 'the glyph model'} ({recipe.model.family})",
        f"  transformer: {sizes.parameters:,} parameters in {sizes.blocks} blocks of width"
        f" {sizes.width}",
        f"  trained: {estimate.trained:,} ({trained})",
        f"  a sample: latents {_format_shape(sample)}, {sample.tokens} tokens, {text}",
    ]
    if estimate.evaluated != sample:
        evaluated = estimate.evaluated
        lines.append(
            f"  a sample of an evaluation: latents {_format_shape(evaluated)},"
            f" {evaluated.tokens} tokens"
        )
    processes = f"{estimate.processes}"
    if estimate.nodes > 1:
        replicas = ", with a replica of the model each" if estimate.sharding == "hybrid" else ""
        processes += f" on each of {estimate.nodes} nodes{replicas}"
    if estimate.sharding == "replicated":
        processes += ", with a replica of the model each"
    if estimate.context_parallel > 1:
        processes += f", {estimate.context_parallel} of them for each sample"
    return [
        *lines,
        f"  evaluations of the network for a denoising step: {sample.passes}",
        f"  processes in an offline or a colocated stage: {processes}",
    ]


def _format_shape(sample: SampleSize) -> str:
    return " x ".join(map(str, sample.latent_shape))


def _describe_memory(estimate: Estimate) -> list[str]:
    lines = [
        "GiB of a process, at most",
        *format_table(
            ["", "weights", "optimiser", "copies", "activations", "samples", "others", "total"],
            [[name, *_format_memory_row(memory)] for name, memory in estimate.memory.items()],
        ),
        f"  Beside it, in main memory: {estimate.main_memory / GIB:.1f} GiB of text encoders and"
        f" VAE, and {estimate.prompt / 2**20:.2f} MiB for each different prompt.",
        f"  On the disk of its machine: {estimate.embeddings / GIB:.3g} GiB, the encoded prompts of"
        " a stage or an evaluation, if all of them differ, and of at most"
        f" {2 * PROMPTS_PER_WINDOW:,} at a time, besides those of a step that a curriculum chooses"
        " late.",
    ]
    encoding = estimate.memory["text encoding"]
    # As ``ebbflow.models.residency`` does: the encoders take the place of the weights.
    least = max(encoding.peak_bytes - encoding.weights, encoding.weights + encoding.copies)
    if encoding.others and least < encoding.peak_bytes:
        lines.append(
            f"  Text encoding takes {least / GIB:.2f} GiB where it does not fit: the weights wait"
            " in main memory meanwhile, unless they are sharded."
        )
    offloaded = max(memory.offloaded for memory in estimate.memory.values())
    if offloaded:
        lines.append(
            f"  With model.cpu_offload, {offloaded / GIB:.2f} GiB more in each of the largest"
            " processes."
        )
    return [*lines, *_describe_phases(estimate), *_describe_undeclared_memory(estimate.recipe)]


def _describe_phases(estimate: Estimate) -> list[str]:
    rows = []
    for name, memory in estimate.memory.items():
        parts = (memory.loading, memory.encoding, memory.main_memory_bytes)
        if any(parts):
            rows.append([name, *(f"{part / GIB:.2f}" for part in parts)])
    return [
        "GiB of a process with a GPU: on the GPU while it loads the model and encodes prompts, and"
        " in main memory",
        *format_table(["", "loading", "encoding", "main memory"], rows),
        "  Processes on one machine each have their main memory: trajectories, pictures, what is"
        " offloaded, and text encoders and VAE.",
    ]


def _describe_work(estimate: Estimate) -> list[str]:
    recipe = estimate.recipe
    rows = []
    for label, work in estimate.work.items():
        counts = (work.samples, work.denoising, work.training, work.comparing)
        rows.append([label, *(f"{count:,}" for count in counts)])
    lines = [
        "evaluations of the network for one sample each, at most, in every one of rounds:"
        f" {recipe.rounds}",
        *format_table(["", "samples", "denoising", "training", "comparing"], rows),
        f"  {estimate.evaluation:,} in the evaluation after each stage, of the base model and of"
        " the champion.",
    ]
    if recipe.rounds > 1 and any(stage.only_from_base for stage in recipe.stages):
        lines.append("  Stages with only_from_base are trained in the first round alone.")
    # What the numbers above leave out.
    if any(stage.source_files for stage in recipe.stages):
        lines.append("  Pairs and data from files are not counted.")
    if recipe.branches:
        lines.append("  Branches are evaluated on their own prompts, and counted as if on all.")
    if any(stage.kind == "custom" for stage in recipe.stages):
        lines.append("  Stages of your own kinds are not counted.")
    return lines


def _describe_storage(estimate: Estimate) -> list[str]:
    total = sum(estimate.stored.values())
    rows = [[kind, f"{size / GIB:.3g}"] for kind, size in estimate.stored.items()]
    return [
        f"GiB that a whole run keeps, at most: {total / GIB:.3g}",
        *format_table(["", "GiB"], rows),
    ]


def _describe_hours(estimate: Estimate, tflops: float) -> list[str]:
    parts = estimate_hours(estimate, tflops)
    # ``Hours`` adds up wall-clock and GPU hours alike: stages run one after the other.
    parts["the run"] = sum(parts.values(), start=Hours(0, 0))
    lines = [
        f"hours of the network at {tflops:g} TFLOP/s for each GPU, in all rounds",
        *format_table(
            ["", "hours", "GPU-hours"],
            [[name, f"{part.wall:.2g}", f"{part.gpu:.2g}"] for name, part in parts.items()],
        ),
        "  Text encoders, VAE, rewards, downloads and the start of pods are not counted.",
    ]
    if estimate.recipe.branches:
        lines.append(
            "  Hours of branches are added up; with enough machines they run side by side."
        )
    return lines


def _format_memory_row(memory: Memory) -> list[str]:
    parts = (
        memory.weights,
        memory.optimizer,
        memory.copies,
        memory.activations,
        memory.samples,
        memory.others,
        memory.peak_bytes,
    )
    return [f"{part / GIB:.2f}" for part in parts]


def format_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return aligned lines: names to the left, numbers to the right."""
    # Headings count, too: most are wider than their numbers.
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for name, *numbers in (header, *rows):
        cells = [name.ljust(widths[0])]
        cells += [number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  " + "  ".join(cells))
    return lines
