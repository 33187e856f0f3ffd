"""YAML as plain data, with the line of every key for error messages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO, Any

import yaml

from ebbflow.recipe.base import sanitize_text
from ebbflow.recipe.secrets import redact_secrets

MAX_KEYS = 1000
"""Largest number of keys of one mapping; real ones have a few dozen."""


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, except that a key that is given twice is an error. PyYAML would take the
    last value without a word.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        counts = Counter(key.value for key in keys)
        duplicates = sorted(key for key, count in counts.items() if count > 1)
        if duplicates:
            # The line of the second one: the first is usually the one that is meant.
            mark = [key.start_mark for key in keys if key.value == duplicates[0]][1]
            raise yaml.constructor.ConstructorError(None, None, f"given twice: {duplicates}", mark)
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        # Merges (``<<``) of merges grow without bound.
        if len(node.value) > MAX_KEYS:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {MAX_KEYS} keys in one place", node.start_mark
            )


@dataclass(frozen=True)
class YamlText:
    """A text that was read.

    Attributes:
        name: what stands for it in messages, such as its file.
        data: what it holds.
        node: its root, whose parts know their lines; None of an empty text.
    """

    name: str
    data: Any
    node: yaml.Node | None

    def locate_key(self, path: tuple[Any, ...]) -> str:
        """``"file:line: "`` of the key at a path in the data, or of the nearest one above it that
        the text has.

        A path of pydantic also holds the names of the choices in a union, which the text does not
        have.
        """
        node = self.node
        if node is None:
            return f"{self.name}: "
        mark = node.start_mark
        for part in path:
            if isinstance(node, yaml.MappingNode):
                # Merged keys stand first, and what overrides them comes last.
                matches = [
                    (key, value)
                    for key, value in node.value
                    if isinstance(key, yaml.ScalarNode) and key.value == str(part)
                ]
                if matches:
                    key, node = matches[-1]
                    mark = key.start_mark
            elif (
                isinstance(node, yaml.SequenceNode)
                and isinstance(part, int)
                and part < len(node.value)
            ):
                node = node.value[part]
                mark = node.start_mark
        return f"{self.name}:{mark.line + 1}: "


def read_yaml(text: str | bytes, name: str) -> YamlText:
    """Read a YAML or JSON text.

    Raises:
        yaml.YAMLError: it is not valid, or gives a key twice.
        Exception: whatever PyYAML's converters raise at odd tags, and the end of the stack at deep
            nesting.
    """
    loader = UniqueKeyLoader(text)
    try:
        # The nodes are kept beside the data, which no longer knows its lines.
        node = loader.get_single_node()
        return YamlText(name, loader.construct_document(node) if node is not None else None, node)
    finally:
        loader.dispose()


def read_top_scalars(text: IO[str], keys: Collection[str]) -> dict[str, str]:
    """Read scalars at the top of a YAML mapping, as they are written, and no further than the last
    of ``keys``; a missing key is left out.

    Raises:
        yaml.YAMLError: what was read is not valid, is no mapping, or has something else at a key.
        Exception: as ``read_yaml``.
    """
    # Events of the parser and not nodes: nested text needs no stack, and no alias is followed.
    loader: Any = yaml.SafeLoader(text)  # its types lack the events
    try:
        while loader.check_event(yaml.StreamStartEvent, yaml.DocumentStartEvent):
            loader.get_event()
        if not loader.check_event(yaml.MappingStartEvent):
            raise yaml.YAMLError("it is no mapping")
        loader.get_event()
        scalars: dict[str, str] = {}
        while len(scalars) < len(keys) and not loader.check_event(yaml.MappingEndEvent):
            key = _skip_node(loader)
            value = _skip_node(loader)
            if isinstance(key, yaml.ScalarEvent) and key.value in keys:
                if not isinstance(value, yaml.ScalarEvent):
                    raise yaml.YAMLError(f"{key.value} is no scalar")
                scalars[key.value] = value.value
        return scalars
    finally:
        loader.dispose()


def _skip_node(loader: Any) -> yaml.Event:
    """Pass over a node with all that it holds, and return its first event."""
    first: yaml.Event = loader.get_event()
    depth = int(isinstance(first, yaml.CollectionStartEvent))
    while depth > 0:
        event = loader.get_event()
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
    return first


def describe_yaml_error(error: Exception, name: str) -> str:
    """Return where a text is invalid and why."""
    # Without the line itself, which PyYAML would quote: it may hold a secret.
    line = ""
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        reason = ", ".join(part for part in (error.context, error.problem) if part)
        line = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
    elif isinstance(error, yaml.YAMLError):
        reason = str(error)
    else:
        # Errors of Python's converters quote the value: ``invalid literal for int(): '...'``.
        reason = re.sub(r"(['\"]).*\1", "...", str(error))
    text = sanitize_text(redact_secrets(" ".join(reason.split())))
    return f"{name}{line}: not valid YAML: {text or type(error).__name__}"
