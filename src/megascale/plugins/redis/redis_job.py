"""Start and end of a job in Redis: opening, joining, renewal of the keys' expiry, and removal of the keys.

The *fence* is the key that names the attempt and the epoch that hold a job; an *epoch* is a random name that is part of
all keys of one start (`redis_keys`). The owner, rank 0, opens the job. The other ranks join it by the *join key*.
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Iterator

from megascale.core.failure import FailureLog
from megascale.errors import ConfigError
from megascale.plugins.redis.redis_connections import RedisConnections, parse_info
from megascale.plugins.redis.redis_keys import JOIN_MS, OPEN, SUPERSEDED, JobKeys
from megascale.rendezvous.agree import VERDICT
from megascale.rendezvous.stores import StoreFault, StoreFenced

log = logging.getLogger(__name__)

_JOIN_RENEWAL_INTERVAL = JOIN_MS / 1000 / 3  # seconds; two renewals in a row may fail before the join key expires
_RENEWAL_TIMEOUT = 60.0  # seconds per renewal, during which the server may be unreachable
_VERDICT_EXPIRY_MS = 60_000  # time in which processes of an older start can read that they are superseded
_BATCH_KEYS = 1000  # keys per message to the server


class RenewalThread:
    """Thread of the owner that renews the expiry of the join key during the start, and of all keys afterwards.

    Attributes:
        sealed: set once no further rank may join, so that the join key is no longer renewed.
    """

    def __init__(self, connections: RedisConnections) -> None:
        self._connections = connections
        self.sealed = threading.Event()
        self._stopped = threading.Event()
        threading.Thread(target=self._run, name="megascale-store-renewal", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end. It may wait for either event, so both are set."""
        self._stopped.set()
        self.sealed.set()

    def _run(self) -> None:
        connections = self._connections
        keys = connections.keys
        failures = FailureLog(log, f"keeping the keys of job {keys.job!r} from expiring")
        while not self._stopped.is_set():
            try:
                if not self.sealed.wait(_JOIN_RENEWAL_INTERVAL):
                    connections.run_command(time.monotonic() + _RENEWAL_TIMEOUT, "PEXPIRE", keys.join, JOIN_MS)
                elif not self._stopped.wait(connections.expiry_ms / 1000 / 3):
                    self.renew(connections.expiry_ms, _RENEWAL_TIMEOUT)
            except (StoreFenced, ConfigError):
                return
            except StoreFault as error:
                if not self._stopped.is_set():
                    log.warning("the expiry of the keys of job %r was not renewed; retrying: %s", keys.job, error)
            except Exception as error:
                failures.note(error, "the thread tries again")
                self._stopped.wait(_JOIN_RENEWAL_INTERVAL)

    def renew(self, expiry_ms: int, timeout: float) -> None:
        """Set the expiry of all keys of the epoch. Raises StoreFault after `timeout` seconds without a server."""
        connections = self._connections
        keys = connections.keys
        deadline = time.monotonic() + timeout
        names = [keys.fence, keys.index, keys.last_changes, keys.complete_on]
        for batch in _scan_index(connections, keys, deadline):
            names += batch
        for start in range(0, len(names), _BATCH_KEYS):
            connections.run_commands(
                deadline, [("PEXPIRE", name, expiry_ms) for name in names[start : start + _BATCH_KEYS]]
            )


def open_job(connections: RedisConnections, deadline: float) -> None:
    """Set the fence to a new epoch of this attempt, and remove the keys of the previous start."""
    job, attempt = connections.keys.job, connections.keys.attempt
    keys = JobKeys(job, attempt, epoch=uuid.uuid4().hex[:12])
    server, memory, previous_token = connections.run_commands(
        deadline, [("INFO", "server"), ("INFO", "memory"), ("GET", keys.fence)]
    )
    server_info = parse_info(server) | parse_info(memory)
    policy = server_info.get("maxmemory_policy", "noeviction")
    if server_info.get("maxmemory", "0") != "0" and policy != "noeviction":
        log.warning(
            "the Redis server at %s drops keys when its memory is full (maxmemory-policy %s); noeviction is safe",
            connections.address,
            policy,
        )
    server_run_id = server_info.get("run_id", "")
    previous_keys = keys  # if the job was not open
    if previous_token:
        previous_attempt, _, previous_epoch = previous_token.decode().partition(":")
        previous_keys = JobKeys(job, int(previous_attempt), previous_epoch)
    # If the previous start still has its join key, processes may be waiting in it. The verdict below ends their wait.
    was_joinable = connections.run_command(deadline, "EXISTS", previous_keys.join) == 1
    parameters = (keys.attempt, keys.epoch, connections.expiry_ms, JOIN_MS, server_run_id)
    connections.run_command(deadline, "EVAL", OPEN, 2, keys.fence, keys.join, *parameters)
    if previous_keys != keys:
        if previous_keys.join != keys.join:
            connections.run_command(deadline, "DEL", previous_keys.join)
        remove_epoch(connections, previous_keys, deadline)
        if was_joinable:
            # Values are lists of one element.
            verdict_key = previous_keys.value_key(VERDICT)
            commands = [
                ("DEL", verdict_key),
                ("RPUSH", verdict_key, SUPERSEDED),
                ("PEXPIRE", verdict_key, _VERDICT_EXPIRY_MS),
            ]
            connections.run_commands(deadline, commands)
    connections.keys = keys
    connections.server_run_id = server_run_id


def join_job(connections: RedisConnections, deadline: float) -> None:
    """Wait until the owner has opened the job, and read its epoch from the join key."""
    [value] = connections.wait_for_values(deadline, [connections.keys.join])
    epoch, _, server_run_id = value.decode().partition(" ")
    connections.keys = JobKeys(connections.keys.job, connections.keys.attempt, epoch)
    connections.server_run_id = server_run_id


def _scan_index(connections: RedisConnections, keys: JobKeys, deadline: float) -> Iterator[list[str]]:
    """Yield the names of an epoch's data keys, up to about _BATCH_KEYS at a time."""
    cursor = None
    while cursor != b"0":
        cursor, members = connections.run_command(deadline, "SSCAN", keys.index, cursor or b"0", "COUNT", _BATCH_KEYS)
        if members:
            yield [member.decode() for member in members]


def remove_epoch(connections: RedisConnections, keys: JobKeys, deadline: float) -> None:
    """Delete all keys of an epoch except the fence."""
    for batch in list(_scan_index(connections, keys, deadline)):
        connections.run_command(deadline, "UNLINK", *batch)
    connections.run_command(deadline, "UNLINK", keys.index, keys.last_changes, keys.complete_on)
