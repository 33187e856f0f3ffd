"""``ebbflow serve-reward`` and ``label``: a reward, or a page for people, over HTTP."""

from __future__ import annotations

import sys
from pathlib import Path

import click
import yaml

from ebbflow.recipe import Recipe, RecipeError
from ebbflow.recipe.yaml_text import describe_yaml_error


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
        # As part of a recipe, so that its rules and its errors are those of a recipe.
        (config,) = Recipe.model_validate(
            {"rewards": [yaml.safe_load(reward)], "guardrails": []}
        ).rewards
        run_reward_server(config, host, port, read_token(token_variable))
    # The argument may be broken JSON; YAML reads JSON and names the column.
    except yaml.YAMLError as error:
        sys.exit(describe_yaml_error(error, "NAME_OR_JSON"))
    except (RecipeError, RewardError, NoAnswer) as error:
        sys.exit(str(error))


@click.command()
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
        # Sources are read before the page is served: a mistake in them ends the command at once.
        task = load_label_task(sources, stage, prompts, max_pairs, seed)
        with open_session(
            task, folder, Settings(seed, max_pairs, error_rate), all_pairs
        ) as session:
            click.echo(
                f"{len(task.pairs)} pairs; the results go to {folder} when you stop this with"
                " Ctrl-C. For raters:"
            )
            # Blocks until Ctrl-C. The folder stays locked meanwhile, so that no other server writes
            # answers.
            run_label_server(session, host, port, click.echo)
    except (LabelError, TableError, PromptError, FolderInUseError, DiskFullError) as error:
        sys.exit(str(error))
