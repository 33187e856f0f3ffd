"""Captioned data becomes what an offline stage trains on: latents by bucket, shared by digest."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from benchmarks.tiny_models import build_tiny
from ebbflow.algorithms.built_in.sft import ALGORITHM, SFTConfig
from ebbflow.data.captioned import DataError
from ebbflow.data.prompts import read_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.flow.noise import SampleKeys
from ebbflow.models import load_model
from ebbflow.models.base import Conditioning
from ebbflow.offline import batches
from ebbflow.offline.data import describe_encoding, encode_data, import_data
from ebbflow.offline.shards import read_image_size, read_latents
from ebbflow.offline.training import train_offline_folder
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder, write_new_folder
from ebbflow.storage.tables import TableError, read_column, read_table, write_table
from ebbflow.training import update
from ebbflow.training.batches import build_forward_batch
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.policy_metadata import write_base_policy
from tests.glyph_stages import small_stage

SIZES = [(70, 70)] * 4 + [(90, 40)] * 3 + [(40, 100)] * 3 + [(20, 20)]
"""Width and height of the pictures: squares, wide ones, tall ones, and one that is too small."""
DATA = {
    "kind": "offline",
    "algorithm": {"name": "sft", "noise_levels": 1, "sigma": {"kind": "schedule"}},
    "sampler": {"name": "ode", "steps": 1000},
    "epochs": 2,
    "batch_size": 2,
    "micro_batch": 2,
    "checkpoints": {"every": 2},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "flux"
    with write_new_folder(folder) as unfinished:
        build_tiny("flux", unfinished)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "photos"
    folder.mkdir()
    draw = np.random.default_rng(0)
    rows = []
    for number, (width, height) in enumerate(SIZES):
        Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8)).save(
            folder / f"{number}.png"
        )
        rows.append(json.dumps({"file_name": f"{number}.png", "text": f"picture {number}"}))
    (folder / "metadata.jsonl").write_text("\n".join(rows))
    return folder


def context(base, photos, data=None, **stage):
    model = {"family": "flux", "path": str(base), "height": 64, "width": 64, "max_tokens": 8}
    data = {"path": str(photos), "buckets": {"step": 32}} | (data or {})
    stages = [small_stage(DATA | {"data": data} | stage)]
    policy = {"train": "lora", "rank": 2, "alpha": 2}
    return StageContext(
        Recipe.model_validate({"model": model, "policy": policy, "stages": stages}), 0, 0
    )


def write_prompt_table(path, make_prompts, held_out="Picture 4."):
    prompts = [asdict(p) for p in make_prompts(2)]
    prompts.append(asdict(replace(make_prompts(3)[2], prompt=held_out, split="held_out")))
    write_table(path, PROMPTS, [pa.RecordBatch.from_pylist(prompts, PROMPTS)], {})
    return path


def prepare(ctx, base, photos, make_prompts, folder):
    """(imported tables, shards) of the stage."""
    folder.mkdir(exist_ok=True)
    prompts = write_prompt_table(folder / "run-prompts.parquet", make_prompts)
    config = ctx.config.captioned_data
    with pytest.warns(UserWarning, match="on prompts of the evaluation 1"):
        imported = import_data(ctx, config, photos, base, prompts, folder)
    model = load_model(base, ctx.recipe.model)
    with pytest.warns(UserWarning, match="of 11 pictures left out: 1 smaller than their size"):
        shards = encode_data(ctx, config, model, photos, imported.encoding, folder / "latents")
    return imported, shards


@pytest.fixture(scope="module")
def prepared(base, photos, make_prompts, tmp_path_factory):
    ctx = context(base, photos)
    folder = tmp_path_factory.mktemp("stage")
    (folder / "latents").mkdir()
    imported, shards = prepare(ctx, base, photos, make_prompts, folder)
    write_base_policy(
        folder / "start",
        verify_folder(base),
        ctx.recipe.digest,
        ctx.recipe.policy,
        ctx.recipe.model,
    )
    return ctx, folder, imported, shards


def train(prepared, base, trained, checkpoints=None, shards=None):
    ctx, folder, imported, own_shards = prepared
    recorder = MetricsRecorder()
    record = train_offline_folder(
        ctx,
        StageFolders(base, folder / "start", imported.prompts, trained),
        shards or own_shards,
        imported.advantages,
        recorder,
        checkpoints,
    )
    return record, [row["loss"] for row in recorder.metrics_rows]


def test_every_picture_is_a_prompt_and_evaluated_ones_are_not_trained_on(prepared):
    _, _, imported, _ = prepared
    prompts = read_prompts(imported.prompts, "train")
    assert [(p.prompt_id, p.prompt) for p in prompts] == [
        (number, f"picture {number}") for number in range(11)
    ]
    trained = read_table(imported.advantages).to_pylist()
    assert [row["prompt_id"] for row in trained] == [n for n in range(11) if n != 4]
    assert {(row["sample"], row["advantage"]) for row in trained} == {(0, 0.0)}
    assert (imported.pictures, imported.evaluated) == (11, 1)


def test_a_shard_has_the_latents_of_one_bucket(prepared, base, photos):
    ctx, _, _, shards = prepared
    by_size = {read_image_size(ctx, path): path for path in shards}
    numbers = {size: read_column(path, "prompt_id").to_pylist() for size, path in by_size.items()}
    # None: the model's own size.
    assert numbers == {None: [0, 1, 2, 3], (32, 64): [4, 5, 6], (64, 32): [7, 8, 9]}
    model = load_model(base, ctx.recipe.model)
    picture = np.asarray(Image.open(photos / "1.png").resize((64, 64), Image.Resampling.LANCZOS))
    torch.testing.assert_close(
        read_latents(by_size[None])[1], model.encode_images(picture[None])[0].cpu()
    )


def test_the_digest_of_the_latents_follows_pictures_vae_and_sizes_alone(
    base, photos, make_prompts, tmp_path
):
    def encoding(folder=photos, **data):
        ctx = context(base, folder, data)
        prompts = write_prompt_table(tmp_path / "prompts.parquet", make_prompts, "other")
        imported = import_data(
            ctx, ctx.config.captioned_data, folder, base, prompts, tmp_path / "out"
        )
        return imported.encoding, imported.digest

    (tmp_path / "out").mkdir()
    same = encoding()
    assert encoding(caption_dropout=0.5) == same
    assert encoding(buckets=None)[0] != same[0]
    copy = tmp_path / "moved"
    copy.mkdir()
    for file in photos.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    assert encoding(copy) == same
    text = (copy / "metadata.jsonl").read_text()
    (copy / "metadata.jsonl").write_text(text.replace("picture 3", "a new caption"))
    assert encoding(copy)[0] == same[0]  # latents do not depend on captions
    assert encoding(copy)[1] != same[1]
    Image.new("RGB", (70, 70)).save(copy / "3.png")
    assert encoding(copy)[0] != same[0]


def test_latents_follow_the_code_of_a_family_of_the_users_own(base, photos, tmp_path, monkeypatch):
    # Not "mine", which tests of the same process have imported from other folders.
    package = tmp_path / "family_with_latents"
    package.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    ctx = context(base, photos)
    model = ctx.recipe.model.model_copy(update={"family": "family_with_latents:Family"})
    own = replace(ctx, recipe=ctx.recipe.model_copy(update={"model": model}))

    def describe(code):
        (package / "__init__.py").write_text(code)
        return describe_encoding(own, own.config.captioned_data)

    first = describe("class Family: scale = 1")
    assert describe("class Family: scale = 2") != first
    assert describe("class Family: scale = 1") == first


@pytest.mark.any_cpu
def test_a_stage_trains_on_all_buckets_and_resumes_exactly(prepared, base, tmp_path, monkeypatch):
    ctx = prepared[0]
    record, losses = train(prepared, base, tmp_path / "whole")
    # Buckets of 4, 2 and 3 pictures in batches of 2, twice.
    assert record.optimizer_steps == len(losses) == 2 * (2 + 1 + 2)

    class Killed(Exception):
        """What the test ends a stage with."""

    step = update.PolicyUpdater.update_policy

    def doomed(updater, *arguments):
        if updater.updates == 5:
            raise Killed
        return step(updater, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(update.PolicyUpdater, "update_policy", doomed)
        with pytest.raises(Killed):
            train(prepared, base, tmp_path / "killed", Checkpoints(ctx, tmp_path / "kept"))
    resumed = train(prepared, base, tmp_path / "resumed", Checkpoints(ctx, tmp_path / "kept"))
    assert resumed[1] == losses
    assert verify_folder(tmp_path / "resumed") == verify_folder(tmp_path / "whole")


def test_shards_of_other_data_are_refused(prepared, base, tmp_path):
    ctx, _, _, shards = prepared
    other = tmp_path / "other.parquet"
    table = read_table(shards[0])
    about = json.loads(table.schema.metadata[b"ebbflow"]) if table.schema.metadata else {}
    write_table(
        other, table.schema.remove_metadata(), table.to_batches(), about | {"data_digest": "0"}
    )
    with pytest.raises(TableError, match="is a rollout shard of something else: data_digest = '0'"):
        train(prepared, base, tmp_path / "policy", shards=[other])


def test_captions_are_dropped_by_picture_and_epoch(base, photos, make_prompts):
    prompts = [replace(make_prompts(1)[0], prompt_id=number) for number in range(2000)]
    ctx = context(base, photos, {"caption_dropout": 0.25})
    first = [p.prompt == "" for p in batches._choose_captions(ctx, prompts, epoch=0)]
    # 4 standard errors of a share of 2,000 draws.
    assert abs(np.mean(first) - 0.25) < 4 * (0.25 * 0.75 / 2000) ** 0.5
    assert [p.prompt == "" for p in batches._choose_captions(ctx, prompts, epoch=1)] != first
    part = batches._choose_captions(ctx, prompts[7:11], epoch=0)
    assert [p.prompt == "" for p in part] == first[7:11]
    none = batches._choose_captions(context(base, photos, {"caption_dropout": 0}), prompts, 0)
    assert none == prompts


def test_the_loss_on_data_is_least_where_the_linear_velocity_has_its_closed_form():
    """x0 ~ N(m, s^2): the best v(x) = a x + b has a = (sigma - (1 - sigma) s^2) / Var x and b = -m
    - a (1 - sigma) m.
    """
    mean, std, sigma, count = 1.5, 0.5, 0.6, 4000
    draw = torch.Generator().manual_seed(0)
    clean = mean + std * torch.randn(count, 1, dtype=torch.float64, generator=draw)
    config = SFTConfig(noise_levels=1, sigma={"kind": "uniform", "min": sigma, "max": sigma + 1e-6})
    batch = build_forward_batch(
        clean,
        Conditioning({"embeds": torch.zeros(count, 1)}),
        torch.zeros(count),
        SampleKeys(3, list(range(count)), [0] * count),
        np.arange(count),
        config,
        torch.linspace(1, 0, 5),
        visit=0,
    )
    variance = (1 - sigma) ** 2 * std**2 + sigma**2
    slope = torch.tensor((sigma - (1 - sigma) * std**2) / variance, requires_grad=True)
    offset = torch.tensor(-mean - slope.item() * (1 - sigma) * mean, requires_grad=True)
    rows = batch.build_rows(slice(0, count), slope * batch.inputs.latents + offset, {})
    loss, _ = ALGORITHM.loss(rows, config)
    # The expected loss there is the variance of v that x does not explain.
    explained = (sigma - (1 - sigma) * std**2) ** 2 / variance
    expected = 1 + std**2 - explained
    assert abs(loss.mean().item() - expected) < 4 * loss.std().item() / count**0.5
    gradients = torch.autograd.grad(loss.mean(), (slope, offset))
    residual = (rows.velocity - (rows.noise - rows.clean)).detach().squeeze(1)
    for gradient, factor in zip(
        gradients, (batch.inputs.latents.squeeze(1), torch.ones(count)), strict=True
    ):
        error = (2 * residual * factor).std().item() / count**0.5
        assert abs(gradient.item()) < 4 * error


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"algorithm": {"name": "diffusion_nft"}}, "diffusion_nft compares samples by their rew"),
        ({"pairs": "pairs.jsonl"}, "pairs and data are both samples"),
        ({"sizes": [{"height": 32, "width": 32}]}, "the sizes of pictures are data.buckets"),
    ],
)
def test_what_does_not_go_with_data(base, photos, stage, message):
    with pytest.raises(RecipeError, match=message):
        context(base, photos, **stage)


def test_data_has_the_published_defaults_of_training_on_pictures(photos):
    stage = {"kind": "offline", "algorithm": {"name": "sft"}, "data": {"path": str(photos)}}
    config = Recipe.model_validate({"stages": [stage]}).stages[0]
    assert (config.algorithm.noise_levels, config.algorithm.sigma.kind) == (1, "schedule")
    assert (config.sampler.name, config.sampler.steps) == ("ode", 1000)
    del stage["data"]
    config = Recipe.model_validate({"stages": [stage]}).stages[0]
    assert (config.algorithm.noise_levels, config.sampler.steps) == (39, 40)


def test_pictures_that_are_all_too_small_are_an_error(base, photos, tmp_path):
    ctx = context(base, photos)
    recipe = ctx.recipe.model_copy(
        update={"model": ctx.recipe.model.model_copy(update={"height": 128, "width": 128})}
    )
    ctx = StageContext(recipe, 0, 0)
    config = ctx.config.captioned_data.model_copy(update={"buckets": None})
    model = load_model(base, recipe.model)
    with (
        pytest.warns(UserWarning, match="11 smaller"),
        pytest.raises(DataError, match="no picture is left to train on: all 11 are smaller"),
    ):
        encode_data(ctx, config, model, photos, "", tmp_path)
