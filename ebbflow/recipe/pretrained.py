"""Weights that come from elsewhere: a folder, a URI, or a repository of the Hugging Face hub at one
commit.
"""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from ebbflow.recipe.base import Strict
from ebbflow.recipe.paths import PathText

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class PretrainedSourceConfig(Strict):
    """The source of pretrained weights."""

    path: PathText | None = None
    """A folder or a URI. With a ``revision``, the id of a Hugging Face repository
    (``owner/name``)."""
    # A commit and no branch: ``main`` moves, and the same recipe would then give other bytes.
    revision: str | None = Field(None, pattern=r"^[0-9a-f]{40}$")
    """Commit of the repository, 40 hexadecimal digits. Without it nothing is downloaded."""

    @property
    def is_on_hub(self) -> bool:
        """Whether the path is the id of a repository."""
        return self.revision is not None

    @model_validator(mode="after")
    def _check_revision_of_repository(self) -> PretrainedSourceConfig:
        if self.revision and not (self.path and REPOSITORY.fullmatch(self.path)):
            raise ValueError(
                f"revision is the commit of a Hugging Face repository, and path = {self.path!r} is"
                " no owner/name; give the id of a repository, or leave revision out"
            )
        return self
