"""`megascale whatif`: replay recorded steps to find the time that each rank, stage and kind of operation costs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import (
    JSON,
    check_picture,
    join_limited,
    make_console,
    make_number_table,
    number_or_none,
    print_json,
)

if TYPE_CHECKING:
    from megascale.observe.analysis.operation_trace import OperationTrace
    from megascale.observe.analysis.whatif import SubsetResult, WhatIf

_MAX_LISTED = 12  # rows per group of the table
_MAX_SLOWEST_RANKS = 8  # of the slowest 3% of ranks
_MAX_SKIPPED_STEPS = 5  # steps whose reason is printed
_MIN_SHOWN_SECONDS = 5e-6  # less would be printed as 0.00 ms


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(whatif)


def whatif(
    source: Path = typer.Argument(..., help="Run folder, such as runs/stdlib, or a trace (.parquet)."),
    steps: str = typer.Option("", "--steps", help="Steps to replay: 7, or 7-20; default: the last recorded ones."),
    last: int = typer.Option(20, min=1, help="Number of the last recorded steps, without --steps."),
    rank: list[int] = typer.Option([], "--rank", help="Also replay with this rank made typical; repeatable."),
    export: Path | None = typer.Option(None, help="Also write the operations as a trace that this command reads."),
    plot: Path | None = typer.Option(
        None, help="Also draw the workers' heat map (.png, .svg, .pdf).", callback=check_picture
    ),
    as_json: bool = JSON,
) -> None:
    """Compute how much faster a job's steps would be if a rank, a stage or a kind of operation were typical.

    Steps are replayed from their operations in three ways. "ideal": every operation takes its kind's typical time.
    "alone": one part is as recorded and the rest is typical; the figure is the slow-down. "explains": one part is
    typical and the rest is as recorded; the figure is the share of the loss that vanishes. M_S is the last stage's
    share, M_W that of the slowest 3% of ranks.

    About 100% for one rank: examine its machine (megascale diagnose). For the last stage: its share of the layers. For
    forward and backward computes of all ranks alike: uneven samples. Steps much longer than their replay without
    launch gaps: the host is late (garbage collection, loader, other processes). A negative share: the part's operations
    are shorter than typical, so steps would be longer with typical ones.

    A trace has one row per operation: dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id, gmc,
    as in ByteDance's StragglerAnalysis. --export writes a run in this form. Of ranks that share a stage, the tools of
    StragglerAnalysis read only one.

    Examples:

      megascale whatif runs/stdlib

      megascale whatif runs/stdlib --steps 100-120 --rank 5 --plot workers.png

      megascale whatif trace-ST.parquet --json
    """
    from megascale.observe.analysis.operation_trace import write_trace
    from megascale.observe.analysis.whatif import analyse_trace

    trace = _read_trace(source, steps, last)
    if export is not None:
        typer.echo(f"{write_trace(trace, export)} operations: {export}", err=as_json)
    report = analyse_trace(trace, tuple(rank))
    if plot is not None:
        from megascale.observe.analysis.plots import draw_worker_scores

        draw_worker_scores(report, plot)
        typer.echo(f"workers: {plot}", err=as_json)
    if as_json:
        print_json(_to_dict(report))
    else:
        _print_tables(report)


def _read_trace(source: Path, steps: str, last: int) -> OperationTrace:
    """Return the chosen steps of a run's spans or of a trace file."""
    from megascale.errors import ConfigError, DataError
    from megascale.observe.analysis.operation_trace import read_trace
    from megascale.observe.analysis.run_steps import choose_sampled_steps, parse_step_range

    if source.is_dir():
        from megascale.observe.analysis.run_trace import read_run_trace
        from megascale.observe.store.tables import SpanTables

        with SpanTables(source) as tables:
            return read_run_trace(tables, choose_sampled_steps(tables, steps, last))
    if not source.exists():
        raise DataError(f"{source} does not exist; name a run folder, such as runs/stdlib, or a trace (.parquet)")
    trace = read_trace(source)
    if not steps:
        return trace
    low, high = parse_step_range(steps)
    is_chosen = (trace.step >= low) & (trace.step <= high)
    if not is_chosen.any():
        raise ConfigError(f"--steps={steps}: {source} has steps {trace.step.min()} to {trace.step.max()}")
    return trace.select_rows(is_chosen)


def _print_tables(report: WhatIf) -> None:
    """Print the slow-down of the steps, and a table of what each rank, stage and kind of operation costs."""
    console = make_console()
    gap_share = 1.0 - report.original / report.recorded
    console.print(
        f"{report.steps} steps of {report.recorded:.4f} s; {report.original:.4f} s without launch gaps "
        f"({gap_share:.1%} of a step), {report.ideal:.4f} s with every operation typical"
    )
    if len(report.slowest) == 1:
        subject = "rank"
    else:
        subject = f"{len(report.slowest)} ranks"
    stage_share = ""
    if not math.isnan(report.stage_share):
        stage_share = f"M_S (last stage) {_format_share(report.stage_share)}; "
    slowest_ranks = join_limited(report.slowest, _MAX_SLOWEST_RANKS)
    console.print(
        f"slow-down {report.slow_down:.4f}; {stage_share}M_W (slowest {subject}: {slowest_ranks}) "
        f"{_format_share(report.worker_share)}"
    )
    table = make_number_table(["made typical", "explains", "saves, ms", "alone, slow-down"])
    groups: list[tuple[str, dict[Any, SubsetResult]]] = [("rank", report.ranks)]
    for name, results in (("stage", report.stages), ("replica", report.replicas)):
        if len(results) > 1:
            groups.append((name, results))
    groups.append(("", report.kinds))
    for name, results in groups:
        shown_rows = [(key, result) for key, result in results.items() if abs(result.seconds) >= _MIN_SHOWN_SECONDS]
        shown_rows.sort(key=lambda row: -row[1].seconds)  # the most costly first
        for key, result in shown_rows[:_MAX_LISTED]:
            saved = f"{1e3 * result.seconds:.2f}"
            table.add_row(f"{name} {key}".strip(), _format_share(result.explains), saved, f"{result.alone:.4f}")
        table.add_section()
    console.print(table)
    if any(result.seconds <= -_MIN_SHOWN_SECONDS for _, results in groups for result in results.values()):
        console.print("negative: these operations are shorter than typical, so steps would be longer with typical ones")
    for number, reason in list(report.skipped_steps.items())[:_MAX_SKIPPED_STEPS]:
        console.print(f"skipped: step {number}: {reason}", markup=False)
    if len(report.skipped_steps) > _MAX_SKIPPED_STEPS:
        console.print(f"skipped: {len(report.skipped_steps) - _MAX_SKIPPED_STEPS} more steps")


def _format_share(share: float) -> str:
    """Return a share in percent, "-" for a share without a meaning (NaN)."""
    return "-" if math.isnan(share) else f"{share:.1%}"


def _to_dict(report: WhatIf) -> dict[str, Any]:
    """Return the record of --json; null stands for a figure without a meaning."""

    def results_to_dict(results: dict[Any, SubsetResult]) -> dict[str, Any]:
        record = {}
        for key, result in results.items():
            figures = {"alone": result.alone, "explains": result.explains, "seconds": result.seconds}
            record[str(key)] = {name: number_or_none(value) for name, value in figures.items()}
        return record

    return {
        "steps": report.steps,
        "left_out": {str(step): reason for step, reason in report.skipped_steps.items()},
        "recorded_seconds": report.recorded,
        "replayed_seconds": report.replayed,
        "original_seconds": report.original,
        "ideal_seconds": report.ideal,
        "slow_down": report.slow_down,
        "stage_share": number_or_none(report.stage_share),
        "worker_share": number_or_none(report.worker_share),
        "slowest_ranks": list(report.slowest),
        "kinds": results_to_dict(report.kinds),
        "stages": results_to_dict(report.stages),
        "replicas": results_to_dict(report.replicas),
        "ranks": results_to_dict(report.ranks),
        "scores": report.scores.tolist(),
    }
