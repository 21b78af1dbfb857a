"""`python -m benchmarks peers FILE.toml`: several shapes, ours and peers', with one start of each trainer per turn."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from benchmarks.training.shape_file import Shape, load_shapes
from benchmarks.training.shape_rows import OURS, describe_row, format_optional, name_row
from megascale.core import strict_json
from megascale.core.atomic_files import write_atomically
from megascale.errors import ConfigError, TrainingError

# Options of `peers` that shapes of a file have as keys.
SHAPE_OPTIONS = (
    "steps",
    "warmup",
    "peer_micro_batch",
    "peer_recompute",
    "peer_float8",
    "peer_context_exchange",
    "even_experts",
)
END_SECONDS = 20.0  # from the end of a trainer's time until its processes are killed


def compare_shapes(
    file: Path, peers: Sequence[str], *, turns: int, peer_seconds: float, out: Path, options: Sequence[str] = ()
) -> None:
    """Measure all shapes with our trainer and with peers in turn, write the rows, and print them with ratios.

    Args:
        peers: names of peers.
        turns: turns of each trainer, in alternating order.
        peer_seconds: time limit of a peer's turn. Rows that it has completed count.
        options: further options of `shapes`.
    """
    all_shapes = load_shapes(file)
    trainers = [OURS] + list(peers)
    runs: list[dict[str, Any]] = []
    with temporary_folder() as folder:
        for turn in range(turns):
            for trainer in trainers if turn % 2 == 0 else trainers[::-1]:
                limit = None
                if trainer != OURS:
                    limit = peer_seconds
                rows = run_trainer(file, trainer, Path(folder) / f"{turn}-{trainer}.json", limit=limit, options=options)
                runs += [row | {"turn": turn} for row in rows]
                # Write after each turn, so that an interrupted call keeps its rows.
                head = {"date": date.today().isoformat(), "file": file.name}
                write_atomically(out, strict_json.dumps(head | {"rows": runs}, indent=1) + "\n")
    print_comparison(make_comparison(all_shapes, runs), runs)
    typer.echo(f"metrics: {out}")


def compare_files(file: Path, row_files: Sequence[Path]) -> None:
    """Print the comparison of rows that `shapes` has written for the shapes of a file. Each file counts as a turn."""
    runs: list[dict[str, Any]] = []
    for turn, row_file in enumerate(row_files):
        try:
            rows = strict_json.loads(row_file.read_text())["rows"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ConfigError(f"--rows={row_file} holds no rows of `benchmarks shapes`; name its --out file") from None
        runs += [row | {"turn": turn} for row in rows]
    print_comparison(make_comparison(load_shapes(file), runs), runs)


def refuse_options_of_shapes(context: typer.Context) -> None:
    """Raise ConfigError if the command line has an option that each shape of the file sets for itself."""
    for name in SHAPE_OPTIONS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: with a file of shapes, write it into the shapes of the file")


def run_trainer(
    file: Path, trainer: str, out: Path, *, limit: float | None, options: Sequence[str]
) -> list[dict[str, Any]]:
    """Run `shapes` with a trainer in a process of its own, and return the rows that it completed.

    Raises TrainingError if it ended by itself without a row.

    Args:
        limit: seconds after which it is ended; None for no limit.
    """
    arguments = ["shapes", str(file), f"--trainer={trainer}", f"--out={out}", *options]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks"] + arguments)
    is_ended = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        typer.echo(f"{trainer} is ended after {limit:g} s; the rows that it has completed count")
        is_ended = True
    finally:
        if process.poll() is None:
            process.terminate()  # the launcher ends its ranks
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    rows: list[dict[str, Any]] = []
    if out.exists():
        rows = strict_json.loads(out.read_text())["rows"]
    if not rows and not is_ended:
        raise TrainingError(f"{trainer} ended with exit code {process.returncode} and no row; see the lines above")
    return rows


def make_comparison(all_shapes: Sequence[Shape], runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per shape, trainer and label, with the median over turns and `ours_over_it`.

    `ours_over_it` is the peer's seconds per step over ours. In a row of ours, it is the ratio to the fastest row of a
    peer, of the shape itself or of its `compare_with`; None without such a row.
    """
    grouped: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for run in runs:
        grouped.setdefault((run["shape"], run["trainer"], run["label"]), []).append(run)
    rows = {key: summarise_turns(group) for key, group in grouped.items()}
    result = []
    for shape in all_shapes:
        peers_of = shape.compare_with or shape.name
        peers = [row for (name, trainer, _), row in rows.items() if name == peers_of and trainer != OURS]
        ours = rows.get((shape.name, OURS, ""))
        if ours is not None:
            times = [row["step_seconds"] for row in peers if row["step_seconds"] is not None]
            if times and ours["step_seconds"] is not None:
                ours["ours_over_it"] = min(times) / ours["step_seconds"]
            result.append(ours)
        if shape.compare_with is not None:
            continue
        for row in peers:
            if ours is not None and ours["step_seconds"] is not None and row["step_seconds"] is not None:
                row["ours_over_it"] = row["step_seconds"] / ours["step_seconds"]
            result.append(row)
    return result


def summarise_turns(turns: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the median step over the turns of a row, and its rates."""
    measured = [row for row in turns if "failed" not in row]
    first = turns[0]
    result: dict[str, Any] = {key: first[key] for key in ("shape", "trainer", "label")}
    result |= {"step_seconds": None, "ours_over_it": None}
    if not measured:
        return result
    cut = [row for row in measured if "cut" in row]
    if cut:
        result |= {"cut": cut[0]["cut"], "all_step_seconds": cut[0]["all_step_seconds"]}
    seconds = [row["step_seconds"] for row in measured]
    result["step_seconds"] = statistics.median(seconds)
    result["spread"] = (max(seconds) - min(seconds)) / result["step_seconds"]
    scale = measured[0]["step_seconds"] / result["step_seconds"]
    result["tokens_per_second_per_device"] = scale * measured[0]["tokens_per_second_per_device"]
    result["mfu"] = None
    if measured[0]["mfu"] is not None:
        result["mfu"] = scale * measured[0]["mfu"]
    memory = [row["peak_memory_gib"] for row in measured if row["peak_memory_gib"] is not None]
    result["peak_memory_gib"] = max(memory, default=None)
    result["expert_rank_load_max"] = measured[-1].get("expert_rank_load_max")
    rates = [rate for row in measured for rate in row["gemm_flop_per_s"] or []]
    result["gemm_flop_per_s"] = None
    if rates:
        result["gemm_flop_per_s"] = statistics.mean(rates)
    return result


def print_comparison(rows: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]]) -> None:
    """Print the table, and the reasons of failed rows below it."""
    from rich import box
    from rich.table import Table

    from megascale.core.output_console import OutputConsole

    console = OutputConsole(highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    columns = ("", "s/step", "spread", "tokens/s per GPU", "MFU", "GiB", "rank load", "GEMM TFLOP/s", "ours over it")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        if row["step_seconds"] is None:
            table.add_row(name_row(row), "failed")
            continue
        gemm_tflops = None
        if row["gemm_flop_per_s"] is not None:
            gemm_tflops = row["gemm_flop_per_s"] / 1e12
        table.add_row(
            name_row(row),
            f"{row['step_seconds']:.4f}",
            f"{row['spread']:.1%}",
            f"{row['tokens_per_second_per_device']:,.0f}",
            format_optional(row["mfu"], "{:.1%}"),
            format_optional(row["peak_memory_gib"], "{:.1f}"),
            format_optional(row["expert_rank_load_max"], "{:.2f}"),
            format_optional(gemm_tflops, "{:.0f}"),
            format_optional(row["ours_over_it"], "{:.3f}x"),
        )
    console.print(table)
    console.print("ours over it: seconds of the peer over ours; in a row of ours, of the fastest peer")
    settings = {run["peer_settings"]: name_row(run) for run in reversed(runs) if "peer_settings" in run}
    for text, name in settings.items():
        console.print(f"{name}: {text}", markup=False)
    for run in runs:
        if "failed" in run or "cut" in run:
            console.print(describe_row(run), markup=False)
