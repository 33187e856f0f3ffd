"""An online stage from a policy folder to a new one."""

from __future__ import annotations

from pathlib import Path

from ebbflow.data.prompts import read_prompts
from ebbflow.evaluation.records import StageRecord
from ebbflow.online.loop import run_online_stage
from ebbflow.rewards.combine import load_scorer
from ebbflow.stage import Log, Place, open_model, open_policy, save_policy


def train_online_folder(place: Place, base: Path, folder: Path, prompts: Path, trained: Path, log: Log) -> StageRecord:
    """Run the stage on the policy of ``folder`` and leave the trained one at ``trained``."""
    model = open_model(place.recipe, base)
    policy, card = open_policy(place, model, folder)
    scorer = load_scorer(place.recipe.rewards.terms, ())
    record = run_online_stage(place, model, policy, scorer, read_prompts(prompts, "train"), log)
    save_policy(place, policy, card, record, trained)
    return record
