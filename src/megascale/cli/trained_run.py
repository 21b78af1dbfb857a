"""`megascale evaluate|generate|plot`: evaluate a trained model, generate text with it, plot its training."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megascale.cli.common import JSON, check_picture, make_console, make_text_table, print_json
from megascale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from megascale.train.chat import ChatSession
    from megascale.train.evaluation import Evaluation

RUN = typer.Argument(..., help="Run folder, such as runs/stdlib.", show_default=False)
STEP = typer.Option(None, help="Step of the checkpoint; default: the newest.")
DEVICE = typer.Option("auto", help="auto, cpu, cuda or cuda:N.")
CONTEXT = typer.Option(1, min=1, help="Processes of this host that divide the tokens of a long sequence.")


class _Axis(StrEnum):
    """Horizontal axis of `plot`."""

    TOKENS = "tokens"
    STEPS = "steps"
    HOURS = "hours"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(evaluate)
    app.command()(generate)
    app.command()(plot)


def evaluate(
    run: Path = RUN,
    file: str | None = typer.Option(None, help="Token file without .bin/.idx; default: the run's data.valid."),
    stride: int | None = typer.Option(
        None, min=1, help="Tokens that each window predicts; a smaller stride gives each token more context."
    ),
    step: int | None = STEP,
    device: str = DEVICE,
    linear_precision: str | None = typer.Option(
        None, help="train.linear_precision of linear layers; default: as trained. The value `default`: without float8."
    ),
    context: int = CONTEXT,
    as_json: bool = JSON,
) -> None:
    """Print the loss of a trained model on a token file, and bits per byte if the size of the file's text is known.

    Windows are model.sequence_length tokens long and predict each token of the file once.

    Examples:

      megascale evaluate runs/stdlib --file datasets/stdlib/valid

      megascale evaluate runs/stdlib --stride 64

      megascale evaluate runs/float8 --linear-precision default
    """
    from megascale import api

    _start_ranks("evaluate", run, step=step, context=context, device=device)
    with make_console(stderr=True).status("loading the model") as status:
        evaluation = api.evaluate(
            run,
            file,
            stride=stride,
            step=step,
            device=device,
            linear_precision=linear_precision,
            context=context,
            on_progress=lambda done, total: status.update(f"evaluated {done:,} of {total:,} windows"),
        )
    if as_json:
        print_json(asdict(evaluation))
    else:
        print_evaluation(evaluation)


def _start_ranks(command: str, run: Path, *, step: int | None, context: int, device: str) -> None:
    """Run this command in `context` processes and exit, if `context` is above 1 and this process is not one of them."""
    if context == 1:
        return
    from megascale.train import launcher
    from megascale.train.context_ranks import start_ranks
    from megascale.train.trained_config import load_trained_config

    if not launcher.is_launched_rank():
        config, _ = load_trained_config(run, step)
        arguments = sys.argv[sys.argv.index(command) :]  # this command line without the program
        raise typer.Exit(start_ranks(config, context, device, arguments))


def print_evaluation(evaluation: Evaluation) -> None:
    """Print the held-out loss; if the size of the text is known, also bits per byte and those of compressors."""
    console = make_console()
    weight_text = ""
    if evaluation.weight_sum is not None:
        weight_text = f" with a loss weight of {evaluation.weight_sum:,.10g}"
    step_text = ""
    if evaluation.step is not None:
        step_text = f", step {evaluation.step}"
    console.print(
        f"held-out loss {evaluation.loss:.4f} nats per token over {evaluation.tokens:,} tokens{weight_text}{step_text}",
        markup=False,
    )
    if evaluation.within_documents:
        console.print(
            "attention stays within documents, whose first tokens do not count, as in training "
            "(data.document_mask=true in the run's config.toml)",
            markup=False,
        )
    if evaluation.bits_per_byte is None:
        return
    table = make_text_table("held-out text", "bits per byte")
    table.add_row("this model", f"[bold]{evaluation.bits_per_byte:.3f}[/bold]")
    if evaluation.compressed is not None:
        table.add_row("zlib -9", f"{evaluation.compressed.zlib_bits_per_byte:.3f}")
        table.add_row("xz -9e", f"{evaluation.compressed.xz_bits_per_byte:.3f}")
    console.print(table)


def generate(
    run: Path = RUN,
    prompt: str | None = typer.Option(None, help="Text to continue. [default: 'def']", show_default=False),
    prompt_file: Path | None = typer.Option(None, help="File with the text to continue; - reads stdin."),
    chat: bool = typer.Option(
        False,
        "--chat",
        help="Answer --prompt as a message of a conversation; without --prompt, talk until Ctrl-D or Ctrl-C.",
    ),
    system: str = typer.Option("", help="With --chat: first message, with the role system."),
    tokens: int = typer.Option(200, min=1, help="Longest continuation, in tokens."),
    temperature: float = typer.Option(0.8, min=0, help="0 takes the most likely token each time."),
    top_k: int = typer.Option(50, min=0, help="Draw among this many most likely tokens; 0: all."),
    top_p: float = typer.Option(
        1.0, min=0, max=1, help="Draw among the most likely tokens whose probabilities sum to this."
    ),
    repetition_penalty: float = typer.Option(
        1.0, min=0.01, help="Above 1, tokens that occurred already become less likely."
    ),
    stop: list[str] = typer.Option([], help="End before this text; repeatable."),
    seed: int = typer.Option(0, min=0, help="The same seed gives the same text."),
    step: int | None = STEP,
    device: str = DEVICE,
    context: int = CONTEXT,
    as_json: bool = JSON,
) -> None:
    """Continue a text with a trained model.

    Ends after --tokens tokens, at the model's end of document, or before a --stop text.

    Examples:

      megascale generate runs/stdlib --prompt 'class Queue' --tokens 300 --seed 7

      megascale generate runs/stdlib --prompt-file begun.py --temperature 0 --stop 'def '

      megascale generate runs/chat --chat --prompt 'What is 2 plus 3?'

      megascale generate runs/chat --chat
    """
    from megascale import api

    if chat:
        is_interactive = prompt is None and prompt_file is None
        _check_chat_options(stop, context=context, is_interactive=is_interactive, as_json=as_json)
        session = api.open_chat(
            run,
            system=system,
            tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            step=step,
            device=device,
        )
        if is_interactive:
            _talk(session)
        else:
            _answer(session, _read_prompt(prompt, prompt_file), as_json)
        return
    if system:
        raise ConfigError("--system needs --chat; add it, or omit --system")
    if context > 1 and prompt_file is not None and str(prompt_file) == "-":
        raise ConfigError("--prompt-file=- is the input of one process; name a file, or omit --context")
    _start_ranks("generate", run, step=step, context=context, device=device)
    text = _read_prompt(prompt, prompt_file)
    steps: list[int | None] = []
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
        context=context,
        on_note=lambda note: typer.echo(f"note: {note}", err=True),
        on_step=steps.append,
    )
    if as_json:
        print_json({"prompt": text, "text": "".join(pieces), "step": steps[0]})
        return
    first = next(pieces, "")  # errors are raised here, before anything is printed
    typer.echo(text + first, nl=False)
    _print_pieces(pieces)


def _check_chat_options(stop: list[str], *, context: int, is_interactive: bool, as_json: bool) -> None:
    """Raise ConfigError for options that --chat excludes."""
    if stop:
        raise ConfigError("--stop has no effect with --chat, whose replies end with the template's turn; omit it")
    if context > 1:
        raise ConfigError("--context has no effect with --chat, which runs in one process; omit it")
    if is_interactive and as_json:
        raise ConfigError(
            "--json prints one reply, and --chat without --prompt is a conversation; add --prompt, or omit --json"
        )


def _print_pieces(pieces: Iterable[str]) -> None:
    """Print a text while it is generated, and end the line."""
    for piece in pieces:
        typer.echo(piece, nl=False)
    typer.echo()


def _answer(session: ChatSession, text: str, as_json: bool) -> None:
    """Print the reply to one message."""
    pieces = session.reply(text)
    if as_json:
        for _ in pieces:  # The session generates while its pieces are read.
            pass
        print_json({"messages": session.messages, "step": session.step})
        return
    _print_pieces(pieces)


def _talk(session: ChatSession) -> None:
    """Read messages and print replies until the end of the input or Ctrl-C. Ctrl-C in a reply ends the reply only."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        typer.echo("Ctrl-D or Ctrl-C ends the conversation, Ctrl-C during a reply ends the reply.", err=True)
    while True:
        try:
            text = input("> " if is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            typer.echo()
            return
        if not text.strip():
            continue
        try:
            for piece in session.reply(text):
                typer.echo(piece, nl=False)
        except KeyboardInterrupt:  # ends the reply only
            pass
        typer.echo()


def _read_prompt(text: str | None, file: Path | None) -> str:
    """Return the text of --prompt or --prompt-file, or the default prompt without both."""
    if file is None:
        return "def" if text is None else text
    if text is not None:
        raise ConfigError("both --prompt and --prompt-file are given; omit one")
    from megascale.config.text_files import read_text

    try:
        if str(file) == "-":
            return typer.get_text_stream("stdin", encoding="utf-8").read()
        return read_text(file)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompt-file={file} cannot be read as text: {error}; name a text file in UTF-8") from None


def plot(
    runs: list[Path] = typer.Argument(..., help="Run folders.", show_default=False),
    out: Path = typer.Option(
        None,
        "--out",
        "-o",
        help="Picture to write (.png, .svg, .pdf). Default: plots/loss.png in the run folder, or plots/comparison.png "
        "in the first of several.",
        callback=check_picture,
        show_default=False,
    ),
    x: _Axis = typer.Option(_Axis.TOKENS, "--x", help="Horizontal axis; hours count time in steps."),
    smooth: float = typer.Option(
        0.95, min=0, max=0.9999, help="Weight of the past in the average drawn over noisy curves; 0: no average."
    ),
) -> None:
    """Draw loss, learning rate and gradient norm of one or more runs, finished or training.

    Examples:

      megascale plot runs/serial runs/parallel --out blocks.png

      megascale plot runs/* --x hours --smooth 0.99
    """
    from megascale.observe.plots import plot_runs

    def warn(text: str) -> None:
        typer.secho(text, fg="yellow", err=True)

    if out is None:
        name = "loss.png" if len(runs) == 1 else "comparison.png"
        out = runs[0] / "plots" / name
        if runs[0].is_dir():
            out.parent.mkdir(exist_ok=True)
    try:
        picture = plot_runs(runs, out, x=x.value, smoothing=smooth, warn=warn)
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be written: {error.strerror or error}") from None
    typer.echo(f"wrote {picture}")
