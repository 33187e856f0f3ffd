"""docs/features.md is made from its data, and a source that does not say so is found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.features import (
    PAGE,
    find_wrong_sources,
    format_page,
    list_sources,
    read_features,
)
from benchmarks.sources import Clones
from ebbflow.recipe.base import RecipeError


@pytest.fixture
def clones(tmp_path: Path) -> tuple[Path, str]:
    """A folder with a clone of ``someone/library``, and its only commit."""
    clone = tmp_path / "library"
    clone.mkdir()
    (clone / "trainer.py").write_text("class Trainer: ...\n")

    def run_git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(clone), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    run_git("init", "--quiet")
    run_git("add", "trainer.py")
    run_git("commit", "--quiet", "--message", "a trainer")
    return tmp_path, run_git("rev-parse", "--short", "HEAD").strip()


def test_the_page_is_what_its_data_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == format_page(read_features()), (
        "run python -m benchmarks.features"
    )


def test_every_filled_cell_of_another_library_has_a_source() -> None:
    features = read_features()
    libraries = features["libraries"]
    cells = [
        (row["what"], key, row[key])
        for table in features["tables"]
        for row in table["rows"]
        for key in row
        if key not in ("what", "ebbflow")
    ]
    assert len(cells) > 150
    for what, key, cell in cells:
        assert key in libraries, (what, key)
        expected = {"text", "pull"} if "pull" in cell else {"text", "path", "phrase"}
        assert set(cell) - {"at"} == expected, (what, key)


def test_rows_that_others_have_and_ebbflow_lacks_are_shown() -> None:
    """The page shows where others are ahead: its use to a reader depends on it."""
    rows = [row for table in read_features()["tables"] for row in table["rows"]]
    assert len([row for row in rows if "ebbflow" not in row]) >= 5


def test_a_phrase_is_looked_up_at_the_commit(clones: tuple[Path, str]) -> None:
    folder, commit = clones
    library = {"name": "library", "repository": "someone/library", "commit": commit}
    rows = [
        {"what": "a trainer", "library": {"path": "trainer.py", "phrase": "class Trainer"}},
        {"what": "a server", "library": {"path": "trainer.py", "phrase": "class Server"}},
        {"what": "a page", "library": {"path": "README.md", "phrase": "page"}},
        {"what": "nothing"},
    ]
    features = {"libraries": {"library": library}, "others": [], "tables": [{"rows": rows}]}
    assert len(list(list_sources(features))) == 3
    wrong = find_wrong_sources(features, Clones(folder))
    assert wrong == [
        f"a server, library: trainer.py of someone/library at {commit} has no 'class Server'",
        f"a page, library: someone/library at {commit} has no README.md",
    ]


def test_a_commit_that_a_clone_lacks_is_read_from_its_archive(clones: tuple[Path, str]) -> None:
    folder, commit = clones
    for archived in ("abc1234", commit):  # the clone's own commit is read from the clone
        archive = folder / f"library-{archived}{'0' * 33}"
        archive.mkdir()
        (archive / "trainer.py").write_text("class Archived: ...\n")
    sources = Clones(folder)
    assert sources.read("someone/library", "abc1234", "trainer.py") == "class Archived: ...\n"
    assert sources.read("someone/library", "abc1234", "README.md") is None
    assert sources.read("someone/library", commit, "trainer.py") == "class Trainer: ...\n"
    (folder / f"other-{'1' * 40}").mkdir()  # an archive without any clone
    assert sources.read("someone/other", "1111111", "a.py") is None


def test_a_missing_clone_and_a_missing_commit_say_what_to_do(clones: tuple[Path, str]) -> None:
    folder, _ = clones
    with pytest.raises(RecipeError, match="git clone https://github.com/someone/other"):
        Clones(folder).read("someone/other", "abc1234", "a.py")
    with pytest.raises(RecipeError, match="git fetch"):
        Clones(folder).read("someone/library", "abc1234", "a.py")
