"""How a chunk's parameters lie in one flat buffer, as a pure function of their sizes: no tensors here.

Parameters are grouped into regions, so that what must be treated alike is contiguous: matrices in reverse order
(the order in which backward finishes them), then the few small shared or undecayed ones. A region boundary, not a
per-element mask, tells weight decay and double counting apart. The buffer is cut into buckets, the unit of
communication; each bucket is padded so that every data-parallel rank owns an equal, aligned part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64  # elements: 128 bytes of bf16, what vector loads and NCCL like


@dataclass(frozen=True)
class BufferMember:
    """What the layout needs to know of a parameter.

    Attributes:
        count: elements.
        decay: whether weight decay applies.
        shared: the same on every tensor-parallel rank.
        alone: has a bucket of its own (a tied embedding, whose shards another stage holds as well).
    """

    count: int
    decay: bool
    shared: bool
    alone: bool = False


@dataclass(frozen=True)
class BucketSpan:
    """Elements [start, stop) of the buffer, and the members (by index) that lie in it."""

    start: int
    stop: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class FlatLayout:
    """Where each member starts, the buckets, and the size of the buffer in elements.

    Attributes:
        shared: elements [start, stop) that hold the shared members and nothing else, in buckets of their own.
        alone: number of the bucket that holds the member that stands alone, None if there is none.
    """

    starts: tuple[int, ...]
    buckets: tuple[BucketSpan, ...]
    size: int
    shared: tuple[int, int]
    alone: int | None

    def shard(self, bucket: int, rank: int, ranks: int) -> tuple[int, int]:
        """Elements of the buffer that data-parallel `rank` owns of a bucket."""
        span = self.buckets[bucket]
        part = (span.stop - span.start) // ranks
        return span.start + rank * part, span.start + (rank + 1) * part


def lay_out(members: Sequence[BufferMember], ranks: int, bucket_elements: int | None) -> FlatLayout:
    """Lay members (given in forward order) into a buffer.

    Args:
        members: the chunk's parameters in forward order.
        ranks: data-parallel ranks that share each bucket equally.
        bucket_elements: cut the matrices into buckets of about this many elements; None makes one bucket.
    """
    order = sorted(range(len(members)), key=lambda i: (members[i].alone, members[i].shared, not members[i].decay, -i))
    starts = [0] * len(members)
    buckets: list[BucketSpan] = []
    at = begin = 0
    inside: list[int] = []

    def close() -> None:
        nonlocal at, begin, inside
        if inside:
            unit = ALIGN * ranks
            at = begin + -(-(at - begin) // unit) * unit
            buckets.append(BucketSpan(begin, at, tuple(inside)))
            begin, inside = at, []

    region = None
    shared = [0, 0]
    for i in order:
        full = bucket_elements is not None and at - begin + members[i].count > bucket_elements
        if full or (members[i].alone, members[i].shared) != region:
            close()
        region = (members[i].alone, members[i].shared)
        starts[i] = at
        inside.append(i)
        at += -(-members[i].count // ALIGN) * ALIGN
    close()
    for span in buckets:
        if members[span.members[0]].shared:
            shared = [shared[0] if shared[1] else span.start, span.stop]
    last = len(buckets) - 1
    alone = last if members[buckets[last].members[0]].alone else None
    return FlatLayout(tuple(starts), tuple(buckets), at, (shared[0], shared[1]), alone)
