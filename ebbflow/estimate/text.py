"""An estimate as text for people."""

from __future__ import annotations

from ebbflow.estimate.hours import Hours, estimate_hours
from ebbflow.estimate.memory import Memory
from ebbflow.estimate.run import Estimate
from ebbflow.recipe import Recipe

GIB = 2**30


def describe_estimate(made: Estimate, tflops: float | None = None) -> str:
    """The estimate in tables; the hours too, where it is said what a GPU sustains
    (``hours.estimate_hours``).
    """
    sizes = made.sizes
    sample = made.sample
    recipe = made.recipe
    share = f"a LoRA of rank {recipe.policy.rank}" if recipe.policy.train == "lora" else "all"
    text = f"{sample.text_tokens} of text" + (", which are among them" if sample.joint else "")
    kept = sum(made.stored.values())
    replicas = ", with a replica of the model each" if made.hybrid else ""
    nodes = f" on each of {made.nodes} nodes{replicas}" if made.nodes > 1 else ""
    sharing = (
        f", {made.context_parallel} of them for each sample" if made.context_parallel > 1 else ""
    )
    offloaded = max(memory.offloaded for memory in made.memory.values())
    lines = [
        f"{recipe.name}: {recipe.model.path or 'the glyph model'} ({recipe.model.family})",
        (
            f"  transformer: {sizes.parameters:,} parameters in {sizes.blocks} blocks of width"
            f" {sizes.width}"
        ),
        f"  trained: {made.trained:,} ({share})",
        (
            f"  a sample: latents {' x '.join(map(str, sample.latent_shape))}, {sample.tokens}"
            f" tokens, {text}"
        ),
        *[_describe_evaluated_sample(made)] * (made.evaluated != sample),
        f"  evaluations of the network for a denoising step: {sample.passes}",
        f"  processes in the training of an offline stage: {made.processes}{nodes}{sharing}",
        "",
        "GiB of a process, at most",
        *format_table(
            ["", "weights", "optimiser", "copies", "activations", "samples", "others", "total"],
            [[name, *_format_memory_row(memory)] for name, memory in made.memory.items()],
        ),
        (
            f"  Beside it, in main memory: {made.main_memory / GIB:.1f} GiB of text encoders and"
            f" VAE, and {made.prompt / 2**20:.2f} MiB for each different prompt."
        ),
        *[
            f"  With model.cpu_offload, {offloaded / GIB:.2f} GiB more in each of the largest"
            " processes."
        ]
        * bool(offloaded),
        *_describe_undeclared_memory(recipe),
        "",
        (
            "evaluations of the network for one sample each, at most, in every one of rounds:"
            f" {recipe.rounds}"
        ),
        *format_table(
            ["", "samples", "denoising", "training", "comparing"],
            [
                [
                    label,
                    *(
                        f"{value:,}"
                        for value in (done.samples, done.denoising, done.training, done.comparing)
                    ),
                ]
                for label, done in made.work.items()
            ],
        ),
        (
            f"  {made.evaluation:,} in the evaluation after each stage, of the base model and of"
            " the champion."
        ),
        *["  Pairs from a file are not counted."]
        * any(stage.kind == "offline" and bool(stage.pairs) for stage in recipe.stages),
        *["  Branches are evaluated on their own prompts, and counted as if on all."]
        * bool(recipe.branches),
        *["  Stages of your own kinds are not counted."]
        * any(stage.kind == "custom" for stage in recipe.stages),
        "",
        f"GiB that a whole run keeps, at most: {kept / GIB:.3g}",
        *format_table(
            ["", "GiB"], [[kind, f"{size / GIB:.3g}"] for kind, size in made.stored.items()]
        ),
        *(
            _describe_hours(made, tflops)
            if tflops
            else ["", "For the hours, say what a GPU sustains: --tflops"]
        ),
    ]
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


def _describe_evaluated_sample(made: Estimate) -> str:
    sample = made.evaluated
    return (
        f"  a sample of an evaluation: latents {' x '.join(map(str, sample.latent_shape))},"
        f" {sample.tokens} tokens"
    )


def _describe_hours(made: Estimate, tflops: float) -> list[str]:
    parts = estimate_hours(made, tflops)
    parts["the run"] = sum(parts.values(), start=Hours(0, 0))
    return [
        "",
        f"hours of the network at {tflops:g} TFLOP/s for each GPU, in all rounds",
        *format_table(
            ["", "hours", "GPU-hours"],
            [[name, f"{part.wall:.2g}", f"{part.gpu:.2g}"] for name, part in parts.items()],
        ),
        "  Text encoders, VAE, rewards, downloads and the start of pods are not counted.",
        *["  Hours of branches are added up; with enough machines they run side by side."]
        * bool(made.recipe.branches),
    ]


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
    """Aligned lines: names to the left, numbers to the right."""
    wide = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = []
    for name, *numbers in (header, *rows):
        cells = [
            name.ljust(wide[0]),
            *(number.rjust(width) for number, width in zip(numbers, wide[1:], strict=True)),
        ]
        lines.append("  " + "  ".join(cells))
    return lines
