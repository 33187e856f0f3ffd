"""What the pods of short tasks import before they begin: seconds of every node of a run."""

from __future__ import annotations

import json
import subprocess
import sys

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
