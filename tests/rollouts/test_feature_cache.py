"""Feature caches: what they skip, that their state ends with the micro-batch, and that nothing of
them is left where a policy is trained or evaluated.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ebbflow.flow.noise import SampleKeys
from ebbflow.models.base import ModelError
from ebbflow.models.glyph_training.trained import load_trained_glyph
from ebbflow.offline.rollouts import write_shard
from ebbflow.offline.shards import read_latents
from ebbflow.online.monitor import build_validation_requests
from ebbflow.online.sample_workers import RolloutWorker
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import GlyphTrainingConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.rollout_cache import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    TaylorSeerCacheConfig,
)
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.feature_cache import cache_features
from ebbflow.rollouts.generate import Diffusers, generate_samples
from ebbflow.rollouts.mag_ratios import measure_mag_ratios
from ebbflow.rollouts.weights import WeightsVersion
from ebbflow.stage import StageContext
from ebbflow.training.policy import Policy
from tests.glyph_stages import small_stage
from tests.rollouts.test_generate import window

STEPS = 8
SAMPLER = SamplerConfig(name="ode", steps=STEPS)
TEXTS = ["ABCD", "ABCD", "WXYZ", "WXYZ", "QQQQ", "QQQQ"]
SKIPPING = [
    FirstBlockCacheConfig(threshold=0.5),
    TaylorSeerCacheConfig(interval=4, warmup=2),
    MagCacheConfig(ratios=[1.0, 1.0], retention=0.2),
]
NEVER_SKIPPING = [
    FirstBlockCacheConfig(threshold=1e-9),
    TaylorSeerCacheConfig(warmup=STEPS),
    MagCacheConfig(ratios=[1.0, 1.0], retention=1.0),
]


def name_of(cache):
    return cache.name


@pytest.fixture(scope="module")
def trained_model():
    """The glyph model of the package: three blocks, the last of which returns no text."""
    model = load_trained_glyph(GlyphTrainingConfig())
    assert model is not None
    return model


@pytest.fixture
def samples(trained_model, make_keys):
    """``samples(cache, rows, micro_batch)``: final latents of some of six samples."""
    conditioning = trained_model.encode_texts(TEXTS)
    keys = make_keys(len(TEXTS))

    def generate(cache=None, rows=slice(None), micro_batch=64):
        return generate_samples(
            trained_model,
            conditioning.select_rows(rows),
            keys.select_samples(rows),
            SAMPLER,
            micro_batch=micro_batch,
            cache=cache,
        ).latents

    return generate


def count_calls(model, run):
    """Forward passes of each block's attention while ``run()`` generates."""
    counts = [0] * len(model.list_blocks())
    # On the layer below the hooks, which replace the forward of blocks and of attention layers.
    handles = [
        block.attn.to_q.register_forward_hook(
            lambda *_, index=index: counts.__setitem__(index, counts[index] + 1)
        )
        for index, block in enumerate(model.list_blocks())
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return counts


@pytest.mark.parametrize("cache", NEVER_SKIPPING, ids=name_of)
def test_cache_that_never_skips_changes_no_bit(trained_model, samples, cache):
    assert torch.equal(samples(cache), samples())
    assert count_calls(trained_model, lambda: samples(cache)) == [STEPS] * 3


@pytest.mark.parametrize("cache", SKIPPING, ids=name_of)
def test_cache_skips_blocks_and_approximates_the_samples(trained_model, samples, cache):
    plain = samples()
    cached = samples(cache)
    assert not torch.equal(cached, plain)
    assert cached.isfinite().all()
    # Closer to the policy's samples than other samples of the policy are.
    assert (cached - plain).norm() < 0.5 * (plain - plain.roll(1, 0)).norm()
    first, second, last = count_calls(trained_model, lambda: samples(cache))
    assert second < STEPS
    # The first-block cache always computes the first block, and of SD3 the last one.
    always = STEPS if cache.name == "first_block" else second
    assert (first, last) == (always, always)


@pytest.mark.any_cpu
@pytest.mark.parametrize("cache", SKIPPING, ids=name_of)
def test_state_ends_with_the_micro_batch(samples, cache):
    rows = [slice(0, 2), slice(2, 4), slice(4, 6)]
    alone = torch.cat([samples(cache, part) for part in rows])
    assert torch.equal(samples(cache, micro_batch=2), alone)
    # The same micro-batches again give the same bytes.
    assert torch.equal(samples(cache, micro_batch=2), alone)


@pytest.mark.parametrize("cache", SKIPPING, ids=name_of)
def test_nothing_is_left_on_the_network(trained_model, samples, cache):
    before = samples()
    attributes = [set(vars(module)) for module in trained_model.transformer.modules()]
    samples(cache)
    assert [set(vars(module)) for module in trained_model.transformer.modules()] == attributes
    assert torch.equal(samples(), before)


def test_error_of_a_step_leaves_nothing_either(trained_model, samples):
    attributes = [set(vars(module)) for module in trained_model.transformer.modules()]
    with (
        pytest.raises(RuntimeError, match="lost"),
        cache_features(trained_model, SKIPPING[0], STEPS, "float32"),
    ):
        raise RuntimeError("lost")
    assert [set(vars(module)) for module in trained_model.transformer.modules()] == attributes


def test_recorded_trajectory_is_refused(trained_model, make_keys):
    conditioning = trained_model.encode_texts(TEXTS)
    sampler = SamplerConfig(name="flow_sde", steps=STEPS)
    with pytest.raises(ValueError, match="log-probabilities of a plan are those of the network"):
        generate_samples(
            trained_model, conditioning, make_keys(6), sampler, window(0, 1), cache=SKIPPING[0]
        )


def test_sharded_blocks_are_known_by_their_class(trained_model, samples):
    expected = samples(SKIPPING[0])
    blocks = trained_model.list_blocks()
    original = type(blocks[0])
    # As FSDP2's ``fully_shard`` does.
    sharded = type(f"FSDP{original.__name__}", (original,), {})
    try:
        for block in blocks:
            block.__class__ = sharded
        assert torch.equal(samples(SKIPPING[0]), expected)
    finally:
        for block in blocks:
            block.__class__ = original


def test_network_of_one_block_is_refused(model, make_keys):
    conditioning = model.encode_texts(TEXTS)
    with pytest.raises(ModelError, match="first_block.*has 0 that can be cached; leave"):
        generate_samples(model, conditioning, make_keys(6), SAMPLER, cache=SKIPPING[0])


def test_network_without_a_known_layer_is_refused():
    strange = SimpleNamespace(transformer=torch.nn.Sequential(torch.nn.Linear(2, 2)))
    with (
        pytest.raises(ModelError, match="taylor_seer.*finds no layer of Sequential"),
        cache_features(strange, SKIPPING[1], STEPS, "float32"),
    ):
        pass


@pytest.mark.parametrize("cache", [SKIPPING[0], SKIPPING[2]], ids=name_of)
def test_network_of_unknown_blocks_is_refused(cache):
    class OwnNetwork(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    strange = SimpleNamespace(transformer=OwnNetwork())
    attributes = [set(vars(module)) for module in strange.transformer.modules()]
    with (
        pytest.raises(ModelError, match="does not fit OwnNetwork.*Linear.*Leave rollout_cache out"),
        cache_features(strange, cache, STEPS, "float32"),
    ):
        pass
    assert [set(vars(module)) for module in strange.transformer.modules()] == attributes


def test_measured_ratios_are_those_of_the_residuals(trained_model, make_keys):
    conditioning = trained_model.encode_texts(TEXTS)
    keys = make_keys(6)
    inputs, outputs = [], []
    blocks = trained_model.list_blocks()
    handles = [
        blocks[0].register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
        ),
        blocks[-1].register_forward_hook(lambda module, args, output: outputs.append(output[1])),
    ]
    generate_samples(trained_model, conditioning, keys, SAMPLER)
    for handle in handles:
        handle.remove()
    sizes = [(after - before).norm(dim=-1) for before, after in zip(inputs, outputs, strict=True)]
    expected = [1.0] + [
        (now / last).mean().item() for last, now in zip(sizes, sizes[1:], strict=False)
    ]
    ratios = measure_mag_ratios(trained_model, conditioning, keys, SAMPLER)
    assert ratios == pytest.approx(expected, rel=1e-4)


def test_rollouts_to_train_on_are_cached_and_validations_are_not(
    trained_model, make_recipe, make_prompts, make_keys
):
    stage = OnlineStageConfig.model_validate(
        small_stage(
            {
                "algorithm": {"name": "diffusion_nft"},
                "sampler": {"name": "ode", "steps": STEPS},
                "rollout_cache": {"name": "first_block", "threshold": 0.5},
            }
        )
    )
    policy = Policy(trained_model, PolicyConfig(train="full"), 0)
    recipe = make_recipe(evaluation={"steps": STEPS})
    ctx = SimpleNamespace(recipe=recipe, branch_recipe=recipe, config=stage)
    worker = RolloutWorker(Diffusers(ctx, policy))

    def embed(prompts):
        return trained_model.encode_texts([prompt.target for prompt in prompts])

    (request,) = build_validation_requests(ctx, make_prompts(4), embed, version=0)
    assert request.cache is None
    cached_request = request.__class__(**{**vars(request), "cache": stage.rollout_cache})
    weights = WeightsVersion(0)
    plain = worker.generate(request, weights)[0].latents
    cached = worker.generate(cached_request, weights)[0].latents
    assert not torch.equal(cached, plain)
    assert torch.equal(worker.generate(request, weights)[0].latents, plain)


def test_shards_of_an_offline_stage_are_cached(trained_model, make_recipe, make_prompts, tmp_path):
    cache = {"name": "first_block", "threshold": 0.5}
    sampler = {"name": "ode", "steps": STEPS}
    recipe = make_recipe(offline={"rollout_cache": cache, "sampler": sampler, "shards": 1})
    ctx = StageContext(recipe, 1, 1)
    policy = Policy(trained_model, PolicyConfig(train="full"), 0)
    policy.ensure_copy("old")
    prompts = make_prompts(2)
    write_shard(ctx, trained_model, policy, 0, prompts, 0, tmp_path / "shard.parquet")
    # One micro-batch of 8: two groups of 4 samples.
    keys = SampleKeys.number_groups(ctx.stage_seed, [0, 1], 4)
    texts = [prompts[prompt_id].prompt for prompt_id in keys.prompt_ids]
    conditioning = trained_model.encode_texts(texts)
    generated = [
        generate_samples(
            trained_model, conditioning, keys, ctx.config.sampler, micro_batch=8, cache=used
        ).latents
        for used in (ctx.config.rollout_cache, None)
    ]
    stored = read_latents(tmp_path / "shard.parquet")
    assert torch.allclose(stored, generated[0], rtol=0, atol=1e-4)
    assert not torch.allclose(stored, generated[1], rtol=0, atol=1e-2)
