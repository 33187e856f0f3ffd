"""The pipeline: prepare, alternate online and offline stages, evaluate after each, promote what won."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from flytekit import dynamic, map_task, workflow
from flytekit.types.file import FlyteFile

from ebbflow.evaluation.selection import stop_reason
from ebbflow.recipe import Recipe
from ebbflow.records import Registration, TrackedRun, Verdict
from tasks.choose_candidate import choose_candidate
from tasks.compute_advantages import compute_advantages
from tasks.copy_base_model import copy_base_model
from tasks.decide_promotion import decide_promotion
from tasks.download_base_model import download_base_model
from tasks.evaluate_champion import evaluate_champion
from tasks.evaluate_policy import evaluate_policy
from tasks.generate_rollouts import generate_rollouts
from tasks.import_pairs import import_pairs
from tasks.import_policy import import_policy
from tasks.plan_run import plan_run
from tasks.prepare_prompts import prepare_prompts
from tasks.register_policy import register_policy
from tasks.resources import light
from tasks.score_rollouts import score_rollouts
from tasks.start_policy import start_policy
from tasks.start_run import start_run
from tasks.train_base_model import train_base_model
from tasks.train_offline import train_offline
from tasks.train_online import train_online
from tasks.train_online_ray import train_online_ray
from tasks.types import BaseModelArtifact, EvaluatedPolicy, TrainedPolicy
from tasks.write_report import write_report


class PostTraining(NamedTuple):
    """What a run leaves behind; ``run`` leads to MLflow, whose run is tagged with the execution."""

    report: FlyteFile
    summary: FlyteFile
    candidate: EvaluatedPolicy
    verdict: Verdict
    registration: Registration
    run: TrackedRun


@workflow
def post_train(recipe: Recipe = Recipe()) -> PostTraining:
    """Post-train a model by a recipe, from prompts to promotion."""
    run = start_run(recipe=recipe)
    prompts = prepare_prompts(recipe=recipe, run=run)
    base = prepare_base_model(recipe=recipe)
    untrained = prepare_policy(recipe=recipe, base=base)
    before = evaluate_policy(recipe=recipe, run=run, base=base, policy=untrained, prompts=prompts, label="before")
    champion = evaluate_champion(recipe=recipe, run=run, base=base, prompts=prompts, before=before)
    history = train_rounds(recipe=recipe, run=run, base=base, prompts=prompts, history=[before], round=0)
    candidate = choose_candidate(history=history)
    verdict = decide_promotion(recipe=recipe, run=run, candidate=candidate, champion=champion)
    registration = register_policy(recipe=recipe, run=run, base=base, candidate=candidate, champion=champion, verdict=verdict)
    report, summary = write_report(
        recipe=recipe, run=run, base=base, history=history, champion=champion, verdict=verdict, registration=registration
    )
    return PostTraining(report, summary, candidate, verdict, registration, run)


@workflow
def dry_run(recipe: Recipe = Recipe()) -> str:
    """What a run of the recipe would take, as text: the resolved recipe, machines, memory, work, bytes kept. It runs nothing."""
    return plan_run(recipe=recipe)


@dynamic(**light())
def prepare_base_model(recipe: Recipe) -> BaseModelArtifact:
    """The base model that the recipe names, or the one it trains. What cannot have changed since is cached."""
    model = recipe.model
    if model.path is None:
        return train_base_model(training=model.training, threads=recipe.threads)
    if model.revision:
        return download_base_model(repository=model.path, revision=model.revision)
    return copy_base_model(model=model)


@dynamic(**light())
def prepare_policy(recipe: Recipe, base: BaseModelArtifact) -> TrainedPolicy:
    """What training starts from: the base model unless the recipe names something else."""
    return import_policy(recipe=recipe, base=base) if recipe.policy.start else start_policy(recipe=recipe, base=base)


@dynamic(**light())
def train_rounds(
    recipe: Recipe, run: TrackedRun, base: BaseModelArtifact, prompts: FlyteFile, history: list[EvaluatedPolicy], round: int
) -> list[EvaluatedPolicy]:
    """Every round from this one on, unless the stop rule ends them; each stage's policy is evaluated.

    Recursive, because only the inputs of a dynamic have values: the next round is a dynamic of its own, which sees the
    evaluations of this one and can decide to stop.
    """
    if reason := stop_reason(recipe, [evaluated.evaluation for evaluated in history], round):
        print(reason)
        return history
    policy = history[-1].policy
    for stage, config in enumerate(recipe.stages):
        train = online_stage if config.kind == "online" else offline_stage
        policy = train(recipe, run, base, policy, prompts, round, stage)
        evaluated = evaluate_policy(
            recipe=recipe, run=run, base=base, policy=policy, prompts=prompts, label=recipe.stage_label(round, stage)
        )
        history = [*history, evaluated]
    return train_rounds(recipe=recipe, run=run, base=base, prompts=prompts, history=history, round=round + 1)


def online_stage(
    recipe: Recipe, run: TrackedRun, base: BaseModelArtifact, policy: TrainedPolicy, prompts: FlyteFile, round: int, stage: int
) -> TrainedPolicy:
    """Fresh samples, immediate updates: one task, in one process or on a Ray cluster."""
    config = recipe.stages[stage]
    assert config.kind == "online"
    train = train_online_ray if config.placement == "ray" else train_online
    return train(recipe=recipe, run=run, base=base, policy=policy, prompts=prompts, round=round, stage=stage)


def offline_stage(
    recipe: Recipe, run: TrackedRun, base: BaseModelArtifact, policy: TrainedPolicy, prompts: FlyteFile, round: int, stage: int
) -> TrainedPolicy:
    """A large batch generated and scored once in shards, or imported, then epochs over it on a group of processes."""
    config = recipe.stages[stage]
    assert config.kind == "offline"
    place: dict[str, Any] = {"recipe": recipe, "run": run, "round": round, "stage": stage}
    if config.pairs:
        prompts, rollouts, advantages = import_pairs(**place, base=base, prompts=prompts)
        return train_offline(**place, base=base, policy=policy, prompts=prompts, rollouts=rollouts, advantages=advantages)
    roll_out = partial(generate_rollouts, **place, base=base, policy=policy, prompts=prompts)
    rollouts = map_task(roll_out)(shard=list(range(config.shards)))
    scores = map_task(partial(score_rollouts, **place, prompts=prompts))(rollouts=rollouts)
    advantages = compute_advantages(**place, scores=scores)
    return train_offline(**place, base=base, policy=policy, prompts=prompts, rollouts=rollouts, advantages=advantages)
