"""The model families: one record each, with all that can be known of a family without importing torch.

A record names its adapter, the class that computes with torch and diffusers, which is imported when a recipe names the family.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A model family that Ebbflow ships. A user's family needs no record: the recipe names its adapter.

    Attributes:
        adapter: ``package.module:Class``, an ``ebbflow.models.base.Model``.
        guided: has classifier-free guidance, and so reads negative prompts.
        edits_images: every prompt comes with an image.
        diffusers: ``DiffusionPipeline.from_pretrained`` loads its folders, and draws with them.
        vllm_omni: ``package.module:NAME`` of its network in vLLM-Omni's environment (``containers/vllm_omni``); None: the engine
            cannot generate with it.
        tiny: ``package.module:name`` of the builders of its tiny models (``ebbflow tiny name``).
    """

    adapter: str
    guided: bool = True
    edits_images: bool = False
    diffusers: bool = True
    vllm_omni: str | None = None
    tiny: tuple[str, ...] = ()


FAMILIES = {
    "glyph": Family(adapter="ebbflow.models.families.glyph:GlyphModel", guided=False, diffusers=False),
    "sd3": Family(
        adapter="ebbflow.models.families.sd3:SD3Model",
        vllm_omni="ebbflow_vllm_omni.networks:SD3",
        tiny=("ebbflow.models.tiny.sd3:sd3",),
    ),
    "qwen_image": Family(
        adapter="ebbflow.models.families.qwen_image:QwenImageModel",
        vllm_omni="ebbflow_vllm_omni.networks:QWEN_IMAGE",
        tiny=("ebbflow.models.tiny.qwen_image:qwen_image",),
    ),
    "qwen_image_edit": Family(
        adapter="ebbflow.models.families.qwen_image:QwenImageEditModel",
        edits_images=True,
        tiny=("ebbflow.models.tiny.qwen_image:qwen_image_edit",),
    ),
    "flux": Family(
        adapter="ebbflow.models.families.flux:FluxModel",
        guided=False,
        tiny=("ebbflow.models.tiny.flux:flux",),
    ),
    "wan": Family(
        adapter="ebbflow.models.families.wan:WanModel",
        tiny=("ebbflow.models.tiny.wan:wan", "ebbflow.models.tiny.wan:wan21"),
    ),
}
"""By the name that ``model.family`` takes."""
