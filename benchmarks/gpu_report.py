"""The results of ``benchmarks.gpu`` as a page."""

from __future__ import annotations

from typing import Any


def format_report(results: dict[str, Any]) -> str:
    """What was measured and where, as Markdown."""
    return "\n".join(
        [
            *_format_setting(results),
            "",
            *_format_speed(results["measured"]),
            "",
            *_format_ratio_errors(results["ratio_errors"]),
            "",
        ]
    )


def _format_setting(results: dict[str, Any]) -> list[str]:
    machine = results["machine"]
    flops = results["flops"]
    side = results["resolution"]
    compiled = ", compiled block by block" if results["compiled"] else ""
    on_cpu = " Memory is not measured on a CPU." if machine["device"] == "cpu" else ""
    # in units of 10^12, as accelerators are specified
    peak, forward, both, decode = (
        f"{value / 1e12:.3g}"
        for value in (
            results["peak_flops_per_second"],
            flops["forward"],
            flops["forward_and_backward"],
            flops["decode"],
        )
    )
    return [
        (
            f"Written by `{results['command']}` on {machine['device']}: torch {machine['torch']},"
            f" diffusers {machine['diffusers']}."
        ),
        "",
        (
            f"A transformer of {results['parameters'] / 1e6:.4g} million random weights in"
            f" {results['precision']}{compiled}; images of {side} x {side} pixels in"
            f" {results['steps']} steps, LoRA of rank {results['rank']}. *Peer* is plain diffusers"
            " around the same transformer: the pipeline's own loop, with its VAE in the network's"
            " precision (the adapter's is float32), and a plain training loop on the same rows."
            f" The ratio is that of images/s: above 1, this library is faster.{on_cpu}"
        ),
        "",
        (
            f"A large matrix product reaches {peak} TFLOP/s here. Shares are of that, for the FLOPs"
            f" that the work needs: {forward} TFLOP for a row forward, {both} forward and backward,"
            f" {decode} for an image's VAE; guidance takes two rows."
        ),
    ]


def _format_speed(measured: list[dict[str, Any]]) -> list[str]:
    names = [
        "phase",
        "guidance",
        "rows a pass",
        "images/s",
        "peer",
        "ratio",
        "rows/s",
        "share of peak",
        "peer",
        "GiB",
        "peer",
    ]
    return _format_table(names, [_format_speed_row(row) for row in measured])


def _format_speed_row(row: dict[str, Any]) -> list[str]:
    # ours and then the peer, in each pair of columns
    sides = row["ours"], row["peer"]
    loss_rows = row["ours"]["rows_per_second"]
    return [
        row["phase"],
        f"{row['guidance']}",
        f"{row['rows_per_pass']}",
        *(f"{side['images_per_second']:.3g}" for side in sides),
        f"{row['ratio']:.2f}",
        f"{loss_rows:.3g}" if loss_rows else "–",
        *(f"{side['share_of_peak']:.1%}" for side in sides),
        *(
            # None on a CPU
            "–" if side["peak_memory"] is None else f"{side['peak_memory'] / 2**30:.1f}"
            for side in sides
        ),
    ]


def _format_ratio_errors(errors: list[dict[str, Any]]) -> list[str]:
    names = [
        "rows a pass in the rollout",
        "in training",
        "mean of the log-probs",
        "mean of the log-densities",
        "largest",
    ]
    # Log-probs, means over elements, are what clip ranges are compared with; log-densities, sums
    # over elements, are what the rollout correction uses.
    keys = ["mean_log_prob", "mean_log_density", "max_log_density"]
    rows = [
        [f"{row['rollout_rows']}", f"{row['training_rows']}", *(f"{row[key]:.1e}" for key in keys)]
        for row in errors
    ]
    title = (
        "How far the first log-ratio of an update, in bfloat16, is from the 0 that it is in exact"
        " arithmetic:"
    )
    return [title, "", *_format_table(names, rows)]


def _format_table(names: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows)]
