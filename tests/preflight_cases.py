"""Recipes that a preflight check accepts but for what a test changes."""

from pathlib import Path

from ebbflow.models.families.glyph import GlyphModel
from ebbflow.recipe import Recipe

SERVER = "https://mlflow.example"


def older_family() -> type:
    """A user's own family, written for other recipes: the members of the glyph model but two."""
    left_out = ("decode_with_gradient", "set_image_size")
    members = {
        name: value
        for name, value in vars(GlyphModel).items()
        if name not in left_out and not name.startswith("__")
    }
    return type("OlderFamily", (), members)


OLDER_FAMILY = older_family()


PLAIN = "".join(f"a photo of {number} cats\n" for number in range(40))
"""Prompts that name no text."""
SMALL = {"validation": 4, "held_out": 8}


def on_plain_prompts(tmp_path: Path, **keys: object) -> Recipe:
    (tmp_path / "plain.txt").write_text(PLAIN)
    settings = {
        "output": str(tmp_path),
        "model": {"family": f"{__name__}:OLDER_FAMILY", "path": "s3://bucket/base"},
        "prompts": {"source": str(tmp_path / "plain.txt"), **SMALL},
        "rewards": ["jpeg_incompressibility"],
        "stages": [{"kind": "online", "steps": 7}],
    }
    return Recipe.model_validate(settings | keys)
