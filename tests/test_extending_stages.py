"""The rollout engine and the stage kind of examples/: what stages do with them."""

from __future__ import annotations

import pyarrow as pa
import pytest
import torch

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.models import load_model
from ebbflow.offline.rollouts import generate_shard
from ebbflow.offline.shards import read_latents
from ebbflow.online.train_folder import train_online_folder
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.rollouts.engine import open_engine
from ebbflow.rollouts.parity import ParityError
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.storage.artifacts import verify_folder
from ebbflow.storage.tables import read_table_metadata
from ebbflow.training.custom_stage import train_custom_folder
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import read_policy_metadata, write_base_policy
from tests.extension_cases import CONTRAST, COPY, EXAMPLES, SOUP


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


@pytest.fixture
def shard(make_recipe, make_prompts, model, base_folder, tmp_path):
    """``shard(engine)``: the latents and the metadata of an offline stage's first shard."""

    def generate_with(name, open_it=open_engine, push=True):
        ctx = StageContext(make_recipe(offline={"engine": name}), 0, 1)
        policy = Policy(model, ctx.recipe.policy, 0)
        policy.ensure_copy("old")
        with torch.no_grad():
            for value in policy.copies["old"].values():
                value.mul_(1.5)  # what generates is not what the base model has
        engine = None
        if name != "diffusers":
            engine = open_it(ctx, base_folder)
            if push:
                engine.load(policy.copies["old"])
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.parquet"
        generate_shard(ctx, model, policy, 1, make_prompts(6), 0, path, engine)
        return read_latents(path), read_table_metadata(path)["engine"]

    return generate_with


def test_an_offline_stage_generates_with_the_engine(shard):
    latents, engine = shard(COPY)
    assert engine == COPY
    expected, engine = shard("diffusers")
    assert engine == "diffusers"
    assert torch.equal(latents, expected)


def test_an_engine_without_the_policy_s_weights_does_not_pass_the_gate(shard):
    with pytest.raises(ParityError, match="denoising steps are not those of the training policy"):
        shard(COPY, push=False)


def test_what_is_no_engine_is_named(make_recipe, base_folder):
    ctx = StageContext(make_recipe(offline={"engine": "mine.soup:StageFolders"}), 0, 1)
    with pytest.raises((RecipeError, TypeError)):
        open_engine(ctx, base_folder)


def test_a_stage_kind_leaves_a_policy_folder(make_recipe, base_folder, tmp_path):
    stages = [{"kind": "custom", "path": SOUP, "options": {"share": 0.25}}]
    recipe = make_recipe().model_copy(
        update={"stages": Recipe.model_validate({"stages": stages}).stages}
    )
    ctx = StageContext(recipe, 0, 0)
    start = tmp_path / "start"
    prompts = tmp_path / "prompts.parquet"
    policy = Policy(load_model(base_folder), recipe.policy, recipe.seed)
    base = {name: value.detach().clone() for name, value in policy.parameters.items()}
    policy.assign_parameters({name: value + 1 for name, value in base.items()})
    write_base_policy(
        tmp_path / "untrained",
        verify_folder(base_folder),
        recipe.digest,
        recipe.policy,
        recipe.model,
    )
    policy.save_folder(
        start, read_policy_metadata(tmp_path / "untrained").model_copy(update={"version": 3})
    )
    recorder = MetricsRecorder()
    record = train_custom_folder(
        ctx, StageFolders(base_folder, start, prompts, tmp_path / "trained"), recorder
    )
    assert (record.label, recorder.metrics_rows) == (
        "1.1 custom",
        [{"step": 0, "soup/share": 0.25}],
    )
    trained = Policy(load_model(base_folder), recipe.policy, recipe.seed)
    assert trained.load_folder(tmp_path / "trained").stages[-1] == "1.1 custom"
    for name, value in trained.parameters.items():
        torch.testing.assert_close(value.detach(), base[name] + 0.25)


def test_a_stage_that_returns_no_record_is_named(make_recipe, base_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mine.soup.average_with_base", lambda ctx, folders, recorder: None)
    recipe = Recipe.model_validate({"stages": [{"kind": "custom", "path": SOUP}]})
    folders = StageFolders(base_folder, tmp_path, tmp_path, tmp_path / "trained")
    with pytest.raises(RecipeError, match="average_with_base returned NoneType; return"):
        train_custom_folder(StageContext(recipe, 0, 0), folders, MetricsRecorder())


def test_an_online_stage_generates_with_the_engine(
    make_recipe, make_prompts, base_folder, tmp_path
):
    """Its first samples, before any weights are pushed, and all others are those of diffusers."""
    prompts = tmp_path / "prompts.parquet"
    policies = {}
    write_prompts(
        pa.Table.from_pylist([vars(prompt) for prompt in make_prompts(6)], PROMPTS), prompts
    )
    for name in (COPY, "diffusers"):
        recipe = make_recipe(online={"engine": name}, rewards=[CONTRAST], guardrails=[])
        ctx = StageContext(recipe, 0, 0)
        start = tmp_path / "start"
        trained = tmp_path / f"trained-{len(policies)}"
        if not start.exists():
            write_base_policy(
                start, verify_folder(base_folder), recipe.digest, recipe.policy, recipe.model
            )
        train_online_folder(
            ctx, StageFolders(base_folder, start, prompts, trained), MetricsRecorder()
        )
        policies[name] = Policy(load_model(base_folder), recipe.policy, recipe.seed)
        policies[name].load_folder(trained)
    for key, value in policies[COPY].parameters.items():
        assert torch.equal(value, policies["diffusers"].parameters[key])
