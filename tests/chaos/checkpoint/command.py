"""`tests.chaos checkpoint`: attack a run that saves, and check every committed checkpoint after each attack."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from benchmarks.harness.temporary import require_folder
from megascale.core import strict_json
from megascale.errors import TrainingError

if TYPE_CHECKING:
    from rich.console import Console

    from tests.chaos.checkpoint.chaos import Blow


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos checkpoint`."""
    app.command("checkpoint")(checkpoint)


def checkpoint(
    points: int = typer.Option(200, min=1, help="Attacks to make."),
    seed: int = typer.Option(0, help="Seed of the attacks' kinds and moments."),
    folder: Path = typer.Option(Path(), help="Folder for the run, on the disk to test."),
    out: Path = typer.Option(Path("chaos-checkpoint.json"), help="JSON file for the results."),
) -> None:
    """Attack a run that saves. Exit code 1 if a committed checkpoint is lost or damaged.

    Attacks kill, hang and cut off processes, and fill, fail or power off the disk.

    Example: python -m tests.chaos checkpoint --points 60
    """
    from rich.console import Console

    console = Console()
    require_folder(folder)
    with tempfile.TemporaryDirectory(prefix="chaos-checkpoint-", dir=folder) as name:
        rows = attack(console, Path(name), points=points, seed=seed)
    out.write_text(strict_json.dumps({"seed": seed, "kinds": rows}, indent=2) + "\n")
    console.print(f"results: {out}")
    if any(row["held"] < row["points"] for row in rows):
        raise TrainingError(f"some attacks broke the checkpoints: see {out}")


def attack(console: Console, folder: Path, points: int, seed: int) -> list[dict[str, Any]]:
    """Make `points` attacks; return a row per kind with the number of attacks and of those that did no harm."""
    from rich import box
    from rich.progress import Progress
    from rich.table import Table

    from tests.chaos.checkpoint.chaos import KINDS, strike

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("attacks", total=points)

        def report(blow: Blow) -> None:
            progress.update(task, advance=1, description=blow.kind)
            if not blow.held:
                progress.console.print(f"[red]{blow.kind}[/]: {blow.note}")

        blows = strike(points, folder, seed, report)
    rows = []
    table = Table("attack", "points", "held", title=f"chaos, seed {seed}", box=box.SIMPLE_HEAD, title_justify="left")
    for kind in KINDS + ("leaks",):
        of_kind = [blow for blow in blows if blow.kind == kind]
        notes = [blow.note for blow in of_kind if not blow.held]
        stored = len(of_kind) - len(notes)
        rows.append({"kind": kind, "points": len(of_kind), "held": stored, "notes": notes})
        color = "red" if notes else "green"
        table.add_row(kind, str(len(of_kind)), f"[{color}]{stored}")
    console.print(table)
    return rows
