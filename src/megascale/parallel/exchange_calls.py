"""Numbered calls of the ranks of a group on one host: signals, waits and captures, without the data that calls move.

Every rank has one flag for each peer. A call writes its data into this rank's memory and then sets this rank's flag at
each peer to the number of the call. A peer that sees the number copies the data. The stream of copies itself writes and
awaits the flags, so that no SM waits.

No barrier is needed. Calls are numbered, each signals each peer exactly once, and memory is double-buffered. Before a
rank overwrites the data of call n, it has seen the number of a later call from every peer. A peer sends that number
only after its copies of call n.

Calls can be captured in a CUDA graph and replayed (`capture`). A replay would repeat the numbers of the first replay,
so captured calls have flags of their own: two for each peer, used in turn. A signal sets a flag to 1, and the waiting
rank sets it to 0 again. A peer signals call n + 2 after it has seen call n + 1 of this rank. This rank sends call n + 1
after it has set the flag of call n to 0, so no signal is lost. A capture has an even number of calls, the last of which
carries no data. When that call has ended, no rank reads the memory of the capture, and the next capture can begin with
the same flag and the same buffer.

A peer that dies or hangs sets no flag. The exchange's watch (peer_watch.py) then ends the waits of this rank, in graphs
too, and the next call, replay or `check` raises TrainingError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megascale.core.spans import SpanAxis, SpanKind
from megascale.parallel.copy_plan import CopyPlan, Operation, choose_plan
from megascale.parallel.exchange_streams import PeerCopy, Streams, copy_in_pieces, fork_copies, join_copies
from megascale.parallel.peer_watch import PeerWatch
from megascale.parallel.runtime import Runtime


@dataclass
class CapturedCalls:
    """Statistics of the calls that were captured together.

    Attributes:
        nbytes: bytes that the gathers and scatters move, over all ranks.
    """

    nbytes: int = 0


@dataclass
class CallState:
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


class ExchangeCalls:
    """One rank's calls. Calls do not nest, and results are awaited in the order of calls.

    Args:
        rank, size: this rank's index in the group, and the number of ranks, at least two.
        kind: axis of the grid whose waits the timers record.

    Attributes:
        watch: ends waits for a peer that has died; None without processes to watch.
        copy_plan: order of the copies of all calls, for measurements; None: chosen by the bytes of a part. Ranks may
            have different plans, but not other values of `awaits_in_kernel`.
        next_peers: the other ranks, from `rank + 1` on. Ranks begin with different peers, so that each GPU serves one
            peer at a time.
        previous_peers: the other ranks, from `rank - 1` on: the order in which the peers reach this rank.
    """

    def __init__(
        self, rank: int, size: int, streams: Streams, runtime: Runtime | None = None, kind: SpanAxis = SpanAxis.TENSOR
    ) -> None:
        self.rank = rank
        self.size = size
        self.next_peers = [(rank + step) % size for step in range(1, size)]
        self.previous_peers = [(rank - step) % size for step in range(1, size)]
        self.watch: PeerWatch | None = None
        self.copy_plan: CopyPlan | None = None
        self._streams = streams
        self._runtime = runtime or Runtime()
        self._kind = kind
        self._begun_count = 0
        self._state = CallState()
        self._is_computing = False  # whether the work of a call is running
        self._is_capturing = False
        self._empty_call_number = 0  # number of the last eager call without data
        self._unread_buffers: set[int] = set()  # buffers of scatters whose result was not awaited

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

    # parts of a call ------------------------------------------------------------------------------------------------

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

    def _make_empty_call(self) -> None:
        """Make a call without data. When it ends, every peer has ended all earlier calls."""
        number = self._begin_call()
        self._copy_waits_for_main()  # main may be reading a peer's memory
        self._meet(number)
        self._end_call()  # no caller needs its event

    def _meet(self, number: int) -> None:
        """Signal all peers, and wait for the signals of all."""
        for peer in self.next_peers:
            self._streams.signal(peer, number)
        for peer in self.previous_peers:
            self._streams.wait_for(peer, number)

    # copies ---------------------------------------------------------------------------------------------------------

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
        queues = fork_copies(streams, self.size, plan)
        for copy, queue in zip(copies, queues, strict=True):
            if not plan.waits_first:
                streams.wait_for(copy.peer, number, queue)
            if not plan.piece_bytes:
                streams.copy(copy.to, copy.source, queue)
        if plan.piece_bytes:
            copy_in_pieces(streams, copies, queues, plan.piece_bytes)
        join_copies(streams, queues)
        return signalled_event

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
        self._state = CallState()
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
