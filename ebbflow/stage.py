"""What every part of a training stage needs to know: which stage of the run it is, and whom it
tells what it does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ebbflow.recipe import Recipe
from ebbflow.recipe.latents import list_judges
from ebbflow.recipe.stages import CustomStageConfig, OfflineStageConfig, OnlineStageConfig
from ebbflow.recipe.students import teacher_copy_name
from ebbflow.seeding import derive_seed

if TYPE_CHECKING:  # scoring and advantages know their stage and do without torch
    import pyarrow as pa
    from PIL import Image

    from ebbflow.algorithms.base import Algorithm, FollowingName


class MetricsLogger(Protocol):
    """Takes what a stage shows of itself; ``ebbflow.tracking.child_run.RunLogger`` is one."""

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """The metrics of a training step, or some of them."""

    def log_table(self, name: str, table: pa.Table) -> None:
        """A table, by its path without an ending."""

    def log_image(self, key: str, image: Image.Image | bytes, step: int) -> None:
        """A picture, one of several with this key."""

    def log_file(self, path: str, content: bytes) -> None:
        """A file, by its path."""

    def log_tags(self, tags: Mapping[str, str]) -> None:
        """Facts about the process, by name; a later value replaces an earlier one."""


@dataclass(frozen=True)
class StageContext:
    """A stage within a run: the recipe, and indices from zero.

    Example:
        ``StageContext(recipe, round=1, stage=0)`` is the first stage of the second round. Its
        ``stage_label`` is "2.1 online", and its ``stage_seed`` differs from that of the same stage
        in the first round.
    """

    recipe: Recipe
    round: int
    stage: int

    @cached_property
    def config(self) -> OnlineStageConfig | OfflineStageConfig | CustomStageConfig:
        return self.recipe.stages[self.stage]

    @cached_property
    def online_config(self) -> OnlineStageConfig:
        # Callers know the kind of their stage; the assert tells mypy.
        assert isinstance(self.config, OnlineStageConfig)
        return self.config

    @cached_property
    def offline_config(self) -> OfflineStageConfig:
        assert isinstance(self.config, OfflineStageConfig)
        return self.config

    @property
    def algorithm(self) -> Algorithm:
        from ebbflow.algorithms.registry import find_algorithm

        return find_algorithm(self.config.algorithm)

    @property
    def latent_judges(self) -> dict[str, list[str]]:
        """The rewards that judge each latent of a sample (``list_judges``)."""
        # A branch may have rewards of its own, and so other judges than the recipe.
        return list_judges(self.branch_recipe.rewards, self.recipe.model)

    @property
    def following_copies(self) -> tuple[FollowingName, ...]:
        """The copies of the stage's policy that follow it, as ``old``."""
        # The reference is a key of the stage, so its copy is none of the algorithm's.
        copies = self.algorithm.list_following_copies(self.config.hyper_parameters)
        return (*copies, "recent") if self.config.reference.is_reset else copies

    @property
    def teacher_folders(self) -> dict[str, str]:
        """Where the policy folders of the stage's teachers lie, by the policy copy that each
        becomes (``teacher_copy_name``).
        """
        hyper = self.config.hyper_parameters
        # Only the hyper-parameters of algorithms that learn from teachers have these keys.
        one = getattr(hyper, "teacher", None)
        several = getattr(hyper, "teachers", {})
        if one:
            return {"teacher": one}
        return {teacher_copy_name(name): folder for name, folder in several.items()}

    @property
    def starts_as_teacher(self) -> bool:
        """Whether the stage's teacher is the policy that it starts from."""
        return (
            "teacher" in self.algorithm.copies(self.config.hyper_parameters)
            and not self.teacher_folders
        )

    @cached_property
    def branch_recipe(self) -> Recipe:
        """The recipe with the prompt sets and the rewards of the stage's branch; the recipe, of a
        stage in none.
        """
        return self.recipe.select_branch(self.config.branch)

    @cached_property
    def stage_label(self) -> str:
        return self.recipe.stage_label(self.round, self.stage)

    @cached_property
    def stage_seed(self) -> int:
        """Seed of all noise of the stage; two stages never share a draw."""
        # By round and place, not by name: the same stage of another round must see other noise.
        return derive_seed(self.recipe.seed, "stage", self.round, self.stage)


@dataclass(frozen=True)
class AnchorFiles:
    """The captioned data of a stage's anchor: the tables of ``import_data``, the shards of
    ``encode_data``.
    """

    prompts: Path
    advantages: Path
    latents: Sequence[Path]


@dataclass(frozen=True)
class StageFolders:
    """What a stage reads and writes on this machine.

    Example:
        The second stage of a local run, distilled from one teacher::

            StageFolders(
                base=Path("runs/glyph-1/nodes/ebbflow-base/base"),
                policy=Path("runs/glyph-1/nodes/ebbflow-1.1/policy"),
                prompts=Path("runs/glyph-1/nodes/ebbflow-prompts/prompts.parquet"),
                output=Path("runs/glyph-1/nodes/ebbflow-1.2/policy"),
                teachers={"teacher": Path("models/teacher")},
            )

    Attributes:
        base: the base-model folder.
        policy: the policy folder that the stage starts from.
        prompts: the prompt table.
        output: where the policy folder of the stage goes; nothing is there yet.
        teachers: policy folders, by the copy of the policy that each becomes.
        anchor: the data of the stage's anchor, where it has one.
    """

    base: Path
    policy: Path
    prompts: Path
    output: Path
    teachers: Mapping[str, Path] = field(default_factory=dict)
    anchor: AnchorFiles | None = None


@dataclass
class MetricsRecorder:
    """Keeps the metrics for the report, and passes everything on to a metrics logger, if there is
    one.
    """

    metrics_logger: MetricsLogger | None = None
    rows: dict[int, dict[str, float]] = field(default_factory=dict)
    """By the number of the step."""

    @property
    def keeps_files(self) -> bool:
        """Whether a logged file goes anywhere: one that takes a second to make is made for nobody
        else.
        """
        return self.metrics_logger is not None

    @property
    def metrics_rows(self) -> list[dict[str, float]]:
        """One dictionary per step, with the key ``step``."""
        return list(self.rows.values())

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        # A step may be logged in parts, such as its training and its validation: one row has them
        # all.
        self.rows.setdefault(step, {"step": step}).update(values)
        if self.metrics_logger:
            self.metrics_logger.log_metrics(values, step)

    def log_table(self, name: str, table: pa.Table) -> None:
        if self.metrics_logger:
            self.metrics_logger.log_table(name, table)

    def log_image(self, key: str, image: Image.Image | bytes, step: int) -> None:
        if self.metrics_logger:
            self.metrics_logger.log_image(key, image, step)

    def log_file(self, path: str, content: bytes) -> None:
        if self.metrics_logger:
            self.metrics_logger.log_file(path, content)

    def log_tags(self, tags: Mapping[str, str]) -> None:
        if self.metrics_logger:
            self.metrics_logger.log_tags(tags)

    def resume_metrics(self, rows: Sequence[dict[str, float]]) -> None:
        """Record the metrics of an earlier attempt again, and pass them on: it may have died before
        it could deliver them.

        What the recorder has already, it leaves out.
        """
        for row in rows:
            # ``step`` is the key of the row and no metric.
            values = {name: value for name, value in row.items() if name != "step"}
            self.log_metrics(values, int(row["step"]))

    def write_json(self, path: Path) -> None:
        """The kept metrics as a JSON list with one object per step."""
        path.write_text(json.dumps(self.metrics_rows))
