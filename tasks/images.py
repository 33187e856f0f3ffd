"""The CPU image that Flyte builds when you register; the Dockerfiles are in containers/."""

from __future__ import annotations

from flytekit import ImageSpec
from flytekit.constants import CopyFileDetection


def build_cpu_image(registry: str) -> ImageSpec:
    """Describe what containers/base.Dockerfile builds, pushed to ``registry``. Paths are relative:
    register from the repository's root.
    """
    return ImageSpec(
        name="ebbflow",
        registry=registry,
        base_image=(
            "python:3.11.14-slim-bookworm"
            "@sha256:65a93d69fa75478d554f4ad27c85c1e69fa184956261b4301ebaf6dbb0a3543d"
        ),
        python_exec="/usr/local/bin/python",
        apt_packages=["tesseract-ocr", "wget"],
        requirements="containers/uv.txt",
        copy=[
            "pyproject.toml",
            "constraints.txt",
            "containers/environment/first_process.pth",
            "README.md",
            "LICENSE",
            "NOTICE",
            "datasets",
            "ebbflow",
            "tasks",
            "workflows",
        ],
        commands=[
            "cd /root && uv pip install --torch-backend cpu --constraints constraints.txt"
            " --config-settings editable_mode=compat --editable '.[all]'"
            " && cp containers/environment/first_process.pth"
            " /usr/local/lib/python3.11/site-packages",
        ],
        env={"MLFLOW_DISABLE_TELEMETRY": "true"},
        # Otherwise Flyte copies only the modules that registering loads, and the image gets another
        # tag than in a pod, where a dynamic looks it up.
        source_copy_mode=CopyFileDetection.NO_COPY,
    )
