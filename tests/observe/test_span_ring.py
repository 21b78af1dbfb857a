"""The ring between a rank and the span service: nothing torn, nothing twice, nothing waits."""

from __future__ import annotations

import multiprocessing
import os

import numpy as np
import pytest

from megascale.observe.store.frames import HEAD_BYTES, ROLLUP, ROLLUPS, SPAN, SPANS, scan_frames
from megascale.observe.store.span_ring import SpanRing


def spans(count: int, value: int = 0) -> np.ndarray:
    records = np.zeros(count, SPAN)
    records["start_ns"] = value
    return records


def test_frames_go_round_the_end_of_the_ring():
    ring = SpanRing(rank=3, attempt=2, capacity=10_000)
    second = SpanRing(os.dup(ring.handle))
    assert (second.rank, second.attempt, second.identity) == (3, 2, ring.identity)
    observed = []
    for step in range(1, 200):
        ring.write(SPANS, step, spans(step % 40 + 1, step), 7)
        data = second.read()
        for head, body, _ in scan_frames(data):
            observed.append((head.number, head.step))
            assert np.frombuffer(body, SPAN)["start_ns"].tolist() == [step] * (step % 40 + 1)
            assert head.error_ns == 7
        second.release(len(data))
    assert observed == [(step, step) for step in range(1, 200)]
    assert ring.lost_spans == 0


def _write_many(ring: SpanRing, frames: int) -> None:
    rollup = np.zeros(1, ROLLUP)
    for step in range(1, frames + 1):
        ring.write(ROLLUPS, step, rollup, 0)


def test_two_processes_at_once_see_whole_numbers():
    """An end that is read while the other process writes it is the old one or the new one, never a part of it."""
    ring, frames = SpanRing(capacity=8 << 20), 40_000  # room for all: nothing is dropped however slow the reader is
    writer = multiprocessing.get_context("fork").Process(target=_write_many, args=(ring, frames))
    writer.start()
    steps: list[int] = []
    while alive := writer.is_alive() or ring.free_bytes() < 8 << 20:
        for _ in range(100 if alive else 1):
            data = ring.read()
            steps += [head.step for head, _, _ in scan_frames(data)]
            ring.release(len(data))
    writer.join(60)
    assert writer.exitcode == 0
    assert ring.lost_rollups == 0
    assert steps == list(range(1, frames + 1))


def test_what_was_not_taken_over_is_read_again():
    ring = SpanRing(capacity=10_000)
    ring.write(SPANS, 1, spans(2), 0)
    ring.write(SPANS, 2, spans(2), 0)
    (_, _, end), _ = scan_frames(ring.read())
    ring.release(end)
    repeated = SpanRing(os.dup(ring.handle))
    assert [head.step for head, _, _ in scan_frames(repeated.read())] == [2]


def test_full_it_drops_spans_first_and_counts_them():
    ring = SpanRing(capacity=8 * (HEAD_BYTES + 10 * SPAN.itemsize))
    for step in range(20):
        ring.write(SPANS, step, spans(10), 0)
    assert ring.lost_spans == 14 * 10  # a quarter is for roll-ups
    ring.write(ROLLUPS, 20, np.zeros(5, ROLLUP), 0)
    assert ring.lost_rollups == 0
    for _ in range(20):
        ring.write(ROLLUPS, 20, np.zeros(5, ROLLUP), 0)
    assert ring.lost_rollups > 0
    heads = [head for head, _, _ in scan_frames(ring.read())]
    assert [head.kind for head in heads][:7] == [SPANS] * 6 + [ROLLUPS]
    assert heads[6].lost == 140


def test_steps_are_asked_for_from_the_other_end():
    ring = SpanRing(capacity=4096)
    second = SpanRing(os.dup(ring.handle))
    assert not ring.is_requested(5)
    second.request_spans(5, 6)
    assert [step for step in range(10) if ring.is_requested(step)] == [5, 6]


def test_other_memory_is_refused():
    handle = os.memfd_create("other")
    with pytest.raises(ValueError, match="not a ring of spans"):
        SpanRing(handle)
    os.ftruncate(handle, 1 << 16)
    with pytest.raises(ValueError, match="not a ring of spans"):
        SpanRing(handle)
    os.close(handle)
    ring = SpanRing(capacity=4096)
    os.ftruncate(ring.handle, 1 << 16)
    with pytest.raises(ValueError, match="not a ring of spans"):
        SpanRing(os.dup(ring.handle))
