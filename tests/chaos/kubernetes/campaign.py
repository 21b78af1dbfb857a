"""Jobs on a real Kubernetes: pods deleted, nodes lost, drained and cut off, the API away, drivers killed, doubled."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.launched import make
from megascale.core import strict_json
from tests.chaos.kubernetes.faults import FAULTS
from tests.chaos.kubernetes.run import LOCAL, one_local, one_of
from tests.chaos.kubernetes.site import KubernetesSite, impossible, programs
from tests.chaos.kubernetes.table import show

NODES = 4  # two with ranks, a spare, and one where what was lost comes again


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos kubernetes`."""
    app.command("kubernetes")(kubernetes_faults)


def kubernetes_faults(
    kinds: list[str] = typer.Option([*LOCAL, *FAULTS], "--kind", help="Kinds of fault; may be repeated."),
    runs: int = typer.Option(3, min=1, help="Runs of each kind."),
    folder: Path = typer.Option(Path("kubernetes-faults"), help="What was run so far, and logs of what was not right."),
    shown: bool = typer.Option(False, "--session", help="Instead: a session as the documentation shows it."),
    out: Path = typer.Option(Path("bench-kubernetes-faults.json"), help="JSON file for the figures."),
) -> None:
    """Break jobs on a real Kubernetes and time what follows. CPU; needs root and what scripts/kubernetes-build builds.

    etcd, an API server, controllers and four kubelets with containers on network namespaces; a job of two ranks with a
    spare in real pods. One fault a run; right is the expected verdict, an end without a person, the weights of an
    undisturbed run bit for bit, at most one step lost, and never two trainers of a rank, as trainers' own records
    show. The kinds one-machine and one-machine-cut are the same job on nodes of this machine, with one killed and one
    cut off, to compare with. A run that is in FOLDER is not done again. Exit code 1 if anything was not right.

    Examples:

      python -m tests.chaos kubernetes --kind pod-deleted --runs 1

      python -m tests.chaos kubernetes --runs 5 --folder faults --out kubernetes.json

      python -m tests.chaos kubernetes --session
    """
    from megascale.errors import ConfigError

    for kind in kinds:
        if kind not in FAULTS and kind not in LOCAL:
            known = ", ".join([*LOCAL, *FAULTS])
            raise ConfigError(f"--kind={kind} is no kind of fault of this bench; known: {known}")
    if why := impossible():
        raise ConfigError(f"the kubernetes campaign cannot run here: {why}")
    if shown:
        from tests.chaos.kubernetes.session import session

        with _work() as work, KubernetesSite(work / "s", NODES) as site:
            raise typer.Exit(0 if session(site, work, typer.echo) else 1)
    folder.mkdir(parents=True, exist_ok=True)
    _all(folder, kinds, runs)
    rows = [row for row in done(folder) if row["kind"] in kinds]
    about: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
    about |= {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    about |= {"kubernetes": (programs() / "VERSION").read_text().strip()}
    out.write_text(strict_json.dumps(about | {"rows": rows}, indent=1))
    show(rows, kinds)
    typer.echo(f"Kubernetes {about['kubernetes']}, {about['cores']} cores; figures: {out}")
    if not all(row["right"] for row in rows):
        raise typer.Exit(1)


@contextlib.contextmanager
def _work() -> Iterator[Path]:
    work = Path(tempfile.mkdtemp(prefix="ms"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def done(folder: Path) -> list[dict[str, Any]]:
    """The rows of runs that were done."""
    file = folder / "rows.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _all(folder: Path, kinds: Sequence[str], runs: int) -> None:
    """Do the runs that are missing, a line each into FOLDER/rows.jsonl."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    known = {row["name"] for row in done(folder)}
    missing = [
        (kind, f"{kind}-{i}") for i in range(runs) for kind in dict.fromkeys(kinds) if f"{kind}-{i}" not in known
    ]
    if not missing:
        return
    gpus = int(any(FAULTS[kind].gpus for kind, _ in missing if kind in FAULTS))
    with _work() as work, KubernetesSite(work / "s", NODES, gpus) as site:
        file = make(work)
        for kind, name in missing:
            row = one(site, file, kind, name, folder)
            row["machine_load"] = round(os.getloadavg()[0], 1)
            with open(folder / "rows.jsonl", "a") as rows:
                rows.write(strict_json.dumps(row) + "\n")
            console.print("[green]right[/] " if row["right"] else "[bold red]WRONG[/] ", end="")
            console.print(
                strict_json.dumps({k: v for k, v in row.items() if k not in ("events", "said")}), markup=False
            )


def one(site: KubernetesSite, file: Path, kind: str, name: str, folder: Path) -> dict[str, Any]:
    """One fault of a kind, and what came of it.

    Args:
        site: whole; it is again afterwards.
        file: settings (launched.py::make).
        name: of the run.
        folder: undisturbed weights are kept there, and logs of a run that was not right.
    """
    if kind in LOCAL:
        return one_local(file, kind, name, folder)
    return one_of(site, file, FAULTS[kind], kind, name, folder)
