"""Memory of an exchange (exchange.py): buffers that peers read, and slots into which peers push results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

BUFFERS = 2  # buffers for gathers, and as many for scatters: peers may still read the previous one
LENT_SLOTS = 2  # slots of pushed results, used in turn
_ALIGN_BYTES = 512  # alignment of lent slots


class ExchangeBuffers:
    """Views of the memory of all ranks.

    Args:
        memory: memory of each rank, uint8 [`count_buffer_bytes`].
        lent_memory: memory of each rank for results that peers push, uint8 [`count_lent_bytes`]; empty: no call pushes.
        shard_bytes: size of the largest shard that will be gathered or scattered.
    """

    def __init__(self, memory: Sequence[torch.Tensor], lent_memory: Sequence[torch.Tensor], shard_bytes: int) -> None:
        self._memory = memory
        self._lent_memory = lent_memory
        self._shard_bytes = shard_bytes
        self._size = len(memory)
        self._views: dict[tuple[int, tuple[int, ...], torch.dtype], list[torch.Tensor]] = {}

    @property
    def can_lend(self) -> bool:
        """True if there are slots of pushed results."""
        return bool(self._lent_memory)

    def view_gather(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's buffer of a gather as a view of `shape`."""
        return self._view(index * self._shard_bytes, shape, dtype, math.prod(shape))

    def view_scatter(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's buffer of a scatter as a view [size, *shape]."""
        start = (BUFFERS + index * self._size) * self._shard_bytes
        return self._view(start, (self._size, *shape), dtype, math.prod(shape))

    def view_slot(self, index: int, shape: Sequence[int], dtype: torch.dtype) -> list[torch.Tensor]:
        """Return every rank's slot of a pushed result as a view [size, *shape]."""
        slot_bytes = len(self._lent_memory[0]) // LENT_SLOTS
        nbytes = self._size * math.prod(shape) * dtype.itemsize
        if nbytes > slot_bytes:
            raise ValueError(f"a pushed result has {nbytes} bytes; this exchange was made for {slot_bytes}")
        start = index * slot_bytes
        views = [memory[start : start + nbytes].view(dtype) for memory in self._lent_memory]
        return [view.view((self._size, *shape)) for view in views]

    def _view(self, start: int, shape: Sequence[int], dtype: torch.dtype, shard_elements: int) -> list[torch.Tensor]:
        """Return views of `shape` of every rank's memory, from byte `start` on.

        Raises ValueError if a shard of `shard_elements` elements does not fit in a buffer.
        """
        key = (start, tuple(shape), dtype)
        views = self._views.get(key)
        if views is None:
            nbytes = shard_elements * dtype.itemsize
            if nbytes > self._shard_bytes:
                raise ValueError(f"a shard has {nbytes} bytes; this exchange was made for {self._shard_bytes}")
            stop = start + math.prod(shape) * dtype.itemsize
            views = [memory[start:stop].view(dtype).view(tuple(shape)) for memory in self._memory]
            self._views[key] = views
        return views


def count_buffer_bytes(size: int, shard_bytes: int) -> int:
    """Return the bytes of the gather and scatter buffers of one of `size` ranks."""
    return BUFFERS * (1 + size) * shard_bytes


def count_lent_bytes(size: int, shard_bytes: int) -> int:
    """Return the bytes of the slots of pushed results of one of `size` ranks."""
    return LENT_SLOTS * size * (-(-shard_bytes // _ALIGN_BYTES) * _ALIGN_BYTES)
