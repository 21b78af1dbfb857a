"""`python -m benchmarks layouts`: the same training in two or more layouts, losses side by side.

Every layout must give the losses of one process: to rounding in float64, within the type's noise in float32 and
bfloat16. Each run is a real `megascale train` with its own processes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

from benchmarks.harness.temporary import temporary_folder
from benchmarks.harness.training_runs import describe_machine, make_timing_config, train
from megascale.config import Config
from megascale.core import strict_json

FLOOR = 1e-17  # of the plot of differences: below the rounding of float64
ROWS = 12  # of the table; the JSON file has every step


@dataclass
class LayoutRun:
    """A layout and what came of it."""

    name: str
    parallel: dict[str, Any]
    processes: int
    losses: list[float]
    grad_norms: list[float]
    seconds: float


def register(app: typer.Typer) -> None:
    """Add the bench."""
    app.command("layouts", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(layouts)


def layouts(
    context: typer.Context,
    file: Path = typer.Argument(..., help="Configuration, such as examples/stdlib-3d.toml.", show_default=False),
    steps: int = typer.Option(20, min=1, help="Steps of each run."),
    against: list[str] = typer.Option(
        [],
        help="Another layout as keys of \\[parallel], such as tensor=4,pipeline=2,zero=1; may be repeated. "
        "Default: one process.",
    ),
    float64: bool = typer.Option(False, "--float64", help="Train in float64: differences are rounding alone."),
    within: float | None = typer.Option(None, help="Exit 1 if a loss differs by more than this, relatively."),
    out: Path = typer.Option(Path("bench-layouts.json"), help="JSON file for the metrics."),
    plot: Path | None = typer.Option(None, help="Draw losses and differences into this PNG."),
) -> None:
    """Train a configuration in its own layout and in others, and print the losses next to each other.

    Any setting can be given as --section.key=value; it holds for all runs. Runs leave nothing behind.

    Example: python -m benchmarks layouts examples/stdlib-3d.toml --steps 20 --float64

    Example: python -m benchmarks layouts examples/gpt.toml --against tensor=8,pipeline=1 --steps 200 --plot layouts.png
    """
    from megascale import api
    from megascale.config import load_command_line
    from megascale.core.layout import lay_out
    from megascale.errors import TrainingError
    from megascale.train.launcher import count_processes

    config = api.resolve(load_command_line(file, context.args))
    peers = [_parse(text) for text in against] or [{"data": 1}]
    gpus = api.visible_gpus()
    plans = []
    for keys in (None, *peers):
        item = _prepared(config, steps, "float64" if float64 else None, keys)
        processes = count_processes(item, gpus)
        lay_out(item, processes)  # all are checked before the first one trains
        plans.append((item, processes))
    runs = []
    with temporary_folder() as folder:
        for number, (item, processes) in enumerate(plans):
            runs.append(_train(item, processes, Path(folder) / str(number)))
    record = _record(file, plans[0][0], runs)
    _show(record, runs)
    out.write_text(strict_json.dumps(record, indent=2) + "\n")
    if plot is not None:
        draw(record, plot)
        typer.echo(f"wrote {plot}")
    if within is not None and not record["largest_loss_difference"] <= within:
        raise TrainingError(
            f"the losses of these layouts differ by {record['largest_loss_difference']:.2e}, more than --within="
            f"{within:g}; figures of every step are in {out}"
        )


def _parse(text: str) -> dict[str, Any]:
    """Keys of [parallel] out of `tensor=4,layer_split=[1,2]`, validated later with all the rest."""
    import tomllib

    from megascale.errors import ConfigError

    table = text.replace(";", ",")
    try:
        if table:
            return tomllib.loads(f"v = {{{table}}}")["v"]
        return {}
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"--against={text!r} is not a list of keys of [parallel]; write it as --against tensor=4,pipeline=2"
        ) from None


def _prepared(config: Config, steps: int, precision: str | None, parallel: dict[str, Any] | None) -> Config:
    from megascale.config import from_tree

    tree = make_timing_config(config, steps)
    if parallel is not None:
        tree["parallel"] = {"gpus_per_host": config.parallel.gpus_per_host, **parallel}
    if precision is not None:
        tree["train"]["precision"] = precision
    return from_tree(tree)


def name_of(config: Config, processes: int) -> str:
    """Short name of a layout, such as TP2 PP2x2 DP2 ZeRO-2."""
    if processes == 1:
        return "one process"
    parallel = config.parallel
    if parallel.virtual_stages > 1:
        virtual = f"x{parallel.virtual_stages}"
    else:
        virtual = ""
    data = processes // (parallel.tensor * parallel.pipeline)
    zero = f" ZeRO-{parallel.zero}" if data > 1 else ""
    return f"TP{parallel.tensor} PP{parallel.pipeline}{virtual} DP{data}{zero}"


def _train(config: Config, processes: int, folder: Path) -> LayoutRun:
    from rich.progress import Progress

    name, began = name_of(config, processes), time.perf_counter()
    with Progress(transient=True) as progress:
        bar = progress.add_task(name, total=config.train.steps)
        steps = train(config, processes, folder, name, on_progress=lambda done: progress.update(bar, completed=done))
    return LayoutRun(
        name,
        config.parallel.model_dump(exclude_none=True),
        processes,
        [step["loss"] for step in steps],
        [step["grad_norm"] for step in steps],
        time.perf_counter() - began,
    )


def _record(file: Path, config: Config, runs: list[LayoutRun]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        **describe_machine(config),
        "file": str(file),
        "precision": config.train.precision,
        "steps": config.train.steps,
        "runs": [asdict(run) for run in runs],
        "largest_loss_difference": _largest(runs, lambda run: run.losses),
        "largest_grad_norm_difference": _largest(runs, lambda run: run.grad_norms),
    }


def relative(value: float, reference: float) -> float:
    """Return |value - reference| / |reference|, infinite if either is NaN or infinite."""
    if not (math.isfinite(value) and math.isfinite(reference)):
        return math.inf
    if reference:
        return abs(value - reference) / abs(reference)
    return abs(value)


def _largest(runs: list[LayoutRun], series: Callable[[LayoutRun], Sequence[float]]) -> float:
    """Largest relative difference of the first run from any other at any step."""
    first = series(runs[0])
    return max(relative(a, b) for run in runs[1:] for a, b in zip(first, series(run), strict=True))


def _show(record: dict[str, Any], runs: list[LayoutRun]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"{record['file']} in {record['precision']}: loss of {record['steps']} steps"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    if record["precision"] == "float64":
        digits = 12
    else:
        digits = 7
    table.add_column("step", justify="right")
    table.add_column(runs[0].name, justify="right")
    for run in runs[1:]:
        table.add_column(run.name, justify="right")
        table.add_column("difference", justify="right")
    steps, count = record["steps"], min(ROWS, record["steps"])
    for i in sorted({round(k * (steps - 1) / max(1, count - 1)) for k in range(count)}):
        cells = [f"{runs[0].losses[i]:.{digits}f}"]
        for run in runs[1:]:
            cells += [f"{run.losses[i]:.{digits}f}", f"{relative(runs[0].losses[i], run.losses[i]):.1e}"]
        table.add_row(str(i + 1), *cells)
    console = Console()
    console.print(table)
    console.print(
        f"largest relative difference: loss {record['largest_loss_difference']:.2e}, "
        f"gradient norm {record['largest_grad_norm_difference']:.2e}"
    )
    console.print(", ".join(f"{run.name}: {run.processes} processes, {run.seconds:.0f} s" for run in runs))


def draw(record: dict[str, Any], out: Path) -> None:
    """Losses of all runs over steps, and under them how far the first is from each other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    runs = [LayoutRun(**run) for run in record["runs"]]
    steps = range(1, record["steps"] + 1)
    figure, (top, low) = plt.subplots(2, 1, figsize=(9, 6), sharex=True, height_ratios=[2, 1], layout="constrained")
    differences = [relative(a, b) for run in runs[1:] for a, b in zip(runs[0].losses, run.losses, strict=True)]
    floor = min((d for d in differences if d > 0), default=FLOOR) / 3
    highest = 10 * floor
    for number, run in enumerate(runs):
        dashes = "-" if number == 0 else (0, (3, 2 + number))
        top.plot(steps, run.losses, color=f"C{number}", linestyle=dashes, linewidth=1.6, label=run.name)
        if number:
            separate = [relative(a, b) for a, b in zip(runs[0].losses, run.losses, strict=True)]
            # A difference of nothing has no place on a logarithmic axis: it is drawn at the bottom.
            low.plot(steps, [max(d, floor) for d in separate], ".-", color=f"C{number}", linewidth=0.8, markersize=4)
            highest = max(highest, *separate)
    top.set_ylabel("Loss (nats per token)")
    top.set_title(f"{record['file']}, {record['precision']}", fontsize=10)
    top.legend()
    low.set_ylabel("Relative difference")
    low.set_yscale("log")
    low.set_ylim(floor / 2, 10 ** math.ceil(math.log10(min(highest, 1.0)) + 0.5))
    low.xaxis.set_major_locator(MaxNLocator(integer=True))
    low.set_xlabel("Step")
    for axes in (top, low):
        axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    plt.close(figure)
