"""`python -m benchmarks checkpoint`: the cost of saving and loading next to what the machine gives; planning."""

from __future__ import annotations

import platform
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from benchmarks.harness.temporary import require_folder
from megascale.core import strict_json
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

PARTS = ("save", "load", "memory", "stall", "plan")


def register(app: typer.Typer) -> None:
    """Add `python -m benchmarks checkpoint`."""
    app.command("checkpoint")(checkpoint)


def checkpoint(
    gigabytes: float = typer.Option(1.0, "--gb", min=0.02, help="size of the state, in 10^9 bytes"),
    repeats: int = typer.Option(9, min=1, help="runs of each part: the median of saves counts, the best of loads"),
    parts: str = typer.Option(",".join(PARTS), help="which to measure"),
    replicas: str = typer.Option("1,2,4,8", help="numbers of data-parallel processes that load"),
    folder: Path = typer.Option(Path(), help="where to write, on the disk to be measured"),
    preset: str = typer.Option("gpt-175b", help="plan: model shape"),
    layout: str = typer.Option("8,8,192", help="plan: tensor, pipeline and data-parallel ranks"),
    step_seconds: float = typer.Option(1.0, min=0.05, help="stall: how long a training step should last"),
    persist: bool = typer.Option(False, help="stall: write the saves to the disk too, not only to memory"),
    out: Path = typer.Option(Path("bench-checkpoint.json"), help="JSON file for the metrics"),
) -> None:
    """Measure what saving and loading cost next to what the machine gives.

    Needs room for about 3 x --gb on the disk and, with 8 replicas, 9 x --gb of memory.
    Example: python -m benchmarks checkpoint --gb 0.5
    """
    from rich.console import Console

    console = Console()
    require_folder(folder)
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=folder) as name:
        figures = _measure(console, Path(name), parts.split(","), gigabytes, repeats, replicas, preset, layout)
        if "stall" in parts.split(","):
            figures["stall"] = _stall(console, Path(name), gigabytes, step_seconds, repeats, persist)
    out.write_text(strict_json.dumps({**describe_machine(), **figures}, indent=2) + "\n")
    console.print(f"metrics: {out}")


def describe_machine() -> dict[str, Any]:
    import os

    import torch

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _measure(
    console: Console,
    folder: Path,
    parts: list[str],
    gigabytes: float,
    repeats: int,
    replicas: str,
    preset: str,
    layout: str,
) -> dict[str, Any]:
    from benchmarks.checkpoint import measures

    unknown = set(parts) - set(PARTS)
    if unknown:
        raise ConfigError(f"--parts={','.join(sorted(unknown))} is not measured here; choose of {','.join(PARTS)}")
    try:
        worlds = tuple(int(n) for n in replicas.split(","))
        tensor, pipeline, data = (int(n) for n in layout.split(","))
    except ValueError:
        raise ConfigError(
            f"--replicas={replicas} and --layout={layout} must be whole numbers with commas between, the layout three"
        ) from None
    figures: dict[str, Any] = {}
    with console.status("measuring ...") as status:
        if "save" in parts:
            status.update("saving, at once and in the background")
            figures["save"] = measures.saving(folder, gigabytes, repeats)
        if "load" in parts:
            status.update("loading by replicas")
            figures["load"] = measures.loading(folder, gigabytes, worlds)
        if "memory" in parts:
            status.update("loading from memory and from storage")
            figures["memory"] = measures.memory_against_storage(folder, gigabytes, repeats)
        if "plan" in parts:
            status.update(f"planning {preset} on {tensor * pipeline * data:,} ranks")
            figures["plan"] = measures.planning(preset, tensor, pipeline, data)
    _print(console, figures, preset)
    return figures


def _stall(
    console: Console, folder: Path, gigabytes: float, step_seconds: float, saves: int, persist: bool
) -> dict[str, Any]:
    from rich import box
    from rich.table import Table

    from benchmarks.checkpoint.stall import stalls

    with console.status("steps with and without a save"):
        f = stalls(folder, gigabytes, step_seconds, saves, persist)
    title = f"{f['processes']} x {f['device']}, {f['state_bytes'] / 1e9:.2f} GB of state"
    table = Table("", "", title=title, box=box.SIMPLE_HEAD, title_justify="left", show_header=False)
    if f["pinned"]:
        lock = "page-locked"
    else:
        lock = "not page-locked"
    table.add_row("stall a save, slowest process", f"{statistics.median(f['stall_s']) * 1e3:,.1f} ms")
    table.add_row("a step", f"{f['plain_step_s']:.3f} s")
    table.add_row("a step that begins with a save", f"{statistics.median(f['save_step_s']):.3f} s ({f['slower']:+.1%})")
    table.add_row("staged, checksums included, after", f"{statistics.median(f['staged_s']):.2f} s")
    location = f"in place after {f['in_place_s']:.2f} s, {f['prepare_s']:.2f} s of it before the first step"
    table.add_row("staging memory", f"{f['staging_bytes'] / 1e9:.2f} GB, {lock}, {location}")
    table.add_row("saves skipped", str(f["skipped"]))
    console.print(table)
    return f


def _print(console: Console, figures: dict[str, Any], preset: str) -> None:
    from rich import box
    from rich.table import Table

    def table(title: str, *columns: str) -> Table:
        result = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left")
        for i, column in enumerate(columns):
            result.add_column(column, justify="right" if i else "left")
        return result

    saved = figures.get("save")
    if saved:
        t = table(
            f"saving {saved['bytes'] / 1e9:.2f} GB, median of {len(saved['save_mb_s'])}", "", "MB/s", "of the disk"
        )
        t.add_row(
            "the disk (one file, past the page cache, synced)", f"{statistics.median(saved['disk_mb_s']):,.0f}", ""
        )
        t.add_row(
            "save, to the commit", f"{statistics.median(saved['save_mb_s']):,.0f}", f"{saved['save_of_disk']:.0%}"
        )
        t.add_row(
            f"in the background, to the commit (stall {min(saved['background_stall_s']) * 1e3:,.0f} ms on the CPU)",
            f"{statistics.median(saved['background_mb_s']):,.0f}",
            f"{saved['background_of_disk']:.0%}",
        )
        if saved["removal_s"]:
            t.add_row(f"removing the one before, after the commit: {min(saved['removal_s']):.2f} s", "", "")
        console.print(t)
    loaded = figures.get("load")
    if loaded:
        t = table("loading by data-parallel replicas", "replicas", "read / checkpoint", "most one read", "seconds")
        for row in loaded:
            ratio, most = f"{row['ratio']:.3f}", f"{row['most_one_read']:.3f}"
            t.add_row(str(row["replicas"]), ratio, most, f"{row['seconds']:.2f}")
        console.print(t)
    memory = figures.get("memory")
    if memory:
        t = table(f"loading {memory['bytes'] / 1e9:.2f} GB, best", "from", "seconds", "memory is faster by")
        t.add_row("the service's memory", f"{min(memory['memory_s']):.2f}", "")
        t.add_row("storage, cold", f"{min(memory['storage_s']):.2f}", f"{memory['times_faster']:.1f} x")
        slow = f"{memory['times_faster_than_slow']:.1f} x"
        t.add_row("storage held to 200 MB/s", f"{memory['slow_storage_s']:.2f}", slow)
        console.print(t)
    plan = figures.get("plan")
    if plan:
        t = table(f"planning {preset} on {plan['ranks']:,} ranks, {plan['chunks']:,} chunks", "", "")
        t.add_row("first save: plan and index", f"{plan['first_save_s']:.2f} s")
        t.add_row("each save after it", f"{plan['later_save_s']:.2f} s")
        t.add_row("peak memory of the planning process", f"{plan['peak_rss_gib']:.2f} GiB")
        t.add_row("each rank's own part, before", f"{plan['offer_s_each'] * 1e3:.1f} ms")
        written = f"{plan['least_one_writes'] / 1e6:,.0f} to {plan['most_one_writes'] / 1e6:,.0f} MB"
        t.add_row("a rank writes", written)
        console.print(t)
