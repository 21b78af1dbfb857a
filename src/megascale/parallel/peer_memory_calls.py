"""Calls whose data lies in memory of the ranks that peers read without a copy into a buffer.

Memory that a rank changes rarely, such as its shard of the parameters, is gathered by `gather_from_peers`. A rank
changes it only after `wait_for_peer_reads`, when every peer has ended its earlier calls. So only the first gather of a
shard after `wait_for_peer_reads` awaits the peers, which have then written theirs. Later gathers of the shard need no
flags: a rank that is ahead of its peers does not wait for them. Gradients are reduced by `reduce_from_peers`. Such a
call ends when the peers have read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megascale.core.spans import SpanAxis
from megascale.parallel.exchange_calls import ExchangeCalls
from megascale.parallel.exchange_streams import Streams
from megascale.parallel.runtime import Runtime


class PeerMemoryCalls(ExchangeCalls):
    """One rank's calls on memory that peers read.

    Attributes:
        peer_memory: memory of each rank, which peers read, uint8; empty without such calls.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        streams: Streams,
        runtime: Runtime | None = None,
        kind: SpanAxis = SpanAxis.TENSOR,
        peer_memory: Sequence[torch.Tensor] = (),
    ) -> None:
        super().__init__(rank, size, streams, runtime=runtime, kind=kind)
        self.peer_memory = peer_memory
        # By half of the staging memory: the event on side after which the last sum has read it.
        self._staging_sum_events: list[Any] = [None, None]
        self._staged_half = 0  # half of the staging memory for the next piece
        # (address, bytes) of each shard of this rank that was gathered since the last `wait_for_peer_reads`.
        self._gathered_shards: set[tuple[int, int]] = set()

    def gather_from_peers(
        self, out: torch.Tensor, shards: Sequence[torch.Tensor], copies_own: bool = True
    ) -> Callable[[], None]:
        """All-gather shards[rank] of every rank, views of `peer_memory`, into out [size, *shape of a shard].

        The gather overlaps with later work. Work that was submitted before the shard's first gather may write this
        rank's shard, and later work only after `wait_for_peer_reads`.

        Args:
            copies_own: whether to copy this rank's shard; False if `out` contains it (mapped_slots.py).

        Returns:
            A function that waits for the gather.
        """
        streams = self._streams
        shard = shards[self.rank]
        number = self._begin_call(shard.nbytes)
        self._copy_waits_for_main()
        key = shard.data_ptr(), shard.nbytes
        # A replay repeats the flags of its capture, so every captured gather has flags.
        has_flags = self._is_capturing or key not in self._gathered_shards
        if has_flags:
            if not self._is_capturing:
                self._gathered_shards.add(key)
            for peer in self.previous_peers:  # in the order in which peers need the shard
                streams.signal(peer, number)
        for peer in self.next_peers:
            if has_flags:
                streams.wait_for(peer, number)
            streams.copy(out[peer], shards[peer])
        if copies_own:
            streams.copy(out[self.rank], shard)
        end = self._end_call() if has_flags else streams.record_event("copy")
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
        for peer in self.previous_peers:
            streams.signal(peer, number)
        piece_length = staging.shape[-1]
        length = len(parts[self.rank])
        for start in range(0, length, piece_length):
            stop = min(start + piece_length, length)
            half = self._staged_half  # calls with a single piece use both halves in turn too
            self._staged_half = 1 - half
            if self._staging_sum_events[half] is not None:
                streams.stream_wait("copy", self._staging_sum_events[half])
            received = staging[half, :, : stop - start]
            for peer in self.next_peers:
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
        self._gathered_shards.clear()
        self._make_empty_call()
        self._await(self._streams.record_event("copy"))
