"""Ctrl-C in any phase of a local run: two lines that say how to resume, exit status 130, and no
traceback.
"""

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
POINTS = [
    "ebbflow.models.glyph_training.train:_flow_matching_loss:2",
    "ebbflow.evaluation.evaluate:_generate_and_score:1",
    # of the online stage, in the process of the command
    "ebbflow.training.update:PolicyUpdater.update_policy:1",
    "ebbflow.offline.training:_time_update:1",  # of the offline stage, where ranks save first
]


def test_an_interrupted_run_says_how_to_resume(tmp_path: Path) -> None:
    for start, point in enumerate(POINTS):
        printed = run_pipeline_until(tmp_path, RECIPE, f"{point}:sigint")
        (folder,) = (tmp_path / "runs").glob("tiny-*")
        said = printed.rstrip().splitlines()
        assert said.count("interrupted") == 1, printed
        assert said[-1].startswith(
            f"{folder} keeps what is finished; resume with: again_cases.py run "
        ), printed
        assert "Traceback" not in printed
        assert ("resuming the stopped run" in printed) == (start > 0)
    (checkpoint,) = (tmp_path / "runs").glob("*/checkpoints/1.2-offline/step-*")
    assert checkpoint.name == "step-00001"
