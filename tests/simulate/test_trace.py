"""Replay of recorded jobs: a job whose times are known by construction."""

from __future__ import annotations

from collections import Counter

import pytest

from megascale.core.replay import Graph, replay
from megascale.core.schedule import ActionKind, pipeline_schedule
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


def test_overlapped_collectives_stay_overlapped():
    """A gather that ran beside compute is not put behind it."""
    rows = [
        op("forward-compute", 0, 0.0, 5.0, 0),
        op("params-all-gather", 0, 1.0, 2.0, 0),
        op("forward-compute", 0, 5.0, 5.0, 1),
        op("optimizer", 0, 10.0, 1.0, 0),
    ]
    step = _step(0, rows)
    assert replay_step(step) == pytest.approx(11.0)
    assert replay_step(step, lambda o: 3.0 if o.kind == "params-all-gather" else o.own) == pytest.approx(11.0)


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
    """Two workers that wait for each other the wrong way round cannot be replayed, and that is said."""
    crossed = [
        op("forward-send", 0, 0.0, 1.0, 0),
        op("forward-send", 0, 1.0, 1.0, 1),
        op("forward-recv", 1, 0.0, 1.0, 1),
        op("forward-recv", 1, 1.0, 1.0, 0),
    ]
    with pytest.raises(DataError, match="cannot be replayed"):
        replay_step(_step(0, crossed))


def test_damaged_files_are_refused(tmp_path):
    pytest.importorskip("pyarrow")
    bad = tmp_path / "trace.parquet"
    bad.write_bytes(b"not a table")
    with pytest.raises(DataError, match="cannot be read"):
        read(bad)


@pytest.mark.parametrize(("stages", "virtual", "microbatches"), [(4, 1, 8), (4, 2, 8), (2, 3, 6)])
def test_a_recorded_overlapped_schedule_replays(stages, virtual, microbatches):
    """Record the project's own interleaved schedule with overlapped transfers, then replay the recording."""
    graph = Graph.of(pipeline_schedule(stages, virtual, microbatches))
    timeline = replay(graph, graph.durations(1.0, 2.0, 0.2, 0.2))
    names = {
        ActionKind.FORWARD: "forward-compute",
        ActionKind.BACKWARD: "backward-compute",
        ActionKind.SEND_FORWARD: "forward-send",
        ActionKind.RECV_FORWARD: "forward-recv",
        ActionKind.SEND_BACKWARD: "backward-send",
        ActionKind.RECV_BACKWARD: "backward-recv",
    }
    seen: Counter[tuple[str, int]] = Counter()
    rows = []
    for n in range(graph.actions):
        kind, stage = ActionKind(int(graph.kind[n])), int(graph.stage[n])
        if kind not in names:
            continue
        start, length = float(timeline.start[n]), float(timeline.end[n] - timeline.start[n])
        sequence = seen[(names[kind], stage)]
        seen[(names[kind], stage)] += 1
        batch, chunk = int(graph.microbatch[n]), int(graph.chunk[n])
        # A microsecond of launch delay keeps what starts together from being taken for one batch.
        start += 1e-5 * n / graph.actions
        rows.append(Operation(names[kind], 0, stage, 0, sequence, batch, start, length, stages, 0, chunk))
    step = _step(0, rows)
    assert replay_step(step) == pytest.approx(float(timeline.makespan), rel=1e-3)
    # Twice as slow everywhere is twice as long, launch gaps aside.
    assert replay_step(step, lambda o: 2 * o.own, gaps=False) == pytest.approx(2 * float(timeline.makespan), rel=0.01)
