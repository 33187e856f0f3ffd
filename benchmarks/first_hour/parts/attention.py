"""Attention without the padding of prompts, on which no CPU can run a line of torch's kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.first_hour.lines import Line, Setting, judge, skip
from ebbflow.models.fused_kernels import attend_without_padding, can_attend_without_padding

FORWARD = "prompts of different lengths without a mask: attention is that under the mask"
BACKWARD = "prompts of different lengths without a mask: gradients are those under the mask"
ALONE = "prompts of different lengths without a mask: a row has the same bytes alone"
LENGTHS = (300, 7, 512)
SHAPE = (3, 1024 + 512, 24, 128)
"""[N, image and prompt, heads, D] of Qwen-Image in 512 x 512 pixels."""


def measure(setting: Setting) -> Iterator[Line]:
    if not torch.cuda.is_available():
        for claim in (FORWARD, BACKWARD, ALONE):
            yield skip(claim, "torch sees no GPU here")
        return
    device = torch.device("cuda", torch.cuda.current_device())
    if not can_attend_without_padding(device, SHAPE[-1]):
        for claim in (FORWARD, BACKWARD, ALONE):
            yield skip(claim, "this GPU or this torch has no such kernel, and the mask stays")
        return
    torch.manual_seed(0)
    # Query, key, value, and the gradient of the result.
    inputs = torch.randn(4, *SHAPE, device=device).bfloat16()
    lengths = torch.tensor(LENGTHS, device=device)
    mask = torch.arange(max(LENGTHS), device=device) < lengths[:, None]
    image = mask.new_ones(len(LENGTHS), SHAPE[1] - max(LENGTHS))
    seen = torch.cat([image, mask], 1)  # [N, tokens]

    def attend_under_mask(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads_first = [x.transpose(1, 2) for x in (query, key, value)]
        mixed = scaled_dot_product_attention(*heads_first, attn_mask=seen[:, None, None])
        return mixed.transpose(1, 2)

    def attend_unpadded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_without_padding(query, key, value, mask)

    exact = differentiate(attend_under_mask, inputs.float(), seen)
    masked = differentiate(attend_under_mask, inputs, seen)
    unpadded = differentiate(attend_unpadded, inputs, seen)
    for claim, part in ((FORWARD, slice(0, 1)), (BACKWARD, slice(1, None))):
        error = measure_error(unpadded[part], exact[part])
        # As far from float32 as the kernel with a mask, or twice as far: both round differently.
        bar = 2 * measure_error(masked[part], exact[part])
        yield judge(claim, error <= bar, f"{error:.1e} of float32", f"<= {bar:.1e}")
    query, key, value = inputs[:3, :1]
    alone = attend_without_padding(query, key, value, mask[:1])[seen[:1]]
    same = torch.equal(alone, unpadded[0][: len(alone)])
    yield judge(ALONE, same, "equal" if same else "different", "equal bytes")


def differentiate(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Tensor, seen: Tensor
) -> list[Tensor]:
    """Return the attention of all tokens that are no padding, [tokens, heads, D], and the gradients
    of query, key and value there.
    """
    operands = [x.clone().requires_grad_() for x in inputs[:3]]
    mixed = attend(*operands)[seen]
    gradients = torch.autograd.grad(mixed, operands, inputs[3][seen])
    return [mixed.detach(), *(gradient[seen] for gradient in gradients)]


def measure_error(results: list[Tensor], exact: list[Tensor]) -> float:
    """Return the largest relative error, of norms."""
    pairs = zip(results, exact, strict=True)
    return max(float((result.float() - true).norm() / true.norm()) for result, true in pairs)
