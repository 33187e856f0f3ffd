"""``ebbflow run``: run a recipe on this machine, as ``pyflyte run`` does, with an end that a person
can read.

The pipeline itself is built on top of this library, in the package ``workflows``. It is loaded by
its name when a run starts; nothing else in the library knows it, or Flyte.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from ebbflow.compute import PROCESSES, count_local_processes
from ebbflow.extras import MissingExtraError, require
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.output_folder import check_output_folder
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.resume import handle_interrupt, how_to_resume
from ebbflow.rewards.built_in.model import list_unpinned_models
from ebbflow.storage.disk import PathError, create_private_folder

logger = logging.getLogger(__name__)
PIPELINE = "workflows.run"
ADDED_BY_FLYTE = re.compile(
    r"(?:Error encountered while executing '([\w.]+)':\s*)|(?:USER:\w+: error=)"
)
EXPLAINED = ("ebbflow", "tasks")
"""Packages whose own errors name value, place and fix."""
RECOVERABLE = "FlyteRecoverableException"
"""What tasks raise where another attempt may succeed, with a message of their own."""


class SubmitError(RuntimeError):
    """Flyte did not take a run: says why, and what to do."""


def launch_recipe(path: Path, debug: bool, turn: bool = False) -> None:
    """Run the recipe at ``path`` to its end. An error ends the process with status 1, Ctrl-C with
    130.

    Args:
        debug: let an error of the pipeline show its traceback.
        turn: a turn of the flywheel, which begins with the reward model and pins it itself.
    """
    # First, so that Ctrl-C also says how to resume while the pipeline still loads.
    signal.signal(signal.SIGINT, handle_interrupt)
    try:
        # The report comes last and an evaluation after hours: what they need is checked now.
        require("ebbflow run", "flytekit", "mlflow", "cv2", "matplotlib", "pandas")
        recipe = load_recipe(path)
        if not turn:
            recipe = pin_rewards(recipe)
        _prepare_environment(recipe)
    except (MissingExtraError, RecipeError) as error:
        sys.exit(str(error))
    logger.info(
        "recipe %s, seed %d: loading the pipeline, which takes seconds", recipe.name, recipe.seed
    )
    try:
        pipeline = importlib.import_module(PIPELINE)
        execute = pipeline.turn if turn else pipeline.run
        execute(recipe)
    except Exception as error:
        if debug:
            raise
        sys.exit(f"\n{explain_error(error)}\n{how_to_resume()}")


def pin_rewards(recipe: Recipe, with_store: bool = True) -> Recipe:
    """Return the recipe with the version and the digest of each registered reward model, and with
    the store that they are in unless it runs on another machine.

    Raises:
        RecipeError: one of them does not exist.
    """
    # The registry imports MLflow, which takes seconds.
    if not list_unpinned_models(recipe):
        return recipe
    from ebbflow.registry.reward_models import pin_reward_models
    from ebbflow.tracking.store import TrackingError

    try:
        return pin_reward_models(recipe, with_store)
    except TrackingError as error:
        raise RecipeError(f"rewards: {error}") from error


def explain_error(error: Exception) -> str:
    """Write the message of an error, with the task that raised it, and without what Flyte and torch
    wrap around it.

    An error that does not explain itself also gets its type, and its traceback is written to a
    file.
    """
    # Flyte wraps once per level (workflow, dynamic, task); the innermost names the task.
    tasks = [name for name in ADDED_BY_FLYTE.findall(str(error)) if name]
    where = f"{tasks[-1].rpartition('.')[2]}: " if tasks else ""
    rank_error = _find_first_rank_error(error)
    if rank_error is not None:
        return f"{where}{rank_error}{_write_traceback(error)}"
    message = ADDED_BY_FLYTE.sub("", str(error)).strip()
    error_type = type(error)
    if error_type.__module__.partition(".")[0] in EXPLAINED or error_type.__name__ == RECOVERABLE:
        return where + message.removeprefix(where)
    return f"{where}{type(error).__name__}: {message}{_write_traceback(error)}"


def _find_first_rank_error(error: Exception) -> str | None:
    """Find what the first training process to fail raised: type and message. None for an error of
    another kind.
    """
    # Known by its method: torch's ChildFailedError comes wrapped, and importing torch for its type
    # would cost seconds at every start.
    wrapped: Any = getattr(error, "value", None)
    if not hasattr(wrapped, "get_first_failure"):
        return None
    _, failure = wrapped.get_first_failure()
    # A process that raised leaves a dictionary; one that was killed leaves text about its signal.
    message = failure.message
    return str(message["message"] if isinstance(message, dict) else message)


def _write_traceback(error: Exception) -> str:
    """Write the traceback to a file and say where it is; where no file can be written, say how to
    see it.
    """
    try:
        file = create_private_folder() / f"traceback-{os.getpid()}.txt"
        file.write_text(redact_secrets("".join(traceback.format_exception(error))))
    except (OSError, PathError):
        return "\n--debug shows the traceback"
    return f"\nthe traceback is in {file}; --debug shows it"


def _prepare_environment(recipe: Recipe) -> None:
    """Set the environment of the run, before anything reads it.

    Base models, which Flyte's cache keeps for all runs, lie in the temporary folder: one in
    ``output`` survives a reboot.

    Raises:
        RecipeError: the output folder cannot be made.
    """
    if "://" not in recipe.output:
        check_output_folder(recipe.output)
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A deployment has a number of its own, and the pipeline reads both when it is imported.
    if not os.environ.get("EBBFLOW_DEPLOYMENT") and not os.environ.get(PROCESSES):
        os.environ[PROCESSES] = str(count_local_processes())
    # Programs of this environment are found where it has not been activated.
    os.environ["PATH"] = os.pathsep.join(
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    # An output in a bucket has no local folder: the machine's own temporary folder stays.
    if "://" in recipe.output:
        return
    folder = Path(recipe.output).absolute() / "flyte"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(
            f"output = {recipe.output!r} cannot be written ({error.strerror}); set another folder"
        ) from None
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)
