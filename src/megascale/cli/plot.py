"""`megascale plot`: compare runs in one picture."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import typer

from megascale.cli.common import check_picture
from megascale.errors import ConfigError


class _Axis(StrEnum):
    TOKENS = "tokens"
    STEPS = "steps"
    HOURS = "hours"


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def plot(
        runs: list[Path] = typer.Argument(..., help="Run folders.", show_default=False),
        out: Path = typer.Option(
            Path("comparison.png"), "--out", "-o", help="Picture to write (.png, .svg, .pdf).", callback=check_picture
        ),
        x: _Axis = typer.Option(_Axis.TOKENS, "--x", help="What lies along the bottom; hours count time in steps."),
        smooth: float = typer.Option(
            0.95, min=0, max=0.9999, help="Weight of the past in the average drawn over noisy curves; 0: none."
        ),
    ) -> None:
        """Draw loss, learning rate and gradient norm of one or more runs, also of those that still go on.

        Examples:

          megascale plot runs/serial runs/parallel --out blocks.png

          megascale plot runs/* --x hours --smooth 0.99
        """
        from megascale.observe.plots import plot_runs

        def warn(text: str) -> None:
            typer.secho(text, fg="yellow", err=True)

        try:
            typer.echo(f"wrote {plot_runs(runs, out, x=x.value, smoothing=smooth, warn=warn)}")
        except OSError as error:
            raise ConfigError(f"--out={out} cannot be written: {error.strerror or error}") from None
