"""What surrounds the steps of every stage, online and offline: progress, metrics, checkpoints, and
what ends it early.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebbflow.alerts import send_alert_in_background
from ebbflow.algorithms.advantages import PromptStatistics
from ebbflow.progress import show_progress
from ebbflow.stage import MetricsRecorder, StageContext
from ebbflow.training.checkpoint import CheckpointError, Checkpoints
from ebbflow.training.stop_conditions import Preempted, Stop, StopConditions

logger = logging.getLogger(__name__)


@dataclass
class StageState:
    """What a stage knows apart from policy and optimiser, and stores in a checkpoint.

    Example: an online stage after 20 of its steps with 64 samples and two updates each::

        StageState(step=20, samples=1280, updates=40, seconds={"rollout": 61.2, "training": 48.0},
                   elapsed=75.3, prompt_rewards={17: (0.41, 0.08)})

    Attributes:
        history: rewards of each prompt so far, where ``advantages.running`` wants them.
        step: training steps done.
        samples: images generated for training.
        updates: optimiser steps done.
        seconds: time that workers were busy, by task.
        elapsed: seconds of the stage so far, over all attempts.
        alarms: raised by the stage.
        training_alarms: raised by the training group.
        first_statistics: of each image statistic in the first step of an online stage what is
            compared with later steps (``ebbflow.online.statistics_alarm``), by the size of the
            step; that of the model is the empty text.
        statistic_alarms: the statistics whose alarm rang.
        kept_prompts: ids of the prompts that ``prompt_filter`` left; None without one, or before
            its first pass.
        prompt_rewards: running (mean, standard deviation) of each prompt's rewards, by id, where a
            ``curriculum`` wants them.
        algorithm_memory: what the algorithm's ``reshape`` remembers from step to step.
    """

    history: PromptStatistics = field(default_factory=PromptStatistics)
    step: int = 0
    samples: int = 0
    updates: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    elapsed: float = 0.0
    alarms: list[str] = field(default_factory=list)
    training_alarms: list[str] = field(default_factory=list)
    first_statistics: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    statistic_alarms: list[str] = field(default_factory=list)
    kept_prompts: list[int] | None = None
    prompt_rewards: dict[int, tuple[float, float]] = field(default_factory=dict)
    algorithm_memory: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {**vars(self), "history": self.history.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        # JSON has texts as keys and lists as tuples.
        rewards = {
            int(prompt): (mean, std) for prompt, (mean, std) in state["prompt_rewards"].items()
        }
        history = PromptStatistics.from_state_dict(state["history"])
        vars(self).update(state | {"history": history, "prompt_rewards": rewards})


class StageLoop:
    """The frame of a stage's loop::

        for step in loop.iterate_steps():
            ...                             # train
            loop.finish_step(metrics)
            if loop.preempted: save a checkpoint; raise loop.preemption_error()

    Args:
        num_steps: of the whole stage.
        gpus: of the whole stage, for ``max_gpu_hours``.
        steps_ahead: steps in flight while another one trains; a preempted stage waits for them.
        quiet: no progress, for all ranks but the first.
    """

    def __init__(
        self,
        ctx: StageContext,
        state: StageState,
        recorder: MetricsRecorder,
        checkpoints: Checkpoints | None,
        num_steps: int,
        gpus: float,
        steps_ahead: int = 0,
        quiet: bool = False,
    ) -> None:
        self.ctx = ctx
        self.state = state
        self.recorder = recorder
        self.checkpoints = checkpoints
        self.num_steps = num_steps
        self.first_step = state.step
        self.conditions = StopConditions(ctx.config, gpus, state.elapsed, steps_ahead)
        self.stop = Stop.NO
        name = f"{ctx.stage_label} {ctx.config.algorithm_name}"
        self.progress = show_progress(name, "step", total=num_steps, done=state.step, quiet=quiet)
        self.quiet = quiet
        # An earlier attempt has pushed those of its checkpoint.
        self.pushed_alarms = {*state.alarms, *state.training_alarms}

    def iterate_steps(self) -> Iterator[int]:
        """Iterate over the steps that are left, until the last one, or the one with which the
        budget is spent: that becomes an alarm.
        """
        with self.progress:
            while self.state.step < self.num_steps:
                yield self.state.step  # ``finish_step`` counts it
                if self.stop is Stop.SPENT and self.state.step < self.num_steps:
                    self.state.alarms.append(
                        self.conditions.budget_message(self.state.step, self.num_steps)
                    )
                    logger.warning("%s %s", self.ctx.stage_label, self.state.alarms[-1])
                    break
        self._push_new_alarms()

    def _push_new_alarms(self) -> None:
        """Send alarms to the webhook when they ring, once, and not when the stage has ended."""
        for alarm in (*self.state.training_alarms, *self.state.alarms):
            if alarm not in self.pushed_alarms and not self.quiet:
                send_alert_in_background(
                    f"{self.ctx.recipe.name}, stage {self.ctx.stage_label}: {alarm}"
                )
            self.pushed_alarms.add(alarm)

    def finish_step(self, metrics: dict[str, float], **postfix: str) -> None:
        """Record the metrics of a step. All processes of a group finish a step together: they agree
        on what ends the stage.

        Args:
            postfix: what progress shows with the step.
        """
        self.recorder.log_metrics(metrics, self.state.step)
        self.state.step += 1
        self.state.elapsed = self.conditions.elapsed_seconds
        self.progress.set_postfix(postfix, refresh=False)
        self.progress.update()
        self.stop = self.conditions.check_after_step()
        self._push_new_alarms()

    @property
    def preempted(self) -> bool:
        """Whether the machine is taken away: save, and raise ``preemption_error()``."""
        return self.stop is Stop.LEAVE

    def preemption_error(self) -> Preempted:
        """Build the error with which a preempted stage ends, after its checkpoint."""
        saved = self.checkpoints is not None
        return Preempted(
            self.conditions.preemption_message(
                self.ctx.stage_label, self.state.step, self.num_steps, saved=saved
            )
        )

    def build_checkpoint_state(self) -> dict[str, Any]:
        """Build what a checkpoint holds apart from the training group's parts."""
        return {
            "state": self.state.state_dict(),
            "rows": self.recorder.metrics_rows,
            "num_steps": self.num_steps,
        }


def load_stage_state(
    checkpoint: Path,
    saved: dict[str, Any],
    state: StageState,
    recorder: MetricsRecorder,
    num_steps: int,
) -> None:
    """Continue from a checkpoint's state (``StageLoop.build_checkpoint_state``).

    Raises:
        CheckpointError: it is of training in another number of steps, as with another number of
            processes.
    """
    # The order of an offline stage's batches depends on the number of processes, so another number
    # of steps would train on some samples twice and on others never.
    if saved["num_steps"] != num_steps:
        raise CheckpointError(
            f"{checkpoint} is of training in {saved['num_steps']} steps, this one has {num_steps}:"
            " train with as many processes as before (EBBFLOW_TRAIN_PROCESSES), or remove it"
        )
    state.load_state_dict(saved["state"])
    recorder.resume_metrics(saved["rows"])
