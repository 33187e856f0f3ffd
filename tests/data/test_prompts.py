import json
import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prompt_cases import write_file

from ebbflow.data import files
from ebbflow.data.prompt_files import read_prompt_file
from ebbflow.data.prompts import (
    PromptError,
    PromptRow,
    check_targets,
    make_glyph_prompts,
    read_prompt_ids,
    read_prompts,
    split_prompts,
    write_prompts,
)
from ebbflow.data.schema import PROMPTS
from ebbflow.recipe.model import GlyphTrainingConfig
from tests.cpu_time import at_most_cpu_seconds

DPG_HEADER = (
    "item_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    "question_natural_language"
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
IMAGE = st.none() | st.binary(max_size=20)
ROWS = st.lists(
    st.builds(
        PromptRow,
        prompt=TEXT,
        negative_prompt=TEXT,
        target=st.none() | TEXT,
        source=TEXT,
        metadata=TEXT,
        image=IMAGE,
    ),
    min_size=3,
    max_size=20,
)


def test_glyph_prompts_are_unique_quoted_and_repeatable():
    rows = make_glyph_prompts(500, 4, seed=7)
    assert len({row.target for row in rows}) == 500
    assert all(
        len(row.target) == 4 and row.target.isascii() and row.target.isupper() for row in rows
    )
    assert all(row.prompt == f'"{row.target}"' for row in rows)
    assert rows == make_glyph_prompts(500, 4, seed=7)
    assert rows != make_glyph_prompts(500, 4, seed=8)


def test_glyph_prompts_can_use_up_every_string():
    assert {row.target for row in make_glyph_prompts(26, 1, seed=0)} == set(
        "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    )
    with pytest.raises(PromptError, match="only 26 strings of 1 letters A-Z, not 27"):
        make_glyph_prompts(27, 1, seed=0)
    with pytest.raises(PromptError, match="count = 0"):
        make_glyph_prompts(0, 1, seed=0)


def test_glyph_prompts_of_several_alphabets_are_as_many_of_each():
    rows = make_glyph_prompts(
        14, 1, 0, [*GlyphTrainingConfig(alphabets=["lower_case", "digits"]).alphabet_characters]
    )
    targets = [row.target for row in rows]
    assert all(target.islower() for target in targets[:7])
    assert all(target.isdigit() for target in targets[7:])
    assert len(set(targets)) == 14
    with pytest.raises(PromptError, match="only 10 strings of 1 letters 0-9, not 11"):
        make_glyph_prompts(22, 1, 0, ["abcdefghijklmnopqrstuvwxyz", "0123456789"])


def test_every_format_gives_the_same_rows(tmp_path):
    records = [
        {
            "prompt": 'a sign "OPEN" and "LATE"',
            "negative_prompt": "blurry",
            "target": None,
            "style": "neon",
        },
        {"prompt": 'a card "HI"', "negative_prompt": None, "target": "BYE", "style": "paper"},
        {"prompt": "a tree", "negative_prompt": None, "target": None, "style": "oil"},
    ]
    jsonl = write_file(tmp_path, "p.jsonl", "\n".join(map(json.dumps, records)))
    csv = write_file(
        tmp_path,
        "p.csv",
        'prompt,negative_prompt,target,style\r\n"a sign ""OPEN"" and ""LATE""",blurry,,neon\r\n'
        '"a card ""HI""",,BYE,paper\r\na tree,,,oil\r\n',
    )
    parquet = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist(records), parquet)
    expected = [("OPEN LATE", "blurry", "neon"), ("BYE", "", "paper"), (None, "", "oil")]
    json_file = write_file(tmp_path, "p.json", json.dumps(records, indent=1))
    tsv = write_file(
        tmp_path,
        "p.tsv",
        'prompt\tnegative_prompt\ttarget\tstyle\na sign "OPEN" and "LATE"\tblurry\t\tneon\n'
        'a card "HI"\t\tBYE\tpaper\na tree\t\t\toil\n',
    )
    for path in (jsonl, csv, parquet, json_file, tsv):
        rows, report = read_prompt_file(path)
        assert [
            (row.target, row.negative_prompt, json.loads(row.metadata)["style"]) for row in rows
        ] == expected
        assert {row.source for row in rows} == {path.name}
        assert (report.rows, report.duplicates, report.empty_lines) == (3, 0, 0)


def test_text_file_with_typographic_quotes_duplicates_and_empty_lines(tmp_path):
    path = write_file(
        tmp_path,
        "p.txt",
        b"\xef\xbb\xbf" + "a sign “GO”\r\n\n  a sign “GO” \n   \na tree\u2028with a pond".encode(),
    )
    rows, report = read_prompt_file(path)
    assert [(row.prompt, row.target) for row in rows] == [
        ("a sign “GO”", "GO"),
        ("a tree\u2028with a pond", None),
    ]
    assert str(report) == "p.txt: 2 prompts kept, 1 duplicate and 2 empty lines left out"


@pytest.mark.parametrize(
    "prompt", ["“" * 2**17, '"x' + "“" * 2**17, "“" * 2**17 + '"', "“ ”" + "“a" * 2**17], ids=len
)
def test_quotes_that_nothing_closes_take_linear_time(tmp_path, prompt):
    path = write_file(tmp_path, "p.txt", prompt)
    with at_most_cpu_seconds(60):
        (row,), _ = read_prompt_file(path)
    assert row.target is None


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ("“A” and “B C”", "A B C"),
        ('“A "B” "C"', 'A "B C'),
        ("“A “B” C", "B"),
        ("““A””", "A"),
        ('"A “B" C”', "A “B"),
        ("“A", None),
        ("A”", None),
    ],
)
def test_the_target_is_what_pairs_of_quotes_enclose(tmp_path, prompt, target):
    (row,), _ = read_prompt_file(write_file(tmp_path, "p.txt", prompt))
    assert row.target == target


def test_the_first_of_duplicates_is_kept_and_metadata_has_sorted_keys(tmp_path):
    lines = [
        '{"prompt": "x", "b": 1, "a": [2]}',
        '{"a": 9, "prompt": " x "}',
        '{"prompt": "x", "negative_prompt": "y"}',
    ]
    rows, report = read_prompt_file(write_file(tmp_path, "p.jsonl", "\n".join(lines)))
    assert rows[0].metadata == '{"a": [2], "b": 1}'
    assert [row.negative_prompt for row in rows] == ["", "y"]
    assert report.duplicates == 1


@pytest.mark.parametrize(
    ("name", "content", "line", "value"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": oops}', "line 2", "oops"),
        ("p.jsonl", '["a"]', "line 1", "not an object"),
        ("p.jsonl", '{"prompt": "a"}\n\n{"text": "b"}', "line 3", "no prompt"),
        ("p.jsonl", '{"prompt": 7}', "line 1", "prompt = 7 is not text"),
        ("p.jsonl", '{"prompt": "  "}', "line 1", "no prompt"),
        ("p.jsonl", "{}", "line 1", "no prompt"),
        ("p.jsonl", '{"prompt": "a", "prompt": "b"}', "line 1", "twice"),
        ("p.jsonl", '{"prompt": "a", "x": NaN}', "line 1", "NaN"),
        ("p.jsonl", '{"prompt": "a", "x": 1e999}', "line 1", "x"),
        ("p.jsonl", '{"prompt": "\\ud800"}', "line 1", "surrogate"),
        ("p.jsonl", '{"prompt": "a", "x": ["\\ud800"]}', "line 1", "surrogate"),
        ("p.jsonl", '{"prompt": "a"}\n' + "[" * 100_000, "line 2", "not JSON"),
        ("p.csv", "prompt,style\na,b\nc,d,e", "line 3", "c,d,e"),
        ("p.csv", 'prompt,style\n"two\nlines",b\nc', "line 4", "1 field and the header 2"),
        ("p.csv", 'prompt,style\n"never closed,b', "line 2", "not CSV"),
        ("p.csv", "text,style\na,b", "line 1", "text, style"),
        ("p.csv", "prompt,style,style\na,b,c", "line 1", "'style' is there twice"),
        ("p.csv", "prompt,style\n,b", "line 2", "no prompt"),
        ("p.txt", b"a\n\xff\xfe", "line 2", "UTF-8"),
        ("p.csv", b"prompt\na\n\xff", "line 3", "UTF-8"),
        ("p.txt", "", "p.txt", "no prompt in it"),
        ("p.txt", "\n \n", "p.txt", "2 empty lines"),
        ("p.csv", "prompt\n", "p.csv", "no prompt in it"),
        ("p.parquet", "PAR1 or so", "p.parquet", "Parquet"),
        ("p.tsv", "a", "line 1", "no column 'prompt' among 'a'"),
        ("p.tsv", "prompt\tstyle\na\tb\tc", "line 2", "take tabs out of fields"),
        ("p.json", '{"prompt": "a"}', "p.json", "not a list"),
        ("p.json", '[{"prompt": "a"}, "b"]', "item 2", "not an object"),
        ("p.json", '[{"prompt": "a"}, {}]', "item 2", "no prompt"),
        ("p.json", '[{"prompt": "a", "prompt": "b"}]', "p.json", "twice"),
        ("p.json", "[" * 100_000, "p.json", "not JSON"),
        (
            "p.csv",
            f"{DPG_HEADER}\na,cat,,1,0,,,,Cat?\na,dog,,2,1,,,,Dog?",
            "line 3",
            "another text",
        ),
        ("p.csv", f"{DPG_HEADER}\na,,,1,0,,,,Cat?", "line 2", "no prompt"),
        ("p.xlsx", "a", "p.xlsx", ".jsonl"),
        ("p", "a", "p", ".jsonl"),
    ],
)
def test_malformed_files_name_the_file_the_line_and_the_value(tmp_path, name, content, line, value):
    with pytest.raises(PromptError) as caught:
        read_prompt_file(write_file(tmp_path, name, content))
    for part in (str(tmp_path / name), line, value):
        assert part in str(caught.value)


def test_partiprompts_are_read_with_their_categories(tmp_path):
    content = (
        "Prompt\tCategory\tChallenge\tNote\n"
        '"G I G" painted on a wall\tIllustrations\tWriting & Symbols\t\n'
        "bond\tAbstract\tBasic\tBiology-inspired\n"
    )
    rows, report = read_prompt_file(write_file(tmp_path, "PartiPrompts.tsv", content))
    assert [(row.prompt, row.target) for row in rows] == [
        ('"G I G" painted on a wall', "G I G"),
        ("bond", None),
    ]
    assert json.loads(rows[1].metadata) == {
        "Category": "Abstract",
        "Challenge": "Basic",
        "Note": "Biology-inspired",
    }
    assert report.rows == 2


def test_what_vbench_lists_twice_is_one_prompt_of_all_its_dimensions(tmp_path):
    items = [
        {
            "prompt_en": "a beach by Hokusai",
            "dimension": ["appearance_style"],
            "auxiliary_info": {"appearance_style": {"a": "b"}},
        },
        {
            "prompt_en": "a cat and a dog",
            "dimension": ["multiple_objects"],
            "auxiliary_info": {"multiple_objects": {"object": "cat"}},
        },
        {
            "prompt_en": "a beach by Hokusai",
            "dimension": ["overall_consistency", "imaging_quality"],
        },
    ]
    rows, report = read_prompt_file(
        write_file(tmp_path, "VBench_full_info.json", json.dumps(items))
    )
    assert [row.prompt for row in rows] == ["a beach by Hokusai", "a cat and a dog"]
    assert json.loads(rows[0].metadata) == {
        "dimension": ["appearance_style", "overall_consistency", "imaging_quality"],
        "auxiliary_info": {"appearance_style": {"a": "b"}},
    }
    assert report.duplicates == 0


def test_a_prompt_of_dpg_bench_has_all_its_questions(tmp_path):
    content = (
        f'{DPG_HEADER}\np1,"A cat, asleep",,1,0,entity,whole,entity - whole (cat),Is there a'
        ' cat?\np1,"A cat, asleep",,2,1,attribute,state,"attribute - state (cat, asleep)",Is the'
        " cat asleep?\np2,A dog,,1,0,entity,whole,entity - whole (dog),Is there a dog?\n"
    )
    rows, report = read_prompt_file(write_file(tmp_path, "dpg_bench.csv", content))
    assert [row.prompt for row in rows] == ["A cat, asleep", "A dog"]
    metadata = json.loads(rows[0].metadata)
    assert (metadata["item_id"], metadata["keywords"], report.duplicates) == ("p1", "", 0)
    assert metadata["questions"][1] == {
        "proposition_id": "2",
        "dependency": "1",
        "category_broad": "attribute",
        "category_detailed": "state",
        "tuple": "attribute - state (cat, asleep)",
        "question_natural_language": "Is the cat asleep?",
    }
    assert [question["proposition_id"] for question in metadata["questions"]] == ["1", "2"]


def test_rules_and_questions_of_geneval_are_kept(tmp_path):
    lines = [
        {
            "tag": "counting",
            "include": [{"class": "clock", "count": 2}],
            "exclude": [{"class": "clock", "count": 3}],
            "prompt": "a",
        },
        {
            "prompt": "b",
            "atom_count": 3,
            "vqa_list": [["Is the pig green?", "Yes"]],
            "skills": ["attribute"],
        },
    ]
    rows, _ = read_prompt_file(
        write_file(tmp_path, "evaluation_metadata.jsonl", "\n".join(map(json.dumps, lines)))
    )
    assert [json.loads(row.metadata) | {"prompt": row.prompt} for row in rows] == lines


def test_a_list_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_JSON_BYTES", 20)
    with pytest.raises(
        PromptError,
        match=r"its 21 bytes are more than the 20 of a JSON list; convert it to \.jsonl",
    ):
        read_prompt_file(write_file(tmp_path, "p.json", '[{"prompt": "a cat"}]'))


def test_malformed_parquet_rows_and_missing_files(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a", None]}), path)
    with pytest.raises(PromptError, match="row 2.*no prompt"):
        read_prompt_file(path)
    pq.write_table(pa.table({"prompt": ["a"], "blob": [b"\xff"]}), path)
    with pytest.raises(PromptError, match="row 1.*blob"):
        read_prompt_file(path)
    pq.write_table(pa.table({"text": ["a"]}), path)
    with pytest.raises(PromptError, match="no column 'prompt'"):
        read_prompt_file(path)
    with pytest.raises(PromptError, match="no such file"):
        read_prompt_file(tmp_path / "nowhere.txt")


@settings(max_examples=150, deadline=None)
@given(
    content=st.binary(max_size=200),
    suffix=st.sampled_from([".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet"]),
)
@example(content=b"prompt\n\x00", suffix=".csv")
@example(content=b"prompt\r\ra", suffix=".csv")
@example(content=b"9" * 5000, suffix=".jsonl")
def test_arbitrary_bytes_are_prompts_or_a_prompt_error(content, suffix):
    assert_rows_or_error(content, suffix)


@settings(max_examples=150, deadline=None)
@given(
    content=st.lists(
        st.sampled_from(
            [
                '"',
                ",",
                "\n",
                "\r",
                "prompt",
                "target",
                "{",
                "}",
                ":",
                "[",
                "a",
                "\\u",
                "dead",
                " ",
                "“",
                "”",
            ]
        )
    ),
    suffix=st.sampled_from([".txt", ".jsonl", ".json", ".csv", ".tsv"]),
)
def test_almost_well_formed_files_are_prompts_or_a_prompt_error(content, suffix):
    head = {".csv": "prompt,target\n", ".tsv": "prompt\ttarget\n"}.get(suffix, "")
    assert_rows_or_error((head + "".join(content)).encode(), suffix)


def assert_rows_or_error(content: bytes, suffix: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write_file(Path(folder), f"p{suffix}", content)
        try:
            rows, report = read_prompt_file(path)
        except PromptError as error:
            message = str(error)
        else:
            message = str(path)
            assert report.rows == len(rows) > 0
            assert all(row.prompt.strip() and row.target != "" for row in rows)
            assert split_prompts(rows, 0, 0, seed=0).num_rows == len(rows)
    assert str(path) in message


def test_split_depends_on_ids_and_seed_only():
    table = split_prompts(make_glyph_prompts(100, 4, seed=0), 10, 20, seed=3)
    other = split_prompts(make_glyph_prompts(100, 5, seed=9), 10, 20, seed=3)
    splits = table["split"].to_pylist()
    assert table.schema.equals(PROMPTS)
    assert table["prompt_id"].to_pylist() == list(range(100))
    assert [splits.count(name) for name in ("train", "validation", "held_out")] == [70, 10, 20]
    assert splits == other["split"].to_pylist()
    assert (
        splits
        != split_prompts(make_glyph_prompts(100, 4, seed=0), 10, 20, seed=4)["split"].to_pylist()
    )


def test_split_leaves_at_least_one_to_train_on():
    rows = make_glyph_prompts(5, 4, seed=0)
    assert split_prompts(rows, 2, 2, seed=0)["split"].to_pylist().count("train") == 1
    with pytest.raises(
        PromptError, match="5 prompts cannot be split into validation = 2, held_out = 3"
    ):
        split_prompts(rows, 2, 3, seed=0)


@settings(max_examples=50, deadline=None)
@given(rows=ROWS, seed=st.integers(0, 2**31 - 1))
def test_prompt_tables_survive_the_round_trip(rows, seed):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "prompts.parquet")
        write_prompts(split_prompts(rows, 1, 1, seed), path)
        back = read_prompts(path)
        by_split = [read_prompts(path, split) for split in ("train", "validation", "held_out")]
        assert read_prompt_ids(path, "train") == [prompt.prompt_id for prompt in by_split[0]]
        assert read_prompts(path, "train", [99, by_split[0][-1].prompt_id]) == by_split[0][-1:]
        assert read_prompts(path, ids=[]) == []
        assert [file.name for file in Path(folder).iterdir()] == ["prompts.parquet"]
    assert [
        PromptRow(p.prompt, p.negative_prompt, p.target, p.source, p.metadata, p.image)
        for p in back
    ] == rows
    assert [prompt.prompt_id for prompt in back] == list(range(len(rows)))
    assert (
        sorted(
            (prompt for part in by_split for prompt in part), key=lambda prompt: prompt.prompt_id
        )
        == back
    )
    assert [len(part) for part in by_split] == [len(rows) - 2, 1, 1]


def test_only_prompt_tables_are_written_and_read(tmp_path):
    path = tmp_path / "prompts.parquet"
    with pytest.raises(PromptError, match="not written"):
        write_prompts(pa.table({"prompt": ["a"]}), path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(PromptError, match="no table at"):
        read_prompts(path)
    pq.write_table(pa.table({"prompt": ["a"]}), path)
    with pytest.raises(PromptError, match="prompt_id"):
        read_prompts(path)
    write_prompts(split_prompts(make_glyph_prompts(3, 4, 0), 1, 1, 0), path)
    with pytest.raises(PromptError, match="no split 'test'"):
        read_prompts(path, "test")
    with pytest.raises(PromptError, match="there is no split 'test'"):
        read_prompt_ids(path, "test")


def test_missing_targets_are_counted_and_shown(tmp_path):
    rows = [
        PromptRow("a tree"),
        PromptRow('"A"', target="A"),
        PromptRow("a lake"),
        PromptRow("x" * 500),
    ]
    table = split_prompts(rows, 1, 1, seed=0)
    write_prompts(table, tmp_path / "p.parquet")
    for prompts in (rows, table, read_prompts(tmp_path / "p.parquet")):
        with pytest.raises(
            PromptError,
            match="p.txt: 3 of 4 prompts name no text to read, first: 'a tree'; 'a lake'",
        ):
            check_targets(prompts, "p.txt")
        check_targets(prompts[1:2] if isinstance(prompts, list) else prompts.slice(1, 1), "p.txt")
