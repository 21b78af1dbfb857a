"""Reads dumps of torch's flight recorder, as JSON (ours) or pickle (torch's), into the types of core/calls.py.

A pickle may run any code when it is loaded, so this reader makes only numbers, texts, lists and dictionaries.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.calls import Call, CallRecord, GroupCounts, PendingWait
from megascale.core.untrusted_files import check_pickle, read_bounded
from megascale.errors import DataError

_MAX_BYTES = 1 << 28
_WIDTHS = {"Double": 8, "Long": 8, "Float": 4, "Int": 4, "Half": 2, "BFloat16": 2, "Byte": 1, "Char": 1, "Bool": 1}
_OPS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}


@dataclass(frozen=True)
class FlightDump:
    """The content of a rank's flight recorder.

    Attributes:
        device: the calls ran on a device (NCCL), so only the recorder knows which calls have finished.
        record: the calls; its sequence numbers are torch's.
    """

    device: bool
    record: CallRecord


def read_flight(file: Path, rank: int | None = None, world: int = 0) -> FlightDump:
    """Read one rank's dump. DataError if the file is not a dump."""
    try:
        data = read_bounded(file, _MAX_BYTES)
        if data[:1] in b"{ \n":
            dump = strict_json.loads(data)
        else:
            check_pickle(data)
            dump = _PlainUnpickler(io.BytesIO(data)).load()
        return _convert(dump, _parse_rank(file) if rank is None else rank, world)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged dump may raise any error
        raise DataError(f"{file} is not a flight-recorder dump that this version reads: {error}") from None


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class and function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the dump contains {module}.{name}; dumps hold plain data only")


def _parse_rank(file: Path) -> int:
    digits = "".join(c for c in file.stem.rpartition("-")[2].rpartition("_")[2] if c.isdigit())
    return int(digits or 0)


def _convert(dump: dict[str, Any], rank: int, world: int) -> FlightDump:
    members = {
        str(group.get("name")): _parse_members(group.get("ranks")) for group in dump.get("pg_config", {}).values()
    }
    calls: list[Call] = []
    pending: list[tuple[int, Call]] = []
    queued: Counter[str] = Counter()
    is_device = False
    # A recorder without calls leaves out the entries.
    entries = dump["entries"] if "pg_config" not in dump else dump.get("entries", ())
    has_start_times = any(entry.get("time_discovered_started_ns") for entry in entries)
    for entry in entries:
        name, description = entry["process_group"]
        if description == "default_pg":
            group = "world"
        else:
            group = str(name)
        backend, _, operation = str(entry["profiling_name"]).partition(":")
        is_device |= backend == "nccl"
        sequence = int(entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"])
        op = _convert_op(operation)
        call = Call(group, sequence, op, _count_call_bytes(op, entry))
        calls.append(call)
        if entry.get("retired") or entry.get("state") == "completed":
            continue
        if backend == "nccl" and has_start_times and entry.get("state") == "scheduled":
            # The host has launched it, and the device has not reached it: the rank has not joined the call.
            queued[group] += 1
        else:
            pending.append((int(entry.get("time_created_ns") or 0), call))
    started: dict[str, int] = {}
    for call in calls:
        started[call.group] = max(started.get(call.group, 0), call.sequence)
    for group, count in queued.items():
        started[group] -= count
    open_calls = Counter(call.group for _, call in pending)
    sizes = {group: len(members.get("0" if group == "world" else group, ())) for group in started}
    groups = {group: GroupCounts(sizes[group], count, count - open_calls[group]) for group, count in started.items()}
    waiting = None
    if pending:
        start_ns, oldest = min(pending, key=lambda item: item[0])
        waiting = PendingWait(oldest.group, oldest.sequence, start_ns)
    if sizes:
        world = max(world, *sizes.values(), 1)
    record = CallRecord(rank, 0, world, waiting=waiting, groups=groups, calls=tuple(calls), is_complete=False)
    return FlightDump(is_device, record)


def _convert_op(name: str) -> str:
    """Return our name of torch's collective: `_all_gather_base` and `allgather` are all_gather."""
    plain = name.replace("_", "").lower()
    return next((ours for theirs, ours in _OPS.items() if theirs in plain), name.split(" ")[0])


def _parse_members(text: Any) -> tuple[int, ...]:
    if isinstance(text, str) and text:
        ranks = json.loads(text)
    else:
        ranks = []
    return tuple(int(rank) for rank in ranks)


def _count_call_bytes(op: str, entry: dict[str, Any]) -> int:
    """Return the bytes of a call that all its members have in common, 0 if they may have none."""
    if op == "all_to_all":  # ranks may send different amounts (Muon's matrices), which is not a mismatch
        return 0
    sides = _count_bytes(entry)
    if op in ("gather", "scatter"):  # the larger side exists on one rank only
        return min((side for side in sides if side), default=0)
    return max(sides)


def _count_bytes(entry: dict[str, Any]) -> tuple[int, int]:
    """Return the bytes of the inputs and of the outputs."""
    totals = []
    for side in ("input", "output"):
        sizes, kinds = entry.get(f"{side}_sizes") or [], entry.get(f"{side}_dtypes") or []
        pairs = zip(sizes, kinds, strict=False)
        totals.append(sum(math.prod(size) * _WIDTHS.get(str(kind), 1) for size, kind in pairs))
    return totals[0], totals[1]
