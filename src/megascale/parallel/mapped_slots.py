"""Slots of ZeRO-3 in which this rank's part is its shard itself, so that a gather copies the parts of peers alone.

Otherwise a gather copies the rank's own shard as well. Engines are slow within a device, so that copy is a kernel,
which delays GEMMs. Here each unit has a range of addresses, made of pages of the slot and of the rank's shards
(core/mapped_layout.py). Parameters are views of the range, and the optimizer updates the shard there.
"""

from __future__ import annotations

import logging
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megascale.core.copy_choice import FLOAT8_SLOTS, SHARD_SWITCH, read_shard_switch
from megascale.core.mapped_layout import (
    MIN_MAPPED_BYTES,
    MIN_SHARD_PAGES,
    UnitPages,
    count_block_bytes,
    divide_slot,
    find_shard_offset,
)
from megascale.parallel import device_pages, symmetric
from megascale.parallel.buffers import ParamAndGradBuffer
from megascale.parallel.collectives import Axis
from megascale.parallel.device_pages import Pages, SharedBlock
from megascale.parallel.slot_units import SlotUnit

_log = logging.getLogger(__name__)


class _Mappings:
    """Memory and addresses of a rank's slots, which are given back with the last reference to this object.

    Attributes:
        handles: handles of memory.
        ranges, mapped: (address, bytes) of reserved addresses, and of mapped memory.
    """

    def __init__(self, pages: Pages) -> None:
        self.handles: list[int] = []
        self.ranges: list[tuple[int, int]] = []
        self.mapped: list[tuple[int, int]] = []
        # At the end of the process the driver gives everything back.
        weakref.finalize(self, _free, pages, self.handles, self.ranges, self.mapped).atexit = False


@dataclass
class _Shard:
    """A shard that lies in a unit's range.

    Attributes:
        key: chunk and index of the bucket.
        start, nbytes: position of the shard in the unit's matrices, and its bytes.
        block_start: first available byte of the block, in the unit's matrices; negative before them.
        block: memory of the shard.
    """

    key: tuple[int, int]
    start: int
    nbytes: int
    block_start: int
    block: SharedBlock


class MappedSlots:
    """Memory of all units of a rank, and of the shards that lie in it.

    `connect` must follow the construction on all ranks. The memory is freed with the last tensor.

    Args:
        axis: ranks that share each bucket.
        buffers: buffers of the rank's chunks.
        units: all units of the chunks.
        buckets: (chunk, index) of the buckets whose shards are mapped.

    Attributes:
        unit_memory: memory of the matrices of each unit.
        shards: by (chunk, index) of a bucket: this rank's shard in the memory of its unit.
        peer_shards: every rank's shard by the same key, as memory that this rank can read. Set by `connect`.
        nbytes: bytes of memory on this rank.
    """

    def __init__(
        self,
        axis: Axis,
        pages: Pages,
        buffers: Sequence[ParamAndGradBuffer],
        units: Sequence[SlotUnit],
        buckets: frozenset[tuple[int, int]],
    ) -> None:
        self.unit_memory: list[torch.Tensor] = []
        self.shards: dict[tuple[int, int], torch.Tensor] = {}
        self.peer_shards: dict[tuple[int, int], list[torch.Tensor]] = {}
        self.nbytes = 0
        self._axis = axis
        self._pages = pages
        self._mappings = _Mappings(pages)
        shards = [self._allocate_shards(buffers[unit.chunk], unit, buckets) for unit in units]
        self._shards = shards
        handles = [shard.block.handle for unit_shards in shards for shard in unit_shards]
        unit_pages = []
        for unit, unit_shards in zip(units, shards, strict=True):
            blocks = tuple(self._find_block(shard) for shard in unit_shards)
            nbytes = (unit.elements[1] - unit.elements[0]) * buffers[unit.chunk].params.element_size()
            unit_pages.append(UnitPages(nbytes, pages.page_bytes, blocks))
        slot_units: dict[int, list[int]] = defaultdict(list)  # by start of the slot: indices of its units
        for index, unit in enumerate(units):
            slot_units[unit.start].append(index)
        slot_handles: list[dict[tuple[int, int], int]] = [{} for _ in units]  # by range of a slot's memory
        for indices in slot_units.values():
            pieces = {}
            for first, stop in divide_slot([unit_pages[index] for index in indices]):
                pieces[first, stop] = self._allocate(stop - first, like=handles[0])
            for index in indices:
                slot_handles[index] = pieces
        for unit, unit_shards, layout, pieces in zip(units, shards, unit_pages, slot_handles, strict=True):
            self._map_unit(layout, unit_shards, pieces, buffers[unit.chunk].params.dtype)

    def _allocate_shards(
        self, buffer: ParamAndGradBuffer, unit: SlotUnit, buckets: frozenset[tuple[int, int]]
    ) -> list[_Shard]:
        """Allocate the blocks of a unit's mapped shards."""
        pages, ranks = self._pages, self._axis.size
        itemsize = buffer.params.element_size()
        unit_start, unit_stop = unit.elements
        shards = []
        for bucket, span in enumerate(buffer.layout.buckets):
            key = unit.chunk, bucket
            if key not in buckets or not unit_start <= span.start < unit_stop:
                continue
            bucket_start = (span.start - unit_start) * itemsize
            shard_bytes = (span.stop - span.start) // ranks * itemsize
            available_bytes = count_block_bytes(
                bucket_start, shard_bytes, ranks, lead_bytes=pages.lead_bytes, page_bytes=pages.page_bytes
            )
            block = pages.allocate_shared(available_bytes)
            self._mappings.handles.append(block.handle)
            self.nbytes += block.nbytes
            start = bucket_start + self._axis.rank * shard_bytes
            offset = find_shard_offset(start, pages.lead_bytes, pages.page_bytes)
            shards.append(_Shard(key, start, shard_bytes, block_start=start - offset, block=block))
            self.peer_shards[key] = []
        return shards

    def _find_block(self, shard: _Shard) -> tuple[int, int]:
        """Return the range of a shard's block in its unit."""
        return shard.block_start, shard.block_start + shard.block.nbytes

    def _allocate(self, nbytes: int, like: int) -> int:
        """Allocate memory of a slot, and return its handle."""
        handle = self._pages.allocate(nbytes, like)
        self._mappings.handles.append(handle)
        self.nbytes += nbytes
        return handle

    def _map_unit(
        self,
        layout: UnitPages,
        shards: Sequence[_Shard],
        pieces: Mapping[tuple[int, int], int],
        dtype: torch.dtype,
    ) -> None:
        """Map the memory of a unit, and make its tensors.

        Args:
            pieces: handles by range of the slot.
        """
        pages, mappings = self._pages, self._mappings
        total_bytes = layout.stop - layout.first
        address = pages.reserve(total_bytes)
        mappings.ranges.append((address, total_bytes))
        origin = address - layout.first  # of the unit's matrices
        slot_ranges = layout.list_slot_ranges()
        for (first, stop), handle in pieces.items():
            if any(start <= first and stop <= end for start, end in slot_ranges):
                pages.map(origin + first, stop - first, handle)
                mappings.mapped.append((origin + first, stop - first))
        for shard in shards:
            pages.map(origin + shard.block_start, shard.block.nbytes, shard.block.handle)
            mappings.mapped.append((origin + shard.block_start, shard.block.nbytes))
        pages.allow_access(address, total_bytes)
        # The tensors own the mappings.
        memory = pages.view(address, total_bytes, mappings)[-layout.first : layout.nbytes - layout.first]
        memory.zero_()
        self.unit_memory.append(memory.view(dtype))
        for shard in shards:
            self.shards[shard.key] = memory[shard.start : shard.start + shard.nbytes].view(dtype)

    def connect(self) -> None:
        """Map the shards of all ranks. Collective over the axis."""
        pages, axis = self._pages, self._axis
        for unit_shards in self._shards:
            for shard in unit_shards:
                dtype = self.shards[shard.key].dtype
                first_start = shard.start - axis.rank * shard.nbytes
                for rank, memory in enumerate(pages.open_peers(shard.block)):
                    start = first_start + rank * shard.nbytes
                    offset = find_shard_offset(start, pages.lead_bytes, pages.page_bytes) - pages.lead_bytes
                    self.peer_shards[shard.key].append(memory[offset : offset + shard.nbytes].view(dtype))


def _free(
    pages: Pages, handles: Sequence[int], ranges: Sequence[tuple[int, int]], mapped: Sequence[tuple[int, int]]
) -> None:
    """Free memory and addresses. After an error of the device, the end of the process frees them."""
    try:
        pages.synchronize()
        for address, nbytes in mapped:
            pages.unmap(address, nbytes)
        for address, nbytes in ranges:
            pages.free(address, nbytes)
        for handle in handles:
            pages.release(handle)
    except RuntimeError as error:
        _log.warning("the end of the process frees the memory of mapped shards: %s", error)


def select_mapped_buckets(
    buffers: Sequence[ParamAndGradBuffer], gathers_in_float8: bool, device: torch.device
) -> tuple[frozenset[tuple[int, int]], str]:
    """Return the (chunk, index) of the buckets whose shards may be mapped, and why there are none."""
    if device.type != "cuda":
        return frozenset(), f"{device.type} memory is not mapped"
    if gathers_in_float8:
        return frozenset(), FLOAT8_SLOTS
    buckets = set()
    for chunk, buffer in enumerate(buffers):
        for bucket, shard in enumerate(buffer.shards):
            if buffer.layout.units[bucket] is not None and shard.params.nbytes >= MIN_MAPPED_BYTES:
                buckets.add((chunk, bucket))
    if not buckets:
        return frozenset(), f"all shards have fewer than {MIN_MAPPED_BYTES >> 20} MiB"
    return frozenset(buckets), ""


def map_slots(
    axis: Axis,
    buffers: Sequence[ParamAndGradBuffer],
    units: Sequence[SlotUnit],
    buckets: frozenset[tuple[int, int]],
    device: torch.device,
) -> MappedSlots | str:
    """Return slots with mapped shards, or why they are unavailable; the same on every rank. Collective over the axis.

    Raises ConfigError if the environment's switch has another value than 0 or 1.

    Args:
        buckets: (chunk, index) of the buckets whose shards are mapped.
    """
    switch = read_shard_switch()
    slots: MappedSlots | None = None
    reason = ""
    try:
        if switch == "0":
            raise RuntimeError(f"{SHARD_SWITCH}=0")
        pages = device_pages.make_pages(axis, device)
        if MIN_SHARD_PAGES * pages.page_bytes > MIN_MAPPED_BYTES:
            raise RuntimeError(f"pages have {pages.page_bytes} bytes")
        slots = MappedSlots(axis, pages, buffers, units, buckets)
    except Exception as error:  # any failure makes the mapping unavailable on all ranks, and the start-up line names it
        reason = _describe(error)
    reason = symmetric.find_failure(reason, axis, device)
    if reason or slots is None:
        return reason
    try:
        slots.connect()
    except Exception as error:
        reason = _describe(error)
    return symmetric.find_failure(reason, axis, device) or slots


def _describe(error: Exception) -> str:
    """Return the first line of an error."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
