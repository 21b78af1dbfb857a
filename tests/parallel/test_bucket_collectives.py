"""Collectives of buckets in one process: what is sent over which axis, when it starts, and when it is awaited."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megascale.core.batch import Batch
from megascale.parallel import data_parallel
from megascale.parallel.buffers import Axes, ParamAndGradBuffer
from megascale.parallel.collectives import Axis, Pending
from megascale.parallel.data_parallel import DataParallel
from tests.parallel.test_buffers import chunk

DATA, REDUCE, TIED = (Axis(None, 2, 1, name=name) for name in ("data", "reduce", "tied"))


@dataclass(frozen=True)
class Call:
    """A collective: its number, name, elements of the flat buffer, axis, and the time of its start."""

    number: int
    op: str
    start: int
    stop: int
    axis: str
    time: str


class Wire:
    """Collectives that copy nothing, and are in flight until they are awaited."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Call] = []
        self.in_flight: set[Call] = set()
        self.time = ""
        self._count = 0
        monkeypatch.setattr(data_parallel, "all_reduce", lambda x, axis: self._start("all_reduce", x, axis))
        for op in ("reduce_scatter_in_place", "reduce_scatter_rounded"):
            monkeypatch.setattr(data_parallel, op, self._make_scatter(op))
        monkeypatch.setattr(data_parallel, "all_gather_into", self._gather)

    def _start(self, op: str, x: torch.Tensor, axis: Axis) -> Pending:
        if axis.size == 1:
            return Pending(x)
        self._count += 1
        call = Call(self._count, op, x.storage_offset(), x.storage_offset() + x.numel(), axis.name, self.time)
        self.calls.append(call)
        self.in_flight.add(call)

        def finish() -> None:
            self.in_flight.discard(call)

        return Pending(x, finish=finish)

    def _make_scatter(self, op: str) -> Callable[..., Pending]:
        def scatter(buffer: torch.Tensor, axis: Axis, dtype: torch.dtype | None = None) -> Pending:
            assert dtype == (torch.bfloat16 if op == "reduce_scatter_rounded" else None)
            pending = self._start(op, buffer, axis)
            return Pending(buffer.view(2, -1)[axis.rank], finish=lambda: pending.wait().view(2, -1)[axis.rank])

        return scatter

    def _gather(self, out: torch.Tensor, shard: torch.Tensor, axis: Axis) -> Pending:
        assert shard.data_ptr() == out.view(2, -1)[axis.rank].data_ptr()
        assert shard.numel() * 2 == out.numel()
        return self._start("all_gather", out, axis)

    def take(self) -> list[Call]:
        """Return the calls since the last one of this method."""
        calls, self.calls = self.calls, []
        return calls


def make(wire: Wire, zero: int, tied: Axis | None = None, **options: Any) -> tuple[ParamAndGradBuffer, DataParallel]:
    axes = Axes(data=DATA, reduce=REDUCE) if tied is None else Axes(data=DATA, reduce=REDUCE, tied=tied)
    flat = ParamAndGradBuffer(chunk(Axis()), torch.device("cpu"), axes, zero, bucket_elements=300)
    for parameter in flat.parameters:
        torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(parameter.numel()))
    return flat, DataParallel([flat], **options)


def run_backward(wire: Wire, flat: ParamAndGradBuffer, data: DataParallel, is_armed: bool) -> None:
    tokens = torch.arange(8)[:, None]
    loss = flat.module(tokens, Batch(tokens, tokens)).sum()
    if is_armed:
        data.arm_reductions(0)
    data.begin_backward(0)
    wire.time = "backward"
    loss.backward()
    wire.time = "end"
    data.end_backward(0)
    wire.time = ""


def spans_of(flat: ParamAndGradBuffer) -> list[tuple[int, int]]:
    return [(span.start, span.stop) for span in flat.layout.buckets]


@pytest.mark.parametrize("reduce_dtype", [None, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero", [0, 1])
def test_each_bucket_is_reduced_once_after_its_last_gradient(monkeypatch, zero, overlap, reduce_dtype):
    wire = Wire(monkeypatch)
    flat, data = make(wire, zero, overlap=overlap, reduce_dtype=reduce_dtype)
    if zero == 0:
        expected = "all_reduce"  # of sums in their own type
    elif reduce_dtype == torch.bfloat16:
        expected = "reduce_scatter_rounded"
    else:
        expected = "reduce_scatter_in_place"
    for _ in range(3):
        data.begin_step()
        for micro_batch in range(2):
            is_armed = micro_batch == 1
            run_backward(wire, flat, data, is_armed)
            calls = wire.take()
            if not is_armed:
                assert calls == []
                continue
            assert sorted((call.start, call.stop) for call in calls) == spans_of(flat)
            assert {(call.op, call.axis) for call in calls} == {(expected, "reduce")}
            # The first micro-batch of all shows how many contributions each gradient has.
            assert {call.time for call in calls} == {"backward" if overlap else "end"}
            assert len(wire.in_flight) == (len(calls) if overlap else 0)
        data.finish_reductions()
        assert not wire.in_flight
        assert wire.take() == []


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_a_shard_holds_the_sum_of_a_step_and_of_no_other(monkeypatch, zero):
    wire = Wire(monkeypatch)
    flat, data = make(wire, zero)
    sums = []
    for micro_batches in (1, 2, 1):
        data.begin_step()
        for micro_batch in range(micro_batches):
            run_backward(wire, flat, data, zero == 2 or micro_batch == micro_batches - 1)
        data.finish_reductions()
        sums.append(torch.cat([shard.grads for shard in flat.shards]).clone())
    assert sums[0].any()
    torch.testing.assert_close(sums[1], 2 * sums[0])
    assert torch.equal(sums[2], sums[0])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_tied_embedding_is_summed_over_its_stages_last(monkeypatch, overlap):
    wire = Wire(monkeypatch)
    flat, data = make(wire, 1, tied=TIED, overlap=overlap)
    assert flat.layout.tied_bucket is not None
    shard = flat.shards[flat.layout.tied_bucket].grads
    for _ in range(2):
        data.begin_step()
        run_backward(wire, flat, data, True)
        wire.take()
        data.finish_reductions()
        [call] = wire.take()
        first = shard.storage_offset()
        assert (call.op, call.axis, call.start, call.stop) == ("all_reduce", "tied", first, first + shard.numel())
        assert len(wire.in_flight) == int(overlap)
        data.finish_tied()
        assert not wire.in_flight


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2])
def test_each_bucket_is_gathered_once_in_the_order_of_its_use(monkeypatch, zero, overlap):
    wire = Wire(monkeypatch)
    flat, data = make(wire, zero, overlap=overlap)
    data.start_gather(0)
    calls = wire.take()
    if zero == 0:
        assert calls == []
        assert not data.is_gathering(0)
        return
    spans = spans_of(flat)
    assert [(call.start, call.stop) for call in calls] == [spans[bucket] for bucket in flat.forward_order]
    assert {(call.op, call.axis) for call in calls} == {("all_gather", "data")}
    assert data.is_gathering(0) == overlap
    assert len(wire.in_flight) == (len(calls) if overlap else 0)
    if overlap:
        data.start_gather(0)  # it is in flight
        assert wire.take() == []
    data.await_parameters(0)
    assert len(wire.in_flight) == (len(calls) if overlap else 0)  # the module awaits its units
    data.finish_gathers()
    assert not wire.in_flight
    assert not data.is_gathering(0)
    data.gather_full_parameters()
    assert len(wire.take()) == len(spans)
    assert not wire.in_flight
    (weights,) = data.list_weights_in_use()
    assert weights is flat.params


@pytest.mark.parametrize("overlap", [True, False])
def test_updated_shards_are_gathered_at_once_if_that_is_asked_for(monkeypatch, overlap):
    wire = Wire(monkeypatch)
    flat, data = make(wire, 1, overlap=overlap)
    on_shard_updated = data.gather_under_update(0)
    for bucket in flat.forward_order:
        on_shard_updated(flat.shards[bucket])
        spans = [(call.start, call.stop) for call in wire.take()]
        assert spans == ([spans_of(flat)[bucket]] if overlap else [])
    second_chunk, _ = make(wire, 1)
    on_shard_updated(second_chunk.shards[0])
    data.end_update()
    assert wire.take() == []
    data.start_gather(0)
    assert len(wire.take()) == (0 if overlap else len(flat.shards))
    data.invalidate_gathered()
    assert not wire.in_flight


def test_a_single_rank_sends_nothing(monkeypatch):
    wire = Wire(monkeypatch)
    flat = ParamAndGradBuffer(chunk(Axis()), torch.device("cpu"), zero=2)
    assert flat.zero == 1  # there is nothing to shard
    data = DataParallel([flat])
    data.start_gather(0)
    assert wire.take() == []
