"""AdamW whose master weights and moments lie in host memory (`optimizer.offload`).

An update moves the state through slots of device memory, piece by piece: while one piece is updated, the next one is
fetched and the one before is stored. The kernels are those of `ShardedAdamW` on the same numbers, so the results have
the same bits (unlike ZeRO-Offload, Ren et al. 2021, whose update runs on the host).

The update cannot move under the backward, because clipping needs the norm of the whole gradient. The host waits until
the last piece is stored, since checkpoints read the state without the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megascale.config import OptimizerConfig
from megascale.core.capacity import Capacity
from megascale.core.memory import OFFLOAD_ELEMENTS, OFFLOAD_SLOTS
from megascale.errors import FitError, TrainingError
from megascale.ops.segments import Segment, Segments
from megascale.optim.base import Shards, ShardState, StatePart, UpdateRule, UpdateStep
from megascale.optim.sharded_adamw import apply_adamw
from megascale.parallel.buffers import FlatShard
from megascale.parallel.host_copies import InlineCopies, PageLockError, page_lock


class HostMemory:
    """Page-locked host memory of a rank's master weights and optimizer state, allocated once.

    Args:
        count: elements.
        dtype: their type.
        device: device that copies from and to the memory.

    Raises FitError if the host has less free memory, TrainingError if the memory cannot be page-locked.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        capacity = Capacity.measure()
        needed = count * dtype.itemsize
        if capacity.memory is not None and needed > capacity.memory:
            raise FitError(
                f"optimizer.offload=true needs {needed / 2**30:.1f} GiB of host memory per rank, and "
                f"{capacity.memory / 2**30:.1f} GiB are free ({capacity.memory_from}); use more data-parallel ranks or "
                "set --optimizer.offload=false"
            )
        self._memory = torch.zeros(count, dtype=dtype)
        try:
            page_lock(self._memory, device)
        except PageLockError as error:
            raise TrainingError(
                f"optimizer.offload=true: {error}; raise the limit (ulimit -l), free host memory, or set "
                "--optimizer.offload=false"
            ) from error
        self._used = 0

    def take(self, count: int) -> torch.Tensor:
        """Return the next `count` elements, which are zero."""
        self._used += count
        return self._memory[self._used - count : self._used]


@dataclass
class _Piece:
    """A range of a part that is updated at once.

    Attributes:
        state: the shard's state, whose master weights lie on the host.
        start, stop: elements of the shard.
        host: master weights and moments on the host.
        segments: ranges of tensors, with offsets from `start`.
        ends_shard: whether it is the last piece of its shard.
    """

    state: ShardState
    start: int
    stop: int
    host: dict[str, torch.Tensor]
    segments: Segments
    ends_shard: bool = False


class OffloadedAdamW(UpdateRule):
    """AdamW on state in host memory."""

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        super().__init__(config, shards)
        self._pieces = list(_cut_pieces(shards, OFFLOAD_ELEMENTS))
        longest = max((piece.stop - piece.start for piece in self._pieces), default=0)
        master = shards.states[0].master
        names = ("master", "exp_avg", "exp_avg_sq")
        self._slots = [
            {name: torch.empty(longest, dtype=master.dtype, device=shards.device) for name in names}
            for _ in range(OFFLOAD_SLOTS)
        ]
        self._copies = InlineCopies.of(shards.device)

    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Update piece by piece, with the copies of other pieces under way."""
        copies, pieces = self._copies, self._pieces
        fetched: dict[int, Any] = {}
        stored: dict[int, Any] = {}

        def fetch(number: int) -> None:
            if number < len(pieces):
                piece = pieces[number]
                # The previous piece in this slot must have been stored.
                after = stored.get(number - OFFLOAD_SLOTS)
                fetched[number] = copies.fetch(self._device_views(number), list(piece.host.values()), after)

        fetch(0)
        for number, piece in enumerate(pieces):
            fetch(number + 1)
            copies.wait(fetched.pop(number))
            staged = self._device_views(number)
            self._update_piece(piece, staged, step)
            stored[number] = copies.store(list(piece.host.values()), staged)
            if piece.ends_shard:
                on_updated(piece.state.shard)
        copies.synchronize()

    def recompute(self, state: ShardState, part: StatePart, step: UpdateStep) -> dict[str, torch.Tensor]:
        """Repeat the update of a copy in device memory, see `UpdateRule.recompute`."""
        apply_adamw(self.config, state, part, step)
        return {}

    def _device_views(self, number: int) -> list[torch.Tensor]:
        """Return the device memory of a piece: master weights and moments."""
        piece = self._pieces[number]
        slot = self._slots[number % OFFLOAD_SLOTS]
        return [slot[name][: piece.stop - piece.start] for name in piece.host]

    def _update_piece(self, piece: _Piece, staged: Sequence[torch.Tensor], step: UpdateStep) -> None:
        master, exp_avg, exp_avg_sq = staged
        shard = piece.state.shard
        elements = slice(piece.start, piece.stop)
        state = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        part = StatePart(0, piece.stop - piece.start, [], piece.segments, state)
        view = FlatShard(shard.params[elements], shard.grads[elements], [])
        apply_adamw(self.config, ShardState(view, master, [part], []), part, step)


def _cut_pieces(shards: Shards, limit: int) -> Iterator[_Piece]:
    """Yield the pieces of all shards in the order of updates, of at most `limit` elements each."""
    for state in shards.update_order:
        pieces: list[_Piece] = []
        for part in state.parts:
            for begin in range(0, part.stop - part.start, limit):
                end = min(begin + limit, part.stop - part.start)
                rows = []
                for row in part.segments.rows:
                    start, stop = max(row.start, begin), min(row.stop, end)
                    if start < stop:
                        rows.append(Segment(start - begin, stop - begin, row.decay, row.tensor))
                host = {"master": part.view(state.master)[begin:end]}
                host |= {name: part.state[name][begin:end] for name in ("exp_avg", "exp_avg_sq")}
                segments = Segments(rows, part.segments.tensors, shards.device)
                pieces.append(_Piece(state, part.start + begin, part.start + end, host, segments))
        if pieces:
            pieces[-1].ends_shard = True
        yield from pieces
