"""Replicas of snapshots in the memory of another host, sent over TCP with a shared token. Needs no torch.

A replica has its own memory. It is valid only once it is complete and its checksums match, so a sender that dies leaves
no replica that could be loaded. The replica is sent while its snapshot is being staged, and checked while it arrives.

One TCP connection moves about 2 GB/s, since a core copies its bytes on each end (dev/log.md). A large replica is
therefore divided into segments, which several connections carry in turn.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import select
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
    ReplicaReady,
    ReplicaStream,
    Replicate,
    Replicated,
    SnapshotMessage,
    StageSnapshot,
)
from megascale.checkpoint.background.snapshot_memory import (
    CHECKSUM_THREADS,
    Progress,
    Slot,
    compute_checksum,
    make_slots,
    pop_older_slots,
)
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.step_folders import get_nonce
from megascale.core.failure import PAUSE, FailureLog
from megascale.services.connection_server import AUTHENTICATION_TIMEOUT, ConnectionServer
from megascale.services.conversation import Conversation, ErrorReply, set_peer_timeout

log = logging.getLogger("megascale.checkpoint.background.replica")

_TIMEOUT = 60.0  # seconds within which a transfer must make progress
# A peer that acknowledges nothing for this many seconds counts as lost. The time is short, because a new trainer waits
# for the memory that is being sent. A driver needs equally long to declare a node lost.
_PEER_TIMEOUT = 5.0
_SNAPSHOT_ABANDONED = "the process ended before its state was copied"
_SEND_BYTES = 4 << 20  # bytes between two updates of the time of the last progress
_SEGMENT_BYTES = 16 << 20  # bytes that a connection carries before the next one has its turn
_MAX_STREAMS = 8  # connections per replica
_MAX_HOST_STREAMS = 32  # connections of all ranks of a host together
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
        self._arrivals: dict[str, _Arrival] = {}  # replicas that arrive in several streams, by name of the transfer

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
        """Receive one replica and reply whether it arrived undamaged, or receive another stream of a replica."""
        with contextlib.suppress(ValueError, KeyError):
            message = sender.receive(max_body_bytes=MAX_INDEX_BYTES)
            if isinstance(message, ReplicaStream):
                with self._lock:
                    arrival = self._arrivals.get(message.transfer)
                if arrival is not None:
                    arrival.receive(sender, message.stream)
                return
            if not isinstance(message, Replicate):
                return
            try:
                slot = self._reserve_slot(message, CheckpointIndex.from_bytes(bytes(sender.body)))
            except OSError as error:
                sender.send(ErrorReply(f"this host has no memory for the copy: {error}"[:2000], "OSError"))
                raise
            try:
                crcs = self._receive_chunks(sender, message, slot)
                checksums = sender.receive()
                is_complete = isinstance(checksums, Checksums) and list(checksums.crcs) == crcs
                if is_complete:
                    slot.mark_complete(message, crcs)
            finally:
                slot.busy.release()
            sender.send(Replicated(is_complete))

    def _receive_chunks(self, sender: Conversation, message: Replicate, slot: Slot) -> list[int]:
        """Fill a slot with the bytes of all streams, and return the CRC-32 of each chunk, which threads compute.

        Raises OSError or EOFError if a stream ends early. No thread writes into the slot afterwards.
        """
        arrival = _Arrival(slot, message)
        with ThreadPoolExecutor(1) as pool:
            checksums = pool.submit(_compute_checksums, slot, arrival.progress)
            try:
                if message.streams > 1:
                    with self._lock:
                        self._arrivals[message.transfer] = arrival
                sender.send(ReplicaReady())
                arrival.receive(sender, 0)
                arrival.wait(sender.sock)
            finally:
                with self._lock:
                    self._arrivals.pop(message.transfer, None)
                arrival.close()
            return checksums.result()

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


class _Arrival:
    """Bytes of a replica that arrive in several streams.

    Attributes:
        progress: number of bytes at the start of the replica that have arrived.
    """

    def __init__(self, slot: Slot, message: Replicate) -> None:
        self.progress = Progress()
        self._view = slot.memory.view
        self._size = message.size
        self._streams = message.streams
        self._segment_bytes = message.segment_bytes
        self._complete_segments: set[int] = set()  # those after the first one that is missing
        self._next_segment = 0  # the first one that is missing
        self._senders: dict[int, Conversation] = {}  # by stream, while it arrives
        self._ended_streams: set[int] = set()
        self._failure: BaseException | None = None
        self._changed = threading.Condition()

    def receive(self, sender: Conversation, stream: int) -> None:
        """Receive the segments of one stream. Raises OSError or EOFError if it ends early."""
        with self._changed:
            is_known = stream in self._senders or stream in self._ended_streams
            if self._failure is not None or is_known or stream >= self._streams:
                raise ConnectionError(f"stream {stream} of a replica is not expected")
            self._senders[stream] = sender
        failure: BaseException | None = None
        try:
            for segment, start, stop in list_segments(self._size, self._segment_bytes, stream, self._streams):
                sender.receive_into(self._view[start:stop])
                self._add_segment(segment)
                if self._failure is not None:
                    raise ConnectionError("another stream of the replica has failed")
        except BaseException as error:
            failure = error
            raise
        finally:
            with self._changed:
                del self._senders[stream]
                self._ended_streams.add(stream)
                self._failure = self._failure or failure
                self._changed.notify_all()

    def _add_segment(self, segment: int) -> None:
        """Record that a segment has arrived."""
        with self._changed:
            self._complete_segments.add(segment)
            while self._next_segment in self._complete_segments:
                self._complete_segments.discard(self._next_segment)
                self._next_segment += 1
            self.progress.advance(min(self._next_segment * self._segment_bytes, self._size))

    def wait(self, first: socket.socket) -> None:
        """Wait until all streams have ended. Raises ConnectionError if one of them failed or did not come.

        Args:
            first: connection of the first stream, which the sender closes if it gives up.
        """
        with self._changed:
            while len(self._ended_streams) < self._streams and self._failure is None:
                self._changed.wait(_STALL_POLL)
                if _has_hung_up(first):
                    self._failure = self._failure or ConnectionError("the sender has given up")
            if self._failure is not None:
                raise ConnectionError(f"a stream of the replica ended early: {self._failure}")

    def close(self) -> None:
        """Accept no further stream, and wait until no thread writes into the memory."""
        with self._changed:
            self._failure = self._failure or ConnectionError("the transfer has ended")
            for sender in self._senders.values():
                sender.shut_down()
            self._changed.wait_for(lambda: not self._senders)
        self.progress.fail()


def _has_hung_up(sock: socket.socket) -> bool:
    """Return whether the other end has closed the connection, without a wait and without reading."""
    poll = select.poll()
    poll.register(sock, select.POLLRDHUP)
    return bool(poll.poll(0))  # also if the connection has failed


def list_segments(size: int, segment_bytes: int, stream: int, streams: int) -> list[tuple[int, int, int]]:
    """Return number, first byte and end of each segment that a stream carries."""
    return [
        (start // segment_bytes, start, min(start + segment_bytes, size))
        for start in range(stream * segment_bytes, size, streams * segment_bytes)
    ]


def choose_streams(size: int, local_ranks: int) -> int:
    """Return the number of connections for a replica of `size` bytes, if `local_ranks` ranks of the host send one."""
    host_share = max(1, _MAX_HOST_STREAMS // max(local_ranks, 1))
    return max(1, min(_MAX_STREAMS, host_share, size // _SEGMENT_BYTES))


def _compute_checksums(slot: Slot, arrived: Progress) -> list[int]:
    """Return the CRC-32 of each chunk of a slot, whose bytes may still be arriving."""
    index = slot.index
    crcs = []
    with ThreadPoolExecutor(CHECKSUM_THREADS, "megascale-checksums") as executor:  # without work it starts no thread
        for row in range(len(index)):
            start = int(index.columns["data"][row])
            stop = start + index.nbytes(row)
            arrived.wait(stop)
            crcs.append(compute_checksum(slot.memory.view[start:stop], executor))
    return crcs


class ReplicaSender:
    """Threads that send a snapshot to its peer while the snapshot is being completed.

    Args:
        slots: number of slots of the rank.
        progress: number of bytes that are complete.
    """

    def __init__(self, staged: StageSnapshot, slots: int, slot: Slot, progress: Progress) -> None:
        self._staged = staged
        self._slots = slots
        self._slot = slot
        self._progress = progress
        self._crcs: tuple[int, ...] | None = None
        self._problem: str | None = "the transfer did not end"
        self._streams = choose_streams(staged.size, len(staged.local_ranks))
        self._peers: list[Conversation] = []  # of all streams
        self._is_given_up = False  # whether streams that open now must end at once
        self._peers_lock = threading.Lock()
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
            if crcs is None:
                self._shut_down()  # stop sending bytes that are useless now
        while self._thread.is_alive():
            self._thread.join(_STALL_POLL)
            is_stalled = time.monotonic() - self._last_progress > _STALL_SECONDS
            if is_stalled and not is_awaited():
                self._shut_down()
        return self._problem

    def _shut_down(self) -> None:
        """End all streams, and those that open later."""
        with self._peers_lock:
            self._is_given_up = True
            for peer in self._peers:
                peer.shut_down()

    def _run(self) -> None:
        assert self._staged.peer is not None
        host, port = self._staged.peer
        try:
            with self._connect() as peer:
                self._send(peer)
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

    def _connect(self) -> Conversation:
        """Return a new connection to the peer that has proved the token. Raises OSError."""
        assert self._staged.peer is not None
        sock = socket.create_connection(self._staged.peer, timeout=_PEER_TIMEOUT)
        peer = Conversation(sock, BETWEEN_SERVICES, BETWEEN_SERVICES)
        try:
            with self._peers_lock:
                self._peers.append(peer)
                if self._is_given_up:
                    peer.shut_down()
            set_peer_timeout(sock, _PEER_TIMEOUT)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            peer.timeout = _TIMEOUT
            peer.authenticate(bytes.fromhex(self._staged.token), "replicas", "client")
        except BaseException:
            peer.close()
            raise
        return peer

    def _send(self, peer: Conversation) -> None:
        """Send the snapshot. Raises OSError or EOFError if it did not arrive completely and undamaged."""
        staged = self._staged
        snapshot = {name: getattr(staged, name) for name in SnapshotMessage.__struct_fields__}
        transfer = secrets.token_hex(16) if self._streams > 1 else ""
        announcement = Replicate(
            **snapshot,
            slots=self._slots,
            streams=self._streams,
            segment_bytes=_SEGMENT_BYTES,
            transfer=transfer,
        )
        peer.send(announcement, self._slot.index.to_bytes())
        if not isinstance(peer.receive_reply(max_body_bytes=0), ReplicaReady):
            raise ConnectionError("the peer did not reserve memory")
        if self._streams == 1:
            self._send_segments(peer, 0)
        else:
            self._send_streams(peer, transfer)
        self._finished.wait()
        if self._crcs is None:
            raise OSError(_SNAPSHOT_ABANDONED)
        peer.send(Checksums(self._crcs))
        reply = peer.receive_reply(max_body_bytes=0)
        if not isinstance(reply, Replicated) or not reply.is_complete:
            raise ConnectionError("the copy arrived damaged")

    def _send_streams(self, peer: Conversation, transfer: str) -> None:
        """Send the segments in several streams, of which `peer` is the first. Raises OSError or EOFError as `_send`."""
        with ThreadPoolExecutor(self._streams - 1, "megascale-replica") as pool:
            futures = [pool.submit(self._send_stream, transfer, stream) for stream in range(1, self._streams)]
            try:
                self._send_segments(peer, 0)
                for future in futures:
                    future.result()
            except BaseException:
                self._shut_down()  # the other streams would wait for a peer that has given up
                raise

    def _send_stream(self, transfer: str, stream: int) -> None:
        """Open another stream and send its segments. After an error, all streams end."""
        try:
            with self._connect() as peer:
                peer.send(ReplicaStream(transfer, stream))
                self._send_segments(peer, stream)
        except BaseException:
            self._shut_down()
            raise

    def _send_segments(self, peer: Conversation, stream: int) -> None:
        """Send the segments of one stream, as they are completed. Raises OSError, also if the snapshot never is."""
        for _, start, end in list_segments(self._staged.size, _SEGMENT_BYTES, stream, self._streams):
            sent_bytes = start
            while sent_bytes < end and not self._is_abandoned():
                stop = min(self._progress.wait(sent_bytes + 1), sent_bytes + _SEND_BYTES, end)
                peer.send_bytes(self._slot.memory.view[sent_bytes:stop])
                sent_bytes = stop
                self._last_progress = time.monotonic()
