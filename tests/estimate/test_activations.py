"""The activations of a network, against what autograd saves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import (
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    WanTransformer3DModel,
)
from peft import LoraConfig
from transformers import (
    BlipVisionConfig,
    BlipVisionModel,
    CLIPVisionConfig,
    CLIPVisionModel,
    Qwen2VLConfig,
    Qwen2VLModel,
)

from ebbflow.data.model_sizes import BLOCK_BYTES, ModelSizes
from ebbflow.estimate.activations import activation_bytes
from ebbflow.estimate.hours import count_recomputed_passes
from ebbflow.estimate.run import estimate_recipe
from ebbflow.estimate.text import GIB
from ebbflow.recipe import load_recipe
from ebbflow.recipe.model import ModelConfig

RECIPES = Path(__file__).parents[2] / "workflows" / "recipes"


WIDTH = 128
TEXT = 40
SIDE = 32
HEADS = {"num_attention_heads": 4, "attention_head_dim": 32}


def network(family, blocks):
    if family == "sd3":
        return SD3Transformer2DModel(
            sample_size=SIDE,
            in_channels=4,
            out_channels=4,
            num_layers=blocks,
            joint_attention_dim=48,
            caption_projection_dim=WIDTH,
            pooled_projection_dim=40,
            pos_embed_max_size=48,
            qk_norm="rms_norm",
            **HEADS,
        )
    if family == "flux":
        streams = {
            "num_layers": blocks // 2,
            "num_single_layers": blocks // 2,
            "axes_dims_rope": (8, 12, 12),
        }
        return FluxTransformer2DModel(
            in_channels=16, joint_attention_dim=48, pooled_projection_dim=16, **streams, **HEADS
        )
    if family == "qwen_image":
        return QwenImageTransformer2DModel(
            num_layers=blocks, joint_attention_dim=32, axes_dims_rope=(8, 12, 12), **HEADS
        )
    return WanTransformer3DModel(
        num_layers=blocks, in_channels=4, out_channels=4, text_dim=32, ffn_dim=4 * WIDTH, **HEADS
    )


def inputs(family, samples):
    side = SIDE // 2
    draw = torch.randn
    time = {"timestep": torch.rand(samples), "return_dict": False}
    if family == "sd3":
        pooled = draw(samples, 40)
        return time | {
            "hidden_states": draw(samples, 4, SIDE, SIDE),
            "encoder_hidden_states": draw(samples, TEXT, 48),
            "pooled_projections": pooled,
        }
    if family == "flux":
        ids = {"txt_ids": torch.zeros(TEXT, 3), "img_ids": torch.zeros(side * side, 3)}
        text = {
            "encoder_hidden_states": draw(samples, TEXT, 48),
            "pooled_projections": draw(samples, 16),
        }
        return time | ids | text | {"hidden_states": draw(samples, side * side, 16)}
    if family == "qwen_image":
        mask = torch.ones(samples, TEXT, dtype=torch.bool)
        text = {
            "encoder_hidden_states": draw(samples, TEXT, 32),
            "encoder_hidden_states_mask": mask,
        }
        return (
            time
            | text
            | {
                "hidden_states": draw(samples, side * side, 64),
                "img_shapes": [[(1, side, side)]] * samples,
            }
        )
    return time | {
        "hidden_states": draw(samples, 4, 1, SIDE, SIDE),
        "encoder_hidden_states": draw(samples, TEXT, 32),
    }


LAYERS = {
    "sd3": [
        "attn.to_q",
        "attn.to_k",
        "attn.to_v",
        "attn.to_out.0",
        "attn.add_q_proj",
        "attn.add_k_proj",
        "attn.add_v_proj",
    ],
    "flux": ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0", "ff.net.0.proj", "ff.net.2"],
    "qwen_image": [
        "to_q",
        "to_k",
        "to_v",
        "to_out.0",
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.2",
    ],
    "wan": ["to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"],
}


def saved_bytes(family, blocks, mode, checkpointing=False):
    """Bytes that autograd keeps after a forward pass for a second sample: what is there once is no
    activation.
    """
    torch.manual_seed(0)
    module = network(family, blocks).train()
    if mode == "lora":
        module.to(torch.bfloat16).requires_grad_(False)
        module.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=LAYERS[family]))
    if checkpointing:
        module.enable_gradient_checkpointing()
    kept = [{}, {}]
    for samples, storages in enumerate(kept, start=1):

        def keep(value, storages=storages):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
            return value

        hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=mode != "float32"):
            module(**inputs(family, samples))
    one, two = (sum(storages.values()) for storages in kept)
    return two - one


def toy(blocks):
    return ModelSizes(
        parameters=0,
        blocks=blocks,
        width=WIDTH,
        linears={},
        lora_targets=(),
        text_encoders=0,
        vae=0,
        text_width=0,
        stored=0,
    )


def tokens_of(family):
    return (SIDE // 2) ** 2 + (0 if family == "wan" else TEXT)


def kept_for_the_gradient(module, image, call):
    """Bytes that autograd keeps of an image through a network that is not trained; its own weights
    do not count.
    """
    own = {
        value.untyped_storage().data_ptr()
        for value in module.requires_grad_(False).eval().parameters()
    }
    kept = {}

    def keep(value):
        storage = value.untyped_storage()
        kept.update({storage.data_ptr(): storage.nbytes()} if storage.data_ptr() not in own else {})
        return value

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        call(image.requires_grad_())
    return sum(kept.values())


def of_vision(kind, config, patch, layers):
    sizes = {
        "hidden_size": WIDTH,
        "intermediate_size": 4 * WIDTH,
        "num_attention_heads": 4,
        "image_size": 224,
    }
    module = kind(config(**sizes, num_hidden_layers=layers, patch_size=patch))
    return kept_for_the_gradient(
        module, torch.rand(1, 3, 224, 224), lambda pixels: module(pixel_values=pixels)
    )


def of_qwen(layers, language):
    """In the shape of Qwen2-VL-7B, a sixteenth of its width."""
    text = {
        "hidden_size": 224,
        "intermediate_size": 1184,
        "num_hidden_layers": layers,
        "num_attention_heads": 28,
    }
    rope = {"type": "mrope", "mrope_section": [1, 1, 2]}
    text |= {
        "num_key_value_heads": 4,
        "vocab_size": 8,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "rope_scaling": rope,
    }
    vision = {"depth": layers, "embed_dim": WIDTH, "hidden_size": 224, "num_heads": 4}
    module = Qwen2VLModel(Qwen2VLConfig(text_config=text, vision_config=vision))
    if language:
        return kept_for_the_gradient(
            module, torch.rand(1, 300, 224), lambda x: module.language_model(inputs_embeds=x)
        )
    grid = torch.tensor([[1, 16, 16]])
    return kept_for_the_gradient(
        module, torch.rand(256, 1176), lambda x: module.visual(x, grid_thw=grid)
    )


@pytest.mark.parametrize(
    ("kept", "size"),
    [
        (lambda layers: of_vision(CLIPVisionModel, CLIPVisionConfig, 14, layers), 257 * WIDTH),
        (lambda layers: of_vision(BlipVisionModel, BlipVisionConfig, 16, layers), 197 * WIDTH),
        (lambda layers: of_qwen(layers, language=False), 256 * WIDTH),
        (lambda layers: of_qwen(layers, language=True), 300 * 224),
    ],
    ids=["clip", "blip", "qwen's eyes", "qwen"],
)
def test_what_a_reward_keeps_of_an_image_is_right_within_a_factor_of_two(kept, size):
    """A block over estimated: .83, .82, .94 and 1.19."""
    ratio = (kept(3) - kept(1)) / 2 / (BLOCK_BYTES * 2 * size)
    assert 0.5 < ratio < 2, f"a block keeps {ratio:.2f} times the estimate"


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("family", LAYERS)
@pytest.mark.parametrize("mode", ["float32", "bfloat16", "lora"])
def test_activations_are_right_within_a_factor_of_two(family, mode):
    """Saved over estimated: float32 .96 to 1.24, trained in 16 bits 1.12 to 1.75, under a LoRA .69
    to 1.19; most for wan.
    """
    precision = "float32" if mode == "float32" else "bfloat16"
    ratio = saved_bytes(family, 4, mode) / activation_bytes(
        toy(4), tokens_of(family), precision, checkpointing=False
    )
    assert 0.5 < ratio < 2, f"{family} in {mode} keeps {ratio:.2f} times the estimate"


def test_with_checkpointing_a_block_keeps_its_input():
    four, eight = (saved_bytes("sd3", blocks, "float32", checkpointing=True) for blocks in (4, 8))
    expected = [
        activation_bytes(toy(blocks), tokens_of("sd3"), "float32", checkpointing=True)
        for blocks in (4, 8)
    ]
    assert eight - four == expected[1] - expected[0]


def test_blocks_that_do_not_recompute_keep_all():
    """Of 8 blocks with activations a and inputs x, where each third recomputes: 3 x, 5 a, and one a
    that is there again.
    """
    whole = toy(8)
    tokens = tokens_of("sd3")
    block = activation_bytes(whole, tokens, "float32", checkpointing=False) // 8
    taken = tokens * WIDTH * 4
    for every, expected in (
        (1, 8 * taken + block),
        (2, 4 * taken + 5 * block),
        (3, 3 * taken + 6 * block),
    ):
        assert activation_bytes(whole, tokens, "float32", True, every) == expected
    assert [
        count_recomputed_passes(
            ModelConfig(gradient_checkpointing=True, gradient_checkpointing_every=n)
        )
        for n in (1, 2)
    ] == [1, 0.5]
    assert count_recomputed_passes(ModelConfig()) == 0


@pytest.mark.parametrize(("name", "times"), [("sd35_medium_ocr_512", 2), ("sd35_medium_nft", 1)])
def test_guidance_doubles_what_is_kept_on_trajectories_and_not_on_final_latents(name, times):
    recipe = load_recipe(RECIPES / f"{name}.yaml")
    plain, guided = (
        estimate_recipe(
            recipe.model_copy(
                update={"model": recipe.model.model_copy(update={"guidance": guidance})}
            )
        )
        for guidance in (1.0, 4.5)
    )
    assert (plain.sample.passes, guided.sample.passes) == (1, 2)
    kept = [made.memory["1.1 online training"].activations for made in (plain, guided)]
    assert kept[1] == times * kept[0] > GIB
