"""What users wrote stays text in everything that a browser or MLflow's UI renders."""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from flytekit.deck.deck import _get_deck
from PIL import Image

from ebbflow.data.images import encode_pngs
from ebbflow.data.records import Evaluation, Registration, StageRecord, TrackedRun
from ebbflow.data.schema import build_evaluation_schema
from ebbflow.evaluation.gate import decide_by_gate
from ebbflow.plots import charts
from ebbflow.plots.images import build_image_grid, format_caption
from ebbflow.recipe import Recipe
from ebbflow.recipe.base import RecipeError
from ebbflow.report.run_report import (
    ReportInputs,
    format_summary_table,
    summarise_run,
    write_report,
)
from ebbflow.tracking.child_run import open_node_run
from ebbflow.tracking.parent_run import _build_parent_tags, start_run
from ebbflow.tracking.store import connect_to_store

pytestmark = pytest.mark.filterwarnings("ignore:Glyph")
PLANT = "PLANTED"
HOSTILE = [
    f"<script>{PLANT}</script>",
    f"\"><img src=x onerror='{PLANT}'>",
    f"' onmouseover='{PLANT}",
    f"</title></style></svg></script><iframe name={PLANT}>",
    f"{{{{7*7}}}} {{% raw %}} {PLANT}",
    f"<!-- {PLANT} --> <![CDATA[ {PLANT} ]]> &lt;b&gt;",
    f"\u202e\u2028\x0b\x85 \ufeff{PLANT}\U000e0001",
    f"$\\frac{{{PLANT}}}{{0}}$ $$ \\ %s %(x)s",
    f"javascript:{PLANT}//`${{{PLANT}}}`",
]
NO_PATH = re.compile(r"[\x00-\x1f\x7f-\x9f*?\[]")
"""What a recipe refuses in paths."""
TEXT_MAY_STAND_IN = {"title", "alt", "aria-label"}
METRICS = ["reward", "ocr", "exact_match"]


class Page(HTMLParser):
    """Elements and attributes of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: dict[str, int] = {}
        self.attributes: list[tuple[str, str, str]] = []
        self.comments: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements[tag] = self.elements.get(tag, 0) + 1
        self.attributes += [(tag, name, value or "") for name, value in attributes]

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


def write_evaluation(path: Path, label: str, version: int, text: str) -> tuple[Evaluation, Path]:
    """An evaluation of four samples with one text everywhere, and where the samples are."""
    picture = encode_pngs(np.full((1, 8, 8, 3), 90 * version, np.uint8))[0]
    rows = [
        {
            "prompt_id": prompt,
            "sample": 0,
            "split": "held_out",
            "prompt": text,
            "target": text if prompt % 2 else None,
        }
        | {
            "image": picture,
            "reward": 0.1 * version,
            "ocr": 0.2,
            "exact_match": 0.0,
            "failure": text,
        }
        for prompt in range(4)
    ]
    table = pa.Table.from_pylist(rows, schema=build_evaluation_schema(METRICS))
    pa.parquet.write_table(table, path)
    means = {"reward": 0.1 * version, "ocr": 0.2, "exact_match": 0.0, text: 0.3, "Own": 0.1}
    evaluation = Evaluation(
        label=label,
        policy_version=version,
        held_out=means,
        validation=means,
        coverage=1.0,
        velocity_drift=0.0,
        seconds={text: 1.0},
    )
    return evaluation, path


def made(folder: Path, hostile: str | None) -> ReportInputs:
    """A run's report with one text everywhere that a user or a server can have one, or with a
    harmless one.
    """
    text = hostile or "harmless"
    recipe = Recipe.model_validate(
        {
            "output": f"runs/{NO_PATH.sub('', text)}",
            "prompts": {"source": f"{NO_PATH.sub('', text)}.txt"},
            "tracking": {"experiment": text},
            "evaluation": {"resamples": 200},
            "policy": {"train": "lora", "targets": [text]},
            "rewards": [{"name": "a.b:Own", "options": {text: text}}],
            "guardrails": [],
        }
    )
    folder.mkdir()
    before, after = (
        write_evaluation(folder / f"{version}.parquet", label, version, text)
        for version, label in enumerate(("before", text))
    )
    tables = [pa.parquet.read_table(path) for _, path in (before, after)]
    decision = decide_by_gate(recipe, after[0], before[0], tables[1], tables[0])
    decision = decision.model_copy(
        update={
            "reasons": [*decision.reasons, text],
            "target": decision.target.model_copy(update={"metric": text}),
            "guardrails": [decision.target.model_copy(update={"metric": text})],
        }
    )
    record = StageRecord(
        label=text,
        algorithm=text,
        samples=8,
        optimizer_steps=2,
        seconds={text: 2.0},
        alarms=[text, text],
    )
    tracked = TrackedRun(
        run_id=text,
        experiment_id="1",
        tracking_uri=text,
        folder=text,
        recipe_digest=recipe.digest,
        started_at=0.0,
    )
    return ReportInputs(
        recipe=recipe,
        tracked=tracked,
        evaluations=[before, after],
        stages=[(record, [{"step": 1.0, "loss": 0.5, "reward/mean": 0.4, text: 0.1}])],
        decision=decision,
        registration=Registration(model_name=text, version=text, champion=True, previous=text),
        base_seconds=1.0,
        outages=[text],
    )


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("harmless")
    write_report(folder / "report.html", made(folder / "inputs", None))
    return Page((folder / "report.html").read_text())


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_report_has_the_same_elements_whatever_the_texts_say(tmp_path, harmless, hostile):
    inputs = made(tmp_path / "inputs", hostile)
    write_report(tmp_path / "report.html", inputs)
    page = Page((tmp_path / "report.html").read_text())
    drawn = {
        "path",
        "g",
        "use",
        "defs",
        "tspan",
        "clippath",
        "rect",
        "text",
        "style",
    }  # a chart's, as many as its labels need
    assert {tag: count for tag, count in page.elements.items() if tag not in drawn} == {
        tag: count for tag, count in harmless.elements.items() if tag not in drawn
    }
    assert page.elements.keys() == harmless.elements.keys()
    assert {(tag, name) for tag, name, _ in page.attributes} == {
        (tag, name) for tag, name, _ in harmless.attributes
    }
    assert {name for _, name, value in page.attributes if PLANT in value} <= TEXT_MAY_STAND_IN
    assert page.comments == []
    assert PLANT in page.text
    if "{{7*7}}" in hostile:
        assert "{{7*7}}" in page.text
    json.dumps(summarise_run(inputs), allow_nan=False)
    assert PLANT in format_summary_table(inputs)


def test_the_report_says_when_mlflow_was_away(tmp_path):
    sentence = "1.1 online: MLflow was away for 3 s; 40 records were delivered late"
    inputs = replace(made(tmp_path / "inputs", None), outages=[sentence], stages=[])
    write_report(tmp_path / "report.html", inputs)
    assert f'<li class="bad">✗ {sentence}</li>' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("hostile", HOSTILE[-2:])
def test_a_deck_takes_the_page_as_it_is(hostile):
    """Flyte fills the page into a template with $ in it, and escapes nothing."""
    page = SimpleNamespace(name="report", html=f"<p>{html.escape(hostile)}</p>")
    assert page.html in str(_get_deck(SimpleNamespace(decks=[page]), ignore_jupyter=True))


@pytest.mark.parametrize("hostile", HOSTILE)
def test_hostile_labels_in_charts_never_become_markup(hostile):
    evaluation = Evaluation(
        label=hostile,
        policy_version=0,
        held_out={hostile: 0.5},
        validation={},
        coverage=1.0,
        velocity_drift=0.0,
        seconds={},
    )
    progress = charts.plot_progress([evaluation, evaluation], [hostile], hostile, evaluation)
    svg = progress[0].svg + charts.plot_scatter([0.0, 1.0], [1.0, 1.0], hostile)
    page = Page(svg)
    assert {"script", "img", "iframe"}.isdisjoint(page.elements)
    assert {
        name for _, name, value in page.attributes if PLANT in value or name.startswith("on")
    } == {"aria-label"}
    assert page.comments == []
    assert PLANT in page.text


@pytest.mark.parametrize("hostile", HOSTILE)
def test_pictures_hold_no_text_but_pixels(hostile):
    png = encode_pngs(np.zeros((1, 16, 16, 3), np.uint8))[0]
    buffer = io.BytesIO()
    build_image_grid(
        [png], [format_caption({"target": None, "prompt": hostile, "reward": 1.0})], columns=1
    ).save(buffer, "PNG")
    assert PLANT.encode() not in buffer.getvalue()
    assert Image.open(buffer).info == {}


@pytest.mark.parametrize(
    "key", ["name", "promotion.model_name", "rewards.label", "rewards.metrics"]
)
@pytest.mark.parametrize(
    "hostile", [*HOSTILE, "../../x", "a/b", "a\\b", "..", "a\n", "", "/etc/passwd", "a\0b"]
)
def test_names_that_become_folders_columns_and_markdown_are_plain(key, hostile):
    """``name`` is in MLflow's note, which is markdown, and in the name of the run's folder."""
    recipes = {
        "name": {"name": hostile},
        "promotion.model_name": {"promotion": {"model_name": hostile}},
        "rewards.label": {"rewards": [{"name": "ocr", "label": hostile}]},
        "rewards.metrics": {
            "rewards": [{"name": "remote", "url": "http://127.0.0.1", "metrics": [hostile]}]
        },
    }
    with pytest.raises(RecipeError, match="should match pattern|surrogate"):
        Recipe.model_validate(recipes[key])


def test_the_note_of_a_run_is_made_of_plain_names():
    recipe = Recipe.model_validate({"stages": [{"kind": "online"}], "name": "a.b-c"})
    note = _build_parent_tags(recipe, "e")["mlflow.note.content"]
    assert note == "Recipe **a.b-c**, seed 0: 1 × (online mix_grpo), full training."


def test_tables_dumps_and_notes_in_mlflow_stay_data(tmp_path):
    """MLflow's UI renders tables and text files as text; what it gets is JSON with the same
    strings.
    """
    tracked = start_run(Recipe(output=str(tmp_path)), None)
    with open_node_run(tracked, "1.1 online") as run_logger:
        run_logger.log_table("samples", pa.table({"prompt": HOSTILE}))
        run_logger.log_params({"alarms": HOSTILE})
    client = connect_to_store(tracked.tracking_uri)
    logged = json.loads(
        Path(
            client.download_artifacts(run_logger.run_id, "samples.json", str(tmp_path))
        ).read_text()
    )
    assert [row[0] for row in logged["data"]] == HOSTILE
    assert list(client.get_run(run_logger.run_id).data.params.values()) == [
        str(text) for text in HOSTILE
    ]
