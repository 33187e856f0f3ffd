"""Lines about requests: one that is cut and resumed or repeated, and one in other batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ebbflow.certification.adapter import Generated, Request
from ebbflow.certification.bench import Bench, complete_rollouts, measure_steps, recover_noise
from ebbflow.certification.certificate import Line, Measure, judge_line
from ebbflow.certification.sampling_lines import NOISE_BAR
from ebbflow.flow.noise import SampleKeys
from ebbflow.rollouts.generate import Rollouts, join_rollouts

BATCH = 4
"""Samples of the largest batch."""


def measure_resumption(bench: Bench) -> Line:
    """Compare a request that is repeated, and one that is cut and resumed where the engine does
    that, with the whole one.
    """
    # One prompt, so that an engine that mixes prompts fails its own line alone.
    request = bench.build_request([0], bench.settings.samples)
    whole = bench.generate(request).rollouts
    # A repeated request is the least that an engine must get right after a failure.
    answers: dict[str, Rollouts] = {"repeated": bench.generate(request).rollouts}
    note = "the engine repeats a request that was cut"
    if hasattr(bench.engine, "generate_in_parts"):
        note = "cut before every denoising step"
        for cut in range(1, bench.settings.steps):
            answer: Generated = bench.engine.generate_in_parts(request, cut)
            answers[f"resumed at {cut}"] = complete_rollouts(answer.rollouts, request)
    measures: list[Measure] = []
    for name, rollouts in answers.items():
        measures += measure_steps(bench.compare_rollouts(rollouts, [request]), f"{name}: ")
        measures += _compare_noise(rollouts, whole, request, f"{name}: ")
    failed = [measure for measure in measures if not measure.passes]
    # Of many that pass, the one closest to its bar stands for all.
    worst = max(measures, key=lambda measure: measure.value / (measure.high or 1.0))
    return judge_line("cut and resumed requests", failed or [worst], note)


def measure_batches(bench: Bench) -> Line:
    """Compare the same samples alone, in pairs in another order, and all in one batch."""
    whole = bench.build_request([0], BATCH)
    rollouts = bench.generate(whole).rollouts
    measures = measure_steps(bench.compare_rollouts(rollouts, [whole]), "one batch: ")
    # Reversed as well: an engine may take noise by position instead of by key.
    orders: dict[str, Sequence[Sequence[int]]] = {
        "alone": [[sample] for sample in range(BATCH)],
        "in pairs, in reverse": [[3, 2], [1, 0]],
    }
    for name, batches in orders.items():
        requests = [_select_samples(whole, samples) for samples in batches]
        answers = join_rollouts([bench.generate(request).rollouts for request in requests])
        measures += measure_steps(bench.compare_rollouts(answers, requests), f"{name}: ")
        # The whole batch in the order of the parts, to compare sample by sample.
        order = torch.tensor([sample for samples in batches for sample in samples])
        measures += _compare_noise(answers, _reorder(rollouts, order), whole, f"{name}: ")
    return judge_line("batch invariance", measures)


def _select_samples(request: Request, samples: Sequence[int]) -> Request:
    index = torch.tensor(samples)
    keys: SampleKeys = request.keys.select_samples(index.numpy())
    return Request(
        request.version,
        [request.prompts[sample] for sample in samples],
        request.conditioning.select_rows(index),
        keys,
        request.sampler,
        request.plan,
        request.latent_shape,
    )


def _reorder(rollouts: Rollouts, order: torch.Tensor) -> Rollouts:
    assert rollouts.trajectory is not None
    return Rollouts(rollouts.latents[order], rollouts.trajectory.select_samples(order))


def _compare_noise(
    rollouts: Rollouts, whole: Rollouts, request: Request, named: str
) -> list[Measure]:
    """Compare x_T and the noise of every step of the same samples."""
    trajectory = rollouts.trajectory
    reference = whole.trajectory
    assert trajectory is not None
    assert reference is not None
    start = _root_mean_square(trajectory.states[:, 0] - reference.states[:, 0])
    steps = _root_mean_square(
        recover_noise(trajectory, request) - recover_noise(reference, request)
    )
    return [
        # x_T is generated, not computed: its bytes have no reason to differ.
        Measure(f"{named}difference of x_T", start, high=0.0),
        Measure(f"{named}difference of the steps' noise", steps, high=NOISE_BAR),
    ]


def _root_mean_square(values: torch.Tensor) -> float:
    return values.double().square().mean().sqrt().item()
