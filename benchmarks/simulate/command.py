"""`python -m benchmarks simulator` and `calibration`: the simulator's accuracy, and the shipped calibrations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import JSON, make_console, print_json, split_option
from megascale.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.simulate.published_rows import Rows
    from benchmarks.simulate.score import AnchorCheck


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command()(simulator)
    app.command()(calibration)


def simulator(
    data: Path | None = typer.Option(
        None, "--data", help="Folder with published data; default: MEGASCALE_ANCHORS, else ../shared/data."
    ),
    runs: Path | None = typer.Option(None, "--runs", help="Folder of own run folders, for A7."),
    only: str | None = typer.Option(None, "--only", help="Checks, comma-separated, such as A1,A5."),
    rows: bool = typer.Option(False, "--rows", help="List every row, fitted and held out."),
    as_json: bool = JSON,
    plot: Path | None = typer.Option(None, "--plot", metavar="FOLDER", help="Draw measured against predicted."),
) -> None:
    """Check the simulator's predictions: A1 to A13, each with its error and target. Exit 1 if a check misses.

    Each check names the constants fitted, the rows they were fitted on, and constants that cannot be identified. Checks
    whose data are missing are skipped with a line.

    Example: python -m benchmarks simulator --data ../shared/data --rows
    """
    from benchmarks.simulate.published_rows import find_data_folder
    from benchmarks.simulate.report import validate
    from megascale.observe.analysis.operation_trace import read_trace
    from megascale.observe.analysis.whatif import analyse_trace

    names = split_option(only) or None
    checks = validate(find_data_folder(data), runs, lambda file: analyse_trace(read_trace(file)), names)
    if as_json:
        print_json([_check_to_dict(check) for check in checks], indent=2)
    else:
        _print_checks(checks, make_console(), rows)
    if plot is not None:
        for check in checks:
            _draw_check(check, plot)
    if any(check.passed is False for check in checks):
        raise typer.Exit(1)


def calibration(
    anchor: str = typer.Argument(..., help="Table to fit to; a wrong name lists them."),
    cluster: str = typer.Option(..., "--cluster", help="Cluster of the rows."),
    fit: str = typer.Option("compute", "--fit", help="Constants, comma-separated: compute, overhead, fixed, ..."),
    start: str | None = typer.Option(None, "--start", help="Calibration that gives the constants not fitted."),
    name: str | None = typer.Option(None, "--name", help="Name of the calibration; default: the cluster's."),
) -> None:
    """Fit constants to the development rows of a published table, and print the calibration file.

    Example: python -m benchmarks calibration paper --cluster a100-roce --fit fixed
    """
    from megascale.simulate.calibrating import MeasuredSteps, calibrate
    from megascale.simulate.cluster import load_cluster

    tables = _calibration_tables()
    if anchor not in tables:
        raise ConfigError(f"{anchor!r} is not a table of measured steps; known: {', '.join(tables)}")
    load, stacks = tables[anchor]
    rows = load()
    steps = MeasuredSteps(rows.names, rows.cases, rows.seconds, stacks, f"(rows of {anchor})")
    fitted, _ = calibrate(steps, load_cluster(cluster), fit, start, name)
    typer.echo(fitted.to_toml())


def _calibration_tables() -> dict[str, tuple[Callable[[], Rows], tuple[str, ...]]]:
    """Return the development rows that a calibration may be fitted to, and the stacks that were measured, by name."""
    from benchmarks.simulate import published_rows

    return {
        "paper": (published_rows.paper_development, ("megatron-2023", "megascale")),
        "h200-peers": (published_rows.h200_peers, ("megatron-core",)),
        "h100-peers": (lambda: published_rows.later_peers("peers"), ("megatron-core",)),
        "own-first": (published_rows.load_first_round, ("megascale",)),
        "own-h100": (published_rows.load_h100_runs, ("megascale",)),
        "nemo-h100": (published_rows.nemo_development, ("nemo",)),
    }


def _print_checks(results: Sequence[AnchorCheck], console: Console, rows: bool) -> None:
    """Print each check, then what was fitted, skipped and could not be identified."""
    from megascale.simulate.render import show_rows

    verdicts = {True: "[green]pass[/green]", False: "[red]miss[/red]", None: "[yellow]skipped[/yellow]"}
    for check in results:
        headline = f"\n[bold]{check.key}[/bold] {verdicts[check.passed]}  {check.title}"
        console.print(headline, soft_wrap=True, highlight=False)
        if check.skipped:
            console.print(f"   {check.skipped}", soft_wrap=True, highlight=False)
            continue
        for name, (reached, target, unit) in check.figures.items():
            console.print(f"   {name}: {reached:.2f}{unit}, must {target:g}{unit}", highlight=False)
        if check.columns:
            cells = [
                [
                    c.name,
                    str(c.rows),
                    f"{c.mean:.2f}",
                    f"{c.worst:.1f}",
                    f"{c.bias:+.2f}",
                    "" if c.covered is None else f"{100 * c.covered:.0f}",
                    "" if c.width is None else f"{100 * c.width:.1f}",
                ]
                for c in check.columns
            ]
            show_rows(["errors in seconds, %", "rows", "mean", "worst", "bias", "in band", "width"], cells, console)
        console.print(f"   fitted: {check.fitted}", soft_wrap=True, highlight=False)
        for note in check.notes:
            console.print(f"   {note}", soft_wrap=True, highlight=False)
        if rows:
            for name, measured, predicted, was_fitted in check.rows:
                mark = "fitted" if was_fitted else "held out"
                error = f"{100 * (predicted / measured - 1):+5.1f}%"
                line = f"   {name:48s} measured {measured:8.3f} s, predicted {predicted:8.3f} s ({error}, {mark})"
                console.print(line, highlight=False, soft_wrap=True)


def _check_to_dict(check: AnchorCheck) -> dict[str, Any]:
    figures = {}
    for name, (reached, target, unit) in check.figures.items():
        figures[name] = {"reached": reached, "target": target, "unit": unit.strip()}
    return {
        "key": check.key,
        "title": check.title,
        "figures": figures,
        "passed": check.passed,
        "fitted": check.fitted,
        "skipped": check.skipped,
        "notes": check.notes,
        "columns": [vars(column) for column in check.columns],
        "rows": [
            {"row": name, "measured": measured, "predicted": predicted, "fitted": fitted}
            for name, measured, predicted, fitted in check.rows
        ],
    }


def _draw_check(check: AnchorCheck, folder: Path) -> None:
    from megascale.simulate import simulation_plots

    key = check.key.lower()
    if check.rows:
        simulation_plots.plot_predictions(check.rows, folder / f"{key}.png", f"{check.key}: {check.title}")
    if check.bars:
        names, published, predicted = zip(*check.bars, strict=True)
        simulation_plots.plot_ablation(names, predicted, folder / f"{key}-mfu.png", published)
