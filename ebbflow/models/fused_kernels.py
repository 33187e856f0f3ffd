"""Parts of diffusers' networks in fewer or faster kernels: norms in one each, the rotary embedding
of FLUX as one complex product, and flash attention for the padded prompts of Qwen-Image.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_qwenimage import (
    QwenDoubleStreamAttnProcessor2_0,
    apply_rotary_emb_qwen,
)
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

try:
    from torch.nn.attention.varlen import varlen_attn

    # Only torch 2.12 and newer can be told not to split keys (``attend_without_padding``).
    HAS_UNPADDED_KERNEL = "num_splits" in signature(varlen_attn).parameters
except ImportError:  # torch before 2.10
    HAS_UNPADDED_KERNEL = False


class FusedRMSNorm(RMSNorm):  # type: ignore[misc]
    """diffusers' RMSNorm in one kernel, which rounds once and not after each operation."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        if self.weight is None or self.bias is not None or hidden_states.dtype != self.weight.dtype:
            output: Tensor = super().forward(hidden_states)
            return output
        return nn.functional.rms_norm(hidden_states, self.dim, self.weight, self.eps)


class ComplexRotaryAttention(FluxAttnProcessor):  # type: ignore[misc]
    """The attention of FLUX.1 with ``rotate_pairs``: three kernels for each of query and key where
    diffusers' own rotation takes eight.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        # Inductor compiles no complex numbers, and fuses diffusers' own rotation by itself.
        if image_rotary_emb is None or torch.compiler.is_compiling():
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb
            )
        query, key, value = _project(hidden_states, attn, attn.head_dim, "to_q", "to_k", "to_v")
        query, key = attn.norm_q(query), attn.norm_k(key)
        text_tokens = 0
        if encoder_hidden_states is not None:
            text_tokens = encoder_hidden_states.shape[1]
            text_query, text_key, text_value = _project(
                encoder_hidden_states,
                attn,
                attn.head_dim,
                "add_q_proj",
                "add_k_proj",
                "add_v_proj",
            )
            # Text stands before the image: [N, text + image tokens, heads, D].
            query = torch.cat([attn.norm_added_q(text_query), query], dim=1)
            key = torch.cat([attn.norm_added_k(text_key), key], dim=1)
            value = torch.cat([text_value, value], dim=1)

        cosine, sine = image_rotary_emb
        # diffusers repeats the angle of each pair: [tokens, D] to [tokens, 1, D / 2].
        rotation = torch.complex(cosine[:, ::2], sine[:, ::2]).unsqueeze(1)
        mixed: Tensor = dispatch_attention_fn(
            rotate_pairs(query, rotation),
            rotate_pairs(key, rotation),
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        # As diffusers does for attention kernels that return another precision.
        mixed = mixed.flatten(2, 3).to(query.dtype)
        if encoder_hidden_states is None:
            return mixed
        text, image = mixed[:, :text_tokens], mixed[:, text_tokens:]
        projection, dropout = attn.to_out
        return dropout(projection(image.contiguous())), attn.to_add_out(text.contiguous())


def _project(tokens: Tensor, attn: Any, head_dim: int, *names: str) -> tuple[Tensor, ...]:
    """Apply the named layers to tokens [N, L, width]: [N, L, heads, D] each."""
    return tuple(getattr(attn, name)(tokens).unflatten(-1, (-1, head_dim)) for name in names)


class UnpaddedAttention(QwenDoubleStreamAttnProcessor2_0):  # type: ignore[misc]
    """The attention of Qwen-Image as torch's flash attention of sequences of different lengths.

    diffusers passes a mask of the padding of prompts, which flash attention does not take. A row's
    result depends on no other row, as with the mask, and no length comes to the CPU.
    """

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Any:
        mask = encoder_hidden_states_mask
        is_supported = (
            hidden_states.dtype in (torch.bfloat16, torch.float16)
            # A recipe's ``model.attention`` and ranks that share tokens have their own.
            and self._attention_backend is None
            and self._parallel_config is None
            and not torch.compiler.is_compiling()
            and can_attend_without_padding(hidden_states.device, attn.inner_dim // attn.heads)
        )
        if (
            not is_supported
            or encoder_hidden_states is None
            or mask is None
            or image_rotary_emb is None
        ):
            return super().__call__(
                attn, hidden_states, encoder_hidden_states, mask, attention_mask, image_rotary_emb
            )
        head_dim = attn.inner_dim // attn.heads
        query, key, value = _project(hidden_states, attn, head_dim, "to_q", "to_k", "to_v")
        text_query, text_key, text_value = _project(
            encoder_hidden_states, attn, head_dim, "add_q_proj", "add_k_proj", "add_v_proj"
        )
        angles, text_angles = image_rotary_emb
        # The image before its text, so that padding comes last: [N, image + text, heads, D].
        query = torch.cat(
            [
                _rotate(attn.norm_q(query), angles),
                _rotate(attn.norm_added_q(text_query), text_angles),
            ],
            1,
        )
        key = torch.cat(
            [_rotate(attn.norm_k(key), angles), _rotate(attn.norm_added_k(text_key), text_angles)],
            1,
        )
        value = torch.cat([value, text_value], 1)
        image_tokens = hidden_states.shape[1]
        mixed = attend_without_padding(query, key, value, mask).flatten(2)
        image, text = mixed[:, :image_tokens], mixed[:, image_tokens:]
        projection, dropout = attn.to_out
        return dropout(projection(image.contiguous())), attn.to_add_out(text.contiguous())


def can_attend_without_padding(device: torch.device, head_dim: int) -> bool:
    """Return whether torch has the kernel of ``attend_without_padding``: on NVIDIA's GPUs from
    Ampere on, as all of its flash attention.
    """
    if not HAS_UNPADDED_KERNEL or head_dim % 8 or head_dim > 256:
        return False
    # On meta tensors, kernels and memory of a GPU are counted.
    return device.type == "meta" or (
        device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    )


def attend_without_padding(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Return the attention [N, tokens, heads, D] of rows that end with a padded prompt, in 16 bits
    on CUDA: that of each row without its padding, whose own results mean nothing.

    Args:
        query, key, value: [N, tokens, heads, D], the last L of the tokens a prompt.
        mask: bool [N, L], True for the tokens of the prompt, which come before its padding.
    """
    rows, tokens = query.shape[:2]
    bounds = find_sequences(mask, tokens - mask.shape[1])
    mixed: Any = varlen_attn(
        query.flatten(0, 1),
        key.flatten(0, 1),
        value.flatten(0, 1),
        bounds,
        bounds,
        tokens,
        tokens,
        # All keys in one go: parts would be added in an order that depends on other rows.
        num_splits=1,
    )
    unpacked: Tensor = mixed.unflatten(0, (rows, tokens))
    return unpacked


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    rotated: Tensor = apply_rotary_emb_qwen(x, angles, use_real=False)
    return rotated


_bounds_of_masks: Any = WeakTensorKeyDictionary()


def find_sequences(mask: Tensor, image_tokens: int) -> Tensor:
    """Find the sequences of a pass whose rows are an image, a prompt and its padding: of each row
    two, image and prompt, and the padding, which attends to itself and is seen by nobody.

    All blocks of a pass have the same mask, so its sequences are found once.

    Example:
        Four tokens of an image; prompts of 3 and 1 tokens, padded to 3. The second sequence of the
        first row is empty::

            find_sequences(torch.tensor([[1, 1, 1], [1, 0, 0]]).bool(), 4)  # [0, 7, 7, 12, 14]

    Args:
        mask: bool [N, L], True for the tokens of a prompt, which come first.

    Returns:
        int32 [2 N + 1]: where each sequence begins in the N (image_tokens + L) tokens, and the end.
    """
    bounds_by_tokens: dict[int, Tensor] = _bounds_of_masks.setdefault(mask, {})
    if image_tokens not in bounds_by_tokens:
        rows, text_tokens = mask.shape
        tokens = image_tokens + text_tokens
        starts = torch.arange(rows, device=mask.device) * tokens
        paddings = starts + image_tokens + mask.sum(1)
        pairs = torch.stack([starts, paddings], 1).flatten()
        bounds = nn.functional.pad(pairs, (0, 1), value=rows * tokens).int()
        bounds_by_tokens[image_tokens] = bounds
    return bounds_by_tokens[image_tokens]


def rotate_pairs(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotate each pair of neighbours of x [N, tokens, heads, D] as a complex number, in float32
    (rotary embedding: Su et al., RoFormer, 2104.09864).

    Args:
        rotation: complex64 [tokens, 1, D / 2], cos + i sin of the angles.
    """
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)


def fuse_kernels(network: nn.Module) -> None:
    """Have the parts of a network compute in fewer kernels: RMS norms where they compute in the
    precision of their weights, and the attention of FLUX.1 and of Qwen-Image.
    """
    for module in network.modules():
        # Classes alone change: weights, names and what a processor was set to stay.
        if type(module) is RMSNorm:
            module.__class__ = FusedRMSNorm
        processor = getattr(module, "processor", None)
        if type(processor) is FluxAttnProcessor and not module.fused_projections:
            processor.__class__ = ComplexRotaryAttention
        if type(processor) is QwenDoubleStreamAttnProcessor2_0:
            processor.__class__ = UnpaddedAttention
