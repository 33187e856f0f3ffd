"""A process that holds a lock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HOLDER = "\n".join(
    [
        "import sys",
        "from pathlib import Path",
        "from ebbflow.storage.locks import lock_folder",
        "with lock_folder(Path(sys.argv[1])):",
        "    print('has it', flush=True)",
        "    input()",
    ]
)


def locked_elsewhere(folder: Path | str) -> subprocess.Popen[str]:
    """Another process that has locked the folder, until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "has it\n"
    return process
