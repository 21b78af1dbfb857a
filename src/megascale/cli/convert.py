"""`megascale convert import | export`: models of Hugging Face in and out."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from megascale.train.convert_model import Conversion

convert = typer.Typer(no_args_is_help=True, help="Bring models from Hugging Face folders and back.")


def register(app: typer.Typer) -> None:
    """Add `convert` to the command line."""
    app.add_typer(convert, name="convert")


@convert.command("import")
def import_(
    folder: Path = typer.Argument(
        ..., help="Folder with config.json and safetensors, as save_pretrained writes it.", show_default=False
    ),
    out: Path = typer.Option(..., "--out", "-o", help="Run folder to make, such as runs/gpt2.", show_default=False),
    sequence_length: int | None = typer.Option(
        None, min=2, help="Tokens in a training sample; default: as far as the model reaches (rotary models only)."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Make a run folder of a Hugging Face model: train, generate and evaluate then read it like any other run.

    Reads GPT-2, GPT-J, GPT-NeoX (Pythia), Llama, Mistral and Qwen2, from safetensors only: pickled .bin files are
    never opened. A setting that has no counterpart here is an error that names it. Nothing is fetched from the net.

    Examples:

      megascale convert import ~/models/gpt2 --out runs/gpt2

      megascale train runs/gpt2/config.toml --data.train=datasets/mine/train --train.steps=500 --lr.peak=3e-5

      megascale generate runs/gpt2 --prompt 'The meaning of life is'
    """
    from megascale import api

    made = api.import_model(folder, out, sequence_length=sequence_length)
    if not as_json:
        typer.echo(f"{made.path}: a {made.family} of {made.parameters:,} parameters, as a run before its first step")
    _tell(made, as_json)
    if not as_json:
        if made.tokenizer:
            typer.echo(f"tokenizer: {made.path}/tokenizer.json (megascale data build --tokenizer makes data for it)")
            typer.echo(f"try it: megascale generate {made.path} --prompt 'Once upon a time'")
        typer.echo(f"train it: megascale train {made.path}/config.toml --data.train=DATASET/train --train.steps=N")


@convert.command()
def export(
    run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib.", show_default=False),
    out: Path = typer.Option(..., "--out", "-o", help="Folder to make.", show_default=False),
    family: str | None = typer.Option(
        None, help="gpt2, gptj, gpt_neox, llama, mistral or qwen2; default: what the model is of."
    ),
    step: int | None = typer.Option(None, help="Checkpoint to use; default: the newest."),
    dtype: str | None = typer.Option(None, help="float32, bfloat16 or float16; default: the run's own."),
    tokenizer: bool = typer.Option(True, help="Write the run's tokenizer beside the model."),
    file_gib: float = typer.Option(4.0, min=0.001, help="GiB from which the weights are spread over several files."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Write a run's model as config.json, safetensors and tokenizer files, as transformers.AutoModelForCausalLM loads.

    A model that the family cannot say is an error that names the keys in the way. One file's weights are in memory at
    a time.

    Examples:

      megascale convert export runs/stdlib --out exported

      python -c "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('exported'))"
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from megascale import api

    console = Console(stderr=True)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing", total=None)
        made = api.export_model(
            run,
            out,
            family=family,
            step=step,
            dtype=dtype,
            tokenizer=tokenizer,
            file_bytes=int(file_gib * 2**30),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    if not as_json:
        files = ", ".join(sorted(p.name for p in made.path.iterdir() if p.suffix != ".safetensors"))
        typer.echo(f"{made.path}: a {made.family} of {made.parameters:,} parameters, with {files}")
    _tell(made, as_json)


def _tell(made: Conversion, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(made) | {"path": str(made.path)}))
        return
    for note in made.notes:
        typer.secho(f"note: {note}", fg="yellow")
