"""A trained policy as a pipeline folder that needs nothing of Ebbflow."""

from __future__ import annotations

from pathlib import Path

from ebbflow.models import load_model
from ebbflow.storage.artifacts import new_folder
from ebbflow.training.policy import ADAPTER, Policy
from ebbflow.training.policy_metadata import read_policy_metadata


def export_pipeline(base: Path, folder: Path, target: Path) -> None:
    """Write the base model with the weights of a policy folder to ``target``: float32, in shards, committed; LoRA is merged in.

    ``DiffusionPipeline.from_pretrained(target)`` loads it. The adapters alone need no export: a pipeline's
    ``load_lora_weights`` reads the policy folder itself.

    Raises:
        ArtifactError, PolicyError: the policy folder is not whole.
        ModelError: ``base`` is not the folder of its base model.
    """
    metadata = read_policy_metadata(folder)
    # Adapters are small beside the weights: added in 16 bits, most of what was learnt would round away.
    model = load_model(base, metadata.model.model_copy(update={"precision": "float32"}))
    Policy(model, metadata.config, seed=0).load(folder)
    if metadata.config.train == "lora":
        model.transformer.fuse_lora(adapter_names=[ADAPTER])
        model.transformer.unload_lora()
    with new_folder(target) as unfinished:
        model.save(unfinished)
