"""Golden vectors for samplers, log-probs, losses, advantages, rollout correction and KL: ``python
-m benchmarks.conformance``.

The vectors (``conformance_vectors.json``, described in docs/conformance.md) are computed from the
closed forms of ``conformance_forms``. A library agrees with a case if every value that it returns
does: the largest error, divided by the largest expected magnitude, is at most 1e-10 where it
computed in float64 and 2e-5 in float32. The exit status is 1 if one differs without a known reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from benchmarks.conformance_adapters import (
    Library,
    NotOffered,
    build_diffusers,
    build_ebbflow,
    build_flow_grpo,
)
from benchmarks.conformance_cases import VECTORS, read_vectors, write_vectors
from benchmarks.conformance_verl_omni import build_verl_omni
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.plugins import import_object

INSTALLED = {"ebbflow": build_ebbflow, "diffusers": build_diffusers}
CLONES = {"flow_grpo": build_flow_grpo, "verl_omni": build_verl_omni}
RESULTS = Path(__file__).with_name("results") / "conformance.md"
# By the type that a library returns, as relative errors: sums of some tens of terms in float64, and
# products of a few float32 operations (2^-24 = 6e-8 each) behind exp and log. Masks must be equal.
TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "bool": 0.0}
HELP = f"""
libraries:
  {"  ".join(INSTALLED):24}as installed here (the default)
  {"=CLONE  ".join([*CLONES, ""])}
                          a clone's folder: its files that define the functions are imported and run
  package.module:NAME     your own benchmarks.conformance_adapters.Library (docs/conformance.md)

examples:
  python -m benchmarks.conformance
  python -m benchmarks.conformance --library flow_grpo=../flow_grpo --only 'flow_sde_step/*'
  python -m benchmarks.conformance --library my_package.adapter:LIBRARY
"""


@dataclass(frozen=True)
class Outcome:
    """The result of a library on a case.

    Example:
        ::

            Outcome("agrees", error=3.1e-16, left_out=("std",))
            Outcome("not offered", detail="one reward, normalised inside the step")

    Attributes:
        error: the largest of any value, relative to its largest expected magnitude.
        detail: what differs and by how much, or why.
        left_out: names of the expected values that it did not return.
    """

    status: Literal["agrees", "differs", "differs as known", "not offered"]
    error: float = 0.0
    detail: str = ""
    left_out: tuple[str, ...] = ()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table; exit with the differences, if there are any."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m benchmarks.conformance", None, __doc__, HELP, formatter_class=raw
    )
    parser.add_argument(
        "--library", nargs="+", default=list(INSTALLED), help="what is run, see below"
    )
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help="cases whose name matches, such as 'awm_loss/*'",
    )
    parser.add_argument(
        "--write", action="store_true", help="write benchmarks/results/conformance.md as well"
    )
    parser.add_argument(
        "--write-vectors",
        action="store_true",
        help="compute conformance_vectors.json again, before",
    )
    options = parser.parse_args(arguments)
    # a table of some cases must not replace the committed one of all
    if options.write and options.only != "*":
        parser.error("--write writes the table of all cases; leave --only out")
    if options.write_vectors:
        write_vectors(VECTORS)
    cases = [case for case in read_vectors(VECTORS) if fnmatch(case["name"], options.only)]
    if not cases:
        raise SystemExit(f"no case is named {options.only!r}; the names are in {VECTORS}")
    outcomes_by_library = {
        library: [run_case(library, case) for case in cases]
        for library in map(load_library, options.library)
    }
    table = format_table(cases, outcomes_by_library)
    if options.write:
        RESULTS.write_text(table)
    print(table)
    differences = [
        f"{library.name} differs from {case['name']}: {outcome.detail}"
        for library, outcomes in outcomes_by_library.items()
        for case, outcome in zip(cases, outcomes, strict=True)
        if outcome.status == "differs"
    ]
    if differences:
        raise SystemExit(
            "\n\n".join([*differences, f"{len(differences)} differences without a known reason"])
        )


def load_library(name: str) -> Library:
    """The library of a ``--library`` argument."""
    kind, _, clone = name.partition("=")
    if kind in CLONES:
        if not clone:
            raise SystemExit(f"{kind} is run from a clone: --library {kind}=/path/to/clone")
        return CLONES[kind](Path(clone))
    if name in INSTALLED:
        return INSTALLED[name]()
    if ":" not in name:
        raise SystemExit(
            f"unknown library {name!r}; take {', '.join([*INSTALLED, *CLONES])} or"
            " package.module:NAME"
        )
    try:
        library: Library = import_object(name)
    except RecipeError as error:
        raise SystemExit(f"--library {error}") from None
    return library


def run_case(library: Library, case: Mapping[str, Any]) -> Outcome:
    """One function on one case."""
    if case["function"] not in library.functions:
        return Outcome("not offered")
    expected = case["expected"]
    inputs_and_settings = case["inputs"] | case["settings"]
    try:
        returned = library.functions[case["function"]](
            SimpleNamespace(function=case["function"], **inputs_and_settings)
        )
        values = {name: _to_array(value) for name, value in returned.items()}
    except NotOffered as error:
        return Outcome("not offered", detail=str(error))
    # code that others wrote may raise anything, and the cases after it still run
    except Exception as error:
        return Outcome("differs", float("inf"), f"{type(error).__name__}: {error}")
    if not values or not values.keys() <= expected.keys():
        return Outcome(
            "differs",
            float("inf"),
            f"it returned {sorted(values)}; return some of {sorted(expected)}",
        )
    errors = {name: compute_relative_error(value, expected[name]) for name, value in values.items()}
    limits = {name: TOLERANCE.get(value.dtype.name, 0.0) for name, value in values.items()}
    # not "errors > limits": an error of NaN is no agreement
    far = [name for name in values if not errors[name] <= limits[name]]
    worst = max(errors.values())
    left_out = tuple(name for name in expected if name not in values)
    reason = library.differences.get(case["name"], library.differences.get(case["function"], ""))
    if not far and not reason:
        return Outcome("agrees", worst, left_out=left_out)
    # A known difference that is gone is a failure too, or the table would go on claiming it.
    if far and reason:
        return Outcome("differs as known", worst, reason, left_out)
    if reason:
        return Outcome(
            "differs", worst, f"it agrees now; take this out of its known differences: {reason}"
        )
    # all that is needed to find the mistake, without opening the vectors file
    lines = [f"\n  settings  {case['settings']}", f"  equation  {case['equation']}"]
    for name in far:
        lines += [f"  {name}: the error is {errors[name]:.1e}, the limit {limits[name]:.0e}"]
        lines += [
            f"    expected  {_format_values(expected[name])}",
            f"    found     {_format_values(values[name])}",
        ]
    return Outcome("differs", worst, "\n".join(lines))


def compute_relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Compute the largest error over the largest expected magnitude; infinite for another shape.

    Not element by element: an element near 0 is the difference of larger ones, whose rounding it
    has.
    """
    if found.shape != expected.shape:
        return float("inf")
    found = found.astype(float)
    expected = expected.astype(float)
    return float(np.abs(found - expected).max() / (np.abs(expected).max() or 1.0))


def _to_array(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _format_values(values: np.ndarray) -> str:
    return (
        np.array2string(values.flatten(), precision=10, threshold=8, max_line_width=200)
        + f", shape {values.shape}"
    )


def format_table(
    cases: Sequence[Mapping[str, Any]], found: Mapping[Library, Sequence[Outcome]]
) -> str:
    """A row for each case, a column for each library, and the known differences."""
    lines = [
        HEADER,
        f"| case | {' | '.join(f'{library.name} {library.version}' for library in found)} |",
    ]
    lines.append(f"|{'---|' * (1 + len(found))}")
    for number, case in enumerate(cases):
        cells = [_format_cell(outcomes[number]) for outcomes in found.values()]
        lines.append(f"| `{case['name']}` | {' | '.join(cells)} |")
    totals = [[outcome.status for outcome in outcomes] for outcomes in found.values()]
    counts = [
        f"{total.count('agrees')} of {len(total) - total.count('not offered')}" for total in totals
    ]
    lines += [f"| **agree, of those offered** | {' | '.join(counts)} |", ""]
    for library, outcomes in found.items():
        pairs = zip(cases, outcomes, strict=True)
        left_out = sorted(
            {
                f"{name} (`{case['function']}`)"
                for case, outcome in pairs
                for name in outcome.left_out
            }
        )
        if left_out:
            lines.append(
                f"- Not compared for {library.name}, which does not return it:"
                f" {', '.join(left_out)}."
            )
        lines += [
            f"- {library.name} differs from `{name}`: {why}."
            for name, why in library.differences.items()
        ]
    names = [library.name + "=CLONE" * (library.name in CLONES) for library in found]
    return "\n".join(
        [*lines, "", f"`python -m benchmarks.conformance --library {' '.join(names)}`", ""]
    )


def _format_cell(outcome: Outcome) -> str:
    if outcome.status == "not offered":
        return "–"
    return (
        f"{outcome.error:.0e}"
        if outcome.status == "agrees"
        else f"**{outcome.status}**: {outcome.error:.0e}"
    )


HEADER = """# Which library agrees with the closed forms

Golden vectors of `python -m benchmarks.conformance` ([format](../../docs/conformance.md)): the
largest error of any value, over the largest expected magnitude. Limits: 1e-10 where the library
computes in float64, 2e-5 in float32. A dash: not offered.
"""


if __name__ == "__main__":
    main()
