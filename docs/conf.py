"""The documentation site, built by `make docs`: the pages of the repository as they are, and a
reference from the docstrings.

The source folder is the repository, so that the links that work on a code host work here too. Three
things are added: the pages of the reference, a page for each room; links to Python files of the
library, which lead to the reference; and names such as
`ebbflow.flow.sampler.sample_next_latents` in backticks, which do the same. What cannot be
resolved fails the build.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "ebbflow"
REFERENCE = ROOT / "docs" / "reference"

project = "Ebbflow"
author = "the Ebbflow authors"
project_copyright = "the Ebbflow authors, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

root_doc = "docs/index"
include_patterns = [
    "*.md",
    "docs/*.md",
    "docs/reference/*.md",
    "datasets/*.md",
    "datasets/*/*.md",
    "containers/*.md",
    "benchmarks/results/*.md",
]
exclude_patterns = [".*", "runs/**", "build/**"]

html_theme = "furo"
html_title = "Ebbflow"
html_show_sphinx = False
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
toc_object_entries_show_parents = "hide"
highlight_language = "text"  # of literal blocks in docstrings, which are equations

myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_default_options = {
    "members": True,
    "undoc-members": True,
    "show-inheritance": True,
    "ignore-module-all": True,
}
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
napoleon_use_ivar = True

# Other libraries' names stay plain text: their indexes would have to be downloaded, and the build
# works offline.
nitpick_ignore_regex = [(r"py:.*", r"(?!ebbflow\.).*")]
suppress_warnings = [
    "ref.python"
]  # a short name after `Raises:` that several rooms have; a name that none has is an error still

SECTIONS = {
    "Where it fits",
    "Why",
    "How",
    "Gotchas",
    "Args:",
    "Attributes:",
    "Raises:",
    "Returns:",
    "Yields:",
    "Note:",
    "Example:",
    "Examples:",
}


def rooms() -> list[str]:
    """The rooms as the docstring of the package orders them, which a test holds against the
    imports; other modules are last.
    """
    docstring = ast.get_docstring(ast.parse((LIBRARY / "__init__.py").read_text())) or ""
    return [
        name
        for name in re.findall(r"^- (\w+): ", docstring, re.MULTILINE)
        if (LIBRARY / name).is_dir()
    ] + [""]


def modules(room: str) -> list[str]:
    """The public modules of a room, or those that lie in no room."""
    files = sorted((LIBRARY / room).rglob("*.py") if room else LIBRARY.glob("*.py"))
    names = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in files
    ]
    return [name for name in names if "._" not in name]


def write_reference() -> None:
    """A page for each room with all its modules, written only where it changed."""
    REFERENCE.mkdir(exist_ok=True)
    pages = {}
    for room in rooms():
        title = f"ebbflow.{room}" if room else "ebbflow"
        body = [f"# {title}", ""]
        for name in modules(room):
            heading = [] if name == title else [f"## {name}", ""]
            body += [*heading, "```{eval-rst}", f".. automodule:: {name}", "```", ""]
        pages[f"{room or 'ebbflow'}.md"] = "\n".join(body)
    toc = "\n".join(page.removesuffix(".md") for page in pages)
    sentence = "Every public name, by room: each room imports only those before it."
    pages["index.md"] = f"# Reference\n\n{sentence}\n\n```{{toctree}}\n{toc}\n```\n"
    for name, text in pages.items():
        file = REFERENCE / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


class LinkCode(SphinxTransform):
    """Links to the library's files and folders, and its names in backticks, become references to
    the docstrings.

    Other folders have no page of their own; a link to one becomes plain text.
    """

    default_priority = 100

    def apply(self, **_: object) -> None:
        if self.env.docname.startswith("docs/reference/"):
            return
        links = (addnodes.download_reference, addnodes.pending_xref)
        for link in list(self.document.findall(lambda node: isinstance(node, links))):
            path = (
                (ROOT / self.env.docname).parent / link.get("reftarget", "").split("#")[0]
            ).resolve()
            if path.is_relative_to(LIBRARY) and (path.is_dir() or path.suffix == ".py"):
                name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                link.replace_self(self._reference(name, "mod", *link.children))
            elif path.is_dir() and link.get("refdomain") != "doc":
                link.replace_self(link.children)
        for literal in list(self.document.findall(nodes.literal)):
            name = literal.astext().removesuffix("()")
            is_inside_a_link = isinstance(
                literal.parent,
                nodes.reference | addnodes.pending_xref | addnodes.download_reference,
            )
            if (
                re.fullmatch(r"ebbflow(\.\w+){2,}", name) and not is_inside_a_link
            ):  # `ebbflow.name` is a tag in MLflow
                literal.replace_self(self._reference(name, "obj", literal.deepcopy()))

    def _reference(self, name: str, role: str, *children: nodes.Node) -> addnodes.pending_xref:
        target = {
            "reftarget": name,
            "refdoc": self.env.docname,
            "refdomain": "py",
            "reftype": role,
            "refexplicit": True,
        }
        return addnodes.pending_xref("", *children, **target)


def as_restructured_text(
    app: Sphinx, what: str, name: str, documented: object, options: object, lines: list[str]
) -> None:
    """Docstrings are written for those who read the code: equations are indented, ``|x|`` and ``[N,
    *latent]`` mean themselves.

    A table, and an indented block that belongs to no section, become literal blocks; elsewhere bars
    and unpaired asterisks are escaped.
    """
    written: list[str] = []
    rulers = [number for number, line in enumerate(lines) if re.fullmatch(r"=+( +=+)+", line)] or [
        len(lines)
    ]
    in_block = False
    # The closing quotes on a line of their own leave blanks behind, which are no indented block.
    for number, line in enumerate(text.rstrip() for text in lines):
        if rulers[0] <= number <= rulers[-1]:
            written += ["::", ""] if number == rulers[0] else []
            written.append(f"    {line}")
            continue
        before = next((earlier for earlier in reversed(written) if earlier.strip()), "")
        if not line.startswith("    "):
            in_block = in_block and not line.strip()
        elif not before.startswith((" ", "-", "*")) and before not in SECTIONS:
            written += [] if before.endswith("::") else ["", "::", ""]
            in_block = True
        written.append(line if in_block else escape(line))
    lines[:] = written


def escape(line: str) -> str:
    """Bars, and asterisks that nothing closes, outside of ``literals``."""
    parts = re.split(r"(``.*?``)", line)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(
            r"(?<![\\*\w])\*(?=\w)(?![^*]*\*)", r"\\*", parts[index].replace("|", r"\|")
        )
    return "".join(parts)


def resolve(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, text: nodes.TextElement
) -> nodes.Node | None:
    """A name that a room hands on leads to where it is defined; private ones, and those without a
    docstring, stay plain text.
    """
    name = node["reftarget"]
    if not name.startswith("ebbflow."):
        return None
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None
    defined = f"{getattr(found, '__module__', None)}.{getattr(found, '__qualname__', None)}"
    if defined in env.domains["py"].objects and defined != name:
        return env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, "obj", defined, node, text
        )
    return text if node["reftype"] == "class" or "._" in name else None


def write_start_page(app: Sphinx, error: Exception | None) -> None:
    """``index.html`` in the folder of the site, which leads to the root page: that lies in ``docs``
    as its source does.
    """
    if error is None:
        (app.outdir / "index.html").write_text(
            f'<meta http-equiv="refresh" content="0; url={root_doc}.html">\n'
        )


def setup(app: Sphinx) -> None:
    # Before autodoc does: it would set TYPE_CHECKING first, and FastAPI cannot be imported under
    # it.
    for name in (name for room in rooms() for name in modules(room)):
        importlib.import_module(name)
    write_reference()
    app.add_transform(LinkCode)
    app.connect("autodoc-process-docstring", as_restructured_text, priority=400)
    app.connect("missing-reference", resolve)
    app.connect("build-finished", write_start_page)
