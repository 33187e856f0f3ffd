"""What a recipe has to know of a sampler, without importing torch.

The samplers are files of ``ebbflow/flow/samplers``, found by the name of their folder; a user's own
is found by its path. ``ebbflow.flow.sampler`` says what they are.
"""

from __future__ import annotations

from typing import Protocol

from ebbflow.recipe.plugins import check_members, import_modules, import_object


class SamplerFacts(Protocol):
    """The facts of ``ebbflow.flow.sampler.Sampler`` that a recipe is checked against."""

    description: str
    eta: float | None
    max_eta: float
    log_prob_is_density: bool
    multistep: bool


# Importing these files is light: they need torch for their annotations alone.
SAMPLERS: dict[str, SamplerFacts] = {
    module.__name__.rpartition(".")[2]: module.SAMPLER
    for module in import_modules("ebbflow.flow.samplers")
}
"""The samplers that come with Ebbflow, by the names of their files."""
STOCHASTIC_SAMPLERS = tuple(name for name, facts in SAMPLERS.items() if facts.eta is not None)
"""Those whose steps have log-probabilities."""


def find_sampler_facts(name: str) -> SamplerFacts:
    """Return the facts of a sampler, by its name or a user's path.

    Raises:
        RecipeError: nothing can be imported from the path, or it is no sampler.
    """
    if name in SAMPLERS:
        return SAMPLERS[name]
    facts: SamplerFacts = import_object(name)
    # ``step`` is not in the protocol: it takes tensors, and this room imports no torch.
    members = ("step", *SamplerFacts.__annotations__)
    check_members(facts, members, name, "ebbflow.flow.sampler.Sampler")
    return facts
