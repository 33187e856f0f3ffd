"""The model families: one record each, with all that can be known of a family without importing
torch.

A record stands in the file of its family, ``ebbflow/models/families/NAME.py``, as ``FAMILY =
Family(...)``: a new family is one file, and no list of names has to follow. It is read from the
text of the file, whose import would bring torch and diffusers. The file of a user's own family may
have a record, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

from ebbflow.recipe.plugins import PATH

FOLDER = Path(__file__).parents[1] / "models" / "families"


@dataclass(frozen=True)
class Family:
    """What a recipe has to know of a model family.

    A user's own family may leave the record out: then a recipe is checked against nothing but what
    its adapter shows once it is loaded.

    Attributes:
        adapter: class of its file, an ``ebbflow.models.base.Model``.
        pipeline: class of diffusers that an index of its folders names; a user's own family leaves
            it out, as its ``load`` alone knows the layout of its folders.
        folder_files: what a base-model folder of the family must have.
        size_multiple: pixels; every published model of the family generates images whose sides
            are multiples of it, and some of them other sizes, too. 0: none is known.
        frame_multiple: the same of videos, which have 1 + a multiple of it frames; 0: images.
        guided: whether it has classifier-free guidance, and so reads negative prompts.
        edits_images: whether every prompt comes with an image.
        min_images: the fewest images of a prompt, where it edits them.
        max_images: the most; None: any number.
        experts: whether it has one transformer for high noise and one for low noise;
            ``model.expert`` names the one that is trained, or both.
        diffusers: whether ``DiffusionPipeline.from_pretrained`` loads its folders and generates
            with them.
        vllm_omni: ``package.module:NAME`` of its network in vLLM-Omni's environment
            (``containers/vllm_omni``); None: the engine cannot generate with it.
        feature_caches: the names of ``rollout_cache`` whose hooks of diffusers fit its network
            (``tests/rollouts/test_cached_families.py``).
        trains_base_model: whether the adapter loads the base model that a run trains from scratch
            where ``model.path`` is not set: the glyph model that ``model.training`` describes.
        has_fixed_size: whether it generates the size that it was trained on and no other; a recipe
            cannot set another for the model, its stages or its evaluation.
        unsupported_keys: further keys of ``model`` that have no effect on the family.
        modular: whether its pipeline is a modular one of diffusers, which loads its parts by a
            function of its own.
        latents: the names of the latents of a sample, where it has several.
        caveat: how what its pipeline generates differs from what is trained, rewarded and
            evaluated; empty where they are the same. ``check``, the report and ``export`` say it.

    Example:
        >>> Family(adapter="FluxKontextModel", guided=False, edits_images=True)
    """

    adapter: str
    pipeline: str = ""
    folder_files: tuple[str, ...] = ("model_index.json",)
    size_multiple: int = 0
    frame_multiple: int = 0
    guided: bool = True
    edits_images: bool = False
    min_images: int = 1
    max_images: int | None = 1
    experts: bool = False
    diffusers: bool = True
    vllm_omni: str | None = None
    feature_caches: tuple[str, ...] = ()
    trains_base_model: bool = False
    has_fixed_size: bool = False
    unsupported_keys: tuple[str, ...] = ()
    modular: bool = False
    latents: tuple[str, ...] = ()
    caveat: str = ""

    def takes_images(self, count: int) -> bool:
        """Whether a prompt may have so many images, of a family that edits them."""
        return self.min_images <= count and (self.max_images is None or count <= self.max_images)

    def surely_generates(self, sides: Iterable[int], frames: int) -> bool:
        """Whether every published model of the family generates images of these sides, in pixels,
        and so many frames. If not, the configuration of the model at hand decides.
        """
        if not self.size_multiple or any(side % self.size_multiple for side in sides):
            return False
        if self.frame_multiple:
            return (frames - 1) % self.frame_multiple == 0
        return frames == 1

    def describe_images(self) -> str:
        """How many images a prompt has, in words: "2", "1 or more"."""
        if self.max_images is None:
            return f"{self.min_images} or more"
        if self.min_images == self.max_images:
            return str(self.max_images)
        return f"{self.min_images} to {self.max_images}"


def _read_family_record(file: Path) -> Family | None:
    """What a file assigns to ``FAMILY``: a call whose arguments are literals, by name; None without
    such a line.

    Raises:
        ValueError: an argument is no literal, or no fact of a family.
    """
    return _parse_family_record(file, file.read_text("utf-8"))


# A recipe asks for the record of its family twenty times and more. The file is read each time: it
# may have changed.
@lru_cache(maxsize=8)
def _parse_family_record(file: Path, source: str) -> Family | None:
    for statement in ast.parse(source).body:
        # Only this form is read, by its text: running the file would import torch.
        match statement:
            case ast.Assign(
                targets=[ast.Name("FAMILY")],
                value=ast.Call(func=ast.Name("Family"), args=[], keywords=keywords),
            ):
                try:
                    return Family(**{str(key.arg): ast.literal_eval(key.value) for key in keywords})
                except (TypeError, ValueError) as error:
                    raise ValueError(
                        f"{file}: FAMILY = Family(...) cannot be read ({error}); write the facts of"
                        " ebbflow.recipe.families.Family, as literals"
                    ) from None
    return None


def _read_shipped_records() -> dict[str, Family]:
    records = {}
    # Sorted, since file systems list a folder in any order, and errors and schemas show the names
    # in this one. Files with an underscore hold what several families share.
    for file in sorted(FOLDER.glob("[!_]*.py")):
        record = _read_family_record(file)
        if record is None:
            raise ValueError(
                f"{file} has no line FAMILY = Family(...); write one, with literals by name"
            )
        records[file.stem] = record
    return records


FAMILIES = _read_shipped_records()
"""By the name that ``model.family`` takes."""


def find_family(name: str) -> Family | None:
    """The record of a family by ``model.family``; None of a user's own without one.

    Raises:
        ValueError: the file of the user's family has a record that cannot be read.
    """
    # A name that is neither gets None here; ``model.family`` rejects it.
    if name in FAMILIES or not PATH.fullmatch(name):
        return FAMILIES.get(name)
    module, _, adapter = name.partition(":")
    file = _find_source_file(module)
    record = _read_family_record(file) if file else None
    # A file may have several adapters; its record describes the one that it names.
    return record if record and record.adapter == adapter else None


def _find_source_file(module: str) -> Path | None:
    """The source of a module, found without running code of it or of the packages around it; None
    where it is not installed here.
    """
    top, *inner = module.split(".")
    try:
        # Of a package at the top, this imports nothing; of one inside, it would import those around
        # it, and with them perhaps torch.
        spec = find_spec(top)
    except ValueError:  # a module without a file, such as __main__
        return None
    if spec is None:
        return None
    if not inner:
        return Path(spec.origin) if spec.origin and spec.origin.endswith(".py") else None
    for folder in spec.submodule_search_locations or ():
        path = Path(folder, *inner)
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None
