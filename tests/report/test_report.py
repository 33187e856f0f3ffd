"""The report of an invented but lifelike run: nothing a user wrote becomes markup, and the summary
says what was measured.
"""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from page_structure import contrasts, parse, problems
from report_cases import HOSTILE, write_page

from ebbflow.data.records import CategoryMeans, Evaluation, Registration
from ebbflow.formatting import format_number
from ebbflow.plots import charts
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.promotion import MarginsConfig
from ebbflow.registry.serving import how_to_load
from ebbflow.report.glossary import OWN, build_glossary
from ebbflow.report.run_facts import RunFacts
from ebbflow.report.run_report import (
    ReportInputs,
    format_summary_table,
    summarise_run,
    write_summary,
)


class Tags(HTMLParser):
    """Collects start tags, and fails on one that is never closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [
            value or "" for name, value in attributes if name in ("src", "href", "xlink:href")
        ]
        if tag not in ("meta", "img", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_whole_file(page: str) -> None:
    parsed = Tags()
    parsed.feed(page)
    assert not parsed.open
    assert all(value.startswith(("data:image/", "#")) for value in parsed.outside)
    assert not re.search(r"url\((?!#)", page)
    assert len(page) < 1_000_000


def test_prompts_never_become_markup(page: str) -> None:
    parsed = Tags()
    parsed.feed(page)
    assert "script" not in parsed.tags
    assert "&lt;script&gt;alert(" in page


def test_the_page_tells_the_run(inputs: ReportInputs, page: str) -> None:
    text = re.sub(r"\s+", " ", html.unescape(page))
    assert "✓ Champion: ebbflow-glyph v1" in text
    for reason in inputs.decision.reasons:
        assert reason in text
    for known in (inputs.tracked.run_id, inputs.recipe.digest, "Where the time went", "flow_grpo"):
        assert known in text
    changed = text.count('id="fell-') + text.count('id="rose-')
    assert text.count("<img ") == 2 * (16 * 3 + changed), (
        "each picture is there as it stands and enlarged"
    )
    assert len(re.findall(r"<figure>", text)) == 8 + 4 + 4, (
        "a panel is drawn only for what a stage reported, and for each metric"
    )


def test_the_page_shows_what_stands_behind_the_means(inputs: ReportInputs, page: str) -> None:
    text = re.sub(r"\s+", " ", page)
    rows = re.findall(
        r"<tr(?: class=\"chosen\")?><th"
        r" scope=\"row\">([^<]*)</th>((?:\s*<td[^>]*>[^<]*</td>)+)\s*</tr>",
        text,
    )
    cells = [(name, *re.findall(r"<td[^>]*>([^<]*)</td>", rest)) for name, rest in rows]
    ocr = [format_number(evaluation.held_out["ocr"]) for evaluation, _ in inputs.evaluations]
    assert ("before", "OCR", ocr[0], "0.111", "0.222", "–") in cells
    assert ("1.2 offline ★", "OCR", ocr[2], "0.111", "0.302", "0.999") in cells
    assert ("1.1 online", "0.290", "0.125") in cells
    assert ("1.2 offline ★", "0.330", "0.125") in cells


@pytest.mark.usefixtures("no_charts")
def test_scores_by_tag_are_shown_with_their_mean(inputs: ReportInputs, tmp_path: Path) -> None:
    def tagged(evaluation: Evaluation, ocr: dict[str, float]) -> Evaluation:
        categories = [
            CategoryMeans(column="tag", value=tag, prompts=3, means={"ocr": mean})
            for tag, mean in ocr.items()
        ]
        return evaluation.model_copy(update={"categories": categories})

    (before, first), (between, second), (after, last) = inputs.evaluations
    was = {"counting": 0.25, HOSTILE: 0.5}
    now = {"counting": 0.75, HOSTILE: 0.625}
    evaluations = [(tagged(before, was), first), (between, second), (tagged(after, now), last)]
    text = re.sub(
        r"\s+",
        " ",
        html.unescape(
            write_page(replace(inputs, evaluations=evaluations), tmp_path / "report.html")
        ),
    )
    for row in (
        ("counting", 3, 0.25, 0.75),
        (HOSTILE, 3, 0.5, 0.625),
        ("mean of these", "", 0.375, 0.6875),
    ):
        name, prompts, old, new = row
        assert (
            f'<th scope="row">{name}</th><td>{prompts}</td> <td>{format_number(old)} →'
            f" {format_number(new)}</td>" in text
        )
    found = summarise_run(replace(inputs, evaluations=evaluations))["categories"]
    assert found["tag"]["before"] == {
        "overall": {"ocr": 0.375},
        "values": {"counting": {"prompts": 3, "ocr": 0.25}, HOSTILE: {"prompts": 3, "ocr": 0.5}},
    }
    assert found["tag"]["after"]["overall"] == {"ocr": 0.6875}
    assert "categories" not in summarise_run(inputs)


def test_the_same_run_gives_the_same_bytes(inputs: ReportInputs, page: str, tmp_path: Path) -> None:
    assert write_page(inputs, tmp_path / "a.html") == page
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


@pytest.mark.usefixtures("no_charts")
def test_a_run_that_was_not_promoted_says_so(inputs: ReportInputs, tmp_path: Path) -> None:
    registration = Registration(
        model_name="ebbflow-glyph", version="2", champion=False, previous=None
    )
    decision = inputs.decision.model_copy(
        update={"promote": False, "reasons": ("Refused: Guardrail x fell.", "Coverage is full.")}
    )
    page = write_page(
        replace(inputs, registration=registration, decision=decision), tmp_path / "report.html"
    )
    assert "v2 stays challenger" in page
    assert re.search(
        r'<li class="bad">✗ Refused: Guardrail x fell.</li>\s*<li class="good">✓ Coverage is'
        r" full.</li>",
        page,
    )
    assert "Not registered" in write_page(
        replace(inputs, registration=None), tmp_path / "report.html"
    )


def test_a_run_that_a_person_declined_says_so_and_waits_no_longer(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    recipe = Recipe.model_validate({"promotion": {"approval": 2}})
    challenger = Registration(
        model_name="ebbflow-glyph", version="2", champion=False, previous=None
    )
    waiting = replace(inputs, recipe=recipe, registration=challenger)
    assert waiting.awaits_approval
    declined = challenger.model_copy(update={"declined": True})
    answered = replace(waiting, registration=declined)
    assert not answered.awaits_approval
    page = write_page(answered, tmp_path / "report.html")
    assert "Not approved: ebbflow-glyph v2 stays challenger" in page
    assert "said no" in page


@pytest.mark.usefixtures("no_charts")
def test_an_alarm_stands_above_the_pictures_and_beside_its_curves(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    quiet = write_page(inputs, tmp_path / "quiet.html")
    (record, steps), *rest = inputs.stages
    alarmed = record.model_copy(
        update={"alarms": ["velocity drift 1.9 above drift_alarm = 1 after 12 optimiser steps"]}
    )
    page = write_page(replace(inputs, stages=[(alarmed, steps), *rest]), tmp_path / "loud.html")
    assert "velocity drift 1.9" not in quiet
    assert page.count("velocity drift 1.9") == 2
    assert page.index("1.1 online: velocity drift 1.9") < page.index("Same prompts, same noise")


@pytest.mark.usefixtures("no_charts")
def test_what_a_familys_pipeline_does_otherwise_stands_above_the_pictures(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    model = ModelConfig(family="ltx2", path="/models/ltx2")
    recipe = inputs.recipe.model_copy(update={"model": model})
    page = write_page(replace(inputs, recipe=recipe), tmp_path / "page.html")
    assert "further guidance" not in write_page(inputs, tmp_path / "glyph.html")
    caveat = "model.family = ltx2: video and sound are trained, rewarded and evaluated under"
    assert page.index(caveat) < page.index("Same prompts, same noise")


@pytest.mark.usefixtures("no_charts")
def test_an_unmeasured_guard_and_a_missing_metric_do_not_break_the_page(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    without = [
        (entry.model_copy(update={"held_out": entry.held_out | {"tesseract": float("nan")}}), path)
        for entry, path in inputs.evaluations
    ]
    bare = replace(inputs, evaluations=without, stages=[(inputs.stages[0][0], [])])
    page = write_page(bare, tmp_path / "report.html")
    assert "This stage logged no metrics" in page
    assert "tesseract" not in summarise_run(bare)["before"]


def test_the_verdict_must_be_about_one_of_the_evaluations(inputs: ReportInputs) -> None:
    with pytest.raises(
        ValueError, match=r"about '9\.9 online', but the evaluations are \['before'"
    ):
        replace(inputs, decision=inputs.decision.model_copy(update={"candidate": "9.9 online"}))


def test_the_summary_has_the_promised_keys(inputs: ReportInputs, tmp_path: Path) -> None:
    write_summary(tmp_path / "summary.json", inputs)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert set(written) == {
        *(
            "before",
            "after",
            "seconds",
            "candidate",
            "champion",
            "promoted",
            "mlflow_run_id",
            "model_version",
        ),
        *("policy", "base", "load", "digest"),
    }
    assert (written["candidate"], written["champion"]) == (
        inputs.decision.candidate,
        inputs.decision.champion,
    )
    for side in ("before", "after"):
        assert set(written[side]) >= {"ocr", "exact_match", "tesseract", "similarity"}
    assert written["after"]["ocr"] == inputs.evaluations[2][0].held_out["ocr"]
    assert written["seconds"]["1.1 online"] == pytest.approx(32.9)
    assert written["seconds"]["total"] == pytest.approx(74.3 + 32.9 + 33.3 + 3 * 3.5)
    assert (written["promoted"], written["model_version"], written["mlflow_run_id"]) == (
        True,
        "1",
        inputs.tracked.run_id,
    )


def test_the_summary_names_the_folders_and_the_line_that_loads_them(inputs: ReportInputs) -> None:
    numbers = summarise_run(replace(inputs, policy="/runs/x/policy", base="/runs/flyte/base"))
    assert (numbers["policy"], numbers["base"]) == ("/runs/x/policy", "/runs/flyte/base")
    assert numbers["load"] == how_to_load(inputs.tracked.tracking_uri, "ebbflow-glyph", "1")
    assert summarise_run(replace(inputs, registration=None))["load"] is None


def test_the_terminal_table_lines_up(inputs: ReportInputs) -> None:
    lines = format_summary_table(inputs).splitlines()
    assert lines[0].split() == ["OCR", "Exact", "match", "Tesseract", "Similarity", "drift"]
    assert [line.split("  ")[0] for line in lines[2:]] == ["before", "1.1 online", "1.2 offline*"]
    assert len({len(line) for line in lines}) == 1


@pytest.mark.usefixtures("no_charts")
def test_a_keyboard_and_a_screen_reader_reach_everything(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    facts = RunFacts(120.0, "a machine", {"torch": "2"}, nodes={"1.1 online": (0.0, 60.0)})
    page = write_page(replace(inputs, facts=facts, policy="/runs/policy"), tmp_path / "report.html")
    assert problems(page) == []
    root = parse(page)
    landmarks = [element.tag for element in root.all("header", "nav", "main", "footer")]
    assert landmarks == ["header", "nav", "main", "footer"]
    tips = [element for element in root.all("a") if element.attributes.get("class") == "term"]
    texts = {
        element.attributes["id"]: element.whole_text
        for element in root.all("dd")
        if "id" in element.attributes
    }
    assert len(tips) > 20
    for tip in tips:
        assert texts[tip.attributes["aria-describedby"]] == tip.attributes["data-tip"]


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('<h2 id="pictures-title">', '<h4 id="pictures-title">', "an h4 follows an h2"),
        (' scope="row"', "", "a header cell without a scope"),
        ("<caption>Means over the held-out prompts</caption>", "", "a table without a caption"),
        ('id="gate"', 'id="gate2"', "a link to #gate"),
    ],
)
def test_the_check_of_the_structure_sees_what_is_wrong(
    page: str, old: str, new: str, problem: str
) -> None:
    assert problems(page) == []
    assert old in page
    assert any(found.startswith(problem) for found in problems(page.replace(old, new)))


def test_colours_can_be_told_from_what_they_stand_on(page: str) -> None:
    found = contrasts(page)
    assert len(found) > 40
    assert {
        pair: ratio for pair, ratio in found.items() if ratio < (4.5 if "text" in pair else 3)
    } == {}


@pytest.mark.usefixtures("no_charts")
def test_times_are_those_of_the_clock(inputs: ReportInputs, tmp_path: Path) -> None:
    nodes = {
        "1.2 offline rollout 0": (10.0, 30.0),
        "1.2 offline rollout 1": (12.0, 32.0),
        "1.2 offline": (40.0, 45.0),
        "1.2 offline evaluation": (45.0, 52.0),
        "before evaluation": (2.0, 5.0),
        "11.2 offline": (0.0, 900.0),
    }
    facts = RunFacts(3700.0, "a machine", {"torch": "2.13.0"}, "c0ffee", "ada", nodes)
    timed = replace(inputs, facts=facts)
    seconds = summarise_run(timed)["seconds"]
    assert (seconds["1.2 offline"], seconds["evaluations"], seconds["run"]) == (27.0, 10.0, 3700.0)
    assert seconds["total"] == pytest.approx(74.3 + 32.9 + 27 + 10)
    assert seconds["1.1 online"] == pytest.approx(32.9), (
        "what is not known is the sum of the phases"
    )
    text = parse(write_page(timed, tmp_path / "report.html")).whole_text
    for known in (
        "1 h 01 min",
        "27.0 s",
        "a machine",
        "torch 2.13.0",
        "c0ffee",
        "by ada",
        "1 January 1970, 01:01 UTC",
    ):
        assert known in text


@pytest.mark.usefixtures("no_charts")
def test_the_page_says_how_to_load_the_version_and_where_the_policy_is(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    folders = {"policy": "/runs/x/policy", "base": "/runs/flyte/base"}
    page = html.unescape(write_page(replace(inputs, **folders), tmp_path / "report.html"))
    assert f"mlflow.set_tracking_uri({inputs.tracked.tracking_uri!r})" in page
    assert "mlflow.pyfunc.load_model('models:/ebbflow-glyph/1')" in page
    assert all(folder in page for folder in folders.values())


def test_every_name_of_the_page_is_explained() -> None:
    rewards = [
        "ocr",
        "pickscore",
        "jpeg_compressibility",
        {"name": "vision_judge", "url": "http://127.0.0.1", "model": "m"},
    ]
    recipe = Recipe.model_validate({"rewards": rewards, "guardrails": ["tesseract", "a.b:Own"]})
    statistics = list(MarginsConfig.model_fields)
    metrics = [
        "reward",
        "exact_match",
        *(config.column for config in (*recipe.rewards, *recipe.guardrails)),
    ]
    found = build_glossary(recipe, metrics, statistics)["meanings"]
    assert {charts.format_metric_name(name) for name in (*metrics, *statistics)} | {
        panel.title for panel in charts.PANELS
    } <= found.keys()
    assert [name for name, text in found.items() if not text.endswith(".") or len(text) < 10] == []
    assert [name for name, text in found.items() if text == OWN] == ["Own"]


def test_the_report_says_whose_prompts_a_metric_is_of() -> None:
    mixture = [{"name": name, "source": f"{name}.txt"} for name in ("words", "signs")]
    rewards = [{"name": "jpeg_compressibility"}, {"name": "similarity", "prompts": ["words"]}]
    recipe = Recipe.model_validate(
        {"prompts": {"mixture": mixture}, "rewards": rewards, "guardrails": []}
    )
    found = build_glossary(recipe, ["jpeg_compressibility", "similarity"], [])["meanings"]
    assert "Only of prompts" not in found["Jpeg compressibility"]
    assert found["Similarity"].endswith(" Only of prompts of words.")
