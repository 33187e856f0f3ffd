"""Qwen-Image under a LoRA in bfloat16 attends without a mask on CUDA, and predicts what the mask
gives.

CPUs have no flash attention of several sequences: a loop over the sequences takes its place, with
the arguments of ``torch.nn.attention.varlen.varlen_attn``.
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from pipeline_cases import few_tokens

from benchmarks.first_hour.lines import Setting
from benchmarks.first_hour.parts import attention
from ebbflow.models import fused_kernels, load_model, predict
from ebbflow.models.base import Conditioning
from ebbflow.models.fused_kernels import (
    UnpaddedAttention,
    can_attend_without_padding,
    find_sequences,
)
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.policy import Policy
from tests.pretend_cuda.device import pretend_cuda

attend = torch.nn.functional.scaled_dot_product_attention
LENGTHS = [5, 2, 5]
ROUNDING = 2.0**-8
"""Of bfloat16, relative."""


def attend_to_sequences(query, key, value, query_bounds, key_bounds, max_q, max_k, num_splits):
    """Attention of each sequence [T, heads, D] to itself."""
    assert query_bounds.dtype == key_bounds.dtype == torch.int32
    assert num_splits == 1
    queries = query_bounds.tolist()
    keys = key_bounds.tolist()
    assert queries[0] == keys[0] == 0
    assert queries[-1] == len(query)
    assert keys[-1] == len(key)
    parts = []
    for number in range(len(queries) - 1):
        of_queries = slice(queries[number], queries[number + 1])
        of_keys = slice(keys[number], keys[number + 1])
        assert of_queries.stop - of_queries.start <= max_q
        assert of_keys.stop - of_keys.start <= max_k
        # [T, heads, D] to [heads, T, D].
        heads_first = [x.transpose(0, 1) for x in (query[of_queries], key[of_keys], value[of_keys])]
        if heads_first[0].shape[1]:
            parts.append(attend(*heads_first).transpose(0, 1))
    return torch.cat(parts)


@pytest.fixture(scope="module")
def folder(tiny_folder):
    return tiny_folder("qwen_image")


def predict_rows(folder, device, rows=slice(None), padding=0.0):
    """(predictions, gradients of the adapters) of prompts of ``LENGTHS`` tokens, padded to 6 with
    a number that nothing may see.
    """
    config = ModelConfig(
        family="qwen_image",
        path=str(folder),
        precision="bfloat16",
        height=32,
        width=32,
        **few_tokens("qwen_image"),
    )
    policy = Policy(load_model(folder, config), PolicyConfig(train="lora", rank=4, alpha=8), 0)
    model = policy.model
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            if "lora_B" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    width = model.transformer.config.joint_attention_dim
    embeds = torch.randn(len(LENGTHS), 6, width, generator=generator)
    mask = torch.arange(6) < torch.tensor(LENGTHS)[:, None]
    embeds[~mask] = padding
    latents = torch.randn(len(LENGTHS), *model.latent_shape, generator=generator)[rows].to(device)
    sigma = torch.tensor([0.9, 0.2, 0.5])[rows].to(device)
    conditioning = Conditioning({"embeds": embeds.bfloat16()[rows], "mask": mask[rows]})
    prediction = predict(model, latents, sigma, conditioning.to(torch.device(device)))
    prediction.square().mean().backward()
    # The text of the last block goes nowhere, and its adapters have no gradient.
    gradients = [p.grad for p in policy.parameters.values() if p.grad is not None]
    return prediction.detach().cpu(), torch.cat([g.flatten().cpu() for g in gradients])


def test_the_first_hour_compares_it_with_the_mask(tmp_path):
    """With the loop in place of the kernel, as no CPU has it: the part itself is tested."""
    with (
        pretend_cuda(),
        patch.object(attention, "SHAPE", (3, 16, 2, 8)),
        patch.object(attention, "LENGTHS", (3, 1, 6)),
        patch.object(fused_kernels, "varlen_attn", attend_to_sequences),
    ):
        lines = list(attention.measure(Setting(tmp_path, "tiny")))
    assert [line.verdict for line in lines] == ["passed"] * 3


def predict_unpadded(folder, **keys):
    """As ``predict_rows`` on the pretend device, where no attention may have a mask."""

    def refuse_mask(query, key, value, attn_mask=None, **others):
        assert attn_mask is None
        return attend(query, key, value, **others)

    with (
        pretend_cuda(),
        patch.object(torch.nn.functional, "scaled_dot_product_attention", refuse_mask),
        patch.object(fused_kernels, "varlen_attn", side_effect=attend_to_sequences) as kernel,
    ):
        results = predict_rows(folder, "cuda", **keys)
    assert kernel.call_count > 0
    return results


def test_predictions_and_gradients_are_those_under_the_mask_up_to_rounding(folder):
    expected, expected_gradients = predict_rows(folder, "cpu")
    prediction, gradients = predict_unpadded(folder)
    # Each block rounds its sums anew: some roundings of the largest number.
    assert (prediction - expected).abs().max() < 8 * ROUNDING * expected.abs().max()
    assert torch.nn.functional.cosine_similarity(gradients, expected_gradients, dim=0) > 0.99


def test_padding_is_seen_by_nobody(folder):
    zeros, _ = predict_unpadded(folder)
    numbers, _ = predict_unpadded(folder, padding=7.0)
    assert torch.equal(zeros, numbers)


def test_all_blocks_of_a_pass_share_the_sequences_of_its_mask():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    bounds = find_sequences(mask, image_tokens=4)
    assert bounds.tolist() == [0, 7, 7, 12, 14]
    assert bounds.dtype == torch.int32
    assert find_sequences(mask, image_tokens=4) is bounds
    assert find_sequences(mask, image_tokens=5).tolist() == [0, 8, 8, 14, 16]
    assert find_sequences(~mask, image_tokens=4).tolist() == [0, 4, 7, 13, 14]


@pytest.mark.parametrize("keys", [{"precision": "float32"}, {"attention": "native"}])
def test_a_mask_stays_where_flash_attention_does_not_fit(folder, keys):
    """In float32, and with an attention that the recipe names."""
    precision = {"precision": "bfloat16"} | keys
    config = ModelConfig(family="qwen_image", path=str(folder), height=32, width=32, **precision)
    policy = Policy(load_model(folder, config), PolicyConfig(train="lora", rank=4, alpha=8), 0)
    processors = [block.attn.processor for block in policy.model.list_blocks()]
    for processor in processors:
        unpadded = isinstance(processor, UnpaddedAttention)
        assert not unpadded or processor._attention_backend is not None


@pytest.mark.parametrize(
    ("capability", "has_kernel"), [((7, 5), True), ((9, 0), False)], ids=["turing", "older torch"]
)
def test_a_mask_stays_where_the_gpu_or_torch_has_no_such_kernel(folder, capability, has_kernel):
    with (
        pretend_cuda(),
        patch.object(torch.cuda, "get_device_capability", lambda *_: capability),
        patch.object(fused_kernels, "HAS_UNPADDED_KERNEL", has_kernel),
        patch.object(fused_kernels, "varlen_attn") as kernel,
    ):
        predict_rows(folder, "cuda")
        lines = list(attention.measure(Setting(folder, "tiny")))
    assert kernel.call_count == 0
    assert [line.verdict for line in lines] == ["not measured"] * 3
    assert not can_attend_without_padding(torch.device("meta"), head_dim=12)
