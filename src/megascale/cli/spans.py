"""`megascale spans`: times of each rank's steps, and spans of the next steps on request."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from megascale.cli.common import make_console, make_number_table

if TYPE_CHECKING:
    from megascale.observe.store.tables import SpanTables

_SPAN_COLUMNS = (
    "attempt", "host", "rank", "step", "action", "chunk", "microbatch", "axis", "bytes", "start_ns", "end_ns",
    "waited_on",
)  # fmt: skip
_DIRECTIONS = {"nic_rx_rate": "received", "nic_tx_rate": "sent"}  # word by name of the counter
_POLL_SECONDS = 0.2  # between counts of the requested steps that have arrived
_MIN_STALL_SECONDS = 1e-4  # per step; shorter stalls by checkpoints get no column
# SQL of the newest attempt's number. A roll-up has the times of one rank, action and step.
_NEWEST_ATTEMPT = "(SELECT max(attempt) FROM rollups WHERE action = 'step')"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(spans)


def spans(
    run: Path = typer.Argument(..., help="Run folder, such as runs/stdlib, training or ended."),
    steps: int = typer.Option(0, "--steps", min=0, help="Record all spans of this many next steps, and wait for them."),
    last: int = typer.Option(20, min=1, help="Steps in the table: the last ones of the newest attempt."),
    wait: float = typer.Option(600.0, min=1, help="Seconds to wait for the steps."),
    export: Path | None = typer.Option(None, help="Also write the spans to this file: JSON lines, one per span."),
) -> None:
    """Print the times of each rank's steps: its own work, and its waits by axis.

    Ranks write summaries of every step and all spans of every observe.spans-th step into RUN/spans, where DuckDB reads
    them (docs/spans.md). With --steps all spans of the next steps are recorded too.

    Examples:

      megascale spans runs/stdlib

      megascale spans runs/stdlib --steps 5 --export spans.jsonl
    """
    from megascale.observe.store.tables import SpanTables

    if steps:
        requested = _request_steps(run, steps, time.monotonic() + wait)
    else:
        requested = None
    with SpanTables(run) as tables:
        _print_tables(tables, last)
        if export is not None:
            count = _export_spans(tables, run.name, export, requested)
            typer.echo(f"{count} spans: {export}")


def _request_steps(run: Path, steps: int, deadline: float) -> tuple[int, int]:
    """Request all spans of the next steps, wait for them, and return the first and the last of these steps.

    Args:
        deadline: limit for the wait, on the clock of time.monotonic.

    Raises TrainingError if the spans do not arrive in time.
    """
    from rich.progress import Progress

    from megascale.errors import TrainingError
    from megascale.observe.store.tables import count_complete_steps, request_spans

    first, last = request_spans(run, steps)
    with Progress(transient=True) as progress:
        task = progress.add_task(f"steps {first} to {last}", total=steps)
        complete_count = count_complete_steps(run, first, last)
        while complete_count < steps:
            if time.monotonic() > deadline:
                raise TrainingError(
                    f"spans of {complete_count} of the steps {first} to {last} of {run} have arrived: the run hangs, "
                    f"has ended, or its steps are longer than --wait allows; raise --wait, or see megascale hang; the "
                    f"spans so far are in {run / 'spans'}"
                )
            progress.update(task, completed=complete_count)
            time.sleep(_POLL_SECONDS)
            complete_count = count_complete_steps(run, first, last)
    return first, last


def _print_tables(tables: SpanTables, last: int) -> None:
    """Print a row per rank, then skipped files, the fullest links, and network settings to improve."""
    rows = _summarise_ranks(tables, last)
    axes = sorted({axis for row in rows for axis in row["waits"]})
    # One word per line of a header, so that a table of five axes fits a terminal of 80 columns.
    headers = ["rank", "steps", "step,\ns", "own,\ns"] + [f"{axis}\nwaits,\ns" for axis in axes]
    has_lost = any(row["lost"] for row in rows)
    if has_lost:
        headers.append("lost")
    table = make_number_table(headers)
    for row in rows:
        seconds = [row["seconds"], row["own"]] + [row["waits"].get(axis, 0.0) for axis in axes]
        cells = [f"{number:.4f}" for number in seconds]
        if has_lost:
            cells.append(str(row["lost"]))
        table.add_row(str(row["rank"]), str(row["steps"]), *cells)
    console = make_console()
    console.print(table)
    for file, reason in tables.skipped.items():
        console.print(f"skipped: {file}: {reason}", markup=False)
    for line in describe_links(tables) + describe_network(tables):
        console.print(line, markup=False)


def describe_links(tables: SpanTables) -> list[str]:
    """Return lines on the eight fullest links of hosts, by their use per millisecond in recorded steps.

    A counter `nic_rate_limit` has the speed of a link, and `nic_rx_rate` and `nic_tx_rate` have its use, in bytes/s.
    """
    columns = tables.query(
        "WITH limits AS (SELECT host, device, max(value) AS link_limit FROM counters WHERE name = 'nic_rate_limit' "
        "AND value > 0 AND isfinite(value) GROUP BY ALL) SELECT host, device, name, avg(value) / link_limit AS mean, "
        "quantile_cont(value, 0.99) / link_limit AS p99, max(value) / link_limit AS highest, link_limit "
        "FROM counters JOIN limits USING (host, device) "
        "WHERE name IN ('nic_rx_rate', 'nic_tx_rate') AND isfinite(value) GROUP BY host, device, name, link_limit "
        "ORDER BY p99 DESC, host, device, name LIMIT 8"
    )
    lines = []
    for host, device, name, mean, p99, highest, limit in _list_rows(columns):
        direction = _DIRECTIONS[name]
        lines.append(
            f"host {host} {device} {direction} {mean:.0%} of its {8 * limit / 1e9:g} Gbit/s in recorded steps; one "
            f"millisecond in a hundred {p99:.0%}, the fullest {highest:.0%}"
        )
    return lines


def describe_network(tables: SpanTables) -> list[str]:
    """Return lines on network settings of hosts that differ from the advice, as their span services report them."""
    from megascale.core import strict_json
    from megascale.core.untrusted_files import read_small_text
    from megascale.observe.store.span_messages import STATE_FILE

    lines = []
    for host in tables.hosts:
        try:
            for setting in strict_json.loads(read_small_text(host / STATE_FILE))["network"]:
                if setting["good"] is False:
                    name = f"{host.name} {setting['device']} {setting['name']}"
                    lines.append(f"{name}: {setting['found']}; advised: {setting['advised']}")
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return lines


def _summarise_ranks(tables: SpanTables, last: int) -> list[dict[str, Any]]:
    """Return a record per rank over the last steps of the newest attempt: seconds per step, waits by axis, lost spans.

    Earlier attempts are excluded, since their layout may differ.
    """
    newest = f"(SELECT max(step) FROM rollups WHERE action = 'step' AND attempt = {_NEWEST_ATTEMPT})"
    recent = f"attempt = {_NEWEST_ATTEMPT} AND step > {newest} - ?"
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
    rows: dict[int, dict[str, Any]] = {}
    for rank, count, total_ns, waited_ns, lost in _list_rows(steps):
        rows[rank] = {
            "rank": rank,
            "steps": count,
            "seconds": total_ns / count / 1e9,
            "own": (total_ns - waited_ns) / count / 1e9,
            "waits": {},
            "lost": lost,
        }
    for rank, action, axis, total_ns in _list_rows(stalls):
        row = rows.get(rank)
        if row is None:
            continue
        seconds = total_ns / row["steps"] / 1e9
        waits = row["waits"]
        name = {"data_wait": "samples", "checkpoint_stall": "checkpoint"}.get(action, axis)
        if action == "checkpoint_stall":
            row["own"] -= seconds  # the waits of a step do not include stalls
            if seconds <= _MIN_STALL_SECONDS:
                continue
        waits[name] = waits.get(name, 0.0) + seconds
    return list(rows.values())


def _list_rows(columns: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the rows of a query's result, which has an array per column."""
    return list(zip(*(column.tolist() for column in columns.values()), strict=True))


def _export_spans(tables: SpanTables, job: str, file: Path, steps: tuple[int, int] | None) -> int:
    """Write spans as JSON lines and return their number.

    Args:
        steps: first and last step of the newest attempt to write; None: all spans.
    """
    from megascale.core.spans import Span

    condition = ""
    parameters: list[int] = []
    if steps:
        condition = f"WHERE step BETWEEN ? AND ? AND attempt = {_NEWEST_ATTEMPT}"
        parameters = list(steps)
    names = ", ".join(_SPAN_COLUMNS)
    rows = _list_rows(tables.query(f"SELECT {names} FROM spans {condition} ORDER BY start_ns, rank", parameters))
    with open(file, "w") as out:
        for row in rows:
            out.write(Span(job=job, **dict(zip(_SPAN_COLUMNS, row, strict=True))).to_json() + "\n")
    return len(rows)
