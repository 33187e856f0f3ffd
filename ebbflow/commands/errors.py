"""Errors that are expensive to import."""

from __future__ import annotations


def import_model_error() -> type[Exception]:
    from ebbflow.models import ModelError  # imports torch

    return ModelError
