"""Copies of staged snapshots in another host's memory, over TCP with a shared token. No torch.

A copy is received into memory of its own and counts only when all of it is there and its checksums hold, so a sender
that dies in the middle leaves nothing that could be taken for a checkpoint. It is sent while its snapshot is completed,
and checked while it comes.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megascale.checkpoint.background.service_protocol import COPIES, INDEX, Checksums, Replicate, Replicated, Staged
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.staged_file import Progress, Slot, make_slots
from megascale.core.background import PAUSE, FailureLog
from megascale.services.conversation import Conversation, authenticate
from megascale.services.reception import AUTHENTICATION_TIMEOUT, Reception
from megascale.services.silence import notice_silence

log = logging.getLogger("megascale.checkpoint.background.replica")

_TIMEOUT = 60.0
# A peer that acknowledges nothing for so long is gone. Whoever starts in its place waits for the memory that is being
# copied, and a driver takes as long to call a node lost.
_SILENCE = 5.0
_ENDED = "the process ended before its state was copied"
_RUN = 32 << 20  # bytes that are sent, and that have come, before the other thread hears of it


def partners(domains: Sequence[Any]) -> list[int]:
    """For each host the host that keeps its copy: each keeps one, in another fault domain wherever that can be.

    Args:
        domains: each host's fault domain (rack, switch, power feed); hosts of one domain tend to fail together.

    Hosts are laid out domain after domain on a ring, largest domain first, and each is paired with the one half the
    ring (at least the largest domain) further on, so no host meets its own domain unless one domain holds more than
    half of all hosts. A single host has no partner but itself.
    """
    groups: dict[Any, list[int]] = {}
    for host, domain in enumerate(domains):
        groups.setdefault(domain, []).append(host)
    ring = [host for group in sorted(groups.values(), key=lambda g: (-len(g), g)) for host in group]
    shift = max(len(group) for group in groups.values()) if len(groups) > 1 else 1
    result = [0] * len(ring)
    for place, host in enumerate(ring):
        result[host] = ring[(place + shift) % len(ring)]
    return result


class Replicas:
    """Other hosts' snapshots kept here."""

    def __init__(self) -> None:
        self._slots: dict[int, list[Slot]] = {}
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._token = b""

    def list_complete(self) -> list[tuple[int, Slot]]:
        """(process, snapshot) of all copies that are complete."""
        with self._lock:
            return [(rank, slot) for rank, slots in self._slots.items() for slot in slots if slot.generation]

    def listen(self, address: str, token: bytes) -> int:
        """Take copies from those who know `token`; the port. Later calls change the token only."""
        with self._lock:
            self._token = token
            if self._listener is None:
                self._listener = socket.create_server((address, 0))
                reception = Reception(self._listener, self._meet, self._take)
                threading.Thread(target=self._receive, args=(reception,), daemon=True).start()
            return int(self._listener.getsockname()[1])

    @staticmethod
    def _receive(reception: Reception) -> None:
        """Take connections for as long as the process lives."""
        failures = FailureLog(log, "taking in copies of other hosts")
        while True:
            try:
                reception.serve(lambda: False)
            except Exception as error:
                failures.note(error, f"it starts again in {PAUSE:g} s")
            time.sleep(PAUSE)

    def _meet(self, sock: socket.socket) -> Conversation:
        notice_silence(sock, _SILENCE)
        sender = Conversation(sock, COPIES, COPIES)
        with sender.time_limit(AUTHENTICATION_TIMEOUT):
            authenticate(sender, self._token, "replicas", "server")
        sender.timeout = _TIMEOUT
        return sender

    def _take(self, sender: Conversation) -> None:
        with contextlib.suppress(ValueError, KeyError):
            message = sender.receive(attached=INDEX)
            if not isinstance(message, Replicate):
                return
            slot = self._room(message, CheckpointIndex.from_bytes(bytes(sender.body)))
            try:
                crcs = _receive(sender, slot, message.size)
                told = sender.receive()
                whole = isinstance(told, Checksums) and list(told.crcs) == crcs
                if whole:
                    slot.become(message, crcs)
            finally:
                slot.busy.release()
            sender.send(Replicated(whole))

    def _room(self, message: Replicate, index: CheckpointIndex) -> Slot:
        """Memory for a copy, its lock held.

        Each slot of a process has its own copy, so that a copy is given up only where the snapshot is; of a single slot
        there are two, the older of which is overwritten. What a run began from stays until it has made one itself.
        OSError while another copy comes into that memory, of a sender that has died.
        """
        size, count, number = max(message.size, 1), max(2, message.slots), message.slot
        with self._lock:
            slots = self._slots.setdefault(message.rank, [])
            if [slot.memory.size for slot in slots] != [size] * count:
                for slot in slots:
                    slot.memory.close()
                slots.clear()
                slots += make_slots(count, size, index)
            if message.slots == 1:
                number = min(range(count), key=lambda i: slots[i].generation)
            begun = any(slot.generation[9:] == message.generation[9:] for slot in slots)
            origin = not begun and slots[number].generation.startswith(f"{message.above:08d}-")
            place = (number + 1) % count if origin else number
            slot = slots[place]
            if not slot.busy.acquire(blocking=False):
                raise BlockingIOError("another copy of this process is on its way")
            slots[place], slots[number] = slots[number], slot
            slot.generation, slot.index = "", index
            return slot


def _receive(sender: Conversation, slot: Slot, size: int) -> list[int]:
    """Fill a slot with what comes; the checksum of each chunk."""
    arrived = Progress()
    with ThreadPoolExecutor(1) as pool:
        checking = pool.submit(_checksums, slot, arrived)
        try:
            for start in range(0, size, _RUN):
                sender.receive_into(slot.memory.view[start : min(start + _RUN, size)])
                arrived.advance(min(start + _RUN, size))
        finally:
            arrived.fail()
        return checking.result()


def _checksums(slot: Slot, arrived: Progress) -> list[int]:
    index, view, found = slot.index, slot.memory.view, []
    for row in range(len(index)):
        start = int(index.columns["data"][row])
        end = start + index.nbytes(row)
        arrived.wait(end)
        found.append(crc32(view[start:end]))
    return found


class Copying:
    """A snapshot on its way to its process's peer, sent as far as it is complete; `progress` says how far that is.

    staged: where it lies in this host's service; slots: how many its process has there.
    """

    def __init__(self, staged: Staged, slots: int, slot: Slot, progress: Progress) -> None:
        self._staged, self._slots, self._slot, self._progress = staged, slots, slot, progress
        self._crcs: tuple[int, ...] | None = None
        self._problem: str | None = "it did not come to an end"
        self._peer: Conversation | None = None
        self._told = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, crcs: Sequence[int] | None) -> str | None:
        """Wait until it is there; what went wrong, None if nothing did. crcs: of each chunk, None where the snapshot
        will never be complete. What is said first counts."""
        if not self._told.is_set():
            self._crcs = None if crcs is None else tuple(crcs)
            self._told.set()
            self._progress.fail()  # harmless where all is complete
            if crcs is None and self._peer is not None:
                self._peer.hang_up()  # it may be slow to take what is of no use any more
        self._thread.join()
        return self._problem

    def _run(self) -> None:
        assert self._staged.peer is not None
        host, port = self._staged.peer
        try:
            with Conversation(socket.create_connection((host, port), timeout=_SILENCE), COPIES, COPIES) as self._peer:
                self._send(self._peer)
            self._problem = None
            return
        except EOFError:
            why = "the peer hung up"
        except OSError as error:
            why = str(error)
        except Exception as error:
            log.exception("copying failed")
            why = repr(error)
        if self._given_up():
            why = _ENDED
        log.warning("the copy of process %s to %s:%s failed: %s", self._staged.rank, host, port, why)
        self._problem = f"{host}:{port}: {why}"[:2000]

    def _given_up(self) -> bool:
        return self._told.is_set() and self._crcs is None

    def _send(self, peer: Conversation) -> None:
        """OSError or EOFError if it did not arrive complete."""
        staged, slot = self._staged, self._slot
        notice_silence(peer.sock, _SILENCE)
        peer.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.timeout = _TIMEOUT
        authenticate(peer, bytes.fromhex(staged.token), "replicas", "client")
        message = Replicate(
            staged.rank,
            staged.slot,
            self._slots,
            staged.size,
            staged.above,
            staged.step,
            staged.generation,
            staged.identity,
            staged.state,
            staged.ranks,
        )
        peer.send(message, slot.index.to_bytes())
        at = 0
        while at < staged.size and not self._given_up():
            stop = min(self._progress.wait(at + 1), at + _RUN)
            peer.send_bytes(slot.memory.view[at:stop])
            at = stop
        self._told.wait()
        if self._crcs is None:
            raise OSError(_ENDED)
        peer.send(Checksums(self._crcs))
        answer = peer.receive_reply(attached=0)
        if not isinstance(answer, Replicated) or not answer.whole:
            raise ConnectionError("the copy arrived damaged")
