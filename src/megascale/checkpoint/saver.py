"""Saving in the foreground: the processes write their files and commit before `save` returns.

Order of a save: agree on a plan; check the free space; each process writes one file durably; the first process writes
the index, then COMMIT atomically; only then are older checkpoints removed. Death at any point leaves the previous
commit as the newest.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from megascale.checkpoint.format import archive
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.chunks import TensorShard, box_slices, split_box
from megascale.checkpoint.format.index import TensorInfo
from megascale.checkpoint.format.torch_index import make_torch_metadata
from megascale.checkpoint.format.write_plan import Offer, RankPart, WritePlan, data_file_name, make_offer, make_plan
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.base import Storage, StorageWriter, explain_save_error
from megascale.checkpoint.storage.opening import open_storage
from megascale.errors import DataError, TrainingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megascale.core.tensors import Box

Folder = TypeVar("Folder", Path, str)
WrittenFile = tuple[np.ndarray, int]  # CRC-32 of each chunk in file order, and of the file


@dataclass(frozen=True)
class ShardChunk:
    """A chunk in memory: a box of a shard."""

    shard: TensorShard
    box: Box

    @property
    def info(self) -> TensorInfo:
        """Return shape and dtype of the logical tensor."""
        return TensorInfo(tuple(self.shard.shape), dtype_name(self.shard.tensor))

    def view(self) -> torch.Tensor:
        """Return the elements as a view of the shard's memory."""
        return self.shard.tensor.detach()[box_slices(self.shard.box, self.box)]


@dataclass(frozen=True)
class SaveFailure:
    """An error that kept a process from saving, in a form that can be sent to the others.

    Attributes:
        text: message with cause and remedy.
        errno: error number of the failed system call, 0: none.
    """

    text: str
    errno: int

    @classmethod
    def from_error(cls, error: Exception, storage: Storage, needed: int) -> SaveFailure:
        """Return the failure that describes an error; `needed`: bytes of the checkpoint."""
        if not isinstance(error, TrainingError):
            error = explain_save_error(error, storage, needed)
        return cls(str(error), error.errno)

    def to_error(self) -> TrainingError:
        """Return the failure as an exception."""
        error = TrainingError(self.text)
        error.errno = self.errno
        return error


def dtype_name(tensor: torch.Tensor) -> str:
    """Return a tensor's dtype as the index names it. Raises TrainingError for one that the format does not have."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in archive.DTYPES:
        raise TrainingError(f"a checkpoint cannot hold {name} tensors; it holds {', '.join(archive.DTYPES)}")
    return name


def cut_chunks(shards: Sequence[TensorShard]) -> list[ShardChunk]:
    """Return the chunks of some shards, numbered as `make_offer` numbers them."""
    result = []
    for shard in shards:
        item = archive.element_size(dtype_name(shard.tensor))
        result += [ShardChunk(shard, box) for box in split_box(shard.box, item) if box.count or 0 in shard.shape]
    return result


def agree_on_plan(peers: Peers, shards: Sequence[TensorShard]) -> tuple[RankPart, WritePlan | None]:
    """Return this process's part of a save, and on the first process the plan; collective.

    Raises TrainingError on all processes if the shards do not cover each logical tensor.
    """
    try:
        offer: Any = make_offer((s.name, s.shape, dtype_name(s.tensor), s.box) for s in shards)
    except (ValueError, TrainingError) as error:
        offer = str(error)
    offers = peers.gather(offer, Offer | str)
    plan = None
    answers: list[Any] = []
    if peers.rank == 0:
        try:
            problem = next((answer for answer in offers if isinstance(answer, str)), None)
            if problem is not None:
                raise ValueError(problem)
            plan = make_plan(offers)
            answers = plan.parts
        except ValueError as error:
            answers = [f"the checkpoint cannot be saved: {error}"] * peers.size
    part = peers.scatter(answers, RankPart | str)
    if isinstance(part, str):
        raise TrainingError(part)
    return part, plan


def to_host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as bytes in host memory, row-major, without a copy where they already are so."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def write_chunk(
    writer: StorageWriter, dtype: str, sizes: tuple[int, ...], elements: memoryview, length: int, file_crc: int
) -> tuple[int, int]:
    """Append a chunk's archive to a data file.

    Args:
        length: bytes of the archive.
        file_crc: CRC-32 of the file before the chunk.

    Returns the CRC-32 of the chunk and of the file.
    """
    crc = crc32(elements)
    head, tail = archive.build_archive_frame(dtype, sizes, crc, length)
    for data, data_crc in ((head, crc32(head)), (elements, crc), (tail, crc32(tail))):
        writer.write(data)
        file_crc = archive.combine_crc32(file_crc, data_crc, len(data))
    return crc, file_crc


def write_rank_file(writer: StorageWriter, part: RankPart, chunks: Sequence[ShardChunk]) -> WrittenFile:
    """Write one process's file durably and return its checksums."""
    crcs = np.zeros(len(part.chunks), np.uint32)
    file_crc = 0
    for row, (number, length) in enumerate(zip(part.chunks.tolist(), part.length.tolist(), strict=True)):
        chunk = chunks[number]
        elements = to_host_bytes(chunk.view())
        crcs[row], file_crc = write_chunk(writer, chunk.info.dtype, chunk.box.sizes, elements, length, file_crc)
    writer.finish()
    return crcs, file_crc


def save(
    folder: Folder,
    step: int,
    shards: Sequence[TensorShard],
    state: dict[str, Any],
    *,
    keep: int,
    group: ProcessGroup | None = None,
) -> Folder:
    """Write `folder/step-N/` and commit it; collective over `group`.

    Args:
        folder: the run's checkpoints folder, a path or an fsspec URL that all processes of the group see.
        step: optimizer steps done.
        shards: this process's boxes. Over the group they must cover each logical tensor; equal boxes on several
            processes are written once.
        state: further state as JSON, taken from the group's first process.
        keep: number of committed checkpoints to keep, this one included.
        group: the processes that save together; None: the default group, or this process alone.

    Returns the committed folder. Raises TrainingError, on all processes alike, if the disk is full or fails (the
    previous checkpoint stays, the half-written one is removed).
    """
    save_to_storage(open_storage(folder), step, shards, state, keep, Peers(group))
    return type(folder)(f"{folder}/{folders.step_name(step)}")


def save_to_storage(
    storage: Storage, step: int, shards: Sequence[TensorShard], state: dict[str, Any], keep: int, peers: Peers
) -> int:
    """Save and commit as `save` does; return the checkpoint's bytes, the same on all processes."""
    part, plan = agree_on_plan(peers, shards)
    if plan:
        begun = _begin_save(storage, state, plan.size)
    else:
        begun = None
    begun = peers.broadcast(begun, tuple[str, int] | SaveFailure | None)
    if isinstance(begun, SaveFailure):
        raise begun.to_error()
    generation, needed = begun
    path = f"{folders.step_name(step)}/{generation}-{data_file_name(peers.rank)}"
    written = _try_write_rank_file(storage, path, part, cut_chunks(shards), needed)
    results = peers.gather(written, WrittenFile | SaveFailure)
    if plan:
        finished = _finish_save(storage, step, generation, plan, results, state, keep)
    else:
        finished = None
    outcome = peers.broadcast(finished, int | SaveFailure | None)
    if isinstance(outcome, SaveFailure):
        raise outcome.to_error()
    return int(outcome)


def _begin_save(storage: Storage, state: dict[str, Any], needed: int) -> tuple[str, int] | SaveFailure:
    """Return the save's generation and bytes, or why it cannot begin."""
    try:
        folders.check_owner(storage, state)
        free = storage.free()
        if free is not None and free < needed:
            raise OSError(errno.ENOSPC, "No space left on device")
        return folders.new_generation(storage), needed
    except (OSError, DataError) as error:
        return SaveFailure.from_error(error, storage, needed)


def _try_write_rank_file(
    storage: Storage, path: str, part: RankPart, chunks: Sequence[ShardChunk], needed: int
) -> WrittenFile | SaveFailure:
    """Write this process's file and return its checksums, or the failure.

    The failure is returned because a process that raised alone would leave the others waiting in a collective.
    """
    if not part.size:
        return np.zeros(0, np.uint32), 0
    writer = None
    try:
        writer = storage.create(path)
        return write_rank_file(writer, part, chunks)
    except Exception as error:
        if writer is not None:
            writer.abort()
        return SaveFailure.from_error(error, storage, needed)


def _finish_save(
    storage: Storage,
    step: int,
    generation: str,
    plan: WritePlan,
    results: Sequence[Any],
    state: dict[str, Any],
    keep: int,
) -> SaveFailure | int:
    """Commit and prune on the first process; return the checkpoint's bytes, or the failure after removing its files."""
    failure = next((result for result in results if isinstance(result, SaveFailure)), None)
    if failure is None:
        try:
            index = plan.index.with_generation(generation, np.concatenate([crcs for crcs, _ in results]))
            files = {
                f"{generation}-{data_file_name(rank)}": (part.size, crc)
                for rank, (part, (_, crc)) in enumerate(zip(plan.parts, results, strict=True))
                if part.size
            }
            commit = folders.commit_save(storage, step, generation, index, files, make_torch_metadata(index), state)
            folders.prune(storage, keep)
            return commit.size
        except Exception as error:
            failure = SaveFailure.from_error(error, storage, plan.size)
    with contextlib.suppress(OSError):
        folders.withdraw(storage, step, generation)
    return failure
