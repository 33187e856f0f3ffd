"""Whether the folder of a recipe's runs, or what a command writes, can be written."""

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
    refuse_root_folder(folder, "output")
    try:
        candidates = (folder.absolute(), *folder.absolute().parents)
        nearest = next(path for path in candidates if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise RecipeError(
            f"output = {output!r} cannot be written ({error.strerror}); set another folder"
        ) from None


def refuse_root_folder(path: Path, name: str) -> None:
    """Refuse a relative path in the working directory ``/``: services and containers start there
    unless they are told another folder, and nobody looks for pictures or runs beside ``/usr``.

    Args:
        name: of the key or option that the path comes from, for the error.

    Raises:
        RecipeError: the path is relative and the working directory is ``/``.
    """
    if not path.is_absolute() and Path.cwd() == Path("/"):
        raise RecipeError(
            f"{name} = {str(path)!r} would be {path.absolute()}, as the working directory is /;"
            " start the command in a folder of yours, or set an absolute path"
        )
