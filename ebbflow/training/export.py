"""A trained policy as a pipeline folder that needs nothing of Ebbflow."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ebbflow.models import load_model
from ebbflow.models.base import trained_networks
from ebbflow.recipe.families import FAMILIES
from ebbflow.storage.artifacts import (
    EXPORT,
    ArtifactError,
    check_replaceable,
    write_new_folder,
)
from ebbflow.training.adapters import ADAPTER
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import (
    PolicyMetadata,
    read_policy_metadata,
    require_allowed_code,
    require_base,
)


def export_pipeline(
    base: Path,
    folder: Path,
    target: Path,
    overwrite: bool = False,
    allowed_code: Collection[str] = (),
) -> PolicyMetadata:
    """Write the base model with the weights of a policy folder to ``target``: float32, in shards,
    committed; LoRA is merged in.

    ``how_to_load_pipeline`` says what loads it. The adapters alone need no export: a pipeline's
    ``load_lora_weights`` reads the policy folder itself.

    Args:
        overwrite: whether ``target`` may be an earlier export that nobody has changed, which is
            then replaced.
        allowed_code: see ``require_allowed_code``.

    Returns:
        The policy's metadata.

    Raises:
        ArtifactError: a folder is not what was committed, ``target`` holds something, or it is in
            ``base`` or ``folder``, or one of them is in it.
        PolicyError: ``base`` is not the policy's base model, or the policy names code that is not
            allowed.
        ModelError: ``base`` cannot be read.
    """
    for source in (base, folder):
        # Links resolved: two names may lead to one folder.
        paths = (target.resolve(), source.resolve())
        if paths[0].is_relative_to(paths[1]) or paths[1].is_relative_to(paths[0]):
            raise ArtifactError(
                f"{target} is, holds or lies in {source}, which the export reads; name a folder"
                " elsewhere"
            )
    check_replaceable(target, overwrite, EXPORT)
    metadata = read_policy_metadata(folder)
    require_base(metadata, base, folder)
    require_allowed_code(metadata, folder, allowed_code)
    # Adapters are small beside the weights: added in 16 bits, most of what was learnt would round
    # away.
    model = load_model(base, metadata.model.model_copy(update={"precision": "float32"}))
    Policy(model, metadata.config, seed=0).load_folder(folder)
    if metadata.config.train == "lora":
        for network in trained_networks(model.transformer).values():
            network.fuse_lora(adapter_names=[ADAPTER])
            network.unload_lora()
    with write_new_folder(target, overwrite, EXPORT) as unfinished:
        model.save(unfinished)
    return metadata


def how_to_load_pipeline(folder: Path, family: str) -> str:
    """Return a line of Python that loads an exported pipeline of a family, which Ebbflow ships or a
    user has written.

    diffusers loads what has all parts of its pipeline. The glyph model has no VAE, and of a user's
    family nothing is known.
    """
    if family in FAMILIES and FAMILIES[family].modular:
        return (
            "from diffusers import ModularPipeline; pipeline ="
            f" ModularPipeline.from_pretrained({str(folder)!r}); pipeline.load_components()"
        )
    if family in FAMILIES and FAMILIES[family].diffusers:
        return (
            "from diffusers import DiffusionPipeline; pipeline ="
            f" DiffusionPipeline.from_pretrained({str(folder)!r})"
        )
    config = "" if family in FAMILIES else f", ModelConfig(family={family!r}, path={str(folder)!r})"
    imports = "from pathlib import Path; from ebbflow.models import load_model"
    imports += "; from ebbflow.recipe.model import ModelConfig" if config else ""
    return f"{imports}; model = load_model(Path({str(folder)!r}){config})"
