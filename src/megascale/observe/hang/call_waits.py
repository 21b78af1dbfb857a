"""Calls of the ranks of a run that stands still, and the calls in which they wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megascale.core.calls import READER, CallRecord
from megascale.observe.hang.scene import Scene


@dataclass(frozen=True)
class Wait:
    """A rank's wait in a call, or for samples. The names of the fields are keys in the output of `megascale hang`.

    Attributes:
        group, op, sequence: group, operation and number of the call. For samples the group is READER.
        on: awaited ranks: the members with a record that have not joined the call. If all have joined, the other ranks
            that wait in the call, or else all other members.
        all_came: whether every member has joined the call.
        seconds: duration of the wait: this host's time minus the begin by the rank's clock.
    """

    rank: int
    group: str
    op: str
    sequence: int
    on: tuple[int, ...]
    all_came: bool
    seconds: float


def select_records(scene: Scene) -> dict[int, CallRecord]:
    """Return the record of each rank's calls.

    This is the rank's own record of its calls. For calls on devices it is the record of torch's flight recorder, since
    the rank's own record does not say which of these have finished.
    """
    own_records = select_own_records(scene)
    flights = {rank: item.flight for rank, item in scene.ranks.items() if item.flight is not None}
    if not flights or (own_records and not are_calls_on_devices(scene)):
        return own_records
    records = {}
    for rank, flight in flights.items():
        if rank in own_records:
            waiting = own_records[rank].waiting
        else:
            waiting = None
        # The flight recorder does not record waits for samples, so take them from the rank's own record.
        is_reading = waiting is not None and waiting.group == READER
        if is_reading:
            records[rank] = replace(flight.record, waiting=waiting)
        else:
            records[rank] = flight.record
    return records


def select_own_records(scene: Scene) -> dict[int, CallRecord]:
    """Return the record that each rank wrote of its calls, of the ranks that have one."""
    return {rank: item.record for rank, item in scene.ranks.items() if item.record is not None}


def are_calls_on_devices(scene: Scene) -> bool:
    """Return whether calls ran on devices and all ranks with a record have a flight record."""
    flights = {rank: item.flight for rank, item in scene.ranks.items() if item.flight is not None}
    return any(flight.device for flight in flights.values()) and flights.keys() >= select_own_records(scene).keys()


def list_waits(scene: Scene, records: Mapping[int, CallRecord], members: Mapping[str, list[int]]) -> list[Wait]:
    """Return the waits of all ranks that are not gone.

    Args:
        members: ranks with a record, by group.
    """
    waits = []
    for rank, record in records.items():
        waiting = record.waiting
        if waiting is None or scene.ranks[rank].process == "gone":
            continue
        seconds = 0.0  # if the begin of the wait is unknown
        if waiting.start_ns:
            seconds = max(0.0, (scene.now_ns - waiting.start_ns) / 1e9)
        if waiting.group == READER:
            waits.append(Wait(rank, READER, "read", record.step, on=(), all_came=False, seconds=seconds))
            continue
        peers = [member for member in members[waiting.group] if member != rank]
        absent_peers = [peer for peer in peers if records[peer].groups[waiting.group].started < waiting.sequence]
        # A size of 0 means unknown. In a group of known size, members without a record count as absent.
        group_size = record.groups[waiting.group].size
        all_came = not absent_peers and (group_size == 0 or len(peers) + 1 >= group_size)
        awaited = absent_peers
        if all_came:
            peers_in_call = [peer for peer in peers if _is_in_call(records[peer], waiting.group, waiting.sequence)]
            awaited = peers_in_call or peers
        call = record.find_call(waiting.group, waiting.sequence)
        op = call.op if call else ""
        waits.append(
            Wait(
                rank=rank,
                group=waiting.group,
                op=op,
                sequence=waiting.sequence,
                on=tuple(awaited),
                all_came=all_came,
                seconds=seconds,
            )
        )
    return waits


def _is_in_call(record: CallRecord, group: str, sequence: int) -> bool:
    """Return whether a rank waits in this call."""
    waiting = record.waiting
    return waiting is not None and (waiting.group, waiting.sequence) == (group, sequence)
