"""A forward pass of a network in the size of FLUX.1-dev, with random weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.cuda_budget import CASES
from benchmarks.first_hour.lines import Line, Setting, judge, skip
from benchmarks.first_hour.parts.ratio import move_adapters
from benchmarks.first_hour.parts.speed import FORWARD, judge_kernels
from benchmarks.gpu import measure_matmul_peak
from benchmarks.kernel_counts import count_kernels
from ebbflow.models.base import Conditioning, predict
from ebbflow.models.sizes import build_meta_adapter
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.policy import Policy

SIZE = "the size of FLUX.1-dev: "
CLAIMS = (
    SIZE + "a forward pass with adapters starts few more kernels",
    SIZE + "the device is busy during a forward pass with adapters",
)
SHARE = SIZE + "the share of the peak in a forward pass with adapters"
CASE = CASES["FLUX.1-dev"]


def measure(setting: Setting) -> Iterator[Line]:
    if not torch.cuda.is_available() or setting.size == "tiny":
        for claim in (*CLAIMS, SHARE):
            yield skip(claim, "a network of 24 GB needs a GPU")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    adapter = build_meta_adapter(CASE.config)
    latents = torch.randn(CASE.rows, *adapter.latent_shape, device=device)
    sigma = torch.full((CASE.rows,), 0.5, device=device)
    conditioning = Conditioning(
        {
            name: torch.randn(CASE.rows, *shape, device=device, dtype=torch.bfloat16)
            for name, shape in CASE.inputs.items()
        },
        None,
        CASE.config.guidance,
    )
    with count_kernels() as counts:
        meta = Conditioning(
            {name: value.to("meta") for name, value in conditioning.tensors.items()},
            None,
            CASE.config.guidance,
        )
        adapter.transformer.to(torch.bfloat16)
        adapter.predict_velocity(latents.to("meta").bfloat16(), sigma.to("meta").bfloat16(), meta)
    fill_network(adapter.transformer, device)
    adapter.device = device
    policies: list[Policy] = []

    @torch.no_grad()
    def run_plain() -> None:
        adapter.predict_velocity(latents.bfloat16(), sigma.bfloat16(), conditioning)

    @torch.no_grad()
    def run_ours() -> None:
        if not policies:
            policies.append(Policy(adapter, PolicyConfig(train="lora", rank=32, alpha=64), 0))
            move_adapters(policies[0])
        predict(adapter, latents, sigma, conditioning)

    lines, milliseconds = judge_kernels(CLAIMS, run_plain, run_ours)
    yield from lines
    peak = measure_matmul_peak(8192, device, torch.bfloat16)
    share = counts.flops / (milliseconds / 1000) / peak
    yield judge(SHARE, share >= FORWARD, f"{share:.2f} of a large product", f">= {FORWARD}")


@torch.no_grad()
def fill_network(network: torch.nn.Module, device: torch.device) -> None:
    """Give a network of the meta device random weights of the width's scale: on zeros kernels can
    be faster.
    """
    assert not list(network.buffers()), "buffers would need values"
    network.to_empty(device=device)
    for name, weight in network.named_parameters():
        if weight.ndim > 1:
            weight.normal_(std=weight[0].numel() ** -0.5)
        else:
            weight.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
