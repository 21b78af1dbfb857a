"""What is known of a rank, as one bounded piece of data: agents send it, and run folders keep it where no rank writes.

`status/rank-N.evidence` is what the agent of a rank that writes elsewhere saw when it was last asked.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path

import msgspec

from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError
from megascale.observe.hang.scene import RankEvidence

MAX_EVIDENCE_BYTES = 200 * 1024  # bytes of a rank's evidence, packed
TOGETHER = 30.0  # seconds within which what was sent counts as seen at one time
_UNPACKED = 64 << 20  # bytes that it may take, unpacked


def pack_evidence(what: RankEvidence, history: int) -> bytes:
    """What is known of a rank, small enough to send: with fewer calls, then without its flight record."""
    for calls, flight in ((history, what.flight), (history // 8, what.flight), (history // 8, None), (0, None)):
        record = what.record
        if record is not None and len(record.calls) > calls:
            record = replace(record, calls=record.calls[-calls:] if calls else (), whole=False)
        data = zlib.compress(msgspec.msgpack.encode(replace(what, record=record, flight=flight)), 6)
        if len(data) <= MAX_EVIDENCE_BYTES:
            return data
    return b""


def unpack_evidence(data: bytes) -> RankEvidence:
    """What `pack` gave; DataError for anything else."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, _UNPACKED)
        return msgspec.msgpack.decode(text, type=RankEvidence)
    except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise DataError(f"evidence that is none: {error}") from None


def evidence_file(rank: int) -> str:
    """Where a run folder keeps what was sent of a rank."""
    return f"status/rank-{rank}.evidence"


def read_sent(folder: Path, ranks: list[int]) -> tuple[dict[int, RankEvidence], int]:
    """(what was sent of each rank, when: nanoseconds since 1970), of those that were seen together last.

    Args:
        folder: of the files.
        ranks: whose.
    """
    found: dict[int, tuple[float, RankEvidence]] = {}
    for rank in ranks:
        file = folder / f"rank-{rank}.evidence"
        try:
            when, what = file.stat().st_mtime, unpack_evidence(read_bounded(file, MAX_EVIDENCE_BYTES))
        except (OSError, ValueError, DataError):
            continue
        if what.rank == rank:
            found[rank] = when, what
    last = max((when for when, _ in found.values()), default=0.0)
    return {rank: what for rank, (when, what) in found.items() if last - when <= TOGETHER}, int(last * 1e9)
