"""Pool of one process's connections to the Redis server. Repairs them, and makes each change exactly once.

A process normally uses one connection; a second opens only while another thread waits on the first. When the
server comes back from a restart without its memory, each process writes again the values it had written (`_Journal`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import select
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch.distributed import DistStoreError

from megascale.core.failure import FailureLog
from megascale.errors import ConfigError
from megascale.plugins.redis.redis_connection import (
    Address,
    BrokenConnection,
    Connection,
    RedisRefused,
    access_error,
)
from megascale.plugins.redis.redis_keys import CHANGE, JOIN_MS, REVIVE, SUPERSEDED, JobKeys
from megascale.rendezvous.agree import VERDICT
from megascale.rendezvous.stores import StoreFault, StoreFenced, Superseded

log = logging.getLogger(__name__)
T = TypeVar("T")

_CHANGE_SHA = hashlib.sha1(CHANGE.encode(), usedforsecurity=False).hexdigest()  # Redis's name of a cached script
# A plain command that takes longer than this is taken for a broken connection and repeated.
_ANSWER_SECONDS = 20.0
_WARN_SECONDS = 5.0  # without a server, before a warning is logged
_PIPELINE = 128  # waits sent at once
# A server that logs its changes writes them once per second, or up to two seconds late on a slow disk.
_AT_RISK_SECONDS = 60.0


@dataclass
class _Journal:
    """Values and sums that this process wrote, to be written again into a server that lost its memory."""

    values: dict[str, bytes] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)


@dataclass
class _Change:
    """A change that the server has made: its slot, its number within the slot, and its time."""

    slot: _Slot
    count: int
    time: float
    operation: str
    keys: Sequence[str]
    arguments: Sequence[Any]


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
    """Connections of this process to the server, shared by its threads.

    Raises from every call:
        StoreFault: the server cannot be reached within `deadline`, or refuses.
        StoreFenced: another attempt holds the job, or the job has ended.
        ConfigError: password, certificate or permission refused.

    Attributes:
        keys: names of the job's keys; opening or joining the job sets their epoch.
        server_run_id: id of the server process, set with the epoch; a restarted server has another.
        restarts: number of times that the server lost its data and this process wrote its values again.
        owns_start: this process is the owner of a start that is under way.
    """

    def __init__(self, address: Address, keys: JobKeys, expiry: float) -> None:
        self.address = address
        self.keys = keys
        self._context = address.tls_context()
        self.expiry_ms = int(expiry * 1000)
        self.server_run_id = ""
        self.closed = False
        self.restarts = 0
        self.owns_start = False
        self._journal = _Journal()
        self._recent: deque[_Change] = deque()
        self._free: list[_Slot] = []
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self._repair = threading.RLock()

    # Commands

    def run_command(self, deadline: float, *command: Any) -> Any:
        """Run one command that may be repeated without harm."""
        return self.run_commands(deadline, [command])[0]

    def run_commands(self, deadline: float, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Run several commands in one message, each of which may be repeated without harm."""

        def run(connection: Connection) -> list[Any]:
            connection.send(*commands)
            return [_read_answer(connection, deadline) for _ in commands]

        with self._slot() as slot:
            return self._persist(slot, run, deadline)

    def change_once(self, deadline: float, operation: str, keys: Sequence[str], *arguments: Any) -> bytes:
        """Run the script CHANGE exactly once, even if its answer is lost and it is sent again."""
        with self._slot() as slot:
            slot.count += 1
            answer = self._persist(
                slot, lambda c: self._send_change(c, slot, operation, keys, arguments, deadline=deadline), deadline
            )
            completed = time.monotonic()
            with self._lock:
                self._recent.append(_Change(slot, slot.count, completed, operation, keys, arguments))
                while self._recent[0].time < completed - _AT_RISK_SECONDS:
                    self._recent.popleft()
            return answer

    def wait_for_values(self, deadline: float, keys: Sequence[str]) -> list[bytes]:
        """Wait until all `keys` (Redis keys) exist, and return their values.

        Raises DistStoreError, whose text is the first absent key, at `deadline`.
        """
        values: list[bytes] = []
        pending = 0  # answers that have yet to arrive

        def run(connection: Connection) -> None:
            nonlocal pending
            while len(values) < len(keys):
                batch = keys[len(values) : len(values) + _PIPELINE]
                wait = f"{max(0.001, deadline - time.monotonic()):.3f}"
                connection.send(*[("BLMOVE", key, key, "LEFT", "LEFT", wait) for key in batch])
                pending = len(batch)
                while pending:
                    value = _read_answer(connection, deadline, longest=float("inf"))
                    pending -= 1
                    if value is None:
                        return
                    values.append(value)

        with self._slot() as slot:
            try:
                self._persist(slot, run, deadline)
            finally:
                if pending:
                    slot.drop()
        if len(values) < len(keys):
            raise DistStoreError(keys[len(values)])
        verdict_key = self.keys.value_key(VERDICT)  # under any other key these bytes are an ordinary value
        if any(key == verdict_key and value == SUPERSEDED for key, value in zip(keys, values, strict=True)):
            raise Superseded(f"job {self.keys.job!r} was opened again while this process joined an older start of it")
        return values

    def journal_value(self, key: str, value: bytes) -> None:
        """Record that this process wrote `value`, which it writes again if the server loses its data."""
        with self._lock:
            self._journal.values[key] = value

    def journal_sum(self, key: str, number: int) -> None:
        """Record that this process added `number`, which it adds again if the server loses its data."""
        with self._lock:
            self._journal.sums[key] = self._journal.sums.get(key, 0) + number

    def remove_from_journal(self, key: str) -> None:
        """Record that `key` was deleted."""
        with self._lock:
            self._journal.values.pop(key, None)
            self._journal.sums.pop(key, None)

    def close(self) -> None:
        """Close all connections; a call that waits on one raises StoreFault."""
        self.closed = True
        with self._lock:
            slots = self._slots
            self._slots = []
            self._free = []
        for slot in slots:
            slot.drop()

    def heal(self) -> None:
        """Reach the server again and write again the values it lost; the watcher calls it when a connection broke."""
        if self.closed or not (self.owns_start or self._journal.values or self._journal.sums or self._recent):
            return
        try:
            self.run_command(time.monotonic() + 60.0, "PING")
        except (DistStoreError, ConfigError) as error:
            log.debug("the Redis server did not come back: %s", error)

    # Helpers

    @contextmanager
    def _slot(self) -> Iterator[_Slot]:
        with self._lock:
            slot = self._free.pop() if self._free else _Slot()
            if slot not in self._slots:
                self._slots.append(slot)
        try:
            yield slot
        finally:
            with self._lock:
                if self.closed:
                    slot.drop()
                else:
                    self._free.append(slot)

    def _persist(self, slot: _Slot, run: Callable[[Connection], T], deadline: float) -> T:
        """Run `run` on the slot's connection, and connect again until `deadline` if the connection breaks."""
        began = time.monotonic()
        pause = 0.02
        warned = False
        while True:
            if self.closed:
                raise StoreFault(f"the store at {self.address} was closed by this process")
            try:
                if slot.connection is None:
                    slot.connection = self._connect(deadline)
                return run(slot.connection)
            except BrokenConnection as error:
                slot.drop()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise StoreFault(f"the Redis server at {self.address} cannot be reached: {error}") from None
                if not warned and time.monotonic() - began > _WARN_SECONDS:
                    log.warning("waiting for the Redis server at %s: %s", self.address, error)
                    warned = True
                time.sleep(min(remaining, pause * random.uniform(0.5, 1.0)))
                pause = min(1.0, 2 * pause)
            except RedisRefused as error:
                raise self._refusal(str(error)) from None
            except BaseException:
                slot.drop()  # an interrupt in the middle of an answer leaves the connection out of step
                raise

    def _connect(self, deadline: float) -> Connection:
        connection = Connection(self.address, self._context, deadline - time.monotonic())
        try:
            if self.server_run_id:
                self._check_memory(connection, deadline)
        except BaseException:
            connection.close()
            raise
        _watch(connection.fileno(), self)
        return connection

    def _check_memory(self, connection: Connection, deadline: float) -> None:
        """Check on a new connection whether the server has restarted, and bring a restarted one up to date."""
        connection.send(("INFO", "server"), ("INFO", "persistence"), ("GET", self.keys.fence))
        facts = parse_info(_read_answer(connection, deadline)) | parse_info(_read_answer(connection, deadline))
        token = _read_answer(connection, deadline)
        server_run_id = facts.get("run_id", "")
        with self._repair:
            if server_run_id == self.server_run_id:
                return
            if facts.get("aof_enabled") == "1" and token == self.keys.token.encode():
                self._repeat_lost(connection, deadline)
            else:
                self._revive(connection, server_run_id, deadline)
                self.restarts += 1
            self.server_run_id = server_run_id

    def _revive(self, connection: Connection, server_run_id: str, deadline: float) -> None:
        """Write this process's values and sums again into a server that lost its memory."""
        keys = self.keys
        names = (keys.fence, keys.index, keys.last_changes, keys.complete_on, keys.join)
        if self.owns_start:
            join_value = f"{keys.epoch} {server_run_id}"
        else:
            join_value = ""
        connection.send(
            ("EVAL", REVIVE, len(names)) + names + (keys.token, self.expiry_ms, server_run_id, join_value, JOIN_MS)
        )
        if _read_answer(connection, deadline) == 1:
            log.warning("the Redis server at %s restarted without its memory; ranks write theirs again", self.address)
        with self._lock:
            values = {keys.value_key(key): value for key, value in self._journal.values.items()}
            sums = {keys.value_key(key): number for key, number in self._journal.sums.items()}
            self._recent.clear()  # the changes below contain their results
        slot = _Slot()
        if values:
            self._repeat(connection, slot, "fill", list(values), tuple(values.values()), deadline=deadline)
        for name, number in sums.items():
            self._repeat(connection, slot, "add", [name], (number,), deadline=deadline)

    def _repeat_lost(self, connection: Connection, deadline: float) -> None:
        """Make those changes again that the server had made but not logged before it restarted from its log."""
        with self._lock:
            recent = list(self._recent)
        if not recent:
            return
        names = list({change.slot.name for change in recent})
        connection.send(("HMGET", self.keys.last_changes) + tuple(names))
        answers = dict(zip(names, _read_answer(connection, deadline), strict=True))
        logged = {name: int(answer.split(b" ", 1)[0]) if answer else 0 for name, answer in answers.items()}
        lost = [change for change in recent if change.count > logged[change.slot.name]]
        for change in lost:
            slot = _Slot()
            self._repeat(connection, slot, change.operation, change.keys, change.arguments, deadline=deadline)
            change.slot = slot
            change.count = slot.count
        if lost:
            log.warning("repeated %d changes that the Redis server at %s had not logged", len(lost), self.address)

    def _repeat(
        self,
        connection: Connection,
        slot: _Slot,
        operation: str,
        keys: Sequence[str],
        arguments: Sequence[Any],
        *,
        deadline: float,
    ) -> None:
        """Make a change under the next count of `slot`."""
        slot.count += 1
        self._send_change(connection, slot, operation, keys, arguments, deadline=deadline)

    def _send_change(
        self,
        connection: Connection,
        slot: _Slot,
        operation: str,
        keys: Sequence[str],
        arguments: Sequence[Any],
        *,
        deadline: float,
    ) -> Any:
        names = (self.keys.fence, self.keys.index, self.keys.last_changes, *keys)
        parameters = (self.keys.token, slot.name, slot.count, self.expiry_ms, operation, *arguments)
        try:
            connection.send(("EVALSHA", _CHANGE_SHA, len(names)) + names + parameters)
            return _read_answer(connection, deadline)
        except RedisRefused as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
            connection.send(("EVAL", CHANGE, len(names)) + names + parameters)
            return _read_answer(connection, deadline)

    def _refusal(self, text: str) -> Exception:
        """Return the error that explains the server's answer `text`."""
        text = text.removeprefix("ERR ")
        job, attempt = self.keys.job, self.keys.attempt
        if text.startswith("FENCED"):
            holder = int(text.split()[1].split(":")[0])
            if holder == attempt:
                return Superseded(f"attempt {holder} of job {job!r} was started again; this process must end")
            return StoreFenced(
                f"attempt {attempt} of job {job!r} is over: attempt {holder} has begun; this process must end"
            )
        if text.startswith("GONE"):
            return StoreFenced(
                f"the keys of job {job!r} are gone from the Redis server at {self.address}: the job has ended, its "
                "keys expired, or the server was emptied"
            )
        if text.startswith("OOM"):
            return StoreFault(
                f"the Redis server at {self.address} has reached its memory limit; raise its maxmemory or remove "
                "other data from it"
            )
        return access_error(self.address, text) or StoreFault(f"the Redis server at {self.address} answered: {text}")


def _read_answer(connection: Connection, deadline: float, longest: float = _ANSWER_SECONDS) -> Any:
    """Read the next answer. The server ends waits at `deadline`; its answer may arrive a little later."""
    return connection.read(min(longest, max(0.0, deadline - time.monotonic()) + 2.0))


def parse_info(text: bytes) -> dict[str, str]:
    """Return the answer to INFO as a table."""
    pairs = (line.partition(":") for line in text.decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}


class _Watcher:
    """Thread that notices at once when an idle connection breaks.

    A rank that waits inside NCCL does not use its store. If the server restarts without its memory, the other ranks
    would wait for this rank's values. One thread per process sleeps in epoll on all idle connections.
    """

    def __init__(self) -> None:
        self._poll = select.epoll()
        self._owners: dict[int, weakref.ReferenceType[RedisConnections]] = {}
        threading.Thread(target=self._run, name="megascale-store-watch", daemon=True).start()

    def add(self, descriptor: int, owner: RedisConnections) -> None:
        self._owners[descriptor] = weakref.ref(owner)
        events = select.EPOLLRDHUP | select.EPOLLONESHOT
        try:
            self._poll.register(descriptor, events)
        except FileExistsError:  # a new connection has the number of a closed one
            self._poll.modify(descriptor, events)

    def _run(self) -> None:
        failures = FailureLog(log, "the repair of a connection to the store")
        while True:
            for descriptor, _ in self._poll.poll():
                reference = self._owners.pop(descriptor, None)
                owner = None if reference is None else reference()
                if owner is None:
                    continue
                try:
                    threading.Thread(target=owner.heal, name="megascale-store-heal", daemon=True).start()
                except RuntimeError as error:  # no further thread can be started
                    failures.note(error, "the next call repairs it")


_watchers: dict[int, _Watcher] = {}  # The key is the process id, because a fork has no threads of its parent.
_watchers_lock = threading.Lock()


def _watch(descriptor: int, owner: RedisConnections) -> None:
    """Call `owner.heal()` in a thread of its own when the connection with this descriptor breaks.

    Without epoll (not Linux) nothing is watched, and the next call repairs the connection.
    """
    if not hasattr(select, "epoll"):
        return
    with _watchers_lock:
        pid = os.getpid()
        if pid not in _watchers:
            _watchers[pid] = _Watcher()
        _watchers[pid].add(descriptor, owner)
