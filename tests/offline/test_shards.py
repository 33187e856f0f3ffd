"""Rollout shards and their scores: what an offline stage stores and reads."""

from __future__ import annotations

import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from ebbflow.data.images import decode_pngs, encode_pngs
from ebbflow.data.schema import build_rollout_schema, build_score_schema
from ebbflow.flow.noise import SampleKeys
from ebbflow.offline.rollouts import choose_shard_prompts, generate_shard
from ebbflow.offline.scoring import score_shard
from ebbflow.offline.shards import (
    build_layout_metadata,
    build_rollout_batch,
    decode_latent,
    read_latent_parts,
    read_latents,
    read_layout,
)
from ebbflow.rewards.combine import RewardError
from ebbflow.rollouts.generate import Rollouts, generate_samples
from ebbflow.stage import StageContext
from ebbflow.storage.tables import (
    TableError,
    nan_to_null,
    read_table,
    read_table_metadata,
    write_table,
)
from ebbflow.training.policy import Policy


@pytest.fixture
def ctx(make_recipe):
    return StageContext(make_recipe(), round=1, stage=1)


@pytest.fixture
def policy(model, ctx):
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    return policy


@pytest.fixture
def shards(ctx, model, policy, make_prompts, tmp_path):
    """Both rollout shards of the stage, over four of six prompts."""
    paths = [tmp_path / f"rollouts-{shard}.parquet" for shard in range(2)]
    for shard, path in enumerate(paths):
        generate_shard(ctx, model, policy, 7, make_prompts(6), shard, path)
    return paths


@given(
    arrays.arrays(
        np.uint8, st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 9), st.just(3))
    )
)
def test_png_round_trip_is_lossless(images):
    assert np.array_equal(decode_pngs(encode_pngs(images)), images)


def test_shards_hold_every_group_of_the_stage_once(ctx, model, shards):
    tables = [read_table(path, build_rollout_schema(model.latent_shape)) for path in shards]
    keys = [
        list(zip(table["prompt_id"].to_pylist(), table["sample"].to_pylist(), strict=True))
        for table in tables
    ]
    assert [len(part) for part in keys] == [8, 8]
    together = sorted(keys[0] + keys[1])
    prompt_ids = sorted({prompt_id for prompt_id, _ in together})
    assert len(prompt_ids) == 4
    assert together == [(prompt_id, sample) for prompt_id in prompt_ids for sample in range(4)]
    assert {version for table in tables for version in table["policy_version"].to_pylist()} == {7}


def test_ids_lead_to_the_same_shards_as_prompts(ctx, make_prompts):
    prompts = make_prompts(6)
    for shard in range(2):
        chosen = [prompt.prompt_id for prompt in choose_shard_prompts(ctx, prompts, shard)]
        assert choose_shard_prompts(ctx, [prompt.prompt_id for prompt in prompts], shard) == chosen


def test_latents_and_images_are_those_of_the_engine(ctx, model, shards, make_prompts):
    for path in shards:
        table = read_table(path)
        keys = SampleKeys(
            ctx.stage_seed, table["prompt_id"].to_pylist(), table["sample"].to_pylist()
        )
        texts = [make_prompts(6)[prompt_id].prompt for prompt_id in keys.prompt_ids]
        expected = generate_samples(
            model, model.encode_texts(texts), keys, ctx.config.sampler, micro_batch=8
        ).latents
        latents = read_latents(path)
        assert latents.dtype == torch.float32
        assert torch.allclose(latents, expected, rtol=0, atol=1e-5)
        assert np.array_equal(
            decode_pngs(table["image"].to_pylist()), model.decode_latents(latents)
        )


def test_images_are_compressed_while_the_next_micro_batch_is_generated(
    make_recipe, model, make_prompts, tmp_path, monkeypatch
):
    ctx = StageContext(make_recipe(offline={"prompts": 4, "shards": 1, "micro_batch": 4}), 1, 1)
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    second_has_begun = threading.Event()
    num_decoded = 0
    decode_latents = type(model).decode_latents

    def decode_and_tell(self, latents):
        nonlocal num_decoded
        num_decoded += 1
        if num_decoded == 2:
            second_has_begun.set()
        return decode_latents(self, latents)

    def encode_once_the_next_is_generated(pictures):
        assert second_has_begun.wait(60), "the images are waited for before the next micro-batch"
        return encode_pngs(pictures)

    monkeypatch.setattr(type(model), "decode_latents", decode_and_tell)
    monkeypatch.setattr("ebbflow.offline.rollouts.encode_pngs", encode_once_the_next_is_generated)
    generate_shard(ctx, model, policy, 7, make_prompts(6), 0, tmp_path / "rollouts.parquet")
    assert num_decoded == 4
    assert len(read_latents(tmp_path / "rollouts.parquet")) == 16


def test_a_failure_to_write_ends_the_shard_and_leaves_no_file(
    make_recipe, model, make_prompts, tmp_path, monkeypatch
):
    def fail(pictures):
        raise OSError("no room")

    ctx = StageContext(make_recipe(offline={"prompts": 4, "shards": 1, "micro_batch": 4}), 1, 1)
    policy = Policy(model, ctx.recipe.policy, 0)
    policy.ensure_copy("old")
    monkeypatch.setattr("ebbflow.offline.rollouts.encode_pngs", fail)
    with pytest.raises(OSError, match="no room"):
        generate_shard(ctx, model, policy, 7, make_prompts(6), 0, tmp_path / "rollouts.parquet")
    assert list(tmp_path.iterdir()) == []


def test_the_old_copy_generates(ctx, model, policy, shards, make_prompts, tmp_path):
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter += 0.05
    generate_shard(ctx, model, policy, 7, make_prompts(6), 0, tmp_path / "again.parquet")
    assert torch.equal(read_latents(tmp_path / "again.parquet"), read_latents(shards[0]))
    policy.snapshot_copy("old")
    generate_shard(ctx, model, policy, 7, make_prompts(6), 0, tmp_path / "later.parquet")
    assert not torch.allclose(
        read_latents(tmp_path / "later.parquet"), read_latents(shards[0]), atol=1e-2
    )


def test_stages_and_rounds_share_no_noise(ctx, model, policy, shards, make_prompts, tmp_path):
    generate_shard(
        StageContext(ctx.recipe, 2, 1),
        model,
        policy,
        7,
        make_prompts(6),
        0,
        tmp_path / "other.parquet",
    )
    ours, others = (
        read_latents(path).flatten(1) for path in (shards[0], tmp_path / "other.parquet")
    )
    assert torch.cdist(ours, others).min() > 0.1


def test_a_shard_says_what_made_it(ctx, shards):
    said = read_table_metadata(shards[1])
    assert said["recipe_digest"] == ctx.recipe.digest
    assert (said["stage"], said["shard"], said["seed"], said["micro_batch"]) == (
        "2.2 offline",
        1,
        ctx.stage_seed,
        8,
    )
    assert (said["sampler"]["name"], said["dtype"]) == ("ode", "float32")
    assert said["seconds"]["rollout"] > 0


def test_rougher_rollouts_are_rougher_and_say_so(
    make_recipe, model, policy, shards, make_prompts, tmp_path
):
    rough = StageContext(make_recipe(offline={"rollout_precision": "bfloat16"}), 1, 1)
    generate_shard(rough, model, policy, 7, make_prompts(6), 0, tmp_path / "rough.parquet")
    assert read_table_metadata(tmp_path / "rough.parquet")["dtype"] == "bfloat16"
    exact = read_latents(shards[0])
    found = read_latents(tmp_path / "rough.parquet")
    assert 1e-4 < (found - exact).abs().max() < 0.5


def test_a_cut_shard_is_refused(shards):
    content = shards[0].read_bytes()
    shards[0].write_bytes(content[: len(content) // 2])
    with pytest.raises(TableError, match="no whole Parquet file"):
        read_latents(shards[0])


def test_an_exception_while_generating_leaves_nothing(
    ctx, model, policy, make_prompts, tmp_path, monkeypatch
):
    calls = []

    def decode(latents):
        calls.append(len(latents))
        if len(calls) == 2:
            raise RuntimeError("the second batch")
        return type(model).decode_latents(model, latents)

    monkeypatch.setattr(model, "decode_latents", decode)
    wide = StageContext(
        ctx.recipe.model_copy(update={"stages": [ctx.config.model_copy(update={"shards": 1})] * 2}),
        0,
        1,
    )
    with pytest.raises(RuntimeError, match="the second batch"):
        generate_shard(wide, model, policy, 0, make_prompts(6), 0, tmp_path / "broken.parquet")
    assert not list(tmp_path.iterdir())


def test_scores_are_those_of_the_stored_images(ctx, scorer, shards, make_prompts, tmp_path):
    score_shard(ctx, scorer, make_prompts(6), shards[0], tmp_path / "scores.parquet")
    scores = read_table(tmp_path / "scores.parquet", build_score_schema(["brightness", "darkness"]))
    rollouts = read_table(shards[0])
    expected = 1 - decode_pngs(rollouts["image"].to_pylist()).mean((1, 2, 3)) / 255
    for name in ("prompt_id", "sample"):
        assert scores[name].to_pylist() == rollouts[name].to_pylist()
    assert scores["reward"].to_pylist() == pytest.approx(expected, abs=1e-12)
    assert scores["brightness"].to_pylist() == pytest.approx(1 - expected, abs=1e-12)
    assert scores["failure"].null_count == 8
    said = read_table_metadata(tmp_path / "scores.parquet")
    assert (said["stage"], said["shard"], said["recipe_digest"]) == (
        "2.2 offline",
        0,
        ctx.recipe.digest,
    )
    assert said["seconds"].keys() == {"scoring"}


def with_failures(prompts, ids):
    return [type(p)(**{**vars(p), "target": "FAIL"}) if p.prompt_id in ids else p for p in prompts]


def test_failed_scores_are_null_and_counted_never_a_number(
    make_recipe, model, policy, scorer, make_prompts, tmp_path
):
    ctx = StageContext(make_recipe(max_failed_share=0.5), 1, 1)
    shard = tmp_path / "rollouts.parquet"
    generate_shard(ctx, model, policy, 7, make_prompts(6), 0, shard)
    lost = read_table(shard)["prompt_id"][0].as_py()
    score_shard(
        ctx, scorer, with_failures(make_prompts(6), {lost}), shard, tmp_path / "scores.parquet"
    )
    scores = read_table(tmp_path / "scores.parquet").to_pylist()
    assert sum(row["reward"] is None for row in scores) == 4
    for row in scores:
        failed = row["prompt_id"] == lost
        assert (row["reward"] is None) == (row["darkness"] is None) == failed
        assert row["failure"] == ("darkness: made to fail" if failed else None)


def test_too_many_failures_stop_the_stage(
    make_recipe, model, policy, scorer, make_prompts, tmp_path
):
    ctx = StageContext(make_recipe(max_failed_share=0.49), 1, 1)
    shard = tmp_path / "rollouts.parquet"
    generate_shard(ctx, model, policy, 7, make_prompts(6), 0, shard)
    lost = read_table(shard)["prompt_id"][0].as_py()
    with pytest.raises(
        RewardError,
        match=r"4 of 8 images \(50\.0%\).*max_failed_share = 49\.0%.*darkness: made to fail",
    ):
        score_shard(
            ctx, scorer, with_failures(make_prompts(6), {lost}), shard, tmp_path / "scores.parquet"
        )
    assert not (tmp_path / "scores.parquet").exists()


@given(
    st.lists(
        st.one_of(st.floats(allow_nan=False, allow_infinity=False), st.just(float("nan"))),
        max_size=10,
    )
)
def test_not_scored_is_null(values):
    column = nan_to_null(np.array(values, np.float64))
    assert column.type == pa.float64()
    assert column.to_pylist() == [None if np.isnan(value) else value for value in values]


@pytest.fixture
def film(model, monkeypatch):
    """The model as one of videos: latents [C, frames, H, W], three frames that know nothing of each
    other.
    """
    velocity, decode, (channels, height, width) = (
        model.predict_velocity,
        model.decode_latents,
        model.latent_shape,
    )

    def of_frames(latents, sigma, conditioning):
        return torch.stack(
            [velocity(latents[:, :, frame], sigma, conditioning) for frame in range(3)], 2
        )

    def to_videos(latents):
        return np.stack([decode(latents[:, :, frame]) for frame in range(3)], 1)

    monkeypatch.setattr(model, "latent_shape", (channels, 3, height, width))
    monkeypatch.setattr(model, "predict_velocity", of_frames)
    monkeypatch.setattr(model, "decode_latents", to_videos)
    return model


def test_a_shard_of_videos_holds_their_latents_and_every_frame(
    ctx, film, policy, scorer, make_prompts, tmp_path
):
    rollouts = tmp_path / "rollouts.parquet"
    generate_shard(ctx, film, policy, 7, make_prompts(6), 0, rollouts)
    table = read_table(rollouts, build_rollout_schema(film.latent_shape))
    keys = SampleKeys(ctx.stage_seed, table["prompt_id"].to_pylist(), table["sample"].to_pylist())
    conditioning = film.encode_prompts(
        [make_prompts(6)[prompt_id] for prompt_id in keys.prompt_ids]
    )
    expected = generate_samples(film, conditioning, keys, ctx.config.sampler, micro_batch=8).latents
    latents = read_latents(rollouts)
    assert latents.shape == (8, *film.latent_shape)
    assert torch.allclose(latents, expected, rtol=0, atol=1e-5)
    videos = decode_pngs(table["image"].to_pylist())
    assert videos.shape == (8, 3, *film.latent_shape[2:], 3)
    assert np.array_equal(videos, film.decode_latents(latents))

    score_shard(ctx, scorer, make_prompts(6), rollouts, tmp_path / "scores.parquet")
    darkness = 1 - videos.mean((1, 2, 3, 4)) / 255
    assert read_table(tmp_path / "scores.parquet")["reward"].to_pylist() == pytest.approx(
        darkness, abs=1e-12
    )


def test_how_latents_lie_in_memory_makes_no_difference(
    ctx, model, policy, shards, make_prompts, tmp_path, monkeypatch
):
    def turned(*arguments, **options):
        return Rollouts(generate_samples(*arguments, **options).latents.mT.contiguous().mT, None)

    monkeypatch.setattr("ebbflow.rollouts.generate.generate_samples", turned)
    generate_shard(ctx, model, policy, 7, make_prompts(6), 0, tmp_path / "turned.parquet")
    assert torch.equal(read_latents(tmp_path / "turned.parquet"), read_latents(shards[0]))


@pytest.mark.parametrize("shape", [(4,), (2, 3), (3, 4, 5), (3, 1, 4, 5), (16, 3, 4, 5)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_latents_of_any_rank_survive_the_round_trip(shape, precision, tmp_path):
    latents = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    path = stored(tmp_path, latents, precision)
    read_table(path, build_rollout_schema(shape, precision))
    assert torch.equal(read_latents(path), latents.to(getattr(torch, precision)).float())
    layout, (value, _) = read_layout(path), read_table(path)["latent"].to_pylist()
    assert np.array_equal(decode_latent(layout, value), read_latents(path)[0].numpy())


def stored(folder, latents, precision="float32", at_once=3):
    """A shard with these latents in row groups of ``at_once``."""
    path = folder / "rollouts.parquet"
    batches = []
    for start in range(0, len(latents), at_once):
        rows = range(start, min(start + at_once, len(latents)))
        batches.append(
            build_rollout_batch(
                rows, rows, 0, latents[start : start + at_once], [b""] * len(rows), precision
            )
        )
    shape = latents.shape[1:]
    write_table(
        path,
        build_rollout_schema(shape, precision),
        batches,
        build_layout_metadata(shape, precision),
    )
    return path


@pytest.mark.any_cpu
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@given(data=st.data())
def test_the_latents_of_any_rows_are_read_in_the_order_asked_for(tmp_path_factory, precision, data):
    latents = torch.arange(10.0).view(10, 1, 1).expand(10, 2, 3)
    path = stored(tmp_path_factory.mktemp("shard"), latents, precision)
    rows = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=5), max_size=4))
    found = read_latent_parts(path, [np.array(part, np.int64) for part in rows])
    assert [part[:, 0, 0].tolist() for part in found] == rows
    assert all(part.shape == (len(asked), 2, 3) for part, asked in zip(found, rows, strict=True))
    assert all(part.dtype == getattr(torch, precision) for part in found)


def test_only_row_groups_with_rows_that_are_wanted_are_read(tmp_path, monkeypatch):
    path = stored(tmp_path, torch.zeros(9, 2))
    groups = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda *a, **kw: groups.append(a[1]) or read(*a, **kw)
    )
    read_latent_parts(path, [np.array([8]), np.array([0, 7])])
    assert groups == [0, 2]


def test_reading_stops_when_it_is_told_to(tmp_path, monkeypatch):
    path = stored(tmp_path, torch.zeros(9, 2))
    groups = []
    read = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile, "read_row_group", lambda *a, **kw: groups.append(a[1]) or read(*a, **kw)
    )
    read_latent_parts(path, [np.arange(9)], stopped=lambda: len(groups) == 2)
    assert groups == [0, 1]


def test_a_row_that_the_shard_has_not_is_an_error(tmp_path):
    with pytest.raises(TableError, match="has 4 rows, and row 4 is asked for"):
        read_latent_parts(stored(tmp_path, torch.zeros(4, 2)), [np.array([0, 4])])


def test_latents_have_no_dictionary_and_no_statistics(tmp_path):
    with pq.ParquetFile(stored(tmp_path, torch.zeros(9, 64))) as file:
        columns = {
            name: file.metadata.row_group(0).column(index)
            for index, name in enumerate(file.schema_arrow.names)
        }
    for name in ("latent", "image"):
        assert not columns[name].has_dictionary_page
        assert not columns[name].is_stats_set
    assert {column.compression for column in columns.values()} == {"ZSTD"}
    assert columns["prompt_id"].is_stats_set


def test_scoring_decodes_no_latents(ctx, scorer, shards, make_prompts, tmp_path, monkeypatch):
    columns = []
    read = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda *a, **kw: columns.append(kw["columns"]) or read(*a, **kw),
    )
    score_shard(ctx, scorer, make_prompts(6), shards[0], tmp_path / "scores.parquet")
    assert columns == [["prompt_id", "sample", "finite", "image"]]


def test_a_shard_of_an_older_layout_is_named_with_the_way_to_renew_it(
    ctx, scorer, shards, make_prompts, tmp_path
):
    table = read_table(shards[0])
    said = read_table_metadata(shards[0])
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(read_latents(shards[0]).numpy())
    index = table.schema.get_field_index("latent")
    old = table.set_column(
        index, pa.field("latent", tensors.type, nullable=False), tensors
    ).drop_columns(["finite"])
    del said["layout"]
    write_table(shards[0], old.schema, old.combine_chunks().to_batches(), said)
    with pytest.raises(
        TableError,
        match=(
            r"has rollouts of layout 1, and this version of Ebbflow reads layout 2; generate them"
        ),
    ):
        score_shard(ctx, scorer, make_prompts(6), shards[0], tmp_path / "scores.parquet")


def test_rounded_latents_are_a_key_of_the_recipe(
    make_recipe, model, policy, shards, make_prompts, tmp_path
):
    rounded = StageContext(make_recipe(offline={"latent_precision": "bfloat16"}), 1, 1)
    generate_shard(rounded, model, policy, 7, make_prompts(6), 0, tmp_path / "rounded.parquet")
    found = read_latents(tmp_path / "rounded.parquet")
    exact = read_latents(shards[0])
    assert torch.equal(found, exact.bfloat16().float())
    assert not torch.equal(found, exact)
    assert read_table(tmp_path / "rounded.parquet")["image"].equals(read_table(shards[0])["image"])
