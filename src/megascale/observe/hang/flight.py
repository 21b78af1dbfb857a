"""Reads dumps of torch's flight recorder, as JSON (ours) or pickle (torch's own), into the terms of core/calls.py.

A pickle may run any code when loaded, so the reader here makes nothing but numbers, texts, lists and tables.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.calls import Call, CallRecord, Counts, Waiting
from megascale.core.plain_pickle import check_pickle
from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError

_MAX_BYTES = 1 << 28
_WIDTHS = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1}


@dataclass(frozen=True)
class FlightDump:
    """What a rank's flight recorder held.

    Attributes:
        device: whether the calls ran on a device (NCCL): only the recorder knows then which have finished.
        record: the same in the terms of core/calls.py. Its sequence numbers are torch's.
    """

    device: bool
    record: CallRecord


def read_flight(file: Path, rank: int | None = None, world: int = 0) -> FlightDump:
    """Read one rank's dump; DataError if it is none."""
    try:
        data = read_bounded(file, _MAX_BYTES)
        if data[:1] in b"{ \n":
            dump = strict_json.loads(data)
        else:
            check_pickle(data)
            dump = _Plain(io.BytesIO(data)).load()
        return _convert(dump, _rank_of(file) if rank is None else rank, world)
    except FileNotFoundError:
        raise
    except Exception as error:  # a dump that lies, or is cut off, fails in any way it likes
        raise DataError(f"{file} is no flight-recorder dump that this version reads: {error}") from None


class _Plain(pickle.Unpickler):
    """Refuses every class and function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}; dumps hold plain data only")


def _rank_of(file: Path) -> int:
    digits = "".join(c for c in file.stem.rpartition("-")[2].rpartition("_")[2] if c.isdigit())
    return int(digits or 0)


def _convert(dump: dict[str, Any], rank: int, world: int) -> FlightDump:
    configured = {str(c.get("name")): _members(c.get("ranks")) for c in dump.get("pg_config", {}).values()}
    calls: list[Call] = []
    finished: dict[str, int] = {}
    pending: list[tuple[int, Call]] = []
    device = False
    # A recorder that has seen no call leaves them out.
    for entry in dump["entries"] if "pg_config" not in dump else dump.get("entries", ()):
        raw, description = entry["process_group"]
        group = "world" if description == "default_pg" else str(raw)
        backend, _, op = str(entry["profiling_name"]).partition(":")
        device |= backend == "nccl"
        sequence = int(entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"])
        # Ranks may send different amounts all to all (Muon's matrices): that is no difference between them.
        call = Call(group, sequence, _op(op), 0 if _op(op) == "all_to_all" else _bytes(entry))
        calls.append(call)
        if entry.get("retired") or entry.get("state") == "completed":
            finished[group] = finished.get(group, 0) + 1
        else:
            pending.append((int(entry.get("time_created_ns") or 0), call))
    started: dict[str, int] = {}
    for call in calls:
        started[call.group] = max(started.get(call.group, 0), call.sequence)
    open_calls = {group: sum(1 for _, c in pending if c.group == group) for group in started}
    sizes = {group: len(configured.get("0" if group == "world" else group, ())) for group in started}
    groups = {group: Counts(sizes[group], n, n - open_calls[group]) for group, n in started.items()}
    since, oldest = min(pending, key=lambda p: p[0], default=(0, None))
    waiting = None if oldest is None else Waiting(oldest.group, oldest.sequence, since)
    world = max(world, *sizes.values(), 1) if sizes else world
    record = CallRecord(rank, 0, world, waiting=waiting, groups=groups, calls=tuple(calls), is_complete=False)
    return FlightDump(device, record)


_OPS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}


def _op(name: str) -> str:
    """torch's name of a collective in ours: `_all_gather_base` and `allgather` are all_gather."""
    plain = name.replace("_", "").lower()
    return next((ours for theirs, ours in _OPS.items() if theirs in plain), name.split(" ")[0])


def _members(text: Any) -> tuple[int, ...]:
    ranks = json.loads(text) if isinstance(text, str) and text else []
    return tuple(int(r) for r in ranks)


def _bytes(entry: dict[str, Any]) -> int:
    """Bytes of the larger side, as our own record counts them."""
    sides = ((entry.get(f"{s}_sizes") or [], entry.get(f"{s}_dtypes") or []) for s in ("input", "output"))
    return max(
        sum(math.prod(size) * _WIDTHS.get(str(kind), 1) for size, kind in zip(sizes, kinds, strict=False))
        for sizes, kinds in sides
    )
