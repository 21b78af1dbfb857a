"""Loading from snapshots in the memory of checkpoint services: of this host, or else a replica on a peer host."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megascale.checkpoint.background import snapshot_memory
from megascale.checkpoint.background.huge_pages import identify_memory
from megascale.checkpoint.background.service_protocol import ListSnapshots, OpenedSnapshot, OpenSnapshot
from megascale.checkpoint.chunk_source import ChunkSource, LoadReport
from megascale.checkpoint.copies import FileRange
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex, join_indexes
from megascale.checkpoint.format.write_plan import data_file_name
from megascale.checkpoint.loader import AcceptState, fill_shards
from megascale.checkpoint.object_collectives import Peers
from megascale.services.conversation import Conversation

if TYPE_CHECKING:
    from megascale.checkpoint.background.staging import StagingSlot

# Bytes that a process sends per round if they are on a GPU. A round takes milliseconds besides its bytes.
_DEVICE_ROUND_BYTES = 128 << 20
_DEVICE_ROUNDS_AHEAD = 4  # with parts of 16 MB, enough for 32 threads


@dataclass(frozen=True)
class MemorySave:
    """Save in the memory of a group's hosts.

    Attributes:
        holders: for each rank that saved, the processes of this group whose host has the rank's snapshot. None has the
            snapshot of a rank if the save is incomplete.
        replicas: number of snapshots of which only a peer has a replica.
    """

    step: int
    generation: str
    holders: list[list[int]]
    replicas: int

    @property
    def sequence(self) -> int:
        """Return the number of the save in its folder."""
        return int(self.generation[:8])

    @property
    def is_complete(self) -> bool:
        """Return whether some host has each rank's snapshot."""
        return all(self.holders)


@dataclass(frozen=True)
class DescribedSave:
    """Index of a save in memory, with checksums, and the saved state besides tensors.

    The state is empty if the first rank's snapshot is missing.
    """

    index: CheckpointIndex
    state: dict[str, Any]


@dataclass
class _OpenSnapshot:
    """Snapshot that is mapped into this process, with its description and its index as bytes.

    Attributes:
        mapping: the memory. Its pages are mapped when they are first read.
        descriptor: descriptor of the memory, which this object closes.
        slot_memory: the memory as a slot of this process has it, from which its device can copy; None without a slot.
        is_read: whether bytes of the mapping were read.
    """

    mapping: mmap.mmap
    descriptor: int
    message: OpenedSnapshot
    index: bytes
    slot_memory: np.ndarray | None = None
    is_read: bool = False

    def __post_init__(self) -> None:
        weakref.finalize(self, os.close, self.descriptor)


class MemorySnapshots:
    """Snapshots of one save in this host's service, which are mapped on first use.

    A snapshot has tens of GB, whose pages take seconds to map. From the first read on, threads map the pages while the
    first chunks are checked and copied. A snapshot that is not read through its mapping costs no time.

    Args:
        service: conversation with the host's service, or None without a service.
        slots: staging memory of this process. A snapshot that is in one of the slots is read from there.
    """

    def __init__(self, service: Conversation | None, generation: str, slots: Sequence[StagingSlot] = ()) -> None:
        self._service = service
        self._generation = generation
        self._slots = {slot.identity: slot for slot in slots}
        self._opened: dict[int, _OpenSnapshot] = {}
        self._lock = threading.Lock()  # several threads read at the same time

    def open(self, rank: int) -> _OpenSnapshot:
        """Return the snapshot of a rank. Raises OSError if the service no longer has it."""
        with self._lock:
            if rank not in self._opened:
                assert self._service is not None, "a process without a service holds no snapshot"
                message = self._service.request(OpenSnapshot(rank, self._generation))
                index = bytes(self._service.body)
                (descriptor,) = self._service.files
                try:
                    mapping = mmap.mmap(descriptor, message.size, mmap.MAP_SHARED, mmap.PROT_READ)
                except OSError:
                    os.close(descriptor)
                    raise
                slot = self._slots.get(identify_memory(descriptor))
                slot_memory = None
                if slot is not None and len(slot.map) >= message.size:
                    slot_memory = slot.copyable_memory
                self._opened[rank] = _OpenSnapshot(mapping, descriptor, message, index, slot_memory)
            return self._opened[rank]

    def read(self, rank: int, start: int, stop: int) -> memoryview:
        """Return the bytes from `start` up to `stop` of a rank's snapshot. Raises OSError as `open`."""
        snapshot = self.open(rank)
        if snapshot.slot_memory is not None:
            return snapshot.slot_memory.data[start:stop]
        with self._lock:
            is_first = not snapshot.is_read
            snapshot.is_read = True
        if is_first:
            threading.Thread(
                target=_map_pages, args=(snapshot.mapping,), name="megascale-map-snapshot", daemon=True
            ).start()
        return memoryview(snapshot.mapping)[start:stop]

    def find_range(self, rank: int, start: int, stop: int) -> FileRange:
        """Return the range from `start` up to `stop` of a rank's snapshot. Raises OSError as `open`."""
        snapshot = self.open(rank)
        return FileRange(snapshot.descriptor, 0, snapshot.message.size, snapshot.slot_memory).cut(start, stop)


def _map_pages(mapping: mmap.mmap) -> None:
    """Map all pages of a snapshot in advance. Otherwise each access to a page would wait until it is mapped."""
    with contextlib.suppress(OSError):
        snapshot_memory.fill_pages(mapping, writable=False)


class MemoryChunks(ChunkSource):
    """Chunks of a save in memory, where each snapshot is one data file."""

    has_ranges = True
    max_rounds_ahead = 8  # more than for storage, because one thread only checks 2 to 3 GB/s

    def __init__(
        self,
        name: str,
        index: CheckpointIndex,
        state: dict[str, Any],
        save: MemorySave,
        snapshots: MemorySnapshots,
        *,
        is_on_device: bool,
    ) -> None:
        file_holders = {f"-{data_file_name(rank)}": holders for rank, holders in enumerate(save.holders)}
        super().__init__(name, index, state, {file: file_holders[file] for file in index.files})
        self._snapshots = snapshots
        if is_on_device:
            self.round_bytes = _DEVICE_ROUND_BYTES
            self.max_rounds_ahead = _DEVICE_ROUNDS_AHEAD

    def read(self, file: str, start: int, stop: int) -> memoryview:
        return self._snapshots.read(_parse_rank(file), start, stop)

    def find_range(self, file: str, start: int, stop: int) -> FileRange:
        return self._snapshots.find_range(_parse_rank(file), start, stop)


def _parse_rank(file: str) -> int:
    """Return the rank whose snapshot is a data file of a save in memory."""
    return int(file.removeprefix("-").split(".")[0])


class _ListedSnapshot(NamedTuple):
    """Snapshot in the memory of a host's service (see service_protocol.SnapshotInfo)."""

    rank: int
    is_replica: bool
    generation: str
    ranks: int
    step: int


@dataclass
class _SnapshotHolders:
    """Processes of this group whose host has the snapshot of a rank, or a replica of it."""

    original: list[int] = field(default_factory=list)
    replica: list[int] = field(default_factory=list)


def find_memory_save(service: Conversation | None, peers: Peers, identity: str) -> MemorySave | None:
    """Return the newest save whose snapshots are all in the memory of some host, or None. Collective.

    Arguments are those of `list_memory_saves`.
    """
    return next((save for save in list_memory_saves(service, peers, identity) if save.is_complete), None)


def list_memory_saves(service: Conversation | None, peers: Peers, identity: str) -> list[MemorySave]:
    """Return all saves of which some host has a snapshot in memory, the newest first. Collective.

    Args:
        service: conversation with the host's service, or None without a service.
        identity: identity of the checkpoints folder.
    """
    listed: list[_ListedSnapshot] = []
    if service is not None:
        with contextlib.suppress(OSError):
            for info in service.request(ListSnapshots()).snapshots:
                if info.identity == identity:
                    listed.append(_ListedSnapshot(info.rank, info.replica, info.generation, info.ranks, info.step))
    holders: dict[str, dict[int, _SnapshotHolders]] = {}  # by generation and rank
    descriptions: dict[str, _ListedSnapshot] = {}  # some snapshot of each generation
    for process, process_snapshots in enumerate(peers.all_gather(listed, list[_ListedSnapshot])):
        for snapshot in process_snapshots:
            snapshot_holders = holders.setdefault(snapshot.generation, {}).setdefault(snapshot.rank, _SnapshotHolders())
            if snapshot.is_replica:
                snapshot_holders.replica.append(process)
            else:
                snapshot_holders.original.append(process)
            descriptions[snapshot.generation] = snapshot
    saves = []
    for generation in sorted(holders, reverse=True):
        description = descriptions[generation]
        rank_holders = [holders[generation].get(rank, _SnapshotHolders()) for rank in range(description.ranks)]
        replica_count = sum(bool(holder.replica) and not holder.original for holder in rank_holders)
        processes = [holder.original or holder.replica for holder in rank_holders]
        saves.append(MemorySave(description.step, generation, processes, replica_count))
    return saves


def load_memory_save(
    service: Conversation | None,
    save: MemorySave,
    shards: Sequence[TensorShard],
    peers: Peers,
    report: LoadReport | None = None,
    *,
    accept: AcceptState | None = None,
    covers_model: bool = False,
    slots: Sequence[StagingSlot] = (),
) -> dict[str, Any] | str:
    """Fill shards from a save in memory. Collective.

    Args:
        accept, covers_model: as for `loader.load`.
        slots: staging memory of this process, which may have its snapshot.

    Returns:
        The saved state, or a description of the damage, the same on all processes.
    """
    snapshots = MemorySnapshots(service, save.generation, slots)
    described = describe_memory_save(snapshots, save, peers)
    if isinstance(described, str):
        return described
    name = f"memory, step {save.step}"
    is_new_optimizer = accept is not None and accept(described.state, name)
    is_on_device = peers.exchange_device.type == "cuda"
    source = MemoryChunks(name, described.index, described.state, save, snapshots, is_on_device=is_on_device)
    damage = fill_shards(source, shards, peers, report, covers_model=covers_model, is_new_optimizer=is_new_optimizer)
    return damage or described.state


def describe_memory_save(snapshots: MemorySnapshots, save: MemorySave, peers: Peers) -> DescribedSave | str:
    """Return index and state of a save, or a description of its damage, the same on all processes. Collective.

    The index of an incomplete save lacks the chunks of the missing snapshots.
    """
    problem = None
    descriptions = {}  # index with checksums and state of the snapshots that this process has to describe, by rank
    try:
        for rank, holders in enumerate(save.holders):
            if holders and holders[0] == peers.rank:  # one of the holders describes the snapshot to all processes
                snapshot = snapshots.open(rank)
                crcs = np.array(snapshot.message.crcs, np.uint32)
                index = CheckpointIndex.from_bytes(snapshot.index).with_generation("", crcs)
                descriptions[rank] = (index.to_bytes(), snapshot.message.state if rank == 0 else "")
    except OSError as error:
        problem = str(error)
    answers = peers.all_gather((problem, descriptions), tuple[str | None, dict[int, tuple[bytes, str]]])
    problem = next((text for text, _ in answers if text), None)
    if problem:
        return problem
    all_descriptions: dict[int, tuple[bytes, str]] = {}
    for _, process_descriptions in answers:
        all_descriptions |= process_descriptions
    indexes = [CheckpointIndex.from_bytes(all_descriptions[rank][0]) for rank in sorted(all_descriptions)]
    state: dict[str, Any] = {}
    if 0 in all_descriptions:
        state = json.loads(all_descriptions[0][1])
    return DescribedSave(join_indexes(indexes), state)
