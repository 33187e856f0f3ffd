"""Parts of diffusers' networks in fewer kernels: norms in one each, and the rotary embedding of
FLUX as one complex product.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from torch import Tensor, nn


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
        query, key, value = _project(hidden_states, attn, "to_q", "to_k", "to_v")
        query, key = attn.norm_q(query), attn.norm_k(key)
        text_tokens = 0
        if encoder_hidden_states is not None:
            text_tokens = encoder_hidden_states.shape[1]
            text_query, text_key, text_value = _project(
                encoder_hidden_states, attn, "add_q_proj", "add_k_proj", "add_v_proj"
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


def _project(tokens: Tensor, attn: Any, *names: str) -> tuple[Tensor, ...]:
    """Apply the named layers to tokens [N, L, width]: [N, L, heads, D] each."""
    return tuple(getattr(attn, name)(tokens).unflatten(-1, (-1, attn.head_dim)) for name in names)


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
    precision of their weights, and the attention of FLUX.1.
    """
    for module in network.modules():
        # Classes alone change: weights, names and what a processor was set to stay.
        if type(module) is RMSNorm:
            module.__class__ = FusedRMSNorm
        processor = getattr(module, "processor", None)
        if type(processor) is FluxAttnProcessor and not module.fused_projections:
            processor.__class__ = ComplexRotaryAttention
