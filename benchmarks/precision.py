"""How far the first ratio is from 1, for each model family and precision: ``python -m
benchmarks.precision``.

Before any update the policy that trains is the one that rolled out, so the log-probs of its own
rollout must come out the same. What is left is arithmetic: none where rollout and training see the
same micro-batches, rounding where they do not. Tiny models with random weights
(``benchmarks.tiny_models``); a large one on a GPU is measured by ``python -m benchmarks.gpu``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.machine import describe_machine
from benchmarks.tiny_models import build_tiny
from ebbflow.data.prompts import Prompt
from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.sampler import compute_log_prob, compute_transition
from ebbflow.flow.windows import Plan, Trajectory
from ebbflow.models import Conditioning, Model, load_model
from ebbflow.models.base import DTYPES, predict
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import ModelConfig, Precision
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.policy import Policy

# One with joint attention and pooled prompts, one without pooling, one whose guidance is an input
# of the network, and one of videos.
FAMILIES = {"sd3": 4.5, "qwen_image": 4.0, "flux": 3.5, "wan": 5.0}
"""With the guidance of each family's pipeline."""
TEXTS = [
    'a sign that says "OPEN"',
    "two cats on a sofa",
    "a red bicycle",
    'the word "TIDE" in the sand',
]
SAMPLES = 8
"""Twice the rollout's micro-batch: rows of a second one must agree as well."""
STEPS = 6
TRAINED = (0, 1, 2)
ROLLOUT_MICRO_BATCH = 4


def main() -> None:
    """Measure and print, or write to ``benchmarks/results/precision.md``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--write",
        action="store_true",
        help="write benchmarks/results/precision.md instead of printing",
    )
    written = parser.parse_args().write
    # with several threads a sum may be split in another way, which would be counted as an error
    torch.set_num_threads(1)
    cases: list[tuple[str, Precision]] = [
        (family, precision) for family in FAMILIES for precision in DTYPES
    ]
    with tempfile.TemporaryDirectory() as folder:
        for family in FAMILIES:
            build_tiny(family, Path(folder) / family)
        rows = [
            format_row(Path(folder) / family, family, precision)
            for family, precision in tqdm(cases, unit="case", file=sys.stderr)
        ]
    on = describe_machine()
    measured = (
        f"`python -m benchmarks.precision --write` on {on['cores']} cores ({on['cpu']}), Python"
        f" {on['python']}."
    )
    report = "\n".join([HEADER, *rows, "", measured, ""])
    if written:
        Path(__file__).with_name("results").joinpath("precision.md").write_text(report)
    else:
        print(report)


HEADER = """# How far the first ratio is from 1

Largest |log-prob in training - log-prob in the rollout| over the rows of the first step;
log-probs are means over the latent's elements, as in the loss, whose clip ranges are 1e-3 to
1e-6. Rollouts in micro-batches of 4.

| family | precision | training in micro-batches of 4 | of 2 |
|---|---|---|---|"""


def format_row(folder: Path, family: str, precision: Precision) -> str:
    """A line of the table."""
    config = ModelConfig.model_validate(
        {
            "family": family,
            "path": str(folder),
            "height": 64,
            "width": 64,
            "guidance": FAMILIES[family],
            "precision": precision,
        }
    )
    model = load_model(folder, config)
    # as a stage has it: adapters in float32 on a network of the precision
    Policy(model, PolicyConfig(train="lora"), seed=0)
    equal, smaller = measure_ratio_errors(model, (ROLLOUT_MICRO_BATCH, ROLLOUT_MICRO_BATCH // 2))
    return f"| `{family}` | {precision} | {equal:.1e} | {smaller:.1e} |"


@torch.no_grad()
def measure_ratio_errors(model: Model, micro_batches: tuple[int, ...]) -> list[float]:
    """The largest |log-prob - log-prob of the rollout| when training goes through the samples in
    micro-batches of these sizes.
    """
    # texts of different lengths, each twice
    prompts = [
        Prompt(index % len(TEXTS), TEXTS[index % len(TEXTS)], "", None, "", "", "{}")
        for index in range(SAMPLES)
    ]
    keys = SampleKeys(0, [p.prompt_id for p in prompts], list(range(SAMPLES)))
    sampler = SamplerConfig(name="flow_sde", steps=STEPS)
    conditioning = model.encode_prompts(prompts)
    rollouts = generate_samples(
        model, conditioning, keys, sampler, Plan(TRAINED, TRAINED), ROLLOUT_MICRO_BATCH
    )
    assert rollouts.trajectory
    return [
        max(_largest_errors(model, rollouts.trajectory, conditioning, sampler, size))
        for size in micro_batches
    ]


def _largest_errors(
    model: Model,
    rolled_out: Trajectory,
    conditioning: Conditioning,
    sampler: SamplerConfig,
    size: int,
) -> Iterator[float]:
    """Yield the largest error of each denoising step and micro-batch."""
    for index, step in enumerate(rolled_out.steps.tolist()):
        for start in range(0, SAMPLES, size):
            rows = slice(start, start + size)
            # latents [SAMPLES, trained steps, *latent_shape], log_probs [SAMPLES, trained steps]
            latents = rolled_out.latents[rows, index]
            sigma = rolled_out.sigmas[step].expand(size)
            # exactly what an update computes, on the recorded latents
            velocity = predict(model, latents, sigma, conditioning.select_rows(rows))
            move = compute_transition(
                "flow_sde", latents, velocity, rolled_out.sigmas, step, sampler.eta
            )
            again = compute_log_prob(move, rolled_out.next_latents[rows, index], model.latent_shape)
            yield float((again - rolled_out.log_probs[rows, index]).abs().max())


if __name__ == "__main__":
    main()
