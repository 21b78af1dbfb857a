"""`megascale convert import|export`: convert Hugging Face models to run folders and back."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from megascale.cli.common import JSON, print_json

if TYPE_CHECKING:
    from megascale.train.convert_model import Conversion

convert = typer.Typer(no_args_is_help=True, help="Convert models from Hugging Face folders and back.")


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
        None, min=2, help="Tokens in a training sample, for rotary models only; default: the model's maximum."
    ),
    as_json: bool = JSON,
) -> None:
    """Make a run folder from a Hugging Face model. The commands train, generate and evaluate read it like any run.

    Reads GPT-2, Pythia, Llama, Mistral, Qwen2 and 3, Mixtral, gpt-oss, OLMo, Gemma, Phi and other families
    (docs/model-families.md) from safetensors, one file or indexed shards. Each read takes at most 64 MiB. Pickled
    .bin files are never opened. A setting without a counterpart is an error that names it. Nothing is downloaded.

    Examples:

      megascale convert import ~/models/gpt2 --out runs/gpt2

      megascale train runs/gpt2/config.toml --data.train=datasets/mine/train --train.steps=500 --lr.peak=3e-5

      megascale generate runs/gpt2 --prompt 'The meaning of life is'
    """
    from megascale import api

    run = api.import_model(folder, out, sequence_length=sequence_length)
    if as_json:
        _print_json(run)
        return
    typer.echo(f"{run.path}: {run.family} with {run.parameters:,} parameters, as a run before its first step")
    _print_notes(run)
    if run.tokenizer:
        typer.echo(f"tokenizer: {run.path}/tokenizer.json (megascale data build --tokenizer makes data for it)")
        typer.echo(f"try it: megascale generate {run.path} --prompt 'Once upon a time'")
    typer.echo(f"train it: megascale train {run.path}/config.toml --data.train=DATASET/train --train.steps=N")


@convert.command()
def export(
    run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib.", show_default=False),
    out: Path = typer.Option(..., "--out", "-o", help="Folder to make.", show_default=False),
    family: str | None = typer.Option(
        None, help="gpt2, gptj, gpt_neox, llama, mistral or qwen2; default: the first that fits the model."
    ),
    step: int | None = typer.Option(None, help="Step of the checkpoint; default: the newest."),
    dtype: str | None = typer.Option(
        None, help="float32, bfloat16 or float16; default: the run's train.precision, float64 as float32."
    ),
    adapter: bool = typer.Option(
        False, "--adapter", help="Write the adapters of a run with train.lora as a folder for peft, without the model."
    ),
    tokenizer: bool = typer.Option(True, help="Write the run's tokenizer too."),
    file_gib: float = typer.Option(4.0, min=0.001, help="Size in GiB above which weights are split into files."),
    as_json: bool = JSON,
) -> None:
    """Write a run's model as config.json, safetensors and tokenizer files for transformers.AutoModelForCausalLM.

    A model that the family cannot express is an error that names the keys. Memory holds one file's weights at a time.
    Adapters (train.lora) are merged into the model, or written alone with --adapter.

    Examples:

      megascale convert export runs/stdlib --out exported

      python -c "from transformers import AutoModelForCausalLM as M; print(M.from_pretrained('exported'))"

      megascale convert export runs/adapted --out adapter --adapter
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    from megascale import api

    if adapter:
        written = api.export_adapter(run, out, family=family, step=step, dtype=dtype)
        if as_json:
            _print_json(written)
            return
        typer.echo(f"{written.path}: adapters of {written.family} with {written.parameters:,} parameters, for peft")
        _print_notes(written)
        return
    console = Console(stderr=True)
    columns = (TextColumn("writing"), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("writing", total=None)
        model = api.export_model(
            run,
            out,
            family=family,
            step=step,
            dtype=dtype,
            tokenizer=tokenizer,
            file_bytes=int(file_gib * 2**30),
            progress=lambda written, total: bar.update(task, completed=written, total=total),
        )
    if as_json:
        _print_json(model)
        return
    files = sorted(file.name for file in model.path.iterdir() if file.suffix != ".safetensors")
    typer.echo(f"{model.path}: {model.family} with {model.parameters:,} parameters, with {', '.join(files)}")
    _print_notes(model)


def _print_json(conversion: Conversion) -> None:
    print_json(asdict(conversion) | {"path": str(conversion.path)})


def _print_notes(conversion: Conversion) -> None:
    for note in conversion.notes:
        typer.secho(f"note: {note}", fg="yellow")
