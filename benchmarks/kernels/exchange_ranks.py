"""Ranks of `python -m benchmarks exchange`: measurements of rates and variants, and waits for a peer that has ended.

The benchmark runs this module as a process per rank. Each rank writes a record.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.kernels.exchange_operations import (
    GRAPH_CALLS,
    MEGABYTES,
    OPERATIONS,
    RATED_OPERATIONS,
    REPLAYS,
    Operation,
    capture,
    capture_operation,
    has_nccl_bits,
    make_input,
    make_operation,
    replay_graph,
    time_call,
)
from benchmarks.kernels.exchange_variants import VARIANTS, VariantExchange
from megascale.core import strict_json
from megascale.errors import TrainingError
from megascale.parallel.collectives import Axis
from megascale.parallel.exchange import Exchange
from megascale.parallel.symmetric import make_exchange

LONG_CALLS = 5  # replays of the longer graph in a timed run of a variant
STOP_TIMEOUT = 5.0  # seconds without progress that a stopped peer is given
QUEUED_CALLS = 5000  # gathers that fill the queue of launches
KILL_SECONDS = 1.0  # from the barrier to the end of the victim, when all others wait for it
SCENARIOS = {
    "killed": "killed; a gather waits",
    "killed in a graph": f"killed; {REPLAYS} queued graph replays wait",
    "killed, full queue": "killed; thousands of queued gathers wait",
    "killed, maximum": "killed; the kernel of the maximum waits",
    "stopped": f"stopped (SIGSTOP), time-out {STOP_TIMEOUT:g} s; a gather waits",
}


def run_rank(scenario: str, folder: Path, port: int, world: int, rank: int, variants: Sequence[str]) -> None:
    """Run one rank of a scenario, and write its record."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        device_id=device,
    )
    axis = Axis(dist.group.WORLD, world, rank)
    timeout = 600.0
    if scenario == "stopped":
        timeout = STOP_TIMEOUT
    shard_bytes = max(MEGABYTES) * 1_000_000 // world
    if scenario == "variants":
        exchange = make_exchange(axis, shard_bytes, device, lends=True, exchange_type=VariantExchange)
    else:
        exchange = make_exchange(axis, shard_bytes, device, timeout=timeout, lends=True)
    file = folder / f"rank-{rank}.json"
    if isinstance(exchange, str):
        write_record(file, {"error": f"no exchange: {exchange}"})
        return
    if scenario in SCENARIOS:
        outlive_peer(scenario, exchange, axis, file)
        os._exit(0)  # NCCL would wait for the dead peer
    if isinstance(exchange, VariantExchange):
        measure_variants(variants, exchange, axis, file)
    else:
        rows = [measure(operation, size, exchange, axis) for operation in RATED_OPERATIONS for size in MEGABYTES]
        write_record(file, {"rows": rows})
    exchange.close()
    dist.destroy_process_group()


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Write a rank's record at once, because the rank may be killed right afterwards."""
    partial_file = file.with_suffix(".part")
    partial_file.write_text(strict_json.dumps(record))
    partial_file.rename(file)


def measure(kind: type[Operation], megabytes: int, exchange: Exchange, axis: Axis) -> dict[str, Any]:
    """Return the rates of one operation on a tensor of `megabytes`, in GB/s of that tensor, and whether it is right."""
    operation, nbytes = make_operation(kind, megabytes, exchange, axis)
    graphs = capture_operation(operation)
    is_equal = has_nccl_bits(operation)
    ways: dict[str, Callable[[], Any]] = {
        "nccl": operation.nccl,
        "exchange": operation.exchanged,
        "in_place": operation.in_place,
    }
    for way, graph in graphs.items():
        ways[way] = partial(replay_graph, graph, exchange)
    rates = {way: nbytes / time_call(call, axis) / 1e9 for way, call in ways.items()}
    rates["long_graph"] *= GRAPH_CALLS
    return {"operation": kind.name, "megabytes": megabytes, "equal": is_equal, "rates": rates}


def measure_variants(variants: Sequence[str], exchange: VariantExchange, axis: Axis, file: Path) -> None:
    """Measure the variants, the first one first, and write the record after each of them."""
    sizes = [(kind, megabytes) for kind in OPERATIONS for megabytes in MEGABYTES]
    nccl = []
    for kind, megabytes in sizes:
        operation, nbytes = make_operation(kind, megabytes, exchange, axis)
        rate = nbytes / time_call(operation.nccl, axis) / 1e9
        nccl.append({"operation": kind.name, "megabytes": megabytes, "rate": rate})
    floors = measure_floors(exchange, axis)
    rows: list[dict[str, Any]] = []
    failures = {}
    for name in variants:
        variant = VARIANTS[name]
        exchange.select(variant)
        measured_sizes = [size for size in sizes if size[0].name in variant.operations]
        try:
            rows += [measure_variant(name, kind, megabytes, exchange, axis) for kind, megabytes in measured_sizes]
        except Exception as error:  # the other variants are measured if all ranks fail alike
            failures[name] = f"{type(error).__name__}: {error}"
        write_record(file, {"rows": rows, "nccl": nccl, "failures": failures, "floors": floors})


def measure_floors(exchange: VariantExchange, axis: Axis) -> dict[str, float]:
    """Return the microseconds of a call without data in a graph, and those of a graph with such calls only."""
    like = torch.zeros(1, device="cuda")
    seconds = []
    for count in (0, GRAPH_CALLS):

        def make_calls(count: int = count) -> torch.Tensor:
            for _ in range(count):
                exchange.wait_for_peer_reads()
            return like

        # An even number of calls is followed by two calls that the capture adds.
        graph = capture(make_calls, exchange)
        seconds.append(time_call(partial(replay_graph, graph, exchange), axis))
    flags = (seconds[1] - seconds[0]) / GRAPH_CALLS
    return {"flags": flags * 1e6, "graph": (seconds[0] - 2 * flags) * 1e6}


def measure_variant(
    name: str, kind: type[Operation], megabytes: int, exchange: VariantExchange, axis: Axis
) -> dict[str, Any]:
    """Return the microseconds per call of the selected variant in each graph, and whether it is right."""
    operation, nbytes = make_operation(kind, megabytes, exchange, axis)
    graphs = capture_operation(operation)
    is_equal = has_nccl_bits(operation)
    microseconds = {}
    for way, graph in graphs.items():
        replay = partial(replay_graph, graph, exchange)
        if way == "long_graph":
            microseconds[way] = time_call(replay, axis, calls=LONG_CALLS) * 1e6 / GRAPH_CALLS
        else:
            microseconds[way] = time_call(replay, axis) * 1e6
    return {
        "variant": name,
        "operation": kind.name,
        "megabytes": nbytes / 1e6,
        "equal": is_equal,
        "microseconds": microseconds,
    }


def outlive_peer(scenario: str, exchange: Exchange, axis: Axis, file: Path) -> None:
    """End the last rank while the others wait for it, and write the time of its end, or of the error."""
    operations = [kind(make_input(kind.rows(axis.size * 512, axis.size), axis), exchange, axis) for kind in OPERATIONS]
    maximum = torch.ones((), device="cuda")

    def exchange_all() -> torch.Tensor:
        for operation in operations:
            operation.exchanged()
        assert exchange.peer_max is not None
        return exchange.peer_max(maximum)

    exchange_all()
    graph = capture(exchange_all, exchange)
    replay_graph(graph, exchange)
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    if axis.rank == axis.size - 1:
        time.sleep(KILL_SECONDS)
        write_record(file, {"ended": time.time()})
        if scenario == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if scenario == "killed in a graph":
            for _ in range(REPLAYS):
                replay_graph(graph, exchange)
        elif scenario == "killed, maximum":
            assert exchange.peer_max is not None
            exchange.peer_max(maximum)
        elif scenario == "killed, full queue":
            for _ in range(QUEUED_CALLS):
                operations[0].exchanged()
        else:
            operations[0].exchanged()
        torch.cuda.synchronize()
        exchange.check()
    except TrainingError as error:
        write_record(file, {"raised": time.time(), "message": str(error)})
        return
    write_record(file, {"error": "the wait ended without an error"})


if __name__ == "__main__":
    run_rank(
        sys.argv[1],
        Path(sys.argv[2]),
        port=int(sys.argv[3]),
        world=int(sys.argv[4]),
        rank=int(sys.argv[5]),
        variants=sys.argv[6:],
    )
