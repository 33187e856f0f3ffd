"""``ebbflow export`` prints the line of Python that loads what it wrote; tests/models has
diffusers' families.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from diffusers import DiffusionPipeline

from ebbflow.cli import main
from ebbflow.models import load_model
from ebbflow.recipe.model import ModelConfig
from ebbflow.recipe.policy import PolicyConfig
from ebbflow.storage.artifacts import verify_folder
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
