"""Captioned pictures: every layout gives the same rows, and an error names the file."""

import json

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from ebbflow.data.captioned import (
    DataError,
    count_captioned,
    list_unlisted_files,
    read_captioned,
)
from ebbflow.data.sized_pictures import describe_data
from ebbflow.recipe.data import DataConfig

CAPTIONS = ["a red square", "two, with a comma", 'a "quoted" one']
COLOURS = [(200, 30, 30), (30, 200, 30), (30, 30, 200)]


def write_pictures(folder, size=(20, 16)):
    folder.mkdir(exist_ok=True)
    for number, colour in enumerate(COLOURS):
        Image.new("RGB", size, colour).save(folder / f"{number}.png")
    return folder


def as_jsonl(folder):
    rows = [{"file_name": f"{n}.png", "text": caption} for n, caption in enumerate(CAPTIONS)]
    (write_pictures(folder) / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def as_csv(folder):
    write_pictures(folder)
    lines = ["file_name,caption"]
    lines += [
        f'{n}.png,"{caption.replace(chr(34), chr(34) * 2)}"' for n, caption in enumerate(CAPTIONS)
    ]
    (folder / "metadata.csv").write_text("\n".join(lines))
    return folder


def as_text_files(folder):
    write_pictures(folder)
    for number, caption in enumerate(CAPTIONS):
        (folder / f"{number}.txt").write_text(caption + "\n")
    return folder


def as_parquet(folder, nested=False):
    write_pictures(folder)
    contents = [(folder / f"{n}.png").read_bytes() for n in range(3)]
    images = [{"bytes": c, "path": None} for c in contents] if nested else contents
    path = folder / "pictures.parquet"
    pq.write_table(pa.table({"image": images, "prompt": CAPTIONS}), path)
    return path


def as_nested_parquet(folder):
    return as_parquet(folder, nested=True)


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_text_files, as_parquet, as_nested_parquet])
def test_every_layout_gives_the_same_rows(tmp_path, write):
    data = write(tmp_path / "data")
    rows = list(read_captioned(data))
    assert count_captioned(data) == 3
    assert [row.number for row in rows] == [0, 1, 2]
    assert [row.caption for row in rows] == CAPTIONS
    for row, colour in zip(rows, COLOURS, strict=True):
        pixels = row.read(1, 16)
        assert pixels.shape == (16, 20, 3)
        assert (pixels == colour).all()


def test_a_changed_picture_changes_its_digest_alone(tmp_path):
    folder = as_jsonl(tmp_path / "data")
    before = [row.digest() for row in read_captioned(folder)]
    Image.new("RGB", (20, 16), (0, 0, 0)).save(folder / "1.png")
    after = [row.digest() for row in read_captioned(folder)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_pictures_without_a_row_are_listed(tmp_path):
    folder = as_jsonl(tmp_path / "data")
    Image.new("RGB", (20, 16)).save(folder / "left.png")
    assert list_unlisted_files(folder) == [folder / "left.png"]


@pytest.mark.parametrize("damage", [lambda b: b[:-40], lambda b: b"no picture"])
def test_a_corrupt_picture_is_an_error_that_names_the_file(tmp_path, damage):
    folder = as_jsonl(tmp_path / "data")
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(folder / "1.png")
    (folder / "1.png").write_bytes(damage((folder / "1.png").read_bytes()))
    with pytest.raises(DataError, match=r"1\.png is no PNG or JPEG or WEBP image"):
        describe_data(DataConfig(path=str(folder)), folder, 1, (16, 20), set())


def test_the_check_counts_sizes_and_what_is_left_out(tmp_path):
    folder = as_jsonl(tmp_path / "data")
    Image.new("RGB", (20, 12)).save(folder / "1.png")
    Image.new("RGB", (20, 16)).save(folder / "left.png")
    config = DataConfig(path=str(folder))
    # As the run splits its prompts: the same words are the same prompt.
    assert describe_data(config, folder, 1, (16, 20), {f"{CAPTIONS[2].upper()}."}) == (
        "1 pictures of data: 1 of 20x16; left out: 1 files without a row, 1 on prompts of the"
        " evaluation, 1 smaller than their size"
    )
    with pytest.raises(DataError, match=r"no picture is left to train on: .* 3 smaller than"):
        describe_data(config, folder, 1, (100, 100), set())


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"file_name": "9.png", "text": "x"}', r"line 1: file_name = '9\.png' is not in"),
        ('{"file_name": "../x.png", "text": "x"}', "lies outside"),
        ('{"file_name": "0.png", "text": " "}', r"0\.png: ' ' is no caption"),
        ('{"file_name": "0.png", "label": 3}', "no column 'caption', 'text', 'prompt'"),
        ('{"text": "x"}', "file_name = None is no file"),
        ("[1]", r"metadata\.jsonl, line 1: .* is not an object"),
        ("", "no picture with a caption"),
    ],
)
def test_a_wrong_row_is_named_with_the_fix(tmp_path, rows, message):
    (write_pictures(tmp_path / "data") / "metadata.jsonl").write_text(rows)
    with pytest.raises(DataError, match=message):
        list(read_captioned(tmp_path / "data"))


def test_a_picture_without_its_text_file_is_named(tmp_path):
    folder = as_text_files(tmp_path / "data")
    (folder / "2.txt").unlink()
    with pytest.raises(DataError, match=r"2\.png: has no caption; write 2\.txt beside it"):
        list(read_captioned(folder))


@pytest.fixture
def videos(tmp_path):
    """A folder with an MP4 of 24 frames a second whose frame n is of grey 10 n, and a GIF."""
    folder = tmp_path / "videos"
    folder.mkdir()
    codec = cv2.VideoWriter.fourcc(*"mp4v")
    writer = cv2.VideoWriter(str(folder / "0.mp4"), codec, 24, (64, 48))
    for frame in range(12):
        writer.write(np.full((48, 64, 3), 10 * frame, np.uint8))
    writer.release()
    frames = [Image.new("RGB", (64, 48), (20 * n, 20 * n, 20 * n)) for n in range(6)]
    frames[0].save(folder / "1.gif", save_all=True, append_images=frames[1:], duration=50)
    for number in range(2):
        (folder / f"{number}.txt").write_text("grey")
    return folder


def test_frames_are_taken_at_the_rate_and_short_videos_give_none(videos):
    video, animation = read_captioned(videos)
    clip = video.read(4, 12)  # every second frame
    assert clip.shape == (4, 48, 64, 3)
    # Lossy: the frames are of the greys 0, 20, 40 and 60 to within a few levels.
    assert np.abs(clip.mean((1, 2, 3)) - [0, 20, 40, 60]).max() < 5
    assert video.read(13, 24) is None
    assert np.abs(animation.read(3, 10).mean((1, 2, 3)) - [0, 40, 80]).max() < 2
    # A model of images takes the first frame.
    assert video.read(1, 16).shape == (48, 64, 3)


def test_images_are_left_out_of_the_data_of_a_model_of_videos(videos):
    Image.new("RGB", (64, 48)).save(videos / "2.png")
    (videos / "2.txt").write_text("still")
    assert describe_data(DataConfig(path="x"), videos, 4, (48, 64), set()) == (
        "2 pictures of videos: 2 of 64x48; left out: 1 too short, or no videos"
    )
