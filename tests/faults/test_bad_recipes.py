"""A recipe file is a recipe, or is refused with a message that names the key: whatever it holds."""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import strategies as st
from plain_cases import anything, assert_readable, cases, damage, only_speaks_plainly

from ebbflow.cli import main
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from tests.nested import paths, replaced

SHIPPED = [path.read_bytes() for path in sorted(Path("workflows/recipes").glob("*.yaml"))]
WRITTEN = {
    "name": "small",
    "model": {"training": {"letters": 3}},
    "prompts": {"source": "prompts.txt"},
    "rewards": ["ocr", {"name": "json:loads", "options": {"s": [1, {"deep": 0.5}]}}],
    "guardrails": [],
    "policy": {"train": "lora", "rank": 4, "ema": {"slope": 0.1}},
    "stages": [
        {
            "kind": "online",
            "algorithm": {"name": "mix_grpo"},
            "sampler": {"name": "flow_sde", "steps": 6},
        },
        {
            "kind": "offline",
            "algorithm": {"name": "awm", "old": {"max_decay": 0.1}},
            "pairs": "pairs.jsonl",
        },
    ],
}
FRAGMENTS = [
    *(
        "&a ",
        "*a",
        "<<: *a",
        "- ",
        ": ",
        "? ",
        "{",
        "}",
        "[",
        "]",
        '"',
        "'",
        "|",
        ">",
        "#",
        "\t",
        "\n",
        "\n  ",
        "---\n",
        "...\n",
    ),
    *(
        "%YAML 9.9\n",
        "!!timestamp x",
        "!!int ''",
        "!!float ''",
        "!!bool q",
        "!!map [1]",
        "!!set {a, b}",
        "!!omap [1]",
        "!!pairs [a]",
    ),
    *(
        "!!binary //4=",
        "!!python/name:os.system",
        "2024-01-01",
        "12:30:45",
        "0x" + "f" * 6000,
        "1" * 6000,
        ".nan",
        "-.inf",
        "1e999",
    ),
    *(
        '"\\uD800"',
        '"\\e[2J"',
        '"\\0"',
        "\x00",
        "\x85",
        "\ufeff",
        "é",
        "\u202e",
        "\U0001f600",
        "~",
        "null",
        "yes",
        "no",
        "[" * 300,
    ),
]


def loaded(path: Path) -> None:
    """Read a file; a recipe that it gives has the same digest however it travels."""
    recipe = only_speaks_plainly(lambda: load_recipe(path), RecipeError)
    if recipe is None:
        return
    assert Recipe.model_validate_json(recipe.model_dump_json()).digest == recipe.digest
    resolved = yaml.safe_dump(recipe.model_dump(mode="json"))
    assert Recipe.model_validate(yaml.load(resolved, yaml.CSafeLoader)).digest == recipe.digest


@cases(80, text=st.sampled_from(SHIPPED), go_wrong=damage())
def test_damaged_recipe_is_an_error_or_loads_right(tmp_path: Path, text: bytes, go_wrong) -> None:
    (tmp_path / "recipe.yaml").write_bytes(go_wrong(text))
    loaded(tmp_path / "recipe.yaml")


@cases(
    120,
    text=st.sampled_from([*SHIPPED, b"", b"name: a\n", b"stages:\n"]),
    parts=st.lists(st.tuples(st.floats(0, 1), st.sampled_from(FRAGMENTS)), min_size=1, max_size=4),
)
def test_a_file_with_more_of_yaml_than_a_recipe_needs(
    tmp_path: Path, text: bytes, parts: list[tuple[float, str]]
) -> None:
    for path, part in parts:
        at = int(path * len(text))
        text = text[:at] + part.encode() + text[at:]
    (tmp_path / "recipe.yaml").write_bytes(text)
    loaded(tmp_path / "recipe.yaml")


odd = st.one_of(
    anything,
    st.just(datetime.date(2024, 1, 1)),
    st.just(datetime.datetime(2024, 1, 1)),
    st.just(b"\xff\xfe"),
    st.just({"a", "b"}),
    st.dictionaries(
        st.one_of(st.integers(), st.booleans(), st.none(), st.dates()),
        anything,
        min_size=1,
        max_size=2,
    ),
)


COMPLETE = json.loads(Recipe.model_validate(WRITTEN).model_dump_json())


@cases(120, path=st.sampled_from(paths(COMPLETE)[1:]), new=odd)
def test_anything_in_any_place(tmp_path: Path, path: tuple, new: object) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(replaced(COMPLETE, path, new)))
    loaded(tmp_path / "recipe.yaml")


@cases(150, path=st.sampled_from(paths(COMPLETE)[1:]), new=anything)
def test_anything_in_any_place_of_json_as_flyte_passes_it(path: tuple, new: object) -> None:
    text = json.dumps(replaced(COMPLETE, path, new))
    recipe = only_speaks_plainly(
        lambda: Recipe.model_validate(json.loads(text)), RecipeError, "this recipe cannot be run"
    )
    if recipe is not None:
        assert Recipe.model_validate_json(recipe.model_dump_json()).digest == recipe.digest


@cases(30, path=st.sampled_from(paths(COMPLETE)[1:]), new=odd)
def test_the_command_says_the_same_and_no_more(tmp_path: Path, path: tuple, new: object) -> None:
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(replaced(COMPLETE, path, new)))
    done = CliRunner().invoke(main, ["check", str(tmp_path / "recipe.yaml")])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert "Traceback" not in done.output
    if done.exit_code:
        assert_readable(done.output)


LAUGHS = "a: &a0 [x]\n" + "".join(
    f"b{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9)
)
MERGES = "a: &a0 {x: 1}\n" + "".join(
    f"b{n}: &a{n + 1}\n  <<: [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9)
)
HOLDS = {
    "nothing": (b"", "must hold a mapping"),
    "a comment": (b"# later\n", "must hold a mapping"),
    "two documents": (b"name: a\n---\nname: b\n", "not valid YAML"),
    "deep lists": (b"[" * 20_000, "not valid YAML"),
    "deep mappings": (b"name: " + b"{a: " * 900 + b"1" + b"}" * 900, "YAML"),
    "nested deeper than any recipe": (b"name: " + b"[" * 60 + b"]" * 60, "50 inside each other"),
    "a list that holds itself": (b"stages: &a [*a]", "inside each other"),
    "a mapping that merges itself": (b"stages: &a\n  <<: *a\n", "must be a list; write each item"),
    "laughs": (LAUGHS.encode(), "more than 100000 values"),
    "merges": (MERGES.encode(), "more than 1000 keys in one place"),
    "laughs among options": (
        LAUGHS.encode() + b"rewards: [{name: 'json:loads', options: {s: *a9}}]",
        "100000 values",
    ),
    "binary": (bytes(range(256)), "not valid YAML"),
    "UTF-16 cut off": ("name: a".encode("utf-16")[:-1], "YAML"),
    "NUL": (b"name: \0", "not valid YAML"),
    "too many digits": (b"seed: " + b"9" * 5000, "not valid YAML"),
    "too many hexadecimal digits": (b"seed: 0x" + b"f" * 5000, "an integer of 20000 bits"),
    "an integer of more than 64 bits": (
        b"stages: [{kind: online, steps: 18446744073709551616}]",
        "64 bits",
    ),
    "a date": (
        b"rewards: [{name: 'json:loads', options: {s: 2024-01-01}}]",
        "date; put it in quotes",
    ),
    "bytes": (b"rewards: [{name: 'json:loads', options: {s: !!binary AAAA}}]", "bytes"),
    "a set": (b"rewards: [{name: 'json:loads', options: {s: !!set {a, b}}}]", "set"),
    "no number among options": (
        b"rewards: [{name: 'json:loads', options: {s: .nan}}]",
        "finite number",
    ),
    "a key that is no text": (
        b"rewards: [{name: 'json:loads', options: {s: {no: 1}}}]",
        "YAML reads this key as False",
    ),
    "half a character": (
        b'rewards: [{name: "json:loads", options: {s: "\\uD800"}}]',
        "surrogate pair",
    ),
    "two keys that are lists": (b"? []\n: 1\n? []\n: 2\n", "YAML"),
    "a timestamp that is none": (b"name: !!timestamp x", "not valid YAML"),
    "an integer of no digits": (b"seed: !!int ''", "not valid YAML"),
    "a truth that is none": (b"seed: !!bool x", "not valid YAML"),
    "a mapping that is a list": (b"model: !!map [1]", "not valid YAML"),
    "too much": (b"name: " + b"a" * 70_000, "more than 65536 bytes"),
    "a hundred unknown keys": ("".join(f"key{n}: 1\n" for n in range(100)).encode(), "100 in all"),
    "a control character in a key": (b'"\\e[2J": 1', r"\x1b[2J"),
    "a control character in a choice": (b'stages: [{kind: "\\e[2J"}]', r"\x1b[2J"),
}


@pytest.fixture
def usual_recursion_limit() -> Iterator[None]:
    """Python's own: mypy, which other tests import, raises it for the whole process."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("usual_recursion_limit")
@pytest.mark.parametrize(("content", "says"), HOLDS.values(), ids=HOLDS)
def test_what_a_file_may_hold_and_is_no_recipe(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert_readable(str(error.value), says)


@pytest.mark.parametrize(
    "tag",
    ["object/apply:os.mkdir [{}]", "object/new:pathlib.Path [{}]", "name:os.system", "module:os"],
)
def test_a_tag_never_runs_anything(tmp_path: Path, tag: str) -> None:
    (tmp_path / "recipe.yaml").write_text(
        "name: !!python/" + tag.replace("{}", str(tmp_path / "made"))
    )
    with pytest.raises(RecipeError, match="not valid YAML"):
        load_recipe(tmp_path / "recipe.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
