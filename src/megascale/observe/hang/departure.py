"""Ranks whose calls differ from the calls that were due, by their schedule, their siblings or their own step before.

Ranks of one pipeline stage make the same calls in the same order, and every step repeats the one before. The first call
that differs therefore shows the rank that departed from the common order, also if two ranks wait for each other. A step
in which micro-batches are captured (parallel/chunk_graphs.py) starts a new order, so only the numbers of calls are
compared in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megascale.config.axes import AXES
from megascale.core.calls import Call, CallRecord
from megascale.core.layout import Layout
from megascale.core.schedule import Action


@dataclass(frozen=True)
class Departure:
    """A rank's departure from the common order.

    Attributes:
        kind: "missing send", "missing call" or "mismatched collective".
        due: the call that was due, with its number in the group.
        actual: the call that the rank made instead, None if it skipped a transfer.
        sentence: the evidence.
    """

    kind: str
    due: Call
    actual: Call | None
    sentence: str


# Calls that are made once per capture and not in every step.
_CAPTURE_CALLS = frozenset({"agree_on_capture"})
_REPLAYS = frozenset({"replayed_forward", "replayed_backward"})


def departures(records: Mapping[int, CallRecord], layout: Layout | None, ahead: int = 0) -> dict[int, Departure]:
    """Return the ranks that departed in their current step, without ranks that only follow a departed one.

    Args:
        ahead: number of later steps that hosts may have launched (on devices); the earliest step is checked first.
    """
    for steps_ago in range(ahead, -1, -1):
        departed = _find_in_step(records, layout, steps_ago)
        if departed:
            return departed
    clashes = _find_clashes(records)
    minority = _find_minority(clashes[0]) if clashes else {}
    if len(minority) == 1:
        return minority
    return _find_broken_periods(records) or minority


def _find_in_step(records: Mapping[int, CallRecord], layout: Layout | None, steps_ago: int) -> dict[int, Departure]:
    """Return the ranks that departed so many steps before their current one."""
    candidates: dict[int, Departure | None] = {}
    if layout is not None:
        candidates = {rank: _find_skipped_transfer(rank, record, layout, steps_ago) for rank, record in records.items()}
    if not any(candidates.values()):
        for rank in sorted(records):
            record = records[rank]
            step = record.step - steps_ago
            candidates[rank] = (
                _compare_with_siblings(rank, records, layout, step)
                or _compare_with_last_step(record, step)
                or _find_additional_call(record, step)
            )
    return {rank: departure for rank, departure in candidates.items() if departure is not None}


# transfers that the schedule lists and the rank skipped -----------------------------------------------------------


def _find_skipped_transfer(rank: int, record: CallRecord, layout: Layout, steps_ago: int) -> Departure | None:
    step = record.step - steps_ago
    if layout.grid.pipeline == 1 or not 0 <= rank < layout.grid.world_size or step < 1:
        return None
    if not steps_ago and record.action in ("", "kernels", "evaluate"):
        return None
    stage = layout.grid.coordinate(rank).pipeline
    schedule = layout.schedule()
    passed = schedule[stage]
    if record.index >= 0 and not steps_ago:
        passed = passed[: record.index]
    signatures = {(_get_prefix(c.group), c.op, c.chunk, c.microbatch) for c in record.calls if c.step == step}
    if not signatures or not _has_whole_step(record, step):
        return None
    for action in passed:
        if not (action.kind.is_send or action.kind.is_receive):
            continue
        direction = schedule.channel(stage, action).pass_name
        op = "send" if action.kind.is_send else "recv"
        if (direction, op, action.chunk, action.microbatch) in signatures:
            continue
        group = _name_channel(direction, rank, stage, action, layout)
        counts = record.groups.get(group)
        if counts is None:
            channel = schedule.channel(stage, action)
            similar = [a for a in passed if a.kind == action.kind and schedule.channel(stage, a) == channel]
            sequence = sum(call.group == group for call in record.calls) + similar.index(action) + 1
        else:
            sequence = counts.started + 1
        due = Call(group, sequence, op, 0, step, action.chunk, action.microbatch)
        sentence = f"it skipped {action} of step {step}"
        if not steps_ago:
            sentence += f"; its schedule lists it before {record.action}"
            if record.microbatch >= 0:
                sentence += f" of micro-batch {record.microbatch}"
        return Departure("missing send" if action.kind.is_send else "missing call", due, None, sentence)
    return None


def _name_channel(direction: str, rank: int, stage: int, action: Action, layout: Layout) -> str:
    grid = layout.grid
    coordinate = grid.coordinate(rank)
    channel = layout.schedule().channel(stage, action)
    source, target = (grid.rank(coordinate.move(pipeline=end)) for end in (channel.source, channel.target))
    return f"{direction}/{source}-{target}"


# comparison with siblings and with the step before ----------------------------------------------------------------


def _get_prefix(group: str) -> str:
    return group.partition("/")[0]


def _make_signature(call: Call) -> tuple[str, str, int, int, int]:
    return _get_prefix(call.group), call.op, call.bytes, call.chunk, call.microbatch


def _select_step(record: CallRecord, step: int) -> list[Call]:
    return [call for call in record.calls if call.step == step and call.op not in _CAPTURE_CALLS]


def _has_capture(record: CallRecord, step: int) -> bool:
    return any(call.step == step and call.op in _CAPTURE_CALLS for call in record.calls)


def _has_whole_step(record: CallRecord, step: int) -> bool:
    """Return whether the record still has all calls of a step."""
    return record.is_complete or any(call.step < step for call in record.calls)


def _find_first_difference(calls: Sequence[Call], expected: Sequence[Call]) -> int | None:
    for i, (call, due) in enumerate(zip(calls, expected, strict=False)):
        if _make_signature(call) != _make_signature(due):
            return i
    return None


def _compare_with_siblings(
    rank: int, records: Mapping[int, CallRecord], layout: Layout | None, step: int
) -> Departure | None:
    """Return the departure of a rank from the majority of its stage."""
    if layout is None or rank >= layout.grid.world_size or not _has_whole_step(records[rank], step):
        return None
    record = records[rank]
    siblings = [r for r in layout.grid.group(AXES.stage, rank) if r != rank and r in records]
    siblings = [r for r in siblings if records[r].step == record.step and _has_whole_step(records[r], step)]
    if len(siblings) < 2:
        return None
    calls = _select_step(record, step)
    differences = {r: _find_first_difference(calls, _select_step(records[r], step)) for r in siblings}
    positions = {r: position for r, position in differences.items() if position is not None}
    if len(positions) <= len(siblings) / 2:
        return None
    first = min(positions.values())
    witness = next(r for r, position in positions.items() if position == first)
    due = _select_step(records[witness], step)[first]
    subject = f"while rank {witness} and {len(positions) - 1} others of its stage"
    return _describe_difference(due, calls, first, record, step, subject)


def _compare_with_last_step(record: CallRecord, step: int) -> Departure | None:
    """Return the departure of a step's calls from the order of the rank's own step before."""
    before = step - 1
    # A process learns in its first step when each gradient is complete, so that step's calls have another order.
    if not any(call.step < before for call in record.calls) or _has_capture(record, step):
        return None
    calls, expected = _select_step(record, step), _select_step(record, before)
    first = _find_first_difference(calls, expected)
    if first is None:
        return None
    return _describe_difference(expected[first], calls, first, record, step, f"while in step {before} it")


def _find_additional_call(record: CallRecord, step: int) -> Departure | None:
    """Return a call that the step before made less often, in steps whose order may differ from the step before.

    These are a process's second step, and a step with a capture, in which there may only be fewer calls.
    """
    before = step - 1
    expected = _select_step(record, before)
    follows_first_step = record.is_complete and not any(call.step < before for call in record.calls)
    if not (follows_first_step or _has_capture(record, step)) or not _has_whole_step(record, before) or not expected:
        return None
    usual = Counter(_make_key(call) for call in expected)
    calls = [call for call in _select_step(record, step) if call.op not in _REPLAYS]
    totals = Counter(_make_key(call) for call in calls)
    counts: Counter[tuple[str, str, int]] = Counter()
    for call in calls:
        key = _make_key(call)
        counts[key] += 1
        if counts[key] > usual[key]:
            missing = [due for due in expected if usual[_make_key(due)] > totals[_make_key(due)]]
            due = call
            if missing:
                due = replace(missing[-1], sequence=record.groups[missing[-1].group].started + 1)
            times = f"{_format_times(counts[key])} in step {step}, {_format_times(usual[key])} in step {before}"
            sentence = f"it made {_format_call(call)} {times}"
            return Departure("mismatched collective", due, call, sentence)
    return None


def _make_key(call: Call) -> tuple[str, str, int]:
    return call.group, call.op, call.bytes


def _format_times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def _format_call(call: Call) -> str:
    return f"{call.op} of {call.bytes} bytes on {call.group}"


def _describe_difference(
    due: Call, calls: Sequence[Call], position: int, record: CallRecord, step: int, subject: str
) -> Departure:
    """Return a departure at a position of a step's calls."""
    actual = calls[position]
    kind = "mismatched collective"
    if due.op in ("send", "recv") and _make_signature(due) not in [_make_signature(call) for call in calls[position:]]:
        if due.op == "send":
            kind = "missing send"
        else:
            kind = "missing call"
    # Express the call that was due in this rank's own group of that kind, with the number that it would have had.
    similar = (
        group
        for group in record.groups
        if _get_prefix(group) == _get_prefix(due.group) and _is_same_channel(group, due, record)
    )
    group = next(similar, due.group)
    earlier = [call.sequence for call in calls[:position] if call.group == group]
    later = [call.sequence for call in calls[position:] if call.group == group]
    sequence = due.sequence
    if later:
        sequence = later[0]
    elif earlier:
        sequence = earlier[-1] + 1
    elif group in record.groups:
        sequence = record.groups[group].started + 1
    sentence = (
        f"call {position + 1} of its step {step} was {_format_call(actual)} {subject} made {_format_call(due)} there"
    )
    due = Call(group, sequence, due.op, due.bytes, step, due.chunk, due.microbatch)
    return Departure(kind, due, actual, sentence)


def _is_same_channel(group: str, due: Call, record: CallRecord) -> bool:
    """Return whether a group can be the channel of a call.

    A stage has two channels of each direction. The channel on which a rank sends begins with its own number.
    """
    if due.op not in ("send", "recv"):
        return True
    source = group.partition("/")[2].partition("-")[0]
    return (source == str(record.rank)) == (due.op == "send")


# comparison with the rank's own period, for calls whose step is unknown --------------------------------------------

_PERIODS = 3  # that must be equal before a departure
_LEAST_CALLS = 12  # that these periods must have
_LONGEST_PERIOD = 512  # calls


def _find_broken_periods(records: Mapping[int, CallRecord]) -> dict[int, Departure]:
    """Return the ranks whose last calls depart from their own period; {} if no rank in order waits for another.

    Another trainer's flight record has no steps, but every step makes the same calls. Of two ranks that wait for each
    other, the one that skipped a call breaks its own order.
    """
    departed = {}
    for rank, record in records.items():
        departure = _find_broken_period(record)
        if departure is not None:
            departed[rank] = departure
    # Ranks that begin an evaluation break their period too. If the ranks in order wait for none, they are late instead.
    has_waiting_peer = any(record.waiting is not None for rank, record in records.items() if rank not in departed)
    return departed if has_waiting_peer else {}


def _find_broken_period(record: CallRecord) -> Departure | None:
    """Return the first call that breaks the shortest period of a rank's calls, None without period or departure."""
    signatures = [(call.group, call.op, call.bytes) for call in record.calls]
    count = len(signatures)
    for period in range(1, min(_LONGEST_PERIOD, count // (_PERIODS + 3)) + 1):
        # A rank blocks within two periods after its departure, because the host of a device is a step ahead.
        recent = count - 2 * period
        start = recent - max(_PERIODS * period, _LEAST_CALLS)
        if start < period:
            continue
        breaks = (i for i in range(start, count) if signatures[i] != signatures[i - period])
        first = next(breaks, None)
        if first is None:
            return None
        if first >= recent:
            return _describe_broken_period(record, first, period)
    return None


def _describe_broken_period(record: CallRecord, index: int, period: int) -> Departure:
    actual, expected = record.calls[index], record.calls[index - period]
    due = replace(expected, sequence=record.groups[expected.group].started + 1)
    later = [call.sequence for call in record.calls[index:] if call.group == expected.group]
    if later:
        due = replace(due, sequence=later[0])
    sentence = (
        f"call {actual.sequence} of {actual.group} was {_format_call(actual)}, where it had made "
        f"{_format_call(expected)} in each of the {_PERIODS} steps before"
    )
    return Departure("mismatched collective", due, actual, sentence)


# comparison of the members of a group, if nothing else shows a departure --------------------------------------------


def _find_clashes(records: Mapping[int, CallRecord]) -> list[dict[int, Call]]:
    """Return for each group its oldest call that differs between the members, as rank -> call."""
    by_group: dict[str, dict[int, dict[int, Call]]] = {}
    for rank, record in records.items():
        for call in record.calls:
            if call.group in record.groups:
                by_group.setdefault(call.group, {}).setdefault(call.sequence, {})[rank] = call
    clashes = []
    for _, by_number in sorted(by_group.items()):
        for _, calls in sorted(by_number.items()):
            kinds = {("transfer" if c.op in ("send", "recv") else c.op, c.bytes) for c in calls.values()}
            if len(kinds) > 1:
                clashes.append(calls)
                break
    return clashes


def _find_minority(calls: Mapping[int, Call]) -> dict[int, Departure]:
    """Return the members whose call differs from the majority; all members without a majority."""
    votes = Counter((call.op, call.bytes) for call in calls.values()).most_common()
    usual, count = votes[0]
    is_tie = len(votes) > 1 and votes[1][1] == count
    due = next(call for call in calls.values() if (call.op, call.bytes) == usual)
    minority = {}
    for rank, call in calls.items():
        if is_tie or (call.op, call.bytes) != usual:
            different = next(c for c in calls.values() if (c.op, c.bytes) != (call.op, call.bytes))
            sentence = (
                f"call {call.sequence} of {call.group} is {_format_call(call)} here and {_format_call(different)} on "
                "another member"
            )
            minority[rank] = Departure("mismatched collective", due, call, sentence)
    return minority
