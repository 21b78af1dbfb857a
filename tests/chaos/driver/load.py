"""One driver, many agents: 1,536 authenticated connections over loopback, a heartbeat a second each, some fall silent.

The driver is the real one (agent server, rules, journal, loop) in a process on one core; the agents are coroutines
of a few client processes that speak the real protocol. Verdicts are noted, not acted upon, so that detection can be
timed again and again: a silent agent comes back later, and a verdict on one that was not silent is a false alarm.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import platform
import queue
import random
import resource
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from megascale.errors import TrainingError
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.agent_messages import FROM_AGENT, Hello, Start, Stop, Stopped
from megascale.resilience.protocol.contact import read_contact, read_token
from megascale.resilience.protocol.heartbeat import GpuReport, Heartbeat, NetworkTraffic, Worker
from megascale.resilience.protocol.job_description import JobDescription

RANKS = 8  # a node
STEPS = 4  # of a rank, in two seconds


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos driver`."""
    app.command("driver")(driver)


def driver(
    agents: int = typer.Option(1536, min=2, help="Nodes, each with 8 ranks."),
    seconds: float = typer.Option(60.0, min=15, help="How long it lasts, after all have joined."),
    processes: int = typer.Option(3, min=1, help="Client processes."),
    silent: int = typer.Option(5, min=1, help="Agents that fall silent every second window."),
    window: float = typer.Option(5.0, help="resilience.window, seconds."),
    out: Path = typer.Option(Path("bench-driver.json"), help="JSON file for the figures."),
) -> None:
    """Load one driver on one core with agents that beat once a second.

    Detection: from an agent's last heartbeat to the driver's verdict. The target is window + 1 s at p99, no false
    alarm, flat memory. Example: python -m tests.chaos driver --seconds 300
    """
    from rich.console import Console
    from rich.table import Table

    from megascale.core.preflight import AGENT_BYTES, check_processes

    check_processes("--processes", processes, AGENT_BYTES)
    context = multiprocessing.get_context("spawn")
    results: Queue[Any] = context.Queue()
    with temporary_folder() as name:
        run = Path(name)
        served = context.Process(target=_serve, args=(run, agents, seconds, window, results))
        served.start()
        contact = run / "driver" / "contact.json"
        while not contact.exists() and served.is_alive():
            time.sleep(0.05)
        shares = [list(range(i, agents, processes)) for i in range(processes)]
        clients = [context.Process(target=_clients, args=(run, s, window, silent / processes, results)) for s in shares]
        for client in clients:
            client.start()
        result = [_result(results, seconds + 300, served) for _ in range(processes + 1)]
        for process in (served,) + tuple(clients):
            process.join()
    measures = next(r for r in result if "verdicts" in r)
    silences = [tuple(s) for r in result for s in r.get("silences", ())]
    figures = _judge(measures, silences, window)
    figures |= _reading()
    figures |= {"agents": agents, "seconds": seconds, "window": window, "cores": os.cpu_count()}
    figures |= {"date": datetime.now(UTC).isoformat(timespec="seconds"), "python": platform.python_version()}
    table = Table("what", "figure", title=f"{agents} agents, {agents * RANKS} ranks, one driver on one core")
    for key, value in figures.items():
        table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
    Console().print(table)
    out.write_text(strict_json.dumps(figures, indent=1))
    typer.echo(f"figures: {out}")


def _result(results: Queue[Any], seconds: float, served: Any) -> Any:
    """The next process's figures. TrainingError if the driver ended without any, rather than waiting for it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=1.0)
        if served.exitcode:
            break
    raise TrainingError(f"the driver's process ended with exit code {served.exitcode} and no figures; see above")


def _judge(measures: dict[str, Any], silences: list[tuple[str, float, float]], window: float) -> dict[str, Any]:
    """Match verdicts with silences; times are of this machine's monotonic clock, one for all processes."""
    late = []
    matched = set()
    false = 0
    for node, at in measures["verdicts"]:
        cause = next((s for s in silences if s[0] == node and s[1] + window * 0.5 < at < s[2] + 1.0), None)
        if cause is None:
            false += 1
        elif cause not in matched:
            matched.add(cause)
            late.append(at - cause[1])
    due = [s for s in silences if s[2] - s[1] > window + 1.0 and s[1] + window + 1.0 < measures["ended"]]
    late.sort()
    return {
        "silences": len(due),
        "missed": sum(s not in matched for s in due),
        "false alarms": false,
        "detection median s": late[len(late) // 2] if late else None,
        "detection p99 s": late[min(len(late) - 1, int(len(late) * 0.99))] if late else None,
        "heartbeats a second": measures["beats"] / measures["lasted"],
        "driver CPU share": measures["cpu"] / measures["lasted"],
        "slowest loop iteration s": measures["slowest"],
        "resident MiB after 90 s": measures["memory"][
            min(90, len(measures["memory"]) - 1)
        ],  # its history is full by then
        "resident MiB last": measures["memory"][-1],
        "resident MiB every 5 minutes": [round(m) for m in measures["memory"][::300]],
        "joined within s": measures["joining"],
    }


class _Nowhere(Cluster):
    """A cluster whose nodes come by themselves."""

    def __init__(self) -> None: ...

    def announce(self, job: JobDescription, token: bytes) -> None: ...

    def nodes(self) -> list[Any]:
        return []

    async def start_agent(self, name: str) -> bool:
        return False

    async def fence(self, name: str) -> bool:
        return True

    async def request(self) -> str | None:
        return None


def _serve(run: Path, agents: int, seconds: float, window: float, results: Queue[Any]) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    # Each agent is a connection, and so is each client's end.
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], max(limits[0], 4 * agents + 1000)), limits[1]))
    results.put(asyncio.run(_drive(run, agents, seconds, window)))


async def _drive(run: Path, agents: int, seconds: float, window: float) -> dict[str, Any]:
    from megascale.config import from_tree
    from megascale.resilience.driver.driver import Driver
    from megascale.resilience.driver.state.job_state import JobState, Phase
    from megascale.resilience.driver.state.journal import Journal
    from megascale.resilience.rules.view import Verdict

    tree = {"resilience": {"nodes": agents, "window": window}, "train": {"global_batch": agents * RANKS}}
    config = from_tree(tree | {"parallel": {"data": agents * RANKS}, "data": {}})

    verdicts: list[tuple[str, float]] = []

    def noted(result: Sequence[Verdict]) -> None:
        """Takes verdicts instead of acting on them."""
        current = time.monotonic()
        for verdict in result:
            if verdict.action not in ("none", "alert"):
                verdicts.extend((node, current) for node in verdict.nodes or ("",))

    journal, _ = Journal.take(run, 0.1)
    job = JobState("bench", Phase.WAITING, 0, (), RANKS, agents * RANKS)
    measured = Driver(run, config, _Nowhere(), ["train"], journal, job)
    measured.response.act = noted  # type: ignore[method-assign, assignment]

    def beats() -> int:
        return sum(node.heartbeat.sequence for node in measured.nodes.all() if node.heartbeat is not None)

    await measured.open()
    began = time.monotonic()
    measured.announce("http://127.0.0.1:0")
    work = asyncio.create_task(measured.run())
    while measured.job.phase is not Phase.RUNNING and not work.done():
        await asyncio.sleep(0.05)
    joined = time.monotonic()
    await asyncio.sleep(3.0)
    start = time.monotonic()
    cpu = time.process_time()
    before = beats()
    measured.slowest_seconds = 0.0
    memory = [_memory()]
    verdicts.clear()
    while time.monotonic() - start < seconds and not work.done():
        await asyncio.sleep(1.0)
        memory.append(_memory())
    lasted = time.monotonic() - start
    measures = {"verdicts": verdicts, "beats": beats() - before, "lasted": lasted, "joining": joined - began}
    measures |= {
        "cpu": time.process_time() - cpu,
        "slowest": measured.slowest_seconds,
        "memory": memory,
        "ended": time.monotonic(),
    }
    measured.operations.interrupt()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60):
            await work
    (run / "over").touch()
    return measures


def _memory() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20


def _clients(run: Path, numbers: list[int], window: float, silent: float, results: Queue[Any]) -> None:
    cores = os.sched_getaffinity(0)  # agents are other machines: they take nothing of the driver's core
    os.sched_setaffinity(0, cores - {min(cores)} or cores)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], max(limits[0], len(numbers) + 1000)), limits[1]))
    results.put({"silences": asyncio.run(_crowd(run, numbers, window, silent))})


async def _crowd(run: Path, numbers: list[int], window: float, silent: float) -> list[tuple[str, float, float]]:
    """`silent`: how many of these agents fall silent every two windows, on average."""
    rng = random.Random(numbers[0])
    silences: list[tuple[str, float, float]] = []
    quiet: dict[int, float] = {}
    last: dict[int, float] = {}

    async def silence() -> None:
        owed = 0.0
        await asyncio.sleep(10.0)
        while True:
            owed += silent
            while owed >= 1.0:
                owed -= 1.0
                number = rng.choice(numbers)
                if number not in quiet and number in last:
                    quiet[number] = time.monotonic() + 1.6 * window
            await asyncio.sleep(2 * window)

    tasks = [asyncio.create_task(_agent(run, n, rng.random(), quiet, last, silences)) for n in numbers]
    tasks.append(asyncio.create_task(silence()))
    while not (run / "over").exists():
        await asyncio.sleep(0.2)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return silences


def _heartbeat(name: str, sequence: int, ranks: Sequence[int], step: int, offset: float, **details: Any) -> Heartbeat:
    """Return a heartbeat of a training node's agent."""
    workers = tuple(
        Worker(rank, 1000 + rank, "running", 0, "train", step, "forward", 3, 0.1, "", 1 << 33, float(step))
        for rank in ranks
    )
    return Heartbeat(
        details.pop("job", "bench"),
        details.pop("attempt", 1),
        name,
        sequence,
        time.time_ns(),
        workers=workers,
        gpus=tuple(GpuReport(i, "NVIDIA H200", 60.0 + i, 690.0) for i in range(RANKS)),
        traffic=tuple(_traffic(i, offset) for i in range(RANKS)),
        **details,
    )


def _reading(count: int = 2000) -> dict[str, float]:
    """Return a driver's cost of reading a heartbeat: CPU microseconds, the least of five rounds, and bytes."""
    seconds = dict.fromkeys(range(RANKS), 0.45)
    data = FROM_AGENT.encode(_heartbeat("n17", 44, range(RANKS), 7, 0.5, step_seconds=seconds))
    rounds = []
    for _ in range(5):
        started = time.process_time()
        for _ in range(count):
            FROM_AGENT.decode(data)
        rounds.append((time.process_time() - started) / count)
    return {"reading a heartbeat us": 1e6 * min(rounds), "bytes a heartbeat": len(data)}


def _traffic(number: int, offset: float) -> NetworkTraffic:
    """Return the traffic of a training node's NIC: steady with a small variation."""
    rate = 8e9 * (1 + 0.1 * offset)
    return NetworkTraffic(f"mlx5_{number}", rate, rate, 0.0, 4 * rate, 0.0, 4 * rate, 0, 100)


async def _agent(
    run: Path, number: int, offset: float, quiet: dict[int, float], last: dict[int, float], silences: list[Any]
) -> None:
    rng = random.Random(number)
    contact, name = read_contact(run), f"n{number}"
    await asyncio.sleep(2 * offset)
    while True:
        try:
            reader, writer = await asyncio.open_connection(*contact.agents)
            channel = await agent_channel.open_channel(reader, writer, read_token(run), driver=False)
            break
        except (OSError, EOFError):  # all come at once: an agent that was not heard in time tries again
            await asyncio.sleep(1.0 + offset)
    channel.send(Hello(contact.job, name, agent_channel.VERSION, "127.0.0.1", name))
    orders: dict[str, Any] = {}

    async def obey() -> None:
        while True:
            order = await channel.receive()
            if isinstance(order, Start):
                orders.update(ranks=order.ranks, attempt=order.attempt, started=time.monotonic())
            elif isinstance(order, Stop):
                orders.clear()
                channel.send(Stopped(order.order, 0, 1))

    listening = asyncio.create_task(obey())
    sequence, due = 0, time.monotonic()
    try:
        while not listening.done():
            sequence += 1
            # Steps stand still from then on: no job trains while a node is lost, and there is always one.
            step = min(STEPS, int((time.monotonic() - orders["started"]) * 2)) if orders else 0
            ranks = orders.get("ranks", ())
            seconds = {rank: 0.45 + 0.02 * rng.random() for rank in ranks}
            details = {"job": contact.job, "attempt": orders.get("attempt", 0), "step_seconds": seconds}
            channel.send(_heartbeat(name, sequence, ranks, step, offset, **details))
            last[number] = time.monotonic()
            due += 1.0
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if number in quiet:
                deadline = quiet[number]
                await asyncio.sleep(max(0.0, deadline - time.monotonic()))
                silences.append((name, last[number], time.monotonic()))
                del quiet[number]
                due = time.monotonic()
    finally:
        listening.cancel()
        channel.close()
