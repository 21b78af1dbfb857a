"""A command group that imports the modules of its commands on first use."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group


def lazy_group(modules: Mapping[str, str]) -> type[TyperGroup]:
    """Return a group class that imports a command's module when the command, or the list of commands, is needed.

    Args:
        modules: command name -> dotted module. Each module has `register(app)`, which adds its command, and imports
            heavy packages inside its functions only.
    """

    class LazyGroup(TyperGroup):
        def list_commands(self, ctx: Any) -> list[str]:
            self._load(modules)
            return list(modules)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            # An unknown name needs all commands, so that the error can suggest the nearest one.
            self._load([cmd_name] if cmd_name in modules else modules)
            return super().get_command(ctx, cmd_name)

        def _load(self, names: Iterable[str]) -> None:
            missing = [name for name in names if name not in self.commands]
            if not missing:
                return
            app = typer.Typer(rich_markup_mode="rich")
            for name in missing:
                importlib.import_module(modules[name]).register(app)
            self.commands.update(get_group(app).commands)

    return LazyGroup
