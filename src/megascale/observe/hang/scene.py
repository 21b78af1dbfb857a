"""The scene of a hang: the evidence of each rank of a run that stands still.

The agents of hosts that do not share the run folder send the evidence of their ranks in packed form. The run folder
then has a file `status/rank-N.evidence` per rank, with the newest evidence that the agent sent.
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

MAX_EVIDENCE_BYTES = 200 * 1024  # largest packed evidence of a rank
MAX_AGE_DIFFERENCE_SECONDS = 30.0  # evidence of several ranks counts as simultaneous within this time
_MAX_UNPACKED_BYTES = 64 << 20

ProcessState = Literal["running", "stopped", "gone", "unknown"]


@dataclass(frozen=True)
class RankEvidence:
    """The evidence of one rank.

    Attributes:
        process: "running", "stopped" (SIGSTOP, a debugger), "gone", or "unknown" if it runs on another host.
        status, record: content of the rank's status file and call record, None if missing.
        answered: the rank answered the request for its stack; None if it was not asked.
        stack: frames of its main thread, innermost first.
        reader: state of the process that reads the rank's samples, if the rank waits for samples.
        flight: content of torch's flight recorder.
        moving: the rank made progress while it was watched.
        own_pid: process id of a rank of another trainer, from the file that the rank writes instead of a record; 0 if
            unknown.
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
        """Return whether the rank runs another trainer, which writes no record."""
        return self.record is None and bool(self.own_pid)

    @property
    def pid(self) -> int:
        """The process id of the rank, 0 if unknown."""
        return self.record.pid if self.record is not None else self.own_pid


@dataclass(frozen=True)
class Scene:
    """The evidence of a run.

    Attributes:
        ranks: evidence by rank; a rank without files is missing.
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
    """Return evidence as at most MAX_EVIDENCE_BYTES: if necessary with fewer calls, then without the flight record.

    The result is empty if even this is too large.

    Args:
        history: largest number of calls.
    """
    flight = evidence.flight
    for call_count, kept_flight in ((history, flight), (history // 8, flight), (history // 8, None), (0, None)):
        record = evidence.record
        if record is not None and len(record.calls) > call_count:
            record = replace(record, calls=record.calls[-call_count:] if call_count else (), is_complete=False)
        smaller = replace(evidence, record=record, flight=kept_flight)
        data = zlib.compress(msgspec.msgpack.encode(smaller), 6)
        if len(data) <= MAX_EVIDENCE_BYTES:
            return data
    return b""


def unpack_evidence(data: bytes) -> RankEvidence:
    """Return the evidence that `pack_evidence` packed. Raises DataError for other data."""
    try:
        unpacked = zlib.decompressobj().decompress(data, _MAX_UNPACKED_BYTES)
        return msgspec.msgpack.decode(unpacked, type=RankEvidence)
    except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"the data is not evidence of a rank: {error}") from None


def get_evidence_file(rank: int) -> str:
    """Return the path, within a run folder, of the evidence that an agent sent."""
    return f"status/rank-{rank}.evidence"


def read_sent_evidence(folder: Path, ranks: list[int]) -> tuple[dict[int, RankEvidence], int]:
    """Return the newest simultaneous evidence that agents sent, and the newest file's time, nanoseconds since 1970."""
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
    newest = max((time for time, _ in sent.values()), default=0.0)
    recent = {rank: item for rank, (time, item) in sent.items() if newest - time <= MAX_AGE_DIFFERENCE_SECONDS}
    return recent, int(newest * 1e9)
