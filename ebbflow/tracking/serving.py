"""MLflow loads a registered policy here: ``mlflow.pyfunc.load_model("models:/<name>@champion").predict(prompts)``.

The model's data folder has ``policy/`` and, unless the base model is only referenced, ``base/``.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import pandas as pd

from ebbflow.data.prompts import Prompt
from ebbflow.tracking.store import TrackingError


class ServedPolicy:
    """Generates images from prompts with fixed noise: the same prompt and seed give the same image."""

    def __init__(self, base: Path, policy: Path) -> None:
        self.base, self.policy = base, policy

    def predict(self, model_input: pd.DataFrame, params: dict[str, Any] | None = None) -> pd.DataFrame:
        """One PNG per row of ``prompt`` and, optionally, ``negative_prompt``, ``seed`` (default 0) and ``image`` to edit."""
        from ebbflow.evaluation.serve import generate_images

        rows = model_input.astype(object).where(model_input.notna(), None).to_dict("records")
        images = generate_images(
            self.base, self.policy, [_prompt(row) for row in rows], [int(row.get("seed") or 0) for row in rows]
        )
        return pd.DataFrame({"image": images})


def _prompt(row: dict[Hashable, Any]) -> Prompt:
    """A row as an entry of a prompt table."""
    negative, image = row.get("negative_prompt") or "", row.get("image")
    return Prompt(0, str(row["prompt"]), str(negative), None, source="", split="", metadata="{}", image=image)


def _load_pyfunc(data_path: str) -> ServedPolicy:
    """MLflow's entry point."""
    return ServedPolicy(base_folder(Path(data_path)), Path(data_path) / "policy")


def base_folder(data: Path) -> Path:
    """The base model of a version: stored in its data folder, or only referenced, then from the hub or its cache.

    Raises:
        TrackingError: it was not stored and is not on the hub.
    """
    base, policy = data / "base", data / "policy"
    if base.is_dir():
        return base
    from ebbflow.models.prepare import cached_base
    from ebbflow.training.policy_metadata import read_policy_metadata

    model = read_policy_metadata(policy).model
    if not model.on_hub:
        raise TrackingError(
            f"{data} was registered without its base model; put the one that {policy / 'policy.json'} names into {base}"
        )
    return cached_base(model)
