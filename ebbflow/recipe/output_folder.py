"""Whether the folder of a recipe's runs can be written."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ebbflow.recipe.base import RecipeError


def check_output_folder(output: str) -> None:
    """Check that a local folder can be written or made, without making it: ``ebbflow check`` and a
    run that is refused leave nothing behind.

    Raises:
        RecipeError: it cannot, or lies in ``/`` because the command was started there.
    """
    folder = Path(output)
    if not folder.is_absolute() and Path.cwd() == Path("/"):
        raise RecipeError(
            f"output = {output!r} would be {folder.absolute()}, as the working directory is /;"
            " start the run in a folder of yours, or set an absolute path"
        )
    try:
        candidates = (folder.absolute(), *folder.absolute().parents)
        nearest = next(path for path in candidates if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise RecipeError(
            f"output = {output!r} cannot be written ({error.strerror}); set another folder"
        ) from None
