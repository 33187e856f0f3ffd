"""Rollouts in 8 bits: what is refused, that nothing else than rollouts is rounded, and how far they
are from float32.

Where torchao is not installed, a stand-in rounds the weights as it does without a GPU: row by row,
to e4m3. ``make test-float8`` installs torchao into a folder of its own and runs the tests with it.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from ebbflow.certification.adapter import EngineSetup
from ebbflow.certification.bench import CertificateSettings, open_bench
from ebbflow.certification.own_engines import FLOAT8, RecipeEngine
from ebbflow.certification.sampling_lines import measure_network
from ebbflow.models.base import ModelError, default_device, predict, predict_in_float32
from ebbflow.models.glyph_training.trained import load_trained_glyph
from ebbflow.offline.rollouts import write_shard
from ebbflow.online.monitor import build_validation_requests
from ebbflow.online.prompt_sampler import PromptSampler
from ebbflow.online.rollout_queue import RolloutQueue
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.preflight import check_recipe
from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.digest import compute_digest
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.rollout_cache import require_quantization, require_whole_weights
from ebbflow.rollouts import generate as generate_module
from ebbflow.rollouts.generate import Diffusers
from ebbflow.rollouts.quantization import quantize_linears
from ebbflow.rollouts.step_comparison import NOISE_MULTIPLE
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy
from tests.glyph_stages import small_stage

NFT = {"algorithm": {"name": "diffusion_nft"}, "sampler": {"name": "ode", "steps": 3}}
KEYS = {"rollout_precision": "bfloat16", "rollout_quantization": "float8"}
LARGEST = torch.finfo(torch.float8_e4m3fn).max


def quantize_rows(layers: nn.Module, config: object) -> None:
    for module in layers.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight.detach()
            scale = weight.float().abs().amax(1, keepdim=True) / LARGEST
            rounded = (weight.float() / scale).to(torch.float8_e4m3fn).float() * scale
            module.weight = nn.Parameter(rounded.to(weight.dtype), requires_grad=False)


@pytest.fixture(autouse=True)
def torchao(monkeypatch):
    if importlib.util.find_spec("torchao") is not None:
        return
    stand_in = ModuleType("torchao.quantization")
    stand_in.quantize_ = quantize_rows
    for name in ("Float8DynamicActivationFloat8WeightConfig", "Float8WeightOnlyConfig", "PerRow"):
        setattr(stand_in, name, SimpleNamespace)
    monkeypatch.setitem(sys.modules, "torchao.quantization", stand_in)


@pytest.fixture
def trained_model():
    """The glyph model of the package, for this test alone."""
    model = load_trained_glyph(GlyphTrainingConfig())
    assert model is not None
    return model


def build(stage, **model):
    return Recipe.model_validate({"model": model, "stages": [small_stage(stage)]})


@pytest.mark.parametrize(
    ("stage", "model", "said"),
    [
        (
            {"kind": "online", "algorithm": {"name": "flow_grpo"}, **KEYS},
            {},
            "rollout_quantization = 'float8' approximates the network, and flow_grpo takes a ratio",
        ),
        (
            {"kind": "online", "algorithm": {"name": "draft"}, **KEYS},
            {},
            "and draft generates the samples of the rollout again",
        ),
        (
            {"kind": "online", **NFT, "rollout_quantization": "float8"},
            {},
            "rollouts are in float32; set rollout_precision: bfloat16",
        ),
        (
            {"kind": "online", **NFT, **KEYS, "engine": "vllm_omni"},
            {},
            "engine = 'vllm_omni' has its own; set engine: diffusers",
        ),
        (
            {"kind": "online", **NFT, **KEYS},
            {"compile": "blocks"},
            "replaces the weights of compiled blocks; set model.compile: off",
        ),
    ],
    ids=["ratio", "again", "precision", "engine", "compiled"],
)
def test_what_cannot_be_generated_in_8_bits_is_refused(stage, model, said):
    with pytest.raises(RecipeError) as error:
        build(stage, **model)
    assert said in str(error.value)


def test_recipes_without_it_keep_their_digest():
    stage = {"kind": "online", **NFT}
    assert compute_digest(build(stage | {"rollout_quantization": None})) == compute_digest(
        build(stage)
    )


def test_a_check_names_the_extra_that_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    stage = build({"kind": "online", **NFT, **KEYS}).stages[0]
    with pytest.raises(RecipeError, match=r'stages\.2\.roll.*`pip install "ebbflow\[float8\]"`'):
        require_quantization(stage, "stages.2")


def test_a_check_refuses_weights_that_processes_share(make_recipe, tmp_path):
    online = {**NFT, **KEYS, "placement": "colocated"}
    recipe = make_recipe(online=online, output=str(tmp_path / "runs"))
    with pytest.raises(RecipeError) as error:
        check_recipe(recipe, "", on_cluster=True, processes=4, shards=2)
    assert "'float8' rounds whole weights, and 2 processes share them" in str(error.value)
    alone = make_recipe(online=online | {"placement": "in_process"}).stages[0]
    require_whole_weights(alone, "stages.0", 2)
    require_whole_weights(recipe.stages[0], "stages.0", 1)


@pytest.mark.parametrize("train", ["full", "lora"])
def test_rollouts_are_rounded_and_nothing_else_is(trained_model, make_recipe, make_prompts, train):
    config = {"train": train} if train == "full" else {"train": train, "rank": 2}
    policy = Policy(trained_model, PolicyConfig(**config), 0)
    weights = {key: value.clone() for key, value in trained_model.transformer.state_dict().items()}
    parameters = dict(trained_model.transformer.named_parameters())
    recipe = make_recipe(online={**NFT, **KEYS}, evaluation={"steps": 3})
    ctx = StageContext(recipe, 0, 0)

    def embed(prompts):
        return trained_model.encode_texts([prompt.target for prompt in prompts])

    # What decides over a policy is generated without it.
    (request,) = build_validation_requests(ctx, make_prompts(4), embed, version=0)
    assert request.quantization is None
    worker = RolloutWorker(Diffusers(ctx, policy))
    plain = worker.generate(request, WeightsVersion(0))[0].latents
    rounding = request.__class__(**{**vars(request), "quantization": "float8"})
    rounded = worker.generate(rounding, WeightsVersion(0))[0].latents
    assert not torch.equal(rounded, plain)
    assert torch.equal(worker.generate(request, WeightsVersion(0))[0].latents, plain)
    # Training goes on with the same objects, and with every bit of them.
    after = dict(trained_model.transformer.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())
    for key, value in trained_model.transformer.state_dict().items():
        assert torch.equal(value, weights[key])


def test_samples_to_train_on_are_generated_so(
    trained_model, make_recipe, make_prompts, tmp_path, monkeypatch
):
    recipe = make_recipe(online={**NFT, **KEYS}, offline={**NFT, **KEYS, "shards": 1})
    online, offline = (StageContext(recipe, 0, stage) for stage in (0, 1))
    sampler = PromptSampler(online, make_prompts(9))
    workers = SimpleNamespace(steps_before=0)
    queue = RolloutQueue(online, workers, sampler, MagicMock(), None)
    requests = asyncio.run(queue.build_requests(0))
    assert {request.quantization for request in requests} == {"float8"}

    asked = []

    def watch(model, quantization):
        asked.append(quantization)
        return quantize_linears(model, quantization)

    monkeypatch.setattr(generate_module, "quantize_linears", watch)
    policy = Policy(trained_model, PolicyConfig(train="full"), 0)
    policy.ensure_copy("old")
    write_shard(offline, trained_model, policy, 0, make_prompts(2), 0, tmp_path / "shard.parquet")
    assert set(asked) == {"float8"}


def test_weights_are_put_back_after_an_error(trained_model):
    parameters = dict(trained_model.transformer.named_parameters())
    with (
        pytest.raises(RuntimeError, match="in the block"),
        quantize_linears(trained_model, "float8"),
    ):
        raise RuntimeError("in the block")
    after = dict(trained_model.transformer.named_parameters())
    assert all(after[name] is parameter for name, parameter in parameters.items())


def test_layers_compute_with_weights_and_biases_of_bfloat16(trained_model):
    """A product in 8 bits refuses a bias in float32, as trained weights and many published ones
    have; only a GPU would show it.
    """
    layers = [m for block in trained_model.list_blocks() for m in block.modules()]
    linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
    assert {linear.bias.dtype for linear in linears} == {torch.float32}
    with quantize_linears(trained_model, "float8"):
        assert {linear.bias.dtype for linear in linears} == {torch.bfloat16}
        assert {linear.weight.dtype for linear in linears} == {torch.bfloat16}
    assert {linear.bias.dtype for linear in linears} == {torch.float32}
    assert not any("extra_repr" in vars(linear) for linear in linears)


def test_a_plan_is_refused(trained_model, make_recipe):
    policy = Policy(trained_model, PolicyConfig(train="full"), 0)
    diffusers = Diffusers(StageContext(make_recipe(online=NFT), 0, 0), policy)
    with pytest.raises(ValueError, match="'float8' rounds it; leave one of them out"):
        diffusers.generate(None, None, None, plan=SimpleNamespace(), quantization="float8")


def test_a_gpu_without_products_in_8_bits_is_named(trained_model, monkeypatch):
    monkeypatch.setattr(
        "ebbflow.rollouts.quantization.device_of", lambda model: torch.device("cuda", 0)
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with (
        pytest.raises(ModelError, match=r"NVIDIA A100 does not multiply .* capability 8\.9"),
        quantize_linears(trained_model, "float8"),
    ):
        pass


def test_sharded_weights_are_refused(trained_model, monkeypatch):
    monkeypatch.setattr("ebbflow.rollouts.quantization.DTensor", nn.Parameter)
    with (
        pytest.raises(ModelError, match="these are sharded; set train_sharding: replicated"),
        quantize_linears(trained_model, "float8"),
    ):
        pass


def test_the_velocity_is_as_far_from_float32_as_e4m3_rounds(trained_model):
    """e4m3 has 3 bits of fraction: a weight moves by 2^-4 of itself at most, and by 2^-4 / sqrt(3)
    in the mean square where its last place is uniform. On a GPU activations are rounded, too.
    """
    device = default_device()
    trained_model.transformer.to(device)
    conditioning = trained_model.encode_texts(["ABCD", "EFGH"]).to(device)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *trained_model.latent_shape, generator=generator).to(device)
    sigma = torch.tensor([0.9, 0.5], device=device)
    with torch.no_grad():
        truth = predict_in_float32(trained_model, latents, sigma, conditioning)
        bfloat16 = predict(trained_model, latents, sigma, conditioning, "bfloat16")
        with quantize_linears(trained_model, "float8"):
            float8 = predict(trained_model, latents, sigma, conditioning, "bfloat16")
    rounding = measure_error(bfloat16, truth)
    error = measure_error(float8, truth)
    assert rounding < error < 2**-4


def measure_error(velocity: Tensor, truth: Tensor) -> float:
    """The root mean square of the error, relative to the velocity."""
    return ((velocity - truth).square().mean() / truth.square().mean()).sqrt().item()


def test_the_certificate_says_how_far_it_is_from_the_policy(tiny_recipe):
    """Farther than bfloat16 rounds, in the same unit: the change of the latents in two steps."""
    model = tiny_recipe("sd3", {"guidance": 4.0, "max_tokens": 32}).model
    lora = PolicyConfig(train="lora", rank=4, alpha=8)
    settings = CertificateSettings(steps=5, samples=1, adapters=(lora,), updates=10, layers=4)
    setup = EngineSetup(Path(model.path), model, lora, "bfloat16", 4)
    lines = []
    for opens in (RecipeEngine("diffusers"), FLOAT8):
        bench = open_bench(opens, setup, settings)
        lines.append(measure_network(bench))
        bench.close()
    exact, rounded = lines
    assert exact.verdict == "passed"
    (before,), (after,) = exact.measures, rounded.measures
    assert before.high is not None
    # The bar is a multiple of what bfloat16 rounds here.
    assert before.value < before.high / NOISE_MULTIPLE < after.value < 2**-4
