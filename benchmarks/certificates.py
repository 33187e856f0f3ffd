"""Certificates of the engines on tiny models with random weights: ``python -m
benchmarks.certificates``.

Each is what ``ebbflow certify ENGINE FOLDER --family FAMILY`` measures, in
``benchmarks/results/certificate_ENGINE_FAMILY.json`` and ``.md``. The models have the layouts and
the classes of the published ones (``benchmarks.tiny_models``).
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.tiny_models import TINY, build_tiny
from ebbflow.certification.certify import certify_engine, open_certified_engine
from ebbflow.certification.page import write_page
from ebbflow.models.families import load_adapter
from ebbflow.recipe.families import FAMILIES
from ebbflow.recipe.model import ModelConfig

RESULTS = Path(__file__).with_name("results")
SIZES = {"wan": (64, 96), "flux": (64, 96)}
SIZE = (64, 64)
EDITED_PIXELS = 64 * 64
"""Of an image to edit, which pipelines scale to a megapixel: minutes per line on a CPU."""
GUIDANCE = 4.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Certify an engine on one or more families; exit with 1 if a line fails."""
    parser = argparse.ArgumentParser("python -m benchmarks.certificates", description=__doc__)
    parser.add_argument("--engine", default="diffusers")
    parser.add_argument("--families", nargs="+", default=["sd3"], metavar="FAMILY")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.families) - set(TINY))
    if unknown:
        parser.error(f"no tiny model of {', '.join(unknown)}; take some of {', '.join(TINY)}")
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Tiny models are faster with one thread than with several that share a core.
    torch.set_num_threads(1)
    verdicts = [write_certificate(options.engine, family) for family in options.families]
    sys.exit(int("failed" in verdicts))


def write_certificate(engine: str, family: str) -> str:
    """Certify an engine on the tiny model of a family; write both files, return the verdict."""
    height, width = SIZES.get(family, SIZE)
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / f"tiny_{family}"
        build_tiny(family, base)
        # A scale of 1 would leave the line of guidance unmeasured.
        guidance = GUIDANCE if FAMILIES[family].guided else 1.0
        model = ModelConfig(
            family=family, path=str(base), height=height, width=width, guidance=guidance
        )
        adapter = load_adapter(family)
        small: AbstractContextManager[Any] = nullcontext()
        if hasattr(adapter, "edited_pixels"):
            small = patch.object(adapter, "edited_pixels", EDITED_PIXELS)
        with small:
            certificate = certify_engine(engine, open_certified_engine(engine), base, model)
        certificate = certificate.sign()
    name = f"certificate_{engine}_{family}"
    command = f"python -m benchmarks.certificates --engine {engine} --families {family}"
    (RESULTS / f"{name}.json").write_text(certificate.to_json())
    (RESULTS / f"{name}.md").write_text(write_page(certificate, command))
    return certificate.verdict


if __name__ == "__main__":
    main()
