"""`python -m benchmarks dashboard`: the page of 12,288 ranks in a browser, its server, and a driver beside it."""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json

PARTS = ("page", "driver")
STREAMS = 19
# Name, bound, unit: the project's aims for two cores.
BOUNDS = {
    "first overview": (2.0, "s"), "first heat map": (2.0, "s"), "frames of the heat map": (0.05, "s"),
    "frames of the timeline": (0.05, "s"), "frames of the grid": (0.05, "s"), "server": (1024.0, "MiB"),
    "page": (500.0, "MiB"), "live": (2.0, "s"), "driver": (0.1, "s"),
}  # fmt: skip
_SETTLED = 3.0  # seconds of requests to the driver before the pages load


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("dashboard")(dashboard)


def dashboard(
    parts: str = typer.Option("page,driver", help=f"Which of {', '.join(PARTS)}."),
    data: int = typer.Option(192, min=1, help="page: data-parallel ranks; the job has 64 times as many in all."),
    rollup_steps: int = typer.Option(100, min=1, help="page: steps of which roll-ups come."),
    metric_steps: int = typer.Option(20_000, min=10, help="page: steps of which metrics come."),
    seconds: float = typer.Option(20.0, min=2, help="driver: how long pages are open."),
    chromium: str = typer.Option("", help="Program; default: the system's chromium."),
    folder: Path | None = typer.Option(None, help="page: run folder, made if it is not there and kept."),
    out: Path = typer.Option(Path("bench-dashboard.json"), help="JSON file for the figures."),
) -> None:
    """The dashboard at 12,288 ranks in a headless browser. Exit code 1 if an aim is missed.

    page: roll-ups of 100 steps and spans of one through the normal ingest, and metrics of 20,000 steps; the first
    views in fresh profiles, frames while zooming and moving, memory of server and page, and how late the page is with
    19 other clients on the stream. driver: a launched job at rest, its nodes' page open and 19 streams; how late the
    driver's loop answers meanwhile.

    Examples:

      python -m benchmarks dashboard

      python -m benchmarks dashboard --parts page --folder runs/big
    """
    from megascale.errors import ConfigError, describe_install

    expected = parts.split(",")
    wrong = [part for part in expected if part not in PARTS]
    if wrong:
        raise ConfigError(f"--parts={parts}: there is no part {wrong[0]!r}; there are {', '.join(PARTS)}")
    program = chromium or shutil.which("chromium") or shutil.which("google-chrome") or ""
    if not program or shutil.which(program) is None:
        raise ConfigError(f"--chromium={chromium}: there is no such program; install chromium or name one")
    try:
        import playwright  # noqa: F401
    except ImportError:
        raise ConfigError(
            f"this bench drives a browser with the package playwright; {describe_install('test')}"
        ) from None
    record: dict[str, Any] = {"date": date.today().isoformat(), "figures": {}}
    with temporary_folder() as temporary:
        if "page" in expected:
            _page(record, folder or Path(temporary) / "big", data, rollup_steps, metric_steps, program)
        if "driver" in expected:
            _driver(record, Path(temporary) / "job", seconds, program)
    out.write_text(strict_json.dumps(record | _machine(program), indent=1) + "\n")
    missed = _show(record["figures"])
    typer.echo(f"metrics: {out}")
    if missed:
        raise typer.Exit(1)


def _page(record: dict[str, Any], run: Path, data: int, rollups: int, metrics: int, program: str) -> None:
    from benchmarks.observe import dashboard_set, page_measures
    from benchmarks.observe.synthetic_spans import Job

    if not (run / "metrics.jsonl").exists():
        dashboard_set.make(run, Job(data=data), 1, rollups, metrics)
    figures = record["figures"]
    with served(run) as (address, pid), page_measures.chromium(program) as browser, streams(address, run.name, STREAMS):
        for name, view in (("overview", "overview"), ("heat map", "heatmap"), ("timeline", "timeline")):
            lasted = page_measures.view_seconds(browser, f"{address}{view}", 5)
            # The first one reads the files; it counts.
            figures[f"first {name}"] = page_measures.summarise(lasted) | {"cold": lasted[0], "value": max(lasted)}
        context = browser.new_context(viewport={"width": 1280, "height": 720})
        page = context.new_page()
        for name, view in (("heat map", "heatmap"), ("timeline", "timeline"), ("grid", "grid")):
            page.goto(f"{address}{view}")
            page.wait_for_selector("main[data-ready]", timeout=60_000)
            page.wait_for_timeout(1000)
            pair = [
                each for kind in ("zoom", "move") for each in page_measures.frame_seconds(page, ".canvas canvas", kind)
            ]
            moved = page_measures.summarise(pair)
            drawn = page.evaluate("window.megascaleFrames.slice(-200)")
            figures[f"frames of the {name}"] = moved | {
                "value": moved["p95"],
                "drawing": page_measures.summarise(drawn),
            }
        figures["page"] = {"value": page_measures.page_bytes(browser) / 2**20}
        page.goto(f"{address}overview")
        page.wait_for_selector("main[data-ready]")
        last = int(strict_json.loads((run / "metrics.jsonl").read_text().rstrip().rsplit("\n", 1)[-1])["step"])
        lag = page_measures.live_seconds(page, run, 10, last)
        figures["live"] = page_measures.summarise(lag) | {"value": max(lag)}
        figures["server"] = {"value": page_measures.server_bytes(pid) / 2**20}
        context.close()


def _driver(record: dict[str, Any], folder: Path, seconds: float, program: str) -> None:
    """Measure the latency of an idle driver's loop, without pages and with them."""
    from benchmarks.harness.launched import Launched, make
    from benchmarks.observe import page_measures
    from megascale.resilience.driver.api.client import send_request

    folder.mkdir()
    job = Launched(make(folder), "watched", ["--train.steps=1000000"])
    try:
        job.first(lambda event: event.kind == "first_step")
        send_request(job.run, "POST", "/v1/job/pause", {"why": "benchmarks dashboard"})
        job.first(lambda event: event.kind == "paused")
        before = _late(job.run, _SETTLED)
        with (
            served(job.run) as (address, _),
            page_measures.chromium(program) as browser,
            streams(address, "watched", STREAMS),
        ):
            page = browser.new_context().new_page()
            page.goto(f"{address}nodes?node=n0")
            page.wait_for_selector("main[data-ready]", timeout=60_000)
            # Ten people who press reload.
            halt = threading.Event()
            peers = [threading.Thread(target=_reload, args=(address, halt), daemon=True) for _ in range(3)]
            for item in peers:
                item.start()
            lasted = _late(job.run, seconds)
            halt.set()
        record["figures"]["driver"] = page_measures.summarise(lasted) | {
            "value": max(lasted), "asked": len(lasted), "without": page_measures.summarise(before)
        }  # fmt: skip
    finally:
        job.process.send_signal(signal.SIGINT)
        job.end()
        job.end_agents()


def _late(run: Path, seconds: float) -> list[float]:
    """Seconds that the driver takes to answer the smallest question, twenty times a second."""
    from megascale.resilience.driver.api.client import send_request

    result, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        began = time.monotonic()
        send_request(run, "GET", "/health")
        result.append(time.monotonic() - began)
        time.sleep(0.05)
    return result


def _reload(address: str, halt: threading.Event) -> None:
    from urllib.request import urlopen

    while not halt.wait(0.3):
        with contextlib.suppress(OSError):
            urlopen(f"{address}api/nodes?run=watched", timeout=10).read()


@contextlib.contextmanager
def served(run: Path) -> Iterator[tuple[str, int]]:
    """The command in a process of its own: its address and process id."""
    command = [sys.executable, "-m", "megascale", "dashboard", str(run), "--port=0", "--no-browser", "--no-token"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        result = re.search(r"https?://\S+", process.stdout.readline())
        if result is None:
            raise OSError("the dashboard did not start")
        yield result[0], process.pid
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def streams(address: str, run: str, count: int) -> Iterator[list[int]]:
    """So many further clients of the live stream; how many events each has got."""
    got, connections = [0] * count, []
    host = address.removeprefix("http://").rstrip("/")

    def read(number: int, answer: http.client.HTTPResponse) -> None:
        with contextlib.suppress(OSError, ValueError, http.client.HTTPException, AttributeError):
            while line := answer.readline():
                got[number] += line.startswith(b"data:")

    for number in range(count):
        connection = http.client.HTTPConnection(host, timeout=60)
        connection.request("GET", f"/api/live?run={run}")
        answer = connection.getresponse()
        connections.append((connection, answer))
        threading.Thread(target=read, args=(number, answer), daemon=True).start()
    yield got
    for connection, _ in connections:
        if connection.sock is not None:
            connection.sock.close()
    if not all(got):
        raise AssertionError(f"of {count} streams {got.count(0)} got no event")


def _show(figures: dict[str, Any]) -> list[str]:
    """Print a table; names of the aims that are missed."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table, missed = Table("figure", "value", "median", "aim", box=box.SIMPLE_HEAD), []
    for name, item in figures.items():
        bound, unit = BOUNDS.get(name, (None, "s"))
        if bound is not None and item["value"] >= bound:
            missed.append(name)
        shown = [f"{item[key]:.3g} {unit}" if key in item else "" for key in ("value", "median")]
        table.add_row(
            name, *shown, "" if bound is None else f"< {bound:g} {unit}", style="red" if name in missed else ""
        )
    Console(highlight=False).print(table)
    return missed


def _machine(program: str) -> dict[str, Any]:
    import os
    import platform

    import duckdb

    import megascale

    output = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    versions = {"megascale": megascale.__version__, "duckdb": duckdb.__version__, "chromium": output.split("\n")[0]}
    return {"device": f"CPU, {os.cpu_count()} cores, {platform.machine()}", "versions": versions}
