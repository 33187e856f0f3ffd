"""Machines made of containers: each has an address of its own on a network that leads nowhere, and
runs a node of Ray.

Containers are what pods are: any user, a root filesystem that cannot be written, ``/tmp`` of their
own. The network's gateway is this machine, where the stores of a test listen.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

NETWORK = "ray-ebbflow"
SUBNET = "10.213.77"
GATEWAY = f"{SUBNET}.1"
HEAD = f"{SUBNET}.10"
CPUS = {"head": 0, "training": 2, "rollouts": 1}
"""Cores that each machine offers to Ray: the training rank fits on one alone, all other workers on
the other.
"""
PROBE = "wget -T 2 -q -O- http://127.0.0.1:52365/api/local_raylet_healthz | grep success"
"""What KubeRay runs in every pod of a cluster to learn whether it is ready."""
DASHBOARD = "http://127.0.0.1:8265"


@dataclass(frozen=True)
class Machines:
    """Containers on the network.

    Args:
        tool: podman or docker.
        environment: of every container.
    """

    tool: str
    image: str
    environment: Mapping[str, str]
    free: Iterator[int] = field(default_factory=lambda: count(11))
    """Last numbers of addresses that no machine has had."""

    @contextmanager
    def network(self) -> Iterator[None]:
        """The network; its gateway is there as long as it has a container."""
        self._end()
        self._do(
            "network",
            "create",
            "--internal",
            "--subnet",
            f"{SUBNET}.0/24",
            "--gateway",
            GATEWAY,
            NETWORK,
        )
        try:
            self.start("gateway", f"{SUBNET}.2", "sleep", "infinity")
            yield
        finally:
            self._end()

    @contextmanager
    def ray_cluster(self) -> Iterator[None]:
        """A head without cores and two workers, once all of them answer."""
        try:
            for name in CPUS:
                self.add(name)
            yield
        finally:
            for name in CPUS:
                self.remove(name)

    def add(self, name: str) -> None:
        """A node of Ray, started as KubeRay starts it, once it answers."""
        head = name == "head"
        joins = ["--head"] if head else ["--address", f"{HEAD}:6379"]
        options = [
            "--num-cpus",
            str(CPUS[name]),
            "--object-store-memory",
            str(100 * 2**20),
            "--disable-usage-stats",
            "--block",
        ]
        self.start(
            name, HEAD if head else f"{SUBNET}.{next(self.free)}", "ray", "start", *joins, *options
        )
        while self.execute(name, "sh", "-c", PROBE, log=Path(os.devnull)).wait(60):
            running = self._do("inspect", "--format", "{{.State.Running}}", _full(name))
            assert running.strip() == "true", self._do("logs", "--tail", "50", _full(name))
            time.sleep(0.5)

    def submit(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        """A command as a job of Ray, under way."""
        return self.execute(
            "head", "ray", "job", "submit", "--address", DASHBOARD, "--", *command, log=log
        )

    def start(self, name: str, address: str, *command: str) -> None:
        podman = ["--read-only-tmpfs=false"] if Path(self.tool).name == "podman" else []
        pod = [
            "--user",
            "1000",
            "--read-only",
            *podman,
            "--tmpfs",
            "/tmp:exec",
            "--shm-size",
            "256m",
        ]
        variables = [f"--env={key}={value}" for key, value in self.environment.items()]
        options = [
            "--detach",
            "--pull",
            "never",
            "--network",
            NETWORK,
            "--ip",
            address,
            "--name",
            _full(name),
            *pod,
            *variables,
        ]
        self._do("run", *options, self.image, *command)

    def execute(self, name: str, *command: str, log: Path) -> subprocess.Popen[bytes]:
        """A command in a container, under way; ``log``: what it prints."""
        with log.open("wb") as file:
            return subprocess.Popen(
                [self.tool, "exec", _full(name), *command], stdout=file, stderr=subprocess.STDOUT
            )

    def remove(self, name: str) -> None:
        """End a machine with all its processes, without a warning."""
        self._do("kill", _full(name), required=False)
        self._do("rm", "--force", _full(name), required=False)

    def _end(self) -> None:
        for name in (*CPUS, "gateway"):
            self.remove(name)
        self._do("network", "rm", NETWORK, required=False)

    def _do(self, *command: str, required: bool = True) -> str:
        done = subprocess.run(
            [self.tool, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0 or not required, f"{command}: {done.stdout[-3000:]}"
        return done.stdout


def _full(name: str) -> str:
    return f"{NETWORK}-{name}"
