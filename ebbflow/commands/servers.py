"""``ebbflow serve-reward`` and ``label``: a reward, or a page for people, over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import yaml

from ebbflow.commands.loading import import_libraries
from ebbflow.commands.options import OutputPath
from ebbflow.recipe import Recipe, RecipeError, load_recipe
from ebbflow.recipe.rewards import RewardConfig
from ebbflow.recipe.yaml_text import describe_yaml_error

MAX_PAIRS = 200


def parse_reward(text: str) -> RewardConfig:
    """Parse a reward as a recipe names it: its name, or JSON with its keys.

    Raises:
        RecipeError: it is none.
    """
    try:
        # As part of a recipe, so that its rules and its errors are those of a recipe.
        (config,) = Recipe.model_validate(
            {"rewards": [yaml.safe_load(text)], "guardrails": []}
        ).rewards
    # The text may be broken JSON; YAML reads JSON and names the column.
    except yaml.YAMLError as error:
        raise RecipeError(describe_yaml_error(error, "NAME_OR_JSON")) from None
    return config


@click.command("serve-reward")
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
        run_reward_server(parse_reward(reward), host, port, read_token(token_variable))
    except (RecipeError, RewardError, NoAnswer) as error:
        sys.exit(str(error))


@click.command()
@click.argument("folder", type=OutputPath())
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
    type=click.IntRange(min=1),
    help=f"Largest number of pairs; they are chosen by the seed. [default: {MAX_PAIRS}, all of"
    " a recipe's queue]",
)
@click.option(
    "--error-rate",
    default=0.05,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Error rate of the test that stops a comparison.",
)
@click.option(
    "--all-pairs", is_flag=True, help="Ask about every pair, also after the test has decided."
)
@click.option(
    "--seed",
    default=0,
    show_default=True,
    type=click.IntRange(min=0),
    help="Seed of the order of the pairs and of their sides.",
)
@click.option(
    "--stand-in",
    metavar="NAME_OR_JSON",
    help="Let a reward answer instead of people, such as ocr, and serve no page.",
)
@click.option(
    "--stand-in-errors",
    default=0.0,
    show_default=True,
    type=click.FloatRange(0, 1),
    help="Share of the pairs in which the stand-in prefers the worse picture.",
)
@click.option(
    "--stand-in-raters",
    default=1,
    show_default=True,
    type=click.IntRange(min=1),
    help="Number of stand-ins that answer.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8080, show_default=True, type=click.IntRange(0, 65535))
def label(
    folder: Path,
    sources: tuple[Path, ...],
    stage: str | None,
    prompts: Path | None,
    max_pairs: int | None,
    error_rate: float,
    all_pairs: bool,
    seed: int,
    stand_in: str | None,
    stand_in_errors: float,
    stand_in_raters: int,
    host: str,
    port: int,
) -> None:
    """Serve a page on which people compare pictures, and keep their answers in FOLDER
    (docs/label.md).

    SOURCES: the folder of a run; or the samples.parquet of champion and candidate; or rollouts with
    --prompts; or a queue of pairs, or the recipe that has one (docs/flywheel.md).
    """
    from ebbflow.labeling.results import write_results
    from ebbflow.labeling.server import run_label_server
    from ebbflow.labeling.session import Settings, open_session
    from ebbflow.labeling.sources import load_label_task
    from ebbflow.labeling.stand_in import answer_as_stand_in
    from ebbflow.rewards.combine import load_reward

    with _exit_on_label_errors():
        # Sources are read before the page is served: a mistake in them ends the command at once.
        if len(sources) == 1 and sources[0].suffix in (".yaml", ".yml"):
            queue, num_pairs = _open_queue_of_recipe(sources[0])
            sources = (queue,)
            max_pairs = max_pairs or num_pairs
        max_pairs = max_pairs or MAX_PAIRS
        task = load_label_task(sources, stage, prompts, max_pairs, seed)
        with open_session(
            task, folder, Settings(seed, max_pairs, error_rate), all_pairs
        ) as session:
            if stand_in:
                answers = answer_as_stand_in(
                    session, load_reward(parse_reward(stand_in)), stand_in_raters, stand_in_errors
                )
                write_results(session)
                click.echo(f"{answers} answers of {stand_in_raters} stand-in(s) in {folder}")
                return
            click.echo(
                f"{len(task.pairs)} pairs; the results go to {folder} when you stop this with"
                " Ctrl-C. For raters:"
            )
            # Blocks until Ctrl-C. The folder stays locked meanwhile, so that no other server writes
            # answers.
            run_label_server(session, host, port, click.echo)


@contextmanager
def _exit_on_label_errors() -> Iterator[None]:
    """End the command with the message of an error that its user can mend."""
    from ebbflow.data.prompts import PromptError
    from ebbflow.labeling.sources import LabelError
    from ebbflow.rewards.base import RewardError
    from ebbflow.storage.disk import DiskFullError
    from ebbflow.storage.locks import FolderInUseError
    from ebbflow.storage.tables import TableError

    try:
        yield
    except (
        LabelError,
        TableError,
        PromptError,
        FolderInUseError,
        DiskFullError,
        RecipeError,
        RewardError,
    ) as error:
        sys.exit(str(error))


def _open_queue_of_recipe(path: Path) -> tuple[Path, int]:
    """Return the queue of a recipe, and how many pairs it may have."""
    with import_libraries():
        from ebbflow.registry.drawing import ERRORS  # imports torch and MLflow
        from ebbflow.reward_training.folder import require_reward_model_config
        from ebbflow.reward_training.queue import open_queue

    recipe = load_recipe(path)
    num_pairs = require_reward_model_config(recipe).queue
    try:
        return open_queue(recipe), num_pairs
    except ERRORS as error:
        sys.exit(str(error))
