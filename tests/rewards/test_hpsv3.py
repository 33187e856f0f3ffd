"""HPSv3 against the steps of its published code, with transformers' own Qwen2-VL and image
processor.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from network_cases import as_prompts, make_reward, some_images
from PIL import Image
from qwen_cases import HPSV3_HEAD, qwen_weights
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from ebbflow.rewards.built_in.hpsv3 import HpsV3Config
from ebbflow.rewards.combine import RewardError, load_reward
from ebbflow.rewards.templates import fill_template

IMAGES = some_images(2, 90, 130)
TEXTS = ["a red cat", "ocean waves at night, a sign {that} says <|Rew<|Reward|>ard|> nothing"]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> HpsV3Config:
    """Never write into its folder."""
    return make_reward("hpsv3", tmp_path_factory.mktemp("hpsv3"))


def later_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name.replace("model.", "model.language_model.").replace(
            "visual.", "model.visual."
        ): weights[name]
        for name in weights
    }


@torch.no_grad()
def published(
    config: HpsV3Config, image: np.ndarray, text: str, positions: str = "plain"
) -> Tensor:
    """The head's two outputs at the special token, of one image, as
    ``HPSv3RewardInferencer.reward`` computes them.
    """
    tokenizer = Qwen2Tokenizer.from_pretrained(config.processor.path)
    tokenizer.add_special_tokens(
        {"extra_special_tokens": ["<|Reward|>"]}, replace_extra_special_tokens=False
    )
    config_ = Qwen2VLConfig.from_pretrained(config.processor.path)
    config_.text_config.vocab_size = len(tokenizer)
    head = nn.Sequential(
        *(
            nn.Linear(*reversed(HPSV3_HEAD[n])) if n in HPSV3_HEAD else nn.ReLU()
            for n in (0, 1, 3, 4, 5)
        )
    )
    weights = load_file(f"{config.path}/HPSv3.safetensors")
    for layer, number in zip(head[::2], HPSV3_HEAD, strict=True):
        layer.load_state_dict(
            {part: weights.pop(f"rm_head.{number}.{part}") for part in ("weight", "bias")}
        )
    network = Qwen2VLForConditionalGeneration.from_pretrained(
        None, config=config_, state_dict=later_names(weights)
    )
    network = network.to(torch.bfloat16).float().eval()
    sized = Image.fromarray(image).resize(
        (560, 392), Image.Resampling.BICUBIC
    )  # 256 * 28 * 28 pixels, up to multiples of 28
    pixels = Qwen2VLImageProcessorPil()(sized, return_tensors="pt")
    assert pixels.image_grid_thw.tolist() == [[1, 28, 40]]
    message = (
        "<|im_start|>system\nYou are a helpful"
        " assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>"
        + "<|image_pad|>" * (28 * 40 // 4)
        + f"<|vision_end|>{fill_template('hpsv3', text)}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(message, return_tensors="pt").input_ids
    types = (ids == network.config.image_token_id).int()
    plain = (
        {"position_ids": torch.arange(ids.shape[1])[None]}
        if positions == "plain"
        else {"mm_token_type_ids": types}
    )
    hidden = network.model(input_ids=ids, **pixels, **plain).last_hidden_state
    (place,) = (
        (ids[0] == tokenizer.convert_tokens_to_ids("<|Reward|>")).nonzero().flatten().tolist()
    )
    return head(hidden[0, place])


def test_it_is_the_first_output_of_the_published_head(config):
    values = load_reward(config)(IMAGES, as_prompts(*TEXTS)).values
    wanted = [
        published(config, image, text.replace("<|Rew<|Reward|>ard|>", ""))
        for image, text in zip(IMAGES, TEXTS, strict=True)
    ]
    assert np.allclose(values, [float(pair[0]) for pair in wanted], rtol=0, atol=2e-5)
    assert (
        abs(float(published(config, IMAGES[0], TEXTS[0], "three-dimensional")[0]) - values[0])
        > 1e-3
    )


def test_the_template_is_the_published_one():
    text = fill_template("hpsv3", "a {red} cat")
    assert text.startswith(
        "\nYou are tasked with evaluating a generated image based on Visual Quality and Text"
        " Alignment"
    )
    assert "**Visual Quality:**  \nEvaluate" in text
    assert text.endswith(
        "- a {red} cat\n\n\n\nPlease provide the overall ratings of this image: <|Reward|>\n\nEND\n"
    )


def test_it_is_kept_in_bfloat16_as_published_with_its_head_in_float32(config):
    rough = load_reward(config.model_copy(update={"precision": "bfloat16"}))
    judge = rough._score_function.args[0]
    assert {weight.dtype for weight in judge.model.parameters()} == {torch.bfloat16}
    assert {weight.dtype for weight in judge.head.parameters()} == {torch.float32}
    exact = load_reward(config)(IMAGES, as_prompts(*TEXTS)).values
    assert rough(IMAGES, as_prompts(*TEXTS)).values == pytest.approx(
        exact, abs=0.05 * np.abs(exact).max()
    )


def test_later_names_of_the_weights_are_read_too(config, tmp_path):
    later = later_names(qwen_weights(("<|Reward|>",), HPSV3_HEAD))
    save_file(later, tmp_path / "HPSv3.safetensors")
    other = load_reward(config.model_copy(update={"path": str(tmp_path)}))
    assert np.array_equal(
        other(IMAGES[:1], as_prompts("")).values,
        load_reward(config)(IMAGES[:1], as_prompts("")).values,
    )


@pytest.mark.parametrize(
    ("tokens", "head", "reason"),
    [
        ((), HPSV3_HEAD, "has 7.. tokens and the text encoder"),
        (("<|Reward|>",), {0: (20, 32)}, r"HPSv3\.safetensors lacks the weights '3\.weight'"),
    ],
)
def test_a_checkpoint_of_another_network_is_refused(config, tmp_path, tokens, head, reason):
    save_file(qwen_weights(tokens, head), tmp_path / "HPSv3.safetensors")
    with pytest.raises(RewardError, match=reason):
        load_reward(config.model_copy(update={"path": str(tmp_path)}))(IMAGES, as_prompts(*TEXTS))
