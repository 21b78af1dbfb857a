"""Replicas of snapshots in the memory of another host, sent over TCP with a shared token. Needs no torch.

A replica has its own memory. It is valid only once it is complete and its checksums match, so a sender that dies leaves
no replica that could be loaded. The replica is sent while its snapshot is being staged, and checked while it arrives.
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
    BETWEEN_SERVICES,
    MAX_INDEX_BYTES,
    Checksums,
    Replicate,
    Replicated,
    SnapshotMessage,
    StageSnapshot,
)
from megascale.checkpoint.background.snapshot_memory import Progress, Slot, make_slots, pop_older_slots
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.step_folders import get_nonce
from megascale.core.failure import PAUSE, FailureLog
from megascale.services.connection_server import AUTHENTICATION_TIMEOUT, ConnectionServer
from megascale.services.conversation import Conversation, set_peer_timeout

log = logging.getLogger("megascale.checkpoint.background.replica")

_TIMEOUT = 60.0  # seconds within which a transfer must make progress
# A peer that acknowledges nothing for this many seconds counts as lost. The time is short, because a new trainer waits
# for the memory that is being sent. A driver needs equally long to declare a node lost.
_PEER_TIMEOUT = 5.0
_SNAPSHOT_ABANDONED = "the process ended before its state was copied"
_RECEIVE_BYTES = 32 << 20  # bytes between two notices to the thread that computes checksums
_SEND_BYTES = 4 << 20  # bytes between two updates of the time of the last progress
# If the trainer has left, a transfer without progress for this many seconds is given up. The peer may be the lost host,
# and the next trainer waits for the memory that is being sent.
_STALL_SECONDS = 2.0
_STALL_POLL = 0.1  # seconds between two checks of the progress


def pair_hosts(domains: Sequence[Any]) -> list[int]:
    """Return for each host the host that keeps its replica, in another fault domain if possible.

    The hosts form a ring in which domains follow one another, the largest domain first. Each host's partner is as many
    places further on the ring as the largest domain has hosts. The partner is then in another domain, unless one domain
    has more than half of all hosts. Each host keeps one replica. A single host is its own partner.

    Args:
        domains: fault domain of each host (rack, switch, power feed). Hosts of one domain tend to fail together.
    """
    hosts_by_domain: dict[Any, list[int]] = {}
    for host, domain in enumerate(domains):
        hosts_by_domain.setdefault(domain, []).append(host)
    ring: list[int] = []
    for domain_hosts in sorted(hosts_by_domain.values(), key=lambda hosts: (-len(hosts), hosts)):
        ring += domain_hosts
    if len(hosts_by_domain) > 1:
        shift = max(len(domain_hosts) for domain_hosts in hosts_by_domain.values())
    else:
        shift = 1
    partners = [0] * len(ring)
    for position, host in enumerate(ring):
        partners[host] = ring[(position + shift) % len(ring)]
    return partners


class Replicas:
    """Replicas of other hosts' snapshots in the memory of this service."""

    def __init__(self) -> None:
        self._slots: dict[int, list[Slot]] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._token = b""

    def list_complete(self) -> list[tuple[int, Slot]]:
        """Return all complete replicas, each as its rank and its slot."""
        with self._lock:
            return [(rank, slot) for rank, slots in self._slots.items() for slot in slots if slot.generation]

    def drop_older(self, sequence: int) -> None:
        """Free the memory of ranks that have only saves up to the number `sequence`, or no complete save."""
        with self._lock:
            for slot in pop_older_slots(self._slots, sequence, is_used=lambda rank: False):
                slot.memory.close()

    def listen(self, address: str, token: bytes) -> int:
        """Accept replicas from processes that know `token`, and return the port. Later calls only change the token."""
        with self._lock:
            self._token = token
            if self._listener is None:
                self._listener = socket.create_server((address, 0))
                server = ConnectionServer(self._listener, self._authenticate, self._receive_replica)
                threading.Thread(target=_serve_forever, args=(server,), daemon=True).start()
            return int(self._listener.getsockname()[1])

    def _authenticate(self, sock: socket.socket) -> Conversation:
        set_peer_timeout(sock, _PEER_TIMEOUT)
        sender = Conversation(sock, BETWEEN_SERVICES, BETWEEN_SERVICES)
        with sender.time_limit(AUTHENTICATION_TIMEOUT):
            sender.authenticate(self._token, "replicas", "server")
        sender.timeout = _TIMEOUT
        return sender

    def _receive_replica(self, sender: Conversation) -> None:
        """Receive one replica, and reply whether it arrived undamaged."""
        with contextlib.suppress(ValueError, KeyError):
            message = sender.receive(max_body_bytes=MAX_INDEX_BYTES)
            if not isinstance(message, Replicate):
                return
            slot = self._reserve_slot(message, CheckpointIndex.from_bytes(bytes(sender.body)))
            try:
                crcs = _receive_chunks(sender, slot, message.size)
                checksums = sender.receive()
                is_complete = isinstance(checksums, Checksums) and list(checksums.crcs) == crcs
                if is_complete:
                    slot.mark_complete(message, crcs)
            finally:
                slot.busy.release()
            sender.send(Replicated(is_complete))

    def _reserve_slot(self, message: Replicate, index: CheckpointIndex) -> Slot:
        """Return the slot for a new replica, with its lock held.

        Each slot of a rank has its own replica, which is overwritten only when the slot is. A rank with a single slot
        has two replicas, of which the older one is overwritten. The replica from which the run started stays until the
        run has made a new one.

        Raises:
            OSError: another replica is still arriving in this slot, whose sender has probably died.
        """
        size = max(message.size, 1)
        slot_count = max(2, message.slots)
        with self._lock:
            slots = self._slots.setdefault(message.rank, [])
            if len(slots) != slot_count or any(slot.memory.size < size for slot in slots):
                for slot in slots:
                    slot.memory.close()
                slots.clear()
                slots += make_slots(slot_count, size, index)
            target_index = message.slot
            if message.slots == 1:
                target_index = min(range(slot_count), key=lambda i: slots[i].generation)
            nonce = get_nonce(message.generation)
            has_newer = any(get_nonce(slot.generation) == nonce for slot in slots)
            target_generation = slots[target_index].generation
            is_base = not has_newer and bool(target_generation) and target_generation == message.base_generation
            # If the target has the replica from which the run started, overwrite its neighbour and swap the two.
            overwritten_index = (target_index + 1) % slot_count if is_base else target_index
            slot = slots[overwritten_index]
            if not slot.busy.acquire(blocking=False):
                raise BlockingIOError("another copy of this process is on its way")
            slots[overwritten_index] = slots[target_index]
            slots[target_index] = slot
            slot.generation = ""
            slot.index = index
            return slot


def _serve_forever(server: ConnectionServer) -> None:
    """Accept connections until the process ends."""
    failures = FailureLog(log, "receiving replicas of other hosts")
    while True:
        try:
            server.serve(lambda: False)
        except Exception as error:
            failures.note(error, f"it starts again in {PAUSE:g} s")
        time.sleep(PAUSE)


def _receive_chunks(sender: Conversation, slot: Slot, size: int) -> list[int]:
    """Fill a slot with the received bytes, and return the CRC-32 of each chunk, which another thread computes."""
    arrived = Progress()
    with ThreadPoolExecutor(1) as pool:
        checksums = pool.submit(_compute_checksums, slot, arrived)
        try:
            for start in range(0, size, _RECEIVE_BYTES):
                stop = min(start + _RECEIVE_BYTES, size)
                sender.receive_into(slot.memory.view[start:stop])
                arrived.advance(stop)
        finally:
            arrived.fail()
        return checksums.result()


def _compute_checksums(slot: Slot, arrived: Progress) -> list[int]:
    """Return the CRC-32 of each chunk of a slot, whose bytes may still be arriving."""
    index = slot.index
    crcs = []
    for row in range(len(index)):
        start = int(index.columns["data"][row])
        stop = start + index.nbytes(row)
        arrived.wait(stop)
        crcs.append(crc32(slot.memory.view[start:stop]))
    return crcs


class ReplicaSender:
    """Thread that sends a snapshot to its peer while the snapshot is being completed.

    Args:
        staged: description of the snapshot.
        slots: number of slots of the rank.
        slot: slot of the snapshot.
        progress: number of bytes that are complete.
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
        """Wait for the end of the transfer, and return its error or None. Only the first call sets `crcs`.

        Args:
            crcs: CRC-32 of each chunk, or None if the snapshot will not be completed.
            is_awaited: returns whether the trainer still waits. If not, a transfer without progress is given up.
        """
        if not self._finished.is_set():
            self._crcs = None if crcs is None else tuple(crcs)
            self._finished.set()
            self._progress.fail()  # no effect if the snapshot is complete
            if crcs is None and self._peer is not None:
                self._peer.shut_down()  # stop sending bytes that are useless now
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
            with Conversation(sock, BETWEEN_SERVICES, BETWEEN_SERVICES) as self._peer:
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
        """Send the snapshot. Raises OSError or EOFError if it did not arrive completely and undamaged."""
        staged = self._staged
        set_peer_timeout(peer.sock, _PEER_TIMEOUT)
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.timeout = _TIMEOUT
        peer.authenticate(bytes.fromhex(staged.token), "replicas", "client")
        snapshot = {name: getattr(staged, name) for name in SnapshotMessage.__struct_fields__}
        peer.send(Replicate(**snapshot, slots=self._slots), self._slot.index.to_bytes())
        sent_bytes = 0
        while sent_bytes < staged.size and not self._is_abandoned():
            stop = min(self._progress.wait(sent_bytes + 1), sent_bytes + _SEND_BYTES)
            peer.send_bytes(self._slot.memory.view[sent_bytes:stop])
            sent_bytes = stop
            self._last_progress = time.monotonic()
        self._finished.wait()
        if self._crcs is None:
            raise OSError(_SNAPSHOT_ABANDONED)
        peer.send(Checksums(self._crcs))
        reply = peer.receive_reply(max_body_bytes=0)
        if not isinstance(reply, Replicated) or not reply.is_complete:
            raise ConnectionError("the copy arrived damaged")
