"""Search for ranks that break the period of their own calls.

Every step makes the same calls, so the calls of a rank are periodic. This search works without the steps of calls,
which another trainer's flight record lacks. Of two ranks that wait for each other, the rank that skipped a call breaks
its period.

A checkpoint or an evaluation makes further calls, on all ranks alike. A *regular* call is a call that most steps make.
A *joint* call is a call that two ranks or more made under the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from megascale.core.calls import Call, CallRecord
from megascale.observe.hang.departed_call import Departure, format_call, make_key

_PERIODS = 3  # number of equal periods that must precede a departure
_MIN_CALLS = 12  # smallest number of calls in these periods together
_LONGEST_PERIOD = 512  # in calls
_MIN_REPEATS = 0.6  # smallest share of calls that repeat after one period, if checkpoints interrupt it


class _CallIdentity(NamedTuple):
    """Properties of a call that are equal on all members of its group."""

    group: str
    sequence: int
    op: str
    bytes: int


def find_broken_periods(records: Mapping[int, CallRecord]) -> dict[int, Departure]:
    """Return the departures of ranks whose last calls differ from their period, by rank."""
    departures = _keep_departures({rank: _find_broken_period(record) for rank, record in records.items()})
    joint_calls = _find_joint_calls(records)
    if not departures or any(_identify(departure.actual) in joint_calls for departure in departures.values()):
        # A checkpoint or an evaluation breaks the period of all ranks, or hides that a rank broke it.
        departures = _keep_departures(
            {rank: _find_broken_regular_period(record, joint_calls) for rank, record in records.items()}
        )
    # Ranks that begin an evaluation break their period too. If none of the other ranks waits, all ranks evaluate.
    has_waiting_peer = any(record.waiting is not None for rank, record in records.items() if rank not in departures)
    if has_waiting_peer:
        return departures
    return {}


def _keep_departures(departures: Mapping[int, Departure | None]) -> dict[int, Departure]:
    return {rank: departure for rank, departure in departures.items() if departure is not None}


def _identify(call: Call | None) -> _CallIdentity | None:
    if call is None:
        return None
    return _CallIdentity(call.group, call.sequence, call.op, bytes=call.bytes)


def _find_joint_calls(records: Mapping[int, CallRecord]) -> set[_CallIdentity | None]:
    """Return the calls that two ranks or more made under the same number."""
    counts = Counter(_identify(call) for record in records.values() for call in record.calls)
    return {call for call, count in counts.items() if count > 1}


def _find_broken_regular_period(record: CallRecord, joint_calls: Set[_CallIdentity | None]) -> Departure | None:
    """Return the first call that breaks a rank's period, after joint calls that are not regular have been dropped.

    Such calls are those of a checkpoint. One whole period must follow them, since a checkpoint may also make calls that
    are equal to regular ones.
    """
    is_kept = [
        is_regular or _identify(call) not in joint_calls
        for call, is_regular in zip(record.calls, _mark_regular_calls(record), strict=True)
    ]
    kept_calls = tuple(call for call, kept in zip(record.calls, is_kept, strict=True) if kept)
    dropped = [index for index, kept in enumerate(is_kept) if not kept]
    # Number of kept calls before the last dropped one.
    first_index = dropped[-1] + 1 - len(dropped) if dropped else 0
    departure = _find_broken_period(replace(record, calls=kept_calls), first_index)
    if departure is not None and _identify(departure.actual) in joint_calls:
        return None
    return departure


def _mark_regular_calls(record: CallRecord) -> list[bool]:
    """Return whether each call is regular; True for all calls of a record without a period."""
    keys = [make_key(call) for call in record.calls]
    number_by_key = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    numbers = np.array([number_by_key[key] for key in keys], dtype=np.int64)
    # Part of a step may repeat within it, so the period is the distance at which most calls repeat.
    period = 0
    largest_share = _MIN_REPEATS
    for distance in range(1, min(_LONGEST_PERIOD, len(keys) // (_PERIODS + 3)) + 1):
        share = float((numbers[distance:] == numbers[:-distance]).mean())
        if share > largest_share:
            period = distance
            largest_share = share
    if not period:
        return [True] * len(keys)
    is_repeated = numbers[period:] == numbers[:-period]
    # Repetitions of each different call; a regular call is repeated in at least half of the steps.
    repeat_counts = np.bincount(numbers[period:][is_repeated], minlength=len(number_by_key))
    step_count = len(keys) / period
    return [bool(is_regular) for is_regular in (repeat_counts >= step_count / 2)[numbers]]


def _find_broken_period(record: CallRecord, first_index: int = 0) -> Departure | None:
    """Return the first call that breaks the shortest period of a rank's calls; None without a period or a break.

    If `first_index` is positive, a whole period must lie between the call at this index and the break.
    """
    keys = [make_key(call) for call in record.calls]
    call_count = len(keys)
    # The calls must contain _PERIODS equal periods, a period before them for the comparison, and the last two periods.
    for period in range(1, min(_LONGEST_PERIOD, call_count // (_PERIODS + 3)) + 1):
        # A rank blocks within two periods after its departure, because the host of a device is a step ahead. Before
        # these two periods, the calls must have been periodic.
        last_periods_start = call_count - 2 * period
        start = last_periods_start - max(_PERIODS * period, _MIN_CALLS)
        if start < period:
            continue
        breaks = [index for index in range(start, call_count) if keys[index] != keys[index - period]]
        if not breaks:
            return None
        if breaks[0] >= last_periods_start:
            if first_index and breaks[0] < first_index + period:
                return None
            return _describe_broken_period(record, breaks[0], period)
    return None


def _describe_broken_period(record: CallRecord, index: int, period: int) -> Departure:
    """Return the departure at the call with this index, which differs from the call one period before."""
    actual = record.calls[index]
    expected = record.calls[index - period]
    # The call that was due would have had the number of the group's next call.
    due = replace(expected, sequence=record.groups[expected.group].started + 1)
    later_sequences = [call.sequence for call in record.calls[index:] if call.group == expected.group]
    if later_sequences:
        due = replace(due, sequence=later_sequences[0])
    sentence = (
        f"call {actual.sequence} of {actual.group} was {format_call(actual)}, where it had made "
        f"{format_call(expected)} in each of the {_PERIODS} steps before"
    )
    return Departure("mismatched collective", due, actual, sentence=sentence)
