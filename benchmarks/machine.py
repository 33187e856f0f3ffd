"""What a benchmark ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any


def describe_machine() -> dict[str, Any]:
    """Processor, cores and versions, for the results."""
    # platform.processor() is empty or "x86_64" on most Linux systems
    cpu = next(
        (line.split(":")[1].strip() for line in _read_cpuinfo() if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


def describe_commit() -> str:
    """Describe the commit of the code that is measured, with ``-dirty`` where it was changed."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def _read_cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
