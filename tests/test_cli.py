from pathlib import Path

from click.testing import CliRunner

from ebbflow.cli import main
from ebbflow.recipe import load_recipe

RECIPES = Path(__file__).parents[1] / "workflows" / "recipes"


def test_check_prints_a_recipe_that_means_the_same(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(RECIPES / "glyph.yaml")])
    assert result.exit_code == 0
    (tmp_path / "resolved.yaml").write_text(result.output)
    resolved = load_recipe(tmp_path / "resolved.yaml")
    assert resolved == load_recipe(RECIPES / "glyph.yaml")
    assert resolved.digest in result.output


def test_check_refuses_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("rouns: 3\n")
    result = CliRunner().invoke(main, ["check", str(tmp_path / "bad.yaml")])
    assert result.exit_code == 1
    assert "did you mean 'rounds'?" in result.output


def test_check_names_a_missing_file(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["check", str(tmp_path / "none.yaml")])
    assert result.exit_code == 1
    assert "none.yaml" in result.output


def test_keys_reach_into_every_choice() -> None:
    shown = CliRunner().invoke(main, ["keys"]).output
    for key in ("rounds = 1", "stages[](OnlineStage).algorithm(FlowGRPO).clip_range = ", "rewards.terms[].name = (required)"):
        assert key in shown
    assert "Prompts that choose the best round." in shown
