"""The binary form of spans and roll-ups: frames of records with a checksum, as they leave a rank and lie in a spool.

    frame = head (64 bytes) | records of one kind, all of one rank and one step

A frame has its ring's identity and a number counted up there: who has kept one knows which come next, so that none is
kept twice. What is torn, of another schema or no frame at all is told apart from what is there (`scan`).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from megascale.core.calls import MOST_RANKS
from megascale.core.spans import SPAN_SCHEMA

ROLLUPS, SPANS, CLOCKS, COUNTERS = range(4)

# One row a rank, step, kind and axis. Rows of the same are parts: counts, times and bytes add up.
ROLLUP = np.dtype(
    [
        ("kind", "u1"),
        ("axis", "u1"),
        ("unused", "u2"),
        ("count", "u4"),
        ("total_ns", "i8"),  # from start to end, of all together
        ("waited_ns", "i8"),  # of that: for others, or for samples
        ("longest_ns", "i8"),
        ("host_ns", "i8"),  # the host's time in them: as long as the device's where the host is the slower
        ("bytes", "i8"),
        ("first_ns", "i8"),  # start of the first, end of the last
        ("last_ns", "i8"),
    ]
)
SPAN = np.dtype(
    [
        ("kind", "u1"),
        ("axis", "u1"),
        ("chunk", "i2"),
        ("microbatch", "i4"),
        ("waited_on", "i4"),
        ("unused", "u4"),
        ("bytes", "i8"),
        ("start_ns", "i8"),
        ("end_ns", "i8"),
    ]
)
# How far the common clock was ahead of the host's monotonic one, in nanoseconds, and by how much that may be wrong.
CLOCK = np.dtype([("time_ns", "i8"), ("offset_ns", "i8"), ("error_ns", "i8")])
# A value of a device of the host, such as a NIC's bytes. Names are UTF-8, cut off.
COUNTER = np.dtype([("time_ns", "i8"), ("value", "f8"), ("name", "S32"), ("device", "S16")])
RECORDS = {ROLLUPS: ROLLUP, SPANS: SPAN, CLOCKS: CLOCK, COUNTERS: COUNTER}

# magic, schema, kind, bytes of the records, ring, number, step, rank, attempt, clock's error, spans lost, checksum
_HEAD = struct.Struct("<4sHHIQQQIIQQI")
HEAD_BYTES = _HEAD.size
_SUM = struct.Struct("<I")  # the last field of the head: of all that is before and after it
_SUM_AT = HEAD_BYTES - _SUM.size
_MAGIC = b"MSpn"
MOST_BYTES = 1 << 24  # of one frame's records


class FrameHead(NamedTuple):
    """What a frame says of its records.

    Attributes:
        kind: ROLLUPS, SPANS, CLOCKS or COUNTERS.
        ring, number: the ring's identity, and which of its frames this is.
        rank, attempt, step: whose records they are.
        error_ns: by how much their times may be off on their host's clock.
        lost: spans that this rank has dropped so far, for want of room.
    """

    kind: int
    ring: int
    number: int
    rank: int
    attempt: int
    step: int
    error_ns: int = 0
    lost: int = 0


def pack_frame(head: FrameHead, records: np.ndarray[Any, Any]) -> bytes:
    """A frame."""
    return pack_bytes(head, records.tobytes())


def pack_bytes(head: FrameHead, data: bytes | memoryview) -> bytes:
    """A frame of records that are bytes already."""
    about = (head.ring, head.number, head.step, head.rank, head.attempt, head.error_ns, head.lost)
    bare = _HEAD.pack(_MAGIC, SPAN_SCHEMA, head.kind, len(data), *about, 0)[:_SUM_AT]
    return bare + _SUM.pack(zlib.crc32(data, zlib.crc32(bare))) + bytes(data)


class TornFrame(ValueError):
    """Bytes that are no whole frame; `at` is where they begin, `short` whether there may simply be more to come."""

    def __init__(self, text: str, at: int, short: bool = False) -> None:
        super().__init__(text)
        self.offset, self.is_truncated = at, short


def scan(data: bytes | memoryview, check: bool = True) -> Iterator[tuple[FrameHead, memoryview, int]]:
    """The frames of `data`: (head, its records as bytes, where the frame ends); TornFrame at the first that is none.

    check: whether checksums are compared; those of a frame that was read before need not be.
    """
    view, at = memoryview(data), 0
    while at < len(view):
        if len(view) - at < HEAD_BYTES:
            raise TornFrame("a frame's head is cut off", at, short=True)
        magic, schema, kind, size, ring, number, step, rank, attempt, error, lost, crc = _HEAD.unpack_from(view, at)
        if magic != _MAGIC:
            raise TornFrame("this is no frame of spans", at)
        if schema != SPAN_SCHEMA:
            raise TornFrame(f"a frame of schema {schema}; this version reads {SPAN_SCHEMA}", at)
        if kind not in RECORDS or size > MOST_BYTES or size % RECORDS[kind].itemsize:
            raise TornFrame(f"a frame of kind {kind} with {size} bytes", at)
        end = at + HEAD_BYTES + size
        if end > len(view):
            raise TornFrame("a frame's records are cut off", at, short=True)
        body = view[at + HEAD_BYTES : end]
        if check and zlib.crc32(body, zlib.crc32(view[at : at + _SUM_AT])) != crc:
            raise TornFrame("a frame whose checksum is wrong", at)
        if rank >= MOST_RANKS or attempt >= 1 << 31 or max(step, error, lost) >= 1 << 62:
            raise TornFrame(f"a frame of rank {rank}, attempt {attempt} and step {step}", at)
        yield FrameHead(kind, ring, number, rank, attempt, step, error, lost), body, end
        at = end
