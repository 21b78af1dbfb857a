"""How a chunk's parameters lie in one flat buffer, as a pure function of their sizes: no tensors here.

Parameters are grouped into regions, so that what must be treated alike is contiguous: matrices in reverse order
(the order in which backward finishes them), then the few small replicated or undecayed ones. Matrices that may
travel in another type than the rest come first, in buckets of nothing else. A region boundary, not a
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
        replicated: the same on every tensor-parallel rank.
        own_bucket: has a bucket to itself (a tied embedding, whose shards another stage holds as well).
        apart: in buckets where all are: what may be gathered as float8 (parallel/float8_gather.py).
    """

    count: int
    decay: bool
    replicated: bool
    tied: bool = False
    apart: bool = False

    @property
    def region(self) -> tuple[bool, bool, bool]:
        """Members of one region share buckets; regions lie in this order."""
        return self.tied, self.replicated, not self.apart


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
        replicated: elements [start, stop) that hold the replicated members and nothing else, in buckets of their own.
        own_bucket: number of the bucket of the member that has one to itself, None if there is none.
    """

    starts: tuple[int, ...]
    buckets: tuple[BucketSpan, ...]
    size: int
    replicated: tuple[int, int]
    tied_bucket: int | None

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
    order = sorted(range(len(members)), key=lambda i: (members[i].region, not members[i].decay, -i))
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
    replicated = [0, 0]
    for i in order:
        full = bucket_elements is not None and at - begin + members[i].count > bucket_elements
        if full or members[i].region != region:
            close()
        region = members[i].region
        starts[i] = at
        inside.append(i)
        at += -(-members[i].count // ALIGN) * ALIGN
    close()
    for span in buckets:
        if members[span.members[0]].replicated:
            replicated = [replicated[0] if replicated[1] else span.start, span.stop]
    last = len(buckets) - 1
    own_bucket = last if members[buckets[last].members[0]].tied else None
    return FlatLayout(tuple(starts), tuple(buckets), at, (replicated[0], replicated[1]), own_bucket)
