"""Weights by broadcast on Ray: what one process computes, whoever is missing, dies, hangs or damages them on the way."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import ray
import ray_broadcast_cases as cases
import torch
from safetensors.torch import load_file

from ebbflow.data.prompts import write_prompts
from ebbflow.data.schema import PROMPTS
from ebbflow.models import load_model
from ebbflow.online import ray_broadcast
from ebbflow.online.loop import train_online_folder
from ebbflow.online.ray_actor import Folders
from ebbflow.online.roles import Trainer
from ebbflow.rollouts.weights import TransferError, bucketize
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.storage.artifacts import verify
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import write_base_policy
from ebbflow.training.update import PolicyUpdater

TIMED = ("seconds/", "ms_per_image/", "images_per_second", "push/", "utilisation/", "workers/")
STEPS = 5


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Any:
    """A small Ray of two cores, which workers share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else all other processes of the machine go first
        ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
        yield
        ray.shutdown()


@dataclass(frozen=True)
class Ran:
    """What a stage left behind: the policy's parameters, its metrics without those of time, and how many workers it replaced."""

    parameters: dict[str, torch.Tensor]
    metrics: list[dict[str, float]]
    replaced: float


@pytest.fixture(scope="module")
def context_of(make_recipe):
    """``place_of(mode, training=2)``: a stage of three parts a step with validations, on Ray where it says how many ranks."""

    def make(mode: str, training: int = 0, **online: Any) -> StageContext:
        counts = {"training": training, "rollout": 2, "reward": 1}
        resources = {role: {"cpus": 0.1, "count": count} for role, count in counts.items()}
        on_ray = {"placement": "ray", "transfer": "broadcast", "resources": resources} if training else {}
        stage = {"mode": mode, "steps": STEPS, "micro_batch": 4, "prompts_per_step": 3, "optimizer": {"lr": 1e-3}}
        rewards = {"rewards": [{"name": "custom", "path": "ray_cases:Darkness", "label": "darkness"}], "guardrails": []}
        validation = {"validation": {"every": 2, "prompts": 2}}
        recipe = make_recipe(
            online=stage | validation | on_ray | online, **rewards, policy={"ema": {"slope": 0.5, "max_decay": 0.5}}
        )
        return StageContext(recipe, 0, 0)

    return make


@pytest.fixture(scope="module")
def train(base_folder, make_prompts, tmp_path_factory):
    """``train(ctx, base)``: the whole stage, from folder to folder; ``base`` is what workers ask for the base model."""

    def run(ctx: StageContext, base: Callable[[], Path] | None = None) -> Ran:
        folder, recorder = tmp_path_factory.mktemp("stage"), MetricsRecorder()
        prompts = [replace(one, split="validation" if one.prompt_id > 5 else "train") for one in make_prompts(8)]
        write_prompts(pa.Table.from_pylist([vars(prompt) for prompt in prompts], PROMPTS), folder / "prompts.parquet")
        write_base_policy(folder / "start", verify(base_folder), ctx.recipe.digest, ctx.recipe.policy)
        actors = Folders(base or partial(Path, base_folder), partial(Path, folder / "start"))
        train_online_folder(
            ctx, base_folder, folder / "start", folder / "prompts.parquet", folder / "trained", recorder, actors=actors
        )
        rows = [{name: value for name, value in row.items() if not name.startswith(TIMED)} for row in recorder.metrics]
        replaced = max(row.get("workers/replaced", 0) for row in recorder.metrics)
        return Ran(load_file(folder / "trained" / "transformer" / "diffusion_pytorch_model.safetensors"), rows, replaced)

    return run


@pytest.fixture(scope="module")
def alone(context_of, train):
    """``alone(mode)``: what one process computes."""
    known: dict[str, Ran] = {}

    def run(mode: str) -> Ran:
        known[mode] = known.get(mode) or train(context_of(mode))
        return known[mode]

    return run


def assert_same(one: Ran, other: Ran) -> None:
    assert one.metrics == other.metrics
    assert one.parameters.keys() == other.parameters.keys()
    assert all(torch.equal(value, other.parameters[name]) for name, value in one.parameters.items())


def versions(notes: Path, how: str) -> set[int]:
    """Those that some worker generated with after they came by broadcast, or from the store."""
    return set(map(int, (notes / how).read_text().split())) if (notes / how).exists() else set()


def test_workers_generate_what_one_process_does(context_of, train, alone, base_folder, tmp_path):
    """Validations too, whose weights are others; nothing goes through the store."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the weights of version")
        on_ray = train(context_of("sync", training=1), partial(cases.noted, base_folder, tmp_path))
    assert_same(alone("sync"), on_ray)
    assert on_ray.replaced == 0
    assert versions(tmp_path, "store") == set()
    assert versions(tmp_path, "broadcast") == set(range(STEPS + 1)), "the last one is of a validation"


def test_workers_that_die_change_nothing(context_of, train, alone, base_folder, tmp_path):
    """In the middle of a part, before a transfer and in the middle of one; those that replace them take part in the next ones."""
    with pytest.warns(UserWarning, match="were not broadcast to all rollout workers") as warned:
        on_ray = train(context_of("one_step_off", training=1), partial(cases.dying, base_folder, tmp_path))
    assert_same(alone("one_step_off"), on_ray)
    assert on_ray.replaced == 3
    said = [str(warning.message) for warning in warned]
    assert len([text for text in said if "rollout worker died and was replaced" in text]) == 3
    assert len([text for text in said if "were not broadcast to all rollout workers" in text]) == 2
    assert versions(tmp_path, "store")
    assert STEPS in versions(tmp_path, "broadcast")


def test_a_worker_that_hangs_is_done_without(context_of, train, alone, base_folder, tmp_path, monkeypatch):
    """Two ranks, so the policy is that of one up to rounding."""
    monkeypatch.setattr(ray_broadcast, "GRACE", 1)
    with pytest.warns(UserWarning, match=r"were not broadcast .*waited 1 s for rank ([12]|1, 2) of 3"):
        on_ray = train(context_of("sync", training=2), partial(cases.hanging, base_folder, tmp_path))
    for name, value in alone("sync").parameters.items():
        assert torch.allclose(value, on_ray.parameters[name], atol=1e-4)
    assert on_ray.replaced == 0
    assert versions(tmp_path, "store")


def test_damaged_weights_are_not_generated_with(context_of, train, base_folder):
    with pytest.raises(TransferError, match="the weights of version 1 arrived as"):
        train(context_of("async", training=1), partial(cases.damaging, base_folder))


def test_a_copy_is_sent_in_the_order_of_the_parameters(context_of, base_folder):
    """One that was read from a file has another order, and receivers know only that of the parameters."""
    ctx = context_of("sync")
    policy = Policy(load_model(base_folder), ctx.recipe.policy, 0)
    trainer = Trainer(ctx, PolicyUpdater(policy, ctx.online))
    policy.copies["ema"] = dict(reversed(policy.copies["reference"].items()))
    published = trainer.publish(1, "ema")
    assert [list(bucket) for bucket in published.buckets] == [list(bucket) for bucket in bucketize(trainer.expected())]
