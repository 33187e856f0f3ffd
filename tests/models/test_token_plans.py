"""Families whose tokens ranks can share predict together what one process predicts, and have its
gradient between them; families that cannot say why.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

import diffusers
import pytest
import torch
from pipeline_cases import prompts
from torch import Tensor

from ebbflow.models import load_model
from ebbflow.models.base import Conditioning, ModelError, predict
from ebbflow.models.context_parallel import require_shareable_family
from ebbflow.models.families import load_adapter
from ebbflow.models.pipeline import PipelineModel
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.training.distributed import join_process_group, sum_over_processes
from ebbflow.training.policy import Policy
from tests.two_processes import as_two_ranks

pytestmark = pytest.mark.any_cpu

EXCHANGING_HEADS = (
    *("flux", "flux2", "flux2_klein", "qwen_image", "ltx_video"),
    *("wan", "wan_a14b", "wan_i2v", "wan_flf2v"),
)
GATHERING_KEYS = ("ltx2", "qwen_image_edit", "qwen_image_edit_plus", "flux_kontext", "flux2_edit")
SHARED = (*EXCHANGING_HEADS, *GATHERING_KEYS)
UNEVEN = "uneven flux"
"""FLUX with a number of tokens that two ranks cannot divide: 9 of the image, 33 of the prompt."""
FRAMES = {"ltx_video": 9, "ltx2": 9, **dict.fromkeys(EXCHANGING_HEADS[5:], 5)}
LORA = PolicyConfig(train="lora", rank=2, alpha=4)


def test_every_family_with_a_plan_shares_tokens_or_says_why_not():
    supported = []
    refusals = []
    for name in FAMILIES:
        family = load_adapter(name)
        config = ModelConfig(family=name, **({} if name == "glyph" else {"path": "base"}))
        try:
            require_shareable_family(family, config, 2)
        except ModelError as error:
            refusals.append(str(error))
            # A plan that diffusers adds in a later release needs a decision here.
            assert not has_plan(family), name
        else:
            assert has_plan(family), name
            supported.append(name)
    assert sorted(supported) == sorted(SHARED)
    said = "cannot be shared, as diffusers has no plan of its network for it; leave it out"
    assert all(said in refusal for refusal in refusals)


def has_plan(family: type) -> bool:
    """Whether diffusers says how ranks share the tokens of a family's network."""
    published = getattr(family, "published", {})
    if not published or not issubclass(family, PipelineModel):
        return False
    part = next(iter(published.values()))[family.networks[0]]
    return getattr(getattr(diffusers, part.kind), "_cp_plan", None) is not None


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(("flux", "ltx_video", "ltx2", "qwen_image_edit", UNEVEN), id="different"),
        pytest.param((*SHARED, UNEVEN), id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_that_share_tokens_predict_what_one_process_predicts(
    tiny_folder, tmp_path, families
):
    folders = {name: tiny_folder(name.split()[-1]) for name in families}
    alone = {name: predict_and_differentiate(name, path) for name, path in folders.items()}
    torch.save(alone, tmp_path / "alone.pt")  # so many tensors do not travel to a process
    as_two_ranks(predict_together, folders, tmp_path / "alone.pt")


def predict_together(folders: dict[str, Path], saved: Path) -> None:
    alone = torch.load(saved, weights_only=False)
    with join_process_group(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, path in folders.items():
            expected, expected_gradients, conditioning = alone[name]
            velocity, gradients, _ = predict_and_differentiate(name, path, conditioning, 2)
            # Half of the tokens are other shapes of the same products, in float32.
            assert (velocity - expected).abs().max() < 1e-5 * expected.abs().max(), name
            assert gradients.keys() == expected_gradients.keys()
            assert sum(value.abs().max() > 0 for value in expected_gradients.values()) > 0
            largest = max(value.abs().max() for value in expected_gradients.values())
            for key, gradient in gradients.items():
                # Each rank has the gradient of its own tokens.
                whole = sum_over_processes(gradient.clone())
                assert (whole - expected_gradients[key]).abs().max() < 1e-4 * largest, (name, key)


def predict_and_differentiate(
    name: str,
    path: Path,
    conditioning: Conditioning | None = None,
    context_parallel: int = 1,
) -> tuple[Tensor, dict[str, Tensor], Conditioning]:
    """The velocity of two samples at two noise levels, the gradient of a sum of it, and what it was
    predicted for.
    """
    size = 48 if name == UNEVEN else 64
    # The first families to edit read prompts whole.
    max_tokens = {UNEVEN: 33, "qwen_image_edit": None, "qwen_image_edit_plus": None}.get(name, 32)
    config = ModelConfig(
        family=name.split()[-1],
        path=str(path),
        height=size,
        width=size,
        frames=FRAMES.get(name, 1),
        **({"expert": "both"} if name in ("wan_a14b", "wan_i2v") else {}),
        max_tokens=max_tokens,
    )
    model = load_model(path, config)
    replicas = context_parallel
    policy = Policy(model, LORA, 0, context_parallel > 1, replicas, context_parallel=replicas)
    for key, parameter in policy.parameters.items():
        if "lora_B" in key:  # zero at the start, and then the other factor has no gradient
            torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(1))
    # Encoded once: the other process does not know of the small pictures of these tests.
    if conditioning is None:
        wanted = prompts(config.family, ("a cat", "two dogs in the snow"))
        conditioning = model.encode_prompts(wanted)
    noise = torch.Generator().manual_seed(2)
    latents = torch.randn(2, *shape_of(model), generator=noise)
    target = torch.randn(latents.shape, generator=noise)
    velocity = predict(model, latents, torch.tensor([0.95, 0.4]), conditioning)
    (velocity * target).mean().backward()
    gradients = {key: p.grad for key, p in policy.parameters.items() if p.grad is not None}
    return velocity.detach(), gradients, conditioning


def shape_of(model: PipelineModel) -> Sequence[int]:
    shape: Sequence[int] = model.latent_shape
    return shape
