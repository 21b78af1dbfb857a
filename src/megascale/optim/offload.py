"""AdamW whose master weights and moments lie in host memory (`optimizer.offload`).

An update copies the state to the device in blocks, through a few staging buffers. While the device updates a block, the
next block is fetched and the previous block is stored. The kernels and their inputs are those of `ShardedAdamW`, so
the results have the same bits. ZeRO-Offload (Ren et al. 2021), by contrast, updates on the host's processor. Segments
(ops/segments.py) tell the kernels which elements of a block belong to which tensor.

The update cannot overlap the backward, because clipping needs the norm of the complete gradient. The host waits until
the last block is stored, because checkpoints read the state in host memory.
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

_STAGED_NAMES = ("master", "exp_avg", "exp_avg_sq")


class HostMemory:
    """Page-locked host memory of a rank's master weights and optimizer state, allocated once.

    Args:
        count: number of elements.
        dtype: type of the elements.

    Raises FitError if the host has less free memory, TrainingError if the memory cannot be page-locked.
    """

    def __init__(self, count: int, dtype: torch.dtype, device: torch.device) -> None:
        capacity = Capacity.measure()
        needed_bytes = count * dtype.itemsize
        if capacity.memory is not None and needed_bytes > capacity.memory:
            raise FitError(
                f"optimizer.offload=true needs {needed_bytes / 2**30:.1f} GiB of host memory per rank, and "
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
        self._allocated_count = 0

    def allocate(self, count: int) -> torch.Tensor:
        """Return the next `count` elements of the memory, which are zero."""
        start = self._allocated_count
        self._allocated_count += count
        return self._memory[start : self._allocated_count]


@dataclass
class _Block:
    """Range of a state part that one kernel updates.

    Attributes:
        state: state of the shard; its master weights are in host memory.
        start, stop: range of the shard's elements.
        host_tensors: master weights and moments of the range in host memory, by name.
        segments: tensors of the range, with offsets from `start`.
        is_last_of_shard: whether this is the last block of its shard.
    """

    state: ShardState
    start: int
    stop: int
    host_tensors: dict[str, torch.Tensor]
    segments: Segments
    is_last_of_shard: bool = False


class OffloadedAdamW(UpdateRule):
    """AdamW on state in host memory."""

    def __init__(self, config: OptimizerConfig, shards: Shards) -> None:
        super().__init__(config, shards)
        self._blocks = list(_divide_into_blocks(shards, OFFLOAD_ELEMENTS))
        max_length = max((block.stop - block.start for block in self._blocks), default=0)
        dtype = shards.states[0].master.dtype
        # Tensors of each staging buffer by name. Block i uses buffer i modulo OFFLOAD_SLOTS.
        self._staging_buffers: list[dict[str, torch.Tensor]] = []
        for _ in range(OFFLOAD_SLOTS):
            buffer = {name: torch.empty(max_length, dtype=dtype, device=shards.device) for name in _STAGED_NAMES}
            self._staging_buffers.append(buffer)
        self._copies = InlineCopies.for_device(shards.device)

    def update(self, step: UpdateStep, on_updated: Callable[[FlatShard], None]) -> None:
        """Update block by block, while other blocks are copied."""
        copies = self._copies
        blocks = self._blocks
        # Events at the end of each block's copies, by the block's index.
        fetch_events: dict[int, Any] = {}
        store_events: dict[int, Any] = {}

        def start_fetch(index: int) -> None:
            if index < len(blocks):
                # The copy waits until the previous block in this staging buffer is stored.
                previous_store = store_events.get(index - OFFLOAD_SLOTS)
                host_tensors = list(blocks[index].host_tensors.values())
                fetch_events[index] = copies.fetch(self._get_staged_tensors(index), host_tensors, previous_store)

        start_fetch(0)
        for index, block in enumerate(blocks):
            start_fetch(index + 1)
            copies.wait(fetch_events.pop(index))
            staged_tensors = self._get_staged_tensors(index)
            self._update_block(block, staged_tensors, step)
            store_events[index] = copies.store(list(block.host_tensors.values()), staged_tensors)
            if block.is_last_of_shard:
                on_updated(block.state.shard)
        copies.synchronize()

    def recompute(self, state: ShardState, part: StatePart, step: UpdateStep) -> dict[str, torch.Tensor]:
        """Repeat the update on copied elements in device memory, see `UpdateRule.recompute`."""
        apply_adamw(self.config, state, part, step)
        return {}

    def _get_staged_tensors(self, index: int) -> list[torch.Tensor]:
        """Return the device memory of a block: master weights and moments."""
        block = self._blocks[index]
        buffer = self._staging_buffers[index % OFFLOAD_SLOTS]
        return [buffer[name][: block.stop - block.start] for name in block.host_tensors]

    def _update_block(self, block: _Block, staged_tensors: Sequence[torch.Tensor], step: UpdateStep) -> None:
        """Run AdamW on a block as if it were a shard of its own."""
        master, exp_avg, exp_avg_sq = staged_tensors
        shard = block.state.shard
        elements = slice(block.start, block.stop)
        moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        part = StatePart(0, block.stop - block.start, [], block.segments, moments)
        block_shard = FlatShard(shard.params[elements], shard.grads[elements], [])
        apply_adamw(self.config, ShardState(block_shard, master, [part], []), part, step)


def _divide_into_blocks(shards: Shards, max_length: int) -> Iterator[_Block]:
    """Yield the blocks of all shards in the order of updates, of at most `max_length` elements each."""
    for state in shards.update_order:
        blocks: list[_Block] = []
        for part in state.parts:
            part_length = part.stop - part.start
            for start in range(0, part_length, max_length):
                stop = min(start + max_length, part_length)
                host_tensors = {"master": part.view(state.master)[start:stop]}
                for name in ("exp_avg", "exp_avg_sq"):
                    host_tensors[name] = part.state[name][start:stop]
                segments = _cut_segments(part.segments, start, stop)
                blocks.append(_Block(state, part.start + start, part.start + stop, host_tensors, segments))
        if blocks:
            blocks[-1].is_last_of_shard = True
        yield from blocks


def _cut_segments(segments: Segments, start: int, stop: int) -> Segments:
    """Return the segments within elements `start:stop`, with offsets from `start`."""
    cut_segments = []
    for segment in segments.ranges:
        cut_start = max(segment.start, start)
        cut_stop = min(segment.stop, stop)
        if cut_start < cut_stop:
            cut_segments.append(Segment(cut_start - start, cut_stop - start, segment.decay, segment.tensor_index))
    return Segments(cut_segments, segments.tensor_count, segments.device)
