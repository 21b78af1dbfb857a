"""`python -m tests.chaos soak --minutes N`: one launched job after the other under random faults, in several calls.

Each call trains for some minutes, adds its faults to the report, ends its job and looks for what it has left behind:
processes, sockets, folders and shared memory. The faults of a soak depend on its seed and their numbers alone, so that
several calls make the same soak as one. The report is written after each fault, and a call that is killed keeps them.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from benchmarks.harness.launched import Launched, make
from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from megascale.core.atomic_files import write_atomically
from megascale.core.capacity import usable_cores
from megascale.core.recovery_record import PHASES, RecoveryRecord
from megascale.data.loader.ring import find_dead_segments
from megascale.errors import ConfigError, MegascaleError
from tests.chaos.local.fault_cases import CASES

KINDS = {"kill-rank": 6, "stop-rank": 2, "segfault": 1, "kill-agent": 1, "kill-node": 1}  # and how often each is drawn
# Kinds whose mean costs have targets: a process that dies, and one that hangs.
COSTS = {"kill": ("kill-rank", "segfault"), "hang": ("stop-rank",)}
ENDING = 60.0  # seconds of a call that its end may take
LEAST = 15.0  # seconds from a recovery to the next fault
LINGER = 15  # seconds that checkpoint services outlive their trainers; a busy machine takes some to start a rank
RECOVERY_LIMIT = 120.0
PACE = 0.1  # least seconds of a step
SETTINGS = [
    "--train.steps=10000000",
    "--resilience.budget_seconds=60",
    "--resilience.no_progress_limit=20",
    "--resilience.checksum_interval=1",
    f"--checkpoint.linger={LINGER}",
]


def endure(minutes: float, every: float, seed: int, out: Path) -> dict[str, Any]:
    """Go on with the soak of the report `out` for some minutes, and return the report, which is written too.

    Args:
        every: seconds between faults, on average.
    """
    report = load_report(every, seed, out)
    call: dict[str, Any] = {"began": time.time(), "load": [os.getloadavg()[0]], "cores": usable_cores()}
    call |= {"seconds": 0.0, "faults": 0, "problem": "the call was ended from outside", "remains": []}
    earlier_faults = len(report["faults"])
    report["calls"].append(call)

    def save_report() -> None:
        call["seconds"] = time.time() - call["began"]
        call["faults"] = len(report["faults"]) - earlier_faults
        report["summary"] = summarise(report)
        write_atomically(out, strict_json.dumps(report, indent=1) + "\n")

    save_report()
    with temporary_folder(prefix="megascale-soak-") as name:
        folder = Path(name)
        temporary = folder / "t"  # short, since sockets are in it
        temporary.mkdir()
        segments = list_segments()
        with mock.patch.dict(os.environ, TMPDIR=str(temporary)):
            job = Launched(make(folder), "soak", SETTINGS, pace=PACE)
            try:
                problem = _strike(job, call["began"] + 60 * minutes - ENDING, report, save_report)
            finally:
                job.process.send_signal(signal.SIGINT)
                code = job.end(ENDING)
        remains = _wait_for_remains(temporary, segments)
        job.end_agents()
    if code != 130:
        problem = problem or f"the job ended with exit code {code} instead of 130"
    call |= {"problem": problem, "remains": remains}
    call["load"].append(os.getloadavg()[0])
    save_report()
    return report


def read_settings(out: Path) -> tuple[int, float]:
    """Return seed and interval of a report. Raises ConfigError if the file does not exist or is no report."""
    try:
        report = json.loads(out.read_text())
        return report["seed"], report["every"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--resume={out} is not the report of a soak ({error!r}); begin one with --out") from None


def load_report(every: float, seed: int, out: Path) -> dict[str, Any]:
    """Return the report of earlier calls, or a new one. Raises ConfigError if it has another seed or interval."""
    if not out.exists():
        return {"seed": seed, "every": every, "calls": [], "faults": []}
    report: dict[str, Any] = json.loads(out.read_text())
    if (report["seed"], report["every"]) != (seed, every):
        raise ConfigError(
            f"--out={out} holds a soak of --seed={report['seed']} --every={report['every']:g}; name another file"
        )
    return report


def summarise(report: dict[str, Any]) -> dict[str, Any]:
    """Return counts, hours and mean seconds per kind over all calls of a report."""
    kinds: dict[str, dict[str, float]] = {}
    for kind in KINDS:
        rows = [row for row in report["faults"] if row["kind"] == kind]
        recovered = [row for row in rows if not row["problem"]]
        kinds[kind] = {"faults": len(rows), "recovered": len(recovered)}
        if recovered:
            kinds[kind] |= {
                "mean_seconds": statistics.fmean(row["total"] for row in recovered),
                "mean_cost": statistics.fmean(row["cost"] for row in recovered),
                "mean_lost_steps": statistics.fmean(row["lost"] for row in recovered),
            }
    calls = report["calls"]
    return {
        "calls": len(calls),
        "hours": sum(call["seconds"] for call in calls) / 3600,
        "faults": len(report["faults"]),
        "problems": sum(bool(call["problem"]) for call in calls),
        "remains": sum(len(call["remains"]) for call in calls),
        "kinds": kinds,
    }


def _strike(job: Launched, deadline: float, report: dict[str, Any], save_report: Callable[[], None]) -> str:
    """Inject faults until the deadline; return what went wrong, "" if each was recovered from.

    Args:
        save_report: called after each fault.
    """
    if job.first(lambda e: e.kind == "first_step", deadline - time.time()) is None:
        return "the job came to no first step"
    while True:
        number = len(report["faults"])
        dice = random.Random(f"{report['seed']}-{number}")
        pause, remaining = divide_pause(report, dice, deadline - LEAST - time.time())
        time.sleep(pause)
        if remaining > 0:
            report["waited"] = report.get("waited", 0.0) + pause
            return "" if not job.over() else "the job ended by itself"
        report["waited"] = 0.0
        row = _inject(job, number, dice)
        report["faults"].append(row)
        save_report()
        print(strict_json.dumps(row), flush=True)
        if row["problem"]:
            return f"fault {number}: {row['problem']}"


def divide_pause(report: dict[str, Any], dice: random.Random, available: float) -> tuple[float, float]:
    """Return the part of the pause before the next fault that fits into this call, and the part for the next call.

    Without the second part, calls that are shorter than a pause would wait for the same fault again and again.

    Args:
        report: its "waited" is the part that earlier calls have waited.
        dice: of the fault.
        available: seconds until the last time at which this call may inject a fault.
    """
    total = max(LEAST, dice.expovariate(1 / report["every"]))
    pause = max(LEAST, total - report.get("waited", 0.0))
    part = min(pause, max(0.0, available))
    return part, pause - part


def _inject(job: Launched, number: int, dice: random.Random) -> dict[str, Any]:
    """Inject a random fault, and return what came of it."""
    from megascale.resilience.faults.inject import Options, inject

    kind = dice.choices(list(KINDS), list(KINDS.values()))[0]
    placed = next(e for e in reversed(job.events()) if e.kind == "attempt_started").nodes
    where = dice.randrange(len(placed))
    after = job.events()[-1].id
    step_seconds = _measure_step(job)
    injected = time.time()
    row: dict[str, Any] = {"number": number, "kind": kind, "where": placed[where], "time": injected, "problem": ""}
    options = Options(node=placed[where]) if kind in ("kill-agent", "kill-node") else Options(rank=where)
    try:
        inject(job.run, kind, options)
    except MegascaleError as error:
        return row | {"problem": f"it was not injected: {error}", "events": _describe_events(job)}
    event = job.first(lambda e: e.kind == "recovered" and e.id > after, RECOVERY_LIMIT)
    record = RecoveryRecord.from_details(event.details) if event else None
    if event is None or record is None:
        return row | {"problem": f"no recovery within {RECOVERY_LIMIT:g} s", "events": _describe_events(job)}
    total = event.time - injected
    row |= {
        "cause": record.cause,
        "total": total,
        "seconds": record.seconds,
        "starts": record.starts,
        "lost": record.lost_steps,
        "kept": len(record.reused_ranks),
        "doubts": record.doubts,
        "cost": total + max(0, record.lost_steps) * step_seconds,
    }
    if record.cause not in CASES[kind].verdicts:
        row["problem"] = f"its verdict was {record.cause}"
    return row


def _describe_events(job: Launched) -> list[str]:
    """Return the job's newest events, for a problem whose cause is not known."""
    return [f"{e.time:.1f} {e.kind}: {'; '.join(e.evidence)[:300]}" for e in job.events()[-12:]]


def _measure_step(job: Launched) -> float:
    """Return the median of the newest steps' seconds."""
    lines = (job.run / "metrics.jsonl").read_text().splitlines()[-40:]
    seconds = []
    for line in lines:
        with contextlib.suppress(ValueError, KeyError):
            seconds.append(float(json.loads(line)["seconds"]))
    return statistics.median(seconds) if seconds else 0.0


# what is left ---------------------------------------------------------------------------------------------------------


def _wait_for_remains(temporary: Path, segments: set[Path]) -> list[str]:
    """Return what the job has left behind once its services had the time to end."""
    deadline = time.monotonic() + LINGER + 30.0
    while True:
        remains = list(find_remains(temporary, segments))
        if not remains or time.monotonic() > deadline:
            return remains
        time.sleep(0.5)


def find_remains(temporary: Path, segments: set[Path]) -> Iterator[str]:
    """Yield processes, sockets, folders and shared memory of the job with this folder of temporary files.

    Args:
        segments: the loader's segments without a user before the job.
    """
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("TMPDIR") != str(temporary):
                continue
            yield f"process {process.pid}: {' '.join(process.cmdline())[:200]}"
            for connection in process.net_connections():
                yield f"socket {connection.laddr} of process {process.pid}"
    for path in temporary.glob("*/*"):
        yield f"folder or file {path}"
    for path in list_segments() - segments:
        yield f"shared memory {path}"


def list_segments() -> set[Path]:
    """Return the loader's segments that no process uses."""
    return {path for path, _ in find_dead_segments()}


def show(report: dict[str, Any]) -> list[str]:
    """Print the report's tables; return what went wrong."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=150, highlight=False)
    table = Table("fault", "n", *PHASES, "in all (most)", "lost steps", "kept", "cost")
    for kind in KINDS:
        rows = [row for row in report["faults"] if row["kind"] == kind and not row["problem"]]
        if not rows:
            continue
        phases = [_mean([row["seconds"].get(name, 0.0) for row in rows]) for name in PHASES]
        total = f"{_mean([row['total'] for row in rows])} ({max(row['total'] for row in rows):.1f})"
        lost = f"{_mean([row['lost'] for row in rows])} ({max(row['lost'] for row in rows)})"
        reused = _mean([row["kept"] for row in rows])
        table.add_row(kind, str(len(rows)), *phases, total, lost, reused, _mean([row["cost"] for row in rows]))
    console.print(table)
    for name, kinds in COSTS.items():
        costs = [row["cost"] for row in report["faults"] if row["kind"] in kinds and not row["problem"]]
        if costs:
            console.print(f"mean cost per {name}: {_mean(costs)} s ({len(costs)} faults), lost steps included")
    hours = sum(call["seconds"] for call in report["calls"]) / 3600
    console.print(f"{len(report['faults'])} faults in {hours:.2f} h and {len(report['calls'])} calls")
    problems = [call["problem"] for call in report["calls"] if call["problem"]]
    problems += [f"left behind: {text}" for call in report["calls"] for text in call["remains"]]
    for problem in problems:
        console.print(problem, soft_wrap=True)
    return problems


def _mean(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2f}"
