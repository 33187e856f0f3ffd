"""Weights that come from elsewhere: a folder, a URI, or a repository of the Hugging Face hub at one
commit.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, model_validator

from ebbflow.recipe.base import Strict
from ebbflow.recipe.paths import PathText

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def _check_commit(revision: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise ValueError(
            "this is no commit, and a branch or a tag may move; give the 40 hexadecimal digits that"
            " `git ls-remote https://huggingface.co/OWNER/NAME` prints before it"
        )
    return revision


class PretrainedSourceConfig(Strict):
    """The source of pretrained weights."""

    path: PathText | None = None
    """A folder or a URI. With a ``revision``, the id of a Hugging Face repository
    (``owner/name``)."""
    # A commit and no branch: ``main`` moves, and the same recipe would then give other bytes.
    revision: Annotated[str, AfterValidator(_check_commit)] | None = None
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
