"""Replicas of snapshots in another host's memory, sent over TCP with a shared token. No torch.

A replica is received into memory of its own and counts only once it is complete and its checksums match, so a sender
that dies leaves nothing that could be mistaken for a checkpoint. It is sent while its snapshot is being staged, and
checked while it arrives.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megascale.checkpoint.background.service_protocol import (
    COPIES,
    INDEX,
    Checksums,
    Replicate,
    Replicated,
    SnapshotMessage,
    StageSnapshot,
)
from megascale.checkpoint.background.snapshot_memory import Progress, Slot, make_slots, pop_older_slots
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.core.failure import PAUSE, FailureLog
from megascale.services.connection_server import AUTHENTICATION_TIMEOUT, ConnectionServer
from megascale.services.conversation import Conversation, set_peer_timeout

log = logging.getLogger("megascale.checkpoint.background.replica")

_TIMEOUT = 60.0
# A peer that acknowledges nothing for this long counts as lost. The process that replaces it waits for the memory that
# is being copied, and a driver needs as long to declare a node lost.
_PEER_TIMEOUT = 5.0
_SNAPSHOT_ABANDONED = "the process ended before its state was copied"
_TRANSFER_BYTES = 32 << 20  # received before the other thread is notified
_SENT_BYTES = 4 << 20  # sent between two marks of progress
# Seconds without progress after which a copy is given up whose trainer has left. The peer may be the lost host, and the
# next trainer waits for the memory that is being copied.
_STALL_SECONDS = 2.0
_STALL_POLL = 0.1


def pair_hosts(domains: Sequence[Any]) -> list[int]:
    """Return, for each host, the host that keeps its replica, in another fault domain wherever that is possible.

    Hosts are arranged domain after domain on a ring, largest domain first. Each is paired with the host half the ring
    (at least the largest domain) further on, so no host meets its own domain unless one domain holds more than half of
    all hosts. Each host keeps one replica; a single host is paired with itself.

    Args:
        domains: each host's fault domain (rack, switch, power feed); hosts of one domain tend to fail together.
    """
    groups: dict[Any, list[int]] = {}
    for host, domain in enumerate(domains):
        groups.setdefault(domain, []).append(host)
    ring = [host for group in sorted(groups.values(), key=lambda g: (-len(g), g)) for host in group]
    if len(groups) > 1:
        shift = max(len(group) for group in groups.values())
    else:
        shift = 1
    partners = [0] * len(ring)
    for position, host in enumerate(ring):
        partners[host] = ring[(position + shift) % len(ring)]
    return partners


class Replicas:
    """The replicas of other hosts' snapshots in this service."""

    def __init__(self) -> None:
        self._slots: dict[int, list[Slot]] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._token = b""

    def list_complete(self) -> list[tuple[int, Slot]]:
        """Return (process, snapshot) of all complete replicas."""
        with self._lock:
            return [(rank, slot) for rank, slots in self._slots.items() for slot in slots if slot.generation]

    def drop_older(self, sequence: int) -> None:
        """Free the memory of processes of which only saves up to a number are left."""
        with self._lock:
            for slot in pop_older_slots(self._slots, sequence):
                slot.memory.close()

    def listen(self, address: str, token: bytes) -> int:
        """Take replicas from holders of `token` and return the port. Later calls change the token only."""
        with self._lock:
            self._token = token
            if self._listener is None:
                self._listener = socket.create_server((address, 0))
                server = ConnectionServer(self._listener, self._authenticate, self._receive_replica)
                threading.Thread(target=_serve_forever, args=(server,), daemon=True).start()
            return int(self._listener.getsockname()[1])

    def _authenticate(self, sock: socket.socket) -> Conversation:
        set_peer_timeout(sock, _PEER_TIMEOUT)
        sender = Conversation(sock, COPIES, COPIES)
        with sender.time_limit(AUTHENTICATION_TIMEOUT):
            sender.authenticate(self._token, "replicas", "server")
        sender.timeout = _TIMEOUT
        return sender

    def _receive_replica(self, sender: Conversation) -> None:
        with contextlib.suppress(ValueError, KeyError):
            message = sender.receive(max_body_bytes=INDEX)
            if not isinstance(message, Replicate):
                return
            slot = self._reserve_slot(message, CheckpointIndex.from_bytes(bytes(sender.body)))
            try:
                crcs = _receive_chunks(sender, slot, message.size)
                checksums = sender.receive()
                is_complete = isinstance(checksums, Checksums) and list(checksums.crcs) == crcs
                if is_complete:
                    slot.complete(message, crcs)
            finally:
                slot.busy.release()
            sender.send(Replicated(is_complete))

    def _reserve_slot(self, message: Replicate, index: CheckpointIndex) -> Slot:
        """Return the memory for a replica with its lock held.

        Each slot of a process has its own replica, so that a replica is overwritten only with its snapshot. A process
        with a single slot has two replicas, of which the older is overwritten. The snapshot that a run began from stays
        until the run has made a new one. Raises OSError while another replica arrives in that memory, whose sender has
        died.
        """
        size = max(message.size, 1)
        count = max(2, message.slots)
        with self._lock:
            slots = self._slots.setdefault(message.rank, [])
            if [slot.memory.size for slot in slots] != [size] * count:
                for slot in slots:
                    slot.memory.close()
                slots.clear()
                slots += make_slots(count, size, index)
            number = message.slot
            if message.slots == 1:
                number = min(range(count), key=lambda i: slots[i].generation)
            # Swap the replica that the run began from with its neighbour, so that the neighbour is overwritten.
            has_own = any(slot.generation[9:] == message.generation[9:] for slot in slots)
            is_origin = not has_own and slots[number].generation.startswith(f"{message.base_sequence:08d}-")
            chosen = (number + 1) % count if is_origin else number
            slot = slots[chosen]
            if not slot.busy.acquire(blocking=False):
                raise BlockingIOError("another copy of this process is on its way")
            slots[chosen] = slots[number]
            slots[number] = slot
            slot.generation = ""
            slot.index = index
            return slot


def _serve_forever(server: ConnectionServer) -> None:
    """Accept connections for as long as the process lives."""
    failures = FailureLog(log, "receiving replicas of other hosts")
    while True:
        try:
            server.serve(lambda: False)
        except Exception as error:
            failures.note(error, f"it starts again in {PAUSE:g} s")
        time.sleep(PAUSE)


def _receive_chunks(sender: Conversation, slot: Slot, size: int) -> list[int]:
    """Fill a slot with the arriving bytes and return the CRC-32 of each chunk."""
    arrived = Progress()
    with ThreadPoolExecutor(1) as pool:
        checksums = pool.submit(_compute_checksums, slot, arrived)
        try:
            for start in range(0, size, _TRANSFER_BYTES):
                stop = min(start + _TRANSFER_BYTES, size)
                sender.receive_into(slot.memory.view[start:stop])
                arrived.advance(stop)
        finally:
            arrived.fail()
        return checksums.result()


def _compute_checksums(slot: Slot, arrived: Progress) -> list[int]:
    index = slot.index
    crcs = []
    for row in range(len(index)):
        start = int(index.columns["data"][row])
        stop = start + index.nbytes(row)
        arrived.wait(stop)
        crcs.append(crc32(slot.memory.view[start:stop]))
    return crcs


class ReplicaSender:
    """Sends a snapshot to its process's peer in a thread, as far as `progress` says that it is complete.

    Args:
        staged: description of the snapshot.
        slots: number of slots of its process.
        slot: the snapshot's memory.
    """

    def __init__(self, staged: StageSnapshot, slots: int, slot: Slot, progress: Progress) -> None:
        self._staged = staged
        self._slots = slots
        self._slot = slot
        self._progress = progress
        self._crcs: tuple[int, ...] | None = None
        self._problem: str | None = "the transfer did not end"
        self._peer: Conversation | None = None
        self._last_progress = time.monotonic()
        self._finished = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, crcs: Sequence[int] | None, is_awaited: Callable[[], bool] = lambda: True) -> str | None:
        """Wait for the end of the transfer and return its problem, None if there was none. The first call counts.

        Args:
            crcs: CRC-32 of each chunk, None if the snapshot will never be complete.
            is_awaited: returns whether the trainer still waits. If not, a transfer that makes no progress is given up.
        """
        if not self._finished.is_set():
            self._crcs = None if crcs is None else tuple(crcs)
            self._finished.set()
            self._progress.fail()  # no effect if the snapshot is complete
            if crcs is None and self._peer is not None:
                self._peer.shut_down()  # the peer may be slow to take bytes that are useless now
        while self._thread.is_alive():
            self._thread.join(_STALL_POLL)
            is_stalled = time.monotonic() - self._last_progress > _STALL_SECONDS
            if is_stalled and self._peer is not None and not is_awaited():
                self._peer.shut_down()
        return self._problem

    def _run(self) -> None:
        assert self._staged.peer is not None
        host, port = self._staged.peer
        try:
            sock = socket.create_connection((host, port), timeout=_PEER_TIMEOUT)
            with Conversation(sock, COPIES, COPIES) as self._peer:
                self._send(self._peer)
            self._problem = None
            return
        except EOFError:
            reason = "the peer hung up"
        except OSError as error:
            reason = str(error)
        except Exception as error:
            log.exception("copying failed")
            reason = repr(error)
        if self._is_abandoned():
            reason = _SNAPSHOT_ABANDONED
        log.warning("the copy of process %s to %s:%s failed: %s", self._staged.rank, host, port, reason)
        self._problem = f"{host}:{port}: {reason}"[:2000]

    def _is_abandoned(self) -> bool:
        return self._finished.is_set() and self._crcs is None

    def _send(self, peer: Conversation) -> None:
        """Send the snapshot. Raises OSError or EOFError if it did not arrive complete."""
        staged = self._staged
        set_peer_timeout(peer.sock, _PEER_TIMEOUT)
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.timeout = _TIMEOUT
        peer.authenticate(bytes.fromhex(staged.token), "replicas", "client")
        snapshot = {name: getattr(staged, name) for name in SnapshotMessage.__struct_fields__}
        peer.send(Replicate(**snapshot, slots=self._slots), self._slot.index.to_bytes())
        sent = 0
        while sent < staged.size and not self._is_abandoned():
            stop = min(self._progress.wait(sent + 1), sent + _SENT_BYTES)
            peer.send_bytes(self._slot.memory.view[sent:stop])
            sent = stop
            self._last_progress = time.monotonic()
        self._finished.wait()
        if self._crcs is None:
            raise OSError(_SNAPSHOT_ABANDONED)
        peer.send(Checksums(self._crcs))
        answer = peer.receive_reply(max_body_bytes=0)
        if not isinstance(answer, Replicated) or not answer.is_complete:
            raise ConnectionError("the copy arrived damaged")
