"""Reduction of gradients in slots by copy engines (overlap.reductions=copies): ZeRO-2 and 3 on one host.

The slots of gradient_slots.py lie in peer memory, which the other ranks of the group read directly
(`Exchange.peer_memory`). A rank copies the other ranks' gradients of its shard into staging memory, in pieces. A small
kernel on a side stream adds each piece and the rank's own gradients to the shard while the next piece is copied. Unlike
NCCL's reductions, copies take no SMs from the GEMMs of the backward.

With parallel.reduce_dtype=bfloat16 peer memory has slots of 16 bits, into which GEMMs write their rounded gradients
directly. All other gradients are written to slots in float32 and are rounded when the reduction begins. If GEMMs round
all gradients of blocks (`rounds_block_gradients` of core/rank_memory.py), only tables have slots in float32. Unlike
`reduce_scatter_rounded`, the rank's own gradients are rounded too. Sums have the type of the shard's gradients.

A sum reads each addend and the shard once and writes the shard once (ops/peer_sum.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from megascale.core.unit_slots import size_staging
from megascale.ops.peer_sum import sum_over_peers
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Axis, Pending
from megascale.parallel.exchange import Exchange
from megascale.parallel.gradient_slots import ShardTarget, size_slots, size_wide_slots
from megascale.parallel.peer_memory import PeerMemory


def count_slot_elements(buffers: Sequence[ParamAndGradBuffer]) -> int:
    """Return the number of elements of the slots for the gradients of these chunks."""
    size, _ = size_slots([buffer.layout for buffer in buffers], [buffer.count_units() for buffer in buffers])
    return size


def count_wide_elements(buffers: Sequence[ParamAndGradBuffer]) -> int:
    """Return the number of elements of the slots in float32 if blocks have rounded slots only."""
    return size_wide_slots([buffer.layout for buffer in buffers], [buffer.count_units() for buffer in buffers])


class CopyReduction:
    """Reduces gradients in slots over data-parallel ranks by the copy engines.

    Args:
        exchange: exchange of the data-parallel ranks, whose peer memory has room for the slots.
        count: number of elements of the slots.
        wide_count: number of elements of `memory` if GEMMs round all gradients of blocks; None: `count`. It needs a
            `sent_dtype` that is narrower than `dtype`.

    Attributes:
        memory: memory of the slots.
        rounded: memory of the slots in the type in which gradients are sent; None if that is the type of `memory`.
        rounds_blocks: whether blocks have slots in `rounded` only.
        staging: memory for pieces of the other ranks' gradients.
    """

    def __init__(
        self,
        exchange: Exchange,
        count: int,
        dtype: torch.dtype,
        sent_dtype: torch.dtype,
        wide_count: int | None = None,
    ) -> None:
        self._exchange = exchange
        self._peer_memory = PeerMemory(exchange)
        sent = self._peer_memory.take(count, sent_dtype).zero_()
        self.rounded: Tensor | None = None
        self.rounds_blocks = wide_count is not None
        if sent_dtype == dtype:
            if wide_count is not None:
                raise ValueError(f"gradients in {dtype} are sent without rounding, so blocks need no rounded slots")
            self.memory = sent
        else:
            memory_count = count if wide_count is None else wide_count
            self.memory = torch.zeros(memory_count, dtype=dtype, device=sent.device)
            self.rounded = sent
        self.staging = torch.empty(size_staging(count, exchange.size), dtype=sent_dtype, device=sent.device)
        # Every rank's gradients of a shard that this rank reduces, by address and length of this rank's.
        self._parts: dict[tuple[int, int], list[Tensor]] = {}

    def __call__(self, grads: Tensor, axis: Axis, target: ShardTarget) -> Pending:
        """Sum `grads`, which lie in the slots, over ranks into the gradients of this rank's shard.

        When the result has been awaited, no peer reads `grads` any more, and they may be overwritten.
        """
        sent = grads
        prepare = None
        if self.rounded is not None and grads.dtype != self.rounded.dtype:
            start = grads.storage_offset() - self.memory.storage_offset()
            sent = self.rounded[start : start + len(grads)]
            if target.unrounded:
                prepare = partial(_round, sent, grads, target.unrounded)
        shard = sent.view(axis.size, -1)[axis.rank]
        key = shard.data_ptr(), len(shard)
        parts = self._parts.get(key)
        if parts is None:
            parts = self._parts[key] = self._peer_memory.list_peers(shard)
        transfer = axis.transfer("fused_scatter", sent.nbytes)

        def add(start: int, stop: int, received: Tensor) -> None:
            out = target.grads[start:stop]
            sum_over_peers(shard[start:stop], received, axis.rank, out, target.accumulates)

        wait = self._exchange.reduce_from_peers(parts, self.staging, add, prepare)
        return Pending(target.grads, transfer=transfer, finish=wait)


def _round(sent: Tensor, grads: Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """Write ranges of the gradients to the memory that peers read."""
    for start, stop in ranges:
        sent[start:stop].copy_(grads[start:stop])
