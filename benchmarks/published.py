"""Published values against their sources: ``python -m benchmarks.published --sources FOLDER`` reads
each value of published.yaml in FOLDER, where the repositories are cloned, compares it with what
Ebbflow says and does, and writes results/published.md. The exit status is 1 if a difference has no
reason, or a reason no difference.
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.published_values import MISSING, extract_value, parse_scalar
from benchmarks.sources import Clones
from ebbflow.models.families import load_adapter
from ebbflow.models.sizes import build_meta_adapter
from ebbflow.recipe.base import RecipeError
from ebbflow.recipe.defaults import list_published_defaults
from ebbflow.recipe.model import ModelConfig

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_name("published.yaml")
REPORT = Path(__file__).parent / "results" / "published.md"
RECIPES = ROOT / "workflows" / "recipes"
OWN_RECIPES = (
    *("glyph", "glyph_few_steps", "glyph_flywheel", "glyph_lora", "glyph_ray"),
    *("glyph_specialists", "tiny"),
)
"""Recipes of the model that is trained here: nothing is published of it."""
OWN_KEYS = (
    *("name", "model.family", "model.path", "model.revision", "prompts.*", "rewards", "rounds"),
    *("guardrails", "branches.*", "promotion.*", "evaluation.micro_batch", "stages.?.kind"),
    *("stages.?.branch", "stages.?.micro_batch", "stages.?.shards", "stages.?.placement"),
)
"""Keys of a recipe that say what a run is of and how it fits the machine."""
HELP = """examples:
  python -m benchmarks.published --sources ../clones            write the report
  python -m benchmarks.published --sources ../clones --check    compare, and write nothing
FOLDER has the clones as FOLDER/NAME, FOLDER/OWNER+NAME or FOLDER/OWNER/NAME, and the archive of a
commit that a clone lacks as FOLDER/NAME-COMMIT. Values of a repository that is not there are not
found; the report says which. Where none is there, the status is 1.
"""
EQUAL, DIFFERS, NOT_FOUND, WRONG = "equal", "differs", "not found", "WRONG"


class Row(NamedTuple):
    """A value of the report.

    Attributes:
        subject: the algorithm, recipe or family.
        setting: the key.
        ours: the value here.
        published: the value in the source, as a recipe would state it.
        state: equal, differs, not found, or WRONG: a difference without a reason, or a reason
            without a difference.
        how: what was compared: the value of a key, or words of the code.
        remark: the reason of a difference, the note of the entry, or what is wrong.
        source: the link to the file, and the key.
    """

    subject: str
    setting: str
    ours: Any
    published: Any
    state: str
    how: str
    remark: str
    source: str


def read_data(path: Path = DATA) -> dict[str, Any]:
    """Returns the data file: ``files``, ``algorithms``, ``recipes`` and ``targets``."""
    return dict(yaml.safe_load(path.read_text(encoding="utf-8")))


def list_entries(group: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns setting to entry of an algorithm or a recipe, each with its file (``at``)."""
    without = set(group.get("without", ()))
    entries = {**group["values"], **group.get("overrides", {})}
    return {
        setting: {
            "at": group.get("at"),
            **(entry if isinstance(entry, Mapping) else {"key": entry}),
        }
        for setting, entry in entries.items()
        if setting not in without
    }


def list_recipe_entries(data: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Returns setting to entry of a recipe; ``like`` takes another one's, and its stages'."""
    group = data["recipes"][name]
    entries: dict[str, dict[str, Any]] = {}
    if "like" in group:
        stages = group["like"]["stages"]
        for setting, entry in list_recipe_entries(data, group["like"]["recipe"]).items():
            if not setting.startswith("stages."):
                entries[setting] = entry
                continue
            _, number, key = setting.split(".", 2)
            for target, original in stages.items():
                if int(number) == original:
                    entries[f"stages.{target}.{key}"] = entry
    without = set(group.get("without", ()))
    return {
        **{setting: entry for setting, entry in entries.items() if setting not in without},
        **list_entries(group),
    }


def list_recipe_values(name: str) -> dict[str, Any]:
    """Returns dotted key to value of what a recipe's file sets, without ``OWN_KEYS``."""
    recipe = yaml.safe_load((RECIPES / f"{name}.yaml").read_text(encoding="utf-8"))
    return {
        key: value
        for key, value in _iterate_leaves(recipe, "")
        if not any(fnmatch.fnmatch(key, pattern) for pattern in OWN_KEYS)
    }


def _iterate_leaves(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from _iterate_leaves(part, f"{prefix}.{key}" if prefix else key)
    elif prefix == "stages":
        for number, part in enumerate(value):
            yield from _iterate_leaves(part, f"{prefix}.{number}")
    else:
        yield prefix, value


def convert(value: Any, entry: Mapping[str, Any]) -> Any:
    """Returns a value of a source as a recipe would state it.

    Raises:
        ValueError: ``means`` lacks the value, or ``pattern`` does not match it.
    """
    if "pattern" in entry:
        match = re.search(entry["pattern"], str(value))
        if match is None:
            raise ValueError(f"{entry['pattern']} does not match {value!r}")
        value = parse_scalar(match[1])
    if "item" in entry:
        value = value[entry["item"]]
    if "means" in entry:
        key = value if not isinstance(value, list | tuple) else str(list(value))
        if key not in entry["means"]:
            raise ValueError(f"{value!r} is none of {list(entry['means'])}")
        value = entry["means"][key]
    if "times" in entry or "plus" in entry:
        value = value * entry.get("times", 1) + entry.get("plus", 0)
    return value


def is_equal(first: Any, second: Any) -> bool:
    """Whether two values are the same, apart from rounding and from lists that are tuples."""
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        return len(first) == len(second) and all(map(is_equal, first, second))
    numbers = (int, float)
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, numbers) and isinstance(second, numbers):
        return math.isclose(first, second, rel_tol=1e-9)
    return bool(first == second)


class Comparison:
    """The comparison of the data with its sources.

    Example:
        ::

            rows = Comparison(read_data(), Clones(Path("../clones"))).compare_all()
    """

    def __init__(self, data: Mapping[str, Any], clones: Clones) -> None:
        self.data = data
        self.clones = clones

    def compare_all(self) -> dict[str, list[Row]]:
        """Returns the rows of each table."""
        return {
            "Defaults of algorithms": list(self._iterate_algorithms()),
            "Recipes": list(self._iterate_recipes()),
            "Layers that LoRA adapts": list(self._iterate_targets()),
        }

    def _iterate_algorithms(self) -> Iterator[Row]:
        for name, group in self.data["algorithms"].items():
            table = list_published_defaults()[name]
            defaults = table.list_values()
            for setting, entry in list_entries(group).items():
                row = table.published[setting]
                ours = row.ours or defaults[setting]
                yield self._compare(name, setting, entry, ours, row.value, row.deviation)

    def _iterate_recipes(self) -> Iterator[Row]:
        for name in self.data["recipes"]:
            values = list_recipe_values(name)
            for setting, entry in list_recipe_entries(self.data, name).items():
                ours = values[setting]
                stated = entry.get("is", ours)  # of words; of a key the source says it
                yield self._compare(name, setting, entry, ours, stated, entry.get("reason", ""))

    def _iterate_targets(self) -> Iterator[Row]:
        for family, entry in self.data["targets"].items():
            ours = list_adapted_layers(family, load_adapter(family).lora_targets)

            def expand(targets: Any, family: str = family) -> Any:
                return list_adapted_layers(family, targets)

            row = self._compare(
                family, "targets", entry, ours, ours, entry.get("reason", ""), expand
            )
            yield row._replace(
                ours=f"{len(ours)} layers",
                published=row.published
                if isinstance(row.published, str)
                else f"{len(row.published)} layers",
            )

    def _compare(
        self,
        subject: str,
        setting: str,
        entry: Mapping[str, Any],
        ours: Any,
        stated: Any,
        reason: str,
        expand: Callable[[Any], Any] = lambda value: value,
    ) -> Row:
        """Compares an entry with the value here.

        Args:
            stated: what is said to be published; of words in the source it is the value.
            reason: why ``ours`` is another value, empty where it is the same.
            expand: turns the source's value into what is compared.
        """
        file = self.data["files"][entry["at"]]
        key = entry.get("key", entry.get("text", entry.get("absent")))
        how = "value" if "key" in entry else "words" if "text" in entry else "no such words"
        row = Row(
            subject,
            setting,
            ours,
            stated,
            EQUAL,
            how,
            "; ".join(filter(None, [reason, entry.get("note", "")])),
            format_source(file, entry),
        )
        try:
            text = self.clones.read(file["repository"], file["commit"], file["path"])
        except RecipeError:
            return row._replace(state=NOT_FOUND, published="", remark="no clone with the commit")
        if text is None:
            return row._replace(state=NOT_FOUND, published="", remark="no such file at the commit")
        if how != "value":
            if (key in text) != (how == "words"):
                return row._replace(state=WRONG, remark=f"the file has {key!r} or lacks it")
            if not (reason or is_equal(ours, stated)):
                return row._replace(state=WRONG, remark="differs without a reason")
            if "reason" in entry or (reason and not is_equal(ours, stated)):
                return row._replace(state=DIFFERS)
            return row
        value = extract_value(text, file["path"], add_function(key, file))
        if value is MISSING:
            return row._replace(state=WRONG, published="", remark=f"the file has no {key}")
        try:
            published = expand(convert(value, entry))
        except ValueError as error:
            return row._replace(state=WRONG, published=value, remark=str(error))
        row = row._replace(published=published)
        if not (reason or is_equal(published, ours)):
            return row._replace(state=WRONG, remark="differs without a reason")
        if reason and is_equal(published, ours):
            return row._replace(state=WRONG, remark=f"is equal, and has a reason: {reason}")
        if not entry.get("reason") and not is_equal(published, stated):
            return row._replace(state=WRONG, remark=f"{stated!r} is said to be published")
        return row._replace(state=DIFFERS if reason else EQUAL)


def add_function(key: str, file: Mapping[str, Any]) -> str:
    """Returns the key with the function of the file in which assignments are looked for."""
    function = file.get("function", "")
    is_assignment = not (key.startswith("--") or key.endswith(")") or ":" in key)
    return f"{function}:{key}" if function and is_assignment else key


def list_adapted_layers(family: str, targets: list[str]) -> list[str]:
    """Returns the linear layers of a family's published network that ``targets`` match, as peft
    matches them: by the end of the name.
    """
    adapter: Any = load_adapter(family)
    repository = next(iter(adapter.published))
    model = ModelConfig(family=family, path=repository, revision="0" * 40)
    built = build_meta_adapter(model)
    modules = dict(built.pipeline.transformer.named_modules())
    return sorted(
        name
        for name, module in modules.items()
        if type(module).__name__ == "Linear"
        and any(name == target or name.endswith(f".{target}") for target in targets)
    )


def format_source(file: Mapping[str, Any], entry: Mapping[str, Any]) -> str:
    """Formats the link to a file at its commit, and the entry's key in it."""
    url = f"https://github.com/{file['repository']}/blob/{file['commit']}/{file['path']}"
    name = f"{file.get('copy_of', file['repository'])} {file['path']}"
    function = file.get("function", "")
    place = entry.get("key", "")
    if function and not place.startswith("--"):
        place = f"{function}: {place}" if place else function
    return f"[{name}]({url}){f' `{place}`' if place else ''}"


def find_gaps(data: Mapping[str, Any]) -> list[str]:
    """Returns a line for each value that is called published and has no entry, and for each entry
    of a value that is not there, or of words without the value that they show (``is``).
    """
    gaps = []
    for name, table in list_published_defaults().items():
        entries = list_entries(data["algorithms"].get(name, {"values": {}}))
        gaps += [f"algorithm {name}: {key}" for key in set(table.published) ^ set(entries)]
    names = {path.stem for path in RECIPES.glob("*.yaml")} - set(OWN_RECIPES)
    gaps += [f"recipe {name}" for name in names ^ set(data["recipes"])]
    for name in names & set(data["recipes"]):
        ours = data["recipes"][name].get("ours", {})
        values = list_recipe_values(name)
        entries = list_recipe_entries(data, name)
        expected = {key for key in values if not any(fnmatch.fnmatch(key, own) for own in ours)}
        gaps += [f"recipe {name}: {key}" for key in expected ^ set(entries)]
        gaps += [
            f"recipe {name}: {key}: is"
            for key, entry in entries.items()
            if not entry.keys() & {"key", "reason", "is"}
        ]
    return sorted(gaps)


def count_states(rows: list[Row]) -> dict[str, int]:
    """Returns how many rows have each state."""
    return {
        state: sum(row.state == state for row in rows)
        for state in (EQUAL, DIFFERS, NOT_FOUND, WRONG)
    }


def format_report(tables: Mapping[str, list[Row]]) -> str:
    """Formats results/published.md."""
    rows = [row for table in tables.values() for row in table]
    lines = [
        "# Published values against their sources",
        "",
        "Written by `python -m benchmarks.published --sources FOLDER` from",
        "[published.yaml](../published.yaml): each value that a default, a recipe or a family",
        "calls",
        "published, read in the source at its commit. *value*: the command extracted the value",
        "of a key and compared it. *words*: the value is code, and the command found the words",
        "that show it; *no such words*: it found that the file lacks them.",
        "",
        "| | " + " | ".join(tables) + " | all |",
        "|---" * (len(tables) + 2) + "|",
    ]
    for state in (EQUAL, DIFFERS, NOT_FOUND, WRONG):
        counts = [count_states(table)[state] for table in tables.values()]
        label = {DIFFERS: "differs, with the reason", WRONG: "unexplained"}.get(state, state)
        lines.append(f"| {label} | {' | '.join(map(str, counts))} | {sum(counts)} |")
    values = sum(row.how == "value" and row.state != NOT_FOUND for row in rows)
    lines += ["", f"Of {len(rows)} entries, {values} are extracted values.", ""]
    for title, table in tables.items():
        lines += [f"## {title}", ""]
        lines += ["| of | setting | here | published | | by | remark | source |", "|---" * 8 + "|"]
        lines += [_format_row(row) for row in table]
        lines += [""]
    return "\n".join(lines)


def _format_row(row: Row) -> str:
    cells = [
        row.subject,
        f"`{row.setting}`",
        _format_value(row.ours),
        _format_value(row.published),
        row.state,
        row.how,
        row.remark,
        row.source,
    ]
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _format_value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published",
        description=__doc__,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sources", type=Path, metavar="FOLDER", required=True, help="the clones")
    parser.add_argument("--check", action="store_true", help="write no report")
    arguments = parser.parse_args()
    data = read_data()
    gaps = find_gaps(data)
    if gaps:
        print("values without an entry, or entries without a value:", *gaps, sep="\n")
        return 1
    tables = Comparison(data, Clones(arguments.sources)).compare_all()
    rows = [row for table in tables.values() for row in table]
    print(", ".join(f"{number} {state}" for state, number in count_states(rows).items()))
    if all(row.state == NOT_FOUND for row in rows):
        print(f"{arguments.sources} has no clone of any source; see --help", file=sys.stderr)
        return 1
    wrong = [
        f"{row.subject} {row.setting}: {row.ours!r} here, {row.published!r} there: {row.remark}"
        for row in rows
        if row.state == WRONG
    ]
    if not arguments.check:
        REPORT.write_text(format_report(tables), encoding="utf-8")
        print(f"wrote {REPORT}")
    if wrong:
        print("\n".join(wrong), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
