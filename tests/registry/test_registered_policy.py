"""What is registered of a policy, and comes back from the registry."""

from __future__ import annotations

from pathlib import Path

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pytest
import torch
from registry_cases import contents, crown, new_run

from ebbflow.data.images import CONDITION_COMPRESSION, encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.evaluation import serve
from ebbflow.models import load_model
from ebbflow.recipe import Recipe
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.registry import model_version
from ebbflow.registry.download import download_champion, download_champion_folders
from ebbflow.registry.lookup import find_champion
from ebbflow.registry.model_version import link_served_folder
from ebbflow.registry.promotion import RegistryError
from ebbflow.storage.artifacts import ArtifactError, verify_folder
from ebbflow.training.policy import Policy
from ebbflow.training.policy_metadata import (
    ITERATE,
    STATISTICS,
    PolicyMetadata,
    read_policy_metadata,
)

pytestmark = pytest.mark.usefixtures("few_sources")


def test_the_champion_comes_back_as_it_was_registered(
    recipe: Recipe, name: str, policy: Path, base: Path, tmp_path: Path
) -> None:
    tracked = new_run(recipe)
    crown(tracked, policy, base, {}, model_name=name, expected_champion=None)
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    data = download_champion(champion, tmp_path / "champion")
    assert contents(data / "policy") == contents(policy)
    assert (data / "base" / "model_index.json").is_file()
    assert not (data / "policy").is_symlink()
    assert not [
        path
        for path in tmp_path.joinpath("champion").rglob("*")
        if path.suffix in {".pkl", ".pickle"}
    ]


CONFIGS = {
    "full": PolicyConfig(ema={}),
    "lora": PolicyConfig(train="lora", rank=4, alpha=8, ema={}),
}


def in_training(base_folder: Path, folder: Path, config: PolicyConfig) -> Path:
    """A policy folder as a stage leaves it behind for the next one: three sets of parameters that
    differ, and statistics.
    """
    policy = Policy(load_model(base_folder), config, seed=0)
    for name in ("old", "ema"):
        policy.snapshot_copy(name)
        with torch.no_grad():
            for value in policy.parameters.values():
                value += 0.01
    metadata = PolicyMetadata(
        base_digest="b" * 64,
        recipe_digest="r" * 64,
        config=config,
        version=3,
        copies=("old", ITERATE),
    )
    policy.save_folder(folder, metadata, statistics={"of": "prompts"})
    return folder


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_only_training_reads_is_not_registered(
    recipe: Recipe, name: str, base_folder: Path, tmp_path: Path, config: PolicyConfig
) -> None:
    trained = in_training(base_folder, tmp_path / "trained", config)
    before = contents(trained)
    tracked = new_run(recipe)
    crown(tracked, trained, None, {}, model_name=name, expected_champion=None)
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    served = download_champion(champion, tmp_path / "champion") / "policy"
    verify_folder(served)
    assert read_policy_metadata(served) == read_policy_metadata(trained).model_copy(
        update={"copies": ()}
    )
    found = contents(served)
    dropped = {STATISTICS, "old/parameters.safetensors", f"{ITERATE}/parameters.safetensors"}
    assert found.keys() == before.keys() - dropped
    made_anew = {"policy.json", "manifest.json", "COMMIT"}
    assert {path: found[path] for path in found.keys() - made_anew} == {
        path: before[path] for path in found.keys() - made_anew
    }
    assert not [path for path in served.rglob("*") if path.is_symlink()]
    assert contents(trained) == before

    loaded, expected = (Policy(load_model(base_folder), config, seed=0) for _ in range(2))
    loaded.load_folder(served)
    expected.load_folder(trained)
    for key, value in expected.parameters.items():
        assert torch.equal(loaded.parameters[key], value)


def test_the_same_policy_is_served_with_the_same_commit(base_folder: Path, tmp_path: Path) -> None:
    for name in ("one", "other"):
        trained = in_training(base_folder, tmp_path / name, CONFIGS["full"])
        link_served_folder(trained, tmp_path / f"{name}-served")
    assert verify_folder(tmp_path / "one-served") == verify_folder(tmp_path / "other-served")


def test_a_damaged_policy_gets_no_new_commit(
    recipe: Recipe, name: str, base_folder: Path, tmp_path: Path
) -> None:
    trained = in_training(base_folder, tmp_path / "trained", CONFIGS["lora"])
    (trained / "old" / "parameters.safetensors").write_bytes(b"")
    with pytest.raises(ArtifactError, match="does not match its manifest"):
        link_served_folder(trained, tmp_path / "served")
    with pytest.raises(RegistryError, match="does not match its manifest"):
        crown(new_run(recipe), trained, None, {}, model_name=name, expected_champion=None)


def test_the_registered_model_renders_with_seeds(
    recipe: Recipe,
    name: str,
    policy: Path,
    base: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def generate_images(
        base: Path, policy: Path, prompts: list[Prompt], seeds: list[int]
    ) -> list[serve.GeneratedImage]:
        assert (base / "model_index.json").is_file()
        assert (policy / "policy.json").is_file()
        texts = [
            f"{p.prompt}/{p.negative_prompt}/{p.image == png}/{seed}"
            for p, seed in zip(prompts, seeds, strict=True)
        ]
        return [serve.GeneratedImage(text.encode()) for text in texts]

    (png,) = encode_pngs(np.zeros((1, 8, 8, 3), np.uint8), CONDITION_COMPRESSION)
    monkeypatch.setattr(serve, "generate_images", generate_images)
    monkeypatch.setattr(serve, "load_served_model", lambda base, policy: None)
    tracked = new_run(recipe)
    crown(tracked, policy, base, {}, model_name=name, expected_champion=None)
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    model = mlflow.pyfunc.load_model(
        str(download_champion(champion, tmp_path / "champion").parents[1])
    )
    rows = pd.DataFrame(
        {
            "prompt": ["AB", "CD"],
            "seed": [5, 6],
            "negative_prompt": ["dull", None],
            "image": [png, None],
        }
    )
    assert model.predict(rows)["image"].tolist() == [b"AB/dull/True/5", b"CD//False/6"]
    assert model.predict(pd.DataFrame({"prompt": ["AB"]}))["image"].tolist() == [b"AB//False/0"]


def test_a_large_base_model_is_only_referred_to(
    recipe: Recipe,
    name: str,
    policy: Path,
    base_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        model_version, "MAX_STORED_BASE", model_version.count_folder_bytes(base_folder) - 1
    )
    tracked = new_run(recipe)
    crown(
        tracked,
        policy,
        base_folder,
        {"base_digest": verify_folder(base_folder)},
        model_name=name,
        expected_champion=None,
    )
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    found, its_policy = download_champion_folders(champion, tmp_path / "champion", base_folder)
    assert found == base_folder
    assert not (its_policy.parent / "base").exists()


def test_a_model_without_its_base_says_so(
    recipe: Recipe, name: str, policy: Path, tmp_path: Path
) -> None:
    tracked = new_run(recipe)
    crown(tracked, policy, None, {}, model_name=name, expected_champion=None)
    champion = find_champion(tracked.tracking_uri, name)
    assert champion is not None
    with pytest.raises(Exception, match="registered without its base model"):
        mlflow.pyfunc.load_model(str(download_champion(champion, tmp_path / "champion").parents[1]))
