"""The ring buffer through which a rank passes frames to its host's span service, without waiting.

The rank writes frames; the service reads and releases them. If the ring is full, the rank drops and counts records,
spans before roll-ups. The memory is anonymous (a memfd), and the rank passes it to the service as an open file. The
memory exists as long as one of the two processes. Frames stay in the ring until the service has stored and released
them, so that a new service continues where a killed service stopped.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

import numpy as np

from megascale.observe.store.frames import HEAD_BYTES, SPANS, FrameHead, pack_frame

CAPACITY = 4 << 20  # bytes of frames
_MAGIC = b"MSring1\0"
_PREAMBLE = struct.Struct("<8sQIIQ")  # magic, capacity, rank, attempt, identity
_FRAMES_OFFSET = 4096
# Indices of 64-bit fields, one per cache line. The service writes the released bytes and the requested steps; the rank
# writes all other fields. Written and released bytes are totals since the ring was made, so they never decrease.
_WRITTEN, _RELEASED, _FIRST_REQUESTED, _LAST_REQUESTED, _LOST_SPANS, _LOST_ROLLUPS, _STEP, _SAMPLED_STEP = (
    8 * i for i in range(1, 9)
)
_ROLLUP_FRACTION = 4  # spans leave one fourth of the ring free for roll-ups


class SpanRing:
    """A ring as one of its two processes sees it: one process writes, one reads.

    Args:
        handle: open file of the memory, which the ring owns; None creates the memory.
        rank, attempt: origin of a new ring.
        capacity: bytes of frames that a new ring holds.

    Attributes:
        identity: random number that identifies the ring.

    Raises:
        ValueError: the memory is not a ring.
    """

    def __init__(self, handle: int | None = None, rank: int = 0, attempt: int = 0, capacity: int = CAPACITY) -> None:
        is_new = handle is None
        if handle is None:
            handle = os.memfd_create("megascale-spans", os.MFD_CLOEXEC)
            os.ftruncate(handle, _FRAMES_OFFSET + capacity)
        self.handle = handle
        size = os.fstat(handle).st_size
        if size < _FRAMES_OFFSET:
            raise ValueError(f"memory of {size} bytes is not a ring of spans")
        self._map = mmap.mmap(handle, size)
        if is_new:
            identity = int.from_bytes(os.urandom(8), "little")
            _PREAMBLE.pack_into(self._map, 0, _MAGIC, capacity, rank, attempt, identity)
        magic, self._capacity, self.rank, self.attempt, self.identity = _PREAMBLE.unpack_from(self._map, 0)
        if magic != _MAGIC or self._capacity != size - _FRAMES_OFFSET:
            raise ValueError("the memory is not a ring of spans")
        # A view reads and writes a field atomically. `struct` clears a field before it writes it, byte by byte.
        self._fields = memoryview(self._map)[:_FRAMES_OFFSET].cast("Q")
        self._written = self._fields[_WRITTEN]
        self._frame_count = 0

    # Methods of the rank ------------------------------------------------------------------------------------------

    def write(self, kind: int, step: int, records: np.ndarray[Any, Any], error_ns: int) -> None:
        """Write records of one step, or drop and count them; see timers.SpanSink.

        Args:
            kind: ROLLUPS or SPANS (frames.py).
            error_ns: largest error of the records' times on the host's clock.
        """
        if kind == SPANS:
            reserve = self._capacity // _ROLLUP_FRACTION
        else:
            reserve = 0
        if HEAD_BYTES + records.nbytes > self.free_bytes() - reserve:
            self._fields[_LOST_SPANS if kind == SPANS else _LOST_ROLLUPS] += len(records)
            return
        self._frame_count += 1
        head = FrameHead(
            kind, self.identity, self._frame_count, self.rank, self.attempt, step, error_ns, self.lost_spans
        )
        frame = pack_frame(head, records)
        offset = self._written % self._capacity
        size_before_end = min(len(frame), self._capacity - offset)
        self._map[_FRAMES_OFFSET + offset : _FRAMES_OFFSET + offset + size_before_end] = frame[:size_before_end]
        if size_before_end < len(frame):
            remaining_size = len(frame) - size_before_end
            self._map[_FRAMES_OFFSET : _FRAMES_OFFSET + remaining_size] = frame[size_before_end:]
        self._written += len(frame)
        self._fields[_STEP] = step
        # Publish the frame last, so that the service never reads an incomplete frame.
        self._fields[_WRITTEN] = self._written

    def is_requested(self, step: int) -> bool:
        """Return whether all spans of a step were requested; see timers.SpanSink."""
        return self._fields[_FIRST_REQUESTED] <= step <= self._fields[_LAST_REQUESTED]

    def mark_sampled(self, step: int) -> None:
        """Announce a step whose spans are all recorded; see timers.SpanSink."""
        self._fields[_SAMPLED_STEP] = step

    def free_bytes(self) -> int:
        return self._capacity - (self._written - self._fields[_RELEASED])

    # Methods of the service ---------------------------------------------------------------------------------------

    def read(self) -> bytes:
        """Return all frames that were written and not yet released. Raises ValueError if the ring is damaged."""
        released = self._fields[_RELEASED]
        size = self._fields[_WRITTEN] - released
        if not 0 <= size <= self._capacity:
            raise ValueError(
                f"the ring claims {size} bytes of frames in a capacity of {self._capacity}: another version wrote it"
            )
        offset = released % self._capacity
        size_before_end = min(size, self._capacity - offset)
        data = self._map[_FRAMES_OFFSET + offset : _FRAMES_OFFSET + offset + size_before_end]
        if size_before_end < size:
            return data + self._map[_FRAMES_OFFSET : _FRAMES_OFFSET + size - size_before_end]
        return data

    def release(self, size: int) -> None:
        """Free the first `size` bytes that `read` returned; the caller has stored them."""
        self._fields[_RELEASED] += size

    def request_spans(self, first: int, last: int) -> None:
        """Request all spans of the steps `first` to `last`."""
        # Empty the range first, so that a rank that reads in between does not see a mixture of two ranges.
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
    def lost_spans(self) -> int:
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
