"""`megascale evaluate`: held-out loss of a trained run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from megascale.core import strict_json


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def evaluate(
        run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib.", show_default=False),
        file: str | None = typer.Option(None, help="Token file without .bin/.idx; default: the run's data.valid."),
        stride: int | None = typer.Option(
            None, min=1, help="Tokens that each window predicts; fewer than its length give each more to go by."
        ),
        step: int | None = typer.Option(None, help="Checkpoint to use; default: the newest."),
        device: str = typer.Option("auto", help="auto, cpu or cuda."),
        linear_precision: str | None = typer.Option(
            None,
            help="Linear layers' train.linear_precision; default: as trained. The value `default`: without float8.",
        ),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    ) -> None:
        """Loss of a trained model on a token file, and bits per byte where the file's text size is known.

        Windows are model.sequence_length long and predict each token of the file once.

        Examples:

          megascale evaluate runs/stdlib --file datasets/stdlib/valid

          megascale evaluate runs/stdlib --stride 64

          megascale evaluate runs/float8 --linear-precision default
        """
        from megascale import api
        from megascale.cli.summary import print_evaluation

        found = api.evaluate(run, file, stride=stride, step=step, device=device, linear_precision=linear_precision)
        if as_json:
            typer.echo(strict_json.dumps(asdict(found)))
        else:
            print_evaluation(found)
