"""A torch.distributed.Store on a Redis server, and the `redis://` and `rediss://` rendezvous handlers.

Rank 0 of a job is the owner. It opens the job: it fences off older attempts, removes their keys and draws a new
*epoch*, a random name that is part of all keys of this start. The other ranks wait for the *join key*, which holds the
epoch and exists only during the start. The *fence* is the key that names the attempt and epoch that hold the job. A job
that ends well removes its keys. If a job dies, its keys expire.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import torch.distributed as dist

from megascale.core.secrets import PASSWORD_VARIABLE
from megascale.errors import TrainingError
from megascale.plugins.redis.redis_connection import Address
from megascale.plugins.redis.redis_connections import RedisConnections
from megascale.plugins.redis.redis_job import RenewalThread, join_job, open_job, remove_epoch
from megascale.plugins.redis.redis_keys import JobKeys
from megascale.rendezvous.stores import (
    ExternalStore,
    StoreFault,
    StoreFenced,
    StoreRequest,
    is_loopback,
    read_job_and_attempt,
    restrict_to_loopback,
    summarise_error,
)

EXPIRY = 24 * 3600.0  # seconds until the keys of a job that died expire
# Calls that do not wait for a key have at least this time-out, even if the store's time-out is shorter. The server may
# need this long to restart.
_MIN_CALL_SECONDS = 5.0

# torch keeps only the C++ half of a Python store alive. This set keeps the Python half from being collected.
_open_stores: set[RedisStore] = set()


class RedisStore(ExternalStore):
    """torch.distributed.Store with all operations of torch's stores.

    Several threads may use the store at the same time, including torch's background threads. Values are bytes. Text is
    stored as UTF-8. As in torch, reading waits up to `timeout` for a key. `connections` keep a *journal* of the values
    that this process wrote, from which they are restored if the server loses its data.

    Raises, besides the errors of RedisConnections:
        torch.distributed.DistStoreError: a key was not set before the time-out.
        torch.distributed.QueueEmptyError: the queue is empty and the call does not block.
    """

    def __init__(self, connections: RedisConnections, timeout: timedelta, renewal: RenewalThread | None = None) -> None:
        super().__init__()
        self.connections = connections
        self._renewal = renewal
        self.set_timeout(timeout)
        _open_stores.add(self)

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
        """Open the job as its owner, or join it once the owner has opened it.

        Args:
            job, attempt: name of the job and number of its attempt, equal on all ranks. A higher attempt fences off
                the lower ones.
            owner: whether this process opens the job; True for exactly one process.
            timeout: limit for opening or joining, and time-out of the store.
            expiry: seconds until the keys of a job that died expire.
        """
        deadline = time.monotonic() + timeout.total_seconds()
        connections = RedisConnections(address, JobKeys(job, attempt), expiry)
        try:
            if owner:
                open_job(connections, deadline)
            else:
                join_job(connections, deadline)
        except BaseException:
            connections.close()
            raise
        connections.is_start_owner = owner
        return cls(connections, timeout, RenewalThread(connections) if owner else None)

    def seal(self) -> None:
        """Delete the join key, so that no further rank joins. Only the owner's call has an effect."""
        if self._renewal is not None:
            self._renewal.sealed.set()
            self.connections.is_start_owner = False
            self.connections.run_command(self._deadline(), "DEL", self.connections.keys.join)

    def remove_all(self) -> None:
        """Remove all keys of the job. The last rank that leaves the job calls this method."""
        if self._renewal is not None:
            self._renewal.stop()
        keys = self.connections.keys
        deadline = self._deadline()
        remove_epoch(self.connections, keys, deadline)
        # A newer attempt may have opened the job meanwhile, so the fence is removed only if it is this attempt's.
        script = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1], KEYS[2]) end return 1"
        self.connections.run_command(deadline, "EVAL", script, 2, keys.fence, keys.join, keys.token)

    def expire_soon(self, seconds: float) -> None:
        """Let all keys expire after `seconds`, so that other ranks can still read the reason of a failure.

        Only the owner's call has an effect.
        """
        if self._renewal is not None:
            self._renewal.stop()
            self._renewal.renew(int(seconds * 1000), _MIN_CALL_SECONDS)

    def close(self) -> None:
        """Close the connections of this store and of its clones. The data stays on the server."""
        if self._renewal is not None:
            self._renewal.stop()
        self.connections.close()
        for store in [store for store in _open_stores if store.connections is self.connections]:
            _open_stores.discard(store)

    # Operations of torch.distributed.Store. Its C++ code calls them by these names, such as `deleteKey`.

    def set(self, key: str, value: str | bytes) -> None:
        self.multi_set([key], [value])

    def get(self, key: str) -> bytes:
        return self._wait_for_values([key], self._timeout())[0]

    def add(self, key: str, value: int) -> int:
        total = int(self._change_value("add", key, int(value)))
        self.connections.journal_sum(key, int(value))
        return total

    def check(self, keys: Sequence[str]) -> bool:
        if not keys:
            return True
        names = [self._value_key(key) for key in keys]
        return self.connections.run_command(self._deadline(), "EXISTS", *names) == len(names)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        replacement = _to_bytes(desired)
        stored = self._change_value("compare", key, _to_bytes(expected), replacement)
        if stored == replacement:
            self.connections.journal_value(key, replacement)
        return stored

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._wait_for_values(keys, self._timeout() if timeout is None else timeout)

    def delete_key(self, key: str) -> bool:
        self.connections.remove_from_journal(key)
        return self._change_value("delete", key) == b"1"

    deleteKey = delete_key

    def num_keys(self) -> int:
        return len(self.list_keys())

    getNumKeys = num_keys

    def list_keys(self) -> list[str]:
        prefix = self._value_key("")
        members = self.connections.run_command(self._deadline(), "SMEMBERS", self.connections.keys.index)
        names = [member.decode() for member in members]
        return sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix))

    def append(self, key: str, value: str | bytes) -> None:
        self._change_value("append", key, _to_bytes(value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._wait_for_values(keys, self._timeout())

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys for {len(values)} values")
        if not keys:
            return
        encoded_values = [_to_bytes(value) for value in values]
        self.connections.change_once(self._deadline(), "set", [self._value_key(key) for key in keys], *encoded_values)
        for key, encoded_value in zip(keys, encoded_values, strict=True):
            self.connections.journal_value(key, encoded_value)

    def has_extended_api(self) -> bool:
        return True

    def queue_push(self, key: str, value: str | bytes) -> None:
        self.connections.change_once(self._deadline(), "push", [self.connections.keys.queue_key(key)], _to_bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        queue = self.connections.keys.queue_key(key)
        if block:
            return self._pop_blocking(key, queue)
        answer = self.connections.change_once(self._deadline(), "pop", [queue])
        # The script answers "-", or a mark of one byte followed by the element.
        if answer == b"-":
            raise dist.QueueEmptyError(f"queue {key!r} is empty")
        return answer[1:]

    def queue_len(self, key: str) -> int:
        return int(self.connections.run_command(self._deadline(), "LLEN", self.connections.keys.queue_key(key)))

    def clone(self) -> RedisStore:
        """Return a store on the same data with a time-out of its own."""
        return RedisStore(self.connections, self._timeout())

    # Helpers

    def _timeout(self) -> timedelta:
        return self.timeout  # type: ignore[attr-defined]

    def _deadline(self) -> float:
        return time.monotonic() + max(_MIN_CALL_SECONDS, self._timeout().total_seconds())

    def _value_key(self, key: str) -> str:
        return self.connections.keys.value_key(key)

    def _change_value(self, operation: str, key: str, *arguments: Any) -> bytes:
        return self.connections.change_once(self._deadline(), operation, [self._value_key(key)], *arguments)

    def _wait_for_values(self, keys: Sequence[str], timeout: timedelta) -> list[bytes]:
        seconds = timeout.total_seconds()
        try:
            return self.connections.wait_for_values(time.monotonic() + seconds, [self._value_key(key) for key in keys])
        except StoreFault:
            raise
        except dist.DistStoreError as error:
            # The error's text is the Redis key of the first absent value.
            key = str(error).removeprefix(self._value_key(""))
            loss = "; the server lost its data meanwhile" if self.connections.restore_count else ""
            raise dist.DistStoreError(f"wait timeout after {seconds * 1000:.0f}ms, key: {key}{loss}") from None

    def _pop_blocking(self, key: str, queue: str) -> bytes:
        """Pop the first element of `queue`, and wait for one if the queue is empty.

        The element moves to a list that only this call uses, and is read from there. Until it has been read, it is in
        one of the two lists, so that no element is lost with a connection.
        """
        popped_list = self.connections.keys.popped_key(uuid.uuid4().hex[:12])
        # The operation "list" adds the key to the index of the job's keys, so that it is removed with them.
        self.connections.change_once(self._deadline(), "list", [popped_list])
        deadline = time.monotonic() + self._timeout().total_seconds()
        while True:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise dist.DistStoreError(f"wait timeout: queue {key!r} stayed empty")
            # RedisConnections sends a command again whose answer takes longer than 20 seconds, so each wait is shorter.
            wait_seconds = f"{max(min(remaining, 10.0), 0.001):.3f}"
            commands = [("BLMOVE", queue, popped_list, "LEFT", "LEFT", wait_seconds), ("LRANGE", popped_list, 0, -1)]
            _, popped_values = self.connections.run_commands(self._deadline(), commands)
            if popped_values:
                # BLMOVE puts each element in front of the list, so the last one was popped first. A BLMOVE that was
                # sent twice has popped further elements, which go back to the front of the queue.
                for value in popped_values[:-1]:
                    self.connections.run_command(self._deadline(), "LPUSH", queue, value)
                self.connections.change_once(self._deadline(), "delete", [popped_list])
                return popped_values[-1]


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def open_redis_store(request: StoreRequest) -> dist.Store:
    """Open the Redis store of `rendezvous.url`, on rank 0 as its owner.

    Raises:
        TrainingError: the server is unreachable, another attempt holds the job, or rank 0 did not open the job in time.
        ConfigError: the server refuses the password or a certificate.
    """
    settings = request.settings
    password = os.environ.get(PASSWORD_VARIABLE)
    if settings.password:
        password = settings.password.get_secret_value()
    address = Address.parse(
        settings.url, password, ca=settings.tls_ca, certificate=settings.tls_certificate, key=settings.tls_key
    )
    if is_loopback(address.host):
        restrict_to_loopback()
    job, attempt = read_job_and_attempt(request.run_name)
    timeout = timedelta(seconds=request.timeout)
    try:
        return RedisStore.open(address, job, attempt, owner=request.rank == 0, timeout=timeout, expiry=settings.expiry)
    except StoreFenced as error:
        raise TrainingError(str(error)) from None
    except StoreFault as error:
        raise TrainingError(
            f"{summarise_error(error)}; rank {request.rank} tried for rendezvous.timeout={settings.timeout:g} seconds: "
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
    """Implement torch's `init_method="redis://HOST:PORT/DB?job=NAME&attempt=N"`.

    torch adds `rank` and `world_size` to the URL.

    Yields:
        The store, the rank and the world size, once.
    """
    split_url = urlsplit(url)
    query = dict(parse_qsl(split_url.query))
    if "rank" not in query or "world_size" not in query:
        raise ValueError("redis:// rendezvous needs rank and world_size")
    address = Address.parse(urlunsplit(split_url._replace(query="")), ca=query.get("ca"))
    rank = int(query["rank"])
    store = RedisStore.open(
        address, query.get("job", "torch"), int(query.get("attempt", 0)), owner=rank == 0, timeout=timeout
    )
    yield store, rank, int(query["world_size"])
    raise RuntimeError("redis:// rendezvous gives one store per start; begin a new attempt instead")


def register() -> None:
    """Register `redis://` and `rediss://` with torch. Further calls have no effect."""
    for scheme in ("redis", "rediss"):
        try:
            dist.register_rendezvous_handler(scheme, _handle_url)
        except RuntimeError:  # the scheme is already registered
            return
