"""``ebbflow train-reward``, ``turn`` and ``write-rubrics``: rewards from people, and from
questions.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ebbflow.commands.loading import import_libraries
from ebbflow.commands.options import OutputPath
from ebbflow.recipe import RecipeError, load_recipe
from ebbflow.recipe.output_folder import check_output_folder


@click.command("train-reward")
@click.argument("recipe", type=click.Path(path_type=Path))
def train_reward(recipe: Path) -> None:
    """Train the reward model of RECIPE's section reward_model on labels of people, register it in
    MLflow, and make it champion if it agrees better with held-out labels (docs/reward_models.md).

    Started again, it resumes after the last epoch, and trains nothing where nothing has changed.
    """
    with import_libraries():
        from ebbflow.data.labels import LabelFileError
        from ebbflow.reward_training.run import train_and_register
        from ebbflow.rewards.base import RewardError
        from ebbflow.storage.artifacts import ArtifactError
        from ebbflow.storage.disk import DiskFullError
        from ebbflow.storage.locks import FolderInUseError
        from ebbflow.tracking.store import TrackingError

    try:
        resolved = load_recipe(recipe)
        if "://" not in resolved.output:
            check_output_folder(resolved.output)
        outcome = train_and_register(resolved)
    except (
        RecipeError,
        LabelFileError,
        RewardError,
        ArtifactError,
        TrackingError,
        FolderInUseError,
        DiskFullError,
    ) as error:
        sys.exit(str(error))
    measurement = outcome.record.measurement
    click.echo(
        f"agreement  {measurement.agreement.mean:.3f} ({measurement.agreement.low:.3f} to"
        f" {measurement.agreement.high:.3f}) with {measurement.judgements} held-out answers"
    )
    if measurement.rater_agreement is not None:
        click.echo(f"raters     {measurement.rater_agreement:.3f} with each other")
    verdict = "promoted" if outcome.record.decision.promote else "not promoted"
    click.echo(f"version    {outcome.version.uri}, {verdict}")
    for reason in outcome.record.decision.reasons:
        click.echo(f"           {reason}")
    click.echo(f"report     {outcome.folder / 'report.html'}")


@click.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def turn(recipe: Path, debug: bool) -> None:
    """Turn the flywheel once: train the reward model of RECIPE on the labels so far, post-train the
    policy on it, let the gate decide, and choose the pairs to label next (docs/flywheel.md).

    A turn that was stopped resumes. Label first, with `ebbflow label FOLDER RECIPE`.
    """
    from ebbflow.launch import launch_recipe

    launch_recipe(recipe, debug, turn=True)


@click.command("write-rubrics")
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("output", type=OutputPath(dir_okay=False))
@click.option("--url", required=True, help="Address of an OpenAI-compatible server.")
@click.option("--model", required=True, help="Name of the language model on the server.")
@click.option("--token-variable", help="Environment variable that holds the server's token.")
@click.option(
    "--questions",
    default=5,
    show_default=True,
    type=click.IntRange(1, 50),
    help="Number of questions to ask for.",
)
@click.option(
    "--concurrency",
    default=8,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Number of requests at the same time.",
)
def write_rubrics(
    prompts: Path,
    output: Path,
    url: str,
    model: str,
    token_variable: str | None,
    questions: int,
    concurrency: int,
) -> None:
    """Have a language model write a rubric, a list of questions, for each prompt of the file
    PROMPTS; OUTPUT (.jsonl) is the same prompts with them, for the reward 'rubric'
    (docs/rewards.md).

    Started again, it asks for the rubrics that are missing. Exits with status 1 if some are.
    """
    from pydantic import ValidationError

    from ebbflow.data.prompts import PromptError
    from ebbflow.recipe.base import explain_validation_error
    from ebbflow.rewards.built_in.rubric import RubricConfig
    from ebbflow.rewards.rubric_files import write_rubrics as write_rubric_file

    # Through the class of the reward, so that its rules and errors are those of a recipe.
    keys = {"url": url, "model": model, "concurrency": concurrency}
    if token_variable:
        keys["token_variable"] = token_variable
    try:
        config = RubricConfig.model_validate(keys)
        written, failed = write_rubric_file(prompts, output, config, questions)
    except ValidationError as error:
        sys.exit(explain_validation_error(error, RubricConfig))
    except PromptError as error:
        sys.exit(str(error))
    click.echo(f"{output}: {written} prompts got a rubric")
    if failed:
        sys.exit(f"{failed} got none; run the command again")
