"""The image of CPU tasks, built and run: nothing here runs without podman or docker (``make
test-containers``).
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = "EBBFLOW_CONTAINER_TOOL"
OPTIONS = "EBBFLOW_BUILD_OPTIONS"
IMAGE = "ebbflow-base:test"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def image() -> str:
    """The base image, as its tag; layers of an earlier build are used again."""
    if TOOL not in os.environ:
        pytest.skip(
            f"{TOOL} is not set: `make test-containers` builds the base image with podman or"
            " docker, and tests it"
        )
    return build_base_image()


def build_base_image(tag: str = IMAGE) -> str:
    """``tag``."""
    options = shlex.split(os.environ.get(OPTIONS, ""))
    command = [
        os.environ[TOOL],
        "build",
        *options,
        "--file",
        "containers/base.Dockerfile",
        "--tag",
        tag,
        ".",
    ]
    built = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600
    )
    assert built.returncode == 0, built.stdout[-5000:]
    return tag


@pytest.fixture(scope="session")
def run(image: str) -> Run:
    """``run(*command, text=..., user=...)``: a command in a container that can write to /tmp alone
    and has no network.
    """
    tool = os.environ[TOOL]
    # What podman adds by itself, and Kubernetes does not: places to write to, and a name for the
    # user.
    bare = [
        "--read-only",
        *(["--read-only-tmpfs=false", "--passwd=false"] if Path(tool).name == "podman" else []),
    ]
    options = [
        "--rm",
        "--interactive",
        *bare,
        "--tmpfs",
        "/tmp:exec",
        "--network",
        "none",
        "--workdir",
        "/tmp",
    ]

    def started(
        *command: str, text: str = "", user: str = "1000"
    ) -> subprocess.CompletedProcess[str]:
        whole = [tool, "run", *options, "--user", user, image, *command]
        return subprocess.run(whole, input=text, capture_output=True, text=True, timeout=1800)

    return started
