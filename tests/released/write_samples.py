"""Write what the checkout on PYTHONPATH leaves behind, small, as a sample of its formats::

    PYTHONPATH=. python tests/released/write_samples.py tests/released/format_1

``runs/``: the folders of a finished and of a stopped run. ``checkpoint/``: of a stage. ``version/``
and ``version.json``: the files and the tags of a promoted version. All are written by the functions
that write them in a run; weights and scores are made up, because a real base model has megabytes.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from ebbflow.data.prompts import Prompt
from ebbflow.recipe import Recipe
from ebbflow.registry import model_version
from ebbflow.run_summary import write_summary_file
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import verify_folder
from ebbflow.tracking.parent_run import finish_run
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.policy_metadata import PolicyMetadata
from tasks.start_run import start_run

ROOT = Path(__file__).parents[2]
MODEL = "released"
RECIPE = {
    "rewards": [{"name": "similarity", "weight": 2}],
    "guardrails": ["ocr"],
    "evaluation": {"steps": 2, "resamples": 200},
}
SUMMARY = {"before": {"reward": 0.1}, "after": {"reward": 0.2}, "model_version": "1"}
STEP = 7


def main(target: Path, verification: Path) -> None:
    """Write the samples to a new folder.

    Args:
        verification: ``tests/verification`` of the checkout.
    """
    sys.path.insert(0, str(verification))
    target = target.absolute()
    target.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        # What is written says "runs", and not where that was.
        os.chdir(scratch)
        finished = Recipe.model_validate({**RECIPE, "name": "finished"})
        stopped = finished.model_copy(update={"name": "stopped"})
        for recipe in (finished, stopped):
            run = start_run(recipe=recipe)
            assert isinstance(run.folder, str)
            node = Path(run.folder) / "nodes" / "1.1-online"
            node.mkdir(parents=True)
            (node / "metrics.json").write_text("{}")
            if recipe is finished:
                summary = SUMMARY | {"promoted": True}
                write_summary_file(Path(run.folder) / "summary.json", summary)
                finish_run(run, "FINISHED")
            shutil.copytree(run.folder, target / "runs" / Path(run.folder).name)
        write_checkpoint(finished, target / "checkpoint")
        write_version(finished, Path(scratch), target)


def write_checkpoint(recipe: Recipe, folder: Path) -> None:
    """Write the checkpoint of a stage, with a file in place of the policy and the optimiser."""
    checkpoints = Checkpoints(StageContext(recipe, 0, 0), folder)
    with checkpoints.save_step(STEP, {"step": STEP}) as unfinished:
        (unfinished / "policy-0.safetensors").write_bytes(b"\0" * 64)


def write_version(recipe: Recipe, scratch: Path, target: Path) -> None:
    """Register and promote a version, and write its files and its tags."""
    from verification_cases import committed, evaluated, prompt_table, registered

    texts = [f"WORD{number}" for number in range(28)]
    prompts = [
        Prompt(number, f'"{text}"', "", text, "words", "held_out" if number > 3 else "train", "{}")
        for number, text in enumerate(texts)
    ]
    base = committed(scratch / "base", {"model_index.json": "{}", "weights.safetensors": "w" * 64})
    metadata = PolicyMetadata(
        base_digest=verify_folder(base),
        recipe_digest=recipe.digest,
        config=recipe.policy,
        version=7,
    )
    policy = committed(
        scratch / "policy",
        {"policy.json": metadata.model_dump_json(), "weights.safetensors": "p" * 64},
    )
    sides = {
        "candidate": evaluated(scratch / "candidate.parquet", prompts, 0.2, "1.1 online"),
        "champion": evaluated(scratch / "champion.parquet", prompts, 0.0, "before"),
    }
    table = prompt_table(scratch / "prompts.parquet", prompts)
    # The sources of the whole library are stored with a version; a folder stands for them here.
    model_version.LIBRARY = model_version.LIBRARY / "flow" / "samplers"
    version = registered(recipe, MODEL, base, policy, sides, table)
    shutil.copytree(version.folder, target / "version")
    (target / "version.json").write_text(json.dumps(version.tags, indent=2, sort_keys=True) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), ROOT / "tests" / "verification")
