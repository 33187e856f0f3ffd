"""DPM-Solver++ against diffusers' own, against Euler, and against a flow that is known exactly."""

import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler
from hypothesis import given
from hypothesis import strategies as st
from solver_cases import DATA_MEAN, DATA_STD, affine_velocity, bent_velocity, schedule

from ebbflow.flow.sampler import SolverHistory, compute_transition
from ebbflow.flow.samplers.dpm_solver import SAMPLER as DPM_SOLVER
from ebbflow.flow.windows import shorten_schedule


def exact_path(z, sigma):
    """Where the exact flow of that velocity takes z ~ N(0, 1) of sigma = 1: every quantile of a
    Gaussian stays one.
    """
    return (1 - sigma) * DATA_MEAN + torch.sqrt((1 - sigma) ** 2 * DATA_STD**2 + sigma**2) * z


def solve(x, velocity, sigmas):
    history = None
    path = [x]
    for step in range(len(sigmas) - 1):
        x, history = DPM_SOLVER.advance(x, velocity(x, sigmas[step]), sigmas, step, history)
        path.append(x)
    return path


def euler(x, velocity, sigmas):
    for step in range(len(sigmas) - 1):
        x = x + (sigmas[step + 1] - sigmas[step]) * velocity(x, sigmas[step])
    return x


def noise(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("steps", [2, 3, 10, 20])
@pytest.mark.parametrize("first", [0.999, 1.0])
def test_every_step_is_that_of_diffusers(steps, first):
    peer = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++",
        solver_order=2,
        solver_type="midpoint",
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        flow_shift=3.0,
    )
    peer.set_timesteps(steps)
    if first == 1.0:
        peer.sigmas = schedule(steps).float()
    sigmas = peer.sigmas
    assert sigmas[0].item() == pytest.approx(first, abs=1e-3)
    assert sigmas[-1] == 0
    latents = noise(2, 3, 4, dtype=torch.float32)
    ours = solve(latents, bent_velocity, sigmas)
    peer.set_begin_index(0)
    for step in range(steps):
        latents = peer.step(
            bent_velocity(latents, sigmas[step]), peer.timesteps[step], latents
        ).prev_sample
        assert (ours[step + 1] - latents).abs().max() < 1e-5


def test_the_first_the_last_and_the_step_after_pure_noise_are_euler_and_no_other_is():
    sigmas = schedule(6)
    x = noise(2, 4)
    history = None
    for step in range(6):
        velocity = bent_velocity(x, sigmas[step])
        after, history = DPM_SOLVER.advance(x, velocity, sigmas, step, history)
        distance = (after - compute_transition("ode", x, velocity, sigmas, step).mean).abs().max()
        assert torch.allclose(history.clean, x - sigmas[step] * velocity, atol=1e-12)
        assert distance < 1e-12 if step in (0, 1, 5) else distance > 1e-3
        x = after


def test_it_can_start_at_any_step_and_is_euler_there():
    sigmas = schedule(6)
    x = noise(2, 4)
    velocity = bent_velocity(x, sigmas[3])
    after, _ = DPM_SOLVER.advance(x, velocity, sigmas, 3, None)
    assert torch.allclose(after, compute_transition("ode", x, velocity, sigmas, 3).mean, atol=1e-12)


def test_a_constant_clean_prediction_is_reached_exactly_whatever_the_steps():
    data = noise(2, 4)
    for steps in (1, 2, 7):
        end = solve(
            torch.ones(2, 4, dtype=torch.float64),
            lambda x, sigma: (x - data) / sigma,
            schedule(steps),
        )[-1]
        assert torch.allclose(end, data, atol=1e-12)


def test_it_is_of_second_order_and_euler_of_first():
    z = torch.tensor([[-2.0], [-0.4], [1.0]], dtype=torch.float64)

    def error(solver, steps):
        # Inside (0, 1): at the ends of a whole schedule lambda is infinite, and a few steps there
        # are of first order.
        sigmas = torch.linspace(0.9, 0.1, steps + 1, dtype=torch.float64)
        end = solver(exact_path(z, sigmas[0]), affine_velocity, sigmas)
        return (end - exact_path(z, sigmas[-1])).abs().max().item()

    for steps in (80, 160):
        second = error(lambda *case: solve(*case)[-1], steps) / error(
            lambda *case: solve(*case)[-1], 2 * steps
        )
        assert second == pytest.approx(4, rel=0.1)
        assert error(euler, steps) / error(euler, 2 * steps) == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [10, 20, 40])
def test_over_a_whole_schedule_it_ends_nearer_to_the_exact_flow_than_euler(steps, shift):
    z = noise(100, 1)
    sigmas = schedule(steps, shift)
    exact = exact_path(z, sigmas[-1])
    ends = solve(z, affine_velocity, sigmas)[-1], euler(z, affine_velocity, sigmas)
    ours, eulers = ((end - exact).pow(2).mean().sqrt() for end in ends)
    assert ours < eulers / 1.3


def test_bf16_input_is_computed_in_float32():
    latents, velocity, before = (
        noise(2, 4, dtype=torch.float32).bfloat16() * scale for scale in (1, 2, 3)
    )
    history = SolverHistory(latents.float(), before.float())
    low, low_history = DPM_SOLVER.advance(latents, velocity, schedule(6), 3, history)
    full, full_history = DPM_SOLVER.advance(
        latents.float(), velocity.float(), schedule(6), 3, history
    )
    for ours, theirs in ((low, full), (low_history.clean, full_history.clean)):
        assert ours.dtype == torch.float32
        assert torch.equal(ours, theirs)


def test_a_shorter_schedule_by_hand():
    sigmas = torch.tensor([0.8, 0.6, 0.3, 0.1, 0.0])
    assert shorten_schedule(sigmas, 0.5).tolist() == pytest.approx([0.8, 0.3, 0])
    assert shorten_schedule(sigmas, 0.6).tolist() == pytest.approx([0.8, 0.5, 0.5 / 3, 0])
    assert shorten_schedule(sigmas, 0.01).tolist() == pytest.approx([0.8, 0])
    assert torch.equal(shorten_schedule(sigmas, 0.99), sigmas)


@given(st.integers(1, 60), st.floats(0.01, 0.99), st.floats(1, 6))
def test_a_shorter_schedule_has_its_length_keeps_its_ends_and_descends(steps, share, shift):
    sigmas = schedule(steps, shift).float()
    shorter = shorten_schedule(sigmas, share)
    assert len(shorter) - 1 == max(1, math.ceil(share * steps))
    assert shorter.dtype == torch.float32
    assert shorter[0] == sigmas[0]
    assert shorter[-1] == 0
    assert (shorter.diff() < 0).all()
