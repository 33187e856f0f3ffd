"""A plan of an online stage as text for people."""

from __future__ import annotations

import math
from pathlib import Path
from typing import get_args

from ebbflow.estimate.gpus import GPU_TYPES
from ebbflow.estimate.plan import (
    GPUS_PER_NODE,
    OnlineWork,
    Plan,
    PlanError,
    TaskTimes,
    build_online_work,
    estimate_task_times,
    explain_scaling_limit,
    find_best_plan,
    find_scaling_limit,
    list_gpu_counts,
    plan_colocated,
    read_task_times,
)
from ebbflow.estimate.plan_settings import describe_settings
from ebbflow.estimate.run import Estimate
from ebbflow.estimate.text import format_table
from ebbflow.recipe.online import Mode
from ebbflow.stage import StageContext

MODES: tuple[Mode, ...] = get_args(Mode)
COLOCATED_MODES: tuple[Mode, ...] = ("sync", "one_step_off")
"""As in one process, ``async`` would hide no more than ``one_step_off`` does."""
DEFAULT_GPU = "h100"


def describe_plans(
    estimate: Estimate,
    gpus: int,
    tflops: float | None,
    timeline: Path | None,
    network: float,
    gpu: str = DEFAULT_GPU,
    price: float | None = None,
) -> str:
    """``describe_plan`` of every online stage of a recipe; of the first alone, where a timeline
    says what its tasks take.

    Args:
        tflops: what a GPU sustains; default: ``GpuType.sustained_tflops``.
        gpu: its type, of ``GPU_TYPES``.
        price: of an hour of a GPU.

    Raises:
        PlanError: there is no online stage, both of ``tflops`` and ``timeline`` are given, or as
            ``find_best_plan``.
    """
    # Each of them says how long tasks take.
    if tflops and timeline:
        raise PlanError("say how long tasks take, by either --tflops or --timeline")
    contexts = [
        StageContext(estimate.recipe, 0, index)
        for index, stage in enumerate(estimate.recipe.stages)
        if stage.kind == "online"
    ]
    if not contexts:
        raise PlanError(
            f"{estimate.recipe.name} has no online stage; offline stages scale with their shards"
            " and train_nodes"
        )
    texts = []
    # A timeline is of one stage, and does not say which.
    for ctx in contexts[: 1 if timeline else None]:
        work = build_online_work(estimate, ctx)
        times = (
            read_task_times(work, timeline, network)
            if timeline
            else estimate_task_times(
                estimate, work, tflops or GPU_TYPES[gpu].sustained_tflops, network
            )
        )
        texts.append(describe_plan(estimate, work, times, gpus, gpu, price))
    return "\n\n".join(texts)


def describe_plan(
    estimate: Estimate,
    work: OnlineWork,
    times: TaskTimes,
    gpus: int,
    gpu: str = DEFAULT_GPU,
    price: float | None = None,
) -> str:
    """What all GPUs together do in a step, the best splits of so many GPUs, and of fewer.

    Raises:
        PlanError: there are fewer GPUs than roles that need one.
    """
    # One GPU for each role that needs one.
    smallest = 3 if work.ctx.online_config.resources.reward.gpus and times.scoring else 2
    sizes = [size for size in list_gpu_counts(gpus) if size >= smallest] or [gpus]
    plans = {
        size: {mode: find_best_plan(work, times, mode, size) for mode in MODES} for size in sizes
    }
    together = [plan_colocated(work, times, mode, gpus) for mode in COLOCATED_MODES]
    compared = [*together, *plans[gpus].values()]
    best = min(plans[gpus].values(), key=lambda plan: plan.schedule.step)
    rounds = estimate.recipe.count_rounds(work.ctx.stage)
    lines = [
        (
            f"{work.ctx.stage_label} {work.ctx.config.algorithm_name}: {work.samples:,} samples a"
            f" step in {work.requests:,} requests, {work.groups:,} groups for the ranks in each of"
            f" {work.ctx.online_config.updates_per_step} updates"
        ),
        (
            f"  seconds of one worker: a request {times.rollout:.3g}, its rewards"
            f" {times.scoring:.3g}; a step's training on one rank {times.training:.3g}; between"
            f" steps {times.between:.3g}"
        ),
        "",
        *_describe_comparison(work, compared, gpus, rounds, price),
        "",
        *_describe_fastest(estimate, work, compared, gpus, gpu),
        *_describe_reward_workers(work, times, best),
        "",
        "seconds of a step with fewer GPUs, and how much of them is used, against the fewest",
        *format_table(
            ["GPUs", *(f"{mode} {what}" for mode in MODES for what in ("s", "efficiency"))],
            [[f"{size:,}", *_format_efficiency(plans, size, sizes[0])] for size in sizes],
        ),
        "",
        *(
            _describe_scaling_limit(work, times, mode, {size: plans[size][mode] for size in sizes})
            for mode in MODES
        ),
    ]
    return "\n".join(lines)


def _describe_fastest(
    estimate: Estimate, work: OnlineWork, plans: list[Plan], gpus: int, gpu: str
) -> list[str]:
    """Return the keys of the fastest plan on policy, and of the fastest of all if that is another:
    older samples are a choice that costs learning.
    """
    on_policy = [plan for plan in plans if not work.steps_ahead(plan.mode)]
    lines = []
    for what, some in (("on policy", on_policy), ("of all", plans)):
        fastest = min(some, key=lambda plan: plan.schedule.step)
        if what == "of all" and fastest in on_policy:
            continue
        label = _format_label(work, fastest)
        lines += [
            f"fastest {what}: {label}, {fastest.schedule.step:.3g} s a step",
            *describe_settings(estimate, work, fastest, gpus, gpu),
            "",
        ]
    return lines


def _describe_comparison(
    work: OnlineWork, plans: list[Plan], gpus: int, rounds: int, price: float | None
) -> list[str]:
    header = ["", "training", "rollout", "reward", "unused", "step s", "samples/s", *_BUSY]
    header += ["staleness", "push GB", "GPU-hours"]
    if price:
        header.append("price")
    return [
        f"{gpus:,} GPUs colocated, and the best split of them in each mode",
        *format_table(header, [_format_row(work, plan, gpus, rounds, price) for plan in plans]),
        (
            "  Busy: the share of the time in which the workers of a role work. Push: to all"
            f" rollout nodes, in a step. GPU-hours: of all steps, and of all rounds ({rounds})."
        ),
    ]


_BUSY = ("training busy", "rollout busy", "reward busy")


def _format_label(work: OnlineWork, plan: Plan) -> str:
    label = f"{plan.mode} ({work.steps_ahead(plan.mode)} ahead)"
    return f"colocated {label}" if plan.colocated else label


def _format_row(
    work: OnlineWork, plan: Plan, gpus: int, rounds: int, price: float | None
) -> list[str]:
    split = plan.split
    schedule = plan.schedule
    nodes = 0 if plan.colocated else math.ceil(split.rollout / GPUS_PER_NODE)
    gpu_hours = gpus * schedule.step * work.ctx.online_config.steps * rounds / 3600
    cells = [
        _format_label(work, plan),
        *(f"{count:,}" for count in (*split, gpus - plan.num_gpus)),
        f"{schedule.step:.3g}",
        f"{work.samples / schedule.step:.3g}",
        *(f"{share:.0%}" for share in (schedule.training, schedule.rollout)),
        f"{schedule.reward:.0%}" if split.reward else "-",
        f"{schedule.staleness:.2g}",
        f"{work.pushed * nodes / 1e9:.3g}",
        f"{gpu_hours:.3g}",
    ]
    if price:
        cells.append(f"{gpu_hours * price:,.2f}")
    return cells


def _describe_reward_workers(work: OnlineWork, times: TaskTimes, best: Plan) -> list[str]:
    if not times.scoring:
        return ["  Rewards are not counted: only a timeline says how long they take."]
    if best.split.reward:
        return []
    needed = math.ceil(work.requests * times.scoring / best.schedule.step)
    return [
        f"  Rewards run on CPUs (resources.reward.gpus is 0): {needed:,} reward workers keep up"
        " with the fastest mode."
    ]


def _format_efficiency(plans: dict[int, dict[Mode, Plan]], size: int, smallest: int) -> list[str]:
    cells = []
    for mode in MODES:
        step = plans[size][mode].schedule.step
        # 100 % where n times the GPUs make a step n times as fast.
        first = plans[smallest][mode].schedule.step
        cells += [f"{step:.3g}", f"{first * smallest / step / size:.0%}"]
    return cells


def _describe_scaling_limit(
    work: OnlineWork, times: TaskTimes, mode: Mode, plans: dict[int, Plan]
) -> str:
    last = find_scaling_limit(plans)
    if last == max(plans):
        return f"{mode} scales to all {last:,} GPUs"
    # The plan just above the limit is the one that shows what it waits for.
    after = min(size for size in plans if size > last)
    return (
        f"{mode} scales to about {last:,} GPUs: {explain_scaling_limit(work, times, plans[after])}"
    )
