"""How MLflow loads a registered policy: ``mlflow.pyfunc.load_model("models:/<name>@champion").predict(prompts)``.

The model's data folder holds ``policy/`` and, unless the base model was registered by reference only, ``base/``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from ebbflow.tracking.runs import TrackingError


class ServedPolicy:
    """Renders prompts with fixed noise: the same prompt and seed give the same image."""

    def __init__(self, base: Path, policy: Path) -> None:
        self.base, self.policy = base, policy

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """One PNG per row of ``prompt`` and, where given, ``seed`` (0 without it)."""
        from ebbflow.evaluation.serve import generate_images

        prompts = [str(prompt) for prompt in model_input["prompt"]]
        seeds = model_input["seed"].fillna(0).astype("int64").tolist() if "seed" in model_input else [0] * len(prompts)
        return pd.DataFrame({"image": generate_images(self.base, self.policy, prompts, seeds)})


def _load_pyfunc(data_path: str) -> ServedPolicy:
    """MLflow's entry point."""
    base, policy = Path(data_path) / "base", Path(data_path) / "policy"
    return ServedPolicy(base if base.is_dir() else _referenced_base(data_path, policy), policy)


def _referenced_base(data_path: str, policy: Path) -> Path:
    """The base model that a version only refers to, from the hub's cache or from the hub."""
    from ebbflow.models.hub import pretrained_folder
    from ebbflow.models.prepare import PIPELINE_FILES
    from ebbflow.training.policy import read_card

    model = read_card(policy).model
    if not model.on_hub:
        raise TrackingError(
            f"{data_path} was registered without its base model, so it cannot render by itself; "
            f"put the base model that {policy / 'policy.json'} names into {Path(data_path) / 'base'}"
        )
    return pretrained_folder(model, PIPELINE_FILES)
