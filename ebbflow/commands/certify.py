"""``ebbflow certify`` and ``check-certificate``: what a rollout engine does, line by line."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ebbflow.commands.loading import import_libraries
from ebbflow.commands.options import OutputPath
from ebbflow.recipe import RecipeError, load_recipe
from ebbflow.recipe.families import FAMILIES, find_family
from ebbflow.recipe.model import ModelConfig

CERTIFICATE = "certificate.json"
PAGE = "certificate.md"
GUIDANCE = 4.0
"""Of families with guidance, where nothing else is asked for: 1 would leave the line unmeasured."""


@click.command()
@click.argument("engine")
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option("--family", help="Family of MODEL, where that is a folder.")
@click.option(
    "--output",
    type=OutputPath(),
    default=Path("certificate"),
    show_default=True,
    help=f"Folder for {CERTIFICATE} and {PAGE}.",
)
@click.option(
    "--precision",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="Precision of the engine. Default: that of the model.",
)
@click.option("--size", nargs=2, type=int, metavar="HEIGHT WIDTH", help="Size of the images.")
@click.option("--guidance", type=click.FloatRange(min=1), help="Scale of guidance.")
@click.option("--steps", default=6, show_default=True, type=click.IntRange(min=5))
@click.option(
    "--samples", default=2, show_default=True, type=click.IntRange(min=1), help="Of each prompt."
)
@click.option(
    "--updates",
    default=100,
    show_default=True,
    type=click.IntRange(min=2),
    help="Pushes of weights, for the drift.",
)
def certify(
    engine: str,
    model: Path,
    family: str | None,
    output: Path,
    precision: str | None,
    size: tuple[int, int] | None,
    guidance: float | None,
    steps: int,
    samples: int,
    updates: int,
) -> None:
    """Measure what ENGINE does with MODEL, and write a certificate.

    ENGINE is diffusers (the trainer's own), vllm_omni, sglang, or package.module:NAME of
    an adapter for another library's engine (docs/certificate.md). MODEL is a recipe, whose model is
    taken, or a base-model folder in diffusers' layout, with --family.

    Each line has a verdict (passed, failed, not supported, not measured) and its numbers beside
    their bars. The certificate is signed where EBBFLOW_SIGNING_KEY is set (`ebbflow make-key`).

    Exits with 0 if all that the engine offers passed, with 1 if a line failed, with 3 if none
    failed and one could not be measured.
    """
    with import_libraries():
        from ebbflow.certification.bench import CertificateSettings  # imports torch
        from ebbflow.certification.certificate import EXIT_STATUS
        from ebbflow.certification.certify import certify_engine, open_certified_engine
        from ebbflow.certification.page import write_page
        from ebbflow.models import ModelError
        from ebbflow.registry.signing import SignatureError

    try:
        config = _read_model(model, family, size, guidance)
        opens = open_certified_engine(engine)
        settings = CertificateSettings(steps=steps, samples=samples, updates=updates)
        base = Path(config.path or "")
        # Validated with the model's other keys, so that the error of a bad one names the key.
        values = config.model_dump() | {"precision": precision or config.precision}
        engine_precision = ModelConfig.model_validate(values).precision
        certificate = certify_engine(
            engine, opens, base, config, engine_precision, settings=settings
        ).sign()
    except (RecipeError, ModelError, SignatureError) as error:
        sys.exit(str(error))
    # Written also for a failed certificate: it is what a reader needs most.
    output.mkdir(parents=True, exist_ok=True)
    (output / CERTIFICATE).write_text(certificate.to_json())
    command = f"ebbflow certify {engine} {model.name}"
    (output / PAGE).write_text(write_page(certificate, command))
    for line in certificate.lines:
        note = f"  {line.note}" if line.note and line.verdict != "passed" else ""
        click.echo(f"{line.verdict:14}{line.name}{note}")
    click.echo(f"{certificate.verdict}: {output / PAGE}")
    if not certificate.signature:
        click.echo("not signed: EBBFLOW_SIGNING_KEY is not set", err=True)
    sys.exit(EXIT_STATUS[certificate.verdict])


def _read_model(
    path: Path, family: str | None, size: tuple[int, int] | None, guidance: float | None
) -> ModelConfig:
    """Read the model of a recipe, or describe that of a folder.

    Raises:
        RecipeError: the recipe trains a model of its own, or a folder comes without its family.
    """
    changes: dict[str, object] = {}
    if size:
        changes |= {"height": size[0], "width": size[1]}
    if path.is_file():
        config = load_recipe(path).model
        # Such a model is trained by the run itself, and there is no folder yet.
        if not config.path:
            raise RecipeError(
                f"{path}: the model has no path, so that each run trains it; give the base-model"
                f" folder of a run, with --family {config.family}"
            )
        changes = config.model_dump(mode="json") | changes
    else:
        if family is None:
            raise RecipeError(
                f"{path} is a folder: say its --family, one of {', '.join(FAMILIES)}, or"
                " package.module:NAME of your own"
            )
        changes |= {"family": family, "path": str(path)}
    # A family of one's own may have no record; then guidance is tried.
    facts = find_family(str(changes["family"]))
    if guidance or changes.get("guidance", 1) == 1:
        default = GUIDANCE if facts is None or facts.guided else 1.0
        changes["guidance"] = guidance or default
    try:
        return ModelConfig.model_validate(changes)
    except ValueError as error:
        raise RecipeError(f"{path}: {error}") from None


@click.command("check-certificate")
@click.argument("file", type=click.Path(exists=True, path_type=Path))
def check_certificate(file: Path) -> None:
    """Check that FILE, a certificate of `ebbflow certify`, is what was signed, by a key of
    EBBFLOW_VERIFY_KEYS; print its verdict.

    Exits as certify does, and with 1 if the signature is missing or does not match.
    """
    from ebbflow.certification.certificate import (  # imports MLflow
        EXIT_STATUS,
        CertificateError,
        read_certificate,
    )

    try:
        certificate = read_certificate(file)
        key = certificate.check_signature()
    except CertificateError as error:
        sys.exit(str(error))
    model = certificate.model["family"]
    click.echo(
        f"{certificate.engine} with {model}: {certificate.verdict}, measured"
        f" {certificate.measured}, signed with the key {key}"
    )
    sys.exit(EXIT_STATUS[certificate.verdict])
