"""The pictures of a report: which prompts they are of, their size, and grids of them."""

from __future__ import annotations

import base64
import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from page_structure import parse
from PIL import Image
from report_cases import evaluation, picture, samples, write_page

from ebbflow.data.images import decode_pngs, encode_pngs
from ebbflow.formatting import format_difference, format_number
from ebbflow.plots.images import build_image_grid
from ebbflow.recipe import Recipe
from ebbflow.report.run_report import ReportInputs


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
    page = write_page(many, tmp_path / "report.html")
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
            write_page(
                replace(inputs, evaluations=[(entry, path) for entry, _ in inputs.evaluations]),
                tmp_path / f"{name}.html",
            )
        )
    assert pages[0] == pages[1]
    first, *rest = re.findall(r'<img [^>]*src="data:image/(?:png|jpeg);base64,([^"]+)"', pages[1])
    assert len(rest) == 2 * 5 * 3 - 1, "the reward is the same on both sides, so no prompt changed"
    shown = Image.open(io.BytesIO(base64.b64decode(first)))
    assert (shown.format, getattr(shown, "n_frames", 1)) == (kind, 1)


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


def change_rewards(
    inputs: ReportInputs, path: Path, rewards: dict[int, float | None]
) -> ReportInputs:
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
    moved = change_rewards(inputs, tmp_path / "after.parquet", {100: -5.0, 101: 7.0, 102: None})
    root = parse(write_page(moved, tmp_path / "report.html"))
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
    page = write_page(
        replace(
            change_rewards(inputs, tmp_path / "a.parquet", {0: 2.25}),
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
    root = parse(write_page(large, tmp_path / "report.html"))
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
