"""The adapters of diffusers' pipelines against these pipelines: the same image from one noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    HunyuanVideo15Pipeline,
)
from folder_cases import change_index, copy_folder
from pipeline_cases import (
    EVERY,
    FIRST_AND_LAST,
    LONG,
    NEWER_FAMILIES_IN_TEST_ALL,
    NEWEST_FAMILIES_IN_TEST_ALL,
    SHORT,
    TINY,
    FirstOrderUniPC,
    UnroundedUniPC,
    edits,
    guided,
    has_limit,
    keys,
    our_latents,
    picture,
    prompts,
    theirs,
)
from torch import nn

from ebbflow.flow.latents import get_picture_shape
from ebbflow.models import ModelError, load_model, predict
from ebbflow.models.base import Conditioning, is_trainable
from ebbflow.models.packed import pack_latents, unpack_tokens
from ebbflow.recipe.choices import SamplerConfig
from ebbflow.recipe.model import ModelConfig
from ebbflow.rollouts.generate import generate_samples
from tests.tolerances import assert_equal_to_rounding


def assert_same(model, pipeline, wanted, steps=3):
    ours = our_latents(model, wanted, steps)
    latents, images = theirs(pipeline, model, wanted, steps)
    assert ours.std() > 0.5
    assert (ours - latents).abs().max() < 1e-5 * ours.abs().max()
    decoded = model.decode_latents(ours)
    assert decoded.dtype == np.uint8
    assert decoded.std() > 5
    assert np.abs(decoded - images).max() < 1
    leaf = ours.clone().requires_grad_()
    pixels = model.decode_with_gradient(leaf)
    assert np.abs((255 * pixels).detach().movedim(-3, -1).numpy() - decoded).max() < 0.51
    assert torch.autograd.grad(pixels.sum(), leaf)[0].abs().max() > 0


# The same image as the pipeline.


@pytest.mark.parametrize("name", EVERY)
def test_the_ode_is_the_pipeline(tiny, peer, name):
    assert_same(tiny(name), peer(name), prompts(name, SHORT))


@pytest.mark.any_cpu
@pytest.mark.parametrize("name", EVERY)
def test_blocks_are_listed_in_the_order_of_their_calls(tiny, name):
    """Prefetch relies on it: a block that was asked for after its call would keep weights for the
    next pass.
    """
    model = tiny(name)
    called = []
    blocks = model.list_blocks()
    hooks = [
        block.register_forward_pre_hook(lambda module, _: called.append(module)) for block in blocks
    ]
    our_latents(model, prompts(name, SHORT[:1]), steps=2)
    for hook in hooks:
        hook.remove()
    assert called == [block for _ in range(len(called) // len(blocks)) for block in blocks]
    assert called


@pytest.mark.parametrize(
    ("texts", "config"),
    [((SHORT[1], LONG), {"width": 96}), (SHORT[:2], {"guidance": 1.0, "height": 96})],
    ids=["long-wide", "unguided-tall"],
)
@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_the_ode_is_the_pipeline_at_other_sizes(tiny, peer, name, texts, config):
    assert_same(tiny(name, **config), peer(name), prompts(name, texts))


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        *(("wan", 5), ("wan21", 5), ("wan_i2v", 5), ("hunyuan_video", 5), ("hunyuan_video_15", 5)),
        *(("ltx_video", 9), ("ltx2", 9)),
    ],
)
def test_videos_are_the_pipelines(tiny, peer, name, frames):
    model = tiny(name, frames=frames)
    assert_same(model, peer(name), prompts(name, SHORT[:2]))
    assert get_picture_shape(model.latent_shape)[1] == 2
    assert model.decode_latents(torch.zeros(1, *model.latent_shape)).shape == (1, frames, 64, 64, 3)


@pytest.mark.parametrize(
    ("size", "latents"),
    [
        ((80, 40), (4, 12)),
        # Scaled to 96 x 64, whose own proportions would lead to 64 x 64.
        ((80, 48), (8, 12)),
    ],
)
def test_an_image_to_edit_keeps_its_proportions(tiny, peer, size, latents):
    model = tiny("qwen_image_edit")
    wanted = prompts("qwen_image_edit", SHORT[:2], size=size)
    assert_same(model, peer("qwen_image_edit"), wanted)
    assert model.encode_prompts(wanted)["image"].shape == (2, 16, *latents)


def test_the_rounding_of_times_is_all_that_differs_from_steps_of_first_order(open_tiny, open_peer):
    """UniPC gives the network integers; the sigmas that it steps along are not rounded, and ours
    never are.
    """
    model = open_tiny("wan")
    pipeline = open_peer("wan")
    wanted = prompts("wan", SHORT[:1])
    rounded = type(
        "Rounded", (FirstOrderUniPC,), {"set_timesteps": FirstOrderUniPC.__base__.set_timesteps}
    )
    pipeline.scheduler = rounded.from_config(pipeline.scheduler.config)
    latents, _ = theirs(pipeline, model, wanted)
    assert (our_latents(model, wanted) - latents).abs().max() > 1e-4

    def round_down(module, positional, named):
        return positional, named | {"timestep": (named["timestep"] * (1 - 1e-6)).floor()}

    model.transformer.register_forward_pre_hook(round_down, with_kwargs=True)
    assert (our_latents(model, wanted) - latents).abs().max() < 1e-4


def test_unipc_is_the_published_solver_of_wan(tiny, open_peer):
    """But for the rounding of times."""
    model = tiny("wan21")
    pipeline = open_peer("wan21")
    wanted = prompts("wan21", SHORT[:1])
    pipeline.scheduler = UnroundedUniPC.from_config(
        pipeline.scheduler.config, solver_order=2, disable_corrector=[]
    )
    latents, _ = theirs(pipeline, model, wanted, steps=5)
    ours = generate_samples(
        model, model.encode_prompts(wanted), keys(wanted), SamplerConfig(name="unipc", steps=5)
    ).latents
    assert (ours - latents).abs().max() < 1e-5 * ours.abs().max()
    assert (ours - our_latents(model, wanted, steps=5)).abs().max() > 1e-2


def test_flux_without_guidance_is_the_pipeline(tiny_folder, open_tiny, open_peer, tmp_path):
    """The layout of FLUX.1 schnell: no guidance, no shift."""
    folder = copy_folder(tiny_folder("flux"), tmp_path / "schnell", "transformer", "scheduler")
    config = FluxTransformer2DModel.load_config(tiny_folder("flux") / "transformer")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        FluxTransformer2DModel.from_config(config, guidance_embeds=False).save_pretrained(
            folder / "transformer"
        )
    FlowMatchEulerDiscreteScheduler(shift=1.0).save_pretrained(folder / "scheduler")
    model = open_tiny("flux", folder, guidance=1.0)
    assert_same(model, open_peer("flux", folder), prompts("flux"))
    assert model.compute_sigmas(4).tolist() == [1, 0.75, 0.5, 0.25, 0]
    with pytest.raises(
        ModelError, match=r"model.guidance = 3.5: .*schnell takes no guidance.*leave it out"
    ):
        open_tiny("flux", folder, guidance=3.5)


def test_sd3_without_its_large_text_encoder_is_the_pipeline(
    tiny_folder, open_tiny, open_peer, tmp_path
):
    folder = copy_folder(tiny_folder("sd3"), tmp_path / "small", "text_encoder_3", "tokenizer_3")
    change_index(folder, text_encoder_3=[None, None], tokenizer_3=[None, None])
    absent = ("text_encoder_3", "tokenizer_3")
    assert_same(
        open_tiny("sd3", folder), open_peer("sd3", folder, absent), prompts("sd3", SHORT[:1])
    )


@pytest.mark.parametrize("name", NEWEST_FAMILIES_IN_TEST_ALL)
def test_the_image_depends_on_everything_that_the_pipeline_is_told(tiny, name):
    """Without this, an adapter that forgot any of it would still equal a pipeline that ignores
    it."""
    model = tiny(name)
    wanted = prompts(name, SHORT[:1])
    image = our_latents(model, wanted)
    others = [our_latents(model, prompts(name, SHORT[1:2])), our_latents(model, wanted, steps=4)]
    others.append(our_latents(tiny(name, guidance=2.0), wanted))
    if guided(name):
        others.append(our_latents(model, prompts(name, SHORT[:1], ["a wooden table"])))
    if edits(name):
        other_images = [picture(128, 64, seed) for seed in (9, 8)[: 1 + (name in FIRST_AND_LAST)]]
        others.append(our_latents(model, [replace(wanted[0], image=b"".join(other_images))]))
    for other in others:
        assert (other - image).abs().max() > 1e-2


@pytest.mark.parametrize("name", [name for name in TINY if has_limit(name)])
def test_prompts_beyond_the_limit_are_cut_there(tiny, name):
    together = tiny(name, max_tokens=20).encode_prompts(prompts(name, (SHORT[1], LONG)))
    assert together["embeds"].shape[1] == (77 + 20 if name == "sd3" else 20)
    assert not torch.allclose(together["embeds"][0], together["embeds"][1])
    if name == "qwen_image":
        short, long = together["mask"].sum(1).tolist()
        assert short < long == 20


def test_padding_to_the_published_limits_is_the_pipelines(tiny_folder):
    """To 1,000 tokens of text and 256 of quotes; of an image that is not there we have none, and
    the pipeline 729. All other tests pad to few.
    """
    folder = tiny_folder("hunyuan_video_15")
    size = {"height": 64, "width": 64, "guidance": 1.0}
    model = load_model(folder, ModelConfig(family="hunyuan_video_15", path=str(folder), **size))
    assert model.count_tokens().text == 1256
    pipeline = HunyuanVideo15Pipeline.from_pretrained(folder, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    assert pipeline.vision_num_semantic_tokens == 729
    assert_same(model, pipeline, prompts("hunyuan_video_15", SHORT[:1]), steps=2)


def test_hunyuan_video_reads_the_words_of_a_prompt(tiny):
    """The class that its folder names would lose the spaces of the text."""
    tokenizer = tiny("hunyuan_video").pipeline.tokenizer
    assert tokenizer.decode(tokenizer("two cats 漢").input_ids) == "<|begin_of_text|>two cats 漢"


# What follows from the family.


@pytest.mark.parametrize("name", EVERY)
def test_schedules_begin_at_pure_noise_and_end_at_the_image(tiny, name):
    model = tiny(name)
    for steps in (2, 4, 10):
        sigmas = model.compute_sigmas(steps)
        assert (sigmas.dtype, sigmas.shape) == (torch.float32, (steps + 1,))
        assert (sigmas[0], sigmas[-1]) == (1, 0)
        assert (sigmas.diff() < 0).all()
    sigmas_of_four = model.compute_sigmas(4)
    model.compute_sigmas(7)
    assert len(sigmas_of_four) == 5


@pytest.mark.parametrize("sampler", ["flow_sde", "dance_sde", "cps"])
@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_stochastic_samples_have_the_size_of_deterministic_ones(tiny, name, sampler):
    """A sigma of a hair below 1 would make the first noise of Flow-SDE a thousand times as
    large."""
    model = tiny(name, guidance=1.0)
    wanted = prompts(name)
    exact = our_latents(model, wanted, steps=6)
    noisy = generate_samples(
        model, model.encode_prompts(wanted), keys(wanted), SamplerConfig(name=sampler, steps=6)
    ).latents
    assert (noisy - exact).abs().max() > 0.1
    assert noisy.std() < 2 * exact.std()


@pytest.mark.parametrize("name", EVERY)
def test_the_blocks_are_all_that_repeats(tiny, name):
    model = tiny(name)
    kinds = [type(module).__name__ for module in model.transformer.modules()]
    named = model.transformer._no_split_modules or model.transformer._repeated_blocks
    several = {kind for kind in named if kinds.count(kind) > 1}  # some networks name their ends too
    repeated = [
        module
        for key, module in model.transformer.named_modules()
        if type(module).__name__ in several and is_trainable(model, f"{key}.weight")
    ]
    assert len(repeated) >= 2
    assert sorted(id(block) for block in model.list_blocks()) == sorted(
        id(block) for block in repeated
    )


@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_a_loaded_model_is_frozen(tiny, name):
    modules = [
        part for part in tiny(name).pipeline.components.values() if isinstance(part, nn.Module)
    ]
    assert len(modules) >= 3
    for module in modules:
        assert not module.training
        assert not any(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_what_pushes_samples_is_the_prompt_against_the_negative_one(tiny, name):
    """The closed form of guidance, from the network's own predictions of both."""
    model = tiny(name)
    wanted = prompts(name, SHORT[:2])
    conditioning = model.encode_prompts(wanted)
    latents = torch.randn(2, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    sigma = torch.tensor([0.8, 0.3])
    with torch.no_grad():
        pushed, alone = (
            predict(model, latents, sigma, inputs)
            for inputs in (conditioning, conditioning.without_guidance())
        )
    if not guided(name):
        assert conditioning.negative is None
        assert torch.equal(pushed, alone)
        return
    with torch.no_grad():
        negative = predict(model, latents, sigma, conditioning.negative)
    expected = negative + 4 * (alone - negative)
    if name.startswith("qwen") and name != "qwen_image_21":
        tokens = pack_latents(expected)
        length = pack_latents(alone).norm(dim=-1, keepdim=True)
        expected = unpack_tokens(
            tokens / tokens.norm(dim=-1, keepdim=True) * length, model.latent_shape
        )
    if name == "lumina2":  # of every row of the latents
        expected = expected / expected.norm(dim=-1, keepdim=True) * alone.norm(dim=-1, keepdim=True)
    # Guidance 4 adds and subtracts terms of this size.
    assert_equal_to_rounding(pushed, expected, 4 * alone, 4 * negative)
    assert (pushed - alone).abs().max() > 1e-2


def test_packing_is_undone_by_unpacking():
    latents = torch.randn(2, 3, 4, 6)
    tokens = pack_latents(latents)
    assert tokens.shape == (2, 6, 12)
    assert torch.equal(unpack_tokens(tokens, (3, 4, 6)), latents)
    # The second token is the second patch of the first row: two by two elements of every channel.
    assert torch.equal(tokens[0, 1], latents[0, :, :2, 2:4].flatten())


# How the network is computed.


@pytest.mark.parametrize("name", NEWER_FAMILIES_IN_TEST_ALL)
def test_gradient_checkpointing_changes_no_gradient(open_tiny, name):
    model = open_tiny(name, gradient_checkpointing=True)
    calls = []
    model.transformer.requires_grad_(True)
    model.list_blocks()[-1].register_forward_pre_hook(lambda *_: calls.append(1))
    latents = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    conditioning = model.encode_prompts(prompts(name, SHORT[:1]))

    def differentiate():
        calls.clear()
        model.transformer.zero_grad()
        velocity = predict(model, latents, torch.tensor([0.7]), conditioning)
        velocity.square().mean().backward()
        gradients = {
            key: p.grad for key, p in model.transformer.named_parameters() if p.grad is not None
        }
        return velocity.detach(), gradients, len(calls)

    velocity, gradients, count = differentiate()
    model.transformer.disable_gradient_checkpointing()
    same, expected, plain_count = differentiate()
    assert count == 2 * plain_count
    assert torch.allclose(velocity, same, atol=1e-6)
    assert gradients.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.allclose(gradients[key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_every_second_block_recomputes_its_activations(open_tiny, name):
    model = open_tiny(name, gradient_checkpointing=True, gradient_checkpointing_every=2)
    calls = []
    model.transformer.requires_grad_(True)
    for number, block in enumerate(model.list_blocks()):
        block.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    latents = torch.randn(1, *model.latent_shape, generator=torch.Generator().manual_seed(0))
    velocity = predict(
        model, latents, torch.tensor([0.7]), model.encode_prompts(prompts(name, SHORT[:1]))
    )
    forward = list(calls)
    velocity.square().mean().backward()
    assert forward == list(range(len(model.list_blocks())))
    assert sorted(calls[len(forward) :]) == forward[::2]


@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_attention_backends_are_those_of_diffusers(open_tiny, tiny, name):
    wanted = prompts(name, SHORT[:1])
    native = our_latents(open_tiny(name, attention="native"), wanted)
    assert (native - our_latents(tiny(name), wanted)).abs().max() < 1e-5
    with pytest.raises(
        ModelError,
        match="model.attention = 'fast': diffusers has .*flash, .*native, .*; take one of them",
    ):
        open_tiny(name, attention="fast")
    problem = (
        "diffusers has only 'native' for sd3" if name == "sd3" else "not usable.*Or leave it out"
    )
    with pytest.raises(ModelError, match=f"model.attention = '_flash_3': .*{problem}"):
        open_tiny(name, attention="_flash_3")


def test_an_embedded_guidance_stays_without_negative_prompts(tiny):
    conditioning = tiny("flux").encode_prompts(prompts("flux"))
    assert isinstance(conditioning, Conditioning)
    assert conditioning.without_guidance().guidance == conditioning.guidance == 3.5
