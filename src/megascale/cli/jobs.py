"""`megascale jobs|nodes|events|evict|cordon|uncordon|pause|resume|restart`: look at launched jobs and steer them.

Where RUN is a file of `megascale access` and no folder, all is asked of the driver: from a laptop, say.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import typer

from megascale.cli.common import OVERRIDES
from megascale.core import strict_json
from megascale.errors import ConfigError, DataError

RUN = typer.Argument(..., help="Run folder, such as runs/stdlib, or an access file.", show_default=False)
JSON = typer.Option(False, "--json", help="Print JSON for a machine.")
WHY = typer.Option("asked for on the command line", "--why", help="Goes into the journal.")


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.command()(jobs)
    app.command()(nodes)
    app.command()(events)
    app.command()(evict)
    app.command()(cordon)
    app.command()(uncordon)
    app.command()(pause)
    app.command()(resume)
    app.command(context_settings=OVERRIDES)(restart)


def jobs(
    runs: Path = typer.Argument(Path("runs"), help="A folder of run folders, or one run folder."),
    as_json: bool = JSON,
) -> None:
    """List launched jobs: phase, attempt, step, and whether a driver is at work.

    Works with and without a running driver. Example: megascale jobs
    """
    from rich.console import Console
    from rich.table import Table

    from megascale.resilience.driver.state.journal import FILE
    from megascale.resilience.driver.state.journal_reader import JournalReader

    folders = [runs] if (runs / FILE).exists() else sorted(p.parent for p in runs.glob(f"*/{FILE}"))
    if not folders:
        raise DataError(f"{runs} holds no run that was started with `megascale launch`")
    rows: list[dict[str, Any]] = []
    for folder in folders:
        reader = JournalReader(folder)
        job, alive = reader.job, reader.driver_alive()
        reader.close()
        if job is not None:
            rows.append(
                {"run": str(folder), "phase": job.phase.value, "attempt": job.attempt, "step": _step(folder, job.step)}
                | {"ranks": job.world, "nodes": list(job.placement), "driver": alive, "why": job.reason}
            )
    if as_json:
        typer.echo(strict_json.dumps(rows))
        return
    table = Table("run", "phase", "attempt", "step", "ranks", "nodes", "driver", "last decision", box=None)
    table.columns[0].overflow = "fold"
    for r in rows:
        cells = [r["run"], r["phase"], r["attempt"], r["step"], r["ranks"], len(r["nodes"])]
        table.add_row(*map(str, cells), "running" if r["driver"] else "none", r["why"])
    Console(highlight=False).print(table)


def _step(run: Path, known: int) -> int:
    """The step that rank 0 is in, if its status can be read here; else the one the journal knows."""
    from megascale.core.status import read_status

    status = read_status(run / "status" / "rank-0.status")
    return max(known, status.step) if status is not None else known


def nodes(run: Path = RUN, as_json: bool = JSON) -> None:
    """Show a job's nodes: state, ranks, last heartbeat, what each rank does, and how slow its slowest rank is.

    own, s: a step's seconds of its slowest rank without waits for others. slower: against ranks with the same work, in
    red where megascale stragglers names it. Both from the run's spans, empty where there are none.

    Asks the driver; without one, shows what the journal remembers. Example: megascale nodes runs/stdlib
    """
    from rich.console import Console
    from rich.table import Table

    found, alive = _nodes(run)
    speeds = {} if run.is_file() else _speeds(run)
    for n in found:
        mine = [speeds[rank] for rank in n["ranks"] if rank in speeds]
        slowest = max(mine, key=lambda one: one["slower"] or 0.0, default={"own": None, "slower": None, "named": False})
        n |= {"own_seconds": slowest["own"], "slower": slowest["slower"], "slow": any(one["named"] for one in mine)}
    if as_json:
        typer.echo(strict_json.dumps(found))
        return
    table = Table("node", "address", "state", "ranks", "heartbeat", "own, s", "slower", "doing", box=None)
    for n in found:
        state = n["state"] + (" (cordoned)" if n["cordoned"] else "")
        seen = "" if n["seen"] is None else f"{n['seen']:.1f} s ago"
        doing = ", ".join(sorted({f"{w['phase'] or w['state']} {w['step']}" for w in n["workers"]}))
        if n["state"] == "up" and not n["ranks"]:
            doing = f"spare, self-checks {n.get('checks', 'not run')}"
        own = "" if n["own_seconds"] is None else f"{n['own_seconds']:.3g}"
        slower = "" if n["slower"] is None else f"{n['slower']:+.1%}"
        slower = f"[red]{slower}[/red]" if n["slow"] else slower
        table.add_row(n["name"], n["address"], state, " ".join(map(str, n["ranks"])), seen, own, slower, doing)
    console = Console(highlight=False)
    console.print(table)
    for n in found:
        if n["state"] != "up":
            console.print(f" {n['name']} {n['state']}: {n['why']}", markup=False)
    if not alive:
        typer.echo("no driver is at work: this is what the journal remembers")


def _nodes(run: Path) -> tuple[list[dict[str, Any]], bool]:
    """(the nodes as the API has them, whether a driver said so)."""
    from megascale.resilience.driver.api.client import list_stored_nodes, send_request
    from megascale.resilience.driver.state.journal_reader import JournalReader

    if run.is_file():
        return send_request(run, "GET", "/v1/nodes"), True
    reader = JournalReader(run)
    stored, alive = list_stored_nodes(reader), reader.driver_alive()
    reader.close()
    if alive:
        return send_request(run, "GET", "/v1/nodes"), True
    return stored, False


def _speeds(run: Path) -> dict[int, dict[str, Any]]:
    """Of each rank seconds of its own work a step, by how much it is slower than comparable ranks (None: it has none),
    and whether it stands out; empty without spans."""
    import math

    from megascale.errors import MegascaleError
    from megascale.observe.analysis.rank_parts import choose_window, rank_parts
    from megascale.observe.analysis.slow_ranks import nan_median
    from megascale.observe.analysis.stragglers import find_stragglers
    from megascale.observe.store.tables import SpanTables

    try:
        with SpanTables(run) as tables:
            found = find_stragglers(rank_parts(tables, *choose_window(tables)))
    except MegascaleError:
        return {}
    named = {one.slow_rank.rank for one in found.persistent}
    rows = zip(
        found.parts.ranks.tolist(),
        nan_median(found.parts.working).tolist(),
        found.judgement.excess.tolist(),
        strict=True,
    )
    return {
        rank: {"own": own, "slower": None if math.isnan(by) else by, "named": rank in named} for rank, own, by in rows
    }


def events(
    run: Path = RUN,
    as_json: bool = JSON,
    follow: bool = typer.Option(False, "--follow", "-f", help="Go on as new events come; Ctrl-C ends."),
    all_events: bool = typer.Option(False, "--all", help="Also the trainers' events (checkpoints, evaluations)."),
) -> None:
    """Print the events of a job with date (UTC) and attempt: what happened, what was decided, and on what evidence.

    Example: megascale events runs/stdlib
    """
    import time

    from rich.console import Console

    from megascale.resilience.driver.state.journal_reader import JournalReader

    console, after = Console(highlight=False, soft_wrap=True), 0
    reader = None if run.is_file() else JournalReader(run)
    if reader is None and all_events:
        raise ConfigError("--all reads the run folder, and an access file leads to its driver only; leave it out")
    trainers = _trainer_events(run) if all_events else []
    first: float | None = None
    while True:
        fresh = reader.events(after) if reader is not None else _told(run, after)
        merged: list[Any] = sorted([*fresh, *trainers], key=lambda e: e["time"] if isinstance(e, dict) else e.time)
        trainers = []
        for entry in merged:
            if as_json:
                typer.echo(strict_json.dumps(entry if isinstance(entry, dict) else vars(entry)))
                continue
            first = first if first is not None else (entry["time"] if isinstance(entry, dict) else entry.time)
            _show(console, entry, first)
        after = fresh[-1].id if fresh else after
        if not follow and (reader is not None or not fresh):
            break
        if follow:
            time.sleep(0.5)
    if reader is not None:
        reader.close()


def _told(run: Path, after: int) -> list[Any]:
    """Events as the driver tells them: some at a time."""
    from types import SimpleNamespace

    from megascale.resilience.driver.api.client import send_request

    return [SimpleNamespace(**record) for record in send_request(run, "GET", f"/v1/events?after={after}")]


def _trainer_events(run: Path) -> list[dict[str, Any]]:
    """Return the events that trainers wrote, those with a time; damaged lines are left out."""
    from megascale.core.bounded_lines import RecordReader
    from megascale.core.events import is_plausible_time

    found = []
    with contextlib.suppress(OSError):
        for record in RecordReader(run / "events.jsonl"):
            time = strict_json.to_float(record.get("time"))
            if record.get("by") != "driver" and is_plausible_time(time):
                found.append(record | {"time": time, "event": str(record.get("event", ""))})
    return found


def _show(console: Any, entry: Any, first: float) -> None:
    from rich.text import Text

    from megascale.core.events import format_time

    if isinstance(entry, dict):
        hidden = ("time", "date", "event", "attempt")
        rest = {k: v for k, v in entry.items() if k not in hidden and not isinstance(v, dict)}
        text = ", ".join(f"{k} {v}" for k, v in rest.items())
        when = f"{format_time(entry['time'])} {str(entry.get('attempt', 0))[:20]:>3} "
        parts = (when, f"{'':10}{entry['event']}  ", text)
        when, event, text = (part.encode(errors="replace").decode() for part in parts)  # half a character
        console.print(Text.assemble((when, "dim"), event, (text, "dim")))
        return
    colour = {"stop": "bold red", "evict": "red", "alert": "yellow", "": "cyan", "none": "cyan"}.get(entry.action)
    about = f" on {', '.join(entry.nodes)}" if entry.nodes else ""
    about += f" (rank {', '.join(map(str, entry.ranks))})" if entry.ranks else ""
    action = f" -> {entry.action}" if entry.action not in ("", "none") else ""
    since = f"{entry.time - first:+8.2f}s "
    when = f"{format_time(entry.time)} {entry.attempt:>3} "
    head = Text.assemble((when, "dim"), (since, "dim"), (entry.kind, colour or "yellow"))
    console.print(head.append(about).append(action, style="bold"))
    for sentence in entry.evidence:
        console.print(Text(f"{'':39}{sentence}", style="dim"))


def evict(run: Path = RUN, node: str = typer.Argument(..., help="Such as n2."), why: str = WHY) -> None:
    """Take a node out of a job; its ranks move to a spare or a new node.

    Example: megascale evict runs/stdlib n2 --why "fan is loud"
    """
    _order(run, f"/v1/nodes/{node}/evict", why)


def cordon(run: Path = RUN, node: str = typer.Argument(..., help="Such as n2."), why: str = WHY) -> None:
    """Give a node nothing new; what it runs goes on.

    Example: megascale cordon runs/stdlib n2
    """
    _order(run, f"/v1/nodes/{node}/cordon", why)


def uncordon(run: Path = RUN, node: str = typer.Argument(..., help="Such as n2."), why: str = WHY) -> None:
    """Allow a node again, an evicted one too.

    Example: megascale uncordon runs/stdlib n2
    """
    _order(run, f"/v1/nodes/{node}/uncordon", why)


def pause(run: Path = RUN, why: str = WHY) -> None:
    """Let a job save and stop; its nodes stay ready.

    Example: megascale pause runs/stdlib
    """
    _order(run, "/v1/job/pause", why)


def resume(run: Path = RUN, why: str = WHY) -> None:
    """Go on with a paused job.

    Example: megascale resume runs/stdlib
    """
    _order(run, "/v1/job/resume", why)


def restart(context: typer.Context, run: Path = RUN, why: str = WHY) -> None:
    """Update a running job: save, import the code anew, start the trainers again, with settings changed if any are
    given as --section.key=value.

    Settings that bring no step are taken back. Layout, model and the driver's own ([resilience]) need a new launch.

    Examples:

      megascale restart runs/stdlib --why "new kernel"

      megascale restart runs/stdlib --lr.peak=1e-4 --train.eval_interval=100
    """
    if context.args:
        _check_settings(run, context.args)
    from megascale.resilience.driver.recovery.hot_update import store_settings

    if context.args:
        store_settings(run, [word.removeprefix("--") for word in context.args])
    _order(run, "/v1/job/restart", why, from_folder=bool(context.args))


def _check_settings(run: Path, words: list[str]) -> None:
    """Raises what a launch with these settings would raise, before anything is stopped for them."""
    from megascale import api
    from megascale.config import load_command_line
    from megascale.core.layout import lay_out
    from megascale.resilience.driver.recovery.hot_update import settings_file
    from megascale.resilience.driver.state.journal_reader import JournalReader

    wrong = [word for word in words if not (word.startswith("--") and "=" in word)]
    if wrong:
        raise ConfigError(f"{wrong[0]} is no setting: give --section.key=value, such as --lr.peak=1e-4")
    reader = JournalReader(run)
    job = reader.job
    reader.close()
    lay_out(api.resolve(load_command_line(settings_file(run), words)), job.world if job is not None else 1)


def _order(run: Path, path: str, why: str, **more: Any) -> None:
    from megascale.resilience.driver.api.client import send_request

    answer = send_request(run, "POST", path, {"why": why} | more)
    typer.echo(f"done; the job is {answer['phase']}")
