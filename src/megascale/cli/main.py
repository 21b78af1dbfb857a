"""`megascale`: the list of commands, and how errors become one paragraph and an exit code."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import typer

from megascale.core import terminal
from megascale.core.python_process import leave_working_directory, sleep_at_barriers
from megascale.core.secrets import hide_secrets
from megascale.errors import EXIT_FAILED, EXIT_INTERRUPTED, MegascaleError, missing_extra

# Command -> the module that registers it, in the order of --help. Each has `register(app)` and imports heavy packages
# only inside its functions. Other commands of a module than its first stand beside it.
COMMANDS: dict[str, str] = {
    "config": "config",
    "data": "data",
    "plan": "plan",
    "train": "train",
    "launch": "launch",
    "agent": "agent",
    **dict.fromkeys(("jobs", "nodes", "events", "evict", "cordon", "uncordon", "pause", "resume", "restart"), "jobs"),
    **dict.fromkeys(("access", "logs"), "access"),
    "evaluate": "evaluate",
    "generate": "generate",
    "plot": "plot",
    "convert": "convert",
    "checkpoint": "checkpoint",
    "simulate": "simulate",
    "network": "network",
    "bench": "bench",
    "doctor": "doctor",
    "hang": "hang",
    "spans": "spans",
    "whatif": "whatif",
    "timeline": "timeline",
    "dashboard": "dashboard",
    "stragglers": "stragglers",
    "decline": "decline",
    "faults": "faults",
    "diagnose": "diagnose",
}

# Commands that people run for what they do: lost output does not end them. The others are run for what they print.
WORK: frozenset[tuple[str, ...]] = frozenset(
    {
        ("train",),
        ("launch",),
        ("agent",),
        *((action,) for action in ("evict", "cordon", "uncordon", "pause", "resume", "restart")),
        ("plot",),
        ("dashboard",),
        ("bench",),
        ("data", "build"),
        ("convert", "import"),
        ("convert", "export"),
        *(("checkpoint", action) for action in ("prune", "export", "import", "reshard")),
        ("faults", "inject"),
    }
)


def command_line(modules: Iterable[str]) -> typer.Typer:
    """The commands of these modules of cli/."""
    app = typer.Typer(
        name="megascale",
        help="Train large language models unattended, on one GPU or on many hosts.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for module in modules:
        importlib.import_module(f"megascale.cli.{module}").register(app)
    return app


def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from megascale import __version__

        typer.echo(f"megascale {__version__}")
        raise typer.Exit


def __getattr__(name: str) -> typer.Typer:
    """`app`: all commands, made when it is first asked for."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = app = command_line(dict.fromkeys(COMMANDS.values()))
    return app


def _named() -> typer.Typer:
    """What runs the words of this process. To make all commands takes longer than most need to run: where the first
    word is a command, its module's are made and no others."""
    module = COMMANDS.get(sys.argv[1]) if len(sys.argv) > 1 else None
    return command_line([module] if module else dict.fromkeys(COMMANDS.values()))


def is_work(words: Sequence[str]) -> bool:
    """Return whether a command line is run for what it does, so that it goes on when its output is lost."""
    if "--dry-run" in words or "--json" in words:
        return False
    return tuple(words[:1]) in WORK or tuple(words[:2]) in WORK


def main() -> None:
    """Run the command that the command line names."""
    leave_working_directory()
    sleep_at_barriers()
    terminal.open_streams()
    if is_work(sys.argv[1:]):
        terminal.ignore_lost_output()
    run_app(_named)


def _exit_with(error: MegascaleError) -> NoReturn:
    typer.secho(f"error: {error}", fg="red", err=True)
    if os.environ.get("MEGASCALE_TRACEBACK"):
        raise error
    sys.exit(error.exit_code)


def run_app(make_app: Callable[[], typer.Typer]) -> None:
    """Make a command line and run it. A MegascaleError prints its message and sets the exit code."""
    try:
        hide_secrets()
        try:
            make_app()()
        finally:
            sys.stdout.flush()
    except MegascaleError as error:
        _exit_with(error)
    except ModuleNotFoundError as error:
        known = missing_extra(error)
        if known is None:
            raise
        _exit_with(known)
    except KeyboardInterrupt:
        typer.secho("interrupted", fg="yellow", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if not terminal.is_output_error(error):
            raise
        terminal.ignore_lost_output()  # Python flushes stdout once more at its end
        if error.errno != errno.EPIPE:  # who reads a pipe may close it
            typer.secho(f"error: standard output cannot be written: {error.strerror}", fg="red", err=True)
        sys.exit(EXIT_FAILED)


if __name__ == "__main__":
    main()
