"""``ebbflow export`` prints the line of Python that loads what it wrote; tests/models has
diffusers' families.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline

from ebbflow.cli import main
from ebbflow.models import load_model
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import ArtifactError, verify_folder
from ebbflow.training import export
from ebbflow.training.export import export_pipeline
from ebbflow.training.policy_metadata import write_base_policy


@pytest.mark.parametrize("family", ["glyph", "mine.shifted:ShiftedGlyph"])
def test_the_line_that_is_printed_loads_the_export(base_folder, tmp_path, monkeypatch, family):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    config = ModelConfig(family=family, path=None if family == "glyph" else "x")
    write_base_policy(
        tmp_path / "policy", verify_folder(base_folder), "recipe", PolicyConfig(), config
    )
    command = [
        "export",
        tmp_path / "policy",
        tmp_path / "exported",
        "--base",
        base_folder,
        "--allow-code",
        family,
    ]
    done = CliRunner().invoke(main, list(map(str, command)))
    assert done.exit_code == 0, done.output
    names = {}
    exec(done.stdout.splitlines()[-1], names)
    loaded = names["model"]
    assert type(loaded).__name__ == ("GlyphModel" if family == "glyph" else "ShiftedGlyph")
    for name, value in load_model(base_folder).transformer.state_dict().items():
        assert torch.equal(loaded.transformer.state_dict()[name], value), name


def test_diffusers_loads_no_glyph_folder_as_it_is(base_folder):
    """What the line for glyph relies on; should diffusers learn to, the line can be its own."""
    with pytest.raises(ValueError, match="vae"):
        DiffusionPipeline.from_pretrained(base_folder, local_files_only=True)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"family": "ltx2"}, ["LTX2Pipeline adds further guidance"]),
        (
            {"family": "wan_a14b", "guidance": 4, "guidance_2": 3},
            ["guidance_scale=4, guidance_scale_2=3"],
        ),
        ({"family": "sd3", "guidance": 4}, []),
    ],
)
def test_an_export_says_what_its_pipeline_does_otherwise(tmp_path, monkeypatch, config, said):
    metadata = SimpleNamespace(model=ModelConfig(path="x", **config))
    monkeypatch.setattr(export, "export_pipeline", lambda *arguments: metadata)
    (tmp_path / "policy").mkdir()
    folders = (tmp_path / "policy", tmp_path / "exported", "--base", tmp_path)
    done = CliRunner().invoke(main, ["export", *map(str, folders)])
    assert done.exit_code == 0, done.output
    assert all(text in done.stderr for text in said)
    assert bool(done.stderr) == bool(said)
    assert done.stdout.splitlines()[-1].startswith("from diffusers import DiffusionPipeline")


@pytest.fixture
def policy(base_folder, tmp_path):
    folder = tmp_path / "policy"
    write_base_policy(folder, verify_folder(base_folder), "recipe", PolicyConfig(), ModelConfig())
    return folder


@pytest.mark.parametrize("target", ["policy", "policy/exported", ".", "link"])
def test_an_export_never_replaces_its_input(base_folder, tmp_path, policy, target):
    (tmp_path / "link").symlink_to(policy)
    digest = verify_folder(policy)
    with pytest.raises(ArtifactError, match="is, holds or lies in .*, which the export reads"):
        export_pipeline(base_folder, policy, tmp_path / target, overwrite=True)
    assert verify_folder(policy) == digest


def test_overwriting_replaces_an_earlier_export_alone(base_folder, tmp_path, policy):
    exported = tmp_path / "exported"
    export_pipeline(base_folder, policy, exported)
    digest = verify_folder(exported)
    export_pipeline(base_folder, policy, exported, overwrite=True)
    assert verify_folder(exported) == digest
    other_policy = tmp_path / "other"
    write_base_policy(other_policy, "0" * 64, "recipe", PolicyConfig(), ModelConfig())
    with pytest.raises(ArtifactError, match="holds an artifact of a run, not an export"):
        export_pipeline(base_folder, policy, other_policy, overwrite=True)
    verify_folder(other_policy)
