"""A rollout shard is read as it was written or is refused: damaged, of another stage, or with
latents that are none.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import strategies as st
from plain_cases import assert_readable, cases, damage, only_speaks_plainly

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS, build_rollout_schema
from ebbflow.evaluation.evaluate import evaluate_on_prompts
from ebbflow.models import load_model
from ebbflow.offline.rollouts import generate_shard
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.shards import (
    build_rollout_batch,
    build_shard_identity,
    check_shard,
    read_latents,
)
from ebbflow.offline.training import train_offline_folder
from ebbflow.rewards.combine import NO_PICTURE, RewardError
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import (
    TableError,
    read_batches,
    read_table,
    read_table_metadata,
    write_table,
)
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import write_base_policy


@pytest.fixture(scope="module")
def made(tmp_path_factory, base_folder, make_recipe, make_prompts):
    """A stage, its prompts and the bytes of a shard of it."""
    ctx = StageContext(make_recipe(), 0, 1)
    path = tmp_path_factory.mktemp("shard") / "rollouts.parquet"
    model = load_model(base_folder)
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    generate_shard(ctx, model, policy, 7, make_prompts(6), 0, path)
    return ctx, make_prompts(6), path.read_bytes()


@pytest.fixture
def shard(made, tmp_path):
    (tmp_path / "rollouts.parquet").write_bytes(made[2])
    return tmp_path / "rollouts.parquet"


@pytest.fixture
def score(made, scorer, tmp_path):
    ctx, prompts, _ = made

    def score(path: Path) -> pa.Table:
        score_shard(ctx, scorer, prompts, path, tmp_path / "scores.parquet")
        return read_table(tmp_path / "scores.parquet")

    return score


def known(prompts):
    return {prompt.prompt_id for prompt in prompts}


@cases(250, go_wrong=damage())
def test_a_damaged_shard_is_refused_or_reads_as_before(made, tmp_path, go_wrong):
    ctx, prompts, content = made
    good = tmp_path / "good.parquet"
    path = tmp_path / "rollouts.parquet"
    good.write_bytes(content)
    path.write_bytes(go_wrong(content))

    def everything():
        check_shard(ctx, path, known(prompts))
        return (
            read_table(path),
            read_latents(path),
            read_table_metadata(path),
            pa.Table.from_batches(read_batches(path, 3)),
        )

    read = only_speaks_plainly(everything, TableError, str(path))
    if read is not None:
        table, latents, about, batches = read
        expected = read_table(good)
        assert table.equals(expected)
        assert batches.equals(expected)
        assert torch.equal(latents, read_latents(good))
        assert about == read_table_metadata(good)


@cases(40, go_wrong=damage())
def test_a_damaged_shard_leaves_no_scores(made, tmp_path, scorer, go_wrong):
    ctx, prompts, content = made
    path = tmp_path / "rollouts.parquet"
    scores = tmp_path / "scores.parquet"
    path.write_bytes(go_wrong(content))
    scores.unlink(missing_ok=True)
    only_speaks_plainly(
        lambda: score_shard(ctx, scorer, prompts, path, scores), TableError, str(path)
    )
    assert {file.name for file in tmp_path.iterdir()} - {"rollouts.parquet"} <= {"scores.parquet"}


def rewritten(path: Path, about=None, columns=None, schema=None, **changed) -> Path:
    """The shard with other columns, or said to be something else."""
    table = read_table(path)
    schema = schema or table.schema.remove_metadata()
    values = {name: table[name].combine_chunks() for name in table.schema.names} | changed
    batch = pa.record_batch([values[name] for name in schema.names], schema=schema)
    write_table(path, schema, [batch], {**read_table_metadata(path), **(about or {})})
    return path


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("recipe_digest", "f" * 64),
        ("stage", "2.1 offline"),
        ("seed", 5),
        ("seed", None),
        ("stage", {"a": []}),
    ],
)
def test_a_shard_of_another_stage_is_refused_with_both(made, shard, score, key, value):
    with pytest.raises(TableError) as error:
        score(rewritten(shard, about={key: value}))
    assert_readable(
        str(error.value),
        str(shard),
        f"{key} = {value!r}",
        repr(build_shard_identity(made[0])[key]),
        "generate it",
    )
    assert not (shard.parent / "scores.parquet").exists()


def test_training_refuses_it_too(made, shard, base_folder, tmp_path):
    ctx, prompts, _ = made
    rows = [{**vars(prompt)} for prompt in prompts]
    write_prompts(pa.Table.from_pylist(rows, schema=PROMPTS), tmp_path / "prompts.parquet")
    write_base_policy(tmp_path / "policy", verify_folder(base_folder), "recipe", ctx.recipe.policy)
    rewritten(shard, about={"stage": "1.1 offline"})
    trained = tmp_path / "trained"
    folders = StageFolders(base_folder, tmp_path / "policy", tmp_path / "prompts.parquet", trained)
    with pytest.raises(
        TableError, match=r"stage = '1\.1 offline' \(this stage's: '1\.2 offline'\)"
    ):
        train_offline_folder(ctx, folders, [shard], tmp_path / "none.parquet", MetricsRecorder())
    assert not trained.exists()


def without(schema: pa.Schema, name: str) -> pa.Schema:
    return schema.remove(schema.get_field_index(name))


@pytest.mark.parametrize("name", build_rollout_schema((1, 16, 32)).names)
def test_a_column_that_is_missing_is_named(shard, score, name):
    schema = without(read_table(shard).schema.remove_metadata(), name)
    with pytest.raises(TableError, match=r"should have\n.*" + name) as error:
        score(rewritten(shard, schema=schema))
    assert_readable(str(error.value), str(shard))


def test_latents_of_another_shape_are_refused_with_both(made, shard):
    ctx, prompts, _ = made
    with pytest.raises(TableError) as error:
        check_shard(ctx, shard, known(prompts), (4, 8, 8))
    assert_readable(str(error.value), str(shard), "(4, 8, 8)", "(1, 16, 32)")


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float32()), pa.binary(), pa.binary(2044), pa.float32()]
)
def test_latents_that_are_no_tensors_are_refused(shard, score, kind):
    schema = read_table(shard).schema.remove_metadata()
    schema = schema.set(schema.get_field_index("latent"), pa.field("latent", kind, nullable=False))
    value = {
        pa.list_(pa.float32()): [0.5],
        pa.binary(): b"x",
        pa.binary(2044): b"x" * 2044,
        pa.float32(): 0.5,
    }[kind]
    with pytest.raises(TableError, match="has the columns"):
        score(rewritten(shard, schema=schema, latent=pa.array([value] * 8, kind)))


def test_a_prompt_that_the_run_has_not_is_named(shard, score):
    ids = pa.array([99, *read_table(shard)["prompt_id"].to_pylist()[1:]], pa.int64())
    with pytest.raises(TableError, match=r"prompt_id = 99, and the run's prompts have none"):
        score(rewritten(shard, prompt_id=ids))


@pytest.mark.parametrize("image", [b"", b"no picture", b"\x89PNG\r\n\x1a\n"])
def test_an_image_that_is_none_is_named(shard, score, image):
    images = pa.array([image, *read_table(shard)["image"].to_pylist()[1:]], pa.binary())
    with pytest.raises(TableError) as error:
        score(rewritten(shard, image=images))
    assert_readable(str(error.value), str(shard), "cannot be read")


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        ({}, "was not written by Ebbflow"),
        ({"ebbflow": "{}"}, "does not match its sha256"),
        ({"ebbflow": "{", "ebbflow.sha256": "0" * 64}, "does not match its sha256"),
    ],
)
def test_metadata_that_was_tampered_with(shard, score, metadata, says):
    table = read_table(shard)
    with pq.ParquetWriter(shard, table.schema.remove_metadata()) as writer:
        writer.write_table(table.replace_schema_metadata(None))
        writer.add_key_value_metadata(metadata)
    with pytest.raises(TableError, match=says):
        score(shard)


# What a model that gives no numbers leaves behind.


def spoilt(shard: Path, rows: list[int], value: float) -> Path:
    latents = read_latents(shard)
    table = read_table(shard)
    for row in rows:
        latents[row].view(-1)[row] = value
    columns = [table[name].to_pylist() for name in ("prompt_id", "sample", "image")]
    batch = build_rollout_batch(*columns[:2], 7, latents, columns[2], "float32")
    return rewritten(shard, latent=batch["latent"], finite=batch["finite"])


@cases(
    25,
    rows=st.lists(st.integers(0, 7), unique=True, max_size=7),
    value=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_a_latent_that_is_not_finite_is_masked_and_counted(
    made, scorer, make_recipe, tmp_path, rows, value
):
    ctx, prompts, content = made
    (tmp_path / "rollouts.parquet").write_bytes(content)
    score_shard(ctx, scorer, prompts, tmp_path / "rollouts.parquet", tmp_path / "good.parquet")
    shard = spoilt(tmp_path / "rollouts.parquet", rows, value)
    good = read_table(tmp_path / "good.parquet").to_pylist()
    lenient = ctx.recipe.model_copy(update={"max_failed_share": 0.99})
    rewritten(shard, about=build_shard_identity(StageContext(lenient, 0, 1)))
    score_shard(StageContext(lenient, 0, 1), scorer, prompts, shard, tmp_path / "scores.parquet")
    for index, (row, before) in enumerate(
        zip(read_table(tmp_path / "scores.parquet").to_pylist(), good, strict=True)
    ):
        if index in rows:
            assert (row["reward"], row["darkness"], row["brightness"], row["failure"]) == (
                None,
                None,
                None,
                NO_PICTURE,
            )
        else:
            assert row == before


def test_too_many_of_them_stop_the_stage(shard, score):
    with pytest.raises(
        RewardError, match=rf"1 of 8 images .*max_failed_share = 5\.0% .*: {NO_PICTURE}"
    ):
        score(spoilt(shard, [3], np.nan))


@pytest.fixture
def blind(model, monkeypatch):
    """The model, whose network gives NaN for every sample that is not the first of its batch."""
    velocity = model.predict_velocity

    def broken(latents, sigma, conditioning):
        found = velocity(latents, sigma, conditioning).clone()
        found[1:] = np.nan
        return found

    monkeypatch.setattr(model, "predict_velocity", broken)
    return model


def test_a_network_that_gives_nan_is_never_scored_as_if_it_drew(made, blind, scorer, tmp_path):
    ctx, prompts, _ = made
    policy = Policy(blind, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    generate_shard(ctx, blind, policy, 7, prompts, 0, tmp_path / "rollouts.parquet")
    with pytest.raises(RewardError, match=f"7 of 8 images .*{NO_PICTURE}"):
        score_shard(
            ctx, scorer, prompts, tmp_path / "rollouts.parquet", tmp_path / "scores.parquet"
        )
    assert not (tmp_path / "scores.parquet").exists()


def test_nor_is_it_in_an_evaluation(made, blind, scorer, make_prompts, tmp_path):
    recipe = made[0].recipe
    prompts = [*make_prompts(2, "validation"), *make_prompts(4, "held_out")]
    policy = Policy(blind, recipe.policy, 0)
    found = evaluate_on_prompts(
        recipe, blind, policy, 0, scorer, prompts, "blind", tmp_path / "samples.parquet"
    )
    rows = read_table(tmp_path / "samples.parquet").to_pylist()
    assert [row["failure"] for row in rows] == [None] + [NO_PICTURE] * 5
    assert found.coverage == 0
    assert "reward" not in found.held_out
    json.loads(found.model_dump_json())


def test_a_table_that_fails_in_the_middle_leaves_no_file(tmp_path, made):
    schema = build_rollout_schema((1, 16, 32))

    def batches():
        (tmp_path / "seen").touch()
        yield pa.RecordBatch.from_pylist([], schema)
        assert not (tmp_path / "rollouts.parquet").exists()
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        write_table(tmp_path / "rollouts.parquet", schema, batches(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]
