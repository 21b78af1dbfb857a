"""Saving in the foreground: all files are written and committed before `save` returns.

The processes agree on a plan, and the first process checks the free space. Each process writes one file durably. The
first process then writes the index, and COMMIT atomically, and removes older checkpoints. If a process dies before
COMMIT is written, the previous commit stays the newest.
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
from megascale.checkpoint.format.write_plan import (
    Offer,
    RankFileLayout,
    WritePlan,
    data_file_name,
    make_offer,
    make_plan,
)
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.base import Storage, StorageWriter, explain_save_error
from megascale.checkpoint.storage.opening import open_storage
from megascale.errors import DataError, TrainingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megascale.core.tensors import Box

Folder = TypeVar("Folder", Path, str)
# CRC-32 of each chunk in file order, and CRC-32 of the file
WrittenFile = tuple[np.ndarray, int]


@dataclass(frozen=True)
class ShardChunk:
    """Chunk in live memory: a box of a shard."""

    shard: TensorShard
    box: Box

    @property
    def info(self) -> TensorInfo:
        """Return shape and dtype of the chunk's logical tensor."""
        return TensorInfo(tuple(self.shard.shape), get_dtype_name(self.shard.tensor))

    def view(self) -> torch.Tensor:
        """Return the elements as a view of the shard's memory."""
        return self.shard.tensor.detach()[box_slices(self.shard.box, self.box)]


@dataclass(frozen=True)
class SaveFailure:
    """Error that kept a process from saving, in a form that can be sent to other processes.

    Attributes:
        text: message with cause and remedy.
        errno: error number of the failed system call, or 0.
    """

    text: str
    errno: int

    @classmethod
    def from_error(cls, error: Exception, storage: Storage, required_bytes: int) -> SaveFailure:
        """Return the failure that describes an error of saving a checkpoint of `required_bytes`."""
        if not isinstance(error, TrainingError):
            error = explain_save_error(error, storage, required_bytes)
        return cls(str(error), error.errno)

    def to_error(self) -> TrainingError:
        error = TrainingError(self.text)
        error.errno = self.errno
        return error


def get_dtype_name(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype in the index. Raises TrainingError if the format lacks the dtype."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in archive.DTYPES:
        raise TrainingError(f"a checkpoint cannot hold {name} tensors; it holds {', '.join(archive.DTYPES)}")
    return name


def cut_chunks(shards: Sequence[TensorShard]) -> list[ShardChunk]:
    """Return the chunks of the shards, in the same order as `make_offer`."""
    chunks = []
    for shard in shards:
        element_bytes = archive.element_size(get_dtype_name(shard.tensor))
        chunks += [
            ShardChunk(shard, box) for box in split_box(shard.box, element_bytes) if box.count or 0 in shard.shape
        ]
    return chunks


def agree_on_plan(peers: Peers, shards: Sequence[TensorShard]) -> tuple[RankFileLayout, WritePlan | None]:
    """Plan a save. Collective.

    Returns:
        The layout of this process's file, and on the first process the plan (None on other processes).

    Raises:
        TrainingError: the shards do not cover each logical tensor; on all processes.
    """
    try:
        offer: Any = make_offer((s.name, s.shape, get_dtype_name(s.tensor), s.box) for s in shards)
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
            answers = plan.file_layouts
        except ValueError as error:
            answers = [f"the checkpoint cannot be saved: {error}"] * peers.size
    file_layout = peers.scatter(answers, RankFileLayout | str)
    if isinstance(file_layout, str):
        raise TrainingError(file_layout)
    return file_layout, plan


def to_host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's elements as row-major bytes in host memory, without a copy if they are already in this form."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data)


def write_chunk(
    writer: StorageWriter, dtype: str, sizes: tuple[int, ...], elements: memoryview, length: int, file_crc: int
) -> tuple[int, int]:
    """Append a chunk's archive to a data file.

    Args:
        dtype: name of the elements' dtype.
        sizes: shape of the chunk.
        elements: bytes of the chunk's elements.
        length: size of the archive in bytes, padding included.
        file_crc: CRC-32 of the file before the chunk.

    Returns:
        The CRC-32 of the chunk's elements, and the CRC-32 of the file after the chunk.
    """
    crc = crc32(elements)
    head, tail = archive.build_archive_frame(dtype, sizes, crc, length)
    for data, data_crc in ((head, crc32(head)), (elements, crc), (tail, crc32(tail))):
        writer.write(data)
        file_crc = archive.combine_crc32(file_crc, data_crc, len(data))
    return crc, file_crc


def write_rank_file(writer: StorageWriter, file_layout: RankFileLayout, chunks: Sequence[ShardChunk]) -> WrittenFile:
    """Write one process's file durably and return its checksums."""
    crcs = np.zeros(len(file_layout.chunks), np.uint32)
    file_crc = 0
    for row, (number, length) in enumerate(zip(file_layout.chunks.tolist(), file_layout.length.tolist(), strict=True)):
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
    """Write the checkpoint `folder/step-N/` and commit it. Collective over `group`.

    Args:
        folder: checkpoints folder of the run, a path or an fsspec URL that all processes of the group see.
        step: number of completed optimizer steps.
        shards: shards of this process. Over the group the shards must cover each logical tensor. Equal boxes on several
            processes are written once.
        state: state besides tensors that JSON can represent. The state of the group's first process is saved.
        keep: number of committed checkpoints to keep, this one included.
        group: processes that save together. Default: the default group, or this process alone.

    Returns:
        The folder of the committed checkpoint.

    Raises:
        TrainingError: the disk is full or fails; on all processes. The previous checkpoint stays, and the incomplete
            one is removed.
    """
    save_to_storage(open_storage(folder), step, shards, state, keep, Peers(group))
    return type(folder)(f"{folder}/{folders.step_name(step)}")


def save_to_storage(
    storage: Storage, step: int, shards: Sequence[TensorShard], state: dict[str, Any], keep: int, peers: Peers
) -> int:
    """Save and commit as `save` does. Return the size of the checkpoint in bytes, the same on all processes."""
    file_layout, plan = agree_on_plan(peers, shards)
    if plan:
        begin_result = _begin_save(storage, state, plan.size)
    else:
        begin_result = None
    begin_result = peers.broadcast(begin_result, tuple[str, int] | SaveFailure | None)
    if isinstance(begin_result, SaveFailure):
        raise begin_result.to_error()
    generation, required_bytes = begin_result
    path = f"{folders.step_name(step)}/{generation}-{data_file_name(peers.rank)}"
    written = _try_write_rank_file(storage, path, file_layout, cut_chunks(shards), required_bytes)
    results = peers.gather(written, WrittenFile | SaveFailure)
    if plan:
        finish_result = _finish_save(storage, step, generation, plan, results, state, keep)
    else:
        finish_result = None
    outcome = peers.broadcast(finish_result, int | SaveFailure | None)
    if isinstance(outcome, SaveFailure):
        raise outcome.to_error()
    return int(outcome)


def _begin_save(storage: Storage, state: dict[str, Any], required_bytes: int) -> tuple[str, int] | SaveFailure:
    """Return the generation and the size in bytes of a new save, or the failure that prevents it."""
    try:
        folders.check_owner(storage, state)
        free_bytes = storage.free()
        if free_bytes is not None and free_bytes < required_bytes:
            raise OSError(errno.ENOSPC, "No space left on device")
        return folders.make_generation(storage), required_bytes
    except (OSError, DataError) as error:
        return SaveFailure.from_error(error, storage, required_bytes)


def _try_write_rank_file(
    storage: Storage, path: str, file_layout: RankFileLayout, chunks: Sequence[ShardChunk], required_bytes: int
) -> WrittenFile | SaveFailure:
    """Write this process's file, and return its checksums or the failure.

    A failure is returned instead of raised, because the other processes wait for this process in a collective.
    """
    if not file_layout.size:
        return np.zeros(0, np.uint32), 0
    writer = None
    try:
        writer = storage.create(path)
        return write_rank_file(writer, file_layout, chunks)
    except Exception as error:
        if writer is not None:
            writer.abort()
        return SaveFailure.from_error(error, storage, required_bytes)


def _finish_save(
    storage: Storage,
    step: int,
    generation: str,
    plan: WritePlan,
    results: Sequence[Any],
    state: dict[str, Any],
    keep: int,
) -> SaveFailure | int:
    """Commit the save and prune, on the first process. Return the checkpoint's size in bytes, or the failure.

    After a failure the files of the save are removed.
    """
    failures = [result for result in results if isinstance(result, SaveFailure)]
    if failures:
        failure = failures[0]
    else:
        try:
            index = plan.index.with_generation(generation, np.concatenate([crcs for crcs, _ in results]))
            files = {}
            for rank, (file_layout, (_, file_crc)) in enumerate(zip(plan.file_layouts, results, strict=True)):
                if file_layout.size:
                    files[f"{generation}-{data_file_name(rank)}"] = (file_layout.size, file_crc)
            commit = folders.commit_save(storage, step, generation, index, files, make_torch_metadata(index), state)
            folders.prune(storage, keep)
            return commit.size
        except Exception as error:
            failure = SaveFailure.from_error(error, storage, plan.size)
    with contextlib.suppress(OSError):
        folders.withdraw_save(storage, step, generation)
    return failure
