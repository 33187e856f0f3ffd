"""Families that take several images to edit: the image is the pipeline's, depends on each of them,
and is trained; the others refuse more than one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from pipeline_cases import SHORT, keys, our_latents, picture, prompts, theirs

from ebbflow.flow.windows import Plan
from ebbflow.models import ModelError
from ebbflow.models.editing import list_images
from ebbflow.models.encoding import embed_prompts
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.stages import OnlineStageConfig
from ebbflow.rollouts.generate import generate_samples
from ebbflow.training.batches import build_trajectory_batch
from ebbflow.training.policy import Policy
from ebbflow.training.update import PolicyUpdater
from tests.glyph_stages import small_stage

SEVERAL = ("qwen_image_edit_plus", "flux2_edit")
FURTHER = [(96, 64), (64, 112)]


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", SEVERAL)
def test_the_ode_with_several_images_is_the_pipeline(tiny, peer, name, count):
    model = tiny(name)
    wanted = prompts(name, SHORT[:2], size=(80, 64), further=FURTHER[: count - 1])
    ours = our_latents(model, wanted)
    latents, images = theirs(peer(name), model, wanted)
    assert (ours - latents).abs().max() < 1e-5 * ours.abs().max()
    assert abs(model.decode_latents(ours) - images).max() < 1


@pytest.mark.parametrize("name", SEVERAL)
def test_the_image_depends_on_each_image_and_on_their_order(tiny, name):
    model = tiny(name)
    first, second = (picture(64, 64, seed) for seed in (1, 2))
    (prompt,) = prompts(name, SHORT[:1])
    drawn = [
        our_latents(model, [replace(prompt, image=image)])
        for image in (first + second, second + first, first, first + picture(64, 64, 3))
    ]
    for other in drawn[1:]:
        assert (other - drawn[0]).abs().max() > 1e-2


@pytest.mark.parametrize("name", SEVERAL)
def test_several_images_keep_their_order_in_a_file_of_embeddings(tiny, name):
    model = tiny(name)
    wanted = prompts(name, SHORT[:2], size=(80, 64), further=FURTHER)
    images = list_images(model.encode_prompts(wanted))
    stored = list_images(embed_prompts(model, wanted)(wanted))
    assert len(images) == len(stored) == 3
    assert len({image.shape for image in images}) > 1
    assert all(torch.equal(one, other) for one, other in zip(images, stored, strict=True))


@pytest.mark.parametrize("name", SEVERAL)
def test_a_step_on_prompts_with_several_images_begins_with_a_ratio_of_one(open_tiny, name):
    stage = OnlineStageConfig.model_validate(
        small_stage({"sampler": {"steps": 3}, "algorithm": {"name": "flow_grpo"}})
    )
    model = open_tiny(name, guidance=1.0)
    updater = PolicyUpdater(Policy(model, PolicyConfig(train="lora", rank=4, alpha=8), 0), stage)
    wanted = prompts(name, SHORT[:2], further=FURTHER[:1])
    conditioning = model.encode_prompts(wanted)
    rollouts = generate_samples(
        model, conditioning, keys(wanted), stage.sampler, Plan((0, 1), (0, 1))
    )
    batch = build_trajectory_batch(
        rollouts.trajectory,
        conditioning,
        torch.tensor([1.0, -1.0]),
        keys(wanted),
        stage.sampler,
    )
    metrics = updater.update_policy(batch, 2)
    assert metrics["ratio/deviation"] == 0
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("name", ["qwen_image_edit", "flux_kontext", "wan_i2v"])
def test_families_of_one_image_refuse_more(tiny, name):
    with pytest.raises(
        ModelError, match=rf"prompt 0 .* has 2 images, and {name} takes 1; change the column"
    ):
        tiny(name).encode_prompts(prompts(name, SHORT[:1], further=FURTHER[:1]))


def test_a_first_frame_without_a_last_one_is_refused(tiny):
    (prompt,) = prompts("wan_flf2v", SHORT[:1])
    with pytest.raises(ModelError, match="has 1 image, and wan_flf2v takes 2; change the column"):
        tiny("wan_flf2v").encode_prompts([replace(prompt, image=picture(64, 64))])


@pytest.mark.parametrize("name", SEVERAL)
def test_prompts_with_different_numbers_of_images_are_refused(tiny, name):
    one, two = prompts(name, SHORT[:2], further=FURTHER[:1])
    one = replace(one, image=picture(64, 64))
    with pytest.raises(
        ModelError,
        match=r"scaled to different sizes \(64 x 64 of prompt 0, 64 x 64 and .* of prompt 1\)",
    ):
        tiny(name).encode_prompts([one, two])
