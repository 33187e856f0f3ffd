"""Prompt files that come with images to edit."""

import io
import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from prompt_cases import write_file

from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import PromptError, PromptRow, read_prompts, split_prompts, write_prompts


def picture(grey: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (5, 4), (grey, grey, grey)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.fixture
def pictures(tmp_path):
    """A folder of two images to edit."""
    (tmp_path / "in").mkdir()
    for grey in (0, 200):
        (tmp_path / "in" / f"{grey}.png").write_bytes(picture(grey))
    return tmp_path


def greys(rows: list[PromptRow]) -> list[int | None]:
    """The one grey of each image."""
    arrays = [row.image and np.asarray(Image.open(io.BytesIO(row.image))) for row in rows]
    assert all(
        array is None or (array.shape == (4, 5, 3) and array.min() == array.max())
        for array in arrays
    )
    return [None if array is None else int(array[0, 0, 0]) for array in arrays]


def test_images_are_read_from_paths_and_from_parquet_bytes(pictures):
    paths = [
        {"prompt": "a", "image": "in/0.png"},
        {"prompt": "b", "image": None},
        {"prompt": "c", "image": "in/200.png"},
    ]
    jsonl = write_file(pictures, "p.jsonl", "\n".join(map(json.dumps, paths)))
    csv = write_file(pictures, "p.csv", f"prompt,image\na,in/0.png\nb, \nc,{pictures}/in/200.png\n")
    pq.write_table(pa.Table.from_pylist(paths), pictures / "p.parquet")
    held = [
        row | {"image": row["image"] and (pictures / row["image"]).read_bytes()} for row in paths
    ]
    pq.write_table(pa.Table.from_pylist(held), pictures / "bytes.parquet")
    for path in (jsonl, csv, pictures / "p.parquet", pictures / "bytes.parquet"):
        rows, _ = read_prompt_file(path)
        assert greys(rows) == [0, None, 200]
        assert {row.metadata for row in rows} == {"{}"}


def test_rows_of_the_same_prompt_with_other_images_are_other_rows(pictures):
    images = ["in/0.png", None, "in/200.png", "in/../in/0.png", None]
    lines = [json.dumps({"prompt": "make it blue", "image": image}) for image in images]
    rows, report = read_prompt_file(write_file(pictures, "p.jsonl", "\n".join(lines)))
    assert greys(rows) == [0, None, 200]
    assert report.duplicates == 2


def test_images_get_into_the_prompt_table_and_out(pictures):
    lines = [json.dumps({"prompt": "x", "image": f"in/{grey}.png"}) for grey in (0, 200)] + [
        '{"prompt": "y"}'
    ]
    rows, _ = read_prompt_file(write_file(pictures, "p.jsonl", "\n".join(lines)))
    write_prompts(split_prompts(rows, 1, 1, seed=0), pictures / "table.parquet")
    back = read_prompts(pictures / "table.parquet")
    assert [prompt.image for prompt in back] == [row.image for row in rows]
    assert greys(back) == [0, 200, None]
    assert "image" not in repr(back[0])


@pytest.mark.parametrize(
    ("image", "says"),
    [
        ("in/none.png", "no image file in .* Paths are relative to the file that names them"),
        ("../in/0.png", "lies outside"),
        ("p.jsonl", "no PNG or JPEG or WEBP image"),
        ("https://example.org/0.png", "no image file in"),
        ("a\u0000b", "is no valid path"),
        ("\ud800", "surrogate"),
        (7, "is not text"),
        (["in/0.png", 7], "has 7, which is no image; write paths"),
        ([], "is an empty list"),
    ],
)
def test_an_image_that_cannot_be_used_is_named_with_its_line(pictures, image, says):
    path = write_file(
        pictures, "p.jsonl", '{"prompt": "a"}\n' + json.dumps({"prompt": "b", "image": image})
    )
    with pytest.raises(PromptError, match=says) as caught:
        read_prompt_file(path)
    for part in (f"{path}, line 2: image = ", repr(image)):
        assert part in str(caught.value)


def test_bytes_in_parquet_that_are_no_image_are_named_with_their_row(tmp_path):
    pq.write_table(
        pa.table({"prompt": ["a", "b"], "image": [picture(0), b"GIF89a" + bytes(500)]}),
        tmp_path / "p.parquet",
    )
    with pytest.raises(
        PromptError, match=r"p.parquet, row 2: image = b'GIF89a.*\.\.\..* is no PNG or JPEG or WEBP"
    ) as caught:
        read_prompt_file(tmp_path / "p.parquet")
    assert len(str(caught.value)) < 500


@settings(max_examples=100, deadline=None)
@given(
    value=st.text(max_size=12)
    | st.lists(st.sampled_from(["..", ".", "/", "in", "0.png", "~", "\\", "$HOME"])).map("".join)
)
def test_no_path_reads_anything_but_an_image_of_the_folder(value):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "in").mkdir()
        Path(folder, "in", "0.png").write_bytes(picture(0))
        path = write_file(Path(folder), "p.jsonl", json.dumps({"prompt": "a", "image": value}))
        try:
            rows, _ = read_prompt_file(path)
        except PromptError:
            return
    assert greys(rows) == [0 if value.strip() else None]
