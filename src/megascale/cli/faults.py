"""`megascale faults inject|list`: inject faults into a running job, to test that it recovers."""

from __future__ import annotations

from pathlib import Path

import typer

from megascale.cli.common import JSON, make_console, print_json

faults = typer.Typer(
    no_args_is_help=True,
    help="Inject faults into a running job, to test that it recovers. Example: megascale faults list",
)


def register(app: typer.Typer) -> None:
    """Add `faults` to the command line."""
    app.add_typer(faults, name="faults")


@faults.command("list")
def list_faults(as_json: bool = JSON) -> None:
    """List every fault with its effect and the expected recovery.

    Example: megascale faults list
    """
    from rich.table import Table

    from megascale.resilience.faults.inject import FAULTS

    if as_json:
        print_json([vars(fault) for fault in FAULTS.values()], indent=2)
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for header in ("kind", "target"):
        table.add_column(header, no_wrap=True)
    for header in ("effect", "expected recovery"):
        table.add_column(header)
    for fault in FAULTS.values():
        if fault.is_in_trainer:
            kind = f"{fault.kind} *"
        else:
            kind = fault.kind
        table.add_row(kind, fault.target, fault.effect, fault.expected_response)
    console = make_console()
    console.print(table)
    console.print("* injected by the trainer: needs a run started with --resilience.faults=true", markup=False)


@faults.command()
def inject(
    kind: str = typer.Argument(..., help="A kind of `megascale faults list`.", show_default=False),
    run: Path = typer.Option(..., "--run", help="Run folder.", show_default=False),
    rank: int = typer.Option(None, help="Rank to inject into.", show_default=False),
    node: str = typer.Option(None, help="Node to inject into, such as n1.", show_default=False),
    seconds: float = typer.Option(None, help="Duration, or a slow rank's delay per step."),
    step: int = typer.Option(0, help="First step at which a trainer injects the fault; 0: the next step."),
    persistent: bool = typer.Option(
        False, "--persistent", help="Inject it again after every restart (a broken machine or program)."
    ),
    group: str = typer.Option("data_reduce", help="mismatch: world, tensor, data_gather or data_reduce."),
) -> None:
    """Inject one fault into a run.

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
