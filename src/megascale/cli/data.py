"""`megascale data build|inspect|packing|ledger|samples`: make data sets, inspect them, verify a run's samples."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from megascale.cli.common import JSON, format_count, make_console, print_json
from megascale.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

    from megascale.config import Config
    from megascale.data.dataset.description import DataSetDescription
    from megascale.data.dataset.ledger import LedgerReport
    from megascale.data.dataset.packing_comparison import PackingRow
    from megascale.data.dataset.samples import SampleSource
    from megascale.data.prepare.builder import BuildResult
    from megascale.data.prepare.chat_builder import ChatBuild, TextRun

data = typer.Typer(no_args_is_help=True, help="Make data sets of text and inspect them.")

RUN = typer.Argument(..., help="Run folder, such as runs/stdlib.", show_default=False)

# Texts of `data inspect` for `DataSetDescription.compared`, the comparison with the checksum in dataset.json.
_COMPARISONS = {
    "all": "all tokens are as the build wrote them",
    "sample": "a sample of the tokens is as the build wrote it (--full reads all)",
    "none": "not compared: no checksum was recorded at the build",
}
# Keys of `data ledger --json` by field of LedgerReport, where they differ.
_LEDGER_KEYS = {
    "distinct_ids": "distinct",
    "steps_with_totals": "recorded",
    "compared_steps": "compared",
    "unaccounted_samples": "unknown",
}
_BAR_WIDTH = 40  # characters of the histogram's longest bar


def register(app: typer.Typer) -> None:
    """Add `data` to the command line."""
    app.add_typer(data, name="data")


@data.command()
def build(
    out: Path = typer.Option(..., "--out", "-o", help="Folder to make."),
    stdlib: bool = typer.Option(False, "--stdlib", help="Use the Python standard library's own source as text."),
    inputs: list[Path] = typer.Option([], "--input", "-i", help="File or folder of text; repeatable."),
    vocab_size: int = typer.Option(4096, help="Entries of the byte-level BPE tokenizer to train."),
    chat: list[Path] = typer.Option(
        [], "--chat", help="JSON lines of conversations (messages) or prompt/completion pairs; repeatable."
    ),
    tokenizer: Path | None = typer.Option(
        None,
        help="Use this tokenizer.json (Hugging Face) or .tiktoken file instead of training one; with --chat also the "
        "folder of a tokenizer.",
    ),
    chat_template: Path | None = typer.Option(
        None, help="With --chat: Jinja file to use instead of the tokenizer's own chat template."
    ),
    max_tokens: int | None = typer.Option(
        None, min=2, help="With --chat: cut longer conversations to this; default: keep them whole."
    ),
    held_out: float = typer.Option(0.05, help="Share of the text for evaluation (the library has its own)."),
    text_key: str = typer.Option("text", help="Key of the text in jsonl records and parquet rows."),
    workers: int | None = typer.Option(None, min=1, help="Number of processes; default: one per core."),
    as_json: bool = JSON,
) -> None:
    """Make a data set: token files for training and evaluation, a tokenizer and a manifest.

    Reads text files (one document each), .jsonl and .json (also .gz and .zst), .parquet, and folders of them. An
    interrupted build continues when it is called again; a finished one changes nothing.

    With --chat only the assistant's tokens count in the loss. The first conversation is printed as it is trained.

    Examples:

        megascale data build --stdlib --out datasets/stdlib

        megascale data build --input ~/notes --input book.txt --vocab-size 8192 --out datasets/mine

        megascale data build --input crawl/ --tokenizer llama/tokenizer.json --held-out 0.001 --out datasets/crawl

        megascale data build --chat conversations.jsonl --tokenizer llama/ --out datasets/chat
    """
    if chat:
        if stdlib or inputs:
            raise ConfigError("--chat makes a data set of its own; omit --input and --stdlib")
        if workers is not None or text_key != "text":
            raise ConfigError("--workers and --text-key have no effect with --chat; omit them")
        from megascale.data.prepare.chat_builder import build_chat

        chat_result = build_chat(
            out,
            chat,
            tokenizer=tokenizer,
            template=chat_template,
            vocab_size=vocab_size,
            held_out=held_out,
            max_tokens=max_tokens,
        )
        if as_json:
            print_json(asdict(chat_result.manifest))
        else:
            _print_chat_build(chat_result)
        return
    if chat_template is not None or max_tokens is not None:
        raise ConfigError("--chat-template and --max-tokens need --chat=FILE.jsonl; add it, or omit them")
    from megascale.data.prepare.builder import build as build_data

    result = build_data(
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
        print_json(asdict(result.manifest))
    else:
        _print_text_build(out, result)


def _print_text_build(folder: Path, result: BuildResult) -> None:
    """Print the size and compressibility of each part of a data set of plain text, and what the build skipped."""
    from rich.table import Table

    manifest = result.manifest
    console = make_console()
    if not result.fresh:
        console.print(f"{folder} is already built from these inputs; nothing to do.", markup=False, soft_wrap=True)
    table = Table("part", "documents", "tokens", "bytes", "bytes/\ntoken", "zlib -9\nbits/byte", "xz -9e\nbits/byte")
    for name, split in manifest.parts.items():
        cells = [f"{split.documents:,}", f"{split.tokens:,}", f"{split.bytes:,}", f"{split.bytes_per_token:.2f}"]
        if split.compressed:
            cells.append(f"{split.compressed.zlib_bits_per_byte:.3f}")
            cells.append(f"{split.compressed.xz_bits_per_byte:.3f}")
        table.add_row(name, *cells)
    console.print(table)
    for reason, count in manifest.skipped.items():
        console.print(f"skipped {reason}: {count:,}", markup=False)
    for note in manifest.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print(
        f"Train on it with --data.train={folder}/train --data.valid={folder}/valid", soft_wrap=True, markup=False
    )


def _print_chat_build(result: ChatBuild) -> None:
    """Print the first conversation of a data set, and how many tokens of each part count in the loss."""
    from rich.table import Table

    console = make_console()
    if not result.fresh:
        console.print(
            f"{result.folder} is already built from these inputs; nothing to do.", markup=False, soft_wrap=True
        )
    if result.sample:
        console.print("The first conversation; tokens that count in the loss are marked:")
        _print_marked(result.sample, console)
    table = Table("part", "conversations", "tokens", "counted", "share")
    for name, part in result.manifest.parts.items():
        counted = part.counted_tokens or 0
        table.add_row(
            name, f"{part.documents:,}", f"{part.tokens:,}", f"{counted:,}", f"{counted / max(part.tokens, 1):.1%}"
        )
    console.print(table)
    if result.statistics:
        longest = max(split.max_length for split in result.statistics.values())
        console.print(f"the longest conversation has {longest:,} tokens")
    for note in result.manifest.notes:
        console.print(f"note: {note}", markup=False, soft_wrap=True)
    console.print(
        f"Train on it with --data.train={result.folder}/train --data.valid={result.folder}/valid",
        soft_wrap=True,
        markup=False,
    )


def _print_marked(text_runs: list[TextRun], console: Console) -> None:
    """Print a conversation. Text in the loss is green on a terminal, and in double brackets elsewhere.

    Each of `text_runs` is a stretch of text whose tokens all count in the loss, or all do not.
    """
    from rich.text import Text

    text = Text()
    for text_run in text_runs:
        if not text_run.is_in_loss:
            text.append(text_run.text, style="dim" if console.is_terminal else "")
        elif console.is_terminal:
            text.append(text_run.text, style="bold green")
        else:
            text.append(f"[[{text_run.text}]]")
    console.print(text, soft_wrap=True)


@data.command()
def inspect(
    path: Path = typer.Argument(..., help="A data set's folder, or one token file without .bin/.idx."),
    samples: int = typer.Option(3, help="Documents whose beginning is shown."),
    tokens: int = typer.Option(64, help="Tokens to show of each."),
    tokenizer: Path | None = typer.Option(None, help="tokenizer.json; default: the one next to the token file."),
    full: bool = typer.Option(False, "--full", help="Compare all tokens with their checksum, not a sample."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON, one line per token file."),
) -> None:
    """Check token files and show their contents: documents, lengths, decoded samples.

    Reads any Megatron-LM .bin/.idx pair. Exit code 4 if a file is damaged or does not fit its tokenizer. The tokens
    of a data set built here are compared with a checksum: a sample of them, or all with --full.

    Examples:

        megascale data inspect datasets/stdlib

        megascale data inspect datasets/stdlib --full

        megascale data inspect corpus_text_document --tokenizer gpt2/tokenizer.json --samples 10
    """

    from megascale.data.dataset.description import describe_token_file, find_prefixes, list_manifest_sources

    console = make_console()
    for prefix in find_prefixes(path):
        description = describe_token_file(prefix, samples, tokens, tokenizer, full=full)
        if as_json:
            print_json(asdict(description))
        else:
            _print_token_file(description, list_manifest_sources(prefix), console)


def _print_token_file(description: DataSetDescription, sources: list[str], console: Console) -> None:
    """Print the description of one token file. `sources` lists the inputs of its data set, if they are recorded."""
    from rich.markup import escape
    from rich.table import Table

    shortest, median, mean, longest = description.lengths
    lines = [f"\n[bold]{escape(description.prefix)}[/bold]: index and data agree"]
    for source in sources:
        lines.append(f"  made of    {escape(source)}")
    lines.append(f"  documents  {description.documents:,} in {description.sequences:,} sequences")
    size = f"{description.dtype}, {description.bytes:,} bytes"
    lines.append(f"  tokens     {description.tokens:,} ({size}), largest id {description.largest_id}")
    lines.append(f"  contents   {_COMPARISONS[description.compared]}")
    if description.longest_run is not None:
        length, first, token = description.longest_run
        lines.append(f"  repeated   id {token}, {length:,} times from token {first:,} on (the longest run of one id)")
    lines.append(f"  lengths    {shortest:,} to {longest:,} tokens per document, median {median:,}, mean {mean:,.1f}")
    lines.append(f"  tokenizer  {escape(description.tokenizer or 'none; ids are shown instead of text')}")
    for line in lines:
        console.print(line, soft_wrap=True)
    table = Table("tokens in a document", "documents", "")
    largest_count = max((count for _, _, count in description.histogram), default=1)
    for start, stop, count in description.histogram:
        table.add_row(f"{start:,} to {stop - 1:,}", f"{count:,}", "█" * round(_BAR_WIDTH * count / largest_count))
    console.print(table)
    for document, text in description.samples:
        console.print(f"[bold]document {document:,} begins[/bold]")
        console.print(text, markup=False, style="dim")


@data.command()
def ledger(
    run: Path = RUN,
    draw: bool = typer.Option(True, help="Compute the sample ids again and compare them; needs the run's data files."),
    full: bool = typer.Option(False, "--full", help="Compare the tokens of every step, not of some."),
    as_json: bool = JSON,
) -> None:
    """Prove that a run trained each sample once: no number is missing or repeated, and each step follows the seed.

    Compares two checksums with those of the samples that all ranks have read. The checksum of sample numbers is
    compared for every step. The checksum of tokens is compared for steps spread evenly over the run. These steps have
    at most 67 million tokens together, or one million if the data are text files. Exit code 4 if the ledger shows a
    skipped, repeated or exchanged sample.

    Examples:

        megascale data ledger runs/stdlib

        megascale data ledger runs/stdlib --no-draw

        megascale data ledger runs/stdlib --full
    """
    from megascale.data.dataset.ledger import check_ledger
    from megascale.train.run_folder import RunFolder

    run_ledger = _read_ledger(run)
    file = run_ledger.file
    if not file.exists():
        raise DataError(f"{run} has no ledger ({file} is missing): it has not trained a step yet, or lost its history")
    if not run_ledger.records:
        raise DataError(
            f"{file} has no steps, so it proves nothing: the run has not trained a step, or lost its history"
        )
    saved_step = RunFolder(run).find_last_saved_step() or 0
    source = _open_samples(run_ledger.config) if draw else None
    result = check_ledger(run_ledger.records, source, full=full, saved_step=saved_step)
    if source is not None:
        source.close()
    if as_json:
        print_json(_describe_ledger(result))
    else:
        _print_ledger(result, draw)
    if result.faults:
        raise DataError(f"{file}: {'; '.join(result.faults)}. The run did not train each sample once")
    if not as_json:
        _print_proof(result, draw)


class _Ledger(NamedTuple):
    """The ledger of a run: which samples each step trained. Without the file there are no records."""

    config: Config
    records: list[dict[str, Any]]
    file: Path


def _read_ledger(run: Path) -> _Ledger:
    from megascale.train.run_folder import RunFolder, load_run_config, read_records

    file = RunFolder(run).samples
    records = read_records(file) if file.exists() else []
    return _Ledger(load_run_config(run), records, file)


def _open_samples(config: Config) -> SampleSource:
    """Open the run's training data, from which sample ids are computed again."""
    from megascale.data.dataset.samples import SampleSource
    from megascale.data.loader.host_plan import find_index_folder

    return SampleSource(
        config.data,
        config.model.sequence_length,
        vocab_size=config.model.vocab_size,
        seed=config.train.seed,
        index=find_index_folder(config.train.runs),
    )


def _describe_ledger(report: LedgerReport) -> dict[str, Any]:
    """Return the output of `--json`, whose keys other programs read."""
    return {_LEDGER_KEYS.get(name, name): value for name, value in asdict(report).items()}


def _print_ledger(result: LedgerReport, draw: bool) -> None:
    """Print the counts of a ledger's check. `draw` says whether sample ids were computed again from the data."""
    typer.echo(f"{result.steps:,} steps, {result.samples:,} samples from number 0 on")
    if draw:
        typer.echo(f"{result.distinct_ids:,} different (epoch, file, window); {result.epochs:.3f} epochs")
        typer.echo(f"tokens of {result.compared_steps:,} steps read again and compared with those that ranks had read")
    for sentence in result.missing:
        typer.echo(sentence)
    if result.steps_before_change:
        typer.echo(f"{result.steps_before_change:,} steps were trained before a change of the data that was accepted")


def _print_proof(result: LedgerReport, draw: bool) -> None:
    """Print the statement that the ledger's lines prove."""
    if result.steps_with_totals < result.steps:
        unproven = result.steps - result.steps_with_totals
        typer.echo(
            f"each sample was assigned to one step; the lines of {unproven:,} steps do not record the samples that "
            "ranks read"
        )
        return
    statement = "each sample was trained once"
    if result.unaccounted_samples:
        statement = "each other sample was trained once"
    if result.lost_steps:
        statement = statement.replace("sample", f"sample of the {format_count(result.steps, 'step')} with a line")
    if draw:
        statement += ", as the seed and the files determine it"
    typer.echo(statement)


@data.command()
def samples(
    run: Path = RUN,
    step: int = typer.Option(..., min=1, help="Step; the samples of a future step are drawn ahead."),
    as_json: bool = JSON,
) -> None:
    """List the samples that a step trains: their numbers, and for each its file, epoch and tokens.

    Examples:

        megascale data samples runs/stdlib --step 1200
    """
    from megascale.data.dataset.ledger import find_step_samples

    run_ledger = _read_ledger(run)
    config = run_ledger.config
    first, count = find_step_samples(run_ledger.records, step, config.train.global_batch)
    source = _open_samples(config)
    sample_ids = source.find_sample_ids(first, count).tolist()
    # Without data.weights, all entries of data.train that are text files form one stream, which is one "file".
    file_names = config.data.train
    if len(source.files) == 1:
        file_names = [", ".join(file_names)]
    rows = []
    for number, (epoch, file_index, window) in enumerate(sample_ids, start=first):
        row = {"sample": number, "file": file_names[file_index], "epoch": epoch, "window": window}
        # A packed sample has several ranges of tokens. The key `tokens` has only the first.
        ranges = source.find_token_ranges(file_index, window)
        rows.append(row | {"tokens": list(ranges[0]), "ranges": [list(token_range) for token_range in ranges]})
    source.close()
    if as_json:
        print_json({"step": step, "first": first, "count": count, "samples": rows})
        return
    typer.echo(f"step {step} trains samples {first} to {first + count - 1}:")
    for row in rows:
        tokens = ", ".join(f"{start:,} to {stop - 1:,}" for start, stop in row["ranges"])
        window = f"window {row['window']} (tokens {tokens})"
        typer.echo(f"  {row['sample']}: {row['file']} {window}, epoch {row['epoch']}")


@data.command()
def packing(
    path: Path | None = typer.Argument(
        None, help="A data set's folder, or one token file without .bin/.idx. Default: three made-up distributions."
    ),
    sequence_length: int = typer.Option(8192, min=2, help="model.sequence_length."),
    max_documents: int | None = typer.Option(None, min=1, help="data.max_documents; default: as in training."),
    documents: int = typer.Option(100_000, min=1, help="Documents of each made-up distribution."),
    as_json: bool = JSON,
) -> None:
    """Show how full samples are with data.document_mask=true, under each value of data.packing.

    A document that is cut loses its context at the cut. The column "attention" is the share of full causal attention
    that is computed within documents.

    Examples:

        megascale data packing datasets/stdlib --sequence-length 1024

        megascale data packing
    """

    from megascale.config import DataConfig
    from megascale.data.dataset.description import find_prefixes
    from megascale.data.dataset.packing_comparison import compare_drawn, compare_file

    # Limit of documents per sample: the option, or training's default for this sequence length.
    limit = DataConfig(document_mask=True, max_documents=max_documents).count_max_documents(sequence_length)
    if path is None:
        rows = compare_drawn(documents, sequence_length=sequence_length, max_documents=limit)
    else:
        rows = []
        for prefix in find_prefixes(path):
            rows += compare_file(str(prefix), sequence_length=sequence_length, max_documents=limit)
    if as_json:
        print_json([_describe_packing(row) for row in rows])
    else:
        _print_packings(rows, f"{sequence_length:,} tokens and at most {limit:,} documents per sample", make_console())


def _describe_packing(row: PackingRow) -> dict[str, Any]:
    """Return the record of `--json` for one packing of one distribution or file."""
    report = row.report
    return {
        "name": row.name,
        "packing": row.packing,
        "documents": report.documents,
        "cut": report.cut,
        "samples": report.samples,
        "fill": report.fill,
        "attention_share": report.attention_share,
        "seconds": row.seconds,
    }


def _print_packings(rows: list[PackingRow], title: str, console: Console) -> None:
    """Print one row per packing. The columns "number" and "cut" count documents, and "seconds" is packing time."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("documents", "packing", "number", "cut", "samples", "fill", "attention", "seconds", title=title)
    for row in rows:
        report = row.report
        numbers = [f"{report.documents:,}", f"{report.cut:,}", f"{report.samples:,}", f"{report.fill:.2%}"]
        table.add_row(escape(row.name), row.packing, *numbers, f"{report.attention_share:.2%}", f"{row.seconds:.2f}")
    console.print(table)
