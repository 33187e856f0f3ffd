"""The part "Free network" of the benchmark of speed: what is on the GPU's path, and the committed
shares.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from benchmarks import free_network, speed
from benchmarks.free_network import FreeModel, SampleCost, format_part
from benchmarks.speed_report import replace_part
from ebbflow.estimate.gpus import GPU_TYPES
from ebbflow.flow.noise import SampleKeys
from ebbflow.models.base import Conditioning
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.generate import generate_samples

COST = SampleCost(
    network=1.0,
    kernels=0.01,
    copies=0.02,
    first_noise=0.03,
    noise=0.5,
    images=1.5,
    statistics=0.25,
    engine=0.002,
)


def test_what_takes_longer_than_the_network_is_waited_for() -> None:
    assert COST.on_path == pytest.approx(0.01 + 0.02 + 0.03 + 0.5)
    assert COST.share == pytest.approx(0.56)
    assert COST.serial_share == pytest.approx(0.06 + 0.5 + 1.5 + 0.25)


def test_the_socket_of_an_engine_is_a_share_of_its_own() -> None:
    assert COST.engine_share == pytest.approx(0.002)
    (row,) = [
        line for line in format_part({"a size": COST}, "`it`").splitlines() if "socket, ad" in line
    ]
    assert row.endswith("(wanted ≤ 1 %) | 0.20 % |")
    picture = np.zeros((8, 8, 3), np.uint8)
    assert free_network.measure_engine_seconds(torch.Size((1, 4, 4)), 3, 2, picture) > 0


def test_the_free_network_is_asked_as_often_as_a_real_one() -> None:
    asked = []

    class CountedModel(FreeModel):
        def predict_velocity(self, latents, sigma, conditioning):
            asked.append(len(latents))
            return super().predict_velocity(latents, sigma, conditioning)

    keys = SampleKeys(0, [0, 1, 2], [0, 0, 0])
    conditioning = Conditioning({"embeds": torch.zeros(3, 1, 1)})
    sampler = SamplerConfig(name="flow_sde", steps=4)
    generate_samples(CountedModel((1, 4, 4)), conditioning, keys, sampler)
    assert asked == [3] * 4


def test_a_part_replaces_the_one_of_the_page() -> None:
    part = format_part({"a size": COST}, "`a command`")
    page = replace_part("# Speed\n\ntable\n", part)
    assert replace_part(page, part) == page
    assert page.count(free_network.HEADING) == 1
    assert "| network, predicted | 1,000.00 |" in page


def test_the_committed_shares_are_below_what_is_wanted() -> None:
    page = speed.RESULTS.read_text()
    (row,) = [line for line in page.splitlines() if line.startswith("| share on the GPU's path")]
    shares = [float(value) / 100 for value in re.findall(r"([\d.]+) % \|", row.split("|", 2)[2])]
    assert len(shares) == len(free_network.SIZES)
    assert max(shares) <= free_network.WANTED
    assert f"{GPU_TYPES['h100'].sustained_tflops:.0f} TFLOP/s" in page
