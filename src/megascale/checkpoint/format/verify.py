"""Summary of a checkpoint, and verification of all its files against their checksums. Needs no torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.commit import METADATA, Commit, DamagedCheckpoint
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.step_folders import StorageLike, find_steps, step_name
from megascale.checkpoint.storage.base import Storage

_READ_BYTES = 32 << 20  # per read


@dataclass(frozen=True)
class TensorSummary:
    """Tensor in a `Summary`, with its size in bytes and its number of chunks."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    chunks: int


@dataclass(frozen=True)
class Summary:
    """Contents of a step's folder.

    Attributes:
        committed: whether the folder has a complete checkpoint.
        problem: reason why the folder has no complete checkpoint, or None if it has one.
        sequence: number of the save.
        bytes: total size of all files.
        state: saved state besides tensors.
    """

    path: str
    step: int
    committed: bool
    problem: str | None
    sequence: int = 0
    bytes: int = 0
    tensors: list[TensorSummary] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


def summarise_step(storage: Storage, step: int) -> Summary:
    """Return the contents of one step's folder, even if its checkpoint is incomplete."""
    path = f"{storage.url}/{step_name(step)}"
    try:
        commit = folders.read_commit(storage, step)
        if commit is None:
            return Summary(path, step, committed=False, problem="no COMMIT: the save did not finish")
        index = folders.read_index(storage, commit)
        folders.check_sizes(storage, commit)
    except DamagedCheckpoint as damage:
        return Summary(path, step, committed=False, problem=str(damage))
    counts = np.bincount(index.columns["tensor"], minlength=len(index.tensors)).tolist()
    tensors = [
        TensorSummary(name, info.shape, info.dtype, info.nbytes, count)
        for (name, info), count in zip(index.tensors.items(), counts, strict=True)
    ]
    return Summary(
        path,
        commit.step,
        committed=True,
        problem=None,
        sequence=commit.sequence,
        bytes=commit.size,
        tensors=tensors,
        state=commit.state,
    )


def inspect(folder_or_step: StorageLike) -> Summary:
    """Return the contents of the newest committed checkpoint of a folder, or of the one step of a step-N folder.

    If there is no committed checkpoint, return the contents of an incomplete one.
    """
    storage, listed = find_steps(folder_or_step)
    summaries = [summarise_step(storage, step) for step in listed]
    return max(summaries, key=lambda summary: (summary.committed, summary.sequence, summary.step))


@dataclass
class VerifyResult:
    """Result of a verification.

    Attributes:
        bytes: number of bytes that were read.
        problems: one line per file that differs from the written one.
        tensors: names of the tensors with damaged chunks.
        removed: whether training removed the checkpoint while it was read. The problems are then meaningless.
    """

    step: int
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    tensors: set[str] = field(default_factory=set)
    removed: bool = False


def verify(
    storage: Storage, step: int, on_progress: Callable[[int, int], None] | None = None, threads: int = 4
) -> VerifyResult:
    """Read every file of a step's checkpoint and compare its checksum.

    Args:
        on_progress: called during the verification with the number of bytes read so far and in total.
    """
    result = VerifyResult(step)
    try:
        commit = folders.read_commit(storage, step)
    except DamagedCheckpoint as damage:
        result.problems.append(str(damage))
        return result
    if commit is None:
        result.problems.append("no COMMIT: the save did not finish")
        result.removed = not storage.list(step_name(step))
        return result
    index: CheckpointIndex | None = None
    try:
        index = folders.read_index(storage, commit)
    except DamagedCheckpoint as damage:
        result.problems.append(str(damage))
    verifier = _FileVerifier(storage, commit, index, result, on_progress)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(verifier.check_file, [name for name in commit.files if name != commit.index_file]))
    result.removed = bool(result.problems) and folders.is_removed(storage, commit)
    return result


@dataclass(frozen=True)
class _FileVerifier:
    """Check of the files of one commit, which adds problems to `result`."""

    storage: Storage
    commit: Commit
    index: CheckpointIndex | None
    result: VerifyResult
    on_progress: Callable[[int, int], None] | None

    def check_file(self, name: str) -> None:
        """Read one file and record its problem, if any, with the tensors that it damages."""
        problem = self._find_problem(name)
        if problem:
            self.result.problems.append(problem)
            if self.index is not None and name in self.index.files:
                self.result.tensors |= self._find_damaged_tensors(self.index, name)

    def _find_problem(self, name: str) -> str | None:
        """Return a line that describes how a file differs from the written one, or None."""
        size, expected_crc = self.commit.files[name]
        path = f"{step_name(self.commit.step)}/{name}"
        crc = 0
        offset = 0
        try:
            while offset < size:
                data = self.storage.read(path, offset, min(_READ_BYTES, size - offset))
                if not data:
                    break
                crc = crc32(data, crc)
                offset += len(data)
                self.result.bytes += len(data)
                if self.on_progress is not None:
                    self.on_progress(self.result.bytes, self.commit.size)
            actual_size = self.storage.size(path)
        except OSError as error:
            return f"{name} cannot be read: {error}"
        if actual_size != size:
            return f"{name} is {actual_size} bytes long, {size} were written"
        if crc == expected_crc:
            return None
        if name == METADATA:
            return f"{name}: torch's copy of the index, which only plain dcp.load reads, is not what was written"
        return f"{name}: its contents are not what was written"

    def _find_damaged_tensors(self, index: CheckpointIndex, name: str) -> set[str]:
        """Return the names of the tensors that have a damaged chunk in a file."""
        damaged_tensors = set()
        file_number = index.files.index(name)
        for row in (index.columns["in_file"] == file_number).nonzero()[0].tolist():
            start = int(index.columns["data"][row])
            try:
                data = self.storage.read(f"{step_name(self.commit.step)}/{name}", start, index.nbytes(row))
            except OSError:
                data = b""
            if len(data) != index.nbytes(row) or crc32(data) != int(index.columns["crc"][row]):
                damaged_tensors.add(index.name(row))
        return damaged_tensors
