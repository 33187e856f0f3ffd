"""A stage kind: the average of the policy and the base model (WiSE-FT, 2109.01903), which takes
back some of what was learnt.
"""

from __future__ import annotations

from ebbflow.data.records import StageRecord
from ebbflow.stage import MetricsRecorder, StageContext, StageFolders
from ebbflow.timing import Clock
from ebbflow.training.policy_io import load_policy, save_policy
from ebbflow.training.update import PolicyUpdater


def average_with_base(
    ctx: StageContext, folders: StageFolders, recorder: MetricsRecorder
) -> StageRecord:
    """theta <- share theta + (1 - share) theta_base; ``options.share`` is .5 by default."""
    share = float(ctx.config.options.get("share", 0.5))
    clock = Clock()
    with clock.measure_phase("training"):
        policy, metadata = load_policy(ctx, folders.base, folders.policy)
        policy.blend_copy("reference", decay=1 - share)  # the copy that is always the base model
        policy.assign_parameters(policy.copies["reference"])
    recorder.log_metrics({"soup/share": share}, step=0)
    updater = PolicyUpdater(policy, ctx.config, metadata)
    record = StageRecord(
        label=ctx.stage_label,
        algorithm=ctx.config.algorithm_name,
        samples=0,
        optimizer_steps=0,
        seconds=clock.seconds,
    )
    save_policy(ctx, updater, metadata, record, folders.output)
    return record
