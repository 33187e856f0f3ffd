import numpy as np
import pytest

from ebbflow.models.glyph_training.lettering import render_batch, render_text


def ink_box(image: np.ndarray) -> tuple[int, int, int, int]:
    rows = np.nonzero((image < 128).any(1))[0]
    columns = np.nonzero((image < 128).any(0))[0]
    return rows[0], rows[-1], columns[0], columns[-1]


@pytest.mark.parametrize(
    ("text", "height", "width"),
    [("WXYZ", 16, 32), ("HELLO WORLD", 64, 128), ("Q", 24, 24), ("gÅjq", 64, 64)],
)
def test_letters_are_dark_centred_and_as_large_as_fit(text, height, width):
    image = render_text(text, height, width)
    assert (image.shape, image.dtype) == ((height, width), np.uint8)
    assert image.min() < 64
    assert image.max() == 255
    top, bottom, left, right = ink_box(image)
    assert abs(top - (height - 1 - bottom)) <= 2
    assert abs(left - (width - 1 - right)) <= 3
    assert max((bottom - top + 1) / height, (right - left + 1) / width) > 0.8
    assert min(top, left, height - 1 - bottom, width - 1 - right) >= 1


def test_rendering_is_a_function_of_the_text():
    assert np.array_equal(render_text("ABCD", 16, 32), render_text(" ABCD ", 16, 32))
    assert not np.array_equal(render_text("ABCD", 16, 32), render_text("ABCE", 16, 32))
    assert (render_text(" ", 16, 32) == 255).all()


def test_text_that_cannot_be_shown_is_an_error():
    with pytest.raises(ValueError, match="'AAAAAAAAAAAA' cannot be read in an image of 16x32"):
        render_text("A" * 12, 16, 32)
    with pytest.raises(ValueError, match="no '日'"):
        render_text("日", 32, 32)
    with pytest.raises(ValueError, match="cannot be read"):
        render_batch(["OK", "A" * 12], 16, 32, np.random.default_rng(0))


def test_training_renderings_are_jittered_whole_and_repeatable():
    images = render_batch(["AH"] * 64, 16, 32, np.random.default_rng(0))
    assert (images.shape, images.dtype) == ((64, 16, 32), np.uint8)
    assert np.array_equal(images, render_batch(["AH"] * 64, 16, 32, np.random.default_rng(0)))
    assert len({image.tobytes() for image in images}) >= 9
    clean = ink_box(render_text("AH", 16, 32))
    assert (
        max(abs(a - b) for image in images for a, b in zip(ink_box(image), clean, strict=True)) <= 3
    )
    ink = (255.0 - images).sum((1, 2))
    assert ink.min() > 0.75 * ink.max(), "letters must not leave the image"


def test_a_text_takes_the_same_draws_whatever_its_neighbours_say():
    one = render_batch(["ABCD", "WXYZ"], 16, 32, np.random.default_rng(1))
    two = render_batch(["", "WXYZ"], 16, 32, np.random.default_rng(1))
    assert np.array_equal(one[1], two[1])
    assert (two[0] == 255).all()
