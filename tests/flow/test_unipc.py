"""UniPC against diffusers' own, and against a flow that is known exactly."""

import pytest
import torch
from diffusers import UniPCMultistepScheduler
from solver_cases import DATA_MEAN, DATA_STD, affine_velocity, bent_velocity, schedule

from ebbflow.flow.samplers.dpm_solver import SAMPLER as DPM_SOLVER
from ebbflow.flow.samplers.unipc import SAMPLER as UNIPC


def solve(sampler, x, velocity, sigmas):
    history = None
    path = [x]
    for step in range(len(sigmas) - 1):
        x, history = sampler.advance(x, velocity(x, sigmas[step]), sigmas, step, history)
        path.append(x)
    return path


def noise(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("steps", [2, 3, 10, 20])
@pytest.mark.parametrize("flow_shift", [3.0, 5.0])
def test_every_step_is_that_of_diffusers(steps, flow_shift):
    peer = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=flow_shift
    )
    peer.set_timesteps(steps)
    sigmas = torch.where(peer.sigmas > 1 - 1e-5, 1.0, peer.sigmas)
    latents = noise(2, 3, 4, dtype=torch.float32)
    ours = solve(UNIPC, latents, bent_velocity, sigmas)
    for step in range(steps):
        latents = peer.step(
            bent_velocity(latents, sigmas[step]), peer.timesteps[step], latents
        ).prev_sample
        assert (ours[step + 1] - latents).abs().max() < 1e-5


def test_a_constant_clean_prediction_is_reached_exactly_whatever_the_steps():
    data = noise(2, 4)
    for steps in (1, 2, 7):
        start = torch.ones(2, 4, dtype=torch.float64)
        end = solve(
            UNIPC,
            start,
            lambda x, sigma: (x - data) / sigma.clamp(max=1 - 1e-6),
            schedule(steps),
        )[-1]
        assert torch.allclose(end, data, atol=1e-12)


def test_it_is_of_second_order_at_least_and_nearer_than_its_predictor_alone():
    z = torch.tensor([[-2.0], [-0.4], [1.0]], dtype=torch.float64)

    def exact(sigma):
        """Every quantile of a Gaussian stays one."""
        return (1 - sigma) * DATA_MEAN + torch.sqrt((1 - sigma) ** 2 * DATA_STD**2 + sigma**2) * z

    def error(sampler, steps):
        sigmas = torch.linspace(
            0.9, 0.1, steps + 1, dtype=torch.float64
        )  # inside (0, 1): at its ends lambda is infinite
        return (
            (solve(sampler, exact(sigmas[0]), affine_velocity, sigmas)[-1] - exact(sigmas[-1]))
            .abs()
            .max()
        )

    assert error(UNIPC, 40) < error(UNIPC, 20) / 3.5
    assert error(UNIPC, 40) < error(DPM_SOLVER, 40)
