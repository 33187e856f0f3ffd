"""What Flyte's console shows of workflows, tasks and their inputs.

flytekit takes it from docstrings, and cuts the first sentence where its line ends. Inputs it takes
from ``Args:``, which the tasks do not have: an input has the same name and meaning in all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from flytekit.core import python_function_task, workflow
from flytekit.core.docstring import Docstring

INPUTS = {
    "advantages": "The advantage of every sample that is trained on.",
    "anchor_latents": "The encoded pictures of the stage's anchor.",
    "anchor_tables": "Prompts and advantages of the stage's anchor.",
    "answer": "What the person said who was asked for approval.",
    "approval_hours": "Hours that a person has to approve a promotion, where the recipe does not"
    " set promotion.approval. 0 asks nobody.",
    "base": "The base model.",
    "asked_at": "When a person was asked for approval.",
    "inputs_digest": "The digest of what a run of a schedule is trained from.",
    "kickoff_time": "When the schedule started the run; the seed of the run.",
    "unchanged": "Why there is nothing to train; empty if there is.",
    "before": "The evaluation of the policy that training started from.",
    "branch": "The branch of the recipe, by name.",
    "candidate": "The policy that may become champion.",
    "champion": "The registered champion and its evaluation, or that there is none.",
    "decision": "What the gate decided, with reasons.",
    "encoding": "The digest of captioned data, VAE and sizes.",
    "err": "The error that ended the execution.",
    "history": "The evaluated policies so far, oldest first.",
    "label": "How the evaluation is called in tables and reports.",
    "model": "The keys `model` of the recipe.",
    "policy": "The policy to start from, or to evaluate.",
    "prompts": "The table of prompts.",
    "recipe": "The recipe, as JSON. Keys that are left out have their defaults: `ebbflow keys`"
    " explains every key, and `ebbflow check FILE` checks a recipe before it is started.",
    "question": "What a person was asked for approval; empty where nobody was.",
    "registration": "The registered version of the model.",
    "report": "The report that a person decides by.",
    "repository": "The repository of the base model on the hub.",
    "revision": "The commit in the repository.",
    "rollouts": "Generated samples, a shard each.",
    "round": "The round of training, from 0.",
    "run": "The MLflow run, and the folder of the run's files.",
    "scores": "The rewards of every sample, a shard each.",
    "shard": "Which shard of the rollouts, from 0.",
    "specialists": "The policies of branches that the stage learns from.",
    "stage": "The stage of the recipe, from 0.",
    "threads": "Threads of torch.",
    "training": "How the base model is trained.",
}
"""Help for the inputs of workflows and tasks, by name."""


class WholeDocstring(Docstring):
    """A docstring whose first sentence is whole, and whose inputs are described by ``INPUTS``."""

    def __init__(
        self, docstring: str | None = None, callable_: Callable[..., Any] | None = None
    ) -> None:
        super().__init__(docstring, callable_)
        text = inspect.cleandoc(docstring or getattr(callable_, "__doc__", None) or "")
        # Paragraphs are separated by blank lines; their own line breaks are those of the source.
        self.paragraphs = [" ".join(part.split()) for part in text.split("\n\n") if part.strip()]

    @property
    def input_descriptions(self) -> dict[str, str]:
        return INPUTS | super().input_descriptions

    @property
    def short_description(self) -> str | None:
        return self.paragraphs[0] if self.paragraphs else None

    @property
    def long_description(self) -> str | None:
        # All of it: the console shows the long description where there is one.
        return "\n\n".join(self.paragraphs) or None


def describe_entities() -> None:
    """Let flytekit describe the tasks and workflows that are defined from here on in this way: it
    makes the descriptions itself, and nothing can name other ones.
    """
    for module in (workflow, python_function_task):
        module.Docstring = WholeDocstring
