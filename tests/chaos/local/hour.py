"""One long launched run under random faults: the effective training time ratio, each recovery's time by phase.

Ratio, as the MegaScale paper defines it (section 6.3): iterations done times the time of one, over all time; a step
done twice counts once. Time of one: the mean of the run's own steps, copies to memory included; the median, which
puts what else the machine did down to the faults, is given beside it.

Extrapolation: what a fault costs on average (all time that brought no new step, the first start left out, over the
number of faults) once in three hours, instead of every minute or two.
"""

from __future__ import annotations

import json
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.launched import Launched, phases
from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from tests.chaos.local.fault_cases import CASES

PACE = 0.1  # least seconds of a step
RARE = 3 * 3600.0  # seconds between faults that the ratio is extrapolated to
# Faults and how often they are drawn. Those that count as a person's mistake when they come twice come once.
_DRAWN = {"kill-rank": 4, "segfault": 2, "stop-rank": 2, "kill-agent": 2, "kill-node": 2, "kill-driver": 2}
_ONCE = {"exception": 1, "out-of-memory": 1, "full-disk": 1, "flip-weight": 1, "nan-gradient": 1}
_RIDDEN = ("kill-driver", "nan-gradient")  # training goes on without a start
_NODES = ("kill-agent", "kill-node")
# Faults come some hundred times as often as in life, so budgets count over minutes in place of an hour.
_SETTINGS = ["--train.steps=10000000", "--resilience.budget_seconds=300", "--resilience.checksum_interval=1"]


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos hour`."""
    app.command("hour")(hour)


def hour(
    hours: float = typer.Option(1.0, min=0.01, help="Hours to train."),
    every: float = typer.Option(90.0, min=20.0, help="Seconds between faults, on average."),
    seed: int = typer.Option(0, help="Seed of the faults and their times."),
    out: Path = typer.Option(Path("chaos-hour.json"), help="JSON file for the figures."),
) -> None:
    """Train one launched job under random faults and print its effective training time. Needs no GPU.

    Exit code 1 if a fault was not recovered from with the right verdict.

    Example: python -m tests.chaos hour --hours 0.5 --every 90
    """
    from benchmarks.harness.launched import make
    from tests.chaos.faults.report import describe_machine

    with temporary_folder() as name:
        figures, good = long_run(make(Path(name)), hours, every, seed)
    out.write_text(strict_json.dumps(describe_machine() | figures, indent=1))
    typer.echo(f"figures: {out}")
    if not good:
        raise typer.Exit(1)


def long_run(file: Path, hours: float, every: float, seed: int) -> tuple[dict[str, Any], bool]:
    """Train for `hours` with a fault every `every` seconds on average; (figures, whether every fault was met)."""
    dice = random.Random(seed)
    begun = time.time()
    job = Launched(file, "hour", _SETTINGS, pace=PACE)
    first = job.first(lambda e: e.kind == "first_step")
    rows: list[dict[str, Any]] = []
    try:
        if first is not None:
            rows = _faults(job, begun + hours * 3600, every, dice)
    finally:
        job.process.send_signal(signal.SIGINT)
        ended = time.time()
        code = job.end()
    figures = _ratio(job, begun, ended, first.time if first is not None else ended, rows)
    figures |= {"exit_code": code, "seed": seed, "every": every, "rows": rows}
    _show(figures)
    return figures, code == 130 and bool(rows) and all(row["recovered"] and row["right"] for row in rows)


def _faults(job: Launched, deadline: float, every: float, dice: random.Random) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    remaining = _DRAWN | _ONCE
    due = time.time() + dice.expovariate(1 / every)
    while True:
        due = max(due, time.time() + 10.0)  # a fault while one is being recovered from is another bench's
        if due > deadline - 60.0:
            time.sleep(max(0.0, deadline - time.time()))
            return rows
        time.sleep(max(0.0, due - time.time()))
        kind = dice.choices(list(remaining), list(remaining.values()))[0]
        if kind in _ONCE:
            del remaining[kind]
        rows.append(_inject_fault(job, kind, dice))
        print(strict_json.dumps(rows[-1]), flush=True)
        if not rows[-1]["recovered"] and job.process.poll() is not None:
            return rows
        due += dice.expovariate(1 / every)


def _inject_fault(job: Launched, kind: str, dice: random.Random) -> dict[str, Any]:
    from megascale.errors import MegascaleError
    from megascale.resilience.faults.inject import Options, inject

    placed = next(e for e in reversed(job.events()) if e.kind == "attempt_started").nodes
    where = dice.randrange(2)
    options = Options(node=placed[where]) if kind in _NODES else Options(rank=where)
    after, injected = job.events()[-1].id, time.time()
    row: dict[str, Any] = {"kind": kind, "at": injected, "where": placed[where]}
    try:
        inject(job.run, kind, options)
    except MegascaleError as error:
        return row | {"recovered": False, "right": False, "why": str(error)}
    if kind == "kill-driver":
        job.process.wait()
        job.start()
    right = CASES[kind].verdicts
    expected = ("recover", "evict", "diagnose", "stop")
    verdict = job.first(lambda e: e.id > after and (e.kind in right or e.action in expected), 120.0)
    done, repeated = job.step(), None
    if kind not in _RIDDEN:
        repeated = job.first(lambda e: e.id > after and e.kind == "first_step", 180.0)
    result = phases(job, injected, verdict, repeated)
    resumed = result.pop("resumed_from")
    row |= result
    row["lost_steps"] = max(0, done - int(resumed)) if repeated and resumed is not None else 0
    row["actions"] = [e.action for e in job.events(after) if e.kind == "recovery_action"]
    row["verdict"] = verdict.kind if verdict else ""
    row["right"] = verdict is not None and verdict.kind in right
    row["recovered"] = row["right"] if kind in _RIDDEN else repeated is not None
    return row


def _ratio(job: Launched, begun: float, ended: float, first: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    seconds = []
    file = job.run / "metrics.jsonl"
    for line in file.read_text().splitlines() if file.exists() else []:
        record = json.loads(line)
        if "loss" in record and record.get("time", 0) <= ended:
            seconds.append(record["seconds"])
    worked, middle = sum(seconds), statistics.median(seconds) if seconds else 0.0
    start = first - begun
    cost = (ended - begun - start - worked) / max(1, len(rows))
    return {
        "hours": (ended - begun) / 3600,
        "faults": len(rows),
        "recovered": sum(row["recovered"] for row in rows),
        "right_verdicts": sum(row["right"] for row in rows),
        "steps": len(seconds),
        "step_seconds": worked / max(1, len(seconds)),
        "median_step_seconds": middle,
        "start_seconds": start,
        "effective_ratio": worked / (ended - begun),
        "effective_ratio_by_median": middle * len(seconds) / (ended - begun),
        "cost_of_a_fault": cost,
        "extrapolated_ratio": 1 - cost / RARE,
    }


def _show(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "n", "recovered", "detect", "stop", "load", "first step", "in all", "lost steps", "actions")
    rows = figures["rows"]
    for kind in sorted({row["kind"] for row in rows}):
        local = [row for row in rows if row["kind"] == kind]
        cells = [_median(local, name) for name in ("detect", "stop", "load", "step", "total", "lost_steps")]
        actions = ", ".join(sorted({r for row in local for r in row.get("actions", [])})) or "none"
        table.add_row(kind, str(len(local)), str(sum(row["recovered"] for row in local)), *cells, actions)
    console = Console(width=140, highlight=False)
    console.print(table)
    console.print(
        f"{figures['faults']} faults in {figures['hours']:.2f} h, {figures['recovered']} recovered, "
        f"{figures['right_verdicts']} with the right verdict; "
        f"{figures['steps']} steps of {figures['step_seconds']:.3f} s (median {figures['median_step_seconds']:.3f}); "
        f"effective training time ratio {figures['effective_ratio']:.3f} "
        f"({figures['effective_ratio_by_median']:.3f} by the median)"
    )
    console.print(
        f"a fault costs {figures['cost_of_a_fault']:.1f} s on average: once in three hours it leaves a ratio of "
        f"{figures['extrapolated_ratio']:.4f}"
    )


def _median(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in rows if row.get(name) is not None]
    return f"{statistics.median(values):.1f} ({max(values):.1f})" if values else "-"
