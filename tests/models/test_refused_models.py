"""What the adapters of diffusers' pipelines refuse: sizes, limits, and folders of another kind."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest
import torch
from folder_cases import change_index, copy_folder

from ebbflow.models import ModelError


def test_limits_that_the_pipeline_would_not_keep_are_refused(open_tiny):
    with pytest.raises(
        ModelError, match="model.max_tokens = 1025: the pipeline reads 1024 at most"
    ):
        open_tiny("qwen_image", max_tokens=1025)
    with pytest.raises(
        ModelError, match="model.max_tokens = 8: .*reads prompts whole; leave it out"
    ):
        open_tiny("qwen_image_edit", max_tokens=8)
    with pytest.raises(ModelError, match="max_tokens = 8: qwen_image_21 reads prompts whole"):
        open_tiny("qwen_image_21", max_tokens=8)
    with pytest.raises(
        ModelError, match="model.max_tokens = 300: the network has positions for 299 at most"
    ):
        open_tiny("lumina2", max_tokens=300)
    with pytest.raises(
        ModelError, match="model.max_tokens = 20: .*8 learned tokens.*; take (16|24)"
    ):
        open_tiny("ltx2", max_tokens=20)


@pytest.mark.parametrize(
    ("part", "config", "message"),
    [
        ("vae", {"timestep_conditioning": True}, "has a VAE that draws noise to decode"),
        (
            "transformer",
            {"use_keyframes_abs_pos_embedding": True},
            "is later than LTX-2.3, and ltx2 is LTX-2 and LTX-2.3; take Lightricks/LTX-2",
        ),
    ],
)
def test_later_versions_of_ltx_2_are_refused(tiny, part, config, message):
    model = tiny("ltx2")
    parts = {
        name: SimpleNamespace(config=getattr(model.pipeline, name).config)
        for name in ("vae", "transformer", "connectors")
    }
    parts[part] = SimpleNamespace(config=SimpleNamespace(**{**parts[part].config, **config}))
    with pytest.raises(ModelError, match=message):
        type(model)._check_pipeline(SimpleNamespace(**parts), model.config)


def test_a_qwen_image_21_with_a_schedule_of_its_own_is_refused(tiny):
    model = tiny("qwen_image_21")
    turbo = SimpleNamespace(config=SimpleNamespace(sample_sigmas=[1.0, 0.75, 0.5, 0.25]))
    with pytest.raises(ModelError, match="is distilled to a fixed schedule of 4 steps; take Qwen"):
        type(model)._check_pipeline(turbo, model.config)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "sd3",
            {"height": 72},
            r"model.height = 72: sd3 draws multiples of 16 pixels; take (64|80)",
        ),
        ("sd3", {"width": 8}, r"model.width = 8: sd3 draws multiples of 16 pixels; take 16"),
        ("flux", {"width": 100}, r"model.width = 100: flux draws multiples of 16 pixels; take 96"),
        (
            "qwen_image",
            {"height": 56},
            r"model.height = 56: qwen_image draws multiples of 16 pixels; take (48|64)",
        ),
        (
            "qwen_image_edit",
            {"height": 56},
            r"model.height = 56: qwen_image_edit draws multiples of 16 pixels",
        ),
        (
            "wan",
            {"height": 80},
            r"model.height = 80: wan draws multiples of 32 pixels; take (64|96)",
        ),
        (
            "wan21",
            {"height": 72},
            r"model.height = 72: wan draws multiples of 16 pixels; take (64|80)",
        ),
        ("wan", {"frames": 4}, r"model.frames = 4: wan draws 1 \+ a multiple of 4 frames; take 5"),
        (
            "ltx_video",
            {"frames": 5},
            r"model.frames = 5: ltx_video draws 1 \+ a multiple of 8 frames; take (1|9)",
        ),
        (
            "sana",
            {"height": 80},
            r"model.height = 80: sana draws multiples of 32 pixels; take (64|96)",
        ),
    ],
)
def test_sizes_that_a_family_cannot_draw_are_refused_with_one_that_it_can(
    tiny, name, config, message
):
    with pytest.raises(ModelError, match=message):
        tiny(name, **config)


def test_a_folder_of_another_pipeline_is_refused_with_its_family(tiny_folder, open_tiny, tmp_path):
    with pytest.raises(
        ModelError,
        match=(
            "flux is a FluxPipeline, and model.family = 'sd3' is a StableDiffusion3Pipeline.*flux"
        ),
    ):
        open_tiny("sd3", tiny_folder("flux"))
    with pytest.raises(ModelError, match="is not a sd3 base model: model_index.json missing"):
        open_tiny("sd3", tmp_path)
    (tmp_path / "model_index.json").write_text("[1")
    with pytest.raises(ModelError, match="model_index.json is not the JSON object"):
        open_tiny("sd3", tmp_path)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("sd3", "vae"),
        ("sd3", "text_encoder_3"),
        ("sd3", "scheduler"),
        ("qwen_image_edit", "processor"),
    ],
)
def test_a_folder_that_lacks_a_part_is_refused(tiny_folder, open_tiny, tmp_path, name, part):
    folder = copy_folder(tiny_folder(name), tmp_path / "poor", part)
    with pytest.raises(
        ModelError, match=f"poor cannot be read as a {name} base model .*fetch it again"
    ):
        open_tiny(name, folder)


def test_only_safetensors_are_read(tiny_folder, open_tiny, tmp_path):
    folder = copy_folder(
        tiny_folder("sd3"), tmp_path / "pickled", "diffusion_pytorch_model.safetensors"
    )
    torch.save({}, folder / "transformer" / "diffusion_pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"transformer holds no .safetensors weights; fetch them in that format"
    ):
        open_tiny("sd3", folder)
    for part, weights in (("vae", "diffusion_pytorch_model"), ("text_encoder", "model")):
        folder = copy_folder(tiny_folder("sd3"), tmp_path / part)
        (folder / part / f"{weights}.safetensors").unlink()
        torch.save(
            {},
            folder / part / {"vae": "diffusion_pytorch_model.bin"}.get(part, "pytorch_model.bin"),
        )
        with pytest.raises(
            ModelError, match=f"{part} cannot be read as a sd3 base model .*safetensors"
        ):
            open_tiny("sd3", folder)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (
            "transformer/diffusion_pytorch_model.safetensors",
            "broken cannot be read as a sd3 base model .*fetch it again",
        ),
        (
            "text_encoder/model.safetensors",
            "broken cannot be read as a sd3 base model .*fetch it again",
        ),
        (
            "vae/config.json",
            "broken/vae/config.json is not the JSON object .*fetch the folder again",
        ),
        ("tokenizer/tokenizer.json", "broken cannot be read as a sd3 base model .*fetch it again"),
    ],
)
def test_a_folder_with_a_broken_part_is_refused(tiny_folder, open_tiny, tmp_path, file, says):
    folder = copy_folder(tiny_folder("sd3"), tmp_path / "broken")
    (folder / file).write_bytes((folder / file).read_bytes()[:100])
    with pytest.raises(ModelError, match=says):
        open_tiny("sd3", folder)


def test_a_folder_with_two_transformers_is_refused(tiny_folder, open_tiny, tmp_path):
    folder = copy_folder(tiny_folder("wan21"), tmp_path / "two")
    shutil.copytree(folder / "transformer", folder / "transformer_2")
    change_index(folder, transformer_2=["diffusers", "WanTransformer3DModel"], boundary_ratio=0.875)
    with pytest.raises(
        ModelError, match="two holds two transformers.*set model.family to wan_a14b"
    ):
        open_tiny("wan21", folder)
