"""Policy folders, base models and checkpoints are what was committed, or are refused; also where
the manifest was made again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from plain_cases import anything, assert_readable, cases, damage, only_speaks_plainly
from safetensors.torch import load_file, save_file

from ebbflow.models import ModelError, load_model
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import (
    COMMIT,
    MANIFEST,
    ArtifactError,
    commit_folder,
    verify_folder,
    write_new_folder,
)
from ebbflow.training.policy import Policy
from ebbflow.training.policy_io import read_prompt_statistics
from ebbflow.training.policy_metadata import (
    ITERATE,
    STATISTICS,
    PolicyError,
    PolicyMetadata,
    read_policy_metadata,
)

CONFIGS = {"full": PolicyConfig(), "lora": PolicyConfig(train="lora", rank=2, alpha=2)}
WEIGHTS = {
    "full": "transformer/diffusion_pytorch_model.safetensors",
    "lora": "pytorch_lora_weights.safetensors",
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory, base_folder):
    """Of each kind: a policy, and a folder of it."""
    made = {}
    for kind, config in CONFIGS.items():
        policy = Policy(load_model(base_folder), config, 0)
        folder = tmp_path_factory.mktemp("policies") / kind
        policy.ensure_copy("old")
        metadata = PolicyMetadata(
            base_digest="base",
            recipe_digest="recipe",
            config=config,
            version=3,
            copies=("old", ITERATE),
        )
        policy.save_folder(folder, metadata, statistics={"ocr": [[0, 1, 0.5, 0.0]]})
        made[kind] = (policy, folder)
    return made


def fresh(folder: Path, tmp_path: Path) -> Path:
    shutil.rmtree(tmp_path / "copy", ignore_errors=True)
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def load(policy: Policy, folder: Path) -> PolicyMetadata | None:
    """Load it to train on; an error leaves the policy as it was."""
    before = {name: value.detach().clone() for name, value in policy.parameters.items()}
    metadata = only_speaks_plainly(
        lambda: policy.load_folder(folder, to_train=True), (PolicyError, ArtifactError), str(folder)
    )
    if metadata is None:
        assert all(torch.equal(before[name], value) for name, value in policy.parameters.items())
    return metadata


@cases(
    60,
    number=st.integers(0, 9),
    go_wrong=damage(),
    kind=st.sampled_from(["lora", "lora", "lora", "full"]),
)
def test_a_damaged_file_is_found_whichever_it_is(policies, tmp_path, number, go_wrong, kind):
    policy, whole = policies[kind]
    folder = fresh(whole, tmp_path)
    path = folder / files(folder)[number % len(files(folder))]
    path.write_bytes(go_wrong(path.read_bytes()))
    assert load(policy, folder) is None


@cases(
    40,
    kind=st.sampled_from(["remove", "add", "rename"]),
    number=st.integers(0, 9),
    name=st.text(st.characters(codec="utf-8", exclude_characters="/\0"), min_size=1, max_size=40),
)
def test_a_file_too_many_or_too_few_is_found(policies, tmp_path, kind, number, name):
    policy, whole = policies["lora"]
    folder = fresh(whole, tmp_path)
    path = folder / files(folder)[number % len(files(folder))]
    if kind == "remove":
        path.unlink()
    elif kind == "add":
        (folder / f"x{name}").write_bytes(b"")
    else:
        path.rename(folder / f"x{name}")
    assert load(policy, folder) is None


def remade(folder: Path) -> Path:
    """Committed once more: the manifest fits whatever the folder holds now."""
    for name in (MANIFEST, COMMIT):
        (folder / name).unlink(missing_ok=True)
    commit_folder(folder)
    verify_folder(folder)
    return folder


manifests = st.one_of(
    st.binary(max_size=30),
    anything.map(lambda value: json.dumps(value).encode()),
    anything.map(lambda value: json.dumps({"files": value}).encode()),
    st.sampled_from(
        ["/etc/passwd", "../../etc/passwd", "a/../../b", "\ud800", "x" * 5000, "\x1b[2J"]
    ).map(lambda name: json.dumps({"files": {name: {"bytes": 1, "sha256": "0" * 64}}}).encode()),
    st.just(b"[" * 100_000),
    st.just(json.dumps({"files": {f"{n}": {} for n in range(5000)}}).encode()),
)


@cases(60, content=manifests)
def test_a_manifest_of_anything_whose_commit_fits(policies, tmp_path, content):
    policy, whole = policies["lora"]
    folder = fresh(whole, tmp_path)
    remade(folder)
    (folder / MANIFEST).write_bytes(content)
    (folder / COMMIT).write_text(hashlib.sha256(content).hexdigest())
    assert load(policy, folder) is None


@cases(30, content=st.binary(max_size=80))
def test_a_commit_of_anything(policies, tmp_path, content):
    folder = fresh(policies["lora"][1], tmp_path)
    (folder / COMMIT).write_bytes(content)
    assert load(policies["lora"][0], folder) is None


CARD = PolicyMetadata(
    base_digest="base", recipe_digest="recipe", config=CONFIGS["lora"], version=3, copies=("old",)
).model_dump(mode="json")


@cases(
    90,
    key=st.sampled_from([*CARD, "unknown", ""]),
    inner=st.sampled_from(["train", "rank", "family", "steps", None]),
    new=anything,
)
def test_anything_in_the_card(policies, tmp_path, key, inner, new):
    policy, whole = policies["lora"]
    folder = fresh(whole, tmp_path)
    changed = json.loads((folder / "policy.json").read_text())
    if inner and isinstance(changed.get(key), dict):
        changed[key][inner] = new
    else:
        changed[key] = new
    (folder / "policy.json").write_text(json.dumps(changed))
    metadata = load(policy, remade(folder))
    if metadata is not None:
        assert metadata.config == policy.config


@pytest.mark.parametrize("key", ["base_digest", "recipe_digest", "config"])
def test_a_key_that_the_card_lacks_is_named(policies, tmp_path, key):
    folder = fresh(policies["lora"][1], tmp_path)
    metadata = json.loads((folder / "policy.json").read_text())
    del metadata[key]
    (folder / "policy.json").write_text(json.dumps(metadata))
    with pytest.raises(PolicyError, match=rf"policy\.json .*\n{key}.*: Field required"):
        read_policy_metadata(remade(folder))


@pytest.mark.parametrize("content", [b"", b"\xff", b"[]", b"null", b"{", b"[" * 100_000])
def test_a_card_that_is_no_json_object(policies, tmp_path, content):
    folder = fresh(policies["lora"][1], tmp_path)
    (folder / "policy.json").write_bytes(content)
    with pytest.raises(PolicyError) as error:
        read_policy_metadata(remade(folder))
    assert_readable(str(error.value), "policy.json")


@pytest.mark.parametrize("name", ["../lora", "/etc", "a/b", ""])
def test_a_copy_cannot_be_read_from_elsewhere(policies, tmp_path, name):
    folder = fresh(policies["lora"][1], tmp_path)
    metadata = json.loads((folder / "policy.json").read_text()) | {"copies": [name]}
    (folder / "policy.json").write_text(json.dumps(metadata))
    with pytest.raises(PolicyError, match=r"copies\.0 = .*pattern"):
        policies["lora"][0].load_folder(remade(folder), to_train=True)


def change(tensors: dict[str, torch.Tensor], how: str) -> dict[str, torch.Tensor]:
    name = next(name for name, value in tensors.items() if value.ndim == 2)
    value = tensors.pop(name)
    new = {
        "smaller": {name: value[:1, :1].clone()},  # which copying would repeat
        "turned": {name: value.T.contiguous()},
        "flat": {name: value.flatten()},
        "integers": {name: value.int()},
        "missing": {},
        "renamed": {name.replace("weight", "wait"): value},
        "more": {name: value, f"{name}.more": value.clone()},
    }[how]
    return tensors | new


HOW = ["smaller", "turned", "flat", "integers", "missing", "renamed", "more"]


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("which", ["weights", "old"])
def test_weights_that_do_not_fit_are_named(policies, tmp_path, kind, which, how):
    policy, whole = policies[kind]
    folder = fresh(whole, tmp_path)
    path = folder / (WEIGHTS[kind] if which == "weights" else "old/parameters.safetensors")
    tensors = load_file(path)
    if how == "turned" and all(
        value.shape[0] == value.shape[1] for value in tensors.values() if value.ndim == 2
    ):
        pytest.skip("every matrix is square")
    save_file(change(tensors, how), path)
    with pytest.raises(PolicyError) as error:
        policy.load_folder(remade(folder), to_train=True)
    assert_readable(str(error.value), str(folder))


@cases(
    60,
    go_wrong=damage(),
    which=st.sampled_from([WEIGHTS["lora"], "old/parameters.safetensors", STATISTICS]),
)
def test_weights_that_cannot_be_read_although_the_manifest_fits(
    policies, make_recipe, tmp_path, go_wrong, which
):
    policy, whole = policies["lora"]
    folder = fresh(whole, tmp_path)
    content = (folder / which).read_bytes()
    # The header alone says how the numbers are to be read; other numbers are other weights.
    end = (
        min(len(content), 8 + int.from_bytes(content[:8], "little"))
        if which != STATISTICS
        else len(content)
    )
    (folder / which).write_bytes(go_wrong(content[:end]) + content[end:])
    before = {name: value.detach().clone() for name, value in policy.parameters.items()}
    load(policy, remade(folder))
    ctx = StageContext(make_recipe(), 0, 0)
    metadata = PolicyMetadata.model_validate(
        CARD | {"progress": {"algorithm": ctx.config.algorithm_name}}
    )
    only_speaks_plainly(
        lambda: read_prompt_statistics(ctx, metadata, folder), PolicyError, str(folder)
    )
    policy.assign_parameters(before)


@pytest.fixture
def broken_base(base_folder, tmp_path):
    """Of a user: never committed, or its checksums would be all that is looked at."""
    return Path(
        shutil.copytree(
            base_folder, tmp_path / "base", ignore=shutil.ignore_patterns(MANIFEST, COMMIT)
        )
    )


BASE_FILES = [
    "glyph.json",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.safetensors",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors",
]


@cases(40, name=st.sampled_from(BASE_FILES), go_wrong=damage())
def test_a_damaged_base_model(base_folder, tmp_path, name, go_wrong):
    folder = fresh(base_folder, tmp_path)
    content = (folder / name).read_bytes()
    end = (
        min(len(content), 8 + int.from_bytes(content[:8], "little"))
        if name.endswith("safetensors")
        else len(content)
    )
    (folder / name).write_bytes(go_wrong(content[:end]) + content[end:])
    only_speaks_plainly(lambda: verify_folder(folder), ArtifactError, str(folder), name)
    remade(folder)  # else its checksums are all that is looked at
    model = only_speaks_plainly(lambda: load_model(folder), ModelError, str(folder))
    if (
        model is not None
    ):  # what else a configuration may say is between the libraries and whoever wrote it
        assert len(model.latent_shape) == 3


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("glyph.json", '{"height": "x", "width": 32}'),
        ("glyph.json", '{"height": -8, "width": 32}'),
        ("glyph.json", '{"height": 16}'),
        ("glyph.json", '{"height": 64, "width": 256}'),
        ("glyph.json", "[]"),
        ("scheduler/scheduler_config.json", '"owner/name"'),
        ("transformer/config.json", '"owner/name"'),
        ("text_encoder/config.json", "[" * 100_000),
        ("tokenizer/tokenizer_config.json", "{}"),
    ],
)
def test_a_base_model_that_says_it_is_something_else(broken_base, name, content):
    (broken_base / name).write_text(content)
    with pytest.raises(ModelError) as error:
        load_model(broken_base)
    assert_readable(str(error.value), str(broken_base))


@pytest.mark.parametrize("how", ["smaller", "missing", "renamed", "more"])
@pytest.mark.parametrize("name", [name for name in BASE_FILES if name.endswith("safetensors")])
def test_a_base_model_with_other_weights_is_never_filled_up_at_random(broken_base, name, how):
    save_file(
        change(load_file(broken_base / name), how), broken_base / name, metadata={"format": "pt"}
    )
    with pytest.raises(ModelError) as error:
        load_model(broken_base)
    assert_readable(str(error.value), str(broken_base))


@pytest.mark.parametrize("name", ["a", "deep/b"])
@pytest.mark.parametrize("at", range(4))
def test_a_folder_that_is_not_finished_is_not_there(tmp_path, name, at):
    folder = tmp_path / "artifact"

    def write():
        with write_new_folder(folder) as unfinished:
            for number in range(4):
                if number == at:
                    raise RuntimeError("in the middle")
                (unfinished / name).parent.mkdir(exist_ok=True)
                (unfinished / name).write_bytes(bytes([number]))

    with pytest.raises(RuntimeError, match="in the middle"):
        write()
    assert not folder.exists()
    assert not list(tmp_path.glob(".artifact*"))


def test_the_numbers_of_a_policy_survive(policies, tmp_path):
    """The folders that are damaged here are whole before."""
    for policy, folder in policies.values():
        metadata = load(policy, fresh(folder, tmp_path))
        assert metadata is not None
        assert metadata.version == 3
        assert all(
            np.isfinite(value.detach().numpy()).all() for value in policy.parameters.values()
        )
