"""Offline stages whose shards have images of several sizes."""

from __future__ import annotations

import pyarrow as pa
import pytest

from benchmarks.tiny_models import build_tiny
from ebbflow.data.images import decode_pngs
from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.models import ModelError
from ebbflow.offline.advantages import write_advantages
from ebbflow.offline.rollouts import generate_shard_from_folders
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.shards import choose_image_size, read_image_size, read_layout
from ebbflow.offline.training import train_offline_folder
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder, write_new_folder
from ebbflow.storage.tables import TableError, read_table
from ebbflow.training import passes, update
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.policy_metadata import write_base_policy
from tests.glyph_stages import small_stage

SIZES = [{"height": 32, "width": 64}, {"height": 64, "width": 32, "weight": 2}]
OFFLINE = {
    "kind": "offline",
    "prompts": 6,
    "shards": 3,
    "epochs": 2,
    "group_size": 2,
    "batch_size": 4,
    "micro_batch": 4,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "flux"
    with write_new_folder(folder) as unfinished:
        build_tiny("flux", unfinished)
    return folder


def context(base, **stage):
    model = {"family": "flux", "path": str(base), "height": 64, "width": 64, "max_tokens": 8}
    stages = [
        small_stage(
            OFFLINE | {"sampler": {"steps": 3}, "sizes": SIZES, "checkpoints": {"every": 2}} | stage
        )
    ]
    policy = {"train": "lora", "rank": 2, "alpha": 2}
    return StageContext(
        Recipe.model_validate({"model": model, "policy": policy, "stages": stages}), 0, 0
    )


@pytest.fixture(scope="module")
def stored(base, make_prompts, scorer, tmp_path_factory):
    """(stage, folder with its prompts, starting policy, shards and advantages)."""
    ctx = context(base)
    folder = tmp_path_factory.mktemp("stage")
    prompts = make_prompts(6)
    write_prompts(
        pa.Table.from_pylist([vars(p) for p in prompts], PROMPTS), folder / "prompts.parquet"
    )
    write_base_policy(
        folder / "start",
        verify_folder(base),
        ctx.recipe.digest,
        ctx.recipe.policy,
        ctx.recipe.model,
    )
    for shard in range(3):
        rollouts = folder / f"rollouts-{shard}.parquet"
        scores = folder / f"scores-{shard}.parquet"
        generate_shard_from_folders(
            ctx, base, folder / "start", folder / "prompts.parquet", shard, rollouts
        )
        score_shard(ctx, scorer, prompts, rollouts, scores)
    write_advantages(ctx, sorted(folder.glob("scores-*")), folder / "advantages.parquet")
    return ctx, folder


def train(ctx, base, folder, trained, checkpoints=None, rollouts=None, **rest):
    tables = [folder / f"{name}.parquet" for name in ("prompts", "advantages")]
    rollouts = rollouts or sorted(folder.glob("rollouts-*"))
    recorder = MetricsRecorder()
    train_offline_folder(
        ctx,
        StageFolders(base, folder / "start", tables[0], trained),
        rollouts,
        tables[1],
        recorder,
        checkpoints,
        **rest,
    )
    return [row["loss"] for row in recorder.metrics_rows]


@pytest.mark.any_cpu
def test_a_shard_has_one_size_by_its_weight(stored):
    ctx, folder = stored
    for shard, size in enumerate([(32, 64), (64, 32), (64, 32)]):
        path = folder / f"rollouts-{shard}.parquet"
        assert read_image_size(ctx, path) == choose_image_size(ctx, shard) == size
        assert decode_pngs(read_table(path)["image"].to_pylist()).shape[1:3] == size
        assert read_layout(path).shape[1] * size[1] == read_layout(path).shape[2] * size[0]


@pytest.mark.any_cpu
def test_a_stage_trains_on_each_shard_in_its_size_and_resumes_exactly(
    stored, base, tmp_path, monkeypatch
):
    ctx, folder = stored
    predict = passes.predict
    seen = []

    def watched(model, latents, *rest):
        seen.append((tuple(latents.shape[2:]), (model.height, model.width)))
        return predict(model, latents, *rest)

    monkeypatch.setattr(passes, "predict", watched)
    losses = train(ctx, base, folder, tmp_path / "whole")
    assert {size for _, size in seen} == {(32, 64), (64, 32)}
    assert all(shape[0] * size[1] == shape[1] * size[0] for shape, size in seen)

    class Killed(Exception):
        """What the test ends a stage with."""

    step = update.PolicyUpdater.update_policy

    def doomed(updater, *arguments):
        if updater.updates == 3:
            raise Killed
        return step(updater, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(update.PolicyUpdater, "update_policy", doomed)
        with pytest.raises(Killed):
            train(ctx, base, folder, tmp_path / "killed", Checkpoints(ctx, tmp_path / "kept"))
    assert (
        train(ctx, base, folder, tmp_path / "resumed", Checkpoints(ctx, tmp_path / "kept"))
        == losses
    )
    assert verify_folder(tmp_path / "resumed") == verify_folder(tmp_path / "whole")


def test_a_shard_of_another_size_is_refused(stored, base, tmp_path):
    ctx, folder = stored
    other = context(base, sizes=SIZES[::-1])
    recipe = ctx.recipe.model_copy(update={"stages": other.recipe.stages})
    with pytest.raises(TableError, match="has latents of shape .*; generate it again"):
        train(StageContext(recipe, 0, 0), base, folder, tmp_path / "policy")


def test_processes_that_share_tokens_take_one_size(stored, base, tmp_path):
    ctx, folder = stored
    with pytest.raises(ModelError, match="train_context_parallel = 2 is for stages of one size"):
        train(ctx, base, folder, tmp_path / "policy", context_parallel=2)


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"shards": 1}, "shards = 1 leaves none for 32 x 64"),
        ({"pairs": "pairs.jsonl"}, "pairs has images already"),
    ],
)
def test_what_has_no_sizes(base, stage, message):
    with pytest.raises(RecipeError, match=message):
        context(base, **stage)
