"""Evaluations and rollouts whose pictures have a grey level each, so that a simulated rater can see
which is brighter.
"""

from __future__ import annotations

import io
import json
import queue
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock
from urllib.parse import urljoin

import numpy as np
import pyarrow as pa
import torch
import uvicorn
from PIL import Image

from ebbflow.data.images import encode_pngs
from ebbflow.data.prompts import Prompt
from ebbflow.data.schema import PROMPTS, build_evaluation_schema, build_rollout_schema
from ebbflow.labeling import server
from ebbflow.labeling.session import Session, Settings, open_session
from ebbflow.labeling.sources import LabelTask, load_comparison
from ebbflow.offline.shards import build_layout_metadata, build_rollout_batch
from ebbflow.storage.tables import write_table

LATENT = (1, 16, 32)
"""Of the glyph model."""


def grey(level: int, height: int = 16, width: int = 32) -> bytes:
    return encode_pngs(np.full((1, height, width, 3), level, np.uint8))[0]


def level(png: bytes) -> int:
    with Image.open(io.BytesIO(png)) as image:
        return image.getpixel((0, 0))[0]


def write_evaluation(
    path: Path,
    label: str,
    levels: Sequence[int],
    prompts: Sequence[str] | None = None,
    split: str = "held_out",
    **size: int,
) -> Path:
    """One sample per prompt with these grey levels."""
    rows = [
        {
            "prompt_id": index,
            "sample": 0,
            "split": split,
            "prompt": prompts[index] if prompts else f"prompt {index}",
        }
        | {"target": None, "image": grey(value, **size), "reward": 0.5, "failure": None}
        for index, value in enumerate(levels)
    ]
    schema = build_evaluation_schema(["reward"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_table(
        path,
        schema,
        [pa.RecordBatch.from_pylist(rows, schema)],
        {"label": label, "recipe_digest": "d"},
    )
    return path


def make_comparison(
    folder: Path, candidate_wins: Sequence[bool], prompts: Sequence[str] | None = None
) -> LabelTask:
    """A task in which the candidate's picture is the brighter one where it wins."""
    bright = [200 if wins else 60 for wins in candidate_wins]
    champion = write_evaluation(
        folder / "champion.parquet",
        "before",
        [120 + index % 9 for index in range(len(bright))],
        prompts,
    )
    candidate = write_evaluation(folder / "candidate.parquet", "1.1 online", bright, prompts)
    return load_comparison(champion, candidate, max_pairs=1000, seed=0)


def write_rollouts(
    folder: Path, groups: int, group_size: int, shards: int = 2, stage: str = "1.2 offline"
) -> tuple[list[Path], Path]:
    """Shards whose pictures and latents have a different level each, and their prompt table."""
    texts = [f'"WO{index}"' for index in range(groups)]
    prompts = [
        Prompt(index, text, "", text.strip('"'), "test", "train", "{}")
        for index, text in enumerate(texts)
    ]
    write_table(
        folder / "prompts.parquet",
        PROMPTS,
        [pa.RecordBatch.from_pylist([vars(one) for one in prompts], PROMPTS)],
        {},
    )
    paths = []
    for shard in range(shards):
        keys = [
            (prompt, sample)
            for prompt in range(shard, groups, shards)
            for sample in range(group_size)
        ]
        levels = [20 + 7 * prompt + 3 * sample for prompt, sample in keys]
        latents = torch.stack([torch.full(LATENT, value / 127.5 - 1) for value in levels])
        prompt_ids, samples = zip(*keys, strict=True)
        batch = build_rollout_batch(
            prompt_ids, samples, 4, latents, [grey(value) for value in levels], "float32"
        )
        path = folder / f"rollouts-{shard}.parquet"
        write_table(
            path,
            build_rollout_schema(LATENT),
            [batch],
            {"stage": stage, "shard": shard} | build_layout_metadata(LATENT),
        )
        paths.append(path)
    return paths, folder / "prompts.parquet"


def brighter(session: Session, rater: str, pair: str) -> str:
    """What a rater says who looks at the two sides and prefers the brighter one."""
    left, right = (level(session.picture_on_side(rater, pair, side)) for side in ("left", "right"))
    return "tie" if left == right else "left" if left > right else "right"


def rate(session: Session, rater: str, count: int | None = None) -> int:
    """Let a rater answer the next pairs; returns how many there were."""
    done = 0
    while (upcoming := session.list_upcoming_pairs(rater)) and done != count:
        session.record_answer(rater, upcoming[0].key, brighter(session, rater, upcoming[0].key))
        done += 1
    return done


@contextmanager
def opened(
    task: LabelTask, folder: Path, all_pairs: bool = False, **settings: float
) -> Iterator[Session]:
    with open_session(task, folder, Settings(**settings), all_pairs) as session:
        yield session


@contextmanager
def serving(session: Session) -> Iterator[str]:
    """The server of ``ebbflow label`` in a thread: its address."""
    made: list[uvicorn.Server] = []
    addresses: queue.Queue[str] = queue.Queue()

    def remember(config: uvicorn.Config) -> uvicorn.Server:
        made.append(uvicorn.Server(config))
        return made[0]

    with mock.patch.object(
        server, "uvicorn", SimpleNamespace(Config=uvicorn.Config, Server=remember)
    ):
        thread = threading.Thread(
            target=server.run_label_server,
            args=(session, "127.0.0.1", 0, addresses.put),
            daemon=True,
        )
        thread.start()
        try:
            yield addresses.get(timeout=30)
        finally:
            made[0].should_exit = True
            thread.join(30)


def send_answers(address: str, rater: str, count: int) -> int:
    """Answer the next pairs with ties, as the page does; returns how many there were."""
    headers = {"Content-Type": "application/json", "Origin": urljoin(address, "/").rstrip("/")}
    for done in range(count):
        pair = json.loads(
            urllib.request.urlopen(f"{address}state?rater={rater}", timeout=30).read()
        )["pair"]
        if pair is None:
            return done
        body = json.dumps({"rater": rater, "pair": pair["key"], "answer": "tie"}).encode()
        urllib.request.urlopen(
            urllib.request.Request(f"{address}answer", body, headers), timeout=30
        ).read()
    return count
