"""Checkpoint service of a host: it owns the staging memory, outlives the trainers and saves their snapshots. No torch.

A trainer asks for memory, fills it with a snapshot during the next forward and backward pass, and reports the snapshot.
The service writes the snapshot to storage, sends it to a peer host and commits it. If the trainers die, the service
still saves staged snapshots, and new trainers find them in memory. The service ends once no trainer has been connected
for some time.

`connect_checkpoint_service` starts the service as `python -m megascale.checkpoint.background.service FOLDER`.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megascale.checkpoint.background.commit_writer import FileWriting, SaveWriter, ServiceLifetime
from megascale.checkpoint.background.pending_saves import SaveFailed
from megascale.checkpoint.background.replica import Replicas, ReplicaSender
from megascale.checkpoint.background.service_protocol import (
    FROM_SERVICE,
    SERVICE_MODULE,
    TO_SERVICE,
    Allocate,
    Allocated,
    AwaitCommit,
    AwaitPages,
    AwaitPruning,
    Goodbye,
    InvalidateSlot,
    ListSnapshots,
    OpenedSnapshot,
    OpenSnapshot,
    PagesReady,
    Register,
    Registered,
    Released,
    SnapshotInfo,
    SnapshotList,
    StageSnapshot,
    StorePlan,
    locate_service,
)
from megascale.checkpoint.background.snapshot_memory import Progress, Slot, frame_chunks, make_slots, pop_older_slots
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.core.exit_record import find_exit_record
from megascale.errors import TrainingError
from megascale.services import host_service
from megascale.services.conversation import Conversation, Done, ErrorReply
from megascale.services.host_service import (
    Launch,
    ReadySignal,
    ServiceFailed,
    claim_service,
    connect_service,
    start_service,
)
from megascale.services.messages import Message

log = logging.getLogger("megascale.checkpoint.background.service")

_GOODBYE_SECONDS = 10.0  # within which a service starts and replies to the rank of a refused start
_PAGES_TIMEOUT = 0.5  # seconds within which `AwaitPages` gets a reply, even if the pages are not ready


# Messages of a trainer that starts, after the end of the run before it. A connection alone shows no start: an agent
# connects too, and ranks of the ended run still wait for commits.
_START_MESSAGES = (Register, Allocate, StageSnapshot, ListSnapshots, OpenSnapshot)


class CheckpointService:
    """State of the service, shared by the connections of all trainers. Each method `on_...` handles one message.

    One lock guards the tables, and each slot has its own lock.

    Attributes:
        name: random name of this process.
        lifetime: decision when the service ends.
        slots: slots by rank. Slots whose rank has received the memory of another rank have negative keys.
        file_indexes: index of each rank's file by rank.
    """

    def __init__(self, linger: float) -> None:
        self.name = os.urandom(8).hex()
        self.lifetime = ServiceLifetime(linger)
        self.slots: dict[int, list[Slot]] = {}
        self.file_indexes: dict[int, CheckpointIndex] = {}
        self._owners: dict[int, Conversation] = {}  # by rank: the trainer that received its slots last
        self._lock = threading.Lock()
        self._replicas = Replicas()
        self._writer = SaveWriter(self.lifetime)
        self._handlers: dict[type[Message], Callable[[Conversation, Any], None]] = {
            Register: self.on_register,
            Goodbye: self.on_goodbye,
            Allocate: self.on_allocate,
            AwaitPages: self.on_await_pages,
            InvalidateSlot: self.on_invalidate_slot,
            StageSnapshot: self.on_stage_snapshot,
            StorePlan: self.on_store_plan,
            AwaitPruning: self.on_await_pruning,
            AwaitCommit: self.on_await_commit,
            ListSnapshots: self.on_list_snapshots,
            OpenSnapshot: self.on_open_snapshot,
        }

    def handle_trainer(self, trainer: Conversation) -> None:
        """Serve one trainer, or an agent that keeps the service alive, until it disconnects."""
        while True:
            message = trainer.receive(max_body_bytes=1 << 40)
            if isinstance(message, _START_MESSAGES):
                self.lifetime.has_run_ended = False
            try:
                self._handlers[type(message)](trainer, message)
            except EOFError:
                raise
            except (OSError, SaveFailed, TrainingError, ValueError, KeyError, IndexError) as error:
                if isinstance(error, ConnectionError) and not trainer.is_connected():
                    log.info("%s has no reply, because the trainer has ended (%s)", message.do, error)
                    return
                log.exception("%s failed", message.do)
                trainer.send(ErrorReply(str(error)[:2000], type(error).__name__, find_exit_record(error)))

    def on_register(self, trainer: Conversation, message: Register) -> None:
        """Reply with this process's name and id, and the port on which it accepts replicas (0: no port)."""
        token = bytes.fromhex(message.token)
        if token:
            port = self._replicas.listen(message.listen, token)
        else:
            port = 0
        trainer.send(Registered(self.name, os.getpid(), port))

    def on_goodbye(self, trainer: Conversation, message: Goodbye) -> None:
        """Let the service end as soon as it has no work, unless the message excludes it."""
        if not (message.keeps_snapshots and self._has_snapshots()):
            self.lifetime.has_run_ended = True
        trainer.send(Done())

    def on_allocate(self, trainer: Conversation, message: Allocate) -> None:
        """Reply with memory for one rank's snapshots. Reuse its previous memory if that is intact and large enough.

        A trainer keeps the memory that it has mapped if its rank has another number now. The snapshots there remain
        those of its previous number until they are overwritten.

        A dead trainer's snapshot may still be being written to storage, for minutes. Its memory is handed out at once,
        so that the next trainer starts meanwhile, and `on_await_pages` says when it may be filled.

        A process that waits for its attempt sends no chunks. The index and the snapshots of an ended trainer with its
        rank then stay, because the attempt may need them.
        """
        rank = message.rank
        index = CheckpointIndex.from_bytes(bytes(trainer.body))
        with self._lock:
            slots = self._take_slots(rank, frozenset(message.memories))
            usable_count = sum(slot.is_intact and slot.memory.size >= message.size for slot in slots)
            is_usable = usable_count == len(slots) == message.slots
            is_declined = message.optional and bool(slots) and not is_usable
            if is_usable or is_declined:
                self.slots[rank] = slots
            elif slots and not len(index):
                self._keep_unused(slots)
                slots = []
        if is_declined:
            trainer.send(Allocated(()))
            return
        if not is_usable:
            closing = _close_slots(slots)
            try:
                slots = _make_reserved_slots(message, index)
            except OSError:
                closing.join()  # the memory of the old slots may suffice
                slots = _make_reserved_slots(message, index)
        with self._lock:
            self.slots[rank] = slots
            self._owners[rank] = trainer
            if len(index):
                self.file_indexes[rank] = index
        generations = tuple(slot.generation for slot in slots)
        trainer.send(Allocated(generations), files=[slot.memory.descriptor for slot in slots])

    def _take_slots(self, rank: int, memories: frozenset[str]) -> list[Slot]:
        """Remove and return the slots of a rank: those of `memories`, or else its previous ones.

        The previous slots of a rank that has other memory now stay for their snapshots, without a rank.
        """
        for owner, slots in list(self.slots.items()):
            if slots and all(slot.memory.identity in memories for slot in slots):
                del self.slots[owner]
                self._keep_unused(self.slots.pop(rank, []))
                return slots
        return self.slots.pop(rank, [])

    def _keep_unused(self, slots: list[Slot]) -> None:
        """Keep slots for their snapshots, without a rank. The lock must be held."""
        if slots:
            self.slots[min([0, *self.slots]) - 1] = slots

    def on_await_pages(self, trainer: Conversation, message: AwaitPages) -> None:
        """Reply whether all pages of a slot are mapped, and no snapshot of a dead trainer is being written from them.

        Before that, each access of the trainer to a page would have to wait until the kernel clears the page.
        """
        with self._lock:
            slot = self.slots[message.rank][message.slot]
        is_ready = slot.memory.page_filler.wait(_PAGES_TIMEOUT) and slot.wait_until_free(_PAGES_TIMEOUT)
        trainer.send(PagesReady(is_ready))

    def on_invalidate_slot(self, trainer: Conversation, message: InvalidateSlot) -> None:
        """Mark a slot's snapshot as incomplete, because the trainer is about to overwrite it."""
        self.slots[message.rank][message.slot].generation = ""
        trainer.send(Done())

    def on_stage_snapshot(self, trainer: Conversation, message: StageSnapshot) -> None:
        """Complete a staged snapshot. At the same time send it to the peer and write it to storage.

        The first reply reports that the snapshot is complete here and at the peer. The second reply reports that the
        slot may be overwritten.
        """
        start_time = time.monotonic()
        slots = self.slots[message.rank]
        slot = slots[message.slot]
        with self.lifetime.work(), slot.busy:
            slot.index = self.file_indexes[message.rank]
            staged_counts = _receive_staged_counts(trainer, len(slot.index), message.follow)
            if message.persist:
                file_writing = FileWriting(self._writer, message, slot)
            else:
                file_writing = None
            progress = file_writing.progress if file_writing else Progress()
            if message.peer:
                sender = ReplicaSender(message, len(slots), slot, progress)
            else:
                sender = None
            crc = None
            replica_problem = None
            try:
                try:
                    crcs, crc = frame_chunks(slot.memory.view[: message.size], slot.index, staged_counts, progress)
                finally:
                    for _ in staged_counts:  # read the remaining counts, which precede the trainer's next message
                        pass
                slot.mark_complete(message, crcs.tolist())
                if sender:
                    replica_problem = sender.finish(slot.crcs, trainer.is_connected)
                with contextlib.suppress(OSError):  # the file is completed even if the trainer has died
                    trainer.send(Done())
            finally:
                if sender:
                    sender.finish(None)  # no effect if it has finished
                if file_writing:
                    file_writing.finish(crc)
        trainer.send(Released(time.monotonic() - start_time, replica_problem))
        if message.drops_up_to:
            self._drop_older(message.drops_up_to)

    def _drop_older(self, sequence: int) -> None:
        """Free memory of ranks and replicas with saves up to `sequence` only, which have moved to other hosts."""
        with self._lock:
            for slot in pop_older_slots(self.slots, sequence, self._has_trainer):
                slot.memory.close()
        self._replicas.drop_older(sequence)

    def _has_trainer(self, rank: int) -> bool:
        """Return whether the trainer that received the slots of a rank is still connected."""
        owner = self._owners.get(rank)
        return owner is not None and owner.is_connected()

    def on_store_plan(self, trainer: Conversation, message: StorePlan) -> None:
        """Store the plan of the first process for all saves: the index, and the index in torch's format."""
        size = message.index_bytes
        self._writer.plans = {message.plan: (bytes(trainer.body[:size]), bytes(trainer.body[size:]))}
        trainer.send(Done())

    def on_await_pruning(self, trainer: Conversation, message: AwaitPruning) -> None:
        """Reply once the checkpoints that a commit made superfluous are removed."""
        self._writer.wait_for_pruning()
        trainer.send(Done())

    def on_await_commit(self, trainer: Conversation, message: AwaitCommit) -> None:
        """Reply once a save is committed or given up."""
        trainer.send(self._writer.wait_for_result(message.generation, trainer.is_connected))

    def on_list_snapshots(self, trainer: Conversation, message: ListSnapshots) -> None:
        """Reply with the complete snapshots of local ranks and the complete replicas from other hosts."""
        local_slots = self._list_slots()
        snapshots = [_describe_snapshot(rank, slot, is_replica=False) for rank, slot in local_slots if slot.generation]
        for rank, slot in self._replicas.list_complete():
            if slot.generation:
                snapshots.append(_describe_snapshot(rank, slot, is_replica=True))
        trainer.send(SnapshotList(tuple(snapshots), self.name))

    def _has_snapshots(self) -> bool:
        """Return whether the service has a complete snapshot of a local rank, or a complete replica."""
        return any(slot.generation for _, slot in self._list_slots() + self._replicas.list_complete())

    def _list_slots(self) -> list[tuple[int, Slot]]:
        """Return the slots of all local ranks, each with the rank of its snapshot."""
        with self._lock:
            return [(slot.rank, slot) for slots in self.slots.values() for slot in slots]

    def on_open_snapshot(self, trainer: Conversation, message: OpenSnapshot) -> None:
        """Reply with one snapshot: its memory, its index, the checksums of its chunks and its saved state."""
        for rank, slot in self._list_slots() + self._replicas.list_complete():
            if rank == message.rank and slot.generation == message.generation:
                opened = OpenedSnapshot(slot.state, tuple(slot.crcs), slot.step, max(slot.size, 1))
                trainer.send(opened, slot.index.to_bytes(), [slot.memory.descriptor])
                return
        raise KeyError(f"no snapshot of process {message.rank} and {message.generation}")


def _make_reserved_slots(message: Allocate, index: CheckpointIndex) -> list[Slot]:
    """Return new slots of the reserved size, or of the necessary size if the host has too little memory.

    Raises:
        OSError: memory is insufficient for the necessary size.
    """
    if message.reserved > message.size:
        try:
            return make_slots(message.slots, message.reserved, index, spare=message.spare)
        except OSError as error:
            log.warning("rank %d has no reserve of staging memory: %s", message.rank, error)
    return make_slots(message.slots, message.size, index)


def _close_slots(slots: Sequence[Slot]) -> threading.Thread:
    """Release the memory of slots, and return the thread that does so for snapshots that are still written or sent.

    The next attempt starts meanwhile.
    """

    def close_when_free() -> None:
        for slot in slots:
            slot.wait_until_free()
            slot.memory.close()

    thread = threading.Thread(target=close_when_free, name="megascale-close-slots", daemon=True)
    thread.start()
    return thread


def _describe_snapshot(rank: int, slot: Slot, *, is_replica: bool) -> SnapshotInfo:
    return SnapshotInfo(rank, is_replica, slot.step, slot.generation, slot.identity, slot.ranks)


def _receive_staged_counts(trainer: Conversation, count: int, follow: bool) -> Iterator[int]:
    """Yield the number of chunks that are copied, as it increases, up to `count`.

    Args:
        follow: whether the trainer is still copying and reports its progress.

    Raises:
        EOFError: the trainer disconnected before the last chunk.
    """
    if not follow:
        yield count
        return
    rows = -1
    while rows < count:
        rows = trainer.receive().rows
        yield rows


def serve(folder: Path, linger: float, ready: ReadySignal | None = None) -> None:
    """Run the service until it is no longer needed. Return at once if another process is the service of the folder."""
    service = CheckpointService(linger)
    location = locate_service(folder)
    claimed = claim_service(
        location,
        lambda: service.handle_trainer,
        (FROM_SERVICE, TO_SERVICE),
        ready or ReadySignal(None, None),
        make_folder=True,
    )
    if claimed is None:
        return
    service.lifetime.server = claimed.server
    claimed.server.serve(service.lifetime.is_done)
    location.release(claimed.lock)
    claimed.server.stop()
    location.remove_leftovers()


def connect_checkpoint_service(folder: Path, linger: float = 60.0, log_file: Path | None = None) -> Conversation:
    """Return a conversation with the service of `folder`, which is started if it does not run.

    Args:
        folder: private folder of the service (see service_protocol.private_folder).
        linger: seconds that a new service waits for trainers to return.
        log_file: file for the output of a new service.

    Raises:
        TrainingError: the service does not start.
    """
    location = locate_service(folder)
    try:
        return connect_service(
            location,
            _make_launch(folder, linger, log_file),
            TO_SERVICE,
            FROM_SERVICE,
            seconds=host_service.START_TIMEOUT,
            make_folder=True,
        )
    except (OSError, ServiceFailed) as error:
        raise TrainingError(
            f"the checkpoint service does not answer on {str(location.socket_path)!r} ({error}); "
            f"look into {str(log_file or folder)!r}, or set checkpoint.background=false"
        ) from None


def start_checkpoint_service(folder: Path, linger: float, log_file: Path) -> None:
    """Start the service of `folder` unless it runs, without waiting until it is ready. Arguments as above."""
    location = locate_service(folder)
    if location.find_service_pid() is None:
        with contextlib.suppress(OSError):  # `connect_checkpoint_service` reports what prevents it
            start_service(location, _make_launch(folder, linger, log_file), make_folder=True)


def end_unused_service(folder: Path) -> None:
    """Let the service of `folder` end if it has no snapshot and no trainer. Errors are only logged."""
    location = locate_service(folder)
    try:
        connection = host_service.find_service(location, TO_SERVICE, FROM_SERVICE, seconds=_GOODBYE_SECONDS)
        if connection is None:
            with contextlib.suppress(OSError):  # files of a service that is just starting are in the folder
                folder.rmdir()
            return
        with connection, connection.time_limit(_GOODBYE_SECONDS):
            connection.request(Goodbye(keeps_snapshots=True))
    except OSError as error:
        log.warning("the checkpoint service was not informed that the start was refused: %s", error)


def _make_launch(folder: Path, linger: float, log_file: Path | None) -> Launch:
    return Launch(SERVICE_MODULE, [str(folder), "--linger", str(linger)], log_file)


def main() -> None:
    """Run the command line of the service, with which `connect_checkpoint_service` starts it."""
    parser = argparse.ArgumentParser(description="Checkpoint service of one host.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--linger", type=float, default=60.0, help="seconds to wait for trainers before ending")
    parser.add_argument("--ready", type=int, help="file descriptor on which to report readiness")
    parser.add_argument("--starting", type=int, help="file descriptor of a lock to release when ready")
    arguments = parser.parse_args()
    # Slurm sends SIGTERM to all processes of a job before it ends the job. A login manager sends SIGHUP to all
    # processes of a session that closes. The trainers then save through this service, so it ignores both signals.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    serve(arguments.folder, arguments.linger, ReadySignal(arguments.ready, arguments.starting))


if __name__ == "__main__":
    main()
