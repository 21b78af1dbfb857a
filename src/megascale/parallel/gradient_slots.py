"""Gradients of units in slots: from ZeRO-2 on, the gradients of a unit exist only until they are reduced.

The matrices of a unit of the forward (a block, the embedding, the head) have buckets of their own. ZeRO-2 divides a
unit into several buckets, so that most of a block is reduced before its backward ends.

A bucket goes through these states in every micro-batch:

1. Open: in backward, the first operator that writes one of the bucket's gradients opens the bucket. Before that, other
   buckets that use the same memory are reduced and drained.
2. In reduction: the sum over data-parallel ranks starts when the bucket's last gradient is complete, or when another
   bucket needs the memory.
3. Drained: the sum is added to the float32 gradients of the rank's shard. The first reduction of a step overwrites
   these instead.

Blocks use two slots in turn, so that one is reduced while the backward of the next block fills the other. Embedding
and head, which may be much larger than a block, use the memory of both slots. The address of a gradient never changes.

ZeRO-2 divides a table that is larger than the slots by rows. Its parts use the slots' memory in turn. A part is open
only while one operator writes it. The loss writes the head once per group of tokens, so each part is then reduced once
per group of tokens.

Gradients may be sent in a narrower type than they are summed in (copy_reduction.py). The rounded slots then hold what
is sent. Where GEMMs round all gradients of blocks, blocks have rounded slots only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megascale import torch_private
from megascale.core.schedule import ActionKind
from megascale.core.unit_slots import find_gaps
from megascale.parallel.buffer_layout import FlatLayout, compute_slot_starts
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Axis, Pending
from megascale.parallel.parameters import get_spec
from megascale.parallel.runtime import Runtime
from megascale.parallel.slot_sink import RowPart, SlotSink, TableSink


class BackwardState(Protocol):
    """The state of a chunk's present backward.

    Attributes:
        recorded_counts: by kind of backward, how often each parameter's gradient is added to; kinds without a backward
            so far are missing.
    """

    backward_kind: ActionKind
    recorded_counts: dict[ActionKind, list[int]]


class _WritePlan(NamedTuple):
    """Plan of the writes to a bucket's gradients in a backward of one kind.

    Attributes:
        zeroed: ranges of the bucket that are set to zero first, because operators add to them.
        overwritten: sinks whose gradients the next GEMM overwrites, because no other operator adds to them.
        views: the memory that each sink writes.
        unrounded: ranges of elements that are not written to the rounded slots directly.
    """

    zeroed: list[torch.Tensor]
    overwritten: list[SlotSink]
    views: list[tuple[SlotSink, torch.Tensor]]
    unrounded: list[tuple[int, int]]


@dataclass(frozen=True)
class ShardTarget:
    """Gradients to which a reduction adds its result.

    Attributes:
        grads: gradients of the rank's shard of the bucket.
        accumulates: whether the result is added; otherwise it replaces the gradients.
        unrounded: ranges of elements of the bucket that the rounded slots do not hold yet.
    """

    grads: torch.Tensor
    accumulates: bool
    unrounded: Sequence[tuple[int, int]] = ()


# Starts to reduce a bucket's gradients. The shard has the sum when the result has been awaited.
StartSlotReduction = Callable[[torch.Tensor, Axis, ShardTarget], Pending]


def reduce_into_shard(
    start_reduction: Callable[[torch.Tensor, Axis], Pending], grads: torch.Tensor, axis: Axis, target: ShardTarget
) -> Pending:
    """Reduce by `start_reduction`, whose result is this rank's slice of the sum, and add the result to the shard."""
    reduction = start_reduction(grads, axis)

    def add() -> None:
        reduced = reduction.wait()
        if target.accumulates:
            target.grads.add_(reduced)
        else:
            target.grads.copy_(reduced)

    return Pending(target.grads, finish=add)


class _GradientView(NamedTuple):
    """Memory in which a parameter's gradient can be written.

    Attributes:
        member: index of the parameter in the chunk.
        first: its first element in the bucket.
        view: the gradient in the slot.
        rounded: the gradient in the rounded slot; None without rounded slots.
    """

    member: int
    sink: SlotSink
    first: int
    view: torch.Tensor
    rounded: torch.Tensor | None


class GradientBucket:
    """One bucket of a unit, with its memory in the slots and its reduction.

    Attributes:
        unit: index of the unit in the chunk's forward.
        start, stop: range of elements in the slots' memory.
        is_rounded: whether all gradients of the bucket are written to the rounded slots.
        grads: the bucket's gradients, a view of the slots' memory, or of the rounded slots if `is_rounded`. With
            rounded slots GEMMs may write their gradients to those instead; `widen` copies them here.
        is_open: whether the bucket has gradients of the present backward that are not reduced yet.
        is_reduced: whether this step has reduced the bucket before, so that the next result is added.
    """

    def __init__(self, slots: GradientSlots, buffer: ParamAndGradBuffer, chunk: int, index: int, start: int) -> None:
        self.slots = slots
        self.chunk = chunk
        self.index = index
        self.unit = buffer.layout.units[index]
        self._buffer = buffer
        self._span = buffer.layout.buckets[index]
        self.start = start
        self.stop = start + self._span.stop - self._span.start
        self.is_rounded = slots.rounds_blocks and is_block(self.unit, buffer.count_units())
        if self.is_rounded:
            assert slots.rounded is not None
            self.grads = slots.rounded[start : self.stop]
        else:
            self.grads = slots.memory[start : self.stop]
        self._shard_grads = buffer.shards[index].grads
        self.is_open = False
        self.is_reduced = False
        self._pending: Pending | None = None
        self._write_plans: dict[ActionKind, _WritePlan] = {}
        self._overwritten: list[SlotSink] = []  # as in the plan of the present backward
        self._views: list[_GradientView] = []
        unrounded = [] if self.is_rounded else [(0, self.stop - start)]
        self._first_plan = _WritePlan([self.grads], overwritten=[], views=[], unrounded=unrounded)
        self._plan = self._first_plan  # of the present or last backward
        if self._span.rows is not None:
            self._add_part(buffer, self._span.rows)
            return
        for i in self._span.members:
            sink = buffer.sinks[i]
            assert isinstance(sink, SlotSink)
            first = buffer.layout.starts[i] - self._span.start
            shape = buffer.parameters[i].shape
            view = self.grads[first : first + shape.numel()].view(shape)
            rounded = None
            if slots.rounded is not None:
                rounded = slots.rounded[start + first : start + first + shape.numel()].view(shape)
            self._views.append(_GradientView(i, sink, first, view, rounded))
            sink.view = view
            sink.before_write = self.open_for_write
            self._first_plan.views.append((sink, view))
            if self.is_rounded:
                self._first_plan.overwritten.append(sink)  # no GEMM adds to memory of 16 bits

    def _add_part(self, buffer: ParamAndGradBuffer, rows: tuple[int, int]) -> None:
        """Let the sink of a divided table write `rows` of its gradient to this bucket."""
        (member,) = self._span.members
        sink = buffer.sinks[member]
        assert isinstance(sink, TableSink)
        shape = (rows[1] - rows[0], *buffer.parameters[member].shape[1:])
        view = self.grads[: math.prod(shape)].view(shape)
        sink.parts.append(RowPart(slice(*rows), view, self._open_part, self._reduce_part))

    @property
    def is_part(self) -> bool:
        """Whether the bucket holds a part of a divided table."""
        return self._span.rows is not None

    def _open_part(self, is_overwritten: bool) -> None:
        """Take the memory of a part, and zero what is not overwritten."""
        self._take_memory()
        first_zeroed = 0
        if is_overwritten:
            (member,) = self._span.members
            assert self._span.rows is not None
            row_elements = self._buffer.parameters[member].shape[1:].numel()
            first_zeroed = (self._span.rows[1] - self._span.rows[0]) * row_elements  # the rest is padding
        self.grads[first_zeroed:].zero_()
        self.slots.runtime.stream.wait_for_main()

    def _reduce_part(self) -> None:
        """Reduce a part that has been written; without overlap, wait for the sum."""
        self.reduce()
        if not self.slots.overlaps_parts:
            self.drain()

    def overlaps(self, bucket: GradientBucket) -> bool:
        """Return whether this bucket and `bucket` use the same memory."""
        return self.start < bucket.stop and bucket.start < self.stop

    def open_for_write(self) -> None:
        """Open the bucket if it is closed and a backward is running, which is about to write one of its gradients."""
        if not self.is_open and self.slots.is_writable:
            self.open()

    def open(self) -> None:
        """Take the bucket's memory from its previous users, and zero the gradients that no GEMM will overwrite."""
        self._take_memory()
        self._follow_plan()
        if self._plan.zeroed:
            torch_private.foreach_zero_(self._plan.zeroed)
        self._set_sinks(True)
        self.slots.runtime.stream.wait_for_main()  # GEMMs on the side stream write gradients too

    def _take_memory(self) -> None:
        """Reduce and drain the buckets that use the same memory, and open this one."""
        if self.is_open:
            raise RuntimeError("a bucket of gradients was opened twice; reduce it first")
        for bucket in list(self.slots.active):
            if bucket.overlaps(self):
                bucket.reduce()
                bucket.drain()
        self.slots.active.append(self)
        self.is_open = True

    def plan_captured_writes(self) -> None:
        """Let the captured GEMMs of a backward overwrite the gradients that no other operator adds to."""
        self._follow_plan()
        self._set_sinks(True)

    def mark_written(self) -> None:
        """Record that a replay has written all gradients of the bucket."""
        self._set_sinks(False)

    def _set_sinks(self, should_overwrite: bool) -> None:
        """Let the next GEMM of each parameter in `_overwritten` overwrite its gradient, or add to it."""
        for sink in self._overwritten:
            sink.should_overwrite = should_overwrite

    def _follow_plan(self) -> None:
        """Let the sinks write as in the plan for a backward of the present kind."""
        write_plan = self._plan_writes(self.slots.states[self.chunk])
        self._overwritten = write_plan.overwritten
        if write_plan is self._plan:
            return
        self._plan = write_plan
        for sink, view in write_plan.views:
            sink.view = view

    def _plan_writes(self, state: BackwardState) -> _WritePlan:
        """Return the plan for a backward of the present kind. The first backward of a kind zeroes all gradients."""
        write_plan = self._write_plans.get(state.backward_kind)
        if write_plan is not None:
            return write_plan
        write_counts = state.recorded_counts.get(state.backward_kind)
        if write_counts is None:
            return self._first_plan
        overwritten = []
        overwritten_ranges = []
        rounded_ranges = []
        views = []
        for member, sink, first, view, rounded in self._views:
            is_overwritten = write_counts[member] == 1 and sink.is_gemm_gradient
            if self.is_rounded and write_counts[member] and not (is_overwritten and sink.can_be_rounded):
                raise RuntimeError(self._explain_unrounded(member))
            elements = first, first + view.numel()
            if is_overwritten:
                overwritten.append(sink)
                overwritten_ranges.append(elements)
            if is_overwritten and sink.can_be_rounded and rounded is not None:
                rounded_ranges.append(elements)
                views.append((sink, rounded))
            else:
                views.append((sink, view))
        size = self.stop - self.start
        zeroed = [self.grads[first:last] for first, last in find_gaps(0, size, overwritten_ranges)]
        unrounded = [] if self.is_rounded else find_gaps(0, size, rounded_ranges)
        write_plan = _WritePlan(zeroed, overwritten, views, unrounded)
        self._write_plans[state.backward_kind] = write_plan
        return write_plan

    def check_rounded(self) -> None:
        """Raise RuntimeError if a recorded gradient of the bucket is not the rounded result of one GEMM."""
        self._plan_writes(self.slots.states[self.chunk])

    def _explain_unrounded(self, member: int) -> str:
        """Return the error for a matrix of a rounded bucket whose gradient is not the rounded result of one GEMM."""
        names = ", ".join(piece.name for piece in get_spec(self._buffer.parameters[member]).pieces)
        return (
            "parallel.reduce_dtype=bfloat16 with overlap.reductions=copies keeps the gradients of blocks in bfloat16 "
            f"only, but {names} has a gradient that is not written by one GEMM; set "
            "--overlap.reductions=collectives or --parallel.reduce_dtype=float32"
        )

    def widen(self) -> torch.Tensor:
        """Return `grads` with all gradients, also those that GEMMs have written to the rounded slots."""
        if self.is_rounded:
            return self.grads
        for item in self._views:
            if item.sink.view is item.rounded:
                item.view.copy_(item.rounded)
        return self.grads

    def reduce(self) -> None:
        """Start the reduction of an open bucket."""
        if not self.is_open:
            return
        self.slots.runtime.stream.synchronize()
        for sink in self._overwritten:
            if sink.should_overwrite:  # no GEMM has written the gradient in this backward
                if self._plan is not self._first_plan:  # the first plan zeroes all gradients, to which others may add
                    sink.view.zero_()
                sink.should_overwrite = False
        self.is_open = False
        target = ShardTarget(self._shard_grads, self.is_reduced, self._plan.unrounded)
        self._pending = self.slots.start_reduction(self.grads, self._buffer.axes.reduce, target)

    def drain(self) -> None:
        """Wait for the reduction in flight, which adds its result to the shard's gradients."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        self.is_reduced = True
        self.slots.active.remove(self)

    def drop_communication(self) -> None:
        """Forget the reduction in flight, and the gradients of the failed backward."""
        for sink in self._overwritten:
            sink.should_overwrite = False
        self._overwritten = []
        self.is_open = False
        self._pending = None

    def finish(self) -> None:
        """Zero the shard's gradients if this step has reduced none."""
        if not self.is_reduced:
            self._shard_grads.zero_()


class GradientSlots:
    """The slots of a rank's chunks, which share them.

    Args:
        start_reduction: starts to reduce a bucket's gradients over data-parallel ranks.
        memory: memory for all slots, which peers may read; None: the slots get memory that only this rank reads.
        rounded: memory of all slots that peers read instead, of a narrower type; None: they read `memory`.
        rounds_blocks: whether GEMMs write all gradients of blocks to `rounded`. `memory` then has the elements of
            `size_wide_slots` only.
        overlaps_parts: whether later work overlaps with the reductions of a divided table's parts.

    Attributes:
        memory: memory of all slots.
        buckets: for each chunk the buckets of its units, which are the first ones of the chunk.
        active: buckets that are open or whose reduction is in flight.
        is_writable: whether a backward is running: an operator that then reads a gradient's address will write there.
    """

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        states: Sequence[BackwardState],
        start_reduction: StartSlotReduction,
        runtime: Runtime,
        memory: torch.Tensor | None = None,
        rounded: torch.Tensor | None = None,
        rounds_blocks: bool = False,
        overlaps_parts: bool = True,
    ) -> None:
        self.overlaps_parts = overlaps_parts
        self.rounded = rounded
        self.rounds_blocks = rounds_blocks
        self.runtime = runtime
        self.states = states
        self.start_reduction = start_reduction
        self.active: list[GradientBucket] = []
        self.is_writable = False
        layouts = [buffer.layout for buffer in buffers]
        size, block_size = size_slots(layouts, [buffer.count_units() for buffer in buffers])
        if memory is None:
            memory = torch.zeros(size, dtype=buffers[0].grad_dtype, device=buffers[0].params.device)
        self.memory = memory
        self.buckets: list[list[GradientBucket]] = []
        for chunk, buffer in enumerate(buffers):
            starts = find_slot_starts(buffer.layout, buffer.count_units(), block_size)
            self.buckets.append(
                [GradientBucket(self, buffer, chunk, index, start) for index, start in enumerate(starts)]
            )

    def drop_communication(self) -> None:
        """Forget the reductions in flight, because the step has failed and the groups are gone."""
        for bucket in self.active:
            bucket.drop_communication()
        self.active.clear()
        self.is_writable = False

    def begin_step(self) -> None:
        """Let the first reduction of each bucket overwrite the shard's gradients."""
        for bucket in self._all_buckets():
            bucket.is_reduced = False

    def open_unit(self, chunk: int, unit: int) -> None:
        """Open all buckets of a unit, whose backward is about to be replayed."""
        for bucket in self._unit_buckets(chunk, unit):
            bucket.open()

    def check_rounded(self, chunk: int) -> None:
        """Check the first backward of a kind before an optimizer uses its gradients.

        Raises RuntimeError if GEMMs did not round all gradients of a chunk's blocks.
        """
        for bucket in self.buckets[chunk]:
            if bucket.is_rounded:
                bucket.check_rounded()

    def set_unit_overwrites(self, chunk: int, unit: int) -> None:
        """Let the GEMMs of a unit's backward, which is captured, overwrite gradients."""
        for bucket in self._unit_buckets(chunk, unit):
            bucket.plan_captured_writes()

    def end_unit(self, chunk: int, reduces: bool) -> None:
        """Record that replays have written the chunk's open buckets, and start to reduce them if `reduces`."""
        for bucket in list(self.active):
            if bucket.chunk == chunk and bucket.is_open:
                bucket.mark_written()
                if reduces:
                    bucket.reduce()

    def _unit_buckets(self, chunk: int, unit: int) -> Iterable[GradientBucket]:
        """Yield the buckets of a unit, without the parts of a divided table, which their writer opens."""
        for bucket in self.buckets[chunk]:
            if bucket.unit == unit and not bucket.is_part:
                yield bucket

    def reduce_chunk(self, chunk: int) -> None:
        """Start the reductions of a chunk's open buckets, at the end of its backward."""
        for bucket in list(self.active):
            if bucket.chunk == chunk:
                bucket.reduce()

    def drain(self) -> None:
        """Wait for all reductions in flight."""
        for bucket in list(self.active):
            if not bucket.is_open:
                bucket.drain()

    def finish(self) -> None:
        """Reduce the open buckets, and wait until the shards have the sums of the step."""
        for bucket in list(self.active):
            bucket.reduce()
            bucket.drain()
        for bucket in self._all_buckets():
            bucket.finish()

    def _all_buckets(self) -> Iterable[GradientBucket]:
        for buckets in self.buckets:
            yield from buckets


def size_slots(layouts: Sequence[FlatLayout], unit_counts: Sequence[int]) -> tuple[int, int]:
    """Return the size of all slots together, and of one of the two slots that blocks use in turn, in elements.

    Args:
        unit_counts: number of units of each chunk's forward; the first and the last unit are not blocks.
    """
    largest_size = 0
    block_size = 0
    for layout, count in zip(layouts, unit_counts, strict=True):
        _, slot_sizes = compute_slot_starts(layout)
        for unit, size in slot_sizes.items():
            largest_size = max(largest_size, size)
            if is_block(unit, count):
                block_size = max(block_size, size)
    return max(largest_size, 2 * block_size), block_size


def is_block(unit: int | None, unit_count: int) -> bool:
    """Return whether a unit of a chunk's forward is a block. The first and the last unit are not."""
    return unit is not None and 0 < unit < unit_count - 1


def size_wide_slots(layouts: Sequence[FlatLayout], unit_counts: Sequence[int]) -> int:
    """Return the elements of slots that are not rounded if blocks have rounded slots only (arguments: `size_slots`)."""
    wide_size = 0
    for layout, count in zip(layouts, unit_counts, strict=True):
        _, slot_sizes = compute_slot_starts(layout)
        for unit, size in slot_sizes.items():
            if not is_block(unit, count):
                wide_size = max(wide_size, size)
    return wide_size


def find_slot_starts(layout: FlatLayout, unit_count: int, block_size: int) -> list[int]:
    """Return the first element in the slots' memory of each bucket that belongs to a unit."""
    units = [unit for unit in layout.units if unit is not None]
    starts, _ = compute_slot_starts(layout)
    for bucket, unit in enumerate(units):
        if is_block(unit, unit_count):
            starts[bucket] += block_size * (unit % 2)
    return starts
