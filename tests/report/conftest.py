"""The MLflow store of these tests, and the report of an invented run."""

import pytest
from markupsafe import Markup
from report_cases import curves, evaluation, samples, write_page

from ebbflow.data.records import Registration, StageRecord, TrackedRun
from ebbflow.evaluation.gate import decide_by_gate
from ebbflow.plots import charts
from ebbflow.recipe import Recipe
from ebbflow.report.run_report import ReportInputs
from tests.store_fixtures import *  # noqa: F403


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    folder = tmp_path_factory.mktemp("report")
    recipe = Recipe.model_validate({"output": str(folder), "evaluation": {"resamples": 1000}})
    shares = {"before": 0.58, "1.1 online": 0.82, "1.2 offline": 0.95}
    evaluations = []
    tables = []
    for index, (label, share) in enumerate(shares.items()):
        path = folder / f"{index}.parquet"
        tables.append(samples(path, share))
        evaluations.append((evaluation(label, tables[-1], 40 * index), path))
    phases = {"rollout": 14.2, "scoring": 6.8, "training": 11.9}
    return ReportInputs(
        recipe=recipe,
        tracked=TrackedRun(
            run_id="0123456789abcdef0123456789abcdef",
            experiment_id="1",
            tracking_uri=f"sqlite:///{folder}/mlflow.db",
            folder=str(folder),
            recipe_digest=recipe.digest,
            started_at=0.0,
        ),
        evaluations=evaluations,
        stages=[
            (
                StageRecord(
                    label="1.1 online",
                    algorithm="flow_grpo",
                    samples=5120,
                    optimizer_steps=80,
                    seconds=phases,
                ),
                curves(40, True),
            ),
            (
                StageRecord(
                    label="1.2 offline",
                    algorithm="diffusion_nft",
                    samples=1024,
                    optimizer_steps=16,
                    seconds=phases | {"advantages": 0.4},
                ),
                curves(16, False),
            ),
        ],
        decision=decide_by_gate(recipe, evaluations[2][0], evaluations[0][0], tables[2], tables[0]),
        registration=Registration(
            model_name="ebbflow-glyph", version="1", champion=True, previous=None
        ),
        base_seconds=74.3,
    )


@pytest.fixture(scope="session")
def page(inputs: ReportInputs, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page with its charts; drawing them is what takes the time."""
    return write_page(inputs, tmp_path_factory.mktemp("page") / "new" / "report.html")


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are not drawn; only what they say to a screen reader is there."""
    monkeypatch.setattr(
        charts,
        "render_svg",
        lambda figure, text: Markup('<svg role="img" aria-label="{}"></svg>').format(text),
    )
