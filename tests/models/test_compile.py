"""``model.compile``: rollouts and training still agree to the bit, and what is missing is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch._inductor.runtime.cache_dir_utils import (
    cache_dir,
    default_cache_dir,
    triton_cache_dir,
)

from ebbflow.flow.noise import SampleKeys
from ebbflow.flow.windows import Plan
from ebbflow.models import ModelError
from ebbflow.models.base import predict
from ebbflow.models.compile import CACHE, compile_blocks
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.recipe_file import parse_recipe
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.policy import Policy
from tests.parameters import move


@pytest.mark.parametrize(
    ("text", "expected"), [("off", "off"), ("blocks", "blocks"), ("'off'", "off")]
)
def test_the_key_is_read_as_it_is_written(text, expected):
    recipe = parse_recipe(
        f"{{name: a, model: {{compile: {text}}}, stages: [{{kind: online, steps: 1}}]}}", "a"
    )
    assert recipe.model.compile == expected
    assert ModelConfig().compile == "off"


def test_a_missing_compiler_is_named(model, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ModelError,
        match=r"model.compile = 'blocks': .*'no-such-compiler' is not on the PATH; install g\+\+",
    ):
        compile_blocks(model)


def test_graphs_round_as_uncompiled_code_and_are_not_chosen_by_their_time(model, monkeypatch):
    """On a GPU, inductor chooses reductions by timing, for rollouts and training separately."""
    settings = torch._inductor.config
    monkeypatch.setattr(settings, "deterministic", False)
    monkeypatch.setattr(settings, "emulate_precision_casts", False)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **keys: None)
    compile_blocks(model)
    assert settings.deterministic
    assert settings.emulate_precision_casts


@pytest.mark.parametrize("set_by_torch", [True, False])
def test_compiled_kernels_are_among_the_caches_of_the_user(
    model, monkeypatch, tmp_path, set_by_torch
):
    """torch's default is a folder of temporary files, where a machine that starts again has none.
    torch enters it into the environment when it is imported.
    """
    if set_by_torch:
        monkeypatch.setenv(CACHE, default_cache_dir())
    else:
        monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **keys: None)
    compile_blocks(model)
    assert Path(cache_dir()) == tmp_path / "ebbflow" / "compiled"
    assert Path(triton_cache_dir(0)) == tmp_path / "ebbflow" / "compiled" / "triton" / "0"


def test_a_cache_that_cannot_be_made_costs_time_and_no_stage(model, monkeypatch, tmp_path, caplog):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.delenv(CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **keys: None)
    compile_blocks(model)
    assert os.environ[CACHE] == default_cache_dir()
    assert f"{file}/ebbflow/compiled cannot be made" in caplog.text


def test_a_folder_that_is_named_for_compiled_kernels_is_taken(model, monkeypatch):
    monkeypatch.setenv(CACHE, "/named")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda block, **keys: None)
    compile_blocks(model)
    assert os.environ[CACHE] == "/named"


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "config", [PolicyConfig(train="full"), PolicyConfig(train="lora", rank=4)], ids=["full", "lora"]
)
def test_compiled_training_predicts_what_compiled_rollouts_did(
    model, config, precision, monkeypatch, tmp_path_factory
):
    monkeypatch.setenv(CACHE, str(tmp_path_factory.getbasetemp() / "compiled"))
    model.precision = precision
    policy = Policy(model, config, 0)
    move(policy)
    conditioning = model.encode_texts(["ABCD", "EFGH"])
    keys = SampleKeys(2, [0, 1], [0, 0])
    sampler = SamplerConfig(name="flow_sde", steps=2)
    plan = Plan((0,), (0,))
    eager = generate_samples(model, conditioning, keys, sampler, plan).latents
    compile_blocks(model)
    rollouts = generate_samples(model, conditioning, keys, sampler, plan)
    assert (rollouts.latents - eager).abs().max() < (
        1e-4 if precision == "float32" else 0.1
    ) * eager.abs().max()
    latents = rollouts.trajectory.latents[:, 0]
    sigma = rollouts.trajectory.sigmas[0].expand(2)
    with torch.no_grad():
        rolled_out = predict(model, latents, sigma, conditioning)
    trained = predict(model, latents, sigma, conditioning)
    assert trained.requires_grad
    assert torch.equal(trained, rolled_out)
    trained.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.parameters.values())
