"""The data anchor: its gradient beside the algorithm's, against closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ebbflow.algorithms.base import mean_per_row
from ebbflow.data import prompt_windows
from ebbflow.models.glyph_training.pictures import write_pictures
from ebbflow.offline import anchor as anchor_module
from ebbflow.offline.anchor import DataAnchor
from ebbflow.offline.data import encode_data, import_data
from ebbflow.offline.shards import read_latents
from ebbflow.offline.training import train_offline_folder
from ebbflow.recipe import RecipeError
from ebbflow.stage import AnchorFiles, MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import TableError
from ebbflow.training.checkpoint import Checkpoints
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.offline_stage import write_offline_stage


@pytest.fixture
def anchored(make_recipe, model, base_folder, make_prompts, tmp_path):
    """(stage, anchor, updater) with eight pictures, of which a step sees three in passes of two."""
    pictures = tmp_path / "pictures"
    write_pictures(pictures, count=8, seed=3)
    anchor = {
        "data": {"path": str(pictures), "caption_dropout": 0.5},
        "weight": 0.25,
        "batch_size": 3,
    }
    ctx = StageContext(make_recipe(online={"anchor": anchor, "micro_batch": 2}), 0, 0)
    return ctx, open_files(ctx, model, base_folder, make_prompts, tmp_path, pictures)


def open_files(ctx, model, base_folder, make_prompts, folder, pictures):
    import pyarrow as pa

    from ebbflow.data.prompts import write_prompts
    from ebbflow.data.schema import PROMPTS

    table = folder / "run-prompts.parquet"
    write_prompts(pa.Table.from_pylist([vars(p) for p in make_prompts(2)], PROMPTS), table)
    config = ctx.config.captioned_data
    imported = import_data(ctx, config, pictures, base_folder, table, folder)
    (folder / "latents").mkdir()
    shards = encode_data(ctx, config, model, pictures, imported.encoding, folder / "latents")
    return AnchorFiles(imported.prompts, imported.advantages, shards)


def gradient_of_anchor(ctx, model, files, update, scale=1.0):
    updater = PolicyUpdater(Policy(model, ctx.recipe.policy, 0), ctx.config)
    updater.updates = update
    anchor = DataAnchor(ctx, model, files)
    loss = anchor.add_gradient(updater, scale)
    gradients = {
        name: p.grad.clone() for name, p in updater.policy.parameters.items() if p.grad is not None
    }
    for parameter in updater.policy.parameters.values():
        parameter.grad = None
    return anchor, loss.item(), gradients


def test_the_gradient_is_the_weight_times_that_of_the_mean_flow_matching_loss(anchored, model):
    ctx, files = anchored
    anchor, loss, gradients = gradient_of_anchor(ctx, model, files, update=4)
    # The same pictures, noise and noise levels at once, by the formula.
    shard, rows = anchor.choose_rows(4)
    batch = anchor._build_batch(model, shard, rows, 4)
    assert torch.equal(batch.clean.cpu(), read_latents(shard.path)[shard.rows[rows]])
    sigma = batch.inputs.sigma.view(-1, 1, 1, 1)
    torch.testing.assert_close(
        batch.inputs.latents, (1 - sigma) * batch.clean + sigma * batch.noise, rtol=0, atol=0
    )
    velocity = model.predict_velocity(*batch.inputs.model_arguments(slice(0, len(rows))))
    expected = mean_per_row((velocity - (batch.noise - batch.clean)) ** 2).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    parameters = dict(model.transformer.named_parameters())
    names = [name for name in gradients if name in parameters]
    assert len(names) == len(gradients)
    by_formula = torch.autograd.grad(0.25 * expected, [parameters[name] for name in names])
    for name, value in zip(names, by_formula, strict=True):
        torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-6)


def test_the_scale_of_the_loss_scales_the_gradient_alone(anchored, model):
    ctx, files = anchored
    _, loss, gradients = gradient_of_anchor(ctx, model, files, update=1)
    _, scaled_loss, scaled = gradient_of_anchor(ctx, model, files, update=1, scale=4.0)
    assert scaled_loss == loss
    for name, value in gradients.items():
        torch.testing.assert_close(scaled[name], 4 * value, rtol=1e-6, atol=1e-9)


def test_pictures_noise_and_dropped_captions_follow_the_number_of_the_step(anchored, model):
    ctx, files = anchored
    first, second = DataAnchor(ctx, model, files), DataAnchor(ctx, model, files)
    chosen = [first.choose_rows(update) for update in range(200)]
    again = [second.choose_rows(update) for update in range(200)]
    assert all(np.array_equal(a[1], b[1]) for a, b in zip(chosen, again, strict=True))
    # Every picture comes up, and three neighbours at a time.
    assert set(np.concatenate([rows for _, rows in chosen]).tolist()) == set(range(8))
    assert all(np.array_equal(np.diff(rows), [1, 1]) for _, rows in chosen)
    dropped = [first._is_dropped(i, update) for update in range(50) for i in range(8)]
    assert abs(np.mean(dropped) - 0.5) < 4 * (0.25 / 400) ** 0.5


def test_latents_of_other_data_are_refused(anchored, model):
    import json

    from ebbflow.storage.tables import read_table, read_table_metadata, write_table

    ctx, files = anchored
    path = files.latents[0]
    about = read_table_metadata(path) | {"data_digest": "other"}
    table = read_table(path)
    other = path.with_name("other.parquet")
    schema = table.schema.remove_metadata()
    write_table(other, schema, table.cast(schema).to_batches(), json.loads(json.dumps(about)))
    with pytest.raises(TableError, match="has the latents of other data"):
        DataAnchor(ctx, model, AnchorFiles(files.prompts, files.advantages, [other]))


def test_captions_in_windows_have_the_gradient_of_all_at_once(anchored, model, monkeypatch):
    ctx, files = anchored
    usual = [gradient_of_anchor(ctx, model, files, update)[1:] for update in range(6)]
    monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", 5)
    encoded = []
    encode = anchor_module.encode_windows_together

    def watch(model, windows, steps, negatives):
        encoded.extend(windows.list_missing(steps))
        encode(model, windows, steps, negatives)

    monkeypatch.setattr(anchor_module, "encode_windows_together", watch)
    anchor = DataAnchor(ctx, model, files)
    assert anchor.embeddings is None
    updater = PolicyUpdater(Policy(model, ctx.recipe.policy, 0), ctx.config)
    updater.num_updates = 6
    for update, (loss, gradients) in enumerate(usual):
        updater.updates = update
        updater.optimizer.zero_grad()
        anchor.encode_captions(updater)
        assert anchor.add_gradient(updater, 1.0).item() == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                updater.policy.parameters[name].grad, gradient, rtol=1e-4, atol=1e-6
            )
    # Each step is in one window, and no window has more different pictures than fit.
    assert [step for window in encoded for step in window.steps] == list(range(6))
    assert len(encoded) > 1
    assert all(
        len({prompt.prompt_id for prompt in window.list_prompts()}) <= 5 for window in encoded
    )


@pytest.mark.parametrize("captions_at_once", [5, prompt_windows.PROMPTS_PER_WINDOW])
@pytest.mark.any_cpu
def test_an_anchored_stage_resumes_exactly(
    captions_at_once, model, base_folder, make_recipe, make_prompts, scorer, tmp_path, monkeypatch
):
    monkeypatch.setattr(prompt_windows, "PROMPTS_PER_WINDOW", captions_at_once)
    pictures = tmp_path / "pictures"
    write_pictures(pictures, count=8, seed=3)
    anchor = {"data": {"path": str(pictures), "caption_dropout": 0.5}, "batch_size": 3}
    recipe = make_recipe(offline={"anchor": anchor, "checkpoints": {"every": 2}})
    ctx = StageContext(recipe, 0, 1)
    files = open_files(ctx, model, base_folder, make_prompts, tmp_path, pictures)
    stage = tmp_path / "stage"
    stage.mkdir()
    write_offline_stage(stage, recipe, base_folder, make_prompts(4), scorer)

    def train(name, kept):
        recorder = MetricsRecorder()
        prompts = stage / "prompts.parquet"
        train_offline_folder(
            ctx,
            StageFolders(base_folder, stage / "start", prompts, tmp_path / name, anchor=files),
            sorted(stage.glob("rollouts-*")),
            stage / "advantages.parquet",
            recorder,
            Checkpoints(ctx, tmp_path / kept),
        )
        return [row["anchor/loss"] for row in recorder.metrics_rows]

    class Killed(Exception):
        """What the test ends a stage with."""

    step = PolicyUpdater.update_policy

    def doomed(updater, *arguments):
        if updater.updates == 3:
            raise Killed
        return step(updater, *arguments)

    losses = train("whole", "kept-whole")
    assert len(set(losses)) == len(losses) > 3
    with monkeypatch.context() as patch:
        patch.setattr(PolicyUpdater, "update_policy", doomed)
        with pytest.raises(Killed):
            train("killed", "kept")
    assert train("resumed", "kept") == losses
    assert verify_folder(tmp_path / "resumed") == verify_folder(tmp_path / "whole")


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        ({"placement": "ray"}, "anchor is for placement: in_process and colocated"),
    ],
)
def test_stages_that_take_no_anchor(make_recipe, stage, message):
    with pytest.raises(RecipeError, match=message):
        make_recipe(online=stage | {"anchor": {"data": {"path": "pictures"}}})
