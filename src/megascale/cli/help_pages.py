"""Commands whose help reads like that of torchrun and kubectl: arguments in capitals, and flags without a type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import CommandInfo, TyperInfo

_MAX_NAMED_COMMANDS = 20  # of a group


class ReadableHelp:
    """Mixin for commands and groups of typer. Names of arguments apply to error messages too."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, with the words that help pages show for them."""
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for parameter in params:
            if parameter.metavar is not None:
                continue
            if parameter.param_type_name == "argument":
                parameter.metavar = parameter.name.upper()
            elif getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        return params

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the parts of the usage line. Required arguments have no braces, which a shell would expand."""
        pieces: list[str] = super().collect_usage_pieces(ctx)  # type: ignore[misc]
        return [re.sub(r"^\{(.*)\}(\.\.\.)?$", r"\1\2", piece) for piece in pieces]


class ReadableCommand(ReadableHelp, TyperCommand):
    """A command with a readable help page, which refuses empty paths."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments into `ctx.params`.

        Raises BadParameter for an empty path, such as an unset variable of the shell. It would be read as the working
        directory.
        """
        arguments = list(args)  # the parser empties `args`
        remaining: list[str] = super().parse_args(ctx, args)
        if not any(not argument or re.fullmatch(r"-[^=]*=", argument) for argument in arguments):
            return remaining
        # An empty path and "." are the same Path, so the number of dots distinguishes them.
        dot_count = sum(argument.rpartition("=")[2].rstrip("/") == "." for argument in arguments)
        parameters: list[Any] = self.get_params(ctx)
        blank_parameters = []
        for parameter in parameters:
            value = ctx.params.get(parameter.name)
            values = value if isinstance(value, list | tuple) else [value]
            if value != parameter.default:
                blank_parameters += [parameter] * values.count(Path())
        if len(blank_parameters) > dot_count:
            message = "the path is empty; name a file or a folder, or . for the working directory"
            raise typer.BadParameter(message, ctx=ctx, param=blank_parameters[0] if not dot_count else None)
        return remaining


class ReadableGroup(ReadableHelp, TyperGroup):
    """A group with a readable help page, whose error for an unknown command names the commands."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name, the command and its arguments. A large group only refers to its help page."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            names = [command for command in self.list_commands(ctx) if not self.commands[command].hidden]
            if len(names) <= _MAX_NAMED_COMMANDS:
                ctx.fail(f"No such command {name!r}. Commands: {', '.join(names)}.")
        return super().resolve_command(ctx, args)


def make_readable(app: typer.Typer) -> None:
    """Give all commands and groups of `app` that have no class of their own a readable help page."""
    for info in app.registered_commands:
        _replace_class(info, TyperCommand, ReadableCommand)
    for group in app.registered_groups:
        assert group.typer_instance is not None
        _replace_class(group.typer_instance.info, TyperGroup, ReadableGroup)
        make_readable(group.typer_instance)


def _replace_class(info: CommandInfo | TyperInfo, default: type, readable: type) -> None:
    """Replace the class of a command or a group if it is typer's default, which may stand in a placeholder."""
    chosen = getattr(info.cls, "value", info.cls)
    if chosen is None or chosen is default:
        info.cls = readable
