"""Search for ranks whose calls (collectives, sends and receives) differ from the calls that were due.

Which call was due follows from the rank's schedule, its siblings (the ranks of the same pipeline stage) or its previous
step. Siblings make the same calls in the same order, and every step repeats the previous step. The first call that
differs therefore shows the rank that departed from the common order, even if two ranks wait for each other. In a step
whose micro-batches are captured as CUDA graphs (parallel/chunk_graphs.py), the order differs. For such a step only the
counts of equal calls are compared.

Another trainer's calls have no step. They are compared with the calls of the other members, and with the rank's own
periodic calls (call_periods.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from megascale.config.axes import AXES
from megascale.core.calls import Call, CallRecord
from megascale.core.layout import Layout
from megascale.core.schedule import Action
from megascale.observe.hang.call_periods import find_broken_periods
from megascale.observe.hang.departed_call import Departure, format_call, make_key

# Calls that are made once per capture of a CUDA graph instead of in every step.
_CAPTURE_CALLS = frozenset({"agree_on_capture"})
# Replays of captured CUDA graphs, which the log of calls records like calls.
_REPLAYS = frozenset({"replayed_forward", "replayed_backward"})


def find_departures(
    records: Mapping[int, CallRecord], layout: Layout | None, steps_ahead: int = 0
) -> dict[int, Departure]:
    """Return the departures by rank. Ranks that wait because of a departed rank are not included.

    Args:
        layout: provides schedules and stages, if known.
        steps_ahead: number of steps by which hosts may be ahead of their devices. Each of these earlier steps is
            checked before the current step.
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
    # Several ranks differ, or none. Compare each rank with its own earlier calls.
    return find_broken_periods(records) or minority


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
    # Calls of the step: direction (for transfers the prefix of the group's name), op, chunk and micro-batch.
    recorded_calls = {(_get_prefix(c.group), c.op, c.chunk, c.microbatch) for c in record.calls if c.step == step}
    if not recorded_calls or not _has_whole_step(record, step):
        return None
    for action in finished_actions:
        if not (action.kind.is_send or action.kind.is_receive):
            continue
        direction = schedule.channel(stage, action).pass_name
        op = "send" if action.kind.is_send else "recv"
        if (direction, op, action.chunk, action.microbatch) in recorded_calls:
            continue
        group = _name_channel(direction, rank, stage, action, layout)
        counts = record.groups.get(group)
        if counts is None:
            # No call of the group was recorded. Assume that the rank made all earlier transfers of the channel.
            channel = schedule.channel(stage, action)
            transfers = [a for a in finished_actions if a.kind == action.kind and schedule.channel(stage, a) == channel]
            call_count = len([call for call in record.calls if call.group == group])
            sequence = call_count + transfers.index(action) + 1
        else:
            sequence = counts.started + 1
        # The schedule does not contain the number of bytes, so it is 0.
        due = Call(group, sequence, op, 0, step, action.chunk, action.microbatch)
        sentence = f"it skipped {action} of step {step}"
        if not steps_ago:
            sentence += f"; its schedule lists it before {record.action}"
            if record.microbatch >= 0:
                sentence += f" of micro-batch {record.microbatch}"
        kind = "missing send" if action.kind.is_send else "missing call"
        return Departure(kind, due, actual=None, sentence=sentence)
    return None


def _name_channel(direction: str, rank: int, stage: int, action: Action, layout: Layout) -> str:
    """Return the name of a transfer's group, such as forward/0-4 for activations from rank 0 to rank 4."""
    grid = layout.grid
    coordinate = grid.coordinate(rank)
    channel = layout.schedule().channel(stage, action)
    source, target = (grid.rank(coordinate.move(pipeline=end)) for end in (channel.source, channel.target))
    return f"{direction}/{source}-{target}"


# Comparison with siblings and with the previous step ---------------------------------------------------------------


def _get_prefix(group: str) -> str:
    """Return the part of a group's name that is equal on all ranks, such as forward of forward/0-4."""
    return group.partition("/")[0]


def _make_signature(call: Call) -> tuple[str, str, int, int, int]:
    """Return what is equal in the corresponding calls of siblings and of steps."""
    return _get_prefix(call.group), call.op, call.bytes, call.chunk, call.microbatch


def _select_step(record: CallRecord, step: int) -> list[Call]:
    return [call for call in record.calls if call.step == step and call.op not in _CAPTURE_CALLS]


def _has_capture(record: CallRecord, step: int) -> bool:
    return any(call.step == step and call.op in _CAPTURE_CALLS for call in record.calls)


def _has_whole_step(record: CallRecord, step: int) -> bool:
    """Return whether the record, which keeps the newest calls, has all calls of a step."""
    return record.is_complete or any(call.step < step for call in record.calls)


def _find_first_difference(calls: Sequence[Call], expected: Sequence[Call]) -> int | None:
    """Return the index of the first call that differs from the expected call; None if one sequence begins the other."""
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
    # Index of the first different call, by sibling with such a call.
    differences: dict[int, int] = {}
    for sibling in siblings:
        index = _find_first_difference(calls, _select_step(records[sibling], step))
        if index is not None:
            differences[sibling] = index
    if len(differences) <= len(siblings) / 2:
        return None
    sibling = min(differences, key=lambda r: differences[r])
    index = differences[sibling]
    due = _select_step(records[sibling], step)[index]
    subject = f"while rank {sibling} and {len(differences) - 1} others of its stage"
    return _describe_difference(due, calls, index, record=record, step=step, subject=subject)


def _compare_with_last_step(record: CallRecord, step: int) -> Departure | None:
    """Return the departure of a step's calls from those of the rank's previous step."""
    previous_step = step - 1
    # A process learns in its first step when each gradient is complete, so that step's calls have another order.
    if not any(call.step < previous_step for call in record.calls) or _has_capture(record, step):
        return None
    calls = _select_step(record, step)
    expected = _select_step(record, previous_step)
    index = _find_first_difference(calls, expected)
    if index is None:
        return None
    subject = f"while in step {previous_step} it"
    return _describe_difference(expected[index], calls, index, record=record, step=step, subject=subject)


def _find_additional_call(record: CallRecord, step: int) -> Departure | None:
    """Return the departure of a step that makes a call more often than the previous step.

    Two kinds of steps are compared in this way, because their order may differ from that of the previous step: a
    process's second step, and a step with a capture. A step with a capture may make fewer calls than the previous step,
    but no additional ones.
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
    # The first call beyond the previous step's count of equal calls is additional. If the previous step has other calls
    # that this step lacks, one of them was due instead.
    previous_counts = Counter(make_key(call) for call in expected)
    calls = [call for call in _select_step(record, step) if call.op not in _REPLAYS]
    total_counts = Counter(make_key(call) for call in calls)
    counts_so_far: Counter[tuple[str, str, int]] = Counter()
    for call in calls:
        key = make_key(call)
        counts_so_far[key] += 1
        if counts_so_far[key] <= previous_counts[key]:
            continue
        missing_calls = [c for c in expected if previous_counts[make_key(c)] > total_counts[make_key(c)]]
        due = call
        if missing_calls:
            last_missing = missing_calls[-1]
            due = replace(last_missing, sequence=record.groups[last_missing.group].started + 1)
        sentence = (
            f"it made {format_call(call)} {_format_times(counts_so_far[key])} in step {step}, "
            f"{_format_times(previous_counts[key])} in step {previous_step}"
        )
        return Departure("mismatched collective", due, call, sentence=sentence)
    return None


def _format_times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def _describe_difference(
    expected: Call, calls: Sequence[Call], index: int, *, record: CallRecord, step: int, subject: str
) -> Departure:
    """Return the departure at an index of a step's calls.

    Args:
        expected: call of a sibling or of the previous step at this index.
        subject: begin of a clause about the rank or step that made the call `expected`.
    """
    actual = calls[index]
    kind = "mismatched collective"
    later_signatures = [_make_signature(call) for call in calls[index:]]
    if expected.op in ("send", "recv") and _make_signature(expected) not in later_signatures:
        if expected.op == "send":
            kind = "missing send"
        else:
            kind = "missing call"
    # Find the rank's own group for the expected call, and the number that the call would have had.
    groups = [
        group
        for group in record.groups
        if _get_prefix(group) == _get_prefix(expected.group) and _can_carry(group, expected, record)
    ]
    group = groups[0] if groups else expected.group
    earlier_sequences = [call.sequence for call in calls[:index] if call.group == group]
    later_sequences = [call.sequence for call in calls[index:] if call.group == group]
    sequence = expected.sequence
    if later_sequences:
        sequence = later_sequences[0]
    elif earlier_sequences:
        sequence = earlier_sequences[-1] + 1
    elif group in record.groups:
        sequence = record.groups[group].started + 1
    sentence = (
        f"call {index + 1} of its step {step} was {format_call(actual)} {subject} made {format_call(expected)} there"
    )
    due = Call(group, sequence, expected.op, expected.bytes, step, expected.chunk, expected.microbatch)
    return Departure(kind, due, actual, sentence=sentence)


def _can_carry(group: str, call: Call, record: CallRecord) -> bool:
    """Return whether a rank makes a call like `call` on a group of this name.

    A stage has two groups of each direction, one on which it sends and one on which it receives. The name of the group
    on which a rank sends has the rank's number first, such as forward/4-8.
    """
    if call.op not in ("send", "recv"):
        return True
    source = group.partition("/")[2].partition("-")[0]
    rank_sends = source == str(record.rank)
    return rank_sends == (call.op == "send")


# Comparison of the members of a group -------------------------------------------------------------------------------


def _find_clashes(records: Mapping[int, CallRecord]) -> list[dict[int, Call]]:
    """Return, for each group, the calls by rank of the oldest sequence number at which the members' calls differ.

    Groups without a difference are left out.
    """
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
    """Return the departures of the members whose call differs from the most frequent call; in a tie, of all members.

    Args:
        calls: call of each member under one sequence number.
    """
    frequencies = Counter((call.op, call.bytes) for call in calls.values()).most_common()
    usual_call, usual_count = frequencies[0]
    is_tie = len(frequencies) > 1 and frequencies[1][1] == usual_count
    due = next(call for call in calls.values() if (call.op, call.bytes) == usual_call)
    minority = {}
    for rank, call in calls.items():
        if is_tie or (call.op, call.bytes) != usual_call:
            different = next(c for c in calls.values() if (c.op, c.bytes) != (call.op, call.bytes))
            sentence = (
                f"call {call.sequence} of {call.group} is {format_call(call)} here and {format_call(different)} on "
                "another member"
            )
            minority[rank] = Departure("mismatched collective", due, call, sentence=sentence)
    return minority
