"""Memory of rounded reductions: what is received lies apart from what is kept, and in the buffer where it fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.parallel.collectives import SINGLE_RANK, Axis, Pending, _receive_buffer, all_reduce, can_exchange


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

    def waiting(self) -> str:
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
