"""The optional packages: which extra of ``pyproject.toml`` installs a module, and the error that
names it.

The core of the library (recipes, losses, models, training) installs little. Modules that need more
import it at their top as usual; the command line turns the ``ModuleNotFoundError`` into a sentence
with the command that installs the extra. Code that would notice a missing package only late, such
as after hours of training, calls ``require`` first.
"""

from __future__ import annotations

from importlib.util import find_spec

EXTRAS = {
    "boto3": "mlflow",
    "cryptography": "mlflow",
    "cv2": "evaluation",
    "docker": "flyte",
    "fastapi": "serve",
    "flytekit": "flyte",
    "flytekitplugins": "flyte",
    "git": "mlflow",
    "kubernetes": "flyte",
    "matplotlib": "evaluation",
    "mlflow": "mlflow",
    "msgpack": "flyte",
    "omegaconf": "ocr",
    "onnxruntime": "ocr",
    "pandas": "evaluation",
    "prometheus_client": "metrics",
    "rapidfuzz": "ocr",
    "rapidocr": "ocr",
    "ray": "ray",
    "sqlalchemy": "mlflow",
    "starlette": "serve",
    "uvicorn": "serve",
}
"""The extra that installs each top-level module which the library, the tasks or the workflows
import and the core lacks. Extras that are installed by hand (8bit, float8, postgresql, tensorboard,
wandb) have errors of their own, which name the recipe's key; without movies no MP4 file is written.
"""


class MissingExtraError(ModuleNotFoundError):
    """A package is not installed that an extra of Ebbflow installs."""


def require(user: str, *modules: str) -> None:
    """Check that top-level modules are installed, without importing them.

    Example::

        >>> require("ebbflow run", "flytekit", "mlflow")
        MissingExtraError: ebbflow run needs flytekit: pip install 'ebbflow[flyte]'

    Args:
        user: what needs them, as the first words of the error.
        modules: keys of ``EXTRAS``.

    Raises:
        MissingExtraError: some are not installed; it names all of them.
    """
    # ``find_spec`` looks at the disk only; importing mlflow or ray would take seconds.
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise MissingExtraError(_describe_missing(user, missing), name=missing[0])


def explain_missing(user: str, *modules: str) -> str | None:
    """Return the message of ``require``; None if all modules are installed."""
    try:
        require(user, *modules)
    except MissingExtraError as error:
        return str(error)
    return None


def explain_import_error(user: str, error: ModuleNotFoundError) -> str | None:
    """Return which extra would have prevented ``error``; None if no extra installs its module.

    Args:
        user: what failed, as the first words of the message.
    """
    # A submodule's error carries the dotted name ("mlflow.entities"); extras install packages.
    module = (error.name or "").partition(".")[0]
    return _describe_missing(user, [module]) if module in EXTRAS else None


def _describe_missing(user: str, modules: list[str]) -> str:
    # One command for all of them, in an order that does not depend on the imports.
    extras = ",".join(sorted({EXTRAS[module] for module in modules}))
    return f"{user} needs {', '.join(modules)}: pip install 'ebbflow[{extras}]'"
