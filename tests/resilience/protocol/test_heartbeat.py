"""Heartbeats: what is written is read back, and nothing else is read."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megascale.resilience.protocol.heartbeat import MAX_BYTES, GpuReport, Heartbeat, LogMatch, NetworkTraffic, Worker

counts = st.integers(0, 2**63 - 1)
numbers = st.floats(allow_nan=False, allow_infinity=False)
texts = st.text(max_size=50)
workers = st.builds(
    Worker,
    rank=counts,
    pid=counts,
    state=st.sampled_from(["running", "exited", "signalled"]),
    code=st.integers(-(2**31), 2**31),
    phase=texts,
    step=counts,
    action=texts,
    microbatch=st.integers(-1, 1000),
    status_age=numbers,
    message=texts,
    rss=counts,
    cpu_seconds=numbers,
    stderr_tail=texts,
    errno=counts,
    error=texts,
    ended_age=numbers,
    by_agent=st.booleans(),
)
logs = st.builds(LogMatch, rank=counts, pattern=texts, line=texts, age=numbers)
gpus = st.builds(
    GpuReport,
    index=counts,
    name=texts,
    temperature=numbers,
    power_watts=numbers,
    ecc_errors=counts,
    xid=counts,
    throttled=st.booleans(),
    recovery=texts,
)
rates = {f.name: numbers for f in fields(NetworkTraffic) if f.type == "float"}
traffic = st.builds(NetworkTraffic, interface=texts, errors=counts, samples=counts, **rates)
heartbeats = st.builds(
    Heartbeat,
    job=st.text(min_size=1, max_size=50),
    attempt=counts,
    node=st.text(min_size=1, max_size=50),
    sequence=counts,
    sent_ns=counts,
    address=texts,
    pod=texts,
    hardware=st.dictionaries(texts, texts, max_size=3),
    versions=st.dictionaries(texts, texts, max_size=3),
    workers=st.lists(workers, max_size=3).map(tuple),
    logs=st.lists(logs, max_size=3).map(tuple),
    gpus=st.lists(gpus, max_size=2).map(tuple),
    traffic=st.lists(traffic, max_size=2).map(tuple),
    checksums=st.dictionaries(texts, texts, max_size=3),
    step_seconds=st.dictionaries(st.integers(0, 10**8), numbers, max_size=3),
    disks=st.dictionaries(texts, numbers, max_size=3),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(heartbeats)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back(heartbeat):
    assert Heartbeat.from_json(heartbeat.to_json()) == heartbeat


@given(heartbeats, st.data())
@settings(max_examples=150, deadline=None)
def test_anything_put_in_place_of_a_field_is_read_as_that_type_or_refused(heartbeat, data):
    record = json.loads(heartbeat.to_json())
    where = record
    if record["workers"] and data.draw(st.booleans()):
        where = record["workers"][0]
    name = data.draw(st.sampled_from(sorted(where)))
    where[name] = data.draw(anything)
    try:
        found = Heartbeat.from_json(json.dumps(record))
    except ValueError as error:
        assert str(error)
    else:
        assert Heartbeat.from_json(found.to_json()) == found


@given(st.binary(max_size=300) | anything.map(lambda x: json.dumps(x).encode()))
@settings(max_examples=150, deadline=None)
def test_nothing_but_a_heartbeat_is_read(data):
    with pytest.raises(ValueError):
        Heartbeat.from_json(data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.update(attempt=True), "attempt"),
        (lambda r: r.update(attempt=-1), "attempt"),
        (lambda r: r.update(sequence=2**70), "sequence"),
        (lambda r: r.update(node=""), "node"),
        (lambda r: r.update(workers=[{}] * 300), "workers"),
        (lambda r: r.update(more=1), "fields"),
        (lambda r: r.pop("pod"), "fields"),
        (lambda r: r.update(step_seconds={"-1": 1.0}), "rank"),
    ],
)
def test_a_refusal_names_the_field(change, reason):
    record = json.loads(Heartbeat("job", 1, "n0", 1, 0).to_json())
    change(record)
    with pytest.raises(ValueError, match=reason):
        Heartbeat.from_json(json.dumps(record))


def test_size_depth_and_false_numbers_are_refused():
    good = Heartbeat("job", 1, "n0", 1, 0, step_seconds={3: 1.5}).to_json()
    with pytest.raises(ValueError, match="bytes"):
        Heartbeat.from_json(good + " " * MAX_BYTES)
    with pytest.raises(ValueError, match="NaN"):
        Heartbeat.from_json(good.replace("1.5", "NaN"))
    with pytest.raises(ValueError):
        Heartbeat.from_json("[" * 100_000)
