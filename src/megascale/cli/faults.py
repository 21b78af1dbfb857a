"""`megascale faults`: break a running job on purpose, to see that it recovers."""

from __future__ import annotations

from pathlib import Path

import typer


def register(app: typer.Typer) -> None:
    """Add `faults inject` and `faults list`."""
    faults = typer.Typer(no_args_is_help=True, help="Break a running job on purpose.")

    @faults.callback()
    def _several() -> None:
        """Break a running job on purpose, to see that it recovers. Example: megascale faults list"""

    @faults.command("list")
    def list_faults(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
        """Name every fault, what it does and what should follow.

        Example: megascale faults list
        """
        import json

        from rich.console import Console
        from rich.table import Table

        from megascale.resilience.faults.inject import FAULTS

        if as_json:
            typer.echo(json.dumps([vars(fault) for fault in FAULTS.values()], indent=2))
            return
        table = Table(box=None, padding=(0, 2, 0, 0))
        for name in ("kind", "target"):
            table.add_column(name, no_wrap=True)
        for name in ("what happens", "what should follow"):
            table.add_column(name)
        for fault in FAULTS.values():
            table.add_row(
                fault.kind + (" *" if fault.is_in_trainer else ""), fault.target, fault.effect, fault.expected_response
            )
        console = Console(highlight=False)
        console.print(table)
        console.print("* done by the trainer: needs a run started with --resilience.faults=true", markup=False)

    @faults.command()
    def inject(
        kind: str = typer.Argument(..., help="One of `megascale faults list`.", show_default=False),
        run: Path = typer.Option(..., "--run", help="Run folder.", show_default=False),
        rank: int = typer.Option(None, help="Which rank.", show_default=False),
        node: str = typer.Option(None, help="Which node, such as n1.", show_default=False),
        seconds: float = typer.Option(None, help="How long it lasts, or a slow rank's delay a step."),
        step: int = typer.Option(0, help="First step at which a trainer injects it into itself; 0: the next."),
        persistent: bool = typer.Option(
            False, "--persistent", help="Inject it again after every restart (a broken machine or program)."
        ),
        group: str = typer.Option("data_reduce", help="mismatch: world, tensor, data_gather or data_reduce."),
    ) -> None:
        """Break one thing in a run.

        Examples:

          megascale faults inject kill-rank --run runs/stdlib --rank 1

          megascale faults inject kill-node --run runs/stdlib --node n2

          megascale faults inject slow-rank --run runs/stdlib --node n1 --seconds 0.3 --persistent
        """
        from megascale.resilience.faults.inject import Options
        from megascale.resilience.faults.inject import inject as inject_fault

        options = Options(rank, node, seconds, step, persistent, group)
        for line in inject_fault(run, kind, options):
            typer.echo(line)

    app.add_typer(faults, name="faults")
