"""Lines about the weights that an engine is given: adapters, full weights, versions, drift."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch

from ebbflow.certification.adapter import Request, WeightsVersionError
from ebbflow.certification.bench import Bench, HiddenEffectError, measure_change
from ebbflow.certification.certificate import Line, Measure, judge_line
from ebbflow.recipe.policy import PolicyConfig

PREVIOUS = "rollout"
"""The copy of the policy that holds the weights of the version before."""


def describe_weights(policy: PolicyConfig) -> str:
    """Name a kind of weights, as a line does."""
    if policy.train == "full":
        return "full weights"
    variant = "DoRA" if policy.dora else "rsLoRA" if policy.rslora else "LoRA"
    return f"{variant} of rank {policy.rank} and alpha {policy.alpha}"


def measure_weights(bench: Bench) -> Line:
    """Measure which share of new weights the engine shows."""
    name = describe_weights(bench.setup.policy)
    # Random and of a known effect: trained adapters would be too small to see.
    bench.change_weights(seed=1)
    bench.settle_weights()
    comparison = bench.compare(bench.build_requests(), base="reference")
    measures = measure_change(comparison, "new weights")
    bench.restore_base()
    return judge_line(name, measures)


def measure_layers(bench: Bench) -> Line:
    """Measure the adapter of every layer alone: one that an engine ignores hides among the others.

    Raises:
        HiddenEffectError: rounding hides too much, or all layers are wrong alike, which is for the
            line of their kind to say.
    """
    measured: dict[str, list[Measure]] = {}
    groups = dict(group_layers(bench.policy.parameters, bench.settings.layers))
    for number, (group, parameters) in enumerate(groups.items()):
        # Some layers change nothing, such as those after the last joint attention.
        if bench.change_weights(seed=2 + number, only=parameters):
            bench.settle_weights()
            comparison = bench.compare(bench.build_requests(), base="reference")
            measured[group] = measure_change(comparison, "new weights")
    bench.restore_base()
    # A layer fails by its share or by its steps.
    failed = [group for group, one in measured.items() if not all(m.passes for m in one)]
    if measured and len(failed) == len(measured):
        raise HiddenEffectError("no layer alone shows its adapter")
    # One that fails first: ``max`` alone passes over a NaN.
    worst = max(measured, key=lambda group: (group in failed, _distance(measured[group])))
    note = f"wrong: {', '.join(failed)}" if failed else f"worst: {worst}"
    if len(measured) < len(groups):
        note += f"; {len(groups) - len(measured)} without effect on the velocity"
    count = Measure("layers, or groups of them, looked at alone", len(measured), 1)
    return judge_line("every adapted layer", [*measured[worst], count], note)


def _distance(measures: list[Measure]) -> float:
    """Return how far the worst of some numbers is from its bar, in units of the bar."""
    return max(
        abs(measure.value - 1) / (measure.high - 1)
        if measure.low is not None and measure.high is not None
        else measure.value / (measure.high or 1.0)
        for measure in measures
    )


def group_layers(parameters: Iterable[str], most: int) -> Iterator[tuple[str, list[str]]]:
    """Group the parameters of adapters by layer; of more layers than ``most``, once by kind of
    layer and once by block.
    """
    by_layer: dict[str, list[str]] = {}
    for name in parameters:
        by_layer.setdefault(name.partition(".lora_")[0], []).append(name)
    # Each group costs a push and a generation; published models have hundreds of layers.
    if len(by_layer) <= most:
        yield from by_layer.items()
        return
    # Twice: an engine may miss a kind of layer, as fused ones, or a block, as the last.
    for pattern in (_name_kind, _name_block):
        groups: dict[str, list[str]] = {}
        for layer, names in by_layer.items():
            groups.setdefault(pattern(layer), []).extend(names)
        yield from groups.items()


def _name_kind(layer: str) -> str:
    return re.sub(r"\d+", "*", layer)


def _name_block(layer: str) -> str:
    number = re.search(r"^.*?\d+", layer)
    return number[0] + ".*" if number else layer


def measure_versions(bench: Bench) -> Line:
    """Measure whether the next request shows a push, and what requests for old weights get."""
    # Seeds of their own: weights that an earlier line has pushed would hide a late push.
    bench.change_weights(seed=101)
    bench.settle_weights()
    old_weights = bench.copy_weights()
    old_version = bench.version
    bench.policy.snapshot_copy(PREVIOUS)
    bench.change_weights(seed=102)
    # Pushed once and asked at once: a late push must show here.
    bench.push_weights()
    request = bench.build_request([0], bench.settings.samples)
    answer = bench.generate(request)
    comparison = bench.compare_rollouts(answer.rollouts, [request], base=PREVIOUS)
    measures = measure_change(comparison, "the push before the request")
    measures.append(_measure_version(answer.version, request))
    measures += _measure_old_request(bench, old_version)
    measures += _measure_late_push(bench, old_weights, old_version)
    bench.policy.copies.pop(PREVIOUS)
    bench.restore_base()
    return judge_line("weight versions", measures)


def _measure_version(version: int, request: Request, named: str = "the request") -> Measure:
    wanted = request.version
    return Measure(f"version that answers {named}", version, wanted, wanted)


def _measure_old_request(bench: Bench, old_version: int) -> list[Measure]:
    """Ask for the version before: it must be generated with that one, or refused."""
    # The request is built for the older version, and the count goes on from the newest.
    newest = bench.version
    bench.version = old_version
    request = bench.build_request([0], bench.settings.samples)
    bench.version = newest
    try:
        answer = bench.generate(request)
    except WeightsVersionError:
        return [Measure("request for an older version that is not refused", 0, high=0)]
    with bench.policy.use_copy(PREVIOUS):
        comparison = bench.compare_rollouts(answer.rollouts, [request], base="reference")
    named = "a request for the version before"
    return [*measure_change(comparison, named), _measure_version(answer.version, request, named)]


def _measure_late_push(
    bench: Bench, old_weights: dict[str, torch.Tensor], old_version: int
) -> list[Measure]:
    """Push an older version after a newer one: the newer one must go on to answer, or the request
    for it must be refused.
    """
    try:
        bench.engine.load(old_weights, old_version)
    except WeightsVersionError:
        return [Measure("older push after a newer one that is not refused", 0, high=0)]
    request = bench.build_request([0], bench.settings.samples)
    try:
        answer = bench.generate(request)
    # It refuses to answer for weights that it may have lost: late, and never wrong.
    except WeightsVersionError:
        return []
    comparison = bench.compare_rollouts(answer.rollouts, [request], base=PREVIOUS)
    return measure_change(comparison, "the newest version after an older push")


@torch.no_grad()
def measure_drift(bench: Bench) -> Line:
    """Push many small updates, one after the other, and look at their sum."""
    bench.change_weights(seed=103)
    final = {name: values.detach().clone() for name, values in bench.policy.parameters.items()}
    base = bench.policy.copies["reference"]
    updates = bench.settings.updates
    for update in range(1, updates + 1):
        # A straight line: each update is a hundredth of the change, as in training.
        part = {name: torch.lerp(base[name], final[name], update / updates) for name in final}
        bench.policy.assign_parameters(part)
        bench.push_weights()
    # The last one again: an engine that is one push late fails the line of versions.
    bench.settle_weights()
    comparison = bench.compare(bench.build_requests(), base="reference")
    measures = measure_change(comparison, f"the sum of {updates} updates")
    bench.restore_base()
    return judge_line("drift", measures)
