"""VideoReward against the steps of its published code, with transformers' own Qwen2-VL and peft's
adapters.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from network_cases import as_prompts, make_reward
from peft import LoraConfig, get_peft_model
from PIL import Image
from qwen_cases import VIDEO_SETTINGS, VIDEO_TOKENS, video_reward_weights
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from ebbflow.rewards.built_in import videoalign
from ebbflow.rewards.built_in.videoalign import VideoAlignConfig, select_seen_frames
from ebbflow.rewards.combine import RewardError, Scorer, load_reward
from ebbflow.rewards.pixels import MEAN, STD
from ebbflow.rewards.templates import fill_template

VIDEOS = np.random.default_rng(5).integers(0, 256, (2, 17, 50, 80, 3), dtype=np.uint8)
"""At 8 frames per second; two of each second are 4."""
TEXTS = ["a cat jumps", "waves {that} say <|MQ_reward|> nothing"]
SCALE = VIDEO_SETTINGS["inference_config"]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> VideoAlignConfig:
    """Never write into its folder."""
    return make_reward("videoalign", tmp_path_factory.mktemp("videoalign"))


@pytest.fixture(autouse=True)
def few_pixels(monkeypatch):
    monkeypatch.setattr(videoalign, "MIN_PIXELS", 4 * 28 * 28)


def patches(frames: np.ndarray, merge: int = 2, patch: int = 14) -> Tensor:
    """As Qwen2-VL's processor of videos cuts standardised frames, [T, 3, H, W]."""
    time, colours, height, width = frames.shape
    cut = frames.reshape(
        time // 2,
        2,
        colours,
        height // patch // merge,
        merge,
        patch,
        width // patch // merge,
        merge,
        patch,
    ).transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return torch.from_numpy(cut.reshape(-1, colours * 2 * patch * patch).astype(np.float32))


@torch.no_grad()
def published(
    config: VideoAlignConfig, video: np.ndarray, text: str, shown: list[int]
) -> list[float]:
    """The z-scores of one video, as ``VideoVLMRewardInference.reward`` computes them."""
    tokenizer = Qwen2Tokenizer.from_pretrained(config.processor.path)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": list(VIDEO_TOKENS)}, replace_extra_special_tokens=False
    )
    sizes = Qwen2VLConfig.from_pretrained(config.processor.path)
    sizes.text_config.vocab_size = len(tokenizer)
    base, adapter, head = video_reward_weights()
    named = {
        name.replace("model.", "model.language_model.").replace("visual.", "model.visual."): base[
            name
        ]
        for name in base
    }
    network = (
        Qwen2VLForConditionalGeneration.from_pretrained(None, config=sizes, state_dict=named)
        .to(torch.bfloat16)
        .float()
    )
    network = get_peft_model(
        network, LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model\..*_proj")
    ).eval()
    prefix = "base_model.model.model.language_model."
    missing = network.load_state_dict(
        {prefix + name.removeprefix("model."): adapter[name] for name in adapter}, strict=False
    )
    assert not missing.unexpected_keys
    sized = [
        np.asarray(Image.fromarray(frame).resize((84, 56), Image.Resampling.BICUBIC))
        for frame in video[shown]
    ]
    pixels = (
        np.stack(sized).transpose(0, 3, 1, 2) / 255 - np.array(MEAN)[:, None, None]
    ) / np.array(STD)[:, None, None]
    message = (
        "<|im_start|>system\nYou are a helpful"
        " assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        + "<|video_pad|>" * (len(shown) // 2 * 2 * 3)
        + f"<|vision_end|>{fill_template('videoalign', text)}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(message, return_tensors="pt").input_ids
    hidden = network.base_model.model.model(
        input_ids=ids,
        pixel_values_videos=patches(pixels),
        video_grid_thw=torch.tensor([[len(shown) // 2, 4, 6]]),
        position_ids=torch.arange(ids.shape[1])[None],
    ).last_hidden_state
    found = (hidden[0] @ head[0])[
        torch.isin(ids[0], torch.tensor(tokenizer.convert_tokens_to_ids(list(VIDEO_TOKENS))))
    ]
    return [
        (float(x) - SCALE[f"{name}_mean"]) / SCALE[f"{name}_std"]
        for x, name in zip(found, ("VQ", "MQ", "TA"), strict=True)
    ]


def test_it_is_the_sum_of_the_published_ratings(config):
    reward = load_reward(config)
    result = reward(VIDEOS, as_prompts(*TEXTS))
    wanted = [
        published(config, video, text.replace("<|MQ_reward|>", ""), [0, 5, 11, 16])
        for video, text in zip(VIDEOS, TEXTS, strict=True)
    ]
    found = np.stack(
        [result.metrics[f"videoalign_{name}"] for name in ("visual", "motion", "alignment")], 1
    )
    assert found == pytest.approx(np.array(wanted), abs=2e-5)
    assert result.values == pytest.approx(found.sum(1))
    assert not reward.has_gradient


def test_a_recipe_may_add_up_some_of_them_and_names_their_columns(config):
    reward = load_reward(
        config.model_copy(
            update={"dimensions": ["visual", "motion"], "label": "quality", "batch": 1}
        )
    )
    table = Scorer(((reward, 2.0),))(VIDEOS, as_prompts(*TEXTS))
    assert list(table.metrics) == [
        "quality",
        "quality_visual",
        "quality_motion",
        "quality_alignment",
    ]
    assert table.reward == pytest.approx(
        2 * (table.metrics["quality_visual"] + table.metrics["quality_motion"])
    )


def test_videoalign_scores_depend_on_the_order_of_frames(config):
    """The same frames in another order are another video."""
    reward = load_reward(config)
    prompts = as_prompts(*TEXTS)
    forwards, backwards = (reward(videos, prompts).values for videos in (VIDEOS, VIDEOS[:, ::-1]))
    assert (np.abs(forwards - backwards) > 1e-4).all()


def test_no_videos_are_no_scores(config):
    result = load_reward(config)(VIDEOS[:0], [])
    assert result.values.shape == (0,)
    assert {values.shape for values in result.metrics.values()} == {(0,)}


@pytest.mark.parametrize(
    ("count", "rate", "shown"),
    [
        (81, 16, [0, 9, 18, 27, 36, 44, 53, 62, 71, 80]),
        (17, 8, [0, 5, 11, 16]),
        (33, 24, [0, 11, 21, 32]),
        (5, 1, [0, 1, 3, 4]),
        (3, 24, [0, 2]),
    ],
)
def test_two_frames_of_each_second_are_looked_at(count, rate, shown):
    """As ``smart_nframes`` and the uniform sampling of the published code."""
    assert select_seen_frames(count, rate, 2.0).tolist() == shown


def test_the_template_is_the_published_one():
    text = fill_template("videoalign", "a {red} cat")
    assert text.startswith(
        "\nYou are tasked with evaluating a generated video based on three distinct criteria:"
        " Visual Quality, Mot"
    )
    assert "**Motion Quality:**  \nAssess the dynamic aspects" in text
    assert text.endswith(
        "Textual prompt - a {red} cat\nPlease provide the ratings of Text Alignment:"
        " <|TA_reward|>\nEND\n"
    )
    assert [text.count(token) for token in VIDEO_TOKENS] == [1, 1, 1]


def test_images_are_not_scored(config):
    with pytest.raises(
        RewardError, match="'videoalign' scores videos and got images; set model.frames"
    ):
        Scorer(((load_reward(config), 1.0),))(VIDEOS[:, 0], as_prompts(*TEXTS))
    with pytest.raises(RewardError, match="videos of two frames or more"):
        load_reward(config)(VIDEOS[:, :1], as_prompts(*TEXTS))
    assert load_reward(config).scores == "videos"


BROKEN = {
    "other tokens": (
        {"model_config": {"reward_token": "last"}},
        r"model_config\.json is not that of the published VideoReward",
    ),
    "no deviations": ({"inference_config": {}}, "is not that of the published VideoReward"),
    "no adapter part": ({}, r"model\.pth lacks the weights '.*q_proj\.lora_B\.default\.weight'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_checkpoint_of_another_model_is_refused(config, tmp_path: Path, case):
    changed, reason = BROKEN[case]
    folder = tmp_path / "other"
    shutil.copytree(config.path, folder)
    (folder / "model_config.json").write_text(json.dumps(VIDEO_SETTINGS | changed))
    if not changed:
        path = folder / "checkpoint-7" / "model.pth"
        state = torch.load(path, weights_only=True)
        torch.save(
            {
                name: state[name]
                for name in state
                if not name.endswith("0.self_attn.q_proj.lora_B.default.weight")
            },
            path,
        )
    with pytest.raises(RewardError, match=reason):
        load_reward(config.model_copy(update={"path": str(folder)}))(VIDEOS, as_prompts(*TEXTS))
