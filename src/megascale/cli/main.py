"""`megascale`: the list of commands, and how errors become one paragraph and an exit code."""

from __future__ import annotations

import importlib
import os
import sys

import typer

from megascale.core.secrets import hide_password
from megascale.errors import EXIT_INTERRUPTED, MegascaleError

# Each module has `register(app)`. They import heavy packages only inside their functions, so --help is quick.
COMMANDS: tuple[str, ...] = (
    "config",
    "data",
    "plan",
    "train",
    "launch",
    "agent",
    "jobs",
    "access",
    "evaluate",
    "generate",
    "plot",
    "convert",
    "checkpoint",
    "simulate",
    "network",
    "bench",
    "doctor",
    "hang",
    "spans",
    "whatif",
    "timeline",
    "dashboard",
    "stragglers",
    "decline",
    "faults",
    "diagnose",
)

app = typer.Typer(
    name="megascale",
    help="Train large language models unattended, on one GPU or on many hosts.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

for _command in COMMANDS:
    importlib.import_module(f"megascale.cli.{_command}").register(app)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from megascale import __version__

        typer.echo(f"megascale {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point: run a command; a MegascaleError prints its message and sets the exit code."""
    try:
        hide_password()
        app()
    except MegascaleError as error:
        typer.secho(f"error: {error}", fg="red", err=True)
        if os.environ.get("MEGASCALE_TRACEBACK"):
            raise
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        typer.secho("interrupted", fg="yellow", err=True)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
