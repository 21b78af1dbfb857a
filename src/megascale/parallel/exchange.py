"""Gather and scatter of a tensor-parallel group by copies from peer to peer, overlapped with the GEMMs.

Every rank has memory that its peers read, and a flag for each peer. What others need is written into the own memory;
then their flags get the number of the call; who has seen the number copies. The copies run on a stream of their own, by
copy engines, and the flags are written and awaited by the stream itself: no SM is taken from the GEMM
that runs meanwhile (MegaScale section 3.2, Figure 3c; Flux, arXiv 2406.06858, for what cutting a GEMM costs).

No barrier is needed. Calls are numbered, each signals each peer exactly once, and memory is double-buffered: when a
rank writes where call n wrote, it has seen a later call's number from every peer, and a peer sends that only after its
copies of call n. The two buffers of a gather and of a scatter are apart, since a backward pass gathers and scatters at
once.

Calls can be captured in a CUDA graph and replayed (`captured`). The numbers of a replay would be those of the first
one, so captured calls have flags of their own, two for each peer, used in turn: a signal sets 1, whoever has seen it
sets 0 again. A peer signals call n + 2 after it has seen call n + 1 of this rank, which this one sends after it has set
the flag of call n to 0: none is lost. A capture has an even number of calls, the last of which carries nothing: when it
has ended nobody reads what it wrote, and the next capture begins with the same flag and the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megascale.core.spans import SpanAxis, SpanKind
from megascale.ops.peer_max import PeerMax
from megascale.parallel.runtime import Runtime

BUFFERS = 2


class Streams(Protocol):
    """What an exchange asks of a device. Its queues run in order, each for itself: "main" (the GEMMs), "side"
    (more of them) and "copy" (copies and flags)."""

    def compute(self, work: Callable[[], Any], queue: str = "main") -> None:
        """Run `work` on main or side."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor, queue: str = "copy") -> None:
        """Copy on copy or main."""
        ...

    def signal(self, peer: int, number: int) -> None:
        """On copy: set the flag that this rank has at `peer`."""
        ...

    def wait_for(self, peer: int, number: int) -> None:
        """On copy: wait until the flag of `peer` here has reached `number`."""
        ...

    def record_event(self, queue: str) -> Any:
        """A point in a queue that others can wait for."""
        ...

    def stream_wait(self, queue: str, event: Any) -> None:
        """The queue goes on only after the event."""
        ...

    def capture(self, on: bool) -> None:
        """From now on signals and waits are parts of a capture: of two flags for each peer the one that the call's
        number, even or odd, says, set to 1 by a signal and to 0 by whoever has waited for it."""
        ...


# What writes a part of a result into memory: (out, the rank whose part it is); all parts at once for None.
Make = Callable[[torch.Tensor, int | None], Any]


@dataclass
class Captured:
    """Calls that were captured. nbytes: what their gathers and scatters move, over all ranks."""

    nbytes: int = 0


class Exchange:
    """One group's exchange as one rank sees it. One at a time is made; results are waited for in the order of calls.

    Args:
        rank, size: in the group; at least two.
        memory: of each rank, uint8 [`bytes_needed`].
        shard_bytes: the largest part of one rank that will be gathered or scattered.
        streams: of this rank's device.
        keep: what must live as long as the exchange, such as the memory's owner.
        on_side_stream: consume every other part on the side stream, each in what the other leaves of the device; may be
            changed between steps.
        runtime: what this rank runs with.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: Sequence[torch.Tensor],
        shard_bytes: int,
        streams: Streams,
        keep: Any = None,
        on_side_stream: bool = False,
        runtime: Runtime | None = None,
    ) -> None:
        self._runtime = runtime or Runtime()
        self._keep, self.on_side_stream = keep, on_side_stream
        self.rank, self.size, self.shard_bytes = rank, size, shard_bytes
        self._memory, self._streams = memory, streams
        self._number = self._gathers = self._scatters = 0
        self.peer_max: PeerMax | None = None  # for scalars, where the device has it
        self._within = False  # what a call computes
        self._met = 0  # the number after which every peer had done all before
        self._bytes = 0
        self._capturing = False
        self._gathered: Any = None  # event on copy: the last gather is over, the one before was read
        self._owed: set[int] = set()  # buffers of scatters whose result was not waited for
        self._open: set[int] = set()  # buffers of scatters after which no call has ended yet
        self._free: dict[int, Any] = {}  # buffer index -> event on copy after which nobody reads it any more
        self._views: dict[Any, list[torch.Tensor]] = {}

    @staticmethod
    def bytes_needed(size: int, shard_bytes: int) -> int:
        """Of one rank's memory."""
        return BUFFERS * (1 + size) * shard_bytes

    def _parts(self, gathers: bool, index: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Every rank's memory for one buffer index: `shape` for a gather, [size, *shape] for a scatter."""
        key = (gathers, index, tuple(shape), dtype)
        if key not in self._views:
            nbytes = math.prod(shape) * dtype.itemsize
            if nbytes > self.shard_bytes:
                raise ValueError(f"a part of {nbytes} bytes; this exchange was made for {self.shard_bytes}")
            start = index * self.shard_bytes if gathers else (BUFFERS + index * self.size) * self.shard_bytes
            full = tuple(shape) if gathers else (self.size, *shape)
            nbytes *= 1 if gathers else self.size
            self._views[key] = [m[start : start + nbytes].view(dtype).view(full) for m in self._memory]
        return self._views[key]

    def _begin(self, nbytes: int = 0) -> int:
        if self._within:  # its signals would come before those of the call that it lies in, which has a lower number
            raise RuntimeError("a call of the exchange within what another call computes")
        self._number += 1
        self._bytes += nbytes * self.size
        return self._number

    def _compute(self, work: Callable[[], Any], queue: str = "main") -> None:
        """Run what a call was given to compute."""

        def guarded() -> None:
            self._within = True
            try:
                work()
            finally:
                self._within = False

        self._streams.compute(guarded, queue)

    def _end(self, scattered: int | None = None, queue: str = "copy") -> Any:
        """The call's last point; by then every peer has signalled, so that it has done its copies before."""
        event = self._streams.record_event(queue)
        self._free |= dict.fromkeys(self._open, event)
        self._open = set() if scattered is None else {scattered}
        return event

    def _await(self, event: Any, queue: str = "main") -> None:
        """Have a queue wait for the copies, which wait for peers; main's waits are timed."""
        if queue != "main":
            self._streams.stream_wait(queue, event)
            return
        recorder = self._runtime.recorder
        since = recorder.mark()
        self._streams.stream_wait("main", event)
        recorder.record_wait(since, SpanKind.WAIT, SpanAxis.TENSOR)

    # captures -------------------------------------------------------------------------------------------------------

    @contextmanager
    def captured(self) -> Iterator[Captured]:
        """Calls within are captured, not done: all ranks must capture the same ones. They are replayed in their place
        among all calls of the group, each time after `before_replay`. Nothing may be under way at either end."""
        if self._owed:
            raise RuntimeError("a scatter's result must be waited for before a capture begins")
        streams, made = self._streams, Captured()
        before = self._number, self._gathers, self._scatters, self._free, self._open, self._bytes, self._gathered
        self._number = self._gathers = self._scatters = self._bytes = 0
        self._free, self._open, self._gathered = {}, set(), None
        self._capturing = True
        streams.capture(True)
        try:
            yield made
            for _ in range(2 - self._number % 2):
                self._meet()
            self._await(streams.record_event("copy"))
            made.nbytes = self._bytes
        finally:
            streams.capture(False)
            self._capturing = False
            self._owed.clear()
            self._number, self._gathers, self._scatters, self._free, self._open, self._bytes, self._gathered = before

    def before_replay(self) -> None:
        """A replay is next. It takes any memory at once, so that calls since the last one must be over everywhere."""
        if self._number != self._met:
            self._meet()
            self._await(self._streams.record_event("copy"))
            self._met = self._number

    def _meet(self) -> None:
        """A call that carries nothing: after it every peer has done all calls before."""
        streams, number = self._streams, self._begin()
        streams.stream_wait("copy", streams.record_event("main"))  # which may read a peer's memory itself
        for step in range(1, self.size):
            streams.signal((self.rank + step) % self.size, number)
        for step in range(1, self.size):
            streams.wait_for((self.rank - step) % self.size, number)
        self._end()

    # gather ---------------------------------------------------------------------------------------------------------

    def _send(self, x: torch.Tensor, place: torch.Tensor | None) -> tuple[int, list[torch.Tensor]]:
        """Put x where the peers find it, and into `place`, and signal them: (number of the call, where each rank's part
        is).

        In a capture main copies, before it computes: there a copy within a device is a kernel, which would wait until
        the GEMM beside it has left the device, and with it the peers.
        """
        streams, number = self._streams, self._begin(x.nbytes)
        parts = self._parts(True, self._gathers % BUFFERS, x.shape, x.dtype)
        self._gathers += 1
        queue = "main" if self._capturing else "copy"
        if self._capturing and self._gathered is not None:
            streams.stream_wait("main", self._gathered)
        streams.copy(parts[self.rank], x, queue)
        if self._capturing:
            if place is not None:
                streams.copy(place, x, queue)
            streams.stream_wait("copy", streams.record_event("main"))
        for step in range(1, self.size):
            streams.signal((self.rank - step) % self.size, number)  # who needs it first, first
        return number, parts

    def gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """All-gather x [n, ...] on dimension 0, overlapped with what comes next; the function returned waits for it."""
        streams = self._streams
        whole = x.new_empty((self.size, *x.shape))
        streams.stream_wait("copy", streams.record_event("main"))
        number, parts = self._send(x, whole[self.rank])
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            streams.wait_for(peer, number)
            streams.copy(whole[peer], parts[peer])
        if not self._capturing:
            streams.copy(whole[self.rank], x)
        last = self._gathered = self._end()

        def wait(kept: torch.Tensor = x) -> torch.Tensor:  # x must live until it was copied
            self._await(last)
            return whole.flatten(0, 1)

        return wait

    def gather_and_consume(
        self, x: torch.Tensor, consume: Callable[[torch.Tensor, int], Any], keep: bool
    ) -> torch.Tensor:
        """All-gather x [n, ...], calling consume(part, rank) for each rank's part as soon as it is there.

        Returns [size * n, ...]; with keep=False this rank's own part of it stays unwritten.
        """
        streams = self._streams
        whole = x.new_empty((self.size, *x.shape))
        if self._capturing:
            number, parts = self._send(x, whole[self.rank] if keep else None)
            self._compute(lambda: consume(x, self.rank))  # needs no communication
        else:  # the GEMM first: the host is what is waited for
            streams.stream_wait("copy", streams.record_event("main"))
            self._compute(lambda: consume(x, self.rank))
            number, parts = self._send(x, None)
            if keep:
                streams.copy(whole[self.rank], x)
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            streams.wait_for(peer, number)
            streams.copy(whole[peer], parts[peer])
            queue = "side" if self.on_side_stream and step % 2 else "main"
            self._await(streams.record_event("copy"), queue)
            self._compute(lambda peer=peer: consume(whole[peer], peer), queue)  # type: ignore[misc]
        if self.on_side_stream:
            streams.stream_wait("main", streams.record_event("side"))
        self._gathered = self._end()  # main has waited for the last copy already, itself or by the side stream
        return whole.flatten(0, 1)

    # scatter --------------------------------------------------------------------------------------------------------

    def _room(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int, list[torch.Tensor]]:
        """(number of the call, its buffer index, every rank's memory); main may write into the own one."""
        number, index = self._begin(math.prod(shape) * dtype.itemsize), self._scatters % BUFFERS
        self._scatters += 1
        if index in self._owed:
            raise RuntimeError("a scatter's result must be waited for before the next scatter but one")
        if index in self._free:  # not timed: it was so long ago that peers have read it
            self._streams.stream_wait("main", self._free.pop(index))
        return number, index, self._parts(False, index, shape, dtype)

    def scatter(self, make: Make, shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Reduce-scatter what make(out, None) writes into out [size, *shape] at once, overlapped with what comes next.

        The function returned waits and gives the sum over ranks of their part for this rank, of `shape`.
        """
        streams = self._streams
        number, index, parts = self._room(shape, like.dtype)
        mine = parts[self.rank]
        got = like.new_empty((self.size, *shape) if self.size > 2 else (1, *shape))
        self._compute(lambda: make(mine, None))
        streams.stream_wait("copy", streams.record_event("main"))
        for step in range(1, self.size):
            streams.signal((self.rank + step) % self.size, number)
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            streams.wait_for(source, number)
            streams.copy(got[source if self.size > 2 else 0], parts[source][self.rank])
        if self.size > 2:
            streams.copy(got[self.rank], mine[self.rank])
        last = self._end(index)
        self._owed.add(index)

        def wait() -> torch.Tensor:
            self._owed.discard(index)
            self._await(last)
            if self.size > 2:
                return self._sum(got)
            streams.compute(lambda: torch.add(mine[self.rank], got[0], out=got[0]))
            return got[0]

        return wait

    def scatter_now(self, make: Make, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """As `scatter`, with nothing to hide it under. Of two ranks, each makes its peer's part first, which travels
        while it makes its own: make(out, rank) writes one part, of `shape`, at a time.

        Two GEMMs of half the rows take as long as one (docs/log.md, 2026-11-25); among more ranks parts would be too
        small to fill the device.
        """
        if self.size > 2:
            return self.scatter(make, shape, like)()
        streams, peer = self._streams, 1 - self.rank
        number, index, parts = self._room(shape, like.dtype)
        got, own = like.new_empty(tuple(shape)), like.new_empty(tuple(shape))
        self._compute(lambda: make(parts[self.rank][peer], peer))
        streams.stream_wait("copy", streams.record_event("main"))
        streams.signal(peer, number)
        self._compute(lambda: make(own, self.rank))
        streams.wait_for(peer, number)
        streams.copy(got, parts[peer][self.rank])
        self._await(self._end(index))
        streams.compute(lambda: torch.add(own, got, out=own))
        return own

    def _sum(self, parts: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(parts[0])
        self._streams.compute(lambda: torch.sum(parts, 0, out=out))
        return out
