"""How every HTML page is made from its template."""

from __future__ import annotations

from pathlib import Path

import jinja2


def create_page_environment(folder: Path) -> jinja2.Environment:
    """The environment of the templates in a folder: what comes from users is escaped, and an
    unknown name is an error.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,  # prompts come from users
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
