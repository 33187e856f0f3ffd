"""Defaults of a stage that its algorithm sets: ``stage_defaults`` of the algorithm's class."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from ebbflow.recipe.algorithms import AlgorithmConfig, CustomAlgorithmConfig
from ebbflow.recipe.choices import SamplerConfig, WindowConfig
from ebbflow.recipe.kinds import find_kind
from ebbflow.recipe.registry import ALGORITHMS


def add_algorithm_defaults(
    data: dict[str, Any], stage: type[BaseModel], default_algorithm: Any
) -> dict[str, Any]:
    """Return the keys of a stage as a recipe gives them, with the algorithm's defaults for the
    others, down to single keys of ``sampler``, ``window`` and so on.

    Example:
        DanceGRPO has ``{"name": "dance_sde", "steps": 16}`` as its sampler::

            data = {"algorithm": {"name": "dance_grpo"}, "sampler": {"steps": 9}}
            add_algorithm_defaults(data, OnlineStageConfig, None)
            # {"algorithm": {"name": "dance_grpo"},
            #  "sampler": {"name": "dance_sde", "steps": 9},
            #  "window": {"kind": "share", "share": 0.6}, ...}

    Args:
        stage: the class of the stage; it ignores defaults of keys that it lacks.
        default_algorithm: the algorithm of a stage that names none.
    """
    algorithm = _find_algorithm_class(data.get("algorithm", default_algorithm))
    if algorithm is None:
        # No such algorithm: pydantic's error about ``algorithm`` says more than one from here.
        return data
    stage_defaults = algorithm.stage_defaults
    if data.get("data"):
        stage_defaults = stage_defaults | algorithm.data_defaults
    defaults = {key: value for key, value in stage_defaults.items() if key in stage.model_fields}
    penalty = find_kind(algorithm.kind).default_penalty
    # An algorithm's own penalty replaces that of its kind.
    defaults["reference"] = {"penalty": penalty} | defaults.get("reference", {})
    merged = {
        key: _merge_section(key, defaults[key], data[key]) for key in defaults.keys() & data.keys()
    }
    return defaults | data | merged


def _find_algorithm_class(algorithm: Any) -> type[AlgorithmConfig] | None:
    """Return the class of hyper-parameters that a recipe's ``algorithm`` asks for; None if there
    is none.

    Args:
        algorithm: a mapping from YAML, or an instance where Python builds the stage.
    """
    if isinstance(algorithm, AlgorithmConfig):
        return type(algorithm)
    if isinstance(algorithm, CustomAlgorithmConfig):
        return type(algorithm.load_algorithm()[1])
    if not isinstance(algorithm, dict):
        return None
    name = algorithm.get("name")
    if name == "custom":
        try:
            return type(CustomAlgorithmConfig.model_validate(algorithm).load_algorithm()[1])
        except ValidationError:
            return None
    # YAML may give a list or a mapping as the name, which no dict takes as a key.
    return ALGORITHMS.get(name) if isinstance(name, str) else None


def _merge_section(section: str, defaults: Any, values: Any) -> Any:
    """Return what the recipe gives for a section, with the algorithm's defaults for the other
    keys.

    Where the recipe takes another sampler or kind of window than the algorithm, only ``steps`` is
    filled in: the algorithm's other values were chosen for its own sampler or window. A noise level
    of ``flow_sde``, for example, means something else to ``cps``.
    """
    if isinstance(values, BaseModel):
        # Only the keys that were set: the others are not the user's choice.
        values = values.model_dump(exclude_unset=True)
    if not (isinstance(values, dict) and isinstance(defaults, dict)):
        return values
    choice_key, usual_choice = {
        "sampler": ("name", SamplerConfig().name),
        "window": ("kind", WindowConfig().kind),
    }.get(section, ("", ""))
    algorithm_choice = defaults.get(choice_key, usual_choice)
    if values.get(choice_key, algorithm_choice) != algorithm_choice:
        defaults = {key: value for key, value in defaults.items() if key == "steps"}
    return defaults | values
