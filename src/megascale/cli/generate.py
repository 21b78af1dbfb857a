"""`megascale generate`: text from a trained run."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from megascale.errors import ConfigError, DataError


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def generate(
        run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib.", show_default=False),
        prompt: str | None = typer.Option(None, help="Text to continue. [default: 'def']", show_default=False),
        prompt_file: Path | None = typer.Option(None, help="File that holds the text to continue; - reads stdin."),
        tokens: int = typer.Option(200, min=1, help="Longest continuation."),
        temperature: float = typer.Option(0.8, min=0, help="0 takes the likeliest token each time."),
        top_k: int = typer.Option(50, min=0, help="Draw among this many likeliest tokens; 0: all."),
        top_p: float = typer.Option(1.0, min=0, max=1, help="Draw among the likeliest that have this chance together."),
        repetition_penalty: float = typer.Option(1.0, min=0.01, help="Above 1, words that are there come less often."),
        stop: list[str] = typer.Option([], help="End before this text; may be given again."),
        seed: int = typer.Option(0, min=0, help="The same seed gives the same text."),
        step: int | None = typer.Option(None, help="Checkpoint to use; default: the newest."),
        device: str = typer.Option("auto", help="auto, cpu or cuda."),
        as_json: bool = typer.Option(False, "--json", help="Print prompt and continuation as JSON."),
    ) -> None:
        """Continue a text with a trained model.

        Ends after --tokens tokens, where the model ends the document, or before a --stop text.

        Examples:

          megascale generate runs/stdlib --prompt 'class Queue' --tokens 300 --seed 7

          megascale generate runs/stdlib --prompt-file begun.py --temperature 0 --stop 'def '
        """
        from megascale import api

        text = _prompt(prompt, prompt_file)
        pieces = api.generate(
            run,
            text,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            stop=stop,
            seed=seed,
            step=step,
            device=device,
        )
        if as_json:
            typer.echo(json.dumps({"prompt": text, "text": "".join(pieces)}))
            return
        first = next(pieces, "")  # what is wrong is said before anything is printed
        typer.echo(text + first, nl=False)
        for piece in pieces:
            typer.echo(piece, nl=False)
        typer.echo()


def _prompt(text: str | None, file: Path | None) -> str:
    if file is None:
        return "def" if text is None else text
    if text is not None:
        raise ConfigError("both --prompt and --prompt-file are given; leave one out")
    from megascale.config.text_files import read_text

    try:
        if str(file) == "-":
            return typer.get_text_stream("stdin", encoding="utf-8").read()
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompt-file={file} cannot be read as text: {error}") from None
