"""Allocation of memory that the other ranks of a group read directly, for shards of parameters under ZeRO-3.

An `Exchange` moves shards between the ranks of a group by copies instead of NCCL. Its `peer_memory` lists one block of
memory per rank, which every rank of the group has mapped.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.exchange import Exchange

_ALIGN = 512  # bytes


class PeerMemory:
    """Allocates parts of this rank's block. All ranks must take the same sizes in the same order."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._local_memory = exchange.peer_memory[exchange.rank]
        self._used = 0

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next `count` elements of this rank's memory."""
        start = self._used
        stop = start + count * dtype.itemsize
        self._used = start + _round_up(count * dtype.itemsize)
        return self._local_memory[start:stop].view(dtype)

    def list_peers(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return the view at the same offset in every rank's memory, for a shard that `take` returned."""
        start = shard.data_ptr() - self._local_memory.data_ptr()
        return [memory[start : start + shard.nbytes].view(shard.dtype) for memory in self._exchange.peer_memory]


def count_peer_memory_bytes(
    buffers: Iterable[ParamAndGradBuffer],
    has_float8: bool,
    mapped_buckets: frozenset[tuple[int, int]] = frozenset(),
) -> int:
    """Return the bytes that this rank's shards of parameters (`shard_params`) need in its block.

    Args:
        has_float8: whether shards are also cast to float8, one byte per element.
        mapped_buckets: (chunk, index) of buckets whose shards lie in slots instead (mapped_slots.py).
    """
    total_bytes = 0
    for chunk, buffer in enumerate(buffers):
        if mapped_buckets:
            for bucket, shard in enumerate(buffer.shards):
                if buffer.layout.units[bucket] is not None and (chunk, bucket) not in mapped_buckets:
                    total_bytes += _round_up(shard.params.nbytes)
            continue
        total_bytes += _round_up(buffer.shard_params.nbytes)
        if has_float8:
            total_bytes += _round_up(buffer.shard_params.numel())
    return total_bytes


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
