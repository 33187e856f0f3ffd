"""The command line of the first hour: ``python -m benchmarks.first_hour``."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.first_hour.lines import Setting
from benchmarks.first_hour.page import build_json, format_page, summarize
from benchmarks.first_hour.parts import PARTS
from benchmarks.first_hour.runner import Outcome, measure_part, run_parts
from benchmarks.machine import describe_commit, describe_machine

DESCRIPTION = """Judge this machine's GPU in 25 minutes: whether Ebbflow computes right on it, how
fast, and whether its memory is what estimates say.

Needs one GPU of 80 GB, 64 GB of main memory, 25 GB of disk, and no network: all weights are
random. Without a GPU the same parts run on tiny networks, which proves the script and judges
nothing of a GPU.

Every line of the page is a verdict: passed, failed, or not measured, with the number, the bar and
the reason. A part that crashes or hangs ends alone, and its open lines count as failed. Start the
same command again to go on where it was stopped: finished parts are kept."""
EPILOG = "docs/first_hour.md says what each verdict means, and what to do after a failure."


def main() -> None:
    arguments = parse_arguments()
    setting = Setting(arguments.folder.resolve(), arguments.size or choose_size())
    if arguments.measure:
        measure_part(setting, arguments.measure)
        return
    start = time.monotonic()
    commit = describe_commit()
    outcomes: list[Outcome] = []
    # Written after each part: what is known survives a crash of this process, too.
    for outcome in run_parts(setting, arguments.minutes, commit, arguments.again):
        outcomes.append(outcome)
        machine = describe_run(commit, (time.monotonic() - start) / 60)
        page = format_page(outcomes, machine)
        (setting.folder / "first_hour.md").write_text(page)
        (setting.folder / "first_hour.json").write_text(
            json.dumps(build_json(outcomes, machine), indent=1) + "\n"
        )
    print(page)
    print(f"{summarize(outcomes)}: {setting.folder / 'first_hour.md'}", file=sys.stderr)
    if any(line.verdict == "failed" for outcome in outcomes for line in outcome.all_lines):
        sys.exit(1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_hour",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [part.name for part in PARTS]
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("runs/first_hour"),
        help="of the page, the JSON, logs, models and runs (%(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=25.0,
        help="for all parts; those that do not fit are not measured (%(default)s)",
    )
    parser.add_argument(
        "--again",
        nargs="+",
        choices=names,
        default=(),
        metavar="PART",
        help=f"measure these again and keep all others: {', '.join(names)}",
    )
    parser.add_argument(
        "--size",
        choices=("medium", "tiny"),
        help="of the networks (medium on a GPU, tiny on a CPU)",
    )
    # What ``run_parts`` starts: one part in a process of its own.
    parser.add_argument("--measure", choices=names, help=argparse.SUPPRESS)
    return parser.parse_args()


def choose_size() -> str:
    import torch

    return "medium" if torch.cuda.is_available() else "tiny"


def describe_run(commit: str, minutes: float) -> dict[str, Any]:
    """Describe the machine, the command and the versions, for the page."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    return describe_machine() | {
        "device": device,
        "torch": torch.__version__,
        "commit": commit,
        "command": shlex.join(["python", "-m", "benchmarks.first_hour", *sys.argv[1:]]),
        "minutes": minutes,
    }


if __name__ == "__main__":
    main()
