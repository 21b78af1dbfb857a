"""Gather, scatter and all-to-all of a group on one host by peer-to-peer copies, overlapped with GEMMs.

Every rank has memory that its peers read, and one flag for each peer. A call writes its data into this rank's memory
and then sets this rank's flag at each peer to the number of the call. A peer that sees the number copies the data.
Copies run on a stream of their own, by copy engines. The stream itself writes and awaits the flags, so that the GEMM
that runs meanwhile keeps all SMs (MegaScale section 3.2, Figure 3c; Flux, arXiv 2406.06858, on the cost of cutting a
GEMM).

No barrier is needed. Calls are numbered, each signals each peer exactly once, and memory is double-buffered. Before a
rank overwrites the data of call n, it has seen the number of a later call from every peer. A peer sends that number
only after its copies of call n. Gathers and scatters have separate buffers, since a backward pass gathers and scatters
at the same time.

Calls can be captured in a CUDA graph and replayed (`capture`). A replay would repeat the numbers of the first replay,
so captured calls have flags of their own: two for each peer, used in turn. A signal sets a flag to 1, and the waiting
rank sets it to 0 again. A peer signals call n + 2 after it has seen call n + 1 of this rank. This rank sends call n + 1
after it has set the flag of call n to 0, so no signal is lost. A capture has an even number of calls, the last of which
carries no data. When that call has ended, no rank reads the memory of the capture, and the next capture can begin with
the same flag and the same buffer.

Memory that a rank changes rarely, such as its shard of the parameters, is gathered without a copy into a buffer
(`gather_from_peers`). A rank changes it only after `wait_for_peer_reads`, when every peer has ended its earlier calls.
Gradients are reduced without a copy into a buffer too (`reduce_from_peers`). Such a call ends when the peers have read
them.

The copies of a gather can also be pushes into memory of the exchange (`gather` with `lend`, in captures). A push needs
no flag before its copies, and the shard is not copied for the peers. Results lie in two slots in turn. A rank pushes
result n + 2 after it has seen the flag of result n + 1 from every peer. A peer sends that flag after its main queue has
read result n, because a lent result may be read only before the next lent gather begins. A capture ends with a call
without data, so the next capture pushes after all reads in this one. Reads after the capture would have no such flag.

A peer that dies or hangs sets no flag. The exchange's watch (peer_watch.py) then ends the waits of this rank, in graphs
too, and the next call, replay or `check` raises TrainingError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from megascale.core.spans import SpanAxis, SpanKind
from megascale.ops.peer_max import PeerMax
from megascale.ops.peer_sum import MAX_RANKS, PeerSum, can_sum_parts, sum_over_peers, sum_parts
from megascale.parallel.copy_plan import PUSHED, TWO_QUEUES, CopyPlan, Operation, choose_plan
from megascale.parallel.peer_watch import PeerWatch
from megascale.parallel.runtime import Runtime

BUFFERS = 2  # buffers for gathers, and as many for scatters: peers may still read the previous one
LENT_SLOTS = 2  # results of gathers that lie in memory of the exchange, used in turn
_ALIGN_BYTES = 512  # alignment of lent slots
_LOADED_ELEMENTS = 4096  # of each addend in the launch that loads a kernel; a multiple of 16, like those of a scatter


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


# A function write(out, rank) that writes into `out` the part of a result that `rank` receives. With rank=None it writes
# the parts of all ranks.
WriteParts = Callable[[torch.Tensor, int | None], Any]


class PeerCopy(NamedTuple):
    """A copy of `source`, in the memory of `peer`, to `to`; both are contiguous."""

    peer: int
    to: torch.Tensor
    source: torch.Tensor


class _Scatter(NamedTuple):
    """A scatter or an all-to-all that has begun.

    Attributes:
        parts: every rank's buffer [size, *shape of a part]. `parts[r][q]` is the part that rank r sends to rank q.
    """

    call_number: int
    buffer_index: int
    parts: list[torch.Tensor]


@dataclass
class CapturedCalls:
    """Statistics of the calls that were captured together.

    Attributes:
        nbytes: bytes that the gathers and scatters move, over all ranks.
    """

    nbytes: int = 0


@dataclass
class _CallState:
    """Progress of a sequence of calls. Every capture has a sequence of its own.

    Attributes:
        gather_count, scatter_count: number of gathers and scatters so far, which chooses the buffer of the next one.
        lent_count: number of pushed results so far, which chooses the slot of the next one.
        nbytes: bytes that the calls move, over all ranks.
        gather_event: event on copy after which peers have read the gather before the last one.
        open_buffers: indices of scatter buffers that peers may still read until the next call ends.
        free_events: by index of a scatter buffer, the event on copy after which no rank reads the buffer.
    """

    call_number: int = 0
    gather_count: int = 0
    scatter_count: int = 0
    lent_count: int = 0
    nbytes: int = 0
    gather_event: Any = None
    open_buffers: set[int] = field(default_factory=set)
    free_events: dict[int, Any] = field(default_factory=dict)


def list_copy_queues(size: int) -> list[str]:
    """Return the queues of copies of a group of `size` ranks: one per other rank."""
    return ["copy"] + [f"copy {index}" for index in range(1, size - 1)]


class Exchange:
    """One rank's end of a group's exchange. Calls do not nest, and results are awaited in the order of calls.

    Args:
        rank, size: this rank's index in the group, and the number of ranks, at least two.
        memory: memory of each rank, uint8 [`count_buffer_bytes`].
        shard_bytes: size of the largest shard that will be gathered or scattered.
        owner: an object that must live as long as the exchange, such as the memory's owner.
        on_side_stream: consume every second shard on the side stream, so that two GEMMs fill the device together; may
            be changed between steps.
        kind: axis of the grid whose waits the timers record.
        peer_memory: additional memory of each rank, which peers read without a copy into a buffer, uint8.
        lent_memory: memory of each rank for results that peers push, uint8 [`count_lent_bytes`]; empty: no call pushes.

    Attributes:
        peer_max: computes the maximum of a number over ranks; None if the device does not support that.
        peer_sum: sums parts over ranks and awaits them; None if the device does not support that.
        watch: ends waits for a peer that has died; None without processes to watch.
        copy_plan: order of the copies of all calls, for measurements; None: chosen by the bytes of a part. Ranks may
            have different plans, but not other values of `awaits_in_kernel`.
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
        peer_memory: Sequence[torch.Tensor] = (),
        lent_memory: Sequence[torch.Tensor] = (),
    ) -> None:
        self._lent_memory = lent_memory
        self.peer_memory = peer_memory
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
        self.peer_sum: PeerSum | None = None
        self.watch: PeerWatch | None = None
        self.copy_plan: CopyPlan | None = None
        self._begun_count = 0
        self._state = _CallState()
        self._is_computing = False  # whether the work of a call is running
        self._is_capturing = False
        self._empty_call_number = 0  # number of the last eager call without data
        self._loaded_sums: set[torch.dtype] = set()  # types whose kernel for captured scatters has been launched
        self._unread_buffers: set[int] = set()  # buffers of scatters whose result was not awaited
        self._views: dict[Any, list[torch.Tensor]] = {}
        # By half of the staging memory: the event on side after which the last sum has read it.
        self._staging_sum_events: list[Any] = [None, None]
        self._staged_half = 0  # half of the staging memory for the next piece

    @staticmethod
    def count_buffer_bytes(size: int, shard_bytes: int) -> int:
        """Return the bytes of the gather and scatter buffers of one rank."""
        return BUFFERS * (1 + size) * shard_bytes

    @staticmethod
    def count_lent_bytes(size: int, shard_bytes: int) -> int:
        """Return the bytes of the slots of pushed results of one rank."""
        return LENT_SLOTS * size * (-(-shard_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)

    def _gather_buffer(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's buffer of a gather as a view of `shape`."""
        return self._buffer_views(index * self.shard_bytes, shape, dtype, math.prod(shape))

    def _scatter_buffer(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's buffer of a scatter as a view [size, *shape]."""
        start = (BUFFERS + index * self.size) * self.shard_bytes
        return self._buffer_views(start, (self.size, *shape), dtype, math.prod(shape))

    def _buffer_views(
        self, start: int, shape: Sequence[int], dtype: torch.dtype, shard_elements: int
    ) -> list[torch.Tensor]:
        """Return views of `shape` of every rank's memory, from byte `start` on.

        Raises ValueError if a shard of `shard_elements` elements does not fit in a buffer.
        """
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

    def _begin_call(self, nbytes: int = 0) -> int:
        """Start a call that moves a shard of `nbytes`, and return the call's number."""
        if self._is_computing:
            # The new call's signals would precede those of the enclosing call, which has a lower number.
            raise RuntimeError("a call of the exchange was started within the work of another call; start it later")
        self.check()
        self._begun_count += 1
        self._state.call_number += 1
        self._state.nbytes += nbytes * self.size
        return self._state.call_number

    def _run_work(self, work: Callable[..., Any], *args: Any, queue: str = "main") -> None:
        """Run the caller's work within a call. The work may not start another call."""

        def guarded() -> None:
            self._is_computing = True
            try:
                work(*args)
            finally:
                self._is_computing = False

        self._streams.compute(guarded, queue)

    def _end_call(self, scatter_index: int | None = None) -> Any:
        """Return an event on the copy queue at the end of the call.

        By then every peer has signalled this call, and so has ended the copies of its earlier calls.

        Args:
            scatter_index: index of the scatter buffer that the call has written.
        """
        event = self._streams.record_event("copy")
        state = self._state
        state.free_events |= dict.fromkeys(state.open_buffers, event)
        state.open_buffers = set() if scatter_index is None else {scatter_index}
        return event

    def _await(self, event: Any, queue: str = "main") -> None:
        """Let a queue wait for copies, which wait for peers. The waits of main are timed."""
        if queue != "main":
            self._streams.stream_wait(queue, event)
            return
        recorder = self._runtime.recorder
        start = recorder.mark()
        self._streams.stream_wait("main", event)
        recorder.record_wait(start, SpanKind.WAIT, self._kind)

    def _copy_waits_for_main(self) -> None:
        """Let the copy queue wait for the work that main has so far."""
        self._streams.stream_wait("copy", self._streams.record_event("main"))

    def _choose_plan(self, operation: Operation) -> CopyPlan:
        """Return the order of the copies of a call."""
        if self.copy_plan is not None:
            return self.copy_plan
        return choose_plan(operation, self._is_capturing, self.size)

    def _copy_from_peers(self, copies: Sequence[PeerCopy], number: int, plan: CopyPlan) -> Any:
        """Copy from each peer when it has signalled the call, in the order of `plan`.

        Returns:
            An event after which all peers have signalled the call, or None if that is the end of the call.
        """
        streams = self._streams
        signalled_event = None
        if plan.waits_first:
            for copy in copies:
                streams.wait_for(copy.peer, number)
            if self._is_capturing:
                signalled_event = streams.record_event("copy")
        queues = self._fork_copies(plan)
        for copy, queue in zip(copies, queues, strict=True):
            if not plan.waits_first:
                streams.wait_for(copy.peer, number, queue)
            if not plan.piece_bytes:
                streams.copy(copy.to, copy.source, queue)
        if plan.piece_bytes:
            self._copy_in_pieces(copies, queues, plan.piece_bytes)
        self._join_copies(queues)
        return signalled_event

    def _copy_in_pieces(self, copies: Sequence[PeerCopy], queues: Sequence[str], piece_bytes: int) -> None:
        """Copy a piece from each peer, then the next piece from each. All parts have the same length."""
        length = copies[0].to.numel()
        step = max(1, piece_bytes // copies[0].to.itemsize)
        for start in range(0, length, step):
            for copy, queue in zip(copies, queues, strict=True):
                to = copy.to.flatten()[start : start + step]
                source = copy.source.flatten()[start : start + step]
                self._streams.copy(to, source, queue)

    def _fork_copies(self, plan: CopyPlan) -> list[str]:
        """Return the queue of the copy from each peer, in the order of copies."""
        names = list_copy_queues(self.size)
        names = names[: plan.queues or len(names)]
        if len(names) > 1:
            start = self._streams.record_event("copy")
            for queue in names[1:]:
                self._streams.stream_wait(queue, start)
        return [names[index % len(names)] for index in range(self.size - 1)]

    def _join_copies(self, queues: Sequence[str]) -> None:
        """Let copy wait for the copies in these queues."""
        for queue in dict.fromkeys(queues):
            if queue != "copy":
                self._streams.stream_wait("copy", self._streams.record_event(queue))

    def count_calls(self) -> int:
        """Return the number of calls and replays that have begun."""
        return self._begun_count

    def check(self) -> None:
        """Raise TrainingError if a peer has died or hangs: results of earlier calls are then undefined."""
        if self.watch is not None:
            self.watch.check()

    def call_on_failure(self, action: Callable[[], None]) -> None:
        """Call `action` before the waits of this rank are released, or now if they have been."""
        if self.watch is not None:
            self.watch.call_on_failure(action)

    def close(self, failed: bool = False) -> None:
        """Stop watching the peers. Unless `failed`, the peers regard the end of this rank as planned."""
        if self.watch is not None:
            self.watch.close(failed)

    # captures -------------------------------------------------------------------------------------------------------

    @contextmanager
    def capture(self) -> Iterator[CapturedCalls]:
        """Capture the enclosed calls instead of running them. All ranks must capture the same calls.

        All ranks must replay a capture at the same position among the calls of the group, after `before_replay`. No
        call may be in flight when the capture begins or ends.
        """
        if self._unread_buffers:
            raise RuntimeError("a capture of the exchange began before the result of a scatter was awaited; await it")
        calls = CapturedCalls()
        eager_state = self._state
        self._state = _CallState()
        self._is_capturing = True
        self._streams.capture(True)
        try:
            yield calls
            # At least one empty call, so that peers end their copies, and an even number of calls in total.
            for _ in range(2 - self._state.call_number % 2):
                self._make_empty_call()
            self._await(self._streams.record_event("copy"))
            calls.nbytes = self._state.nbytes
        finally:
            self._streams.capture(False)
            self._is_capturing = False
            self._unread_buffers.clear()
            self._state = eager_state

    def before_replay(self) -> None:
        """Wait until all ranks have ended earlier calls, because a replay may write all buffers at once."""
        self.check()
        self._begun_count += 1
        if self._state.call_number != self._empty_call_number:
            self._make_empty_call()
            self._await(self._streams.record_event("copy"))
            self._empty_call_number = self._state.call_number

    def after_replay(self) -> None:
        """Let the copy queue wait for the replay, so that the watch sees the replay in flight."""
        self._copy_waits_for_main()

    def _make_empty_call(self) -> None:
        """Make a call without data. When it ends, every peer has ended all earlier calls."""
        number = self._begin_call()
        self._copy_waits_for_main()  # main may be reading a peer's memory
        self._meet(number)
        self._end_call()  # no caller needs its event

    def _meet(self, number: int) -> None:
        """Signal all peers, and wait for the signals of all."""
        for step in range(1, self.size):
            self._streams.signal((self.rank + step) % self.size, number)
        for step in range(1, self.size):
            self._streams.wait_for((self.rank - step) % self.size, number)

    # gather ---------------------------------------------------------------------------------------------------------

    def _publish_shard(self, x: torch.Tensor, own_out: torch.Tensor | None) -> tuple[int, list[torch.Tensor]]:
        """Begin a gather: copy x into the memory that peers read, and signal the peers.

        In a capture, x is copied on the main queue before main computes, and also into `own_out`, while the peers read.
        The reason is that a captured copy within a device is a kernel: on the copy queue it would wait until a
        concurrent GEMM has left the device, and the peers would wait for it.

        Returns:
            The number of the call, and the memory of each rank's shard.
        """
        streams, state = self._streams, self._state
        number = self._begin_call(x.nbytes)
        shards = self._gather_buffer(state.gather_count % BUFFERS, x.shape, x.dtype)
        state.gather_count += 1
        if self._is_capturing:
            if state.gather_event is not None:
                streams.stream_wait("main", state.gather_event)
            streams.copy(shards[self.rank], x, "main")
            self._copy_waits_for_main()
            if own_out is not None:
                streams.copy(own_out, x, "main")
        else:
            streams.copy(shards[self.rank], x, "copy")
        for step in range(1, self.size):
            streams.signal((self.rank - step) % self.size, number)  # in the order in which peers need the shard
        return number, shards

    def gather(self, x: torch.Tensor, lend: bool = False) -> Callable[[], torch.Tensor]:
        """All-gather x [n, ...] on dimension 0, overlapped with later work.

        Args:
            lend: whether the result may lie in memory of the exchange. Its reads must then be submitted to main before
                this rank begins its next gather with `lend`, and within the capture.

        Returns:
            A function that waits and returns the gathered tensor [size * n, ...].
        """
        if lend and self._is_capturing and self._lent_memory:
            return self._push_gather(x)
        streams = self._streams
        out = x.new_empty((self.size, *x.shape))
        self._copy_waits_for_main()
        number, shards = self._publish_shard(x, out[self.rank])
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        copies = [PeerCopy(peer, out[peer], shards[peer]) for peer in peers]
        signalled_event = self._copy_from_peers(copies, number, self._choose_plan("gather"))
        if not self._is_capturing:
            streams.copy(out[self.rank], x)
        end = self._end_call()
        self._state.gather_event = signalled_event or end

        def wait(source: torch.Tensor = x) -> torch.Tensor:  # the default keeps x alive until it has been copied
            self._await(end)
            return out.flatten(0, 1)

        return wait

    def _push_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Gather by pushes into the peers' slots."""
        streams = self._streams
        number = self._begin_call(x.nbytes)
        slots = self._next_slots(x.shape, x.dtype)
        self._copy_waits_for_main()
        self._push([PeerCopy(peer, slots[peer][self.rank], x) for peer in self._list_next_peers()])
        streams.copy(slots[self.rank][self.rank], x, "main")
        self._meet(number)
        end = self._end_call()

        def wait(source: torch.Tensor = x) -> torch.Tensor:  # the default keeps x alive until it has been copied
            self._await(end)
            return slots[self.rank].flatten(0, 1)

        return wait

    def _list_next_peers(self) -> list[int]:
        """Return the peers in the order in which this rank serves them. Ranks begin with different peers."""
        return [(self.rank + step) % self.size for step in range(1, self.size)]

    def _next_slots(self, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's slot of the next pushed result, as views [size, *shape]."""
        slot_bytes = len(self._lent_memory[0]) // LENT_SLOTS
        nbytes = self.size * math.prod(shape) * dtype.itemsize
        if nbytes > slot_bytes:
            raise ValueError(f"a pushed result has {nbytes} bytes; this exchange was made for {slot_bytes}")
        start = self._state.lent_count % LENT_SLOTS * slot_bytes
        self._state.lent_count += 1
        views = [memory[start : start + nbytes].view(dtype) for memory in self._lent_memory]
        return [view.view((self.size, *shape)) for view in views]

    def _push(self, copies: Sequence[PeerCopy]) -> None:
        """Copy to each peer; the copies' `to` lies in the peer's memory."""
        plan = self.copy_plan or PUSHED
        queues = self._fork_copies(plan)
        self._copy_in_pieces(copies, queues, plan.piece_bytes or copies[0].to.nbytes)
        self._join_copies(queues)

    def gather_from_peers(self, out: torch.Tensor, shards: Sequence[torch.Tensor]) -> Callable[[], None]:
        """All-gather shards[rank] of every rank, views of `peer_memory`, into out [size, *shape of a shard].

        The gather overlaps with later work. Work that was submitted before may write this rank's shard, and later work
        only after `wait_for_peer_reads`.

        Returns:
            A function that waits for the gather.
        """
        streams = self._streams
        number = self._begin_call(shards[self.rank].nbytes)
        self._copy_waits_for_main()
        for step in range(1, self.size):
            streams.signal((self.rank - step) % self.size, number)  # in the order in which peers need the shard
        for step in range(1, self.size):
            peer = (self.rank + step) % self.size
            streams.wait_for(peer, number)
            streams.copy(out[peer], shards[peer])
        streams.copy(out[self.rank], shards[self.rank])
        end = self._end_call()
        return lambda: self._await(end)

    def reduce_from_peers(
        self,
        parts: Sequence[torch.Tensor],
        staging: torch.Tensor,
        add: Callable[[int, int, torch.Tensor], Any],
        prepare: Callable[[], Any] | None = None,
    ) -> Callable[[], None]:
        """Bring all other ranks' addends of this rank's part of a tensor, and add them on the side stream.

        The reduction overlaps with later work.

        Args:
            parts: every rank's addend of the part that this rank reduces [elements], as views of `peer_memory`.
            staging: memory of this rank for two pieces of the peers' addends [2, size - 1, elements of a piece]. One
                half is filled while the other one is added.
            add: add(start, stop, received) adds the other ranks' elements start:stop of the part, in the order of
                ranks [size - 1, stop - start].
            prepare: writes this rank's addends of all parts, on the side stream; None: they have been written.

        Returns:
            A function that waits for the sums, and until the peers have read this rank's addends.
        """
        streams = self._streams
        number = self._begin_call(parts[self.rank].nbytes)
        self._copy_waits_for_main()
        if prepare is not None:
            streams.stream_wait("side", streams.record_event("main"))
            streams.compute(prepare, "side")
            streams.stream_wait("copy", streams.record_event("side"))
        for step in range(1, self.size):
            streams.signal((self.rank - step) % self.size, number)
        piece_length = staging.shape[-1]
        length = len(parts[self.rank])
        for start in range(0, length, piece_length):
            stop = min(start + piece_length, length)
            half = self._staged_half  # calls with a single piece use both halves in turn too
            self._staged_half = 1 - half
            if self._staging_sum_events[half] is not None:
                streams.stream_wait("copy", self._staging_sum_events[half])
            received = staging[half, :, : stop - start]
            for step in range(1, self.size):
                peer = (self.rank + step) % self.size
                if start == 0:  # the flag of a call is awaited once
                    streams.wait_for(peer, number)
                row = peer if peer < self.rank else peer - 1  # `received` has no row for this rank
                streams.copy(received[row], parts[peer][start:stop])
            streams.stream_wait("side", streams.record_event("copy"))
            streams.compute(partial(add, start, stop, received), "side")
            self._staging_sum_events[half] = streams.record_event("side")
        sum_event = streams.record_event("side")
        self._make_empty_call()  # it ends when the peers have read this rank's addends
        read_event = streams.record_event("copy")

        def wait() -> None:
            self._await(read_event)
            streams.stream_wait("main", sum_event)

        return wait

    def wait_for_peer_reads(self) -> None:
        """Let later work wait until every peer has ended its earlier calls and no longer reads `peer_memory`."""
        self._make_empty_call()
        self._await(self._streams.record_event("copy"))

    def gather_and_consume(
        self, x: torch.Tensor, consume: Callable[[torch.Tensor, int], Any], keep_own: bool
    ) -> torch.Tensor:
        """All-gather x [n, ...], and call consume(shard, rank) for each rank's shard as soon as the shard has arrived.

        Returns:
            The gathered tensor [size * n, ...]. Without `keep_own` this rank's rows of it stay unwritten.
        """
        streams = self._streams
        out = x.new_empty((self.size, *x.shape))
        if self._is_capturing:
            number, shards = self._publish_shard(x, out[self.rank] if keep_own else None)
            self._run_work(consume, x, self.rank)  # this rank's shard needs no communication
        else:
            # Launch the GEMM before the copies: the device has no other work, and waits for the host.
            self._copy_waits_for_main()
            self._run_work(consume, x, self.rank)
            number, shards = self._publish_shard(x, None)
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
            self._run_work(consume, out[peer], peer, queue=queue)
        if self.on_side_stream:
            streams.stream_wait("main", streams.record_event("side"))
        # Main has waited for the last copy, directly or through the side stream.
        self._state.gather_event = self._end_call()
        return out.flatten(0, 1)

    # scatter --------------------------------------------------------------------------------------------------------

    def _begin_scatter(self, shape: Sequence[int], dtype: torch.dtype) -> _Scatter:
        """Start a scatter of parts of `shape`, and let main wait until it may write into the scatter's buffer."""
        state = self._state
        number = self._begin_call(math.prod(shape) * dtype.itemsize)
        index = state.scatter_count % BUFFERS
        state.scatter_count += 1
        if index in self._unread_buffers:
            raise RuntimeError(
                "a scatter of the exchange began while two earlier scatters were not awaited; await the older one first"
            )
        if index in state.free_events:  # this wait is not timed: peers have read the buffer long ago
            self._streams.stream_wait("main", state.free_events.pop(index))
        return _Scatter(number, index, self._scatter_buffer(index, shape, dtype))

    def all_to_all(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Send a part to each rank and receive a part from each rank, overlapped with later work.

        write(out, rank) writes the part for `rank`, of `shape`, into `out`. A part is copied while the next one is
        written. This rank's own part is written last and needs no copy.

        Args:
            like: a tensor of the parts' type and device.

        Returns:
            A function that waits and returns the received parts, [size * shape[0], ...] in the order of ranks.
        """
        streams = self._streams
        number, index, parts = self._begin_scatter(shape, like.dtype)
        received = like.new_empty((self.size, *shape))
        peers = [(self.rank + step) % self.size for step in range(1, self.size)]
        sources = [(self.rank - step) % self.size for step in range(1, self.size)]
        copies = [PeerCopy(source, received[source], parts[source][self.rank]) for source in sources]
        plan = self._choose_plan("all_to_all")
        if plan.waits_first or plan.piece_bytes:
            for peer in peers:
                self._run_work(write, parts[self.rank][peer], peer)
            self._copy_waits_for_main()
            for peer in peers:
                streams.signal(peer, number)
            self._copy_from_peers(copies, number, plan)
        else:
            queues = self._fork_copies(plan)
            for peer, copy, queue in zip(peers, copies, queues, strict=True):
                self._run_work(write, parts[self.rank][peer], peer)
                streams.stream_wait(queue, streams.record_event("main"))
                streams.signal(peer, number, queue)
                streams.wait_for(copy.peer, number, queue)
                streams.copy(copy.to, copy.source, queue)
            self._join_copies(queues)
        self._run_work(write, received[self.rank], self.rank)
        end = self._end_call(index)

        def wait() -> torch.Tensor:
            self._await(end)
            return received.flatten(0, 1)

        return wait

    def scatter(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Reduce-scatter the tensor that write(out [size, *shape], None) writes, overlapped with later work.

        Returns:
            A function that waits and returns this rank's part, summed over ranks, of `shape`.
        """
        streams = self._streams
        plan = self._choose_plan("scatter")
        if not self._is_capturing and like.dtype not in self._loaded_sums:
            self._load_sum(like)
        number, index, parts = self._begin_scatter(shape, like.dtype)
        own_parts = parts[self.rank]
        self._run_work(write, own_parts, None)
        self._copy_waits_for_main()
        if plan.sum_programs:
            if self.size <= MAX_RANKS and can_sum_parts(like.device):
                return self._sum_from_peers(index, number, [part[self.rank] for part in parts], plan)
            plan = TWO_QUEUES
        for step in range(1, self.size):
            streams.signal((self.rank + step) % self.size, number)
        received = like.new_empty((self.size - 1, *shape))
        copies = []
        for step in range(1, self.size):
            source = (self.rank - step) % self.size
            row = source if source < self.rank else source - 1
            copies.append(PeerCopy(source, received[row], parts[source][self.rank]))
        self._copy_from_peers(copies, number, plan)
        end = self._end_call(index)
        self._unread_buffers.add(index)

        def wait() -> torch.Tensor:
            self._unread_buffers.discard(index)
            self._await(end)
            out = received[0]
            if self.size == 2:
                streams.compute(lambda: torch.add(own_parts[self.rank], received[0], out=out))
                return out
            out = torch.empty_like(received[0])
            local_part = own_parts[self.rank].flatten()
            rows = received.flatten(1)
            streams.compute(lambda: sum_over_peers(local_part, rows, self.rank, out.view(-1)))
            return out

        return wait

    def _load_sum(self, like: torch.Tensor) -> None:
        """Launch the kernel that sums captured scatters once, since a capture may not load a kernel."""
        self._loaded_sums.add(like.dtype)
        plan = choose_plan("scatter", is_captured=True, ranks=self.size)
        if plan.sum_programs and self.size <= MAX_RANKS and can_sum_parts(like.device):
            part = like.new_zeros(_LOADED_ELEMENTS)
            sum_parts([part] * self.size, torch.empty_like(part), plan.sum_programs)

    def _sum_from_peers(
        self, index: int, number: int, addends: Sequence[torch.Tensor], plan: CopyPlan
    ) -> Callable[[], torch.Tensor]:
        """Sum all ranks' addends of this rank's part by a kernel that reads them in the peers' memory.

        Args:
            index: index of the scatter's buffer.
            number: number of the scatter.

        Returns:
            A function that waits and returns the sum.
        """
        streams = self._streams
        out = torch.empty_like(addends[self.rank])
        parts = [addend.view(-1) for addend in addends]
        awaits_in_kernel = plan.awaits_in_kernel and self.peer_sum is not None
        if not awaits_in_kernel:
            self._meet(number)
        # The kernel's flags say that this rank has ended its earlier copies, as all flags do.
        streams.stream_wait("side", streams.record_event("copy"))
        if awaits_in_kernel:
            assert self.peer_sum is not None
            self.peer_sum(parts, out.view(-1), partial(streams.compute, queue="side"))
        else:
            streams.compute(lambda: sum_parts(parts, out.view(-1), plan.sum_programs), "side")
        # Later signals say that this rank no longer reads the addends.
        streams.stream_wait("copy", streams.record_event("side"))
        end = self._end_call(index)
        self._unread_buffers.add(index)

        def wait() -> torch.Tensor:
            self._unread_buffers.discard(index)
            self._await(end)
            return out

        return wait

    def scatter_now(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter and wait, if no later work can hide the copies. Return this rank's part, of `shape`.

        With two ranks, each rank first writes its peer's part, which is copied while the rank writes its own part:
        write(out, rank) writes the part for `rank`. Two GEMMs of half the rows take as long as one (dev/log.md,
        2026-11-25). With more ranks the parts would be too small to fill the device, and the call is `scatter`.
        """
        if self.size > 2:
            return self.scatter(write, shape, like)()
        streams = self._streams
        peer = 1 - self.rank
        number, index, parts = self._begin_scatter(shape, like.dtype)
        received = like.new_empty(tuple(shape))
        own_part = like.new_empty(tuple(shape))
        self._run_work(write, parts[self.rank][peer], peer)
        self._copy_waits_for_main()
        streams.signal(peer, number)
        streams.wait_for(peer, number)
        streams.copy(received, parts[peer][self.rank])
        self._run_work(write, own_part, self.rank)
        self._await(self._end_call(index))
        streams.compute(lambda: torch.add(own_part, received, out=own_part))
        return own_part
