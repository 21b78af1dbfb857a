"""A torch.distributed.Store on a Redis server, and the `redis://` and `rediss://` rendezvous handlers.

One rank of a job, the owner (rank 0), opens the job: it fences off older attempts, removes their keys and draws a
fresh epoch. The other ranks learn the epoch at the job's door, which stands open only while the start lasts. The keys
of a job that died expire after some time; a job that ends well removes them at once.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import torch.distributed as dist

from megascale.core.failure import FailureLog
from megascale.core.secrets import PASSWORD_VARIABLE
from megascale.errors import ConfigError, TrainingError
from megascale.plugins.redis.redis_connection import Address
from megascale.plugins.redis.redis_connections import RedisConnections, parse_info
from megascale.plugins.redis.redis_keys import DOOR_MS, OPEN, SUPERSEDED, JobKeys
from megascale.rendezvous.agree import VERDICT
from megascale.rendezvous.stores import (
    ExternalStore,
    StoreFault,
    StoreFenced,
    StoreRequest,
    first_line,
    is_loopback,
    job_name,
    stay_on_loopback,
)

log = logging.getLogger(__name__)

EXPIRY = 24 * 3600.0
_DOOR_RENEWAL = DOOR_MS / 3000  # seconds between the owner's renewals of the door
_BATCH = 1000
# Calls that wait for no key have at least this many seconds, whatever the store's time-out: the server may restart.
_GRACE_SECONDS = 5.0
_RENEWAL_SECONDS = 60.0  # for which the keeper tries to reach the server

# torch keeps only the C++ half of a Python store alive; without this set the other half would be collected.
_alive: set[RedisStore] = set()


class RedisStore(ExternalStore):
    """All operations of torch's Store; safe for several threads, torch's own background threads included.

    Values are bytes; text is stored as UTF-8. As in torch, reading waits up to `timeout` for a key.

    Raises, besides the errors of RedisConnections:
        torch.distributed.DistStoreError: a key did not come in time.
        torch.distributed.QueueEmptyError: the queue is empty and the call does not block.
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
        """Open the job as its `owner` (one process of it), or join it once the owner has opened it.

        Args:
            job, attempt: equal on all ranks. A higher attempt fences off the lower ones.
            expiry: seconds after which keys of a job that died vanish.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        link = RedisConnections(address, JobKeys(job, attempt), expiry)
        try:
            if owner:
                _open_job(link, deadline)
            else:
                _join_job(link, deadline)
        except BaseException:
            link.close()
            raise
        link.door_open = owner
        return cls(link, timeout, _Keeper(link) if owner else None)

    def seal(self) -> None:
        """Close the door; only the owner's call has an effect."""
        if self._keeper is not None:
            self._keeper.sealed.set()
            self.link.door_open = False
            self.link.command(self._deadline(), "DEL", self.link.keys.door)

    def remove_all(self) -> None:
        """Remove every key of the job: the last rank to leave calls it."""
        if self._keeper is not None:
            self._keeper.stop()
        keys, deadline = self.link.keys, self._deadline()
        _remove_epoch(self.link, keys, deadline)
        # A newer attempt may have opened the job meanwhile, so the fence is removed only if it is this attempt's.
        remove = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end return 1"
        self.link.command(deadline, "EVAL", remove, 2, keys.fence, keys.door, keys.token)

    def expire_soon(self, seconds: float) -> None:
        """Let the keys vanish after `seconds`, in which other ranks can read the failure; for the owner."""
        if self._keeper is not None:
            self._keeper.stop()
            self._keeper.renew(int(seconds * 1000), _GRACE_SECONDS)

    def close(self) -> None:
        """Close the connections; the data stays. Clones end with their original."""
        if self._keeper is not None:
            self._keeper.stop()
        self.link.close()
        for store in [store for store in _alive if store.link is self.link]:
            _alive.discard(store)

    # torch's operations. C++ calls `deleteKey`, `getNumKeys` and the rest by these names.

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        return self._take([key], self._timeout())[0]

    def add(self, key: str, value: int) -> int:
        total = int(self._change("add", key, int(value)))
        self.link.remember_sum(key, int(value))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        if not keys:
            return True
        names = [self._name(key) for key in keys]
        return self.link.command(self._deadline(), "EXISTS", *names) == len(names)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        replacement = _bytes(desired)
        stored = self._change("compare", key, _bytes(expected), replacement)
        if stored == replacement:
            self.link.remember(key, replacement)
        return stored

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._take(keys, self._timeout() if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        self.link.forget(key)
        return self._change("delete", key) == b"1"

    deleteKey = delete_key

    def num_keys(self) -> int:
        return len(self.list_keys())

    getNumKeys = num_keys

    def list_keys(self) -> list[str]:
        prefix = self._name("")
        members = self.link.command(self._deadline(), "SMEMBERS", self.link.keys.index)
        names = [member.decode() for member in members]
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def append(self, key: str, value: str | bytes) -> None:
        self._change("append", key, _bytes(value))

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
        self.link.change(self._deadline(), "push", [self.link.keys.queue(key)], _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        queue = self.link.keys.queue(key)
        if block:
            return self._pop_waiting(key, queue)
        answer = self.link.change(self._deadline(), "pop", [queue])
        if answer == b"-":
            raise dist.QueueEmptyError(f"queue {key!r} is empty")
        return answer[1:]

    def queue_len(self, key: str) -> int:
        return int(self.link.command(self._deadline(), "LLEN", self.link.keys.queue(key)))

    def clone(self) -> RedisStore:
        """Return a store on the same data with a time-out of its own."""
        return RedisStore(self.link, self._timeout())

    # Machinery

    def _timeout(self) -> timedelta:
        return self.timeout  # type: ignore[attr-defined]

    def _deadline(self) -> float:
        return time.monotonic() + max(_GRACE_SECONDS, self._timeout().total_seconds())

    def _name(self, key: str) -> str:
        return self.link.keys.value(key)

    def _change(self, operation: str, key: str, *arguments: Any) -> bytes:
        return self.link.change(self._deadline(), operation, [self._name(key)], *arguments)

    def _take(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        seconds = timeout.total_seconds()
        try:
            return self.link.take(time.monotonic() + seconds, [self._name(key) for key in keys])
        except StoreFault:
            raise
        except dist.DistStoreError as error:
            key = str(error)[len(self._name("")) :]
            restart = "; the server lost its memory meanwhile" if self.link.restarts else ""
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, key: {key}{restart}") from None

    def _pop_waiting(self, key: str, queue: str) -> bytes:
        """Move the first element to a list of this call's own and read it there: a broken connection loses nothing."""
        target = self.link.keys.popped(uuid.uuid4().hex[:12])
        self.link.change(self._deadline(), "list", [target])
        deadline = time.monotonic() + self._timeout().total_seconds()
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise dist.DistStoreError(f"wait timeout: queue {key!r} stayed empty")
            # Plain commands may be sent twice, so the wait is shorter than the limit for a broken connection.
            wait = f"{max(min(remaining, 10.0), 0.001):.3f}"
            commands = [("BLMOVE", queue, target, "LEFT", "LEFT", wait), ("LRANGE", target, 0, -1)]
            _, moved = self.link.commands(self._deadline(), commands)
            if moved:
                # Newest first; further elements that a repeated wait moved go back to the front.
                for value in moved[:-1]:
                    self.link.command(self._deadline(), "LPUSH", queue, value)
                self.link.change(self._deadline(), "delete", [target])
                return moved[-1]


class _Keeper:
    """The owner's thread: keeps the door open during the start, and later keeps keys from expiring."""

    def __init__(self, link: RedisConnections) -> None:
        self._link = link
        self.sealed = threading.Event()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="megascale-store-keeper", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        self.sealed.set()

    def _run(self) -> None:
        keys, link = self._link.keys, self._link
        failures = FailureLog(log, f"keeping the keys of job {keys.job!r} from expiring")
        while not self._stopped.is_set():
            try:
                if not self.sealed.wait(_DOOR_RENEWAL):
                    link.command(time.monotonic() + _RENEWAL_SECONDS, "PEXPIRE", keys.door, DOOR_MS)
                elif not self._stopped.wait(link.expiry_ms / 3000):
                    self.renew(link.expiry_ms, _RENEWAL_SECONDS)
            except (StoreFenced, ConfigError):
                return
            except StoreFault as error:
                if not self._stopped.is_set():
                    log.warning("the expiry of the keys of job %r was not renewed; retrying: %s", keys.job, error)
            except Exception as error:
                failures.note(error, "it is retried")
                self._stopped.wait(_DOOR_RENEWAL)

    def renew(self, expiry_ms: int, timeout: float) -> None:
        """Set the expiry of every key of the epoch; StoreFault if the server is away for `timeout` seconds."""
        keys, link = self._link.keys, self._link
        deadline = time.monotonic() + timeout
        names = [keys.fence, keys.index, keys.done, keys.life]
        for batch in _scan_index(link, keys, deadline):
            names += batch
        for start in range(0, len(names), _BATCH):
            link.commands(deadline, [("PEXPIRE", name, expiry_ms) for name in names[start : start + _BATCH]])


def _open_job(link: RedisConnections, deadline: float) -> None:
    """Take the job as its owner, and remove the keys of an older start."""
    job = link.keys
    server, memory, token = link.commands(deadline, [("INFO", "server"), ("INFO", "memory"), ("GET", job.fence)])
    facts = parse_info(server) | parse_info(memory)
    policy = facts.get("maxmemory_policy", "noeviction")
    if facts.get("maxmemory", "0") != "0" and policy != "noeviction":
        log.warning(
            "the Redis server at %s drops keys when its memory is full (maxmemory-policy %s); noeviction is safe",
            link.address,
            policy,
        )
    keys = JobKeys(job.job, job.attempt, uuid.uuid4().hex[:12])
    run_id = facts.get("run_id", "")
    older = keys
    if token:
        attempt, _, epoch = token.decode().partition(":")
        older = JobKeys(job.job, int(attempt), epoch)
    # A process may have joined the older start if its door is open.
    was_open = link.command(deadline, "EXISTS", older.door) == 1
    parameters = (keys.attempt, keys.epoch, link.expiry_ms, DOOR_MS, run_id)
    link.command(deadline, "EVAL", OPEN, 2, keys.fence, keys.door, *parameters)
    if older != keys:
        if older.door != keys.door:
            link.command(deadline, "DEL", older.door)
        _remove_epoch(link, older, deadline)
        if was_open:
            verdict = older.value(VERDICT)
            link.commands(deadline, [("DEL", verdict), ("RPUSH", verdict, SUPERSEDED), ("PEXPIRE", verdict, 60_000)])
    link.keys = keys
    link.run_id = run_id


def _join_job(link: RedisConnections, deadline: float) -> None:
    """Wait until the owner has opened the job, and learn its epoch."""
    [value] = link.take(deadline, [link.keys.door])
    epoch, _, run_id = value.decode().partition(" ")
    link.keys = JobKeys(link.keys.job, link.keys.attempt, epoch)
    link.run_id = run_id


def _scan_index(link: RedisConnections, keys: JobKeys, deadline: float) -> Iterator[list[str]]:
    """Yield the names of an epoch's data keys in batches."""
    cursor = None
    while cursor != b"0":
        cursor, members = link.command(deadline, "SSCAN", keys.index, cursor or b"0", "COUNT", _BATCH)
        if members:
            yield [member.decode() for member in members]


def _remove_epoch(link: RedisConnections, keys: JobKeys, deadline: float) -> None:
    """Delete all keys of an epoch except the fence."""
    for batch in list(_scan_index(link, keys, deadline)):
        link.command(deadline, "UNLINK", *batch)
    link.command(deadline, "UNLINK", keys.index, keys.done, keys.life)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def open_redis_store(request: StoreRequest) -> dist.Store:
    """Open the Redis store of `rendezvous.url`, as its owner on rank 0. Raises as `rendezvous.stores.open_store`."""
    settings = request.settings
    password = os.environ.get(PASSWORD_VARIABLE)
    if settings.password:
        password = settings.password.get_secret_value()
    address = Address.parse(
        settings.url, password, ca=settings.tls_ca, certificate=settings.tls_certificate, key=settings.tls_key
    )
    if is_loopback(address.host):
        stay_on_loopback()
    job, attempt = job_name(request.run_name)
    timeout = timedelta(seconds=request.timeout)
    try:
        return RedisStore.open(address, job, attempt, owner=request.rank == 0, timeout=timeout, expiry=settings.expiry)
    except StoreFenced as error:
        raise TrainingError(str(error)) from None
    except StoreFault as error:
        raise TrainingError(
            f"{first_line(error)}; rank {request.rank} tried for rendezvous.timeout={settings.timeout:g} seconds: "
            f"is the server up and rendezvous.url={settings.url} right?"
        ) from None
    except dist.DistError:
        raise TrainingError(
            f"rank 0 did not open job {job!r} attempt {attempt} at {address} within "
            f"rendezvous.timeout={settings.timeout:g} seconds (rank {request.rank} waited): look at rank 0's log, and "
            "give every rank the same MEGASCALE_JOB and MEGASCALE_ATTEMPT"
        ) from None


def _handle_url(
    url: str, timeout: timedelta = timedelta(seconds=300), **_: Any
) -> Iterator[tuple[dist.Store, int, int]]:
    """Serve torch's `init_method="redis://HOST:PORT/DB?job=NAME&attempt=N"`; torch adds rank and world_size."""
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
    raise RuntimeError("redis:// rendezvous gives one store per start; begin a new attempt instead")


def register() -> None:
    """Register `redis://` and `rediss://` with torch; calling it again has no effect."""
    for scheme in ("redis", "rediss"):
        try:
            dist.register_rendezvous_handler(scheme, _handle_url)
        except RuntimeError:
            return
