"""Pairs files: every way of writing a pair reads alike, and what is wrong is named with its row."""

import io
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image

from ebbflow.data.images import encode_pngs
from ebbflow.data.pairs import (
    IMAGES,
    LATENTS,
    PairError,
    check_pairs,
    read_pair_prompts,
    read_pairs,
)

SIDES = np.random.default_rng(0).integers(0, 256, (6, 2, 4, 6, 3), dtype=np.uint8)
PROMPTS = ["a", "b", " a ", "c d", "é", "a"]


def png(image):
    return encode_pngs(image[None])[0]


ROWS = [
    {"prompt": prompt, "chosen": png(chosen), "rejected": png(rejected)}
    for prompt, (chosen, rejected) in zip(PROMPTS, SIDES, strict=True)
]


def parquet(folder, rows, name="pairs.parquet", **options):
    pq.write_table(pa.Table.from_pylist(rows), folder / name, **options)
    return folder / name


def jsonl(folder, *lines):
    path = folder / "pairs.jsonl"
    path.write_bytes(
        b"".join(
            (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"
            for line in lines
        )
    )
    return path


def as_files(folder):
    """The same rows with a path below ``folder`` in the place of every image's bytes."""
    (folder / "images").mkdir()
    rows = []
    for number, row in enumerate(ROWS):
        for side in IMAGES:
            (folder / "images" / f"{number}-{side}.png").write_bytes(row[side])
        rows.append(
            {"prompt": row["prompt"]} | {side: f"images/{number}-{side}.png" for side in IMAGES}
        )
    return rows


@pytest.mark.parametrize("write", ["bytes", "paths", "jsonl"])
def test_every_way_of_writing_images_gives_the_same_pairs(tmp_path, write):
    path = {
        "bytes": lambda: parquet(tmp_path, ROWS, row_group_size=2),
        "paths": lambda: parquet(tmp_path, as_files(tmp_path)),
        "jsonl": lambda: jsonl(tmp_path, b"\xef\xbb\xbf", *as_files(tmp_path), b"  "),
    }[write]()
    check_pairs(path)
    pairs = list(read_pairs(path))
    assert [pair.number for pair in pairs] == list(range(6))
    assert [pair.prompt for pair in pairs] == ["a", "b", "a", "c d", "é", "a"]
    for pair, (chosen, rejected) in zip(pairs, SIDES, strict=True):
        assert np.array_equal(pair.chosen, chosen)
        assert np.array_equal(pair.rejected, rejected)
        assert not pair.is_tie


@given(arrays.arrays(np.float32, (5, 2, 3, 4), elements=st.floats(-100, 100, width=16)))
def test_every_way_of_writing_latents_gives_the_same_pairs(tmp_path_factory, latents):
    folder = tmp_path_factory.mktemp("pairs")
    flat = latents.reshape(5, 2, 12)
    nested = pa.list_(pa.list_(pa.float16()))
    columns = {
        "tensor": lambda side: pa.FixedShapeTensorArray.from_numpy_ndarray(
            np.ascontiguousarray(latents[:, side])
        ),
        "list": lambda side: pa.array(list(flat[:, side]), pa.list_(pa.float64())),
        "large": lambda side: pa.array(list(flat[:, side]), pa.large_list(pa.float32())),
        "fixed": lambda side: pa.array(list(flat[:, side]), pa.list_(pa.float32(), 12)),
        "nested": lambda side: pa.array(latents[:, side].astype(np.float16).tolist(), nested),
    }
    for name, column in columns.items():
        path = folder / f"{name}.parquet"
        pq.write_table(
            pa.table({"prompt": ["p"] * 5, LATENTS[0]: column(0), LATENTS[1]: column(1)}), path
        )
        pairs = list(read_pairs(path))
        assert len(pairs) == 5
        for pair, (chosen, rejected) in zip(pairs, flat, strict=True):
            assert pair.chosen.dtype == np.float32
            assert np.array_equal(pair.chosen, chosen)
            assert np.array_equal(pair.rejected, rejected)
            assert pair.is_tie == np.array_equal(chosen, rejected)


def test_jpeg_and_grey_images_are_read_as_rgb(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(SIDES[0, 0]).save(buffer, format="JPEG")
    grey = io.BytesIO()
    Image.fromarray(SIDES[0, 0, :, :, 0]).save(grey, format="PNG")
    (pair,) = read_pairs(
        parquet(
            tmp_path, [{"prompt": "p", "chosen": buffer.getvalue(), "rejected": grey.getvalue()}]
        )
    )
    assert pair.chosen.shape == pair.rejected.shape == (4, 6, 3)
    assert np.array_equal(pair.rejected, np.repeat(SIDES[0, 0, :, :, :1], 3, axis=2))


def test_prompts_are_read_alone_and_other_columns_are_named(tmp_path):
    rows = [row | {"chosen": b"never decoded", "score": 1.0, "model": "x"} for row in ROWS]
    ignored = set()
    assert list(read_pair_prompts(parquet(tmp_path, rows), ignored)) == list(
        enumerate(prompt.strip() for prompt in PROMPTS)
    )
    assert ignored == {"score", "model"}
    lines = [
        {"prompt": "p", "chosen": "a.png", "rejected": "b.png"},
        {"prompt": "q", "chosen": "", "rejected": "", "by": 1},
    ]
    ignored.clear()
    assert list(read_pair_prompts(jsonl(tmp_path, *lines), ignored)) == [(0, "p"), (1, "q")]
    assert ignored == {"by"}


def test_the_same_picture_written_twice_is_a_tie(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(SIDES[0, 0]).save(buffer, format="PNG", compress_level=9)
    row = {"prompt": "p", "chosen": buffer.getvalue(), "rejected": png(SIDES[0, 0])}
    assert row["chosen"] != row["rejected"]
    assert [pair.is_tie for pair in read_pairs(parquet(tmp_path, [row, ROWS[1]]))] == [True, False]


BAD_ROWS = {
    "no prompt": ({"prompt": "  "}, "row 2: '  ' is no prompt; give every row"),
    "null prompt": ({"prompt": None}, "row 2: None is no prompt"),
    "no image": ({"rejected": b"nonsense"}, "row 2: rejected = .*nonsense.* is no PNG or JPEG"),
    "half an image": (
        {"rejected": png(SIDES[1, 1])[:-30]},
        "row 2: rejected = .* is no PNG or JPEG image that can be read",
    ),
    "null image": ({"chosen": None}, "row 2: chosen = None is no image"),
}


@pytest.mark.parametrize("change", BAD_ROWS)
def test_a_bad_row_is_named(tmp_path, change):
    changed, says = BAD_ROWS[change]
    path = parquet(tmp_path, [ROWS[0], ROWS[1] | changed, ROWS[2]])
    check_pairs(path)
    with pytest.raises(PairError, match=r"pairs\.parquet, " + says):
        list(read_pairs(path))


GOOD_LINE = {"prompt": "p", "chosen": "a.png", "rejected": "b.png"}
BAD_LINES = {
    "not JSON": (b'{"prompt": ', "is not JSON .*one JSON object per line"),
    "not UTF-8": (b'{"prompt": "\xff"}', "is not UTF-8 .*save the file as UTF-8"),
    "no object": (["p"], "is not an object"),
    "twice": (
        b'{"prompt": "p", "prompt": "q", "chosen": "a.png", "rejected": "b.png"}',
        "a key is there twice",
    ),
    "no rejected": (
        {"prompt": "p", "chosen": "a.png"},
        "a pair needs chosen and rejected .*there is prompt, chosen; rename",
    ),
    "no prompt": (
        {"chosen": "a.png", "rejected": "b.png"},
        "no column 'prompt' among chosen, rejected",
    ),
    "surrogate": (
        b'{"prompt": "\\ud800", "chosen": "a.png", "rejected": "b.png"}',
        "surrogate pair",
    ),
    "latents": (
        {"prompt": "p", "chosen_latent": [0.1], "rejected_latent": [0.2]},
        "from Parquet only; write .* .parquet",
    ),
    "not there": (
        GOOD_LINE | {"chosen": "none.png"},
        r"chosen = 'none.png' is no image file in .*From a URI only that file is fetched",
    ),
    "folder": (GOOD_LINE | {"chosen": "."}, "chosen = '.' is no image file"),
    "above": (GOOD_LINE | {"rejected": "../b.png"}, r"rejected = '\.\./b.png' lies outside"),
    "above below": (GOOD_LINE | {"rejected": "x/../../b.png"}, "lies outside"),
    "absolute": (GOOD_LINE | {"rejected": "/etc/passwd"}, "rejected = '/etc/passwd' lies outside"),
    "NUL": (GOOD_LINE | {"chosen": "a\0.png"}, "chosen = .* is no valid path"),
    "number": (GOOD_LINE | {"chosen": 3}, "chosen = 3 is no image"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_a_bad_line_is_named(tmp_path, case):
    line, says = BAD_LINES[case]
    for name, side in zip(("a.png", "b.png"), SIDES[0], strict=True):
        (tmp_path / name).write_bytes(png(side))
    path = jsonl(tmp_path, GOOD_LINE, b"", line)
    with pytest.raises(PairError, match=r"pairs\.jsonl, line 3: .*" + says):
        list(read_pairs(path))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([0.1, float("nan")], "1 of 2 numbers are not finite"),
        ([0.1, float("inf")], "1 of 2 numbers are not finite"),
        ([1e300, -1e300], "2 of 2 numbers are not finite"),
        ([0.1, None], "1 of 2 numbers are not finite"),
        (None, "chosen_latent = None is no latent"),
    ],
)
def test_a_bad_latent_is_named(tmp_path, values, says):
    rows = [
        {"prompt": "p", "chosen_latent": latent, "rejected_latent": [0.3, 0.4]}
        for latent in ([0.1, 0.2], values)
    ]
    with pytest.raises(PairError, match=f"row 2: .*{says}"):
        list(read_pairs(parquet(tmp_path, rows)))


def test_latents_of_another_type_are_refused(tmp_path):
    for values in ([1, 2], ["a"], [{"x": 0.5}], 0.5, "abc"):
        with pytest.raises(
            PairError,
            match="row 1: chosen_latent = .* is no latent; write a list or a fixed-shape tensor",
        ):
            list(
                read_pairs(
                    parquet(
                        tmp_path,
                        [{"prompt": "p", "chosen_latent": values, "rejected_latent": values}],
                    )
                )
            )


def test_a_tensor_that_is_null_is_refused(tmp_path):
    # Arrow itself cannot read such a column back from Parquet, so only its own words say where.
    numbers = pa.array([[0.1, 0.2], None], pa.list_(pa.float32(), 2))
    tensors = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.float32(), (2,)), numbers)
    path = tmp_path / "tensor.parquet"
    pq.write_table(
        pa.table({"prompt": ["p", "q"], "chosen_latent": tensors, "rejected_latent": tensors}), path
    )
    with pytest.raises(PairError, match=r"tensor\.parquet"):
        list(read_pairs(path))


def test_a_file_that_is_none_is_named(tmp_path):
    for name, content, says in [
        ("none.parquet", None, "no such file; check the stage's 'pairs'"),
        ("pairs.csv", b"prompt,chosen,rejected\n", "none of .parquet, .jsonl"),
        ("broken.parquet", b"PAR1", "not a Parquet file that can be read"),
        ("empty.jsonl", b"\n \n", "no pair in it; write at least one"),
    ]:
        if content is not None:
            (tmp_path / name).write_bytes(content)
        for read in (check_pairs, lambda path: list(read_pair_prompts(path, set()))):
            with pytest.raises(PairError, match=f"{name}.*{says}"):
                read(tmp_path / name)


def test_columns_that_do_not_make_a_pair_are_named(tmp_path):
    latents = dict.fromkeys(LATENTS, [0.5])
    with pytest.raises(
        PairError, match=r"pairs\.parquet: a pair needs .*there is prompt, rejected; rename"
    ):
        check_pairs(parquet(tmp_path, [{"prompt": "p", "rejected": b""}]))
    with pytest.raises(PairError, match="both images and latents; remove chosen and rejected"):
        check_pairs(parquet(tmp_path, [ROWS[0] | latents]))
    with pytest.raises(PairError, match="no column 'prompt' among chosen_latent"):
        check_pairs(parquet(tmp_path, [latents]))
    twice = pa.table([["p"], [b""], [b""], [b""]], names=["prompt", "chosen", "rejected", "chosen"])
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(PairError, match="the column 'chosen' is there twice"):
        check_pairs(tmp_path / "twice.parquet")
    pq.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), tmp_path / "empty.parquet")
    with pytest.raises(PairError, match="no pair in it"):
        check_pairs(tmp_path / "empty.parquet")


def test_a_file_cut_off_is_no_file(tmp_path):
    path = parquet(tmp_path, ROWS)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(PairError, match="not a Parquet file that can be read"):
        list(read_pairs(path))
