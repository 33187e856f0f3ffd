"""What every number of the report means, in a sentence each: rewards and margins say it in the
recipe's docstrings, panels beside their metrics, and what is left stands here.
"""

from __future__ import annotations

from collections.abc import Sequence

from ebbflow.formatting import first_doc_paragraph
from ebbflow.plots import charts
from ebbflow.recipe import Recipe
from ebbflow.recipe.key_docs import read_field_docs
from ebbflow.recipe.promotion import MarginsConfig

MEANINGS = {
    "reward": (
        "The weighted sum of the trained rewards of a prompt, with the weights of the recipe."
    ),
    "exact_match": (
        "1 where the OCR reads exactly the target text, else 0; the mean is the share of such"
        " pictures."
    ),
    "Velocity drift": (
        "Mean squared difference between the policy's velocity and the base model's, on the"
        " policy's own samples."
    ),
    "Policy version": "Optimiser steps since the base model.",
    "Spread": "Standard deviation of the prompts' means: how much easy and hard prompts differ.",
    "Worst tenth": (
        "Mean of the lowest tenth of the prompts: a policy that gives up on hard prompts falls here"
        " first."
    ),
    "Best of k": (
        "Expected reward of the best of k samples of a prompt: what sampling more and keeping the"
        " best would give."
    ),
    "Interval": (
        "Where the mean difference lies with the stated confidence, paired by prompt. The gate"
        " decides by its own p-values, which its reasons state."
    ),
    "Allowed fall": (
        "The candidate must prove that a guardrail fell by less: promotion.guardrail_tolerance, and"
        " against the anchor promotion.anchor_tolerance, on its own scale."
    ),
}
OWN = "A score of your own code, or one that a server of rewards reports; higher counts as better."


def build_glossary(
    recipe: Recipe, metrics: Sequence[str], statistics: Sequence[str]
) -> dict[str, dict[str, str]]:
    """Build the variables of the glossary of a page: the meaning of everything that it names, and
    the id of each meaning, by the name that the page shows.
    """
    meanings = {panel.title: panel.meaning for panel in charts.PANELS}
    # A metric of the run may have a panel's name, and then its own meaning counts.
    for metric in metrics:
        meanings[charts.format_metric_name(metric)] = explain_metric(recipe, metric)
    for name in statistics:
        meanings[charts.format_metric_name(name)] = explain_statistic(name)
    # Lower-case entries of MEANINGS are metrics, which the loop above has added where they occur.
    meanings |= {name: text for name, text in MEANINGS.items() if name[0].isupper()}
    ids = {name: f"about-{number}" for number, name in enumerate(meanings, start=1)}
    return {"meanings": meanings, "ids": ids}


def explain_metric(recipe: Recipe, metric: str) -> str:
    """Explain what a metric of the held-out prompts measures."""
    if metric in MEANINGS:
        return MEANINGS[metric]
    for config in (*recipe.rewards, *recipe.guardrails):
        if config.column == metric:
            text = first_doc_paragraph(type(config).__doc__)
            # The docstring of a custom reward's config is about configs, not about this score.
            if config.name == "custom" or not text:
                text = OWN
            if config.prompts:
                return f"{text} Only of prompts of {', '.join(config.prompts)}."
            return text
    return OWN


def explain_statistic(name: str) -> str:
    """Explain what a statistic of the images measures."""
    # The margins of the promotion are named after the statistics, and their keys are documented.
    docs = read_field_docs(MarginsConfig)
    return docs.get(name, "A statistic of the images.")
