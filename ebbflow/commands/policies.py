"""``ebbflow evaluate``, ``export``, ``draw``, ``verify`` and ``rollback``: policies after a run."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ebbflow.commands.loading import REGISTRY, import_libraries
from ebbflow.commands.options import STORE, OutputPath
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.families import find_family

NOTHING_TO_VERIFY = 3
"""The exit status of ``verify`` where nothing failed and nothing could be verified; click has 2."""


@click.command()
@click.argument("policy", type=click.Path(exists=True, path_type=Path))
@click.argument("target", type=OutputPath())
@click.option(
    "--base",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="Folder of the policy's base model.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace TARGET if it is an unchanged earlier export; nothing else is deleted.",
)
@click.option(
    "--allow-code",
    multiple=True,
    metavar="MODULE:NAME",
    help="Code that POLICY may name and you trust.",
)
def export(
    policy: Path, target: Path, base: Path, overwrite: bool, allow_code: tuple[str, ...]
) -> None:
    """Export POLICY, a policy folder, to TARGET, a new or empty folder, as a diffusers pipeline
    with its LoRA merged.

    The last line of the output is the line of Python that loads it.
    """
    with import_libraries():
        from ebbflow.models import ModelError  # imports torch
        from ebbflow.storage.artifacts import ArtifactError
        from ebbflow.training.export import export_pipeline, how_to_load_pipeline
        from ebbflow.training.policy_metadata import PolicyError

    try:
        metadata = export_pipeline(base, policy, target, overwrite, allow_code)
    except (ArtifactError, ModelError, PolicyError) as error:
        sys.exit(str(error))
    name = metadata.model.family
    family = find_family(name)
    if family and family.caveat:
        click.echo(f"{name}: {family.caveat}", err=True)
    if metadata.model.guidance_2 is not None:
        click.echo(
            f"{name} was trained with guidance_scale={metadata.model.guidance:g},"
            f" guidance_scale_2={metadata.model.guidance_2:g}: give both to the pipeline",
            err=True,
        )
    click.echo(f"{target} has the {name} model. To load it in Python:")
    click.echo(how_to_load_pipeline(target, name))


@click.command()
@click.argument("policy")
@click.option(
    "--against",
    default="base",
    show_default=True,
    help="The other policy, named as POLICY; 'base' is the base model of POLICY.",
)
@click.option(
    "--recipe",
    required=True,
    type=click.Path(path_type=Path),
    help="Whose held-out prompts, rewards, guardrails and rules decide.",
)
@click.option(
    "--output",
    default="evaluations",
    show_default=True,
    type=OutputPath(file_okay=False),
    help="Folder; samples that it has of an earlier evaluation are not generated again.",
)
@click.option(
    "--base",
    type=click.Path(exists=True, path_type=Path),
    help="Folder of the base model, where it is not found.",
)
def evaluate(policy: str, against: str, recipe: Path, output: Path, base: Path | None) -> None:
    """Evaluate POLICY and compare it with another by the rules of the gate, on the held-out prompts
    of a recipe (docs/promotion.md).

    POLICY is a policy folder, a registered model (MODEL, MODEL@ALIAS, MODEL/3), or 'base'. Nothing
    is registered and nothing of the error budget is spent. Writes a page with the pictures of both
    side by side, and prints the table and the reasons.
    """
    with import_libraries():
        from ebbflow.comparison import policy_page  # imports torch
        from ebbflow.comparison.policies import compare_policies
        from ebbflow.data.prompts import PromptError
        from ebbflow.evaluation.evaluate import EvaluationError
        from ebbflow.launch import pin_rewards
        from ebbflow.registry.drawing import ERRORS
        from ebbflow.rewards.base import RewardError
        from ebbflow.tracking.store import resolve_tracking_uri

    try:
        resolved = pin_rewards(load_recipe(recipe))
        folder = output / resolved.name
        comparison = compare_policies(
            resolved, resolve_tracking_uri(resolved), policy, against, folder, base
        )
        page = policy_page.write_policy_page(comparison)
    except (RecipeError, EvaluationError, PromptError, RewardError, *ERRORS) as error:
        sys.exit(str(error))
    click.echo(policy_page.format_comparison(comparison))
    click.echo(f"\n{policy_page.describe_verdict(comparison)}\npage    {page}")


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.IntRange(min=1),
    help="The version to promote; default: the previous champion.",
)
def rollback(recipe: Path, to: int | None) -> None:
    """Restore the previous champion of the model that RECIPE promotes."""
    with import_libraries(REGISTRY):
        from ebbflow.registry import promotion  # imports MLflow
        from ebbflow.tracking.store import TrackingError, resolve_tracking_uri

    try:
        resolved = load_recipe(recipe)
        name = resolved.promotion.model_name
        # MLflow numbers versions with strings.
        version = None if to is None else str(to)
        result = promotion.roll_back_champion(resolve_tracking_uri(resolved), name, version)
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
    click.echo(
        f"{name}: version {result.version} is champion again and replaces version {result.previous}"
    )
    click.echo(
        f"The next run is compared with version {result.version}; another rollback restores version"
        f" {result.previous}."
    )


@click.command()
@click.argument("model", metavar="MODEL[@ALIAS]")
@click.option(
    "--again",
    is_flag=True,
    help="Also generate the held-out samples again, and compare pictures and scores.",
)
@click.option(
    "--allow-code",
    multiple=True,
    metavar="MODULE:NAME",
    help="Code that MODEL may name and you trust, for --again.",
)
@STORE
def verify(model: str, again: bool, allow_code: tuple[str, ...], recipe: Path | None) -> None:
    """Verify a registered version: its digests, and the gate's decision, made again from the stored
    scores.

    MODEL alone means its champion; MODEL/3 is version 3. Exits with status 1 if a check failed, and
    with status 3 if nothing failed and there was nothing to decide it by: the version was
    registered without its policy's digest or the gate's record.
    """
    with import_libraries(REGISTRY):
        from ebbflow.tracking.store import TrackingError, resolve_tracking_uri  # imports MLflow
        from ebbflow.training.policy_metadata import list_named_code
        from ebbflow.verification.checks import ESSENTIAL, verify_version

    try:
        user_recipe = load_recipe(recipe) if recipe else Recipe()
        # Code that the user's own recipe names is code that the user runs anyway.
        allowed = (*allow_code, *user_recipe.plugin_paths, *list_named_code(user_recipe.model))
        version, checks = verify_version(resolve_tracking_uri(user_recipe), model, again, allowed)
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
    click.secho(f"{version.name} version {version.version}", bold=True)
    for check in checks:
        click.echo(str(check))
    failed = [check.name for check in checks if check.status == "FAILED"]
    if failed:
        sys.exit(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")
    missing = [
        check.name
        for check in checks
        if check.name in ESSENTIAL and check.status not in ("ok", "adopted")
    ]
    if missing:
        click.echo(f"nothing to verify it by: {', '.join(missing)} not stored", err=True)
        sys.exit(NOTHING_TO_VERIFY)


@click.command()
@click.argument("model")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option(
    "--out",
    default="drawn",
    show_default=True,
    type=OutputPath(),
    help="Folder; nothing is overwritten.",
)
@click.option(
    "--seed", default=0, show_default=True, type=click.IntRange(0, 2**62), help="Of the noise."
)
@click.option(
    "--samples",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Of each prompt, with successive seeds.",
)
@click.option(
    "--image",
    "images",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The image to edit; several times for several images.",
)
@click.option(
    "--base",
    type=click.Path(exists=True, path_type=Path),
    help="Folder of the base model, where it is not found.",
)
@click.option(
    "--allow-code",
    multiple=True,
    metavar="MODULE:NAME",
    help="Code that MODEL may name and you trust.",
)
@STORE
def draw(
    model: str,
    prompts: tuple[str, ...],
    out: Path,
    seed: int,
    samples: int,
    images: tuple[Path, ...],
    base: Path | None,
    allow_code: tuple[str, ...],
    recipe: Path | None,
) -> None:
    """Draw each PROMPT with MODEL into PNG files (docs/serving.md).

    MODEL is a registered model, which means its champion, MODEL@ALIAS, MODEL/3, or a policy folder.
    """
    with import_libraries():
        from ebbflow.registry import drawing  # imports torch
        from ebbflow.tracking.store import resolve_tracking_uri

    # Each sample has a seed of its own, so that one picture can be generated again alone.
    seeds = range(seed, seed + samples)
    try:
        uri = resolve_tracking_uri(load_recipe(recipe) if recipe else Recipe())
        generated = drawing.generate_pictures(
            uri, model, prompts, out, seeds, base=base, images=images, allowed_code=allow_code
        )
        # Files appear meanwhile; printing their names here would break the progress bar.
        pictures = list(generated)
    except (RecipeError, *drawing.ERRORS) as error:
        sys.exit(str(error))
    # Paths go to stdout, for a pipe; what failed goes to stderr.
    for picture in pictures:
        click.echo(picture.path or f"{picture.prompt}: not drawn", err=picture.path is None)
        if picture.problem:
            click.echo(f"  {picture.problem}", err=True)
    failed = sum(picture.path is None for picture in pictures)
    if failed:
        sys.exit(f"{failed} of {len(pictures)} pictures could not be drawn")
