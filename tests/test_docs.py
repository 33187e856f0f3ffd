"""The documentation: links lead somewhere, names exist, pages are in the navigation, and the rooms
are the code's own.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache, reduce
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token

from ebbflow.recipe import load_recipe
from ebbflow.recipe.registry import ALGORITHMS

ROOT = Path(__file__).parents[1]
NOT_OURS = {"build", "dist", "runs", "reference", "node_modules"}
PAGES = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(
        part.startswith(".") or part in NOT_OURS for part in path.relative_to(ROOT).parts[:-1]
    )
)
LIBRARY = ROOT / "ebbflow"
PACKAGE = ast.get_docstring(ast.parse((LIBRARY / "__init__.py").read_text())) or ""
ROOMS = [
    name for name in re.findall(r"^- (\w+): ", PACKAGE, re.MULTILINE) if (LIBRARY / name).is_dir()
]
"""The folders, lowest first; ``tests/test_house.py`` holds the list against the imports."""


@cache
def _tokens(page: Path) -> list[Token]:
    blocks = MarkdownIt().enable("table").parse(page.read_text())
    return [token for block in blocks for token in [block, *(block.children or [])]]


def _links(page: Path) -> list[str]:
    """Where the links and images of a page lead, but for other hosts."""
    found = [
        token.attrs.get("href") or token.attrs.get("src")
        for token in _tokens(page)
        if token.type in ("link_open", "image")
    ]
    return [str(link) for link in found if not re.match(r"[a-z]+:", str(link))]


def _anchors(page: Path) -> set[str]:
    """Of the headings of a page, as code hosts and the site make them."""
    tokens = _tokens(page)
    headings = [
        tokens[index + 1].content
        for index, token in enumerate(tokens)
        if token.type == "heading_open"
    ]
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    seen: Counter[str] = Counter()
    anchors = set()
    for slug in slugs:
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def _broken(page: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if path.endswith("docs/reference/index.md") or (
        page.parent.name == "docs" and path == "reference/index.md"
    ):
        return False  # `make docs` writes it
    return (
        not target.exists()
        or bool(anchor)
        and (target.suffix != ".md" or anchor not in _anchors(target))
    )


def test_docs_have_pages_and_links() -> None:
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/index.md",
        "datasets/README.md",
    } <= {path.relative_to(ROOT).as_posix() for path in PAGES}
    assert sum(len(_links(page)) for page in PAGES) > 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_leads_somewhere(page: Path) -> None:
    assert [link for link in _links(page) if _broken(page, link)] == []


def test_a_dead_link_or_anchor_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title, with *more*\n\n## Twice\n\n## Twice\n")
    assert _anchors(page) == {"a-title-with-more", "twice", "twice-1"}
    assert not any(_broken(page, link) for link in ("#twice", "page.md#twice-1", "page.md"))
    assert all(_broken(page, link) for link in ("#thrice", "page.md#thrice", "other.md"))


def _is_defined(name: str) -> bool:
    """Whether a dotted name is a module of the library, or something that one defines, imports or
    declares. Imports nothing.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.exists():
                return _has(ast.parse(file.read_text()).body, parts[count:])
    return False


def _has(body: list[ast.stmt], names: list[str]) -> bool:
    if not names:
        return True
    for node in body:
        match node:
            case ast.ClassDef(name=found) if found == names[0]:
                return _has(node.body, names[1:])
            case ast.FunctionDef(name=found) | ast.AsyncFunctionDef(name=found) if (
                found == names[0]
            ):
                return len(names) == 1
            case ast.AnnAssign(target=ast.Name(id=found)) if found == names[0]:
                return len(names) == 1
            case ast.Assign(targets=[ast.Name(id=found)]) if found == names[0]:
                return len(names) == 1
            case ast.ImportFrom() if names[0] in {
                alias.asname or alias.name for alias in node.names
            }:
                return len(names) == 1
    return False


def test_every_name_of_the_library_in_the_pages_exists() -> None:
    """In backticks, with three parts and more: ``ebbflow.tag`` is a tag in MLflow."""
    named = {
        (page.relative_to(ROOT).as_posix(), token.content.removesuffix("()"))
        for page in PAGES
        for token in _tokens(page)
        if token.type == "code_inline" and re.fullmatch(r"ebbflow(\.\w+){2,}(\(\))?", token.content)
    }
    assert len(named) > 10
    assert sorted((page, name) for page, name in named if not _is_defined(name)) == []


def test_every_page_is_in_the_navigation() -> None:
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"```{toctree}\n(.*?)```", index.read_text(), re.DOTALL)
    targets = [
        re.sub(r".*<(.*)>", r"\1", line)
        for block in listed
        for line in block.splitlines()
        if line and line[0] != ":"
    ]
    found = {((index.parent / target).resolve()).with_suffix(".md") for target in targets}
    assert [
        page.relative_to(ROOT).as_posix() for page in PAGES if page != index and page not in found
    ] == []


def test_the_rooms_of_the_readme_are_those_of_the_package_in_their_order() -> None:
    tree = re.search(
        r"^ebbflow/ .*?(?=^\w+/ )", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    assert tree
    assert re.findall(r"^  (\w+) ", tree.group(), re.MULTILINE) == ROOMS


def test_the_rooms_of_the_contributors_guide_are_those_of_the_package_in_their_order() -> None:
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE) == ROOMS


def test_the_lines_of_the_examples_are_counted() -> None:
    rows = re.findall(
        r"^\| an? .*\[\w+\.py\]\((.*)\) \| (\d+) \|$",
        (ROOT / "CONTRIBUTING.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) >= 3
    counted = [(path, str(len((ROOT / path).read_text().splitlines()))) for path, _ in rows]
    assert counted == rows


def _texts_of_the_code() -> list[str]:
    """Every text in the sources, with ``...`` for the values that a message is given."""
    texts = []
    for file in [*LIBRARY.rglob("*.py"), *(ROOT / "tasks").rglob("*.py")]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        part.value if isinstance(part, ast.Constant) else "..."
                        for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value.replace("{}", "..."))
    return texts


def test_the_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    page = ROOT / "docs" / "troubleshooting.md"
    messages = [
        token.content.strip()
        for token in _tokens(page)
        if token.type == "fence" and token.info == "text"
    ]
    assert len(messages) > 15
    texts = _texts_of_the_code()
    assert [message for message in messages if not any(message in text for text in texts)] == []


@pytest.mark.parametrize("page", ["choosing.md", "features.md"])
def test_every_algorithm_is_in_the_pages_that_compare_them(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    assert [name for name in ALGORITHMS if f"`{name}`" not in text] == []


def test_the_keys_for_users_of_other_libraries_are_those_of_the_recipe() -> None:
    """The columns "Ebbflow" and "value" of its table, where a value is given."""
    recipe = load_recipe(ROOT / "workflows" / "recipes" / "sd35_medium_ocr_512.yaml").model_dump(
        mode="json"
    )
    text = (ROOT / "docs" / "from_other_libraries.md").read_text()
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \| ([^| ][^|]*) \|", text, re.MULTILINE)
    assert len(rows) > 25
    for keys, values in rows:
        paths = re.findall(r"`([\w.]+)`", keys)
        expected = [yaml.safe_load(value) for value in values.split(", ")]
        found = [
            reduce(
                lambda part, key: part[int(key) if key.isdigit() else key], path.split("."), recipe
            )
            for path in paths
        ]
        assert found == expected * (len(found) // len(expected)), keys
