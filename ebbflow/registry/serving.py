"""MLflow loads a registered policy here:
``mlflow.pyfunc.load_model("models:/<name>@champion").predict(prompts)``.

The model's data folder has ``policy/`` and, unless the base model is only referenced, ``base/``.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Hashable
from pathlib import Path
from threading import Lock
from typing import Any

import pandas as pd

from ebbflow.data.images import ImageError, load_condition_image
from ebbflow.data.prompts import Prompt
from ebbflow.recipe.secrets import redact_secrets
from ebbflow.tracking.store import TrackingError

logger = logging.getLogger(__name__)


class ServedPolicy:
    """Generates images from prompts with fixed noise: the same prompt and seed give the same image.

    Example:
        >>> model = mlflow.pyfunc.load_model("models:/glyph@champion")
        >>> model.predict(pd.DataFrame({"prompt": ['"EBBS"', '"EBBS"'], "seed": [0, -1]}))
                   image                      error warning sound
        0  b'\\x89PNG…'                       None    None  None
        1           None  seed = -1: give 0 or more    None  None
    """

    def __init__(self, base: Path, policy: Path) -> None:
        self.base = base
        self.policy = policy
        # a server may call from several threads, and there is one model
        self._one_at_a_time = Lock()

    def predict(
        self, model_input: pd.DataFrame, params: dict[str, Any] | None = None
    ) -> pd.DataFrame:
        """Columns ``image``, a PNG, ``error``, why there is none, ``warning``, and ``sound``, a WAV
        of a video with sound, a row per row of the input.

        Args:
            model_input: ``prompt`` and, optionally, ``negative_prompt``, ``seed`` (default 0) and
                ``image`` to edit. A row that cannot be drawn gets an error, and the others their
                images.
        """
        from ebbflow.evaluation.serve import GeneratedImage, generate_images

        # pandas fills missing cells with NaN, which is no string and no bytes
        rows = model_input.astype(object).where(model_input.notna(), None).to_dict("records")
        # A row that cannot be used must not cost the others their images: its index is missing from
        # the requests and has its error already.
        requests: dict[int, tuple[Prompt, int]] = {}
        drawn = {}
        for index, row in enumerate(rows):
            try:
                requests[index] = _parse_request(row)
            except ValueError as error:
                drawn[index] = GeneratedImage(error=str(error))
        prompts = [prompt for prompt, _ in requests.values()]
        seeds = [seed for _, seed in requests.values()]
        with self._one_at_a_time:
            drawn |= dict(
                zip(requests, generate_images(self.base, self.policy, prompts, seeds), strict=True)
            )
        # dtype=object: a column of None alone would become one of floats
        return pd.DataFrame(
            [drawn[index] for index in range(len(rows))],
            columns=list(GeneratedImage._fields),
            dtype=object,
        )


def _parse_request(row: dict[Hashable, Any]) -> tuple[Prompt, int]:
    """Convert a row to an entry of a prompt table and its seed.

    Raises:
        ValueError: a value of it cannot be used.
    """
    prompt, negative, seed, image = (
        row.get(name) for name in ("prompt", "negative_prompt", "seed", "image")
    )
    if prompt is None:
        raise ValueError("the row has no prompt; give it one")
    seed = int(seed or 0)
    if seed < 0:
        raise ValueError(f"seed = {seed}: give 0 or more")
    if not isinstance(image, bytes | None):
        raise ValueError("image is no bytes; give the content of an image file")
    # bytes only: a path in a request would let a client read files of the server
    try:
        edited = None if image is None else load_condition_image(image, Path())
    except ImageError as error:
        raise ValueError(f"image {error}") from None
    return (
        Prompt(
            0,
            str(prompt),
            str(negative or ""),
            None,
            source="",
            split="",
            metadata="{}",
            image=edited,
        ),
        seed,
    )


def load_version(tracking_uri: str, named: str, into: Path) -> ServedPolicy:
    """Download a registered version, compare it with what was registered, and load it with this
    Ebbflow. Unlike MLflow's ``load_model``, nothing in the version runs as code.

    Args:
        named: ``MODEL``, ``MODEL@alias`` or ``MODEL/version``; a model alone means its champion.
        into: a folder for the version, which must stay as long as the policy is used.

    Raises:
        RegistryError: there is no such version, it is not what was registered, or it is not signed
            where a key is configured.
        ArtifactError, PolicyError, ModelError: as ``evaluation.serve.iterate_images``.
    """
    from ebbflow.registry.download import download_registered_data
    from ebbflow.registry.lookup import find_named_version

    version = find_named_version(tracking_uri, named)
    return _load_data(download_registered_data(tracking_uri, version, into))


def _load_pyfunc(data_path: str) -> ServedPolicy:
    """MLflow's entry point."""
    _require_registered_data(Path(data_path))
    return _load_data(Path(data_path))


def _load_data(data: Path) -> ServedPolicy:
    """Load the policy now: a server's first request would run into its time limit."""
    from ebbflow.evaluation.serve import load_served_model

    base = find_base_folder(data)
    load_served_model(base, data / "policy")
    return ServedPolicy(base, data / "policy")


def _require_registered_data(data: Path) -> None:
    """Compare the data of a version that MLflow loads with what was registered, by the tags in the
    registry that MLflow took it from.

    Raises:
        RegistryError: they differ; or a key is configured and the version cannot be found.
    """
    import mlflow
    import yaml
    from mlflow.exceptions import MlflowException

    from ebbflow.registry.download import require_registered_folders
    from ebbflow.registry.model_version import (
        REGISTERED_MODEL_META,
        RegistryError,
        check_store_exists,
    )
    from ebbflow.registry.signing import is_signing_configured

    # MLflow writes this file beside what it downloads as models:/NAME/VERSION. The folder of the
    # data is one or two levels below it.
    places = [parent / REGISTERED_MODEL_META for parent in list(data.parents)[:3]]
    meta = next((path for path in places if path.is_file()), None)
    named = yaml.safe_load(meta.read_text()) if meta else None
    problem = f"{data} was not loaded as models:/NAME/VERSION, so that nothing says what it is"
    if named:
        uri = mlflow.get_registry_uri()
        try:
            check_store_exists(uri)
            client = mlflow.MlflowClient(registry_uri=uri)
            version = client.get_model_version(named["model_name"], str(named["model_version"]))
        except (RegistryError, MlflowException) as error:
            problem = f"the registry does not have the version of {data}: {error}"
        else:
            require_registered_folders(version, data)
            return
    if is_signing_configured():
        raise RegistryError(f"{problem}; its signature cannot be checked, so it is not served")
    logger.warning("%s; its digests were not compared with the registry's", problem)


def find_base_folder(data: Path) -> Path:
    """The base model of a version: stored in its data folder, or only referenced, then from the hub
    or its cache.

    Raises:
        TrackingError: it was not stored and is not on the hub.
    """
    base = data / "base"
    policy = data / "policy"
    if base.is_dir():
        return base
    # imported here: only a model of the hub needs them
    from ebbflow.models.prepare import cache_base_folder
    from ebbflow.training.policy_metadata import read_policy_metadata

    model = read_policy_metadata(policy).model
    if not model.is_on_hub:
        raise TrackingError(
            f"{data} was registered without its base model; put the one that"
            f" {policy / 'policy.json'} names into {base}"
        )
    return cache_base_folder(model)


def how_to_load(tracking_uri: str, model_name: str, version: str) -> str:
    """A line of Python that loads a registered version. It names the store, as MLflow's default is
    another than a run's.
    """
    store = f"mlflow.set_tracking_uri({redact_secrets(tracking_uri)!r})"
    return (
        f"import mlflow; {store}; model ="
        f" mlflow.pyfunc.load_model('models:/{model_name}/{version}')"
    )


def how_to_draw(tracking_uri: str, model_name: str, version: str, prompt: str) -> str:
    """A line of shell that draws a prompt with a registered version."""
    store = f"MLFLOW_TRACKING_URI={shlex.quote(redact_secrets(tracking_uri))}"
    return f"{store} ebbflow draw {shlex.quote(f'{model_name}/{version}')} {shlex.quote(prompt)}"
