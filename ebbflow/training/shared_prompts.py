"""Prompts that the processes of a machine encode together: each a share, and all read the same
files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack

from ebbflow.data.prompts import Prompt
from ebbflow.models import Model
from ebbflow.models.base import device_of
from ebbflow.models.encoding import (
    EMBEDDINGS,
    Embeddings,
    Encode,
    PromptWindows,
    open_embeddings,
    write_embeddings,
)
from ebbflow.storage.disk import open_scratch_folder, path_of_scratch_folder
from ebbflow.training.distributed import Ranks, broadcast_first_of_node


def encode_prompts_together(
    model: Model, prompts: Iterable[Prompt], negatives: bool = False
) -> Embeddings:
    """Encode every different prompt once on each machine; all processes of the group call it.

    Args:
        negatives: as of ``embed_prompts``.
    """
    ranks = Ranks.current()
    with ExitStack() as stack:
        process = broadcast_first_of_node(os.getpid())
        if ranks.local_rank == 0:
            folder = stack.enter_context(open_scratch_folder(EMBEDDINGS))
        else:
            folder = path_of_scratch_folder(EMBEDDINGS, process)
        ranks.wait_for_all()  # the first process of each machine has made the folder
        written_prompts = write_embeddings(
            model, prompts, folder, negatives, ranks.local_rank, ranks.ranks_per_node
        )
        ranks.wait_for_all()  # all shares of the prompts are written
        embeddings = open_embeddings(folder, written_prompts)
        ranks.wait_for_all()  # all have opened the files, and the first process removes their names
    return embeddings


def encode_windows_together(
    model: Model, windows: PromptWindows, steps: range, negatives: bool = False
) -> None:
    """``encode_prompts_together`` of the windows of some steps, as far as they are not encoded."""
    for window in windows.list_missing(steps):
        windows.add(window, encode_prompts_together(model, window.list_prompts(), negatives))


def build_shared_lookup(model: Model, prompts: Iterable[Prompt]) -> Encode:
    """``encode_prompts_together`` now; the result looks up the conditioning of any of the prompts,
    on the model's device.
    """
    embeddings = encode_prompts_together(model, prompts)
    device = device_of(model)
    return lambda wanted: embeddings(wanted).to(device)
