"""Jobs under a real Slurm: nodes set down and drained, daemons killed, jobs requeued, cancelled and out of time."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.launched import Launched, Steps, make, phases, recovery
from megascale.core import strict_json
from tests.chaos.slurm.faults import FAULTS, SlurmFault
from tests.chaos.slurm.job import SlurmJob
from tests.chaos.slurm.session import session
from tests.chaos.slurm.site import SlurmSite, impossible

PACE = 0.1  # least seconds of a step
NODES = 4  # two with ranks, a spare, and one that requeued and next jobs may get
ONE_MACHINE = "one-machine"
_BEFORE = 20  # steps before the fault
_LEARN = 30.0  # seconds in which Slurm learns of a script's end without the daemons that were killed
_PHASES = ("detect", "stop", "load", "step", "total")


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos slurm`."""
    app.command("slurm")(slurm)


def slurm(
    kinds: list[str] = typer.Option([ONE_MACHINE, *FAULTS], "--kind", help="Kinds of fault; may be repeated."),
    runs: int = typer.Option(3, min=1, help="Runs of each kind."),
    shown: bool = typer.Option(False, "--session", help="Instead: a session as the documentation shows it."),
    out: Path = typer.Option(Path("bench-slurm.json"), help="JSON file for the figures."),
) -> None:
    """Break jobs under a real Slurm and time what follows. CPU; needs root, Debian's slurm-wlm and munge, ip, iptables.

    A munged, a slurmctld and four slurmds on network namespaces; a job of two ranks with a spare, sent off by sbatch as
    `launch --dry-run` prints it. One fault a run; right is the expected verdict, an end without a person, the weights
    of an undisturbed run bit for bit, at most one step lost, and nothing left that trains beside its replacement.
    The kind one-machine is the same job on this machine with a node killed, to compare with. Exit code 1 if anything
    was not right.

    Examples:

      python -m tests.chaos slurm --kind node-down --runs 1

      python -m tests.chaos slurm --runs 3 --out slurm.json

      python -m tests.chaos slurm --session
    """
    from megascale.errors import ConfigError

    for kind in kinds:
        if kind not in FAULTS and kind != ONE_MACHINE:
            raise ConfigError(
                f"--kind={kind} is no kind of fault of this bench; known: {ONE_MACHINE}, {', '.join(FAULTS)}"
            )
    if why := impossible():
        raise ConfigError(f"the slurm campaign cannot run here: {why}")
    folder = Path(tempfile.mkdtemp(prefix="ms"))  # short: munged's socket lies in it
    try:
        if shown:
            raise typer.Exit(_session(folder))
        rows = _all(folder, kinds, runs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout.strip()
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
    about |= {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    about |= {"slurm": version, "load": list(os.getloadavg())}
    out.write_text(strict_json.dumps(about | {"rows": rows}, indent=1))
    typer.echo(f"{version}, {about['cores']} cores with a load of {about['load'][0]:.1f}; figures: {out}")
    if not all(row["right"] for row in rows):
        raise typer.Exit(1)


def _session(folder: Path) -> int:
    work = folder / "job"
    work.mkdir()
    with SlurmSite(folder / "s", NODES) as site:
        return 0 if session(site, work, typer.echo) else 1


def _all(folder: Path, kinds: list[str], runs: int) -> list[dict[str, Any]]:
    from rich.console import Console

    console, file = Console(highlight=False, soft_wrap=True), make(folder)
    calm: dict[int, dict[str, Any]] = {}
    rows = []
    with SlurmSite(folder / "s", NODES) as site:
        for i in range(runs):
            for kind in kinds:
                row = one(site, file, kind, f"{kind}-{i}", calm)
                rows.append(row)
                console.print("[green]right[/] " if row["right"] else "[bold red]WRONG[/] ", end="")
                console.print(strict_json.dumps(row), markup=False)
    _show(rows, kinds)
    return rows


def one(site: SlurmSite, file: Path, kind: str, name: str, calm: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """One fault of a kind, and what came of it.

    Args:
        site: idle; it is again afterwards.
        file: settings (launched.py::make).
        name: of the run.
        calm: weights of undisturbed runs by their steps; what is missing is trained.
    """
    fault = FAULTS["node-down" if kind == ONE_MACHINE else kind]
    if fault.steps not in calm:
        calm[fault.steps] = _calm(file, fault.steps)
    row: dict[str, Any] = {"kind": kind, "name": name, "verdict": None, "lost": None}
    words = [f"--train.steps={fault.steps}"]
    if kind == ONE_MACHINE:
        job: Launched = Launched(file, name, [*words, "--resilience.test_spares=false"], PACE)
        try:
            row |= _one_machine(job)
        finally:
            job.end(0.0 if "code" not in row else 10.0)
    else:
        job = SlurmJob(site, file, name, words, PACE, fault.sbatch)
        try:
            row |= _strike(job, fault)
        finally:
            site.repair()
    row["same"] = row.get("code") == 0 and _same(job.weights(), calm[fault.steps])
    lost = row["lost"] is None or row["lost"] <= fault.lost
    row["right"] = bool(row["same"] and lost and not row["wrong"])
    if not row["right"]:
        row["events"] = [
            f"{e.time:.2f} {e.kind} {e.action} {' '.join(e.nodes)}: {e.evidence}"[:400] for e in job.events()
        ]
        row["said"] = job.said() if isinstance(job, SlurmJob) else job.output.read_text()[-1500:]
    return row


def _calm(file: Path, steps: int) -> dict[str, Any]:
    from megascale.errors import TrainingError

    job = Launched(file, f"calm-{steps}", [f"--train.steps={steps}", "--resilience.spares=0"], pace=0.001)
    if code := job.end():
        raise TrainingError(f"the undisturbed run ended with {code}: {job.output.read_text()[-2000:]}")
    return job.weights()


def _one_machine(job: Launched) -> dict[str, Any]:
    """The same without Slurm: all processes of a node are killed, and the spare takes over."""
    from megascale.resilience.faults.inject import Options, inject

    wrong: list[str] = []
    while job.first(lambda e: e.kind == "first_step") and job.step() < _BEFORE:
        time.sleep(0.02)
    injected, before = time.time(), job.events()[-1].id
    with Steps(job) as steps:
        inject(job.run, "kill-node", Options(node="n1"))
        verdict, again = recovery(job, FAULTS["node-down"].verdicts, injected, before)
    row: dict[str, Any] = dict(phases(job, injected, verdict, again, steps))
    row |= {"code": job.end(), "verdict": verdict.kind if verdict else None, "wrong": wrong}
    row["actions"] = [e.action for e in job.events() if e.kind == "recovery_action"]
    return row


def _strike(job: SlurmJob, fault: SlurmFault) -> dict[str, Any]:
    """Let it train, break it, and say what came of it."""
    row: dict[str, Any] = {"wrong": ["no first step"]}
    if job.first(lambda e: e.kind == "first_step") is None:
        return row
    job.until_step(_BEFORE)
    before, began = job.events()[-1].id, time.time()
    verdict = again = None
    with Steps(job) as steps:
        injected = fault.strike(job)
        if fault.verdicts:
            verdict, again = recovery(job, fault.verdicts, began, before)
            if fault.ends == "next" and verdict:
                injected.at = max(injected.at, verdict.time) if fault.sbatch else injected.at
    row = {"node": injected.node, "verdict": verdict.kind if verdict else None}
    row |= phases(job, injected.at, verdict, again, steps)
    job.first(lambda e: e.kind == "job_done")
    job.first(lambda e: e.kind == "driver_ended")
    row["code"] = job.end(_LEARN)
    if row["code"] < 0:
        # A slurmd that comes back kills the batch script of a job that has lost its node: not before that has ended.
        job.site.start_all()
        row["code"] = job.end()
    events = job.events()
    row["actions"] = [e.action for e in events if e.kind == "recovery_action"]
    row["attempts"] = sum(e.kind == "attempt_started" for e in events)
    row["wrong"] = injected.wrong + fault.check(job, injected)
    row["wrong"] += [f"none of {', '.join(fault.verdicts)} came"] if fault.verdicts and verdict is None else []
    row["wrong"] += ["trainers started again"] if fault.ends == "ride" and row["attempts"] > 1 else []
    row["wrong"] += [f"Slurm: {job.jobs()}"] if row["code"] else []
    return row


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _show(rows: list[dict[str, Any]], kinds: list[str]) -> None:
    from statistics import median

    from rich.console import Console
    from rich.table import Table

    heads = ("fault", "right", "same weights", "detect", "stop", "load", "first step", "in all", "lost", "actions")
    table = Table(*heads, title="seconds: median (worst)", box=None, padding=(0, 2))
    for kind in dict.fromkeys(kinds):
        own = [row for row in rows if row["kind"] == kind]

        def seconds(key: str, own: list[dict[str, Any]] = own) -> str:
            found = [row[key] for row in own if row.get(key) is not None]
            return f"{median(found):.1f} ({max(found):.1f})" if found else "-"

        lost = [row["lost"] for row in own if row["lost"] is not None]
        actions = ", ".join(sorted({" ".join(row.get("actions", [])) or "none" for row in own}))
        table.add_row(
            kind,
            f"{sum(row['right'] for row in own)} of {len(own)}",
            f"{sum(row['same'] for row in own)} of {len(own)}",
            *map(seconds, _PHASES),
            str(max(lost)) if lost else "-",
            actions,
        )
    Console(width=160).print(table)
