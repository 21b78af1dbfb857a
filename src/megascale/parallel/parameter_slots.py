"""Parameters in slots: under ZeRO-3 a unit's whole matrices exist only around their use.

A rank keeps its shard of each unit's matrices. Before a forward or a backward of the unit, its shards are gathered into
a slot; the memory is free again when another unit of the same slot is gathered. Parameters are views of their slot at
addresses that never change.

Usually a unit is a block, the embedding or the head. Blocks use two slots in turn, so that the next block is gathered
while one computes. Embedding and head share a third slot. The embedding is not gathered for backward, which does not
read it. With more chunks per rank than slots, a unit is a whole chunk. It then stays gathered for the consecutive
micro-batches that the schedule runs through it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from megascale.core.unit_slots import CHUNK_SLOTS
from megascale.parallel.buffer_layout import find_unit_ranges
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Pending, all_gather_into


class ParameterUnit:
    """Matrices that are gathered together, and their memory in a slot.

    Attributes:
        start, stop: elements of the slots' memory.
        params: the matrices.
        is_gathered: whether the slot has the matrices, or their gather is in flight.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        buffer: ParamAndGradBuffer,
        elements: tuple[int, int],
        start: int,
    ) -> None:
        first, last = elements
        self.start = start
        self.stop = start + last - first
        self.memory = memory[self.start : self.stop]
        self.is_gathered = False
        self.pending: list[Pending] = []
        self._axis = buffer.axes.data
        self._messages: list[tuple[torch.Tensor, torch.Tensor]] = []  # each bucket's part of the slot, and its shard
        self.params: list[nn.Parameter] = []
        for bucket, span in enumerate(buffer.layout.buckets):
            if not first <= span.start < last:
                continue
            self._messages.append((self.memory[span.start - first : span.stop - first], buffer.shards[bucket].params))
            for i in span.members:
                param = buffer.parameters[i]
                offset = buffer.layout.starts[i] - first
                # Gathers write through the slot, whose version counter is not the parameter's. Autograd would
                # otherwise take a parameter that is gathered again for backward for a changed one.
                param.data = self.memory[offset : offset + param.numel()].view(param.shape)
                self.params.append(param)

    def overlaps(self, unit: ParameterUnit) -> bool:
        """Return whether both use the same memory."""
        return self.start < unit.stop and unit.start < self.stop

    def start_gather(self) -> None:
        """Start to gather the matrices into the slot."""
        self.is_gathered = True
        for out, shard in self._messages:
            self.pending.append(all_gather_into(out, shard, self._axis))

    def wait(self) -> None:
        """Wait for a gather in flight."""
        while self.pending:
            self.pending.pop().wait()

    def store_shards(self) -> None:
        """Write this rank's shards from the matrices in the slot."""
        for out, shard in self._messages:
            shard.copy_(out.view(self._axis.size, -1)[self._axis.rank])


class ParameterSlots:
    """The slots of a rank's chunks, which share them.

    Args:
        buffers: the chunks' buffers. Their matrices get memory here.
        chunk_slots: slot of each chunk if units are whole chunks; None for blocks.
        prefetches: gather the next unit while one computes.

    Attributes:
        memory: memory of all slots.
        units: units of each chunk by number of the unit in the forward, None for one without matrices.
        poisons: fill a slot with NaN as soon as its unit is not in use, to prove that nothing reads it then.
        gathers: gathers since the start, for tests and diagnosis.
    """

    poisons = False

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        chunk_slots: Sequence[int] | None,
        prefetches: bool,
    ) -> None:
        self.prefetches = prefetches
        self.gathers = 0
        self.is_by_chunk = chunk_slots is not None
        self._gathered: list[ParameterUnit] = []
        self.units: list[list[ParameterUnit | None]] = []
        if chunk_slots is None:
            starts, size = _find_block_starts(buffers)
        else:
            starts, size = _find_chunk_starts(buffers, chunk_slots)
        self.memory = torch.zeros(size, dtype=buffers[0].params.dtype, device=buffers[0].params.device)
        for buffer, unit_starts in zip(buffers, starts, strict=True):
            units: list[ParameterUnit | None] = [None] * buffer.count_units()
            if chunk_slots is None:
                for number, elements in find_unit_ranges(buffer.layout).items():
                    units[number] = ParameterUnit(self.memory, buffer, elements, unit_starts[number])
            elif buffer.layout.unit_size:
                unit = ParameterUnit(self.memory, buffer, (0, buffer.layout.unit_size), unit_starts[0])
                units = [unit] * len(units)
            self.units.append(units)

    def before_forward(self, chunk: int, number: int) -> None:
        """Make a unit's matrices complete for its forward, and start to gather the next unit's."""
        self._make_complete(self.units[chunk][number])
        if self.prefetches and number + 1 < len(self.units[chunk]):
            self._start_gather(self.units[chunk][number + 1])

    def before_backward(self, chunk: int, number: int, has_next_microbatch: bool) -> None:
        """Make a unit's matrices complete for its backward, and start to gather those that are needed next.

        Args:
            has_next_microbatch: whether another micro-batch follows, whose forward begins with the first unit.
        """
        self._make_complete(self.units[chunk][number])
        if self.prefetches and (number > 1 or has_next_microbatch):
            self._start_gather(self.units[chunk][number - 1])

    def start_first_gather(self, chunk: int) -> None:
        """Start to gather the first unit of a chunk's forward, unless another unit has its slot and may be in use."""
        unit = next((unit for unit in self.units[chunk] if unit is not None), None)
        if self.prefetches and unit is not None and not any(occupant.overlaps(unit) for occupant in self._gathered):
            self._start_gather(unit)

    def gather_parameter(self, chunk: int, param: nn.Parameter) -> None:
        """Make one parameter complete; it stays so until the next use of a slot."""
        for unit in self.units[chunk]:
            if unit is not None and any(member is param for member in unit.params):
                self._make_complete(unit)
                return

    def is_gathering(self, chunk: int) -> bool:
        """Return whether a gather of the chunk's matrices is in flight."""
        return any(unit is not None and unit.pending for unit in self.units[chunk])

    def wait(self) -> None:
        """Wait for all gathers in flight."""
        for unit in self._gathered:
            unit.wait()

    def invalidate(self) -> None:
        """Drop what is gathered, because shards are about to be updated or loaded."""
        for unit in list(self._gathered):
            self._release(unit)

    @torch.no_grad()
    def fill(self, initialise: Callable[[nn.Parameter], None]) -> None:
        """Initialise all matrices unit by unit, and keep this rank's shards of them."""
        self.invalidate()
        for units in self.units:
            for unit in dict.fromkeys(units):
                if unit is None:
                    continue
                unit.memory.zero_()
                for param in unit.params:
                    initialise(param)
                unit.store_shards()

    def _make_complete(self, unit: ParameterUnit | None) -> None:
        if self.poisons:
            for occupant in list(self._gathered):
                if occupant is not unit and not occupant.pending:
                    self._release(occupant)
        if unit is not None:
            self._start_gather(unit)
            unit.wait()

    def _start_gather(self, unit: ParameterUnit | None) -> None:
        """Start to gather a unit unless its slot has it."""
        if unit is None or unit.is_gathered:
            return
        for occupant in list(self._gathered):
            if occupant.overlaps(unit):
                self._release(occupant)
        # The side stream needs no wait: it computes gradients of weights, which read no parameter.
        unit.start_gather()
        self.gathers += 1
        self._gathered.append(unit)

    def _release(self, unit: ParameterUnit) -> None:
        """Give up a unit's matrices."""
        unit.wait()
        unit.is_gathered = False
        self._gathered.remove(unit)
        if self.poisons:
            unit.memory.fill_(float("nan"))


def _find_block_starts(buffers: Sequence[ParamAndGradBuffer]) -> tuple[list[dict[int, int]], int]:
    """Return where each unit of each chunk starts, and the size of all slots: two of a block and one for the others."""
    block_size = outer_size = 0
    for buffer in buffers:
        last = buffer.count_units() - 1
        for number, (start, stop) in find_unit_ranges(buffer.layout).items():
            if 0 < number < last:
                block_size = max(block_size, stop - start)
            else:
                outer_size = max(outer_size, stop - start)
    starts = []
    for buffer in buffers:
        last = buffer.count_units() - 1
        numbers = find_unit_ranges(buffer.layout)
        starts.append({n: block_size * (n % 2) if 0 < n < last else 2 * block_size for n in numbers})
    return starts, 2 * block_size + outer_size


def _find_chunk_starts(
    buffers: Sequence[ParamAndGradBuffer], chunk_slots: Sequence[int]
) -> tuple[list[dict[int, int]], int]:
    """Return where each chunk starts, as its only unit, and the size of all slots."""
    size = max(buffer.layout.unit_size for buffer in buffers)
    return [{0: slot * size} for slot in chunk_slots], CHUNK_SLOTS * size
