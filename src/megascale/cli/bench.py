"""`megascale bench NAME`: measure this machine. Other benchmarks and the chaos campaigns run from a clone."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import typer

from megascale.cli.lazy_group import lazy_group
from megascale.core.python_command import protect_children
from megascale.core.terminal import termination_signals
from megascale.errors import ConfigError

BENCHES: dict[str, str] = {
    "train": "megascale.bench.train",
    "kernels": "megascale.bench.kernels.command",
}
# Commands that the package had until 0.1 -> the command that replaces each, in a clone of the repository.
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
        for name in (
            "restarts", "soak", "hang", "driver", "fuzz", "hostile", "many-nodes",
        )
    },
    "resilience": "python -m tests.chaos faults",
    "machines": "python -m tests.chaos faults --site machines",
    "slurm": "python -m tests.chaos faults --site slurm",
    "kubernetes": "python -m tests.chaos kubernetes-scale",
    "kubernetes-faults": "python -m tests.chaos faults --site kubernetes",
}  # fmt: skip


class _Benches(lazy_group(BENCHES)):  # type: ignore[misc]
    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in MOVED:
            raise ConfigError(f"megascale bench {cmd_name} is run from a clone of the repository: {MOVED[cmd_name]}")
        return super().get_command(ctx, cmd_name)


def register(app: typer.Typer) -> None:
    """Add `bench` with one sub-command per module."""
    bench = typer.Typer(
        cls=_Benches,
        no_args_is_help=True,
        rich_markup_mode="rich",
        help="Measure this machine: each prints a table and writes JSON.",
    )

    @bench.callback()
    def _several() -> None:
        """Measure this machine: each prints a table and writes JSON. Example: megascale bench kernels --out k.json"""
        prepare_children()

    app.add_typer(bench, name="bench")


def prepare_children() -> None:
    """Protect the processes that a measurement starts, and end them with it.

    The signals that end a command become KeyboardInterrupt, so that it ends the processes that it started.
    """
    protect_children()
    for number in termination_signals():
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
