"""The cases of the conformance kit: a closed form, settings and inputs each. Every setting is said,
so that no default matters.

To add one, write its closed form in ``conformance_forms``, yield it here, name the function in an
adapter, and run ``python -m benchmarks.conformance --write-vectors``. CRD has none yet.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from benchmarks import conformance_forms as forms

VECTORS = Path(__file__).with_name("conformance_vectors.json")
FORMAT = 1
"""Of the vectors file; a reader of another library checks it."""
# As small as the formulas allow: a gradient by complex steps costs a call per element, and a person
# should be able to read a vector. Not square, so that a transposed axis shows.
SHAPE = (2, 3)
"""Of a latent: D = 6."""
STEPS = 10
ROWS = 6
"""Of a loss: three groups, or pairs, of two."""
Cases: TypeAlias = Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]
"""(name, closed form, settings, inputs) of each."""
# the defaults of the samplers, as published
ETA = [("flow_sde_step", 0.7), ("dance_sde_step", 0.3), ("cps_step", 0.8)]


def read_vectors(path: Path = VECTORS) -> list[dict[str, Any]]:
    """The cases of a vectors file, inputs and expected values as arrays; null becomes NaN."""
    document = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        raise SystemExit(
            f"{path} has format {document.get('format')!r}, this kit reads {FORMAT}; see"
            " docs/conformance.md"
        )
    return [
        case | {part: _convert_to_arrays(case[part]) for part in ("inputs", "expected")}
        for case in document["cases"]
    ]


def write_vectors(path: Path = VECTORS) -> None:
    """Compute all cases from the closed forms, a line of the file each."""
    # a line each: a diff shows which cases a change of a form touches
    lines = ",\n".join(json.dumps(case) for case in compute_vectors())
    path.write_text(f'{{"format": {FORMAT}, "cases": [\n{lines}\n]}}\n')


def compute_vectors() -> Iterator[dict[str, Any]]:
    """Every case with its expected values, as the vectors file has it."""
    for name, function, settings, inputs in _list_cases():
        form = forms.FORMS[function]
        expected = form(SimpleNamespace(**_convert_to_arrays(inputs), **settings))
        plain = {key: np.asarray(value).tolist() for key, value in expected.items()}
        head = {
            "name": f"{function}/{name}",
            "function": function,
            "equation": _join_lines(inspect.getdoc(form) or ""),
        }
        yield head | {"settings": settings, "inputs": inputs, "expected": plain}


def _join_lines(text: str) -> str:
    """Return the paragraphs of a docstring with a line each."""
    return "\n\n".join(" ".join(paragraph.split("\n")) for paragraph in text.split("\n\n"))


def _convert_to_arrays(values: dict[str, Any]) -> dict[str, Any]:
    arrays = {key: np.array(value) for key, value in values.items()}
    # a list with a null, the score of a failed sample, is an array of objects: null becomes NaN
    return {
        key: value.astype(float) if value.dtype == object else value
        for key, value in arrays.items()
    }


def _random_numbers(seed: str, *shape: int, scale: float = 1.0) -> Any:
    """Random numbers with four decimals, the same on every machine."""
    # Python's generator is the same in all versions; NumPy's may change between releases. Four
    # decimals are exact in the file and short enough to read.
    generator = random.Random(seed)
    numbers = [round(generator.gauss(0, scale), 4) for _ in range(int(np.prod(shape)))]
    return np.array(numbers).reshape(shape)


def _list_cases() -> Cases:
    for each in (
        _list_step_cases(),
        _list_trajectory_losses(),
        _list_forward_losses(),
        _list_advantage_cases(),
        _list_correction_cases(),
    ):
        for name, function, settings, inputs in each:
            yield (
                name,
                function,
                settings,
                {key: np.asarray(value).tolist() for key, value in inputs.items()},
            )


def _list_step_cases() -> Cases:
    # 1 to 0 with the timestep shift of SD3, s = 3: shifted = s t / (1 + (s - 1) t)
    even = np.linspace(1, 0, STEPS + 1)
    sigmas = np.round(3 * even / (1 + 2 * even), 4)
    inputs = {
        name: _random_numbers(name, 2, *SHAPE) for name in ("latents", "velocity", "noise")
    } | {"sigmas": sigmas}
    # the first step, where sigma = 1 needs a rule of its own, one in the middle, and the last
    for step in (0, 4, 8, 9):
        yield f"step_{step}", "ode_step", {"step": step}, inputs
    # Not step 9: at sigma' = 0 the standard deviation of CPS is 0, and a density has no value.
    # CPS with eta = 1 replaces all of the noise, which is the one stochastic step of diffusers.
    stochastic = [(function, eta, step) for function, eta in ETA for step in (0, 4, 8)]
    for function, eta, step in [*stochastic, ("cps_step", 1.0, 4)]:
        transition = forms.FORMS[function](
            SimpleNamespace(**inputs, recorded=inputs["latents"], step=step, eta=eta)
        )
        # a plausible next latent, so that the log-prob is of the size that training sees
        recorded = (
            transition["mean"] + transition["std"] * _random_numbers("recorded", 2, *SHAPE)
        ).round(4)
        yield (
            f"step_{step}_eta_{eta}",
            function,
            {"step": step, "eta": eta},
            inputs | {"recorded": recorded},
        )
    for name, schedule in (("from_pure_noise", sigmas), ("from_a_later_sigma", sigmas[2:])):
        velocities = _random_numbers(name, len(schedule) - 1, 2, *SHAPE)
        yield (
            name,
            "dpm_solver_steps",
            {},
            {"latents": inputs["latents"], "velocities": velocities, "sigmas": schedule},
        )


def _list_trajectory_losses() -> Cases:
    # Means [ROWS, *SHAPE], the others a number for each row.
    old = _random_numbers("old", ROWS, *SHAPE)
    std = np.linspace(0.2, 0.7, ROWS).round(4)
    dt = -np.linspace(0.05, 0.2, ROWS).round(4)
    inputs = {
        "mean": (old + _random_numbers("moved", ROWS, *SHAPE, scale=0.15)).round(4),
        "old_mean": old,
        "next_latents": (old + std[:, None, None] * _random_numbers("z", ROWS, *SHAPE)).round(4),
        "teacher_mean": (old + _random_numbers("teacher", ROWS, *SHAPE, scale=0.3)).round(4),
        "reference_mean": (old + _random_numbers("reference", ROWS, *SHAPE, scale=0.2)).round(4),
        "advantage": _random_numbers("advantage", ROWS),
        "std": std,
        "dt": dt,
    }
    # Some published losses take one std and dt for the whole batch. They can agree where all rows
    # are of the same step, and differ where they are not.
    for name, same in (
        ("steps_differ", inputs),
        ("same_step", inputs | {"std": np.full(ROWS, 0.4), "dt": np.full(ROWS, -0.1)}),
    ):
        old_log_prob, log_prob = (
            forms.log_density(same["next_latents"], same[key], same["std"])
            for key in ("old_mean", "mean")
        )
        rows = same | {"old_log_prob": old_log_prob, "log_prob": log_prob}
        # A narrow range and a wide one: clipped and free rows take different branches, and each has
        # a gradient to get wrong.
        for clip_range in (0.02, 0.5):
            yield f"{name}_clip_{clip_range}", "flow_grpo_loss", {"clip_range": clip_range}, rows
        yield (
            f"{name}_clip_0.02",
            "tempflow_grpo_loss",
            {"clip_range": 0.02, "noise_weight": 2.25},
            rows,
        )
        for clip_range in (0.005, 0.5):
            yield f"{name}_clip_{clip_range}", "grpo_guard_loss", {"clip_range": clip_range}, rows
        for limit in (0.01, 0.1):
            yield f"{name}_limit_{limit}", "flow_dppo_loss", {"divergence_limit": limit}, rows
        for function in ("distillation_loss", "reference_kl", "reference_kl_without_dt"):
            yield name, function, {}, rows


def _list_forward_losses() -> Cases:
    # Noise and sigma are shared within a group, as in training: a comparison of two samples is then
    # one of the samples and not of their noise.
    group = np.arange(ROWS) // 2
    velocities = {
        name: _random_numbers(name, ROWS, *SHAPE)
        for name in ("velocity", "old_velocity", "reference_velocity")
    }
    inputs = {
        "clean": _random_numbers("clean", ROWS, *SHAPE),
        "noise": _random_numbers("eps", ROWS, *SHAPE)[group],
    } | velocities
    inputs |= {
        "sigma": np.array([0.3, 0.6, 0.85])[group],
        "advantage": _random_numbers("advantage", ROWS, scale=2),
        "group_index": group,
    }
    for mode in ("all", "positive_only", "negative_only", "one_only", "binary"):
        betas = (1.0, 0.1) if mode == "all" else (1.0,)
        for beta in betas:
            settings: dict[str, Any] = {"beta": beta, "advantages": mode, "advantage_clip": 5.0}
            yield f"{mode}_beta_{beta}", "diffusion_nft_loss", settings, inputs
    for surrogate in ("power", "plain", "sigma", "sigma_squared"):
        settings = {"surrogate": surrogate, "power": 0.25, "old_weight": 0.0, "advantage_clip": 5.0}
        yield surrogate, "awm_loss", settings, inputs
        if surrogate == "power":
            yield "power_near_the_old_policy", "awm_loss", settings | {"old_weight": 1.0}, inputs
    yield "beta_2", "diffusion_dpo_loss", {"beta": 2.0}, inputs
    for clip_range in (None, 0.3):
        yield (
            f"beta_2_clip_{clip_range}",
            "dgpo_loss",
            {"beta": 2.0, "clip_range": clip_range},
            inputs,
        )
    for beta in (1.0, 0.5):
        yield f"beta_{beta}", "crd_loss", {"beta": beta, "advantage_clip": 5.0}, inputs
    yield "temperature_1.5", "rwr_loss", {"temperature": 1.5}, inputs
    for function in ("sft_loss", "reference_velocity"):
        yield "rows", function, {}, inputs


def _list_advantage_cases() -> Cases:
    rewards = (_random_numbers("rewards", 2, 12, scale=0.3) + 0.5).round(4)
    # three prompts of four samples each, mixed: a form that takes neighbours for a group fails
    ids = np.arange(12) % 3
    one = {
        "rewards": rewards[:1],
        "weights": [1.0],
        "prompt_ids": ids,
        "earlier_rewards": [[]],
        "earlier_prompt_ids": [],
    }
    # rewards of different scales, for which a sum of rewards and a sum of advantages differ
    two = one | {
        "rewards": rewards * [[1.0], [20.0]],
        "weights": [0.7, 0.2],
        "earlier_rewards": [[], []],
    }
    flat = rewards[:1].copy()
    failed = rewards[:1].astype(object)
    flat[0, ids == 1] = 0.5  # a group without a spread would divide by 0
    failed[0, 4] = None
    past = {
        "earlier_rewards": (_random_numbers("past", 1, 9, scale=0.3) + 0.4).round(4),
        "earlier_prompt_ids": np.arange(9) % 3,
    }
    plain = {"std": "group", "combine": "sum", "trim": 0.0, "keep_extremes": None, "clip": 5.0}
    for std in ("global", "group", "none"):
        yield f"{std}_std", "advantages", plain | {"std": std}, one
    yield "sum_of_two", "advantages", plain, two
    yield "each_of_two", "advantages", plain | {"combine": "per_reward"}, two
    yield "clipped", "advantages", plain | {"clip": 0.6}, one
    yield "trimmed_baseline", "advantages", plain | {"trim": 0.25}, one
    yield "extremes_alone", "advantages", plain | {"keep_extremes": 1}, one
    yield "group_without_spread", "advantages", plain, one | {"rewards": flat}
    yield "failed_score", "advantages", plain, one | {"rewards": failed}
    yield "running_statistics", "advantages", plain, one | past


def _list_correction_cases() -> Cases:
    # [samples, steps], log-prob of training minus that of the rollout; both signs, as the rules
    # have an upper and a lower limit
    delta = _random_numbers("delta", 5, 4, scale=0.02)
    dims = int(np.prod(SHAPE))
    bounds = {
        "low": 0.9,
        "high": 1.1,
        "normalise": False,
        "reject": "none",
        "reject_level": "step",
        "reject_above": 1.0,
    }
    plain: dict[str, Any] = {
        "dims": dims,
        "unit": "sum",
        "weights": "truncated",
        "level": "step",
    } | bounds
    for weights in ("truncated", "masked"):
        for level in ("step", "trajectory"):
            yield (
                f"{weights}_{level}",
                "rollout_correction",
                plain | {"weights": weights, "level": level},
                {"delta": delta},
            )
    yield (
        "mean_unit",
        "rollout_correction",
        plain | {"unit": "mean", "low": 0.98, "high": 1.02},
        {"delta": delta},
    )
    for weights in ("truncated", "masked"):
        yield (
            f"{weights}_normalised",
            "rollout_correction",
            plain | {"weights": weights, "normalise": True},
            {"delta": delta},
        )
    for reject, above in (("k1", 0.15), ("k2", 0.01), ("k3", 0.01)):
        for level in ("step", "sequence_mean", "sequence_sum", "sequence_max"):
            rule: dict[str, Any] = {"weights": "none", "reject": reject, "reject_level": level}
            # a sum over four steps is that much larger than one step
            rule["reject_above"] = above * (4 if level == "sequence_sum" else 1)
            yield f"reject_{reject}_{level}", "rollout_correction", plain | rule, {"delta": delta}
    yield "rows", "rollout_divergence", {"dims": dims}, {"delta": delta}
