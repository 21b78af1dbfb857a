"""`python -m tests.chaos loader`: kill the loader and the workers of a training at random moments."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

from benchmarks.harness.temporary import require_folder
from megascale.core import strict_json
from megascale.errors import TrainingError


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos loader`."""
    app.command("loader")(loader)


def loader(
    kills: int = typer.Option(200, min=1, help="Kills of the loader and of workers."),
    seed: int = typer.Option(0, help="Seed of the kills."),
    folder: Path | None = typer.Option(None, help="Folder for the runs; default: a temporary folder."),
    out: Path = typer.Option(Path("chaos-loader.json"), help="JSON file for the results."),
) -> None:
    """Train twice, undisturbed and under random kills. Exit code 1 unless ledgers and losses are equal bit for bit.

    Example: python -m tests.chaos loader --kills 20
    """
    from rich.console import Console

    from tests.chaos.data.loader import run_chaos

    console = Console()
    if folder is not None:
        require_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        result = run_chaos(Path(name), kills, seed, console)
    out.write_text(strict_json.dumps(result, indent=1) + "\n")
    console.print(f"results: {out}")
    if not result["equal"]:
        raise TrainingError(f"the disturbed run differs from the undisturbed one: see {out}")
