"""Every block of the documentation is run as it stands on its page, or says why it is not
(tests/doc_blocks.py).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import mlflow
import pytest
import yaml
from PIL import Image

from tests.doc_blocks import (
    ROOT,
    Block,
    BlockError,
    blocks_of,
    make_clone,
    run_block,
    split_commands,
    unknown_commands,
)

PAGES = [
    *("README.md", "CONTRIBUTING.md"),
    *(
        path.relative_to(ROOT).as_posix()
        for folder in ("docs", "datasets", "containers")
        for path in sorted((ROOT / folder).rglob("*.md"))
    ),
]
BLOCKS = {
    page: blocks_of((ROOT / page).read_text(), page) for page in PAGES if "reference" not in page
}
RUN = {"sh", "python", "yaml"}
SHOWN = {"text", "json", "dockerfile", "output", "{toctree}", "{eval-rst}"}
MADE_UP_RUN = "glyph-1a2b3c4d"
PICTURES = ("street.jpg", "better.png", "worse.png", "cat.png")
"""Of the user, on the pages, as is ``my.yaml``."""


def quick(block: Block) -> bool:
    return block.language in RUN and not block.mark


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_clone(tmp_path_factory.mktemp("clone") / "ebbflow")
    for name in PICTURES:
        Image.new("RGB", (64, 32), "white").save(folder / name)
    recipes = folder / "workflows" / "recipes"
    glyph = yaml.safe_load((recipes / "glyph.yaml").read_text())
    # The demo trains as the page says, and judges fewer samples: reading those of three evaluations
    # and two verifications would be half of all that the blocks do.
    fewer = {"evaluation": {"samples": 1}, "prompts": {"validation": 16, "held_out": 64}}
    assert not fewer.keys() & glyph.keys()
    (recipes / "glyph.yaml").write_text(yaml.safe_dump(glyph | fewer))
    own = yaml.safe_load((folder / "examples" / "recipe.yaml").read_text())
    own["stages"][0] |= {"prompts_per_step": 2}
    own["evaluation"] |= fewer["evaluation"]
    (folder / "examples" / "recipe.yaml").write_text(yaml.safe_dump(own))
    shutil.copy(recipes / "tiny.yaml", folder / "my.yaml")
    return folder


@pytest.fixture(scope="module")
def finished_blocks() -> set[str]:
    """Where the blocks stand that were run in the clone."""
    return set()


def test_every_block_names_a_language_that_is_run_or_shown() -> None:
    blocks = [block for found in BLOCKS.values() for block in found]
    assert sum(quick(block) for block in blocks) > 20
    assert [block.where for block in blocks if block.language not in RUN | SHOWN] == []


def test_a_block_that_is_only_shown_has_no_mark() -> None:
    assert [
        block.where
        for found in BLOCKS.values()
        for block in found
        if block.mark and block.language not in RUN
    ] == []


@pytest.mark.parametrize(
    "page", [page for page, blocks in BLOCKS.items() if any(map(quick, blocks))]
)
def test_the_blocks_of_a_page_run(
    page: str, clone: Path, finished_blocks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    for block in filter(quick, BLOCKS[page]):
        run_block(block, clone)
        finished_blocks.add(block.where)


@pytest.mark.exhaustive
def test_all_blocks_run_in_one_clone(
    clone: Path, finished_blocks: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a reader who goes through all pages; the demo of the README leaves the run that other
    pages look at. Blocks that ran in this clone before do not run twice.
    """
    monkeypatch.syspath_prepend(ROOT / "examples")
    names: dict[str, str] = {}
    for blocks in BLOCKS.values():
        for block in blocks:
            is_run = block.language in RUN and not block.mark.startswith("no")
            if is_run and block.where not in finished_blocks:
                run_block(block, clone, names)
            if runs := sorted((clone / "runs").glob("glyph-*")):
                names[MADE_UP_RUN] = runs[0].name
    assert names


@pytest.mark.parametrize(
    "page",
    [
        page
        for page, blocks in BLOCKS.items()
        if any(block.mark.startswith("no") for block in blocks)
    ],
)
def test_commands_that_no_test_runs_exist(page: str) -> None:
    skipped = [
        block for block in BLOCKS[page] if block.mark.startswith("no") and block.language == "sh"
    ]
    assert [problem for block in skipped for problem in unknown_commands(block.text)] == []


@pytest.mark.parametrize(
    "command",
    [
        "make nothing",
        "ebbflow nothing",
        "ebbflow estimate --nothing recipe.yaml",
        "A=b python -m benchmarks.nothing",
        ".venv/bin/pytest tests/nothing.py::test_it",
        "true | ebbflow \\\n  nothing",
    ],
)
def test_a_command_that_does_not_exist_is_found(command: str) -> None:
    assert len(unknown_commands(command)) == 1


def test_plain_commands_of_ebbflow_and_flyte_need_no_shell() -> None:
    assert split_commands("ebbflow verify m@champion   # why\npyflyte run a.py b\n") == [
        ["ebbflow", "verify", "m@champion"],
        ["pyflyte", "run", "a.py", "b"],
    ]
    for text in ("ebbflow runs | head", "true\nebbflow runs", "ebbflow draw $MODEL", "a=1 ebbflow"):
        assert split_commands(text) == [["bash", "-euo", "pipefail", "-c", text]]


def only(text: str) -> Block:
    (block,) = blocks_of(text, "page.md")
    return block


def test_what_stands_above_a_block_is_read() -> None:
    assert only("```sh\ntrue\n```\n").mark == ""
    assert only("<!-- test: exhaustive -->\n```sh\ntrue\n```\n").mark == "exhaustive"
    assert only("<!-- test: no, needs docker -->\n```sh\ntrue\n```\n").mark == "no, needs docker"
    assert only("`a/b.py`\n\n```python\n1\n```\n").file == "a/b.py"
    assert only("```sh\ntrue\n```\n\n```output\n1\n```\n").output == "1\n"
    with pytest.raises(BlockError, match=r"page.md:1: .* is no mark"):
        only("<!-- test: later -->\n```sh\ntrue\n```\n")


@pytest.mark.parametrize(
    "text",
    [
        "```sh\nfalse\ntrue\n```\n",
        "```sh\nfalse | true\n```\n",
        "```sh\nebbflow check missing.yaml\n```\n",
        "```python\n1 / 0\n```\n",
        "```yaml\nstage: []\n```\n",
        "```sh\necho 1\n```\n\n```output\n2\n```\n",
        "```python\nprint(1)\n```\n\n```output\n1 ... 2\n```\n",
        "`Makefile`\n\n```sh\nother\n```\n",
    ],
    ids=["command", "pipe", "plain command", "code", "key", "output", "output of code", "file"],
)
def test_a_block_that_fails_is_found(text: str, clone: Path) -> None:
    with pytest.raises(BlockError, match=r"page.md:\d"):
        run_block(only(text), clone)


def test_dots_of_an_output_are_anything(clone: Path) -> None:
    run_block(
        only("```sh\nprintf 'took 1.5 s\\nand 2\\n'\n```\n\n```output\ntook ... s\nand 2\n```\n"),
        clone,
    )


def test_code_leaves_no_variable_and_no_store_behind(clone: Path) -> None:
    before = dict(os.environ), mlflow.get_tracking_uri()
    run_block(
        only(
            '```python\nimport mlflow\nmlflow.set_tracking_uri("sqlite:///runs/mlflow.db")\n```\n'
        ),
        clone,
    )
    assert (dict(os.environ), mlflow.get_tracking_uri()) == before
