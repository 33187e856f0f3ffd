"""CPU-seconds until something starts: ``python -m benchmarks.startup [--against CHECKOUT] [--runs
3]``.

The command line, what each kind of pod imports before its task does anything, and a whole run of
the tiny recipe with all its processes (``ebbflow run``; of a checkout without that command
``pyflyte run``). With ``--against``, another checkout takes its turns in between, with the same
packages, and the table has the ratios. The least of the runs counts. It goes to
``benchmarks/results/startup.md``.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from tqdm import tqdm

from benchmarks.machine import describe_machine

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
WORKFLOW = ["workflows/post_training.py", "post_train"]
PODS = [
    "register_policy",
    "compute_advantages",
    "score_rollouts",
    "generate_rollouts",
    "train_online",
]
WHOLE = "a whole run of the tiny recipe"
"""Pods of the pipeline, from the lightest imports to the heaviest."""
PR_SET_CHILD_SUBREAPER = 36
"""From ``linux/prctl.h``; Python has no name for it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="another checkout of this repository")
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    # A process that outlives its parent becomes a child of this one instead of init's: it is waited
    # for here, and its CPU-seconds count.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    trees = [ROOT, *([arguments.against.resolve()] if arguments.against else [])]
    seconds: dict[str, list[float]] = {
        name: [float("inf")] * len(trees) for name in list_commands(ROOT)
    }
    # The checkouts take turns, so that a slow minute of the machine meets both. The least counts:
    # other work on the machine only ever adds.
    for _ in tqdm(range(arguments.runs), unit="run"):
        for column, tree in enumerate(trees):
            for name, command in list_commands(tree).items():
                seconds[name][column] = min(
                    seconds[name][column], measure_cpu_seconds(command, tree)
                )
    written = format_table(seconds, arguments.runs, arguments.against)
    (ROOT / "benchmarks" / "results" / "startup.md").write_text(written)
    print(written)


def list_commands(tree: Path) -> dict[str, list[str]]:
    """What is measured, by its name in the table."""
    ebbflow = str(BIN / "ebbflow")
    pyflyte = str(BIN / "pyflyte")
    launcher = tree / "workflows" / "run.py"
    # A pod imports the workflow before its task's function runs, and then what the function
    # imports.
    imports = {
        name: (
            "import workflows.post_training,"
            f" {', '.join(list_imported_modules(tree / 'tasks' / f'{name}.py'))}"
        )
        for name in PODS
    }
    return {
        "`ebbflow --help`": [ebbflow, "--help"],
        "`ebbflow list`": [ebbflow, "list"],
        "`ebbflow keys`": [ebbflow, "keys"],
        "`ebbflow check`": [ebbflow, "check", "workflows/recipes/glyph.yaml"],
        "`pyflyte run ... --help`": [pyflyte, "run", *WORKFLOW, "--help"],
        **{
            f"imports of a `{name}` pod": [sys.executable, "-c", statement]
            for name, statement in imports.items()
        },
        WHOLE: (
            [ebbflow, "run", "recipe.yaml"]
            if launcher.is_file()
            else [pyflyte, "run", *WORKFLOW, "--recipe", "recipe.yaml"]
        ),
    }


def list_imported_modules(task: Path) -> list[str]:
    """List the modules that the functions of a task's file import when they run.

    Tasks import inside their functions, as registering must not need a GPU stack. The imports are
    read from the source, as calling the task would do its work as well.
    """
    functions = [
        node for node in ast.parse(task.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    imports = [
        node for body in functions for node in ast.walk(body) if isinstance(node, ast.ImportFrom)
    ]
    return sorted({node.module for node in imports if node.module})


def measure_cpu_seconds(command: list[str], tree: Path) -> float:
    """Measure a command on a checkout, with all processes that it leaves behind."""
    with tempfile.TemporaryDirectory(prefix="ebbflow-startup-") as folder:
        settings = yaml.safe_load((tree / "workflows" / "recipes" / "tiny.yaml").read_text())
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(settings | {"output": f"{folder}/runs"}))
        # a folder of its own for everything that is cached between runs, such as Flyte's results
        overrides = {
            "HOME": folder,
            "TMPDIR": folder,
            "PYTHONPATH": str(tree),
            "MLFLOW_DISABLE_TELEMETRY": "true",
        }
        environment = {
            name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"
        } | overrides
        usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        words = [str(recipe) if part == "recipe.yaml" else part for part in command]
        completed = subprocess.run(words, cwd=tree, env=environment, capture_output=True, text=True)
        if completed.returncode:
            raise SystemExit(
                f"{' '.join(words)} failed:\n{completed.stdout[-3000:]}{completed.stderr[-3000:]}"
            )
        # RUSAGE_CHILDREN counts a child only once it has been waited for
        while True:
            try:
                os.wait()
            except ChildProcessError:
                break
        usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (
        usage_after.ru_utime + usage_after.ru_stime - usage_before.ru_utime - usage_before.ru_stime
    )


def read_revision(tree: Path) -> str:
    """The commit of a checkout, in short."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=tree, capture_output=True, text=True
    ).stdout.strip()


def format_table(seconds: dict[str, list[float]], runs: int, against: Path | None) -> str:
    """A line for each entry point."""
    head = ["", "CPU-s", *([f"CPU-s at {read_revision(against)}", "ratio"] if against else [])]
    command = (
        f"python -m benchmarks.startup --runs {runs}{' --against CHECKOUT' if against else ''}"
    )
    lines = ["# CPU-seconds until something starts", "", f"`{command}`", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for name, (now, *earlier) in seconds.items():
        cells = [
            f"{now:.1f}",
            *(cell for old in earlier for cell in (f"{old:.1f}", f"{now / old:.2f}")),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    on = describe_machine()
    return "\n".join([*lines, "", f"{on['cpu']}, {on['cores']} cores, Python {on['python']}", ""])


if __name__ == "__main__":
    main()
