"""Layout of slots whose part of this rank is the rank's shard itself: arithmetic on bytes, without tensors.

Under ZeRO-3 several units share the memory of a slot (parallel/parameter_slots.py). If memory can be mapped in pages,
each unit has a range of addresses of its own. The pages of this rank's part of a bucket belong to a block, which holds
the rank's shard and which the peers read. All other pages belong to the slot, and the units of the slot map the same
ones.

A driver maps blocks as a whole, from their first byte on. So the position of a shard in its block must equal its
position in a page of the unit. A block therefore has up to one page before and some pages after the shard. They receive
the neighbouring parts of peers, which a gather writes anyway.

The trainer maps memory by this arithmetic (parallel/mapped_slots.py), and the planner counts memory by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from megascale.core.unit_slots import find_gaps

# Shards with fewer bytes are copied. A block has up to three pages of 2 MiB besides its shard.
MIN_MAPPED_BYTES = 16 << 20
# Blocks of a unit are disjoint if their shards have so many pages: a block begins at most two pages before its shard
# and ends at most two pages and the driver's own bytes after it.
MIN_SHARD_PAGES = 6
# What the planner assumes: the page of a GPU, and torch's signals, which each shared allocation contains
# (default_signal_pad_size: 32 channels, 72 ranks, 4 bytes).
GPU_PAGE_BYTES = 2 << 20
SIGNAL_BYTES = 9216


class PlannedUnit(NamedTuple):
    """A unit whose memory is counted before it exists.

    Attributes:
        slot: index of its slot.
        bucket_bytes: bytes of each of its buckets, in the order of memory.
    """

    slot: int
    bucket_bytes: tuple[int, ...]


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


# Cached because a search counts the same units for many layouts.
@lru_cache(maxsize=256)
def count_mapped_bytes(
    units: tuple[PlannedUnit, ...],
    ranks: int,
    *,
    page_bytes: int = GPU_PAGE_BYTES,
    lead_bytes: int = 0,
    trail_bytes: int = SIGNAL_BYTES,
    min_bytes: int = MIN_MAPPED_BYTES,
) -> int | None:
    """Return the bytes of slots and shards if own shards are mapped: the most of any rank. None if no shard is mapped.

    Args:
        ranks: ranks that share each bucket.
        lead_bytes, trail_bytes: bytes before and after the available bytes of a shared block.
        min_bytes: smaller shards are copied.
    """
    if all(nbytes // ranks < min_bytes for unit in units for nbytes in unit.bucket_bytes):
        return None
    totals = []
    for rank in range(ranks):
        total = 0
        pages_by_slot: dict[int, dict[tuple[int, ...], UnitPages]] = {}  # and by the unit's buckets
        for unit in units:
            blocks = []
            start = 0
            for nbytes in unit.bucket_bytes:
                shard_bytes = nbytes // ranks
                if shard_bytes < min_bytes:
                    total += shard_bytes  # in memory of its own, which is copied into the slot
                else:
                    available_bytes = count_block_bytes(
                        start, shard_bytes, ranks, lead_bytes=lead_bytes, page_bytes=page_bytes
                    )
                    block_bytes = round_up(lead_bytes + available_bytes + trail_bytes, page_bytes)
                    total += block_bytes
                    shard_start = start + rank * shard_bytes
                    block_start = shard_start - find_shard_offset(shard_start, lead_bytes, page_bytes)
                    blocks.append((block_start, block_start + block_bytes))
                start += nbytes
            pages = UnitPages(start, page_bytes, tuple(blocks))
            # Equal units of a slot map the same pages of it.
            pages_by_slot.setdefault(unit.slot, {})[unit.bucket_bytes] = pages
        for slot_pages in pages_by_slot.values():
            total += sum(stop - first for first, stop in divide_slot(list(slot_pages.values())))
        totals.append(total)
    return max(totals)


def round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple
