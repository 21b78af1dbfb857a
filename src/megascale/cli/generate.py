"""`megascale generate`: text from a trained run."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def generate(
        run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib.", show_default=False),
        prompt: str = typer.Option("def ", help="Text to continue."),
        tokens: int = typer.Option(200, min=1, help="Longest continuation."),
        temperature: float = typer.Option(0.8, min=0, help="0 takes the likeliest token each time."),
        top_k: int = typer.Option(50, min=0, help="Draw among this many likeliest tokens; 0: all."),
        top_p: float = typer.Option(1.0, min=0, max=1, help="Draw among the likeliest that have this chance together."),
        seed: int = typer.Option(0, min=0, help="The same seed gives the same text."),
        step: int | None = typer.Option(None, help="Checkpoint to use; default: the newest."),
        device: str = typer.Option("auto", help="auto, cpu or cuda."),
    ) -> None:
        """Continue a text with a trained model.

        Example: megascale generate runs/stdlib --prompt 'class Queue' --tokens 300 --seed 7
        """
        from megascale import api

        typer.echo(prompt, nl=False)
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        for piece in api.generate(run, prompt, tokens=tokens, step=step, device=device, **options):  # type: ignore[arg-type]
            typer.echo(piece, nl=False)
        typer.echo()
