"""Steps of other libraries' loops: a stub of a checkout is driven as the real one, and both sides
do the same work.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import peer_loops, peers, speed_report
from benchmarks.gpu_sides import generate_random_prompts

# What the two training scripts have of their own, in the fewest lines; the package is imported as
# theirs, and the command line is of packages that need not be there.
PACKAGE = """
import torch


def pipeline_with_logprob(
    pipeline, prompt_embeds, pooled_prompt_embeds, negative_prompt_embeds, num_inference_steps,
    guidance_scale, **arguments,
):
    pipeline.scheduler.set_timesteps(num_inference_steps)
    rows = len(prompt_embeds)
    copies = 2 if guidance_scale > 1 else 1
    latents = [torch.randn(rows, 4, 8, 8)]
    log_probs = []
    for timestep in pipeline.scheduler.timesteps:
        velocity = pipeline.transformer(
            hidden_states=torch.cat([latents[-1]] * copies),
            timestep=timestep.expand(copies * rows),
            encoder_hidden_states=torch.cat([prompt_embeds] * copies),
            pooled_projections=torch.cat([pooled_prompt_embeds] * copies),
            return_dict=False,
        )[0]
        latents.append(latents[-1] - 0.1 * velocity[:rows])
        log_probs.append(None if arguments.get("deterministic") else torch.zeros(rows))
    return pipeline.vae.decode(latents[-1], return_dict=False)[0], latents, log_probs
"""
SCRIPT = """
import logging

from absl import app, flags
from ml_collections import config_flags
import torch
import wandb

from flow_grpo.sampling import pipeline_with_logprob

logging.basicConfig(level=logging.DEBUG)
config_flags.DEFINE_config_file("config", "config/base.py", "Training configuration.")


class PerPromptStatTracker:
    def __init__(self, global_std):
        assert global_std

    def update(self, prompts, rewards):
        assert len(prompts) == len(rewards)
        return rewards - rewards.mean(axis=0)

    def clear(self):
        pass


def return_decay(step, kind):
    return 0.001 * step


def compute_log_prob(transformer, pipeline, sample, j, embeds, pooled_embeds, config):
    velocity = transformer(
        hidden_states=torch.cat([sample["latents"][:, j]] * 2),
        timestep=torch.cat([sample["timesteps"][:, j]] * 2),
        encoder_hidden_states=embeds,
        pooled_projections=pooled_embeds,
        return_dict=False,
    )[0].chunk(2)[1]
    step = sample["next_latents"][:, j] - sample["latents"][:, j]
    return None, -((step + 0.1 * velocity) ** 2).mean(dim=(1, 2, 3)), None, None
"""
SIZE = replace(peer_loops.PEER_SIZES["tiny SD3"], prompts=2, group_size=2, batch=2)


@pytest.fixture
def checkouts(tmp_path: Path) -> dict[str, Path]:
    """A stub of a checkout of each library."""
    for name, script in peer_loops.SCRIPTS.items():
        path = tmp_path / name / script
        package = tmp_path / name / "flow_grpo" / "sampling.py"
        for file, text in ((path, SCRIPT), (package, PACKAGE)):
            file.parent.mkdir(parents=True)
            file.write_text(text)
    return {name: tmp_path / name for name in peer_loops.SCRIPTS}


def count_rows(call: Callable[[], object]) -> tuple[int, int]:
    """Rows through any SD3 network in a call: of all passes, and of those with gradient."""
    rows = []

    def note(module: torch.nn.Module, arguments: object, keys: dict, output: object) -> None:
        if type(module).__name__ == "SD3Transformer2DModel":
            rows.append((len(keys["hidden_states"]), torch.is_grad_enabled()))

    hook = torch.nn.modules.module.register_module_forward_hook(note, with_kwargs=True)
    try:
        call()
    finally:
        # It is one of all modules of this process.
        hook.remove()
    return sum(count for count, _ in rows), sum(count for count, trained in rows if trained)


# Our first updates measure the drift at every 19th of 36 rows, the next odd number after 18 passes.
WATCHED = 2 * 2


@pytest.mark.parametrize(
    ("name", "rows", "with_gradient", "watched"),
    [
        # Guidance doubles the rows: 10 steps of a rollout and 9 trained ones.
        ("flow_grpo", 4 * 2 * (10 + 9), 4 * 2 * 9, WATCHED),
        # Without guidance; each of 9 noise levels has the old policy, the base and the policy.
        ("diffusion_nft", 4 * (10 + 9 * 3), 4 * 9, 0),
    ],
)
def test_a_step_of_a_peer_and_ours_predict_as_many_rows(
    checkouts, name, rows, with_gradient, watched
):
    guidance, build_theirs, build_ours = peers.BUILDERS[name]
    prompts = generate_random_prompts(
        SIZE.network, SIZE.images, guidance, torch.device("cpu"), torch.float32
    )
    theirs = build_theirs(peer_loops.load_script(name, checkouts[name]), SIZE, prompts)
    assert count_rows(theirs) == (rows, with_gradient)
    ours = build_ours(SIZE, prompts, best=False)
    assert count_rows(ours) == (rows + watched, with_gradient)


def test_our_best_settings_for_flow_grpo_train_on_the_passes_of_the_rollout(monkeypatch):
    compiled = []
    monkeypatch.setattr(peers, "compile_blocks", compiled.append)
    guidance, _, build_ours = peers.BUILDERS["flow_grpo"]
    prompts = generate_random_prompts(
        SIZE.network, SIZE.images, guidance, torch.device("cpu"), torch.float32
    )
    ours = build_ours(SIZE, prompts, best=True)
    assert len(compiled) == 1
    # The trained steps of the rollout have a gradient and are not repeated; its last step has none,
    # and neither have the negative prompts in any step.
    assert count_rows(ours) == (4 * 2 * 10 + WATCHED, 4 * 9)


def test_a_step_of_a_peer_trains_its_adapters_and_no_other_weights(checkouts, monkeypatch):
    pipelines = []
    build = peer_loops.build_peer_pipeline
    monkeypatch.setattr(
        peer_loops,
        "build_peer_pipeline",
        lambda size: pipelines.append(build(size)) or pipelines[-1],
    )
    for name, (guidance, build_theirs, _) in peers.BUILDERS.items():
        prompts = generate_random_prompts(
            SIZE.network, SIZE.images, guidance, torch.device("cpu"), torch.float32
        )
        theirs = build_theirs(peer_loops.load_script(name, checkouts[name]), SIZE, prompts)
        network = pipelines[-1].transformer
        before = {key: value.clone() for key, value in network.state_dict().items()}
        theirs()
        after = network.state_dict()
        changed = {key for key in before if not torch.equal(before[key], after[key])}
        assert any("lora_B.default" in key for key in changed), name
        assert all("lora_" in key for key in changed), name


def test_an_import_of_a_checkout_leaves_nothing_behind(checkouts):
    modules = set(sys.modules)
    path = list(sys.path)
    scripts = [peer_loops.load_script(name, checkout) for name, checkout in checkouts.items()]
    assert scripts[0].pipeline_with_logprob is not scripts[1].pipeline_with_logprob
    left = {name.partition(".")[0] for name in set(sys.modules) - modules}
    assert not left & {"flow_grpo", *peer_loops.UNUSED}
    assert sys.path == path


@pytest.mark.parametrize(
    ("text", "message"),
    [("trl=PATH", "one of the names flow_grpo, diffusion_nft"), ("flow_grpo=", "has no scripts/")],
)
def test_a_wrong_checkout_is_named(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        peer_loops.parse_checkout(text)


def test_the_part_names_commits_and_rows(checkouts):
    case = speed_report.Case("a step of flow_grpo ÷ ours", "≥ 2", print, print)
    times = {case: speed_report.MedianTimes(1.5, 3.0, 2.0)}
    part = peers.format_peer_part(times, checkouts, repeat=5)
    assert re.search("at commit [0-9a-z-]+, with flow_grpo at an unknown commit", part)
    assert "| a step of flow_grpo ÷ ours | 1.500 | ≥ 2 | 3.0000 | 2.0000 |" in part
    page = speed_report.replace_part("# Speed\n\ntable\n\n## Free network\n\nrows\n", part)
    assert page.index("## Free network") < page.index(peers.HEADING)
    assert speed_report.replace_part(page, part) == page
