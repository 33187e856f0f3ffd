"""Hours from throughput, and a command that answers at once."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.tiny_models import build_tiny
from ebbflow.cli import main
from ebbflow.data.prompts import Prompt
from ebbflow.estimate.hours import count_forward_operations, estimate_hours
from ebbflow.estimate.measured import cache_folder, check_once, measure_cached
from ebbflow.estimate.run import estimate_recipe
from ebbflow.estimate.text import describe_estimate
from ebbflow.models import ModelError, load_model, predict
from ebbflow.models.sizes import measure_model
from ebbflow.recipe.model import ModelConfig

RECIPES = Path(__file__).parents[2] / "workflows" / "recipes"


@pytest.mark.parametrize(
    "family", ["sd3", "flux", "wan"]
)  # whose prompts are padded to the tokens that are counted
def test_a_forward_pass_takes_what_torch_counts(tiny_recipe, family):
    recipe = tiny_recipe(family, stages=[{"kind": "online"}])
    measured_sizes, sample = measure_model(recipe.model)
    model = load_model(Path(recipe.model.path), recipe.model)
    conditioning = model.encode_prompts([Prompt(0, "A", "", "A", "here", "train", "{}")])
    # Torch counts no fused attention of a CPU.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        predict(model, torch.zeros(1, *model.latent_shape), torch.ones(1), conditioning)
    assert sample.passes * count_forward_operations(measured_sizes, sample) == pytest.approx(
        counter.get_total_flops(), rel=0.15
    )


def test_hours_follow_the_throughput_and_the_machines(tiny_recipe):
    def of(tflops=1.0, **keys):
        made = estimate_recipe(tiny_recipe("sd3", **keys), processes=4)
        return estimate_hours(made, tflops), made

    stages = [{"kind": "online"}, {"kind": "offline", "shards": 2}]
    found, made = of(stages=stages, rounds=3)
    forward = count_forward_operations(made.sizes, made.sample) / 1e12 / 3600
    online = made.work["1.1 online"]
    offline = made.work["1.2 offline"]
    alone = forward * (online.denoising + 3 * online.training + online.comparing)
    assert found["1.1 online"].wall == found["1.1 online"].gpu == pytest.approx(3 * alone)
    shared = forward * (offline.denoising / 2 + (3 * offline.training + offline.comparing) / 4)
    assert found["1.2 offline"].wall == pytest.approx(3 * shared)
    assert found["evaluations"].gpu == pytest.approx(forward * made.evaluation * (2 + 3 * 2))
    twice, _ = of(2.0, stages=stages, rounds=3)
    assert twice["1.1 online"].gpu == pytest.approx(found["1.1 online"].gpu / 2)


def test_a_stage_from_the_base_model_is_counted_in_the_first_round_alone(tiny_recipe):
    first = {"kind": "offline", "shards": 2}
    stages = [first | {"only_from_base": True}, {"kind": "online"}]
    once = estimate_recipe(tiny_recipe("sd3", stages=stages, rounds=3))
    always = estimate_recipe(tiny_recipe("sd3", stages=[first, *stages[1:]], rounds=3))
    # The base model, the champion, the first stage, and the other one in three rounds.
    assert once.evaluations == 2 + 1 + 3
    assert 3 * once.stored["rollout shards"] == always.stored["rollout shards"] > 0
    assert once.stored["policies"] < always.stored["policies"]
    hours = [estimate_hours(estimate, 1.0) for estimate in (once, always)]
    assert 3 * hours[0]["1.1 offline"].gpu == pytest.approx(hours[1]["1.1 offline"].gpu)
    assert hours[0]["1.2 online"] == hours[1]["1.2 online"]
    assert "only_from_base are trained in the first round" in describe_estimate(once)


def test_an_update_that_reuses_the_rollout_s_forward_passes_takes_two_thirds(tiny_recipe):
    def of(**keys):
        made = estimate_recipe(
            tiny_recipe("sd3", stages=[{"kind": "online", "updates_per_step": 1, **keys}])
        )
        return estimate_hours(made, 1.0)["1.1 online"].gpu, made

    (plain, made), (reused, _) = of(), of(reuse_rollout_forward=True)
    forward = count_forward_operations(made.sizes, made.sample) / 1e12 / 3600
    assert plain - reused == pytest.approx(forward * made.work["1.1 online"].training)


def test_workers_of_a_synchronous_stage_wait_for_each_other(tiny_recipe):
    def wall(mode):
        resources = {"training": {"count": 1}, "rollout": {"count": 2}, "reward": {"count": 1}}
        stage = {"kind": "online", "placement": "ray", "mode": mode, "resources": resources}
        made = estimate_recipe(tiny_recipe("sd3", stages=[stage]))
        found = estimate_hours(made, 1.0)["1.1 online"]
        work = made.work["1.1 online"]
        assert found.gpu == pytest.approx(3 * found.wall)
        forward = count_forward_operations(made.sizes, made.sample) / 1e12 / 3600
        return (
            found.wall,
            work.denoising / 2 * forward,
            (3 * work.training + work.comparing) * forward,
        )

    synchronous, rolling, training = wall("sync")
    assert synchronous == pytest.approx(rolling + training)
    overlapping, rolling, training = wall("one_step_off")
    assert overlapping == pytest.approx(max(rolling, training))


def test_the_command_prints_hours_where_it_is_told_the_throughput():
    def shown(*options):
        result = CliRunner().invoke(main, ["estimate", str(RECIPES / "glyph.yaml"), *options])
        assert result.exit_code == 0, result.output
        return result.output

    assert "--tflops" in shown()
    assert re.search(r"^  the run +[\d.e-]+ +[\d.e-]+$", shown("--tflops", "0.1"), re.MULTILINE)


def test_sizes_are_measured_once_for_a_model_as_it_is(tiny_recipe, monkeypatch):
    model = tiny_recipe("sd3").model
    calls = []
    monkeypatch.setattr(
        "ebbflow.models.sizes.measure_model",
        lambda config: calls.append(config) or measure_model(config),
    )
    assert measure_cached(model) == measure_cached(model) == measure_model(model)
    assert len(calls) == 1
    (kept,) = cache_folder().iterdir()
    kept.write_text("{")
    assert measure_cached(model) == measure_model(model)
    assert len(calls) == 2
    measure_cached(model.model_copy(update={"max_tokens": 7}))
    assert len(calls) == 3


def test_a_check_that_passed_is_made_again_only_of_another_model(tiny_recipe, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(tiny_recipe("sd3").model.path, folder)
    model = ModelConfig(family="sd3", path=str(folder), height=64, width=64)
    made = []

    def check_once_more(name, checked=model):
        check_once(checked, name, lambda: made.append(name))
        return len(made)

    assert [check_once_more("size"), check_once_more("size")] == [1, 1]
    assert check_once_more("folder") == 2
    assert check_once_more("size", model.model_copy(update={"height": 32})) == 3
    (folder / "model_index.json").write_text("{}")
    assert check_once_more("size") == 4


def test_a_check_that_failed_is_made_again(tiny_recipe):
    model = tiny_recipe("sd3").model

    def refuse():
        raise ModelError("too large")

    for _ in range(2):
        with pytest.raises(ModelError, match="too large"):
            check_once(model, "size", refuse)


@pytest.mark.parametrize("name", ["estimate", "check"])
def test_a_command_needs_no_torch_the_second_time(tiny_recipe, tmp_path, monkeypatch, name):
    recipe = RECIPES / "glyph.yaml"
    if name == "check":
        settings = tiny_recipe("wan").model_dump(mode="json", exclude_unset=True)
        # Wan2.2 generates no such size, so the record of the family cannot say that Wan2.1 does.
        build_tiny("wan21", tmp_path / "wan21")
        settings["model"] |= {"path": str(tmp_path / "wan21"), "height": 48, "width": 48}
        prompts = {"source": "ebbflow:datasets/signs/prompts.txt", "validation": 4, "held_out": 64}
        rewards = {"prompts": prompts, "rewards": ["jpeg_compressibility"], "guardrails": []}
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(settings | rewards | {"output": str(tmp_path)}))
    monkeypatch.setattr(sys, "path", [*sys.path])  # a command adds folders
    assert not cache_folder().exists()
    first = CliRunner().invoke(main, [name, str(recipe)])
    assert first.exit_code == 0, first.output
    assert list(cache_folder().iterdir()), "it was measured, for which torch is needed"
    command = [sys.executable, "-c", NO_TORCH, name, str(recipe)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stderr
    *lines, loaded = second.stdout.splitlines()
    assert lines == first.stdout.splitlines()
    assert loaded == "False"


NO_TORCH = """
import sys
from ebbflow.cli import main
main(sys.argv[1:], standalone_mode=False)
print("torch" in sys.modules)
"""
