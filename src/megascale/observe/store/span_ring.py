"""The ring through which a rank's frames leave it: memory shared with the host's span service, written without waiting.

The rank writes at the head, the service reads at the tail, and neither ever waits for the other: what there is no room
for is dropped, spans before roll-ups, and counted. The memory is anonymous (a memfd) and handed to the service as an
open file: it outlives either of the two, and with both it is gone. What the service has read stays until it has taken
it over (`taken`), so that another service goes on where a killed one stopped.
"""

from __future__ import annotations

import mmap
import os
import struct
from typing import Any

import numpy as np

from megascale.observe.store.frames import HEAD_BYTES, SPANS, FrameHead, pack_frame

BODY = 4 << 20
_MAGIC = b"MSring1\0"
_HEAD = struct.Struct("<8sQIIQ")  # magic, bytes of the body, rank, attempt, identity
# Each in a cache line of its own. The writer's, but for the tail and what is asked.
_AT_HEAD, _AT_TAIL, _AT_FROM, _AT_UNTIL, _AT_LOST, _AT_LOST_ROLLUPS, _AT_STEP, _AT_KEEPING = (
    64 * i for i in range(1, 9)
)
_BODY_AT = 4096
_RESERVE = 4  # a quarter is kept for roll-ups


class SpanRing:
    """One end of a ring; at most one process writes and one reads.

    Args:
        handle: open file of the memory, kept; None to make it.
        rank, attempt, body: of a ring that is made: whose it is, and its bytes.

    Attributes:
        identity: a random number of this ring.

    Raises ValueError if the memory is no ring.
    """

    def __init__(self, handle: int | None = None, rank: int = 0, attempt: int = 0, body: int = BODY) -> None:
        made = handle is None
        if handle is None:
            handle = os.memfd_create("megascale-spans", os.MFD_CLOEXEC)
            os.ftruncate(handle, _BODY_AT + body)
        self.handle = handle
        size = os.fstat(handle).st_size
        if size < _BODY_AT:
            raise ValueError(f"{size} bytes are no ring of spans")
        self._map = mmap.mmap(handle, size)
        if made:
            identity = int.from_bytes(os.urandom(8), "little")
            _HEAD.pack_into(self._map, 0, _MAGIC, body, rank, attempt, identity)
        magic, self._body, self.rank, self.attempt, self.identity = _HEAD.unpack_from(self._map, 0)
        if magic != _MAGIC or self._body != size - _BODY_AT:
            raise ValueError("this memory is no ring of spans")
        # By a view, whose items are read and written at once; `struct` clears a word before it writes it, byte by byte.
        self._words = memoryview(self._map)[:_BODY_AT].cast("Q")
        self._head, self._lost, self._lost_rollups = self._get(_AT_HEAD), self.lost, self.lost_rollups
        self._number = 0

    def _get(self, at: int) -> int:
        return self._words[at // 8]

    def _set(self, at: int, value: int) -> None:
        self._words[at // 8] = value

    # the rank -----------------------------------------------------------------------------------------------------

    def write(self, kind: int, step: int, records: np.ndarray[Any, Any], error_ns: int) -> None:
        """See timers.SpanSink."""
        needed = HEAD_BYTES + records.nbytes
        room = self.free_bytes() - (self._body // _RESERVE if kind == SPANS else 0)
        if needed > room:
            if kind == SPANS:
                self._lost += len(records)
                self._set(_AT_LOST, self._lost)
            else:
                self._lost_rollups += len(records)
                self._set(_AT_LOST_ROLLUPS, self._lost_rollups)
            return
        self._number += 1
        head = FrameHead(kind, self.identity, self._number, self.rank, self.attempt, step, error_ns, self._lost)
        frame = pack_frame(head, records)
        at = self._head % self._body
        first = min(len(frame), self._body - at)
        self._map[_BODY_AT + at : _BODY_AT + at + first] = frame[:first]
        if first < len(frame):
            self._map[_BODY_AT : _BODY_AT + len(frame) - first] = frame[first:]
        self._head += len(frame)
        self._set(_AT_STEP, step)
        self._set(_AT_HEAD, self._head)

    def is_requested(self, step: int) -> bool:
        """See timers.SpanSink."""
        return self._get(_AT_FROM) <= step <= self._get(_AT_UNTIL)

    def keeps(self, step: int) -> None:
        """See timers.SpanSink."""
        self._set(_AT_KEEPING, step)

    def free_bytes(self) -> int:
        """Bytes that are free."""
        return self._body - (self._head - self._get(_AT_TAIL))

    # the service --------------------------------------------------------------------------------------------------

    def read(self) -> bytes:
        """All frames that were written and not yet taken over."""
        head, tail = self._get(_AT_HEAD), self._get(_AT_TAIL)
        size = head - tail
        if not 0 <= size <= self._body:
            raise ValueError(f"its ends are {size} bytes apart, and it has {self._body}: it is not this version's ring")
        at = tail % self._body
        first = min(size, self._body - at)
        data = self._map[_BODY_AT + at : _BODY_AT + at + first]
        return data + self._map[_BODY_AT : _BODY_AT + size - first] if first < size else data

    def release(self, size: int) -> None:
        """So many bytes of what `read` gave are kept elsewhere now."""
        self._set(_AT_TAIL, self._get(_AT_TAIL) + size)

    def request_spans(self, first: int, last: int) -> None:
        """Have all spans of the steps from `first` to `last` kept."""
        self._set(_AT_UNTIL, 0)
        self._set(_AT_FROM, first)
        self._set(_AT_UNTIL, last)

    @property
    def step(self) -> int:
        """The step of the newest frame."""
        return self._get(_AT_STEP)

    @property
    def keeping(self) -> int:
        """The step under way of which all spans are kept, 0 if it is none."""
        return self._get(_AT_KEEPING)

    @property
    def lost(self) -> int:
        """Spans that were dropped for want of room."""
        return self._get(_AT_LOST)

    @property
    def lost_rollups(self) -> int:
        """Roll-up records that were."""
        return self._get(_AT_LOST_ROLLUPS)

    def close(self) -> None:
        """Let go of this end."""
        self._words.release()
        self._map.close()
        os.close(self.handle)
