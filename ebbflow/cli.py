"""The ``ebbflow`` command: collects the commands of ``ebbflow.commands``."""

from __future__ import annotations

import sys
from typing import Any

import click

from ebbflow.commands import (
    certify,
    cluster,
    costs,
    gate_policy,
    policies,
    projects,
    recipes,
    retention,
    reward_models,
    runs,
    servers,
    signing,
)
from ebbflow.commands.loading import reduce_garbage_collection
from ebbflow.extras import explain_import_error
from ebbflow.logs import configure_logging
from ebbflow.recipe.plugins import extend_import_path
from ebbflow.watchdog import enable_stack_dumps


class CommandGroup(click.Group):
    """Commands of which some need packages that the core does not install."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a missing package ends it with the extra that installs it."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            # The one place that catches it: commands import what they need without a check.
            message = explain_import_error(f"ebbflow {ctx.invoked_subcommand}", error)
            if message is None:
                raise
            sys.exit(message)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ebbflow", message="%(prog)s %(version)s")
def main() -> None:
    """Reinforcement-learning post-training for diffusion and flow-matching models, as a Flyte
    pipeline.

    `ebbflow run RECIPE` runs the pipeline on this machine.

    EBBFLOW_LOG_LEVEL sets how much is logged: DEBUG, INFO (default), WARNING or ERROR.
    """
    reduce_garbage_collection()
    try:
        configure_logging()
        enable_stack_dumps()
    except ValueError as error:
        sys.exit(str(error))
    # For commands that read no recipe, such as serve-reward; ``load_recipe`` puts the folder of a
    # recipe before it.
    extend_import_path(".")


# Click sorts the commands in the help itself.
for command in (
    certify.certify,
    certify.check_certificate,
    cluster.reconcile,
    cluster.submit,
    costs.estimate,
    costs.plan,
    gate_policy.gate_policy,
    policies.draw,
    policies.evaluate,
    policies.export,
    policies.rollback,
    policies.verify,
    projects.create_project,
    signing.make_key,
    signing.sign,
    signing.adopt,
    recipes.check,
    recipes.defaults,
    recipes.keys,
    recipes.list_choices,
    retention.clean,
    reward_models.train_reward,
    reward_models.turn,
    reward_models.write_rubrics,
    runs.compare,
    runs.replay,
    runs.run,
    runs.runs,
    runs.ui,
    servers.label,
    servers.serve_reward,
):
    main.add_command(command)
