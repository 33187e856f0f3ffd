"""A prompt file gives prompts that survive the prompt table, or is refused with the file and the
line.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st
from PIL import Image
from plain_cases import anything, assert_readable, cases, damage, only_speaks_plainly

from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import PromptError, read_prompts, split_prompts, write_prompts

LINES = ['a sign "AB"', "une pomme “É”", 'three "X" and "Y"', "日本", "plain"]


def png(size=(4, 3)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (200, 30, 90)).save(buffer, "PNG")
    return buffer.getvalue()


def parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


WHOLE = {
    ".txt": "\n".join(LINES).encode(),
    ".jsonl": "\n".join(
        json.dumps({"prompt": line, "seed": index}) for index, line in enumerate(LINES)
    ).encode(),
    ".csv": (
        "prompt,target,note\n"
        + "\n".join(f'"{line.replace(chr(34), chr(34) * 2)}",AB,"1,2"' for line in LINES)
    ).encode(),
    ".parquet": parquet(
        pa.table({"prompt": LINES, "image": [png()] * 5, "n": range(5), "x": [0.5] * 5})
    ),
}


def check(path: Path) -> None:
    """Read a file; what it gives goes into a prompt table and comes out as it went in."""
    read = only_speaks_plainly(lambda: read_prompt_file(path), PromptError, str(path))
    if read is None:
        return
    rows, report = read
    assert report.rows == len(rows) > 0
    table = path.with_name("table.parquet")
    write_prompts(split_prompts(rows, 0, 0, seed=0), table)
    for row, prompt in zip(rows, read_prompts(table), strict=True):
        assert prompt.prompt.strip() == prompt.prompt
        assert prompt.prompt
        # The table keeps all of a row but the line that it stood on.
        kept = {name: value for name, value in vars(row).items() if name != "location"}
        assert vars(prompt) | kept == vars(prompt)


@pytest.mark.parametrize("suffix", WHOLE)
def test_the_files_are_whole_before_they_are_damaged(tmp_path, suffix):
    (tmp_path / f"p{suffix}").write_bytes(WHOLE[suffix])
    rows, _ = read_prompt_file(tmp_path / f"p{suffix}")
    assert [row.prompt for row in rows] == LINES


@cases(200, suffix=st.sampled_from(sorted(WHOLE)), go_wrong=damage())
def test_damaged_prompt_file_is_an_error_or_loads_right(tmp_path, suffix, go_wrong):
    path = tmp_path / f"p{suffix}"
    path.write_bytes(go_wrong(WHOLE[suffix]))
    check(path)


columns = st.sampled_from(
    ["prompt", "target", "negative_prompt", "image", "other", "", "\x1b[2J", "é" * 900]
)
texts = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "\ud800",
            "\u202eabc",
            "\x00",
            "\ufeff",
            "a\u2028b",
            '"',
            "x" * 20_000,
            "\U0001f600" * 50,
            " ",
        ]
    ),
)


@cases(
    100,
    records=st.lists(
        st.dictionaries(columns, st.one_of(texts, anything), max_size=4), min_size=1, max_size=3
    ),
)
def test_json_prompts_with_arbitrary_fields_are_an_error_or_load_right(tmp_path, records):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    check(path)


@cases(
    60,
    header=st.lists(columns, min_size=1, max_size=4),
    rows=st.lists(st.lists(texts, max_size=4), max_size=3),
)
def test_csv_prompts_with_arbitrary_cells_are_an_error_or_load_right(tmp_path, header, rows):
    path = tmp_path / "p.csv"
    lines = [",".join(f'"{field}"' for field in fields) for fields in [header, *rows]]
    path.write_bytes("\n".join(lines).encode(errors="surrogatepass"))
    check(path)


TYPES = [
    *(
        pa.string(),
        pa.large_string(),
        pa.binary(),
        pa.int8(),
        pa.uint64(),
        pa.float16(),
        pa.float64(),
        pa.bool_(),
        pa.null(),
    ),
    *(
        pa.date32(),
        pa.timestamp("ns"),
        pa.timestamp("s", "UTC"),
        pa.time64("ns"),
        pa.duration("ns"),
        pa.decimal128(10, 2),
    ),
    *(
        pa.list_(pa.string()),
        pa.struct([("a", pa.int32())]),
        pa.map_(pa.string(), pa.int32()),
        pa.dictionary(pa.int8(), pa.string()),
    ),
]


@cases(
    100,
    kinds=st.lists(st.tuples(columns, st.sampled_from(TYPES)), min_size=1, max_size=4),
    data=st.data(),
)
def test_parquet_prompts_with_arbitrary_columns_are_an_error_or_load_right(tmp_path, kinds, data):
    arrays = [odd_array(kind, data.draw(st.integers(0, 2**64 - 1))) for _, kind in kinds]
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table(arrays, names=[name for name, _ in kinds]), path)
    check(path)


def odd_array(kind: pa.DataType, bits: int) -> pa.Array:
    """Two values of a type from raw bits, so that dates and the like are those that no calendar
    has; and a null.
    """
    if (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_temporal(kind)
        or pa.types.is_decimal(kind)
    ):
        width = kind.bit_width // 8
        if str(kind).startswith("timestamp[s"):
            bits >>= 11  # Parquet has no seconds: they are written as milliseconds
        raw = bits.to_bytes(8, "little") * 6
        return pa.Array.from_buffers(
            kind, 3, [pa.py_buffer(b"\x03"), pa.py_buffer(raw[: 3 * width])]
        )
    values = {
        "string": ["a", "\u202e", None],
        "large_string": ["a", "b", None],
        "binary": [b"\xff", png(), None],
        "bool": [True, False, None],
        "null": [None, None, None],
    }
    if str(kind) in values:
        return pa.array(values[str(kind)], kind)
    nested = {
        pa.types.is_list: [["a"], [], None],
        pa.types.is_struct: [{"a": 1}, {"a": None}, None],
    }
    nested |= {pa.types.is_map: [[("a", 1)], [], None], pa.types.is_dictionary: ["a", "b", None]}
    return next(pa.array(found, kind) for test, found in nested.items() if test(kind))


@cases(60, go_wrong=damage())
def test_a_damaged_prompt_table(tmp_path, go_wrong):
    (tmp_path / "p.txt").write_bytes(WHOLE[".txt"])
    rows, _ = read_prompt_file(tmp_path / "p.txt")
    write_prompts(split_prompts(rows, 1, 1, seed=0), tmp_path / "whole.parquet")
    expected = read_prompts(tmp_path / "whole.parquet")
    path = tmp_path / "table.parquet"
    path.write_bytes(go_wrong((tmp_path / "whole.parquet").read_bytes()))
    found = only_speaks_plainly(lambda: read_prompts(path), PromptError, str(path))
    assert found is None or found == expected


@pytest.mark.parametrize("key", ["prompt", "other"])
def test_nesting_around_the_depth_at_which_the_stack_ends(tmp_path, key):
    for depth in [*range(850, 1000), 100_000]:
        (tmp_path / "p.jsonl").write_text(
            f'{{"prompt": "a", "{key}x": 1, "{key}": ' + "[" * depth + "]" * depth + "}"
        )
        check(tmp_path / "p.jsonl")


def test_what_is_no_file(tmp_path):
    (tmp_path / "folder.txt").mkdir()
    for name in ("folder.txt", "none.csv", "a\0b.jsonl", "x" * 300 + ".txt", "none", ".parquet"):
        with pytest.raises(PromptError) as error:
            read_prompt_file(tmp_path / name)
        assert str(error.value)


def test_long_lines_and_many_are_read_or_refused_in_bounded_words(tmp_path):
    path = tmp_path / "p.jsonl"
    for content in (
        "x" * 5_000_000,
        '{"prompt": ' + "9" * 5_000_000,
        '{"prompt": "' + "x" * 5_000_000 + '"}',
        "{}\n" * 50_000,
    ):
        path.write_text(content)
        check(path)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "latin-1", "shift-jis"])
def test_another_encoding_is_named(tmp_path, encoding):
    text = "Käse é" if encoding == "latin-1" else "日本語 a sign"
    (tmp_path / "p.txt").write_bytes(text.encode(encoding))
    with pytest.raises(PromptError) as error:
        read_prompt_file(tmp_path / "p.txt")
    assert_readable(str(error.value), "p.txt, line 1", "is not UTF-8", "save the file as UTF-8")


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that says it is that large."""
    header = chunk(b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes(100_000)))
        + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    "size", [(8001, 8001), (12_000, 12_000), (60_000, 60_000), (2**31 - 1, 2**31 - 1), (0, 5)]
)
def test_an_image_that_would_fill_memory(tmp_path, size):
    for written, given in ((tmp_path / "bomb.png", "bomb.png"), (tmp_path / "none", bomb(*size))):
        written.write_bytes(bomb(*size))
        pq.write_table(pa.table({"prompt": ["a"], "image": [given]}), tmp_path / "p.parquet")
        with pytest.raises(PromptError) as error:
            read_prompt_file(tmp_path / "p.parquet")
        assert_readable(str(error.value), "p.parquet, row 1: image = ")


@cases(80, go_wrong=damage(), kind=st.sampled_from(["PNG", "JPEG", "WEBP"]))
def test_damaged_image_of_a_prompt_is_an_error_or_loads_right(tmp_path, go_wrong, kind):
    buffer = io.BytesIO()
    Image.effect_noise((24, 16), 90).convert("RGB").save(buffer, kind)
    (tmp_path / "a.img").write_bytes(go_wrong(buffer.getvalue()))
    (tmp_path / "p.jsonl").write_text('{"prompt": "a", "image": "a.img"}')
    check(tmp_path / "p.jsonl")
