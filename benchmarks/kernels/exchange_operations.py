"""Collectives that `python -m benchmarks exchange` measures, by NCCL and by the exchange, and their timing."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megascale.parallel.chunk_graphs import CudaCapture, CudaCapturePool
from megascale.parallel.collectives import Axis
from megascale.parallel.exchange import Exchange

MEGABYTES = (10, 20, 40)
CALLS = 20  # in a timed run
RUNS = 7  # timed; the median counts
REPLAYS = 10
GRAPH_CALLS = 8  # calls in the longer graph, as a layer makes several
WIDTH = 1024  # elements in a row


class Operation:
    """One collective on a tensor, by NCCL and by the exchange.

    Args:
        x: this rank's input; a shard for a gather, else a part for each rank.
    """

    name = ""

    def __init__(self, x: torch.Tensor, exchange: Exchange, axis: Axis) -> None:
        self.x = x
        self.exchange = exchange
        self.axis = axis

    @property
    def parts(self) -> torch.Tensor:
        """The input as a part for each rank."""
        return self.x.view(self.axis.size, -1, WIDTH)

    @staticmethod
    def rows(total: int, size: int) -> int:
        """Return the rows of a rank's input if the whole tensor has `total` rows."""
        return total

    def nccl(self) -> torch.Tensor:
        """Run it by NCCL."""
        raise NotImplementedError

    def exchanged(self) -> torch.Tensor:
        """Run it by the exchange."""
        raise NotImplementedError

    def in_place(self) -> torch.Tensor:
        """Run it by the exchange with parts that a GEMM would have written into its memory; undefined results."""
        return self.exchanged()


class Gather(Operation):
    """All-gather."""

    name = "gather"

    @staticmethod
    def rows(total: int, size: int) -> int:
        return total // size

    def nccl(self) -> torch.Tensor:
        out = self.x.new_empty((self.axis.size * self.x.shape[0], WIDTH))
        dist.all_gather_into_tensor(out, self.x)
        return out

    def exchanged(self) -> torch.Tensor:
        return self.exchange.gather(self.x)()


class LentGather(Gather):
    """All-gather whose result may lie in the exchange's memory."""

    name = "lent gather"

    def exchanged(self) -> torch.Tensor:
        return self.exchange.gather(self.x, lend=True)()


class Scatter(Operation):
    """Reduce-scatter."""

    name = "scatter"

    def nccl(self) -> torch.Tensor:
        out = self.x.new_empty(self.parts.shape[1:])
        dist.reduce_scatter_tensor(out, self.x)
        return out

    def exchanged(self) -> torch.Tensor:
        return self.exchange.scatter(lambda out, rank: out.copy_(self.parts), self.parts.shape[1:], self.x)()

    def in_place(self) -> torch.Tensor:
        return self.exchange.scatter(lambda out, rank: None, self.parts.shape[1:], self.x)()


class AllToAll(Operation):
    """All-to-all of equal parts."""

    name = "all-to-all"

    def nccl(self) -> torch.Tensor:
        out = torch.empty_like(self.x)
        dist.all_to_all_single(out, self.x)
        return out

    def exchanged(self) -> torch.Tensor:
        return self.exchange.all_to_all(self._write, self.parts.shape[1:], self.x)()

    def in_place(self) -> torch.Tensor:
        return self.exchange.all_to_all(self._write_local, self.parts.shape[1:], self.x)()

    def _write(self, out: torch.Tensor, rank: int | None) -> None:
        assert rank is not None
        out.copy_(self.parts[rank])

    def _write_local(self, out: torch.Tensor, rank: int | None) -> None:
        if rank == self.axis.rank:
            self._write(out, rank)


OPERATIONS: tuple[type[Operation], ...] = (Gather, Scatter, AllToAll)
RATED_OPERATIONS: tuple[type[Operation], ...] = (Gather, LentGather, Scatter, AllToAll)


def make_input(rows: int, axis: Axis, seed: int = 0) -> torch.Tensor:
    """Return small whole numbers in bfloat16, whose sums are exact in any order."""
    generator = torch.Generator("cuda").manual_seed(1000 * seed + axis.rank)
    numbers = torch.randint(-8, 9, (rows, WIDTH), generator=generator, device="cuda")
    return numbers.to(torch.bfloat16)


def make_operation(kind: type[Operation], megabytes: int, exchange: Exchange, axis: Axis) -> tuple[Operation, int]:
    """Return an operation on a tensor of about `megabytes`, and the bytes of that tensor."""
    total = megabytes * 1_000_000 // (2 * WIDTH) // axis.size * axis.size
    return kind(make_input(kind.rows(total, axis.size), axis), exchange, axis), total * WIDTH * 2


def capture_operation(operation: Operation) -> dict[str, CudaCapture]:
    """Run an operation, and return its graphs: one call, one call in place, and GRAPH_CALLS calls in place."""
    operation.exchanged()
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "graph": operation.exchanged,
        "graph_in_place": operation.in_place,
        "long_graph": lambda: [operation.in_place() for _ in range(GRAPH_CALLS)][-1],
    }
    return {way: capture(call, operation.exchange) for way, call in calls.items()}


def has_nccl_bits(operation: Operation) -> bool:
    """Return whether all ranks have NCCL's bits, launched and in REPLAYS replays of a graph.

    The graph copies its result, because a result that peers have pushed is valid within the graph only.
    """
    is_equal = torch.equal(operation.nccl(), operation.exchanged())
    graph = capture(lambda: operation.exchanged().clone(), operation.exchange)
    for replay in range(REPLAYS):
        operation.x.copy_(make_input(operation.x.shape[0], operation.axis, seed=1 + replay))
        replay_graph(graph, operation.exchange)
        assert graph.result is not None
        expected = operation.nccl()
        is_equal = is_equal and torch.equal(expected, graph.result)
    agreed = torch.tensor([float(is_equal)], device="cuda")
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    return bool(agreed.item())


def capture(work: Callable[[], torch.Tensor], exchange: Exchange) -> CudaCapture:
    """Return a CUDA graph of `work`, which has run before."""
    torch.cuda.synchronize()

    def captured() -> torch.Tensor:
        with exchange.capture():
            return work()

    return CudaCapturePool(torch.cuda.Stream()).capture(captured)


def replay_graph(graph: CudaCapture, exchange: Exchange) -> None:
    """Replay a graph with calls of the exchange."""
    exchange.before_replay()
    graph.replay()
    exchange.after_replay()


def time_call(call: Callable[[], Any], axis: Axis, calls: int = CALLS) -> float:
    """Return the seconds of one call, the slowest rank's median over RUNS of `calls` calls."""
    seconds = []
    for run in range(RUNS + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        stop.record()
        stop.synchronize()
        if run:  # the first warms up
            seconds.append(start.elapsed_time(stop) / 1e3 / calls)
    slowest = torch.tensor([statistics.median(seconds)], device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)
