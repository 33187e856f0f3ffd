"""Measures every line of a certificate, in the order in which they depend on each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ebbflow.certification.adapter import (
    EngineSetup,
    NotSupportedError,
    OpenEngine,
    WeightsVersionError,
)
from ebbflow.certification.bench import Bench, CertificateSettings, HiddenEffectError, open_bench
from ebbflow.certification.certificate import NETWORK, Certificate, Line, Verdict
from ebbflow.certification.own_engines import RecipeEngine
from ebbflow.certification.request_lines import measure_batches, measure_resumption
from ebbflow.certification.sampling_lines import (
    measure_encoding,
    measure_guidance,
    measure_log_probs,
    measure_network,
    measure_noise,
    measure_prompts,
    measure_schedule,
    measure_transition,
)
from ebbflow.certification.weight_lines import (
    describe_weights,
    measure_drift,
    measure_layers,
    measure_versions,
    measure_weights,
)
from ebbflow.models.base import ModelError
from ebbflow.progress import show_progress
from ebbflow.recipe.model import ModelConfig, Precision
from ebbflow.recipe.plugins import import_object
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.report.run_facts import describe_machine, read_versions
from ebbflow.rollouts.engine import PATHS
from ebbflow.storage.artifacts import digest_of_folder

logger = logging.getLogger(__name__)
FULL = PolicyConfig(train="full")
LAYERS = "every adapted layer"
STEPS_ARE_RIGHT = (NETWORK, "transition")
"""Lines that all comparisons of steps need: with another network every step is another one."""


@dataclass(frozen=True)
class _Step:
    """A line to measure, and the lines without which it would only repeat their failure."""

    name: str
    measure: Callable[[Bench], Line]
    needs: tuple[str, ...] = ()
    unless_failed: tuple[str, ...] = ()
    """Lines whose failure would show here again; they may be unmeasured."""


SAMPLING = (
    _Step("schedule", measure_schedule),
    _Step("noise", measure_noise),
    _Step("text encoding", measure_encoding),
    _Step(NETWORK, measure_network, ("text encoding",)),
    _Step("transition", measure_transition, (NETWORK,)),
    _Step("log-probs", measure_log_probs),
    _Step("guidance", measure_guidance, STEPS_ARE_RIGHT),
    _Step("prompts", measure_prompts, STEPS_ARE_RIGHT),
    _Step("batch invariance", measure_batches, STEPS_ARE_RIGHT),
    _Step("cut and resumed requests", measure_resumption, STEPS_ARE_RIGHT),
)


def open_certified_engine(name: str) -> OpenEngine:
    """Return what opens an engine: ``diffusers``, ``vllm_omni``, or what a path
    ``package.module:NAME`` names, an ``adapter.OpenEngine``.

    Raises:
        RecipeError: nothing can be imported from the path.
    """
    if name == "diffusers" or name in PATHS:
        return RecipeEngine(name)
    open_engine: OpenEngine = import_object(name)
    return open_engine


def certify_engine(
    name: str,
    open_engine: OpenEngine,
    base: Path,
    model: ModelConfig,
    precision: Precision | None = None,
    micro_batch: int = 4,
    settings: CertificateSettings | None = None,
) -> Certificate:
    """Measure every line; nothing that an engine does ends it early.

    Args:
        name: of the engine, for the report.
        base: the base-model folder.
        precision: of the engine; default: the model's.

    Raises:
        ModelError: the trainer cannot load the base model.
    """
    # One default for the command, the benchmark and callers of their own.
    settings = settings or CertificateSettings()
    lines: dict[str, Line] = {}
    versions = read_versions()
    # Full weights come last: they need the most memory, and most engines offer adapters.
    kinds = [*settings.adapters, FULL]
    main_is_measured = False
    for policy in show_progress("certify", "kind", kinds):
        setup = EngineSetup(base, model, policy, precision or model.precision, micro_batch)
        kind = describe_weights(policy)
        bench = _open_bench(open_engine, setup, settings, lines)
        if bench is None:
            continue
        versions.update(bench.engine.versions)
        try:
            # Once: what an engine samples with the base model does not depend on the kind.
            if not main_is_measured:
                _measure_lines(bench, SAMPLING, lines)
                main_is_measured = True
            _measure_lines(bench, _list_weight_steps(policy, kind, lines), lines)
        finally:
            bench.close()
    return Certificate(
        name,
        versions,
        _describe_model(model, base, setup),
        _describe_settings(settings),
        describe_machine(),
        datetime.now(UTC).isoformat(timespec="seconds"),
        _order_lines(lines, kinds),
    )


def _list_weight_steps(policy: PolicyConfig, kind: str, lines: dict[str, Line]) -> Sequence[_Step]:
    """List the lines that are measured with one kind of weights: the kind itself, every layer with
    the first adapters, versions and drift with the first kind that shows.
    """
    steps: list[_Step] = []
    if policy.train == "lora" and LAYERS not in lines:
        steps.append(_Step(LAYERS, measure_layers, STEPS_ARE_RIGHT))
    # A layer that is wrong alone is named there; all adapters together would only repeat it.
    layers = (LAYERS,) if policy.train == "lora" else ()
    steps.append(_Step(kind, measure_weights, STEPS_ARE_RIGHT, layers))
    needs = (*STEPS_ARE_RIGHT, kind)
    for name, measure in (("weight versions", measure_versions), ("drift", measure_drift)):
        if not _is_measured(name, lines):
            steps.append(_Step(name, measure, needs))
    return steps


def _is_measured(name: str, lines: dict[str, Line]) -> bool:
    return name in lines and lines[name].verdict in ("passed", "failed")


def _open_bench(
    open_engine: OpenEngine,
    setup: EngineSetup,
    settings: CertificateSettings,
    lines: dict[str, Line],
) -> Bench | None:
    """Open the engine for a kind of weights; what is in the way becomes the line of this kind."""
    kind = describe_weights(setup.policy)
    logger.info("certify: %s", kind)
    try:
        return open_bench(open_engine, setup, settings)
    # The trainer itself cannot load the folder: nothing can be said of any engine.
    except ModelError:
        raise
    except NotSupportedError as error:
        lines[kind] = Line(kind, "not supported", note=str(error))
    # An engine of another library may raise anything, and the other kinds are measured still.
    except Exception as error:
        logger.debug("certify: %s", kind, exc_info=True)
        lines[kind] = Line(kind, "failed", note=f"opening it: {type(error).__name__}: {error}")
    return None


def _measure_lines(bench: Bench, steps: Sequence[_Step], lines: dict[str, Line]) -> None:
    for step in steps:
        # What an engine does not offer is not in the way of what it does.
        blocking = [
            name for name in step.needs if lines[name].verdict in ("failed", "not measured")
        ]
        blocking += [name for name in step.unless_failed if lines[name].verdict == "failed"]
        if blocking:
            note = f"{blocking[0]} has not passed"
            lines[step.name] = Line(step.name, "not measured", note=note)
            continue
        # A later kind of weights may measure what an earlier one could not.
        lines[step.name] = _measure_line(bench, step)
        logger.info("certify: %s: %s", step.name, lines[step.name].verdict)


def _measure_line(bench: Bench, step: _Step) -> Line:
    verdict: Verdict
    try:
        return step.measure(bench)
    except NotSupportedError as error:
        verdict = "not supported"
        note = str(error)
    except HiddenEffectError as error:
        verdict = "not measured"
        note = str(error)
    except WeightsVersionError as error:
        verdict = "failed"
        note = f"it refuses the weights that were pushed last: {error}"
    # Whatever the engine raises is its failure, and the lines after it are measured still.
    except Exception as error:
        logger.debug("certify: %s", step.name, exc_info=True)
        verdict = "failed"
        note = f"{type(error).__name__}: {error}"
    return Line(step.name, verdict, note=note)


def _order_lines(lines: dict[str, Line], kinds: Sequence[PolicyConfig]) -> tuple[Line, ...]:
    """Order the lines as they are listed, not as they were measured; what no kind of weights could
    be opened for is there, too.
    """
    # Readers compare certificates of several engines line by line.
    names = [step.name for step in SAMPLING]
    names += [*map(describe_weights, kinds), LAYERS, "weight versions", "drift"]
    if all(lines[describe_weights(kind)].verdict == "not supported" for kind in kinds[:-1]):
        note = "the engine has no adapters, or none was asked for"
        lines.setdefault(LAYERS, Line(LAYERS, "not supported", note=note))
    missing = "no kind of weights that it needs was opened, or none showed"
    return tuple(lines.get(name, Line(name, "not measured", note=missing)) for name in names)


def _describe_model(model: ModelConfig, base: Path, setup: EngineSetup) -> dict[str, Any]:
    return {
        "family": model.family,
        "folder": base.name,
        # The folder's name says little: another one may have the same.
        "digest": digest_of_folder(base),
        "height": model.height,
        "width": model.width,
        "guidance": model.guidance,
        "precision": model.precision,
        "engine_precision": setup.precision,
    }


def _describe_settings(settings: CertificateSettings) -> dict[str, Any]:
    return {
        "steps": settings.steps,
        "samples": settings.samples,
        "adapters": [describe_weights(policy) for policy in settings.adapters],
        "updates": settings.updates,
    }
