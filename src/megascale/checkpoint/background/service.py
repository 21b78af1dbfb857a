"""The checkpoint service of a host: owns the staging memory, outlives the trainers, writes what they staged. No torch.

A trainer asks for memory, fills it under the next forward and backward pass, says so, and goes on; writing, copying
to a peer host and committing happen here. If trainers die, what was staged is still saved, and new trainers find it
in memory. The service ends by itself once nobody has talked to it for a while.

Run as `python -m megascale.checkpoint.background.service FOLDER`; `connect` starts it where none runs.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale.checkpoint.background import replica, service_protocol
from megascale.checkpoint.background.commit_writer import Writer
from megascale.checkpoint.background.pending_saves import Failed
from megascale.checkpoint.background.service_protocol import (
    FROM_SERVICE,
    TO_SERVICE,
    Allocate,
    Allocated,
    AwaitPages,
    Fill,
    Goodbye,
    HeldSnapshot,
    HeldSnapshots,
    ListHeld,
    Open,
    Opened,
    PagesReady,
    Plan,
    Pruned,
    Register,
    Registered,
    Released,
    Staged,
    Wait,
)
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.staged_file import Progress, Slot, frame_chunks, make_slots
from megascale.core.exit_record import record_of
from megascale.errors import TrainingError
from megascale.services import host_service
from megascale.services.conversation import Conversation, Done, ErrorReply
from megascale.services.host_service import Launch, Ready, ServiceFailed
from megascale.services.reception import Reception

log = logging.getLogger("megascale.checkpoint.background.service")

_COME_UP = 30.0  # seconds
_A_MOMENT = 0.5


class CheckpointService:
    """State shared by the connections. One lock guards the tables; slots have their own."""

    reception: Reception

    def __init__(self, linger: float) -> None:
        self.name = os.urandom(8).hex()
        self.linger = linger
        self.slots: dict[int, list[Slot]] = {}
        self.replicas = replica.Replicas()
        self.layouts: dict[int, CheckpointIndex] = {}
        self.writer = Writer(self._work, self._deserted)
        self.changed = threading.Condition()
        self.working = 0
        self.goodbye = False

    def done(self) -> bool:
        """Whether to end: nobody connected for a while (or all said goodbye) and nothing left to do."""
        with self.changed:
            idle = not self.reception.client_count and not self.working
            return idle and (self.goodbye or self._deserted())

    def _deserted(self) -> bool:
        """Whether no trainer has been here for longer than the service waits for one."""
        # Whoever started it may take a while to come for the first time, however short it is to wait later.
        known = self.reception.has_had_clients or self.linger < 0
        return self.reception.deserted(self.linger if known else max(self.linger, _COME_UP))

    def talk(self, sock: Conversation) -> None:
        """Serve one trainer until it leaves."""
        with self.changed:
            self.goodbye = False
        while True:
            message = sock.receive(attached=1 << 40)
            try:
                getattr(self, f"on_{message.do}")(sock, message)
            except EOFError:
                raise
            except (OSError, Failed, TrainingError, ValueError, KeyError, IndexError) as error:
                log.exception("%s failed", message.do)
                sock.send(ErrorReply(str(error)[:2000], type(error).__name__, record_of(error)))

    def on_register(self, sock: Conversation, message: Register) -> None:
        """Who this is, and the port where it takes replicas."""
        token = bytes.fromhex(message.token)
        port = self.replicas.listen(message.listen, token) if token else 0
        sock.send(Registered(self.name, os.getpid(), port))

    def on_goodbye(self, sock: Conversation, message: Goodbye) -> None:
        """The run is over: end as soon as the work is done."""
        with self.changed:
            self.goodbye = True
        sock.send(Done())

    def on_allocate(self, sock: Conversation, message: Allocate) -> None:
        """Memory for one process's snapshots; the same memory again if it came into place and has that size."""
        rank, size, count = message.rank, message.size, message.slots
        index = CheckpointIndex.from_bytes(bytes(sock.body))
        with self.changed:
            slots = self.slots.get(rank, [])
        for slot in slots:
            slot.busy.acquire()  # a dead trainer's snapshot may still be on its way to the disk
            slot.busy.release()
        lacking = any(slot.memory.filling.problem for slot in slots)
        if lacking or [slot.memory.size for slot in slots] != [size] * count:
            with self.changed:
                self.slots.pop(rank, None)
            for slot in slots:
                slot.memory.close()
            slots = make_slots(count, size, index)
        with self.changed:
            self.slots[rank], self.layouts[rank] = slots, index
        sock.send(Allocated(tuple(s.generation for s in slots)), files=[slot.memory.handle for slot in slots])

    def on_awaitpages(self, sock: Conversation, message: AwaitPages) -> None:
        """Whether a slot's pages are in place; until then whoever touched them would clear them, one by one."""
        with self.changed:
            memory = self.slots[message.rank][message.slot].memory
        sock.send(PagesReady(memory.filling.wait(_A_MOMENT)))

    def on_fill(self, sock: Conversation, message: Fill) -> None:
        """The trainer is about to overwrite a slot: from here on its snapshot is not complete."""
        slot = self.slots[message.rank][message.slot]
        slot.generation = ""
        sock.send(Done())

    def on_staged(self, sock: Conversation, message: Staged) -> None:
        """A slot is filled, or with "follow" is being filled: complete it, copy it to the peer, write it meanwhile.

        Answers when the snapshot is complete here and at the peer, and again when the slot may be filled anew.
        """
        started = time.monotonic()
        rank = message.rank
        slot = self.slots[rank][message.slot]
        with self._work(), slot.busy:
            slot.index = self.layouts[rank]
            staged = _staged(sock, len(slot.index), message.follow)
            writing = self.writer.start(message, slot) if message.persist else None
            progress = writing.progress if writing else Progress()
            copying = replica.Copying(message, len(self.slots[rank]), slot, progress) if message.peer else None
            crc = problem = None
            try:
                try:
                    crcs, crc = frame_chunks(slot.memory.view[: message.size], slot.index, staged, progress)
                finally:
                    for _ in staged:  # the trainer's next question comes after these
                        pass
                slot.become(message, crcs.tolist())
                if copying:
                    problem = copying.finish(slot.crcs)
                with contextlib.suppress(OSError):  # copies and files are made without the trainer too
                    sock.send(Done())
            finally:
                if copying:
                    copying.finish(None)  # where it has not ended
                if writing:
                    writing.finish(crc)
        sock.send(Released(time.monotonic() - started, problem))

    def on_plan(self, sock: Conversation, message: Plan) -> None:
        """The whole plan and torch's form of it, from the first process: sent once, used for every save."""
        size = message.index_bytes
        self.writer.plans = {message.plan: (bytes(sock.body[:size]), bytes(sock.body[size:]))}
        sock.send(Done())

    def on_pruned(self, sock: Conversation, message: Pruned) -> None:
        """Answer when the checkpoints that a commit made superfluous are gone."""
        with self.writer.pruned():
            sock.send(Done())

    def on_wait(self, sock: Conversation, message: Wait) -> None:
        """Answer when a save is committed or given up."""
        sock.send(self.writer.wait(message.generation, sock.is_connected))

    def on_listheld(self, sock: Conversation, message: ListHeld) -> None:
        """What lies in memory here: own snapshots and replicas of other hosts'."""
        with self.changed:
            own = [(rank, slot) for rank, slots in self.slots.items() for slot in slots]
        found = tuple(
            HeldSnapshot(rank, copy, s.step, s.generation, s.identity, s.ranks)
            for copy, items in ((False, own), (True, self.replicas.list_complete()))
            for rank, s in items
            if s.generation
        )
        sock.send(HeldSnapshots(found, self.name))

    def on_open(self, sock: Conversation, message: Open) -> None:
        """One snapshot: its memory, its chunks with their checksums, the state saved with it."""
        with self.changed:
            own = list(self.slots.get(message.rank, []))
        copies = [slot for rank, slot in self.replicas.list_complete() if rank == message.rank]
        for slot in own + copies:
            if slot.generation == message.generation:
                opened = Opened(slot.state, tuple(slot.crcs), slot.step, slot.memory.size)
                sock.send(opened, slot.index.to_bytes(), [slot.memory.handle])
                return
        raise KeyError(f"no snapshot of process {message.rank} and {message.generation}")

    @contextlib.contextmanager
    def _work(self) -> Any:
        with self.changed:
            self.working += 1
        try:
            yield
        finally:
            with self.changed:
                self.working -= 1
            self.reception.record_activity()


def _staged(sock: Conversation, count: int, follow: bool) -> Iterator[int]:
    """How many chunks of a snapshot have their elements, as the trainer tells it; EOFError if it ends before."""
    rows = count if not follow else -1
    while rows < count:
        rows = sock.receive().rows
        yield rows
    if not follow:
        yield count


def serve(folder: Path, linger: float, ready: Ready | None = None) -> None:
    """Serve until there is nothing left to do. Returns at once if another service already has the folder."""
    service = CheckpointService(linger)
    place = service_protocol.locate_service(folder)
    schemas, ready = (FROM_SERVICE, TO_SERVICE), ready or Ready(None, None)
    owned = host_service.claim_service(place, lambda: service.talk, schemas, ready, make_folder=True)
    if owned is None:
        return
    service.reception = owned.reception
    owned.reception.serve(service.done)
    place.release(owned.lock)
    owned.reception.stop()
    place.sweep()


def connect_checkpoint_service(folder: Path, linger: float = 60.0, log_file: Path | None = None) -> Conversation:
    """A conversation with the service of `folder` (see service_protocol.private_folder), started if none runs.

    Raises TrainingError if it does not come up.
    """
    place = service_protocol.locate_service(folder)
    launch = Launch("megascale.checkpoint.background.service", [str(folder), "--linger", str(linger)], log_file)
    try:
        return host_service.connect_service(place, launch, TO_SERVICE, FROM_SERVICE, seconds=_COME_UP, make_folder=True)
    except (OSError, ServiceFailed) as error:
        raise TrainingError(
            f"the checkpoint service does not answer on {str(place.address)!r} ({error}); "
            f"look into {str(log_file or folder)!r}, or set checkpoint.background=false"
        ) from None


def main() -> None:
    """Command line of the service; started by `connect`, not by people."""
    parser = argparse.ArgumentParser(description="Checkpoint service of one host.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--linger", type=float, default=60.0, help="seconds to wait for trainers before ending")
    parser.add_argument("--ready", type=int, help="open file to tell when ready")
    arguments = parser.parse_args()
    # Slurm sends SIGTERM to all processes of a job that is to end, and a login manager SIGHUP to all processes of a
    # session that closes. Their trainers then save through this service.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    serve(arguments.folder, arguments.linger, Ready(arguments.ready, None))


if __name__ == "__main__":
    main()
