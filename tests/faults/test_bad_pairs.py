"""A pairs file gives pairs, or is refused with the row; an import that fails leaves no table that
looks whole.
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st
from PIL import Image
from plain_cases import anything, assert_readable, cases, damage, only_speaks_plainly

from ebbflow.data.images import encode_pngs
from ebbflow.data.pairs import (
    IMAGES,
    LATENTS,
    PairError,
    check_pairs,
    read_pair_prompts,
    read_pairs,
)
from ebbflow.offline.pairs import import_pairs
from ebbflow.stage import StageContext
from tests.faults.test_bad_prompts import bomb

PICTURES = encode_pngs(np.random.default_rng(0).integers(0, 256, (4, 16, 32, 3), dtype=np.uint8))
ROWS = [
    {"prompt": "AB", "chosen": PICTURES[0], "rejected": PICTURES[1]},
    {"prompt": "CD", "chosen": PICTURES[2], "rejected": PICTURES[3]},
]
NUMBERS = [{"prompt": "AB", "chosen_latent": [0.5] * 512, "rejected_latent": [0.25] * 512}] * 3


def parquet(path: Path, rows: list[dict]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def check(path: Path) -> list | None:
    def everything():
        return list(read_pairs(path)), list(read_pair_prompts(path, set()))

    read = only_speaks_plainly(everything, PairError, str(path))
    only_speaks_plainly(lambda: check_pairs(path), PairError, str(path))
    if read is None:
        return None
    pairs, prompts = read
    assert [(pair.number, pair.prompt) for pair in pairs] == prompts != []
    for pair in pairs:
        for side in (pair.chosen, pair.rejected):
            assert side.dtype == (np.uint8 if pair.columns == IMAGES else np.float32)
            assert np.isfinite(side).all()
    return pairs


@cases(100, rows=st.sampled_from([ROWS, NUMBERS]), go_wrong=damage())
def test_damaged_pairs_file_is_an_error_or_loads_right(tmp_path, rows, go_wrong):
    path = parquet(tmp_path / "pairs.parquet", rows)
    path.write_bytes(go_wrong(path.read_bytes()))
    check(path)


@cases(80, go_wrong=damage())
def test_a_damaged_file_of_lines(tmp_path, go_wrong):
    (tmp_path / "a.png").write_bytes(PICTURES[0])
    (tmp_path / "b.png").write_bytes(PICTURES[1])
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(go_wrong(b'{"prompt": "AB", "chosen": "a.png", "rejected": "b.png"}\n' * 3))
    check(path)


@cases(80, go_wrong=damage(), kind=st.sampled_from(["PNG", "JPEG"]))
def test_damaged_image_of_a_pair_is_an_error_or_loads_right(tmp_path, go_wrong, kind):
    buffer = io.BytesIO()
    Image.open(io.BytesIO(PICTURES[0])).save(buffer, kind)
    check(
        parquet(
            tmp_path / "pairs.parquet",
            [ROWS[0], ROWS[1] | {"rejected": go_wrong(buffer.getvalue())}],
        )
    )


names = st.sampled_from(["prompt", *IMAGES, *LATENTS, "other", "\x1b[2J", "é" * 900])
values = st.one_of(
    anything,
    st.sampled_from(["a.png", "../a.png", "/etc/passwd", "a\0.png", "x" * 300, ".", "\ud800.png"]),
)


@cases(
    100,
    records=st.lists(
        st.dictionaries(names, values, min_size=1, max_size=5), min_size=1, max_size=3
    ),
)
def test_json_pairs_with_arbitrary_fields_are_an_error_or_load_right(tmp_path, records):
    (tmp_path / "a.png").write_bytes(PICTURES[0])
    good = {"prompt": "AB", "chosen": "a.png", "rejected": "a.png"}
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(good | record) for record in records))
    check(path)


COLUMNS = {
    "text": pa.array(["a", "b"]),
    "empty text": pa.array(["", None]),
    "bytes": pa.array([PICTURES[0], b"\xff"]),
    "numbers": pa.array([1.5, None]),
    "lists": pa.array([[0.5, 0.25], []]),
    "lists of lists": pa.array([[[0.5]], [[0.5, 0.25], None]]),
    "lists of text": pa.array([["a"], []]),
    "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(np.ones((2, 1, 2, 2), np.float32)),
    "tensors of integers": pa.FixedShapeTensorArray.from_numpy_ndarray(
        np.ones((2, 1, 2), np.int32)
    ),
    "structs": pa.array([{"bytes": PICTURES[0], "path": None}, None]),
    "words": pa.array(["a", "b"]).dictionary_encode(),
    "days": pa.array([2**31 - 1, -(2**31)], pa.int32()).cast(pa.date32()),
    "nothing": pa.nulls(2),
    "half numbers": pa.array(
        np.array([[1.0], [np.inf]], np.float16).tolist(), pa.list_(pa.float16())
    ),
}


@cases(
    120,
    prompt=st.sampled_from(sorted(COLUMNS)),
    sides=st.tuples(*[st.sampled_from(sorted(COLUMNS))] * 2),
    latents=st.booleans(),
)
def test_parquet_pairs_with_arbitrary_columns_are_an_error_or_load_right(
    tmp_path, prompt, sides, latents
):
    kinds = dict(zip(("prompt", *(LATENTS if latents else IMAGES)), (prompt, *sides), strict=True))
    path = tmp_path / "pairs.parquet"
    pq.write_table(pa.table({name: COLUMNS[kind] for name, kind in kinds.items()}), path)
    check(path)


@pytest.mark.parametrize(
    "size", [(8001, 8001), (12_000, 12_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1)]
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_would_fill_memory(tmp_path, size):
    with pytest.raises(PairError) as error:
        list(
            read_pairs(
                parquet(tmp_path / "pairs.parquet", [ROWS[0], ROWS[1] | {"rejected": bomb(*size)}])
            )
        )
    assert_readable(str(error.value), "pairs.parquet, row 2: rejected = ", "pixels")


def test_greys_that_would_be_cut_off(tmp_path):
    buffer = io.BytesIO()
    Image.fromarray(np.full((16, 32), 40_000, np.uint16)).save(buffer, "PNG")
    with pytest.raises(PairError, match="16 bits"):
        list(
            read_pairs(
                parquet(tmp_path / "pairs.parquet", [ROWS[0] | {"chosen": buffer.getvalue()}])
            )
        )


def test_what_is_no_file(tmp_path):
    (tmp_path / "folder.parquet").mkdir()
    for name in (
        "folder.parquet",
        "none.jsonl",
        "a\0b.jsonl",
        "x" * 300 + ".parquet",
        "none",
        "pairs.csv",
    ):
        with pytest.raises(PairError):
            check_pairs(tmp_path / name)


def test_a_pipe_that_nobody_writes_to_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pairs.jsonl")
    os.mkfifo(tmp_path / "a.png")
    with pytest.raises(PairError, match="no such file"):
        check_pairs(tmp_path / "pairs.jsonl")
    (tmp_path / "lines.jsonl").write_text(
        '{"prompt": "AB", "chosen": "a.png", "rejected": "a.png"}'
    )
    with pytest.raises(PairError, match="is no image file"):
        check_pairs(tmp_path / "lines.jsonl")


@pytest.mark.parametrize("at", [1, 4, 7])
def test_an_import_that_fails_in_the_middle_leaves_no_rollouts(make_recipe, model, tmp_path, at):
    ctx = StageContext(
        make_recipe(offline={"algorithm": {"name": "diffusion_dpo"}, "micro_batch": 2}), 0, 1
    )
    rows = [{**ROWS[number % 2], "prompt": "AB"} for number in range(8)]
    rows[at] |= {"rejected": PICTURES[1][:-30]}
    source = parquet(tmp_path / "pairs.parquet", rows)
    with pytest.raises(PairError, match=f"row {at + 1}: rejected"):
        import_pairs(ctx, model, source, tmp_path / "tables")
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["prompts.parquet"]
