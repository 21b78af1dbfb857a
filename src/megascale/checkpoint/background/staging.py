"""Staging memory as a trainer uses it: shared with the service, and page-locked if a device copies into it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megascale.checkpoint.background.service_protocol import AwaitPages, StageSnapshot
from megascale.checkpoint.background.snapshot_memory import fill_pages
from megascale.checkpoint.format.archive import element_size
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.write_plan import RankPart, data_file_name, make_offer
from megascale.checkpoint.saver import ShardChunk, dtype_name
from megascale.checkpoint.storage.base import PAGE
from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.services.conversation import Conversation

log = logging.getLogger(__name__)

_REPORT_BYTES = 32 << 20  # copied between two progress reports to the service
_REPLICA_TIMEOUT = 5.0  # seconds of waiting for one replica, after which a silent peer counts as lost


@dataclass
class SaveOutcome:
    """The outcome of a save.

    Attributes:
        step: step of the saved state.
        committed: the checkpoint is complete in storage. Only the first process learns of it; on other processes, and
            for snapshots that stay in memory, it is False with an empty `reason`.
        reason: why the save failed, "" if it did not.
        record: the fault as a code.
        bytes: size of the checkpoint.
        stall: seconds that training waited for it on this process, copy included.
        seconds: from the start of the copy to the end of the service's work (to the commit where that is known).
        replica: error of the replica on a peer, None if there was none.
    """

    step: int
    committed: bool = False
    reason: str = ""
    record: ExitRecord = NO_RECORD
    bytes: int = 0
    stall: float = 0.0
    seconds: float = 0.0
    replica: str | None = None


@dataclass
class SnapshotCopy:
    """A copy of the state to host memory that is under way.

    Attributes:
        outcome: filled in while the save proceeds.
        message: description of the snapshot for the service.
        started: monotonic time of the start.
        copied: set once all of it is in host memory.
        replicated: set once it is complete there and at the peer, or has failed.
        event: recorded after the device's copies.
        waits: device events before and after the wait of the training stream.
    """

    outcome: SaveOutcome
    message: StageSnapshot
    started: float
    copied: threading.Event = field(default_factory=threading.Event)
    replicated: threading.Event = field(default_factory=threading.Event)
    event: torch.cuda.Event | None = None
    waits: tuple[torch.cuda.Event, torch.cuda.Event] | None = None


class ReplicaBarrier:
    """Delays optimizer updates until the last snapshot is in the peer's memory, so that a lost host costs one step.

    The weights of step n+1 exist only once the snapshot of step n no longer depends on its host. Where the network is
    slower than a step, the step becomes as long as the replica's copy. Where the peer does not reply, training goes on.

    Args:
        timeout: seconds to wait for one replica.
    """

    def __init__(self, timeout: float = _REPLICA_TIMEOUT) -> None:
        self._timeout = timeout
        self._last: SnapshotCopy | None = None
        self._late: SnapshotCopy | None = None

    def track(self, copy: SnapshotCopy) -> None:
        """Make `copy` the last snapshot."""
        self._last = copy

    def wait(self) -> None:
        """Wait for the last snapshot's replica, up to the timeout; do not wait while an earlier replica is late."""
        copy = self._last
        if copy is None or copy.message.peer is None:
            return
        if self._late is not None and not self._late.replicated.is_set():
            return
        self._late = None
        begun = time.monotonic()
        if not copy.replicated.wait(self._timeout):
            self._late = copy
            log.warning(
                "the snapshot of step %s is not at the peer after %g s; training goes on, and a host that is lost now "
                "costs more than one step (checkpoint.memory_interval, or a faster network)",
                copy.message.step,
                self._timeout,
            )
        copy.outcome.stall += time.monotonic() - begun


class ServiceConnections:
    """Connections of threads with the host's service, which another thread can end.

    Args:
        connect: returns a new connection.

    Attributes:
        end_reason: why they were ended, "" before that.
    """

    def __init__(self, connect: Callable[[], Conversation]) -> None:
        self.end_reason = ""
        self._connect = connect
        self._opened: list[Conversation] = []
        self._lock = threading.Lock()

    def open(self) -> Conversation:
        """Return a new connection, which its thread closes. Raises ConnectionError after `end`."""
        if self.end_reason:
            raise ConnectionError(self.end_reason)
        conversation = self._connect()
        with self._lock:
            self._opened.append(conversation)
            if self.end_reason:
                conversation.shut_down()
        return conversation

    def end(self, reason: str) -> None:
        """Have every wait for a reply fail, now and later. The service completes what it has begun."""
        with self._lock:
            self.end_reason = reason
            for conversation in self._opened:
                conversation.shut_down()


class StagingSlot:
    """One snapshot in shared memory on the trainer's side, with the queue of the thread that copies into it.

    Args:
        handle: file descriptor of the memory.
        size: bytes.
        index: the chunks of this process's file.
        chunks: their elements in live memory.
        device: device of the live memory.
        generation: generation of a complete snapshot that the memory already holds, "" if none.

    Attributes:
        memory_id: identity of the shared memory.
        generation: generation of the snapshot.
        complete: whether the service has all of it.
        prepared: set once `prepare` has ended.
        failed: whether `prepare` failed.
        free: set while no thread or service works on the slot.
        work: copies for the slot's thread; None ends it.
    """

    def __init__(
        self,
        handle: int,
        size: int,
        index: CheckpointIndex,
        chunks: Sequence[ShardChunk],
        device: torch.device,
        generation: str = "",
    ) -> None:
        self.memory_id = identify_memory(handle)
        self.map = mmap.mmap(handle, max(size, PAGE), mmap.MAP_SHARED)
        os.close(handle)
        self._device = device
        self._pinned = False
        self._tried_pinning = False
        self._service: Conversation | None = None
        self.attach(index, chunks, generation)

    def attach(self, index: CheckpointIndex, chunks: Sequence[ShardChunk], generation: str) -> None:
        """Begin to serve live memory, for the first time or after `detach`; arguments as those of the class."""
        self._release_service()
        self.generation = generation
        self.complete = bool(generation)
        self.prepared = threading.Event()
        self.failed = False
        self.free = threading.Event()
        self.work: queue.SimpleQueue[SnapshotCopy | None] = queue.SimpleQueue()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # (staging memory, live memory) of each chunk
        memory = torch.frombuffer(self.map, dtype=torch.uint8)
        for row, chunk in enumerate(chunks):
            start = int(index.columns["data"][row])
            stop = start + chunk.box.count * element_size(chunk.info.dtype)
            target = memory[start:stop].view(getattr(torch, chunk.info.dtype)).reshape(chunk.box.sizes)
            self.pairs.append((target, chunk.view()))

    def detach(self, service: Conversation) -> None:
        """Drop the live memory. The staging memory stays mapped and page-locked, which tens of gigabytes take long.

        The connection stays open until `attach` or `close`, so that the service and its snapshots outlast a long wait.
        """
        self.pairs.clear()
        self._service = service

    def _release_service(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None

    def prepare(self, service: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        """Map the pages once the service has cleared them. Raises OSError if memory is insufficient.

        With tens of gigabytes this takes many seconds, during which training goes on.
        """
        while not stop.is_set() and not service.request(question).ready:
            pass
        fill_pages(self.map, stop=stop)

    def mark_prepared(self) -> None:
        """Allow the slot to be filled, unless `prepare` failed."""
        if not self.failed:
            self.free.set()
        self.prepared.set()

    def page_lock(self) -> bool:
        """Page-lock the memory if it serves a device, at the first call; return whether it is page-locked.

        The driver launches no kernels meanwhile, and ranks wait for each other's kernels, so all ranks do it at once
        between steps.
        """
        if self._device.type == "cuda" and not self._tried_pinning:
            self._pinned = _page_lock(self.map)
            self._tried_pinning = True
        return self._pinned

    def copy_chunks(self) -> Iterator[int]:
        """Copy all chunks in file order; yield the number of copied chunks from time to time and at the end."""
        copied_bytes = 0
        for row, (target, source) in enumerate(self.pairs):
            target.copy_(source)
            copied_bytes += target.nbytes
            if copied_bytes >= _REPORT_BYTES and row + 1 < len(self.pairs):
                yield row + 1
                copied_bytes = 0
        yield len(self.pairs)

    def close(self) -> None:
        """Release the memory in this process."""
        self._release_service()
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(ctypes.c_char.from_buffer(self.map)))
            self._pinned = False
        self.pairs.clear()
        with contextlib.suppress(BufferError):  # a tensor still uses it, with which it is released
            self.map.close()


def identify_memory(handle: int) -> tuple[int, int]:
    """Return the identity of the shared memory behind a descriptor, for as long as somebody holds it."""
    status = os.fstat(handle)
    return status.st_dev, status.st_ino


def choose_slot(
    free: Sequence[bool],
    complete: Sequence[bool],
    generations: Sequence[str],
    origin: Sequence[bool],
    one_at_first: bool,
    keeps_newest: bool = False,
) -> int | None:
    """Return the slot of the next snapshot, None if no slot may be overwritten yet.

    Each process must choose the same slot, and a snapshot that is complete everywhere must stay until another one is:
    otherwise a kill could leave each process with a snapshot of another step.

    Args:
        free: for each slot, whether it is free on every process.
        complete: for each slot, whether its snapshot is complete on every process.
        generations: generation of each slot's snapshot on this process; where complete, the same on all.
        origin: for each slot, whether some process has in it the snapshot that the run began from. Other processes may
            have that from a peer.
        one_at_first: until a snapshot of this start is complete everywhere, make one at a time: the run began from
            memory, or a lost process must cost one step only.
        keeps_newest: leave the newest complete snapshot until another one is complete. Otherwise it is overwritten
            while an older one is written to storage, and a loss during that goes back to the older one.
    """
    if one_at_first and not any(complete) and not all(free):
        return None
    is_valuable = [a or b for a, b in zip(complete, origin, strict=True)]
    newest = max((generations[i] for i in range(len(free)) if complete[i]), default="")
    usable = []
    for i in range(len(free)):
        has_alternative = len(free) == 1 or any(complete[:i]) or any(complete[i + 1 :])
        if keeps_newest and len(free) > 1 and complete[i] and generations[i] == newest:
            has_alternative = False
        if free[i] and (not is_valuable[i] or has_alternative):
            usable.append(i)
    # Slots without a valuable snapshot are overwritten first, then the oldest snapshot.
    return min(usable, key=lambda i: (is_valuable[i], generations[i] if complete[i] else ""), default=None)


def _page_lock(memory: mmap.mmap) -> bool:
    """Page-lock shared memory for copies from the device; log a warning and return False if that is refused."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)
    if int(code) != 0:
        log.warning(
            "%s bytes of staging memory could not be page-locked (CUDA error %s): slow copies", len(memory), code
        )
        return False
    return True


def make_rank_index(shards: Sequence[TensorShard], part: RankPart, rank: int) -> CheckpointIndex:
    """Return the index of the chunks that this process writes, in file order."""
    offer = make_offer((s.name, s.shape, dtype_name(s.tensor), s.box) for s in shards)
    columns = {
        "tensor": offer.tensor[part.chunks],
        "in_file": np.zeros(len(part.chunks), np.int32),
        "start": part.start,
        "length": part.length,
        "data": part.data,
        "crc": np.zeros(len(part.chunks), np.uint32),
        "box": offer.box[part.chunks],
    }
    return CheckpointIndex(offer.tensors, [data_file_name(rank)], columns)
