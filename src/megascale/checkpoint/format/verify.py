"""Reading a whole checkpoint to see whether it is what was written. No torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.step_folders import METADATA, Commit, DamagedCheckpoint
from megascale.checkpoint.storage.base import Storage

_PIECE = 32 << 20


@dataclass
class VerifyResult:
    """What a check found.

    Attributes:
        step: which checkpoint.
        bytes: bytes read.
        problems: one line a file that is not what was written.
        tensors: names of the tensors that are touched.
        removed: training removed the checkpoint while it was read; its problems say nothing then.
    """

    step: int
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    tensors: set[str] = field(default_factory=set)
    removed: bool = False


def verify(
    storage: Storage, step: int, told: Callable[[int, int], None] | None = None, threads: int = 4
) -> VerifyResult:
    """Read every file of a step's checkpoint and compare checksums.

    Args:
        told: called with (bytes read so far, bytes in all) as it goes.
    """
    verdict = VerifyResult(step)
    try:
        commit = folders.read_commit(storage, step)
    except DamagedCheckpoint as damage:
        verdict.problems.append(str(damage))
        return verdict
    if commit is None:
        verdict.problems.append("no COMMIT: the save did not finish")
        verdict.removed = not storage.list(folders.step_name(step))
        return verdict
    index: CheckpointIndex | None = None
    try:
        index = folders.read_index(storage, commit)
    except DamagedCheckpoint as damage:
        verdict.problems.append(str(damage))

    def check(name: str) -> None:
        problem = _check_file(storage, commit, name, verdict, told)
        if problem:
            verdict.problems.append(problem)
            if index is not None and name in index.files:
                verdict.tensors |= _touched(storage, commit, index, name)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(check, [name for name in commit.files if name != commit.index_file]))
    verdict.removed = bool(verdict.problems) and folders.is_removed(storage, commit)
    return verdict


def _check_file(
    storage: Storage, commit: Commit, name: str, verdict: VerifyResult, told: Callable[[int, int], None] | None
) -> str | None:
    size, expected = commit.files[name]
    path = f"{folders.step_name(commit.step)}/{name}"
    crc = at = 0
    try:
        while at < size:
            data = storage.read(path, at, min(_PIECE, size - at))
            if not data:
                break
            crc = crc32(data, crc)
            at += len(data)
            verdict.bytes += len(data)
            if told is not None:
                told(verdict.bytes, commit.size)
        actual = storage.size(path)
    except OSError as error:
        return f"{name} cannot be read: {error}"
    if actual != size:
        return f"{name} is {actual} bytes long, {size} were written"
    if crc == expected:
        return None
    what = "torch's copy of the index, which only plain dcp.load reads" if name == METADATA else "its contents"
    return (
        f"{name}: {what} are not what was written" if name != METADATA else f"{name}: {what}, is not what was written"
    )


def _touched(storage: Storage, commit: Commit, index: CheckpointIndex, name: str) -> set[str]:
    """Tensors with a damaged chunk in a file."""
    found = set()
    number = index.files.index(name)
    for row in (index.columns["in_file"] == number).nonzero()[0].tolist():
        at = int(index.columns["data"][row])
        try:
            data = storage.read(f"{folders.step_name(commit.step)}/{name}", at, index.nbytes(row))
        except OSError:
            data = b""
        if len(data) != index.nbytes(row) or crc32(data) != int(index.columns["crc"][row]):
            found.add(index.name(row))
    return found
