"""`megascale jobs|nodes|events|logs|access|evict|cordon|uncordon|pause|resume|restart`: show and control launched jobs.

RUN may be an access file, which `megascale access` prints, instead of a run folder. The commands then query the driver,
also from another machine.
"""

from __future__ import annotations

import contextlib
import sys
import time
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import typer

from megascale.cli.common import (
    JSON,
    OVERRIDES,
    add_rows,
    format_optional,
    join_limited,
    make_console,
    number_or_none,
    print_json,
)
from megascale.core import strict_json
from megascale.errors import ConfigError, DataError, MegascaleError, TrainingError

RUN = typer.Argument(..., help="Run folder, such as runs/stdlib, or an access file.", show_default=False)
NODE = typer.Argument(..., help="Node, such as n2.")
REASON = typer.Option("requested on the command line", "--why", help="Reason, which goes into the journal.")
_MAX_LISTED_RANKS = 16
_MAX_ATTEMPT_CHARACTERS = 20  # A damaged record may hold any text in place of the attempt.


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (jobs, nodes, events, evict, cordon, uncordon, pause, resume, access, logs):
        app.command()(command)
    app.command(context_settings=OVERRIDES)(restart)


def _make_table(*headers: str) -> Any:
    from rich.table import Table

    return Table(*headers, box=None)


def jobs(
    runs: Path = typer.Argument(Path("runs"), help="A folder of run folders, or one run folder."),
    as_json: bool = JSON,
) -> None:
    """List launched jobs: phase, attempt, step, and whether a driver is running.

    Works with and without a running driver. Example: megascale jobs
    """
    from rich.markup import escape

    from megascale.resilience.driver.state.journal import JOURNAL_FILE

    folders = [runs]
    if not (runs / JOURNAL_FILE).exists():
        folders = sorted(file.parent for file in runs.glob(f"*/{JOURNAL_FILE}"))
    if not folders:
        raise DataError(f"{runs} holds no run that was started with `megascale launch`")
    rows = []
    errors = []
    for folder in folders:
        try:
            row = _describe_job(folder)
        except DataError as error:
            errors.append(error)
            continue
        if row is not None:
            rows.append(row)
    if errors and len(errors) == len(folders):
        raise errors[0]
    for damage in errors:
        typer.secho(f"left out: {damage}", fg="yellow", err=True)
    if as_json:
        print_json(rows)
        return
    table = _make_table("run", "phase", "attempt", "step", "ranks", "nodes", "driver", "last decision")
    for row in rows:
        driver = "running" if row["driver"] else "none"
        cells = [
            row["run"],
            row["phase"],
            row["attempt"],
            row["step"],
            row["ranks"],
            len(row["nodes"]),
            driver,
            row["why"],
        ]
        add_rows(table, [[escape(str(cell)) for cell in cells]])
    make_console().print(table)


def _describe_job(folder: Path) -> dict[str, Any] | None:
    """Return the record of a job from its journal and from rank 0's status; None if the journal has no job yet."""
    from megascale.core.status import read_status
    from megascale.resilience.driver.state.journal_reader import JournalReader

    with contextlib.closing(JournalReader(folder)) as reader:
        job, is_driver_alive = reader.job, reader.is_driver_alive()
    if job is None:
        return None
    status = read_status(folder / "status" / "rank-0.status")
    return {
        "run": str(folder),
        "phase": job.phase.value,
        "attempt": job.attempt,
        "step": job.step if status is None else max(job.step, status.step),
        "ranks": job.world,
        "nodes": list(job.placement),
        "driver": is_driver_alive,
        "why": job.reason,
    }


def nodes(run: Path = RUN, as_json: bool = JSON) -> None:
    """Show a job's nodes: state, ranks, last heartbeat, each rank's activity, and the slowness of the slowest rank.

    own, s: seconds per step of the node's slowest rank, without waits for other ranks. slower: the excess of this time
    over ranks with the same work; red if `megascale stragglers` names the rank. Both come from the run's spans and are
    empty without spans.

    Queries the driver, or shows the last state in the journal if no driver is running.

    Example: megascale nodes runs/stdlib
    """
    rows, journal_reason = _list_nodes(run)
    speed_by_rank = {}
    if not run.is_file():
        speed_by_rank = _measure_ranks(run)
    for row in rows:
        speeds = [speed_by_rank[rank] for rank in row["ranks"] if rank in speed_by_rank]
        slowest = max(speeds, key=lambda speed: speed["slower"] or 0.0, default={"own": None, "slower": None})
        row["own_seconds"] = slowest["own"]
        row["slower"] = slowest["slower"]
        row["slow"] = any(speed["named"] for speed in speeds)
    if as_json:
        print_json(rows)
        return
    table = _make_table("node", "address", "state", "ranks", "heartbeat", "own, s", "slower", "activity")
    add_rows(table, map(_format_node, rows))
    console = make_console()
    console.print(table)
    for row in rows:
        if row["state"] != "up":
            console.print(f" {row['name']} {row['state']}: {row['why']}", markup=False)
    if journal_reason:
        typer.echo(f"{journal_reason}: this is the last state in the journal")


def _format_node(row: dict[str, Any]) -> list[str]:
    """Return the cells of a node's row. `row` has the keys of the API's NodeAnswer and those that `nodes` adds."""
    state = row["state"]
    if row["cordoned"]:
        state += " (cordoned)"
    heartbeat = format_optional(row["seen"], "{:.1f} s ago")
    if row["state"] == "up" and not row["ranks"]:
        activity = f"spare, self-checks {row.get('checks', 'not run')}"
    else:
        activities = {f"{worker['phase'] or worker['state']} {worker['step']}" for worker in row["workers"]}
        activity = ", ".join(sorted(activities))
    own_seconds = format_optional(row["own_seconds"], "{:.3g}")
    slower = format_optional(row["slower"], "{:+.1%}")
    if row["slow"]:
        slower = f"[red]{slower}[/red]"
    ranks = " ".join(map(str, row["ranks"]))
    return [row["name"], row["address"], state, ranks, heartbeat, own_seconds, slower, activity]


def _list_nodes(run: Path) -> tuple[list[dict[str, Any]], str]:
    """Return the driver's nodes and "", or the journal's nodes and the reason why the driver did not answer."""
    from megascale.resilience.driver.api.client import list_stored_nodes, send_request
    from megascale.resilience.driver.state.journal_reader import JournalReader

    if run.is_file():
        return send_request(run, "GET", "/v1/nodes"), ""
    with contextlib.closing(JournalReader(run)) as reader:
        journal_nodes = list_stored_nodes(reader)
        is_driver_alive = reader.is_driver_alive()
    if not is_driver_alive:
        return journal_nodes, "no driver is running"
    try:
        return send_request(run, "GET", "/v1/nodes"), ""
    except TrainingError as error:  # the driver may be on a host that this host cannot reach
        return journal_nodes, str(error)


def _measure_ranks(run: Path) -> dict[int, dict[str, Any]]:
    """Return the speed of each rank from the run's spans; empty without spans.

    A speed has `own` (seconds per step without waits), `slower` (excess over comparable ranks, or None without such
    ranks) and `named` (whether `megascale stragglers` names the rank).
    """
    from megascale.observe.analysis.rank_times import choose_window, read_rank_times
    from megascale.observe.analysis.slow_ranks import nan_median
    from megascale.observe.analysis.stragglers import find_stragglers
    from megascale.observe.store.tables import SpanTables

    try:
        with SpanTables(run) as tables:
            report = find_stragglers(read_rank_times(tables, *choose_window(tables)))
    except MegascaleError:
        return {}
    named_ranks = {straggler.slow_rank.rank for straggler in report.persistent}
    times, excesses = report.times, report.judgement.excess
    ranks = times.ranks.tolist()
    speed_by_rank = {}
    for rank, seconds, excess in zip(ranks, nan_median(times.running).tolist(), excesses.tolist(), strict=True):
        speed_by_rank[rank] = {"own": seconds, "slower": number_or_none(excess), "named": rank in named_ranks}
    return speed_by_rank


def events(
    run: Path = RUN,
    as_json: bool = JSON,
    follow: bool = typer.Option(False, "--follow", "-f", help="Print new events as they occur; Ctrl-C ends."),
    all_events: bool = typer.Option(False, "--all", help="Also the trainers' events (checkpoints, evaluations)."),
) -> None:
    """Print the events of a job with date (UTC) and attempt: faults, decisions and their evidence.

    Example: megascale events runs/stdlib
    """
    from megascale.resilience.driver.api.client import send_request
    from megascale.resilience.driver.state.journal_reader import JournalReader

    reader = None if run.is_file() else JournalReader(run)
    if reader is None and all_events:
        raise ConfigError("--all reads the run folder, but an access file reaches its driver only; omit the option")
    trainer_events = _read_trainer_events(run) if all_events else []
    console = make_console(soft_wrap=True)
    last_id = 0
    first_time: float | None = None
    while True:
        if reader is not None:
            new_events = [vars(event) for event in reader.events(last_id)]
        else:
            # The driver answers with a limited number of events, so requests are repeated until no event is new.
            new_events = send_request(run, "GET", f"/v1/events?after={last_id}")
        sorted_events = sorted(new_events + trainer_events, key=itemgetter("time"))
        trainer_events = []  # printed once
        for event in sorted_events:
            if first_time is None:
                first_time = event["time"]
            if as_json:
                print_json(event)
            elif "event" in event:  # Only trainers' records have this key; the driver's have "kind".
                _print_trainer_event(console, event)
            else:
                _print_driver_event(console, event, event["time"] - first_time)
        if new_events:
            last_id = new_events[-1]["id"]
        if follow:
            time.sleep(0.5)
        elif reader is not None or not new_events:
            break
    if reader is not None:
        reader.close()


def _read_trainer_events(run: Path) -> list[dict[str, Any]]:
    """Return the trainers' events that have a plausible time; damaged lines are skipped."""
    from megascale.core.events import is_plausible_time
    from megascale.core.json_lines import RecordReader

    trainer_events = []
    with contextlib.suppress(OSError):
        for record in RecordReader(run / "events.jsonl"):
            seconds = strict_json.to_float(record.get("time"))
            if record.get("by") != "driver" and is_plausible_time(seconds):
                trainer_events.append(record | {"time": seconds, "event": str(record.get("event", ""))})
    return trainer_events


def _print_trainer_event(console: Any, record: dict[str, Any]) -> None:
    """Print an event of a trainer on one line."""
    from rich.text import Text

    from megascale.core.events import format_time

    hidden = ("time", "date", "event", "attempt")
    details = []
    for key, value in record.items():
        if key not in hidden and not isinstance(value, dict):
            details.append(f"{key} {value}")
    attempt = str(record.get("attempt", 0))[:_MAX_ATTEMPT_CHARACTERS]
    date = _make_printable(f"{format_time(record['time'])} {attempt:>3} ")
    event = _make_printable(f"{'':10}{record['event']}  ")
    console.print(Text.assemble((date, "dim"), event, (_make_printable(", ".join(details)), "dim")))


def _make_printable(text: str) -> str:
    """Replace halves of surrogate pairs. JSON of another process may hold them, and they cannot be printed."""
    return text.encode(errors="replace").decode()


def _print_driver_event(console: Any, event: dict[str, Any], seconds: float) -> None:
    """Print an event of the driver and its evidence. `seconds` is the event's time since the first event."""
    from rich.text import Text

    from megascale.core.events import format_time

    colours = {"stop": "bold red", "evict": "red", "alert": "yellow", "": "cyan", "none": "cyan"}
    text = Text.assemble(
        (f"{format_time(event['time'])} {event['attempt']:>3} ", "dim"),
        (f"{seconds:+8.2f}s ", "dim"),
        (event["kind"], colours.get(event["action"], "yellow")),
    )
    if event["nodes"]:
        text.append(f" on {', '.join(event['nodes'])}")
    if event["ranks"]:
        text.append(f" (rank {', '.join(map(str, event['ranks']))})")
    if event["action"] not in ("", "none"):
        text.append(f" -> {event['action']}", style="bold")
    console.print(text)
    for sentence in event["evidence"]:
        console.print(Text(f"{'':39}{sentence}", style="dim"))


def evict(run: Path = RUN, node: str = NODE, why: str = REASON) -> None:
    """Remove a node from a job; its ranks move to a spare or a new node.

    Example: megascale evict runs/stdlib n2 --why "fan is loud"
    """
    _send_order(run, f"/v1/nodes/{node}/evict", why)


def cordon(run: Path = RUN, node: str = NODE, why: str = REASON) -> None:
    """Assign nothing new to a node; its running ranks continue.

    Example: megascale cordon runs/stdlib n2
    """
    _send_order(run, f"/v1/nodes/{node}/cordon", why)


def uncordon(run: Path = RUN, node: str = NODE, why: str = REASON) -> None:
    """Allow a cordoned or evicted node again.

    Example: megascale uncordon runs/stdlib n2
    """
    _send_order(run, f"/v1/nodes/{node}/uncordon", why)


def pause(run: Path = RUN, why: str = REASON) -> None:
    """Let a job save and stop; its nodes stay ready.

    Example: megascale pause runs/stdlib
    """
    _send_order(run, "/v1/job/pause", why)


def resume(run: Path = RUN, why: str = REASON) -> None:
    """Resume a paused job.

    Example: megascale resume runs/stdlib
    """
    _send_order(run, "/v1/job/resume", why)


def restart(context: typer.Context, run: Path = RUN, why: str = REASON) -> None:
    """Update a running job: save, import the code again, and start the trainers again.

    Settings given as --section.key=value are changed. Settings with which no step succeeds are reverted. Layout, model
    and the driver's own settings ([resilience]) need a new launch.

    Examples:

      megascale restart runs/stdlib --why "new kernel"

      megascale restart runs/stdlib --lr.peak=1e-4 --train.eval_interval=100
    """
    if context.args:
        _check_settings(run, context.args)
        from megascale.resilience.driver.recovery.hot_update import store_settings

        # An order can change only some settings, so all are stored in the run folder, from which the driver reads them.
        store_settings(run, [override.removeprefix("--") for override in context.args])
    _send_order(run, "/v1/job/restart", why, from_folder=bool(context.args))


def _check_settings(run: Path, overrides: list[str]) -> None:
    """Raise the error that a launch with these settings would raise, before the job is stopped."""
    from megascale import api
    from megascale.config import load_command_line
    from megascale.core.layout import lay_out
    from megascale.resilience.driver.recovery.hot_update import settings_file
    from megascale.resilience.driver.state.journal_reader import JournalReader

    for override in overrides:
        if not (override.startswith("--") and "=" in override):
            raise ConfigError(f"{override} is not a setting: give --section.key=value, such as --lr.peak=1e-4")
    with contextlib.closing(JournalReader(run)) as reader:
        world = reader.job.world if reader.job is not None else 1  # number of ranks
    lay_out(api.resolve(load_command_line(settings_file(run), overrides)), world)


def _send_order(run: Path, path: str, why: str, **fields: Any) -> None:
    """Send an order with further `fields` to the driver's API, and print the phase of the job after the order."""
    from megascale.resilience.driver.api.client import send_request

    answer = send_request(run, "POST", path, {"why": why} | fields)
    typer.echo(f"done; the job is {answer['phase']}")


def access(
    run: Path = typer.Argument(..., help="The run folder, on the driver's machine.", show_default=False),
    act: bool = typer.Option(False, "--act", help="Also allow orders (evict, pause ...), not only reading."),
    host: str = typer.Option("", "--host", help="Host by which others reach the driver; default: where it listens."),
) -> None:
    """Print an access file. On another machine, commands such as `nodes`, `logs` and `evict` take it as RUN.

    An access file has address, certificate and token of the running driver in one line of JSON. It lets every reader
    of the file read the job's state, and with --act also control the job: keep it in a file of mode 600. It is valid
    until this driver ends; with resilience.tls_certificate and resilience.api_port, until those settings change.

    Examples:

      (umask 77; ssh head01 megascale access runs/stdlib > stdlib.access)

      megascale nodes stdlib.access
    """
    from megascale.resilience.driver.api.access import create_access

    typer.echo(create_access(run, for_orders=act, host=host).to_text(), nl=False)


def logs(
    run: Path = RUN,
    rank: int = typer.Option(0, "--rank", min=0, help="Rank whose log is printed."),
    lines: int = typer.Option(
        50, "--lines", "-n", min=0, help="Number of lines from the end of the log; at most 64 KiB."
    ),
    follow: bool = typer.Option(False, "--follow", "-f", help="Print new lines as they are written; Ctrl-C ends."),
) -> None:
    """Print the end of a rank's log, from a run folder or through the driver.

    Example: megascale logs runs/stdlib --rank 3 -f
    """
    from megascale.resilience.driver.api.access import LOG_PIECE

    piece = _read_log(run, rank, -LOG_PIECE)
    log_lines = piece.text.splitlines(keepends=True)
    if piece.start:
        log_lines = log_lines[1:]  # the piece may begin within this line
    if lines:
        sys.stdout.write("".join(log_lines[-lines:]))
    while follow:
        sys.stdout.flush()
        time.sleep(0.5)
        piece = _read_log(run, rank, piece.end)
        sys.stdout.write(piece.text)


class _LogPiece(NamedTuple):
    """Text of a log from byte `start` to byte `end`."""

    start: int
    end: int
    text: str


def _read_log(run: Path, rank: int, offset: int) -> _LogPiece:
    """Read a piece of a log from byte `offset` on. A negative offset counts from the end of the log."""
    from megascale.resilience.driver.api.access import read_log_piece
    from megascale.resilience.driver.api.client import send_request

    if run.is_file():
        answer = send_request(run, "GET", f"/v1/logs/{rank}?after={offset}")
        return _LogPiece(answer["start"], answer["end"], answer["text"])
    file = run / "logs" / f"rank-{rank}.log"
    piece = read_log_piece(file, offset)
    if piece is None:
        ranks = sorted(int(log.stem[5:]) for log in file.parent.glob("rank-*.log") if log.stem[5:].isdigit())
        existing = "no rank has a log; rank 0 of `megascale train` prints to its terminal"
        if ranks:
            existing = f"there are logs of ranks {join_limited(ranks, _MAX_LISTED_RANKS)}"
        raise DataError(f"{file} does not exist; {existing}")
    start, content = piece
    return _LogPiece(start, start + len(content), content.decode(errors="replace"))
