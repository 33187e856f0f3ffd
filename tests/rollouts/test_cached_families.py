"""Feature caches on the tiny model of each family: those of its record skip layers, and change
nothing where they skip none.
"""

from __future__ import annotations

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from benchmarks.tiny_models import build_tiny
from ebbflow.models.families import load_adapter
from ebbflow.models.families.qwen_image_edit import QwenImageEditModel
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.rollout_cache import (
    FirstBlockCacheConfig,
    MagCacheConfig,
    TaylorSeerCacheConfig,
)
from ebbflow.rollouts.generate import generate_samples
from tests.models.pipeline_cases import (
    EDITED_PIXELS,
    PADDED,
    draws_videos,
    few_tokens,
    guidance,
    guided,
    keys,
    pad_to_few_tokens,
    prompts,
)

STEPS = 6
SKIPPING = {
    "first_block": FirstBlockCacheConfig(threshold=1e9),
    "taylor_seer": TaylorSeerCacheConfig(interval=4, warmup=1),
    "mag": MagCacheConfig(ratios=[1.0, 1.0], retention=0.0),
}
NEVER_SKIPPING = {
    "first_block": FirstBlockCacheConfig(threshold=1e-9),
    "taylor_seer": TaylorSeerCacheConfig(warmup=STEPS),
    "mag": MagCacheConfig(ratios=[1.0, 1.0], retention=1.0),
}
FAST = ("sd3", "flux", "wan")
CACHED = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.exhaustive)
    for name, family in FAMILIES.items()
    # ``test_feature_cache`` has the glyph model.
    if family.feature_caches and name != "glyph"
]


@pytest.mark.parametrize("family", CACHED)
def test_caches_of_a_family_skip_and_change_nothing_where_they_do_not(
    family, tmp_path, monkeypatch
):
    folder = tmp_path / family
    build_tiny(family, folder)
    frames = {"frames": 9} if draws_videos(family) else {}
    config = ModelConfig(
        family=family,
        path=str(folder),
        height=64,
        width=64,
        guidance=guidance(family),
        **few_tokens(family),
        **frames,
    )
    model = load_adapter(family).load(folder, config, torch.device("cpu"))
    # Of a picture of a megapixel a pass takes seconds.
    if isinstance(model, QwenImageEditModel):
        model.edited_pixels = EDITED_PIXELS
    if family in PADDED:
        pad_to_few_tokens(model.pipeline)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", EDITED_PIXELS)
    monkeypatch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", EDITED_PIXELS // 2)
    rows = prompts(family)
    conditioning = model.encode_prompts(rows)
    num_rows = len(rows) * (1 + guided(family))
    sampler = SamplerConfig(name="ode", steps=STEPS)
    seen = []
    last_block = model.list_blocks()[-1]
    layer = next(
        module
        for name, module in last_block.named_modules()
        if "attn" in name and isinstance(module, torch.nn.Linear)
    )
    layer.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))

    def generate(cache=None):
        seen.clear()
        return generate_samples(model, conditioning, keys(rows), sampler, cache=cache).latents

    plain = generate()
    for name in FAMILIES[family].feature_caches:
        # The tiny SD3 has one block besides the last, which this cache never skips
        # (``test_feature_cache`` has a deeper one).
        if (family, name) == ("sd3", "first_block"):
            continue
        assert torch.equal(generate(NEVER_SKIPPING[name]), plain), name
        cached = generate(SKIPPING[name])
        assert cached.isfinite().all(), name
        assert not torch.equal(cached, plain), name
        # Under guidance both halves of a pass, or neither.
        assert len(seen) < STEPS, name
        assert set(seen) <= {num_rows}, name
    assert torch.equal(generate(), plain)
