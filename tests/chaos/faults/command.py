"""`python -m tests.chaos faults`: inject faults into jobs on one site, and report what followed."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from benchmarks.harness.temporary import require_folder
from megascale.core import strict_json
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from tests.chaos.faults.site import FaultSite, Row

# Site -> "module:class".
SITES: dict[str, str] = {
    "local": "tests.chaos.local.local_site:LocalSite",
    "machines": "tests.chaos.machines.machines_site:MachinesSite",
    "slurm": "tests.chaos.slurm.slurm_faults_site:SlurmFaultSite",
    "kubernetes": "tests.chaos.kubernetes.kubernetes_faults_site:KubernetesFaultSite",
}


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos faults`."""
    app.command("faults")(faults)


def faults(
    site: str = typer.Option("local", help=f"Where jobs run: {', '.join(SITES)}."),
    kinds: list[str] = typer.Option([], "--kind", help="Kinds of fault; may be repeated. Default: all of the site."),
    runs: int = typer.Option(3, min=1, help="Runs of each kind."),
    folder: Path | None = typer.Option(
        None, help="Keep rows, runs and logs here; rows that it has are not run again. Default: nothing is kept."
    ),
    listed: bool = typer.Option(False, "--list", help="Instead: print the site's kinds of fault."),
    shown: bool = typer.Option(False, "--session", help="Instead: run the session that the documentation shows."),
    out: Path = typer.Option(Path("chaos-faults.json"), help="JSON file for the report."),
) -> None:
    """Inject one fault per run into a job of a tiny model, and report what followed. Needs no GPU.

    A run is right if the expected verdict comes, the job ends without a person, and its weights equal those of an
    undisturbed run bit for bit. Exit code 1 if a run is not right.

    Sites: `local` runs two nodes as processes of this machine. `machines` plays five machines by network namespaces
    (root, ip, iptables, sshd). `slurm` starts a real Slurm (root, Debian's slurm-wlm and munge). `kubernetes` starts
    real API servers and kubelets (root, scripts/kubernetes-build).

    Examples:

      python -m tests.chaos faults --kind kill-rank --runs 1

      python -m tests.chaos faults --site slurm --runs 3 --folder slurm-faults
    """
    kind_of_site = load_site(site)
    if listed:
        typer.echo("\n".join(kind_of_site.kinds))
        return
    for kind in kinds:
        if kind not in kind_of_site.kinds:
            raise ConfigError(f"--kind={kind} is unknown on the site {site}; known: {', '.join(kind_of_site.kinds)}")
    problem = kind_of_site.find_problem()
    if problem:
        raise ConfigError(f"--site={site} cannot run on this machine: {problem}")
    with open_work_folder(folder) as work:
        if shown:
            with kind_of_site(work) as location:
                raise typer.Exit(0 if location.show_session(typer.echo) else 1)
        rows = run_campaign(kind_of_site, work, kinds or list(kind_of_site.kinds), runs)
    write_report(kind_of_site, rows, out)
    if not all(row.get("right", True) for row in rows):
        raise typer.Exit(1)


def load_site(name: str) -> type[FaultSite]:
    """Return the class of a site. Raise ConfigError for an unknown name."""
    if name not in SITES:
        raise ConfigError(f"--site={name} is unknown; known: {', '.join(SITES)}")
    module, _, kind = SITES[name].partition(":")
    site: type[FaultSite] = getattr(importlib.import_module(module), kind)
    return site


@contextmanager
def open_work_folder(folder: Path | None) -> Iterator[Path]:
    """Provide the folder of a campaign: `folder`, or a temporary folder that other users may enter."""
    if folder is not None:
        yield require_folder(folder).absolute()
        return
    # The path is short because sockets are created below it.
    work = Path(tempfile.mkdtemp(prefix="ms"))
    work.chmod(0o755)  # Pods run as another user, who must be able to enter the folder.
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def run_campaign(kind_of_site: type[FaultSite], folder: Path, kinds: Sequence[str], runs: int) -> list[Row]:
    """Run every kind `runs` times, round by round, and return the rows.

    Rows are appended to FOLDER/rows.jsonl at once; runs that the file has are left out.
    """
    from rich.console import Console

    from tests.chaos.faults.report import show

    console = Console(highlight=False, soft_wrap=True)
    file = folder / "rows.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    rows = [row for row in rows if row["kind"] in kinds]
    expected = {row["name"] for row in rows}
    possible = []
    for kind in dict.fromkeys(kinds):
        problem = kind_of_site.find_problem_of(kind)
        if problem:
            console.print(f"[yellow]skipped[/] {kind}: {problem}")
            rows.append({"kind": kind, "name": kind, "skipped": problem})
        else:
            possible.append(kind)
    # All kinds of a round run before the next round, so that a busy quarter of an hour does not hit one kind alone.
    missing = [(kind, f"{kind}-{i}") for i in range(runs) for kind in possible if f"{kind}-{i}" not in expected]
    if missing:
        with kind_of_site(folder) as site:
            for kind, name in missing:
                row = {"kind": kind, "name": name, "machine_load": round(os.getloadavg()[0], 1)}
                row |= site.run_once(kind, name)
                with open(file, "a") as opened:
                    opened.write(strict_json.dumps(row) + "\n")
                rows.append(row)
                _print_row(console, row)
    show(rows, kinds)
    return rows


def _print_row(console: Console, row: Row) -> None:
    console.print("[green]right[/] " if row["right"] else "[bold red]WRONG[/] ", end="")
    console.print(strict_json.dumps(row), markup=False)


def write_report(kind_of_site: type[FaultSite], rows: Sequence[Row], out: Path) -> None:
    """Write rows, machine and versions as JSON."""
    from tests.chaos.faults.report import describe_machine

    record = {"site": kind_of_site.name, **describe_machine(), **kind_of_site.describe(), "rows": list(rows)}
    out.write_text(strict_json.dumps(record, indent=1))
    typer.echo(f"report: {out}")
