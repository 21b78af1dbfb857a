"""Source of the chunks of one checkpoint, in storage or in memory, and the report of a load."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megascale.checkpoint.copies import FileRange
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.commit import Commit
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.read_plan import merge_reads
from megascale.checkpoint.storage.base import Buffer, Storage


@dataclass
class LoadReport:
    """Costs and findings of a load on this process.

    Attributes:
        step: step of the loaded checkpoint; None before the load.
        read_bytes: bytes read from storage or memory.
        sent_bytes: bytes sent to other processes.
        damage: descriptions of damaged chunks.
        zeroed_states: optimizer states that the checkpoint lacks and that were set to zero.
        skipped_commits: damaged commits, in place of which an earlier one was loaded.
        seconds: seconds of parts of the load.
        copy_threads: seconds of the threads that copy, as text.
    """

    step: int | None = None
    read_bytes: int = 0
    sent_bytes: int = 0
    damage: list[str] = field(default_factory=list)
    zeroed_states: set[str] = field(default_factory=set)
    skipped_commits: list[Commit] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    copy_threads: str = ""

    def measure(self, part: str, start_time: float) -> float:
        """Add the seconds of a part that began at `start_time` (`time.monotonic`), and return the present time."""
        present_time = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + present_time - start_time
        return present_time

    def describe_seconds(self) -> str:
        """Return the parts of the load and their seconds as text."""
        text = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.seconds.items())
        if self.copy_threads:
            text += f"; {self.copy_threads}"
        return text

    def add(self, report: LoadReport) -> None:
        """Add the bytes and the damage of `report`."""
        self.read_bytes += report.read_bytes
        self.sent_bytes += report.sent_bytes
        self.damage += report.damage


class ChunkSource:
    """Chunks of one checkpoint, in storage or in memory. A subclass implements `read`.

    Args:
        name: name of the checkpoint in messages.
        state: saved state besides tensors.
        holders: processes that can read each data file, by name of the file. Default: all processes can.
        has_checksums: whether the index has the checksums of the chunks.

    Attributes:
        max_rounds_ahead: number of rounds that are read in advance, in one thread per round.
        round_bytes: bytes that a process sends per round. Default: `read_plan.ROUND_BYTES`.
        has_ranges: whether `find_range` is available.
    """

    max_rounds_ahead = 3
    round_bytes: int | None = None
    has_ranges = False

    def __init__(
        self,
        name: str,
        index: CheckpointIndex,
        state: Mapping[str, Any],
        holders: Mapping[str, Sequence[int]] | None = None,
        has_checksums: bool = True,
    ) -> None:
        self.name = name
        self.index = index
        self.state = state
        self.holders = holders
        self.has_checksums = has_checksums

    def read(self, file: str, start: int, stop: int) -> Buffer:
        """Return the bytes from `start` up to `stop` of a data file. Several threads may read at the same time."""
        raise NotImplementedError

    def find_range(self, file: str, start: int, stop: int) -> FileRange:
        """Return where threads can read the bytes from `start` up to `stop` of a data file themselves.

        Raises OSError if the file is no longer available.
        """
        raise NotImplementedError

    def read_chunks(self, rows: np.ndarray, report: LoadReport) -> dict[int, torch.Tensor]:
        """Return the elements of the chunks of some rows of the index. Arguments and result as for `read_chunks`."""
        return read_chunks(self, rows, report)


class StorageChunks(ChunkSource):
    """Chunks of a committed checkpoint in storage."""

    def __init__(self, storage: Storage, commit: Commit, index: CheckpointIndex) -> None:
        self._storage = storage
        self._folder = folders.step_name(commit.step)
        super().__init__(f"{storage.url}/{self._folder}", index, commit.state)

    def read(self, file: str, start: int, stop: int) -> Buffer:
        return self._storage.read(f"{self._folder}/{file}", start, stop - start)


def read_chunks(source: ChunkSource, rows: np.ndarray, report: LoadReport) -> dict[int, torch.Tensor]:
    """Read the chunks of some rows of the index and check them.

    Returns:
        The elements by row. A damaged chunk is recorded in the report, and its elements are zeros.
    """
    index = source.index
    elements_by_row: dict[int, torch.Tensor] = {}
    for file, start, stop, file_rows in merge_reads(index, rows):
        try:
            data = memoryview(source.read(file, start, stop))
            report.read_bytes += len(data)
        except OSError as error:
            data = memoryview(b"")
            report.damage.append(f"{file} cannot be read: {error}")
        for row in file_rows:
            offset = int(index.columns["data"][row]) - start
            chunk_bytes = index.nbytes(row)
            chunk_data = data[offset : offset + chunk_bytes]
            is_intact = len(chunk_data) == chunk_bytes
            if is_intact and source.has_checksums:
                is_intact = crc32(chunk_data) == int(index.columns["crc"][row])
            if not is_intact:
                report.damage.append(f"{file} holds other bytes for {index.name(row)} than were written")
                chunk_data = memoryview(bytearray(chunk_bytes))
            dtype = getattr(torch, index.info(row).dtype)
            with warnings.catch_warnings():
                # torch warns of read-only memory, which is not written here.
                warnings.simplefilter("ignore", UserWarning)
                elements_by_row[row] = torch.frombuffer(chunk_data, dtype=dtype).reshape(index.box(row).sizes)
    return elements_by_row
