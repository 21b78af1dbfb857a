"""Calls of another trainer in flight records, which have no steps: the skipped call, and the device that is stuck."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megascale.core.calls import Call, CallRecord, GroupCounts, PendingWait
from megascale.observe.hang.departure import find_departures
from megascale.observe.hang.flight import FlightDump, read_flight
from megascale.observe.hang.scene import RankEvidence, Scene
from megascale.observe.hang.verdict import explain_hang

# Letter -> group, operation and bytes.
KINDS = {"a": ("world", "all_reduce", 288), "b": ("world", "all_gather", 8), "c": ("metrics", "all_reduce", 8)}
KINDS |= {"d": ("world", "barrier", 0), "e": ("world", "broadcast", 40)}  # calls of a checkpoint


def make_record(rank: int, letters: str) -> CallRecord:
    counts: Counter[str] = Counter()
    calls = []
    for letter in letters:
        group, op, size = KINDS[letter]
        counts[group] += 1
        calls.append(Call(group, counts[group], op, size))
    groups = {group: GroupCounts(2, count, count - (group == calls[-1].group)) for group, count in counts.items()}
    waiting = PendingWait(calls[-1].group, calls[-1].sequence, 1)
    return CallRecord(rank, 0, 2, waiting=waiting, groups=groups, calls=tuple(calls), is_complete=False)


@given(
    start=st.text("abc", max_size=9),
    step=st.text("abc", min_size=1, max_size=7).filter(lambda step: len(set(step)) > 1),
    data=st.data(),
)
def test_of_two_ranks_the_one_that_skips_a_call_is_named(start, step, data):
    skipped = data.draw(st.integers(0, len(step) - 1))
    usual = step * 24
    # The other rank blocks in the skipped call, and the rank that skipped it in its next call of that group.
    blocked = start + usual + step[: skipped + 1]
    rest = (step[skipped + 1 :] + step * 2)[: len(step)]
    if rest[0] == step[skipped]:
        return  # the same call again cannot be told from the skipped one
    departed = find_departures(
        {0: make_record(0, blocked), 1: make_record(1, start + usual + step[:skipped] + rest[:1])}, None
    )
    assert set(departed) == {1}
    assert departed[1].due.op == KINDS[step[skipped]][1]


@given(
    step=st.text("abc", min_size=2, max_size=7).filter(lambda step: len(set(step)) > 1),
    saved=st.text("dea", min_size=1, max_size=12),
    steps_since=st.integers(0, 5),
    data=st.data(),
)
def test_a_checkpoint_of_all_ranks_is_not_taken_for_a_departure(step, saved, steps_since, data):
    skipped = data.draw(st.integers(0, len(step) - 1))
    if not set(saved) & set("de"):
        return  # nothing but calls of a step cannot be told from a step that is made twice
    usual = step * 24 + saved + step * steps_since
    rest = (step[skipped + 1 :] + step * 2)[: len(step)]
    if rest[0] == step[skipped]:
        return
    records = {0: make_record(0, usual + step[: skipped + 1]), 1: make_record(1, usual + step[:skipped] + rest[:1])}
    departed = set(find_departures(records, None))
    assert departed != {0}  # two calls of one group that differ name both ranks
    if "a" not in saved and steps_since:
        assert departed == {1}


def test_a_skipped_call_on_another_group_is_a_mismatch_and_not_a_cycle():
    records = {0: make_record(0, "ac" * 20), 1: make_record(1, "ac" * 19 + "aa")}
    scene = Scene({rank: RankEvidence(rank, "running", record=record) for rank, record in records.items()}, 2)
    hang = explain_hang(scene)
    assert (hang.kind, hang.ranks, hang.group) == ("mismatched collective", (1,), "metrics")


def test_ranks_in_their_usual_order_or_without_one_depart_from_nothing():
    assert find_departures({0: make_record(0, "aab" * 20), 1: make_record(1, "aab" * 19 + "aa")}, None) == {}
    assert find_departures({0: make_record(0, "ab" * 3), 1: make_record(1, "ab" * 2 + "a")}, None) == {}


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_that_begin_an_evaluation_are_not_accused_by_a_rank_that_does_not(world):
    """The last rank loops before the first call of the evaluation, which breaks the period of all others."""
    records = {rank: make_record(rank, "ab" * 24 + "c") for rank in range(world - 1)}
    late = make_record(world - 1, "ab" * 24)
    groups = {name: GroupCounts(world, counts.started, counts.started) for name, counts in late.groups.items()}
    records[world - 1] = replace(late, waiting=None, groups=groups)
    assert find_departures(records, None) == {}
    # On the usual group, the waiting ranks name the one that has not joined.
    for rank in range(world - 1):
        records[rank] = make_record(rank, "ab" * 24 + "aa")
    scene = Scene({rank: RankEvidence(rank, "running", record=record) for rank, record in records.items()}, world)
    hang = explain_hang(scene)
    assert (hang.kind, hang.ranks) == ("busy", (world - 1,))


def write_device_record(folder: Path, rank: int, states: list[str]) -> FlightDump:
    """Write and read the flight record of a rank on NCCL whose calls have these states."""
    entries = [
        {
            "process_group": ["0", "default_pg"],
            "profiling_name": "nccl:all_reduce",
            "collective_seq_id": number,
            "state": state,
            "retired": state == "completed",
            "time_created_ns": number,
            "time_discovered_started_ns": number if state != "scheduled" else None,
            "input_sizes": [[72]],
            "input_dtypes": ["Float"],
        }
        for number, state in enumerate(states, 1)
    ]
    file = folder / f"rank-{rank}.json"
    groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    file.write_text(json.dumps({"pg_config": groups, "entries": entries}))
    return read_flight(file)


def test_a_call_that_the_device_has_not_reached_is_not_joined(tmp_path):
    """Rank 1's host has launched the call too, but its device is in a kernel that does not end."""
    states = {0: ["completed"] * 5 + ["started"], 1: ["completed"] * 5 + ["scheduled"] * 2}
    flights = {rank: write_device_record(tmp_path, rank, states[rank]) for rank in states}
    scene = Scene(
        {rank: RankEvidence(rank, "running", flight=flight, own_pid=1) for rank, flight in flights.items()}, 2
    )
    hang = explain_hang(scene)
    assert (hang.kind, hang.ranks, hang.op, hang.sequence) == ("busy", (1,), "all_reduce", 6)


def test_the_larger_side_of_a_gather_exists_on_its_root_only(tmp_path):
    dumps = []
    for rank, outputs in enumerate(([[3, 8]], [])):
        entry = {"process_group": ["0", "default_pg"], "profiling_name": "gloo:gather", "collective_seq_id": 1}
        entry |= {"input_sizes": [[8]], "input_dtypes": ["Byte"], "output_sizes": outputs, "output_dtypes": ["Byte"]}
        file = tmp_path / f"rank-{rank}.json"
        file.write_text(json.dumps({"pg_config": {}, "entries": [entry]}))
        dumps.append(read_flight(file).record.calls[0])
    assert [(call.op, call.bytes) for call in dumps] == [("gather", 8)] * 2


def test_calls_without_start_times_are_joined_when_they_are_launched(tmp_path):
    flights = {rank: write_device_record(tmp_path, rank, ["scheduled"] * 2) for rank in range(2)}
    scene = Scene(
        {rank: RankEvidence(rank, "running", flight=flight, own_pid=1) for rank, flight in flights.items()}, 2
    )
    assert explain_hang(scene).kind == "network"
