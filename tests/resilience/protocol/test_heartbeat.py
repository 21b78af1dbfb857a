"""Heartbeats: what is written is read back, and nothing else is read."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields

from megascale.core.exit_record import ExitKind, ExitRecord
from megascale.resilience.protocol.agent_messages import FROM_AGENT
from megascale.resilience.protocol.heartbeat import GpuReport, Heartbeat, LogMatch, NetworkTraffic, Worker, truncate
from megascale.services.framing import ProtocolError
from megascale.services.messages import Finite

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
    exit=st.builds(ExitRecord, kind=st.sampled_from(ExitKind), rank=st.integers(-1, 9), subject=st.text(max_size=200)),
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
rates = {f.name: numbers for f in fields(NetworkTraffic) if f.type == Finite}
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


@given(heartbeats)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read_back(heartbeat):
    assert FROM_AGENT.decode(FROM_AGENT.encode(heartbeat)) == heartbeat


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=10)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)


@given(heartbeats, st.data())
@settings(max_examples=150, deadline=None)
def test_anything_put_in_place_of_a_field_is_read_as_that_type_or_refused(heartbeat, data):
    record = msgspec.msgpack.decode(FROM_AGENT.encode(heartbeat))
    where = record
    if record.get("workers") and data.draw(st.booleans()):
        where = record["workers"][0]
    name = data.draw(st.sampled_from(sorted(where)))
    where[name] = data.draw(anything)
    try:
        result = FROM_AGENT.decode(msgspec.msgpack.encode(record))
    except ProtocolError as error:
        assert str(error)
    else:
        assert FROM_AGENT.decode(FROM_AGENT.encode(result)) == result


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda r: r.update(attempt=True), "attempt"),
        (lambda r: r.update(attempt=-1), "attempt"),
        (lambda r: r.update(sequence=2**63), "sequence"),
        (lambda r: r.update(node=""), "node"),
        (lambda r: r.update(workers=[{}] * 300), "workers"),
        (lambda r: r.update(workers=[{"rank": 0, "pid": 1, "state": "asleep"}]), r"workers\[0\].state"),
        (lambda r: r.update(workers=[{"rank": 0, "pid": 1, "state": "running", "message": "x" * 2001}]), "message"),
        (lambda r: r.update(more=1), "unknown field `more`"),
        (lambda r: r.pop("node"), "missing required field `node`"),
        (lambda r: r.update(step_seconds={-1: 1.0}), "step_seconds"),
        (lambda r: r.update(step_seconds={3: math.nan}), "step_seconds"),
        (lambda r: r.update(step_seconds={3: math.inf}), "step_seconds"),
        (lambda r: r.update(disks={"/": -math.inf}), "disks"),
        (lambda r: r.update(do="order"), "do"),
    ],
)
def test_a_refusal_names_the_field(change, reason):
    record = msgspec.msgpack.decode(FROM_AGENT.encode(Heartbeat("job", 1, "n0", 1, 0)))
    change(record)
    with pytest.raises(ProtocolError, match=reason):
        FROM_AGENT.decode(msgspec.msgpack.encode(record))


def test_what_the_driver_would_refuse_is_not_sent():
    with pytest.raises(ValueError, match="step_seconds"):
        FROM_AGENT.encode(Heartbeat("job", 1, "n0", 1, 0, step_seconds={3: math.nan}))
    with pytest.raises(ValueError, match="bytes"):
        FROM_AGENT.encode(
            Heartbeat("job", 1, "n0", 1, 0, logs=tuple(LogMatch(0, "x", "\u20ac" * 2000) for _ in range(256)))
        )


def test_names_are_kept_once():
    beat = Heartbeat(
        "job", 1, "n0", 1, 0, workers=(Worker(0, 1, "running", phase="train"),), traffic=(NetworkTraffic("mlx5_0"),)
    )
    data = FROM_AGENT.encode(beat)
    first, second = FROM_AGENT.decode(data), FROM_AGENT.decode(data)
    assert first.workers[0].phase is second.workers[0].phase
    assert first.traffic[0].interface is second.traffic[0].interface
    assert first.node is second.node


def test_text_that_is_none_is_fitted():
    """Names of files, and so error messages, may hold bytes that are not UTF-8."""
    worker = Worker(
        0, 1, "exited", 1, error=truncate("OSError: no such file " + b"\xff".decode(errors="surrogateescape"))
    )
    assert FROM_AGENT.decode(FROM_AGENT.encode(Heartbeat("job", 1, "n0", 1, 0, workers=(worker,)))).workers == (worker,)
