"""Layout of a chunk's parameters in one flat buffer: a pure function of their sizes, without tensors.

Parameters with the same treatment form contiguous regions. Matrices come first, in reverse order of the forward, which
is the order in which backward completes their gradients. The few small parameters that are replicated or have no weight
decay follow. Matrices that may be gathered in float8 precede all others, in buckets of their own. With regions,
weight decay and sums over axes need no masks per element.

The buffer is divided into buckets, the unit of communication. Each bucket is padded so that every data-parallel rank
has an equal, aligned shard of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from megascale.core.unit_slots import TABLE_PARTS

ALIGN = 64  # elements: 128 bytes of bfloat16, which suits vector loads and NCCL
# Parts of a table have multiples of so many rows. A part's columns of the gradient of 16-bit logits then begin at
# multiples of 16 bytes, as fast GEMMs need.
ROW_ALIGN = 8


@dataclass(frozen=True)
class BufferMember:
    """Properties of a parameter that decide its position in the buffer.

    Attributes:
        count: number of elements.
        has_decay: whether weight decay applies.
        summed_axes: axes over which the gradient is summed before the reduction over data-parallel ranks.
        is_tied: whether this is a tied embedding. It has a bucket of its own, whose shards another stage holds as well.
        float8_gather: whether the parameter may be gathered in float8 (parallel/float8_gather.py). Its buckets contain
            only such parameters.
        unit: unit of the forward (`Chunk.list_forward_units`) that has buckets of its own with this parameter; None if
            the parameter shares buckets with all others of its region.
        row_elements: elements of a row if the parameter may be divided by rows into several buckets, else None.
    """

    count: int
    has_decay: bool
    summed_axes: tuple[str, ...]
    is_tied: bool = False
    float8_gather: bool = False
    unit: int | None = None
    row_elements: int | None = None

    @property
    def region(self) -> tuple[bool, int, tuple[str, ...], bool]:
        """The sort key of the member's region. Members of one region share buckets.

        Regions of units come first, in reverse order of the forward.
        """
        order = 1 if self.unit is None else -self.unit
        return self.is_tied, order, self.summed_axes, not self.float8_gather


@dataclass(frozen=True)
class BucketSpan:
    """One bucket: elements [start, stop) of the buffer.

    Attributes:
        members: indices of the members in this range.
        rows: rows [first, stop) of the only member, if the bucket holds a part of a divided table; else None.
    """

    start: int
    stop: int
    members: tuple[int, ...]
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class SummedRange:
    """Elements [start, stop) of the buffer whose gradients are summed over `axes` before they are reduced."""

    axes: tuple[str, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """Position of every member and bucket in the buffer.

    Attributes:
        starts: first element of each member.
        buckets: buckets in buffer order.
        size: number of elements of the buffer.
        summed_ranges: ranges of buckets whose gradients are summed over axes before the reduction.
        tied_bucket: index of the bucket of the tied embedding, None without one.
        units: unit of each bucket, None for a bucket of members without a unit. Buckets of units come first.
        unit_size: number of elements of all buckets of units, which are the first ones of the buffer.
    """

    starts: tuple[int, ...]
    buckets: tuple[BucketSpan, ...]
    size: int
    summed_ranges: tuple[SummedRange, ...]
    tied_bucket: int | None
    units: tuple[int | None, ...] = ()
    unit_size: int = 0

    def find_shard(self, bucket: int, rank: int, ranks: int) -> tuple[int, int]:
        """Return the elements [start, stop) of the buffer that data-parallel `rank` owns of a bucket."""
        span = self.buckets[bucket]
        size = (span.stop - span.start) // ranks
        return span.start + rank * size, span.start + (rank + 1) * size


def lay_out(
    members: Sequence[BufferMember],
    ranks: int,
    bucket_elements: int | None,
    divides_units: bool = False,
    table_part: int | None = None,
) -> FlatLayout:
    """Assign every member a range of the buffer.

    Args:
        members: the chunk's parameters in forward order.
        ranks: data-parallel ranks that share each bucket equally.
        bucket_elements: approximate elements per bucket of matrices; None makes one bucket.
        divides_units: whether a unit is divided into buckets of this size too, instead of having one bucket.
        table_part: approximate elements of a part of a table. A table that is larger than TABLE_PARTS parts is divided
            by rows. None: tables are not divided.
    """
    starts = [0] * len(members)
    buckets: list[BucketSpan] = []
    offset = 0
    for indices in _group_by_bucket(members, bucket_elements, divides_units):
        bucket_start = offset
        table = members[indices[0]]
        if table_part is not None and table.row_elements is not None and table.count > TABLE_PARTS * table_part:
            if len(indices) != 1:
                raise ValueError(f"a table that is divided by rows has a bucket of its own, not members {indices}")
            starts[indices[0]] = offset
            for first, last in _divide_rows(table.count // table.row_elements, table.row_elements, ranks, table_part):
                size = _round_up((last - first) * table.row_elements, ALIGN * ranks)
                buckets.append(BucketSpan(offset, offset + size, (indices[0],), (first, last)))
                offset += size
            continue
        for i in indices:
            starts[i] = offset
            offset += _round_up(members[i].count, ALIGN)
        offset = bucket_start + _round_up(offset - bucket_start, ALIGN * ranks)
        buckets.append(BucketSpan(bucket_start, offset, tuple(indices)))
    summed: list[SummedRange] = []
    for span in buckets:
        axes = members[span.members[0]].summed_axes
        if summed and summed[-1].axes == axes and summed[-1].stop == span.start:
            summed[-1] = SummedRange(axes, summed[-1].start, span.stop)
        elif axes:
            summed.append(SummedRange(axes, span.start, span.stop))
    last = len(buckets) - 1
    if members[buckets[last].members[0]].is_tied:
        tied_bucket = last
    else:
        tied_bucket = None
    units = tuple(members[span.members[0]].unit for span in buckets)
    unit_size = max((span.stop for span, unit in zip(buckets, units, strict=True) if unit is not None), default=0)
    return FlatLayout(tuple(starts), tuple(buckets), offset, tuple(summed), tied_bucket, units, unit_size)


def find_unit_ranges(layout: FlatLayout) -> dict[int, tuple[int, int]]:
    """Return the range of elements [start, stop) of each unit."""
    ranges: dict[int, tuple[int, int]] = {}
    for span, unit in zip(layout.buckets, layout.units, strict=True):
        if unit is not None:
            start, _ = ranges.get(unit, (span.start, 0))
            ranges[unit] = start, span.stop
    return ranges


def compute_slot_starts(layout: FlatLayout) -> tuple[list[int], dict[int, int]]:
    """Return the first element of each unit's bucket in the slot of its unit, and the elements of each unit's slot.

    Buckets of a unit lie next to each other. The parts of a divided table use memory for TABLE_PARTS of them in turn.
    """
    starts = []
    sizes: dict[int, int] = {}
    table_start = 0  # of the present divided table, in the slot
    part_size = 0
    part_index = 0
    for span, unit in zip(layout.buckets, layout.units, strict=True):
        if unit is None:
            continue
        size = span.stop - span.start
        slot_size = sizes.get(unit, 0)
        if span.rows is None:
            starts.append(slot_size)
            sizes[unit] = slot_size + size
            continue
        if span.rows[0] == 0:
            table_start = slot_size
            part_size = size  # no later part is larger
            part_index = 0
            sizes[unit] = slot_size + TABLE_PARTS * size
        starts.append(table_start + part_index % TABLE_PARTS * part_size)
        part_index += 1
    return starts, sizes


def _group_by_bucket(
    members: Sequence[BufferMember], bucket_elements: int | None, divides_units: bool
) -> list[list[int]]:
    """Return the member indices of each bucket, in buffer order."""
    # -i: reverse order of the forward.
    order = sorted(range(len(members)), key=lambda i: (members[i].region, not members[i].has_decay, -i))
    groups: list[list[int]] = []
    region = None
    size = 0
    for i in order:
        limit = bucket_elements if divides_units or members[i].unit is None else None
        is_full = limit is not None and size + members[i].count > limit
        if is_full or members[i].region != region:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += _round_up(members[i].count, ALIGN)
        region = members[i].region
    return groups


def _divide_rows(rows: int, row_elements: int, ranks: int, part: int) -> list[tuple[int, int]]:
    """Return the rows [first, stop) of each part of a table, with at most about `part` elements per part.

    All parts but the last one are divisible into aligned shards without padding, so that the table is contiguous.
    """
    multiple = lcm(ROW_ALIGN, ALIGN * ranks // gcd(row_elements, ALIGN * ranks))
    length = max(1, part // row_elements // multiple) * multiple
    return [(first, min(first + length, rows)) for first in range(0, rows, length)]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
