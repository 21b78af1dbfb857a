"""Gather, scatter and all-to-all of a group on one host by peer-to-peer copies, overlapped with GEMMs.

Every rank has memory that its peers read, and a flag for each peer. A call writes its data into the rank's own memory
and then sets the peers' flags to the number of the call; a peer that sees the number copies the data. Copies run on a
stream of their own, by copy engines, and the stream itself writes and awaits the flags, so that no SM is taken from
the GEMM that runs meanwhile (MegaScale section 3.2, Figure 3c; Flux, arXiv 2406.06858, on the cost of cutting a GEMM).

No barrier is needed. Calls are numbered, each signals each peer exactly once, and memory is double-buffered. When a
rank writes where call n wrote, it has seen a later call's number from every peer, and a peer sends that only after its
copies of call n. Gathers and scatters have separate buffers, since a backward pass gathers and scatters at once.

Calls can be captured in a CUDA graph and replayed (`capture`). A replay would repeat the numbers of the first one, so
captured calls have flags of their own, two for each peer, used in turn: a signal sets 1, and its waiter sets 0 again.
A peer signals call n + 2 after it has seen call n + 1 of this rank, which this rank sends after it has set the flag of
call n to 0, so no signal is lost. A capture has an even number of calls, the last of which carries no data: when it
has ended, no rank reads its memory, and the next capture begins with the same flag and the same memory.

Memory that a rank changes rarely, such as its shard of the parameters, is gathered where it lies (`gather_resident`). A
rank changes it only after `meet`, when every peer has ended its earlier calls. Gradients are reduced where they lie
(`reduce_resident`); such a call ends when the peers have read them.

A peer that dies or hangs sets no flag. The exchange's watch (peer_watch.py) then ends the waits of this rank, in graphs
too, and the next call, replay or `check` raises TrainingError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from megascale.core.spans import SpanAxis, SpanKind
from megascale.ops.peer_max import PeerMax
from megascale.ops.peer_sum import sum_over_peers
from megascale.parallel.peer_watch import PeerWatch
from megascale.parallel.runtime import Runtime

BUFFERS = 2


class Streams(Protocol):
    """The device operations of an exchange.

    Its queues run in order, each on its own: "main" (the GEMMs), "side" (more GEMMs) and "copy" (copies and flags).
    """

    def compute(self, work: Callable[[], Any], queue: str = "main") -> None:
        """Run `work` on main or side."""
        ...

    def copy(self, to: torch.Tensor, source: torch.Tensor, queue: str = "copy") -> None:
        """Copy on copy or main."""
        ...

    def signal(self, peer: int, number: int) -> None:
        """Set this rank's flag at `peer`, on copy."""
        ...

    def wait_for(self, peer: int, number: int) -> None:
        """Wait on copy until the flag of `peer` on this rank has reached `number`."""
        ...

    def record_event(self, queue: str) -> Any:
        """Record a point in a queue that others can wait for."""
        ...

    def stream_wait(self, queue: str, event: Any) -> None:
        """Continue the queue only after the event."""
        ...

    def capture(self, on: bool) -> None:
        """Start or stop capturing signals and waits.

        Each peer has two flags for captured calls, chosen by the parity of the call's number. A signal sets the flag
        to 1, and its waiter sets it to 0.
        """
        ...


# Writes a part of a result into memory: (out, the rank whose part it is); all parts at once for None.
WriteParts = Callable[[torch.Tensor, int | None], Any]


@dataclass
class CapturedCalls:
    """Calls that were captured. nbytes: bytes that their gathers and scatters move, over all ranks."""

    nbytes: int = 0


@dataclass
class _CallState:
    """Progress of a sequence of calls; a capture has one of its own.

    Attributes:
        number: number of the last call.
        gathers, scatters: how many there were, which chooses the buffer.
        nbytes: bytes that they move, over all ranks.
        gathered: event on copy after which the last gather has ended and the one before was read.
        open: buffers of scatters after which no call has ended yet.
        free: buffer index -> event on copy after which no rank reads the buffer.
    """

    number: int = 0
    gathers: int = 0
    scatters: int = 0
    nbytes: int = 0
    gathered: Any = None
    open: set[int] = field(default_factory=set)
    free: dict[int, Any] = field(default_factory=dict)


class Exchange:
    """One group's exchange as one rank sees it. Calls do not nest, and results are awaited in the order of calls.

    Args:
        rank, size: of the group; at least two ranks.
        memory: memory of each rank, uint8 [`bytes_needed`].
        shard_bytes: the largest shard that will be gathered or scattered.
        streams: streams of this rank's device.
        owner: an object that must live as long as the exchange, such as the memory's owner.
        resident: additional memory of each rank that peers read where it lies, uint8.
        on_side_stream: consume every other shard on the side stream, so that GEMMs fill the device together; may be
            changed between steps.
        runtime: the rank's runtime.
        kind: the axis of the grid, for timers.

    Attributes:
        peer_max: the maximum of a number over ranks, where the device supports it.
        watch: ends waits for a peer that has died; None without processes to watch.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: Sequence[torch.Tensor],
        shard_bytes: int,
        streams: Streams,
        owner: Any = None,
        on_side_stream: bool = False,
        runtime: Runtime | None = None,
        kind: SpanAxis = SpanAxis.TENSOR,
        resident: Sequence[torch.Tensor] = (),
    ) -> None:
        self.resident = resident
        self._runtime = runtime or Runtime()
        self._kind = kind
        self._owner = owner
        self.on_side_stream = on_side_stream
        self.rank = rank
        self.size = size
        self.shard_bytes = shard_bytes
        self._memory = memory
        self._streams = streams
        self.peer_max: PeerMax | None = None
        self.watch: PeerWatch | None = None
        self._calls_begun = 0
        self._state = _CallState()
        self._is_computing = False  # within the work that a call computes
        self._is_capturing = False
        self._met_number = 0  # the call after which every peer had finished all earlier ones
        self._unread: set[int] = set()  # buffers of scatters whose result was not awaited
        self._views: dict[Any, list[torch.Tensor]] = {}
        self._staging_sums: list[Any] = [None, None]  # the last sum of each half of the staging memory

    @staticmethod
    def bytes_needed(size: int, shard_bytes: int) -> int:
        """Return the bytes of one rank's memory."""
        return BUFFERS * (1 + size) * shard_bytes

    def _gather_buffer(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's memory for a gather, as `shape`."""
        return self._buffer_views(index * self.shard_bytes, shape, dtype, math.prod(shape))

    def _scatter_buffer(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's memory for a scatter, as [size, *shape]."""
        start = (BUFFERS + index * self.size) * self.shard_bytes
        return self._buffer_views(start, (self.size, *shape), dtype, math.prod(shape))

    def _buffer_views(
        self, start: int, shape: Sequence[int], dtype: torch.dtype, shard_elements: int
    ) -> list[torch.Tensor]:
        key = (start, tuple(shape), dtype)
        views = self._views.get(key)
        if views is None:
            nbytes = shard_elements * dtype.itemsize
            if nbytes > self.shard_bytes:
                raise ValueError(f"a shard has {nbytes} bytes; this exchange was made for {self.shard_bytes}")
            stop = start + math.prod(shape) * dtype.itemsize
            views = [memory[start:stop].view(dtype).view(tuple(shape)) for memory in self._memory]
            self._views[key] = views
        return views

    def _begin(self, nbytes: int = 0) -> int:
        """Start a call that moves a shard of `nbytes`; returns its number."""
        if self._is_computing:
            # Its signals would precede those of the enclosing call, which has a lower number.
            raise RuntimeError("a call of the exchange within the work that another call computes")
        self.check()
        self._calls_begun += 1
        self._state.number += 1
        self._state.nbytes += nbytes * self.size
        return self._state.number

    def _compute(self, work: Callable[..., Any], *args: Any, queue: str = "main") -> None:
        """Run the work of a call."""

        def guarded() -> None:
            self._is_computing = True
            try:
                work(*args)
            finally:
                self._is_computing = False

        self._streams.compute(guarded, queue)

    def _end(self, scattered: int | None = None) -> Any:
        """Record the call's last point, by which every peer has signalled, and so has finished its earlier copies."""
        event = self._streams.record_event("copy")
        state = self._state
        state.free |= dict.fromkeys(state.open, event)
        state.open = set() if scattered is None else {scattered}
        return event

    def _await(self, event: Any, queue: str = "main") -> None:
        """Let a queue wait for the copies, which wait for peers; the waits of main are timed."""
        if queue != "main":
            self._streams.stream_wait(queue, event)
            return
        recorder = self._runtime.recorder
        start = recorder.mark()
        self._streams.stream_wait("main", event)
        recorder.record_wait(start, SpanKind.WAIT, self._kind)

    def _copy_waits_for_main(self) -> None:
        self._streams.stream_wait("copy", self._streams.record_event("main"))

    def count_calls(self) -> int:
        """Return how many calls and replays have begun."""
        return self._calls_begun

    def check(self) -> None:
        """Raise TrainingError if a peer has died or hangs; results of earlier calls are then undefined."""
        if self.watch is not None:
            self.watch.check()

    def close(self, failed: bool = False) -> None:
        """Stop watching the peers, which take this rank's end as planned unless it has `failed`."""
        if self.watch is not None:
            self.watch.close(failed)

    # captures -------------------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self) -> Iterator[CapturedCalls]:
        """Capture the calls within instead of running them; all ranks must capture the same ones.

        They are replayed at their position among all calls of the group, each time after `before_replay`. No call may
        be in flight at either end.
        """
        if self._unread:
            raise RuntimeError("a scatter's result must be waited for before a capture begins")
        calls = CapturedCalls()
        eager_state = self._state
        self._state = _CallState()
        self._is_capturing = True
        self._streams.capture(True)
        try:
            yield calls
            for _ in range(2 - self._state.number % 2):
                self._meet()
            self._await(self._streams.record_event("copy"))
            calls.nbytes = self._state.nbytes
        finally:
            self._streams.capture(False)
            self._is_capturing = False
            self._unread.clear()
            self._state = eager_state

    def before_replay(self) -> None:
        """Wait until all ranks have finished earlier calls, because a replay uses any of the memory at once."""
        self.check()
        self._calls_begun += 1
        if self._state.number != self._met_number:
            self._meet()
            self._await(self._streams.record_event("copy"))
            self._met_number = self._state.number

    def after_replay(self) -> None:
        """Let the copy queue end after the replay, so that the watch sees that it is in flight."""
        self._copy_waits_for_main()

    def _meet(self) -> None:
        """Make a call without data, after which every peer has finished all earlier calls."""
        number = self._begin()
        self._copy_waits_for_main()  # main may be reading a peer's memory
        for step in range(1, self.size):
            self._streams.signal((self.rank + step) % self.size, number)
        for step in range(1, self.size):
            self._streams.wait_for((self.rank - step) % self.size, number)
        self._end()

    # gather ---------------------------------------------------------------------------------------------------------

    def _send(self, x: torch.Tensor, own_out: torch.Tensor | None) -> tuple[int, list[torch.Tensor]]:
        """Copy x into the memory that peers read, and into `own_out`, and signal the peers.

        In a capture the main queue copies, before it computes. A copy within a device is a kernel there, which on the
        copy queue would wait until a concurrent GEMM has left the device, and the peers with it.

        Returns:
            The number of the call, and the memory of each rank's shard.
        """
        streams, state = self._streams, self._state
        number = self._begin(x.nbytes)
        shards = self._gather_buffer(state.gathers % BUFFERS, x.shape, x.dtype)
        state.gathers += 1
        if self._is_capturing:
            if state.gathered is not None:
                streams.stream_wait("main", state.gathered)
            streams.copy(shards[self.rank], x, "main")
            if own_out is not None:
                streams.copy(own_out, x, "main")
            self._copy_waits_for_main()
        else:
            streams.copy(shards[self.rank], x, "copy")
        for step in range(1, self.size):
            streams.signal((self.rank - step) % self.size, number)  # in the order in which peers need the shard
        return number, shards

    def gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """All-gather x [n, ...] on dimension 0, overlapped with later work; the returned function waits for it."""
        streams = self._streams
        out = x.new_empty((self.size, *x.shape))
        self._copy_waits_for_main()
        number, shards = self._send(x, out[self.rank])
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            streams.wait_for(peer, number)
            streams.copy(out[peer], shards[peer])
        if not self._is_capturing:
            streams.copy(out[self.rank], x)
        last = self._end()
        self._state.gathered = last

        def wait(source: torch.Tensor = x) -> torch.Tensor:  # keeps x alive until it has been copied
            self._await(last)
            return out.flatten(0, 1)

        return wait

    def gather_resident(self, out: torch.Tensor, shards: Sequence[torch.Tensor]) -> Callable[[], None]:
        """All-gather shards[rank] of every rank, views of `resident`, into out [size, *shape of a shard].

        It overlaps with later work; the returned function waits for it. This rank's shard may be written by work that
        was submitted before, and not again before `meet`.
        """
        streams = self._streams
        number = self._begin(shards[self.rank].nbytes)
        self._copy_waits_for_main()
        for step in range(1, self.size):
            streams.signal((self.rank - step) % self.size, number)  # in the order in which peers need the shard
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            streams.wait_for(peer, number)
            streams.copy(out[peer], shards[peer])
        streams.copy(out[self.rank], shards[self.rank])
        last = self._end()
        return lambda: self._await(last)

    def reduce_resident(self, parts: Sequence[torch.Tensor], staging: torch.Tensor) -> Callable[[], None]:
        """Replace parts[rank] of this rank by the sum over ranks of their memory for it, views of `resident`.

        It overlaps with later work. The returned function waits for the sum, and until the peers have read what this
        rank has for them. Sums are in the order of ranks, on the side stream.

        Args:
            parts: every rank's memory of the part that this rank reduces [count].
            staging: this rank's memory for two pieces of the other ranks' parts [2, size - 1, elements of a piece].
        """
        streams = self._streams
        own = parts[self.rank]
        number = self._begin(own.nbytes)
        self._copy_waits_for_main()
        for step in range(1, self.size):
            streams.signal((self.rank - step) % self.size, number)
        piece = staging.shape[-1]
        for index, start in enumerate(range(0, len(own), piece)):
            stop = min(start + piece, len(own))
            half = index % 2
            if self._staging_sums[half] is not None:
                streams.stream_wait("copy", self._staging_sums[half])
            received = staging[half, :, : stop - start]
            for step in range(1, self.size):
                peer = (self.rank + step) % self.size
                if not start:
                    streams.wait_for(peer, number)
                row = peer if peer < self.rank else peer - 1
                streams.copy(received[row], parts[peer][start:stop])
            streams.stream_wait("side", streams.record_event("copy"))
            streams.compute(partial(sum_over_peers, own[start:stop], received, self.rank), "side")
            self._staging_sums[half] = streams.record_event("side")
        summed = streams.record_event("side")
        self._meet()
        is_read = streams.record_event("copy")

        def wait() -> None:
            self._await(is_read)
            streams.stream_wait("main", summed)

        return wait

    def meet(self) -> None:
        """Let later work wait until every peer has ended its earlier calls, and so reads `resident` no more."""
        self._meet()
        self._await(self._streams.record_event("copy"))

    def gather_and_consume(
        self, x: torch.Tensor, consume: Callable[[torch.Tensor, int], Any], keep_own: bool
    ) -> torch.Tensor:
        """All-gather x [n, ...], calling consume(shard, rank) for each rank's shard as soon as it arrives.

        Returns:
            The gathered tensor [size * n, ...]; without `keep_own` this rank's own shard of it stays unwritten.
        """
        streams = self._streams
        out = x.new_empty((self.size, *x.shape))
        if self._is_capturing:
            number, shards = self._send(x, out[self.rank] if keep_own else None)
            self._compute(consume, x, self.rank)  # needs no communication
        else:
            # The GEMM is launched before the copies, because the device waits for the host here.
            self._copy_waits_for_main()
            self._compute(consume, x, self.rank)
            number, shards = self._send(x, None)
            if keep_own:
                streams.copy(out[self.rank], x)
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            streams.wait_for(peer, number)
            streams.copy(out[peer], shards[peer])
            if self.on_side_stream and step % 2:
                queue = "side"
            else:
                queue = "main"
            self._await(streams.record_event("copy"), queue)
            self._compute(consume, out[peer], peer, queue=queue)
        if self.on_side_stream:
            streams.stream_wait("main", streams.record_event("side"))
        self._state.gathered = self._end()  # main has waited for the last copy, itself or through the side stream
        return out.flatten(0, 1)

    # scatter --------------------------------------------------------------------------------------------------------

    def _begin_scatter(self, shape: Sequence[int], dtype: torch.dtype) -> tuple[int, int, list[torch.Tensor]]:
        """Start a scatter whose memory main may write.

        Returns:
            The number of the call, its buffer index, and every rank's memory.
        """
        state = self._state
        number = self._begin(math.prod(shape) * dtype.itemsize)
        index = state.scatters % BUFFERS
        state.scatters += 1
        if index in self._unread:
            raise RuntimeError("a scatter's result must be waited for before the next scatter but one")
        if index in state.free:  # not timed, because peers have long read this buffer
            self._streams.stream_wait("main", state.free.pop(index))
        return number, index, self._scatter_buffer(index, shape, dtype)

    def all_to_all(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send each rank its part and receive all ranks' parts for this one, overlapped with later work.

        write(out, rank) writes one part, of `shape`, at a time. A part travels while the next one is written; this
        rank's own part is written last and needs no copy.

        Returns:
            A function that waits and returns the received parts, [size * shape[0], ...] in the order of ranks.
        """
        streams = self._streams
        number, index, parts = self._begin_scatter(shape, like.dtype)
        received = like.new_empty((self.size, *shape))
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            source = (self.rank - step) % self.size
            self._compute(write, parts[self.rank][peer], peer)
            self._copy_waits_for_main()
            streams.signal(peer, number)
            streams.wait_for(source, number)
            streams.copy(received[source], parts[source][self.rank])
        self._compute(write, received[self.rank], self.rank)
        last = self._end(index)

        def wait() -> torch.Tensor:
            self._await(last)
            return received.flatten(0, 1)

        return wait

    def scatter(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Reduce-scatter what write(out [size, *shape], None) writes, overlapped with later work.

        Returns:
            A function that waits and returns the sum over ranks of their parts for this rank, of `shape`.
        """
        streams = self._streams
        number, index, parts = self._begin_scatter(shape, like.dtype)
        own_parts = parts[self.rank]
        has_two_ranks = self.size == 2
        received = like.new_empty((1 if has_two_ranks else self.size, *shape))
        self._compute(write, own_parts, None)
        self._copy_waits_for_main()
        for step in range(1, self.size):
            streams.signal((self.rank + step) % self.size, number)
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            streams.wait_for(source, number)
            streams.copy(received[0 if has_two_ranks else source], parts[source][self.rank])
        if not has_two_ranks:
            streams.copy(received[self.rank], own_parts[self.rank])
        last = self._end(index)
        self._unread.add(index)

        def wait() -> torch.Tensor:
            self._unread.discard(index)
            self._await(last)
            if has_two_ranks:
                streams.compute(lambda: torch.add(own_parts[self.rank], received[0], out=received[0]))
                return received[0]
            out = torch.empty_like(received[0])
            streams.compute(lambda: torch.sum(received, 0, out=out))
            return out

        return wait

    def scatter_now(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter without later work to hide it, and wait.

        Each of two ranks first computes its peer's part, which travels while the rank computes its own part:
        write(out, rank) writes one part, of `shape`, at a time. Two GEMMs of half the rows take as long as one
        (dev/log.md, 2026-11-25). Among more ranks parts would be too small to fill the device.
        """
        if self.size > 2:
            return self.scatter(write, shape, like)()
        streams = self._streams
        peer = 1 - self.rank
        number, index, parts = self._begin_scatter(shape, like.dtype)
        received = like.new_empty(tuple(shape))
        own_part = like.new_empty(tuple(shape))
        self._compute(write, parts[self.rank][peer], peer)
        self._copy_waits_for_main()
        streams.signal(peer, number)
        self._compute(write, own_part, self.rank)
        streams.wait_for(peer, number)
        streams.copy(received, parts[peer][self.rank])
        self._await(self._end(index))
        streams.compute(lambda: torch.add(own_part, received, out=own_part))
        return own_part
