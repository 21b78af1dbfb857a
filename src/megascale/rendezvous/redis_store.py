"""A torch.distributed.Store on a Redis server, and the `redis://` and `rediss://` rendezvous handlers.

One rank of a job, the owner (rank 0), opens the job: it fences off older attempts, removes what they left and draws
a fresh epoch; the others learn the epoch at the job's door, which stands open only while the start lasts. All keys
expire some time after a job that died; a job that ends well removes them at once.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import torch.distributed as dist

from megascale.core.failure import FailureLog
from megascale.errors import ConfigError
from megascale.rendezvous.agree import VERDICT
from megascale.rendezvous.redis_link import RedisConnections, parse_info
from megascale.rendezvous.redis_script import DOOR_MS, OPEN, SUPERSEDED, Names
from megascale.rendezvous.resp import Address
from megascale.rendezvous.store_errors import StoreFault, StoreFenced, Superseded

log = logging.getLogger(__name__)

EXPIRY = 24 * 3600.0
_DOOR_RENEWAL = DOOR_MS / 3000  # seconds between the owner's renewals of the door
_BATCH = 1000
# Calls that wait for no key still get this long, in seconds, whatever the store's time-out: the server may restart.
_GRACE_PERIOD = 5.0

# torch keeps only the C++ half of a Python store alive; without this the other half would be collected.
_alive: set[RedisStore] = set()


class RedisStore(dist.Store):
    """All operations of torch's Store; safe for several threads, torch's own background threads among them.

    Values are bytes; text is stored as UTF-8. As in torch, reading waits up to `timeout` for a key.

    Raises, besides what Link raises:
        torch.distributed.DistStoreError: a key did not come in time.
        torch.distributed.QueueEmptyError: nothing to pop without waiting.
    """

    def __init__(self, link: RedisConnections, timeout: timedelta, keeper: _Keeper | None = None) -> None:
        super().__init__()
        self.link = link
        self._keeper = keeper
        self.set_timeout(timeout)
        _alive.add(self)

    @classmethod
    def open(
        cls,
        address: Address,
        job: str,
        attempt: int = 0,
        *,
        owner: bool,
        timeout: timedelta = timedelta(seconds=300),
        expiry: float = EXPIRY,
    ) -> RedisStore:
        """Open the job (`owner`, one process of it) or join it when the owner has.

        Args:
            job, attempt: equal on all ranks. A higher attempt fences off the lower ones.
            expiry: seconds after which keys of a job that died vanish.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        link = RedisConnections(address, Names(job, attempt), expiry)
        try:
            link.names, link.run_id = _open_door(link, deadline) if owner else _pass_door(link, deadline)
        except BaseException:
            link.close()
            raise
        link.door_open = owner
        return cls(link, timeout, _Keeper(link) if owner else None)

    def seal(self) -> None:
        """Owner: everybody is here; close the door."""
        if self._keeper is not None:
            self._keeper.sealed.set()
            self.link.door_open = False
            self.link.command(self._deadline(), "DEL", self.link.names.door)

    def remove_all(self) -> None:
        """Remove every key of the job: the last to leave calls it."""
        if self._keeper is not None:
            self._keeper.stop()
        names, deadline = self.link.names, self._deadline()
        _purge(self.link, names, deadline)
        # Only our own: a newer attempt may have come in between.
        drop = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end return 1"
        self.link.command(deadline, "EVAL", drop, 2, names.fence, names.door, names.token)

    def expire_soon(self, seconds: float) -> None:
        """Owner, after a failure: let the keys vanish once the others have read what went wrong."""
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper.renew(int(seconds * 1000), _GRACE_PERIOD)

    def close(self) -> None:
        """Let go of the server; the data stays. Clones end with their original."""
        if self._keeper is not None:
            self._keeper.stop()
        self.link.close()
        for store in [s for s in _alive if s.link is self.link]:
            _alive.discard(store)

    # torch's operations. C++ calls `deleteKey`, `getNumKeys` and the rest by these names.

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        return self._take([key], self._timeout())[0]

    def add(self, key: str, value: int) -> int:
        total = int(self.link.change(self._deadline(), "add", [self._name(key)], int(value)))
        self.link.contributed(key, int(value))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        if not keys:
            return True
        names = [self._name(key) for key in keys]
        return self.link.command(self._deadline(), "EXISTS", *names) == len(names)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        want = _bytes(desired)
        now = self.link.change(self._deadline(), "compare", [self._name(key)], _bytes(expected), want)
        if now == want:
            self.link.remember(key, want)
        return now

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._take(keys, self._timeout() if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        self.link.forget(key)
        return self.link.change(self._deadline(), "delete", [self._name(key)]) == b"1"

    deleteKey = delete_key

    def num_keys(self) -> int:
        return len(self.list_keys())

    getNumKeys = num_keys

    def list_keys(self) -> list[str]:
        names = self.link.names
        start = names.value("")
        members = self.link.command(self._deadline(), "SMEMBERS", names.index)
        return sorted(m.decode()[len(start) :] for m in members if m.decode().startswith(start))

    def append(self, key: str, value: str | bytes) -> None:
        self.link.change(self._deadline(), "append", [self._name(key)], _bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._take(keys, self._timeout())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys for {len(values)} values")
        if not keys:
            return
        data = [_bytes(value) for value in values]
        self.link.change(self._deadline(), "set", [self._name(key) for key in keys], *data)
        for key, value in zip(keys, data, strict=True):
            self.link.remember(key, value)

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: str | bytes) -> None:
        self.link.change(self._deadline(), "push", [self.link.names.queue(key)], _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        queue = self.link.names.queue(key)
        if block:
            return self._pop_waiting(key, queue)
        answer = self.link.change(self._deadline(), "pop", [queue])
        if answer == b"-":
            raise dist.QueueEmptyError(f"queue {key!r} is empty")
        return answer[1:]

    def queue_len(self, key: str) -> int:
        return int(self.link.command(self._deadline(), "LLEN", self.link.names.queue(key)))

    def clone(self) -> RedisStore:
        """A store on the same data with a time-out of its own."""
        return RedisStore(self.link, self._timeout())

    # Machinery

    def _timeout(self) -> timedelta:
        return self.timeout  # type: ignore[attr-defined]

    def _deadline(self) -> float:
        return time.monotonic() + max(_GRACE_PERIOD, self._timeout().total_seconds())

    def _name(self, key: str) -> str:
        return self.link.names.value(key)

    def _take(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        seconds = timeout.total_seconds()
        try:
            return self.link.take(time.monotonic() + seconds, [self._name(key) for key in keys])
        except StoreFault:
            raise
        except dist.DistStoreError as error:
            key = str(error)[len(self._name("")) :]
            forgot = "; the server lost its memory meanwhile" if self.link.restarts else ""
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, key: {key}{forgot}") from None

    def _pop_waiting(self, key: str, queue: str) -> bytes:
        """Move the first element to a place of our own, then read it there: a broken connection loses nothing."""
        place = self.link.names.taken(uuid.uuid4().hex[:12])
        self.link.change(self._deadline(), "list", [place])
        deadline = time.monotonic() + self._timeout().total_seconds()
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise dist.DistStoreError(f"wait timeout: queue {key!r} stayed empty")
            # Plain commands may be sent twice, so the wait is shorter than what counts as a broken connection.
            step = min(left, 10.0)
            many = [("BLMOVE", queue, place, "LEFT", "LEFT", f"{max(step, 0.001):.3f}"), ("LRANGE", place, 0, -1)]
            _, held = self.link.commands(self._deadline(), many)
            if held:
                # Newest first; what a repeated wait took besides goes back to the front.
                for value in held[:-1]:
                    self.link.command(self._deadline(), "LPUSH", queue, value)
                self.link.change(self._deadline(), "delete", [place])
                return held[-1]


class _Keeper:
    """The owner's thread: keeps the door open during the start, and later keeps keys from expiring."""

    def __init__(self, link: RedisConnections) -> None:
        self._link = link
        self.sealed = threading.Event()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megascale-store-keeper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self.sealed.set()

    def _run(self) -> None:
        names, link = self._link.names, self._link
        failures = FailureLog(log, f"keeping the keys of job {names.job!r} from expiring")
        while not self._stopped.is_set():
            try:
                if not self.sealed.wait(_DOOR_RENEWAL):
                    link.command(time.monotonic() + 60.0, "PEXPIRE", names.door, DOOR_MS)
                elif not self._stopped.wait(link.expiry_ms / 3000):
                    self.renew(link.expiry_ms, 60.0)
            except (StoreFenced, ConfigError):
                return
            except StoreFault as error:
                if not self._stopped.is_set():
                    log.warning("keys of job %r were not kept from expiring, trying again: %s", names.job, error)
            except Exception as error:
                failures.note(error, "it is tried again")
                self._stopped.wait(_DOOR_RENEWAL)

    def renew(self, expiry_ms: int, grace_period: float) -> None:
        """Set the expiry of every key of the epoch; StoreFault if the server is away for `grace_period` seconds."""
        names, link = self._link.names, self._link
        deadline = time.monotonic() + grace_period
        keys = [names.fence, names.index, names.done, names.life]
        for batch in _index(link, names, deadline):
            keys += batch
        for start in range(0, len(keys), _BATCH):
            link.commands(deadline, [("PEXPIRE", key, expiry_ms) for key in keys[start : start + _BATCH]])


def _open_door(door: RedisConnections, deadline: float) -> tuple[Names, str]:
    """Owner: take the job, and clear away what an older start left."""
    ours = door.names
    *texts, token = door.commands(deadline, [("INFO", "server"), ("INFO", "memory"), ("GET", ours.fence)])
    facts = {name: value for text in texts for name, value in parse_info(text).items()}
    policy = facts.get("maxmemory_policy", "noeviction")
    if facts.get("maxmemory", "0") != "0" and policy != "noeviction":
        log.warning(
            "the Redis server at %s drops keys when its memory is full (maxmemory-policy %s); noeviction is safe",
            door.address,
            policy,
        )
    mine = Names(ours.job, ours.attempt, uuid.uuid4().hex[:12])
    run_id = facts.get("run_id", "")
    old = Names(ours.job, *_parts(token)) if token else mine
    # Somebody may have joined the start that ends here if its door stands open.
    stood_open = door.command(deadline, "EXISTS", old.door) == 1
    words = (mine.attempt, mine.epoch, door.expiry_ms, DOOR_MS, run_id)
    door.command(deadline, "EVAL", OPEN, 2, mine.fence, mine.door, *words)
    if old != mine:
        if old.door != mine.door:
            door.command(deadline, "DEL", old.door)
        _purge(door, old, deadline)
        if stood_open:
            wake = old.value(VERDICT)
            door.commands(deadline, [("DEL", wake), ("RPUSH", wake, SUPERSEDED), ("PEXPIRE", wake, 60_000)])
    return mine, run_id


def _parts(token: bytes) -> tuple[int, str]:
    attempt, _, epoch = token.decode().partition(":")
    return int(attempt), epoch


def _pass_door(door: RedisConnections, deadline: float) -> tuple[Names, str]:
    """Other ranks: learn the epoch when the owner has opened the job."""
    [value] = door.take(deadline, [door.names.door])
    epoch, _, run_id = value.decode().partition(" ")
    return Names(door.names.job, door.names.attempt, epoch), run_id


def _index(link: RedisConnections, names: Names, deadline: float) -> Iterator[list[str]]:
    cursor = b"0"
    while True:
        cursor, members = link.command(deadline, "SSCAN", names.index, cursor, "COUNT", _BATCH)
        if members:
            yield [member.decode() for member in members]
        if cursor == b"0":
            return


def _purge(link: RedisConnections, names: Names, deadline: float) -> None:
    """Delete all keys of an epoch but the fence."""
    for batch in list(_index(link, names, deadline)):
        link.command(deadline, "UNLINK", *batch)
    link.command(deadline, "UNLINK", names.index, names.done, names.life)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _handler(url: str, timeout: timedelta = timedelta(seconds=300), **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """torch's `init_method="redis://HOST:PORT/DB?job=NAME&attempt=N"`; torch adds rank and world_size."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    if "rank" not in query or "world_size" not in query:
        raise ValueError("redis:// rendezvous needs rank and world_size")
    address = Address.parse(urlunsplit(parts._replace(query="")), ca=query.get("ca"))
    rank = int(query["rank"])
    store = RedisStore.open(
        address, query.get("job", "torch"), int(query.get("attempt", 0)), owner=rank == 0, timeout=timeout
    )
    yield store, rank, int(query["world_size"])
    raise RuntimeError("redis:// rendezvous gives one store a start; begin a new attempt instead")


def register() -> None:
    """Make torch know `redis://` and `rediss://`; calling it again does nothing."""
    for scheme in ("redis", "rediss"):
        try:
            dist.register_rendezvous_handler(scheme, _handler)
        except RuntimeError:
            return


__all__ = ["EXPIRY", "Address", "RedisStore", "Superseded", "register"]
