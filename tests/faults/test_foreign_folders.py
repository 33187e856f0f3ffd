"""Folders from elsewhere: nothing runs that they name, nothing is used that was changed, and
nothing of the user's is deleted.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.data.prompts import Prompt
from ebbflow.data.schema import PROMPTS
from ebbflow.evaluation.evaluate import evaluate_folder
from ebbflow.evaluation.serve import generate_images
from ebbflow.models import ModelError, load_model
from ebbflow.models.prepare import copy_base_folder
from ebbflow.recipe import Recipe
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.rollouts.engine import open_engine
from ebbflow.stage import StageContext
from ebbflow.storage.artifacts import ArtifactError, verify_folder
from ebbflow.storage.tables import write_table
from ebbflow.training.export import export_pipeline
from ebbflow.training.policy_io import load_policy
from ebbflow.training.policy_metadata import ALLOW_CODE, PolicyError, write_base_policy
from ebbflow.training.start import write_start_policy

Use = Callable[[Path, Path], object]


@pytest.fixture
def base(base_folder: Path, tmp_path: Path) -> Path:
    """A base model that may be damaged."""
    return Path(shutil.copytree(base_folder, tmp_path / "base"))


@pytest.fixture
def policy(base_folder: Path, tmp_path: Path) -> Path:
    """The policy folder of the untouched base model."""
    write_base_policy(tmp_path / "policy", verify_folder(base_folder), "recipe", PolicyConfig())
    return tmp_path / "policy"


@pytest.fixture(params=["export", "evaluation", "serving", "training", "start"])
def use(
    request: pytest.FixtureRequest,
    make_recipe: Callable[..., Recipe],
    make_prompts: Callable[..., list[Prompt]],
) -> Use:
    """``use(base, policy)``: what opens both folders together."""
    recipe = make_recipe(rewards=[{"name": "jpeg_compressibility"}], guardrails=[])

    def evaluate(base: Path, policy: Path) -> None:
        prompts = policy.with_name("prompts.parquet")
        rows = [asdict(prompt) for prompt in make_prompts(4, "held_out")]
        write_table(prompts, PROMPTS, [pa.RecordBatch.from_pylist(rows, PROMPTS)], {})
        evaluate_folder(recipe, base, policy, prompts, "label", policy.with_name("samples.parquet"))

    def start(base: Path, policy: Path) -> None:
        write_start_policy(
            make_recipe(policy={"start": {"path": str(policy)}}),
            base,
            policy,
            policy.with_name("start"),
            str(policy),
        )

    return {
        "export": lambda base, policy: export_pipeline(base, policy, policy.with_name("exported")),
        "evaluation": evaluate,
        "serving": lambda base, policy: generate_images(base, policy, make_prompts(1), [0]),
        "training": lambda base, policy: load_policy(StageContext(recipe, 0, 0), base, policy),
        "start": start,
    }[request.param]


def flip_one_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("committed", [True, False])
def test_whole_folders_are_used(use: Use, base: Path, policy: Path, committed: bool) -> None:
    if not committed:
        (base / "COMMIT").unlink()
        (base / "manifest.json").unlink()
    use(base, policy)


def test_one_flipped_bit_of_the_base_model_is_found(use: Use, base: Path, policy: Path) -> None:
    flip_one_bit(base / "text_encoder" / "model.safetensors")
    with pytest.raises(
        ArtifactError, match=r"does not match its manifest \(text_encoder/model.safetensors\)"
    ):
        use(base, policy)
    assert not policy.with_name("exported").exists()


def test_a_base_model_whose_commit_was_removed_is_found(use: Use, base: Path, policy: Path) -> None:
    flip_one_bit(base / "text_encoder" / "model.safetensors")
    (base / "COMMIT").unlink()
    (base / "manifest.json").unlink()
    with pytest.raises(PolicyError, match="policy was trained from base model"):
        use(base, policy)


def test_another_base_model_is_found(use: Use, base: Path, policy: Path, tmp_path: Path) -> None:
    write_base_policy(tmp_path / "foreign", "0" * 64, "recipe", PolicyConfig())
    with pytest.raises(
        PolicyError,
        match=(
            r"foreign was trained from base model 0{12}, and .*base is"
            rf" {verify_folder(base)[:12]}"
        ),
    ):
        use(base, tmp_path / "foreign")


def test_every_process_verifies_the_base_model_that_it_loads(
    base: Path, make_recipe: Callable[..., Recipe]
) -> None:
    flip_one_bit(base / "transformer" / "diffusion_pytorch_model.safetensors")
    other = make_recipe(online={"engine": "mine.second_copy:SecondCopy"})
    for opens in (load_model, lambda folder: open_engine(StageContext(other, 0, 0), folder)):
        with pytest.raises(ArtifactError, match="does not match its manifest"):
            opens(base)


@pytest.mark.parametrize(
    "use", ["export", "evaluation", "serving"], indirect=True
)  # the others run what the recipe names
@pytest.mark.parametrize(
    "named",
    [
        {"family": "shutil:rmtree", "path": "x"},
        {"family": "sd3", "path": "x", "attention": "_flash_3_hub"},
    ],
)
def test_code_that_a_policy_names_does_not_run(
    use: Use, base: Path, tmp_path: Path, named: dict[str, str]
) -> None:
    write_base_policy(
        tmp_path / "foreign",
        verify_folder(base),
        "recipe",
        PolicyConfig(),
        ModelConfig.model_validate(named),
    )
    code = named.get("attention", named["family"])
    with pytest.raises(
        PolicyError,
        match=(
            rf"policy.json names code to run, {code}, which this recipe does not name.*--allow-code"
        ),
    ):
        use(base, tmp_path / "foreign")
    assert verify_folder(base)


@pytest.mark.parametrize("allowed", ["mine.shifted:ShiftedGlyph", "mine.shifted"])
def test_code_that_the_user_names_runs(
    base: Path,
    make_prompts: Callable[..., list[Prompt]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allowed: str,
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    family = ModelConfig(family="mine.shifted:ShiftedGlyph", path="x")
    write_base_policy(tmp_path / "policy", verify_folder(base), "recipe", PolicyConfig(), family)
    with pytest.raises(PolicyError, match="names code to run"):
        generate_images(base, tmp_path / "policy", make_prompts(1), [0])
    monkeypatch.setenv(ALLOW_CODE, f"another.module,{allowed}")
    for given in ((), (allowed,)):
        (drawn,) = generate_images(base, tmp_path / "policy", make_prompts(1), [0], given)
        assert drawn.image
        monkeypatch.delenv(ALLOW_CODE, raising=False)
    export_pipeline(base, tmp_path / "policy", tmp_path / "exported", allowed_code=[allowed])


def test_an_export_never_deletes_what_the_user_has(
    base: Path, policy: Path, tmp_path: Path
) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "thesis.tex").write_text("years of work")
    command = ["export", str(policy), str(target), "--base", str(base)]
    for given in (command, [*command, "--overwrite"]):
        done = CliRunner().invoke(main, given)
        assert done.exit_code == 1
        assert "name a new" in done.output
    assert [path.name for path in target.iterdir()] == ["thesis.tex"]


def test_an_earlier_export_is_replaced_only_when_that_is_said(
    base: Path, policy: Path, tmp_path: Path
) -> None:
    command = ["export", str(policy), str(tmp_path / "target"), "--base", str(base)]
    assert CliRunner().invoke(main, command).exit_code == 0
    again = CliRunner().invoke(main, command)
    assert (again.exit_code, "name a new one, or pass --overwrite" in again.output) == (1, True)
    assert CliRunner().invoke(main, [*command, "--overwrite"]).exit_code == 0
    (tmp_path / "target" / "thesis.tex").write_text("years of work")
    kept = CliRunner().invoke(main, [*command, "--overwrite"])
    assert (kept.exit_code, "thesis.tex" in kept.output) == (1, True)
    assert (tmp_path / "target" / "thesis.tex").read_text() == "years of work"


def test_a_link_out_of_a_foreign_base_model_is_not_followed(base: Path, tmp_path: Path) -> None:
    (base / "COMMIT").unlink()
    (base / "manifest.json").unlink()
    (tmp_path / "secret").write_text("of this machine")
    (base / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ModelError, match="notes.txt is a link out of"):
        copy_base_folder(base, tmp_path / "copy", ModelConfig(path=str(base)))
    assert not (tmp_path / "copy").exists()


def test_a_snapshot_of_the_hub_is_copied_with_its_links(base: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--team--name" / "snapshots" / ("1" * 40)
    shutil.copytree(base, snapshot, ignore=shutil.ignore_patterns("COMMIT", "manifest.json"))
    blob = snapshot.parents[1] / "blobs" / "abc"
    file = snapshot / "transformer" / "diffusion_pytorch_model.safetensors"
    blob.parent.mkdir()
    file.rename(blob)
    file.symlink_to(blob)
    copy_base_folder(snapshot, tmp_path / "copy", ModelConfig(path=str(snapshot)))
    copied = load_model(tmp_path / "copy").transformer.state_dict()
    assert all(
        np.array_equal(copied[name], value)
        for name, value in load_model(base).transformer.state_dict().items()
    )
