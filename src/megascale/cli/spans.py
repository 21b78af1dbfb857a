"""`megascale spans`: what each rank's steps took, and spans of the next steps on demand."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from megascale.observe.store.tables import SpanTables


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("spans")(spans)


def spans(
    run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib, alive or not."),
    steps: int = typer.Option(0, "--steps", min=0, help="Keep all spans of so many next steps, and wait for them."),
    last: int = typer.Option(20, min=1, help="Steps that the table is over: the last ones of the newest attempt."),
    wait: float = typer.Option(600.0, min=1, help="Seconds to wait for the steps."),
    export: Path | None = typer.Option(None, help="Also write the spans to this file: JSON lines, one span each."),
) -> None:
    """What each rank's steps took: its own work, and what it waited for.

    Ranks write roll-ups of every step and all spans of every observe.spans-th one into RUN/spans, where DuckDB reads
    them (docs/observe.md). With --steps all spans of the next steps are kept too.

    Examples:

      megascale spans runs/stdlib

      megascale spans runs/stdlib --steps 5 --export spans.jsonl
    """
    from megascale.observe.store.tables import SpanTables

    asked: tuple[int, int] | None = None
    if steps:
        asked = ask(run, steps, time.monotonic() + wait)
    with SpanTables(run) as tables:
        show(tables, last)
        if export is not None:
            count = write(tables, run.name, export, asked)
            typer.echo(f"{count} spans: {export}")


def ask(run: Path, steps: int, deadline: float) -> tuple[int, int]:
    """Have all spans of the next steps kept, and wait for them: (first, last). TrainingError if they do not come."""
    from rich.progress import Progress

    from megascale.errors import TrainingError
    from megascale.observe.store.asking import arrived, ask_for

    first, last = ask_for(run, steps)
    with Progress(transient=True) as progress:
        task = progress.add_task(f"steps {first} to {last}", total=steps)
        while (done := arrived(run, first, last)) < steps:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"of steps {first} to {last} of {run} {done} have come: the run stands still, has ended, or its "
                    f"steps are longer than --wait allows; what came is in {run / 'spans'}"
                )
            progress.update(task, completed=done)
            time.sleep(0.2)
    return first, last


def show(tables: SpanTables, last: int) -> None:
    """The table: a rank a row."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    found = summary(tables, last)
    axes = sorted({axis for row in found for axis in row["waits"]})
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    # A word a line: a table of five axes fits a terminal of 80 columns.
    heads = ["rank", "steps", "step,\ns", "own,\ns", *(f"{axis}\nwaits,\ns" for axis in axes), "lost"]
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in found:
        waits = [f"{row['waits'].get(axis, 0.0):.4f}" for axis in axes]
        table.add_row(
            str(row["rank"]), str(row["steps"]), f"{row['seconds']:.4f}", f"{row['own']:.4f}", *waits, str(row["lost"])
        )
    console.print(table)
    for file, why in tables.skipped.items():
        console.print(f"left out: {file}: {why}", markup=False)
    for text in [*describe_links(tables), *describe_network(tables)]:
        console.print(text, markup=False)


def describe_links(tables: SpanTables) -> list[str]:
    """How full the hosts' links were by the millisecond in steps whose spans were kept: the fullest eight."""
    found = tables.query(
        "WITH limits AS (SELECT host, device, max(value) AS most FROM counters WHERE name = 'nic_rate_limit' "
        "AND value > 0 AND isfinite(value) GROUP BY ALL) SELECT host, device, name, avg(value) / most AS mean, "
        "quantile_cont(value, 0.99) / most AS high, max(value) / most AS highest, most "
        "FROM counters JOIN limits USING (host, device) "
        "WHERE name IN ('nic_rx_rate', 'nic_tx_rate') AND isfinite(value) GROUP BY host, device, name, most "
        "ORDER BY high DESC, host, device, name LIMIT 8"
    )
    rows = list(zip(*(column.tolist() for column in found.values()), strict=True))
    return [
        f"host {host} {device} {'received' if name == 'nic_rx_rate' else 'sent'} {mean:.0%} of its {8 * most / 1e9:g} "
        f"Gbit/s in kept steps; one millisecond in a hundred {high:.0%}, the fullest {highest:.0%}"
        for host, device, name, mean, high, highest, most in rows
    ]


def describe_network(tables: SpanTables) -> list[str]:
    """What of the hosts' network is set otherwise than advised, as their span services found it."""
    from megascale.core import strict_json
    from megascale.core.untrusted_files import read_small_text
    from megascale.observe.store.ingest import STATE

    found = []
    for host in tables.hosts:
        try:
            settings = strict_json.loads(read_small_text(host / STATE))["network"]
            found += [
                f"{host.name} {one['device']} {one['name']}: {one['found']}; advised: {one['advised']}"
                for one in settings
                if one["good"] is False
            ]
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def summary(tables: SpanTables, last: int) -> list[dict[str, Any]]:
    """Return a row per rank over the last steps of the newest attempt, in seconds per step, and the spans lost in it.

    The step, its own time, and its waits by axis. Steps that an earlier attempt did under the same numbers, on another
    layout perhaps, stay out.
    """
    attempt = "(SELECT max(attempt) FROM rollups WHERE action = 'step')"
    newest = f"(SELECT max(step) FROM rollups WHERE action = 'step' AND attempt = {attempt})"
    recent = f"attempt = {attempt} AND step > {newest} - ?"
    steps = tables.query(
        "SELECT rank, count(DISTINCT step) AS steps, sum(total_ns)::DOUBLE AS total, sum(waited_ns)::DOUBLE AS waited, "
        f"max(lost)::BIGINT AS lost FROM rollups WHERE action = 'step' AND {recent} GROUP BY rank ORDER BY rank",
        [last],
    )
    stalls = tables.query(
        "SELECT rank, action, axis, sum(total_ns)::DOUBLE AS total FROM rollups WHERE action IN ('wait', 'data_wait', "
        f"'checkpoint_stall') AND {recent} GROUP BY ALL",
        [last],
    )
    rows = {
        rank: {"rank": rank, "steps": count, "seconds": total / count / 1e9, "own": (total - waited) / count / 1e9,
               "waits": {}, "lost": lost}
        for rank, count, total, waited, lost in zip(*(column.tolist() for column in steps.values()), strict=True)
    }  # fmt: skip
    for rank, action, axis, total in zip(*(column.tolist() for column in stalls.values()), strict=True):
        if (row := rows.get(rank)) is None:
            continue
        seconds = total / row["steps"] / 1e9
        if action == "checkpoint_stall":
            row["own"] -= seconds
        if action != "checkpoint_stall" or seconds > 1e-4:
            name = {"data_wait": "samples", "checkpoint_stall": "checkpoint"}.get(action, axis)
            row["waits"][name] = row["waits"].get(name, 0.0) + seconds
    return list(rows.values())


def write(tables: SpanTables, job: str, file: Path, steps: tuple[int, int] | None) -> int:
    """Write spans as JSON lines and return how many: all, or those of the newest attempt from first to last step."""
    from megascale.core.spans import Span

    names = ["attempt", "host", "rank", "step", "action", "chunk", "microbatch", "axis", "bytes", "start_ns", "end_ns"]
    names.append("waited_on")
    where, parameters = "", []
    if steps:
        where = "WHERE step BETWEEN ? AND ? AND attempt = (SELECT max(attempt) FROM rollups WHERE action = 'step')"
        parameters = list(steps)
    found = tables.query(f"SELECT {', '.join(names)} FROM spans {where} ORDER BY start_ns, rank", parameters)
    columns = [found[name].tolist() for name in names]
    with open(file, "w") as out:
        for row in zip(*columns, strict=True):
            out.write(Span(job=job, **dict(zip(names, row, strict=True))).to_json() + "\n")
    return len(columns[0])
