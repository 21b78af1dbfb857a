"""Calls in threads at the same time, for the connections of several process groups.

torch makes NCCL's communicators one after the other. NCCL itself makes non-blocking communicators in threads of its
own, so it allows several at the same time. A wait of these threads for other ranks cannot become a cycle:

- A rank waits in the store only for the lowest rank of a group. That rank does not wait in the store for this group.
  A store may answer one call of a rank at a time, so a wait can delay that rank's other groups. By induction over
  the ranks from 0 upwards, each delay ends.
- In NCCL, each communicator has its own sockets.
- Waits for a device's kernels end if only one of the groups has kernels meanwhile. A rank that has not launched the
  group's next kernel has an idle device, so nothing prevents the launch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping

_FAILED_SECONDS = 5.0  # after one call has failed, the others have this time to end

_Result = tuple[str, BaseException | None]  # name of the call, and its error


def call_concurrently(calls: Mapping[str, Callable[[], None]], failed_seconds: float = _FAILED_SECONDS) -> None:
    """Run each call in a thread of its own, and wait for all of them.

    Args:
        calls: the calls by name. Names appear in the names of threads.
        failed_seconds: limit for waiting for the other calls, once one call has failed.

    Raises the error of the first call in the order of `calls` that failed. Calls that wait for a lost rank fail too, as
    a rule, so that no thread uses a group while its process leaves it. After `failed_seconds` they are not awaited.
    """
    results: queue.SimpleQueue[_Result] = queue.SimpleQueue()
    for name, call in calls.items():
        arguments = (name, call, results)
        threading.Thread(target=_run, args=arguments, name=f"connect {name}", daemon=True).start()
    errors = _await_results(results, len(calls), failed_seconds)
    for name in calls:
        if name in errors:
            raise errors[name]


def _run(name: str, call: Callable[[], None], results: queue.SimpleQueue[_Result]) -> None:
    """Run a call in this thread, and put its result."""
    error: BaseException | None = None
    try:
        call()
    except BaseException as failure:
        error = failure
    results.put((name, error))


def _await_results(results: queue.SimpleQueue[_Result], count: int, failed_seconds: float) -> dict[str, BaseException]:
    """Return the errors of failed calls by name, once `count` calls have ended or the limit after a failure is over."""
    errors: dict[str, BaseException] = {}
    deadline = 0.0
    for _ in range(count):
        try:
            if errors:
                name, error = results.get(timeout=max(0.0, deadline - time.monotonic()))
            else:
                name, error = results.get()
        except queue.Empty:
            break
        if error is not None:
            deadline = deadline or time.monotonic() + failed_seconds
            errors[name] = error
    return errors
