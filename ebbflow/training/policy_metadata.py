"""The metadata of a policy folder: what it holds and where it comes from. Reading it needs no
torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from ebbflow.recipe.base import Strict, explain_validation_error, sanitize_text
from ebbflow.recipe.evaluation import EvaluationConfig
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig, resize_model
from ebbflow.recipe.plugins import list_disallowed_paths
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.recipe.samplers import SAMPLERS
from ebbflow.storage.artifacts import digest_of_folder, verify_folder, write_new_folder

METADATA = "policy.json"
STATISTICS = "prompt_statistics.json"
AGAIN = "copy the folder again or make it again"
ALLOW_CODE = "EBBFLOW_ALLOW_CODE"
"""Environment variable of serving: code that policies may name, separated by commas."""
EVALUATION = EvaluationConfig()
ITERATE = "iterate"
"""The copy that holds the parameters themselves, where the folder's weights are their average."""
FIRST_NETWORK = "transformer"
"""What diffusers calls the first network of every pipeline, whose LoRA is at the top of a policy
folder.
"""
LORA_FILE = "pytorch_lora_weights.safetensors"
ADAPTER_METADATA = "lora_adapter_metadata"
"""Where diffusers keeps peft's configuration in the header of a LoRA file, as JSON."""
TARGETS = TypeAdapter(Annotated[list[str], Field(min_length=1, strict=True)])


class PolicyError(Exception):
    """A policy folder that does not fit: names the folder, what differs and how to fix it."""


class Progress(Strict):
    """How far an algorithm has come with a policy: its schedules continue from here in the next
    stage that it runs.
    """

    algorithm: str = ""
    steps: int = 0
    """Rollout steps of online stages."""
    updates: int = 0
    """Optimiser steps."""


class PolicyMetadata(Strict):
    """``policy.json``: what a policy folder holds and where it comes from."""

    base_digest: str
    """COMMIT of the base-model folder that it was trained from."""
    recipe_digest: str
    config: PolicyConfig
    """What the recipe says. In a folder with the weights of a LoRA, ``targets`` are always there:
    the default of a family may change, and what was trained stays what it is."""
    model: ModelConfig = ModelConfig()
    """The base model, and how it generates."""
    steps: int = EVALUATION.steps
    """Denoising steps that it is evaluated with, and served."""
    sampler: str = "ode"
    """Their sampler. It may be a path to code, which reading the metadata does not import."""
    eta: float | None = None
    height: int | None = None
    """Of the images that it is evaluated with, and served; left out, that of ``model``."""
    width: int | None = None
    start: str | None = None
    """Where the policy came from that this one was started at, if it was not the base model."""
    version: int = 0
    """Optimiser steps since the start."""
    progress: Progress = Progress()
    """Of the last stage's algorithm."""
    copies: tuple[Annotated[str, Field(pattern=r"^[a-z]+$")], ...] = ()
    stages: tuple[str, ...] = ()
    """Labels of the stages behind it. No times: the same recipe gives the same bytes."""
    teachers: dict[str, str] = {}
    """COMMIT of the policies that its last distillation from several teachers learnt from, by
    prompt set.
    """

    @property
    def served_model(self) -> ModelConfig:
        """The base model as it generates where the policy is evaluated and served."""
        return resize_model(self.model, self.height, self.width)


def sampling_settings(evaluation: EvaluationConfig) -> dict[str, Any]:
    """Return what a policy's metadata says of how it is evaluated and served."""
    return {key: getattr(evaluation, key) for key in ("steps", "sampler", "eta", "height", "width")}


def read_policy_metadata(folder: Path) -> PolicyMetadata:
    """Read the metadata of a committed policy folder."""
    verify_folder(folder)
    if not (folder / METADATA).is_file():
        raise PolicyError(f"{folder} is no policy folder: it has no {METADATA}")
    # The folder is whole, so what cannot be read was written by another version of Ebbflow.
    try:
        metadata = PolicyMetadata.model_validate_json((folder / METADATA).read_bytes())
    except ValidationError as error:
        raise PolicyError(
            f"{folder / METADATA} says what this Ebbflow does not"
            f" know:\n{explain_validation_error(error, PolicyMetadata)}"
        ) from None
    if metadata.config.train == "lora" and metadata.config.targets is None and has_weights(folder):
        # Of an Ebbflow that did not write the default down.
        config = metadata.config.model_copy(update={"targets": _read_targets(folder)})
        metadata = metadata.model_copy(update={"config": config})
    return metadata


def _read_targets(folder: Path) -> list[str]:
    """Read which layers the LoRA of a policy folder adapts, from the headers of its files."""
    targets: set[str] = set()
    # Of one network the LoRA is at the top of the folder, of a second one in a folder of its own.
    for file in (*folder.glob(LORA_FILE), *folder.glob(f"*/{LORA_FILE}")):
        try:
            with safe_open(file, "numpy") as tensors:
                adapter = json.loads((tensors.metadata() or {})[ADAPTER_METADATA])
            targets.update(TARGETS.validate_python(adapter[f"{FIRST_NETWORK}.target_modules"]))
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = sanitize_text(f"{type(error).__name__}: {error}", 200)
            raise PolicyError(
                f"{file} does not say which layers its LoRA adapts ({reason}); {AGAIN}"
            ) from None
    return sorted(targets)


def choose_policy_config(config: PolicyConfig, folder: Path) -> PolicyConfig:
    """Return the configuration to open the policy of a folder with: the recipe's, and where it
    leaves ``targets`` to the model's family those that the policy was trained with.

    Raises:
        ArtifactError, PolicyError: as ``read_policy_metadata``.
    """
    if config.train == "full" or config.targets:
        return config
    return config.model_copy(update={"targets": read_policy_metadata(folder).config.targets})


def has_weights(folder: Path) -> bool:
    """Return whether a whole policy folder has weights of its own; one of the untouched base model
    has none.
    """
    return (folder / FIRST_NETWORK).is_dir() or any(folder.glob("*.safetensors"))


def require_base(metadata: PolicyMetadata, base: Path, folder: Path) -> None:
    """Check that ``base``, committed or not, is byte for byte the base model that the policy in
    ``folder`` was trained from.

    Raises:
        ArtifactError: the base model is not what was committed.
        PolicyError: it is another one.
    """
    # By what is in the folder and not by its name: LoRA on another base gives pictures too, and
    # nothing else would tell.
    digest = digest_of_folder(base)
    if digest != metadata.base_digest:
        raise PolicyError(
            f"the policy in {folder} was trained from base model {metadata.base_digest[:12]}, and"
            f" {base} is {digest[:12]}; use its own base"
        )


def require_allowed_code(
    metadata: PolicyMetadata, folder: Path, allowed: Collection[str | None] = ()
) -> None:
    """Check that reading the policy in ``folder`` runs only code that is Ebbflow's or that the user
    named.

    A policy folder may come from anybody. Its metadata names the model family and the sampler,
    which are imported and called, and the attention backend, which diffusers may download.

    Args:
        allowed: what the user's own recipe or ``--allow-code`` names: ``package.module:Class``, a
            module, an attention backend.

    Raises:
        PolicyError: it names other code.
    """
    foreign = list_disallowed_paths(list_named_code(metadata.model, metadata.sampler), allowed)
    if foreign:
        raise PolicyError(
            f"{folder / METADATA} names code to run, {foreign[0]}, which this recipe does not name;"
            " if you trust it, take a recipe that names it, or allow it (--allow-code"
            f" {foreign[0]}, or the variable {ALLOW_CODE} when serving)"
        )


def list_named_code(model: ModelConfig, sampler: str = "ode") -> list[str]:
    """List the family and the attention backend of a model and the sampler, if they are not
    Ebbflow's or diffusers' own code.
    """
    paths = []
    if model.family not in FAMILIES:
        paths.append(model.family)
    if sampler not in SAMPLERS:
        paths.append(sampler)
    if model.attention and model.attention.endswith("_hub"):
        paths.append(model.attention)  # kernels that diffusers downloads and runs
    return paths


def write_base_policy(
    folder: Path,
    base_digest: str,
    recipe_digest: str,
    config: PolicyConfig,
    model: ModelConfig = ModelConfig(),
    evaluation: EvaluationConfig = EVALUATION,
) -> None:
    """Write the policy folder of the untouched base model: version 0, no weights of its own."""
    metadata = PolicyMetadata(
        base_digest=base_digest,
        recipe_digest=recipe_digest,
        config=config,
        model=model,
        **sampling_settings(evaluation),
    )
    with write_new_folder(folder) as unfinished:
        (unfinished / METADATA).write_text(metadata.model_dump_json(indent=2))
