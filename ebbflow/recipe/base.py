"""What every part of a recipe has in common: it is strict, immutable and explains its errors."""

from __future__ import annotations

import difflib
import math
import re
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from reprlib import Repr
from typing import Any

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationError, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ebbflow.recipe.foreign_keys import FOREIGN_KEYS
from ebbflow.recipe.key_docs import read_field_docs
from ebbflow.recipe.secrets import is_secret_option, redact_secrets

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
MAX_LENGTH = 128
"""Characters of a name; names become names of folders and of things in MLflow."""
# Far more values and levels than any recipe has. Without limits, a few lines of YAML whose aliases
# repeat each other would fill the memory.
MAX_VALUES = 100_000
MAX_DEPTH = 50
MAX_PROBLEMS = 20
"""Problems that one error explains."""
ADDRESS = re.compile(r"\s*(?:[A-Za-z][A-Za-z0-9+.-]*:)?//")
"""How a URI begins."""
SECRET = re.compile(
    r"token|secret|pass|pwd|key|credential|auth|cookie|dsn|header|connection|sig|jwt", re.IGNORECASE
)
"""Names of keys whose texts no message repeats: what is under them is a secret, or was taken for
the place of one.
"""


class _ShortRepr(Repr):
    def repr_int(self, x: int, level: int) -> str:
        # Python raises ValueError when it writes out an integer of thousands of digits.
        return repr(x) if x.bit_length() <= 256 else f"an integer of {x.bit_length()} bits"

    def repr_str(self, x: str, level: int) -> str:
        # Redacted first: cutting could leave half of a secret, which no pattern recognises.
        return super().repr_str(redact_secrets(x), level)


_SHORT = _ShortRepr()
_SHORT.maxstring = _SHORT.maxother = 80
_SHORT.maxlevel = 3


class _ValueOfWrongType:
    """A boolean where a number belongs, or a number where a boolean does. pydantic would convert
    it; no field accepts this class, and its ``repr`` shows the value in the error.
    """

    def __init__(self, value: float) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


class RecipeError(Exception):
    """A recipe that cannot be run: names the key, the value and how to fix it.

    Not a ``ValueError``: pydantic would fold it into a ``ValidationError`` and bury the message.
    """


class Strict(BaseModel):
    """Base of every recipe model: unknown keys are errors, true is no number and 1 not true,
    instances never change.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _reject_booleans_as_numbers(cls, data: Any) -> Any:
        # pydantic's own strict mode would also reject ``lr: 3e-4``, which YAML reads as text.
        if not isinstance(data, dict):
            return data
        return {
            key: _mark_wrong_type(value, _types_by_field(cls).get(key, frozenset()))
            for key, value in data.items()
        }

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Return the schema, with the docstrings of the fields as their descriptions."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, text in read_field_docs(cls).items():
            if name in properties:
                properties[name].setdefault("description", text)
        return schema


@cache
def _types_by_field(model: type[BaseModel]) -> dict[str, frozenset[Any]]:
    """Return the types in the annotation of each field, including types inside of others."""
    return {
        name: frozenset(_iterate_types(field.annotation))
        for name, field in model.model_fields.items()
    }


def _iterate_types(annotation: Any) -> Iterator[Any]:
    arguments = typing.get_args(annotation)
    if not arguments:
        yield annotation
    for argument in arguments:
        yield from _iterate_types(argument)


def _mark_wrong_type(value: Any, kinds: frozenset[Any]) -> Any:
    """Return the value, or a ``_ValueOfWrongType`` for a boolean where only numbers fit or a number
    where only booleans do.
    """
    if isinstance(value, list):
        return [_mark_wrong_type(item, kinds) for item in value]
    takes_numbers = bool(kinds & {int, float})
    takes_booleans = bool in kinds
    # A field that takes both, neither or anything decides itself.
    if takes_numbers == takes_booleans or Any in kinds:
        return value
    # In Python a boolean is an int, too.
    is_number_or_boolean = isinstance(value, (int, float))
    if is_number_or_boolean and isinstance(value, bool) != takes_booleans:
        return _ValueOfWrongType(value)
    return value


Locate = Callable[[tuple[Any, ...]], str]
"""From a path in nested data to ``"file:line: "`` of it."""


def locate_nowhere(path: tuple[Any, ...]) -> str:
    """Return no location: the ``Locate`` of data that was read from no file."""
    return ""


def explain_validation_error(
    error: ValidationError, model: type[BaseModel], locate: Locate = locate_nowhere
) -> str:
    """Return one line per problem of a ``ValidationError``: its line in the file, the key, the
    value, and the fix.

    Example:
        ``recipe.yaml:3: rouns: unknown key; did you mean 'rounds'? Known keys here: branches, ...``
    """
    lines = []
    problems = error.errors()
    paths = [problem["loc"] for problem in problems]
    for problem in problems:
        loc = problem["loc"]
        # pydantic drops an invalid item, and then also reports that the list is too short.
        has_invalid_item = any(path[: len(loc)] == loc != path for path in paths)
        if problem["type"] == "too_short" and has_invalid_item:
            continue
        value = problem.get("input")
        if problem["type"] == "union_tag_invalid":
            # The value is the whole section; what is wrong is the key in it that names the class.
            loc = (*loc, problem["ctx"]["discriminator"].strip("'"))
            value = problem["ctx"]["tag"]
        key = format_path(loc) if loc else model.__name__.lower()
        setting = "" if _is_hidden(problem, loc, value) else f" = {shorten_value(value)}"
        explanation = redact_secrets(_explain_problem(problem, model))
        # The names of an online stage's keys alone are more than 500 characters.
        reason = "\n".join(sanitize_text(line, 800) for line in explanation.splitlines())
        lines.append(f"{locate(loc)}{key}{setting}: {reason}")
        if len(lines) == MAX_PROBLEMS < len(problems):
            return "\n".join([*lines, f"... and more, {len(problems)} in all"])
    return "\n".join(lines)


def _is_hidden(problem: Any, loc: tuple[Any, ...], value: Any) -> bool:
    """Return whether an error must not repeat a value."""
    if isinstance(value, str) and any(SECRET.search(str(key)) for key in loc):
        return True
    # The value of an unknown key may be a secret that no pattern recognises; sections are too long.
    return problem["type"] == "extra_forbidden" or isinstance(value, (dict, BaseModel))


def iter_leaves(data: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return (path, value) of everything in nested data, including mappings and lists.

    Example:
        >>> iter_leaves({"rounds": 3})
        [((), {"rounds": 3}), (("rounds",), 3)]

    Raises:
        RecipeError: there is more than any recipe holds: YAML's aliases can repeat each other, or
            hold themselves.
    """
    pending: list[tuple[tuple[Any, ...], Any]] = [((), data)]
    leaves = []
    while pending:
        path, value = pending.pop()
        leaves.append((path, value))
        # Counted inside of the loop: a mapping that holds itself through an alias never ends.
        if len(leaves) > MAX_VALUES or len(path) > MAX_DEPTH:
            raise RecipeError(
                f"{format_path(path[:3])}: more than {MAX_VALUES} values, or {MAX_DEPTH} inside"
                " each other; write it without aliases"
            )
        if isinstance(value, dict):
            pending += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, (list, tuple)):
            pending += [((*path, index), inner) for index, inner in enumerate(value)]
    return leaves


def require_no_secrets(
    values: list[tuple[tuple[Any, ...], Any]], locate: Locate = locate_nowhere
) -> None:
    """Check that ``iter_leaves`` hold no secrets, which would end up in parameters, files and
    reports.

    Raises:
        RecipeError: a text holds a password, a token or a key, or the name of one of somebody's own
            options says that it is one; says where, and not what.
    """
    reasons = [(path, _describe_secret(path, value)) for path, value in values]
    lines = [
        f"{locate(path)}{format_path(path)} {reason}: it would end up in logs and reports; take it"
        " out and keep it in the environment (for MLflow MLFLOW_TRACKING_USERNAME and"
        " MLFLOW_TRACKING_PASSWORD, for a reward the variable that token_variable names, or one"
        " that your own code reads, for a store of files the cloud's own)"
        for path, reason in reasons
        if reason
    ]
    if lines:
        raise RecipeError("\n".join(lines[:MAX_PROBLEMS]))


def _describe_secret(path: tuple[Any, ...], value: Any) -> str | None:
    """Return what an error may say of a value that is or holds a secret; None for other values."""
    if isinstance(value, str):
        # A password that was copied with a newline in it ends there for every pattern.
        text = re.sub(r"[\r\n\t]", "", value) if ADDRESS.match(value) else value
        if redact_secrets(text) != text:
            return "holds a password, a token or a key"
    if isinstance(value, dict):
        # The values of a mapping are leaves of their own; only its keys are left to check.
        keys = [key for key in value if isinstance(key, str)]
        if any(redact_secrets(key) != key for key in keys):
            return "has a key with a password or a token in it"
    # Only ``options`` have keys that users choose; the names of all others are known.
    if "options" in path[:-1] and is_secret_option(path[path.index("options") + 1 :], value):
        return (
            "is a secret, by its name or by how random it is (a public random value may stand under"
            " a name that says so: ..._revision, ..._commit, ..._digest, ..._sha256)"
        )
    return None


def require_json_values(
    values: list[tuple[tuple[Any, ...], Any]], locate: Locate = locate_nowhere
) -> None:
    """Check that JSON can hold ``iter_leaves``, since that is how a recipe travels: YAML also reads
    dates, sets and bytes.

    Raises:
        RecipeError: it cannot; one line for each.
    """
    lines = []
    for path, value in values:
        if isinstance(value, dict):
            for key in value:
                reason = _explain_bad_key(key)
                if reason:
                    key_path = (*path, key)
                    lines.append(f"{locate(key_path)}{format_path(key_path)}: {reason}")
        elif not isinstance(value, (list, tuple)):
            reason = _explain_bad_value(value)
            if reason:
                setting = f"{format_path(path)} = {shorten_value(value)}"
                lines.append(f"{locate(path)}{setting}: {reason}")
    if lines:
        raise RecipeError("\n".join(lines[:MAX_PROBLEMS]))


def _explain_bad_key(key: Any) -> str | None:
    if isinstance(key, str):
        return _explain_bad_value(key)
    return f"YAML reads this key as {shorten_value(key)}; put it in quotes"


def _explain_bad_value(value: Any) -> str | None:
    """Return why JSON cannot hold a value, or None."""
    if value is None or isinstance(value, (bool, BaseModel)):
        return None
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**63 else "integers have 64 bits; take a smaller one"
    if isinstance(value, float):
        return None if math.isfinite(value) else "Input should be a finite number"
    if not isinstance(value, str):
        return f"YAML reads this as a {type(value).__name__}; put it in quotes, or take it out"
    if "\0" in value:
        return "holds a NUL character, which no name may have; take it out"
    return explain_lone_surrogate(value)


def explain_lone_surrogate(text: str) -> str | None:
    """Return why a text cannot be written as UTF-8, or None: JSON's escapes can spell half of a
    surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return "holds half of a surrogate pair; escape characters whole"
    return None


def format_path(path: tuple[Any, ...]) -> str:
    """Return a path in nested data as messages name it: ``stages.0.optimizer.lr``."""
    texts = [
        redact_secrets(part) if isinstance(part, str) else shorten_value(part) for part in path
    ]
    return ".".join(sanitize_text(text, 80) for text in texts) or "recipe"


def shorten_value(value: Any) -> str:
    """Return a value as a message may repeat it: on one line, and cut where it is long."""
    return sanitize_text(_SHORT.repr(value))


def sanitize_text(text: str, most: int = 500) -> str:
    """Return text on one line without control characters, cut where it is long."""
    text = text if len(text) <= most else f"{text[:most]}..."
    # ``repr`` writes control characters as escapes; its quotes are cut off.
    return text if text.isprintable() else repr(text)[1:-1]


def find_nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is almost ``name``, has it as a word, or is most like it; None
    if none is.

    Example:
        >>> find_nearest_name("rouns", ["rounds", "rewards"])
        "rounds"
    """
    known = list(known)
    # difflib takes quadratic time.
    name = name[:100]
    # A typo first; then another spelling or a name that has it as a word; then the loosest match.
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
    if matches:
        return matches[0]
    # "Flow-GRPO" stands for flow_grpo.
    known_by_lower_case = {known_name.lower(): known_name for known_name in known}
    text = name.lower().replace("-", "_")
    nearest = (
        difflib.get_close_matches(text, known_by_lower_case, n=1, cutoff=0.8)
        or [lower for lower in known_by_lower_case if text in lower.split("_")]
        or difflib.get_close_matches(text, known_by_lower_case, n=1)
    )
    return known_by_lower_case[nearest[0]] if nearest else None


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint to the nearest name, for the front of a sentence; empty if none is near."""
    nearest = find_nearest_name(name, known)
    return f"did you mean {nearest!r}? " if nearest else ""


def _explain_problem(problem: Any, model: type[BaseModel]) -> str:
    if problem["type"] == "extra_forbidden":
        known = sorted(_list_sibling_keys(problem["loc"], model))
        key = format_path(problem["loc"][-1:])
        own_key = FOREIGN_KEYS.get(key)
        hint = f"Ebbflow calls it {own_key!r}. " if own_key else suggest_name(key, known)
        return f"unknown key; {hint}Known keys here: {', '.join(known)}"
    if problem["type"] == "union_tag_invalid":
        return _list_choices(problem["ctx"]["tag"], problem["ctx"]["expected_tags"])
    if problem["type"] == "literal_error" and isinstance(problem["input"], str):
        return _list_choices(problem["input"], problem["ctx"]["expected"])
    # The words of pydantic for the next four are Python's, and a recipe is YAML.
    if problem["type"] == "union_tag_not_found":
        return f"the key {problem['ctx']['discriminator']} is missing"
    if problem["type"] in ("model_type", "model_attributes_type"):
        return f"must be a section, not a value; {_describe_section(problem, model)}"
    if problem["type"] == "dict_type":
        return "must be a section; write each entry on a line of its own as 'NAME: VALUE'"
    if problem["type"] == "list_type":
        return "must be a list; write each item on a line of its own that begins with '- '"
    reason = str(problem["msg"]).removeprefix("Value error, ")
    if not isinstance(problem["input"], _ValueOfWrongType):
        return reason
    # ``approval: true`` is a likely guess; the key's description says what the number means.
    meaning = _describe_key(problem["loc"], model)
    return f"{reason}. {meaning}" if meaning else reason


def _list_choices(value: str, choices: str) -> str:
    """Return a hint to the nearest of ``choices``, which pydantic lists in quotes."""
    names = re.findall(r"'([^']*)'", choices)
    return f"{suggest_name(value, names)}Take {', '.join(names)}"


def _describe_section(problem: Any, model: type[BaseModel]) -> str:
    """Return how to write the section at the path of a problem."""
    node = _find_node(problem["loc"], model)
    if "discriminator" not in node:
        return f"its keys are {', '.join(_list_sibling_keys((*problem['loc'], ''), model))}"
    key = node["discriminator"]["propertyName"]
    names = list(node["discriminator"]["mapping"])
    # ``algorithm: flow_grpo`` is a likely guess.
    example = problem["input"] if problem["input"] in names else names[0]
    return f"write {{{key}: {example}}}, with {key} one of {', '.join(names)}"


def _find_node(path: tuple[Any, ...], model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of what is at a path."""
    schema = _json_schema(model)
    node = schema
    for part in path:
        node = _descend_schema(_resolve_reference(node, schema), part, schema)
    return node


def _describe_key(path: tuple[Any, ...], model: type[BaseModel]) -> str:
    """Return the description of a key."""
    return " ".join(str(_find_node(path, model).get("description", "")).split())


def _list_sibling_keys(path: tuple[Any, ...], model: type[BaseModel]) -> list[str]:
    """Return the keys that the model at the parent of ``path`` accepts.

    ``path`` mixes field names, list indices and the tags of discriminated unions, so we walk the
    JSON schema: a field descends into its schema, an index or a tag into whatever it selects.
    """
    schema = _json_schema(model)
    node = _find_node(path[:-1], model)
    # The parent may be an optional section, whose keys are in one of ``anyOf``.
    options = [node, *_resolve_reference(node, schema).get("anyOf", [])]
    return [
        key
        for option in options
        for key in _resolve_reference(option, schema).get("properties", {})
    ]


@cache
def _json_schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _resolve_reference(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    # ``$ref`` is ``#/$defs/NAME``.
    while "$ref" in node:
        node = schema["$defs"][node["$ref"].rsplit("/", 1)[1]]
    return node


def _descend_schema(node: dict[str, Any], part: Any, schema: dict[str, Any]) -> dict[str, Any]:
    tags: dict[str, str] = node.get("discriminator", {}).get("mapping", {})
    # pydantic puts the tag of a union into the path, such as ``stages.0.online.steps``, and the
    # data has no such key.
    if part in tags:
        return {"$ref": tags[part]}
    if isinstance(part, int):
        items: dict[str, Any] = node.get("items", {})
        return items
    # An optional section is ``anyOf`` of its model and null.
    for option in [node, *node.get("anyOf", [])]:
        properties: dict[str, dict[str, Any]] = _resolve_reference(option, schema).get(
            "properties", {}
        )
        if part in properties:
            return properties[part]
    return {}


def apportion_total(weights: Sequence[float], total: int) -> list[int]:
    """Return whole numbers that add up to ``total``, in proportion to the weights, by the largest
    remainders.

    Example:
        >>> apportion_total([2.0, 1.0], 8)
        [5, 3]
    """
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [math.floor(share) for share in exact]
    # ``counts - exact`` is the remainder with a minus, so the largest comes first. Sorting is
    # stable: of equal remainders, the first weight gets the rest.
    by_remainder = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return counts
