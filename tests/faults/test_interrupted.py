"""Ctrl-C in any stage of a local run: one line that says how to resume, exit status 130, and no traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.faults.again_cases import run_pipeline_until
from tests.glyph_stages import small_stage

SMALL = {"group_size": 4, "micro_batch": 8}
RECIPE: dict[str, Any] = {
    "model": {"training": {"steps": 3, "batch": 4}},
    "prompts": {"count": 24, "validation": 4, "held_out": 4},
    "rewards": ["mine.contrast:Contrast"],
    "guardrails": [],
    "stages": [
        small_stage({"kind": "online", "steps": 2, "prompts_per_step": 2, **SMALL}),
        small_stage({"kind": "offline", "prompts": 4, "batch_size": 8, "epochs": 1, **SMALL}),
    ],
}
SAID = "interrupted; the same command resumes"


def test_an_interrupted_stage_says_how_to_resume(tmp_path: Path) -> None:
    """First in the online stage, in the process of the command; then in the offline stage, where ranks save first."""
    for start, point in enumerate(["ebbflow.training.update:PolicyUpdater.update", "ebbflow.offline.training:_timed_update"]):
        printed = run_pipeline_until(tmp_path, RECIPE, f"{point}:1:sigint")
        assert printed.count(SAID) == 1, printed
        assert "Traceback" not in printed
        assert ("resuming the stopped run" in printed) == (start > 0)
    (checkpoint,) = (tmp_path / "runs").glob("*/checkpoints/1.2-offline/step-*")
    assert checkpoint.name == "step-00001"
