"""Loading from snapshots that services still hold in memory: this host's own, otherwise a replica on a peer's host."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.checkpoint.background import snapshot_memory
from megascale.checkpoint.background.service_protocol import ListSnapshots, OpenedSnapshot, OpenSnapshot
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex, join_indexes
from megascale.checkpoint.format.write_plan import data_file_name
from megascale.checkpoint.loader import AcceptState, ChunkSource, LoadReport, fill_shards
from megascale.checkpoint.object_collectives import Peers
from megascale.services.conversation import Conversation


@dataclass(frozen=True)
class MemorySave:
    """A save that is complete in the memory of a group's hosts.

    Attributes:
        step: step of the saved state.
        generation: generation of the save.
        holders: for each process that saved, the processes of this group whose host has its snapshot.
        replicas: number of snapshots of which only a peer's replica is left.
    """

    step: int
    generation: str
    holders: list[list[int]]
    replicas: int

    @property
    def sequence(self) -> int:
        """Return the number of the save in its folder."""
        return int(self.generation[:8])


@dataclass
class _OpenSnapshot:
    """A snapshot that is mapped into this process: its memory, its description and its index as bytes."""

    mapping: mmap.mmap
    message: OpenedSnapshot
    index: bytes
    is_read: bool = False


class MemorySnapshots:
    """The snapshots of one save that this host's service holds, mapped on first use.

    A snapshot has tens of GB, whose pages take seconds to map. Threads map them from the first read on, while the first
    chunks are checked and copied. A snapshot of which nothing is read, as that of a rank whose state stays, costs
    nothing.

    Args:
        service: conversation with the host's service, None if there is none.
    """

    def __init__(self, service: Conversation | None, generation: str) -> None:
        self._service = service
        self._generation = generation
        self._opened: dict[int, _OpenSnapshot] = {}
        self._lock = threading.Lock()  # several rounds are read at once

    def open(self, rank: int) -> _OpenSnapshot:
        """Return the snapshot of a process. Raises OSError if the service cannot give it."""
        with self._lock:
            if rank not in self._opened:
                assert self._service is not None, "a process without a service holds no snapshot"
                message = self._service.request(OpenSnapshot(rank, self._generation))
                index = bytes(self._service.body)
                (handle,) = self._service.files
                try:
                    mapping = mmap.mmap(handle, message.size, mmap.MAP_SHARED, mmap.PROT_READ)
                finally:
                    os.close(handle)
                self._opened[rank] = _OpenSnapshot(mapping, message, index)
            return self._opened[rank]

    def read(self, rank: int, start: int, stop: int) -> memoryview:
        """Return the bytes `start .. stop` of a process's snapshot. Raises OSError as `open` does."""
        snapshot = self.open(rank)
        with self._lock:
            is_first = not snapshot.is_read
            snapshot.is_read = True
        if is_first:
            threading.Thread(
                target=_map_pages, args=(snapshot.mapping,), name="megascale-map-snapshot", daemon=True
            ).start()
        return memoryview(snapshot.mapping)[start:stop]


def _map_pages(mapping: mmap.mmap) -> None:
    """Map all pages of a snapshot ahead of their reads, which otherwise map them one by one."""
    with contextlib.suppress(OSError):
        snapshot_memory.fill_pages(mapping, writable=False)


class MemoryChunks(ChunkSource):
    """The chunks of a save in memory; each snapshot is one data file."""

    max_rounds_ahead = 8  # one thread checks 2 to 3 GB/s, and chunks that stay on their host are not copied for it

    def __init__(
        self, name: str, index: CheckpointIndex, state: dict[str, Any], save: MemorySave, snapshots: MemorySnapshots
    ) -> None:
        file_holders = {f"-{data_file_name(rank)}": holders for rank, holders in enumerate(save.holders)}
        super().__init__(name, index, state, {file: file_holders[file] for file in index.files})
        self._snapshots = snapshots

    def read(self, file: str, start: int, stop: int) -> memoryview:
        rank = int(file.removeprefix("-").split(".")[0])
        return self._snapshots.read(rank, start, stop)


def find_memory_save(service: Conversation | None, peers: Peers, identity: str) -> MemorySave | None:
    """Return the newest save whose snapshots are all in some host's memory, None if there is none; collective.

    Args:
        service: conversation with the host's service, None if there is none.
        identity: identity of the checkpoints folder.
    """
    entries = []
    if service is not None:
        with contextlib.suppress(OSError):
            for s in service.request(ListSnapshots()).snapshots:
                if s.identity == identity:
                    entries.append((s.rank, s.replica, s.generation, s.ranks, s.step))
    saves: dict[str, dict[int, tuple[list[int], list[int]]]] = {}  # holders of each snapshot and of its replica
    facts: dict[str, tuple[int, int]] = {}  # (number of processes, step) of each save
    for member, member_entries in enumerate(peers.all_gather(entries, list[tuple[int, bool, str, int, int]])):
        for rank, is_replica, generation, ranks, step in member_entries:
            owners, replicas = saves.setdefault(generation, {}).setdefault(rank, ([], []))
            (replicas if is_replica else owners).append(member)
            facts[generation] = (ranks, step)
    for generation in sorted(saves, reverse=True):
        snapshots = saves[generation]
        ranks, step = facts[generation]
        if len(snapshots) == ranks:
            holders = [snapshots[rank][0] or snapshots[rank][1] for rank in range(ranks)]
            return MemorySave(step, generation, holders, sum(not snapshots[rank][0] for rank in range(ranks)))
    return None


def load_memory_save(
    service: Conversation | None,
    save: MemorySave,
    shards: Sequence[TensorShard],
    peers: Peers,
    report: LoadReport | None = None,
    *,
    accept: AcceptState | None = None,
    complete: bool = False,
) -> dict[str, Any] | str:
    """Fill shards from memory; collective.

    Args:
        accept: as for `loader.load`.
        complete: as for `loader.load`.

    Returns the saved state, or a description of the damage, the same on all processes.
    """
    snapshots = MemorySnapshots(service, save.generation)
    problem = None
    parts = {}
    try:
        for rank, holders in enumerate(save.holders):
            if holders[0] == peers.rank:
                snapshot = snapshots.open(rank)
                crcs = np.array(snapshot.message.crcs, np.uint32)
                index = CheckpointIndex.from_bytes(snapshot.index).with_generation("", crcs)
                parts[rank] = (index.to_bytes(), snapshot.message.state if rank == 0 else "")
    except OSError as error:
        problem = str(error)
    answers = peers.all_gather((problem, parts), tuple[str | None, dict[int, tuple[bytes, str]]])
    problem = next((text for text, _ in answers if text), None)
    if problem:
        return problem
    all_parts = {rank: part for _, member_parts in answers for rank, part in member_parts.items()}
    index = join_indexes([CheckpointIndex.from_bytes(all_parts[rank][0]) for rank in range(len(save.holders))])
    state: dict[str, Any] = json.loads(all_parts[0][1])
    name = f"memory, step {save.step}"
    new_optimizer = accept is not None and accept(state, name)
    source = MemoryChunks(name, index, state, save, snapshots)
    damage = fill_shards(source, shards, peers, report, complete=complete, new_optimizer=new_optimizer)
    return damage or state
