"""The glyph base model of the default recipe as a file that comes with the package.

Its training takes about 90 CPU-seconds, as long as all that the demo does with the model.
``python -m ebbflow.models.glyph_training.trained`` trains it again and replaces the file, which has
to be done when the defaults of ``GlyphTrainingConfig`` or the training change.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ebbflow.models.families.glyph import GlyphModel, build_glyph_model
from ebbflow.models.glyph_training.train import train_glyph_base
from ebbflow.recipe.model import GlyphTrainingConfig, ModelConfig

TRAINED_MODEL = Path(__file__).with_name("base.safetensors")
"""The parameters in float32, 7 MB; its metadata has the training's settings, as JSON."""

logger = logging.getLogger(__name__)


def load_trained_glyph(config: GlyphTrainingConfig) -> GlyphModel | None:
    """Load the glyph model that comes with the package.

    Returns:
        None: it was trained with other settings than these.
    """
    with safe_open(TRAINED_MODEL, framework="pt") as file:
        settings = GlyphTrainingConfig.model_validate_json(file.metadata()["training"])
        if settings != config:
            return None
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    with torch.random.fork_rng(devices=[]):
        model = build_glyph_model(config)
    parameters = _list_parameters(model)
    if {name: tensor.shape for name, tensor in stored.items()} != {
        name: tensor.shape for name, tensor in parameters.items()
    }:
        raise ValueError(
            f"{TRAINED_MODEL} has other layers than the glyph model; train it again by"
            f" 'python -m {__name__}'"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(stored[name])
    return model


def save_trained_glyph(model: GlyphModel, config: GlyphTrainingConfig, path: Path) -> None:
    """Save the parameters of ``model``, which was trained with these settings, at ``path``."""
    tensors = {
        name: parameter.detach().contiguous() for name, parameter in _list_parameters(model).items()
    }
    # All settings, also those that are the defaults today: these may change.
    save_file(tensors, path, {"training": json.dumps(config.model_dump(mode="json"))})


def _list_parameters(model: GlyphModel) -> dict[str, Tensor]:
    """Without buffers: the positions of the patches follow from the model's size."""
    return {
        f"{part}.{name}": parameter
        for part in ("transformer", "text_encoder")
        for name, parameter in getattr(model, part).named_parameters()
    }


def main() -> None:
    """Train the glyph base model of the default recipe and save it for the package."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    config = GlyphTrainingConfig()
    with tempfile.TemporaryDirectory() as folder:
        train_glyph_base(config, Path(folder, "base"))
        model = GlyphModel.load(Path(folder, "base"), ModelConfig(), torch.device("cpu"))
        save_trained_glyph(model, config, TRAINED_MODEL)
    print(TRAINED_MODEL)


if __name__ == "__main__":
    main()
