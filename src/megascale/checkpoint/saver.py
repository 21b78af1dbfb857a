"""Saving at once: the processes write their files and commit before `save` returns.

Order of a save: agree on a plan; check the room on the disk; each process writes one file and makes it last; the
first writes the index, then COMMIT in one piece; only then older checkpoints go. Death at any point leaves the
previous commit as the newest.
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
from megascale.checkpoint.format.chunks import TensorShard, slices, split_box
from megascale.checkpoint.format.index import TensorInfo
from megascale.checkpoint.format.torch_index import torch_metadata
from megascale.checkpoint.format.write_plan import Offer, RankPart, WritePlan, data_file, make_offer, make_plan
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.base import Storage, StorageWriter
from megascale.checkpoint.storage.opening import open_storage
from megascale.checkpoint.storage.save_errors import explain
from megascale.errors import DataError, TrainingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megascale.core.tensors import Box

Folder = TypeVar("Folder", Path, str)


@dataclass(frozen=True)
class Slice:
    """A chunk in memory: a box of a shard."""

    shard: TensorShard
    box: Box

    @property
    def info(self) -> TensorInfo:
        """The logical tensor."""
        return TensorInfo(tuple(self.shard.shape), dtype_name(self.shard.tensor))

    def view(self) -> torch.Tensor:
        """The elements, a view on the shard's memory."""
        tensor = self.shard.tensor.detach()
        return tensor[slices(self.shard.box, self.box)] if self.box.sizes else tensor


def dtype_name(tensor: torch.Tensor) -> str:
    """A tensor's dtype as the index names it; TrainingError for one that the format does not have."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in archive.DTYPES:
        raise TrainingError(f"a checkpoint cannot hold {name} tensors; it holds {', '.join(archive.DTYPES)}")
    return name


def cut(shards: Sequence[TensorShard]) -> list[Slice]:
    """The chunks of some shards, numbered as `make_offer` numbers them."""
    result = []
    for shard in shards:
        item = archive.element_size(dtype_name(shard.tensor))
        result += [Slice(shard, box) for box in split_box(shard.box, item) if box.count or 0 in shard.shape]
    return result


def agree(peers: Peers, shards: Sequence[TensorShard]) -> tuple[RankPart, WritePlan | None]:
    """This process's part of the save, and on the first process the whole plan; collective.

    Raises TrainingError on all alike if the shards do not cover each logical tensor.
    """
    answers: list[Any] = []
    plan = None
    try:
        offer: Any = make_offer((s.name, s.shape, dtype_name(s.tensor), s.box) for s in shards)
    except (ValueError, TrainingError) as error:
        offer = str(error)
    offers = peers.gather(offer, Offer | str)
    if peers.rank == 0:
        try:
            wrong = next((o for o in offers if isinstance(o, str)), None)
            if wrong is not None:
                raise ValueError(wrong)
            plan = make_plan(offers)
            answers = plan.parts
        except ValueError as error:
            answers = [f"the checkpoint cannot be saved: {error}"] * peers.size
    part = peers.scatter(answers, RankPart | str)
    if isinstance(part, str):
        raise TrainingError(part)
    return part, plan


def write_part(sink: StorageWriter, part: RankPart, chunks: Sequence[Slice]) -> tuple[np.ndarray, int]:
    """Write one process's file; CRC-32 of each chunk, in file order, and of the whole file."""
    crcs = np.zeros(len(part.chunks), np.uint32)
    whole = 0
    for row, (number, length) in enumerate(zip(part.chunks.tolist(), part.length.tolist(), strict=True)):
        chunk = chunks[number]
        data = host_bytes(chunk.view())
        crcs[row] = crc = crc32(data)
        head, tail = archive.wrap(chunk.info.dtype, chunk.box.sizes, crc, length)
        for piece, piece_crc in ((head, crc32(head)), (data, crc), (tail, crc32(tail))):
            sink.write(piece)
            whole = archive.combine(whole, piece_crc, len(piece))
    sink.finish()
    return crcs, whole


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's elements as bytes, row-major, in host memory; no copy where they already lie so."""
    flat = tensor.to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


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
        state: what else to keep, as JSON (taken from the group's first process).
        keep: committed checkpoints to leave, this one included.
        group: the processes that save together; None: the default group, or this process alone.

    Returns the committed folder. Raises TrainingError, on all processes alike, if the disk is full or fails (the
    previous checkpoint stays, the half-written one is removed).
    """
    save_to(open_storage(folder), step, shards, state, keep, Peers(group))
    return type(folder)(f"{folder}/{folders.step_name(step)}")


def save_to(
    storage: Storage, step: int, shards: Sequence[TensorShard], state: dict[str, Any], keep: int, peers: Peers
) -> int:
    """As `save`; the checkpoint's bytes, the same on all."""
    part, plan = agree(peers, shards)
    start = peers.broadcast(_begin(storage, state, plan.size) if plan else None, tuple[str, int] | SaveFailure | None)
    if isinstance(start, SaveFailure):
        raise start.error()
    generation, needed = start
    result = _write_mine(storage, f"{folders.step_name(step)}/{generation}-{data_file(peers.rank)}", part, cut(shards))
    results = peers.gather(result, Written | SaveFailure)
    finished = _finish(storage, step, generation, plan, results, state, keep) if plan else None
    outcome = peers.broadcast(finished, int | SaveFailure | None)
    if isinstance(outcome, int):
        return outcome
    failed = outcome.error()
    raise failed if isinstance(failed, TrainingError) else explain(failed, storage, needed)


Written = tuple[np.ndarray, int]  # checksums of the chunks of a file, and of the file


@dataclass(frozen=True)
class SaveFailure:
    """What kept a process from saving, for the others. kind: class of the error; errno: of its system call, 0: none."""

    kind: str
    text: str
    errno: int = 0

    @classmethod
    def of(cls, error: Exception) -> SaveFailure:
        """As plain data."""
        if isinstance(error, OSError):
            return cls("OSError", error.strerror or str(error), error.errno or 0)
        if isinstance(error, TrainingError):
            return cls("TrainingError", str(error), error.errno)
        return cls("RuntimeError", repr(error))

    def error(self) -> Exception:
        """As the exception again."""
        if self.kind == "OSError":
            return OSError(self.errno, self.text) if self.errno else OSError(self.text)
        if self.kind != "TrainingError":
            return RuntimeError(self.text)
        failed = TrainingError(self.text)
        failed.errno = self.errno
        return failed


def _begin(storage: Storage, state: dict[str, Any], needed: int) -> tuple[str, int] | SaveFailure:
    """The save's generation and bytes, or why it cannot begin."""
    try:
        folders.check_owner(storage, state)
        free = storage.free()
        if free is not None and free < needed:
            raise OSError(errno.ENOSPC, "No space left on device")
        return folders.new_generation(storage), needed
    except (OSError, DataError) as error:
        return SaveFailure.of(explain(error, storage, needed))


def _write_mine(
    storage: Storage, path: str, part: RankPart, chunks: Sequence[Slice]
) -> tuple[np.ndarray, int] | SaveFailure:
    """(checksums, checksum of the file), or what went wrong: told to all, since a process that fails alone would leave
    the others waiting."""
    if not part.size:
        return np.zeros(0, np.uint32), 0
    sink = None
    try:
        sink = storage.create(path)
        return write_part(sink, part, chunks)
    except Exception as error:
        if sink is not None:
            sink.abort()
        return SaveFailure.of(error)


def _finish(
    storage: Storage,
    step: int,
    generation: str,
    plan: WritePlan,
    results: Sequence[Any],
    state: dict[str, Any],
    keep: int,
) -> SaveFailure | int:
    """Commit and prune on the first process; the checkpoint's bytes, or what went wrong, what was written removed."""
    failure = next((r for r in results if isinstance(r, SaveFailure)), None)
    if failure is None:
        try:
            index = plan.index.with_generation(generation, np.concatenate([crcs for crcs, _ in results]))
            files = {
                f"{generation}-{data_file(rank)}": (part.size, crc)
                for rank, (part, (_, crc)) in enumerate(zip(plan.parts, results, strict=True))
                if part.size
            }
            commit = folders.commit_save(storage, step, generation, index, files, torch_metadata(index), state)
            folders.prune(storage, keep)
            return commit.size
        except Exception as error:
            failure = SaveFailure.of(error)
    with contextlib.suppress(OSError):
        folders.withdraw(storage, step, generation)
    return failure
