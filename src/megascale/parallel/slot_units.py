"""Assignment of a rank's units to slots under ZeRO-3 (parameter_slots.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megascale.core.unit_slots import CHUNK_SLOTS, assign_block_slots, select_persistent_blocks
from megascale.parallel.buffer_layout import find_unit_ranges
from megascale.parallel.buffers import ParamAndGradBuffer


class SlotUnit(NamedTuple):
    """Matrices that are gathered together, and their slot. Units with equal `start` share a slot.

    Attributes:
        unit_index: index of the unit in the chunk's forward; 0 if the unit is a complete chunk.
        elements: range [first, stop) of the unit's elements in the layout of the chunk's buffer.
        start: first element of the slot in the memory of all slots.
        is_persistent: whether the unit has a slot of its own, in which it stays gathered until the update.
    """

    chunk: int
    unit_index: int
    elements: tuple[int, int]
    start: int
    is_persistent: bool


def assign_units(
    buffers: Sequence[ParamAndGradBuffer], chunk_slots: Sequence[int] | None, persistent_blocks: int
) -> tuple[list[SlotUnit], int]:
    """Return all units of a rank's chunks, and the size of all slots in elements.

    Args:
        chunk_slots, persistent_blocks: as for `ParameterSlots`.
    """
    units = []
    if chunk_slots is not None:
        starts, size = _find_chunk_starts(buffers, chunk_slots)
        for chunk, (buffer, start) in enumerate(zip(buffers, starts, strict=True)):
            # Buckets of units are the first ones of a layout.
            if buffer.layout.unit_size:
                units.append(SlotUnit(chunk, 0, (0, buffer.layout.unit_size), start=start, is_persistent=False))
        return units, size
    persistent = select_persistent_blocks([_count_blocks(buffer) for buffer in buffers], persistent_blocks)
    block_starts, size = _find_block_starts(buffers, persistent)
    for chunk, (buffer, unit_starts) in enumerate(zip(buffers, block_starts, strict=True)):
        for unit_index, elements in find_unit_ranges(buffer.layout).items():
            is_persistent = _is_block(buffer, unit_index) and persistent[chunk][unit_index - 1]
            start = unit_starts[unit_index]
            units.append(SlotUnit(chunk, unit_index, elements, start=start, is_persistent=is_persistent))
    return units, size


def _count_blocks(buffer: ParamAndGradBuffer) -> int:
    """Return the number of blocks of a chunk: its units without the first and the last one."""
    return buffer.count_units() - 2


def _find_block_starts(
    buffers: Sequence[ParamAndGradBuffer], persistent: Sequence[Sequence[bool]]
) -> tuple[list[dict[int, int]], int]:
    """Return the start of each unit of each chunk in the slots' memory, and the size of all slots, in elements.

    There are two slots for blocks, one for embedding and head, and one for each persistent block.

    Args:
        persistent: for each block of each chunk whether it has a slot of its own.
    """
    block_size = 0  # of the largest block that shares a slot
    outer_size = 0
    block_persistence = []  # of the blocks with matrices of each chunk
    for buffer, is_persistent in zip(buffers, persistent, strict=True):
        blocks = []
        for unit_index, (start, stop) in sorted(find_unit_ranges(buffer.layout).items()):
            if not _is_block(buffer, unit_index):
                outer_size = max(outer_size, stop - start)
                continue
            blocks.append(is_persistent[unit_index - 1])
            if not blocks[-1]:
                block_size = max(block_size, stop - start)
        block_persistence.append(blocks)
    starts = []
    size = 2 * block_size + outer_size
    for buffer, blocks, slots in zip(buffers, block_persistence, assign_block_slots(block_persistence), strict=True):
        unit_starts = {}
        block_slots = iter(zip(blocks, slots, strict=True))
        for unit_index, (start, stop) in sorted(find_unit_ranges(buffer.layout).items()):
            if not _is_block(buffer, unit_index):
                unit_starts[unit_index] = 2 * block_size
                continue
            has_own_slot, slot = next(block_slots)
            if has_own_slot:
                unit_starts[unit_index] = size
                size += stop - start
            else:
                unit_starts[unit_index] = block_size * slot
        starts.append(unit_starts)
    return starts, size


def _is_block(buffer: ParamAndGradBuffer, unit_index: int) -> bool:
    """Return whether a unit is a block. The first unit is the embedding, the last one the head, where they exist."""
    return 0 < unit_index < buffer.count_units() - 1


def _find_chunk_starts(buffers: Sequence[ParamAndGradBuffer], chunk_slots: Sequence[int]) -> tuple[list[int], int]:
    """Return the start of each chunk, which is a single unit, in the slots' memory, and the size of all slots."""
    slot_size = max(buffer.layout.unit_size for buffer in buffers)
    return [slot * slot_size for slot in chunk_slots], CHUNK_SLOTS * slot_size
