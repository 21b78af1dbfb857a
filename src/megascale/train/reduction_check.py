"""Checks of gradient reductions and of the optimizer's state, which a replay on another replica does not cover.

A reduction is linear: adding the block sums of all ranks' gradients gives the block sums of the reduced gradients, up
to rounding. Each rank compares the blocks of its shard. The bound on rounding is rigorous: a difference above it is a
fault. A block is small, so that one wrong element stands out. An extent (parallel/buffers.py) is a range of a shard
that holds elements of one logical tensor.

The optimizer alone writes its state and the master weights. Their checksums after one update therefore equal their
checksums before the next update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megascale.optim.optimizer import ShardedOptimizer
from megascale.parallel.buffers import Extent, FlatShard
from megascale.parallel.collectives import Axis, Pending, all_reduce
from megascale.parallel.data_parallel import DataParallel
from megascale.parallel.gradient_slots import ShardTarget
from megascale.train.weights import sum_bits

BLOCK = 4096  # elements of a block of gradients
_SUM_ROUNDING = 64  # bound on the rounding of one block's sum, in machine epsilons of float64

# Called with gradients, axis and, for gradients in slots, the target in the shard.
StartReduction = Callable[..., Pending]


class ReductionCheck:
    """Compares the reduced gradients of one step with the gradients before the reduction, the addends.

    Args:
        microbatches: number of micro-batches of a step. Each of them may have a reduction of its own.
        reduce_dtype: type in which addends are sent; None: the type of the gradients.
    """

    def __init__(self, data: DataParallel, microbatches: int, reduce_dtype: torch.dtype | None) -> None:
        self._data = data
        self._microbatches = microbatches
        self._reduce_dtype = reduce_dtype
        self._axis = data.buffers[0].axes.reduce
        # With ZeRO-0 every rank holds the complete sum, as a single shard.
        self._shard_count = self._axis.size if data.buffers[0].zero > 0 else 1
        self._shard_index = self._axis.rank if self._shard_count > 1 else 0
        # (chunk, bucket) by the address of the bucket's gradients in memory. Buckets in slots share addresses, so they
        # are not in it.
        self._bucket_keys = {}
        for chunk, buffer in enumerate(data.buffers):
            for bucket in buffer.resident_buckets:
                span = buffer.layout.buckets[bucket]
                self._bucket_keys[buffer.slice_grads(span.start, span.stop).data_ptr()] = chunk, bucket
        self._sums: dict[tuple[int, int], Tensor] = {}  # block sums of this rank's addends, by (chunk, bucket)
        self._reduction_counts: dict[tuple[int, int], int] = {}  # number of their reductions
        # While addends are summed: the functions that `begin` has replaced, for resident buckets and for slots.
        self._originals: tuple[StartReduction, StartReduction | None] | None = None

    def begin(self) -> None:
        """Sum the addends of all reductions that start until `end` is called.

        The functions that start reductions are replaced until then.
        """
        data = self._data
        self._sums.clear()
        self._reduction_counts.clear()
        start_slot = None if data.gradient_slots is None else data.gradient_slots.start_reduction
        self._originals = data._start_reduction, start_slot
        data._start_reduction = self._watch(data._start_reduction)
        if data.gradient_slots is not None and start_slot is not None:
            data.gradient_slots.start_reduction = self._watch(start_slot)

    def end(self) -> None:
        """Restore the functions that `begin` has replaced."""
        if self._originals is None:
            return
        self._data._start_reduction, start_slot = self._originals
        if self._data.gradient_slots is not None and start_slot is not None:
            self._data.gradient_slots.start_reduction = start_slot
        self._originals = None

    def _watch(self, start: StartReduction) -> StartReduction:
        """Return `start` with block sums of the addends taken before the reduction."""

        def start_watched(grads: Tensor, axis: Axis, *target: ShardTarget) -> Pending:
            key, addends = self._find_bucket(grads)
            sums = sum_blocks(addends.view(self._shard_count, -1))
            self._reduction_counts[key] = self._reduction_counts.get(key, 0) + 1
            if key in self._sums:
                self._sums[key] += sums
            else:
                self._sums[key] = sums
            return start(grads, axis, *target)

        return start_watched

    def _find_bucket(self, grads: Tensor) -> tuple[tuple[int, int], Tensor]:
        """Return (chunk, bucket) of the gradients that a reduction receives, and the addends in their type."""
        slots = self._data.gradient_slots
        if slots is not None:
            for bucket in slots.active:
                if bucket.grads is grads:
                    return (bucket.chunk, bucket.index), bucket.widen()
        return self._bucket_keys[grads.data_ptr()], grads

    def find_wrong_blocks(self) -> Tensor:
        """Return which blocks of this rank's shards differ from the sums of their addends, bool [blocks].

        Collective. Call it after the reductions over this axis, and before a tied embedding is reduced over its stages.
        """
        keys = self._list_keys()
        if not keys:
            return torch.zeros(1, dtype=torch.bool, device=self._data.buffers[0].params.device)
        expected = torch.cat([self._sums[key] for key in keys], dim=-1)  # [2, shards, blocks]
        expected = all_reduce(expected, self._axis).wait()[:, self._shard_index]
        actual = torch.cat([sum_blocks(self._find_shard(key).grads.view(1, -1))[0, 0] for key in keys])
        sums, magnitudes = expected
        grads_dtype = self._find_shard(keys[0]).grads.dtype
        # Each element is rounded once per addend of another rank and per reduction, and once more when it is sent. Part
        # of a divided table may have several reductions per micro-batch.
        reduction_count = max(self._microbatches, *self._reduction_counts.values())
        addition_count = self._axis.size + reduction_count
        epsilon = addition_count * torch.finfo(grads_dtype).eps
        if self._reduce_dtype is not None:
            epsilon += torch.finfo(self._reduce_dtype).eps
        # Block sums are computed in float64. Gradients in float64 have this bound twice.
        epsilon += _SUM_ROUNDING * torch.finfo(torch.float64).eps
        if grads_dtype == torch.float64:
            epsilon += _SUM_ROUNDING * torch.finfo(torch.float64).eps
        sent_dtype = self._reduce_dtype or grads_dtype
        return differ_beyond_rounding(actual, sums, magnitudes, epsilon=epsilon, dtype=sent_dtype)

    def describe(self, block: int) -> str:
        """Return the parameter to which a block of this rank's shards belongs."""
        for key in self._list_keys():
            shard = self._find_shard(key)
            block_count = -(-shard.grads.numel() // BLOCK)
            if block < block_count:
                names = [extent.piece.name for extent in shard.extents if extent.stop > block * BLOCK]
                return f"sum of the gradients of {names[0] if names else 'padding'}"
            block -= block_count
        return "sum of gradients"

    def _list_keys(self) -> list[tuple[int, int]]:
        """Return the buckets to compare: not a tied embedding, whose sum goes on to another stage."""
        keys = []
        for chunk, bucket in sorted(self._sums):
            if bucket != self._data.buffers[chunk].layout.tied_bucket:
                keys.append((chunk, bucket))
        return keys

    def _find_shard(self, key: tuple[int, int]) -> FlatShard:
        """Return this rank's shard of a bucket, which (chunk, bucket) names."""
        chunk, bucket = key
        return self._data.buffers[chunk].shards[bucket]


def sum_blocks(values: Tensor) -> Tensor:
    """Return the sums and the sums of magnitudes over blocks of each row, float64 [2, rows, blocks]."""
    rows, length = values.shape
    blocked_length = length // BLOCK * BLOCK
    sums = []
    full_blocks = values[:, :blocked_length].reshape(rows, -1, BLOCK)
    last_block = values[:, blocked_length:].reshape(rows, 1, -1)
    for blocks in (full_blocks, last_block):
        if blocks.numel():
            magnitudes = torch.linalg.vector_norm(blocks, 1, dim=-1, dtype=torch.float64)
            sums.append(torch.stack((blocks.sum(-1, dtype=torch.float64), magnitudes)))
    if not sums:
        return torch.zeros(2, rows, 0, dtype=torch.float64, device=values.device)
    return torch.cat(sums, dim=-1)


def differ_beyond_rounding(
    actual: Tensor, sums: Tensor, magnitudes: Tensor, *, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Return which sums over blocks differ from those of their addends by more than rounding, bool [blocks].

    Args:
        actual: sums over blocks of the reduced gradients, float64 [blocks].
        sums, magnitudes: sums of the addends and of their magnitudes, float64 [blocks].
        epsilon: bound on the rounding, relative to the magnitudes.
        dtype: type in which addends are sent. A block whose magnitudes exceed its range may overflow and is skipped.
    """
    limits = torch.finfo(dtype)
    # Rounding of subnormal numbers is not relative: it may be as large as the smallest normal number per element.
    underflow = BLOCK * limits.tiny
    is_near = (actual - sums).abs() <= epsilon * magnitudes + underflow
    return ~is_near & (magnitudes <= limits.max)


class StateCheck:
    """Compares the optimizer's state and master weights before an update with those after the previous update."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer
        self._sums: Tensor | None = None

    def take(self) -> None:
        """Store the checksums after an update."""
        self._sums = self._sum()

    def drop(self) -> None:
        """Drop the checksums after an update that no check follows."""
        self._sums = None

    def find_changed_tensors(self) -> Tensor:
        """Return which tensors have changed since `take`, bool [tensors]; [False] without checksums."""
        sums, self._sums = self._sums, None
        if sums is None:
            return torch.zeros(1, dtype=torch.bool, device=self._optimizer.rule.shards.device)
        return sums != self._sum()

    def describe(self, index: int) -> str:
        """Return the name of the tensor at `index` of `find_changed_tensors`."""
        return [name for name, _ in self._list_tensors()][index]

    def _sum(self) -> Tensor:
        """Return the checksums of all tensors, int64 [tensors]."""
        tensors = [tensor for _, tensor in self._list_tensors()]
        if not tensors:
            return torch.zeros(1, dtype=torch.int64, device=self._optimizer.rule.shards.device)
        return sum_bits(tensors)

    def _list_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor of master weights and optimizer state on the device.

        Tensors in host memory are left out, because transfers may be using them.
        """
        for state in self._optimizer.states:
            device = state.shard.grads.device
            if state.master.device == device:
                yield f"master weights from {_name_first(state.shard.extents)} on", state.master
            for part in state.parts:
                first_name = _name_first(part.extents)
                for key, tensor in part.state.items():
                    if tensor.device == device:
                        yield f"{key} from {first_name} on", tensor


def _name_first(extents: Sequence[Extent]) -> str:
    """Return the name of the first piece of a logical tensor in some extents."""
    if not extents:
        return "padding"
    return extents[0].piece.name
