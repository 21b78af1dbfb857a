"""Pool of one process's connections to the Redis server.

The pool replaces broken connections and makes each change exactly once. A process normally uses one connection. A
second one opens only while another thread waits on the first. If the server restarts without its data, each process
writes its own values again. `redis_keys` has the names of a job's keys, the scripts that run on the server, and the
words *epoch*, *fence* and *token*.
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
from megascale.plugins.redis.redis_connection import (
    Address,
    BrokenConnection,
    Connection,
    RedisRefused,
    make_access_error,
)
from megascale.plugins.redis.redis_keys import CHANGE, JOIN_MS, REVIVE, SUPERSEDED, JobKeys
from megascale.plugins.redis.redis_watch import watch_connection
from megascale.rendezvous.agree import VERDICT
from megascale.rendezvous.stores import StoreFault, StoreFenced, Superseded

log = logging.getLogger(__name__)
T = TypeVar("T")

# Redis identifies a cached script by its SHA-1.
_CHANGE_SHA = hashlib.sha1(CHANGE.encode(), usedforsecurity=False).hexdigest()
# If the answer to a command that does not wait for a key takes longer, the connection counts as broken.
_ANSWER_SECONDS = 20.0
_LATE_ANSWER_SECONDS = 2.0
_WARN_SECONDS = 5.0  # time without a server after which a warning is logged
_MAX_WAITS_PER_MESSAGE = 128
# The process keeps its changes this long, because a restart of the server may lose the newest ones. A server with an
# append-only file writes changes to it once per second, or up to two seconds late on a slow disk.
_KEEP_CHANGES_SECONDS = 60.0


@dataclass
class _Journal:
    """Values and sums that this process wrote, and writes again if the server loses its data."""

    values: dict[str, bytes] = field(default_factory=dict)
    sums: dict[str, int] = field(default_factory=dict)


@dataclass
class _Change:
    """Change that the server has made.

    Attributes:
        session, number: the session that sent the change, and the change's number within it.
        completion_time: time.monotonic() when the answer arrived.
        operation, keys, arguments: as in `RedisConnections.change_once`.
    """

    session: _Session
    number: int
    completion_time: float
    operation: str
    keys: Sequence[str]
    arguments: Sequence[Any]


class _Session:
    """Name and change number under which changes are sent; both stay when the connection is replaced.

    The server makes only one change per session name and change number. A change whose answer was lost can therefore be
    sent again on a new connection.
    """

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex[:12]
        self.change_number = 0  # number of the last change
        self.connection: Connection | None = None

    def close_connection(self) -> None:
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class RedisConnections:
    """Connections of this process to the server, shared by its threads.

    Raises from every call:
        StoreFault: the server cannot be reached before `deadline` (of time.monotonic()), or refuses the command.
        StoreFenced: another attempt holds the job, or the job has ended.
        ConfigError: the server refuses the password, the certificate or the permission.

    Attributes:
        keys: names of the job's keys; opening or joining the job sets their epoch.
        server_run_id: id of the server process, set with the epoch; a restarted server has another.
        restore_count: number of times that the server lost its data and this process wrote its values again.
        is_start_owner: whether this process is the owner of a start that is under way. The owner is the process that
            opens the job.

    Args:
        expiry: seconds until the keys of a job that died expire.
    """

    def __init__(self, address: Address, keys: JobKeys, expiry: float) -> None:
        self.address = address
        self.keys = keys
        self._context = address.make_tls_context()
        self.expiry_ms = int(expiry * 1000)
        self.server_run_id = ""
        self.is_closed = False
        self.restore_count = 0
        self.is_start_owner = False
        self._journal = _Journal()
        self._recent_changes: deque[_Change] = deque()
        self._idle_sessions: list[_Session] = []
        self._sessions: list[_Session] = []
        self._lock = threading.Lock()
        self._repair_lock = threading.RLock()

    # Commands

    def run_command(self, deadline: float, *command: Any) -> Any:
        """Run one command and return its answer. The command may be sent twice."""
        return self.run_commands(deadline, [command])[0]

    def run_commands(self, deadline: float, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send several commands in one message and return their answers. Each command may be sent twice."""

        def run(connection: Connection) -> list[Any]:
            connection.send(*commands)
            return [_read_answer(connection, deadline) for _ in commands]

        with self._session() as session:
            return self._run_with_reconnects(session, run, deadline)

    def change_once(self, deadline: float, operation: str, keys: Sequence[str], *arguments: Any) -> bytes:
        """Make a change exactly once, even if its answer is lost and it is sent again.

        Args:
            operation, keys, arguments: operation of the script CHANGE, its Redis keys and its arguments.

        Returns:
            The answer of the script.
        """
        with self._session() as session:
            session.change_number += 1

            def run(connection: Connection) -> bytes:
                return self._send_change(connection, session, operation, keys, arguments, deadline=deadline)

            answer = self._run_with_reconnects(session, run, deadline)
            completion_time = time.monotonic()
            with self._lock:
                self._recent_changes.append(
                    _Change(session, session.change_number, completion_time, operation, keys, arguments)
                )
                while self._recent_changes[0].completion_time < completion_time - _KEEP_CHANGES_SECONDS:
                    self._recent_changes.popleft()
            return answer

    def wait_for_values(self, deadline: float, keys: Sequence[str]) -> list[bytes]:
        """Wait until all `keys` (Redis keys) exist, and return their values in the order of `keys`.

        Raises:
            DistStoreError: a key is still absent at `deadline`; the text of the error is the first absent key.
            Superseded: the owner has opened the job again since this process joined.
        """
        values: list[bytes] = []
        pending_count = 0  # answers that have not arrived yet

        def run(connection: Connection) -> None:
            nonlocal pending_count
            while len(values) < len(keys):
                batch = keys[len(values) : len(values) + _MAX_WAITS_PER_MESSAGE]
                wait_seconds = f"{max(0.001, deadline - time.monotonic()):.3f}"
                # Moving an element within its list waits for the element and reads it (see `redis_keys`).
                connection.send(*[("BLMOVE", key, key, "LEFT", "LEFT", wait_seconds) for key in batch])
                pending_count = len(batch)
                while pending_count:
                    value = _read_answer(connection, deadline, limit_seconds=float("inf"))
                    pending_count -= 1
                    if value is None:  # the server's wait for the key ended at the deadline
                        return
                    values.append(value)

        with self._session() as session:
            try:
                self._run_with_reconnects(session, run, deadline)
            finally:
                # Late answers would otherwise be read as the answers to the session's next commands.
                if pending_count:
                    session.close_connection()
        if len(values) < len(keys):
            raise DistStoreError(keys[len(values)])
        verdict_key = self.keys.value_key(VERDICT)
        # The owner of a newer start writes SUPERSEDED as the verdict, to end the wait of older processes. Under any
        # other key these bytes are an ordinary value.
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
        """Record that this process deleted `key`, so that it does not write the value again."""
        with self._lock:
            self._journal.values.pop(key, None)
            self._journal.sums.pop(key, None)

    def close(self) -> None:
        """Close all connections; a call that waits on one raises StoreFault."""
        self.is_closed = True
        with self._lock:
            sessions = self._sessions
            self._sessions = []
            self._idle_sessions = []
        for session in sessions:
            session.close_connection()

    def reconnect(self) -> None:
        """Connect again after a connection broke, and write again the values that the server has lost.

        Does nothing for a process that has neither written a value nor opened the job.
        """
        if self.is_closed or not (
            self.is_start_owner or self._journal.values or self._journal.sums or self._recent_changes
        ):
            return
        try:
            self.run_command(time.monotonic() + 60.0, "PING")
        except (DistStoreError, ConfigError) as error:
            log.debug("the Redis server did not come back: %s", error)

    # Helpers

    @contextmanager
    def _session(self) -> Iterator[_Session]:
        """Lend an idle session, or a new one if other threads use all sessions."""
        with self._lock:
            session = self._idle_sessions.pop() if self._idle_sessions else _Session()
            if session not in self._sessions:
                self._sessions.append(session)
        try:
            yield session
        finally:
            with self._lock:
                if self.is_closed:
                    session.close_connection()
                else:
                    self._idle_sessions.append(session)

    def _run_with_reconnects(self, session: _Session, run: Callable[[Connection], T], deadline: float) -> T:
        """Return the result of `run` on the session's connection.

        If the connection breaks, the call is repeated on a new connection until `deadline`.
        """
        start = time.monotonic()
        pause = 0.02  # seconds before the next attempt, doubled after each
        has_warned = False
        while True:
            if self.is_closed:
                raise StoreFault(f"the store at {self.address} was closed by this process")
            try:
                if session.connection is None:
                    session.connection = self._connect(deadline)
                return run(session.connection)
            except BrokenConnection as error:
                session.close_connection()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise StoreFault(f"the Redis server at {self.address} cannot be reached: {error}") from None
                if not has_warned and time.monotonic() - start > _WARN_SECONDS:
                    log.warning("waiting for the Redis server at %s: %s", self.address, error)
                    has_warned = True
                time.sleep(min(remaining, pause * random.uniform(0.5, 1.0)))
                pause = min(1.0, 2 * pause)
            except RedisRefused as error:
                raise self._make_error(str(error)) from None
            except BaseException:
                session.close_connection()  # after an interrupt the rest of an answer may still be unread
                raise

    def _connect(self, deadline: float) -> Connection:
        connection = Connection(self.address, self._context, deadline - time.monotonic())
        try:
            if self.server_run_id:
                self._restore_after_restart(connection, deadline)
        except BaseException:
            connection.close()
            raise
        watch_connection(connection.fileno(), self)
        return connection

    def _restore_after_restart(self, connection: Connection, deadline: float) -> None:
        """Check on a new connection whether the server has restarted. If so, write what it has lost again."""
        connection.send(("INFO", "server"), ("INFO", "persistence"), ("GET", self.keys.fence))
        server_info = parse_info(_read_answer(connection, deadline)) | parse_info(_read_answer(connection, deadline))
        stored_token = _read_answer(connection, deadline)
        server_run_id = server_info.get("run_id", "")
        with self._repair_lock:
            if server_run_id == self.server_run_id:
                return
            # A server with an append-only file (AOF) that still has this job's token lost at most the newest changes.
            if server_info.get("aof_enabled") == "1" and stored_token == self.keys.token.encode():
                self._repeat_unlogged_changes(connection, deadline)
            else:
                self._restore_journal(connection, server_run_id, deadline)
                self.restore_count += 1
            self.server_run_id = server_run_id

    def _restore_journal(self, connection: Connection, server_run_id: str, deadline: float) -> None:
        """Write this process's values and sums again into a server that lost its data."""
        keys = self.keys
        names = (keys.fence, keys.index, keys.last_changes, keys.complete_on, keys.join)
        join_value = ""  # does not restore the join key
        if self.is_start_owner:
            join_value = f"{keys.epoch} {server_run_id}"
        connection.send(
            ("EVAL", REVIVE, len(names)) + names + (keys.token, self.expiry_ms, server_run_id, join_value, JOIN_MS)
        )
        if _read_answer(connection, deadline) == 1:  # this process is the first one to restore the job
            log.warning(
                "the Redis server at %s restarted without its data; each rank writes its own values again", self.address
            )
        with self._lock:
            values = {keys.value_key(key): value for key, value in self._journal.values.items()}
            sums = {keys.value_key(key): summand for key, summand in self._journal.sums.items()}
            self._recent_changes.clear()  # the journal contains their results
        session = _Session()
        if values:
            # The operation "fill" sets only absent values.
            self._make_change(connection, session, "fill", list(values), tuple(values.values()), deadline=deadline)
        for name, summand in sums.items():
            self._make_change(connection, session, "add", [name], (summand,), deadline=deadline)

    def _repeat_unlogged_changes(self, connection: Connection, deadline: float) -> None:
        """Repeat the changes that the server made but had not yet written to its append-only file when it stopped."""
        with self._lock:
            recent_changes = list(self._recent_changes)
        if not recent_changes:
            return
        session_names = list({change.session.name for change in recent_changes})
        connection.send(("HMGET", self.keys.last_changes) + tuple(session_names))
        logged_numbers = {}  # number of the last logged change by session name
        for session_name, last_change in zip(session_names, _read_answer(connection, deadline), strict=True):
            # The server keeps the number and the answer of the change, separated by a space.
            logged_numbers[session_name] = int(last_change.split(b" ", 1)[0]) if last_change else 0
        lost_changes = [change for change in recent_changes if change.number > logged_numbers[change.session.name]]
        for change in lost_changes:
            # The original session may already be at a later number, so each repetition has its own session.
            session = _Session()
            self._make_change(connection, session, change.operation, change.keys, change.arguments, deadline=deadline)
            change.session = session
            change.number = session.change_number
        if lost_changes:
            log.warning(
                "repeated %d changes that the Redis server at %s had not logged", len(lost_changes), self.address
            )

    def _make_change(
        self,
        connection: Connection,
        session: _Session,
        operation: str,
        keys: Sequence[str],
        arguments: Sequence[Any],
        *,
        deadline: float,
    ) -> None:
        """Make a change under the next change number of `session`."""
        session.change_number += 1
        self._send_change(connection, session, operation, keys, arguments, deadline=deadline)

    def _send_change(
        self,
        connection: Connection,
        session: _Session,
        operation: str,
        keys: Sequence[str],
        arguments: Sequence[Any],
        *,
        deadline: float,
    ) -> Any:
        """Send a change under the session's current change number, and return its answer."""
        key_names = (self.keys.fence, self.keys.index, self.keys.last_changes, *keys)
        parameters = (self.keys.token, session.name, session.change_number, self.expiry_ms, operation, *arguments)
        try:
            connection.send(("EVALSHA", _CHANGE_SHA, len(key_names)) + key_names + parameters)
            return _read_answer(connection, deadline)
        except RedisRefused as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
            # The server has not cached the script yet, so send its text.
            connection.send(("EVAL", CHANGE, len(key_names)) + key_names + parameters)
            return _read_answer(connection, deadline)

    def _make_error(self, text: str) -> Exception:
        """Return the error that explains the server's refusal `text`."""
        text = text.removeprefix("ERR ")
        job, attempt = self.keys.job, self.keys.attempt
        if text.startswith("FENCED"):
            holder = int(text.split()[1].split(":")[0])  # the text is "FENCED attempt:epoch"
            if holder == attempt:  # the same attempt in a later epoch
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
        return make_access_error(self.address, text) or StoreFault(
            f"the Redis server at {self.address} answered: {text}"
        )


def _read_answer(connection: Connection, deadline: float, limit_seconds: float = _ANSWER_SECONDS) -> Any:
    """Return the next answer. Wait for it at most `limit_seconds`, and until _LATE_ANSWER_SECONDS after `deadline`.

    If a command waits for a key, the server answers at `deadline`, and the answer arrives a little later.
    """
    seconds_to_deadline = max(0.0, deadline - time.monotonic())
    return connection.read(min(limit_seconds, seconds_to_deadline + _LATE_ANSWER_SECONDS))


def parse_info(text: bytes) -> dict[str, str]:
    """Return the values by name in an answer to the command INFO."""
    pairs = (line.partition(":") for line in text.decode().splitlines())
    return {name: value for name, colon, value in pairs if colon}
