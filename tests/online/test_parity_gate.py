"""When the gate looks at an engine in a stage."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from ebbflow.flow.noise import SampleKeys
from ebbflow.online import parity_gate
from ebbflow.online.messages import RolloutRequest
from ebbflow.online.parity_gate import check_parity
from ebbflow.stage import StageContext


class Engine:
    """What a recipe can name; nothing is generated."""


OTHER = f"{__name__}:Engine"


@pytest.fixture
def list_looks(make_recipe, monkeypatch):
    """``list_looks(first_step, every)``: the steps that the gate looked before."""

    def list_steps(first_step, every):
        online = {"engine": OTHER, "parity": {"every": every}}
        ctx = StageContext(make_recipe(online=online), 0, 0)
        steps = []

        async def generate_request(request, weights):
            return "rollouts", None, None

        async def build_request(ctx, queue, step):
            return step

        async def measure_parity(request, rollouts):
            steps.append(request)
            return {"parity/mean_shift": 0.0}

        training = SimpleNamespace(measure_parity=measure_parity)
        queue = SimpleNamespace(
            generate_request=generate_request,
            weights=None,
            workers=SimpleNamespace(training=training),
        )
        monkeypatch.setattr(parity_gate, "_build_parity_request", build_request)

        async def look_before_every_step():
            for step in range(first_step, 32):
                metrics = await check_parity(ctx, queue, step, first_step)
                assert bool(metrics) == (step in steps)

        asyncio.run(look_before_every_step())
        return steps

    return list_steps


def test_the_gate_looks_after_the_first_transfers_and_then_every_so_many_steps(list_looks):
    assert list_looks(0, every=10) == [0, 1, 2, 3, 10, 20, 30]


def test_a_resumed_stage_has_a_new_engine(list_looks):
    assert list_looks(14, every=10) == [14, 15, 16, 17, 24]


@pytest.mark.parametrize(
    ("samples", "expected"),
    [(2, [(0, 4), (1, 4)]), (4, [(0, 4), (1, 4), (2, 4), (0, 5)])],
)
def test_the_gate_looks_at_as_many_prompts_as_possible(
    make_recipe, make_prompts, samples, expected
):
    online = {"engine": OTHER, "parity": {"samples": samples}}
    ctx = StageContext(make_recipe(online=online), 0, 0)

    async def build_requests(step, plan):
        """A request for each prompt, as with groups that are as large as a micro-batch."""
        return [
            RolloutRequest(
                step,
                [prompt] * 4,
                "the prompt's own",
                np.zeros(4, int),
                SampleKeys.number_groups(7, [prompt.prompt_id], 4, first_sample=4),
                ctx.config.sampler,
                plan,
            )
            for prompt in make_prompts(3)
        ]

    queue = SimpleNamespace(
        build_requests=build_requests,
        embeddings=lambda step, prompts: [prompt.prompt_id for prompt in prompts],
    )
    request = asyncio.run(parity_gate._build_parity_request(ctx, queue, 1))
    assert list(zip(request.keys.prompt_ids, request.keys.samples, strict=True)) == expected
    assert [prompt.prompt_id for prompt in request.prompts] == [prompt for prompt, _ in expected]
    encoded = [request.conditioning[row] for row in request.sample_index]
    assert encoded == request.keys.prompt_ids
    assert request.keys.seed == 7
