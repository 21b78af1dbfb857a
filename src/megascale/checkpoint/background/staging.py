"""Trainer's side of staging memory, which is shared with the service, and of the saves that use it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from megascale.checkpoint.background.huge_pages import identify_memory
from megascale.checkpoint.background.service_protocol import AwaitPages, StageSnapshot
from megascale.checkpoint.background.snapshot_memory import fill_pages
from megascale.checkpoint.format.archive import element_size
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.write_plan import RankFileLayout, data_file_name, make_offer
from megascale.checkpoint.saver import ShardChunk, get_dtype_name
from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.services.conversation import Conversation

log = logging.getLogger(__name__)

_REPORT_BYTES = 32 << 20  # bytes between two progress reports to the service
CHECK_SECONDS = 0.05  # between two checks whether a waiting thread must go on without the event
_PREPARE_TIMEOUT = 600.0  # seconds within which the service must free and clear the memory of a slot
_REPLICA_TIMEOUT = 5.0  # seconds to wait for one replica, after which its peer counts as late


@dataclass
class SaveOutcome:
    """Outcome of a save.

    Attributes:
        committed: whether the checkpoint is complete in storage. Only the first process knows it. On other processes,
            and for snapshots that stay in memory, it is False with an empty `reason`.
        reason: reason of a failure, or an empty text.
        record: record of the fault.
        bytes: size of the checkpoint in bytes.
        stall: seconds that training on this process waited for the save, copy included.
        seconds: time from the start of the copy to the commit, or without a known commit to the end of the service's
            work.
        replica: error message if the replica on a peer failed, or None.
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
    """Copy of the state to host memory that is under way.

    Attributes:
        outcome: outcome of the save, filled in while the save proceeds.
        message: description of the snapshot for the service.
        start_time: time.monotonic() at the start.
        copied: set once the whole copy is in host memory.
        replicated: set once the snapshot is complete in host memory and at the peer, or has failed.
        event: device event after the copies, if a device copies.
        waits: device events before and after the wait of the training stream for the copies.
    """

    outcome: SaveOutcome
    message: StageSnapshot
    start_time: float
    copied: threading.Event = field(default_factory=threading.Event)
    replicated: threading.Event = field(default_factory=threading.Event)
    event: torch.cuda.Event | None = None
    waits: tuple[torch.cuda.Event, torch.cuda.Event] | None = None


def wait_for(event: threading.Event, check: Callable[[], None], timeout: float = math.inf) -> bool:
    """Wait for an event, and return whether it came within the time.

    Args:
        check: called several times per second. It raises an error if the thread must not wait any longer.
        timeout: limit in seconds.
    """
    deadline = time.monotonic() + timeout
    while not event.wait(min(CHECK_SECONDS, max(0.0, deadline - time.monotonic()))):
        check()
        if time.monotonic() >= deadline:
            return False
    return True


class ReplicaBarrier:
    """Wait before optimizer updates for the replica of the last snapshot, so that a lost host costs one step.

    With the wait, the weights of step n+1 exist only after the snapshot of step n has been replicated. If the network
    is slower than a step, the step takes as long as the replication. If the peer does not reply, training goes on.

    Args:
        timeout: seconds to wait for one replica.
    """

    def __init__(self, timeout: float = _REPLICA_TIMEOUT) -> None:
        self._timeout = timeout
        self._last: SnapshotCopy | None = None
        self._late: SnapshotCopy | None = None  # a copy whose replica did not come within the time-out

    def track(self, copy: SnapshotCopy) -> None:
        """Make `copy` the last snapshot."""
        self._last = copy

    def wait(self, check: Callable[[], None] = lambda: None) -> None:
        """Wait for the last snapshot's replica, up to the time-out. Return at once while an earlier replica is late.

        Args:
            check: as for `wait_for`.
        """
        copy = self._last
        if copy is None or copy.message.peer is None:
            return
        if self._late is not None and not self._late.replicated.is_set():
            return
        self._late = None
        start_time = time.monotonic()
        if not wait_for(copy.replicated, check, self._timeout):
            self._late = copy
            log.warning(
                "the snapshot of step %s is not at the peer after %g s; training goes on, and a host that is lost now "
                "costs more than one step (checkpoint.memory_interval, or a faster network)",
                copy.message.step,
                self._timeout,
            )
        copy.outcome.stall += time.monotonic() - start_time


class ServiceConnections:
    """Connections of several threads to the host's service, which another thread can end together.

    Attributes:
        end_reason: reason of the end, or an empty text before the end.
    """

    def __init__(self, connect: Callable[[], Conversation]) -> None:
        self.end_reason = ""
        self._connect = connect
        self._opened: list[Conversation] = []
        self._lock = threading.Lock()

    def open(self) -> Conversation:
        """Return a new connection, which the calling thread must close. Raises ConnectionError after `end`."""
        if self.end_reason:
            raise ConnectionError(self.end_reason)
        conversation = self._connect()
        with self._lock:
            self._opened.append(conversation)
            if self.end_reason:
                conversation.shut_down()
        return conversation

    def end(self, reason: str) -> None:
        """Let all waits for replies fail, now and later. The service still completes the work that it has started."""
        with self._lock:
            self.end_reason = reason
            for conversation in self._opened:
                conversation.shut_down()


class StagingSlot:
    """Shared memory for one snapshot on the trainer's side, with the queue of the thread that copies into it.

    Args:
        descriptor: file descriptor of the memory. The caller closes it.
        index: index of this process's file.
        chunks: chunks of the file in live memory, in the order of `index`.
        generation: generation of a complete snapshot that the memory already contains, or an empty text.

    Attributes:
        identity: identity of the shared memory (`identify_memory`).
        prepared: set once `prepare` has ended.
        prepared_time: `time.monotonic()` of that; 0 before.
        has_failed: whether `prepare` failed.
        free: set while neither the slot's thread nor the service uses the slot.
        work: queue of copies for the slot's thread. None ends the thread.
        pairs: staging memory and live memory of each chunk, in file order.
    """

    def __init__(
        self,
        descriptor: int,
        index: CheckpointIndex,
        chunks: Sequence[ShardChunk],
        device: torch.device,
        generation: str = "",
    ) -> None:
        self.identity = identify_memory(descriptor)
        self.map = mmap.mmap(descriptor, 0, mmap.MAP_SHARED)  # all of the memory
        self._is_mapped = False  # whether all pages are populated in this process
        self._parts = "not mapped in advance"  # times of `prepare`, for the log
        self._device = device
        self._is_page_locked = False
        self._has_tried_page_lock = False
        self._service: Conversation | None = None
        self.attach(index, chunks, generation)

    def attach(self, index: CheckpointIndex, chunks: Sequence[ShardChunk], generation: str) -> None:
        """Assign live memory to the slot, for the first time or after `detach`. Arguments are those of the class."""
        self._release_service()
        self.generation = generation
        self.is_complete = bool(generation)
        self.prepared = threading.Event()
        self.prepared_time = 0.0
        self.has_failed = False
        self.free = threading.Event()
        self.work: queue.SimpleQueue[SnapshotCopy | None] = queue.SimpleQueue()
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        memory = torch.frombuffer(self.map, dtype=torch.uint8)
        for row, chunk in enumerate(chunks):
            start = int(index.columns["data"][row])
            stop = start + chunk.box.count * element_size(chunk.info.dtype)
            target = memory[start:stop].view(getattr(torch, chunk.info.dtype)).reshape(chunk.box.sizes)
            self.pairs.append((target, chunk.view()))

    def detach(self, service: Conversation) -> None:
        """Release the live memory, but keep the staging memory.

        Mapping and page-locking tens of gigabytes takes long, so both stay in place for the next `attach`. The
        connection stays open until `attach` or `close`, so that the service does not end meanwhile.
        """
        self.pairs.clear()
        self._service = service

    def _release_service(self) -> None:
        if self._service is not None:
            self._service.close()
            self._service = None

    def prepare(self, service: Conversation, question: AwaitPages, stop: threading.Event) -> None:
        """Map the pages once the service has cleared them. Training goes on during the many seconds that this may take.

        Args:
            question: message that asks the service whether the slot's pages are ready.
            stop: event that ends the work early.

        Raises:
            OSError: memory is insufficient, or the service has not freed it within _PREPARE_TIMEOUT seconds.
        """
        start_time = time.monotonic()
        deadline = start_time + _PREPARE_TIMEOUT
        while not stop.is_set() and not service.request(question).ready:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the checkpoint service has not freed this memory for {_PREPARE_TIMEOUT:g} s: it still writes the "
                    "snapshot of an ended process; check that checkpoint.location accepts writes"
                )
        if not self._is_mapped:
            ready_time = time.monotonic()
            fill_pages(self.map, stop=stop)
            self._is_mapped = not stop.is_set()
            mapped_seconds = time.monotonic() - ready_time
            self._parts = f"cleared {ready_time - start_time:.2f} s after its request, mapped in {mapped_seconds:.2f} s"

    def mark_prepared(self) -> None:
        """Record that `prepare` has ended. Unless it failed, the slot is free from now on."""
        self.prepared_time = time.monotonic()
        if not self.has_failed:
            self.free.set()
        self.prepared.set()

    @property
    def copyable_memory(self) -> np.ndarray | None:
        """Return the memory ([size] uint8) if the device can copy from it directly, else None."""
        if self._device.type == "cuda" and not self._is_page_locked:
            return None
        return np.frombuffer(self.map, np.uint8)

    def page_lock(self) -> bool:
        """Page-lock the memory at the first call if a device copies into it, and return whether it is page-locked.

        Page-locking blocks kernel launches, and ranks wait for each other's kernels. All ranks should therefore call
        this method at the same time, between steps.
        """
        if self._device.type == "cuda" and not self._has_tried_page_lock:
            start_time = time.monotonic()
            self._is_page_locked = _page_lock(self.map)
            self._has_tried_page_lock = True
            seconds = time.monotonic() - start_time
            log.info("%.2f GB for a snapshot: %s, page-locked in %.2f s", len(self.map) / 1e9, self._parts, seconds)
        return self._is_page_locked

    def copy_chunks(self) -> Iterator[int]:
        """Copy all chunks in file order. Yield the number of copied chunks every _REPORT_BYTES and at the end."""
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
        if self._is_page_locked:
            # In a new thread, CUDA would make a context on the first GPU, which takes memory there.
            with torch.cuda.device(self._device):
                torch.cuda.cudart().cudaHostUnregister(ctypes.addressof(ctypes.c_char.from_buffer(self.map)))
            self._is_page_locked = False
        self.pairs.clear()
        with contextlib.suppress(BufferError):  # a tensor still uses the mapping, which is released with the tensor
            self.map.close()


def choose_slot(
    is_free: Sequence[bool],
    is_complete: Sequence[bool],
    generations: Sequence[str],
    is_base: Sequence[bool],
    waits_for_first: bool,
    keeps_newest: bool = False,
) -> int | None:
    """Return the slot of the next snapshot, or None if no slot may be overwritten yet.

    The result is the same on all processes. A snapshot that is complete on all processes is not overwritten before
    another one is. Otherwise the processes could be left with snapshots of different steps if they are killed.

    Args:
        is_free: for each slot, whether it is free on all processes.
        is_complete: for each slot, whether its snapshot is complete on all processes.
        generations: generation of each slot's snapshot on this process. For complete slots it is the same on all.
        is_base: for each slot, whether it has on some process the snapshot from which the run started. Other processes
            may have loaded that snapshot from a peer. If all slots have it, each on some process, one is overwritten.
        waits_for_first: whether to make only one snapshot at a time until one is complete on all processes. Set if the
            run started from memory, or if a lost process must cost one step only.
        keeps_newest: whether to keep the newest complete snapshot until another one is complete. Otherwise it may be
            overwritten while an older one is written to storage, and a loss at that time goes back to the older one.
    """
    if waits_for_first and not any(is_complete) and not all(is_free):
        return None
    slot_count = len(is_free)
    complete_slots = [i for i in range(slot_count) if is_complete[i]]
    newest_generation = max((generations[i] for i in complete_slots), default="")
    if all(is_base) and not complete_slots:
        # Otherwise no snapshot and no save would ever be made again.
        is_base = [False] * slot_count
    usable_slots = []
    for i in range(slot_count):
        # The only slot must be overwritten in any case.
        if slot_count > 1 and (is_complete[i] or is_base[i]):
            has_other_complete_slot = any(slot != i for slot in complete_slots)
            is_kept_newest = keeps_newest and is_complete[i] and generations[i] == newest_generation
            if not has_other_complete_slot or is_kept_newest:
                continue
        if is_free[i]:
            usable_slots.append(i)

    def get_value(i: int) -> tuple[bool, str]:
        """Slots without a complete snapshot or base come first, then slots with older complete snapshots."""
        return is_complete[i] or is_base[i], generations[i] if is_complete[i] else ""

    return min(usable_slots, key=get_value, default=None)


def _page_lock(memory: mmap.mmap) -> bool:
    """Page-lock shared memory for copies from the device. If CUDA refuses, log a warning and return False."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    code = torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)
    if int(code) != 0:
        log.warning(
            "%s bytes of staging memory could not be page-locked (CUDA error %s), so copies are slow", len(memory), code
        )
        return False
    return True


def make_rank_index(shards: Sequence[TensorShard], file_layout: RankFileLayout, rank: int) -> CheckpointIndex:
    """Return the index of this process's file."""
    offer = make_offer((s.name, s.shape, get_dtype_name(s.tensor), s.box) for s in shards)
    columns = {
        "tensor": offer.tensor[file_layout.chunks],
        "in_file": np.zeros(len(file_layout.chunks), np.int32),
        "start": file_layout.start,
        "length": file_layout.length,
        "data": file_layout.data,
        "crc": np.zeros(len(file_layout.chunks), np.uint32),
        "box": offer.box[file_layout.chunks],
    }
    return CheckpointIndex(offer.tensors, [data_file_name(rank)], columns)
