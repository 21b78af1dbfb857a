"""Search for ranks whose calls differ from the calls that were due.

Which call was due follows from the rank's schedule, its siblings (the ranks of the same pipeline stage) or its previous
step. Siblings make the same calls in the same order, and every step repeats the previous step. The first call that
differs therefore shows the rank that departed from the common order, even if two ranks wait for each other. A step in
which micro-batches are captured as CUDA graphs (parallel/chunk_graphs.py) has another order, so only the numbers of its
calls are compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from megascale.config.axes import AXES
from megascale.core.calls import Call, CallRecord
from megascale.core.layout import Layout
from megascale.core.schedule import Action


@dataclass(frozen=True)
class Departure:
    """A rank's departure from the common order.

    Attributes:
        kind: "missing send", "missing call" or "mismatched collective".
        due: call that was due, with its number in the group.
        actual: call that the rank made instead; None if it skipped a transfer.
        sentence: evidence as text.
    """

    kind: str
    due: Call
    actual: Call | None
    sentence: str


# Calls that are made once per capture of a CUDA graph instead of in every step.
_CAPTURE_CALLS = frozenset({"agree_on_capture"})
_REPLAYS = frozenset({"replayed_forward", "replayed_backward"})


def find_departures(
    records: Mapping[int, CallRecord], layout: Layout | None, steps_ahead: int = 0
) -> dict[int, Departure]:
    """Return the departures by rank. Ranks that wait because of a departed rank are not included.

    Args:
        records: record of each rank's calls.
        layout: provides schedules and stages, if known.
        steps_ahead: number of steps by which hosts may be ahead of their devices. The earliest step is checked first.
    """
    for steps_ago in range(steps_ahead, -1, -1):
        departures = _find_departures_in_step(records, layout, steps_ago)
        if departures:
            return departures
    clashes = _find_clashes(records)
    if clashes:
        minority = _find_minority(clashes[0])
    else:
        minority = {}
    if len(minority) == 1:
        return minority
    # A majority is unknown, so compare each rank with its own earlier calls.
    return _find_broken_periods(records) or minority


def _find_departures_in_step(
    records: Mapping[int, CallRecord], layout: Layout | None, steps_ago: int
) -> dict[int, Departure]:
    """Return the departures by rank in the step `steps_ago` steps before each rank's current step."""
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


# Comparison with the schedule --------------------------------------------------------------------------------------


def _find_skipped_transfer(rank: int, record: CallRecord, layout: Layout, steps_ago: int) -> Departure | None:
    """Return the first send or receive that the schedule lists and the rank skipped."""
    step = record.step - steps_ago
    if layout.grid.pipeline == 1 or not 0 <= rank < layout.grid.world_size or step < 1:
        return None
    if not steps_ago and record.action in ("", "kernels", "evaluate"):
        return None
    stage = layout.grid.coordinate(rank).pipeline
    schedule = layout.schedule()
    # Actions that the rank has finished: all of an earlier step, those before `index` of the current step.
    finished_actions = schedule[stage]
    if record.index >= 0 and not steps_ago:
        finished_actions = finished_actions[: record.index]
    signatures = {(_get_prefix(c.group), c.op, c.chunk, c.microbatch) for c in record.calls if c.step == step}
    if not signatures or not _has_whole_step(record, step):
        return None
    for action in finished_actions:
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
            transfers = [a for a in finished_actions if a.kind == action.kind and schedule.channel(stage, a) == channel]
            call_count = len([call for call in record.calls if call.group == group])
            sequence = call_count + transfers.index(action) + 1
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
    """Return the group name of a transfer, such as forward/0-4 from rank 0 to rank 4."""
    grid = layout.grid
    coordinate = grid.coordinate(rank)
    channel = layout.schedule().channel(stage, action)
    source, target = (grid.rank(coordinate.move(pipeline=end)) for end in (channel.source, channel.target))
    return f"{direction}/{source}-{target}"


# Comparison with siblings and with the previous step ---------------------------------------------------------------


def _get_prefix(group: str) -> str:
    return group.partition("/")[0]


def _make_signature(call: Call) -> tuple[str, str, int, int, int]:
    return _get_prefix(call.group), call.op, call.bytes, call.chunk, call.microbatch


def _select_step(record: CallRecord, step: int) -> list[Call]:
    return [call for call in record.calls if call.step == step and call.op not in _CAPTURE_CALLS]


def _has_capture(record: CallRecord, step: int) -> bool:
    return any(call.step == step and call.op in _CAPTURE_CALLS for call in record.calls)


def _has_whole_step(record: CallRecord, step: int) -> bool:
    """Return whether the record, which keeps the newest calls, has all calls of a step."""
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
    sibling = min(positions, key=lambda r: positions[r])
    first_position = positions[sibling]
    due = _select_step(records[sibling], step)[first_position]
    subject = f"while rank {sibling} and {len(positions) - 1} others of its stage"
    return _describe_difference(due, calls, first_position, record, step, subject)


def _compare_with_last_step(record: CallRecord, step: int) -> Departure | None:
    """Return the departure of a step's calls from those of the rank's previous step."""
    previous_step = step - 1
    # A process learns in its first step when each gradient is complete, so that step's calls have another order.
    if not any(call.step < previous_step for call in record.calls) or _has_capture(record, step):
        return None
    calls, expected = _select_step(record, step), _select_step(record, previous_step)
    position = _find_first_difference(calls, expected)
    if position is None:
        return None
    return _describe_difference(expected[position], calls, position, record, step, f"while in step {previous_step} it")


def _find_additional_call(record: CallRecord, step: int) -> Departure | None:
    """Return a call that the step makes more often than the previous step.

    Only steps whose order may differ from that of the previous step are compared: a process's second step, and a step
    with a capture, which may only make fewer calls than the previous step.
    """
    previous_step = step - 1
    expected = _select_step(record, previous_step)
    follows_first_step = record.is_complete and not any(call.step < previous_step for call in record.calls)
    if (
        not (follows_first_step or _has_capture(record, step))
        or not _has_whole_step(record, previous_step)
        or not expected
    ):
        return None
    # The first call beyond the previous step's number of such calls is additional. If the previous step has other calls
    # that this step lacks, one of them was due instead.
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
            times = f"{_format_times(counts[key])} in step {step}, {_format_times(usual[key])} in step {previous_step}"
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
    """Return the departure at a position of a step's calls.

    Args:
        due: call of a sibling or of the previous step at this position.
        calls: calls of the step.
        subject: begin of a clause about the rank or step that made the call `due`.
    """
    actual = calls[position]
    kind = "mismatched collective"
    if due.op in ("send", "recv") and _make_signature(due) not in [_make_signature(call) for call in calls[position:]]:
        if due.op == "send":
            kind = "missing send"
        else:
            kind = "missing call"
    # Find the rank's own group for the call that was due, and the number that the call would have had.
    groups = [
        group
        for group in record.groups
        if _get_prefix(group) == _get_prefix(due.group) and _is_same_channel(group, due, record)
    ]
    group = groups[0] if groups else due.group
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


# Comparison with the rank's own period, for calls whose step is unknown ---------------------------------------------

_PERIODS = 3  # number of equal periods that must precede a departure
_MIN_CALLS = 12  # fewest calls of these periods together
_LONGEST_PERIOD = 512  # calls
_MIN_REPEATS = 0.6  # smallest share of calls that repeat after one period, if checkpoints interrupt it


def _find_broken_periods(records: Mapping[int, CallRecord]) -> dict[int, Departure]:
    """Return the departures of ranks whose last calls differ from their period.

    Every step makes the same calls, so the calls are periodic. This works without steps, which another trainer's flight
    record lacks. Of two ranks that wait for each other, the rank that skipped a call breaks its period.
    """
    departures = _keep_departures({rank: _find_broken_period(record) for rank, record in records.items()})
    joint_calls = _find_joint_calls(records)
    if not departures or any(_identify(departure.actual) in joint_calls for departure in departures.values()):
        # A checkpoint or an evaluation breaks the period of all ranks, or hides that a rank broke it.
        departures = _keep_departures(
            {rank: _find_broken_regular_period(record, joint_calls) for rank, record in records.items()}
        )
    # Ranks that begin an evaluation break their period too. Without a waiting rank among the others, this is the case.
    has_waiting_peer = any(record.waiting is not None for rank, record in records.items() if rank not in departures)
    if has_waiting_peer:
        return departures
    return {}


def _keep_departures(departures: Mapping[int, Departure | None]) -> dict[int, Departure]:
    return {rank: departure for rank, departure in departures.items() if departure is not None}


def _identify(call: Call | None) -> tuple[str, int, str, int] | None:
    """Return what all members of a group have in common of one call."""
    if call is None:
        return None
    return call.group, call.sequence, call.op, call.bytes


def _find_joint_calls(records: Mapping[int, CallRecord]) -> set[tuple[str, int, str, int] | None]:
    """Return the calls that two ranks or more made alike, under the same number."""
    counts = Counter(_identify(call) for record in records.values() for call in record.calls)
    return {call for call, count in counts.items() if count > 1}


def _find_broken_regular_period(
    record: CallRecord, joint_calls: Set[tuple[str, int, str, int] | None]
) -> Departure | None:
    """Return the first call that breaks a rank's period, without the joint calls that most steps lack.

    Such calls are those of a checkpoint. One whole period must follow them, since a checkpoint may also make calls of
    the kinds that a step makes.
    """
    is_regular = _mark_regular_calls(record)
    is_kept = [
        regular or _identify(call) not in joint_calls for call, regular in zip(record.calls, is_regular, strict=True)
    ]
    calls = tuple(call for call, kept in zip(record.calls, is_kept, strict=True) if kept)
    irregular = [index for index, kept in enumerate(is_kept) if not kept]
    kept_before = irregular[-1] + 1 - len(irregular) if irregular else 0
    departure = _find_broken_period(replace(record, calls=calls), first_index=kept_before)
    if departure is not None and _identify(departure.actual) in joint_calls:
        return None
    return departure


def _mark_regular_calls(record: CallRecord) -> list[bool]:
    """Return for each call whether most steps make a call of its kind; True for all in a record without a period."""
    signatures = [(call.group, call.op, call.bytes) for call in record.calls]
    kinds = {signature: kind for kind, signature in enumerate(dict.fromkeys(signatures))}
    kind_by_call = np.array([kinds[signature] for signature in signatures], dtype=np.int64)
    for period in range(1, min(_LONGEST_PERIOD, len(signatures) // (_PERIODS + 3)) + 1):
        is_repeated = kind_by_call[period:] == kind_by_call[:-period]
        if is_repeated.mean() >= _MIN_REPEATS:
            repeats = np.bincount(kind_by_call[period:][is_repeated], minlength=len(kinds))
            steps = len(signatures) / period
            return [bool(regular) for regular in (repeats >= steps / 2)[kind_by_call]]
    return [True] * len(signatures)


def _find_broken_period(record: CallRecord, first_index: int = 0) -> Departure | None:
    """Return the first call that breaks the shortest period of a rank's calls; None without a period or a break.

    If `first_index` is positive, a whole period must lie between this call and the break.
    """
    signatures = [(call.group, call.op, call.bytes) for call in record.calls]
    count = len(signatures)
    for period in range(1, min(_LONGEST_PERIOD, count // (_PERIODS + 3)) + 1):
        # A rank blocks within two periods after its departure, because the host of a device is a step ahead. Before
        # these periods, the calls must have been periodic.
        last_periods_start = count - 2 * period
        start = last_periods_start - max(_PERIODS * period, _MIN_CALLS)
        if start < period:
            continue
        breaks = [i for i in range(start, count) if signatures[i] != signatures[i - period]]
        if not breaks:
            return None
        if breaks[0] >= last_periods_start:
            if first_index and breaks[0] < first_index + period:
                return None
            return _describe_broken_period(record, breaks[0], period)
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


# Comparison of the members of a group -------------------------------------------------------------------------------


def _find_clashes(records: Mapping[int, CallRecord]) -> list[dict[int, Call]]:
    """Return the oldest call of each group that differs between the members, as the call of each rank."""
    calls_by_group: dict[str, dict[int, dict[int, Call]]] = {}  # by group, sequence and rank
    for rank, record in records.items():
        for call in record.calls:
            if call.group in record.groups:
                calls_by_group.setdefault(call.group, {}).setdefault(call.sequence, {})[rank] = call
    clashes = []
    for _, calls_by_sequence in sorted(calls_by_group.items()):
        for _, calls in sorted(calls_by_sequence.items()):
            # The send and the receive of one transfer are equal calls.
            distinct_calls = {("transfer" if c.op in ("send", "recv") else c.op, c.bytes) for c in calls.values()}
            if len(distinct_calls) > 1:
                clashes.append(calls)
                break
    return clashes


def _find_minority(calls: Mapping[int, Call]) -> dict[int, Departure]:
    """Return the departures of the members whose call differs from the most frequent call. In a tie, these are all."""
    votes = Counter((call.op, call.bytes) for call in calls.values()).most_common()
    usual, vote_count = votes[0]
    is_tie = len(votes) > 1 and votes[1][1] == vote_count
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
