"""Both sides of a decision, generated and scored again as the gate had them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ebbflow.evaluation.evaluate import evaluate_folder
from ebbflow.evaluation.gate_scores import score_tables_together
from ebbflow.registry.serving import find_base_folder
from ebbflow.verification import evidence as stored
from ebbflow.verification.compared import BASE, POLICY
from ebbflow.verification.version import RegisteredVersion


def generate_sides(
    registered: RegisteredVersion, scratch: Path, targets: Mapping[str, Path]
) -> str:
    """Generate the samples of the candidate and, where it was found, of the champion, score them
    together and write their tables to ``targets``; return what it took.
    """
    recipe = registered.evaluated_recipe
    prompts = registered.find_file(stored.PROMPT_TABLE)
    folders = {"candidate": (find_base_folder(registered.data), registered.data / "policy")}
    # Without the champion the candidate takes both places, since the gate scores pairs.
    has_champion = (scratch / BASE).exists()
    folders["champion"] = (
        (scratch / BASE, scratch / POLICY) if has_champion else folders["candidate"]
    )
    samples = {side: scratch / f"{side}-drawn.parquet" for side in folders}
    # With the noise of the look.
    look = registered.read_evaluation("candidate").look
    evaluations = {
        side: evaluate_folder(recipe, base, policy, prompts, f"{side} again", samples[side], look)
        for side, (base, policy) in folders.items()
    }
    score_tables_together(recipe, prompts, evaluations, samples, targets)
    seconds = sum(sum(evaluation.seconds.values()) for evaluation in evaluations.values())
    return f"generated and scored in {seconds:.1f} s"
