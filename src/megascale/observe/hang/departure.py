"""Which rank's calls are not those that were due: from its schedule, its siblings, its own step before.

Ranks of one pipeline stage make the same calls in the same order, and every step repeats the one before, so the first
call that differs tells who left the common road, also between two ranks of whom each blames the other. A step in which
micro-batches are captured (parallel/chunk_graphs.py) begins a new order: only how often calls come is compared then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from megascale.core.calls import Call, CallRecord
from megascale.core.layout import Layout
from megascale.core.schedule import Action


@dataclass(frozen=True)
class Departure:
    """A rank left the common road.

    Attributes:
        kind: "missing send", "missing call" or "mismatched collective".
        due: the call that was due, numbered as its group's members count it.
        made: what the rank did instead, None if it went past a transfer.
        sentence: how it is known.
    """

    kind: str
    due: Call
    made: Call | None
    sentence: str


# Made once for each capture: no habit.
_ONCE = frozenset({"agree_on_capture"})
_REPLAYS = frozenset({"replayed_forward", "replayed_backward"})


def departures(records: Mapping[int, CallRecord], layout: Layout | None, ahead: int = 0) -> dict[int, Departure]:
    """The ranks that departed in their present step. Of ranks that only follow a departed one none is named.

    ahead: steps that hosts may have launched since (on devices): the earliest is looked at first.
    """
    clashes = _clashes(records)
    for steps_ago in range(ahead, -1, -1):
        found = _departed_in(records, layout, steps_ago)
        if found:
            return found
    return _minority(clashes[0], records) if clashes else {}


def _departed_in(records: Mapping[int, CallRecord], layout: Layout | None, steps_ago: int) -> dict[int, Departure]:
    """Those that departed in the step so many before their present one."""
    found: dict[int, Departure] = {}
    if layout is not None:
        for rank, record in records.items():
            skipped = _skipped_transfer(rank, record, layout, steps_ago)
            if skipped is not None:
                found[rank] = skipped
    if found:
        return found
    for rank in sorted(records):
        record = records[rank]
        step = record.step - steps_ago
        departed = _against_siblings(rank, records, layout, step)
        departed = departed or _against_habit(record, step) or _one_too_many(record, step)
        if departed is not None:
            found[rank] = departed
    return found


# a transfer that the schedule lists and the rank went past ------------------------------------------------------


def _skipped_transfer(rank: int, record: CallRecord, layout: Layout, steps_ago: int) -> Departure | None:
    step = record.step - steps_ago
    if layout.grid.pipeline == 1 or not 0 <= rank < layout.grid.world_size or step < 1:
        return None
    if not steps_ago and record.action in ("", "kernels", "evaluate"):
        return None
    stage = layout.grid.coordinate(rank).pipeline
    schedule = layout.schedule()
    actions = schedule[stage]
    passed = actions[: record.index] if record.index >= 0 and not steps_ago else actions
    made = {(c.group.partition("/")[0], c.op, c.chunk, c.microbatch) for c in record.calls if c.step == step}
    if not made or not _reaches_back(record, step):
        return None
    for action in passed:
        if not (action.kind.is_send or action.kind.is_receive):
            continue
        direction = schedule.channel(stage, action).direction
        op = "send" if action.kind.is_send else "recv"
        if (direction, op, action.chunk, action.microbatch) in made:
            continue
        group = _channel_name(direction, op, rank, stage, action, layout)
        counts = record.groups.get(group)
        sequence = _number(passed, action, record, group) if counts is None else counts.started + 1
        due = Call(group, sequence, op, 0, step, action.chunk, action.microbatch)
        kind = "missing send" if action.kind.is_send else "missing call"
        sentence = f"it went past {action} of step {step} without starting it"
        if not steps_ago:
            sentence += f"; its schedule lists it before {record.action}"
            sentence += f" of micro-batch {record.microbatch}" if record.microbatch >= 0 else ""
        return Departure(kind, due, None, sentence)
    return None


def _channel_name(direction: str, op: str, rank: int, stage: int, action: Action, layout: Layout) -> str:
    grid = layout.grid
    at = grid.coordinate(rank)
    channel = layout.schedule().channel(stage, action)
    ends = [grid.rank(type(at)(s, at.data, at.tensor)) for s in (channel.source, channel.target)]
    return f"{direction}/{ends[0]}-{ends[1]}"


def _number(passed: Sequence[Action], action: Action, record: CallRecord, group: str) -> int:
    same = [a for a in passed if a.kind == action.kind]
    return sum(1 for c in record.calls if c.group == group) + same.index(action) + 1


# against siblings and against the step before ------------------------------------------------------------------


def _signature(call: Call) -> tuple[str, str, int, int, int]:
    return call.group.partition("/")[0], call.op, call.bytes, call.chunk, call.microbatch


def _of_step(record: CallRecord, step: int) -> list[Call]:
    return [c for c in record.calls if c.step == step and c.op not in _ONCE]


def _captures(record: CallRecord, step: int) -> bool:
    return any(c.step == step and c.op in _ONCE for c in record.calls)


def _reaches_back(record: CallRecord, step: int) -> bool:
    """Whether all calls of `step` are still known."""
    return record.is_complete or any(c.step < step for c in record.calls)


def _first_difference(mine: Sequence[Call], theirs: Sequence[Call]) -> int | None:
    for i, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if _signature(a) != _signature(b):
            return i
    return None


def _against_siblings(
    rank: int, records: Mapping[int, CallRecord], layout: Layout | None, step: int
) -> Departure | None:
    """Where most ranks of the same stage agree and this one does not."""
    if layout is None or rank >= layout.grid.world_size:
        return None
    record = records[rank]
    siblings = [r for r in layout.grid.group(("tensor", "data"), rank) if r != rank and r in records]
    siblings = [r for r in siblings if records[r].step == record.step and _reaches_back(records[r], step)]
    if len(siblings) < 2 or not _reaches_back(record, step):
        return None
    mine = _of_step(record, step)
    differing = {r: _first_difference(mine, _of_step(records[r], step)) for r in siblings}
    against = [r for r, i in differing.items() if i is not None]
    if len(against) <= len(siblings) / 2:
        return None
    first = min(i for i in differing.values() if i is not None)
    witness = next(r for r, i in differing.items() if i == first)
    due = _of_step(records[witness], step)[first]
    return _departed(due, mine, first, record, step, f"while rank {witness} and {len(against) - 1} others of its stage")


def _against_habit(record: CallRecord, step: int) -> Departure | None:
    """Where a step's calls leave the order of the rank's own step before."""
    before = step - 1
    # A process's first step learns which gradients are complete when, so its calls come in another order.
    if not any(c.step < before for c in record.calls) or _captures(record, step):
        return None
    mine, theirs = _of_step(record, step), _of_step(record, before)
    first = _first_difference(mine, theirs)
    if first is None:
        return None
    return _departed(theirs[first], mine, first, record, step, f"while in step {before} it")


def _one_too_many(record: CallRecord, step: int) -> Departure | None:
    """Where the order may differ from the step before, a call more of a sort than that step made: in a process's second
    step, and in one that captures, where calls may only become fewer."""
    before = step - 1
    first_step = record.is_complete and not any(c.step < before for c in record.calls)
    if not (first_step or _captures(record, step)) or not _reaches_back(record, before) or not _of_step(record, before):
        return None
    usual = Counter(_sort(c) for c in _of_step(record, before))
    mine = [c for c in _of_step(record, step) if c.op not in _REPLAYS]
    seen: Counter[tuple[str, str, int]] = Counter()
    for call in mine:
        seen[_sort(call)] += 1
        if seen[_sort(call)] > usual[_sort(call)]:
            left = [c for c in _of_step(record, before) if usual[_sort(c)] > sum(_sort(c) == _sort(m) for m in mine)]
            due = replace(left[-1], sequence=record.groups[left[-1].group].started + 1) if left else call
            times = f"{_times(seen[_sort(call)])} in step {step}, {_times(usual[_sort(call)])} in step {before}"
            return Departure("mismatched collective", due, call, f"it made {_say(call)} {times}")
    return None


def _sort(call: Call) -> tuple[str, str, int]:
    return call.group, call.op, call.bytes


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def _departed(due: Call, mine: Sequence[Call], at: int, record: CallRecord, step: int, who: str) -> Departure:
    made = mine[at]
    later = [_signature(c) for c in mine[at:]]
    kind = "mismatched collective"
    if due.op in ("send", "recv") and _signature(due) not in later:
        kind = "missing send" if due.op == "send" else "missing call"
    # The call that was due, in this rank's group of that kind, with the number it would have had.
    prefix = due.group.partition("/")[0]
    group = next(
        (g for g in record.groups if g.partition("/")[0] == prefix and _same_channel(g, due, record)), due.group
    )
    earlier = [c for c in mine[:at] if c.group == group]
    after = next((c for c in mine[at:] if c.group == group), None)
    if after is not None:
        sequence = after.sequence
    elif earlier:
        sequence = earlier[-1].sequence + 1
    else:
        sequence = record.groups[group].started + 1 if group in record.groups else due.sequence
    sentence = f"call {at + 1} of its step {step} was {_say(made)} {who} made {_say(due)} there"
    due = Call(group, sequence, due.op, due.bytes, step, due.chunk, due.microbatch)
    return Departure(kind, due, made, sentence)


def _same_channel(group: str, due: Call, record: CallRecord) -> bool:
    """A stage has two P2P channels of a direction: the one it sends on begins with its own rank."""
    if due.op not in ("send", "recv"):
        return True
    source = group.partition("/")[2].partition("-")[0]
    return (source == str(record.rank)) == (due.op == "send")


def _say(call: Call) -> str:
    return f"{call.op} of {call.bytes} bytes on {call.group}"


# when nothing else tells -----------------------------------------------------------------------------------------


def _clashes(records: Mapping[int, CallRecord]) -> list[dict[int, Call]]:
    """Calls of one number and group that differ between its members, the oldest first: rank -> its call."""
    found = []
    names = sorted({g for record in records.values() for g in record.groups})
    for name in names:
        by_number: dict[int, dict[int, Call]] = {}
        for rank, record in records.items():
            for call in record.calls:
                if call.group == name:
                    by_number.setdefault(call.sequence, {})[rank] = call
        for number in sorted(by_number):
            made = by_number[number]
            kinds = {("transfer" if c.op in ("send", "recv") else c.op, c.bytes) for c in made.values()}
            if len(kinds) > 1:
                found.append(made)
                break
    return found


def _minority(made: Mapping[int, Call], records: Mapping[int, CallRecord]) -> dict[int, Departure]:
    """Those who differ from most; all members where there is no majority."""
    votes = Counter((c.op, c.bytes) for c in made.values())
    (usual, count), *others = votes.most_common()
    tie = bool(others) and others[0][1] == count
    due = next(c for c in made.values() if (c.op, c.bytes) == usual)
    found = {}
    for rank, call in made.items():
        if tie or (call.op, call.bytes) != usual:
            other = next(c for c in made.values() if (c.op, c.bytes) != (call.op, call.bytes))
            text = f"call {call.sequence} of {call.group} is {_say(call)} here and {_say(other)} on another member"
            found[rank] = Departure("mismatched collective", due, call, text)
    return found
