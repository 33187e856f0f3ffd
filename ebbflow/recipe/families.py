"""The model families: one record each, with all that can be known of a family without importing
torch.

A record stands in the file of its family, ``ebbflow/models/families/NAME.py``, as ``FAMILY =
Family(...)``: a new family is one file, and no list of names has to follow. It is read from the
text of the file, whose import would bring torch and diffusers.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "models" / "families"


@dataclass(frozen=True)
class Family:
    """A model family that Ebbflow ships. A user's family needs no record: the recipe names its
    adapter.

    Attributes:
        adapter: class of its file, an ``ebbflow.models.base.Model``.
        guided: whether it has classifier-free guidance, and so reads negative prompts.
        edits_images: whether every prompt comes with an image.
        experts: whether it has one transformer for high noise and one for low noise;
            ``model.expert`` names the one that is trained, or both.
        diffusers: whether ``DiffusionPipeline.from_pretrained`` loads its folders and generates
            with them.
        vllm_omni: ``package.module:NAME`` of its network in vLLM-Omni's environment
            (``containers/vllm_omni``); None: the engine cannot generate with it.
    """

    adapter: str
    guided: bool = True
    edits_images: bool = False
    experts: bool = False
    diffusers: bool = True
    vllm_omni: str | None = None


def _read_family_record(file: Path) -> Family:
    """Read what a file assigns to ``FAMILY``: a call whose arguments are literals, by name."""
    for statement in ast.parse(file.read_text("utf-8")).body:
        match statement:
            case ast.Assign(
                targets=[ast.Name("FAMILY")], value=ast.Call(args=[], keywords=keywords)
            ):
                values = {str(key.arg): ast.literal_eval(key.value) for key in keywords}
                return Family(**values)
    raise ValueError(f"{file} has no line FAMILY = Family(...); write one, with literals by name")


FAMILIES = {file.stem: _read_family_record(file) for file in sorted(FOLDER.glob("[!_]*.py"))}
"""By the name that ``model.family`` takes."""
