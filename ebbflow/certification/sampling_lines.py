"""Lines about what an engine samples with the base model's weights: schedule, noise, network,
transition, log-probs, guidance and prompts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ebbflow.certification.adapter import NotSupportedError, Request
from ebbflow.certification.bench import (
    MIN_STEPS,
    Bench,
    list_stochastic_samplers,
    measure_change,
    measure_steps,
    recover_noise,
    remove_guidance,
)
from ebbflow.certification.certificate import (
    NETWORK,
    Line,
    Measure,
    find_largest,
    judge_line,
)
from ebbflow.flow.sampler import Transition, compute_log_prob, compute_transition
from ebbflow.flow.windows import Trajectory
from ebbflow.models.base import Conditioning, device_of
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.rollouts.step_comparison import LOG_PROB_ROUNDING, NOISE_MULTIPLE, predict_twice

SIGMA_BAR = 1e-6
NOISE_BAR = 1e-3
"""Of standard normal noise; another stream has 1, the rounding of float32 1e-6."""
STD_BAR = 1e-3
"""Of a step's standard deviation, relative to it, where the noise is known."""
VELOCITY_FLOOR = 1e-5
"""Of an error of the latents' change, relative to it: float32 with another order of summation."""
ENCODING_BAR = 0.02
"""Of encoded prompts, relative to their size: encoders run in 16 bits."""
SAMPLING_DEVIATIONS = 5.0
"""Of a variance that is estimated from the noise."""


def measure_schedule(bench: Bench) -> Line:
    """Compare the sigmas with those of the model's family."""
    trajectory = _generate_trajectory(bench, bench.build_request([0], 1))
    expected = bench.policy.model.compute_sigmas(bench.sampler.steps)
    sigmas = trajectory.sigmas.cpu()
    # Schedules of different lengths have no largest difference.
    error = math.inf
    if sigmas.shape == expected.shape:
        error = (sigmas - expected).abs().max().item()
    measures = [
        Measure("sigmas", len(sigmas), len(expected), len(expected)),
        Measure("largest difference of a sigma", error, high=SIGMA_BAR),
    ]
    return judge_line("schedule", measures)


def measure_noise(bench: Bench) -> Line:
    """Compare x_T and the noise of every step with those that the request names.

    Raises:
        NotSupportedError: the engine has noise of its own.
    """
    if not getattr(bench.engine, "takes_noise", True):
        raise NotSupportedError("the engine generates noise of its own, which no request can name")
    unequal = 0
    errors = []
    # One sample in each request: what a batch does to the noise is another line.
    for row, sample in ((0, 0), (0, 1), (2, 0)):
        request = bench.build_request([row], 1, first_sample=sample)
        trajectory = _generate_trajectory(bench, request)
        start = trajectory.states[:, 0].cpu()
        # Compared by bytes: noise is generated and never rounded.
        unequal += int((start != request.generate_noise(0)).sum())
        errors.append(_split_noise(trajectory, request)[1])
    measures = [
        Measure("elements of x_T that differ", unequal, high=0),
        Measure("share of the steps' noise that is another", find_largest(errors), high=NOISE_BAR),
    ]
    line = judge_line("noise", measures)
    bench.knows_noise = line.verdict == "passed"
    return line


def _split_noise(trajectory: Trajectory, request: Request) -> tuple[float, float]:
    """Split the noise that an engine has added into a multiple of the noise that it was given, and
    the rest.

    Returns:
        The factor, which is 1 unless the standard deviation is another one, farthest from 1 of any
        step; and the root mean square of the rest relative to the noise, the largest of any step.
    """
    noise = recover_noise(trajectory, request).cpu().double()
    steps = trajectory.steps.tolist()
    # [N, W, ...]: the noise of step i has the index i + 1.
    given = torch.stack([request.generate_noise(step + 1) for step in steps], 1).double()
    factors: list[float] = []
    rests: list[float] = []
    for column in range(len(steps)):
        found = noise[:, column]
        wanted = given[:, column]
        factor = ((found * wanted).sum() / wanted.square().sum()).item()
        factors.append(factor)
        # Relative to what was found, so that a wrong standard deviation does not show here.
        rests.append(_root_mean_square(found - factor * wanted) / _root_mean_square(found))
    return _find_farthest(factors), find_largest(rests)


def _find_farthest(factors: Sequence[float]) -> float:
    """Return the factor that is farthest from 1, a NaN first."""
    return max(factors, key=lambda factor: (math.isnan(factor), abs(factor - 1)))


@torch.no_grad()
def measure_network(bench: Bench) -> Line:
    """Compare what two deterministic steps of the base model add to x_T: they show the network,
    whatever the engine's transitions are.
    """
    errors = []
    roundings = []
    device = device_of(bench.policy.model)
    short = SamplerConfig(name="flow_sde", steps=MIN_STEPS)
    for row in (0, 1):
        samples = bench.settings.samples
        # The engine's own x_T and sigmas, which need not be those that were asked for.
        recorded = _generate_trajectory(bench, bench.build_request([row], samples, short))
        request = bench.build_request([row], samples, steps=MIN_STEPS)
        final = bench.generate(request).rollouts.latents.to(device)
        start = recorded.states[:, 0].to(device)
        conditioning = request.conditioning.to(device)
        first, again = _predict_path(bench, start, recorded.sigmas.to(device), conditioning)
        size = _root_mean_square(first - start)
        errors.append(_root_mean_square(final - first) / size)
        roundings.append(_root_mean_square(again - first) / size)
    bar = max(VELOCITY_FLOOR, NOISE_MULTIPLE * max(roundings))
    measures = [Measure("error of the latents' change, relative", find_largest(errors), high=bar)]
    return judge_line(NETWORK, measures)


def _predict_path(
    bench: Bench, start: Tensor, sigmas: Tensor, conditioning: Conditioning
) -> tuple[Tensor, Tensor]:
    """Take Euler's steps from x_T, twice with different roundings, as ``predict_twice`` has them.

    Returns:
        The final latents of both, [N, ...].
    """
    # One path for each kind of rounding: they are never mixed.
    ends = [start, start]
    for sigma, next_sigma in zip(sigmas[:-1], sigmas[1:], strict=True):
        for number in (0, 1):
            velocities = predict_twice(
                bench.policy,
                ends[number],
                sigma,
                conditioning,
                bench.setup.precision,
                bench.setup.micro_batch,
            )
            ends[number] = ends[number] + velocities[number] * (next_sigma - sigma)
    return ends[0], ends[1]


def measure_transition(bench: Bench) -> Line:
    """Compare mean and standard deviation of every step of every stochastic sampler."""
    measures: list[Measure] = []
    # An engine may have one sampler of three and be right.
    missing: list[str] = []
    for sampler in list_stochastic_samplers(bench.settings.steps):
        try:
            measures += _measure_sampler(bench, sampler)
        except NotSupportedError:
            missing.append(sampler.name)
    if not measures:
        raise NotSupportedError("the engine has none of the stochastic samplers")
    note = f"not offered: {', '.join(missing)}" if missing else ""
    return judge_line("transition", measures, note)


def _measure_sampler(bench: Bench, sampler: SamplerConfig) -> list[Measure]:
    # One sample in each request, as what a batch does to the noise is another line.
    requests = [bench.build_request([row], 1, sampler, first_sample=row) for row in (0, 1)]
    rollouts = [bench.generate(request).rollouts for request in requests]
    measures: list[Measure] = []
    factors: list[float] = []
    squares: list[Tensor] = []
    for request, answer in zip(requests, rollouts, strict=True):
        trajectory = answer.trajectory
        assert trajectory is not None
        comparison = bench.compare_rollouts(answer, [request])
        measures += measure_steps(comparison, f"{sampler.name}: ")
        factors.append(_split_noise(trajectory, request)[0])
        squares.append(recover_noise(trajectory, request).cpu().square().flatten())
    factor = _find_farthest(factors)
    tolerance = STD_BAR
    if not bench.knows_noise:
        # Noise that nobody knows has variance 1 if the standard deviation is right.
        variances = torch.cat(squares)
        factor = variances.mean().sqrt().item()
        tolerance = SAMPLING_DEVIATIONS * math.sqrt(0.5 / variances.numel())
    name = f"{sampler.name}: std of a step, beside the policy's"
    # One that fails first: ``max`` alone passes over a NaN.
    worst = max(
        measures, key=lambda measure: (not measure.passes, measure.value / (measure.high or 1))
    )
    return [worst, Measure(name, factor, 1 - tolerance, 1 + tolerance)]


def measure_log_probs(bench: Bench) -> Line:
    """Compare the log-probs with those that the engine's own means and latents have."""
    worst = 0.0
    bar = 0.0
    for request in bench.build_requests():
        trajectory = _generate_trajectory(bench, request)
        for column in range(len(trajectory.steps)):
            transition, next_latents = _rebuild_transition(trajectory, request, column)
            # From the engine's own mean, so that other weights do not show here.
            expected = compute_log_prob(transition, next_latents, request.latent_shape)
            error = (trajectory.log_probs[:, column].to(expected) - expected).abs().max().item()
            # x' - mu cancels: it has the rounding of x', beside a noise of the size of the std.
            cancellation = next_latents.abs().max().item() / transition.std.min().item()
            rounding = LOG_PROB_ROUNDING + 4 * torch.finfo(torch.float32).eps * cancellation
            limit = rounding * max(1.0, expected.abs().max().item())
            if error / limit >= worst / (bar or 1.0) or math.isnan(error):
                worst = error
                bar = limit
    return judge_line("log-probs", [Measure("largest error of a log-prob", worst, high=bar)])


def _rebuild_transition(
    trajectory: Trajectory, request: Request, column: int
) -> tuple[Transition, Tensor]:
    """Return the transition of a step with the engine's mean, and the latents after it."""
    assert trajectory.means is not None
    states = trajectory.states[:, trajectory.find_states()[column] :][:, :2]
    mean = trajectory.means[:, column]
    step = int(trajectory.steps[column])
    eta = request.sampler.eta
    transition = compute_transition(
        request.sampler.name, states[:, 0], mean, trajectory.sigmas, step, eta
    )
    return replace(transition, mean=mean), states[:, 1]


def measure_guidance(bench: Bench) -> Line:
    """Measure which share of guidance the engine shows: 2 if it is applied twice.

    Raises:
        NotSupportedError: the model takes none.
    """
    requests = bench.build_requests(guided=True)
    if requests[0].conditioning.guidance == 1:
        raise NotSupportedError(f"{bench.setup.model.family} takes no guidance")
    # The change that is measured is guidance itself, so its share is 2 if it acts twice.
    unguided = [remove_guidance(request.conditioning) for request in requests]
    comparison = bench.compare(requests, base_conditioning=unguided)
    scale = requests[0].conditioning.guidance
    return judge_line("guidance", measure_change(comparison, f"guidance of {scale:g}"))


def measure_encoding(bench: Bench) -> Line:
    """Compare the texts that an engine encodes itself with the trainer's.

    Raises:
        NotSupportedError: the engine takes encoded prompts.
    """
    encode = getattr(bench.engine, "encode_prompts", None)
    if encode is None:
        raise NotSupportedError("the engine takes prompts that the trainer has encoded")
    found: Conditioning = encode(bench.prompts)
    errors = [0.0]
    for name, wanted in bench.encoded.tensors.items():
        values = found.tensors.get(name)
        error = math.inf
        # A prompt that was cut shorter has another shape.
        if values is not None and values.shape == wanted.shape:
            difference = values.to(wanted).float() - wanted.float()
            size = _root_mean_square(wanted.float())
            error = _root_mean_square(difference) / (size or 1.0)
        errors.append(error)
    error = find_largest(errors)
    measures = [Measure("error of an encoded prompt, relative", error, high=ENCODING_BAR)]
    return judge_line("text encoding", measures)


def measure_prompts(bench: Bench) -> Line:
    """Measure whether every sample shows its own prompt, beside longer and shorter ones."""
    request = bench.build_request(range(len(bench.prompts)), 1)
    # The change that is measured: every prompt instead of the one after it.
    order = torch.arange(len(bench.prompts)).roll(-1)
    others = request.conditioning.select_rows(order)
    comparison = bench.compare([request], base_conditioning=[others])
    return judge_line("prompts", measure_change(comparison, "a sample's own prompt"))


def _generate_trajectory(bench: Bench, request: Request) -> Trajectory:
    trajectory = bench.generate(request).rollouts.trajectory
    assert trajectory is not None
    return trajectory


def _root_mean_square(values: Tensor) -> float:
    return values.double().square().mean().sqrt().item()
