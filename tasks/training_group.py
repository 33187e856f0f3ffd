"""What every rank of a training task does around its training: it joins the group, waits for the
inputs, and lets rank 0 alone write to MLflow.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ebbflow.data.records import StageRecord, TrackedRun
from tasks.branches import first_logged_step
from tasks.files import make_node_output
from tasks.preemption import retry_on_errors
from tasks.types import TrainedPolicy

if TYPE_CHECKING:
    from ebbflow.stage import MetricsRecorder, StageContext
    from ebbflow.tracking.child_run import RunLogger
    from ebbflow.training.distributed import Ranks


class GroupMember(NamedTuple):
    """This process in the group of a stage, between joining it and the end of the stage.

    Attributes:
        policy_folder, metrics_file: where the stage writes; rank 0's are what the task returns.
        run_logger: of the stage's node in MLflow; None on all ranks but 0.
    """

    ranks: Ranks
    policy_folder: Path
    metrics_file: Path
    recorder: MetricsRecorder
    run_logger: RunLogger | None

    def wait_for_inputs(self) -> float:
        """Wait until the first rank of each machine has downloaded the inputs; return the seconds
        since the processes were launched.
        """
        from ebbflow.training.distributed import seconds_since_launch

        self.ranks.wait_for_all()
        return seconds_since_launch()

    def finish_stage(
        self, policy: TrainedPolicy, record: StageRecord, starting: float
    ) -> TrainedPolicy:
        """Log the stage, write its metrics, and return its policy.

        Args:
            policy: that the stage began with.
            starting: seconds that the processes took to start.
        """
        from ebbflow.tracking.nodes import log_stage

        seconds = {"process_start": starting, **record.seconds}
        record = record.model_copy(update={"seconds": seconds})
        if self.run_logger:
            log_stage(self.run_logger, record)
            self.recorder.write_json(self.metrics_file)
        return TrainedPolicy.from_stage(
            policy, self.policy_folder, self.metrics_file, record, record.steps
        )


@contextmanager
def join_training_group(
    ctx: StageContext, run: TrackedRun, policy: TrainedPolicy, *, main_memory: bool
) -> Iterator[GroupMember]:
    """Join the group that the environment announces; a preemption and a lost peer are retried.

    Args:
        policy: that the stage begins with.
        main_memory: whether tensors in main memory travel between ranks, too.
    """
    from ebbflow.compute import set_up_process
    from ebbflow.stage import MetricsRecorder
    from ebbflow.tracking.child_run import open_node_run
    from ebbflow.training.distributed import PeerLost, enter_phase, join_process_group
    from ebbflow.training.stop_conditions import Preempted

    set_up_process(ctx.recipe)  # before NCCL starts
    # Before any rank of this machine writes: what a killed attempt left there is removed.
    policy_folder = make_node_output(run, ctx.stage_label, "policy")
    metrics_file = make_node_output(run, ctx.stage_label, "metrics.json")
    with (
        retry_on_errors(Preempted, PeerLost),
        join_process_group(main_memory) as ranks,
        # MLflow has one writer: every rank would add a run of its own.
        open_node_run(run, ctx.stage_label, first_logged_step(ctx, policy))
        if ranks.rank == 0
        else nullcontext() as run_logger,
    ):
        enter_phase("downloading the inputs")
        recorder = MetricsRecorder(run_logger)
        yield GroupMember(ranks, policy_folder, metrics_file, recorder, run_logger)
