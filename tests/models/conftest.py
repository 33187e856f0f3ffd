"""Tiny folders of the published families, our models of them, and diffusers' pipelines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from diffusers import (
    DiffusionPipeline,
    ModularPipeline,
    SanaPipeline,
    WanImageToVideoPipeline,
    WanPipeline,
)
from diffusers.pipelines.flux import pipeline_flux_kontext
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from diffusers.pipelines.wan import pipeline_wan_i2v
from pipeline_cases import (
    EDITED_PIXELS,
    FIRST_AND_LAST,
    MODULAR,
    PADDED,
    FirstOrderDpmSolver,
    FirstOrderUniPC,
    family,
    few_tokens,
    guidance,
    pad_to_few_tokens,
)
from transformers import PreTrainedTokenizerFast

from benchmarks.tiny_models import build_tiny
from ebbflow.models import load_model
from ebbflow.models.families import load_adapter
from ebbflow.models.families.flux2 import TextProcessor
from ebbflow.models.families.qwen_image_21 import TextOnlyProcessor
from ebbflow.models.families.qwen_image_edit import PictureProcessor, QwenImageEditModel
from ebbflow.models.pipeline import PipelineModel
from ebbflow.recipe.model import ModelConfig

Folder = Callable[[str], Path]
OpenModel = Callable[..., PipelineModel]
OpenPipeline = Callable[..., DiffusionPipeline]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """``tiny_folder("sd3")``: a folder of the published layout. Never write into it."""

    @cache
    def build(name: str) -> Path:
        folder = tmp_path_factory.mktemp("tiny") / name
        build_tiny(name, folder)
        return folder

    return build


@pytest.fixture(scope="session")
def open_tiny(tiny_folder: Folder) -> OpenModel:
    """``open_tiny("sd3", height=96)``: our model of a tiny folder or of another ``folder``, for
    this test alone.
    """

    def open_model(name: str, folder: Path | None = None, **config: Any) -> PipelineModel:
        path = folder or tiny_folder(name)
        return _small(load_model(path, _config(name, path, config)))

    return open_model


@pytest.fixture(scope="session")
def tiny(open_tiny: OpenModel) -> OpenModel:
    """``tiny("sd3", height=96)``: the same, with parts that all tests share. Never change them."""
    opened = cache(open_tiny)

    def draw_as(name: str, **config: Any) -> PipelineModel:
        shared = opened(name)
        return _small(
            type(shared)(
                shared.pipeline, _config(name, Path(shared.config.path), config), shared.device
            )
        )

    return draw_as


@pytest.fixture(scope="session", autouse=True)
def plain_text() -> Iterator[None]:
    """Diffusers' pipeline of image to video cannot do without ftfy, which has nothing to fix in the
    prompts of the tests.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_wan_i2v, "ftfy", SimpleNamespace(fix_text=str), raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def small_pictures() -> Iterator[None]:
    """The pipelines for editing scale a picture to a megapixel, whatever they draw; seconds a
    step."""
    dimensions = pipeline_qwenimage_edit.calculate_dimensions
    side = math.isqrt(EDITED_PIXELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            pipeline_qwenimage_edit,
            "calculate_dimensions",
            lambda area, ratio: dimensions(EDITED_PIXELS, ratio),
        )
        patch.setattr(pipeline_qwenimage_edit_plus, "VAE_IMAGE_SIZE", EDITED_PIXELS)
        patch.setattr(pipeline_qwenimage_edit_plus, "CONDITION_IMAGE_SIZE", EDITED_PIXELS // 2)
        sizes = [(side, side), (side * 3 // 4, side * 3 // 2), (side * 3 // 2, side * 3 // 4)]
        patch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", sizes)
        yield


def _config(name: str, path: Path, config: dict[str, Any]) -> ModelConfig:
    usual = {"height": 64, "width": 64, "guidance": guidance(name)}
    if name in FIRST_AND_LAST:
        usual["frames"] = 5
    if name in PADDED:
        usual |= few_tokens(name)
    return ModelConfig(family=family(name), path=str(path), **usual | config)


def _small(model: PipelineModel) -> PipelineModel:
    if isinstance(model, QwenImageEditModel):
        model.edited_pixels = EDITED_PIXELS
    if model.config.family in PADDED:
        pad_to_few_tokens(model.pipeline)
    return model


@pytest.fixture(scope="session")
def open_peer(tiny_folder: Folder) -> OpenPipeline:
    """``open_peer("sd3")``: diffusers' own pipeline of a tiny folder or of another ``folder``, for
    this test alone.

    What ``absent`` names is left out.
    """

    def open_pipeline(
        name: str, folder: Path | None = None, absent: Sequence[str] = ()
    ) -> DiffusionPipeline:
        path = folder or tiny_folder(name)
        parts = dict.fromkeys(absent)
        if name.startswith("qwen_image_edit"):
            parts["processor"] = PictureProcessor.from_pretrained(path / "processor")
        if name == "qwen_image_21":
            parts["processor"] = TextOnlyProcessor.from_folder(path)
        if name in ("flux2", "flux2_edit"):
            parts["tokenizer"] = None
        if name == "hunyuan_video":  # the class that it names loses the spaces of the text
            parts["tokenizer"] = PreTrainedTokenizerFast.from_pretrained(path / "tokenizer")
        if name in MODULAR:
            pipeline = open_modular(name, path)
        else:
            pipeline = DiffusionPipeline.from_pretrained(path, local_files_only=True, **parts)
        if name in ("flux2", "flux2_edit"):
            pipeline.register_modules(tokenizer=TextProcessor.from_folder(path))
        if name in PADDED:
            pad_to_few_tokens(pipeline)
        pipeline.set_progress_bar_config(disable=True)
        if isinstance(pipeline, (WanPipeline, WanImageToVideoPipeline)):
            options = {"solver_order": 1, "disable_corrector": list(range(100))}
            pipeline.scheduler = FirstOrderUniPC.from_config(pipeline.scheduler.config, **options)
        if isinstance(pipeline, SanaPipeline):
            pipeline.scheduler = FirstOrderDpmSolver.from_config(
                pipeline.scheduler.config, solver_order=1
            )
        return pipeline

    return open_pipeline


def open_modular(name: str, path: Path) -> ModularPipeline:
    """The pipeline of a folder, with the blocks that we run."""
    adapter = load_adapter(name)
    pipeline = adapter.pipeline_class(adapter.build_blocks(), path, local_files_only=True)
    others = [part for part in pipeline.pretrained_component_names if part != "tokenizer"]
    pipeline.load_components(names=others)
    pipeline.update_components(tokenizer=TextProcessor.from_folder(path))
    return pipeline


@pytest.fixture(scope="session")
def peer(open_peer: OpenPipeline) -> OpenPipeline:
    """``peer("sd3")``: the same, shared by all tests. Never change it."""
    return cache(open_peer)
