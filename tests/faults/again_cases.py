"""The pipeline in a process that dies where a test says.

As a script it is ``pyflyte``, or ``ebbflow`` where the first argument is ``turn``.
``EBBFLOW_DIE_AT=module:function:n`` kills its whole process group with SIGKILL as the n-th call of
the function (counted in its process) begins, and ``module:function:n:after`` as it ends. With
``module:function:n:sigterm`` the script alone gets a SIGTERM, as from Kubernetes, and with
``module:function:n:sigint`` the whole process group a SIGINT, as from a terminal. A function is
named where it is looked up: ``ebbflow.online.training_worker:save_policy`` and not where it is
defined; a method as ``module:Class.method:n``. Ranks of a training group import this script too, so
that they die at their calls as well.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.forked import ForkedProgram

ROOT = Path(__file__).parents[2]
DIE_AT = "EBBFLOW_DIE_AT"
EXIT_CODES = {"sigterm": 1, "sigint": 130}


def start_pipeline(
    folder: Path, changes: dict[str, Any], die_at: str = "", recipe: str = "tiny"
) -> ForkedProgram:
    """``pyflyte run`` on a shipped recipe with some keys changed, as a process group of its own;
    all it writes is in ``folder``.

    ``output`` is relative, so that the same changes are the same recipe in every folder. Both
    streams go to ``printed.txt``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    settings = yaml.safe_load((ROOT / "workflows" / "recipes" / f"{recipe}.yaml").read_text())
    (folder / "recipe.yaml").write_text(yaml.safe_dump(settings | {"output": "runs"} | changes))
    workflow = ROOT / "workflows" / "post_training.py"
    arguments = ["run", str(workflow), "post_train", "--recipe", "recipe.yaml"]
    return start_script(folder, arguments, die_at)


def start_script(folder: Path, arguments: list[str], die_at: str) -> ForkedProgram:
    """This script in ``folder``, as a process group of its own."""
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {
        key: value for key, value in os.environ.items() if key != "MLFLOW_TRACKING_URI"
    } | {
        "TMPDIR": str(folder / "tmp"),
        "HOME": str(folder),
        "EBBFLOW_LOCAL_CACHE": str(folder / "cache"),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "FLYTE_LOCAL_CACHE_ENABLED": "true",
        DIE_AT: die_at,
    }
    (folder / "printed.txt").unlink(missing_ok=True)
    return ForkedProgram(
        [sys.executable, __file__, *arguments],
        cwd=folder,
        env=environment,
        output=[folder / "printed.txt"],
        new_session=True,
    )


def run_pipeline_until(
    folder: Path, changes: dict[str, Any], die_at: str = "", recipe: str = "tiny"
) -> str:
    """Run until it dies there, or to its end where nothing is named, and return what it printed.
    Anything else is an error.
    """
    return wait_until(folder, start_pipeline(folder, changes, die_at, recipe), die_at)


def wait_until(folder: Path, process: ForkedProgram, die_at: str) -> str:
    """Wait for a program of ``start_script`` to die there, as ``run_pipeline_until``."""
    try:
        ended = process.wait(timeout=900)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    printed = (folder / "printed.txt").read_text()
    expected = EXIT_CODES.get(die_at.rpartition(":")[2], -signal.SIGKILL if die_at else 0)
    assert ended == expected, f"{die_at or 'to the end'}: ended with {ended}\n{printed[-5000:]}"
    return printed


def _die() -> None:
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _arm(die_at: str) -> None:
    module, path, number, *after = die_at.split(":")
    *classes, name = path.split(".")
    owner = functools.reduce(getattr, classes, importlib.import_module(module))
    function = getattr(owner, name)
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    calls = itertools.count(1)

    @functools.wraps(function)
    def deadly(*arguments: Any, **named: Any) -> Any:
        last = next(calls) == int(number)
        if last and after == ["sigterm"] and os.environ.get("RANK", "0") == "0":
            os.kill(os.getpgrp(), signal.SIGTERM)
        if last and after == ["sigint"] and os.environ.get("RANK", "0") == "0":
            os.killpg(os.getpgrp(), signal.SIGINT)
        if last and not after:
            _die()
        result = function(*arguments, **named)
        if last and after == ["after"]:
            _die()
        return result

    setattr(owner, name, staticmethod(deadly) if static else deadly)


# not under __main__ alone: a spawned rank imports the script as __mp_main__
if __name__ in ("__main__", "__mp_main__") and os.environ.get(DIE_AT):
    _arm(os.environ[DIE_AT])

if __name__ == "__main__":
    if sys.argv[1] == "turn":
        from ebbflow.cli import main
    else:
        from flytekit.clis.sdk_in_container.pyflyte import main

    sys.exit(main())
