"""Encodes prompts ahead of the steps that need them: embeddings wait in memory-mapped files, so
that neither they nor the text encoders take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ebbflow.data.prompt_windows import PromptWindow
from ebbflow.data.prompts import Prompt
from ebbflow.models.base import Conditioning, Model, ModelError, device_of
from ebbflow.storage.disk import open_scratch_folder

Encode = Callable[[Sequence[Prompt]], Conditioning]
Key = tuple[str, str, bytes | None]
PROMPTS_PER_FILE = 512
"""These are encoded together, and are in memory until their file is written."""
EMBEDDINGS = "embeddings"
"""Name of the folder of these files, which is gone once they are open."""
POSITIVE = "positive/"
NEGATIVE = "negative/"


@dataclass(frozen=True)
class Embeddings:
    """Encoded prompts on the CPU, a row for each different one.

    Attributes:
        tables: of ``PROMPTS_PER_FILE`` prompts each, but for the last; padded to the longest prompt
            of their own.
        row: of each prompt, over all tables.

    Example:
        600 prompts are tables of 512 and 88 rows; row 515 is row 3 of the second table::

            embeddings = embed_prompts(model, prompts)
            conditioning = embeddings(prompts[512:516])
            conditioning["embeds"].shape  # [4, 333, 4096], of SD3
    """

    tables: list[Conditioning]
    row: dict[Key, int]

    def __call__(self, prompts: Sequence[Prompt]) -> Conditioning:
        """The conditioning of some of these prompts, a row each, padded to the longest prompt of
        all.
        """
        rows = torch.tensor([self.row[_prompt_key(prompt)] for prompt in prompts])
        if len(self.tables) == 1:
            return self.tables[0].select_rows(rows)
        return _select_rows(self.tables, rows)

    def with_gradient(self, negative_gradient: bool) -> Embeddings:
        """The same rows, whose conditioning has this ``negative_gradient``."""
        tables = [replace(table, negative_gradient=negative_gradient) for table in self.tables]
        return replace(self, tables=tables)


class PromptWindows:
    """The encoded prompts of the steps that a stage is at, a window of steps at a time.

    Prompts are padded to the longest of their window. A step is in the same window in every
    attempt, so that a stage that resumes pads as one that was never killed. Prompts that were
    chosen too late for a window are encoded by themselves, when they are asked for, and padded to
    the longest of those that were asked for with them.

    Args:
        windows: of all steps, or none before a stage knows their prompts.
        negative_gradient: of the conditioning that it gives, as ``Conditioning``.

    Example:
        ::

            windows = PromptWindows(sampler.list_windows())
            for window in windows.list_missing(range(step, step + 2)):
                windows.add(window, embed_prompts(model, window.list_prompts()))
            conditioning = windows(step, prompts)
    """

    def __init__(self, windows: Sequence[PromptWindow], negative_gradient: bool = True) -> None:
        self.windows = windows
        self.negative_gradient = negative_gradient
        self._embeddings: dict[range, Embeddings] = {}
        self._late_embeddings: Embeddings | None = None

    def list_missing(self, steps: range) -> list[PromptWindow]:
        """List the windows of some steps that are not yet encoded, and forget all other windows
        and all late prompts.
        """
        needed = [
            window
            for window in self.windows
            if window.steps.start < steps.stop and steps.start < window.steps.stop
        ]
        # Forgotten before the next ones are encoded: what no request holds leaves the disk. Late
        # prompts are forgotten at the same points in every attempt, so that what is found here,
        # and so its padding, does not depend on where a stage was killed.
        self._late_embeddings = None
        self._embeddings = {
            window.steps: self._embeddings[window.steps]
            for window in needed
            if window.steps in self._embeddings
        }
        return [window for window in needed if window.steps not in self._embeddings]

    def add(self, window: PromptWindow, embeddings: Embeddings) -> None:
        """Keep the encoded prompts of a window until ``list_missing`` forgets it."""
        self._embeddings[window.steps] = embeddings.with_gradient(self.negative_gradient)

    def add_late(self, embeddings: Embeddings) -> None:
        """Keep encoded prompts that the window of their step has not, in place of earlier ones,
        until ``list_missing`` forgets them.
        """
        self._late_embeddings = embeddings.with_gradient(self.negative_gradient)

    def find_embeddings(self, step: int, prompts: Sequence[Prompt]) -> Embeddings | None:
        """Find what has all of these prompts of a step encoded: the window of the step or late
        prompts; None where neither has.
        """
        keys = {_prompt_key(prompt) for prompt in prompts}
        candidates = [embeddings for steps, embeddings in self._embeddings.items() if step in steps]
        if self._late_embeddings:
            candidates.append(self._late_embeddings)
        return next((one for one in candidates if keys <= one.row.keys()), None)

    def __call__(self, step: int, prompts: Sequence[Prompt]) -> Conditioning:
        """The conditioning of some prompts of a step, a row each, padded to the longest of the
        window.
        """
        embeddings = self.find_embeddings(step, prompts)
        assert embeddings is not None, f"prompts of step {step} are not encoded"
        return embeddings(prompts)


def embed_prompts(model: Model, prompts: Iterable[Prompt], negatives: bool = False) -> Embeddings:
    """Encode every different prompt, in this process.

    Args:
        negatives: with its negative prompt, even if the model generates without guidance.

    Raises:
        ModelError: ``negatives`` of a family without classifier-free guidance.
    """
    # The folder is gone at once. A file without a name stays on the disk as long as it is mapped,
    # and no longer, however the process ends.
    with open_scratch_folder(EMBEDDINGS) as folder:
        return open_embeddings(folder, write_embeddings(model, prompts, folder, negatives))


def build_prompt_lookup(model: Model, prompts: Iterable[Prompt], negatives: bool = False) -> Encode:
    """``embed_prompts`` now; the result looks up the conditioning of any of the prompts, on the
    model's device.
    """
    embeddings = embed_prompts(model, prompts, negatives)
    device = device_of(model)
    return lambda wanted: embeddings(wanted).to(device)


def write_embeddings(
    model: Model,
    prompts: Iterable[Prompt],
    folder: Path,
    negatives: bool = False,
    rank: int = 0,
    world: int = 1,
) -> list[Prompt]:
    """Encode every different prompt into files, this process one of ``world`` files; returns the
    prompts in their order.

    Args:
        negatives: as of ``embed_prompts``.

    Raises:
        ModelError: ``negatives`` of a family without classifier-free guidance.
    """
    # Every process derives the same list, and so the same rows, from the same prompts.
    unique = list({_prompt_key(prompt): prompt for prompt in prompts}.values())
    for number, part in list(enumerate(_split_by_file(unique)))[rank::world]:
        table = _encode_table(model, part, negatives)
        tensors = {POSITIVE + name: values for name, values in table.tensors.items()}
        if table.negative is not None:
            tensors |= {NEGATIVE + name: values for name, values in table.negative.tensors.items()}
        # The library refuses views and tensors that share memory.
        plain = {
            name: values.clone(memory_format=torch.contiguous_format)
            for name, values in tensors.items()
        }
        # repr, since metadata of safetensors is text: it reads back as the same float.
        save_file(plain, folder / f"{number}.safetensors", {"guidance": repr(table.guidance)})
    return unique


def open_embeddings(folder: Path, prompts: Sequence[Prompt]) -> Embeddings:
    """Map the files of ``write_embeddings``, given the prompts that it returned."""
    tables = [
        _map_table(folder / f"{number}.safetensors")
        for number, _ in enumerate(_split_by_file(prompts))
    ]
    return Embeddings(tables, {_prompt_key(prompt): row for row, prompt in enumerate(prompts)})


def _split_by_file(prompts: Sequence[Prompt]) -> list[Sequence[Prompt]]:
    return [
        prompts[start : start + PROMPTS_PER_FILE]
        for start in range(0, len(prompts), PROMPTS_PER_FILE)
    ]


def _encode_table(model: Model, prompts: Sequence[Prompt], negatives: bool) -> Conditioning:
    table = model.encode_prompts(prompts).to(torch.device("cpu"))
    # A policy that generates without guidance encodes no negative prompts; a guided reference or
    # teacher needs them.
    if negatives and table.negative is None:
        if not getattr(model, "guided", False):
            raise ModelError(
                f"reference.guidance needs classifier-free guidance, which {type(model).__name__}"
                " has not; set it to 1"
            )
        table = replace(table, negative=_encode_negatives(model, prompts).to(torch.device("cpu")))
    return table


def _encode_negatives(model: Model, prompts: Sequence[Prompt]) -> Conditioning:
    """A family of a user's own encodes negative prompts as prompts unless it has a function for
    them.
    """
    encode_negatives = getattr(model, "encode_negative_prompts", None)
    if encode_negatives:
        encoded: Conditioning = encode_negatives(prompts)
        return encoded
    return model.encode_prompts(
        [replace(prompt, prompt=prompt.negative_prompt) for prompt in prompts]
    )


def _map_table(path: Path) -> Conditioning:
    """A file as tensors that are read from the disk where they are used."""
    # noqa below: the file is no mapping, and has nothing but keys() to iterate over.
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        guidance = float(file.metadata()["guidance"])
    sides = [
        Conditioning(
            {
                name.removeprefix(side): values
                for name, values in tensors.items()
                if name.startswith(side)
            }
        )
        for side in (POSITIVE, NEGATIVE)
    ]
    return Conditioning(sides[0].tensors, sides[1] if sides[1].tensors else None, guidance)


def _select_rows(tables: Sequence[Conditioning], rows: Tensor) -> Conditioning:
    """Some rows of all tables together."""
    tensors = {
        name: _gather_tensor_rows([table[name] for table in tables], rows)
        for name in tables[0].tensors
    }
    negatives = [table.negative for table in tables if table.negative is not None]
    return replace(
        tables[0], tensors=tensors, negative=_select_rows(negatives, rows) if negatives else None
    )


def _gather_tensor_rows(tables: Sequence[Tensor], rows: Tensor) -> Tensor:
    """Some rows, those of rank 2 and more padded with zeros to the longest dimension 1 of all
    tables.
    """
    shape = list(tables[0].shape[1:])
    if shape:
        shape[0] = max(values.shape[1] for values in tables)
    gathered = tables[0].new_zeros(len(rows), *shape)
    # Every table but the last has PROMPTS_PER_FILE rows, so that a row says which table it is in.
    table_numbers = rows // PROMPTS_PER_FILE
    for number in table_numbers.unique().tolist():
        positions = (table_numbers == number).nonzero()[:, 0]
        values = tables[number][rows[positions] % PROMPTS_PER_FILE]
        if shape:
            # This table's prompts may be shorter than those of others; the rest stays 0.
            gathered[positions, : values.shape[1]] = values
        else:
            gathered[positions] = values
    return gathered


def _prompt_key(prompt: Prompt) -> Key:
    return prompt.prompt, prompt.negative_prompt, prompt.image
