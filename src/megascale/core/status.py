"""Status of a trainer: a small memory-mapped file per rank, which other processes can read even if the trainer hangs.

The file has a fixed size and is rewritten in place. An update costs a copy of some hundred bytes and no system call,
and the last record of a dead or hanging process stays on disk. A sequence number stands before the record. It is odd
during a write, so that a reader on the same host recognises a torn record.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from megascale.core import strict_json
from megascale.core.calls import MAX_RANKS, read_calls
from megascale.core.exit_record import ExitRecord
from megascale.core.failure import reserve_file_space
from megascale.core.untrusted_files import open_regular

_SIZE = 4096
_HEADER = struct.Struct("<QI")  # sequence number, bytes of the record
_MAX_MESSAGE_CHARACTERS = 400
_MAX_LABEL_CHARACTERS = 200
_Label = Annotated[str, Meta(max_length=_MAX_LABEL_CHARACTERS)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Step = Annotated[int, Meta(ge=0, lt=1 << 53)]
_Time = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


# Phase of a rank that failed within a step. `Status.step` is then that step; with phase "failed" it is the last
# complete step.
FAILED_IN_STEP = "failed in step"
# Phase of a rank that left a failed attempt and whose process waits for the next attempt.
PARKED = "parked"
# Phase of a rank of a trainer other than MegaScale that reports no steps.
UNOBSERVED = "unobserved"


@dataclass(frozen=True)
class StartReport:
    """Progress of a rank's start, for the record of a recovery (core/recovery_record.py).

    Attributes:
        process_ns: time at which the trainer began to run, in a new or in a reused process. Times are on this host's
            clock.
        groups_ns: time at which the communicators were ready; 0 before.
        state_ns: time at which model, optimizer and data were ready, and an evaluation that the attempt before had not
            completed was repeated; 0 before.
        step: step of the state from which training continues.
        source: source of that state, such as a checkpoint; "" before it is known.
        is_reused: whether the trainer runs in the process of the previous attempt.
        is_standing: whether weights and optimizer state stayed in the memory of that process, so that none are loaded.
        left_ns: time at which this process had completed the last step of the attempt before, if it was ordered to
            leave that attempt after a step; otherwise 0.
        stepped_ns: time at which the results of the first step of this start had come from the device; 0 before.
        kept_step: step of the state that this process has kept from the attempt before; 0 if it has kept none.
    """

    process_ns: _Time
    groups_ns: _Time = 0
    state_ns: _Time = 0
    step: _Step = 0
    source: _Label = ""
    is_reused: bool = False
    is_standing: bool = False
    left_ns: _Time = 0
    stepped_ns: _Time = 0
    kept_step: _Step = 0


@dataclass(frozen=True)
class Status:
    """Last status of a trainer. The annotated types are the schema of the file: readers reject other values.

    Attributes:
        phase: one of start, load, train, evaluate, save, done, failed, FAILED_IN_STEP, PARKED, UNOBSERVED.
        action, microbatch: position in the step; `read_status` takes both from the call log.
        time_ns: time of the last change, on this host's clock.
        message: reason of the failure.
        exit: fault that ended the process; None if there is none.
        checksum: "STEP:HEX" of this rank's parameters after that step (`resilience.checksum_interval`), else "".
        compute_seconds: duration of the last step less the time that this rank waited for other ranks.
        start: progress of the start; None if the trainer does not report it.
        doubt: why a rank that lost a peer ended its process instead of waiting in it; "" if it did not try to wait.
    """

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    pid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    phase: _Label
    step: _Step
    time_ns: _Time
    action: _Label = ""
    microbatch: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    message: Annotated[str, Meta(max_length=_MAX_MESSAGE_CHARACTERS)] = ""
    exit: ExitRecord | None = None
    checksum: Annotated[str, Meta(max_length=100, pattern=r"^([0-9]{1,16}:[0-9A-Za-z]*)?$")] = ""
    compute_seconds: _Seconds = 0.0
    start: StartReport | None = None
    doubt: _Label = ""


_DECODER = msgspec.json.Decoder(Status)


def name_status_file(rank: int, waiting_node: str = "") -> str:
    """Return the name of the status file of a rank.

    Args:
        waiting_node: name of the node if the process waits for its first attempt. It may get another rank then, and a
            process of another node may have this rank, so that the file must not be the rank's.
    """
    if waiting_node:
        return f"waiting-{waiting_node}-{rank}.status"
    return f"rank-{rank}.status"


class StatusFile:
    """Writer of one rank's status, `FOLDER/rank-N.status`.

    Args:
        waiting_node: as for `name_status_file`.
    """

    def __init__(self, folder: Path, rank: int, waiting_node: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / name_status_file(rank, waiting_node)
        self.rank = rank
        with open(self.path, "a+b") as file:
            reserve_file_space(file.fileno(), _SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._sequence = 0
        self.checksum = ""
        self.compute_seconds = 0.0
        self.start: StartReport | None = None
        self.update("start", 0)

    def update(
        self,
        phase: str,
        step: int,
        action: str = "",
        microbatch: int = -1,
        message: str = "",
        exit_record: ExitRecord | None = None,
        doubt: str = "",
    ) -> None:
        """Write a new status. The arguments are the attributes of `Status`, `exit_record` is its `exit`."""
        status = Status(
            rank=self.rank,
            pid=os.getpid(),
            phase=phase,
            step=step,
            time_ns=time.time_ns(),
            action=action,
            microbatch=microbatch,
            # Bytes of a file name that are not UTF-8 become "?", because readers reject surrogates.
            message=message[:_MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode(),
            exit=exit_record,
            checksum=self.checksum,
            compute_seconds=round(self.compute_seconds, 6),
            start=self.start,
            doubt=doubt[:_MAX_LABEL_CHARACTERS].encode(errors="replace").decode(),
        )
        body = _encode(status)
        self._sequence += 2
        self._map[: _HEADER.size] = _HEADER.pack(self._sequence - 1, len(body))  # odd during the write
        self._map[_HEADER.size : _HEADER.size + len(body)] = body
        self._map[: _HEADER.size] = _HEADER.pack(self._sequence, len(body))

    def close(self) -> None:
        """Unmap the file; its content stays."""
        self._map.close()


def _encode(status: Status) -> bytes:
    """Return the record as JSON. The message is shortened to fit the file: a character takes up to 12 bytes."""
    body = strict_json.dumps(asdict(status)).encode()
    while len(body) > _SIZE - _HEADER.size and status.message:
        status = replace(status, message=status.message[: len(status.message) // 2])
        body = strict_json.dumps(asdict(status)).encode()
    return body[: _SIZE - _HEADER.size]


def read_status(path: Path) -> Status | None:
    """Return a rank's last record, or None if it does not exist yet, is being written, or is damaged."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(_SIZE)
            file.seek(0)
            later_header = file.read(_HEADER.size)
        sequence, length = _HEADER.unpack_from(data)
        if sequence % 2 or not length or later_header != data[: _HEADER.size]:
            return None  # torn, or no record yet
        status = _DECODER.decode(data[_HEADER.size : _HEADER.size + length])
    except (OSError, struct.error, ValueError, RecursionError, msgspec.MsgspecError):
        return None
    calls = read_calls(path.with_suffix(".calls"), history=False)
    if calls is None or calls.pid != status.pid or calls.time_ns < status.time_ns:
        return status
    return replace(status, action=calls.action, microbatch=calls.microbatch, time_ns=calls.time_ns)
