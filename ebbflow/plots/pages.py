"""HTML pages that are rendered from templates."""

from __future__ import annotations

from pathlib import Path

import jinja2

TEMPLATES = Path(__file__).parent
"""The folder of the templates that several pages include, such as ``style.html``."""


def create_page_environment(*folders: Path) -> jinja2.Environment:
    """Create the environment of the templates in some folders, which may include those of this
    room.

    What comes from users is escaped, and an unknown name is an error.
    """
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, TEMPLATES]),
        autoescape=True,  # prompts come from users
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
