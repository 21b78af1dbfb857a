"""The ring by which a rank's frames leave it: memory shared with the host's span service, written without waiting.

The rank writes at the head, the service reads at the tail, and neither waits for the other. If there is no room, the
rank drops and counts records, spans before roll-ups. The memory is anonymous (a memfd) and passed to the service as an
open file. It survives either process, and it disappears with both. Frames stay in the ring until the service has stored
and released them, so that a new service continues where a killed one stopped.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

import numpy as np

from megascale.observe.store.frames import HEAD_BYTES, SPANS, FrameHead, pack_frame

BODY_BYTES = 4 << 20
_MAGIC = b"MSring1\0"
_HEAD = struct.Struct("<8sQIIQ")  # magic, bytes of the body, rank, attempt, identity
_BODY_OFFSET = 4096
# Indices of 64-bit fields, each in a cache line of its own. The rank writes all but the tail and the requested steps.
_HEAD_FIELD, _TAIL, _FIRST_REQUESTED, _LAST_REQUESTED, _LOST_SPANS, _LOST_ROLLUPS, _STEP, _SAMPLED_STEP = (
    8 * i for i in range(1, 9)
)
_ROLLUP_SHARE = 4  # a quarter of the ring is reserved for roll-ups


class SpanRing:
    """One end of a ring; at most one process writes and one reads.

    Args:
        handle: open file of the memory, which the ring owns; None creates the memory.
        rank, attempt, body: origin and size of a new ring.

    Attributes:
        identity: a random number of this ring.

    Raises:
        ValueError: the memory is not a ring.
    """

    def __init__(self, handle: int | None = None, rank: int = 0, attempt: int = 0, body: int = BODY_BYTES) -> None:
        is_new = handle is None
        if handle is None:
            handle = os.memfd_create("megascale-spans", os.MFD_CLOEXEC)
            os.ftruncate(handle, _BODY_OFFSET + body)
        self.handle = handle
        size = os.fstat(handle).st_size
        if size < _BODY_OFFSET:
            raise ValueError(f"memory of {size} bytes is not a ring of spans")
        self._map = mmap.mmap(handle, size)
        if is_new:
            identity = int.from_bytes(os.urandom(8), "little")
            _HEAD.pack_into(self._map, 0, _MAGIC, body, rank, attempt, identity)
        magic, self._body, self.rank, self.attempt, self.identity = _HEAD.unpack_from(self._map, 0)
        if magic != _MAGIC or self._body != size - _BODY_OFFSET:
            raise ValueError("the memory is not a ring of spans")
        # A view reads and writes a field at once; `struct` clears a field before it writes it, byte by byte.
        self._fields = memoryview(self._map)[:_BODY_OFFSET].cast("Q")
        self._head = self._fields[_HEAD_FIELD]
        self._number = 0

    # the rank -----------------------------------------------------------------------------------------------------

    def write(self, kind: int, step: int, records: np.ndarray[Any, Any], error_ns: int) -> None:
        """Write records of one step, or drop and count them; see timers.SpanSink."""
        if kind == SPANS:
            reserve = self._body // _ROLLUP_SHARE
        else:
            reserve = 0
        if HEAD_BYTES + records.nbytes > self.free_bytes() - reserve:
            self._fields[_LOST_SPANS if kind == SPANS else _LOST_ROLLUPS] += len(records)
            return
        self._number += 1
        head = FrameHead(kind, self.identity, self._number, self.rank, self.attempt, step, error_ns, self.lost)
        frame = pack_frame(head, records)
        offset = self._head % self._body
        first = min(len(frame), self._body - offset)
        self._map[_BODY_OFFSET + offset : _BODY_OFFSET + offset + first] = frame[:first]
        if first < len(frame):
            self._map[_BODY_OFFSET : _BODY_OFFSET + len(frame) - first] = frame[first:]
        self._head += len(frame)
        self._fields[_STEP] = step
        self._fields[_HEAD_FIELD] = self._head

    def is_requested(self, step: int) -> bool:
        """Return whether all spans of a step were requested; see timers.SpanSink."""
        return self._fields[_FIRST_REQUESTED] <= step <= self._fields[_LAST_REQUESTED]

    def mark_sampled(self, step: int) -> None:
        """Announce a step whose spans are all recorded; see timers.SpanSink."""
        self._fields[_SAMPLED_STEP] = step

    def free_bytes(self) -> int:
        """Return the number of free bytes."""
        return self._body - (self._head - self._fields[_TAIL])

    # the service --------------------------------------------------------------------------------------------------

    def read(self) -> bytes:
        """Return all frames that were written and not yet released."""
        tail = self._fields[_TAIL]
        size = self._fields[_HEAD_FIELD] - tail
        if not 0 <= size <= self._body:
            raise ValueError(f"its ends are {size} bytes apart in a body of {self._body}: another version wrote it")
        offset = tail % self._body
        first = min(size, self._body - offset)
        data = self._map[_BODY_OFFSET + offset : _BODY_OFFSET + offset + first]
        if first < size:
            return data + self._map[_BODY_OFFSET : _BODY_OFFSET + size - first]
        return data

    def release(self, size: int) -> None:
        """Free the first bytes of the data that `read` returned, because they are stored elsewhere."""
        self._fields[_TAIL] += size

    def request_spans(self, first: int, last: int) -> None:
        """Request all spans of the steps `first` to `last`."""
        self._fields[_LAST_REQUESTED] = 0
        self._fields[_FIRST_REQUESTED] = first
        self._fields[_LAST_REQUESTED] = last

    @property
    def step(self) -> int:
        """Step of the newest frame."""
        return self._fields[_STEP]

    @property
    def sampled_step(self) -> int:
        """Current step if all its spans are recorded, otherwise 0."""
        return self._fields[_SAMPLED_STEP]

    @property
    def lost(self) -> int:
        """Number of spans that were dropped because the ring was full."""
        return self._fields[_LOST_SPANS]

    @property
    def lost_rollups(self) -> int:
        """Number of roll-up records that were dropped because the ring was full."""
        return self._fields[_LOST_ROLLUPS]

    def close(self) -> None:
        """Unmap the memory and close its file."""
        self._fields.release()
        self._map.close()
        os.close(self.handle)
