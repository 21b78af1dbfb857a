"""Which collective a rank is in: a memory-mapped record a rank, readable while the rank hangs or after it died.

The engine says what it starts, what it waits for and where it stands in the schedule. Each word costs about a
microsecond and no system call. `rank-N.calls` lies beside `rank-N.status`; the hang verdict joins all ranks' files.
Without a trainer nothing is recorded (`NoCalls`).

Another process reads while this one writes, so words are aligned to 8 bytes and a record is written as one copy of
bytes: a reader sees an old word or a new one. `struct.pack_into` would clear a word first and write it byte by byte.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from megascale.core.failure import reserve
from megascale.core.untrusted_files import open_regular

MOST_RANKS = 1 << 18  # a record that names more is damaged: readers make a row for each rank of the world
OPS = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "send",
    "recv",
    "fused_gather",
    "fused_scatter",
    "all_to_all",
    "replayed_forward",
    "replayed_backward",
    "agree_on_capture",
)
_CODES = {op: code for code, op in enumerate(OPS)}
READER = "reader"  # what a rank waits for that waits for its samples

_MAGIC = b"MSCALL3\0"
_SLOTS, _RING = 64, 8192  # three steps of a stage of twenty layers and eight micro-batches, which a verdict compares
# magic, pid, rank, world, used slots, host name
_HEAD = struct.Struct("<8sIIII40s")
# events, time_ns, step, index in the schedule, chunk, microbatch, action
_PLACE = struct.Struct("<QqqiiI24sxxxx")
_PLACE_AT = 64
# slot (-1: nothing, -2: reader), reader's pid, sequence, since_ns, nanoseconds waited in all
_WAIT = struct.Struct("<iIQqQ")
_WAIT_AT = 128
# name, size, started, finished
_SLOT = struct.Struct("<56sIxxxxQQ")
_COUNTS = struct.Struct("<QQ")
_COUNTS_IN = 64
_SLOTS_AT = 256
# sequence in the group, step, bytes, microbatch, chunk, slot, op
_ENTRY = struct.Struct("<QQQiiHHxxxx")
_ENTRIES_AT = _SLOTS_AT + _SLOTS * _SLOT.size
# number of entries written in all
_TOTAL = struct.Struct("<Q")
_TOTAL_AT = 192
SIZE = _ENTRIES_AT + _RING * _ENTRY.size
_NONE = 0xFFFFFFFF  # a micro-batch of -1


class NoCalls:
    """Records nothing."""

    waited_seconds = 0.0

    def begin(self, group: str, op: str, size: int) -> int:
        """A collective or transfer of `size` bytes on `group` starts; returns a handle."""
        return -1

    def wait(self, call: int) -> None:
        """The host now waits for it."""

    def done(self, call: int) -> None:
        """It has ended."""

    def at(self, action: bytes, chunk: int = -1, microbatch: int = -1, index: int = -1) -> None:
        """This rank stands at an action of its schedule."""

    def step(self, step: int) -> None:
        """A step begins."""

    def reads(self, pid: int = 0) -> None:
        """This rank waits for samples, from process `pid` if another process reads them."""

    def has_read(self) -> None:
        """The samples are there."""


class CallLog(NoCalls):
    """Writes `FOLDER/rank-N.calls`. One thread at a time uses it (the one that runs the step)."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.calls"
        with open(self.path, "w+b") as file:
            reserve(file.fileno(), SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._identity = (os.getpid(), rank, world)
        self._names: dict[str, int] = {}
        self._started: list[int] = []
        self._finished: list[int] = []
        self._events = self._total = self._step = self._waited = 0
        self._since = 0
        self._place = (-1, -1, _NONE, b"")
        self._idle()
        self._head()

    def register_group(self, group: str, size: int) -> None:
        """Name a group of `size` ranks that this rank belongs to before it is used, so that its members are known."""
        if group in self._names or len(self._names) == _SLOTS:
            return
        slot = self._names[group] = len(self._names)
        self._started.append(0)
        self._finished.append(0)
        self._put(_SLOTS_AT + slot * _SLOT.size, _SLOT.pack(group.encode()[:56], size, 0, 0))
        self._head()

    def begin_call(self, group: str, op: str, size: int) -> int:
        """A collective or transfer of `size` bytes on `group` starts; returns a handle for `wait` and `done`."""
        slot = self._names.get(group)
        if slot is None:
            return -1
        sequence = self._started[slot] = self._started[slot] + 1
        _, chunk, microbatch, _ = self._place
        at = _ENTRIES_AT + self._total % _RING * _ENTRY.size
        code = _CODES[op]
        self._put(at, _ENTRY.pack(sequence, self._step, size, _signed(microbatch), chunk, slot, code))
        self._total += 1
        self._put(_TOTAL_AT, _TOTAL.pack(self._total))
        self._count(slot)
        return slot << 48 | sequence

    def begin_wait(self, call: int) -> None:
        """The host now waits for it."""
        if call >= 0:
            self._wait(call >> 48, 0, call & (1 << 48) - 1)

    def end_call(self, call: int) -> None:
        """It has ended."""
        if call < 0:
            return
        self._finished[call >> 48] += 1
        self._count(call >> 48)
        self._idle()

    def set_action(self, action: bytes, chunk: int = -1, microbatch: int = -1, index: int = -1) -> None:
        """This rank stands at an action of its schedule."""
        self._place = (index, chunk, microbatch & _NONE, action)
        self._put_place()

    def begin_step(self, step: int) -> None:
        """A step begins."""
        self._step = step
        self.set_action(b"")

    def begin_data_wait(self, pid: int = 0) -> None:
        """This rank waits for samples, from process `pid` if another process reads them."""
        self._wait(-2, pid, 0)

    def has_read(self) -> None:
        """The samples are there."""
        self._idle()

    @property
    def waited_seconds(self) -> float:  # type: ignore[override]
        """Time that the host has waited for others so far."""
        return self._waited / 1e9

    def close(self) -> None:
        """Let go of the file; its last word stays."""
        self._map.close()

    def _put(self, at: int, record: bytes) -> None:
        self._map[at : at + len(record)] = record

    def _head(self) -> None:
        host = socket.gethostname().encode()[:40]
        self._put(0, _HEAD.pack(_MAGIC, *self._identity, len(self._names), host))

    def _count(self, slot: int) -> None:
        at = _SLOTS_AT + slot * _SLOT.size + _COUNTS_IN
        self._put(at, _COUNTS.pack(self._started[slot], self._finished[slot]))
        self._put_place()

    def _put_place(self) -> None:
        self._events += 1
        self._put(_PLACE_AT, _PLACE.pack(self._events, time.time_ns(), self._step, *self._place))

    def _wait(self, slot: int, pid: int, sequence: int) -> None:
        self._since = time.perf_counter_ns()
        self._put(_WAIT_AT, _WAIT.pack(slot, pid, sequence, time.time_ns(), self._waited))

    def _idle(self) -> None:
        if self._since:
            self._waited += time.perf_counter_ns() - self._since
            self._since = 0
        self._put(_WAIT_AT, _WAIT.pack(-1, 0, 0, 0, self._waited))


def _signed(microbatch: int) -> int:
    return -1 if microbatch == _NONE else microbatch


@dataclass(frozen=True)
class Call:
    """A collective or transfer that a rank started.

    Attributes:
        group, sequence: which group, and how many calls the rank had started on it with this one.
        op, bytes: what, and how much.
        step, chunk, microbatch: where in the schedule; -1 where it has no meaning.
    """

    group: str
    sequence: int
    op: str
    bytes: int
    step: int = 0
    chunk: int = -1
    microbatch: int = -1


@dataclass(frozen=True)
class Counts:
    """What a rank did on a group of `size` ranks: calls started and calls finished."""

    size: int
    started: int
    finished: int


@dataclass(frozen=True)
class Waiting:
    """What the host waits for: a call of a group, or READER (then `pid` reads, 0 if unknown), since `since_ns`."""

    group: str
    sequence: int
    since_ns: int
    pid: int = 0


@dataclass(frozen=True)
class CallRecord:
    """A rank's file.

    Attributes:
        rank, pid, world: whose it is.
        events, time_ns: how often its place was written, and when last.
        step, action, chunk, microbatch, index: its place in the schedule.
        waiting: what it waits for, None while it computes.
        waited_ns: time it has waited so far.
        groups: its groups by name.
        calls: its last calls in the order in which it started them.
        whole: whether `calls` goes back to the start of the run.
        host: name of the host it ran on.
    """

    rank: int
    pid: int
    world: int
    events: int = 0
    time_ns: int = 0
    step: int = 0
    action: str = ""
    chunk: int = -1
    microbatch: int = -1
    index: int = -1
    waiting: Waiting | None = None
    waited_ns: int = 0
    groups: dict[str, Counts] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    is_complete: bool = True
    host: str = ""

    def find_call(self, group: str, sequence: int) -> Call | None:
        """The call with that number, None if it was not made or is forgotten."""
        return next((c for c in reversed(self.calls) if c.group == group and c.sequence == sequence), None)


def read_calls(path: Path, history: bool = True) -> CallRecord | None:
    """What a rank's file says, None if there is none. Whole when the rank stands still; may be torn while it runs."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(SIZE if history else _ENTRIES_AT)
        magic, pid, rank, world, used, host = _HEAD.unpack_from(data, 0)
        if magic != _MAGIC or not rank < world <= MOST_RANKS:
            return None
        events, time_ns, step, index, chunk, microbatch, action = _PLACE.unpack_from(data, _PLACE_AT)
        names, groups = [], {}
        for slot in range(min(used, _SLOTS)):
            name, size, started, finished = _SLOT.unpack_from(data, _SLOTS_AT + slot * _SLOT.size)
            names.append(name.rstrip(b"\0").decode(errors="replace"))
            groups[names[-1]] = Counts(size, started, finished)
        slot, reader, sequence, since, waited = _WAIT.unpack_from(data, _WAIT_AT)
        waiting = None
        if slot == -2:
            waiting = Waiting(READER, 0, since, reader)
        elif 0 <= slot < len(names):
            waiting = Waiting(names[slot], sequence, since)
        (total,) = _TOTAL.unpack_from(data, _TOTAL_AT)
        calls = _entries(data, total, names) if history else ()
    except (OSError, struct.error):
        return None
    place = action.rstrip(b"\0").decode(errors="replace")
    return CallRecord(
        rank,
        pid,
        world,
        events,
        time_ns,
        step,
        place,
        chunk,
        _signed(microbatch),
        index,
        waiting,
        waited,
        groups,
        calls,
        total <= _RING,
        host.rstrip(b"\0").decode(errors="replace"),
    )


def _entries(data: bytes, total: int, names: list[str]) -> tuple[Call, ...]:
    calls = []
    for number in range(max(0, total - _RING), total):
        entry = _ENTRY.unpack_from(data, _ENTRIES_AT + number % _RING * _ENTRY.size)
        sequence, step, size, microbatch, chunk, slot, op = entry
        if slot < len(names) and op < len(OPS):
            calls.append(Call(names[slot], sequence, OPS[op], size, step, chunk, microbatch))
    return tuple(calls)
