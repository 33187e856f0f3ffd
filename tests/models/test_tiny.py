"""Tiny models: the folders that diffusers reads, pictures that depend on what they are asked for,
and bytes that repeat.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import (
    DiffusionPipeline,
    FluxPipeline,
    QwenImageEditPipeline,
    QwenImagePipeline,
    WanPipeline,
)
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit
from PIL import Image
from pipeline_cases import EVERY
from pipeline_cases import TINY as CORE
from tiny_cases import PUBLISHED
from transformers import AutoTokenizer, Qwen2VLImageProcessor, Qwen2VLProcessor
from transformers.utils import is_torchvision_available

from benchmarks.tiny_models import TINY, build_tiny
from ebbflow.models import ModelError
from ebbflow.recipe.base_folder import find_index
from ebbflow.storage.artifacts import ArtifactError

pytestmark = pytest.mark.any_cpu

ROOT = Path(__file__).parents[2]
CAT = "a cat on a sofa"
SIGN = 'a sign that says "HELLO"'


class WithoutVideos(Qwen2VLProcessor):
    """The processor where torchvision is missing, which its own constructor asks for."""

    def __init__(self, image_processor, tokenizer):
        self.image_processor = image_processor
        self.tokenizer = tokenizer
        self.video_processor = None
        self.image_token = "<|image_pad|>"
        self.video_token = "<|video_pad|>"
        self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
            [self.image_token, self.video_token]
        )


def open_folder(folder):
    parts = {}
    if (folder / "processor").exists() and not is_torchvision_available():
        classes = (Qwen2VLImageProcessor, AutoTokenizer)
        parts["processor"] = WithoutVideos(
            *(kind.from_pretrained(folder / "processor") for kind in classes)
        )
    pipeline = DiffusionPipeline.from_pretrained(folder, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture(scope="module", params=CORE)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    """Never write into it."""
    folder = tmp_path_factory.mktemp("tiny") / family
    build_tiny(family, folder)
    return folder


@pytest.fixture(scope="module")
def pipeline(folder):
    with pytest.MonkeyPatch.context() as patch:
        # It scales the picture it edits to a megapixel, whatever the size asked for; seconds a
        # step.
        scaled = pipeline_qwenimage_edit.calculate_dimensions
        patch.setattr(
            pipeline_qwenimage_edit,
            "calculate_dimensions",
            lambda area, ratio: scaled(64 * 64, ratio),
        )
        yield open_folder(folder)


def generate(pipeline, prompts, height=64, width=64, guidance=4.0, negative="blurry", picture=0):
    """Pictures [N, height, width, 3] in [0, 1], or films [N, frames, height, width, 3], each from
    the same noise.
    """
    arguments = {"negative_prompt": [negative] * len(prompts), "guidance_scale": guidance}
    if isinstance(pipeline, (QwenImagePipeline, QwenImageEditPipeline)):
        arguments["true_cfg_scale"] = arguments.pop("guidance_scale")
    if isinstance(pipeline, FluxPipeline):
        del arguments["negative_prompt"]
    if isinstance(pipeline, QwenImageEditPipeline):
        pixels = np.random.default_rng(picture).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        arguments["image"] = [Image.fromarray(pixels)] * len(prompts)
    if isinstance(pipeline, WanPipeline):
        arguments["num_frames"] = 5
    noise = [torch.Generator().manual_seed(7) for _ in prompts]
    output = pipeline(
        prompt=prompts,
        height=height,
        width=width,
        num_inference_steps=2,
        generator=noise,
        output_type="np",
        **arguments,
    )
    return np.asarray(output.frames if isinstance(pipeline, WanPipeline) else output.images)


def distance(first, second):
    """Mean absolute difference, in grey levels."""
    return 255 * np.abs(first - second).mean()


def digests(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", EVERY)
def test_a_folder_has_the_published_parts(tiny_folder, name):
    kind, parts = PUBLISHED[name]
    index = json.loads(find_index(tiny_folder(name)).read_text())
    assert index["_class_name"] == kind.__name__
    assert {part: entry[1] for part, entry in index.items() if isinstance(entry, list)} == parts


def test_every_tiny_model_is_tested():
    assert set(TINY) == set(EVERY)


def test_diffusers_loads_every_part_under_its_published_class(family, folder, pipeline):
    kind, parts = PUBLISHED[family]
    assert type(pipeline) is kind
    assert {part for part, loaded in pipeline.components.items() if loaded is None} == {
        part for part, name in parts.items() if name is None
    }
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 5e6


@pytest.mark.parametrize(("height", "width"), [(64, 64), (64, 96)])
def test_pictures_have_the_size_asked_for(pipeline, height, width):
    pictures = generate(pipeline, [CAT, SIGN], height, width)
    frames = (5,) if isinstance(pipeline, WanPipeline) else ()
    assert pictures.shape == (2, *frames, height, width, 3)
    assert np.isfinite(pictures).all()
    for picture in pictures:
        assert picture.std() > 0.05
        assert ((picture > 0) & (picture < 1)).mean() > 0.8


def test_pictures_depend_on_everything_that_is_asked_for(pipeline):
    cat, sign, typo, again = generate(pipeline, [CAT, SIGN, SIGN.replace("HELLO", "HELLP"), CAT])
    assert distance(cat, again) < 0.01
    assert distance(cat, sign) > 1
    assert distance(sign, typo) > 0.3
    assert distance(cat, generate(pipeline, [CAT], guidance=2.0)[0]) > 0.5
    if not isinstance(pipeline, FluxPipeline):
        assert distance(cat, generate(pipeline, [CAT], negative="a dog")[0]) > 0.5
    if isinstance(pipeline, QwenImageEditPipeline):
        assert distance(cat, generate(pipeline, [CAT], picture=1)[0]) > 0.5


def test_the_velocity_depends_on_the_time(family, pipeline):
    calls = []
    hook = pipeline.transformer.register_forward_pre_hook(
        lambda *call: calls.append(call), with_kwargs=True
    )
    generate(pipeline, [CAT])
    hook.remove()
    _, _, first = calls[0]
    _, _, last = calls[-1]
    # Wan 2.2 has a time for every token.
    assert first["timestep"].ndim == (2 if family == "wan" else 1)
    with torch.no_grad():
        early, late = (
            pipeline.transformer(**first | {"timestep": call["timestep"]})[0]
            for call in (first, last)
        )
    assert (early - late).std() > 0.05 * early.std()


def test_no_weight_is_left_at_a_constant(pipeline):
    """A zero gate or a norm of ones would hide a part that is not wired in."""
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            assert [
                name for name, weight in part.named_parameters() if weight.min() == weight.max()
            ] == []


def test_tokenizers_end_and_pad_as_the_published_ones(pipeline):
    tokenizers = {
        name: part for name, part in pipeline.components.items() if name.startswith("tokenizer")
    }
    for name, tokenizer in tokenizers.items():
        assert tokenizer("HELLO").input_ids != tokenizer("HELLP").input_ids
        if type(tokenizer).__name__ == "CLIPTokenizer":
            config = getattr(pipeline, name.replace("tokenizer", "text_encoder")).config
            assert tokenizer.eos_token == "<|endoftext|>"
            # transformers pools at the largest id where the configuration says 2, and both rules
            # must agree.
            assert config.eos_token_id == tokenizer.eos_token_id == len(tokenizer) - 1 != 2
            padding = tokenizer("a", padding="max_length").input_ids[3:]
            assert set(padding) == {
                tokenizer.convert_tokens_to_ids("!" if name == "tokenizer_2" else "<|endoftext|>")
            }
            assert len(padding) == 74
        elif type(tokenizer).__name__ == "T5Tokenizer":
            assert tokenizer("cat").input_ids[-1] == 1
            assert tokenizer("cat", padding="max_length", max_length=16).input_ids[-1] == 0
            assert tokenizer.decode(tokenizer(SIGN).input_ids, skip_special_tokens=True) == SIGN
        else:
            assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|endoftext|>", "<|im_end|>")
            assert tokenizer.decode(tokenizer(f"{SIGN} naïve 漢").input_ids) == f"{SIGN} naïve 漢"


@pytest.mark.parametrize("family", ["qwen_image", "qwen_image_edit"], indirect=True)
def test_the_head_of_qwens_template_is_as_long_as_the_published_one(pipeline):
    tokens = pipeline.tokenizer(pipeline.prompt_template_encode.format(SIGN)).input_ids
    text = pipeline.tokenizer.decode(tokens[pipeline.prompt_template_encode_start_idx :])
    picture = (
        "<|vision_start|><|image_pad|><|vision_end|>"
        if isinstance(pipeline, QwenImageEditPipeline)
        else ""
    )
    assert text == f"{picture}{SIGN}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory):
    """All families with the same seed, built by the command: hash tables have another order in its
    process, and packages are missing there that this one has.
    """
    root = tmp_path_factory.mktemp("rebuilt")
    code = """
import pathlib, sys
from benchmarks.tiny_models import TINY
from benchmarks.tiny_models.__main__ import NOT_NEEDED, main
root = pathlib.Path(sys.argv[1])
for family in TINY:
    sys.argv[1:] = [family, str(root / family)]
    main()
# What is imported in spite of it was imported too early, and its time is lost.
assert not [name for name in NOT_NEEDED if sys.modules[name]]
"""
    process = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert process.returncode == 0, process.stderr
    return root


@pytest.mark.exhaustive
def test_the_same_seed_gives_the_same_bytes_in_another_process(family, folder, rebuilt):
    assert digests(rebuilt / family) == digests(folder)


def test_another_seed_gives_other_weights_and_nothing_else(family, folder, tmp_path):
    torch.manual_seed(123)
    state = torch.get_rng_state()
    build_tiny(family, tmp_path / "other", seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    first = digests(folder)
    other = digests(tmp_path / "other")
    assert first.keys() == other.keys()
    changed = {name for name in first if first[name] != other[name]}
    assert changed == {name for name in first if name.endswith(".safetensors")}
    assert len(changed) >= 3


def test_an_unknown_family_is_named_with_the_known_ones(tmp_path):
    with pytest.raises(ModelError, match="'sdxl'; take one of .*sd3, .*wan"):
        build_tiny("sdxl", tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_folder_in_use_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for used in (tmp_path, tmp_path / "mine.txt", tmp_path / "dangling"):
        with pytest.raises(ArtifactError, match="exists and is no empty folder; name a new one"):
            build_tiny("sd3", used)
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", "dangling"}
