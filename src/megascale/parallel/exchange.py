"""Gather, scatter and all-to-all of a group on one host by peer-to-peer copies, overlapped with GEMMs.

Every rank has memory that its peers read. Calls are numbered, and flags tell the peers of data (exchange_calls.py).
Copies run on a stream of their own, by copy engines, so that the GEMM that runs meanwhile keeps all SMs (MegaScale
section 3.2, Figure 3c; Flux, arXiv 2406.06858, on the cost of cutting a GEMM).

Gathers and scatters have separate buffers, since a backward pass gathers and scatters at the same time. Each kind has
two, since peers may still read the previous one. Parameters and gradients need no copy into a buffer
(peer_memory_calls.py).

The copies of a gather can also be pushes into memory of the exchange (`gather` with `lend`, in captures). A push needs
no flag before its copies, and the shard is not copied for the peers. Results lie in two slots in turn. A rank pushes
result n + 2 after it has seen the flag of result n + 1 from every peer. A peer sends that flag after its main queue has
read result n, because a lent result may be read only before the next lent gather begins. A capture ends with a call
without data, so the next capture pushes after all reads in this one. Reads after the capture would have no such flag.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from megascale.core.spans import SpanAxis
from megascale.ops.peer_max import PeerMax
from megascale.ops.peer_sum import MAX_RANKS, PeerSum, can_sum_parts, sum_over_peers, sum_parts
from megascale.parallel.copy_plan import PUSHED, TWO_QUEUES, CopyPlan, choose_plan
from megascale.parallel.exchange_buffers import BUFFERS, LENT_SLOTS, ExchangeBuffers
from megascale.parallel.exchange_streams import PeerCopy, Streams, copy_in_pieces, fork_copies, join_copies
from megascale.parallel.peer_memory_calls import PeerMemoryCalls
from megascale.parallel.runtime import Runtime

_LOADED_ELEMENTS = 4096  # of each addend in the launch that loads a kernel; a multiple of 16, like those of a scatter

# A function write(out, rank) that writes into `out` the part of a result that `rank` receives. With rank=None it writes
# the parts of all ranks.
WriteParts = Callable[[torch.Tensor, int | None], Any]


class _Scatter(NamedTuple):
    """A scatter or an all-to-all that has begun.

    Attributes:
        parts: every rank's buffer [size, *shape of a part]. `parts[r][q]` is the part that rank r sends to rank q.
    """

    call_number: int
    buffer_index: int
    parts: list[torch.Tensor]


class Exchange(PeerMemoryCalls):
    """One rank's end of a group's exchange. Calls do not nest, and results are awaited in the order of calls.

    Args:
        rank, size: this rank's index in the group, and the number of ranks, at least two.
        memory: memory of each rank, uint8 [`exchange_buffers.count_buffer_bytes`].
        shard_bytes: size of the largest shard that will be gathered or scattered.
        owner: an object that must live as long as the exchange, such as the memory's owner.
        on_side_stream: consume every second shard on the side stream, so that two GEMMs fill the device together; may
            be changed between steps.
        kind: axis of the grid whose waits the timers record.
        peer_memory: additional memory of each rank, which peers read without a copy into a buffer, uint8.
        lent_memory: memory of each rank for results that peers push, uint8 [`exchange_buffers.count_lent_bytes`];
            empty: no call pushes.

    Attributes:
        memory_bytes: bytes of this rank's memory that peers read. torch's memory statistics do not count them.
        peer_max: computes the maximum of a number over ranks; None if the device does not support that.
        peer_sum: sums parts over ranks and awaits them; None if the device does not support that.
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
        super().__init__(rank, size, streams, runtime=runtime, kind=kind, peer_memory=peer_memory)
        self.shard_bytes = shard_bytes
        self.memory_bytes = memory[rank].nbytes
        self.on_side_stream = on_side_stream
        self.peer_max: PeerMax | None = None
        self.peer_sum: PeerSum | None = None
        self._owner = owner
        self._buffers = ExchangeBuffers(memory, lent_memory, shard_bytes)
        self._loaded_sums: set[torch.dtype] = set()  # types whose kernel for captured scatters has been launched

    # gather ---------------------------------------------------------------------------------------------------------

    def gather(self, x: torch.Tensor, lend: bool = False) -> Callable[[], torch.Tensor]:
        """All-gather x [n, ...] on dimension 0, overlapped with later work.

        Args:
            lend: whether the result may lie in memory of the exchange. Its reads must then be submitted to main before
                this rank begins its next gather with `lend`, and within the capture.

        Returns:
            A function that waits and returns the gathered tensor [size * n, ...].
        """
        if lend and self._is_capturing and self._buffers.can_lend:
            return self._push_gather(x)
        streams = self._streams
        out = x.new_empty((self.size, *x.shape))
        self._copy_waits_for_main()
        number, shards = self._publish_shard(x, out[self.rank])
        copies = [PeerCopy(peer, out[peer], shards[peer]) for peer in self.next_peers]
        signalled_event = self._copy_from_peers(copies, number, self._choose_plan("gather"))
        if not self._is_capturing:
            streams.copy(out[self.rank], x)
        end = self._end_call()
        self._state.gather_event = signalled_event or end

        def wait(source: torch.Tensor = x) -> torch.Tensor:  # the default keeps x alive until it has been copied
            self._await(end)
            return out.flatten(0, 1)

        return wait

    def _publish_shard(self, x: torch.Tensor, local_out: torch.Tensor | None) -> tuple[int, list[torch.Tensor]]:
        """Begin a gather: copy x into the memory that peers read, and signal the peers.

        In a capture, x is copied on the main queue before main computes. While the peers read, x is also copied into
        `local_out`. A captured copy within a device is a kernel: on the copy queue it would wait until a concurrent
        GEMM has left the device, and the peers would wait for it.

        Returns:
            The number of the call, and the memory of each rank's shard.
        """
        streams = self._streams
        state = self._state
        number = self._begin_call(x.nbytes)
        shards = self._buffers.view_gather(state.gather_count % BUFFERS, x.shape, x.dtype)
        state.gather_count += 1
        if self._is_capturing:
            if state.gather_event is not None:
                streams.stream_wait("main", state.gather_event)
            streams.copy(shards[self.rank], x, "main")
            self._copy_waits_for_main()
            if local_out is not None:
                streams.copy(local_out, x, "main")
        else:
            streams.copy(shards[self.rank], x, "copy")
        for peer in self.previous_peers:  # in the order in which peers need the shard
            streams.signal(peer, number)
        return number, shards

    def gather_and_consume(
        self, x: torch.Tensor, consume: Callable[[torch.Tensor, int], Any], keep_local: bool
    ) -> torch.Tensor:
        """All-gather x [n, ...], and call consume(shard, rank) for each rank's shard as soon as the shard has arrived.

        Returns:
            The gathered tensor [size * n, ...]. Without `keep_local` this rank's rows of it stay unwritten.
        """
        streams = self._streams
        out = x.new_empty((self.size, *x.shape))
        if self._is_capturing:
            number, shards = self._publish_shard(x, out[self.rank] if keep_local else None)
            self._run_work(consume, x, self.rank)  # this rank's shard needs no communication
        else:
            # Launch the GEMM before the copies: the device has no other work, and waits for the host.
            self._copy_waits_for_main()
            self._run_work(consume, x, self.rank)
            number, shards = self._publish_shard(x, None)
            if keep_local:
                streams.copy(out[self.rank], x)
        for index, peer in enumerate(self.next_peers):
            streams.wait_for(peer, number)
            streams.copy(out[peer], shards[peer])
            if self.on_side_stream and index % 2 == 0:
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

    # pushes ---------------------------------------------------------------------------------------------------------

    def _push_gather(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Gather by pushes into the peers' slots."""
        streams = self._streams
        number = self._begin_call(x.nbytes)
        slots = self._next_slots(x.shape, x.dtype)
        self._copy_waits_for_main()
        self._push([PeerCopy(peer, slots[peer][self.rank], x) for peer in self.next_peers])
        streams.copy(slots[self.rank][self.rank], x, "main")
        self._meet(number)
        end = self._end_call()

        def wait(source: torch.Tensor = x) -> torch.Tensor:  # the default keeps x alive until it has been copied
            self._await(end)
            return slots[self.rank].flatten(0, 1)

        return wait

    def _next_slots(self, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's slot of the next pushed result, as views [size, *shape]."""
        index = self._state.lent_count % LENT_SLOTS
        self._state.lent_count += 1
        return self._buffers.view_slot(index, shape, dtype)

    def _push(self, copies: Sequence[PeerCopy]) -> None:
        """Copy to each peer; the copies' `to` lies in the peer's memory."""
        plan = self.copy_plan or PUSHED
        queues = fork_copies(self._streams, self.size, plan)
        copy_in_pieces(self._streams, copies, queues, plan.piece_bytes or copies[0].to.nbytes)
        join_copies(self._streams, queues)

    # all-to-all and scatter -----------------------------------------------------------------------------------------

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
        return _Scatter(number, index, self._buffers.view_scatter(index, shape, dtype))

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
        copies = [PeerCopy(peer, received[peer], parts[peer][self.rank]) for peer in self.previous_peers]
        plan = self._choose_plan("all_to_all")
        if plan.waits_first or plan.piece_bytes:
            for peer in self.next_peers:
                self._run_work(write, parts[self.rank][peer], peer)
            self._copy_waits_for_main()
            for peer in self.next_peers:
                streams.signal(peer, number)
            self._copy_from_peers(copies, number, plan)
        else:
            queues = fork_copies(self._streams, self.size, plan)
            for peer, copy, queue in zip(self.next_peers, copies, queues, strict=True):
                self._run_work(write, parts[self.rank][peer], peer)
                streams.stream_wait(queue, streams.record_event("main"))
                streams.signal(peer, number, queue)
                streams.wait_for(copy.peer, number, queue)
                streams.copy(copy.to, copy.source, queue)
            join_copies(self._streams, queues)
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
        local_parts = parts[self.rank]
        self._run_work(write, local_parts, None)
        self._copy_waits_for_main()
        if plan.sum_programs:
            if self.size <= MAX_RANKS and can_sum_parts(like.device):
                return self._sum_from_peers(index, number, [part[self.rank] for part in parts], plan)
            plan = TWO_QUEUES
        for peer in self.next_peers:
            streams.signal(peer, number)
        received = like.new_empty((self.size - 1, *shape))
        copies = []
        for peer in self.previous_peers:
            row = peer if peer < self.rank else peer - 1  # `received` has no row for this rank
            copies.append(PeerCopy(peer, received[row], parts[peer][self.rank]))
        self._copy_from_peers(copies, number, plan)
        end = self._end_call(index)
        self._unread_buffers.add(index)

        def wait() -> torch.Tensor:
            self._unread_buffers.discard(index)
            self._await(end)
            out = received[0]
            if self.size == 2:
                streams.compute(lambda: torch.add(local_parts[self.rank], received[0], out=out))
                return out
            out = torch.empty_like(received[0])
            local_part = local_parts[self.rank].flatten()
            rows = received.flatten(1)
            streams.compute(lambda: sum_over_peers(local_part, rows, self.rank, out.view(-1)))
            return out

        return wait

    def scatter_and_wait(self, write: WriteParts, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
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
        local_part = like.new_empty(tuple(shape))
        self._run_work(write, parts[self.rank][peer], peer)
        self._copy_waits_for_main()
        streams.signal(peer, number)
        streams.wait_for(peer, number)
        streams.copy(received, parts[peer][self.rank])
        self._run_work(write, local_part, self.rank)
        self._await(self._end_call(index))
        streams.compute(lambda: torch.add(local_part, received, out=local_part))
        return local_part

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
