"""Queues of an exchange's device operations (exchange.py), and the order of the copies of one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from megascale.parallel.copy_plan import CopyPlan


class Streams(Protocol):
    """The device operations of an exchange.

    There are these queues: "main" (the GEMMs), "side" (more GEMMs), "copy" (copies and flags) and "copy 1" to "copy N"
    (copies from N other peers at the same time). The operations of a queue run in order, and the queues run
    concurrently.
    """

    def compute(self, work: Callable[[], Any], queue: str = "main") -> None:
        """Run `work` on main or side."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor, queue: str = "copy") -> None:
        """Copy on a queue other than side."""
        ...

    def signal(self, peer: int, number: int, queue: str = "copy") -> None:
        """Set this rank's flag at `peer` to the number of a call, on a queue of copies."""
        ...

    def wait_for(self, peer: int, number: int, queue: str = "copy") -> None:
        """Wait on a queue of copies until the flag of `peer` at this rank has reached the number of a call."""
        ...

    def record_event(self, queue: str) -> Any:
        """Return an event at the present end of a queue, for which other queues can wait."""
        ...

    def stream_wait(self, queue: str, event: Any) -> None:
        """Let later operations of a queue wait for the event."""
        ...

    def capture(self, on: bool) -> None:
        """Start or stop capturing signals and waits.

        Each peer has two flags for captured calls, chosen by the parity of the call's number. A signal sets the flag
        to 1, and its waiter sets it to 0.
        """
        ...


class PeerCopy(NamedTuple):
    """A copy of `source`, in the memory of `peer`, to `to`; both are contiguous."""

    peer: int
    to: torch.Tensor
    source: torch.Tensor


def list_copy_queues(size: int) -> list[str]:
    """Return the queues of copies of a group of `size` ranks: one per other rank."""
    return ["copy"] + [f"copy {index}" for index in range(1, size - 1)]


def fork_copies(streams: Streams, size: int, plan: CopyPlan) -> list[str]:
    """Return the queue of the copy from each of the `size - 1` peers, in the order of copies."""
    names = list_copy_queues(size)
    names = names[: plan.queues or len(names)]
    if len(names) > 1:
        start = streams.record_event("copy")
        for queue in names[1:]:
            streams.stream_wait(queue, start)
    return [names[index % len(names)] for index in range(size - 1)]


def join_copies(streams: Streams, queues: Sequence[str]) -> None:
    """Let copy wait for the copies in these queues."""
    for queue in dict.fromkeys(queues):
        if queue != "copy":
            streams.stream_wait("copy", streams.record_event(queue))


def copy_in_pieces(streams: Streams, copies: Sequence[PeerCopy], queues: Sequence[str], piece_bytes: int) -> None:
    """Copy a piece from each peer, then the next piece from each. All parts have the same length."""
    length = copies[0].to.numel()
    step = max(1, piece_bytes // copies[0].to.itemsize)
    for start in range(0, length, step):
        for copy, queue in zip(copies, queues, strict=True):
            to = copy.to.flatten()[start : start + step]
            source = copy.source.flatten()[start : start + step]
            streams.copy(to, source, queue)
