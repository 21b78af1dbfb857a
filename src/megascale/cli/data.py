"""`megascale data build | inspect | ledger | samples`: make data sets, look into them, prove what a run trained on."""

from __future__ import annotations

from pathlib import Path

import typer

from megascale.core import strict_json

data = typer.Typer(no_args_is_help=True, help="Make data sets of text and look into them.")


# What `data inspect` says of a comparison with the checksum in dataset.json.
_COMPARED = {
    "all": "all tokens are as they were built",
    "sample": "a sample of the tokens is as it was built (--full reads all)",
    "none": "not compared: no checksum was recorded when they were made",
}


def register(app: typer.Typer) -> None:
    """Add `data` to the command line."""
    app.add_typer(data, name="data")


@data.command()
def build(
    out: Path = typer.Option(..., "--out", "-o", help="Folder to make."),
    stdlib: bool = typer.Option(False, "--stdlib", help="Use the Python standard library's own source as text."),
    inputs: list[Path] = typer.Option([], "--input", "-i", help="File or folder of text; may be given again."),
    vocab_size: int = typer.Option(4096, help="Entries of the byte-level BPE tokenizer to train."),
    tokenizer: Path | None = typer.Option(
        None, help="Use this tokenizer.json (Hugging Face) or .tiktoken file instead of training one."
    ),
    held_out: float = typer.Option(0.05, help="Share of the text kept from training (the library has its own)."),
    text_key: str = typer.Option("text", help="Where jsonl records and parquet rows have their text."),
    workers: int | None = typer.Option(None, min=1, help="Processes; default: one a core."),
    as_json: bool = typer.Option(False, "--json", help="Print the manifest as JSON."),
) -> None:
    """Make a data set: token files for training and evaluation, a tokenizer and a manifest.

    Reads text files (each is a document), .jsonl and .json (also .gz and .zst), .parquet, and folders of them. Killed
    and called again it goes on where it stopped; when all is done it says so and does nothing.

    Examples:

        megascale data build --stdlib --out datasets/stdlib

        megascale data build --input ~/notes --input book.txt --vocab-size 8192 --out datasets/mine

        megascale data build --input crawl/ --tokenizer llama/tokenizer.json --held-out 0.001 --out datasets/crawl
    """
    from dataclasses import asdict

    from rich.console import Console
    from rich.table import Table

    from megascale.data.prepare.builder import build as run

    made = run(
        out,
        use_stdlib=stdlib,
        inputs=inputs,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        held_out=held_out,
        text_key=text_key,
        workers=workers,
        progress=not as_json,
    )
    if as_json:
        typer.echo(strict_json.dumps(asdict(made.manifest)))
        return
    console = Console()
    if not made.fresh:
        console.print(f"{out} is already built from these inputs; nothing to do.")
    table = Table("part", "documents", "tokens", "bytes", "bytes/\ntoken", "zlib -9\nbits/byte", "xz -9e\nbits/byte")
    for name, part in made.manifest.parts.items():
        sizes = part.compressed
        extra = [f"{sizes.zlib_bits_per_byte:.3f}", f"{sizes.xz_bits_per_byte:.3f}"] if sizes else ["", ""]
        table.add_row(
            name, f"{part.documents:,}", f"{part.tokens:,}", f"{part.bytes:,}", f"{part.bytes_per_token:.2f}", *extra
        )
    console.print(table)
    for reason, count in made.manifest.skipped.items():
        console.print(f"skipped {reason}: {count:,}", markup=False)
    for note in made.manifest.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print(
        f"Train on it with --data.train={out}/train --data.valid={out}/valid", soft_wrap=True, highlight=False
    )


@data.command()
def inspect(
    path: Path = typer.Argument(..., help="A data set's folder, or one token file without .bin/.idx."),
    samples: int = typer.Option(3, help="Documents to show the beginning of."),
    tokens: int = typer.Option(64, help="Tokens to show of each."),
    tokenizer: Path | None = typer.Option(None, help="tokenizer.json; default: the one beside the token file."),
    full: bool = typer.Option(False, "--full", help="Compare all tokens with their checksum, not a sample."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON, one line a token file."),
) -> None:
    """Check token files and show what they hold: documents, lengths, decoded samples.

    Reads any Megatron-LM .bin/.idx pair. Exit code 4 if a file is damaged or does not fit its tokenizer. The tokens
    of a data set built here are compared with a checksum: a sample of them, or all with --full.

    Examples:

        megascale data inspect datasets/stdlib

        megascale data inspect datasets/stdlib --full

        megascale data inspect corpus_text_document --tokenizer gpt2/tokenizer.json --samples 10
    """
    from dataclasses import asdict

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from megascale.data.dataset.description import describe_token_file, manifest_sources, prefixes

    console = Console()
    for prefix in prefixes(path):
        facts = describe_token_file(prefix, samples, tokens, tokenizer, full=full)
        if as_json:
            typer.echo(strict_json.dumps(asdict(facts)))
            continue
        low, median, mean, high = facts.lengths
        console.print(f"\n[bold]{escape(facts.prefix)}[/bold]: index and data agree")
        for source in manifest_sources(prefix):
            console.print(f"  made of    {escape(source)}", soft_wrap=True)
        console.print(f"  documents  {facts.documents:,} in {facts.sequences:,} sequences")
        console.print(
            f"  tokens     {facts.tokens:,} ({facts.dtype}, {facts.bytes:,} bytes), largest id {facts.largest_id}"
        )
        console.print(f"  contents   {_COMPARED[facts.compared]}")
        if facts.longest_run is not None:
            length, first, token = facts.longest_run
            console.print(
                f"  repeated   id {token}, {length:,} times from token {first:,} on (the longest run of one id)"
            )
        console.print(f"  lengths    {low:,} to {high:,} tokens a document, median {median:,}, mean {mean:,.1f}")
        console.print(f"  tokenizer  {escape(facts.tokenizer or 'none beside it; ids are shown as they are')}")
        table = Table("tokens in a document", "documents", "")
        widest = max((count for *_, count in facts.histogram), default=1)
        for start, stop, count in facts.histogram:
            table.add_row(f"{start:,} to {stop - 1:,}", f"{count:,}", "█" * round(40 * count / widest))
        console.print(table)
        for document, text in facts.samples:
            console.print(f"[bold]document {document:,} begins[/bold]")
            console.print(text, markup=False, highlight=False, style="dim")


@data.command()
def ledger(
    run: Path = typer.Argument(..., help="A run's folder, such as runs/stdlib."),
    draw: bool = typer.Option(True, help="Draw the ids again and compare; needs the data files of the run."),
    full: bool = typer.Option(False, "--full", help="Compare the tokens of every step, not of some."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Prove that a run trained each sample once: no number missing or twice, each step on what the seed gives.

    Compares checksums of what all ranks have read: of sample numbers for every step, of tokens for steps of up to 67
    million tokens (of text one million), evenly over the run. Exit code 4 if the ledger shows a sample skipped,
    repeated or exchanged.

    Examples:

        megascale data ledger runs/stdlib

        megascale data ledger runs/stdlib --no-draw

        megascale data ledger runs/stdlib --full
    """
    from dataclasses import asdict

    from megascale.data.dataset.ledger import check_ledger
    from megascale.data.dataset.samples import SampleSource
    from megascale.data.loader.host_layout import index_folder
    from megascale.errors import DataError
    from megascale.train.run_folder import RunFolder, read_lines, run_config

    config = run_config(run)
    file = RunFolder(run).samples
    if not file.exists():
        raise DataError(f"{run} has no ledger ({file} is missing): it has not trained a step yet, or lost its history")
    source = SampleSource(config, index_folder(config)) if draw else None
    result = check_ledger(read_lines(file), source, full=full)
    if source is not None:
        source.close()
    if as_json:
        typer.echo(strict_json.dumps(asdict(result)))
    else:
        typer.echo(f"{result.steps:,} steps, {result.samples:,} samples from number 0 on")
        if source is not None:
            typer.echo(f"{result.distinct:,} different (epoch, file, window); {result.epochs:.3f} epochs")
            typer.echo(f"tokens of {result.compared:,} steps read again and compared with what ranks had read")
        for sentence in result.missing:
            typer.echo(sentence)
        if result.other_data:
            typer.echo(f"{result.other_data:,} steps were trained before a change of the data that was accepted")
    if result.faults:
        raise DataError(f"{file}: {'; '.join(result.faults)}. The run did not train each sample once")
    if as_json:
        return
    if result.recorded < result.steps:
        unknown = result.steps - result.recorded
        typer.echo(
            f"each sample was due once; the lines of {unknown:,} steps are of an older version and do not say what "
            "ranks have read"
        )
    elif result.unknown:
        typer.echo("each other sample was trained once" + (", as the seed and the files give it" if draw else ""))
    else:
        typer.echo("each sample was trained once" + (", as the seed and the files give it" if draw else ""))


@data.command()
def samples(
    run: Path = typer.Argument(..., help="A run's folder, such as runs/stdlib."),
    step: int = typer.Option(..., min=1, help="Which step; one that is still to come is drawn ahead."),
    as_json: bool = typer.Option(False, "--json", help="Print as JSON."),
) -> None:
    """Name the samples that a step trains: their numbers, and for each its file, epoch and tokens.

    Examples:

        megascale data samples runs/stdlib --step 1200
    """
    import json

    from megascale.data.dataset.ledger import find_step_samples
    from megascale.data.dataset.samples import SampleSource
    from megascale.data.loader.host_layout import index_folder
    from megascale.train.run_folder import RunFolder, read_lines, run_config

    config = run_config(run)
    file = RunFolder(run).samples
    first, count = find_step_samples(read_lines(file) if file.exists() else [], step, config.train.global_batch)
    source = SampleSource(config, index_folder(config))
    rows = source.ids(first, count).tolist()
    source.close()
    length = config.model.sequence_length
    # Text without weights is one stream of all entries.
    names = config.data.train if len(source.files) > 1 else [", ".join(config.data.train)]
    found = [
        {
            "sample": first + i,
            "file": names[number],
            "epoch": epoch,
            "window": window,
            "tokens": [window * length, (window + 1) * length + 1],
        }
        for i, (epoch, number, window) in enumerate(rows)
    ]
    if as_json:
        typer.echo(json.dumps({"step": step, "first": first, "count": count, "samples": found}))
        return
    typer.echo(f"step {step} trains samples {first} to {first + count - 1}:")
    for each in found:
        start, stop = each["tokens"]
        where = f"window {each['window']} (tokens {start:,} to {stop - 1:,})"
        typer.echo(f"  {each['sample']}: {each['file']} {where}, epoch {each['epoch']}")
