"""Parameters in slots: under ZeRO-3 the complete matrices of a unit exist only around their use.

A rank keeps its shard of each unit's matrices. Before a forward or a backward of the unit, all ranks' shards are
gathered into a slot. The slot is reused when another unit that is assigned to it is gathered. Parameters are views of
their slot at addresses that never change.

Usually a unit is a block, the embedding or the head. Blocks use two slots in turn, so that the next block is gathered
while one computes. Embedding and head share a third slot. The embedding is not gathered for backward, which does not
read it. With `parallel.zero3_keep_layers` some blocks have a slot of their own and stay gathered until the update. With
more chunks per rank than slots (core/unit_slots.py), a unit is a whole chunk. It then stays gathered for the
consecutive micro-batches that the schedule runs through it.

Matrices that GEMMs read in float8 may be gathered as bytes (float8_gather.py).

With overlap.gathers=copies, an exchange (exchange.py) gathers the shards instead of NCCL. The shards then lie in peer
memory, which the other ranks of the group read directly (peer_memory.py). Where the driver can map them into the slots,
a rank does not copy its own shard (mapped_slots.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Pending, all_gather_into, gather_from_peers
from megascale.parallel.exchange import Exchange
from megascale.parallel.float8_gather import Float8Gather
from megascale.parallel.mapped_slots import MappedSlots
from megascale.parallel.peer_memory import PeerMemory
from megascale.parallel.slot_units import assign_units


class ParameterUnit:
    """Matrices that are gathered together, and their memory in a slot.

    Args:
        memory: memory of the unit's matrices.
        buffer: buffer of the unit's chunk.
        elements: range [first, stop) of the unit's elements in the buffer's layout.
        start: first element of the unit's slot in the memory of all slots.

    Attributes:
        memory: memory of the unit's matrices.
        start, stop: range of elements in the memory of all slots.
        owns_slot: whether the slot holds the matrices, or their gather is in flight.
        is_float8: whether the last gather fetched matrices that GEMMs read in float8 as bytes.
        is_persistent: whether the unit has a slot of its own, in which it stays gathered until the update.
        bucket_memory: memory of each bucket in the slot, by index of the bucket.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        buffer: ParamAndGradBuffer,
        elements: tuple[int, int],
        start: int,
    ) -> None:
        buffer_start, buffer_stop = elements
        self.start = start
        self.stop = start + buffer_stop - buffer_start
        self.memory = memory
        self.owns_slot = False
        self.is_float8 = False
        self.is_persistent = False
        self.bucket_memory: dict[int, torch.Tensor] = {}
        self._float8: Float8Gather | None = None
        self._float8_buckets: list[int] = []
        self._has_transposes = False
        self.pending: list[Pending] = []
        self._axis = buffer.axes.data
        # For each bucket (memory that the gather fills, this rank's shard), in the weights' type and in float8.
        self._gather_pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._float8_pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        # By the address of this rank's shard: all ranks' shards. It has only shards that copy engines gather.
        self._peer_shards: dict[int, list[torch.Tensor]] = {}
        self._mapped_shards: set[int] = set()  # addresses of this rank's shards that lie in `memory`
        self.params: list[nn.Parameter] = []
        for bucket, span in enumerate(buffer.layout.buckets):
            if not buffer_start <= span.start < buffer_stop:
                continue
            self.bucket_memory[bucket] = self.memory[span.start - buffer_start : span.stop - buffer_start]
            self._gather_pairs.append((self.bucket_memory[bucket], buffer.shards[bucket].params))
            for i in span.members:
                param = buffer.parameters[i]
                offset = buffer.layout.starts[i] - buffer_start
                # `param.data` gives the parameter a version counter of its own. With the slot's counter, autograd
                # would consider the parameter modified when it is gathered again for the backward.
                param.data = self.memory[offset : offset + param.numel()].view(param.shape)
                self.params.append(param)

    def set_float8(self, float8: Float8Gather) -> None:
        """Gather the buckets of matrices that GEMMs read in float8 as bytes from now on."""
        pairs = dict(zip(self.bucket_memory, self._gather_pairs, strict=True))
        self._float8_buckets = [bucket for bucket in self.bucket_memory if bucket in float8.buckets]
        if self._float8_buckets:
            self._float8 = float8
            pairs |= {bucket: float8.gather_pair(bucket) for bucket in self._float8_buckets}
            self._float8_pairs = list(pairs.values())

    def overlaps(self, unit: ParameterUnit) -> bool:
        """Return whether this unit and `unit` use the same memory."""
        return self.start < unit.stop and unit.start < self.stop

    def is_gathered(self, full_precision: bool) -> bool:
        """Return whether the slot holds the matrices; if `full_precision`, whether it holds them in their own type."""
        return self.owns_slot and not (full_precision and self.is_float8)

    def start_gather(self, full_precision: bool = False) -> None:
        """Start to gather the matrices into the slot, in their own type if `full_precision`."""
        self.owns_slot = True
        self.is_float8 = self._float8 is not None and not full_precision
        pairs = self._gather_pairs
        if self._float8 is not None and self.is_float8:
            self._float8.cast_shards()
            self._has_transposes = False
            pairs = self._float8_pairs
        for out, shard in pairs:
            peer_shards = self._peer_shards.get(shard.data_ptr())
            if peer_shards is None:
                self.pending.append(all_gather_into(out, shard, self._axis))
            else:
                copies_own = shard.data_ptr() not in self._mapped_shards
                self.pending.append(gather_from_peers(out, peer_shards, self._axis, copies_own=copies_own))

    def use_exchange(
        self, exchange: Exchange, memory: PeerMemory, mapped_peers: Mapping[int, list[torch.Tensor]]
    ) -> None:
        """Gather by copy engines from now on.

        Args:
            memory: memory of the shards that are copied into the slot.
            mapped_peers: every rank's shard, by index of each bucket whose own shard lies in the slot.
        """
        self._axis = replace(self._axis, exchange=exchange)
        for bucket, (_, shard) in zip(self.bucket_memory, self._gather_pairs, strict=True):
            if bucket in mapped_peers:
                self._mapped_shards.add(shard.data_ptr())
                self._peer_shards[shard.data_ptr()] = mapped_peers[bucket]
        for _, shard in self._gather_pairs + self._float8_pairs:
            if shard.data_ptr() not in self._mapped_shards:
                self._peer_shards[shard.data_ptr()] = memory.list_peers(shard)

    def prepare_backward(self) -> None:
        """Make the transposes that GEMMs of the backward read in float8, unless the slot has them already."""
        if self._float8 is None or self._has_transposes:
            return
        self._has_transposes = True
        for bucket in self._float8_buckets:
            self._float8.transpose(bucket)

    def wait(self) -> None:
        """Wait for a gather in flight."""
        while self.pending:
            self.pending.pop().wait()

    def store_shards(self) -> None:
        """Copy this rank's part of the matrices in the slot to its shards."""
        for out, shard in self._gather_pairs:
            if shard.data_ptr() not in self._mapped_shards:
                shard.copy_(out.view(self._axis.size, -1)[self._axis.rank])

    def poison(self) -> None:
        """Fill the slot with NaN, except this rank's shards in it."""
        for out, shard in self._gather_pairs:
            for rank, part in enumerate(out.view(self._axis.size, -1)):
                if rank != self._axis.rank or shard.data_ptr() not in self._mapped_shards:
                    part.fill_(float("nan"))


class ParameterSlots:
    """The slots of a rank's chunks, which share them.

    Args:
        buffers: the chunks' buffers. The constructor gives memory to their matrices.
        chunk_slots: index of each chunk's slot if a unit is a complete chunk; None if units are blocks, embedding and
            head.
        prefetch: gather the next unit while the present one computes.
        float8: gather matrices that GEMMs read in float8 as bytes.
        exchange: gathers by copy engines; its peer memory has room for the shards (peer_memory.py).
        persistent_blocks: number of blocks with a slot of their own; only without `chunk_slots`.
        mapped: slots in which own shards lie; None: own shards are copied.

    Attributes:
        memory: memory of all slots; empty if `mapped` has it.
        units: `units[chunk][unit_index]`, in forward order; None for a unit without matrices.
        poison_unused: release a unit's slot as soon as another unit is used, and fill the slot with NaN. Tests set it
            to notice reads outside the unit's forward and backward.
        gather_count: number of gathers since the start, for tests and diagnosis.
    """

    poison_unused = False

    def __init__(
        self,
        buffers: Sequence[ParamAndGradBuffer],
        chunk_slots: Sequence[int] | None,
        prefetch: bool,
        float8: bool = False,
        exchange: Exchange | None = None,
        persistent_blocks: int = 0,
        mapped: MappedSlots | None = None,
    ) -> None:
        self._exchange = exchange
        shard_memory = None
        if exchange is not None:
            shard_memory = PeerMemory(exchange)
            for chunk, buffer in enumerate(buffers):
                _place_shards(buffer, chunk, shard_memory, mapped)
        self.prefetch = prefetch
        self.gather_count = 0
        self._gathered: list[ParameterUnit] = []
        self._float8: list[Float8Gather] = []
        self.units: list[list[ParameterUnit | None]] = [[None] * buffer.count_units() for buffer in buffers]
        slot_units, size = assign_units(buffers, chunk_slots, persistent_blocks)
        if mapped is not None:
            size = 0
        self.memory = torch.zeros(size, dtype=buffers[0].params.dtype, device=buffers[0].params.device)
        for index, slot_unit in enumerate(slot_units):
            first, stop = slot_unit.elements
            if mapped is None:
                memory = self.memory[slot_unit.start : slot_unit.start + stop - first]
            else:
                memory = mapped.unit_memory[index]
            buffer = buffers[slot_unit.chunk]
            unit = ParameterUnit(memory, buffer, slot_unit.elements, slot_unit.start)
            unit.is_persistent = slot_unit.is_persistent
            if chunk_slots is None:
                self.units[slot_unit.chunk][slot_unit.unit_index] = unit
            else:
                self.units[slot_unit.chunk] = [unit] * buffer.count_units()
        if float8:
            self._use_float8(buffers, shard_memory)
        if exchange is not None and shard_memory is not None:
            for chunk, units in enumerate(self.units):
                mapped_peers = {}
                if mapped is not None:
                    mapped_peers = {key[1]: peers for key, peers in mapped.peer_shards.items() if key[0] == chunk}
                for chunk_unit in dict.fromkeys(units):
                    if chunk_unit is not None:
                        chunk_unit.use_exchange(exchange, shard_memory, mapped_peers)

    def before_forward(self, chunk: int, unit_index: int) -> None:
        """Ensure that a unit's matrices are gathered for its forward, and start the next gather of the forward."""
        units = self.units[chunk]
        self._ensure_gathered(units[unit_index])
        if self.prefetch:
            self._gather_next(units[unit_index:])

    def before_backward(self, chunk: int, unit_index: int, has_next_microbatch: bool) -> None:
        """Ensure that a unit's matrices are gathered for its backward, and start the next gather of the backward.

        Args:
            has_next_microbatch: whether another micro-batch follows, whose forward begins with the first unit.
        """
        units = self.units[chunk]
        unit = units[unit_index]
        self._ensure_gathered(unit)
        if unit is not None:
            unit.prepare_backward()
        if self.prefetch:
            # The embedding (unit 0) is not read in backward. Gather it only if a forward follows.
            first = 0 if has_next_microbatch else 1
            self._gather_next(units[first : unit_index + 1][::-1])

    def _gather_next(self, units: Sequence[ParameterUnit | None]) -> None:
        """Start to gather the first of these units that is not gathered, unless a unit before it has its slot."""
        earlier_units: list[ParameterUnit] = []
        for unit in units:
            if unit is None:
                continue
            if not unit.owns_slot:
                if not any(earlier_unit.overlaps(unit) for earlier_unit in earlier_units):
                    self._start_gather(unit)
                return
            earlier_units.append(unit)

    def start_first_gather(self, chunk: int) -> None:
        """Start to gather the first unit of a chunk's forward, unless a unit that may be in use has its slot."""
        unit = next((unit for unit in self.units[chunk] if unit is not None), None)
        if unit is None or not self.prefetch:
            return
        if not any(occupant.overlaps(unit) for occupant in self._gathered):
            self._start_gather(unit)

    def gather_parameter(self, chunk: int, param: nn.Parameter) -> None:
        """Ensure that one parameter is gathered in its own type. It is valid until the next gather."""
        for unit in self.units[chunk]:
            if unit is not None and any(member is param for member in unit.params):
                self._ensure_gathered(unit, full_precision=True)
                return

    def is_gathering(self, chunk: int) -> bool:
        """Return whether a gather of the chunk's matrices is in flight."""
        return any(unit is not None and unit.pending for unit in self.units[chunk])

    def drop_communication(self) -> None:
        """Forget gathers in flight and gathered matrices, because the step has failed and the groups are gone."""
        # All units: if a call of a gather failed, its unit owns the slot and is not in `_gathered`. A rank that keeps
        # such a unit would skip its next gather, for which the other ranks would wait.
        for unit in self._all_units():
            unit.pending.clear()
            unit.owns_slot = False
        self._gathered.clear()
        for float8 in self._float8:
            float8.drop_reductions()

    def wait(self) -> None:
        """Wait for all gathers in flight."""
        for unit in self._gathered:
            unit.wait()

    def invalidate(self) -> None:
        """Drop gathered matrices and casts of shards, because shards are about to be updated or loaded."""
        for unit in list(self._gathered):
            self._release(unit)
        for float8 in self._float8:
            float8.is_stale = True
        if self._exchange is not None:
            self._exchange.wait_for_peer_reads()  # peers may still read this rank's shards

    def _all_units(self) -> Iterator[ParameterUnit]:
        """Yield each unit once. If units are chunks, `units` contains a unit several times."""
        for units in self.units:
            for unit in dict.fromkeys(units):
                if unit is not None:
                    yield unit

    def _use_float8(self, buffers: Sequence[ParamAndGradBuffer], shard_memory: PeerMemory | None) -> None:
        """Gather the matrices that GEMMs read in float8 as bytes from now on."""
        for buffer, units in zip(buffers, self.units, strict=True):
            bucket_memory: dict[int, torch.Tensor] = {}
            for unit in units:
                if unit is not None:
                    bucket_memory |= unit.bucket_memory
            byte_count = buffer.shard_params.numel()
            if shard_memory is None:
                shard_bytes = torch.zeros(byte_count, dtype=torch.uint8, device=buffer.shard_params.device)
            else:
                shard_bytes = shard_memory.take(byte_count, torch.uint8)
            float8 = Float8Gather(buffer, bucket_memory, shard_bytes)
            self._float8.append(float8)
            for unit in dict.fromkeys(units):
                if unit is not None:
                    unit.set_float8(float8)

    @torch.no_grad()
    def initialise(self, fill: Callable[[nn.Parameter], None]) -> None:
        """Initialise all matrices by `fill`, which fills one parameter, and keep this rank's shards."""
        self.invalidate()
        for unit in self._all_units():
            unit.memory.zero_()
            for param in unit.params:
                fill(param)
            unit.store_shards()

    def _ensure_gathered(self, unit: ParameterUnit | None, full_precision: bool = False) -> None:
        """Gather a unit unless its slot has it, and wait for the gather."""
        if self.poison_unused:
            for occupant in list(self._gathered):
                if occupant is not unit and not occupant.pending and not occupant.is_persistent:
                    self._release(occupant)
        if unit is not None:
            self._start_gather(unit, full_precision)
            unit.wait()

    def _start_gather(self, unit: ParameterUnit | None, full_precision: bool = False) -> None:
        """Start to gather a unit unless its slot has it."""
        if unit is None or unit.is_gathered(full_precision):
            return
        for occupant in list(self._gathered):
            if occupant.overlaps(unit):
                self._release(occupant)
        # Kernels on the side stream compute weight gradients and read no parameters, so there is no need to wait.
        unit.start_gather(full_precision)
        self.gather_count += 1
        self._gathered.append(unit)

    def _release(self, unit: ParameterUnit) -> None:
        """Free a unit's slot, after a gather in flight."""
        unit.wait()
        unit.owns_slot = False
        self._gathered.remove(unit)
        if self.poison_unused:
            unit.poison()


def _place_shards(buffer: ParamAndGradBuffer, chunk: int, shard_memory: PeerMemory, mapped: MappedSlots | None) -> None:
    """Move this rank's shards of a chunk's units to slots if they are mapped there, else to memory that peers read."""
    if mapped is None:
        buffer.place_shard_params(shard_memory.take(buffer.shard_params.numel(), buffer.shard_params.dtype))
        return
    memory = {}
    for bucket, shard in enumerate(buffer.shards):
        if (chunk, bucket) in mapped.shards:
            memory[bucket] = mapped.shards[chunk, bucket]
        elif buffer.layout.units[bucket] is not None:
            memory[bucket] = shard_memory.take(shard.params.numel(), shard.params.dtype)
    buffer.place_shards(memory)
