"""The conformance kit: its vectors are those of the closed forms, Ebbflow agrees with all, and what
differs is found.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from diffusers import FlowMatchEulerDiscreteScheduler

from benchmarks import conformance, conformance_batch_forms, conformance_forms
from benchmarks.conformance import main, run_case
from benchmarks.conformance_adapters import (
    LOSSES,
    Library,
    NotOffered,
    build_diffusers,
    build_ebbflow,
)
from benchmarks.conformance_cases import VECTORS, compute_vectors, read_vectors, write_vectors

CASES = read_vectors()
OURS = build_ebbflow()
DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


def test_the_committed_vectors_are_those_of_the_closed_forms():
    committed = json.loads(VECTORS.read_text())["cases"]
    fresh = list(compute_vectors())
    assert [case | {"expected": None} for case in committed] == [
        case | {"expected": None} for case in fresh
    ]
    for old, new in zip(committed, fresh, strict=True):
        assert old["expected"].keys() == new["expected"].keys()
        for name, values in new["expected"].items():
            np.testing.assert_allclose(
                old["expected"][name],
                values,
                rtol=1e-12,
                atol=1e-14,
                err_msg=f"{new['name']} {name}",
            )


def test_the_closed_forms_use_nothing_that_they_are_compared_with():
    trees = [
        ast.parse(inspect.getsource(module))
        for module in (conformance_forms, conformance_batch_forms)
    ]
    imports = [
        node
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    names = {alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in imports if isinstance(node, ast.ImportFrom)}
    assert names == {
        "__future__",
        "benchmarks.conformance_batch_forms",
        "collections.abc",
        "itertools",
        "math",
        "numpy",
        "statistics",
        "typing",
    }


@pytest.mark.parametrize(
    ("function", "eta", "mean", "std", "score"),
    [
        ("flow_sde_step", 0.7, 0.322591, 0.391794, 0.000916),
        ("cps_step", 0.8, 0.246155, 0.672662, -0.000015),
        ("dance_sde_step", 1.2, 0.326771, 0.345904, 0.118027),
    ],
)
def test_the_closed_forms_have_the_published_golden_values(function, eta, mean, std, score):
    schedule = FlowMatchEulerDiscreteScheduler(shift=3.0)
    schedule.set_timesteps(10)
    constants = {
        name: np.full((1, 2), value)
        for name, value in {"latents": 0.3, "velocity": -0.5, "recorded": 0.25}.items()
    }
    case = SimpleNamespace(
        **constants,
        noise=np.zeros((1, 2)),
        sigmas=schedule.sigmas.double().numpy(),
        step=4,
        eta=eta,
    )
    found = conformance_forms.FORMS[function](case)
    assert [found["mean"][0, 0], found["std"], found["log_prob"][0]] == pytest.approx(
        [mean, std, score], abs=1e-6
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_ebbflow_agrees_with_every_conformance_vector(case):
    outcome = run_case(OURS, case)
    assert outcome.status == "agrees", outcome.detail
    assert outcome.left_out == ()


def test_every_closed_form_has_cases_and_every_loss_a_closed_form():
    functions = {case["function"] for case in CASES}
    assert functions == set(conformance_forms.FORMS)
    covered = {algorithm.loss for name, algorithm in LOSSES.items() if f"{name}_loss" in functions}
    own = {
        name: algorithm
        for name, algorithm in LOSSES.items()
        if algorithm.config.kind not in ("gradient", "direct_align", "matching")
    }
    assert {name for name, algorithm in own.items() if algorithm.loss not in covered} == set()
    assert len({case["name"] for case in CASES}) == len(CASES)


def test_diffusers_agrees_with_what_it_offers():
    outcomes = {case["name"]: run_case(build_diffusers(), case) for case in CASES}
    offered = {name for name, outcome in outcomes.items() if outcome.status != "not offered"}
    assert {name.split("/")[0] for name in offered} == {"ode_step", "cps_step", "dpm_solver_steps"}
    assert {outcomes[name].status for name in offered} == {"agrees"}


def test_a_changed_value_is_found_in_every_expected_array():
    for case in CASES:
        for name, values in case["expected"].items():
            wrong = values.copy()
            if wrong.dtype == bool:
                wrong.flat[0] = not wrong.flat[0]
            else:
                wrong.flat[np.abs(wrong).argmax()] *= 1 + 1e-4
            outcome = run_case(OURS, case | {"expected": case["expected"] | {name: wrong}})
            assert outcome.status == "differs", (case["name"], name)
            assert f"  {name}: the error is" in outcome.detail


def test_the_run_fails_and_shows_the_case_that_differs(tmp_path, monkeypatch, capsys):
    document = json.loads(VECTORS.read_text())
    case = next(case for case in document["cases"] if case["name"] == "sft_loss/rows")
    case["expected"]["loss"][2] += 0.01
    monkeypatch.setattr(conformance, "VECTORS", tmp_path / "vectors.json")
    (tmp_path / "vectors.json").write_text(json.dumps(document))
    with pytest.raises(SystemExit) as failed:
        main(["--library", "ebbflow", "--only", "s*"])
    message = str(failed.value)
    assert "ebbflow differs from sft_loss/rows" in message
    assert "L = mean((v - u)^2)" in message
    assert "1 differences without a known reason" in message
    assert "| `sft_loss/rows` | **differs**" in capsys.readouterr().out


def test_vectors_of_another_format_are_refused(tmp_path):
    (tmp_path / "vectors.json").write_text('{"format": 2, "cases": []}')
    with pytest.raises(SystemExit, match=r"format 2.*conformance\.md"):
        read_vectors(tmp_path / "vectors.json")


def test_written_vectors_are_read_as_they_were_computed(tmp_path):
    write_vectors(tmp_path / "vectors.json")
    assert [case["name"] for case in read_vectors(tmp_path / "vectors.json")] == [
        case["name"] for case in CASES
    ]


def test_the_adapter_in_the_document_runs_as_it_is_printed(tmp_path, monkeypatch, capsys):
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (tmp_path / "printed_adapter.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    main(["--library", "printed_adapter:LIBRARY"])
    table = capsys.readouterr().out
    assert "| **agree, of those offered** | 4 of 4 |" in table
    assert (
        "which does not return it: gradient (`flow_grpo_loss`), mean_loss (`flow_grpo_loss`)"
        in table
    )


def library(function, **differences):
    return Library("other", "1", {"sft_loss": function}, differences)


def test_what_another_library_returns_decides():
    case = next(case for case in CASES if case["function"] == "sft_loss")
    right = lambda c: {"loss": ((c.velocity - c.noise + c.clean) ** 2).mean((1, 2))}  # noqa: E731
    single = lambda c: {"loss": right(c)["loss"].astype(np.float32)}  # noqa: E731
    wrong = lambda c: {"loss": right(c)["loss"] * 1.01}  # noqa: E731

    def fails(c):
        raise NotImplementedError("no such kernel")

    def refuses(c):
        raise NotOffered("pairs alone")

    assert run_case(library(right), case).status == "agrees"
    assert run_case(library(right), case).left_out == ("mean_loss", "gradient")
    assert 1e-9 < run_case(library(single), case).error < 1e-6
    assert run_case(library(single), case).status == "agrees"
    assert run_case(library(wrong), case).status == "differs"
    assert run_case(library(wrong, sft_loss="a factor"), case).status == "differs as known"
    assert "take this out" in run_case(library(right, sft_loss="a factor"), case).detail
    assert "shape" in run_case(library(lambda c: {"loss": right(c)["loss"][:1]}), case).detail
    assert "return some of" in run_case(library(lambda c: {}), case).detail
    assert run_case(library(lambda c: {"loss": np.full(6, np.nan)}), case).status == "differs"
    assert run_case(library(fails), case).detail == "NotImplementedError: no such kernel"
    assert run_case(library(refuses), case).status == "not offered"


CLONE = {
    "flow_grpo/diffusers_patch/sd3_sde_with_logprob.py": (
        """
import math
from diffusers.utils.torch_utils import randn_tensor

def sde_step_with_logprob(
    self, model_output, timestep, sample, noise_level=0.7, prev_sample=None, sde_type="sde"
):
    step = self.index_for_timestep(timestep[0])
    sigma, after = self.sigmas[step], self.sigmas[step + 1]
    std = after * math.sin(noise_level * math.pi / 2)
    clean, noise = sample - sigma * model_output, sample + (1 - sigma) * model_output
    mean = (1 - after) * clean + (after**2 - std**2).sqrt() * noise
    if prev_sample is None:
        prev_sample = mean + std * randn_tensor(sample.shape)
    return prev_sample, -((prev_sample - mean) ** 2).mean((1, 2, 3)), mean, std
"""
    ),
    "flow_grpo/stat_tracking.py": (
        """
class PerPromptStatTracker:
    def __init__(self, global_std):
        pass

    def update(self, prompts, rewards):
        return rewards - 1.0
"""
    ),
}
"""A clone whose step is CPS whatever it is asked for, and whose advantages are wrong."""


def test_the_files_of_a_clone_are_run(tmp_path, capsys):
    for path, code in CLONE.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(code)
    with pytest.raises(SystemExit) as failed:
        main(["--library", f"flow_grpo={tmp_path}"])
    table = capsys.readouterr().out
    assert "| case | flow_grpo " in table
    cells = dict(re.findall(r"\| `(.*?)` \| (.*?) \|", table))
    assert all(float(cell) < 1e-5 for name, cell in cells.items() if name.startswith("cps_step"))
    wrong = re.findall("differs from (.*?):", str(failed.value))
    assert wrong == [name for name in cells if name.startswith("flow_sde_step")]
    assert [name for name, cell in cells.items() if "as known" in cell] == [
        "advantages/global_std",
        "advantages/group_std",
        "advantages/group_without_spread",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--library", "flow_grpo"], "--library flow_grpo=/path/to/clone"),
        (
            ["--library", "flow_grpo=/nowhere"],
            r"/nowhere has no flow_grpo/diffusers_patch/sd3_sde_with_logprob\.py",
        ),
        (["--library", "trl"], "unknown library 'trl'"),
        (["--library", "no_such_package:LIBRARY"], "cannot be imported"),
        (["--only", "nothing/*"], r"no case is named 'nothing/\*'"),
    ],
)
def test_what_cannot_be_run_is_said(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments)
