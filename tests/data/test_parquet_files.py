"""Files of a kilobyte that would fill the memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ebbflow.data import files, parquet_files
from ebbflow.data.pairs import PairError, read_pair_prompts, read_pairs
from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import PromptError


def write_repeated(path: Path, columns: dict[str, object], num_rows: int) -> Path:
    """Write rows that are all alike, each column as a dictionary of one value."""
    indices = pa.array(np.zeros(num_rows, np.int32))
    table = pa.table(
        {
            name: pa.DictionaryArray.from_arrays(indices, pa.array([value]))
            for name, value in columns.items()
        }
    )
    pq.write_table(table, path, compression="zstd", write_statistics=False)
    assert path.stat().st_size < 50_000
    return path


def test_a_small_file_that_decodes_to_terabytes_is_refused(tmp_path: Path) -> None:
    prompts = write_repeated(tmp_path / "prompts.parquet", {"prompt": "a" * 500_000}, 5_000_000)
    tracemalloc.start()
    with pytest.raises(PromptError, match=r"decode to more than 268,435,456 bytes, 200 times"):
        read_prompt_file(prompts)
    assert tracemalloc.get_traced_memory()[1] < 5e8
    tracemalloc.stop()
    pairs = write_repeated(
        tmp_path / "pairs.parquet",
        {"prompt": "a" * 500_000, "chosen": b"x", "rejected": b"y"},
        5_000_000,
    )
    with pytest.raises(PairError, match=r"decode to more than 268,435,456 bytes, 200 times"):
        list(read_pair_prompts(pairs, set()))


def test_a_file_of_too_many_rows_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = write_repeated(tmp_path / "prompts.parquet", {"prompt": "a"}, files.MAX_ROWS + 1)
    with pytest.raises(PromptError, match=r"10,000,001 rows are more than 10,000,000"):
        read_prompt_file(path)


def test_a_cell_that_is_no_prompt_by_its_size_is_refused(tmp_path: Path) -> None:
    path = write_repeated(tmp_path / "prompts.parquet", {"prompt": "a" * 2_000_000}, 3)
    with pytest.raises(PromptError, match=r"'prompt' has a cell of 2,000,000 bytes; at most 1,048"):
        read_prompt_file(path)
    columns = {"prompt": "a", "chosen": bytes(70_000_000), "rejected": b"y"}
    with pytest.raises(PairError, match=r"'chosen' has a cell of 70,000,000 bytes; at most 67,108"):
        list(read_pairs(write_repeated(tmp_path / "pairs.parquet", columns, 3)))


def test_a_row_of_too_many_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_files, "MAX_VALUES_PER_ROW", 1000)
    latent = [0.0] * 1001
    rows = [{"prompt": "a", "chosen_latent": latent, "rejected_latent": latent}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "pairs.parquet")
    with pytest.raises(PairError, match=r"'chosen_latent.*' has 1,001 values in 1 rows; at most"):
        list(read_pairs(tmp_path / "pairs.parquet"))


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".csv"])
def test_a_line_of_200_megabytes_is_refused_before_it_is_in_memory(
    tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / f"prompts{suffix}"
    with path.open("wb") as file:
        file.write(b'prompt\n{"prompt": "' if suffix != ".jsonl" else b'{"prompt": "')
        file.truncate(200_000_000)
    tracemalloc.start()
    with pytest.raises(PromptError, match=r"line [12]: has more than 1,048,576 bytes and begins"):
        read_prompt_file(path)
    assert tracemalloc.get_traced_memory()[1] < 2e7
    tracemalloc.stop()


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_a_file_of_too_many_lines_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    monkeypatch.setattr(files, "MAX_ROWS", 3)
    path = tmp_path / f"prompts{suffix}"
    form = "{}\n" if suffix == ".txt" else '{{"prompt": "{}"}}\n'
    lines = [form.format(text) for text in ("a cat", "a dog", "a hen", "a cow")]
    path.write_text("".join(lines[:3]))
    assert len(read_prompt_file(path)[0]) == 3
    path.write_text("".join(lines))
    with pytest.raises(PromptError, match="more than 3 lines; split the file"):
        read_prompt_file(path)


def test_a_json_list_of_too_many_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 30)
    path = tmp_path / "prompts.json"
    path.write_text('[{"prompt": "a cat"}]')
    assert len(read_prompt_file(path)[0]) == 1
    path.write_text('[{"prompt": "a cat beside a dog"}]')
    with pytest.raises(PromptError, match=r"its 34 bytes are more than the 30 of a JSON list"):
        read_prompt_file(path)


def test_images_in_parquet_and_repeated_texts_are_still_read(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"a cat no {number}", "negative_prompt": "blurry " * 20}
        for number in range(5000)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "prompts.parquet")
    prompts, _ = read_prompt_file(tmp_path / "prompts.parquet")
    assert [row.prompt for row in prompts] == [row["prompt"] for row in rows]


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
def test_delta_encoded_texts_are_read_within_the_same_limits(tmp_path: Path, encoding: str) -> None:
    texts = [f"a cat no {number}" for number in range(100)]
    path = tmp_path / "prompts.parquet"
    options = {"use_dictionary": False, "column_encoding": encoding}
    pq.write_table(pa.table({"prompt": texts}), path, **options)
    prompts, _ = read_prompt_file(path)
    assert [row.prompt for row in prompts] == texts
    pq.write_table(pa.table({"prompt": ["a" * 2_000_000]}), path, **options)
    with pytest.raises(PromptError, match=r"'prompt' has a cell of 2,000,000 bytes; at most 1,048"):
        read_prompt_file(path)


def test_short_rows_are_decoded_in_large_batches_and_long_ones_in_small(tmp_path: Path) -> None:
    short = tmp_path / "short.parquet"
    pq.write_table(pa.table({"prompt": [f"a cat {number}" for number in range(10_000)]}), short)
    sizes = [batch.num_rows for batch in parquet_files.iterate_batches(short, PromptError)]
    assert sizes == [4096, 4096, 1808]
    pictures = np.random.default_rng(0).bytes(2_000_000)
    long = tmp_path / "long.parquet"
    column = [pictures[number:] for number in range(40)]
    pq.write_table(pa.table({"prompt": ["a"] * 40, "image": column}), long)
    sizes = [batch.num_rows for batch in parquet_files.iterate_batches(long, PromptError)]
    assert sizes == [16, 16, 8]
    # The image is not read, so it does not count.
    batches = parquet_files.iterate_batches(long, PromptError, ["prompt"])
    assert [batch.num_rows for batch in batches] == [40]


def test_rows_that_repeat_a_long_text_come_in_small_batches(tmp_path: Path) -> None:
    path = write_repeated(tmp_path / "prompts.parquet", {"prompt": "a" * 40_000}, 5_000)
    batches = parquet_files.iterate_batches(path, PromptError)
    assert {next(batches).num_rows for _ in range(3)} == {16}
    delta = tmp_path / "delta.parquet"
    pq.write_table(
        pa.table({"prompt": ["a" * 40_000] * 100}),
        delta,
        use_dictionary=False,
        column_encoding={"prompt": "DELTA_BYTE_ARRAY"},
    )
    assert next(parquet_files.iterate_batches(delta, PromptError)).num_rows == 16
