"""The program `megascale`: the table of its commands, and the message and exit code of an error."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import typer
from typer.models import CommandInfo, TyperInfo

from megascale.cli import completion
from megascale.cli.help_pages import ReadableGroup, make_readable
from megascale.core import terminal
from megascale.core.python_process import leave_working_directory, sleep_at_barriers
from megascale.core.secrets import hide_secrets
from megascale.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError, MegascaleError, missing_extra

# Module of this package that registers each command, in the order of --help. Each module has `register(app)`, and
# imports heavy packages inside its functions only.
COMMANDS: dict[str, str] = {
    "config": "config",
    "examples": "examples",
    "data": "data",
    "plan": "plan",
    "train": "train",
    "launch": "launch",
    "agent": "launch",
    "jobs": "jobs",
    "nodes": "jobs",
    "events": "jobs",
    "evict": "jobs",
    "cordon": "jobs",
    "uncordon": "jobs",
    "pause": "jobs",
    "resume": "jobs",
    "access": "jobs",
    "logs": "jobs",
    "restart": "jobs",
    "evaluate": "trained_run",
    "generate": "trained_run",
    "plot": "trained_run",
    "convert": "convert",
    "checkpoint": "checkpoint",
    "simulate": "simulate",
    "network": "network",
    "bench": "bench",
    "doctor": "diagnose",
    "hang": "diagnose",
    "diagnose": "diagnose",
    "spans": "spans",
    "whatif": "whatif",
    "timeline": "timeline",
    "dashboard": "dashboard",
    "monitoring": "monitoring",
    "stragglers": "stragglers",
    "decline": "decline",
    "faults": "faults",
}

# Commands of each panel of --help, in the order of --help.
PANELS: dict[str, tuple[str, ...]] = {
    "Train": ("train", "launch", "evaluate", "generate", "config", "examples", "agent"),
    "Watch": ("jobs", "nodes", "events", "logs", "dashboard", "plot", "monitoring"),
    "Act": ("pause", "resume", "restart", "evict", "cordon", "uncordon", "access", "faults"),
    "Explain": ("doctor", "diagnose", "hang", "spans", "timeline", "stragglers", "whatif", "decline"),
    "Plan": ("plan", "simulate", "network"),
    "Data and models": ("data", "convert", "checkpoint"),
    "Measure": ("bench",),
}

# Commands that are run for their effect. They continue when their output is lost, such as when a terminal session ends.
# All other commands are run for their output.
EFFECT_COMMANDS: frozenset[tuple[str, ...]] = frozenset(
    {
        ("train",),
        ("launch",),
        ("agent",),
        ("evict",),
        ("cordon",),
        ("uncordon",),
        ("pause",),
        ("resume",),
        ("restart",),
        ("plot",),
        ("dashboard",),
        ("monitoring",),
        ("examples",),
        ("bench",),
        ("data", "build"),
        ("convert", "import"),
        ("convert", "export"),
        ("checkpoint", "prune"),
        ("checkpoint", "export"),
        ("checkpoint", "import"),
        ("checkpoint", "reshard"),
        ("faults", "inject"),
    }
)


def make_command_line(modules: Iterable[str]) -> typer.Typer:
    """Return an app with the commands of `modules`, which are names of modules in this package."""
    app = typer.Typer(
        name="megascale",
        cls=ReadableGroup,
        help="Train large language models unattended, on one GPU or on many hosts.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_print_version_option)
    for module in modules:
        importlib.import_module(f"megascale.cli.{module}").register(app)
    _sort_into_panels(app)
    make_readable(app)
    return app


def _sort_into_panels(app: typer.Typer) -> None:
    """Sort commands and groups into the panels of --help, in the order of PANELS."""
    panel_by_command = {name: panel for panel, names in PANELS.items() for name in names}
    positions = {name: position for position, name in enumerate(panel_by_command)}
    infos: list[CommandInfo | TyperInfo] = list(app.registered_commands)
    infos.extend(app.registered_groups)
    for info in infos:
        info.rich_help_panel = panel_by_command[_find_name(info)]
    app.registered_commands.sort(key=lambda info: positions[_find_name(info)])
    app.registered_groups.sort(key=lambda info: positions[_find_name(info)])


def _find_name(info: CommandInfo | TyperInfo) -> str:
    """Return the name under which a command or a group is called."""
    if isinstance(info, TyperInfo):
        return str(info.name or info.typer_instance.info.name)  # type: ignore[union-attr]
    if info.name:
        return info.name
    assert info.callback is not None
    return info.callback.__name__.replace("_", "-")


def _print_version_option(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        from megascale import __version__

        typer.echo(f"megascale {__version__}")
        raise typer.Exit


def __getattr__(name: str) -> typer.Typer:
    """Return `app` with all commands, made on first access."""
    if name != "app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    app = make_command_line(dict.fromkeys(COMMANDS.values()))
    globals()[name] = app
    return app


def _make_app() -> typer.Typer:
    """Return an app with the command that this process's arguments name, or with all commands.

    Importing the modules of all commands takes longer than most commands run.
    """
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in COMMANDS:
        return make_command_line([COMMANDS[name]])
    return make_command_line(dict.fromkeys(COMMANDS.values()))


def list_options(arguments: Sequence[str]) -> list[str]:
    """Return the long options of a command, such as --gpus.

    Args:
        arguments: arguments of a command line, which begin with the command or with group and command.
    """
    command = typer.main.get_command(make_command_line([COMMANDS[arguments[0]]]))
    for name in arguments[:2]:
        command = getattr(command, "commands", {}).get(name, command)
    return [option for parameter in command.params for option in parameter.opts if option.startswith("--")]


def is_run_for_effect(arguments: Sequence[str]) -> bool:
    """Return whether the arguments name a command in EFFECT_COMMANDS, without an option that asks for output."""
    if "--dry-run" in arguments or "--json" in arguments:
        return False
    return tuple(arguments[:1]) in EFFECT_COMMANDS or tuple(arguments[:2]) in EFFECT_COMMANDS


def main() -> None:
    """Run the command that this process's arguments name, or answer a completion request of the shell."""
    leave_working_directory()
    sleep_at_barriers()
    terminal.open_streams()
    terminal.ignore_empty_sizes()
    if is_run_for_effect(sys.argv[1:]):
        terminal.ignore_lost_output()
    if completion.COMPLETE_VARIABLE in os.environ:
        matches = completion.complete_request(os.environ, list_options)
        if matches is not None:
            if completion.is_fish_availability_query(os.environ):
                sys.exit(0 if matches else 1)
            print(matches)
            return
    run_app(_make_app)


def _exit_with(error: MegascaleError) -> NoReturn:
    """Print an error and exit with its code; with MEGASCALE_TRACEBACK set, raise the error instead."""
    typer.secho(f"error: {error}", fg="red", err=True)
    if os.environ.get("MEGASCALE_TRACEBACK"):
        raise error
    sys.exit(error.exit_code)


def _is_interruption(error: SystemExit) -> bool:
    """Return whether typer exits because of a KeyboardInterrupt, which it does without a message."""
    context = error.__context__
    return isinstance(context, typer.Exit) and isinstance(context.__cause__, KeyboardInterrupt)


def _is_named_by_user(error: OSError) -> bool:
    """Return whether an argument of the command is the path that cannot be used, or a path within it."""
    if not isinstance(error.filename, str):
        return False
    values = [argument.partition("=")[2] or argument for argument in sys.argv[1:]]
    return any(value == error.filename or value.startswith(f"{error.filename}{os.sep}") for value in values)


def run_app(make_app: Callable[[], typer.Typer]) -> None:
    """Make an app and run it. Errors of the package print a message and exit with their exit code."""
    terminal.ignore_interrupts_at_exit()
    try:
        hide_secrets()
        warnings.filterwarnings("ignore", module=r"megascale\.")  # the log has them, without lines of the source
        with terminal.interrupt_on_termination():
            try:
                make_app()()
            finally:
                sys.stdout.flush()
    except MegascaleError as error:
        _exit_with(error)
    except ModuleNotFoundError as error:
        extra_error = missing_extra(error)
        if extra_error is None:
            raise
        _exit_with(extra_error)
    except SystemExit as error:
        if _is_interruption(error):
            typer.secho("interrupted", fg="yellow", err=True)
        raise
    except KeyboardInterrupt:
        typer.secho("interrupted", fg="yellow", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except OSError as error:
        if not terminal.is_output_error(error):
            if not _is_named_by_user(error):
                raise
            _exit_with(ConfigError(f"{error.filename} cannot be read or written: {error.strerror}; name another path"))
        terminal.ignore_lost_output()  # Python flushes stdout once more at its end
        if error.errno != errno.EPIPE:  # a pipe's reader may close it at any time
            typer.secho(f"error: standard output cannot be written: {error.strerror}", fg="red", err=True)
        sys.exit(EXIT_FAILED)
    finally:
        terminal.report_late_interrupts()


if __name__ == "__main__":
    main()
