"""Layout of slots whose part of this rank is the rank's shard itself: arithmetic on bytes, without tensors.

Under ZeRO-3 several units share the memory of a slot (parameter_slots.py). If memory can be mapped in pages, each unit
has a range of addresses of its own. The pages of this rank's part of a bucket belong to a block, which holds the rank's
shard and which the peers read. All other pages belong to the slot, and the units of the slot map the same ones.

A driver maps blocks as a whole, from their first byte on. So the position of a shard in its block must equal its
position in a page of the unit. A block therefore has up to one page before and some pages after the shard. They receive
the neighbouring parts of peers, which a gather writes anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from megascale.parallel.buffer_layout import find_gaps

# Shards with fewer bytes are copied. A block has up to three pages of 2 MiB besides its shard.
MIN_MAPPED_BYTES = 16 << 20
# Blocks of a unit are disjoint if their shards have so many pages: a block begins at most two pages before its shard
# and ends at most two pages and the driver's own bytes after it.
MIN_SHARD_PAGES = 6


@dataclass(frozen=True)
class UnitPages:
    """Pages of a unit's range of addresses, in bytes from the first byte of the unit's matrices.

    Attributes:
        nbytes: bytes of the unit's matrices.
        page_bytes: bytes of a page.
        blocks: range [first, stop) of each block, a multiple of pages.
    """

    nbytes: int
    page_bytes: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def first(self) -> int:
        """First byte of the range, 0 or less."""
        return min((0, *(first for first, _ in self.blocks)))

    @property
    def stop(self) -> int:
        """End of the range."""
        return max((self._slot_stop, *(stop for _, stop in self.blocks)))

    @property
    def _slot_stop(self) -> int:
        return round_up(self.nbytes, self.page_bytes)

    def list_slot_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges [first, stop) that belong to the slot. Raises ValueError if blocks overlap."""
        for (_, stop), (first, _) in pairwise(sorted(self.blocks)):
            if first < stop:
                raise ValueError(
                    f"the memory of two shards overlaps in a unit: it ends at {stop} and begins at {first}"
                )
        clipped = [(max(first, 0), min(stop, self._slot_stop)) for first, stop in self.blocks]
        return find_gaps(0, self._slot_stop, clipped)


def divide_slot(units: Sequence[UnitPages]) -> list[tuple[int, int]]:
    """Return the ranges [first, stop) into which a slot is divided, so that each unit maps some of them completely.

    Ranges that no unit maps are omitted: they need no memory.
    """
    ranges = [slot_range for unit in units for slot_range in unit.list_slot_ranges()]
    bounds = sorted({bound for slot_range in ranges for bound in slot_range})
    pieces = []
    for first, stop in pairwise(bounds):
        if any(start <= first and stop <= end for start, end in ranges):
            pieces.append((first, stop))
    return pieces


def find_shard_offset(start: int, lead_bytes: int, page_bytes: int) -> int:
    """Return the position of a shard in its block, given its position `start` in the unit.

    Args:
        lead_bytes: first bytes of the block that are not available.
    """
    return lead_bytes + (start - lead_bytes) % page_bytes


def count_block_bytes(bucket_start: int, shard_bytes: int, ranks: int, *, lead_bytes: int, page_bytes: int) -> int:
    """Return the available bytes that the block of a shard needs, the same for all ranks.

    Args:
        bucket_start: first byte of the bucket in the unit.
    """
    offsets = []
    for rank in range(ranks):
        offsets.append(find_shard_offset(bucket_start + rank * shard_bytes, lead_bytes, page_bytes))
    return max(offsets) - lead_bytes + shard_bytes


def round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
