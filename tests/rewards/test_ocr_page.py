"""The layout ``page`` of the OCR reward, on rendered posters."""

import functools
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont
from reward_cases import as_prompt

from ebbflow.recipe.registry import configure_reward
from ebbflow.rewards import ppocr
from ebbflow.rewards.combine import load_reward
from ebbflow.rewards.text import NO_TARGET

FONT = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans-Bold.ttf"
POSTERS = {
    "grand opening saturday 9 am free coffee": (
        256,
        [("GRAND OPENING", 24), ("Saturday 9 am", 20), ("free coffee", 16)],
    ),
    "summer jazz festival live in the park june 21": (
        512,
        [("SUMMER", 64), ("JAZZ FESTIVAL", 48), ("live in the park", 32), ("June 21", 24)],
    ),
    "hello world": (384, [("Hello", 60), ("World", 60)]),
}


def poster(size, lines, ink=(30, 20, 80), paper=(240, 225, 190)):
    """Centred lines of text, each with its font size, on coloured paper: uint8 RGB [size, size,
    3]."""
    image = Image.new("RGB", (size, size), paper)
    draw = ImageDraw.Draw(image)
    for number, (text, points) in enumerate(lines, start=1):
        font = ImageFont.truetype(str(FONT), points, layout_engine=ImageFont.Layout.BASIC)
        draw.text((size / 2, size * number / (len(lines) + 1)), text, ink, font, anchor="mm")
    return np.asarray(image)


def score(images, targets):
    prompts = [as_prompt(index, target) for index, target in enumerate(targets)]
    return load_reward(configure_reward("ocr", layout="page"))(np.stack(images), prompts)


@functools.cache
def scored(target):
    return score([poster(*POSTERS[target])] * 2, [target, "quarterly tax report of the zoo"])


@pytest.mark.parametrize("target", POSTERS)
def test_reads_clean_posters_exactly(target):
    result = scored(target)
    assert (result.values[0], result.metrics["exact_match"][0]) == (1.0, 1.0)
    assert not result.failures


@pytest.mark.parametrize("target", POSTERS)
def test_another_text_than_asked_for_scores_low(target):
    result = scored(target)
    assert result.values[1] <= 0.25
    assert result.metrics["exact_match"][1] == 0


def test_light_letters_on_dark_and_one_wrong_letter():
    image = poster(256, [("NIGHT", 48), ("MARKET", 48)], ink=(250, 250, 210), paper=(20, 30, 60))
    result = score([image, image], ["night market", "night marker"])
    assert result.values == pytest.approx([1, 1 - 1 / 11])


def test_text_that_is_not_there_scores_zero_and_is_no_failure():
    noise = np.random.default_rng(0).integers(0, 256, (256, 256, 3), dtype=np.uint8)
    blank = [np.full((256, 256, 3), level, np.uint8) for level in (255, 0, 128)]
    result = score([*blank, noise], ["HELLO"] * 4)
    assert np.array_equal(result.values, np.zeros(4))
    assert not result.failures


def test_a_prompt_without_a_target_is_a_failure():
    result = score([poster(256, [("HELLO", 40)])], [None])
    assert np.isnan(result.values[0])
    assert result.failures == {0: NO_TARGET}


def test_an_accident_with_one_image_is_its_failure_alone(monkeypatch):
    reader = ppocr._load_page_reader()

    def accident(image):
        if image.max() == 0:
            raise ValueError("inhomogeneous\nshape")
        return reader(image)

    monkeypatch.setattr(ppocr, "_load_page_reader", lambda: accident)
    result = score(
        [np.zeros((256, 256, 3), np.uint8), poster(256, [("HELLO", 40)])], ["HELLO", "HELLO"]
    )
    assert np.array_equal(result.values, [np.nan, 1.0], equal_nan=True)
    assert result.failures == {0: "rapidocr failed: ValueError: inhomogeneous shape"}


def test_scores_do_not_depend_on_the_batch_and_repeat():
    images = np.stack(
        [poster(256, [("RIVER", 40), ("boat trips", 28)]), poster(256, [("tulip", 60)])]
    )
    texts, _ = ppocr.read_pages(images)
    assert ppocr.read_pages(images[::-1])[0] == texts[::-1]
    assert ppocr.read_pages(images)[0] == texts
    assert ppocr.read_pages(images[:0]) == ([], {})


def box(left, top, right, bottom):
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def test_reading_order_is_lines_from_top_to_bottom_each_from_left_to_right():
    # The words of the first line differ by 20 pixels at their upper edge, as "ace" and "Tall" in
    # large letters do.
    boxes = [
        box(200, 100, 300, 140),
        box(10, 104, 90, 138),
        box(10, 30, 150, 80),
        box(200, 10, 330, 82),
        box(0, 200, 9, 210),
    ]
    assert ppocr.sort_into_reading_order(np.array(boxes)) == [2, 3, 1, 0, 4]


def test_reading_order_takes_lines_of_small_letters_apart():
    boxes = [box(50, 9, 90, 17), box(5, 0, 40, 8), box(5, 9, 40, 17), box(50, 0, 90, 8)]
    assert ppocr.sort_into_reading_order(np.array(boxes)) == [1, 3, 2, 0]


def test_reads_two_columns_of_a_line_in_order():
    image = Image.new("RGB", (512, 256), "white")
    draw = ImageDraw.Draw(image)
    large = ImageFont.truetype(str(FONT), 72, layout_engine=ImageFont.Layout.BASIC)
    draw.text((10, 40), "sun", "black", large)
    draw.text((340, 40), "Day", "black", large)
    draw.text((10, 160), "nine", "black", large)
    assert score([np.asarray(image)], ["sun day nine"]).values[0] == 1


def test_needs_the_detector_too(monkeypatch):
    real = ppocr.find_model_file

    def without_detector(part):
        if part == ppocr.DETECTOR:
            raise FileNotFoundError("no detector")
        return real(part)

    monkeypatch.setattr(ppocr, "find_model_file", without_detector)
    assert (
        load_reward(configure_reward("ocr", layout="page")).explain_unavailable() == "no detector"
    )
    assert load_reward(configure_reward("ocr")).explain_unavailable() is None


def test_threads_wait_without_spinning_as_those_of_the_line_reader():
    reader = ppocr._load_page_reader()
    ppocr.read_pages(np.full((1, 64, 64, 3), 255, np.uint8))
    options = reader.text_det.session.session.get_session_options()
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert options.intra_op_num_threads <= ppocr.MAX_THREADS
