"""The evidence of a run that stands still, for each rank and for the run, and its packed form.

Agents send the evidence of a rank in packed form. If ranks write elsewhere than into the run folder, the run folder
keeps it as `status/rank-N.evidence`: the state in which the rank's agent last saw it.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from megascale.core.calls import CallRecord
from megascale.core.status import Status
from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError
from megascale.observe.hang.flight import FlightDump

MAX_EVIDENCE_BYTES = 200 * 1024  # of a rank, packed
SAME_LOOK_SECONDS = 30.0  # within which evidence of several ranks counts as simultaneous
_MAX_UNPACKED_BYTES = 64 << 20

ProcessState = Literal["running", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class RankEvidence:
    """The evidence of one rank.

    Attributes:
        rank: its number.
        process: "running", "stopped" (SIGSTOP, a debugger), "gone", or "unknown" if it runs on another host.
        status, record: its files, None if missing.
        answered: it answered the request for its stack; None if it was not asked.
        stack: frames of its main thread, innermost first.
        reader: state of the process that reads its samples, if it waits for one.
        flight: content of torch's flight recorder.
        moving: it made progress while it was watched.
        own_pid: process id of a rank of another trainer, which has no record of its own; 0 if unknown.
    """

    rank: int
    process: ProcessState = "unknown"
    status: Status | None = None
    record: CallRecord | None = None
    answered: bool | None = None
    stack: tuple[str, ...] = ()
    reader: ProcessState = "unknown"
    flight: FlightDump | None = None
    moving: bool = False
    own_pid: int = 0

    @property
    def is_foreign(self) -> bool:
        """Whether the rank runs another trainer, which has no record of its own."""
        return self.record is None and bool(self.own_pid)

    @property
    def pid(self) -> int:
        """The process id of the rank, 0 if unknown."""
        return self.record.pid if self.record is not None else self.own_pid


@dataclass(frozen=True)
class Scene:
    """The evidence of a run.

    Attributes:
        ranks: by rank; a rank without files is missing.
        world: number of ranks according to the ranks.
        moving: ranks that made progress while they were watched.
        now_ns: time of the evidence on this host's clock.
        from_agents: agents sent the evidence; the ranks do not write into this folder.
    """

    ranks: dict[int, RankEvidence]
    world: int
    moving: frozenset[int] = field(default_factory=frozenset)
    now_ns: int = 0
    from_agents: bool = False


def pack_evidence(evidence: RankEvidence, history: int) -> bytes:
    """Return evidence in bounded size: if necessary with fewer calls, then without the flight record."""
    flight = evidence.flight
    for calls, kept_flight in ((history, flight), (history // 8, flight), (history // 8, None), (0, None)):
        record = evidence.record
        if record is not None and len(record.calls) > calls:
            record = replace(record, calls=record.calls[-calls:] if calls else (), is_complete=False)
        smaller = replace(evidence, record=record, flight=kept_flight)
        data = zlib.compress(msgspec.msgpack.encode(smaller), 6)
        if len(data) <= MAX_EVIDENCE_BYTES:
            return data
    return b""


def unpack_evidence(data: bytes) -> RankEvidence:
    """Return the evidence of `pack_evidence`; DataError for other data."""
    try:
        unpacked = zlib.decompressobj().decompress(data, _MAX_UNPACKED_BYTES)
        return msgspec.msgpack.decode(unpacked, type=RankEvidence)
    except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"the data is not evidence of a rank: {error}") from None


def evidence_file(rank: int) -> str:
    """Return the path in a run folder of the evidence that an agent sent."""
    return f"status/rank-{rank}.evidence"


def read_sent(folder: Path, ranks: list[int]) -> tuple[dict[int, RankEvidence], int]:
    """Return the newest simultaneous evidence that agents sent, and its time in nanoseconds since 1970.

    Args:
        folder: folder of the files.
        ranks: ranks to read.
    """
    sent: dict[int, tuple[float, RankEvidence]] = {}
    for rank in ranks:
        file = folder / f"rank-{rank}.evidence"
        try:
            time = file.stat().st_mtime
            evidence = unpack_evidence(read_bounded(file, MAX_EVIDENCE_BYTES))
        except (OSError, ValueError, DataError):
            continue
        if evidence.rank == rank:
            sent[rank] = (time, evidence)
    last = max((time for time, _ in sent.values()), default=0.0)
    recent = {rank: evidence for rank, (time, evidence) in sent.items() if last - time <= SAME_LOOK_SECONDS}
    return recent, int(last * 1e9)
