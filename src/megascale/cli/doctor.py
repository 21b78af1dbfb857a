"""`megascale doctor`: what this machine has, and what will be slow or missing, and why."""

from __future__ import annotations

import typer

from megascale.core import strict_json


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command()
    def doctor(as_json: bool = typer.Option(False, "--json", help="Print JSON.")) -> None:
        """Say what this machine has and what will be slow, and why. Changes nothing.

        Example: megascale doctor
        """

        from rich.console import Console
        from rich.table import Table

        from megascale.observe.machine_report import examine_machine

        findings = examine_machine()
        if as_json:
            typer.echo(strict_json.dumps([finding.__dict__ for finding in findings], indent=2))
            return
        table = Table("", "what", "found", "what follows", box=None, padding=(0, 2))
        marks = {"good": "[green]ok[/green]", "slow": "[yellow]slow[/yellow]", "missing": "[red]no[/red]"}
        for finding in findings:
            table.add_row(marks[finding.verdict], finding.subject, finding.value, finding.advice)
        Console(highlight=False).print(table)
