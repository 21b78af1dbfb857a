"""`python -m benchmarks loader`: one reader a host against one torch DataLoader in each rank.

Eight ranks of one tensor-parallel group need the same samples. With the baseline each has a torch DataLoader (one
worker process, two micro-batches ahead) that does just our work: the same sources, tokenizer, order and packing, by
the same code, so that only the sharing differs. Both sides' micro-batches are compared by checksum. What is counted
begins when all processes are up and nothing is read, and ends when the last rank has its last micro-batch.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import statistics
import tempfile
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness import usage
from benchmarks.harness.temporary import require_folder
from megascale.core import strict_json
from megascale.core.layout import lay_out

SOURCES = ("tokens", "jsonl", "parquet")
STEP = 0.1  # seconds of compute that the wait is compared with
_LENGTH, _MICRO = 2048, 2
_FIRST = 10  # steps in which reading begins
_SIDES = {"baseline": "rank", "host": "host"}
_context = multiprocessing.get_context("forkserver")


def register(app: typer.Typer) -> None:
    """Add `loader` to the benches."""
    app.command("loader")(main)


def main(
    ranks: int = typer.Option(8, min=1, help="Ranks of the tensor-parallel group."),
    batches: int = typer.Option(400, min=20, help="Micro-batches of 2 x 2,048 tokens to read where reading bounds."),
    steps: int = typer.Option(200, min=0, help="Steps of 100 ms to wait in where it does not."),
    source: list[str] = typer.Option(list(SOURCES), help="tokens, jsonl or parquet; may be given again."),
    repeat: int = typer.Option(1, min=1, help="Take each measure so often; the table has the best."),
    folder: Path | None = typer.Option(None, help="Where to make the sources; default: a temporary folder."),
    out: Path = typer.Option(Path("loader.json"), help="JSON file to write."),
) -> None:
    """Read with the host's loader and with a DataLoader a rank: tokens/s, processor time, bytes, memory, waiting.

    Example:

      python -m benchmarks loader --out loader.json
    """
    from rich.console import Console

    from megascale.core.preflight import TRAINER_BYTES, check_processes

    console = Console()
    unknown = set(source) - set(SOURCES)
    if unknown:
        raise typer.BadParameter(f"{unknown.pop()!r} is not one of {', '.join(SOURCES)}")
    check_processes("--ranks", ranks, TRAINER_BYTES)
    if folder is not None:
        require_folder(folder)
    with tempfile.TemporaryDirectory(dir=folder) as location:
        result = measure(Path(location), source, ranks, batches, steps, repeat)
        _show(console, result)
    result |= machine()
    out.write_text(strict_json.dumps(result, indent=1) + "\n")
    console.print(f"wrote {out}")


def machine() -> dict[str, Any]:
    """Return the machine and the versions of a measurement."""
    from benchmarks.data.tokenize import processor

    return {
        "date": datetime.now().isoformat(timespec="minutes"),
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "versions": {name: version(name) for name in ("torch", "tokenizers", "numpy")}
        | {"python": platform.python_version()},
    }


@dataclass
class LoaderFigures:
    """One side on one source.

    Attributes:
        seconds: from the word go until the last rank has its last micro-batch.
        tokens_per_second: distinct tokens: every rank gets all of them.
        cpu_seconds: of all processes, ranks included.
        bytes_read: from files, by all processes.
        kernel_bytes_read: what read() returned to all processes, pipes and sockets included; maps are not in it.
        memory_bytes: proportional set sizes of all processes, above those of the ranks before they had a loader.
        crc: of all micro-batches.
    """

    seconds: float
    tokens_per_second: float
    cpu_seconds: float
    bytes_read: int
    kernel_bytes_read: int
    memory_bytes: int
    crc: int


def measure(folder: Path, sources: list[str], ranks: int, batches: int, steps: int, repeat: int = 1) -> dict[str, Any]:
    """Make the sources in `folder` and take all measures; a record for JSON."""
    prefixes = make_sources(folder, max(batches, steps) * _LENGTH * _MICRO)
    load = os.getloadavg()[0]
    bound: dict[str, dict[str, Any]] = {}
    waits: dict[str, dict[str, Any]] = {}
    for name in sources:
        config = _config(folder, prefixes[name], ranks)
        sides = {}
        for side in ("baseline", "host"):
            used = [read_all(config, ranks, batches, side) for _ in range(repeat)]
            sides[side] = min(used, key=lambda m: m.seconds)
        if sides["baseline"].crc != sides["host"].crc:
            raise RuntimeError(f"{name}: the two sides read different tokens")
        bound[name] = {side: asdict(m) for side, m in sides.items()}
        if steps:
            waits[name] = {side: wait_in_steps(config, ranks, steps, side) for side in ("baseline", "host")}
    return {
        "ranks": ranks,
        "batches": batches,
        "micro_batch": [_LENGTH, _MICRO],
        "bound": bound,
        "waits": waits,
        "load_before": load,
        "page_cache": "the sources were dropped from it before each measure (posix_fadvise DONTNEED)",
        "baseline": "torch DataLoader, 1 worker process a rank, prefetch_factor 2, the same sources and order",
    }


def make_sources(folder: Path, tokens: int) -> dict[str, str]:
    """Text of about `tokens` tokens as jsonl, parquet (zstd) and a token file; entries of data.train by name."""
    import pyarrow
    import pyarrow.parquet

    from benchmarks.data.tokenize import write_jsonl
    from megascale.data.dataset.indexed import IndexedWriter
    from megascale.data.prepare.stdlib import read_stdlib
    from megascale.data.tokenizer.tokenizer import train_tokenizer

    texts = list(read_stdlib().values())
    arguments = train_tokenizer(texts[::8], 8192)
    arguments.save(folder / "tokenizer.json")
    write_jsonl(folder / "text.jsonl", texts, round(tokens * 4.2))
    rows = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    table = pyarrow.table({"text": rows})
    pyarrow.parquet.write_table(table, folder / "text.parquet", row_group_size=64, compression="zstd")
    with IndexedWriter(folder / "train", "uint16") as writer:
        for start in range(0, len(rows), 1000):
            writer.add_documents(*arguments.encode_documents(rows[start : start + 1000]))
    return {
        "tokens": str(folder / "train"),
        "jsonl": str(folder / "text.jsonl"),
        "parquet": str(folder / "text.parquet"),
    }


def _config(folder: Path, entry: str, ranks: int) -> Any:
    from megascale import config

    return config.from_tree(
        {
            "model": {
                "sequence_length": _LENGTH,
                "heads": ranks,
                "hidden": 8 * ranks,
                "ffn_hidden": 8 * ranks,
                "vocab_size": 8192,
                "vocab_multiple": ranks,
            },
            "data": {"train": [entry], "tokenizer": str(folder / "tokenizer.json"), "loader": "host"},
            "parallel": {"tensor": ranks, "gpus_per_host": ranks},
            "train": {"micro_batch": _MICRO, "global_batch": _MICRO, "runs": str(folder / "runs"), "device": "cpu"},
        }
    )


def read_all(config: Any, ranks: int, batches: int, side: str) -> LoaderFigures:
    """All ranks read as fast as they can."""
    with _Ranks(config, ranks, batches, 0.0, side) as group:
        before = group.usage()
        report = group.go()
        after = group.usage()
    crcs = {t["crc"] for t in report}
    if len(crcs) != 1:
        raise RuntimeError("ranks of one tensor-parallel group read different tokens")
    seconds = max(t["seconds"] for t in report)
    # The loader's own count stands in the ring and is the same for all its readers; DataLoaders count for themselves.
    counts = [t["bytes_read"] for t in report]
    return LoaderFigures(
        seconds,
        batches * _LENGTH * _MICRO / seconds,
        after["cpu"] - before["cpu"],
        max(counts) if side == "host" else sum(counts),
        int(after["read"] - before["read"]),
        int(after["memory"] - before["memory"]),
        crcs.pop(),
    )


def wait_in_steps(config: Any, ranks: int, steps: int, side: str) -> dict[str, float]:
    """Return the waits for micro-batches as parts of a step of STEP seconds, over all ranks and steps.

    `empty` is the part of the mean in which the host's loader had nothing ready; the rest is copying, and being kept
    from it by other processes.
    """
    with _Ranks(config, ranks, steps, STEP, side) as group:
        report = group.go()
    # The first steps wait for the reading to begin.
    waits = [wait for t in report for wait in t["waits"][_FIRST:]]
    ordered = sorted(waits)
    if side == "host":
        empty = {"empty": sum(t["empty"] for t in report) / len(waits) / STEP}
    else:
        empty = {}
    return empty | {
        "mean": statistics.fmean(waits) / STEP,
        "median": statistics.median(waits) / STEP,
        "p99": ordered[int(0.99 * len(ordered))] / STEP,
        "first_step_seconds": max(t["waits"][0] for t in report),
    }


class _Ranks:
    """The processes of one measure; the loader too where there is one."""

    def __init__(self, config: Any, ranks: int, batches: int, pause: float, side: str) -> None:
        from megascale.data.loader import host_loader

        _context.set_forkserver_preload(["benchmarks.data.loader", "megascale.data.loader.feed", "tokenizers", "torch"])
        self._loader = None
        for path in Path(config.data.train[0]).parent.iterdir():
            if path.is_file():
                usage.drop(path)
        location = None
        if side == "host":
            self._loader = host_loader.start_loader(lay_out(config, ranks), first_rank=0, ranks=ranks)
            assert self._loader is not None
            host_loader.connect_loader(self._loader.folder).close()  # it is up, and reads nothing before readers come
            location = str(self._loader.folder)
        text = config.model_dump(mode="json", exclude_none=True)
        self._ends, self._processes = [], []
        for rank in range(ranks):
            local, remote = _context.Pipe()
            process = _context.Process(target=_rank, args=(remote, text, rank, ranks, batches, pause, location))
            process.start()
            self._ends.append(local)
            self._processes.append(process)
        for end in self._ends:
            end.recv()
        self._known: set[int] = set()

    def __enter__(self) -> _Ranks:
        return self

    def go(self) -> list[dict[str, Any]]:
        """Let all read; what each tells."""
        for end in self._ends:
            end.send("go")
        return [end.recv() for end in self._ends]

    def usage(self) -> dict[str, float]:
        """Processor seconds, bytes returned by read(), proportional memory of ranks, their children and the loader.

        The loader's memory counts from nothing: without one there would be no such process.
        """
        pids = [process.pid for process in self._processes if process.pid is not None]
        pids += [child for pid in pids for child in usage.children(pid)]
        first = not self._known
        memory = sum(map(usage.memory, pids))
        if self._loader is not None:
            loader = self._loader.process.pid
            pids.append(loader)
            memory += 0 if first else usage.memory(loader)
        self._known.update(pids)
        return {"cpu": sum(map(usage.cpu, pids)), "read": sum(map(usage.read, pids)), "memory": memory}

    def __exit__(self, *error: object) -> None:
        for end in self._ends:
            with suppress(OSError):
                end.send("end")
        for process in self._processes:
            process.join(20)
            process.kill()
        if self._loader is not None:
            self._loader.stop()


def _rank(
    end: Any, tree: dict[str, Any], rank: int, ranks: int, batches: int, pause: float, location: str | None
) -> None:
    """One rank: says that it is up, reads at the word go, tells, and stays until its memory was looked at."""
    import torch

    from megascale import config as configuration
    from megascale.data.loader.feed import HostFeed
    from megascale.data.loader.host_plan import plan_host
    from megascale.errors import MegascaleError

    torch.set_num_threads(1)
    config = configuration.from_tree(tree)
    plan = plan_host(lay_out(config, ranks), 0, ranks)
    if location:
        feed = HostFeed(plan, Path(location), rank, torch.device("cpu"))
    else:
        feed = None
    end.send("here")
    end.recv()
    crc = 0
    waits = []
    came_up = 0.0
    try:
        began = time.perf_counter()
        if feed is not None:
            feed.start(0)
        if feed is None:
            read = iter(_dataloader(config))
        else:
            read = None
        bytes_read = 0
        for number in range(batches):
            started = time.perf_counter()
            if feed is not None:
                targets = feed.make_batch_reader(number * _MICRO)(0).targets
                assert targets is not None
            else:
                assert read is not None
                rows, bytes_read = next(read)
                targets = rows.t().contiguous()[1:]
            waits.append(time.perf_counter() - started)
            if feed is not None and feed.reader is not None and number == _FIRST - 1:
                came_up = feed.reader.wait_seconds
            if pause:
                time.sleep(pause)
            elif number % 16 == 0:
                crc = zlib.crc32(targets.numpy().tobytes(), crc)
        seconds = time.perf_counter() - began
        if feed is not None:
            assert feed.reader is not None
            bytes_read = int(feed.reader.ring.read_counters()["bytes_read"])
        report = {"seconds": seconds, "waits": waits, "crc": crc, "bytes_read": int(bytes_read)}
        if feed is not None and feed.reader is not None:
            report["empty"] = feed.reader.wait_seconds - came_up
        end.send(report)
        end.recv()
    except MegascaleError as error:
        end.send({"error": str(error)})
    if feed is not None:
        feed.close()


def _dataloader(config: Any) -> Any:
    """The baseline: a DataLoader whose worker does what our loader does, for this rank alone."""
    from torch.utils.data import DataLoader, IterableDataset

    class Samples(IterableDataset):
        def __iter__(self) -> Iterator[tuple[Any, float]]:
            import torch

            from megascale.data.dataset.samples import SampleSource

            source = SampleSource(
                config.data, config.model.sequence_length, vocab_size=config.model.vocab_size, seed=config.train.seed
            )
            first = 0
            while True:
                rows = torch.from_numpy(source.read_tokens(first, _MICRO))
                yield rows, source.meter.bytes_read
                first += _MICRO

    return DataLoader(Samples(), batch_size=None, num_workers=1, prefetch_factor=2, multiprocessing_context="fork")


def _show(console: Any, result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(
        *("source", "one a", "1,000 tokens/s", "CPU s", "MB read", "memory, MB"), title="where reading bounds"
    )
    columns = (("tokens_per_second", 1e3), ("cpu_seconds", 1), ("bytes_read", 1e6), ("memory_bytes", 1e6))
    for name, sides in result["bound"].items():
        for side, measured in sides.items():
            cells = []
            for key, unit in columns:
                value, base = measured[key], sides["baseline"][key]
                if key == "tokens_per_second":
                    more = f"{value / base:.1f}x"
                else:
                    more = f"1/{base / max(value, 1e-9):.1f}"
                number = f"{value / unit:,.{0 if value / unit > 99 else 1}f}"
                cells.append(number if side == "baseline" else f"{number} ({more})")
            table.add_row(name, _SIDES[side], *cells)
    console.print(table)
    if result["waits"]:
        table = Table(
            *("source", "one a", "mean", "ring empty", "median", "p99", "first step"),
            title="waiting in a step of 100 ms",
        )
        for name, sides in result["waits"].items():
            for side, w in sides.items():
                parts = [f"{w[key]:.2%}" if key in w else "" for key in ("mean", "empty", "median", "p99")]
                table.add_row(name, _SIDES[side], *parts, f"{w['first_step_seconds']:.2f} s")
        console.print(table)
    console.print(f"{result['ranks']} ranks; page cache: {result['page_cache']}; baseline: {result['baseline']}")
