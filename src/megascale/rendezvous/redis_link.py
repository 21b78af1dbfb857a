"""Connections of one process to the Redis server: pooled, repaired after a restart, each change made exactly once.

A process normally uses one connection; a second opens only while another thread waits on the first. When the
server comes back from a restart without its memory, each process writes again what it had written (`_Journal`).
"""

from __future__ import annotations

import hashlib
import logging
import random
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.distributed import DistStoreError

from megascale.errors import ConfigError
from megascale.rendezvous import connection_watch
from megascale.rendezvous.agree import VERDICT
from megascale.rendezvous.redis_script import CHANGE, DOOR_MS, REVIVE, SUPERSEDED, Names
from megascale.rendezvous.resp import Address, Broken, Connection, RedisRefused, access_error
from megascale.rendezvous.store_errors import StoreFault, StoreFenced, Superseded

log = logging.getLogger(__name__)
T = TypeVar("T")

_CHANGE_SHA = hashlib.sha1(CHANGE.encode(), usedforsecurity=False).hexdigest()  # how Redis names a known script
# Seconds. A plain command that takes longer than ANSWER is taken for a broken connection and repeated.
_ANSWER = 20.0
_COMPLAIN = 5.0  # after this long without a server the user is told what is waited for
_PIPELINE = 128  # waits sent at once
# A server that logs its changes writes them once a second, twice that late if the disk is slow; with ample reserve.
_AT_RISK = 60.0


@dataclass
class _Journal:
    """What this process wrote, so that it can be written again into a server that forgot."""

    values: dict[str, bytes] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)


@dataclass
class _Change:
    """A change that the server has made: which of a slot, and when."""

    slot: _Slot
    count: int
    at: float
    op: str
    keys: Sequence[str]
    words: Sequence[Any]


class _Slot:
    """A connection with a name and a count of changes: a change repeated under one count happens once."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex[:12]
        self.count = 0
        self.connection: Connection | None = None

    def drop(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class RedisConnections:
    """A process's way to the server.

    Raises from every call:
        StoreFault: the server cannot be reached within `deadline`, or refuses.
        Fenced: another attempt holds the job, or the job has ended.
        ConfigError: password, certificate or permission refused.

    Attributes:
        names: the job's keys; whoever opens or joins the job sets the epoch, and `run_id`, the server's.
        restarts: how often the server lost its memory and this process gave back its part.
        door_open: this process is the owner of a start that is under way.
    """

    def __init__(self, address: Address, names: Names, expiry: float) -> None:
        self.address = address
        self.names = names
        self._context = address.tls_context()
        self.expiry_ms = int(expiry * 1000)
        self.run_id = ""
        self.closed = False
        self.restarts = 0
        self.door_open = False
        self._journal = _Journal()
        self._recent: deque[_Change] = deque()
        self._free: list[_Slot] = []
        self._all: list[_Slot] = []
        self._lock = threading.Lock()
        self._repair = threading.RLock()

    # Commands

    def command(self, deadline: float, *words: Any) -> Any:
        """One command that may be repeated without harm."""

        def once(connection: Connection) -> Any:
            connection.send(words)
            return _answer(connection, deadline)

        with self._slot() as slot:
            return self._persist(slot, once, deadline)

    def commands(self, deadline: float, many: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Several commands in one message, each of which may be repeated without harm."""

        def once(connection: Connection) -> list[Any]:
            connection.send(*many)
            return [_answer(connection, deadline) for _ in many]

        with self._slot() as slot:
            return self._persist(slot, once, deadline)

    def change(self, deadline: float, op: str, keys: Sequence[str], *words: Any) -> bytes:
        """One run of the script, which happens exactly once even if the answer is lost and it is sent again."""
        with self._slot() as slot:
            slot.count += 1
            answer = self._persist(slot, lambda c: self._change(c, slot, op, keys, words, deadline), deadline)
            now = time.monotonic()
            with self._lock:
                self._recent.append(_Change(slot, slot.count, now, op, keys, words))
                while self._recent[0].at < now - _AT_RISK:
                    self._recent.popleft()
            return answer

    def take(self, deadline: float, keys: Sequence[str]) -> list[bytes]:
        """The values of `keys` (full names), waiting for those that are not there; DistStoreError at `deadline`."""
        values: list[bytes] = []
        owed = 0  # answers that are still on their way

        def once(connection: Connection) -> None:
            nonlocal owed
            while len(values) < len(keys):
                part = keys[len(values) : len(values) + _PIPELINE]
                left = max(0.001, deadline - time.monotonic())
                wait = f"{left:.3f}"
                connection.send(*[("BLMOVE", key, key, "LEFT", "LEFT", wait) for key in part])
                owed = len(part)
                while owed:
                    value = _answer(connection, deadline, longest=float("inf"))
                    owed -= 1
                    if value is None:
                        return
                    values.append(value)

        with self._slot() as slot:
            try:
                self._persist(slot, once, deadline)
            finally:
                if owed:
                    slot.drop()
        if len(values) < len(keys):
            raise DistStoreError(keys[len(values)])
        wake = self.names.value(VERDICT)  # elsewhere the same bytes are a value like others
        if any(key == wake and value == SUPERSEDED for key, value in zip(keys, values, strict=True)):
            raise Superseded(f"job {self.names.job!r} was opened anew while this process joined an older start of it")
        return values

    def remember(self, key: str, value: bytes) -> None:
        """Note that this process wrote `value`."""
        with self._lock:
            self._journal.values[key] = value

    def contributed(self, key: str, number: int) -> None:
        """Note that this process added `number`."""
        with self._lock:
            self._journal.sums[key] = self._journal.sums.get(key, 0) + number

    def forget(self, key: str) -> None:
        """Note that `key` was deleted."""
        with self._lock:
            self._journal.values.pop(key, None)
            self._journal.sums.pop(key, None)

    def close(self) -> None:
        """Close all connections; a call that waits on one ends with StoreFault."""
        self.closed = True
        with self._lock:
            slots, self._all, self._free = self._all, [], []
        for slot in slots:
            slot.drop()

    def heal(self) -> None:
        """Called by the watcher when a connection broke: reach the server again and give back what it forgot."""
        if self.closed or not (self.door_open or self._journal.values or self._journal.sums or self._recent):
            return
        try:
            self.command(time.monotonic() + 60.0, "PING")
        except (DistStoreError, ConfigError) as error:
            log.debug("the Redis server did not come back: %s", error)

    # Machinery

    @contextmanager
    def _slot(self) -> Iterator[_Slot]:
        with self._lock:
            slot = self._free.pop() if self._free else _Slot()
            if slot not in self._all:
                self._all.append(slot)
        try:
            yield slot
        finally:
            with self._lock:
                if self.closed:
                    slot.drop()
                else:
                    self._free.append(slot)

    def _persist(self, slot: _Slot, once: Callable[[Connection], T], deadline: float) -> T:
        """Run `once` on the slot's connection, connecting again as long as there is time."""
        began, pause, told = time.monotonic(), 0.02, False
        while True:
            if self.closed:
                raise StoreFault(f"the store at {self.address} was closed by this process")
            try:
                if slot.connection is None:
                    slot.connection = self._connect(deadline)
                return once(slot.connection)
            except Broken as error:
                slot.drop()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise StoreFault(f"the Redis server at {self.address} cannot be reached: {error}") from None
                if not told and time.monotonic() - began > _COMPLAIN:
                    log.warning("waiting for the Redis server at %s: %s", self.address, error)
                    told = True
                time.sleep(min(left, pause * random.uniform(0.5, 1.0)))
                pause = min(1.0, 2 * pause)
            except RedisRefused as error:
                raise self._explain(str(error)) from None
            except BaseException:
                slot.drop()  # an interrupt in mid-answer leaves the connection out of step
                raise

    def _connect(self, deadline: float) -> Connection:
        connection = Connection(self.address, self._context, deadline - time.monotonic())
        try:
            if self.run_id:
                self._check_memory(connection, deadline)
        except BaseException:
            connection.close()
            raise
        connection_watch.add(connection.fileno(), self)
        return connection

    def _check_memory(self, connection: Connection, deadline: float) -> None:
        """On a new connection: is it the same server, with the same memory? If not, bring it up to date."""
        connection.send(("INFO", "server"), ("INFO", "persistence"), ("GET", self.names.fence))
        facts = parse_info(_answer(connection, deadline)) | parse_info(_answer(connection, deadline))
        token = _answer(connection, deadline)
        run_id = facts.get("run_id", "")
        with self._repair:
            if run_id == self.run_id:
                return
            if facts.get("aof_enabled") == "1" and token == self.names.token.encode():
                self._repeat_lost(connection, deadline)
                self.run_id = run_id
                return
            self._revive(connection, run_id, deadline)
            self.run_id = run_id
            self.restarts += 1

    def _revive(self, connection: Connection, run_id: str, deadline: float) -> None:
        names = self.names
        keys = (names.fence, names.index, names.done, names.life, names.door)
        door = f"{names.epoch} {run_id}" if self.door_open else ""
        connection.send(("EVAL", REVIVE, len(keys), *keys, names.token, self.expiry_ms, run_id, door, DOOR_MS))
        if _answer(connection, deadline) == 1:
            log.warning("the Redis server at %s came back without its memory; ranks write theirs again", self.address)
        slot = _Slot()
        with self._lock:
            values, sums = dict(self._journal.values), dict(self._journal.sums)
            self._recent.clear()  # what follows has all that is left of them
        if values:
            slot.count += 1
            self._change(connection, slot, "fill", [names.value(k) for k in values], tuple(values.values()), deadline)
        for key, number in sums.items():
            slot.count += 1
            self._change(connection, slot, "add", [names.value(key)], (number,), deadline)

    def _repeat_lost(self, connection: Connection, deadline: float) -> None:
        """The server restarted from its log: make those changes again that it had made and not yet logged."""
        with self._lock:
            recent = list(self._recent)
        if not recent:
            return
        names = list({change.slot.name for change in recent})
        connection.send(("HMGET", self.names.done, *names))
        answers = dict(zip(names, _answer(connection, deadline), strict=True))
        logged = {name: int(answer.split(b" ", 1)[0]) if answer else 0 for name, answer in answers.items()}
        lost = [change for change in recent if change.count > logged[change.slot.name]]
        for change in lost:
            slot = _Slot()
            slot.count += 1
            self._change(connection, slot, change.op, change.keys, change.words, deadline)
            change.slot, change.count = slot, slot.count
        if lost:
            log.warning("the Redis server at %s had not logged %d changes; made again", self.address, len(lost))

    def _change(
        self, connection: Connection, slot: _Slot, op: str, keys: Sequence[str], words: Sequence[Any], deadline: float
    ) -> Any:
        names = self.names
        every = (names.fence, names.index, names.done, *keys)
        tail = (len(every), *every, names.token, slot.name, slot.count, self.expiry_ms, op, *words)
        try:
            connection.send(("EVALSHA", _CHANGE_SHA, *tail))
            return _answer(connection, deadline)
        except RedisRefused as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
            connection.send(("EVAL", CHANGE, *tail))
            return _answer(connection, deadline)

    def _explain(self, text: str) -> Exception:
        text = text.removeprefix("ERR ")
        if text.startswith("FENCED"):
            holder = int(text.split()[1].split(":")[0])
            job = self.names.job
            if holder == self.names.attempt:
                return Superseded(f"attempt {holder} of job {job!r} was started anew; this process must end")
            return StoreFenced(
                f"attempt {self.names.attempt} of job {job!r} is over: attempt {holder} has begun; "
                "this process must end"
            )
        if text.startswith("GONE"):
            return StoreFenced(
                f"the keys of job {self.names.job!r} are gone from the Redis server at {self.address}: the job has "
                "ended, its keys expired, or somebody emptied the server"
            )
        if text.startswith("OOM"):
            return StoreFault(
                f"the Redis server at {self.address} has reached its memory limit; raise its maxmemory or remove "
                "what else it stores"
            )
        return access_error(self.address, text) or StoreFault(f"the Redis server at {self.address} answered: {text}")


def _answer(connection: Connection, deadline: float, longest: float = _ANSWER) -> Any:
    """The next answer. The server ends waits at `deadline`; its own lateness is granted a little more."""
    return connection.read(min(longest, max(0.0, deadline - time.monotonic()) + 2.0))


def parse_info(text: bytes) -> dict[str, str]:
    """The answer to INFO as a table."""
    pairs = (line.partition(":") for line in text.decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}
