"""`megascale plot`: compare runs in one picture."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def plot(
        runs: list[Path] = typer.Argument(..., help="Run folders.", show_default=False),
        out: Path = typer.Option(Path("comparison.png"), help="PNG to write."),
    ) -> None:
        """Draw loss, learning rate and gradient norm of one or more runs against tokens.

        Example: megascale plot runs/serial runs/parallel --out blocks.png
        """
        from megascale.observe.plots import plot_runs

        typer.echo(f"wrote {plot_runs(runs, out)}")
