"""Write a tiny model with random weights: ``python -m benchmarks.tiny_models sd3 FOLDER``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.tiny_models import TINY, build_tiny
from ebbflow.commands.loading import import_libraries, reduce_garbage_collection
from ebbflow.logs import configure_logging
from ebbflow.recipe.base_folder import ModelError
from ebbflow.storage.artifacts import ArtifactError

NOT_NEEDED = ("boto3", "onnxruntime", "peft", "scipy", "triton")
"""Packages that diffusers and transformers import where they are installed, and do without where
they are not. No tiny model needs one, and they are a quarter of what the command imports.
"""


def main() -> None:
    """Write the model that the command line names, in the published layout of its family."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help=f"one of {', '.join(TINY)}")
    parser.add_argument("folder", type=Path, help="a new or empty folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    arguments = parser.parse_args()
    for package in NOT_NEEDED:
        # None is how Python is told that there is no such package: ``find_spec`` finds none, and an
        # import fails.
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    configure_logging()
    reduce_garbage_collection()
    try:
        # Nothing that a tiny model leaves behind is worth a search.
        with import_libraries("loading torch, diffusers and transformers, which takes seconds"):
            build_tiny(arguments.name, arguments.folder, arguments.seed)
    except (ArtifactError, ModelError) as error:
        sys.exit(str(error))
    print(f"{arguments.folder}: a tiny {arguments.name}, to be named in model.path")


if __name__ == "__main__":
    main()
