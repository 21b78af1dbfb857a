"""Linear layers over an exchange: outputs and gradients of each rank are its parts of the undivided layer's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Condition
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megascale.core.calls import NullCallLog
from megascale.ops.linear import Operand
from megascale.parallel import column_norm, vocabulary
from megascale.parallel import tensor as tensor_module
from megascale.parallel.collectives import Axis, Pending, all_reduce_small, exchange_gather
from megascale.parallel.column_norm import rms_norm_columns
from megascale.parallel.exchange import Exchange
from megascale.parallel.exchange_buffers import count_buffer_bytes
from megascale.parallel.linear_precision import LinearPrecision
from megascale.parallel.runtime import Runtime
from megascale.parallel.tensor import gather_linear, linear_scatter
from megascale.parallel.vocabulary import vocabulary_embedding, vocabulary_logits, vocabulary_loss

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

    def signal(self, peer: int, number: int, queue: str = "copy") -> None:
        with self._changed:
            self._flags[peer, self._rank] = number
            self._changed.notify_all()

    def wait_for(self, peer: int, number: int, queue: str = "copy") -> None:
        with self._changed:
            has_arrived = lambda: self._flags.get((self._rank, peer), 0) >= number
            assert self._changed.wait_for(has_arrived, timeout=30.0), f"rank {peer} has not signalled call {number}"

    def record_event(self, queue: str) -> None: ...

    def stream_wait(self, queue: str, event: object) -> None: ...

    def capture(self, on: bool) -> None: ...


def run_ranks(size: int, run: Callable[[Axis], Any]) -> list[Any]:
    """Return run(axis) of each rank, each in a thread, with an exchange between them."""
    memory = [torch.zeros(count_buffer_bytes(size, SHARD_BYTES), dtype=torch.uint8) for _ in range(size)]
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


class Flight:
    """Collectives of two ranks with equal parts, which are in flight until they are awaited."""

    def __init__(self) -> None:
        self.count = 0
        self.during_gemms: list[tuple[str, int]] = []

    def _start(self, result: torch.Tensor) -> Pending:
        self.count += 1

        def finish() -> None:
            self.count -= 1

        return Pending(result, finish=finish)

    def all_gather(self, x: torch.Tensor, axis: Axis) -> Pending:
        return self._start(torch.cat([x, x]))

    def reduce_scatter(self, x: torch.Tensor, axis: Axis) -> Pending:
        return self._start(x[: x.shape[0] // 2] * 2)


class CountingGemms(LinearPrecision):
    """GEMMs that note how many collectives are in flight."""

    def __init__(self, axis: Axis, flight: Flight) -> None:
        super().__init__(axis)
        self._flight = flight

    def forward(self, x: Operand, weight: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self._flight.during_gemms.append(("forward", self._flight.count))
        return super().forward(x, weight, *arguments, **options)

    def dgrad(self, dy: Operand, weight: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        self._flight.during_gemms.append(("dgrad", self._flight.count))
        return super().dgrad(dy, weight, *arguments, **options)

    def accumulate_wgrad(self, main_grad: torch.Tensor, dy: Operand, x: Operand, overwrite: bool = False) -> None:
        self._flight.during_gemms.append(("wgrad", self._flight.count))
        super().accumulate_wgrad(main_grad, dy, x, overwrite)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("overlap", ["off", "async", "fused"])
def test_collectives_are_hidden_by_gemms_only_if_that_is_asked_for(monkeypatch, overlap, rank):
    """Parts that are too large for an exchange go by collectives, which are hidden too."""
    flight = Flight()
    monkeypatch.setattr(tensor_module, "all_gather", flight.all_gather)
    monkeypatch.setattr(tensor_module, "reduce_scatter", flight.reduce_scatter)
    exchange: Any = SimpleNamespace(shard_bytes=1) if overlap == "fused" else None
    axis = Axis(None, 2, rank, overlap=overlap, exchange=exchange, runtime=Runtime())
    linears = CountingGemms(axis, flight)
    x, weight = make_leaf(draw(ROWS, BATCH, HIDDEN, seed=1)), make_leaf(draw(COLUMNS, HIDDEN, seed=2))
    y = gather_linear(x, weight, None, linears)
    torch.testing.assert_close(y, torch.nn.functional.linear(torch.cat([x, x]), weight))
    y.backward(torch.ones_like(y))
    hidden = int(overlap != "off")
    forward = [("forward", hidden), ("forward", 0)] if hidden else [("forward", 0)]
    assert flight.during_gemms == list(forward) + [("dgrad", hidden), ("wgrad", hidden)]
    torch.testing.assert_close(
        weight.grad, torch.ones(2 * ROWS * BATCH, COLUMNS).double().t() @ torch.cat([x, x]).flatten(0, 1)
    )
    flight.during_gemms.clear()
    wide, out_weight = make_leaf(draw(2 * ROWS, BATCH, COLUMNS, seed=3)), make_leaf(draw(HIDDEN, COLUMNS, seed=4))
    z = linear_scatter(linears, wide, out_weight)
    assert flight.count == 0
    z.backward(torch.ones_like(z))
    assert flight.during_gemms == [("forward", 0), ("dgrad", 0), ("wgrad", 0)]
    assert flight.count == 0


@pytest.fixture
def collectives_between_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run collectives of the modules by the exchange, since threads have no process group."""
    monkeypatch.setattr(column_norm, "all_reduce", lambda x, axis: Pending(all_reduce_small(x, axis)))
    monkeypatch.setattr(vocabulary, "all_gather", exchange_gather)


@pytest.mark.usefixtures("collectives_between_threads")
@pytest.mark.parametrize("size", [2, 3])
def test_norms_over_the_columns_of_all_ranks(size):
    """Values and gradients are those of whole rows; the two tensors differ in width."""
    inputs = [draw(ROWS, BATCH, size * width, seed=width) for width in (4, 2)]
    weights = [draw(size * width, seed=10 + width) for width in (4, 2)]
    upstream = [draw(ROWS, BATCH, size * width, seed=20 + width) for width in (4, 2)]
    eps = 0.25

    def run(axis: Axis) -> list[torch.Tensor]:
        parts = [make_leaf(tensor.chunk(size, -1)[axis.rank]) for tensor in list(inputs) + list(weights)]
        normed = rms_norm_columns(*parts, eps=eps, axis=axis)
        dys = [dy.chunk(size, -1)[axis.rank] for dy in upstream]
        return list(normed) + list(torch.autograd.grad(normed, parts, dys))

    whole = [make_leaf(tensor) for tensor in list(inputs) + list(weights)]
    normed = [
        x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        for x, weight in zip(whole[:2], whole[2:], strict=True)
    ]
    expected = list(normed) + list(torch.autograd.grad(normed, whole, upstream))
    for rank, results in enumerate(run_ranks(size, run)):
        for result, value in zip(results, expected, strict=True):
            torch.testing.assert_close(result, value.chunk(size, -1)[rank])


@pytest.mark.usefixtures("collectives_between_threads")
@pytest.mark.parametrize("size", [2, 3])
def test_the_vocabulary_is_cut_over_ranks(size):
    """Embeddings, logits, losses and gradients are those of the whole matrix, whose last rows are padding."""
    rows, vocab = 4, 4 * size - 1
    weight, bias = draw(size * rows, HIDDEN, seed=1), draw(size * rows, seed=2)
    x = draw(size * ROWS, BATCH, HIDDEN, seed=3)
    tokens = (torch.arange(size * ROWS * BATCH) * 5 % vocab).view(size * ROWS, BATCH)
    dy = draw(size * ROWS, BATCH, HIDDEN, seed=4)

    def run(axis: Axis) -> list[torch.Tensor]:
        rank = axis.rank
        weight_part, bias_part = (make_leaf(tensor.chunk(size)[rank]) for tensor in (weight, bias))
        x_part = make_leaf(x.chunk(size)[rank])
        embedded = vocabulary_embedding(tokens, weight_part, axis)
        (embedding_grad,) = torch.autograd.grad(embedded, weight_part, dy.chunk(size)[rank])
        logits = vocabulary_logits(x_part, weight_part, bias_part, vocab, axis).detach()
        loss = vocabulary_loss(x_part, weight_part, bias_part, tokens, vocab, axis)
        gradients = torch.autograd.grad(loss.sum(), (x_part, weight_part, bias_part))
        return [embedded.detach(), embedding_grad, logits, loss.detach()] + list(gradients)

    leaves = [make_leaf(tensor) for tensor in (x, weight, bias)]
    embedded = torch.nn.functional.embedding(tokens, leaves[1])
    (embedding_grad,) = torch.autograd.grad(embedded, leaves[1], dy)
    logits = torch.nn.functional.linear(*leaves)[..., :vocab]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none")
    gradients = torch.autograd.grad(loss.sum(), leaves)
    for rank, results in enumerate(run_ranks(size, run)):
        torch.testing.assert_close(results[0], embedded.chunk(size)[rank])
        torch.testing.assert_close(results[1], embedding_grad.chunk(size)[rank])
        torch.testing.assert_close(results[2], logits)
        torch.testing.assert_close(results[3].flatten(), loss)
        for result, gradient in zip(results[4:], gradients, strict=True):
            torch.testing.assert_close(result, gradient.chunk(size)[rank])
