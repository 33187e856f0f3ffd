"""CPU-seconds until something starts: ``python -m benchmarks.startup [--against CHECKOUT] [--runs
3]``.

The command line, commands that load a library for seconds, what each kind of pod imports before its
task does anything, and a whole run of the tiny recipe with all its processes (``ebbflow run``; of a
checkout without that command ``pyflyte run``). Two rows that are not ours tell how low such a
command can come: an import of the classes that a tiny model and ``draw`` need, and MLflow's own UI.
With ``--against``, another checkout takes its turns in between, with the same packages, and the
table has the ratios. The least of the runs counts. It goes to ``benchmarks/results/startup.md``.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from mlflow import MlflowClient
from tqdm import tqdm

from benchmarks.machine import describe_machine
from benchmarks.tiny_models import build_tiny
from ebbflow.recipe import Recipe
from ebbflow.storage.artifacts import digest_of_folder
from ebbflow.tracking.ui import SERVER_SETTINGS

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
"""Pods of the pipeline, from the lightest imports to the heaviest."""
WHOLE = "a whole run of the tiny recipe"
CLASSES = (
    "from diffusers import StableDiffusion3Pipeline; from transformers import"
    " CLIPTextModelWithProjection, T5EncoderModel"
)
WRITE_POLICY = """
import json
import sys
from pathlib import Path

from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.policy_metadata import write_base_policy

folder = Path(sys.argv[1])
model = ModelConfig.model_validate(json.loads(sys.argv[2]))
write_base_policy(folder / "policy", sys.argv[3], "", PolicyConfig(), model)
"""
UNTIL_IT_ANSWERS = """
import os, shutil, signal, subprocess, sys, time, urllib.request

store, port, *command = sys.argv[1:]
os.makedirs("runs", exist_ok=True)
shutil.copy(store, "runs/mlflow.db")
server = subprocess.Popen(command, start_new_session=True)
while True:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
        break
    except OSError:
        assert server.poll() is None, "the server has ended"
        time.sleep(0.1)
# Our command asks the server for the experiment before it prints the addresses.
time.sleep(2)
os.kill(server.pid, signal.SIGTERM)
try:
    server.wait(30)
finally:
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
"""
"""A script that starts a server on a copy of a store, and ends it once it answers."""
PORT = "58431"
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
    with tempfile.TemporaryDirectory(prefix="ebbflow-startup-inputs-") as inputs:
        prepare_inputs(Path(inputs), trees[-1])
        for _ in tqdm(range(arguments.runs), unit="run"):
            for column, tree in enumerate(trees):
                for name, command in list_commands(tree).items():
                    seconds[name][column] = min(
                        seconds[name][column], measure_cpu_seconds(command, tree, Path(inputs))
                    )
    written = format_table(seconds, arguments.runs, arguments.against)
    (ROOT / "benchmarks" / "results" / "startup.md").write_text(written)
    print(written)


def prepare_inputs(folder: Path, tree: Path) -> None:
    """Write what commands read: a tiny SD3 with a policy of it, a recipe that names it, and an
    MLflow store.

    Args:
        tree: the oldest checkout, whose policies all others read.
    """
    build_tiny("sd3", folder / "tiny")
    model = {"family": "sd3", "path": str(folder / "tiny"), "height": 64, "width": 64}
    base_digest = digest_of_folder(folder / "tiny")
    subprocess.run(
        [sys.executable, "-c", WRITE_POLICY, str(folder), json.dumps(model), base_digest],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        check=True,
    )
    settings = yaml.safe_load((ROOT / "workflows" / "recipes" / "tiny.yaml").read_text())
    (folder / "sd3.yaml").write_text(yaml.safe_dump(settings | {"model": model}))
    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    client.create_experiment(Recipe.model_validate(settings).tracking.experiment)


def list_commands(tree: Path) -> dict[str, list[str]]:
    """What is measured, by its name in the table; "INPUTS" stands for the folder of the inputs and
    "OUTPUT" for an empty one.
    """
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
        "`ebbflow check` with `model.path`": [ebbflow, "check", "INPUTS/sd3.yaml"],
        "a tiny SD3": (
            [sys.executable, "-m", "benchmarks.tiny_models", "sd3", "OUTPUT/tiny"]
            if (tree / "benchmarks" / "tiny_models").is_dir()
            else [ebbflow, "tiny", "sd3", "OUTPUT/tiny"]
        ),
        "`ebbflow draw` with a policy of a tiny SD3": [
            *(ebbflow, "draw", "INPUTS/policy", "a cat", "--base", "INPUTS/tiny"),
            *("--out", "OUTPUT/drawn"),
        ],
        "not ours: an import of SD3's pipeline and encoders": [sys.executable, "-c", CLASSES],
        "`ebbflow ui` until it answers": [
            *(sys.executable, "-c", UNTIL_IT_ANSWERS, "INPUTS/mlflow.db", PORT),
            *(ebbflow, "ui", "--recipe", "recipe.yaml", "--port", PORT, "--no-browser"),
        ],
        "not ours: `mlflow ui` until it answers": [
            *(sys.executable, "-c", UNTIL_IT_ANSWERS, "INPUTS/mlflow.db", PORT),
            *(sys.executable, "-m", "mlflow", "ui", "--workers", "1", "--port", PORT),
            *("--backend-store-uri", "sqlite:///runs/mlflow.db"),
        ],
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


def measure_cpu_seconds(command: list[str], tree: Path, inputs: Path) -> float:
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
            **SERVER_SETTINGS,  # as `ebbflow ui` has them
        }
        environment = {
            name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"
        } | overrides
        usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        places = {"recipe.yaml": str(recipe), "INPUTS": str(inputs), "OUTPUT": folder}
        words = []
        for part in command:
            first, *rest = part.split("/", 1)
            words.append("/".join([places.get(first, first), *rest]))
        # A server's store is found from the folder that it is started in.
        here = folder if UNTIL_IT_ANSWERS in command else tree
        completed = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True)
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
