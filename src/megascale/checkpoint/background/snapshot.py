"""Trainer's side of saving in the background: the state is copied to host memory during the next step.

The weights do not change between two optimizer updates, so the copy runs during the forward and backward pass. `start`
starts the copy, and `before_update` makes the update wait until the copy is complete. The steps of a save are:

1. `Snapshots.start` queues a SnapshotCopy.
2. `Snapshots._serve_slot`, in a thread per slot, copies the state and sends `StageSnapshot` to the host's service.
3. `CheckpointService.on_stage_snapshot`, in the service, completes the snapshot, sends it to a peer and writes it.
4. `CommitWatcher` (commit_watcher.py), on the first process, receives the result of the commit.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from megascale.checkpoint.background import service, service_protocol
from megascale.checkpoint.background.commit_watcher import CommitWatcher
from megascale.checkpoint.background.huge_pages import identify_memory
from megascale.checkpoint.background.pending_saves import BLANK
from megascale.checkpoint.background.replica_setup import (
    HostService,
    agree_on_token,
    find_peer_address,
    resolve_address,
    warn_if_reachable,
)
from megascale.checkpoint.background.service_protocol import (
    Allocate,
    AwaitPages,
    Goodbye,
    InvalidateSlot,
    ListSnapshots,
    Register,
    StagedChunks,
    StageSnapshot,
    StorePlan,
)
from megascale.checkpoint.background.staging import (
    ReplicaBarrier,
    SaveOutcome,
    ServiceConnections,
    SnapshotCopy,
    StagingSlot,
    choose_slot,
    make_rank_index,
    wait_for,
)
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.torch_index import make_torch_metadata
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.saver import agree_on_plan, cut_chunks
from megascale.checkpoint.storage.base import PAGE
from megascale.checkpoint.storage.opening import open_storage
from megascale.config import CheckpointConfig
from megascale.core.exit_record import ExitKind, attach_record, find_exit_record
from megascale.core.host_memory import count_other_snapshots, count_slots
from megascale.core.stopwatch import Stopwatch
from megascale.errors import FitError, MegascaleError, TrainingError
from megascale.services.conversation import Conversation, close_descriptors

log = logging.getLogger(__name__)
_REPLY_TIMEOUT = 30.0  # seconds within which the service answers short requests; otherwise it counts as lost
# Additional seconds per GB of all local processes, because the service may still write a dead trainer's snapshot.
_REPLY_TIMEOUT_PER_GB = 3.0
_SLOT_TIMEOUT = 60.0  # seconds that a save with checkpoint.memory_wait waits for a slot
_FREE_WARNING_SECONDS = 60.0  # between two warnings of a save that waits for a slot without checkpoint.memory_wait
_SLOT_POLL = 0.002  # seconds between two checks of the slots
# Seconds that a process which leaves an attempt waits for its snapshots to be complete in this host's memory.
_LEAVE_SECONDS = 2.5
_LEAVE_POLL = 0.05  # seconds between two questions to the service
_SAVES_BEFORE_DROP = 2  # complete saves of a start, after which the services drop snapshots of earlier starts
# Once a host has lost its service, the commits under way get this many seconds. Without that host's files they never
# end.
_COMMIT_SECONDS = 1.5
# The start waits for memory of up to this size. Larger memory is prepared while training runs.
_WAIT_AT_START_BYTES = 256 << 20
_RESERVE_MARGIN = 1.02  # files of ranks differ in size by chunks that are not divided


class Snapshots:
    """Saves in the background for one set of shards. Construction, `open` and `start` are collective over the group.

    Args:
        config: section `checkpoint` of the configuration.
        folder: folder of the checkpoints, a path or an fsspec URL that all hosts see.
        shards: shards of this process, views of the live memory that training changes in place.
        run: run folder, which identifies the service of this host.
        peers: processes that save together.
        base_generation: generation of the save that was loaded from memory, or an empty text. New saves have higher
            numbers.
        last_sequence: number of the newest save of earlier attempts that is known; new saves have higher numbers.
        domain: fault domain of this host.
        reused_slots: result of `leave` of this process's previous Snapshots.
        reserve: new memory has this many times the bytes of the present shards, at least 1. The next Snapshots of this
            process, whose shards may be larger, then need no new memory.
        check: called while a method waits for the service. It raises an error if the process must leave the attempt.

    Attributes:
        stopwatch: seconds of the construction and of `open` by part.

    Raises:
        TrainingError: the shards do not cover the tensors.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        folder: Path | str,
        shards: Sequence[TensorShard],
        *,
        run: Path,
        peers: Peers,
        base_generation: str = "",
        last_sequence: int = 0,
        domain: str = "",
        reused_slots: Sequence[StagingSlot] = (),
        reserve: float = 1.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.stopwatch = Stopwatch()
        self.peers = peers
        self._check = check
        self.slot_count = count_slots(config)
        self.storage = open_storage(folder)
        self._base_generation = base_generation
        self._config = config
        self._domain = domain
        self._service_folder = service_protocol.private_folder(run)
        self._log_file = run / "logs" / "checkpoint-service.log"
        self.file_layout, plan = agree_on_plan(peers, shards)
        self.stopwatch.end_phase("plan")
        start_values = None  # generation, identity of the folder and size of a checkpoint, from the first process
        if plan is not None:
            identity = folders.read_identity(self.storage, create=True)
            base_sequence = folders.get_sequence(base_generation)
            generation = folders.make_generation(self.storage, max(base_sequence, last_sequence))
            start_values = (generation, identity, plan.size)
        self.generation, self.identity, self.required_bytes = peers.broadcast(start_values, tuple[str, str, int] | None)
        self.stopwatch.end_phase("number")
        chunks = cut_chunks(shards)
        self._chunks = [chunks[i] for i in self.file_layout.chunks.tolist()]
        self._index = make_rank_index(shards, self.file_layout, peers.rank)
        self._plan_index = plan.index if plan is not None else None  # index of all chunks, on the first process
        self.stopwatch.end_phase("index")
        self._device = next((s.tensor.device for s in shards if s.tensor.is_cuda), torch.device("cpu"))
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)
        self._outcomes: queue.SimpleQueue[SaveOutcome] = queue.SimpleQueue()
        self._current: SnapshotCopy | None = None
        self._replica_barrier = ReplicaBarrier()
        self._connection: Conversation | None = None  # with the service of this host
        self._has_lost_service = False  # the service of this host is lost
        self._is_memory_prepared = False  # the pages of all slots are mapped; the same on all processes
        self._open_time = 0.0  # `time.monotonic()` when the slots were allocated
        self._has_slot_timed_out = False  # the last wait for a free slot failed; the same on all processes
        self._complete_save_count = 0  # saves of this start that all processes completed; the same on all processes
        self._newest_complete_generation = ""  # generation of the newest of these complete saves
        self.start_sequence = self.sequence  # all saves of this start have higher numbers
        self._closing = threading.Event()
        self._slots: list[StagingSlot] = []
        self._reused_slots = {slot.identity: slot for slot in reused_slots}
        self._reserve = reserve
        self.kept_slot_count = 0  # slots that had been prepared before
        self._slot_threads: list[threading.Thread] = []
        self._slot_connections = ServiceConnections(self._connect)
        self._last_copies: dict[int, SnapshotCopy] = {}  # by slot
        self._watcher: CommitWatcher | None = None
        self._closing_thread: threading.Thread | None = None  # releases memory of earlier attempts
        self._allocation_error: OSError | None = None  # of this process
        self._failed_rank = -1  # first process whose allocation failed, or -1; the same on all processes

    def open(self) -> None:
        """Connect to the service and allocate memory. Collective. After an error, `leave` returns the slots.

        Raises:
            FitError: the host has not enough memory.
            TrainingError: the service is unreachable.
        """
        problem = self._open()
        if problem:
            raise self._make_start_error(problem) from self._allocation_error

    def _make_start_error(self, problem: str) -> MegascaleError:
        """Return the error for a start that failed with `problem`. It records the rank that lacks memory."""
        if self._failed_rank < 0:
            return TrainingError(problem)
        lacks_memory = self._allocation_error is not None and self._allocation_error.errno == errno.ENOMEM
        kind = ExitKind.HOST_MEMORY if lacks_memory else ExitKind.REFUSED
        return attach_record(FitError(problem), kind, rank=self._failed_rank)

    @property
    def sequence(self) -> int:
        """Return the number of the newest save that was begun, or of the start."""
        return folders.get_sequence(self.generation)

    @property
    def memory(self) -> int:
        """Return the bytes of host memory that hold this process's snapshots."""
        return sum(len(slot.map) for slot in self._slots)

    def wait_for_memory(self) -> bool:
        """Wait until the pages of all slots are mapped, and page-lock them if a device copies into them.

        Returns:
            Whether all slots are page-locked.
        """
        page_locked = [wait_for(slot.prepared, self._check) and slot.page_lock() for slot in self._slots]
        return all(page_locked)

    # Saving -------------------------------------------------------------------------------------------------------

    def start(self, step: int, state: dict[str, Any], *, persist: bool = True, wait: bool = False) -> bool:
        """Start a save of the shards' current values. Collective: all processes start the save, or all skip it.

        The shards must not change before `before_update` has returned.

        Args:
            state: state of the trainer besides tensors.
            persist: whether to write the snapshot to storage. Such a save waits until the slots' pages are mapped.
            wait: whether to wait for a free slot instead of skipping the save.

        Returns:
            False if the save was skipped, because all slots are in use or a service is lost.
        """
        start_time = time.monotonic()
        self.before_update()
        if not self.peers.all_true(not self._has_lost_service):
            problem = self._reopen()
            if problem:
                self._has_lost_service = True
                self._outcomes.put(SaveOutcome(step, reason=problem, stall=time.monotonic() - start_time))
                return False
        slot_index = self._choose_slot(wait, persist)
        # With checkpoint.memory_wait, a save waits for a slot instead of being skipped. While memory is being prepared,
        # the wait would cost more than the steps that a fault could lose.
        if slot_index is None and self._config.memory_wait and self._is_memory_prepared:
            slot_index = self._await_slot()
        if slot_index is None:
            return False
        slot = self._slots[slot_index]
        slot.page_lock()
        slot.is_complete = False
        try:
            self._service.request(InvalidateSlot(self.peers.rank, slot_index))
        except OSError:
            self._has_lost_service = True  # the slot's thread gets the same error and reports it
        self.generation = folders.make_next_generation(self.generation)
        message = StageSnapshot(
            rank=self.peers.rank,
            slot=slot_index,
            step=step,
            generation=self.generation,
            identity=self.identity,
            state=json.dumps(state),
            ranks=self.peers.size,
            size=self.file_layout.size,
            base_generation=self._base_generation,
            persist=persist,
            storage=self.storage.url,
            required_bytes=self.required_bytes,
            keep=self._config.keep,
            local_ranks=tuple(self._local_ranks),
            leader=self.peers.rank == 0,
            plan=self._plan_name,
            peer=self._peer,
            token=self._token,
            # Ranks and their replicas may have moved to other hosts. Those of earlier starts are then superfluous.
            drops_up_to=self.start_sequence if self._complete_save_count >= _SAVES_BEFORE_DROP else 0,
        )
        copy = SnapshotCopy(SaveOutcome(step, bytes=self.required_bytes), message, start_time)
        slot.free.clear()
        slot.generation = self.generation
        self._last_copies[slot_index] = copy
        self._replica_barrier.track(copy)
        if self._stream is not None:
            copy.event = self._copy_from_device(slot, self._stream)
        self._current = copy
        slot.work.put(copy)
        copy.outcome.stall += time.monotonic() - start_time
        return True

    def _copy_from_device(self, slot: StagingSlot, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Queue the copies of all chunks on `stream`, and return the event that follows them."""
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for target, source in slot.pairs:
                target.copy_(source, non_blocking=True)
            event = torch.cuda.Event(blocking=True)  # so that the waiting thread sleeps instead of spinning
            event.record(stream)
        return event

    def _choose_slot(self, wait: bool, persist: bool = False) -> int | None:
        """Return the slot of the next snapshot, the same on all processes, or None if all slots are in use.

        Args:
            wait: whether to wait until all slots are free.
            persist: whether to wait until the slots' pages are mapped. A skipped save to storage would be repeated only
                many steps later.
        """
        for slot in self._slots:
            if wait or persist:
                wait_for(slot.prepared, self._check)
            if wait and not slot.has_failed:
                self._wait_until_free(slot)
        is_free = [slot.free.is_set() for slot in self._slots]
        is_complete = [slot.is_complete for slot in self._slots]
        # The whole generation counts, because an attempt that ended early may have begun a save of the same number.
        is_not_base = [not slot.generation or slot.generation != self._base_generation for slot in self._slots]
        is_prepared = all(slot.prepared.is_set() for slot in self._slots)
        # One collective for all flags. A flag of the result holds if it holds on every process.
        flags = self.peers.all_true_each(is_free + is_complete + is_not_base + [is_prepared])
        self._note_preparation(flags.pop())
        slot_count = len(self._slots)
        is_free = flags[:slot_count]
        is_complete = flags[slot_count : 2 * slot_count]
        self._count_complete_saves(is_complete)
        if all(is_free):
            self._has_slot_timed_out = False
        return choose_slot(
            is_free=is_free,
            is_complete=is_complete,
            generations=[slot.generation for slot in self._slots],
            is_base=[not flag for flag in flags[2 * slot_count :]],
            waits_for_first=bool(self._base_generation) or self._config.memory_wait,
            keeps_newest=self._config.memory_wait and not self._has_slot_timed_out,
        )

    def _note_preparation(self, is_prepared: bool) -> None:
        """Store whether the memory of all processes is prepared, and log when it is for the first time."""
        if is_prepared and not self._is_memory_prepared:
            seconds = max(slot.prepared_time for slot in self._slots) - self._open_time
            log.info("memory for snapshots is prepared on all ranks, here within %.2f s", seconds)
        self._is_memory_prepared = is_prepared

    def _wait_until_free(self, slot: StagingSlot) -> None:
        """Wait until a slot is free. The loss of the service ends the wait, and slow storage does not."""
        start_time = time.monotonic()
        while not wait_for(slot.free, self._check, _FREE_WARNING_SECONDS):
            log.warning(
                "a save has waited for %.0f s, because the save before it is still being written to %s",
                time.monotonic() - start_time,
                self.storage.url,
            )

    def _count_complete_saves(self, is_complete: Sequence[bool]) -> None:
        """Count saves of this start that are complete on all processes.

        Args:
            is_complete: for each slot, whether its snapshot is complete on all processes.
        """
        for slot_index, slot in enumerate(self._slots):
            is_of_this_start = slot_index in self._last_copies
            if is_of_this_start and is_complete[slot_index] and slot.generation > self._newest_complete_generation:
                self._newest_complete_generation = slot.generation
                self._complete_save_count += 1

    def _await_slot(self) -> int | None:
        """Wait until a slot is free and return it, the same on all processes.

        Returns None after _SLOT_TIMEOUT seconds, or if a service is lost. All processes take part in each check.
        """
        deadline = time.monotonic() + _SLOT_TIMEOUT
        while True:
            time.sleep(_SLOT_POLL)
            self._check()
            slot_index = self._choose_slot(wait=False)
            may_continue = self.peers.all_true(time.monotonic() < deadline and not self._has_lost_service)
            if slot_index is not None:
                return slot_index
            if not may_continue:
                self._has_slot_timed_out = True
                return None

    def before_update(self, wait_for_replica: bool = False) -> None:
        """Wait for the copy under way. The training loop calls this method before each optimizer update.

        On CUDA the current stream waits, and the host does not.

        Args:
            wait_for_replica: whether the host also waits until the last snapshot is complete in the peer's memory. The
                wait ends after a few seconds, because a lost peer must not stop training.
        """
        if wait_for_replica:
            self._replica_barrier.wait(self._check)
        copy = self._current
        self._current = None
        if copy is None:
            return
        start_time = time.monotonic()
        if copy.event is not None:
            stream = torch.cuda.current_stream(self._device)
            before = torch.cuda.Event(enable_timing=True)
            after = torch.cuda.Event(enable_timing=True)
            before.record(stream)
            stream.wait_event(copy.event)
            after.record(stream)
            copy.waits = (before, after)
        else:
            wait_for(copy.copied, self._check)
        copy.outcome.stall += time.monotonic() - start_time

    def poll(self) -> list[SaveOutcome]:
        """Return the outcomes of the saves that have ended since the last call."""
        outcomes = []
        while not self._outcomes.empty():
            outcomes.append(self._outcomes.get())
        return outcomes

    def finish(self, run_ended: bool = True) -> list[SaveOutcome]:
        """Wait until all saves have ended, and return their outcomes as `poll` does.

        Args:
            run_ended: whether the run has ended, so that the service may end too.
        """
        self.before_update()
        self._close()
        if run_ended and not self._has_lost_service:
            with contextlib.suppress(OSError):  # the service has already ended
                self._service.request(Goodbye())
        self._service.close()
        return self.poll()

    def leave(self, awaits_snapshots: bool = True) -> list[StagingSlot]:
        """Leave saves under way to the service, and return the slots for this process's next Snapshots.

        The method does not wait for replicas and commits, which may need a lost host.

        Args:
            awaits_snapshots: whether to wait until the snapshots are complete in this host's memory, where the next
                attempt finds them.
        """
        self._check = lambda: None
        self.before_update()
        if awaits_snapshots:
            self._await_local_snapshots()
        reason = "the process has left the attempt"
        self._slot_connections.end(reason)
        if self._watcher is not None:
            self._watcher.end_waits(reason)
        slots = self._slots
        self._slots = []
        self._close(slots)
        for slot in slots:
            slot.detach(self._service)
        if not slots and self._connection is not None:
            self._connection.close()
        # A start that failed has not taken over all slots that it received.
        return slots + list(self._reused_slots.values())

    def _await_local_snapshots(self) -> None:
        """Wait until the last snapshot of each slot is complete in the service, for at most _LEAVE_SECONDS."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        for copy in self._last_copies.values():
            while not copy.replicated.wait(_LEAVE_POLL) and time.monotonic() < deadline:
                try:
                    snapshots = self._service.request(ListSnapshots()).snapshots
                except OSError:
                    return
                if any(snapshot.generation == copy.message.generation for snapshot in snapshots):
                    break

    # The service --------------------------------------------------------------------------------------------------

    @property
    def _service(self) -> Conversation:
        assert self._connection is not None, "`open` has not connected to the service"
        return self._connection

    def _connect(self) -> Conversation:
        return service.connect_checkpoint_service(self._service_folder, self._config.linger, self._log_file)

    def _open(self) -> str | None:
        """Connect to the service and set up memory, replicas and threads. Collective.

        Returns:
            The reason for a failure, the same on all processes, or None.
        """
        problem = None
        self._token = ""
        if self._config.replicas:
            self._token, problem = agree_on_token(self.peers, self.storage.url, self.identity)
            if problem:
                return problem
        self.stopwatch.end_phase("token")
        host = HostService("", "", 0, "")
        try:
            self._connection = self._connect()
            self._service.timeout = _REPLY_TIMEOUT
            address = resolve_address(self._config.replica_address)
            registered = self._service.request(Register(self._token, address))
            host = HostService(registered.service, address, registered.port, self._domain)
        except (OSError, TrainingError) as error:
            problem = f"the checkpoint service of a host cannot be reached: {error}"
        self.stopwatch.end_phase("service")
        answers = self.peers.all_gather((problem, host), tuple[str | None, HostService])
        problem = next((text for text, _ in answers if text), None)
        if problem:
            return problem
        hosts = [answer for _, answer in answers]
        self._local_ranks = [rank for rank, rank_host in enumerate(hosts) if rank_host.name == host.name]
        if self._config.replicas and self.peers.rank == 0:
            warn_if_reachable([(rank_host.address, rank_host.port) for rank_host in hosts])
        self._peer = None
        if self._config.replicas:
            self._peer = find_peer_address(hosts, host.name)
        self.stopwatch.end_phase("hosts")
        problem = self._allocate()
        self.stopwatch.end_phase("others' memory")
        if problem:
            return problem
        self._closing.clear()
        self._is_memory_prepared = False
        self._open_time = time.monotonic()
        self._slot_connections = ServiceConnections(self._connect)
        self._has_lost_service = False
        self._slot_threads = [
            _start_thread(self._serve_slot, slot_index, slot) for slot_index, slot in enumerate(self._slots)
        ]
        if self.memory <= _WAIT_AT_START_BYTES:
            self.wait_for_memory()
        self.stopwatch.end_phase("pages")
        if self.peers.rank == 0:
            self._watcher = CommitWatcher(self._connect, self._report)
        return None

    def _allocate(self) -> str | None:
        """Allocate memory for this process's snapshots in the service. On the first process, send the plan. Collective.

        Returns:
            The reason for a failure, the same on all processes, or None.
        """
        size = max(self.file_layout.size, PAGE)
        self._plan_name = secrets.token_hex(4)
        problem = None
        try:
            if self._plan_index is not None:
                self._send_plan(self._plan_index)
                self.stopwatch.end_phase("index")
            gigabytes = size * self.slot_count * len(self._local_ranks) / 1e9
            self._service.timeout = _REPLY_TIMEOUT + _REPLY_TIMEOUT_PER_GB * gigabytes
            request = Allocate(
                self.peers.rank,
                size,
                self.slot_count,
                reserved=self._compute_reserved_size(size),
                spare=self._compute_spare_bytes(size),
                memories=tuple(self._reused_slots),
            )
            allocated = self._service.request(request, self._index.to_bytes())
            self._service.timeout = _REPLY_TIMEOUT
            try:
                for descriptor, generation in zip(self._service.files, allocated.generations, strict=True):
                    self._slots.append(self._make_slot(descriptor, generation))
            finally:
                close_descriptors(self._service.files)
            self._close_unused_slots()
        except OSError as error:
            self._allocation_error = error
            problem = (
                f"rank {self.peers.rank} on {socket.gethostname()}: staging memory for checkpoints is unavailable "
                f"({error}): each process there needs checkpoint.slots x {size:,} bytes of host memory. Lower "
                f"checkpoint.slots={self.slot_count}, or set checkpoint.background=false"
            )
        self.stopwatch.end_phase("memory")
        generations = tuple(slot.generation for slot in self._slots)
        answers = self.peers.all_gather((problem, generations), tuple[str | None, tuple[str, ...]])
        self._failed_rank = next((rank for rank, (text, _) in enumerate(answers) if text), -1)
        if self._failed_rank >= 0:
            return answers[self._failed_rank][0]
        for slot_index, slot in enumerate(self._slots):
            # A process that was left out of an attempt has snapshots of earlier saves than the others.
            slot.is_complete &= all(on_rank[slot_index] == slot.generation for _, on_rank in answers)
        return None

    def _send_plan(self, index: CheckpointIndex) -> None:
        """Send the index of all chunks and torch's metadata to the service. Raises OSError if the service is lost.

        Both are encoded here, while the other processes allocate their memory.
        """
        # The service replaces BLANK by the generation of each save.
        metadata = make_torch_metadata(index.with_generation(BLANK, index.columns["crc"]))
        index_bytes = index.to_bytes()
        self._service.request(StorePlan(self._plan_name, len(index_bytes)), index_bytes + metadata)

    def _compute_reserved_size(self, size: int) -> int:
        """Return the bytes of a slot that is reserved for larger shards, at least `size`, as whole pages."""
        if self._reserve <= 1:
            return size
        return -(-int(size * self._reserve * _RESERVE_MARGIN) // PAGE) * PAGE

    def _compute_spare_bytes(self, size: int) -> int:
        """Return the bytes that other processes of this host, and the replicas of a peer, need besides this process.

        Args:
            size: bytes of a slot of this process.
        """
        has_peer = self._peer is not None
        return size * count_other_snapshots(self._config, len(self._local_ranks), has_peer=has_peer)

    def _close_unused_slots(self) -> None:
        """Release slots of earlier attempts whose memory was too small or belonged to a lost service.

        A thread does so, because releasing tens of gigabytes takes seconds. It ends before `_close` returns.
        """
        slots = list(self._reused_slots.values())
        self._reused_slots = {}
        if not slots:
            return
        log.info("staging memory is replaced: %d slots of an earlier attempt had other sizes or owners", len(slots))

        def close_slots() -> None:
            for slot in slots:
                slot.close()

        self._closing_thread = _start_thread(close_slots)

    def _make_slot(self, descriptor: int, generation: str) -> StagingSlot:
        """Return a slot in the shared memory of `descriptor`. Reuse a slot that has this memory mapped already."""
        slot = self._reused_slots.pop(identify_memory(descriptor), None)
        if slot is None:
            return StagingSlot(descriptor, self._index, self._chunks, self._device, generation)
        self.kept_slot_count += 1
        slot.attach(self._index, self._chunks, generation)
        return slot

    def _reopen(self) -> str | None:
        """Close everything and set it up again on all processes, because a host has lost its service."""
        # A save may lack the files of that host, and is then never committed.
        self._close(watch_seconds=_COMMIT_SECONDS)
        self._slots = []
        self._service.close()
        return self._open()

    def _close(self, reused_slots: Sequence[StagingSlot] = (), watch_seconds: float | None = None) -> None:
        """End the threads and release the memory. The slots' threads end first, because they pass saves to the watcher.

        Args:
            reused_slots: slots whose threads end, but whose memory stays.
            watch_seconds: limit for waiting for commits. Default: until the commits have ended.
        """
        self._closing.set()
        for slot in [*self._slots, *reused_slots]:
            slot.work.put(None)
        for thread in self._slot_threads:
            thread.join()
        if self._watcher is not None:
            self._watcher.close(watch_seconds)
        if self._closing_thread is not None:
            self._closing_thread.join()
        self._closing_thread = None
        self._slot_threads = []
        self._watcher = None
        self._last_copies = {}
        for slot in self._slots:
            slot.close()

    # Threads ------------------------------------------------------------------------------------------------------

    def _serve_slot(self, slot_index: int, slot: StagingSlot) -> None:
        """Prepare a slot. Then stage each queued copy with the service, and wait until the slot is free again."""
        connection: Conversation | None = None
        try:
            connection = self._slot_connections.open()
            connection.timeout = _REPLY_TIMEOUT
            slot.prepare(connection, AwaitPages(self.peers.rank, slot_index), self._closing)
            connection.timeout = None  # The replies to a snapshot wait for storage.
        except Exception as error:
            log.warning("staging memory for checkpoints could not be prepared: %s", str(error) or repr(error))
            self._has_lost_service = True
            slot.has_failed = True
        slot.mark_prepared()
        while (copy := slot.work.get()) is not None:
            try:
                if connection is None:
                    connection = self._slot_connections.open()
                self._stage_copy(connection, slot, copy)
            except Exception as error:
                # After any error the events below must be set, because the next update waits for them.
                copy.outcome.reason = str(error) or repr(error)
                copy.outcome.record = find_exit_record(error)
                is_expected = isinstance(error, OSError | TrainingError)
                if not is_expected:
                    log.exception("the copy of step %d failed", copy.outcome.step)
                if not is_expected or isinstance(error, ConnectionError | TrainingError):
                    self._has_lost_service = True
            copy.copied.set()
            copy.replicated.set()
            slot.free.set()
            if copy.message.persist and self._watcher is not None and not copy.outcome.reason:
                self._watcher.add(copy)
            else:
                self._report(copy)
        if connection is not None:
            connection.close()

    def _stage_copy(self, connection: Conversation, slot: StagingSlot, copy: SnapshotCopy) -> None:
        """Copy the state and wait until the service no longer needs the slot.

        If the copy has an event, the device copies, and this method only waits for the event.
        """
        if copy.event is not None:
            copy.event.synchronize()
            connection.send(copy.message)
        else:
            # The service processes the chunks while later ones are still being copied.
            connection.send(msgspec.structs.replace(copy.message, follow=True))
            for rows in slot.copy_chunks():
                connection.send(StagedChunks(rows))
        copy.copied.set()
        connection.receive_reply()
        slot.is_complete = True
        copy.replicated.set()
        copy.outcome.replica = connection.receive_reply().replica

    def _report(self, copy: SnapshotCopy) -> None:
        """Complete the times of a save that has ended, and queue its outcome for `poll`."""
        if copy.waits is not None:
            before, after = copy.waits
            try:
                after.synchronize()
                copy.outcome.stall += before.elapsed_time(after) / 1e3
            except RuntimeError as error:  # the device has failed, as every later call reports too
                log.warning("the time that step %d waited for its copy is unknown: %s", copy.outcome.step, error)
        copy.outcome.seconds = time.monotonic() - copy.start_time
        self._outcomes.put(copy.outcome)


def _start_thread(function: Callable[..., None], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, daemon=True)
    thread.start()
    return thread
