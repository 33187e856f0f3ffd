"""Errors that are expensive to import."""

from __future__ import annotations


def import_model_error() -> type[Exception]:
    """Return ``ModelError``, whose module imports torch, which takes seconds.

    ``except import_model_error() as error`` as the last handler imports it only when an exception
    has got past all others: Python evaluates the handlers in their order.
    """
    from ebbflow.models import ModelError

    return ModelError
