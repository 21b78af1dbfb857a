"""Several starts of a job on one store, which torchrun's agents keep while they restart their processes.

Each start has a number, which its rank 0 draws, and a prefix for its keys, so that a start reads no key of an earlier
one. torchrun's restart count cannot be that number, because a node does not count a restart that another node caused.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store

from megascale.errors import TrainingError
from megascale.rendezvous.agree import VERDICT, parse_failure, supersede
from megascale.rendezvous.stores import StoreFault

_START_COUNT = "starts"  # key of the number of starts
_OPENED = "start/opened"  # key that rank 0 sets in its start
_MIN_WAIT_SECONDS = 0.01  # for a call after the time has passed, whose error then says so


def is_under_torchrun() -> bool:
    """Return whether torchrun started this process, and so may restart it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def open_start(store: Store, rank: int, world: int, *, timeout: float, configured_timeout: float) -> Store:
    """Return the store of this start, which is `store` with a prefix. Rank 0 begins the start; other ranks wait for it.

    A start with a verdict is complete or has failed, so a rank that was not part of it waits for the next start.

    Args:
        timeout: seconds to wait for rank 0.
        configured_timeout: value of `rendezvous.timeout` for error messages.

    Raises:
        TrainingError: rank 0 began no start within `timeout` seconds.
    """
    if rank == 0:
        return _begin_start(store, world)
    deadline = time.monotonic() + timeout
    number = max(1, store.add(_START_COUNT, 0))  # the newest start; adding 0 reads the count
    while True:
        start_store = _open_prefix(store, number)
        remaining = max(_MIN_WAIT_SECONDS, deadline - time.monotonic())
        try:
            start_store.wait([_OPENED], timedelta(seconds=remaining))
        except DistError as error:
            if isinstance(error, StoreFault) or not _is_reachable(store):
                raise
            raise TrainingError(
                f"rank 0 of {world} did not come within rendezvous.timeout={configured_timeout:g} seconds; look at its "
                f"log and host, or raise --rendezvous.timeout{_describe_earlier_failure(store, number)}"
            ) from None
        if not start_store.check([VERDICT]):
            return start_store
        number += 1


def _begin_start(store: Store, world: int) -> Store:
    """Draw the number of a new start, and end earlier starts, so that ranks waiting in them join the new one."""
    number = store.add(_START_COUNT, 1)
    for earlier_number in range(1, number):
        supersede(_open_prefix(store, earlier_number), world, f"process {os.getpid()} on {socket.gethostname()}")
    start_store = _open_prefix(store, number)
    start_store.set(_OPENED, "1")
    return start_store


def _open_prefix(store: Store, number: int) -> Store:
    """Return the store with the keys of one start."""
    return PrefixStore(f"megascale-start-{number}", store)


def _is_reachable(store: Store) -> bool:
    """Return whether the store still answers."""
    with suppress(DistError):
        store.check([_START_COUNT])
        return True
    return False


def _describe_earlier_failure(store: Store, number: int) -> str:
    """Return text for the end of a sentence that says why the previous start failed; empty if it did not fail."""
    earlier = _open_prefix(store, number - 1)
    if number == 1 or not earlier.check([VERDICT]):
        return ""
    failure = parse_failure(earlier.get(VERDICT).decode())
    if failure is None:
        return ""
    return f" (the previous start failed: {failure.message})"
