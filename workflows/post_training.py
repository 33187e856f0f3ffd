"""The pipeline: prepare, alternate online and offline stages, evaluate after each, promote the
winner.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from flytekit import dynamic, wait_for_input, workflow
from flytekit.types.file import FlyteFile

from ebbflow.data.records import GateDecision, Registration, TrackedRun
from ebbflow.evaluation.selection import find_stop_reason
from ebbflow.recipe import Recipe
from ebbflow.recipe.branches import branches_teaching
from tasks.cache import map_over_values
from tasks.choose_candidate import choose_candidate
from tasks.choose_specialist import choose_specialist
from tasks.compute_advantages import compute_advantages
from tasks.copy_base_model import copy_base_model
from tasks.decide_promotion import decide_promotion
from tasks.distill_branches import distill_branches
from tasks.distill_branches_colocated import distill_branches_colocated
from tasks.distill_branches_ray import distill_branches_ray
from tasks.download_base_model import download_base_model
from tasks.encode_data import encode_data
from tasks.end_failed_run import end_failed_run
from tasks.evaluate_branch import evaluate_branch
from tasks.evaluate_champion import evaluate_champion
from tasks.evaluate_policy import evaluate_policy
from tasks.generate_rollouts import generate_rollouts
from tasks.import_data import import_data
from tasks.import_pairs import import_pairs
from tasks.import_policy import import_policy
from tasks.plan_run import plan_run
from tasks.prepare_prompts import prepare_prompts
from tasks.promote_policy import promote_policy
from tasks.read_recipe import read_recipe
from tasks.register_policy import register_policy
from tasks.request_approval import GATE, request_approval
from tasks.resources import light_resources
from tasks.score_both_sides import score_both_sides
from tasks.score_rollouts import score_rollouts
from tasks.select_prompts import select_prompts
from tasks.start_policy import start_policy
from tasks.start_run import start_run
from tasks.train_base_model import train_base_model
from tasks.train_custom import train_custom
from tasks.train_offline import train_offline
from tasks.train_online import train_online
from tasks.train_online_colocated import train_online_colocated
from tasks.train_online_ray import train_online_ray
from tasks.types import (
    BaseModelArtifact,
    ChampionPolicy,
    EvaluatedPolicy,
    SpecialistPolicy,
    TrainedPolicy,
)
from tasks.watch_approval import GATE_MARGIN, watch_approval
from tasks.write_report import write_report

logger = logging.getLogger(__name__)


class PostTraining(NamedTuple):
    """The outputs of a run; ``run`` names its MLflow run, which is tagged with the execution."""

    report: FlyteFile
    summary: FlyteFile
    candidate: EvaluatedPolicy
    decision: GateDecision
    registration: Registration
    run: TrackedRun


class Conclusion(NamedTuple):
    """The report, and what happened to the candidate."""

    report: FlyteFile
    summary: FlyteFile
    registration: Registration


@workflow(on_failure=end_failed_run)
def post_train(recipe: Recipe) -> PostTraining:
    """Post-train a model by a recipe, from prompts to promotion."""
    run = start_run(recipe=recipe)
    prompts = prepare_prompts(recipe=recipe, run=run)
    base = prepare_base_model(recipe=recipe, run=run)
    untrained = prepare_policy(recipe=recipe, run=run, base=base)
    before = evaluate_policy(
        recipe=recipe, run=run, base=base, policy=untrained, prompts=prompts, label="before"
    )
    champion = evaluate_champion(recipe=recipe, run=run, base=base, prompts=prompts, before=before)
    history = train_rounds(
        recipe=recipe, run=run, base=base, prompts=prompts, history=[before], round=0
    )
    candidate = choose_candidate(run=run, history=history)
    sides = score_both_sides(
        recipe=recipe, run=run, prompts=prompts, candidate=candidate, champion=champion
    )
    decision = decide_promotion(
        recipe=recipe, run=run, candidate=sides.candidate, champion=sides.champion
    )
    report, summary, registration = conclude(
        recipe=recipe,
        run=run,
        base=base,
        prompts=prompts,
        history=history,
        candidate=sides.candidate,
        champion=sides.champion,
        decision=decision,
    )
    return PostTraining(report, summary, candidate, decision, registration, run)


@workflow
def post_train_by_name(recipe: str, approval_hours: float = 0.0) -> PostTraining:
    """Post-train a model by a recipe that is named, from prompts to promotion.

    Args:
        recipe: The name of a recipe that comes with Ebbflow, such as glyph; or the URI of a YAML
            file, such as s3://bucket/mine.yaml; or the text of a recipe.
        approval_hours: Hours that a person has to approve a promotion, where the recipe does not
            set promotion.approval. 0 asks nobody.
    """
    resolved = read_recipe(recipe=recipe, approval_hours=approval_hours)
    return post_train(recipe=resolved)


@workflow
def dry_run(recipe: Recipe) -> str:
    """Describe what a run of the recipe would need, as text: resolved recipe, machines, memory,
    work, storage. It runs nothing.
    """
    return plan_run(recipe=recipe)


@dynamic(**light_resources())
def prepare_base_model(recipe: Recipe, run: TrackedRun) -> BaseModelArtifact:
    """Prepare the base model that the recipe names or trains. What cannot have changed since an
    earlier run is cached.
    """
    # A dynamic, because a workflow's inputs are promises and have no ``path`` to look at; and not
    # Flyte's conditional, which flyte-migrate does not translate.
    model = recipe.model
    if model.path is None:
        return train_base_model(training=model.training, threads=recipe.threads, run=run)
    if model.revision:
        return download_base_model(repository=model.path, revision=model.revision, run=run)
    return copy_base_model(model=model, run=run)


@dynamic(**light_resources())
def prepare_policy(recipe: Recipe, run: TrackedRun, base: BaseModelArtifact) -> TrainedPolicy:
    """Prepare the policy that training starts from: the base model, unless the recipe names
    another.
    """
    prepare = import_policy if recipe.policy.start else start_policy
    return prepare(recipe=recipe, run=run, base=base)


@dynamic(**light_resources())
def train_rounds(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    history: list[EvaluatedPolicy],
    round: int,
) -> list[EvaluatedPolicy]:
    """Train this round and all that follow, until the stop rule ends training; the policy of every
    stage is evaluated.
    """
    reason = find_stop_reason(recipe, [evaluated.evaluation for evaluated in history], round)
    if reason:
        logger.info("%s", reason)
        return history
    inputs: dict[str, Any] = {
        "recipe": recipe,
        "run": run,
        "base": base,
        "prompts": prompts,
        "round": round,
    }
    policy = history[-1].policy
    starts_from_base = round == 0 and not policy.was_trained
    specialists = {}
    for stage, config in enumerate(recipe.stages):
        # Left out of the history as well: there is no new policy to evaluate.
        if config.only_from_base and not starts_from_base:
            logger.info(
                "%s is skipped: only_from_base, and the policy was trained before",
                recipe.stage_label(round, stage),
            )
            continue
        # Branches begin with the same policy and none waits for another: each is one node, at the
        # first of its stages.
        if config.branch:
            if config.branch not in specialists:
                specialists[config.branch] = train_branch(
                    **inputs, policy=policy, branch=config.branch
                )
            continue
        teachers = [specialists[name] for name in branches_teaching(config)]
        policy = train_any_stage(**inputs, policy=policy, stage=stage, specialists=teachers)
        evaluated = evaluate_policy(
            recipe=recipe,
            run=run,
            base=base,
            policy=policy,
            prompts=prompts,
            label=recipe.stage_label(round, stage),
        )
        history = [*history, evaluated]
    # Recursive, because only the inputs of a dynamic have values: the next round is a dynamic of
    # its own, which sees this round's evaluations and can decide to stop.
    return train_rounds(
        recipe=recipe, run=run, base=base, prompts=prompts, history=history, round=round + 1
    )


@dynamic(**light_resources())
def train_branch(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    branch: str,
) -> SpecialistPolicy:
    """Train the stages of a branch on its own prompts, with its own rewards and gate."""
    shared: dict[str, Any] = {"recipe": recipe, "run": run}
    branch_prompts = select_prompts(**shared, prompts=prompts, round=round, branch=branch)
    evaluate = partial(evaluate_branch, **shared, base=base, prompts=branch_prompts, branch=branch)
    history = [evaluate(policy=policy, label=f"{recipe.branch_label(round, branch)} before")]
    for stage, config in enumerate(recipe.stages):
        if config.branch == branch:
            policy = train_any_stage(
                **shared,
                base=base,
                policy=policy,
                prompts=branch_prompts,
                round=round,
                stage=stage,
                specialists=[],
            )
            history = [*history, evaluate(policy=policy, label=recipe.stage_label(round, stage))]
    return choose_specialist(
        **shared, prompts=branch_prompts, round=round, branch=branch, history=history
    )


@dynamic(**light_resources())
def conclude(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    prompts: FlyteFile,
    history: list[EvaluatedPolicy],
    candidate: EvaluatedPolicy,
    champion: ChampionPolicy,
    decision: GateDecision,
) -> Conclusion:
    """Register the candidate as challenger, and promote it if the gate and, if the recipe asks for
    one, a person approve.

    A person decides by the report, so it is written before the gate node and again after it. A no
    is a decision: the version stays challenger and the run ends well, and so is no answer in time.
    """
    inputs: dict[str, Any] = {"recipe": recipe, "run": run, "decision": decision}
    write = partial(write_report, **inputs, base=base, history=history, champion=champion)
    registration = register_policy(
        **inputs, base=base, prompts=prompts, candidate=candidate, champion=champion
    )
    if not decision.promote:
        report, summary = write(registration=registration)
        return Conclusion(report, summary, registration)
    promote = partial(promote_policy, **inputs, champion=champion, registration=registration)
    if not recipe.promotion.approval:
        promoted = promote()
    else:
        report, _ = write(registration=registration)
        question, asked_at = request_approval(**inputs, registration=registration, report=report)
        # A gate that waits for a value, because a rejected ``approve`` fails the execution: nothing
        # could say so in the report and in MLflow any more.
        timeout = timedelta(hours=recipe.promotion.approval) + GATE_MARGIN
        answer = wait_for_input(GATE, timeout, bool)
        # Such a gate has no inputs, and would open before there is a report to decide by.
        question >> answer
        # Beside the gate: it reminds people, and answers in their place when their time is up.
        outcome = watch_approval(recipe=recipe, run=run, question=question, asked_at=asked_at)
        promoted = promote(question=outcome, answer=answer)
    report, summary = write(registration=promoted)
    return Conclusion(report, summary, promoted)


def train_any_stage(
    recipe: Recipe, stage: int, specialists: list[SpecialistPolicy], **inputs: Any
) -> TrainedPolicy:
    """Train a stage of any kind; ``specialists`` are the branches that it learns from."""
    kind = recipe.stages[stage].kind
    if specialists:
        return train_distillation_stage(
            recipe=recipe, stage=stage, specialists=specialists, **inputs
        )
    train = {"online": train_online_stage, "offline": train_offline_stage, "custom": train_custom}[
        kind
    ]
    return train(recipe=recipe, stage=stage, **inputs)


def train_distillation_stage(recipe: Recipe, stage: int, **inputs: Any) -> TrainedPolicy:
    """Train an online stage whose teachers are policies of branches."""
    config = recipe.stages[stage]
    assert config.kind == "online"
    train = {
        "in_process": distill_branches,
        "colocated": distill_branches_colocated,
        "ray": distill_branches_ray,
    }[config.placement]
    return train(recipe=recipe, stage=stage, **inputs)


def train_online_stage(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
) -> TrainedPolicy:
    """Generate, score and update step by step: one task, in one process, a group of equal processes
    or a Ray cluster.
    """
    config = recipe.stages[stage]
    assert config.kind == "online"
    train = {
        "in_process": train_online,
        "colocated": train_online_colocated,
        "ray": train_online_ray,
    }[config.placement]
    stage_inputs: dict[str, Any] = {"recipe": recipe, "run": run, "round": round, "stage": stage}
    anchor = encode_anchor(**stage_inputs, base=base, prompts=prompts)
    return train(**stage_inputs, base=base, policy=policy, prompts=prompts, **anchor)


def encode_anchor(recipe: Recipe, stage: int, **inputs: Any) -> dict[str, Any]:
    """Encode the data of a stage's anchor; return the inputs of its training, none for a stage
    without one.
    """
    if not recipe.stages[stage].anchor:
        return {}
    tables = import_data(recipe=recipe, stage=stage, **inputs)
    del inputs["prompts"]
    latents = encode_data(recipe=recipe, stage=stage, **inputs, encoding=tables.encoding)
    return {"anchor_tables": [tables.prompts, tables.advantages], "anchor_latents": latents}


def train_offline_stage(
    recipe: Recipe,
    run: TrackedRun,
    base: BaseModelArtifact,
    policy: TrainedPolicy,
    prompts: FlyteFile,
    round: int,
    stage: int,
) -> TrainedPolicy:
    """Generate and score a large batch once, in shards, or import one; then train epochs over it in
    a group of processes.
    """
    config = recipe.stages[stage]
    assert config.kind == "offline"
    stage_inputs: dict[str, Any] = {"recipe": recipe, "run": run, "round": round, "stage": stage}
    anchor = encode_anchor(**stage_inputs, base=base, prompts=prompts)
    if config.pairs:
        prompts, rollouts, advantages = import_pairs(**stage_inputs, base=base, prompts=prompts)
    elif config.data:
        prompts, advantages, encoding = import_data(**stage_inputs, base=base, prompts=prompts)
        rollouts = encode_data(**stage_inputs, base=base, encoding=encoding)
    else:
        # Generated and scored on other machines, shard by shard; advantages need all shards.
        roll_out = partial(
            generate_rollouts, **stage_inputs, base=base, policy=policy, prompts=prompts
        )
        rollouts = map_over_values(roll_out, shard=list(range(config.shards)))
        scores = map_over_values(
            partial(score_rollouts, **stage_inputs, prompts=prompts), rollouts=rollouts
        )
        advantages = compute_advantages(**stage_inputs, scores=scores)
    return train_offline(
        **stage_inputs,
        base=base,
        policy=policy,
        prompts=prompts,
        rollouts=rollouts,
        advantages=advantages,
        **anchor,
    )
