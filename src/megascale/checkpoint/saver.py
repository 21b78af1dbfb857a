"""Saving: who writes which chunk, the writing, and the commit that makes it count.

Order of a save: agree on a plan; check the room on the disk; each process writes one file and syncs it; the first
writes the index, then COMMIT in one piece; only then older checkpoints go. Death at any point leaves the previous
commit as the newest.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import zlib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megascale.checkpoint import archive
from megascale.checkpoint import folder as folders
from megascale.checkpoint.folder import COMMIT, METADATA, Commit
from megascale.checkpoint.index import Index, Stored, torch_metadata
from megascale.checkpoint.layout import Chunk, Shard, assign, slices, split
from megascale.checkpoint.peers import Peers
from megascale.errors import TrainingError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def dtype_name(tensor: torch.Tensor) -> str:
    """A tensor's dtype as the index names it; TrainingError for one that the format does not have."""
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in archive.DTYPES:
        raise TrainingError(f"a checkpoint cannot hold {name} tensors; it holds {', '.join(archive.DTYPES)}")
    return name


def chunks_of(shards: Sequence[Shard]) -> list[tuple[Chunk, Shard]]:
    """Cut shards into chunks, each with the shard that holds its data."""
    result = []
    for shard in shards:
        dtype = dtype_name(shard.tensor)
        for box in split(shard.box, archive.element_size(dtype)):
            if not box.count and prod(shard.shape):
                continue  # this process holds nothing of the tensor
            result.append((Chunk(shard.name, tuple(shard.shape), dtype, box), shard))
    return result


def chunk_bytes(chunk: Chunk, shard: Shard) -> memoryview:
    """A chunk's elements as bytes, row-major, in host memory; no copy where they already lie so."""
    part = shard.tensor.detach()[slices(shard.box, chunk.box)] if chunk.box.sizes else shard.tensor.detach()
    flat = part.to("cpu").contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy().data) if flat.numel() else memoryview(b"")


def write_chunks(path: Path, work: Sequence[tuple[Chunk, Shard]]) -> tuple[list[Stored], tuple[int, int]]:
    """Write chunks one behind another into `path` and sync it; their records, and (bytes, checksum) of the file."""
    stored: list[Stored] = []
    size = crc = 0
    with open(path, "wb", buffering=0) as file:
        for chunk, shard in work:
            data = chunk_bytes(chunk, shard)
            data_crc = zlib.crc32(data)
            head, tail = archive.wrap(chunk.dtype, chunk.box.sizes, data_crc, size)
            for part, part_crc in ((head, zlib.crc32(head)), (data, data_crc), (tail, zlib.crc32(tail))):
                _write_all(file.fileno(), memoryview(part))
                crc = archive.combine(crc, part_crc, len(part))
            length = len(head) + len(data) + len(tail)
            stored.append(Stored(chunk, path.name, size, length, size + len(head), data_crc))
            size += length
        os.fsync(file.fileno())
    return stored, (size, crc)


def _write_all(handle: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(handle, data) :]


def save(
    folder: Path,
    step: int,
    shards: Sequence[Shard],
    state: dict[str, Any],
    *,
    keep: int,
    group: ProcessGroup | None = None,
) -> Path:
    """Write `folder/step-N/` and commit it; collective over `group`.

    Args:
        folder: the run's checkpoints folder, on storage that all processes of the group see.
        step: optimizer steps done.
        shards: this process's boxes. Over the group they must cover each logical tensor; equal boxes on several
            processes are written once.
        state: what else to keep, as JSON (taken from the group's first process).
        keep: committed checkpoints to leave, this one included.
        group: the processes that save together; None: the default group, or this process alone.

    Returns the committed folder. Raises TrainingError, on all processes alike, if the disk is full or fails (the
    previous checkpoint stays, the half-written one is removed).
    """
    folder, peers = Path(folder), Peers(group)
    place = folders.step_folder(folder, step)
    offered = chunks_of(shards)
    plan = _plan(peers, folder, place, [chunk for chunk, _ in offered])
    mine = [offered[i] for i in plan["write"]]
    name = f"{plan['generation']}-{peers.rank:05d}.distcp"
    result: tuple[Any, ...]
    try:
        result = ("written", name, *write_chunks(place / name, mine)) if mine else ("nothing",)
    except Exception as error:  # told to all: a process that fails alone would leave the others waiting
        result = ("failed", _explain(error, folder, plan["bytes"]))
    results = peers.gather(result)
    failure = None
    if peers.rank == 0:
        failure = next((r[1] for r in results if r[0] == "failed"), None)
        if failure is None:
            try:
                _commit(place, step, plan, [r for r in results if r[0] == "written"], state)
                folders.prune(folder, keep)
            except Exception as error:
                failure = _explain(error, folder, plan["bytes"])
        if failure is not None:
            _withdraw(place)
    failure = peers.share(failure)
    if failure is not None:
        raise TrainingError(failure)
    return place


def _plan(peers: Peers, folder: Path, place: Path, chunks: list[Chunk]) -> dict[str, Any]:
    """Agree who writes what; checks the room on the disk and makes the folder."""
    offers = peers.gather(chunks)
    plans: list[Any] = []
    if peers.rank == 0:
        try:
            written = assign(offers)
            total = sum(offers[rank][i].nbytes for rank, indices in enumerate(written) for i in indices)
            plan = {"generation": secrets.token_hex(4), "bytes": total}
            place.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(folder).free
            if free < total:
                raise OSError(errno.ENOSPC, "No space left on device")
            plans = [{**plan, "write": indices} for indices in written]
        except ValueError as error:
            plans = [f"the checkpoint cannot be saved: {error}"] * peers.size
        except OSError as error:
            _withdraw(place)
            plans = [_explain(error, folder, total)] * peers.size
    plan = peers.scatter(plans)
    if isinstance(plan, str):
        raise TrainingError(plan)
    return plan


def _commit(
    place: Path, step: int, plan: dict[str, Any], results: list[tuple[Any, ...]], state: dict[str, Any]
) -> None:
    index = Index.build([stored for _, _, records, _ in results for stored in records])
    files = {name: size_and_crc for _, name, _, size_and_crc in results}
    generation = plan["generation"]
    sequence = 1 + max((commit.sequence for commit in folders.commits(place.parent)), default=0)
    for name, data in ((f"index-{generation}.npz", index.to_bytes()), (METADATA, torch_metadata(index))):
        folders.write_file(place / name, data)
        files[name] = (len(data), zlib.crc32(data))
    commit = Commit(step, sequence, generation, files, state)
    folders.sync_folder(place.parent)
    folders.write_file(place / COMMIT, commit.to_bytes())


def _withdraw(place: Path) -> None:
    """Remove what an unfinished save left, keeping a commit that the folder may hold from before."""
    with contextlib.suppress(OSError, folders.Damaged):
        folders.sweep(place, folders.read_commit(place))


def _explain(error: Exception, folder: Path, needed: int) -> str:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        free = 0
    if isinstance(error, OSError) and error.errno in _NO_ROOM:
        return (
            f"the disk of {str(folder)!r} is full: a checkpoint needs {needed:,} bytes and {free:,} are free; the "
            "previous checkpoint stays as it is. Make room, lower checkpoint.keep, or put train.runs on a larger disk"
        )
    return (
        f"the checkpoint could not be written to {str(folder)!r}: {getattr(error, 'strerror', None) or repr(error)}; the previous checkpoint "
        "stays as it is. Check the folder's rights and the storage, or put train.runs elsewhere"
    )
