"""What a person reads last: the verdict with its interval, and where everything is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.data.records import Comparison, GateDecision, Registration, TrackedRun
from ebbflow.recipe import Recipe
from ebbflow.registry.serving import how_to_load
from ebbflow.report.outcome import describe_outcome, read_example_prompt
from ebbflow.tracking.store import resolve_tracking_uri

TARGET = Comparison(
    metric="reward",
    champion=0.523,
    candidate=0.973,
    difference=0.45,
    low=0.41,
    high=0.49,
    prompts=96,
)


@pytest.fixture(autouse=True)
def _folder_of_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def outcome(
    champion: bool,
    promote: bool,
    uri: str | None = None,
    previous: str | None = None,
    target: Comparison = TARGET,
    declined: bool = False,
    **recipe: Any,
) -> list[str]:
    reasons = ["Coverage is full.", *([] if promote else ["Refused: Guardrail ocr fell."])]
    decision = GateDecision(
        promote=promote,
        candidate="1.2 offline",
        champion="before",
        target=target,
        guardrails=[],
        coverage=1.0,
        reasons=reasons,
    )
    run = TrackedRun(
        run_id="abc",
        experiment_id="1",
        tracking_uri=uri or resolve_tracking_uri(Recipe()),
        folder="runs/glyph-abc",
        recipe_digest="d",
        started_at=0.0,
    )
    registration = Registration(
        model_name="mine", version="7", champion=champion, previous=previous, declined=declined
    )
    return describe_outcome(
        Recipe.model_validate(recipe),
        run,
        decision,
        registration,
        policy="runs/policy",
        base="runs/base",
        example="HI YOU",
    ).splitlines()


def test_a_promotion_names_version_interval_and_places() -> None:
    assert outcome(champion=True, promote=True, previous="6") == [
        "PROMOTED: mine version 7 (1.2 offline) is champion and replaces version 6",
        (
            "reward 0.523 -> 0.973, +0.450 with 95% interval [+0.410, +0.490] over 96 prompts,"
            " against before"
        ),
        "",
        "report  runs/glyph-abc/report.html",
        "policy  runs/policy",
        "base    runs/base",
        (
            "MLflow  ebbflow ui, then"
            " http://127.0.0.1:5000/#/experiments/1/runs/abc?workflowType=machine_learning"
        ),
        f"load    {how_to_load(resolve_tracking_uri(Recipe()), 'mine', '7')}",
        "draw    ebbflow draw mine@champion 'HI YOU' --out pictures",
    ]


SMALL = Comparison(
    metric="reward",
    champion=0.3689,
    candidate=0.365,
    difference=-0.0039,
    low=-0.007,
    high=-0.000377,
    prompts=12,
)
LARGE = Comparison(
    metric="reward",
    champion=-21012.5,
    candidate=-20400.2,
    difference=612.3,
    low=600.4,
    high=700.0,
    prompts=12,
)


@pytest.mark.parametrize(
    ("target", "compared"),
    [
        (
            SMALL,
            (
                "reward 0.369 -> 0.365, -0.00390 with 95% interval [-0.00700, -0.000377] over 12"
                " prompts, against before"
            ),
        ),
        (
            LARGE,
            (
                "reward -21,012 -> -20,400, +612 with 95% interval [+600, +700] over 12 prompts,"
                " against before"
            ),
        ),
    ],
)
def test_numbers_of_every_scale_can_be_read(target: Comparison, compared: str) -> None:
    assert outcome(champion=True, promote=True, target=target)[1] == compared


def test_a_refusal_says_why_and_draws_the_challenger() -> None:
    said = outcome(champion=False, promote=False)
    assert said[0] == "NOT PROMOTED: mine version 7 (1.2 offline) is challenger"
    assert said[2] == "Refused: Guardrail ocr fell."
    assert "mine@challenger" in said[-1]


def test_a_person_is_waited_for() -> None:
    assert outcome(champion=False, promote=True, promotion={"approval": 2})[0].startswith(
        "WAITS FOR APPROVAL: mine version 7"
    )


def test_a_no_of_a_person_is_the_verdict() -> None:
    said = outcome(champion=False, promote=True, promotion={"approval": 2}, declined=True)
    assert said[0] == "NOT APPROVED: mine version 7 (1.2 offline) stays challenger"


def test_a_server_has_an_address_and_the_command_names_it() -> None:
    said = outcome(champion=True, promote=True, uri="http://tracking:5000/")
    assert (
        "MLflow  http://tracking:5000/#/experiments/1/runs/abc?workflowType=machine_learning"
        in said
    )
    assert said[-1].startswith(
        "draw    MLFLOW_TRACKING_URI=http://tracking:5000/ ebbflow draw mine@champion"
    )


def test_another_store_is_named(tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/elsewhere/mlflow.db"
    said = outcome(champion=True, promote=True, uri=uri)
    assert said[-3].startswith(f"MLflow  MLFLOW_TRACKING_URI={uri} ebbflow ui, then ")
    assert said[-1].startswith(f"draw    MLFLOW_TRACKING_URI={uri} ebbflow draw")


@pytest.mark.parametrize(("target", "example"), [("ABCD", "ABCD"), (None, "a cat")])
def test_the_example_is_of_a_held_out_prompt(
    tmp_path: Path, target: str | None, example: str
) -> None:
    rows = {
        "split": ["validation", "held_out"],
        "prompt": ["a dog", "a cat"],
        "target": ["XXXX", target],
    }
    pq.write_table(pa.table(rows), tmp_path / "samples.parquet")
    assert read_example_prompt(tmp_path / "samples.parquet") == example
