"""Starts on a store that outlives them: torchrun's agents keep one store while they restart their processes.

Each start has a number, drawn by its rank 0, and a prefix for its keys, so that it reads no key of an earlier start.
torchrun's restart count cannot be that number: a node that is restarted because another node failed does not count it.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store

from megascale.errors import TrainingError
from megascale.rendezvous.agree import VERDICT, supersede
from megascale.rendezvous.stores import StoreFault

_COUNT = "starts"
_OPENED = "start/opened"


def is_under_torchrun() -> bool:
    """Return whether torchrun started this process, and may restart it and its peers."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def open_start(store: Store, rank: int, world: int, *, timeout: float, configured_timeout: float) -> Store:
    """Return the part of `store` that belongs to this start. Rank 0 opens it, the other ranks wait for that.

    A start that has its verdict is over for a rank that was not part of it: the rank waits for the next one.

    Args:
        timeout: seconds to wait for rank 0.
        configured_timeout: `rendezvous.timeout`, of which `timeout` is the remaining part; errors name it.

    Raises:
        TrainingError: rank 0 opened no start within `timeout`.
    """
    if rank == 0:
        return _open_next(store, world)
    deadline = time.monotonic() + timeout
    number = max(1, store.add(_COUNT, 0))
    while True:
        start = _start(store, number)
        remaining = max(0.01, deadline - time.monotonic())
        try:
            start.wait([_OPENED], timedelta(seconds=remaining))
        except DistError as error:
            if isinstance(error, StoreFault) or not _is_reachable(store):
                raise
            raise TrainingError(
                f"rank 0 of {world} did not come within rendezvous.timeout={configured_timeout:g} seconds; look at its "
                f"log and host, or raise --rendezvous.timeout{_earlier_failure(store, number)}"
            ) from None
        if not start.check([VERDICT]):
            return start
        number += 1


def _open_next(store: Store, world: int) -> Store:
    """Draw the number of a new start, and send ranks that wait in an earlier one on to it."""
    number = store.add(_COUNT, 1)
    for earlier in range(1, number):
        supersede(_start(store, earlier), world, f"process {os.getpid()} on {socket.gethostname()}")
    start = _start(store, number)
    start.set(_OPENED, "1")
    return start


def _start(store: Store, number: int) -> Store:
    return PrefixStore(f"megascale-start-{number}", store)


def _is_reachable(store: Store) -> bool:
    with suppress(DistError):
        store.check([_COUNT])
        return True
    return False


def _earlier_failure(store: Store, number: int) -> str:
    """Return why the start before `number` failed, as the end of a sentence; empty if it did not fail."""
    earlier = _start(store, number - 1)
    if number == 1 or not earlier.check([VERDICT]):
        return ""
    _, _, message = earlier.get(VERDICT).decode().partition("fail:")
    if message:
        return f" (the start before failed: {message.partition(':')[2]})"
    return ""
