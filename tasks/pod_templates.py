"""Pod templates that are built when they are read: those who register a task or compile it read
them, and the pod that runs it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

from flytekit import PodTemplate

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec


class LazyPodTemplate(PodTemplate):
    """A pod template whose pod is built when it is first read.

    Importing Kubernetes' client takes as long as everything else that a short task imports of its
    own.

    Args:
        build: builds the pod.
    """

    def __init__(
        self,
        build: Callable[[], V1PodSpec],
        labels: dict[str, str] | None,
        annotations: dict[str, str],
    ) -> None:
        # Not the parent's, which assigns a pod.
        self.build = build
        self.primary_container_name = "primary"
        self.labels = labels
        self.annotations = annotations

    @cached_property
    def pod_spec(self) -> V1PodSpec:
        # Once: flytekit reads it, changes what it read, and reads it again.
        return self.build()
