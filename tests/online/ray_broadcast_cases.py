"""What the actors of test_ray_broadcast.py run: folders that do something to the process that asks for them."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from ray_cases import die, first

from ebbflow.online import broadcast, roles
from ebbflow.online.roles import Generator, Trainer

RECEIVE, GENERATE, BROADCAST = Generator.receive, Generator.generate, Trainer.broadcast
FLAT, WHOLE, CUT = broadcast._flat, broadcast._whole, broadcast.bucketize


def noted(folder: Path, notes: Path, dies: bool = False) -> Path:
    """``folder``; workers note how the weights came that they generate with. ``dies``: one dies after a part of step 1."""

    def generate(self: Generator, part: Any, weights: Any) -> Any:
        with (notes / ("broadcast" if weights.digest in self.sent else "store")).open("a") as file:
            file.write(f"{weights.version}\n")
        made = GENERATE(self, part, weights)
        if dies and part.step == 1 and first(notes / "generating"):
            die()
        return made

    Generator.generate = generate  # type: ignore[method-assign]
    return folder


def dying(folder: Path, notes: Path) -> Path:
    """``folder``; a worker dies generating, then one before it comes for a transfer, then one between two buckets of another."""

    def receive(self: Generator, expected: Any) -> Any:
        if (notes / "generating").exists() and first(notes / "before"):
            die()
        return RECEIVE(self, expected)

    def whole(flat: Any, expected: Any) -> Any:
        if (notes / "before").exists() and first(notes / "amid"):
            die()
        return WHOLE(flat, expected)

    Generator.receive, broadcast._whole = receive, whole  # type: ignore[method-assign]
    for module in (broadcast, roles):
        module.bucketize = partial(CUT, size=2**18)  # type: ignore[attr-defined]
    return noted(folder, notes, dies=True)


def hanging(folder: Path, notes: Path) -> Path:
    """``folder``; one worker does not come for its second transfer, in which it is not waited for long, until one has generated
    with weights from the store."""
    received, sent = [], []

    def send(self: Trainer, version: int, copy: str | None = None) -> Any:
        sent.append(version)
        if len(sent) == 2 and self.group:
            self.group = replace(self.group, timeout=1)
        return BROADCAST(self, version, copy)

    def receive(self: Generator, expected: Any) -> Any:
        received.append(expected)
        if len(received) == 2 and first(notes / "hung"):
            while not (notes / "store").exists():
                time.sleep(0.1)
        return RECEIVE(self, expected)

    Generator.receive, Trainer.broadcast = receive, send  # type: ignore[method-assign]
    return noted(folder, notes)


def damaging(folder: Path) -> Path:
    """``folder``; a byte of the second version is changed after its checksum was taken."""
    versions: set[int] = set()

    def send(self: Trainer, version: int, copy: str | None = None) -> Any:
        versions.add(version)
        return BROADCAST(self, version, copy)

    def flat(bucket: Any) -> torch.Tensor:
        values = FLAT(bucket)
        values[0] ^= len(versions) == 2
        return values

    Trainer.broadcast, broadcast._flat = send, flat  # type: ignore[method-assign]
    return folder
