"""Data parallelism of one rank: one object owns the buckets of all its chunks, their reductions and their gathers.

The schedule decides when to communicate (core/schedule.py), hooks only count gradients, and communication starts in
this module alone. A chunk's REDUCE_GRADS arms its buckets: in the backward that follows, a bucket is reduced as soon
as its last gradient is complete. GATHER_PARAMS all-gathers the chunk's buckets in the order in which forward needs
them. The first gather of a step is armed during the update of the step before, and each bucket is gathered as soon as
this rank's shard of it is updated (MegaScale section 3.2). Without overlap both are awaited where they start.
Matrices that linear layers read in float8 may be gathered as float8 (`float8_gather.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from megascale.core.schedule import WEIGHT_BACKWARDS, ActionKind
from megascale.parallel.buffers import FlatShard, ParamAndGradBuffer
from megascale.parallel.collectives import (
    Pending,
    all_gather_into,
    all_reduce,
    reduce_scatter_in_place,
    reduce_scatter_rounded,
)
from megascale.parallel.float8_gather import Float8Gather


class _ChunkBuckets:
    """Communication in flight for the buckets of one chunk, and the gradient counts of the present backward.

    Attributes:
        contributions: additions to each parameter's gradient by a backward of each kind, learnt in the first one.
        counts: additions to each parameter's gradient in the present backward.
        kind: kind of the present backward.
        complete_at: parameters of each bucket that get a gradient by a backward of each kind. A parameter may get none
            because another chunk's copy is in use.
        incomplete: parameters of each bucket whose gradient is not complete in the present backward.
        unit_buckets: buckets that each unit of the forward needs.
        armed: whether the next backward, or the present one, is reduced.
        reduce_as_filled: whether the present backward reduces buckets as they fill.
        has_grads: ZeRO-2: whether the chunk holds a gradient buffer of the pool.
    """

    def __init__(self, buffer: ParamAndGradBuffer, float8: bool) -> None:
        self.buffer = buffer
        self.float8 = Float8Gather(buffer) if float8 else None
        self.contributions: dict[ActionKind, list[int]] = {}
        self.counts = [0] * len(buffer.parameters)
        self.kind = ActionKind.BACKWARD
        self.complete_at: dict[ActionKind, list[int]] = {}
        self.incomplete: list[int] = []
        self.unit_buckets: list[list[int]] = []
        self.armed = False
        self.reduce_as_filled = False
        self.has_grads = False
        self.reducing: dict[int, Pending] = {}
        self.gathering: dict[int, Pending] = {}

    def microbatch_contributions(self) -> list[int]:
        """Return the additions to each parameter's gradient per micro-batch, all 0 while unknown."""
        whole_backward = self.contributions.get(ActionKind.BACKWARD)
        if whole_backward is not None:
            return whole_backward
        halves = [self.contributions.get(kind) for kind in (ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)]
        if None in halves:
            return [0] * len(self.counts)
        return [sum(counts) for counts in zip(*halves, strict=True)]  # type: ignore[arg-type]

    def learn_contributions(self, kind: ActionKind) -> None:
        """Record the additions of the present backward if it is the first of its kind."""
        if kind in self.contributions:
            return
        self.contributions[kind] = list(self.counts)
        spans = self.buffer.layout.buckets
        self.complete_at[kind] = [sum(1 for i in span.members if self.counts[i]) for span in spans]


class GradientPool:
    """Gradient buffers that the chunks of a rank use in turn (ZeRO-2).

    One chunk's backward fills a buffer while another buffer is reduced. Two suffice if backwards are whole. In two
    halves, every chunk may hold a buffer between them. `drain` finishes a user's reductions.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        drain: Callable[[ParamAndGradBuffer, dict[int, Pending]], None],
        count: int = 2,
    ) -> None:
        size = max(buffer.layout.size for buffer in buffers)
        dtype, device = buffers[0].grad_dtype, buffers[0].params.device
        self.buffers = [torch.zeros(size, dtype=dtype, device=device) for _ in range(count)]
        self._users: list[tuple[ParamAndGradBuffer, dict[int, Pending]] | None] = [None] * count
        self._is_filled = [True] * count  # whether no backward adds to the buffer any more
        self._drain_user = drain
        self._index = 0

    def take(self, user: ParamAndGradBuffer) -> tuple[torch.Tensor, dict[int, Pending]]:
        """Return a zeroed buffer and a dictionary for its reductions, after draining its last user."""
        count = len(self.buffers)
        candidates = ((self._index + offset) % count for offset in range(1, count + 1))
        self._index = next(index for index in candidates if self._is_filled[index])
        self._drain(self._index)
        reducing: dict[int, Pending] = {}
        self._users[self._index] = (user, reducing)
        self._is_filled[self._index] = False
        return self.buffers[self._index][: user.layout.size].zero_(), reducing

    def mark_filled(self, user: ParamAndGradBuffer) -> None:
        """Record that the user's gradients are being reduced, so that its buffer may be drained and taken."""
        for index, entry in enumerate(self._users):
            if entry is not None and entry[0] is user:
                self._is_filled[index] = True

    def drain(self) -> None:
        """Drain all buffers."""
        for index in range(len(self.buffers)):
            self._drain(index)

    def _drain(self, index: int) -> None:
        user, self._users[index] = self._users[index], None
        if user is not None:
            self._drain_user(*user)


class DataParallel:
    """Communicates gradients and parameters of this rank's chunks between the data-parallel ranks.

    Args:
        buffers: the chunks' buffers, in the order of the schedule's chunk numbers.
        overlap: reduce buckets as they fill and gather ahead; without it both are awaited at once.
        reduce_dtype: communication dtype of gradients; None for their own.
        float8: gather the buckets of linear layers' matrices as float8, in which the chunks compute.
        splits_backward: whether the schedule has backwards in two halves.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        overlap: bool = True,
        reduce_dtype: torch.dtype | None = None,
        float8: bool = False,
        splits_backward: bool = False,
    ) -> None:
        self.buffers = list(buffers)
        self.overlap = overlap
        self.reduce_dtype = reduce_dtype
        self._runtime = buffers[0].axes.tensor.runtime
        self._chunks = [_ChunkBuckets(buffer, float8) for buffer in buffers]
        self._tied: list[Pending] = []
        self._measured: tuple[_ChunkBuckets, int] | None = None  # the float8 bucket to gather after the next update
        self._armed_gather: tuple[_ChunkBuckets, dict[int, int]] | None = None  # and its buckets by id of their shard
        for chunk in self._chunks:
            chunk.buffer.set_gradient_hook(partial(self._mark, chunk))
            if overlap:
                chunk.unit_buckets = chunk.buffer.find_unit_buckets()
            if chunk.unit_buckets:
                chunk.buffer.module.pre_forward_gather = partial(self._await_unit, chunk)  # type: ignore[assignment]
        self.pool = None
        if buffers[0].zero == 2:
            pool_size = len(buffers) + 1 if splits_backward else 2
            self.pool = GradientPool(buffers, self._drain, pool_size)

    # gradients ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Zero the gradients of the last step."""
        for chunk in self._chunks:
            self._runtime.stream.synchronize()
            chunk.buffer.zero_grads(chunk.microbatch_contributions())

    def arm_reductions(self, chunk: int) -> None:
        """Run REDUCE_GRADS: the chunk's next backward completes its gradients (ZeRO-2: this micro-batch's)."""
        self._chunks[chunk].armed = True

    def begin_backward(self, chunk: int, kind: ActionKind = ActionKind.BACKWARD) -> None:
        """Prepare for a micro-batch's backward of the chunk, or for one half of it."""
        buckets = self._chunks[chunk]
        buffer = buckets.buffer
        buckets.kind = kind
        buckets.counts = [0] * len(buffer.parameters)
        if self.pool is not None and not buckets.has_grads:
            buckets.has_grads = True
            grads, buckets.reducing = self.pool.take(buffer)
            buffer.set_grads(grads)
        completes_weights = kind in WEIGHT_BACKWARDS
        buckets.reduce_as_filled = (
            self.overlap and buckets.armed and completes_weights and kind in buckets.contributions
        )
        buckets.incomplete = list(buckets.complete_at.get(kind, ()))

    def _mark(self, buckets: _ChunkBuckets, index: int) -> None:
        """Count a contribution to a gradient; the last one of an armed bucket starts its reduction."""
        buckets.counts[index] += 1
        if buckets.reduce_as_filled and buckets.counts[index] == buckets.contributions[buckets.kind][index]:
            bucket = buckets.buffer.bucket_of[index]
            buckets.incomplete[bucket] -= 1
            if not buckets.incomplete[bucket] and not _needs_sums(buckets.buffer, bucket):
                self._reduce(buckets, bucket)

    def end_backward(self, chunk: int, kind: ActionKind = ActionKind.BACKWARD) -> None:
        """Learn the contributions of a micro-batch, and reduce the armed buckets that are not in flight."""
        buckets = self._chunks[chunk]
        buffer = buckets.buffer
        buckets.learn_contributions(kind)
        buckets.reduce_as_filled = False
        if not buckets.armed or kind not in WEIGHT_BACKWARDS:
            return
        buckets.armed = False
        self._runtime.stream.synchronize()
        buffer.zero_unwritten_grads()
        # Along an axis that cuts the batch, each rank has seen only its part of the tokens.
        for part in buffer.layout.summed:
            for name in part.axes:
                all_reduce(buffer.grads[part.start : part.stop], buffer.axes.along(name)).wait()
        for bucket in range(len(buffer.layout.buckets)):
            if bucket not in buckets.reducing:
                self._reduce(buckets, bucket)
                if not self.overlap:
                    buckets.reducing[bucket].wait()
        if self.pool is not None:
            buckets.has_grads = False
            self.pool.mark_filled(buffer)

    def finish_reductions(self) -> None:
        """Wait until this rank's shards hold the sum over data-parallel ranks.

        With overlap the reduction of a tied embedding between its two stages is still in flight (`finish_tied`).
        """
        for chunk in self._chunks:
            buffer = chunk.buffer
            if self.pool is not None:
                self.pool.drain()
            else:
                self._drain(buffer, chunk.reducing)
            if buffer.layout.tied_bucket is not None:
                self._tied.append(all_reduce(buffer.shards[buffer.layout.tied_bucket].grads, buffer.axes.tied))
        if not self.overlap:
            self.finish_tied()

    def finish_tied(self) -> None:
        """Wait until both stages that hold a tied embedding have the sum of its gradients."""
        while self._tied:
            self._tied.pop().wait()

    def _reduce(self, buckets: _ChunkBuckets, bucket: int) -> None:
        self._runtime.stream.synchronize()
        buffer = buckets.buffer
        axis = buffer.axes.reduce
        span = buffer.layout.buckets[bucket]
        grads = buffer.grads[span.start : span.stop]
        if buffer.zero == 0:
            buckets.reducing[bucket] = all_reduce(grads, axis)
        elif self.reduce_dtype is not None and self.reduce_dtype != grads.dtype:
            buckets.reducing[bucket] = reduce_scatter_rounded(grads, axis, self.reduce_dtype)
        else:
            buckets.reducing[bucket] = reduce_scatter_in_place(grads, axis)

    @staticmethod
    def _drain(buffer: ParamAndGradBuffer, reducing: dict[int, Pending]) -> None:
        """Wait for reductions in flight; ZeRO-2 adds them to the shard's gradients."""
        for bucket, pending in reducing.items():
            reduced = pending.wait()
            if buffer.zero == 2:
                buffer.shards[bucket].grads.add_(reduced)
        reducing.clear()

    # parameters --------------------------------------------------------------------------------------------------

    def start_gather(self, chunk: int) -> None:
        """Run GATHER_PARAMS: gather the chunk's buckets in forward order, unless a gather is in flight."""
        buckets = self._chunks[chunk]
        if buckets.gathering:
            return
        if buckets.float8 is not None:
            buckets.float8.start_amax_reduce()
        for bucket in buckets.buffer.forward_order:
            self._gather(buckets, bucket)
        if not self.overlap:
            self._finish_gather(buckets)

    def invalidate_gathered(self) -> None:
        """Invalidate gathered float8 weights, because shards are about to be updated or loaded."""
        self.finish_gathers()
        for chunk in self._chunks:
            if chunk.float8 is not None:
                chunk.float8.invalidate()

    def gather_under_update(self, chunk: int) -> Callable[[FlatShard], None]:
        """Arm the chunk's gather during the update.

        Returns:
            The function that the update calls with each updated shard. It gathers the shard's bucket at once. A
            float8 bucket is gathered after the next shard, when ranks have agreed on its scales. `end_update` gathers
            the last one.
        """
        if self.overlap:
            buckets = self._chunks[chunk]
            self._armed_gather = buckets, {id(shard): bucket for bucket, shard in enumerate(buckets.buffer.shards)}
        return self._on_shard_updated

    def _on_shard_updated(self, shard: FlatShard) -> None:
        """Gather the bucket of an updated shard of the armed chunk."""
        if self._armed_gather is None:
            return
        buckets, bucket_of = self._armed_gather
        bucket = bucket_of.get(id(shard))
        if bucket is None:
            self.end_update()
        elif buckets.float8 is not None and bucket in buckets.float8.buckets:
            buckets.float8.start_amax_reduce(bucket)
            self.end_update()
            self._measured = buckets, bucket
        else:
            self._gather(buckets, bucket)

    def end_update(self) -> None:
        """Gather the last float8 bucket of `gather_under_update`."""
        if self._measured is not None:
            (buckets, bucket), self._measured = self._measured, None
            self._gather(buckets, bucket)

    def await_parameters(self, chunk: int) -> None:
        """Wait for the chunk's parameters before a forward, unless its module waits for each unit."""
        buckets = self._chunks[chunk]
        if not buckets.unit_buckets:
            self._finish_gather(buckets)

    def is_gathering(self, chunk: int) -> bool:
        """Return whether a gather of the chunk is in flight."""
        return bool(self._chunks[chunk].gathering)

    def gather_full_parameters(self) -> None:
        """Gather all parameters in their own type, including those that training gathers as float8 only."""
        for index, chunk in enumerate(self._chunks):
            if chunk.float8 is None:
                self.start_gather(index)
                self._finish_gather(chunk)
                continue
            is_gathered = bool(chunk.gathering)
            self._finish_gather(chunk)
            for bucket in chunk.buffer.forward_order:
                if bucket in chunk.float8.buckets or not is_gathered:
                    self._gather(chunk, bucket, full_precision=True)
            self._finish_gather(chunk)
            chunk.float8.set_weights_gathered()

    def compute_weights(self) -> Iterator[torch.Tensor]:
        """Yield the gathered weights that a step computes with: the same on all data-parallel ranks."""
        for chunk in self._chunks:
            params = chunk.buffer.params
            if chunk.float8 is None:
                yield params
                continue
            for bucket, span in enumerate(chunk.buffer.layout.buckets):
                if bucket not in chunk.float8.buckets:
                    yield params[span.start : span.stop]
            yield from chunk.float8.compute_weights()

    def finish_gathers(self) -> None:
        """Wait for all gathers in flight."""
        self.end_update()
        for chunk in self._chunks:
            self._finish_gather(chunk)

    def _gather(self, buckets: _ChunkBuckets, bucket: int, full_precision: bool = False) -> None:
        """Start the gather of a bucket, as float8 where training does unless `full_precision`."""
        buffer = buckets.buffer
        data = buffer.axes.data
        if buffer.zero == 0 or data.size == 1 or bucket in buckets.gathering:
            return
        if buckets.float8 is not None and bucket in buckets.float8.buckets and not full_precision:
            buckets.gathering[bucket] = buckets.float8.start_gather(bucket)
            return
        # `.data` has its own version counter: gloo writes while a forward saves parameters that have arrived already,
        # and backward would take those for changed.
        params = buffer.params.data
        span = buffer.layout.buckets[bucket]
        start, stop = buffer.layout.shard(bucket, data.rank, data.size)
        buckets.gathering[bucket] = all_gather_into(params[span.start : span.stop], params[start:stop], data)

    def _await_unit(self, buckets: _ChunkBuckets, unit: int) -> None:
        if buckets.gathering:
            for bucket in buckets.unit_buckets[unit]:
                pending = buckets.gathering.pop(bucket, None)
                if pending is not None:
                    pending.wait()

    @staticmethod
    def _finish_gather(buckets: _ChunkBuckets) -> None:
        for pending in buckets.gathering.values():
            pending.wait()
        buckets.gathering.clear()


def _needs_sums(buffer: ParamAndGradBuffer, bucket: int) -> bool:
    """Return whether the bucket's gradients must first be summed over other axes, after the whole backward."""
    bucket_start = buffer.layout.buckets[bucket].start
    for part in buffer.layout.summed:
        if part.start <= bucket_start < part.stop:
            return any(buffer.axes.along(name).size > 1 for name in part.axes)
    return False
