"""What a trainer tells its host: one small file a rank, rewritten in place, readable while the trainer hangs.

The record lives in a memory-mapped file of fixed size, so that an update costs a copy of some hundred bytes and
no system call, and the last word of a dead or stuck process stays on disk. A sequence number before and after the
text (odd while writing) lets a reader on the same host tell a torn record.
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
from megascale.core.calls import MOST_RANKS, read_calls
from megascale.core.exit_record import ExitRecord
from megascale.core.failure import reserve
from megascale.core.untrusted_files import open_regular

_SIZE = 4096
_HEADER = struct.Struct("<QI")
_MESSAGE_CHARACTERS = 400
_Word = Annotated[str, Meta(max_length=200)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_Step = Annotated[int, Meta(ge=0, lt=1 << 53)]


# The phase of a rank whose error came within a step; its status names that step, "failed" alone the last one done.
FAILED_IN_STEP = "failed in step"


@dataclass(frozen=True)
class Status:
    """A trainer's last word. The types are the schema of its record: a record outside them is not read.

    Attributes:
        phase: one of start, load, train, evaluate, save, done, failed.
        step, action, microbatch: where in the run and in the step; the last two from the record of calls.
        time_ns: of the last change, on this host's clock.
        message: why it failed.
        exit: the fault that ended the process, None as long as there is none.
        checksum: "STEP:HEX" of this rank's parameters after that step (`resilience.checksum_interval`), else "".
        compute_seconds: of the last step, without the time this rank waited for others.
    """

    rank: Annotated[int, Meta(ge=0, lt=MOST_RANKS)]
    pid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    phase: _Word
    step: _Step
    time_ns: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    action: _Word = ""
    microbatch: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    message: Annotated[str, Meta(max_length=_MESSAGE_CHARACTERS)] = ""
    checksum: Annotated[str, Meta(max_length=100, pattern=r"^([0-9]{1,16}:[0-9A-Za-z]*)?$")] = ""
    compute_seconds: _Seconds = 0.0
    exit: ExitRecord | None = None


_RECORD = msgspec.json.Decoder(Status)


class StatusFile:
    """Writes the status of one rank into `FOLDER/rank-N.status`."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank}.status"
        self.rank = rank
        with open(self.path, "a+b") as file:
            reserve(file.fileno(), _SIZE)
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._sequence = 0
        self.checksum = ""
        self.compute_seconds = 0.0
        self.update("start", 0)

    def update(
        self,
        phase: str,
        step: int,
        action: str = "",
        microbatch: int = -1,
        message: str = "",
        exit_record: ExitRecord | None = None,
    ) -> None:
        """Say where this rank is."""
        status = Status(
            self.rank,
            os.getpid(),
            phase,
            step,
            time.time_ns(),
            action,
            microbatch,
            # Bytes of a file name that are not text become "?": readers refuse half a character.
            message[:_MESSAGE_CHARACTERS].encode(errors="replace").decode(),
            self.checksum,
            round(self.compute_seconds, 6),
            exit_record,
        )
        body = _fitting(status)
        self._sequence += 2
        self._map[: _HEADER.size] = _HEADER.pack(self._sequence - 1, len(body))
        self._map[_HEADER.size : _HEADER.size + len(body)] = body
        self._map[: _HEADER.size] = _HEADER.pack(self._sequence, len(body))

    def close(self) -> None:
        """Let go of the file; its last word stays."""
        self._map.close()


def _fitting(status: Status) -> bytes:
    """Return the record as JSON, its message cut to the room of the file: a character takes up to 12 bytes."""
    body = strict_json.dumps(asdict(status)).encode()
    while len(body) > _SIZE - _HEADER.size and status.message:
        status = replace(status, message=status.message[: len(status.message) // 2])
        body = strict_json.dumps(asdict(status)).encode()
    return body[: _SIZE - _HEADER.size]


def read_status(path: Path) -> Status | None:
    """Return a rank's last whole record; None if there is none yet, it is being written, or it is damaged."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            data = file.read(_SIZE)
            file.seek(0)
            after = file.read(_HEADER.size)
        sequence, length = _HEADER.unpack_from(data)
        if sequence % 2 or not length or after != data[: _HEADER.size]:
            return None
        status = _RECORD.decode(data[_HEADER.size : _HEADER.size + length])
    except (OSError, struct.error, ValueError, RecursionError, msgspec.MsgspecError):
        return None
    calls = read_calls(path.with_suffix(".calls"), history=False)
    if calls is None or calls.pid != status.pid or calls.time_ns < status.time_ns:
        return status
    return replace(status, action=calls.action, microbatch=calls.microbatch, time_ns=calls.time_ns)
