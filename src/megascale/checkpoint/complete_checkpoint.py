"""A checkpoint read tensor by tensor in one process, checked: for export, conversion, generation and tools."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.chunks import intersect_boxes, slices
from megascale.checkpoint.format.index import TensorInfo
from megascale.checkpoint.format.step_folders import Commit, Damaged
from megascale.checkpoint.loader import LoadReport, fetch
from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.opening import open_storage
from megascale.core.tensors import Box
from megascale.errors import DataError

# Chunks kept after use, in bytes: neighbouring boxes often share a chunk.
_CACHE_BYTES = 256 << 20


class CompleteCheckpoint:
    """One committed checkpoint. Reading raises DataError where what is stored is not what was written.

    Attributes:
        commit: its commit, with the saved state.
        tensors: logical name to shape and dtype.
    """

    def __init__(self, storage: Storage, commit: Commit) -> None:
        self.storage, self.commit = storage, commit
        self.place = folders.step_name(commit.step)
        try:
            self.index = folders.read_index(storage, commit)
            folders.check_sizes(storage, commit)
        except Damaged as damage:
            raise DataError(self._damaged(str(damage))) from None
        self.tensors: dict[str, TensorInfo] = self.index.tensors
        self._cache: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._cached = 0

    @property
    def state(self) -> dict[str, Any]:
        """What was saved besides tensors."""
        return self.commit.state

    def read_tensor(self, name: str) -> torch.Tensor:
        """A whole logical tensor in host memory."""
        shape = self.tensors[name].shape
        return self.box(name, Box((0,) * len(shape), shape))

    def box(self, name: str, box: Box) -> torch.Tensor:
        """A part of a logical tensor."""
        try:
            result = torch.empty(box.sizes, dtype=getattr(torch, self.tensors[name].dtype))
        except RuntimeError as error:
            raise DataError(
                f"{name} of the checkpoint '{self.storage.url}/{self.place}' is {list(box.sizes)}, for which this "
                f"machine has no memory ({str(error).splitlines()[0][:200]})"
            ) from None
        for row in self.index.overlapping(name, box).tolist():
            chunk, held = self._chunk(row), self.index.box(row)
            common = intersect_boxes(held, box)
            if common is not None:
                target = result[slices(box, common)] if common.sizes else result
                target.copy_(chunk[slices(held, common)] if common.sizes else chunk)
        return result

    def _chunk(self, row: int) -> torch.Tensor:
        if row in self._cache:
            self._cache.move_to_end(row)
            return self._cache[row]
        report = LoadReport()
        chunk = fetch(self.index, np.array([row]), self._read, report)[row]
        if report.damage:
            raise DataError(self._damaged(report.damage[0]))
        self._cache[row] = chunk
        self._cached += chunk.nbytes
        while self._cached > _CACHE_BYTES and len(self._cache) > 1:
            self._cached -= self._cache.popitem(last=False)[1].nbytes
        return chunk

    def _read(self, file: str, start: int, stop: int) -> memoryview | bytes | bytearray:
        return self.storage.read(f"{self.place}/{file}", start, stop - start)

    def _damaged(self, why: str) -> str:
        if folders.is_removed(self.storage, self.commit):
            return (
                f"the checkpoint '{self.storage.url}/{self.place}' was removed while it was read: training goes on "
                "there and keeps checkpoint.keep of them. Try again, or raise checkpoint.keep"
            )
        return (
            f"the checkpoint '{self.storage.url}/{self.place}' is damaged: {why}; name another step with --step, or "
            "see `megascale checkpoint verify`"
        )


def open_whole(path: Path | str, step: int | None = None) -> CompleteCheckpoint:
    """The newest committed checkpoint (or that of `step`) of a run folder, checkpoints folder or step-N folder.

    Raises DataError if there is none.
    """
    storage, there = folders.find_steps(path)
    commits = [c for c in folders.survey(storage)[0] if c.step in there and step in (None, c.step)]
    if not commits:
        have = sorted(c.step for c in folders.survey(storage)[0])
        asked = f"of step {step} " if step is not None else ""
        raise DataError(f"there is no committed checkpoint {asked}in {str(path)!r}; committed steps: {have or 'none'}")
    return CompleteCheckpoint(open_storage(storage), commits[0])
