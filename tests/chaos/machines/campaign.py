"""Jobs on several machines, real ssh between them: a machine, a link, an agent or the driver's machine is lost."""

from __future__ import annotations

import os
import platform
import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.launched import Launched, Steps, make, phases, weights
from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from tests.chaos.machines import torchrun as torchrun_machines
from tests.chaos.machines.faults import FAULTS, HEADS, LINK, NODES, MachinesJob
from tests.chaos.machines.network import Machines, impossible
from tests.chaos.machines.session import hosts_session, torchrun_session

PACE = 0.1  # least seconds of a step
TORCHRUN = "torchrun"
_BEFORE = 20  # steps before the fault


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos machines`."""
    app.command("machines")(machines)


def machines(
    kinds: list[str] = typer.Option([*FAULTS, TORCHRUN], "--kind", help="Kinds of fault; may be repeated."),
    runs: int = typer.Option(5, min=1, help="Runs of each kind."),
    shown: bool = typer.Option(False, "--session", help="Instead: sessions as the documentation shows them."),
    out: Path = typer.Option(Path("bench-machines.json"), help="JSON file for the figures."),
    keep: Path = typer.Option(None, "--keep", help="Folder for runs, logs and consoles; default: none are kept."),
) -> None:
    """Break a network of machines under a launched job, and time what follows. CPU; needs root, ip, iptables and sshd.

    Network namespaces play five machines with links of 200 Mbit/s: two for the driver, three where it starts agents by
    ssh (two ranks, one spare). Every step is copied to a peer's memory; checkpoints are on shared storage. One fault
    a run; right is the expected verdict, an end without a person, the weights of an undisturbed run bit for bit, and
    at most one step lost. The kind torchrun is two machines without a driver: a rank is killed, both end, and the same
    commands go on from the newest checkpoint. Exit code 1 if anything was not.

    Examples:

      python -m tests.chaos machines --kind machine-gone --runs 1

      python -m tests.chaos machines --runs 5 --out machines.json

      python -m tests.chaos machines --session
    """
    from megascale.errors import ConfigError

    for kind in kinds:
        if kind not in FAULTS and kind != TORCHRUN:
            raise ConfigError(
                f"--kind={kind} is no kind of fault of this bench; known: {', '.join(FAULTS)}, {TORCHRUN}"
            )
    if why := impossible():
        raise ConfigError(f"the machines campaign cannot run here: {why}")
    with temporary_folder() as name:
        folder = Path(name) if keep is None else keep.absolute()
        folder.mkdir(parents=True, exist_ok=True)
        if shown:
            good = [torchrun_session(folder / "two", typer.echo), hosts_session(folder / "hosts", typer.echo)]
            raise typer.Exit(0 if all(good) else 1)
        rows = _all(folder, kinds, runs)
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
    about |= {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    out.write_text(strict_json.dumps(about | {"load": list(os.getloadavg()), "rows": rows}, indent=1))
    typer.echo(f"figures: {out}")
    if not all(row["right"] for row in rows):
        raise typer.Exit(1)


def _all(folder: Path, kinds: list[str], runs: int) -> list[dict[str, Any]]:
    from rich.console import Console

    console, file = Console(highlight=False, soft_wrap=True), make(folder)
    calm: dict[int, dict[str, Any]] = {}
    rows = []
    for i in range(runs):
        for kind in kinds:
            steps = torchrun_machines.STEPS if kind == TORCHRUN else FAULTS[kind].steps
            if steps not in calm:
                calm[steps] = _calm(file, steps)
            once = _torchrun if kind == TORCHRUN else _once
            row = once(folder, file, kind, i, calm[steps])
            rows.append(row)
            console.print("[green]right[/] " if row["right"] else "[bold red]WRONG[/] ", end="")
            console.print(strict_json.dumps(row), markup=False)
    _show(rows, kinds)
    return rows


def _calm(file: Path, steps: int) -> dict[str, Any]:
    from megascale.errors import TrainingError

    # A pace of 0 stands for the injected fault's default, half a second.
    job = Launched(file, f"calm-{steps}", [f"--train.steps={steps}", "--resilience.spares=0"], pace=0.001)
    if code := job.end():
        raise TrainingError(f"the undisturbed run ended with {code}: {job.output.read_text()[-2000:]}")
    return job.weights()


def _once(folder: Path, file: Path, kind: str, number: int, calm: dict[str, Any]) -> dict[str, Any]:
    fault, name = FAULTS[kind], f"{kind}-{number}"
    network = folder / f"machines-{name}"
    shutil.rmtree(network, ignore_errors=True)
    row: dict[str, Any] = {"kind": kind, "run": number}
    with Machines(network, [*HEADS, *NODES]) as there:
        for machine in there:
            machine.limit(LINK)
        job = MachinesJob(there, file, name, [f"--train.steps={fault.steps}"], PACE)
        try:
            row |= _strike(job, kind)
        finally:
            job.end(0.0 if "code" not in row else 10.0)
    row["weights"] = row.get("code") == 0 and _same(job.weights(), calm)
    row["right"] = bool(
        row["weights"]
        and (row["verdict"] or not fault.verdicts)
        and (row["attempts"] == 1 if fault.ends == "ride" else row["attempts"] > 1)
        and (row["lost"] or 0) <= 1
        and (row["back"] or not fault.back)
    )
    if not row["right"]:
        row["said"] = job.output.read_text()[-1500:]
    return row


def _torchrun(folder: Path, file: Path, kind: str, number: int, calm: dict[str, Any]) -> dict[str, Any]:
    """The same commands on two machines, with nobody who recovers."""
    name = f"{kind}-{number}"
    row, run = torchrun_machines.torchrun(folder / f"machines-{name}", file, name)
    row["weights"] = row["code"] == 0 and _same(weights(run), calm)
    return {"kind": kind, "run": number, **row, "right": row["weights"] and row["right_end"]}


def _strike(job: MachinesJob, kind: str) -> dict[str, Any]:
    """Let it train, break it, and say what came of it."""
    fault = FAULTS[kind]
    row: dict[str, Any] = {"verdict": None, "attempts": 0, "lost": None, "back": False}
    if job.first(lambda e: e.kind == "first_step") is None:
        return row | {"why": "no first step"}
    deadline = time.monotonic() + 120.0
    while job.step() < _BEFORE and time.monotonic() < deadline:
        time.sleep(0.05)
    machine, before = job.holder(1), job.events()[-1].id
    verdict = again = None
    with Steps(job) as steps:
        injected = time.time()
        fault.strike(machine, job)
        if fault.verdicts:
            verdict = job.first(lambda e: e.kind in fault.verdicts and e.time > injected - 0.01)
        if fault.ends == "recover":
            again = job.first(lambda e: e.kind == "first_step" and e.id > before)
    row |= phases(job, injected, verdict, again, steps)
    row["code"] = job.end()
    row["verdict"] = verdict.kind if verdict else None
    events = job.events()
    row["attempts"] = sum(e.kind == "attempt_started" for e in events)
    row["actions"] = [e.action for e in events if e.kind == "recovery_action"]
    row["back"] = any(e.kind == "node_joined" and e.nodes == (machine.name,) and e.id > before for e in events)
    return row


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _show(rows: list[dict[str, Any]], kinds: list[str]) -> None:
    from statistics import median

    from rich.console import Console
    from rich.table import Table

    table = Table("fault", "right", "same", "detect", "first step", "lost", "recovery actions", box=None)
    for kind in kinds:
        own = [row for row in rows if row["kind"] == kind]

        def seconds(key: str, own: list[dict[str, Any]] = own) -> str:
            found = [row[key] for row in own if row.get(key) is not None]
            return f"{median(found):.1f} ({max(found):.1f})" if found else "-"

        count = f"{sum(row['right'] for row in own)} of {len(own)}"
        same = f"{sum(row['weights'] for row in own)} of {len(own)}"
        lost = [row["lost"] for row in own if row["lost"] is not None]
        actions = " ".join(sorted({" ".join(row.get("actions", [])) for row in own if row.get("actions")})) or "none"
        cells = [count, same, seconds("detect"), seconds("total"), str(max(lost)) if lost else "-", actions]
        table.add_row(kind, *cells)
    Console(highlight=False).print(table)
