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
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from megascale.config.axes import AXES
from megascale.core.schedule import WEIGHT_BACKWARDS, ActionKind
from megascale.ops.gradient_sink import GradientSink
from megascale.parallel.buffers import FlatShard, ParamAndGradBuffer
from megascale.parallel.collectives import (
    Axis,
    Pending,
    all_gather_into,
    all_reduce,
    reduce_scatter_in_place,
    reduce_scatter_rounded,
)
from megascale.parallel.copy_reduction import CopyReduction
from megascale.parallel.exchange import Exchange
from megascale.parallel.float8_gather import Float8Gather
from megascale.parallel.gradient_slots import GradientBucket, GradientSlots
from megascale.parallel.parameter_slots import ParameterSlots


class _ChunkBuckets:
    """Communication in flight for the buckets of one chunk, and the gradient counts of the present backward.

    Attributes:
        number: number of the chunk.
        contributions: additions to each parameter's gradient by a backward of each kind, learnt in the first one.
        counts: additions to each parameter's gradient in the present backward.
        kind: kind of the present backward.
        complete_at: parameters of each bucket that get a gradient by a backward of each kind. A parameter may get none
            because another chunk's copy is in use.
        incomplete: parameters of each bucket whose gradient is not complete in the present backward.
        unit_buckets: buckets that each unit of the forward needs.
        armed: whether the next backward, or the present one, is reduced.
        reduce_as_filled: whether the present backward reduces buckets as they fill.
        reductions: backwards of this step that were armed.
        reduces_resident: whether the present backward completes the gradients of buckets without a unit.
    """

    def __init__(self, number: int, buffer: ParamAndGradBuffer, float8: bool) -> None:
        self.number = number
        self.buffer = buffer
        self.float8 = Float8Gather(buffer) if float8 and buffer.zero < 3 else None
        self.contributions: dict[ActionKind, list[int]] = {}
        self.counts = [0] * len(buffer.parameters)
        self.kind = ActionKind.BACKWARD
        self.complete_at: dict[ActionKind, list[int]] = {}
        self.incomplete: list[int] = []
        self.unit_buckets: list[list[int]] = []
        self.armed = False
        self.reduce_as_filled = False
        self.reductions = 0
        self.reduces_resident = True
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


class DataParallel:
    """Communicates gradients and parameters of this rank's chunks between the data-parallel ranks.

    Args:
        buffers: the chunks' buffers, in the order of the schedule's chunk numbers.
        overlap: reduce buckets as they fill and gather ahead; without it both are awaited at once.
        reduce_dtype: communication dtype of gradients; None for their own.
        float8: gather the buckets of linear layers' matrices as float8, in which the chunks compute.
        microbatches: micro-batches of a step, each of which ZeRO-2 reduces; 0 if unknown.
        chunk_slots: ZeRO-3: slot of each chunk if chunks are gathered as a whole (core/unit_slots.py).
        gather_exchange: ZeRO-3: gathers matrices by copy engines.
        copy_reduction: ZeRO-2 and 3: reduces gradients of units by copy engines.

    Attributes:
        early_sink: sink of a gradient in a slot that a forward writes and completes; None without one.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        overlap: bool = True,
        reduce_dtype: torch.dtype | None = None,
        float8: bool = False,
        microbatches: int = 0,
        chunk_slots: Sequence[int] | None = None,
        gather_exchange: Exchange | None = None,
        copy_reduction: CopyReduction | None = None,
    ) -> None:
        self.buffers = list(buffers)
        self.overlap = overlap
        self._start_reduction = _choose_reduction(buffers[0], reduce_dtype)
        self._runtime = buffers[0].axes.tensor.runtime
        self._chunks = [_ChunkBuckets(number, buffer, float8) for number, buffer in enumerate(buffers)]
        self._tied: list[Pending] = []
        self._measured: tuple[_ChunkBuckets, int] | None = None  # the float8 bucket to gather after the next update
        self._armed_gather: tuple[_ChunkBuckets, dict[int, int]] | None = None  # and its buckets by id of their shard
        self.parameter_slots: ParameterSlots | None = None
        if buffers[0].zero == 3:
            self.parameter_slots = ParameterSlots(
                buffers, chunk_slots, prefetch=overlap, float8=float8, exchange=gather_exchange
            )
        for chunk in self._chunks:
            chunk.buffer.set_gradient_hook(partial(self._mark, chunk))
            if overlap:
                chunk.unit_buckets = chunk.buffer.find_unit_buckets()
            if self.parameter_slots is not None:
                chunk.buffer.module.pre_forward_gather = partial(  # type: ignore[assignment]
                    self._gather_before_forward, self.parameter_slots, chunk
                )
                chunk.buffer.module.pre_backward_gather = partial(  # type: ignore[assignment]
                    self._gather_before_backward, self.parameter_slots, chunk
                )
            elif chunk.unit_buckets or chunk.buffer.zero == 2:
                chunk.buffer.module.pre_forward_gather = partial(self._await_unit, chunk)  # type: ignore[assignment]
        self._early_bucket: GradientBucket | None = None  # whose gradient the forward of its unit writes
        self.early_sink: GradientSink | None = None
        self._is_in_step = False
        self._microbatches = microbatches
        self.slots: GradientSlots | None = None
        if buffers[0].zero >= 2:
            start_reduction = copy_reduction or self._start_reduction
            memory = None if copy_reduction is None else copy_reduction.memory
            self.slots = GradientSlots(buffers, self._chunks, start_reduction, self._runtime, memory)

    def drop_communication(self) -> None:
        """Forget everything in flight, because the step has failed and the groups are gone.

        What was learnt of the backwards goes too: the order of reductions follows from it, and a new peer has learnt
        nothing.
        """
        self._tied.clear()
        self._measured = None
        self._armed_gather = None
        for chunk in self._chunks:
            chunk.reducing.clear()
            chunk.gathering.clear()
            chunk.armed = False
            chunk.reduce_as_filled = False
            chunk.reductions = 0
            chunk.contributions.clear()
            chunk.complete_at.clear()
            if chunk.float8 is not None:
                chunk.float8.drop_communication()
        if self.slots is not None:
            self.slots.drop_communication()
        if self.parameter_slots is not None:
            self.parameter_slots.drop_communication()

    # gradients ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Zero the gradients of the last step."""
        for chunk in self._chunks:
            self._runtime.stream.synchronize()
            chunk.buffer.zero_grads(chunk.microbatch_contributions())
        if self.slots is not None:
            self._is_in_step = True
            self.slots.begin_step()
            for chunk in self._chunks:
                chunk.reductions = 0

    def arm_reductions(self, chunk: int) -> None:
        """Run REDUCE_GRADS: the chunk's next backward completes its gradients (ZeRO-2: this micro-batch's)."""
        buckets = self._chunks[chunk]
        buckets.armed = True
        if self.slots is not None:
            buckets.reductions += 1

    def begin_backward(self, chunk: int, kind: ActionKind = ActionKind.BACKWARD) -> None:
        """Prepare for a micro-batch's backward of the chunk, or for one half of it."""
        buckets = self._chunks[chunk]
        buffer = buckets.buffer
        buckets.kind = kind
        buckets.counts = [0] * len(buffer.parameters)
        if self.slots is not None:
            self.slots.is_writable = True
            buckets.reduces_resident = buckets.reductions == self._microbatches
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
                if self.slots is None:
                    self._reduce(buckets, bucket)
                else:
                    self._reduce_filled(self.slots, buckets, index)

    def end_backward(self, chunk: int, kind: ActionKind = ActionKind.BACKWARD) -> None:
        """Learn the contributions of a micro-batch, and reduce the armed buckets that are not in flight."""
        buckets = self._chunks[chunk]
        buckets.learn_contributions(kind)
        buckets.reduce_as_filled = False
        if self.slots is not None:
            self.slots.is_writable = False
        if not buckets.armed or kind not in WEIGHT_BACKWARDS:
            return
        buckets.armed = False
        self._runtime.stream.synchronize()
        if self.slots is not None:
            self.slots.reduce_chunk(chunk)
            if not self.overlap:
                self.slots.drain()
            if not buckets.reduces_resident:
                return
        self._reduce_resident(buckets)

    def begin_unit_backward(self, chunk: int, unit: int) -> None:
        """Prepare the backward of a unit in a replay, whose gradient sinks announce nothing.

        The gradients of the chunk's previous unit are complete; their reduction starts. Then this unit takes its slot
        of gradients, and its matrices are gathered.
        """
        buckets = self._chunks[chunk]
        assert self.slots is not None
        buckets.reduce_as_filled = False
        self.slots.is_writable = False
        self.end_unit_backwards(chunk)
        if not self._writes_early(chunk, unit):
            self.slots.open_unit(chunk, unit)
        if self.parameter_slots is not None:
            self._gather_before_backward(self.parameter_slots, buckets, unit)

    def open_early(self, chunk: int, unit: int) -> None:
        """Open the gradients of a unit before a replay of its forward, if that writes them."""
        if self._early_bucket is not None and self._writes_early(chunk, unit):
            self._early_bucket.open()

    def allow_early_gradients(self, weight: nn.Parameter) -> bool:
        """Let the forward of the last chunk write the gradient of `weight` into its slot, if nothing else lies there.

        The backward of a micro-batch must follow its forward at once. Returns whether it is allowed.
        """
        assert self.slots is not None
        buffer = self.buffers[-1]
        index = next(i for i, param in enumerate(buffer.parameters) if param is weight)
        bucket = self.slots.buckets[-1][buffer.bucket_of[index]]
        unit_buckets = [other for other in self.slots.buckets[-1] if other.unit == bucket.unit]
        if len(unit_buckets) > 1 or len(buffer.layout.buckets[bucket.index].members) > 1:
            return False
        self._early_bucket = bucket
        if self.overlap:
            self.early_sink = buffer.sinks[index]
            self.early_sink.complete = self._reduce_early
        return True

    def _reduce_early(self) -> None:
        """Reduce the gradient that a forward has written."""
        if self._is_in_step and self._early_bucket is not None:
            self._early_bucket.reduce()

    def _writes_early(self, chunk: int, unit: int) -> bool:
        """Return whether the forward of a unit writes its gradient into a slot."""
        bucket = self._early_bucket
        return bucket is not None and bucket.chunk == chunk and bucket.unit == unit

    def set_unit_overwrites(self, chunk: int, unit: int) -> None:
        """Let the GEMMs of a unit's backward, which is captured, overwrite the gradients that they alone write."""
        assert self.slots is not None
        self.slots.set_unit_overwrites(chunk, unit)

    def end_unit_backwards(self, chunk: int) -> None:
        """Record that replays have written the chunk's open buckets; with overlap, start to reduce them."""
        assert self.slots is not None
        self.slots.end_unit(chunk, reduces=self.overlap)

    def _reduce_resident(self, buckets: _ChunkBuckets) -> None:
        """Reduce the buckets without a unit that are not in flight (ZeRO-0 and 1: all buckets)."""
        buffer = buckets.buffer
        resident_start = buffer.resident_start
        buffer.zero_unwritten_grads()
        # Along an axis that cuts the batch, each rank has seen only its part of the tokens.
        for part in buffer.layout.summed:
            for name in part.axes:
                grads = buffer.grads[part.start - resident_start : part.stop - resident_start]
                all_reduce(grads, buffer.axes.along(name)).wait()
        for bucket in buffer.resident_buckets:
            if bucket not in buckets.reducing:
                self._reduce(buckets, bucket)
                if not self.overlap:
                    buckets.reducing[bucket].wait()

    def _reduce_filled(self, slots: GradientSlots, buckets: _ChunkBuckets, index: int) -> None:
        """Reduce the bucket of a parameter whose last gradient of the present backward is complete (ZeRO-2)."""
        bucket = buckets.buffer.bucket_of[index]
        if buckets.buffer.layout.units[bucket] is not None:
            slots.buckets[buckets.number][bucket].reduce()
        elif buckets.reduces_resident:
            self._reduce(buckets, bucket)

    def finish_reductions(self) -> None:
        """Wait until this rank's shards hold the sum over data-parallel ranks.

        With overlap the reduction of a tied embedding between its two stages is still in flight (`finish_tied`).
        """
        self._is_in_step = False
        if self.slots is not None:
            self.slots.finish()
        for chunk in self._chunks:
            buffer = chunk.buffer
            if self.slots is not None and len(chunk.reducing) < len(buffer.resident_buckets):
                self._runtime.stream.synchronize()
                self._reduce_resident(chunk)
            for pending in chunk.reducing.values():
                pending.wait()
            chunk.reducing.clear()
        self._sum_copies()
        for chunk in self._chunks:
            buffer = chunk.buffer
            if buffer.layout.tied_bucket is not None:
                self._tied.append(all_reduce(buffer.shards[buffer.layout.tied_bucket].grads, buffer.axes.tied))
        if not self.overlap:
            self.finish_tied()

    def _sum_copies(self) -> None:
        """Sum the shards' gradients over the ranks that hold copies of the shards."""
        pending = []
        for name in AXES.copies:
            for buffer in self.buffers:
                axis = buffer.axes.along(name)
                if axis.size > 1:
                    pending += [all_reduce(shard.grads, axis) for shard in buffer.shards]
        for reduction in pending:
            reduction.wait()

    def finish_tied(self) -> None:
        """Wait until both stages that hold a tied embedding have the sum of its gradients."""
        while self._tied:
            self._tied.pop().wait()

    @contextmanager
    def discard_gradients(self) -> Iterator[None]:
        """Run backwards whose gradients are not reduced and are overwritten by the next step."""
        slots = self.slots
        if slots is None:
            yield
            return
        start_reduction = slots.start_reduction
        slots.start_reduction = _take_own_part
        try:
            yield
            slots.finish()
        finally:
            slots.start_reduction = start_reduction

    def _reduce(self, buckets: _ChunkBuckets, bucket: int) -> None:
        self._runtime.stream.synchronize()
        buffer = buckets.buffer
        span = buffer.layout.buckets[bucket]
        start = span.start - buffer.resident_start
        grads = buffer.grads[start : span.stop - buffer.resident_start]
        buckets.reducing[bucket] = self._start_reduction(grads, buffer.axes.reduce)

    # parameters --------------------------------------------------------------------------------------------------

    def start_gather(self, chunk: int) -> None:
        """Run GATHER_PARAMS: gather the chunk's buckets in forward order, unless a gather is in flight."""
        buckets = self._chunks[chunk]
        if self.parameter_slots is not None:
            self.parameter_slots.start_first_gather(chunk)
        if buckets.gathering:
            return
        if buckets.float8 is not None:
            buckets.float8.start_amax_reduce()
        for bucket in buckets.buffer.forward_order:
            self._gather(buckets, bucket)
        if not self.overlap:
            self._finish_gather(buckets)

    def invalidate_gathered(self) -> None:
        """Invalidate weights in float8 or in slots, because shards are about to be updated or loaded."""
        self.finish_gathers()
        if self.parameter_slots is not None:
            self.parameter_slots.invalidate()
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
        if self.parameter_slots is not None and self.parameter_slots.is_gathering(chunk):
            return True
        return bool(self._chunks[chunk].gathering)

    def initialise(self, initialise: Callable[[nn.Parameter], None]) -> None:
        """Give the parameters in slots their initial values (ZeRO-3)."""
        if self.parameter_slots is not None:
            self.parameter_slots.fill(initialise)

    def gather_parameter(self, chunk: int, param: nn.Parameter) -> None:
        """Make a parameter complete, after `gather_full_parameters`, until the next call or step. Collective."""
        if self.parameter_slots is not None:
            self.parameter_slots.gather_parameter(chunk, param)

    def gather_full_parameters(self) -> None:
        """Gather all parameters in their own type, including those that training gathers as float8 only.

        Those in slots are gathered when a forward comes to them, or by `gather_parameter`.
        """
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
        if self.parameter_slots is not None:
            self.parameter_slots.wait()

    def _gather(self, buckets: _ChunkBuckets, bucket: int, full_precision: bool = False) -> None:
        """Start the gather of a bucket, as float8 where training does unless `full_precision`."""
        buffer = buckets.buffer
        data = buffer.axes.data
        if buffer.zero == 0 or data.size == 1 or bucket in buckets.gathering:
            return
        params_start = 0
        if buffer.zero == 3:
            if buffer.layout.units[bucket] is not None:
                return
            params_start = buffer.resident_start
        if buckets.float8 is not None and bucket in buckets.float8.buckets and not full_precision:
            buckets.gathering[bucket] = buckets.float8.start_gather(bucket)
            return
        # `.data` has its own version counter: gloo writes while a forward saves parameters that have arrived already,
        # and backward would take those for changed.
        params = buffer.params.data
        span = buffer.layout.buckets[bucket]
        start, stop = buffer.layout.shard(bucket, data.rank, data.size)
        whole = params[span.start - params_start : span.stop - params_start]
        buckets.gathering[bucket] = all_gather_into(whole, params[start - params_start : stop - params_start], data)

    def _await_unit(self, buckets: _ChunkBuckets, unit: int) -> None:
        if self._writes_early(buckets.number, unit) and torch.is_grad_enabled():
            assert self.slots is not None
            self.slots.is_writable = True
        if buckets.gathering and buckets.unit_buckets:
            for bucket in buckets.unit_buckets[unit]:
                pending = buckets.gathering.pop(bucket, None)
                if pending is not None:
                    pending.wait()

    def _gather_before_forward(self, slots: ParameterSlots, buckets: _ChunkBuckets, unit: int) -> None:
        self._await_unit(buckets, unit)
        slots.before_forward(buckets.number, unit)

    def _gather_before_backward(self, slots: ParameterSlots, buckets: _ChunkBuckets, unit: int) -> None:
        if unit == 0:
            return  # the backward of an embedding does not read it
        slots.before_backward(buckets.number, unit, buckets.reductions < self._microbatches)

    @staticmethod
    def _finish_gather(buckets: _ChunkBuckets) -> None:
        for pending in buckets.gathering.values():
            pending.wait()
        buckets.gathering.clear()


def _choose_reduction(
    buffer: ParamAndGradBuffer, reduce_dtype: torch.dtype | None
) -> Callable[[torch.Tensor, Axis], Pending]:
    """Return what sums a bucket's gradients over data-parallel ranks; from ZeRO-1 on, a rank gets its shard."""
    if buffer.zero == 0:
        return all_reduce
    if reduce_dtype is not None and reduce_dtype != buffer.grad_dtype:
        return partial(reduce_scatter_rounded, dtype=reduce_dtype)
    return reduce_scatter_in_place


def _take_own_part(grads: torch.Tensor, axis: Axis) -> Pending:
    """Return this rank's part of a bucket in place of a sum over ranks."""
    return Pending(grads.view(axis.size, -1)[axis.rank])


def _needs_sums(buffer: ParamAndGradBuffer, bucket: int) -> bool:
    """Return whether the bucket's gradients must first be summed over other axes, after the whole backward."""
    bucket_start = buffer.layout.buckets[bucket].start
    for part in buffer.layout.summed:
        if part.start <= bucket_start < part.stop:
            return any(buffer.axes.along(name).size > 1 for name in part.axes)
    return False
