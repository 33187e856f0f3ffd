"""What the pods of short tasks import before they begin: seconds of every node of a run. And what
commands do without.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

LIGHT = [
    "choose_candidate",
    "choose_specialist",
    "compute_advantages",
    "decide_promotion",
    "end_failed_run",
    "plan_run",
    "prepare_prompts",
    "promote_policy",
    "read_recipe",
    "register_policy",
    "request_approval",
    "select_prompts",
    "start_run",
    "write_report",
]
HEAVY = {
    *["cv2", "diffusers", "flytekitplugins.kfpytorch", "flytekitplugins.ray", "google.auth"],
    *["kubernetes", "matplotlib", "mlflow", "pandas", "peft", "ray", "torch", "transformers"],
}
IMPORTED = """
import importlib, json, sys
import flytekit.bin.entrypoint
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(f"tasks.{name}")
print(json.dumps(sorted(set(sys.modules) - before)))
"""
COMMANDS = {
    # MLflow's server is a process of its own, and says what the command asks
    "ui": ("ebbflow.tracking.ui", HEAVY),
    # it says what diffusers does without, which is too late once that is imported
    "tiny": ("benchmarks.tiny_models.__main__", HEAVY),
    # a policy folder whose base model is named needs no registry
    "draw": ("ebbflow.registry.drawing", {"mlflow", "pandas", "ray", "matplotlib"}),
    "export": ("ebbflow.training.export", {"mlflow", "pandas", "ray", "matplotlib"}),
}
"""The module that each command imports, and what must not come with it: no more for a later one."""
IMPORTED_BY_COMMANDS = """
import importlib, json, sys
import ebbflow.cli, ebbflow.tracking.store
for name in sys.argv[1:]:
    importlib.import_module(name)
    print(json.dumps(sorted(sys.modules)), flush=True)
"""
MAX_MODULES = 220
"""177 were measured, 154 of them Ebbflow's; with Kubernetes' client and Flyte's plugins, 514."""


def test_light_tasks_import_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED, *LIGHT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    modules = set(json.loads(done.stdout.splitlines()[-1]))
    assert modules & HEAVY == set()
    assert len(modules) < MAX_MODULES


@pytest.fixture(scope="module")
def modules_of_commands() -> dict[str, set[str]]:
    """The modules in memory after the import of each command and of those before it: one
    interpreter for all, as Torch and Diffusers take it seconds.
    """
    modules = [module for module, _ in COMMANDS.values()]
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_BY_COMMANDS, *modules],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    loaded = [set(json.loads(line)) for line in done.stdout.splitlines()]
    return dict(zip(COMMANDS, loaded, strict=True))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_import_nothing_heavy_that_they_do_not_need(
    command: str, modules_of_commands: dict[str, set[str]]
) -> None:
    module, unwanted = COMMANDS[command]
    assert module in modules_of_commands[command]
    assert unwanted & modules_of_commands[command] == set()
