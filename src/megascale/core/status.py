"""What a trainer tells its host: one small file a rank, rewritten in place, readable while the trainer hangs.

The record lives in a memory-mapped file of fixed size, so that an update costs a copy of some hundred bytes and
no system call, and the last word of a dead or stuck process stays on disk. A sequence number before and after the
text (odd while writing) lets a reader on the same host tell a torn record.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from megascale.core import strict_json
from megascale.core.calls import read_calls
from megascale.core.failure import reserve

_SIZE = 4096
_HEADER = struct.Struct("<QI")


# The phase of a rank whose error came within a step; its status names that step, "failed" alone the last one done.
FAILED_IN_STEP = "failed in step"


@dataclass(frozen=True)
class Status:
    """A trainer's last word.

    Attributes:
        phase: one of start, load, train, evaluate, save, done, failed.
        step, action, microbatch: where in the run and in the step; the last two from the record of calls.
        time_ns: of the last change, on this host's clock.
        message: why it failed.
        checksum: "STEP:HEX" of this rank's parameters after that step (`resilience.checksum_interval`), else "".
        compute_seconds: of the last step, without the time this rank waited for others.
    """

    rank: int
    pid: int
    phase: str
    step: int
    time_ns: int
    action: str = ""
    microbatch: int = -1
    message: str = ""
    checksum: str = ""
    compute_seconds: float = 0.0


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

    def update(self, phase: str, step: int, action: str = "", microbatch: int = -1, message: str = "") -> None:
        """Say where this rank is."""
        status = Status(
            self.rank,
            os.getpid(),
            phase,
            step,
            time.time_ns(),
            action,
            microbatch,
            message[:400],
            self.checksum,
            round(self.compute_seconds, 6),
        )
        body = strict_json.dumps(asdict(status)).encode()[: _SIZE - _HEADER.size]
        self._sequence += 2
        self._map[: _HEADER.size] = _HEADER.pack(self._sequence - 1, len(body))
        self._map[_HEADER.size : _HEADER.size + len(body)] = body
        self._map[: _HEADER.size] = _HEADER.pack(self._sequence, len(body))

    def close(self) -> None:
        """Let go of the file; its last word stays."""
        self._map.close()


def read_status(path: Path) -> Status | None:
    """The last whole record of a rank, or None if there is none yet or it is being written."""
    try:
        with open(path, "rb") as file:
            data = file.read()
            file.seek(0)
            after = file.read(_HEADER.size)
        sequence, length = _HEADER.unpack_from(data)
        if sequence % 2 or not length or after != data[: _HEADER.size]:
            return None
        status = Status(**json.loads(data[_HEADER.size : _HEADER.size + length]))
    except (OSError, struct.error, ValueError, TypeError):
        return None
    calls = read_calls(path.with_suffix(".calls"), history=False)
    if calls is None or calls.pid != status.pid or calls.time_ns < status.time_ns:
        return status
    return replace(status, action=calls.action, microbatch=calls.microbatch, time_ns=calls.time_ns)
