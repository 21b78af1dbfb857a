"""Linear layers over an exchange: outputs and gradients of each rank are its parts of the undivided layer's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from typing import Any

import pytest
import torch

from megascale.core.calls import NullCallLog
from megascale.parallel.collectives import Axis
from megascale.parallel.exchange import Exchange
from megascale.parallel.linear_precision import LinearPrecision
from megascale.parallel.runtime import Runtime
from megascale.parallel.tensor import gather_linear, linear_scatter

ROWS, BATCH, HIDDEN, COLUMNS = 2, 3, 4, 5  # rows of each rank's part of the sequence, columns of each rank
SHARD_BYTES = 1 << 12


class EagerStreams:
    """Queues of one rank's thread that run at once; flags are shared with the threads of its peers."""

    def __init__(self, rank: int, flags: dict[tuple[int, int], int], changed: Condition) -> None:
        self._rank = rank
        self._flags = flags
        self._changed = changed

    def compute(self, work: Callable[[], Any], queue: str = "main") -> None:
        work()

    def copy(self, to: torch.Tensor, source: torch.Tensor, queue: str = "copy") -> None:
        to.copy_(source)

    def signal(self, peer: int, number: int) -> None:
        with self._changed:
            self._flags[peer, self._rank] = number
            self._changed.notify_all()

    def wait_for(self, peer: int, number: int) -> None:
        with self._changed:
            has_arrived = lambda: self._flags.get((self._rank, peer), 0) >= number
            assert self._changed.wait_for(has_arrived, timeout=30.0), f"rank {peer} has not signalled call {number}"

    def record_event(self, queue: str) -> None: ...

    def stream_wait(self, queue: str, event: object) -> None: ...

    def capture(self, on: bool) -> None: ...


def run_ranks(size: int, run: Callable[[Axis], Any]) -> list[Any]:
    """Return run(axis) of each rank, each in a thread, with an exchange between them."""
    memory = [torch.zeros(Exchange.bytes_needed(size, SHARD_BYTES), dtype=torch.uint8) for _ in range(size)]
    flags: dict[tuple[int, int], int] = {}
    changed = Condition()

    def run_rank(rank: int) -> Any:
        exchange = Exchange(rank, size, memory, SHARD_BYTES, EagerStreams(rank, flags, changed))
        return run(Axis(None, size, rank, overlap="fused", name="tensor", exchange=exchange, runtime=Runtime()))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run_rank, range(size)))


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def make_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_()


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("has_recompute", [False, True])
def test_a_gathered_product(size, has_recompute):
    recompute_fn = torch.sin if has_recompute else None
    x, weight, bias = (
        draw(size * ROWS, BATCH, HIDDEN, seed=1),
        draw(size * COLUMNS, HIDDEN, seed=2),
        draw(size * 5, seed=3),
    )
    dy = draw(size * ROWS, BATCH, size * COLUMNS, seed=4)

    def run(axis: Axis) -> list[torch.Tensor]:
        rank = axis.rank
        parts = [make_leaf(tensor.chunk(size)[rank]) for tensor in (x, weight, bias)]
        results = []
        for _ in range(3):  # both of the exchange's buffers are used again
            y = gather_linear(*parts, LinearPrecision(axis), recompute_fn)
            results = [y] + list(torch.autograd.grad(y, parts, dy.chunk(size, -1)[rank]))
        return results

    full = [make_leaf(tensor) for tensor in (x, weight, bias)]
    y = torch.nn.functional.linear(torch.sin(full[0]) if has_recompute else full[0], *full[1:])
    gradients = torch.autograd.grad(y, full, dy)
    for rank, results in enumerate(run_ranks(size, run)):
        torch.testing.assert_close(results[0], y.chunk(size, -1)[rank])
        for result, gradient in zip(results[1:], gradients, strict=True):
            torch.testing.assert_close(result, gradient.chunk(size)[rank])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_a_scattered_sum_of_products(size, count):
    """Of one GEMM, and of two whose sum is scattered once, as in a parallel block."""
    xs = [draw(size * ROWS, BATCH, size * COLUMNS, seed=i) for i in range(count)]
    weights = [draw(HIDDEN, size * COLUMNS, seed=10 + i) for i in range(count)]
    dy = draw(size * ROWS, BATCH, HIDDEN, seed=4)

    def run(axis: Axis) -> list[torch.Tensor]:
        rank = axis.rank
        parts = [make_leaf(t.chunk(size, -1)[rank]) for pair in zip(xs, weights, strict=True) for t in pair]
        results = []
        for _ in range(3):
            y = linear_scatter(LinearPrecision(axis), *parts)
            results = [y] + list(torch.autograd.grad(y, parts, dy.chunk(size)[rank]))
        return results

    full = [make_leaf(t) for pair in zip(xs, weights, strict=True) for t in pair]
    y = sum(torch.nn.functional.linear(x, weight) for x, weight in zip(full[0::2], full[1::2], strict=True))
    gradients = torch.autograd.grad(y, full, dy)
    for rank, results in enumerate(run_ranks(size, run)):
        torch.testing.assert_close(results[0], y.chunk(size)[rank])
        for result, gradient in zip(results[1:], gradients, strict=True):
            torch.testing.assert_close(result, gradient.chunk(size, -1)[rank])


class SizeLog(NullCallLog):
    """Keeps the operation and bytes of each call, and how many calls are in flight."""

    def __init__(self) -> None:
        self.sizes: list[tuple[str, int]] = []
        self.in_flight = 0

    def begin_call(self, group: str, op: str, size: int) -> int:
        assert group == "tensor"
        self.sizes.append((op, size))
        self.in_flight += 1
        return len(self.sizes)

    def end_call(self, call: int) -> None:
        self.in_flight -= 1


@pytest.mark.parametrize("size", [2, 3])
def test_calls_of_an_exchange_are_recorded_with_the_bytes_of_all_ranks(size):
    x, weight = draw(size * ROWS, BATCH, HIDDEN, seed=1), draw(size * COLUMNS, HIDDEN, seed=2)
    out_weight = draw(HIDDEN, size * COLUMNS, seed=3)

    def run(axis: Axis) -> SizeLog:
        rank = axis.rank
        log = SizeLog()
        axis.runtime.calls = log
        linears = LinearPrecision(axis)
        x_part, weight_part = make_leaf(x.chunk(size)[rank]), make_leaf(weight.chunk(size)[rank])
        y = gather_linear(x_part, weight_part, None, linears)
        z = linear_scatter(linears, y, make_leaf(out_weight.chunk(size, -1)[rank]))
        z.backward(torch.ones_like(z))
        return log

    full = x.nbytes  # of the hidden states of all ranks, whose parts are gathered and scattered
    for log in run_ranks(size, run):
        # Forward, then backward: the gradient is gathered, then the input again under the scatter of its gradient.
        operations = ["fused_gather", "fused_scatter", "fused_gather", "fused_gather", "fused_scatter"]
        assert log.sizes == [(operation, full) for operation in operations]
        assert log.in_flight == 0
