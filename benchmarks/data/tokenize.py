"""`python -m benchmarks tokenize`: the speed from jsonl to token files, compared with the tokenizer library alone.

The text is the standard library's source cut into documents at random, with some words of each renamed, so that a
tokenizer's cache of words sees new ones as it would in real text. The library is timed inside `encode_batch` only,
on texts that lie parsed in memory; `data build` is timed whole: reading and parsing the file, splitting, encoding,
writing and joining token files, compressing the held-out text. Both get the same cores and threads. Beside the wall
clock stands processor time, which a busy machine disturbs less.
"""

from __future__ import annotations

import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import require_folder

TARGET = 0.8
_SYLLABLES = ("ba", "co", "du", "fen", "gi", "hol", "ka", "lem", "mi", "nor", "pa", "qui", "ro", "sta", "tu", "ver")


def register(app: typer.Typer) -> None:
    """Add `tokenize` to the benches."""
    app.command("tokenize")(main)


def main(
    size: int = typer.Option(1000, "--megabytes", min=1, help="Megabytes of jsonl to make and read."),
    cores: int = typer.Option(2, min=1, help="Cores, and so workers and threads, for each side."),
    vocab_size: int = typer.Option(32768, help="Entries of the tokenizer, trained on the standard library."),
    folder: Path | None = typer.Option(None, help="Where to work (needs twice the size); default: a temporary folder."),
    out: Path = typer.Option(Path("tokenize.json"), help="JSON file to write."),
) -> None:
    """Tokenise jsonl with `data build` and with the tokenizer library alone.

    Example: python -m benchmarks tokenize --megabytes 100 --out tokenize.json
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if folder is not None:
        require_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder) as location:
        result = measure(Path(location), size * 1_000_000, cores, vocab_size)
    table = Table("what", "seconds", "MB/s", "share", "CPU seconds", "share")
    base = result["rows"][0]
    for row in result["rows"]:
        table.add_row(
            row["what"],
            f"{row['seconds']:.1f}",
            f"{row['megabytes_per_second']:.2f}",
            f"{base['seconds'] / row['seconds']:.0%}",
            f"{row['cpu_seconds']:.1f}",
            f"{base['cpu_seconds'] / row['cpu_seconds']:.0%}",
        )
    console.print(table)
    console.print(
        f"{result['jsonl_bytes']:,} bytes of jsonl, {result['documents']:,} documents, {result['tokens']:,} tokens; "
        f"{cores} cores; load before {result['load'][0]:.1f}, after {result['load'][1]:.1f}"
    )
    share = base["seconds"] / result["rows"][-1]["seconds"]
    console.print(f"target {TARGET:.0%} of encode_batch: {'reached' if share >= TARGET else 'missed'} at {share:.0%}")
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"wrote {out}")


def measure(folder: Path, size: int, cores: int, vocab_size: int) -> dict[str, Any]:
    """Make `size` bytes of jsonl in `folder` and time both sides on it; a record for JSON."""
    from megascale.data.prepare.stdlib import read_stdlib
    from megascale.data.tokenizer.tokenizer import train_tokenizer

    load = os.getloadavg()[0]
    texts = list(read_stdlib().values())
    train_tokenizer(texts, vocab_size).save(folder / "tokenizer.json")
    documents, text_bytes = write_jsonl(folder / "text.jsonl", texts, size)
    # The library does half of the text before and half after: what else the machine does then weighs on both.
    order = [("encode_batch", 0), ("encode_batch_fast", 0), ("", 0), ("encode_batch_fast", 1), ("encode_batch", 1)]
    report: dict[str, dict[str, Any]] = {}
    for method, half in order:
        name, call = (method, f"library({method!r}, {half})") if method else ("data build", f"ours({cores})")
        for key, value in _run_in_process(call, folder, cores).items():
            retained = report.setdefault(name, {})
            retained[key] = retained.get(key, 0) + value
    names = ("encode_batch", "encode_batch_fast", "data build")
    rows = [
        {"what": name, "megabytes_per_second": text_bytes / report[name]["seconds"] / 1e6, **report[name]}
        for name in names
    ]
    return {
        "rows": rows,
        "jsonl_bytes": (folder / "text.jsonl").stat().st_size,
        "text_bytes": text_bytes,
        "documents": documents,
        "tokens": rows[-1]["tokens"],
        "vocab_size": vocab_size,
        "cores": cores,
        "load": [load, os.getloadavg()[0]],
        "date": datetime.now().isoformat(timespec="minutes"),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("tokenizers", "numpy")} | {"python": platform.python_version()},
    }


def processor() -> str:
    """Name of this machine's processor."""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    else:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def write_jsonl(path: Path, texts: list[str], size: int) -> tuple[int, int]:
    """Write about `size` bytes of jsonl; number of documents and bytes of text."""
    draw = random.Random(1)
    files = [text.splitlines(keepends=True) for text in texts if len(text) > 4000]
    written = count = text_bytes = 0
    with open(path, "w", encoding="utf-8") as file:
        while written < size:
            lines = draw.choice(files)
            start = draw.randrange(max(1, len(lines) - 20))
            text = "".join(lines[start : start + draw.randint(20, 200)])
            for word in draw.choices([w for w in text.split() if w.isidentifier()] or ["def"], k=4):
                text = text.replace(word, "".join(draw.choices(_SYLLABLES, k=3)))
            line = json.dumps({"text": text, "id": count}, ensure_ascii=False) + "\n"
            written += file.write(line)
            text_bytes += len(text.encode())
            count += 1
    return count, text_bytes


def _run_in_process(call: str, folder: Path, cores: int) -> dict[str, Any]:
    """Run a function of this module in a process of its own, on `cores` cores; what it returns."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    code = f"import benchmarks.data.tokenize as t; print(t.json.dumps(t.{call}))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "RAYON_NUM_THREADS": str(cores),
            "TOKENIZERS_PARALLELISM": "true",
            "PYTHONPATH": os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p),
        },
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )
    return json.loads(done.stdout)


def _batches(path: Path) -> Iterator[list[str]]:
    """The texts of a jsonl file, about a megabyte at a time."""
    batch: list[str] = []
    size = 0
    with open(path, "rb") as file:
        for line in file:
            batch.append(json.loads(line)["text"])
            size += len(line)
            if size >= 1 << 20:
                yield batch
                batch, size = [], 0
    yield batch


def _processor_seconds() -> float:
    pair = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in pair)


def library(method: str, half: int) -> dict[str, float]:
    """The library alone on every other batch: time inside one of its batch methods only, results dropped."""
    from tokenizers import Tokenizer as Library

    encode = getattr(Library.from_file("tokenizer.json"), method)
    seconds = cpu = 0.0
    for number, batch in enumerate(_batches(Path("text.jsonl"))):
        if number % 2 != half:
            continue
        cpu_start, start = _processor_seconds(), time.perf_counter()
        encode(batch, add_special_tokens=False)
        seconds += time.perf_counter() - start
        cpu += _processor_seconds() - cpu_start
    return {"seconds": seconds, "cpu_seconds": cpu}


def ours(workers: int) -> dict[str, float]:
    """The whole of `data build`."""
    from megascale.data.prepare.builder import build

    start = time.perf_counter()
    built = build("built", inputs=["text.jsonl"], tokenizer="tokenizer.json", workers=workers, progress=False)
    seconds = time.perf_counter() - start
    report = {"seconds": seconds, "cpu_seconds": _processor_seconds()}
    shutil.rmtree("built")
    return {**report, "tokens": sum(part.tokens for part in built.manifest.parts.values())}
