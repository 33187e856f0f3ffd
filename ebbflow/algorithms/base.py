"""What an algorithm is: a pure function from typed terms to (loss, metrics), and a statement of what it needs.

A *term* is one row of the loss. Trajectory algorithms have a term per (sample, trained denoising step), forward-process
algorithms one per (sample, draw of sigma and noise).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from ebbflow.flow.transition import Transition

CopyName = Literal["reference", "old"]
Metrics = dict[str, Tensor]


@dataclass(frozen=True)
class TrajectoryTerms:
    """Terms of a policy gradient, M rows.

    Attributes:
        transition: the step under the policy being trained, with gradient.
        log_prob: [M] of the recorded next latents, with gradient.
        old_log_prob: [M], under the policy that generated them.
        copies: the step under each policy copy that the algorithm asked for.
        advantage: [M].
    """

    transition: Transition
    log_prob: Tensor
    old_log_prob: Tensor
    copies: Mapping[CopyName, Transition]
    advantage: Tensor


@dataclass(frozen=True)
class ForwardTerms:
    """Terms of a forward-process loss, M rows.

    Attributes:
        clean: x0, [M, ...].
        noise: eps, [M, ...].
        sigma: [M]; the network saw (1 - sigma) x0 + sigma eps.
        velocity: under the policy being trained, with gradient, [M, ...].
        copies: the velocity under each policy copy that the algorithm asked for.
        advantage: [M].
    """

    clean: Tensor
    noise: Tensor
    sigma: Tensor
    velocity: Tensor
    copies: Mapping[CopyName, Tensor]
    advantage: Tensor


@dataclass(frozen=True)
class Algorithm:
    """One entry of the registry.

    Attributes:
        summary: one line for people.
        terms: which of the two kinds of terms the loss takes.
        loss: (terms, hyper-parameters) -> (mean over the terms, metrics).
        copies: the policy copies whose predictions the loss needs, given its hyper-parameters.
        draws: draws of (sigma, noise) per sample, for forward terms.
        old_decay: (hyper-parameters, optimiser step) -> d of old <- d old + (1 - d) theta, where an old policy is kept.
    """

    summary: str
    terms: type[TrajectoryTerms] | type[ForwardTerms]
    loss: Callable[[Any, Any], tuple[Tensor, Metrics]]
    copies: Callable[[Any], frozenset[CopyName]]
    draws: Callable[[Any], int] = lambda config: 1
    old_decay: Callable[[Any, int], float] | None = None


def per_term(values: Tensor) -> Tensor:
    """Mean over everything but the rows, [M]."""
    return values.flatten(1).mean(1)


def rows(values: Tensor, like: Tensor) -> Tensor:
    """[M] shaped to broadcast over the rows of ``like``."""
    return values.view(-1, *[1] * (like.ndim - 1))
