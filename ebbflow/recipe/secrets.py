"""Secrets have no place in a recipe: it becomes parameters, a file in MLflow, a page of the report."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ebbflow.recipe.base import RecipeError, dotted

# After the colon of an authority; such a text is no password.
PORT = r"""\d+(?:[/?#\s'"),;]|$)"""
USER_AND_PASSWORD = re.compile(
    r"([A-Za-z][A-Za-z0-9+.-]*://)(?:"
    r"[^\s/?#@:]*:[^\s/?#]*@"
    r"|[^\s/?#:]*@[^\s/?#:]*:[^\s/?#@]*@"  # an e-mail address as user
    rf"|[^\s/?#@:\[]*:(?!{PORT})[^\s@]{{0,300}}@(?:[^\s/?#]*@)?"  # a slash in the password that nobody encoded
    r")"
)
USER_OF_THE_WEB = re.compile(r"(https?://)[^\s/?#]+@")
"""Without a password, what comes before the @ is a token."""
QUERY = re.compile(
    r"([?&](?!ssl_?(?:key|cert))[\w.-]*(?:token|secret|passw|pwd|key|sig|credential|auth)[\w.-]*=)[^&\s'\"]+", re.IGNORECASE
)
OPTION = re.compile(r"(?:^|_)(?:secret|passw(?:or)?d|pwd|(?:api|access|private|secret)_?key|credentials?|token)$")
"""Names of somebody's own options that are secrets, in snake case."""
OF_WORDS = re.compile(r"(?:^|_)(?:bos|class|cls|end|eos|image|mask|pad|sep|special|start|stop|trigger|unk|video)_token$")
"""Tokens that a language model reads."""


def redact(text: str) -> str:
    """A text without the passwords and tokens of the URIs in it."""
    for secret in (USER_AND_PASSWORD, USER_OF_THE_WEB):
        text = secret.sub(r"\1***@", text)
    return QUERY.sub(r"\1***", text)


def require_no_secrets(values: Iterable[tuple[tuple[Any, ...], Any]]) -> None:
    """Check the texts of a recipe, given as (path, value).

    Raises:
        RecipeError: a URI among them holds a password or a token, or the name of one of somebody's own options says that it is
            one; says where, and not what.
    """
    lines = [
        f"{dotted(path)}{shown}: it would end up in logs and reports; take it out and keep it in the environment (for MLflow "
        "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, for a reward the variable that token_variable names, or one that "
        "your own code reads, for a store of files the cloud's own)"
        for path, value in values
        if isinstance(value, str) and (shown := _secret(path, value))
    ]
    if lines:
        raise RecipeError("\n".join(lines))


def _secret(path: tuple[Any, ...], value: str) -> str | None:
    """What may be said of a text that is or holds a secret; None of every other."""
    if redact(value) != value:
        return f" = {redact(value)!r} is a URI with a password or a token in it"
    if "options" in path and value and any(map(_names_a_secret, path[path.index("options") + 1 :])):
        return " is a secret, by its name"
    return None


def _names_a_secret(key: object) -> bool:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", str(key)).lower().replace("-", "_")
    return bool(OPTION.search(name)) and not OF_WORDS.search(name)
