"""The binary format of spans and roll-ups: frames of records with a checksum, in rings and spools.

    frame = head (64 bytes) | records of one kind, all of one rank and one step

A frame holds the identity of the ring that it was written to, and its number in that ring. A reader that knows the last
number of a ring recognises repeated frames. `scan_frames` distinguishes truncated frames, other schemas and foreign
bytes from valid frames.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from megascale.core.calls import MAX_RANKS
from megascale.core.spans import SPAN_SCHEMA

ROLLUPS, SPANS, CLOCKS, COUNTERS = range(4)

# One record per rank, step, kind and axis, or several, whose counts, times and bytes must be added.
ROLLUP = np.dtype(
    [
        ("kind", "u1"),
        ("axis", "u1"),
        ("unused", "u2"),
        ("count", "u4"),
        ("total_ns", "i8"),  # sum of the durations
        ("waited_ns", "i8"),  # waits for other ranks or samples within these durations
        ("longest_ns", "i8"),
        ("host_ns", "i8"),  # sum of the durations on the host; equal to total_ns if the host is the bottleneck
        ("bytes", "i8"),
        ("first_ns", "i8"),  # begin of the first span
        ("last_ns", "i8"),  # end of the last span
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
# Offset of the common clock from the host's monotonic clock, and the largest error of that offset, in nanoseconds.
CLOCK = np.dtype([("time_ns", "i8"), ("offset_ns", "i8"), ("error_ns", "i8")])
# A value of a host's device, such as the bytes of a NIC. Names are truncated UTF-8.
COUNTER = np.dtype([("time_ns", "i8"), ("value", "f8"), ("name", "S32"), ("device", "S16")])
RECORDS = {ROLLUPS: ROLLUP, SPANS: SPAN, CLOCKS: CLOCK, COUNTERS: COUNTER}

# magic, schema, kind, bytes of the records, ring, number, step, rank, attempt, clock error, lost spans, checksum
_HEAD = struct.Struct("<4sHHIQQQIIQQI")
HEAD_BYTES = _HEAD.size
_CHECKSUM = struct.Struct("<I")  # the last field of the head; covers the fields before it and the records
_CHECKSUM_OFFSET = HEAD_BYTES - _CHECKSUM.size
_MAGIC = b"MSpn"
_MAX_RECORD_BYTES = 1 << 24


class FrameHead(NamedTuple):
    """The description of a frame's records.

    Attributes:
        kind: ROLLUPS, SPANS, CLOCKS or COUNTERS.
        ring, number: identity of the ring, and the frame's number in the ring.
        rank, attempt, step: origin of the records.
        error_ns: largest error of the records' times on the host's clock.
        lost: number of spans that this rank has dropped so far because its ring was full.
    """

    kind: int
    ring: int
    number: int
    rank: int
    attempt: int
    step: int
    error_ns: int = 0
    lost: int = 0


def pack_frame(head: FrameHead, records: np.ndarray[Any, Any] | memoryview) -> bytes:
    data = records.tobytes()
    fields = (head.ring, head.number, head.step, head.rank, head.attempt, head.error_ns, head.lost)
    start = _HEAD.pack(_MAGIC, SPAN_SCHEMA, head.kind, len(data), *fields, 0)[:_CHECKSUM_OFFSET]
    return start + _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(start))) + data


class TornFrame(ValueError):
    """Bytes that are not a complete frame.

    Attributes:
        offset: offset of the first of these bytes.
        is_truncated: the bytes are the begin of a frame, whose end may follow.
    """

    def __init__(self, text: str, offset: int, is_truncated: bool = False) -> None:
        super().__init__(text)
        self.offset = offset
        self.is_truncated = is_truncated


def scan_frames(data: bytes | memoryview, check: bool = True) -> Iterator[tuple[FrameHead, memoryview, int]]:
    """Yield head, records as bytes, and offset of the end of each frame. Raises TornFrame at the first invalid frame.

    Args:
        check: compare checksums; unnecessary for frames that were checked before.
    """
    view = memoryview(data)
    offset = 0
    while offset < len(view):
        if len(view) - offset < HEAD_BYTES:
            raise TornFrame("a frame's head is truncated", offset, is_truncated=True)
        magic, schema, kind, size, ring, number, step, rank, attempt, error, lost, crc = _HEAD.unpack_from(view, offset)
        if magic != _MAGIC:
            raise TornFrame("the bytes are not a frame of spans", offset)
        if schema != SPAN_SCHEMA:
            raise TornFrame(f"the frame has schema {schema}; this version reads {SPAN_SCHEMA}", offset)
        if kind not in RECORDS or size > _MAX_RECORD_BYTES or size % RECORDS[kind].itemsize:
            raise TornFrame(f"the frame of kind {kind} has an invalid size of {size} bytes", offset)
        end = offset + HEAD_BYTES + size
        if end > len(view):
            raise TornFrame("a frame's records are truncated", offset, is_truncated=True)
        body = view[offset + HEAD_BYTES : end]
        if check and zlib.crc32(body, zlib.crc32(view[offset : offset + _CHECKSUM_OFFSET])) != crc:
            raise TornFrame("the checksum of a frame is wrong", offset)
        if rank >= MAX_RANKS or attempt >= 1 << 31 or max(step, error, lost) >= 1 << 62:
            raise TornFrame(f"the frame has an invalid rank {rank}, attempt {attempt} or step {step}", offset)
        yield FrameHead(kind, ring, number, rank, attempt, step, error, lost), body, end
        offset = end
