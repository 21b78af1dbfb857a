"""Record of a rank's collectives and schedule position, in a memory-mapped file that survives a hang or a crash.

The engine records each call that it starts or waits for, and its action in the schedule. A record costs about a
microsecond and no system call. `rank-N.calls` lies next to `rank-N.status`; the hang diagnosis joins the files of all
ranks. Outside a trainer nothing is recorded (`NullCallLog`).

Another process may read the file during a write. Fields are therefore aligned to 8 bytes, and a record is written as
one copy of bytes, so that a reader sees either the old or the new value of a field. `struct.pack_into` would clear a
field first and write it byte by byte.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass, field
from pathlib import Path

from megascale.core.failure import reserve_file_space
from megascale.core.untrusted_files import open_regular

MAX_RANKS = 1 << 18  # a record with a larger world is damaged; readers allocate a row per rank
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
    "fused_all_to_all",
)
_OP_CODES = {op: code for code, op in enumerate(OPS)}
READER = "reader"  # stands for the group in a wait for samples

# Layout of the file: header, position, wait, number of calls, groups, ring of calls. Structures are little-endian.
_MAGIC = b"MSCALL3\0"
_MAX_GROUPS = 64
_RING_CALLS = 8192  # three steps of a stage with twenty layers and eight micro-batches, which a verdict compares
# magic, pid, rank, world size, number of groups, host name
_HEADER = struct.Struct("<8sIIII40s")
# number of position writes, time_ns, step, index in the schedule, chunk, microbatch, action
_POSITION = struct.Struct("<QqqiiI24sxxxx")
_POSITION_OFFSET = 64
# group index (or _NOT_WAITING, or _WAITING_FOR_DATA), pid of the process that reads samples, sequence number of the
# awaited call, start_ns, total nanoseconds waited
_WAIT = struct.Struct("<iIQqQ")
_WAIT_OFFSET = 128
_NOT_WAITING, _WAITING_FOR_DATA = -1, -2
# number of calls written in total
_CALL_COUNT = struct.Struct("<Q")
_CALL_COUNT_OFFSET = 192
# name, number of ranks, number of started calls, number of finished calls
_GROUP = struct.Struct("<56sIxxxxQQ")
_GROUPS_OFFSET = 256
_COUNTERS = struct.Struct("<QQ")
_COUNTERS_OFFSET = 64  # within a group
# sequence in the group, step, bytes, microbatch, chunk, group index, op
_CALL = struct.Struct("<QQQiiHHxxxx")
_CALLS_OFFSET = _GROUPS_OFFSET + _MAX_GROUPS * _GROUP.size
SIZE = _CALLS_OFFSET + _RING_CALLS * _CALL.size
_NO_MICROBATCH = 0xFFFFFFFF  # -1 as an unsigned integer
# A call's handle is an integer: the group index in the high bits, the sequence number in the low bits.
_SEQUENCE_BITS = 48
_SEQUENCE_MASK = (1 << _SEQUENCE_BITS) - 1


class NullCallLog:
    """Call log that records nothing, and base class of `CallLog`."""

    waited_seconds = 0.0

    def begin_call(self, group: str, op: str, nbytes: int) -> int:
        """Record the start of a collective or transfer of `nbytes` bytes on `group`; return a handle."""
        return -1

    def begin_wait(self, call: int) -> None:
        """Record that the host now waits for the call with this handle."""

    def end_call(self, call: int) -> None:
        """Record that the call has ended."""

    def set_action(self, action: bytes, chunk: int = -1, microbatch: int = -1, index: int = -1) -> None:
        """Record the action of the schedule that this rank executes."""

    def begin_step(self, step: int) -> None:
        """Record that a step begins."""

    def begin_data_wait(self, pid: int = 0) -> None:
        """Record that this rank waits for samples, from process `pid` if another process reads them."""

    def end_data_wait(self) -> None:
        """Record that the samples have arrived."""


class CallLog(NullCallLog):
    """Writer of `FOLDER/rank-N.calls`, for use by one thread at a time (the one that runs the step)."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.calls"
        with open(self.path, "w+b") as file:
            reserve_file_space(file.fileno(), SIZE)
            self._map = mmap.mmap(file.fileno(), SIZE)
        self._identity = (os.getpid(), rank, world)
        self._group_indices: dict[str, int] = {}
        self._started_counts: list[int] = []  # number of started calls by index of the group
        self._finished_counts: list[int] = []
        self._position_writes = 0
        self._call_count = 0
        self._step = 0
        self._waited_ns = 0
        self._wait_start = 0  # perf_counter_ns at the start of the present wait, 0 if the host does not wait
        self._position = (-1, -1, _NO_MICROBATCH, b"")  # index in the schedule, chunk, micro-batch, action
        self._write_idle()
        self._write_header()

    def register_group(self, group: str, size: int) -> None:
        """Register a group of `size` ranks before its first call. Groups beyond the file's room are not recorded."""
        if group in self._group_indices or len(self._group_indices) == _MAX_GROUPS:
            return
        index = len(self._group_indices)
        self._group_indices[group] = index
        self._started_counts.append(0)
        self._finished_counts.append(0)
        self._write(_GROUPS_OFFSET + index * _GROUP.size, _GROUP.pack(group.encode()[:56], size, 0, 0))
        self._write_header()

    def begin_call(self, group: str, op: str, nbytes: int) -> int:
        """Record the start of a call and return its handle; -1 for a group that is not registered."""
        index = self._group_indices.get(group)
        if index is None:
            return -1
        sequence = self._started_counts[index] + 1
        self._started_counts[index] = sequence
        _, chunk, microbatch, _ = self._position
        offset = _CALLS_OFFSET + self._call_count % _RING_CALLS * _CALL.size
        record = _CALL.pack(sequence, self._step, nbytes, _to_signed(microbatch), chunk, index, _OP_CODES[op])
        self._write(offset, record)
        self._call_count += 1
        self._write(_CALL_COUNT_OFFSET, _CALL_COUNT.pack(self._call_count))
        self._write_counters(index)
        return index << _SEQUENCE_BITS | sequence

    def begin_wait(self, call: int) -> None:
        if call >= 0:
            self._write_wait(call >> _SEQUENCE_BITS, pid=0, sequence=call & _SEQUENCE_MASK)

    def end_call(self, call: int) -> None:
        if call < 0:
            return
        index = call >> _SEQUENCE_BITS
        self._finished_counts[index] += 1
        self._write_counters(index)
        self._write_idle()

    def set_action(self, action: bytes, chunk: int = -1, microbatch: int = -1, index: int = -1) -> None:
        self._position = (index, chunk, microbatch & _NO_MICROBATCH, action)  # the file's micro-batch is unsigned
        self._write_position()

    def begin_step(self, step: int) -> None:
        self._step = step
        self.set_action(b"")

    def begin_data_wait(self, pid: int = 0) -> None:
        self._write_wait(_WAITING_FOR_DATA, pid, sequence=0)

    def end_data_wait(self) -> None:
        self._write_idle()

    @property
    def waited_seconds(self) -> float:  # type: ignore[override]
        """Total seconds that the host has waited for other processes."""
        return self._waited_ns / 1e9

    def close(self) -> None:
        """Unmap the file; its content stays."""
        self._map.close()

    def _write(self, offset: int, record: bytes) -> None:
        self._map[offset : offset + len(record)] = record

    def _write_header(self) -> None:
        host = socket.gethostname().encode()[:40]
        self._write(0, _HEADER.pack(_MAGIC, *self._identity, len(self._group_indices), host))

    def _write_counters(self, index: int) -> None:
        """Write the counts of a group's calls, and the position, whose time shows the progress."""
        offset = _GROUPS_OFFSET + index * _GROUP.size + _COUNTERS_OFFSET
        self._write(offset, _COUNTERS.pack(self._started_counts[index], self._finished_counts[index]))
        self._write_position()

    def _write_position(self) -> None:
        self._position_writes += 1
        self._write(
            _POSITION_OFFSET, _POSITION.pack(self._position_writes, time.time_ns(), self._step, *self._position)
        )

    def _write_wait(self, index: int, pid: int, sequence: int) -> None:
        """Write the start of a wait. The arguments are the first fields of `_WAIT`."""
        self._wait_start = time.perf_counter_ns()
        self._write(_WAIT_OFFSET, _WAIT.pack(index, pid, sequence, time.time_ns(), self._waited_ns))

    def _write_idle(self) -> None:
        """Write the end of a wait, if there is one, and the total time of all waits."""
        if self._wait_start:
            self._waited_ns += time.perf_counter_ns() - self._wait_start
            self._wait_start = 0
        self._write(_WAIT_OFFSET, _WAIT.pack(_NOT_WAITING, 0, 0, 0, self._waited_ns))


def _to_signed(microbatch: int) -> int:
    """Return the number of a micro-batch from the unsigned integer of the file."""
    if microbatch == _NO_MICROBATCH:
        return -1
    return microbatch


def _to_text(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True)
class Call:
    """A collective or transfer that a rank started.

    Attributes:
        sequence: position of this call among the rank's calls on the group, from 1.
        op: operation, one of OPS.
        bytes: size of the message.
        step, chunk, microbatch: position in the schedule; -1 where it does not apply.
    """

    group: str
    sequence: int
    op: str
    bytes: int
    step: int = 0
    chunk: int = -1
    microbatch: int = -1


@dataclass(frozen=True)
class GroupCounts:
    """Number of calls that a rank has started and finished on a group of `size` ranks."""

    size: int
    started: int
    finished: int


@dataclass(frozen=True)
class PendingWait:
    """Wait of the host since `start_ns`: for a call of a group, or for samples.

    In a wait for samples, `group` is READER and `pid` is the process that reads the samples (0 if unknown).

    Attributes:
        group, sequence: the awaited call (see `Call`).
        start_ns: start of the wait since the epoch.
    """

    group: str
    sequence: int
    start_ns: int
    pid: int = 0


@dataclass(frozen=True)
class CallRecord:
    """Content of a rank's file.

    Attributes:
        rank, pid, world: rank, process id and number of ranks of the process that wrote the file.
        events: number of times that the position was written.
        time_ns: time of the last of these writes, since the epoch.
        step, action, chunk, microbatch, index: the rank's position in the schedule.
        waiting: the rank's present wait; None while it computes.
        waited_ns: total time that the rank has waited.
        groups: counts of calls by name of the group.
        calls: the rank's last calls, in the order in which it started them.
        is_complete: whether `calls` goes back to the start of the run.
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
    waiting: PendingWait | None = None
    waited_ns: int = 0
    groups: dict[str, GroupCounts] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    is_complete: bool = True
    host: str = ""

    def find_call(self, group: str, sequence: int) -> Call | None:
        """Return the call with this sequence number, or None if it was not started or is no longer in the ring."""
        for call in reversed(self.calls):
            if call.group == group and call.sequence == sequence:
                return call
        return None


def read_calls(path: Path, history: bool = True) -> CallRecord | None:
    """Read a rank's file; return None if it is missing or damaged.

    The record is consistent if the rank makes no progress, and may be torn while the rank runs.

    Args:
        history: whether to read the ring of calls; without it, `calls` is empty.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(SIZE if history else _CALLS_OFFSET)
        magic, pid, rank, world, group_count, host = _HEADER.unpack_from(data, 0)
        is_valid = magic == _MAGIC and rank < world <= MAX_RANKS
        if not is_valid:
            return None
        events, time_ns, step, index, chunk, microbatch, action = _POSITION.unpack_from(data, _POSITION_OFFSET)
        names = []
        groups = {}
        for group_index in range(min(group_count, _MAX_GROUPS)):
            name, size, started, finished = _GROUP.unpack_from(data, _GROUPS_OFFSET + group_index * _GROUP.size)
            names.append(_to_text(name))
            groups[names[-1]] = GroupCounts(size, started, finished)
        wait_group, reader_pid, sequence, start_ns, waited_ns = _WAIT.unpack_from(data, _WAIT_OFFSET)
        waiting = None
        if wait_group == _WAITING_FOR_DATA:
            waiting = PendingWait(READER, 0, start_ns, reader_pid)
        elif 0 <= wait_group < len(names):
            waiting = PendingWait(names[wait_group], sequence, start_ns)
        (call_count,) = _CALL_COUNT.unpack_from(data, _CALL_COUNT_OFFSET)
        if history:
            calls = _unpack_calls(data, call_count, names)
        else:
            calls = ()
    except (OSError, struct.error):
        return None
    return CallRecord(
        rank=rank,
        pid=pid,
        world=world,
        events=events,
        time_ns=time_ns,
        step=step,
        action=_to_text(action),
        chunk=chunk,
        microbatch=_to_signed(microbatch),
        index=index,
        waiting=waiting,
        waited_ns=waited_ns,
        groups=groups,
        calls=calls,
        is_complete=call_count <= _RING_CALLS,
        host=_to_text(host),
    )


def _unpack_calls(data: bytes, call_count: int, names: list[str]) -> tuple[Call, ...]:
    """Return the calls in the ring of a file, oldest first.

    Args:
        call_count: number of calls written in total, of which the ring has the last ones.
        names: names of the groups by index.
    """
    calls = []
    for index in range(max(0, call_count - _RING_CALLS), call_count):
        record = _CALL.unpack_from(data, _CALLS_OFFSET + index % _RING_CALLS * _CALL.size)
        sequence, step, size, microbatch, chunk, group_index, op = record
        if group_index < len(names) and op < len(OPS):
            calls.append(Call(names[group_index], sequence, OPS[op], size, step, chunk, microbatch))
    return tuple(calls)
