"""What is known of this machine's ranks when a job stands still: calls, stacks, flight records, one message a rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from megascale.errors import MegascaleError
from megascale.observe.hang.evidence import RankEvidence, Scene, collect
from megascale.resilience.protocol.agent_messages import EVIDENCE, Evidence
from megascale.services.framing import ProtocolError

_UNPACKED = 64 << 20  # bytes that a rank's evidence may take, unpacked


def look_at(run: Path, ranks: Iterable[int], order: int, history: int) -> Iterator[Evidence]:
    """Ask the ranks of this machine for their stacks, and say what is known of each; takes up to some seconds."""
    try:
        scene = collect(run, only=frozenset(ranks))
    except (MegascaleError, OSError):
        scene = Scene({}, 0)
    for rank in ranks:
        what = scene.ranks.get(rank)
        data = pack(what, history) if what is not None else b""
        yield Evidence(order, rank, data, rank in scene.moving)


def pack(what: RankEvidence, history: int) -> bytes:
    """What is known of a rank, small enough for a message: with fewer calls, then without its flight record."""
    for calls, flight in ((history, what.flight), (history // 8, what.flight), (history // 8, None), (0, None)):
        record = what.record
        if record is not None and len(record.calls) > calls:
            record = replace(record, calls=record.calls[-calls:] if calls else (), whole=False)
        data = zlib.compress(msgspec.msgpack.encode(replace(what, record=record, flight=flight)), 6)
        if len(data) <= EVIDENCE:
            return data
    return b""


def unpack(data: bytes) -> RankEvidence:
    """What `pack` gave; ProtocolError for anything else."""
    unpacker = zlib.decompressobj()
    try:
        text = unpacker.decompress(data, _UNPACKED)
        return msgspec.msgpack.decode(text, type=RankEvidence)
    except (zlib.error, msgspec.MsgspecError, RecursionError) as error:
        raise ProtocolError(f"evidence that is none: {error}") from None
