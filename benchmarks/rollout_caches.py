"""Time and reward of feature caches in rollouts: ``python -m benchmarks.rollout_caches``.

The glyph model of the package generates the same samples, from the same noise, without a cache and
with each; their OCR scores are compared in pairs. Networks of SD3, FLUX.1 and Wan 2.2, small and
with random weights, show the time and the layers that are skipped alone: how well a cache
approximates depends on the weights. Times are CPU seconds of this process, the median of some turns
in which all settings take part.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from benchmarks.machine import describe_machine
from benchmarks.tiny_models import build_tiny
from ebbflow.data.prepare import prepare_prompt_table
from ebbflow.data.prompts import Prompt, read_prompts, write_prompts
from ebbflow.flow.noise import SampleKeys
from ebbflow.models.base import Model
from ebbflow.models.families import load_adapter
from ebbflow.models.glyph_training.trained import load_trained_glyph
from ebbflow.recipe import Recipe
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import GlyphTrainingConfig, ModelConfig
from ebbflow.recipe.rollout_cache import (
    FeatureCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    TaylorSeerCacheConfig,
)
from ebbflow.rewards.combine import load_scorer
from ebbflow.rollouts.generate import generate_samples
from ebbflow.rollouts.mag_ratios import measure_mag_ratios

RESULTS = Path(__file__).parent / "results" / "rollout_caches.md"
STEPS = 20
SAMPLES = 96
MICRO_BATCH = 48
LAYERS = {
    "sd3": {"num_layers": 12},
    "flux": {"num_layers": 4, "num_single_layers": 8},
    "wan": {"num_layers": 12},
}
"""Blocks of the random networks: as few as leave the layers outside them a small share."""


@dataclass
class Setting:
    """A cache and what was measured with it.

    Attributes:
        seconds: of each turn.
        layers: attention layers computed, as a share of those without a cache.
    """

    label: str
    cache: FeatureCacheConfig | None
    seconds: list[float] = field(default_factory=list)
    layers: float = 1.0
    latents: Tensor = field(default_factory=lambda: torch.empty(0))
    scores: np.ndarray = field(default_factory=lambda: np.empty(0))


def list_settings(ratios: list[float]) -> list[Setting]:
    """List the settings that are compared; the first has no cache."""
    return [
        Setting("none", None),
        *(
            Setting(
                f"first_block, threshold {threshold:g}", FirstBlockCacheConfig(threshold=threshold)
            )
            for threshold in (0.05, 0.1, 0.2)
        ),
        *(
            Setting(f"taylor_seer, interval {interval}", TaylorSeerCacheConfig(interval=interval))
            for interval in (3, 5)
        ),
        *(
            Setting(
                f"mag, threshold {threshold:g}", MagCacheConfig(ratios=ratios, threshold=threshold)
            )
            for threshold in (0.06, 0.24)
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="runs of all (3)")
    parser.add_argument(
        "--write", action="store_true", help="keep the page in benchmarks/results/rollout_caches.md"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tables = {"glyph": measure_glyph(arguments.turns)}
    for family in LAYERS:
        tables[family] = measure_random_network(family, arguments.turns)
    command = shlex.join(["python", "-m", "benchmarks.rollout_caches", *sys.argv[1:]])
    page = format_page(tables, command)
    print(page)
    if arguments.write:
        RESULTS.write_text(page)


def measure_glyph(turns: int) -> list[Setting]:
    """Measure time and OCR score on the trained glyph model."""
    model = load_trained_glyph(GlyphTrainingConfig())
    assert model is not None, "it was trained with the default settings"
    recipe = Recipe.model_validate({})
    table, _ = prepare_prompt_table(recipe)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "prompts.parquet"
        write_prompts(table, file)
        prompts = read_prompts(file, "held_out")
    # Several samples of a prompt where there are fewer prompts: the noise differs.
    prompts = [prompts[number % len(prompts)] for number in range(SAMPLES)]
    settings = measure_settings(model, prompts, MICRO_BATCH, turns)
    scorer = load_scorer(recipe.rewards, ())
    for setting in settings:
        images = model.decode_latents(setting.latents)
        setting.scores = scorer(images, prompts, setting.latents.numpy()).metrics["ocr"]
    return settings


def measure_random_network(family: str, turns: int) -> list[Setting]:
    """Measure time alone, on a network with the layout of a family."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / family
        build_tiny(family, folder)
        config = ModelConfig(family=family, path=str(folder), height=128, width=128, max_tokens=32)
        model: Any = load_adapter(family).load(folder, config, torch.device("cpu"))
    network = model.transformer
    torch.manual_seed(0)
    deeper = type(network).from_config({**network.config, **LAYERS[family]}).eval()
    model.transformer = model.pipeline.transformer = deeper.requires_grad_(requires_grad=False)
    prompts = [
        Prompt(number, f"picture {number}", "", None, "", "train", "{}") for number in range(4)
    ]
    return measure_settings(model, prompts, 4, turns)


def measure_settings(
    model: Model, prompts: list[Prompt], micro_batch: int, turns: int
) -> list[Setting]:
    """Generate a sample of each prompt with every setting, ``turns`` times."""
    conditioning = model.encode_prompts(prompts)
    keys = SampleKeys(0, [prompt.prompt_id for prompt in prompts], list(range(len(prompts))))
    sampler = SamplerConfig(name="ode", steps=STEPS)
    first = slice(0, micro_batch)
    # Of the samples that are compared: what a user would measure once for a model.
    ratios = measure_mag_ratios(
        model, conditioning.select_rows(first), keys.select_samples(first), sampler
    )
    settings = list_settings(ratios)

    def generate(setting: Setting) -> Tensor:
        return generate_samples(
            model, conditioning, keys, sampler, micro_batch=micro_batch, cache=setting.cache
        ).latents

    # Apart from the timed turns, as counting takes time.
    computed = [count_layers(model, partial(generate, setting)) for setting in settings]
    for setting, count in zip(settings, computed, strict=True):
        setting.layers = count / computed[0]
    for turn in tqdm(range(turns), unit="turn"):
        # Other work on the machine slows the last ones as often as the first ones.
        order = settings if turn % 2 == 0 else settings[::-1]
        for setting in order:
            start = time.process_time()
            setting.latents = generate(setting)
            setting.seconds.append(time.process_time() - start)
    return settings


def count_layers(model: Model, run: Callable[[], object]) -> int:
    """Count the calls of attention layers of the network during ``run()``."""
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    handles = [
        module.register_forward_hook(count)
        for name, module in model.transformer.named_modules()
        if name.endswith(".to_q") and isinstance(module, nn.Module)
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def format_page(tables: dict[str, list[Setting]], command: str) -> str:
    """Format the page, given the settings of each network."""
    machine = describe_machine()
    lines = [
        "# Feature caches in rollouts",
        "",
        f"Written by `{command}` on {machine['cpu']}, {machine['cores']} cores, one thread. {STEPS}"
        " steps of the sampler `ode`. Speed-up: CPU seconds without a cache over those with it."
        " Layers: attention layers that were computed. Distance: of the latents from those without"
        " a cache, relative to their norm.",
        "",
        f"## The trained glyph model, {SAMPLES} samples, micro-batches of {MICRO_BATCH}",
        "",
        "OCR score: the mean, and the mean difference from the same samples without a cache with"
        " its standard error. The network has three blocks, of which `first_block` can skip one.",
        "",
        "| cache | speed-up | layers | distance | OCR score | difference |",
        "|---|---|---|---|---|---|",
    ]
    base = tables["glyph"][0]
    for setting in tables["glyph"]:
        difference = setting.scores - base.scores
        error = difference.std(ddof=1) / len(difference) ** 0.5
        lines.append(
            f"{_format_speed(setting, base)} {setting.scores.mean():.3f} |"
            f" {difference.mean():+.3f} ± {error:.3f} |"
        )
    for family, layers in LAYERS.items():
        shape = ", ".join(f"`{key}: {number}`" for key, number in layers.items())
        lines += [
            "",
            f"## Layout of `{family}`, {shape}, random weights",
            "",
            "| cache | speed-up | layers | distance |",
            "|---|---|---|---|",
        ]
        lines += [_format_speed(setting, tables[family][0]) for setting in tables[family]]
    return "\n".join(lines) + "\n"


def _format_speed(setting: Setting, base: Setting) -> str:
    speed = median(base.seconds) / median(setting.seconds)
    distance = (setting.latents - base.latents).norm() / base.latents.norm()
    return f"| {setting.label} | {speed:.2f} | {setting.layers:.0%} | {distance:.3f} |"


if __name__ == "__main__":
    main()
