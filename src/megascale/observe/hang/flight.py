"""Reader of dumps of torch's flight recorder, which returns the types of core/calls.py.

Ranks of this package write dumps as JSON, torch writes pickles. Loading a pickle can run any code, so this reader
refuses pickles with other values than numbers, texts, lists and dictionaries.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.calls import Call, CallRecord, GroupCounts, PendingWait
from megascale.core.group_names import ATTEMPT_KEY, read_attempt, remove_attempt
from megascale.core.untrusted_files import check_pickle, read_bounded
from megascale.errors import DataError

_MAX_BYTES = 1 << 28
_DEFAULT_GROUP = "default_pg"  # torch's description of the group of all ranks
_BYTES_BY_DTYPE = {
    "Double": 8,
    "Long": 8,
    "Float": 4,
    "Int": 4,
    "Half": 2,
    "BFloat16": 2,
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
}
# Our name of a collective by a part of torch's name.
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
        device: whether the calls ran on a device (NCCL).
        record: the calls, with torch's sequence numbers.
    """

    device: bool
    record: CallRecord


def read_flight(file: Path, rank: int | None = None) -> FlightDump:
    """Read one rank's dump. Raises DataError if the file is not a dump, and FileNotFoundError without a file.

    Args:
        rank: None takes the rank from the file's name.
    """
    try:
        data = read_bounded(file, _MAX_BYTES)
        if data[:1] in b"{ \n":
            dump = strict_json.loads(data)
        else:
            check_pickle(data)
            dump = _PlainUnpickler(io.BytesIO(data)).load()
        return _convert(dump, _parse_rank(file) if rank is None else rank)
    except FileNotFoundError:
        raise
    except Exception as error:  # a damaged dump may raise any error
        raise DataError(f"{file} is not a flight-recorder dump that this version reads: {error}") from None


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that refuses every class and function."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"the dump contains {module}.{name}; dumps hold plain data only")


def _parse_rank(file: Path) -> int:
    digits = "".join(c for c in file.stem.rpartition("-")[2].rpartition("_")[2] if c.isdigit())
    return int(digits or 0)


def _convert(dump: dict[str, Any], rank: int) -> FlightDump:
    attempt = dump.get(ATTEMPT_KEY)
    configured_groups = sorted(
        dump.get("pg_config", {}).values(), key=lambda group: read_attempt(str(group.get("name"))) or 0
    )
    if isinstance(attempt, int):
        configured_groups = [
            group for group in configured_groups if read_attempt(str(group.get("name"))) in (None, attempt)
        ]
    # Of groups with the same name, the last one is of the newest attempt.
    members = {
        remove_attempt(str(group.get("name"))): _parse_members(group.get("ranks")) for group in configured_groups
    }
    calls: list[Call] = []
    pending: list[tuple[int, Call]] = []
    queued_counts: Counter[str] = Counter()  # by group
    is_device = False
    # torch leaves out the key "entries" of a dump without calls.
    entries = dump["entries"] if "pg_config" not in dump else dump.get("entries", ())
    if isinstance(attempt, int):
        entries = _drop_other_attempts(entries, attempt, is_prepared="world" in members)
    else:
        entries = _drop_earlier_attempts(entries)
    has_start_times = any(entry.get("time_discovered_started_ns") for entry in entries)
    for entry in entries:
        name, description = entry["process_group"]
        if description == _DEFAULT_GROUP:
            group = "world"
        else:
            group = remove_attempt(str(name))
        backend, _, operation = str(entry["profiling_name"]).partition(":")
        is_device |= backend == "nccl"
        sequence = int(entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"])
        op = _convert_op(operation)
        call = Call(group, sequence, op, _count_call_bytes(op, entry))
        calls.append(call)
        if entry.get("retired") or entry.get("state") == "completed":
            continue
        if backend == "nccl" and has_start_times and entry.get("state") == "scheduled":
            # The host has launched the call and the device has not reached it, so the rank has not joined the call.
            queued_counts[group] += 1
        else:
            pending.append((int(entry.get("time_created_ns") or 0), call))
    started: dict[str, int] = {}
    for call in calls:
        started[call.group] = max(started.get(call.group, 0), call.sequence)
    for group, count in queued_counts.items():
        started[group] -= count  # queued calls are the newest ones of their group
    pending_counts = Counter(call.group for _, call in pending)
    if "0" in members:
        members.setdefault("world", members["0"])  # torch's name of the group of all ranks
    sizes = {group: len(members.get(group, ())) for group in started}
    groups = {
        group: GroupCounts(sizes[group], count, count - pending_counts[group]) for group, count in started.items()
    }
    waiting = None
    if pending:
        start_ns, oldest = min(pending, key=lambda item: item[0])
        waiting = PendingWait(oldest.group, oldest.sequence, start_ns)
    world = max(1, *sizes.values()) if sizes else 0
    record = CallRecord(rank, 0, world, waiting=waiting, groups=groups, calls=tuple(calls), is_complete=False)
    return FlightDump(is_device, record)


def _drop_other_attempts(
    entries: Sequence[dict[str, Any]], attempt: int, is_prepared: bool
) -> Sequence[dict[str, Any]]:
    """Return the calls of an attempt, in order. Groups that are prepared for the next attempt may have calls too.

    Args:
        is_prepared: whether the attempt's groups were prepared. The name of its default group then has the attempt.
    """
    attempts = [read_attempt(str(entry["process_group"][0])) for entry in entries]
    remaining = [entry for entry, number in zip(entries, attempts, strict=True) if number in (None, attempt)]
    if not is_prepared:
        return _drop_earlier_attempts(remaining)
    own_numbers = [
        int(entry.get("pg_id") or 0) for entry, number in zip(entries, attempts, strict=True) if number == attempt
    ]
    first_number = min(own_numbers, default=0)
    return [entry for entry in remaining if int(entry.get("pg_id") or 0) >= first_number]


def _drop_earlier_attempts(entries: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Return the calls of the newest attempt of a process that has stayed, in order.

    Calls that were aborted with an earlier attempt remain in the recorder and never complete. The default group has the
    same name in all attempts. torch numbers the groups of a process as they are made, and an attempt makes its default
    group first. So groups with lower numbers than the newest default group are of earlier attempts.
    """
    numbers = [int(entry.get("pg_id") or 0) for entry in entries]
    attempts = [read_attempt(str(entry["process_group"][0])) for entry in entries]
    is_default = [entry["process_group"][1] == _DEFAULT_GROUP for entry in entries]
    first_number = max((number for number, flag in zip(numbers, is_default, strict=True) if flag), default=0)
    newest = max((attempt for attempt in attempts if attempt is not None), default=None)
    for number, attempt in zip(numbers, attempts, strict=True):
        # The newest attempt may have no call of its default group yet.
        if newest is not None and attempt is not None and attempt < newest:
            first_number = max(first_number, number + 1)
    return [entry for entry, number in zip(entries, numbers, strict=True) if number >= first_number]


def _convert_op(name: str) -> str:
    """Return our name of torch's collective: `_all_gather_base` and `allgather` are all_gather."""
    plain_name = name.replace("_", "").lower()
    for torch_name, op in _OPS.items():
        if torch_name in plain_name:
            return op
    return name.split(" ")[0]


def _parse_members(text: Any) -> tuple[int, ...]:
    if isinstance(text, str) and text:
        ranks = json.loads(text)
    else:
        ranks = []
    return tuple(int(rank) for rank in ranks)


def _count_call_bytes(op: str, entry: dict[str, Any]) -> int:
    """Return the bytes of a call by which its members are compared: equal on all members unless they mismatch."""
    if op == "all_to_all":  # ranks may send different numbers of bytes (Muon's matrices), which is not a mismatch
        return 0
    input_bytes = _count_tensor_bytes(entry, "input")
    output_bytes = _count_tensor_bytes(entry, "output")
    if op in ("gather", "scatter"):  # only one rank has the larger tensor
        return min((count for count in (input_bytes, output_bytes) if count), default=0)
    return max(input_bytes, output_bytes)


def _count_tensor_bytes(entry: dict[str, Any], direction: str) -> int:
    """Return the bytes of the tensors of a call; `direction` is "input" or "output"."""
    shapes = entry.get(f"{direction}_sizes") or []
    dtypes = entry.get(f"{direction}_dtypes") or []
    pairs = zip(shapes, dtypes, strict=False)
    return sum(math.prod(shape) * _BYTES_BY_DTYPE.get(str(dtype), 1) for shape, dtype in pairs)
