"""The GPU benchmark at tiny size on the CPU: what it counts, that both sides do the same work, and
what it reports.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from benchmarks import gpu
from benchmarks.gpu_sides import (
    SIZES,
    build_random_model,
    build_sides,
    generate_random_prompts,
    predict_plainly,
)
from ebbflow.models.base import predict

CPU = torch.device("cpu")
TINY = SIZES["tiny"]
PHASES = ["rollout"] * 4 + ["rollout, images", "rollout, LoRA"] + ["update, LoRA"] * 2


@pytest.fixture
def bench():
    torch.manual_seed(0)
    return build_sides(TINY, CPU, "float32")


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def results(request) -> dict[str, Any]:
    return {"command": "the command", "size": "tiny"} | gpu.run_benchmark(
        replace(TINY, matrix=64), CPU, request.param, repeat=1
    )


def test_a_linear_layer_counts_two_flops_per_weight_and_row():
    layer = nn.Linear(8, 16)
    inputs = torch.randn(4, 8, requires_grad=True)
    assert gpu.count_flops_of_call(lambda: layer(inputs)) == 2 * 4 * 8 * 16
    # Backward there is one such product for the inputs and one for the weights.
    assert gpu.count_flops_of_call(lambda: layer(inputs).sum().backward()) == 3 * 2 * 4 * 8 * 16


def test_attention_counts_its_two_products_of_queries_with_keys_and_weights_with_values():
    query = torch.randn(1, 2, 5, 8)
    key = torch.randn(1, 2, 7, 8)
    attention = nn.functional.scaled_dot_product_attention
    assert gpu.count_flops_of_call(lambda: attention(query, key, key)) == 2 * (2 * 2 * 5 * 7 * 8)


def test_the_count_without_data_is_that_of_the_network(bench):
    model = bench.model
    prompts = generate_random_prompts(TINY, 1, 1.0, CPU, torch.float32)
    found = gpu.count_flops_of_call(
        lambda: model.predict_velocity(bench.noise[:1], torch.tensor([0.5]), prompts)
    )
    assert gpu.count_flops(TINY).forward == found


def test_the_medium_size_is_that_of_the_published_model():
    transformer = build_random_model(SIZES["medium"], torch.device("meta"), "bfloat16").transformer
    assert f"{sum(value.numel() for value in transformer.state_dict().values()):.2g}" == "2.5e+09"


@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_the_plain_training_loop_evaluates_the_same_network(bench, guidance):
    prompts = generate_random_prompts(TINY, len(bench.keys), guidance, CPU, torch.float32)
    sigma = torch.linspace(0.2, 0.9, len(bench.keys))
    ours = predict(bench.model, bench.noise, sigma, prompts)
    torch.testing.assert_close(predict_plainly(bench, bench.noise, sigma, prompts), ours)


def test_nothing_is_timed_unless_both_sides_draw_the_same_latents(bench):
    assert gpu.check_same_latents(bench) < 1e-5
    bench.pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    with pytest.raises(SystemExit, match="differ by"):
        gpu.check_same_latents(bench)


def test_the_ratio_compares_speeds_and_the_median_counts():
    case = gpu.Case(
        "update", 1.0, 2, images=6, loss_rows=18, flops=300, ours=lambda: None, peer=lambda: None
    )
    found = gpu.summarize_speed(case, peak=1000.0, calls=[(3.0, 5), (1.0, 7), (100.0, 6)])
    assert (found["seconds"], found["images_per_second"], found["rows_per_second"]) == (
        3.0,
        2.0,
        6.0,
    )
    assert (found["flops_per_second"], found["share_of_peak"], found["peak_memory"]) == (
        100.0,
        0.1,
        7,
    )


def test_every_phase_is_measured_on_both_sides(results):
    assert [row["phase"] for row in results["measured"]] == PHASES
    for row in results["measured"]:
        ours = row["ours"]
        peer = row["peer"]
        assert len(ours["all_seconds"]) == len(peer["all_seconds"]) == 1
        assert row["ratio"] == pytest.approx(peer["seconds"] / ours["seconds"])
        assert row["ratio"] > 0
        assert ours["share_of_peak"] == pytest.approx(
            row["flops"] / ours["seconds"] / results["peak_flops_per_second"]
        )
        assert ours["peak_memory"] is peer["peak_memory"] is None  # nobody counts them on a CPU


def test_the_work_grows_with_guidance_images_and_training(results):
    flops = {
        (row["phase"], row["guidance"], row["rows_per_pass"]): row["flops"]
        for row in results["measured"]
    }
    counted = results["flops"]
    images = 4
    steps = results["steps"]
    assert (
        flops["rollout", 1.0, 2] == flops["rollout", 1.0, 4] == images * steps * counted["forward"]
    )
    assert flops["rollout, images", 4.5, 4] == images * (
        2 * steps * counted["forward"] + counted["decode"]
    )
    assert flops["update, LoRA", 4.5, 2] == 2 * images * 3 * counted["forward_and_backward"]


def test_with_as_many_rows_a_pass_the_first_log_ratio_is_exactly_zero(results):
    equal = results["ratio_errors"][0]
    assert equal["rollout_rows"] == equal["training_rows"]
    assert equal["max_log_density"] == 0
    assert [row["rollout_rows"] for row in results["ratio_errors"]] == [2, 4]


def test_the_results_are_written_when_asked_for(results, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "RESULTS", tmp_path / "gpu")
    monkeypatch.setattr(
        gpu,
        "run_benchmark",
        lambda *arguments: {name: results[name] for name in results if name != "command"},
    )
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--size", "tiny"])
    gpu.main()
    page = capsys.readouterr().out
    assert "`python -m benchmarks.gpu --size tiny`" in page
    assert page.count("\n| update, LoRA |") == 2
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--size", "tiny", "--write"])
    gpu.main()
    assert json.loads((tmp_path / "gpu.json").read_text())["measured"] == results["measured"]
    assert "--write`" in (tmp_path / "gpu.md").read_text()
