"""`megascale hang`: who waits for whom in a run that stands still, and which rank began it."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from megascale.core import strict_json

_LOOK = 28.0  # seconds: agents have 15, and what they send must be written


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def hang(
        folder: Path = typer.Argument(
            ...,
            help="Run folder, such as runs/stdlib, or a folder with copies of status files or flight-recorder dumps.",
            show_default=False,
        ),
        ask: bool = typer.Option(True, help="Ask ranks that run on this host for their stacks and flight records."),
        watch: float = typer.Option(2.0, min=0.0, help="Seconds to look for movement; as long as a step may take."),
        as_json: bool = typer.Option(False, "--json", help="Print JSON."),
    ) -> None:
        """Say which rank holds a run up, in which collective, and how that is known.

        Joins what every rank wrote down (the call it is in, its place in the schedule) with the state of its process,
        its stack and torch's flight recorder. Ranks that are gone, stopped or silent are suspects. Harmless to a run
        that is well: it is told to be moving. Exit code 0: nothing hangs; 1: something does.

        Examples:

          megascale hang runs/stdlib-3d

          megascale hang runs/stdlib-3d --json

          megascale hang dumps-from-another-cluster --no-ask
        """

        from megascale.observe.hang import hang_report

        if ask and (folder / "driver").is_dir() and not any((folder / "status").glob("rank-*.calls")):
            _have_agents_look(folder, watch)
        scene, verdict = hang_report.examine_run(folder, ask, watch)
        if as_json:
            typer.echo(strict_json.dumps(hang_report.as_json(scene, verdict), indent=2))
        else:
            _print(scene, verdict)
        if verdict.kind != "none":
            raise typer.Exit(1)


def _have_agents_look(run: Path, watch: float) -> None:
    """Ask the driver of ranks that write elsewhere; without it there is what agents sent last."""
    from megascale.errors import MegascaleError
    from megascale.resilience.driver.api.client import send_request

    try:
        send_request(run, "GET", f"/v1/ranks?watch={min(watch, 10.0)}", seconds=_LOOK)
    except MegascaleError as error:
        typer.echo(f"the ranks are shown as their agents saw them last: {error}", err=True)


def _print(scene, verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    from megascale.observe.hang import hang_report
    from megascale.observe.hang.verdict import describe_position

    console = Console(highlight=False)
    colour = "green" if verdict.kind == "none" else "red"
    console.print(f"[bold {colour}]{hang_report.format_headline(verdict)}[/]")
    if scene.sent:
        console.print(
            f"as their agents saw the ranks at {time.strftime('%H:%M:%S', time.localtime(scene.now_ns / 1e9))}"
        )
    for line in verdict.evidence:
        console.print(f"  - {line}", markup=False)
    table = Table("rank", "process", "stands at", "waits in", "for", "s", box=None, padding=(0, 2))
    waits = {w.rank: w for w in verdict.waits}
    for rank in sorted(scene.ranks)[:64]:
        what, wait = scene.ranks[rank], waits.get(rank)
        row = [f"[red]{rank}[/]" if rank in verdict.ranks else str(rank), what.process, describe_position(what)]
        if wait is not None:
            on = "all came" if wait.all_came else ", ".join(map(str, wait.on[:8]))
            row += [f"{wait.group} call {wait.sequence} {wait.op}", on, f"{wait.seconds:.1f}"]
        table.add_row(*row)
    console.print(table)
    if len(scene.ranks) > 64:
        console.print(f"and {len(scene.ranks) - 64} more ranks (--json has all)")
