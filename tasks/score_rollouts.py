"""Score one rollout shard on machines of its own; mapped over the shards."""

from __future__ import annotations

from flytekit import task
from flytekit.types.file import FlyteFile

from ebbflow.data.records import TrackedRun
from ebbflow.recipe import Recipe
from tasks.cache import ONCE_PER_RUN
from tasks.files import fetch_artifact, make_node_output
from tasks.resources import scorer_resources


@task(cache=ONCE_PER_RUN, **scorer_resources())
def score_rollouts(
    # First, because it is the input that is mapped over (``tasks.cache.map_over_values``).
    rollouts: FlyteFile,
    recipe: Recipe,
    run: TrackedRun,
    prompts: FlyteFile,
    round: int,
    stage: int,
) -> FlyteFile:
    """Score a shard (``score_schema``)."""
    from ebbflow.compute import require_requested_gpus, use_deterministic_kernels
    from ebbflow.data.prompts import read_prompts
    from ebbflow.offline.scoring import score_shard
    from ebbflow.rewards.combine import load_scorer
    from ebbflow.stage import StageContext
    from ebbflow.storage.tables import read_column, read_table_metadata
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.tracking.nodes import log_shard

    # Only where it is asked for: it loads torch, which not every reward needs.
    if recipe.deterministic:
        use_deterministic_kernels()
    require_requested_gpus()
    ctx = StageContext(recipe, round, stage)
    shard = fetch_artifact(rollouts)
    node = f"{ctx.stage_label} scoring {read_table_metadata(shard)['shard']}"
    path = make_node_output(run, node, "scores.parquet")
    with open_node_run(run, node) as run_logger:
        prompt_ids = set(read_column(shard, "prompt_id").to_pylist())
        shard_prompts = read_prompts(fetch_artifact(prompts), "train", prompt_ids)
        # Without guardrails, which are for evaluations.
        scorer = load_scorer(ctx.branch_recipe.rewards, ())
        score_shard(ctx, scorer, shard_prompts, shard, path)
        log_shard(run_logger, path)
    return FlyteFile(str(path))
