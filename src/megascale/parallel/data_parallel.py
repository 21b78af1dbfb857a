"""Data parallelism of one rank: reductions of gradients and gathers of parameters, bucket by bucket.

The schedule decides when to communicate (core/schedule.py), and only this module communicates. A chunk's REDUCE_GRADS
arms its buckets: in the following backward, a bucket is reduced as soon as its last gradient is complete. GATHER_PARAMS
all-gathers the chunk's buckets in the order in which forward needs them. The first gather of a step begins during the
update of the previous step: each bucket is gathered as soon as this rank's shard of the bucket is updated (MegaScale
section 3.2). Without overlap, reductions and gathers are awaited where they start. Matrices that linear layers read in
float8 may be gathered as float8 (`float8_gather.py`).

A *unit* is the matrices that one module of the forward reads: the embedding (unit 0), each block, and the head. Buckets
of other parameters are *resident*. Below ZeRO-2 all buckets are resident.
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
from megascale.parallel.chunk_state import ChunkState
from megascale.parallel.collectives import (
    Axis,
    Pending,
    all_gather_into,
    all_reduce,
    reduce_scatter_in_place,
    reduce_scatter_rounded,
)
from megascale.parallel.copy_reduction import CopyReduction
from megascale.parallel.embedding_rows import EmbeddingRows, exchange_rows, find_embedding_bucket
from megascale.parallel.exchange import Exchange
from megascale.parallel.gradient_slots import GradientBucket, GradientSlots, ShardTarget, reduce_into_shard
from megascale.parallel.mapped_slots import MappedSlots
from megascale.parallel.parameter_slots import ParameterSlots
from megascale.parallel.slot_sink import run_at_once


class DataParallel:
    """Communicates gradients and parameters of this rank's chunks between the data-parallel ranks.

    Args:
        buffers: the chunks' buffers, in the order of the schedule's chunk numbers.
        overlap: reduce buckets during backward and gather ahead of forward; otherwise wait for each at once.
        reduce_dtype: type in which gradients are sent; None for the type of the gradients.
        float8: gather the buckets of linear layers' matrices as float8, in which the chunks compute.
        microbatches: number of micro-batches of a step, each of which ZeRO-2 reduces; 0 if unknown.
        chunk_slots: with ZeRO-3, slot of each chunk if complete chunks are gathered (core/unit_slots.py).
        gather_exchange: with ZeRO-3, gathers matrices by copy engines.
        copy_reduction: with ZeRO-2 and 3, reduces gradients of units by copy engines.
        persistent_blocks: with ZeRO-3, number of blocks whose matrices stay gathered until the update.
        mapped_slots: with `gather_exchange`, slots in which own shards lie; None: own shards are copied.

    Attributes:
        gradient_slots: gradients of units from ZeRO-2 on; None below.
        parameter_slots: matrices of units under ZeRO-3; None below.
        early_sink: sink of an early gradient, which a forward computes (`allow_early_gradients`); None without one.
        embedding_rows: reduces the token embedding of the first chunk by rows; None: its gradient is dense.
        run_reduction: runs the reduction of a resident bucket that a backward has completed. In a capture it cuts the
            graph instead.
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
        persistent_blocks: int = 0,
        mapped_slots: MappedSlots | None = None,
    ) -> None:
        self.buffers = list(buffers)
        self.overlap = overlap
        self.run_reduction: Callable[[Callable[[], None]], None] = run_at_once
        self._start_reduction = _choose_reduction(buffers[0], reduce_dtype)
        self._runtime = buffers[0].axes.tensor.runtime
        self._states = [ChunkState(chunk, buffer, float8) for chunk, buffer in enumerate(buffers)]
        self._pending_tied: list[Pending] = []
        # (chunk, its float8 bucket that is gathered when the next shard has been updated)
        self._next_float8_gather: tuple[ChunkState, int] | None = None
        # (chunk that is gathered during the update, index of each of its buckets by Python's id of this rank's shard)
        self._armed_gather: tuple[ChunkState, dict[int, int]] | None = None
        self.parameter_slots: ParameterSlots | None = None
        if buffers[0].zero == 3:
            self.parameter_slots = ParameterSlots(
                buffers,
                chunk_slots,
                prefetch=overlap,
                float8=float8,
                exchange=gather_exchange,
                persistent_blocks=persistent_blocks,
                mapped=mapped_slots,
            )
        for state in self._states:
            state.buffer.set_gradient_hook(partial(self._count_contribution, state))
            if overlap:
                state.unit_buckets = state.buffer.find_unit_buckets()
            if self.parameter_slots is not None:
                state.buffer.module.pre_forward_gather = partial(  # type: ignore[assignment]
                    self._gather_before_forward, self.parameter_slots, state
                )
                state.buffer.module.pre_backward_gather = partial(  # type: ignore[assignment]
                    self._gather_before_backward, self.parameter_slots, state
                )
            elif state.unit_buckets or state.buffer.zero == 2:
                state.buffer.module.pre_forward_gather = partial(self._await_unit, state)  # type: ignore[assignment]
        self._early_bucket: GradientBucket | None = None  # bucket of the early gradient
        self.early_sink: GradientSink | None = None
        self.embedding_rows: EmbeddingRows | None = None
        self._is_in_step = False
        self._microbatches = microbatches
        self.gradient_slots: GradientSlots | None = None
        if buffers[0].zero >= 2:
            start_reduction = copy_reduction or partial(reduce_into_shard, self._start_reduction)
            self.gradient_slots = GradientSlots(
                buffers,
                self._states,
                start_reduction,
                runtime=self._runtime,
                memory=None if copy_reduction is None else copy_reduction.memory,
                rounded=None if copy_reduction is None else copy_reduction.rounded,
                rounds_blocks=copy_reduction is not None and copy_reduction.rounds_blocks,
                overlaps_parts=overlap,
            )

    def drop_communication(self) -> None:
        """Forget everything in flight, because the step has failed and the groups are gone.

        The recorded contributions are forgotten too. They determine the order of reductions, and a rank that is new in
        the next groups has no records.
        """
        self._pending_tied.clear()
        self._next_float8_gather = None
        self._armed_gather = None
        if self.embedding_rows is not None:
            self.embedding_rows.drop()
        for state in self._states:
            state.drop_communication()
        if self.gradient_slots is not None:
            self.gradient_slots.drop_communication()
        if self.parameter_slots is not None:
            self.parameter_slots.drop_communication()

    # gradients ---------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Zero the gradients before a step."""
        if self.embedding_rows is not None:
            self.embedding_rows.drop()
        for state in self._states:
            self._runtime.stream.synchronize()
            state.buffer.zero_grads(state.count_microbatch_contributions())
        if self.gradient_slots is not None:
            self._is_in_step = True
            self.gradient_slots.begin_step()
            for state in self._states:
                state.armed_count = 0

    def reduce_embedding_by_rows(self) -> bool:
        """Reduce the first chunk's token embedding by rows from now on. Return whether its layout allows that."""
        bucket = find_embedding_bucket(self.buffers[0])
        if bucket is None:
            return False
        self.embedding_rows = exchange_rows(self.buffers[0], bucket)
        return True

    def arm_reductions(self, chunk: int) -> None:
        """Run REDUCE_GRADS: let the chunk's next backward reduce its gradients.

        Below ZeRO-2 these are the gradients of the whole step, from ZeRO-2 on those of one micro-batch.
        """
        state = self._states[chunk]
        state.is_armed = True
        if self.gradient_slots is not None:
            state.armed_count += 1

    def begin_backward(self, chunk: int, kind: ActionKind = ActionKind.BACKWARD) -> None:
        """Prepare for a micro-batch's backward of the chunk, or for one half of the backward if it is split."""
        state = self._states[chunk]
        buffer = state.buffer
        state.backward_kind = kind
        state.counts = [0] * len(buffer.parameters)
        if self.gradient_slots is not None:
            self.gradient_slots.is_writable = True
            # From ZeRO-2 on every micro-batch's backward is armed, so this one is the last.
            state.reduces_resident = state.armed_count == self._microbatches
        completes_weights = kind in WEIGHT_BACKWARDS
        has_counts = kind in state.recorded_counts
        state.reduces_as_filled = self.overlap and state.is_armed and completes_weights and has_counts
        state.incomplete_counts = list(state.expected_counts.get(kind, ()))

    def _count_contribution(self, state: ChunkState, index: int) -> None:
        """Count a contribution to a parameter. The last one of an armed bucket starts the bucket's reduction."""
        state.counts[index] += 1
        if state.reduces_as_filled and state.counts[index] == state.recorded_counts[state.backward_kind][index]:
            bucket = state.buffer.bucket_by_param[index]
            state.incomplete_counts[bucket] -= 1
            if not state.incomplete_counts[bucket] and not _needs_axis_sums(state.buffer, bucket):
                if self.gradient_slots is None:
                    self.run_reduction(partial(self._reduce_if_armed, state, bucket))
                else:
                    self._reduce_filled(self.gradient_slots, state, index)

    def _reduce_if_armed(self, state: ChunkState, bucket: int) -> None:
        """Reduce a bucket whose gradients are complete. A replay does this only in a backward that is armed."""
        if state.reduces_as_filled:
            self._reduce(state, bucket)

    @contextmanager
    def capture_reductions(self, chunk: int) -> Iterator[None]:
        """Pass the reductions of an armed backward to `run_reduction` while this backward is captured (ZeRO-0 and 1).

        Captured operators do not run, so the caller may not run these reductions before a replay.
        """
        state = self._states[chunk]
        state.counts = [0] * len(state.buffer.parameters)
        state.reduces_as_filled = self.overlap and ActionKind.BACKWARD in state.recorded_counts
        state.incomplete_counts = list(state.expected_counts.get(ActionKind.BACKWARD, ()))
        try:
            yield
        finally:
            state.reduces_as_filled = False

    def list_unused_parameters(self, chunk: int) -> list[torch.nn.Parameter]:
        """Return a chunk's parameters to which no backward has added a gradient; none before the first backward."""
        state = self._states[chunk]
        if not state.recorded_counts:
            return []
        counts = [sum(kinds) for kinds in zip(*state.recorded_counts.values(), strict=True)]
        return [param for param, count in zip(state.buffer.parameters, counts, strict=True) if not count]

    def end_backward(self, chunk: int, kind: ActionKind = ActionKind.BACKWARD) -> None:
        """Record the contributions in the backward, and reduce the armed buckets that are not in flight."""
        state = self._states[chunk]
        is_first = kind not in state.recorded_counts
        state.record_contributions(kind)
        state.reduces_as_filled = False
        if self.gradient_slots is not None:
            if is_first:
                self.gradient_slots.check_rounded(chunk)
            self.gradient_slots.is_writable = False
        if not state.is_armed or kind not in WEIGHT_BACKWARDS:
            return
        state.is_armed = False
        self._runtime.stream.synchronize()
        if self.gradient_slots is not None:
            self.gradient_slots.reduce_chunk(chunk)
            if not self.overlap:
                self.gradient_slots.drain()
            if not state.reduces_resident:
                return
        self._reduce_resident(state)

    def begin_unit_backward(self, chunk: int, unit: int) -> None:
        """Prepare the backward of a unit in a replay of CUDA graphs, in which gradient sinks do not run.

        Start the reduction of the chunk's previous unit, whose gradients are complete. Then open this unit's slot of
        gradients, and gather its matrices.
        """
        state = self._states[chunk]
        assert self.gradient_slots is not None
        state.reduces_as_filled = False
        self.gradient_slots.is_writable = False
        self.end_unit_backwards(chunk)
        if not self._writes_early(chunk, unit):
            self.gradient_slots.open_unit(chunk, unit)
        if self.parameter_slots is not None:
            self._gather_before_backward(self.parameter_slots, state, unit)

    def open_early_slot(self, chunk: int, unit: int) -> None:
        """Open the slot of a unit's early gradient before a replay of its forward, if the unit has one."""
        bucket = self._early_bucket
        if bucket is not None and self._writes_early(chunk, unit) and not bucket.is_part:
            bucket.open()

    def allow_early_gradients(self, weight: nn.Parameter) -> bool:
        """Let the forward of the last chunk write the gradient of `weight` into its slot (an early gradient).

        Return whether that is possible: the unit must have no other gradient. The backward of a micro-batch must
        follow its forward at once.
        """
        assert self.gradient_slots is not None
        buffer = self.buffers[-1]
        index = [param is weight for param in buffer.parameters].index(True)
        bucket = self.gradient_slots.buckets[-1][buffer.bucket_by_param[index]]
        unit_members: set[int] = set()
        for candidate in self.gradient_slots.buckets[-1]:
            if candidate.unit == bucket.unit:
                unit_members.update(buffer.layout.buckets[candidate.index].members)
        if unit_members != {index}:
            return False
        self._early_bucket = bucket
        if self.overlap and not bucket.is_part:  # the writer of a divided gradient reduces its parts
            self.early_sink = buffer.sinks[index]
            self.early_sink.complete = self._reduce_early
        return True

    def _reduce_early(self) -> None:
        """Reduce the early gradient, which a forward has written."""
        if self._is_in_step and self._early_bucket is not None:
            self._early_bucket.reduce()

    def _writes_early(self, chunk: int, unit: int) -> bool:
        """Return whether the forward of the unit writes an early gradient."""
        bucket = self._early_bucket
        return bucket is not None and bucket.chunk == chunk and bucket.unit == unit

    def set_unit_overwrites(self, chunk: int, unit: int) -> None:
        """Let the captured GEMMs of a unit's backward overwrite the gradients that no other operator adds to."""
        assert self.gradient_slots is not None
        self.gradient_slots.set_unit_overwrites(chunk, unit)

    def end_unit_backwards(self, chunk: int) -> None:
        """Record that replays have written the chunk's open buckets; with overlap, start to reduce them."""
        assert self.gradient_slots is not None
        self.gradient_slots.end_unit(chunk, reduces=self.overlap)

    def _reduce_resident(self, state: ChunkState) -> None:
        """Reduce the buckets without a unit that are not in flight (ZeRO-0 and 1: all buckets)."""
        buffer = state.buffer
        resident_start = buffer.resident_start
        buffer.zero_unwritten_grads()
        # A parameter that is replicated along an axis that cuts the batch has gradients of a part of the tokens.
        for summed_range in buffer.layout.summed_ranges:
            # `buffer.grads` holds resident parameters only, while ranges count from the start of the whole layout.
            grads = buffer.grads[summed_range.start - resident_start : summed_range.stop - resident_start]
            for name in summed_range.axes:
                all_reduce(grads, buffer.axes.along(name)).wait()
        for bucket in buffer.resident_buckets:
            if bucket not in state.pending_reductions:
                self._reduce(state, bucket)
                if not self.overlap:
                    state.pending_reductions[bucket].wait()

    def _reduce_filled(self, slots: GradientSlots, state: ChunkState, index: int) -> None:
        """Reduce the bucket of a parameter whose last gradient of the present backward is complete (ZeRO-2)."""
        bucket = state.buffer.bucket_by_param[index]
        if state.buffer.layout.units[bucket] is not None:
            slots.buckets[state.chunk][bucket].reduce()
        elif state.reduces_resident:
            self._reduce(state, bucket)

    def finish_reductions(self) -> None:
        """Wait until this rank's shards have the gradients summed over data-parallel ranks.

        With overlap, the sum of a tied embedding over its two stages is still in flight (`finish_tied`).
        """
        self._is_in_step = False
        if self.gradient_slots is not None:
            self.gradient_slots.finish()
        for state in self._states:
            buffer = state.buffer
            if self.gradient_slots is not None and len(state.pending_reductions) < len(buffer.resident_buckets):
                # No backward has reduced the resident buckets, since the number of micro-batches is unknown.
                self._runtime.stream.synchronize()
                self._reduce_resident(state)
            for pending in state.pending_reductions.values():
                pending.wait()
            state.pending_reductions.clear()
        self._sum_copies()
        for state in self._states:
            buffer = state.buffer
            if buffer.layout.tied_bucket is not None:
                self._pending_tied.append(all_reduce(buffer.shards[buffer.layout.tied_bucket].grads, buffer.axes.tied))
        if not self.overlap:
            self.finish_tied()

    def _sum_copies(self) -> None:
        """Sum the shards' gradients over the ranks that hold copies of the shards."""
        reductions = []
        for name in AXES.copies:
            for buffer in self.buffers:
                axis = buffer.axes.along(name)
                if axis.size > 1:
                    reductions += [all_reduce(shard.grads, axis) for shard in buffer.shards]
        for reduction in reductions:
            reduction.wait()

    def finish_tied(self) -> None:
        """Wait until both stages that hold a tied embedding have the sum of its gradients."""
        while self._pending_tied:
            self._pending_tied.pop().wait()

    @contextmanager
    def discard_gradients(self) -> Iterator[None]:
        """Enclose backwards whose gradients are not reduced. The next step overwrites these gradients."""
        slots = self.gradient_slots
        if slots is None:
            yield
            return
        start_reduction = slots.start_reduction
        slots.start_reduction = _discard_reduction
        try:
            yield
            slots.finish()
        finally:
            slots.start_reduction = start_reduction

    def _reduce(self, state: ChunkState, bucket: int) -> None:
        """Start the reduction of a resident bucket."""
        self._runtime.stream.synchronize()
        buffer = state.buffer
        rows = self.embedding_rows
        if rows is not None and state.chunk == 0 and bucket == rows.bucket:
            state.pending_reductions[bucket] = rows.reduce()
            return
        span = buffer.layout.buckets[bucket]
        start = span.start - buffer.resident_start
        grads = buffer.grads[start : span.stop - buffer.resident_start]
        state.pending_reductions[bucket] = self._start_reduction(grads, buffer.axes.reduce)

    # parameters --------------------------------------------------------------------------------------------------

    def start_gather(self, chunk: int) -> None:
        """Run GATHER_PARAMS: gather the chunk's buckets in forward order, unless a gather of them is in flight."""
        state = self._states[chunk]
        if self.parameter_slots is not None:
            self.parameter_slots.start_first_gather(chunk)
        if state.pending_gathers:
            return
        if state.float8 is not None:
            state.float8.start_amax_reduce()
        for bucket in state.buffer.forward_order:
            self._gather(state, bucket)
        if not self.overlap:
            self._finish_gather(state)

    def invalidate_gathered(self) -> None:
        """Invalidate gathered weights in float8 or in slots, because shards are about to be updated or loaded."""
        self.finish_gathers()
        if self.parameter_slots is not None:
            self.parameter_slots.invalidate()
        for state in self._states:
            if state.float8 is not None:
                state.float8.invalidate()

    def gather_under_update(self, chunk: int) -> Callable[[FlatShard], None]:
        """Let the chunk's buckets be gathered during the update.

        Returns:
            The function that the update calls with each updated shard. It gathers the shard's bucket. A float8 bucket
            is gathered only after the next shard, when ranks have agreed on the bucket's scales; `end_update` gathers
            the last float8 bucket. Without overlap the function does nothing.
        """
        if self.overlap:
            state = self._states[chunk]
            self._armed_gather = state, {id(shard): bucket for bucket, shard in enumerate(state.buffer.shards)}
        return self._on_shard_updated

    def _on_shard_updated(self, shard: FlatShard) -> None:
        """Gather the bucket of an updated shard of the armed chunk."""
        if self._armed_gather is None:
            return
        state, bucket_by_shard = self._armed_gather
        bucket = bucket_by_shard.get(id(shard))
        if bucket is None:  # a shard of another chunk
            self.end_update()
        elif state.float8 is not None and bucket in state.float8.buckets:
            state.float8.start_amax_reduce(bucket)
            self.end_update()  # gathers the previous float8 bucket, whose scales are known by now
            self._next_float8_gather = state, bucket
        else:
            self._gather(state, bucket)

    def end_update(self) -> None:
        """Gather the float8 bucket that `gather_under_update` has postponed, if any."""
        if self._next_float8_gather is not None:
            state, bucket = self._next_float8_gather
            self._next_float8_gather = None
            self._gather(state, bucket)

    def await_parameters(self, chunk: int) -> None:
        """Wait for the chunk's parameters before a forward, unless its module waits for each unit."""
        state = self._states[chunk]
        if not state.unit_buckets:
            self._finish_gather(state)

    def list_awaited_units(self, chunk: int) -> list[int]:
        """Return the units before whose forward the module waits for buckets that no earlier unit has awaited."""
        state = self._states[chunk]
        if state.buffer.zero == 0:
            return []
        awaited_buckets: set[int] = set()
        awaited_units = []
        for unit, buckets in enumerate(state.unit_buckets):
            if not awaited_buckets.issuperset(buckets):
                awaited_units.append(unit)
            awaited_buckets.update(buckets)
        return awaited_units

    def is_gathering(self, chunk: int) -> bool:
        """Return whether a gather of the chunk is in flight."""
        if self.parameter_slots is not None and self.parameter_slots.is_gathering(chunk):
            return True
        return bool(self._states[chunk].pending_gathers)

    def initialise_slots(self, fill: Callable[[nn.Parameter], None]) -> None:
        """Initialise the parameters in slots by `fill`, which fills one parameter (ZeRO-3)."""
        if self.parameter_slots is not None:
            self.parameter_slots.initialise(fill)

    def gather_parameter(self, chunk: int, param: nn.Parameter) -> None:
        """Make a parameter complete, after `gather_full_parameters`, until the next call or step. Collective."""
        if self.parameter_slots is not None:
            self.parameter_slots.gather_parameter(chunk, param)

    def gather_full_parameters(self) -> None:
        """Gather all parameters in their own type, including those that training gathers as float8 only.

        Parameters in slots are gathered later: before their unit's forward, or by `gather_parameter`.
        """
        for chunk, state in enumerate(self._states):
            if state.float8 is None:
                self.start_gather(chunk)
                self._finish_gather(state)
                continue
            is_gathered = bool(state.pending_gathers)
            self._finish_gather(state)
            for bucket in state.buffer.forward_order:
                if bucket in state.float8.buckets or not is_gathered:
                    self._gather(state, bucket, full_precision=True)
            self._finish_gather(state)
            state.float8.set_weights_gathered()

    def list_weights_in_use(self) -> Iterator[torch.Tensor]:
        """Yield the gathered weights that a step computes with. They are equal on all data-parallel ranks."""
        for state in self._states:
            params = state.buffer.params
            if state.float8 is None:
                yield params
                continue
            for bucket, span in enumerate(state.buffer.layout.buckets):
                if bucket not in state.float8.buckets:
                    yield params[span.start : span.stop]
            yield from state.float8.list_weights_in_use()

    def finish_gathers(self) -> None:
        """Wait for all gathers in flight."""
        self.end_update()
        for state in self._states:
            self._finish_gather(state)
        if self.parameter_slots is not None:
            self.parameter_slots.wait()

    def _gather(self, state: ChunkState, bucket: int, full_precision: bool = False) -> None:
        """Start the gather of a bucket, in the type of training, or in the weights' own type if `full_precision`."""
        buffer = state.buffer
        data = buffer.axes.data
        if buffer.zero == 0 or data.size == 1 or bucket in state.pending_gathers:
            return
        params_start = 0
        if buffer.zero == 3:
            if buffer.layout.units[bucket] is not None:
                return
            params_start = buffer.resident_start
        if state.float8 is not None and bucket in state.float8.buckets and not full_precision:
            state.pending_gathers[bucket] = state.float8.start_gather(bucket)
            return
        # `.data` has a version counter of its own. Gloo writes into one bucket while a forward saves parameters of
        # another one, and with a common counter backward would refuse these as modified.
        params = buffer.params.data
        span = buffer.layout.buckets[bucket]
        start, stop = buffer.layout.find_shard(bucket, data.rank, data.size)
        gathered = params[span.start - params_start : span.stop - params_start]
        shard = params[start - params_start : stop - params_start]
        state.pending_gathers[bucket] = all_gather_into(gathered, shard, data)

    def _await_unit(self, state: ChunkState, unit: int) -> None:
        """Wait for the parameters of a unit before its forward, and allow the forward to write an early gradient."""
        if self._early_bucket is not None and torch.is_grad_enabled() and self._writes_early(state.chunk, unit):
            assert self.gradient_slots is not None
            self.gradient_slots.is_writable = True
        if state.pending_gathers and state.unit_buckets:
            for bucket in state.unit_buckets[unit]:
                pending = state.pending_gathers.pop(bucket, None)
                if pending is not None:
                    pending.wait()

    def _gather_before_forward(self, slots: ParameterSlots, state: ChunkState, unit: int) -> None:
        """Wait for a unit's resident parameters and gather its matrices, before its forward (ZeRO-3)."""
        self._await_unit(state, unit)
        slots.before_forward(state.chunk, unit)

    def _gather_before_backward(self, slots: ParameterSlots, state: ChunkState, unit: int) -> None:
        """Gather the matrices of a unit before its backward (ZeRO-3)."""
        if unit == 0:
            return  # the backward of an embedding does not read it
        slots.before_backward(state.chunk, unit, has_next_microbatch=state.armed_count < self._microbatches)

    @staticmethod
    def _finish_gather(state: ChunkState) -> None:
        """Wait for all gathers of a chunk's buckets."""
        for pending in state.pending_gathers.values():
            pending.wait()
        state.pending_gathers.clear()


def _choose_reduction(
    buffer: ParamAndGradBuffer, reduce_dtype: torch.dtype | None
) -> Callable[[torch.Tensor, Axis], Pending]:
    """Return the function that sums a bucket's gradients over data-parallel ranks.

    It is an all-reduce with ZeRO-0 and a reduce-scatter from ZeRO-1 on.
    """
    if buffer.zero == 0:
        return all_reduce
    if reduce_dtype is not None and reduce_dtype != buffer.grad_dtype:
        return partial(reduce_scatter_rounded, dtype=reduce_dtype)
    return reduce_scatter_in_place


def _discard_reduction(grads: torch.Tensor, axis: Axis, target: ShardTarget) -> Pending:
    """Leave the shard's gradients as they are."""
    return Pending(target.grads)


def _needs_axis_sums(buffer: ParamAndGradBuffer, bucket: int) -> bool:
    """Return whether the bucket's gradients must be summed over other axes before their reduction."""
    bucket_start = buffer.layout.buckets[bucket].start
    for summed_range in buffer.layout.summed_ranges:
        # A bucket lies completely inside or outside a range.
        if summed_range.start <= bucket_start < summed_range.stop:
            return any(buffer.axes.along(name).size > 1 for name in summed_range.axes)
    return False
