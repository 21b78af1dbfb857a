"""What recovery costs: every kind of fault against a launched job, timed by phase, and whether all went right."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.launched import Launched, make, phases
from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from tests.chaos.local.fault_cases import CASES, FaultCase


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos local`."""
    app.command("local")(resilience)


def resilience(
    kinds: list[str] = typer.Option(list(CASES), "--kind", help="Kinds of fault; may be repeated."),
    runs: int = typer.Option(5, min=1, help="Runs of each kind."),
    hours: float = typer.Option(0.0, min=0.0, help="Instead: one long run with random faults."),
    every: float = typer.Option(90.0, min=20.0, help="With --hours: seconds between faults, on average."),
    seed: int = typer.Option(0, help="With --hours: of faults and their times."),
    out: Path = typer.Option(Path("bench-resilience.json"), help="JSON file for the figures."),
) -> None:
    """Break launched jobs of a tiny model and time what follows. CPU, two ranks on two nodes, one spare.

    One fault a run: seconds to detect it and to the first new step, by phase; steps done twice; whether verdict and
    outcome are right and the final weights those of an undisturbed run bit for bit. With --hours: one run, random
    faults, the effective training time ratio. Exit code 1 if anything was not as it should be.

    Examples:

      python -m tests.chaos local --kind kill-rank --runs 3

      python -m tests.chaos local --hours 1 --every 90
    """
    from megascale.errors import ConfigError

    for kind in kinds:
        if kind not in CASES:
            raise ConfigError(f"--kind={kind} is no kind of fault of this bench; known: {', '.join(CASES)}")
    with temporary_folder() as name:
        file = make(Path(name))
        if hours:
            from tests.chaos.local.hour import long_run

            figures, good = long_run(file, hours, every, seed)
        else:
            figures, good = _all(file, kinds, runs)
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
    about |= {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    about["load"] = list(os.getloadavg())
    out.write_text(strict_json.dumps(about | figures, indent=1))
    typer.echo(f"figures: {out}")
    if not good:
        raise typer.Exit(1)


def _all(file: Path, kinds: list[str], runs: int) -> tuple[dict[str, Any], bool]:
    from rich.console import Console

    rows: list[dict[str, Any]] = []
    calm: dict[int, dict[str, Any]] = {}
    console = Console(highlight=False, soft_wrap=True)
    skipped = {kind: why for kind in kinds if (why := _impossible(CASES[kind]))}
    for kind, why in skipped.items():
        console.print(f"[yellow]skipped[/] {kind}: {why}")
        rows.append({"kind": kind, "skipped": why})
    # Round by round, so that what one quarter of an hour of the machine does to figures falls on all kinds.
    for i in range(runs):
        for kind in kinds:
            case = CASES[kind]
            if kind in skipped:
                continue
            if case.same and case.steps not in calm:
                calm[case.steps] = _calm(file, case.steps)
            row = _once(file, kind, i, calm.get(case.steps, {}))
            rows.append(row)
            mark = "[green]right[/]" if row["right"] else "[bold red]WRONG[/]"
            console.print(f"{mark} ", end="")
            console.print(strict_json.dumps(row), markup=False)
    _show(rows, kinds)
    return {"rows": rows}, all(row.get("right", True) for row in rows)


def _impossible(case: FaultCase) -> str:
    """Why this machine cannot run a case, "" if it can."""
    if case.redis and shutil.which("redis-server") is None:
        return "redis-server is not installed"
    if case.own_network and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "this machine does not permit network namespaces"
    return ""


def _calm(file: Path, steps: int) -> dict[str, Any]:
    from megascale.errors import TrainingError

    job = Launched(file, f"calm-{steps}", _words(steps))
    if code := job.end():
        raise TrainingError(f"the undisturbed run ended with {code}: {job.output.read_text()[-2000:]}")
    return job.weights()


def _words(steps: int, case: FaultCase | None = None) -> list[str]:
    tested = case is not None and case.spare
    more = case.words if case is not None else ()
    return [f"--train.steps={steps}", f"--resilience.test_spares={str(tested).lower()}", *more]


@contextmanager
def _redis(wanted: bool) -> Iterator[list[str]]:
    """A Redis server of our own on a free port; the words that make a job use it."""
    if not wanted:
        yield []
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield [f"--rendezvous.url=redis://127.0.0.1:{port}"]
    finally:
        server.kill()
        server.wait()


def _once(file: Path, kind: str, number: int, expected: dict[str, Any]) -> dict[str, Any]:
    case = CASES[kind]
    with _redis(case.redis) as more:
        words = [*_words(case.steps, case), *more]
        job = Launched(file, f"{kind}-{number}", words, own_network=case.own_network)
        try:
            return {"kind": kind, "run": number} | _strike(job, kind, case, number, expected)
        finally:
            job.end(0.1)


def _strike(job: Launched, kind: str, case: FaultCase, number: int, expected: dict[str, Any]) -> dict[str, Any]:
    from megascale.resilience.faults.inject import Options, inject

    started = job.first(lambda e: e.kind == "first_step")
    if case.spare:
        job.first(lambda e: e.kind == "node_diagnosed")
    time.sleep(0.7 + 0.21 * number)  # the fault falls on another step each time
    options = Options(**dict(case.options))
    if kind == "slow-link":
        time.sleep(3.0)  # steps to compare with
        options = Options(node="n1", seconds=25.0)
    places = next((e.nodes for e in reversed(job.events()) if e.kind == "attempt_started"), ())
    if options.node is not None and places and options.node not in places:
        options = replace(options, node=places[-1])  # a start on a busy machine may have gone to the spare
    injected = time.time()
    failed: list[BaseException] = []

    def inject_it() -> None:
        try:
            inject(job.run, case.kind or kind, options)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=inject_it)  # some faults take a while
    thread.start()
    if kind == "kill-driver":
        thread.join()
        job.process.wait()
        job.start()
    actions = ("recover", "evict", "diagnose", "stop")
    hard = None
    if case.ends == "recover":
        hard = job.first(lambda e: e.time > injected and e.action in actions)
    done = job.step()  # before the next attempt begins
    verdict = job.first(lambda e: e.time > injected and e.kind in case.verdicts) if case.verdicts else None
    hard = hard or next((e for e in job.events() if e.time > injected and e.action in actions), verdict)
    again = None
    if case.ends == "recover" and verdict is not None:
        again = job.first(lambda e: e.kind == "first_step" and e.time > injected)
    elif kind == "kill-driver":
        again = job.first(lambda e: e.kind == "node_joined" and e.time > injected)
    code = job.end()
    thread.join()
    row = phases(job, injected, hard, again if case.ends == "recover" else None)
    row["total"] = again.time - injected if again else None
    events = [e for e in job.events() if e.time > injected]
    same = not expected or code != 0 or _equal(job.weights(), expected)
    found = sorted({e.kind for e in events if e.kind in case.verdicts})
    right = not failed and started is not None and (bool(found) or not case.verdicts)
    if case.ends == "stop":
        person = next((e for e in events if e.action == "stop" and e.details.get("person")), None)
        right = right and code == 1 and person is not None
    else:
        attempts = sum(e.kind == "attempt_started" for e in events)
        right = right and code == 0 and (not case.same or same) and (case.ends == "recover") == bool(attempts)
    resumed = row.pop("resumed_from")
    lost = max(0, done - int(resumed)) if case.ends == "recover" and resumed is not None else None
    return {
        "right": right,
        "exit_code": code,
        "same_weights": same if case.same and code == 0 else None,
        "lost_steps": lost,
        **row,
        "actions": [e.action for e in events if e.kind == "recovery_action"],
        "verdicts": found,
        "evidence": list(verdict.evidence)[:2] if verdict else [],
        "failed": [str(error) for error in failed],
        # What was said instead of what should have been.
        "events": []
        if right
        else [f"{e.time - injected:.2f} s {e.kind}: {'; '.join(e.evidence)[:300]}" for e in events],
    }


def _equal(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    import torch

    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def _show(rows: list[dict[str, Any]], kinds: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table

    heads = (
        "fault",
        "right",
        "same weights",
        "detect",
        "stop",
        "load",
        "first step",
        "in all",
        "lost steps",
        "actions",
    )
    table = Table(*heads, title="seconds: median (worst)", box=None, padding=(0, 2))
    for kind in kinds:
        mine = [r for r in rows if r["kind"] == kind]
        if "skipped" in mine[0]:
            table.add_row(kind, "skipped", *[""] * 8)
            continue
        same = [r["same_weights"] for r in mine if r["same_weights"] is not None]
        times = [_worst(mine, name) for name in ("detect", "stop", "load", "step", "total")]
        actions = ", ".join(sorted({" ".join(r["actions"]) or "none" for r in mine}))
        right = f"{sum(r['right'] for r in mine)} of {len(mine)}"
        equal = f"{sum(same)} of {len(same)}" if same else "-"
        table.add_row(kind, right, equal, *times, _worst(mine, "lost_steps"), actions)
    Console(width=160).print(table)


def _worst(rows: list[dict[str, Any]], name: str) -> str:
    values = sorted(r[name] for r in rows if r[name] is not None)
    if not values:
        return "-"
    if name == "lost_steps":
        return f"{values[len(values) // 2]} ({values[-1]})"
    return f"{values[len(values) // 2]:.1f} ({values[-1]:.1f})"
