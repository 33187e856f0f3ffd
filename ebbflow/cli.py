"""The ``ebbflow`` command: check and explain recipes, and what goes with them."""

from __future__ import annotations

import os
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ebbflow.formatting import first_doc_paragraph
from ebbflow.logs import configure_logging
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.base import group_keys, read_field_docs
from ebbflow.recipe.choices import WINDOWS
from ebbflow.recipe.defaults import write_defaults_page, write_defaults_table
from ebbflow.recipe.registry import ALGORITHMS, REWARDS
from ebbflow.recipe.registry import configure_reward as reward_named
from ebbflow.recipe.samplers import SAMPLERS
from ebbflow.recipe.yaml_text import describe_yaml_error


def _count_processes_of_all_nodes() -> str:
    """What local runs and registering take from the environment, where each counts its own:
    processes of a node, and nodes.
    """
    per_node, nodes = (
        os.environ.get(f"EBBFLOW_TRAIN_{name}", default)
        for name, default in (("PROCESSES", "2"), ("NODES", "1"))
    )
    return str(int(per_node) * int(nodes)) if per_node.isdigit() and nodes.isdigit() else per_node


PROCESSES = click.option(
    "--processes",
    default=_count_processes_of_all_nodes,
    show_default="2, or EBBFLOW_TRAIN_PROCESSES times EBBFLOW_TRAIN_NODES",
    type=click.IntRange(min=1),
    help="Training processes of an offline stage, those of all nodes.",
)
STORE = click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="The recipe whose MLflow store it is; left out, MLFLOW_TRACKING_URI or runs/mlflow.db.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ebbflow", message="%(prog)s %(version)s")
def main() -> None:
    """Reinforcement-learning post-training for diffusion and flow-matching models, as a Flyte
    pipeline.

    `ebbflow run RECIPE` runs the pipeline on this machine.

    EBBFLOW_LOG_LEVEL sets how much is logged: DEBUG, INFO (default), WARNING or ERROR.
    """
    try:
        configure_logging()
    except ValueError as error:
        sys.exit(str(error))


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def run(recipe: Path, debug: bool) -> None:
    """Run the pipeline on RECIPE on this machine; a run that was stopped resumes.

    Exits with status 1 after an error, 130 after Ctrl-C.
    """
    from ebbflow.launch import launch_recipe

    launch_recipe(recipe, debug)


@main.command()
@click.argument("folder", type=click.Path(path_type=Path), default=Path("runs"))
def runs(folder: Path) -> None:
    """List the runs in FOLDER, the 'output' of their recipes (default: runs), the newest first."""
    from ebbflow.run_list import describe_runs, list_runs

    if not (found := list_runs(folder)):
        sys.exit(
            f"no runs in {folder}; start one with `ebbflow run RECIPE`, or name the recipe's"
            " 'output'"
        )
    click.echo(describe_runs(found))


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@PROCESSES
def check(recipe: Path, processes: int) -> None:
    """Check RECIPE, a YAML file, and what it names, as a run does before it starts; print it with
    all defaults.
    """
    from ebbflow.data.pairs import PairError  # imports pyarrow
    from ebbflow.data.prompts import PromptError
    from ebbflow.preflight import check_recipe
    from ebbflow.rewards.base import RewardError

    try:
        resolved = load_recipe(recipe)
        check_recipe(resolved, resolved.tracking.uri or "", on_cluster=False, processes=processes)
    except (RecipeError, PromptError, PairError, RewardError) as error:
        sys.exit(str(error))
    except _import_model_error() as error:  # evaluated where all other errors are ruled out
        sys.exit(str(error))
    click.echo(yaml.safe_dump(resolved.model_dump(mode="json"), sort_keys=False), nl=False)
    click.echo(f"# digest {resolved.digest}")


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@PROCESSES
@click.option(
    "--tflops",
    type=click.FloatRange(0, min_open=True),
    help=(
        "Floating-point operations in a second that a GPU sustains, in 10^12: gives hours. A third"
        " to half of its data sheet."
    ),
)
@click.option(
    "--context-parallel",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Processes for each sample.",
)
def estimate(recipe: Path, processes: int, tflops: float | None, context_parallel: int) -> None:
    """Estimate what RECIPE needs: memory per process, network evaluations, storage, hours. Nothing
    is run or downloaded.
    """
    from ebbflow.data.model_sizes import SizeError  # imports numpy
    from ebbflow.estimate.measured import measure_cached
    from ebbflow.estimate.run import estimate_from_sizes, measure_sizes
    from ebbflow.estimate.text import describe_estimate

    if processes % context_parallel:
        raise click.ClickException(
            f"--context-parallel {context_parallel} does not divide --processes {processes}; change"
            " one of them"
        )
    try:
        resolved = load_recipe(recipe)
        if context_parallel > 1:
            from ebbflow.models.sizes import check_shared_tokens  # imports torch

            check_shared_tokens(resolved, context_parallel)
        sizes, sample, evaluated = measure_sizes(resolved, measure_cached)
        click.echo(
            describe_estimate(
                estimate_from_sizes(
                    resolved, processes, sizes, sample, 1, False, context_parallel, evaluated
                ),
                tflops,
            )
        )
    except (RecipeError, SizeError) as error:
        sys.exit(str(error))
    except _import_model_error() as error:  # evaluated where all other errors are ruled out
        sys.exit(str(error))


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--gpus",
    required=True,
    type=click.IntRange(min=2),
    help="To divide between training, rollouts and rewards.",
)
@click.option("--tflops", type=click.FloatRange(0, min_open=True), help="As of `ebbflow estimate`.")
@click.option(
    "--timeline",
    type=click.Path(exists=True, path_type=Path),
    help="timeline.json of a run of the stage, measured.",
)
@click.option(
    "--network",
    default=50.0,
    show_default=True,
    type=click.FloatRange(0, min_open=True),
    help="10^9 bytes in a second between nodes of 8 GPUs.",
)
def plan(
    recipe: Path, gpus: int, tflops: float | None, timeline: Path | None, network: float
) -> None:
    """Plan the online stages of RECIPE for a number of GPUs: the best split in each mode, and where
    it stops scaling.
    """
    from ebbflow.data.model_sizes import SizeError  # imports numpy
    from ebbflow.estimate.measured import measure_cached
    from ebbflow.estimate.plan import PlanError
    from ebbflow.estimate.plan_text import describe_plans
    from ebbflow.estimate.run import estimate_from_sizes, measure_sizes

    try:
        resolved = load_recipe(recipe)
        sizes, sample, _ = measure_sizes(resolved, measure_cached)
        click.echo(
            describe_plans(
                estimate_from_sizes(resolved, 1, sizes, sample), gpus, tflops, timeline, network
            )
        )
    except (RecipeError, SizeError, PlanError) as error:
        sys.exit(str(error))
    except _import_model_error() as error:  # evaluated where all other errors are ruled out
        sys.exit(str(error))


@main.command()
def keys() -> None:
    """Print every recipe key with its default and its meaning."""
    for line in _iterate_keys(Recipe, "", {}):
        if isinstance(line, str):
            click.secho(f"\n# {line}", underline=True)
            continue
        key, default, meaning = line
        click.echo(click.style(key, bold=True) + (f" = {default}" if default is not None else ""))
        if meaning:
            click.echo(f"    {meaning}")


@main.command()
@click.argument("policy", type=click.Path(exists=True, path_type=Path))
@click.argument("target", type=click.Path(path_type=Path))
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
    from ebbflow.models import ModelError  # imports torch
    from ebbflow.storage.artifacts import ArtifactError
    from ebbflow.training.export import export_pipeline, how_to_load_pipeline
    from ebbflow.training.policy_metadata import PolicyError

    try:
        metadata = export_pipeline(base, policy, target, overwrite, allow_code)
    except (ArtifactError, ModelError, PolicyError) as error:
        sys.exit(str(error))
    click.echo(f"{target} has the {metadata.model.family} model. To load it in Python:")
    click.echo(how_to_load_pipeline(target, metadata.model.family))


@main.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.IntRange(min=1),
    help="The version to promote; default: the previous champion.",
)
def rollback(recipe: Path, to: int | None) -> None:
    """Restore the previous champion of the model that RECIPE promotes."""
    from ebbflow.registry import promotion  # imports MLflow
    from ebbflow.tracking.store import TrackingError, resolve_tracking_uri

    try:
        resolved = load_recipe(recipe)
        name = resolved.promotion.model_name
        done = promotion.roll_back_champion(
            resolve_tracking_uri(resolved), name, None if to is None else str(to)
        )
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
    click.echo(
        f"{name}: version {done.version} is champion again and replaces version {done.previous}"
    )
    click.echo(
        f"The next run is compared with version {done.version}; another rollback restores version"
        f" {done.previous}."
    )


@main.command()
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

    MODEL alone means its champion; MODEL/3 is version 3. Exits with status 1 if a check failed.
    """
    from ebbflow.tracking.store import TrackingError, resolve_tracking_uri  # imports MLflow
    from ebbflow.training.policy_metadata import list_named_code
    from ebbflow.verification.checks import verify_version

    try:
        given = load_recipe(recipe) if recipe else Recipe()
        allowed = (*allow_code, *given.plugin_paths, *list_named_code(given.model))
        version, checks = verify_version(resolve_tracking_uri(given), model, again, allowed)
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))
    click.secho(f"{version.name} version {version.version}", bold=True)
    for check in checks:
        click.echo(str(check))
    if failed := [check.name for check in checks if check.status == "FAILED"]:
        sys.exit(f"{len(failed)} of {len(checks)} checks failed: {', '.join(failed)}")


@main.command()
@click.argument("run")
@click.option(
    "--stage",
    required=True,
    help="As the report calls it: 1.1 is the first stage of the first round.",
)
@click.option(
    "--step",
    required=True,
    type=click.IntRange(min=0),
    help="Training step, from zero, as its metrics are logged.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="A new or empty folder; left out, replay-STAGE-STEP.",
)
@click.option(
    "--base",
    type=click.Path(path_type=Path),
    help="Folder of the base model, where the run no longer has it.",
)
@PROCESSES
@STORE
def replay(
    run: str,
    stage: str,
    step: int,
    output: Path | None,
    base: Path | None,
    processes: int,
    recipe: Path | None,
) -> None:
    """Replay a training step of RUN: generate its samples again, and show them with their scores
    and advantages.

    RUN is the folder of a local run or the id of its MLflow run. The policy is trained again up to
    the step.
    """
    from ebbflow.models import ModelError  # imports torch
    from ebbflow.replay import tracked_step
    from ebbflow.rewards.base import RewardError
    from ebbflow.storage.artifacts import ArtifactError
    from ebbflow.tracking.store import TrackingError
    from ebbflow.training.policy_metadata import PolicyError
    from ebbflow.training.replay import ReplayError

    target = output or Path(f"replay-{stage.partition(' ')[0]}-{step}")
    try:
        done = tracked_step.replay_step(
            run, stage, step, target, load_recipe(recipe) if recipe else None, base, processes
        )
    except (
        RecipeError,
        TrackingError,
        ReplayError,
        ArtifactError,
        ModelError,
        PolicyError,
        RewardError,
    ) as error:
        sys.exit(str(error))
    click.echo(f"{target / tracked_step.PAGE}: {done}")


@main.command("list")
def list_choices() -> None:
    """List the algorithms, samplers, windows and rewards that a recipe can use."""
    from ebbflow.rewards.combine import load_reward  # imports pandas

    _print_choices(
        "algorithms",
        {
            name: (first_doc_paragraph(config.__doc__), config.stages)
            for name, config in ALGORITHMS.items()
        },
    )
    _print_choices(
        "samplers",
        {
            name: (facts.description, () if facts.eta is None else ("log-probs",))
            for name, facts in SAMPLERS.items()
        },
    )
    _print_choices("windows", {name: (text, ()) for name, text in WINDOWS.items()})
    missing: dict[str, str | None] = {
        config.name: load_reward(config).explain_unavailable()
        for config in map(reward_named, ("ocr", "tesseract"))
    }
    _print_choices(
        "rewards",
        {
            name: (
                first_doc_paragraph(config.__doc__),
                ("not installed",) if missing.get(name) else (),
            )
            for name, config in REWARDS.items()
        },
    )
    for reason in filter(None, missing.values()):
        click.echo(f"  {reason}")
    click.echo(
        "Your own: {name: custom, path: package.module:ALGORITHM}; a reward by package.module:Name"
        " (docs/extending.md)."
    )


@main.command()
@click.argument(
    "algorithm",
    required=False,
    type=click.Choice([name for name, config in ALGORITHMS.items() if config.published]),
)
def defaults(algorithm: str | None) -> None:
    """Print the defaults of ALGORITHM next to the published values and their sources; without it,
    of all of them.
    """
    click.echo(write_defaults_table(algorithm) if algorithm else write_defaults_page(), nl=False)


@main.command("serve-reward")
@click.argument("reward", metavar="NAME_OR_JSON")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any but localhost needs a token.",
)
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535))
@click.option(
    "--token-variable",
    help="Environment variable that holds the bearer token which requests must carry.",
)
def serve_reward(reward: str, host: str, port: int, token_variable: str | None) -> None:
    """Serve a reward over HTTP, to be used as the 'remote' reward of other machines
    (docs/rewards.md).

    NAME_OR_JSON is an entry of a recipe's rewards: ocr, or '{"name": "ocr", "layout": "page"}'.
    """
    from ebbflow.rewards.base import RewardError
    from ebbflow.rewards.http import NoAnswer, read_token
    from ebbflow.rewards.server import run_reward_server

    try:
        (config,) = Recipe.model_validate(
            {"rewards": [yaml.safe_load(reward)], "guardrails": []}
        ).rewards
        run_reward_server(config, host, port, read_token(token_variable))
    except yaml.YAMLError as error:
        sys.exit(describe_yaml_error(error, "NAME_OR_JSON"))
    except (RecipeError, RewardError, NoAnswer) as error:
        sys.exit(str(error))


@main.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("sources", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--stage", help="Offline stage of the run, such as '1.2 offline': compare its rollouts."
)
@click.option(
    "--prompts",
    type=click.Path(exists=True, path_type=Path),
    help="Prompt table of rollout shards that are named.",
)
@click.option(
    "--max-pairs",
    default=200,
    show_default=True,
    type=click.IntRange(min=1),
    help="Of more, so many are drawn.",
)
@click.option(
    "--error-rate",
    default=0.05,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Of the test that stops a comparison.",
)
@click.option(
    "--all-pairs", is_flag=True, help="Ask about every pair, also after the test has decided."
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Of the order and the sides.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535))
def label(
    folder: Path,
    sources: tuple[Path, ...],
    stage: str | None,
    prompts: Path | None,
    max_pairs: int,
    error_rate: float,
    all_pairs: bool,
    seed: int,
    host: str,
    port: int,
) -> None:
    """Serve a page on which people compare pictures, and keep their answers in FOLDER
    (docs/label.md).

    SOURCES: the folder of a run; or the samples.parquet of champion and candidate; or rollouts with
    --prompts.
    """
    from ebbflow.data.prompts import PromptError
    from ebbflow.labeling.server import run_label_server
    from ebbflow.labeling.session import Settings, open_session
    from ebbflow.labeling.sources import LabelError, load_label_task
    from ebbflow.storage.disk import DiskFullError
    from ebbflow.storage.locks import FolderInUseError
    from ebbflow.storage.tables import TableError

    try:
        task = load_label_task(sources, stage, prompts, max_pairs, seed)
        with open_session(
            task, folder, Settings(seed, max_pairs, error_rate), all_pairs
        ) as session:
            click.echo(
                f"{len(task.pairs)} pairs; the results go to {folder} when you stop this with"
                " Ctrl-C. For raters:"
            )
            run_label_server(session, host, port, click.echo)
    except (LabelError, TableError, PromptError, FolderInUseError, DiskFullError) as error:
        sys.exit(str(error))


@main.command()
@click.argument("model")
@click.argument("prompts", nargs=-1, required=True, metavar="PROMPT...")
@click.option(
    "--out",
    default="drawn",
    show_default=True,
    type=click.Path(path_type=Path),
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
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The image to edit.",
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
    image: Path | None,
    base: Path | None,
    allow_code: tuple[str, ...],
    recipe: Path | None,
) -> None:
    """Draw each PROMPT with MODEL into PNG files (docs/serving.md).

    MODEL is a registered model, which means its champion, MODEL@ALIAS, MODEL/3, or a policy folder.
    """
    from ebbflow.registry import drawing  # imports torch
    from ebbflow.tracking.store import resolve_tracking_uri

    seeds = range(seed, seed + samples)
    try:
        uri = resolve_tracking_uri(load_recipe(recipe) if recipe else Recipe())
        drawn = drawing.generate_pictures(
            uri, model, prompts, out, seeds, base=base, image=image, allowed_code=allow_code
        )
        pictures = list(drawn)  # files appear meanwhile; lines would break the progress bar
    except (RecipeError, *drawing.ERRORS) as error:
        sys.exit(str(error))
    for picture in pictures:
        click.echo(picture.path or f"{picture.prompt}: not drawn", err=picture.path is None)
        if picture.problem:
            click.echo(f"  {picture.problem}", err=True)
    if failed := sum(picture.path is None for picture in pictures):
        sys.exit(f"{failed} of {len(pictures)} pictures could not be drawn")


@main.command()
@STORE
@click.option("--port", default=5000, show_default=True, type=click.IntRange(1, 65535))
@click.option(
    "--browser/--no-browser",
    default=True,
    help="Whether to open the page of the runs in a browser.",
)
def ui(recipe: Path | None, port: int, browser: bool) -> None:
    """Serve MLflow's UI on 127.0.0.1, and print the addresses of runs, reward curves and
    registry."""
    from ebbflow.tracking.store import TrackingError, resolve_tracking_uri  # imports MLflow
    from ebbflow.tracking.ui import serve_ui

    try:
        given = load_recipe(recipe) if recipe else Recipe()
        sys.exit(
            serve_ui(
                resolve_tracking_uri(given), given.tracking.experiment, port, browser, click.echo
            )
        )
    except (RecipeError, TrackingError) as error:
        sys.exit(str(error))


def _import_model_error() -> type[Exception]:
    from ebbflow.models import ModelError  # imports torch

    return ModelError


def _print_choices(title: str, choices: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    """Print aligned lines: name, remarks, description."""
    click.secho(title, bold=True)
    remarks = {name: ", ".join(remark) for name, (_, remark) in choices.items()}
    wide = max(map(len, choices))
    far = max(map(len, remarks.values()))
    for name, (text, _) in choices.items():
        click.echo(f"  {name:<{wide}}  " + (f"{remarks[name]:<{far}}  " if far else "") + text)


def _iterate_keys(
    model: type[BaseModel], prefix: str, shown: dict[Any, str]
) -> Iterator[tuple[str, Any, str] | str]:
    """Yield (dotted key, default, meaning) of every leaf, and the heading of each group of keys
    before its first key.

    Args:
        prefix: what stands before each key, such as ``"model."``.
        shown: the models that were listed, each with the key where. A model is listed once, and
            its further keys refer to the first.
    """
    docs = read_field_docs(model)
    for heading, names in group_keys(model).items():
        if heading:
            yield f"{prefix.removesuffix('.')}: {heading}"
        for name in names:
            yield from _iterate_field(model.model_fields[name], f"{prefix}{name}", docs, shown)


def _iterate_field(
    field: FieldInfo, key: str, docs: dict[str, str], shown: dict[Any, str]
) -> Iterator[tuple[str, Any, str] | str]:
    """Yield the lines of one key, and of the keys of each model that it can hold."""
    inner = _list_models(field.annotation)
    meaning = " ".join((field.description or docs.get(key.rpartition(".")[2], "")).split())
    if not inner:
        yield key, _describe_default(field), meaning
        return
    if tuple(inner) in shown:
        yield key, None, f"{meaning} Keys: see {shown[tuple(inner)]}.".strip()
        return
    shown[tuple(inner)] = key
    many = "[]" if typing.get_origin(field.annotation) is list else ""
    if len(inner) > 1 and meaning:
        yield f"{key}{many}", None, meaning
    for choice in inner:
        summary = " ".join((choice.__doc__ or "").split())
        tag = ""
        if len(inner) > 1:
            tag = f"({choice.__name__.removesuffix('Config')})"
        elif meaning:
            summary = f"{meaning} {summary}"
        yield f"{key}{many}{tag}", None, summary
        yield from _iterate_keys(choice, f"{key}{many}{tag}.", shown)


def _list_models(annotation: Any) -> list[type[BaseModel]]:
    """The models inside an annotation such as ``list[Annotated[A | B, ...]]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in _list_models(part)]


def _describe_default(field: FieldInfo) -> str:
    return (
        "(required)"
        if field.is_required()
        else str(field.get_default(call_default_factory=True, validated_data={}))
    )
