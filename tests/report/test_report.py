"""The report of an invented but lifelike run: nothing a user wrote becomes markup, and the summary
says what was measured.
"""

from __future__ import annotations

import base64
import html
import io
import json
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from markupsafe import Markup
from matplotlib import font_manager
from page_structure import contrasts, parse, problems
from PIL import Image, ImageDraw, ImageFont

from ebbflow.data.images import decode_pngs, encode_pngs
from ebbflow.data.records import (
    CategoryMeans,
    Distribution,
    Evaluation,
    Registration,
    StageRecord,
    TrackedRun,
)
from ebbflow.data.schema import build_evaluation_schema
from ebbflow.evaluation.gate import decide_by_gate
from ebbflow.formatting import format_difference, format_number
from ebbflow.plots import charts
from ebbflow.plots.images import build_image_grid
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
    write_report,
    write_summary,
)

METRICS = ["reward", "ocr", "exact_match", "tesseract", "similarity"]
HOSTILE = "<script>alert('prompt')</script>"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def picture(
    text: str, noise: float, generator: np.random.Generator, size: tuple[int, int] = (32, 16)
) -> bytes:
    canvas = Image.new("L", size, 235)
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono:bold"), size[1] * 3 // 4)
    ImageDraw.Draw(canvas).text((size[0] // 16, 0), text, fill=20, font=font)
    blurred = np.asarray(canvas, dtype=float) + generator.normal(0, 255 * noise, (size[1], size[0]))
    buffer = io.BytesIO()
    Image.fromarray(blurred.clip(0, 255).astype(np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def samples(
    path: Path, right: float, prompts: int = 128, size: tuple[int, int] = (32, 16)
) -> pa.Table:
    """An evaluation in which a share ``right`` of the letters is as it should be."""
    generator = np.random.default_rng(0)
    rows = []
    for prompt in range(prompts):
        target = HOSTILE if prompt == 3 else "".join(generator.choice(list(LETTERS), 4))
        draws = generator.random(4)
        seen = "".join(
            a if draw < right else "X" for a, draw in zip(target[:4], draws, strict=True)
        )
        ocr = float(np.mean(draws < right))
        row = {
            "prompt_id": prompt,
            "sample": 0,
            "split": "held_out",
            "prompt": f'The word "{target}"',
            "target": target,
        }
        row |= {
            "image": picture(seen, 0.25 * (1 - right), generator, size),
            "reward": ocr,
            "ocr": ocr,
        }
        rows.append(
            row
            | {
                "exact_match": float(ocr == 1),
                "tesseract": ocr * 0.8,
                "similarity": 0.5 + ocr / 2,
            }
        )
    table = pa.Table.from_pylist(rows, schema=build_evaluation_schema(METRICS))
    pq.write_table(table, path)
    return table


def evaluation(label: str, table: pa.Table, version: int) -> Evaluation:
    means = {metric: float(np.mean(table[metric].to_pylist())) for metric in METRICS}
    seconds = {"sampling": 2.1, "scoring": 1.4}
    return Evaluation(
        label=label,
        policy_version=version,
        held_out=means,
        validation=means,
        coverage=1.0,
        velocity_drift=version * 1.3e-4,
        seconds=seconds,
        statistics={"entropy": 0.25 + version / 1000, "edge_density": 0.125},
        distributions={
            "ocr": Distribution(
                spread=0.111, worst_tenth=0.222 + version / 1000, best_of=0.999 if version else None
            )
        },
    )


def curves(steps: int, trajectory: bool) -> list[dict[str, float]]:
    generator = np.random.default_rng(1)
    rows = []
    for step in range(1, steps + 1):
        mean = 0.9 - 0.35 * math.exp(-step / 12) + generator.normal(0, 0.02)
        row = {
            "step": step,
            "reward/mean": mean,
            "reward/min": mean - 0.4,
            "reward/max": min(1.0, mean + 0.25),
        }
        row |= {
            "velocity_drift": 2e-4 * step,
            "grad_norm": 0.4 + generator.random() / 3,
            "loss": 0.2 + generator.random() / 50,
        }
        if trajectory:
            row |= {
                "ratio/deviation": generator.random() * 1e-3,
                "kl/reference": 1e-3 * step,
                "group/zero_std_share": step / 200,
            }
            row |= {"clip/down": generator.random() / 9, "clip/up": generator.random() / 9}
        rows.append(row)
    return rows


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
    return written(inputs, tmp_path_factory.mktemp("page") / "new" / "report.html")


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Charts are not drawn; only what they say to a screen reader is there."""
    monkeypatch.setattr(
        charts,
        "render_svg",
        lambda figure, text: Markup('<svg role="img" aria-label="{}"></svg>').format(text),
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


def written(inputs: ReportInputs, path: Path) -> str:
    write_report(path, inputs)
    return path.read_text()


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
        html.unescape(written(replace(inputs, evaluations=evaluations), tmp_path / "report.html")),
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
    assert written(inputs, tmp_path / "a.html") == page
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


@pytest.mark.usefixtures("no_charts")
def test_a_run_that_was_not_promoted_says_so(inputs: ReportInputs, tmp_path: Path) -> None:
    registration = Registration(
        model_name="ebbflow-glyph", version="2", champion=False, previous=None
    )
    decision = inputs.decision.model_copy(
        update={"promote": False, "reasons": ("Refused: Guardrail x fell.", "Coverage is full.")}
    )
    page = written(
        replace(inputs, registration=registration, decision=decision), tmp_path / "report.html"
    )
    assert "v2 stays challenger" in page
    assert re.search(
        r'<li class="bad">✗ Refused: Guardrail x fell.</li>\s*<li class="good">✓ Coverage is'
        r" full.</li>",
        page,
    )
    assert "Not registered" in written(replace(inputs, registration=None), tmp_path / "report.html")


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
    page = written(answered, tmp_path / "report.html")
    assert "Not approved: ebbflow-glyph v2 stays challenger" in page
    assert "said no" in page


@pytest.mark.usefixtures("no_charts")
def test_an_alarm_stands_above_the_pictures_and_beside_its_curves(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    quiet = written(inputs, tmp_path / "quiet.html")
    (record, steps), *rest = inputs.stages
    alarmed = record.model_copy(
        update={"alarms": ["velocity drift 1.9 above drift_alarm = 1 after 12 optimiser steps"]}
    )
    page = written(replace(inputs, stages=[(alarmed, steps), *rest]), tmp_path / "loud.html")
    assert "velocity drift 1.9" not in quiet
    assert page.count("velocity drift 1.9") == 2
    assert page.index("1.1 online: velocity drift 1.9") < page.index("Same prompts, same noise")


@pytest.mark.usefixtures("no_charts")
def test_what_a_familys_pipeline_does_otherwise_stands_above_the_pictures(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    model = ModelConfig(family="ltx2", path="/models/ltx2")
    recipe = inputs.recipe.model_copy(update={"model": model})
    page = written(replace(inputs, recipe=recipe), tmp_path / "page.html")
    assert "further guidance" not in written(inputs, tmp_path / "glyph.html")
    caveat = "model.family = ltx2: video and sound are trained, rewarded and evaluated under"
    assert page.index(caveat) < page.index("Same prompts, same noise")


@pytest.mark.usefixtures("no_charts")
def test_many_rounds_and_large_pictures_stay_small(inputs: ReportInputs, tmp_path: Path) -> None:
    large = tmp_path / "large.parquet"
    table = samples(large, 0.9, prompts=20, size=(512, 256))
    labels = [
        f"{round_}.{stage} {kind}"
        for round_ in range(1, 21)
        for stage, kind in ((1, "online"), (2, "offline"))
    ]
    evaluations = [
        inputs.evaluations[0],
        *((evaluation(label, table, index), large) for index, label in enumerate(labels)),
    ]
    record, metrics = inputs.stages[0]
    stages = [(record.model_copy(update={"label": label}), metrics * 20) for label in labels]
    many = replace(
        inputs,
        evaluations=evaluations,
        stages=stages,
        decision=inputs.decision.model_copy(update={"candidate": labels[7]}),
    )
    page = written(many, tmp_path / "report.html")
    assert len(page) < 5_000_000
    assert "evaluations in between are not shown" in page
    assert "The curves of the first 32 stages are in MLflow" in page
    assert f"{labels[7]} ★" in page


def as_videos(table: pa.Table, path: Path) -> None:
    """The same samples as videos of three frames, which end upside down."""
    images = decode_pngs(table["image"].to_pylist())
    videos = encode_pngs(np.stack([images, images, images[:, ::-1]], 1))
    pq.write_table(
        table.set_column(
            table.schema.get_field_index("image"), table.schema.field("image"), [videos]
        ),
        path,
    )


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(("size", "kind"), [((32, 16), "PNG"), ((512, 256), "JPEG")])
def test_videos_are_shown_as_stills_of_their_first_frames(
    inputs: ReportInputs, tmp_path: Path, size: tuple[int, int], kind: str
) -> None:
    table = samples(tmp_path / "images.parquet", 0.9, prompts=5, size=size)
    as_videos(table, tmp_path / "videos.parquet")
    pages = []
    for name in ("images", "videos"):
        path = tmp_path / f"{name}.parquet"
        pages.append(
            written(
                replace(inputs, evaluations=[(entry, path) for entry, _ in inputs.evaluations]),
                tmp_path / f"{name}.html",
            )
        )
    assert pages[0] == pages[1]
    first, *rest = re.findall(r'<img [^>]*src="data:image/(?:png|jpeg);base64,([^"]+)"', pages[1])
    assert len(rest) == 2 * 5 * 3 - 1, "the reward is the same on both sides, so no prompt changed"
    shown = Image.open(io.BytesIO(base64.b64decode(first)))
    assert (shown.format, getattr(shown, "n_frames", 1)) == (kind, 1)


@pytest.mark.usefixtures("no_charts")
def test_an_unmeasured_guard_and_a_missing_metric_do_not_break_the_page(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    without = [
        (entry.model_copy(update={"held_out": entry.held_out | {"tesseract": float("nan")}}), path)
        for entry, path in inputs.evaluations
    ]
    bare = replace(inputs, evaluations=without, stages=[(inputs.stages[0][0], [])])
    page = written(bare, tmp_path / "report.html")
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


def test_an_image_grid_enlarges_by_whole_pixels() -> None:
    generator = np.random.default_rng(0)
    grid = build_image_grid(
        [picture("ABCD", 0.0, generator)] * 5,
        ["ABCD 1.00", "a caption that is far too long"] + ["x"] * 3,
        columns=4,
    )
    assert grid.width == 4 * (128 + 8) + 8
    assert grid.height == 2 * (64 + 8 + 19) + 8
    block = np.asarray(grid)[8:72, 8:136]
    assert (block.reshape(16, 4, 32, 4, 3) == block[::4, None, ::4][:, :, :, None]).all()


def test_an_image_grid_shows_the_first_frames_of_videos() -> None:
    videos = np.random.default_rng(0).integers(0, 256, (3, 4, 16, 32, 3), np.uint8)
    moving, still = (
        build_image_grid(encode_pngs(pictures), ["a", "b", "c"], columns=2)
        for pictures in (videos, videos[:, 0])
    )
    assert np.array_equal(np.asarray(moving), np.asarray(still))


@pytest.mark.parametrize(
    ("pngs", "captions", "columns"), [([], [], 4), ([b"x"], [], 4), ([b"x"], ["x"], 0)]
)
def test_an_image_grid_needs_pictures_and_captions(
    pngs: list[bytes], captions: list[str], columns: int
) -> None:
    with pytest.raises(ValueError, match="pass a caption per image"):
        build_image_grid(pngs, captions, columns)


@pytest.mark.usefixtures("no_charts")
def test_a_keyboard_and_a_screen_reader_reach_everything(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    facts = RunFacts(120.0, "a machine", {"torch": "2"}, nodes={"1.1 online": (0.0, 60.0)})
    page = written(replace(inputs, facts=facts, policy="/runs/policy"), tmp_path / "report.html")
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


def changed(inputs: ReportInputs, path: Path, rewards: dict[int, float | None]) -> ReportInputs:
    """The candidate's rewards of single prompts are others."""
    table = pq.read_table(inputs.evaluations[2][1])
    values = [
        rewards.get(row["prompt_id"], row["reward"])
        for row in table.select(["prompt_id", "reward"]).to_pylist()
    ]
    pq.write_table(
        table.set_column(
            table.schema.get_field_index("reward"), "reward", pa.array(values, pa.float64())
        ),
        path,
    )
    return replace(inputs, evaluations=[*inputs.evaluations[:2], (inputs.evaluations[2][0], path)])


@pytest.mark.usefixtures("no_charts")
def test_the_worst_and_the_best_changes_are_pictured(inputs: ReportInputs, tmp_path: Path) -> None:
    before = pq.read_table(inputs.evaluations[0][1]).to_pylist()
    moved = changed(inputs, tmp_path / "after.parquet", {100: -5.0, 101: 7.0, 102: None})
    root = parse(written(moved, tmp_path / "report.html"))
    (section,) = [each for each in root.all("section") if each.attributes["id"] == "changes"]
    lists = section.all("ol")
    fell, rose = ([item.all("h4")[0].whole_text for item in each.all("li")] for each in lists)
    assert fell[0] == f"{before[100]['prompt']} OCR {format_difference(-5 - before[100]['reward'])}"
    assert rose[0] == f"{before[101]['prompt']} OCR {format_difference(7 - before[101]['reward'])}"
    assert not any(before[102]["prompt"] in text for text in (*fell, *rose))
    captions = [caption.whole_text for caption in lists[0].all("li")[0].all("figcaption")]
    assert captions[0].startswith(f"before OCR {format_number(before[100]['reward'])}")
    assert captions[1].startswith("1.2 offline ★ OCR -5.00")
    words = section.whole_text
    counts = [
        int(re.search(rf"(\d+) {word}", words)[1]) for word in ("rose", "fell", "stayed the same")
    ]
    assert sum(counts) == 127
    assert "of 127 prompts" in section.all("svg")[0].attributes["aria-label"]


@pytest.mark.usefixtures("no_charts")
def test_the_number_under_a_picture_is_what_was_trained_on(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    """Not the OCR, when the reward is another sum."""
    settings = inputs.recipe.model_dump() | {
        "rewards": [{"name": "similarity", "weight": 2}, {"name": "ocr"}],
        "guardrails": [],
    }
    page = written(
        replace(
            changed(inputs, tmp_path / "a.parquet", {0: 2.25}),
            recipe=Recipe.model_validate(settings),
        ),
        tmp_path / "r.html",
    )
    first = parse(page).all("ol")[0].all("li")[0]
    assert first.all("figcaption")[2].whole_text.startswith("1.2 offline ★ Reward 2.25")


@pytest.mark.usefixtures("no_charts")
def test_prompts_are_whole_and_pictures_have_their_size(
    inputs: ReportInputs, tmp_path: Path
) -> None:
    long = "A very long prompt, " * 40 + "with its end"
    path = tmp_path / "large.parquet"
    table = samples(path, 0.9, prompts=3, size=(512, 256))
    prompts = pa.array([long] * 3, pa.string())
    pq.write_table(
        table.set_column(table.schema.get_field_index("prompt"), "prompt", prompts), path
    )
    large = replace(inputs, evaluations=[(entry, path) for entry, _ in inputs.evaluations])
    root = parse(written(large, tmp_path / "report.html"))
    assert root.all("ol")[0].all("h3")[0].whole_text == long
    picture, *_ = root.all("ol")[0].all("figure")
    preview, whole = picture.all("img")
    sizes = [
        Image.open(io.BytesIO(base64.b64decode(each.attributes["src"].split(",")[1]))).size
        for each in (preview, whole)
    ]
    assert sizes == [(320, 160), (512, 256)]
    assert picture.all("button")[0].attributes["popovertarget"] == next(
        each.attributes["id"] for each in picture.all("div") if "popover" in each.attributes
    )


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
    text = parse(written(timed, tmp_path / "report.html")).whole_text
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
    page = html.unescape(written(replace(inputs, **folders), tmp_path / "report.html"))
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
