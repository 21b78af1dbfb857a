"""`megascale whatif`: what each rank, stage and kind of operation costs a job, by replay of recorded steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import check_picture

if TYPE_CHECKING:
    from megascale.observe.analysis.operation_trace import OperationTrace
    from megascale.observe.analysis.whatif import Part, WhatIf


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("whatif")(whatif)


def whatif(
    source: Path = typer.Argument(..., help="Run folder, such as runs/stdlib, or a trace (.parquet)."),
    steps: str = typer.Option("", "--steps", help="Steps to replay: 7, or 7-20. By default the last of those kept."),
    last: int = typer.Option(20, min=1, help="How many of the last kept steps, without --steps."),
    rank: list[int] = typer.Option([], "--rank", help="Replay with this rank made normal too; may be repeated."),
    export: Path | None = typer.Option(None, help="Also write the operations as a trace that this command reads."),
    plot: Path | None = typer.Option(
        None, help="Also draw the workers' heat map (.png, .svg, .pdf).", callback=check_picture
    ),
    as_json: bool = typer.Option(False, "--json", help="Print all of it as JSON."),
) -> None:
    """How much faster a job's steps would be if a rank, a stage or a kind of operation were normal.

    Steps are replayed from their operations, with every one at its kind's typical time ("ideal"), with one part as
    recorded and the rest typical ("alone", as a slow-down), and with one part typical and the rest as recorded
    ("explains": how much of the loss goes with it). M_S is what the last stage explains, M_W the slowest 3% of ranks.

    Explains about 100% for one rank: look at its machine (megascale diagnose). For the last stage: its share of the
    layers. For forward and backward computes of all ranks alike: uneven samples. Steps much longer than their replay
    without launch gaps: the host is late (garbage collection, loader, other processes).

    A trace has a row an operation: dp_rank, stage, rank, step, optype, start_ts, duration, seq_id, mc, mb_id, gmc, as
    of ByteDance's StragglerAnalysis. --export writes a run so; its tools read one of the ranks that share a stage.

    Examples:

      megascale whatif runs/stdlib

      megascale whatif runs/stdlib --steps 100-120 --rank 5 --plot workers.png

      megascale whatif trace-ST.parquet --json
    """
    from megascale.observe.analysis.operation_trace import write_trace
    from megascale.observe.analysis.whatif import what_if

    trace = _trace(source, steps, last)
    if export is not None:
        typer.echo(f"{write_trace(trace, export)} operations: {export}", err=as_json)
    found = what_if(trace, tuple(rank))
    if plot is not None:
        from megascale.observe.analysis.whatif_plot import heat_map

        heat_map(found, plot)
        typer.echo(f"workers: {plot}", err=as_json)
    if as_json:
        from megascale.core import strict_json

        typer.echo(strict_json.dumps(as_tree(found)))
    else:
        show(found)


def _trace(source: Path, steps: str, last: int) -> OperationTrace:
    from megascale.errors import ConfigError, DataError
    from megascale.observe.analysis.operation_trace import read_trace

    if source.is_dir():
        from megascale.observe.analysis.run_steps import chosen_steps
        from megascale.observe.analysis.run_trace import run_trace
        from megascale.observe.store.tables import SpanTables

        with SpanTables(source) as tables:
            return run_trace(tables, chosen_steps(tables, steps, last))
    if not source.exists():
        raise DataError(f"{source} is not there; name a run folder, such as runs/stdlib, or a trace (.parquet)")
    trace = read_trace(source)
    if steps:
        from megascale.observe.analysis.run_steps import step_range

        low, high = step_range(steps)
        mask = (trace.step >= low) & (trace.step <= high)
        if not mask.any():
            raise ConfigError(f"--steps={steps}: {source} has steps {trace.step.min()} to {trace.step.max()}")
        return trace.select_rows(mask)
    return trace


def show(found: WhatIf) -> None:
    """The tables."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    gaps = 1.0 - found.original / found.recorded
    console.print(
        f"{found.steps} steps of {found.recorded:.4f} s; {found.original:.4f} s without launch gaps ({gaps:.1%} of a "
        f"step), {found.ideal:.4f} s with every operation typical"
    )
    console.print(
        f"slow-down {found.slow_down:.4f}; M_S (last stage) {_percent(found.stage_share)}; M_W (slowest "
        f"{'rank' if len(found.slowest) == 1 else f'{len(found.slowest)} ranks'}: "
        f"{', '.join(map(str, found.slowest[:8]))}{', ...' if len(found.slowest) > 8 else ''}) "
        f"{_percent(found.worker_share)}"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for number, head in enumerate(["made normal", "explains", "saves, ms", "alone, slow-down"]):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    groups: list[tuple[str, dict[Any, Part]]] = [
        ("rank", found.ranks),
        ("stage", found.stages if len(found.stages) > 1 else {}),
        ("replica", found.replicas if len(found.replicas) > 1 else {}),
        ("", found.kinds),
    ]
    for name, parts in groups:
        asked = [(key, part) for key, part in parts.items() if not math.isnan(part.seconds)]
        for key, part in sorted(asked, key=lambda one: -one[1].seconds)[:_SHOWN]:
            table.add_row(
                f"{name} {key}".strip(), _percent(part.explains), f"{1e3 * part.seconds:.2f}", f"{part.alone:.4f}"
            )
        table.add_section()
    console.print(table)
    for number, why in list(found.skipped_steps.items())[:5]:
        console.print(f"left out: step {number}: {why}", markup=False)
    if len(found.skipped_steps) > 5:
        console.print(f"left out: {len(found.skipped_steps) - 5} steps more")


_SHOWN = 12


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def as_tree(found: WhatIf) -> dict[str, Any]:
    """What --json prints; null where a figure has no meaning."""

    def number(value: float) -> float | None:
        return None if math.isnan(value) else value

    def parts(of: dict[Any, Part]) -> dict[str, Any]:
        return {
            str(key): {"alone": number(p.alone), "explains": number(p.explains), "seconds": number(p.seconds)}
            for key, p in of.items()
        }

    return {
        "steps": found.steps,
        "left_out": {str(step): why for step, why in found.skipped_steps.items()},
        "recorded_seconds": found.recorded,
        "replayed_seconds": found.replayed,
        "original_seconds": found.original,
        "ideal_seconds": found.ideal,
        "slow_down": found.slow_down,
        "stage_share": number(found.stage_share),
        "worker_share": number(found.worker_share),
        "slowest_ranks": list(found.slowest),
        "kinds": parts(found.kinds),
        "stages": parts(found.stages),
        "replicas": parts(found.replicas),
        "ranks": parts(found.ranks),
        "scores": found.scores.tolist(),
    }
