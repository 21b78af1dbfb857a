"""`python -m benchmarks exchange`: the exchange of the GPUs of one host compared with NCCL, and the end of a peer.

Gather, scatter and all-to-all are timed at several sizes, launched one by one and replayed from a CUDA graph, and their
results are compared with NCCL's bit for bit. Then one rank is killed, or stopped, while the others wait for it. The
benchmark measures the seconds until the survivors raise an error.

With `--variant` it compares ways to move the data (exchange_variants.py) in graphs instead.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import typer

from benchmarks.kernels.exchange_variants import VARIANTS, VariantExchange
from megascale.core import strict_json
from megascale.errors import ConfigError, TrainingError
from megascale.parallel.chunk_graphs import CudaCapture, CudaCapturePool
from megascale.parallel.collectives import Axis
from megascale.parallel.exchange import Exchange
from megascale.parallel.symmetric import make_exchange

MEGABYTES = (10, 20, 40)
CALLS = 20  # in a timed run
RUNS = 7  # timed; the median counts
LONG_CALLS = 5  # replays of the longer graph in a timed run of a variant
REPLAYS = 10
GRAPH_CALLS = 8  # calls in the longer graph, as a layer makes several
VARIANT_SECONDS = 110.0  # limit of a comparison of variants
STOP_TIMEOUT = 5.0  # seconds without progress that a stopped peer is given
KILL_SECONDS = 1.0  # from the barrier to the end of the victim, when all others wait for it
WIDTH = 1024  # elements in a row
SCENARIOS = {
    "killed": "killed; a gather waits",
    "killed in a graph": f"killed; {REPLAYS} queued graph replays wait",
    "killed, full queue": "killed; thousands of queued gathers wait",
    "killed, maximum": "killed; the kernel of the maximum waits",
    "stopped": f"stopped (SIGSTOP), time-out {STOP_TIMEOUT:g} s; a gather waits",
}


def register(app: typer.Typer) -> None:
    """Add the benchmark."""
    app.command("exchange")(main)


def main(
    gpus: int = typer.Option(0, min=0, help="Ranks, one per GPU; 0: all GPUs of this machine."),
    deaths: bool = typer.Option(True, help="Also end a peer, and measure the time to the survivors' errors."),
    variant: list[str] = typer.Option([], help="Compare this way to move the data; repeatable; all: every way."),
    out: Path = typer.Option(Path("bench-exchange.json"), help="JSON file to write."),
) -> None:
    """Time the exchange of this host's GPUs against NCCL, and the error after a peer's death.

    It takes about two minutes, half a minute with --no-deaths, and reports each part as it ends. Exit code 1 if a
    result differs from NCCL's, or if a survivor gets no error.

    With --variant it compares ways to move the data, ends no peer, and takes about a minute for all of them.
    """
    variants = list(VARIANTS) if "all" in variant else variant
    unknown = sorted(set(variants) - set(VARIANTS))
    if unknown:
        raise ConfigError(f"--variant={unknown[0]} is unknown; known are: all, {', '.join(VARIANTS)}")
    world = gpus or torch.cuda.device_count()
    if world < 2 or world > torch.cuda.device_count():
        raise ConfigError(
            f"benchmarks exchange needs two GPUs or more, and {torch.cuda.device_count()} are visible for {world} "
            "ranks; run it on a machine with several GPUs"
        )
    if variants:
        compare_variants(variants, world, out)
        return
    rates = run_ranks("rates", world, seconds=120.0)[0]
    for row in rates.get("rows", []):
        speeds = ", ".join(f"{way} {rate:.0f}" for way, rate in row["rates"].items())
        typer.echo(f"{row['operation']} of {row['megabytes']} MB: {speeds} GB/s; equal: {row['equal']}", err=True)
    ends = {}
    for scenario in SCENARIOS if deaths else ():
        end = find_seconds(run_ranks(scenario, world, seconds=45.0))
        ends[scenario] = end
        typer.echo(f"{scenario}: {end.seconds} s, {end.message}", err=True)
    record = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "ranks": world,
        "replays": REPLAYS,
        "rates": rates.get("rows", []),
        "error": rates.get("error", ""),
        "seconds_to_error": {scenario: end.seconds for scenario, end in ends.items()},
        "messages": {scenario: end.message for scenario, end in ends.items()},
    }
    show(record)
    out.write_text(strict_json.dumps(record, indent=1) + "\n")
    typer.echo(f"metrics: {out}")
    has_failed = bool(record["error"]) or not all(row["equal"] for row in rates.get("rows", []))
    if has_failed or any(end.seconds is None for end in ends.values()):
        raise typer.Exit(1)


def compare_variants(variants: list[str], world: int, out: Path) -> None:
    """Time the variants, print a table, and write the JSON file. Exit code 1 if a result differs from NCCL's."""
    result = run_ranks("variants", world, seconds=VARIANT_SECONDS, variants=variants)[0]
    rows = result.get("rows", [])
    expected_rows = sum(len(VARIANTS[name].operations) for name in variants) * len(MEGABYTES)
    error = result.get("error", "")
    if not error and len(rows) < expected_rows:
        error = f"{len(rows)} of {expected_rows} rows were measured within {VARIANT_SECONDS:g} s"
    for name, message in result.get("failures", {}).items():
        error += f"; {name}: {message}"
    record = {
        "date": date.today().isoformat(),
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "ranks": world,
        "nccl": result.get("nccl", []),
        "variants": rows,
        "failures": result.get("failures", {}),
        "floors": result.get("floors", {}),
        "error": error,
    }
    show_variants(record)
    out.write_text(strict_json.dumps(record, indent=1) + "\n")
    typer.echo(f"metrics: {out}")
    if error or not all(row["equal"] for row in rows):
        raise typer.Exit(1)


# the ranks ---------------------------------------------------------------------------------------------------------


@dataclass
class End:
    """End of the survivors of a scenario.

    Attributes:
        seconds: from the victim's end to the last survivor's error; None if a survivor got none.
        message: a survivor's error, or why there is none.
    """

    seconds: float | None
    message: str


def run_ranks(scenario: str, world: int, seconds: float, variants: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run a process per rank, and return the record of each; a rank without a record has its exit code."""
    with tempfile.TemporaryDirectory(prefix="bench-exchange-") as folder:
        command = [
            sys.executable,
            "-m",
            "benchmarks.kernels.exchange",
            scenario,
            folder,
            str(find_free_port()),
            str(world),
        ]
        processes = []
        for rank in range(world):
            with (Path(folder) / f"rank-{rank}.err").open("w") as errors:
                processes.append(subprocess.Popen([*command, str(rank), *variants], stderr=errors))
        survivors = processes
        if scenario in SCENARIOS:
            survivors = processes[:-1]
        deadline = time.monotonic() + seconds
        end_times: dict[int, float] = {}
        while time.monotonic() < deadline and len(end_times) < len(survivors):
            time.sleep(0.05)
            for rank, process in enumerate(survivors):
                if process.poll() is not None:
                    end_times.setdefault(rank, time.time())
        for process in processes:
            process.kill()
        codes = [process.wait() for process in processes]
        records = []
        for rank, code in enumerate(codes):
            file = Path(folder) / f"rank-{rank}.json"
            errors_text = file.with_suffix(".err").read_text()
            if file.exists():
                records.append(strict_json.loads(file.read_text()))
            elif rank in end_times and "; ending: " in errors_text:
                # The watch of peers ended a process that could not come to a check.
                messages = [line for line in errors_text.splitlines() if "; ending: " in line]
                records.append({"raised": end_times[rank], "message": messages[0]})
            else:
                sys.stderr.write(errors_text[-2000:])
                records.append({"error": f"rank {rank} ended with code {code} and no result"})
        return records


def find_seconds(records: list[dict[str, Any]]) -> End:
    """Return how the survivors ended; the last rank is the victim."""
    ended = records[-1].get("ended")
    survivors = records[:-1]
    for survivor in survivors:
        if "raised" not in survivor:
            return End(None, survivor.get("error", "no error"))
    if ended is None:
        return End(None, records[-1].get("error", "the victim did not end"))
    return End(max(survivor["raised"] for survivor in survivors) - ended, survivors[0]["message"])


def find_free_port() -> int:
    """Return a port of the loopback interface that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


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
    if isinstance(exchange, VariantExchange):
        measure_variants(variants, exchange, axis, file)
        exchange.close()
        dist.destroy_process_group()
        return
    if scenario == "rates":
        rows = [measure(operation, size, exchange, axis) for operation in RATED_OPERATIONS for size in MEGABYTES]
        write_record(file, {"rows": rows})
        exchange.close()
        dist.destroy_process_group()
        return
    outlive_peer(scenario, exchange, axis, file)
    os._exit(0)  # NCCL would wait for the dead peer


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Write a rank's record at once, because the rank may be killed right afterwards."""
    partial_file = file.with_suffix(".part")
    partial_file.write_text(strict_json.dumps(record))
    partial_file.rename(file)


# rates -------------------------------------------------------------------------------------------------------------


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


def measure(kind: type[Operation], megabytes: int, exchange: Exchange, axis: Axis) -> dict[str, Any]:
    """Return the rates of one operation on a tensor of `megabytes`, in GB/s of that tensor, and whether it is right."""
    operation, nbytes = make_operation(kind, megabytes, exchange, axis)
    graphs = capture_operation(operation)
    is_equal = compare_with_nccl(operation)
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


def compare_with_nccl(operation: Operation) -> bool:
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
    is_equal = compare_with_nccl(operation)
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


# the end of a peer -------------------------------------------------------------------------------------------------


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
        else:
            calls = 1
            if scenario == "killed, full queue":
                calls = 5000
            for _ in range(calls):
                operations[0].exchanged()
        torch.cuda.synchronize()
        exchange.check()
    except TrainingError as error:
        write_record(file, {"raised": time.time(), "message": str(error)})
        return
    write_record(file, {"error": "the wait ended without an error"})


# the table ---------------------------------------------------------------------------------------------------------


def show(record: dict[str, Any]) -> None:
    """Print the tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=140)
    console.print(f"{record['ranks']} x {record['device']}, torch {record['torch']}, {record['date']}")
    console.print(
        "GB/s of the whole tensor (bfloat16), and the ratio to NCCL. in place: a GEMM has written the parts into the "
        f"exchange's memory. long graph: {GRAPH_CALLS} calls in place. equal: NCCL's bits, launched and in "
        f"{record['replays']} replays."
    )
    if record["error"]:
        console.print(record["error"])
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = ("operation", "MB", "NCCL", "exchange", "in place", "graph", "graph, in place", "long graph", "equal")
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index else "left", no_wrap=True)
    for row in record["rates"]:
        rates = row["rates"]
        cells = [f"{rates['nccl']:.0f}"]
        for way in ("exchange", "in_place", "graph", "graph_in_place", "long_graph"):
            cells.append(f"{rates[way]:.0f} {rates[way] / rates['nccl']:.2f}x")
        table.add_row(row["operation"], str(row["megabytes"]), *cells, "yes" if row["equal"] else "NO")
    console.print(table)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("the last rank is", "seconds to the error", "message"):
        table.add_column(heading)
    for scenario in record["seconds_to_error"]:
        description = SCENARIOS[scenario]
        seconds = record["seconds_to_error"][scenario]
        cell = "NO ERROR" if seconds is None else f"{seconds:.2f}"
        table.add_row(description, cell, record["messages"][scenario])
    console.print(table)


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the intercept and the slope of the least-squares line through points (x, y) with two x or more."""
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    variance = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / variance
    return mean_y - slope * mean_x, slope


def show_variants(record: dict[str, Any]) -> None:
    """Print the table of variants."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, width=140)
    console.print(f"{record['ranks']} x {record['device']}, torch {record['torch']}, {record['date']}")
    console.print(
        f"GB/s of the whole tensor at {', '.join(map(str, MEGABYTES))} MB (bfloat16), and the ratio to NCCL. in place: "
        f"a graph of one call whose parts a GEMM has written. long: {GRAPH_CALLS} such calls, with the fixed time per "
        "call and the rate of a GPU's remote bytes in the limit. equal: NCCL's bits, launched and in "
        f"{REPLAYS} replays."
    )
    if record["error"]:
        console.print(record["error"])
    if record["floors"]:
        floors = record["floors"]
        console.print(
            f"A call without data takes {floors['flags']:.1f} us, a graph without calls {floors['graph']:.1f} us."
        )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, heading in enumerate(("operation", "variant", "in place", "long", "fixed us", "limit GB/s", "equal")):
        table.add_column(heading, justify="right" if index > 1 else "left", no_wrap=True)
    remote_share = 1 - 1 / record["ranks"]
    for kind in OPERATIONS:
        nccl = [item["rate"] for item in record["nccl"] if item["operation"] == kind.name]
        table.add_row(kind.name, "NCCL", *[" ".join(f"{rate:.0f}" for rate in nccl)] * 2, "", "", "")
        rows = [row for row in record["variants"] if row["operation"] == kind.name]
        for name in dict.fromkeys(row["variant"] for row in rows):
            rows_of_variant = [row for row in rows if row["variant"] == name]
            cells = []
            for way in ("graph_in_place", "long_graph"):
                rates = [1e3 * row["megabytes"] / row["microseconds"][way] for row in rows_of_variant]
                ratios = " ".join(f"{rate / peer:.2f}" for rate, peer in zip(rates, nccl, strict=True))
                cells.append(" ".join(f"{rate:.0f}" for rate in rates) + f"  {ratios}")
            fixed, slope = fit_line([(row["megabytes"], row["microseconds"]["long_graph"]) for row in rows_of_variant])
            cells += [f"{fixed:.0f}", f"{1e3 * remote_share / slope:.0f}"]
            equal = "yes" if all(row["equal"] for row in rows_of_variant) else "NO"
            table.add_row("", name, *cells, equal)
    console.print(table)


if __name__ == "__main__":
    run_rank(
        sys.argv[1],
        Path(sys.argv[2]),
        port=int(sys.argv[3]),
        world=int(sys.argv[4]),
        rank=int(sys.argv[5]),
        variants=sys.argv[6:],
    )
