"""Collectives by a backend without a network: results, records, waits, and the memory of rounded reductions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.core.calls import NullCallLog
from megascale.parallel import collectives
from megascale.parallel.collectives import SINGLE_RANK, Axis, Pending, _receive_buffer, all_reduce, can_exchange
from megascale.parallel.runtime import Runtime


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float32])
def test_received_parts_never_lie_on_the_slice_that_is_kept(size, wide, narrow):
    shard = 6
    buffer = torch.arange(size * shard, dtype=wide)
    half = buffer.nbytes // 2
    for rank in range(size):
        part = buffer.view(size, -1)[rank]
        before = part.clone()
        received = _receive_buffer(buffer, Axis(size=size, rank=rank), narrow)
        assert (received.numel(), received.dtype) == (buffer.numel(), narrow)
        shares_memory = received.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        first, stop = rank * part.nbytes, (rank + 1) * part.nbytes
        fits = received.nbytes == half and (stop <= half or first >= half)
        assert shares_memory == fits
        received.fill_(-1)
        assert torch.equal(part, before)


class Log(list[str]):
    """The work of a collective and the record of its transfer, in the order of their calls."""

    def wait(self) -> None:
        self.append("wait")

    def begin_wait(self) -> str:
        self.append("waiting")
        return "mark"

    def done(self, mark: str = "") -> None:
        self.append(f"done {mark}".strip())

    def finish(self) -> torch.Tensor | None:
        self.append("finish")
        return None


@pytest.mark.parametrize(
    ("has_work", "has_transfer", "has_finish", "expected"),
    [
        (True, True, False, ["waiting", "wait", "done mark"]),
        (True, True, True, ["waiting", "wait", "done mark", "finish"]),
        (True, False, True, ["wait", "finish"]),
        (False, True, True, ["finish", "done"]),
        (False, True, False, ["done"]),
        (False, False, False, []),
    ],
)
def test_a_wait_is_recorded_around_the_work_and_happens_once(
    has_work: bool, has_transfer: bool, has_finish: bool, expected: list[str]
) -> None:
    log = Log()
    result = torch.zeros(1)
    transfer: Any = log if has_transfer else None
    pending = Pending(result, log if has_work else None, transfer, log.finish if has_finish else None)
    for _ in range(2):
        assert pending.wait() is result
        assert log == expected


def test_the_end_of_a_collective_may_make_another_result() -> None:
    replacement = torch.ones(1)
    pending = Pending(torch.zeros(1), finish=lambda: replacement)
    assert pending.wait() is pending.wait() is replacement


def test_a_single_rank_keeps_its_tensor() -> None:
    x = torch.ones(2)
    assert all_reduce(x, SINGLE_RANK).wait() is x


@pytest.mark.parametrize(
    ("size", "shard_bytes", "nbytes", "expected"),
    [(2, 8, 8, True), (2, 8, 9, False), (2, None, 8, False), (1, 8, 8, False)],
)
def test_an_exchange_takes_shards_up_to_its_size(
    size: int, shard_bytes: int | None, nbytes: int, expected: bool
) -> None:
    exchange: Any = None if shard_bytes is None else SimpleNamespace(shard_bytes=shard_bytes)
    assert can_exchange(Axis(size=size, exchange=exchange), nbytes) == expected


class CallSizes(NullCallLog):
    """Keeps the operation and bytes of each call that begins."""

    def __init__(self) -> None:
        self.sizes: list[tuple[str, int]] = []

    def begin_call(self, group: str, op: str, size: int) -> int:
        assert group == "axis"
        self.sizes.append((op, size))
        return 0


class Backend:
    """torch's collectives on the second of two ranks, whose peer has twice the values; each returns its work."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.awaited = 0
        monkeypatch.setattr(collectives, "_all_gather", self.all_gather)
        monkeypatch.setattr(collectives, "_reduce_scatter", self.reduce_scatter)
        monkeypatch.setattr(collectives.dist, "all_reduce", self.all_reduce)
        monkeypatch.setattr(collectives.dist, "all_to_all_single", self.all_to_all)

    def wait(self) -> None:
        self.awaited += 1

    def all_gather(self, out: torch.Tensor, x: torch.Tensor, group: object, async_op: bool) -> Backend:
        assert (group, async_op) == ("group", True)
        out.copy_(torch.cat([2 * x, x]))
        return self

    def reduce_scatter(self, out: torch.Tensor, x: torch.Tensor, group: object, async_op: bool) -> Backend:
        assert (group, async_op) == ("group", True)
        out.copy_(3 * x.view(2, -1)[1].view(out.shape))
        return self

    def all_reduce(self, x: torch.Tensor, op: object, group: object, async_op: bool) -> Backend:
        assert (group, async_op) == ("group", True)
        x.mul_(3 if op == collectives.dist.ReduceOp.SUM else 2)
        return self

    def all_to_all(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        receive: list[int] | None = None,
        send: list[int] | None = None,
        *,
        group: object,
        async_op: bool,
    ) -> Backend:
        assert (group, async_op) == ("group", True)
        own = x.flatten()[-send[1] :] if send else x.view(2, -1)[1]
        assert receive is None or out.numel() == sum(receive)
        peer = 2 * x.view(2, -1)[1] if receive is None else torch.full((receive[0],), 2.0).to(x.dtype)
        out.copy_(torch.cat([peer, own]).view(out.shape))
        return self


@pytest.fixture
def axis(monkeypatch: pytest.MonkeyPatch) -> Axis:
    axis = Axis("group", size=2, rank=1, name="axis", runtime=Runtime())
    axis.runtime.calls = CallSizes()
    return axis


def test_collectives_start_at_once_and_are_recorded_with_their_bytes(axis: Axis, monkeypatch: Any) -> None:
    backend = Backend(monkeypatch)
    x = torch.arange(12.0).view(4, 3)
    maximum = collectives.dist.ReduceOp.MAX
    started = [
        (collectives.all_gather(x, axis), torch.cat([2 * x, x]), ("all_gather", 96)),
        (collectives.all_gather(x.t(), axis), torch.cat([2 * x.t(), x.t()]), ("all_gather", 96)),
        (collectives.reduce_scatter(x, axis), 3 * x[2:], ("reduce_scatter", 48)),
        (all_reduce(x.clone(), axis), 3 * x, ("all_reduce", 48)),
        (all_reduce(x.clone(), axis, maximum, "max"), 2 * x, ("max", 48)),
        (collectives.all_gather_into(torch.zeros(8, 3), x, axis), torch.cat([2 * x, x]), ("all_gather", 96)),
        (collectives.reduce_scatter_in_place(x.flatten().clone(), axis), 3 * x[2:].flatten(), ("reduce_scatter", 48)),
        (collectives.all_to_all_parts(x, axis), torch.cat([2 * x[2:], x[2:]]), ("all_to_all", 48)),
        (
            collectives.all_to_all(x.flatten(), [5, 7], [3, 7], axis, 20),
            torch.cat([torch.full((3,), 2.0), x.flatten()[5:]]),
            ("all_to_all", 80),
        ),
    ]
    assert backend.awaited == 0
    calls: Any = axis.runtime.calls
    assert calls.sizes == [size for _, _, size in started]
    for number, (pending, expected, _) in enumerate(started, 1):
        assert torch.equal(pending.wait(), expected)
        assert backend.awaited == number


def test_a_rounded_reduction_adds_the_peers_parts_to_its_own(axis: Axis, monkeypatch: Any) -> None:
    """Its own part keeps its type; here each peer's part is twice the own one, rounded to bfloat16."""
    backend = Backend(monkeypatch)
    values = torch.tensor([5.0, 6.0, 1.0 + 2**-12, 3.0])
    pending = collectives.reduce_scatter_rounded(values.clone(), axis, torch.bfloat16)
    calls: Any = axis.runtime.calls
    assert (calls.sizes, backend.awaited) == ([("all_to_all", 8)], 0)
    assert pending.wait().tolist() == [3.0 + 2**-12, 9.0]
    assert backend.awaited == 1


def test_rows_that_do_not_divide_are_refused(axis: Axis) -> None:
    with pytest.raises(ValueError, match="over 2 ranks cannot divide 3 rows"):
        collectives.all_to_all_parts(torch.zeros(3, 2), axis)
