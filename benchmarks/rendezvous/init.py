"""`python -m benchmarks init`: how long a job of thousands of ranks takes to meet and make its groups.

Every rank has a store connection of its own and runs the code that a training rank runs: the same stores, the same
meeting (`rendezvous.agree`), the same plan of groups in the same order. Only the network card's part is left out:
where NCCL would connect, the rank exchanges the 128 bytes that NCCL exchanges through the store (the first member
sets its id under a key of the group, the others get it).

Protocols:
    ordered: one global meeting, then each rank its own groups in the plan's order.
    per-group-barrier: what the paper started from: every rank walks through all groups of Megatron-LM's loops and
        passes a barrier of the whole world after each (torch's own, as under TORCH_DIST_INIT_BARRIER=1). A few of
        these calls are run and the rest extrapolated, since all take alike; the table says so.

Stores: tcp (torch's TCPStore, libuv), tcp-legacy (its older server, USE_LIBUV=0, for the old protocol alone: it does
not wake who waits for a key that compare_set makes), redis.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.core import strict_json
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

    from megascale.core.grid import Grid
    from megascale.rendezvous.group_plan import GroupSpec

PROTOCOLS = ("ordered", "per-group-barrier")
TENSOR = 8
PIPELINE = 8
VIRTUAL = 6
# Ranks a process plays: threads of one process slow each other down, greenlets do not.
_THREADS = 96
# MegaScale section 3.5: seconds at 2,048 GPUs and, with both changes, above 10,000.
PAPER = {"TCPStore, barrier a group": 1047.0, "Redis, barrier a group": 361.0, "Redis, ordered (below)": 5.0}
PAPER_LARGE = {"Redis, ordered (below)": 30.0}
NOTE = (
    "The paper's torch ended every group with a world barrier over a TCPStore of that time. Today's torch has both "
    "switched off (TORCH_DIST_INIT_BARRIER, USE_LIBUV), so 1,047 s is no longer where anybody starts from."
)


@dataclass
class InitResult:
    """The best of some runs.

    Attributes:
        connect, meet, groups: seconds from the common start until the last rank had passed the phase.
        seconds: the whole start; of the per-group-barrier protocol with the calls that were not run.
        calls, calls_run: world barriers in all, and how many of them were run; 0 in the ordered protocol.
        runs: `seconds` of every run.
        server_cpu, ranks_cpu: CPU seconds of the store's server and of all ranks while they ran.
        load: the machine's load average of the minute before.
    """

    ranks: int
    store: str
    protocol: str
    seconds: float
    connect: float
    meet: float
    groups: float
    server_cpu: float
    ranks_cpu: float
    calls: int = 0
    calls_run: int = 0
    runs: list[float] = field(default_factory=list)
    load: float = 0.0

    @property
    def extrapolated(self) -> bool:
        """Return whether `seconds` includes barriers that were not run."""
        return self.calls_run < self.calls


def exchange(store: Store, spec: GroupSpec, rank: int) -> None:
    """The key traffic of one NCCL communicator: its first rank sets a unique id, the others get it."""
    key = f"torch/{spec.name}/cuda/0"
    if rank == spec.ranks[0]:
        store.set(key, "i" * 128)
    else:
        store.get(key)


def megatron_groups(grid: Grid) -> list[str]:
    """Names of the groups in Megatron-LM's loops: data, model, tensor, pipeline, embedding, position embedding."""
    counts = {
        "data": len(grid.groups("data")),
        "model": len(grid.groups(("tensor", "pipeline"))),
        "tensor": len(grid.groups("tensor")),
    }
    counts |= dict.fromkeys(("pipeline", "embedding", "position"), len(grid.groups("pipeline")))
    return [f"{kind}/{index}" for kind, count in counts.items() for index in range(count)]


def measure(ranks: int, store: str, protocol: str, calls: int, redis_server: str = "redis-server") -> InitResult:
    """One run on a fresh server.

    Raises:
        FitError: `ranks` do not divide into TP8 x PP8, or need more open files than the machine allows.
        ConfigError: no redis-server.
        TrainingError: a rank failed.
    """
    import torch.distributed  # noqa: F401  (before the processes fork, not in each of them)

    from benchmarks.rendezvous import crowd
    from megascale.core.grid import Grid

    grid = Grid.from_world_size(ranks, tensor=TENSOR, pipeline=PIPELINE)
    part = _ordered(grid)
    total = 0
    run = 0
    if protocol == "per-group-barrier":
        names = megatron_groups(grid)
        total, run = len(names), min(calls or len(names), len(names))
        part = _barriers(grid, names[:run])
    cooperative = store == "redis"
    if cooperative:
        processes = os.cpu_count() or 1
    else:
        processes = max(1, round(ranks / _THREADS))
    load = os.getloadavg()[0]
    with crowd.serve(store, ranks, redis_server) as (connect, server):
        cpu = crowd.cpu_seconds(server)
        (connected, met, built), ranks_cpu = crowd.run(ranks, connect, part, processes, cooperative)
        cpu = crowd.cpu_seconds(server) - cpu
    groups = built - met
    seconds = met + (groups * total / run if run else groups)
    phases = (connected, met - connected, groups)
    return InitResult(ranks, store, protocol, seconds, *phases, cpu, ranks_cpu, total, run, [seconds], load)


def _ordered(grid: Grid) -> Callable[[Store, int], list[float]]:
    """A rank's part today: one meeting, then its own groups in order."""
    import time

    from megascale.core.chunk_map import make_chunk_map
    from megascale.rendezvous.agree import agree
    from megascale.rendezvous.group_plan import plan_groups

    local: list[list[GroupSpec]] = [[] for _ in range(grid.world_size)]
    for spec in plan_groups(grid, make_chunk_map(grid.pipeline, VIRTUAL), tied=True):
        for rank in spec.ranks:
            local[rank].append(spec)

    def part(store: Store, rank: int) -> list[float]:
        agree(store, rank, grid.world_size, {"bench": "init"}, 600.0)
        met = time.monotonic()
        for spec in local[rank]:
            exchange(store, spec, rank)
        return [met, time.monotonic()]

    return part


def _barriers(grid: Grid, names: list[str]) -> Callable[[Store, int], list[float]]:
    """A rank's part in the paper's time: a barrier of the world after each group, for all its members."""
    import time

    from torch.distributed.distributed_c10d import GroupName

    from megascale.torch_private import store_based_barrier

    limit = timedelta(seconds=600)

    def part(store: Store, rank: int) -> list[float]:
        store_based_barrier(rank, store, GroupName("world"), grid.world_size, limit)
        met = time.monotonic()
        for name in names:
            store_based_barrier(rank, store, GroupName(name), grid.world_size, limit)
        return [met, time.monotonic()]

    return part


def _machine(redis_server: str) -> dict[str, Any]:
    """Return the machine and the versions of the figures."""
    import torch

    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    else:
        lines = []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    try:
        server = subprocess.run([redis_server, "--version"], capture_output=True, text=True).stdout.split()[2]
    except (OSError, IndexError):
        server = "none"
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "redis": server.removeprefix("v="),
    }


def _choice(text: str, expected: tuple[str, ...], option: str) -> list[str]:
    chosen = [word.strip() for word in text.split(",") if word.strip()]
    wrong = [word for word in chosen if word not in expected]
    if wrong or not chosen:
        raise ConfigError(f"--{option} {text!r}: choose among {', '.join(expected)}, separated by commas")
    return chosen


def register(app: typer.Typer) -> None:
    """Add `init`."""

    @app.command("init", help=HELP)
    def init(
        ranks: str = typer.Option("2048,12288", help="World sizes, multiples of 64 (TP8 x PP8)."),
        store: str = typer.Option("tcp,redis", help="tcp, tcp-legacy, redis."),
        protocol: str = typer.Option("per-group-barrier,ordered", help="ordered, per-group-barrier."),
        calls: int = typer.Option(4, min=0, help="World barriers to run of the old protocol's; 0: all of them."),
        repeat: int = typer.Option(2, min=1, help="Runs of each; the best is shown, the file has all."),
        redis_server: str = typer.Option("redis-server", help="The server's program."),
        out: Path = typer.Option(Path("bench-init.json"), help="Figures; the plot lies next to it as .png."),
        as_json: bool = typer.Option(False, "--json", help="Print the figures instead of a table."),
    ) -> None:
        from benchmarks.rendezvous.crowd import STORES

        # torch's TCPStore warns for each of thousands of clients that loopback has no name.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        stores, protocols = _choice(store, STORES, "store"), _choice(protocol, PROTOCOLS, "protocol")
        try:
            sizes = [int(word) for word in ranks.split(",")]
        except ValueError:
            raise ConfigError(f"--ranks {ranks!r} is not a list of numbers such as 2048,12288") from None
        results = _run_all(sizes, stores, protocols, calls, repeat, redis_server, quiet=as_json)
        machine = _machine(redis_server)
        record = {
            "machine": machine,
            "note": NOTE,
            "results": [asdict(r) | {"extrapolated": r.extrapolated} for r in results],
        }
        out.write_text(strict_json.dumps(record, indent=1) + "\n")
        picture = out.with_suffix(".png")
        plot(results, picture)
        if as_json:
            typer.echo(strict_json.dumps(record))
        else:
            _print(results, machine)
            typer.echo(f"metrics: {out}   plot: {picture}")


HELP = """How long thousands of ranks take to meet and make their groups, on this machine.

Compares stores and protocols with the MegaScale paper's figures. Example:

python -m benchmarks init --ranks 2048,12288 --store tcp,redis --protocol per-group-barrier,ordered
"""


def _run_all(
    sizes: list[int],
    stores: list[str],
    protocols: list[str],
    calls: int,
    repeat: int,
    redis_server: str,
    quiet: bool,
) -> list[InitResult]:
    from rich.console import Console

    results: list[InitResult] = []
    with Console(stderr=True, quiet=quiet).status("") as status:
        for size in sizes:
            for protocol in protocols:
                for store in stores:
                    if (store, protocol) == ("tcp-legacy", "ordered"):
                        continue
                    runs: list[InitResult] = []
                    for number in range(repeat):
                        status.update(f"{size:,} ranks, {store}, {protocol}: run {number + 1} of {repeat}")
                        runs.append(measure(size, store, protocol, calls, redis_server))
                    best = min(runs, key=lambda run: run.seconds)
                    best.runs = [round(run.seconds, 3) for run in runs]
                    results.append(best)
    return results


def _print(results: list[InitResult], machine: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="seconds until the last rank had its groups", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in ("ranks", "store", "protocol", "start", "connect", "meet", "groups", "server", "cpu"):
        table.add_column(column, justify="left" if column in ("store", "protocol") else "right", no_wrap=True)
    for r in results:
        start = ("≈" if r.extrapolated else "") + _figure(r.seconds)
        arguments = (_figure(w) for w in (r.connect, r.meet, r.groups, r.server_cpu, r.server_cpu + r.ranks_cpu))
        table.add_row(f"{r.ranks:,}", r.store, r.protocol, start, *arguments)
    console = Console()
    console.print(table)
    guessed = sorted({(r.ranks, r.calls_run, r.calls) for r in results if r.extrapolated})
    if guessed:
        parts = [f"{run} of {calls:,} at {ranks:,} ranks" for ranks, run, calls in guessed]
        console.print(f"≈ extrapolated from the world barriers that were run: {'; '.join(parts)}")
    least, most = min(r.load for r in results), max(r.load for r in results)
    console.print(
        "server, cpu: CPU seconds of the server, and of it and all ranks together. The ranks share this machine's "
        f"{machine['cores']} cores with the server and other processes (load average {least:.1f} "
        f"to {most:.1f}); in a job each rank has its own."
    )
    console.print("Paper, 2,048 GPUs: TCPStore 1,047; Redis 361; Redis and ordered < 5. Above 10,000: < 30.")
    console.print(NOTE, style="dim")
    console.print("  ".join(f"{key} {value}" for key, value in machine.items()), style="dim")


def _figure(value: float) -> str:
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.2f}"


def plot(results: list[InitResult], path: Path) -> None:
    """Bars on a logarithmic axis, a panel for each world size, the paper's figures in grey."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = sorted({r.ranks for r in results})
    figure, axes = pyplot.subplots(1, len(sizes), figsize=(6.2 * len(sizes), 3.8), squeeze=False, layout="constrained")
    for axis, size in zip(axes[0], sizes, strict=True):
        bars: list[tuple[str, float, str, str]] = []
        if size >= 10000:
            bars += [(f"paper: {name}", seconds, "0.75", f"< {seconds:g} s") for name, seconds in PAPER_LARGE.items()]
        elif size == 2048:
            for name, seconds in PAPER.items():
                below = "< " if "below" in name else ""
                bars.append((f"paper: {name}", seconds, "0.75", f"{below}{seconds:,g} s"))
        for r in sorted((r for r in results if r.ranks == size), key=lambda r: (not r.calls, r.store != "tcp")):
            mark = " (extrapolated)" if r.extrapolated else ""
            if r.calls:
                arguments = "a barrier a group"
            else:
                arguments = "ordered"
            if r.store == "redis":
                color = "tab:red"
            else:
                color = "tab:blue"
            bars.append((f"{r.store}, {arguments}", r.seconds, color, f"{_figure(r.seconds)} s{mark}"))
        names = [name.replace(" (below)", "") for name, *_ in bars]
        axis.barh(range(len(bars)), [bar[1] for bar in bars], color=[bar[2] for bar in bars], height=0.65)
        axis.set_yticks(range(len(bars)), names)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel("Time (s)")
        axis.set_title(f"{size:,} ranks", fontsize=11)
        for location, bar in enumerate(bars):
            axis.annotate(
                bar[3], (bar[1], location), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9
            )
        axis.set_xlim(0.1, 500 * max(bar[1] for bar in bars))
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Start of a job: store and group creation (all ranks on one machine; paper: a GPU cluster)")
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
