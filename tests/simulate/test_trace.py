"""Replay of recorded jobs: a job whose times are known by construction."""

from __future__ import annotations

import pytest

from megascale.errors import DataError
from megascale.simulate.trace import Operation, _step, read, replay_step, what_if

F, B, C = 1.0, 2.0, 0.1


def op(kind, stage, start, duration, sequence=0, replica=0, step=0):
    return Operation(kind, replica, stage, step, sequence, sequence, start, duration, 2)


def job(slow: float = 1.0, step: int = 0):
    """Two stages, two micro-batches, 1F1B with blocking exchanges; stage 1 computes `slow` times as long."""
    f1, b1 = F * slow, B * slow
    rows = []
    # stage 0: F0, send, F1, [send + receive gradient 0], B0, receive gradient 1, B1
    t = 0.0
    rows.append(op("forward-compute", 0, t, F, 0))
    t += F
    rows.append(op("forward-send", 0, t, C, 0))
    rows.append(op("forward-recv", 1, 0.0, t + C, 0))
    f0_at_1 = t + C
    t += C
    rows.append(op("forward-compute", 0, t, F, 1))
    t += F
    b0_at_1 = f0_at_1 + f1
    end_b0 = b0_at_1 + b1
    exchange = max(t, end_b0)
    rows.append(op("forward-send", 0, t, exchange + C - t, 1))
    rows.append(op("backward-recv", 0, t, exchange + C - t, 0))
    rows.append(op("forward-compute", 1, f0_at_1, f1, 0))
    rows.append(op("backward-compute", 1, b0_at_1, b1, 0))
    rows.append(op("forward-recv", 1, end_b0, exchange + C - end_b0, 1))
    rows.append(op("backward-send", 1, end_b0, exchange + C - end_b0, 0))
    at = exchange + C
    rows.append(op("backward-compute", 0, at, B, 0))
    rows.append(op("forward-compute", 1, at, f1, 1))
    rows.append(op("backward-compute", 1, at + f1, b1, 1))
    sent = at + f1 + b1
    ready = max(at + B, sent)
    rows.append(op("backward-recv", 0, at + B, ready + C - at - B, 1))
    rows.append(op("backward-send", 1, sent, ready + C - sent, 1))
    rows.append(op("backward-compute", 0, ready + C, B, 1))
    return _step(step, [o.__class__(**{**vars(o), "step": step}) for o in rows]), ready + C + B


@pytest.mark.parametrize("slow", [1.0, 1.7])
def test_replay_gives_the_recorded_step(slow):
    step, length = job(slow)
    assert step.recorded == pytest.approx(length)
    assert replay_step(step) == pytest.approx(length)
    assert replay_step(step, gaps=False) == pytest.approx(length)


def test_transfers_take_their_own_time_not_their_wait():
    step, _ = job(1.7)
    waits = [o for items in step.workers.values() for i in items for o in i.operations if "send" in o.kind]
    assert all(o.own == pytest.approx(C) for o in waits)


def test_faster_operations_never_lengthen_the_step():
    step, length = job(1.5)
    assert replay_step(step, lambda o: 0.5 * o.own) == pytest.approx(0.5 * length, rel=1e-9)
    assert replay_step(step, lambda o: o.own * (0.5 if o.stage == 1 else 1.0)) < length


def test_what_if_finds_the_slow_stage():
    result = what_if([job(1.5, n)[0] for n in range(3)])
    assert result.replayed == pytest.approx(result.recorded)
    assert result.slow_down > 1.0
    assert result.by_stage[1] > result.by_stage[0]
    assert result.without_stage[1] < result.without_stage[0]


def test_a_lost_side_is_an_error():
    step, _ = job()
    workers = {w: items for w, items in step.workers.items() if w[1] == 0}
    # Without stage 1, stage 0's exchanges have one member: they run alone, which is a shorter, possible job.
    assert replay_step(step.__class__(0, workers, step.recorded)) > 0


def test_damaged_files_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    bad = tmp_path / "trace.parquet"
    bad.write_bytes(b"not a table")
    with pytest.raises(DataError, match="cannot be read"):
        read(bad)
