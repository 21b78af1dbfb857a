"""`megascale bench NAME`: measure this machine. Other benchmarks are run from a clone of the repository."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from megascale.cli.help_pages import ReadableGroup, make_readable
from megascale.core.python_process import protect_children
from megascale.errors import ConfigError

# Module of each bench.
BENCHES: dict[str, str] = {
    "train": "megascale.bench.train",
    "kernels": "megascale.bench.kernels",
}
# Commands in a clone of the repository that replace the benches of version 0.1, by the name of the bench.
MOVED: dict[str, str] = {
    **{
        name: f"python -m benchmarks {name}"
        for name in (
            "ablation", "alternate", "convergence", "exposed", "gradients", "init", "layouts", "observe", "dashboard",
            "loader", "overlap", "peers", "schedules", "targets", "tokenize", "checkpoint",
        )
    },
    **{
        name: f"python -m tests.chaos {name}"
        for name in ("restarts", "soak", "hang", "driver", "fuzz", "hostile", "many-nodes")
    },
    "resilience": "python -m tests.chaos faults",
    "machines": "python -m tests.chaos faults --site machines",
    "slurm": "python -m tests.chaos faults --site slurm",
    "kubernetes": "python -m tests.chaos kubernetes-scale",
    "kubernetes-faults": "python -m tests.chaos faults --site kubernetes",
}  # fmt: skip

_HELP = "Measure this machine. Each bench prints a table and writes JSON."


def make_lazy_group(modules: Mapping[str, str]) -> type[TyperGroup]:
    """Return a class of command groups that imports a command's module when the command or the help is needed.

    Args:
        modules: dotted module of each command. A module has `register(app)`, which adds its command, and imports heavy
            packages inside its functions only.
    """

    class LazyGroup(ReadableGroup):
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
            make_readable(app)
            self.commands.update(get_group(app).commands)

    return LazyGroup


class _Benches(make_lazy_group(BENCHES)):  # type: ignore[misc]
    """The group of `bench`. A former bench is an error that names the command which replaces it."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in MOVED:
            raise ConfigError(f"megascale bench {cmd_name} is run from a clone of the repository: {MOVED[cmd_name]}")
        return super().get_command(ctx, cmd_name)


def register(app: typer.Typer) -> None:
    """Add `bench` with one command per module."""
    group = typer.Typer(cls=_Benches, no_args_is_help=True, rich_markup_mode="rich", help=_HELP)
    group.callback(help=f"{_HELP} Example: megascale bench kernels --out k.json")(prepare_children)
    app.add_typer(group, name="bench")


def prepare_children() -> None:
    """End the processes that a measurement has started when the measurement ends."""
    protect_children()
