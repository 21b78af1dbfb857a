"""Reading of single tensors of a checkpoint in one process, for export, conversion, generation and tools."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megascale.checkpoint.chunk_source import LoadReport, StorageChunks, read_chunks
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.chunks import box_slices, intersect_boxes
from megascale.checkpoint.format.commit import Commit, DamagedCheckpoint
from megascale.checkpoint.format.index import TensorInfo
from megascale.checkpoint.storage.base import Storage
from megascale.core.tensors import Box
from megascale.errors import DataError

_CACHE_BYTES = 256 << 20  # chunks that are kept after use, because neighbouring boxes often need the same chunk


class CompleteCheckpoint:
    """Committed checkpoint, all of whose tensors can be read. Reading raises DataError if stored data is damaged.

    Attributes:
        commit: commit of the checkpoint, with the saved state.
        tensors: shape and dtype by logical name.
    """

    def __init__(self, storage: Storage, commit: Commit) -> None:
        self.storage = storage
        self.commit = commit
        self._name = f"{storage.url}/{folders.step_name(commit.step)}"
        try:
            self._index = folders.read_index(storage, commit)
            folders.check_sizes(storage, commit)
        except DamagedCheckpoint as damage:
            raise self._explain_damage(str(damage)) from None
        self.tensors: dict[str, TensorInfo] = self._index.tensors
        self._source = StorageChunks(storage, commit, self._index)
        self._cache: OrderedDict[int, torch.Tensor] = OrderedDict()
        self._cached_bytes = 0

    @property
    def state(self) -> dict[str, Any]:
        """Return the saved state besides tensors."""
        return self.commit.state

    def list_tensors_with_chunks(self) -> Iterator[tuple[str, tuple[int, ...], str, list[tuple[Any, ...]]]]:
        """Yield name, shape, dtype and chunks of each tensor, sorted by name. A chunk is (offsets, sizes, CRC-32)."""
        chunks_by_name: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self.tensors}
        for row in range(len(self._index)):
            box = self._index.box(row)
            chunks_by_name[self._index.name(row)].append((box.offsets, box.sizes, int(self._index.columns["crc"][row])))
        for name, info in sorted(self.tensors.items()):
            yield name, info.shape, info.dtype, chunks_by_name[name]

    def read_tensor(self, name: str) -> torch.Tensor:
        """Return a complete logical tensor in host memory."""
        shape = self.tensors[name].shape
        return self.read_box(name, Box((0,) * len(shape), shape))

    def read_box(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a logical tensor in host memory."""
        try:
            elements = torch.empty(box.sizes, dtype=getattr(torch, self.tensors[name].dtype))
        except RuntimeError as error:
            raise DataError(
                f"{name} of the checkpoint {self._name!r} is {list(box.sizes)}, for which this machine has no memory "
                f"({str(error).splitlines()[0][:200]})"
            ) from None
        for row in self._index.find_overlapping(name, box).tolist():
            chunk = self._read_chunk(row)
            chunk_box = self._index.box(row)
            common = intersect_boxes(chunk_box, box)
            if common is not None:
                elements[box_slices(box, common)].copy_(chunk[box_slices(chunk_box, common)])
        return elements

    def _read_chunk(self, row: int) -> torch.Tensor:
        """Return a chunk from the cache or from storage."""
        if row in self._cache:
            self._cache.move_to_end(row)
            return self._cache[row]
        report = LoadReport()
        chunk = read_chunks(self._source, np.array([row]), report)[row]
        if report.damage:
            raise self._explain_damage(report.damage[0])
        self._cache[row] = chunk
        self._cached_bytes += chunk.nbytes
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            _, oldest = self._cache.popitem(last=False)
            self._cached_bytes -= oldest.nbytes
        return chunk

    def _explain_damage(self, reason: str) -> DataError:
        """Return the error for damaged data, or for a checkpoint that was removed meanwhile."""
        if folders.is_removed(self.storage, self.commit):
            return DataError(
                f"the checkpoint {self._name!r} was removed while it was read: training goes on there and keeps "
                "checkpoint.keep of them. Try again, or raise checkpoint.keep"
            )
        return DataError(
            f"the checkpoint {self._name!r} is damaged: {reason}; name another step with --step, or see "
            "`megascale checkpoint verify`"
        )


def open_checkpoint(path: Path | str, step: int | None = None) -> CompleteCheckpoint:
    """Return the newest committed checkpoint (or that of `step`) of a run folder, checkpoints folder or step-N folder.

    Raises:
        DataError: there is no such checkpoint.
    """
    storage, listed_steps = folders.find_steps(path)
    all_commits, _ = folders.list_commits(storage)
    commits = [commit for commit in all_commits if commit.step in listed_steps and step in (None, commit.step)]
    if not commits:
        committed_steps = sorted(commit.step for commit in all_commits) or "none"
        description = "" if step is None else f"of step {step} "
        raise DataError(
            f"there is no committed checkpoint {description}in {str(path)!r}; committed steps: {committed_steps}"
        )
    return CompleteCheckpoint(storage, commits[0])
