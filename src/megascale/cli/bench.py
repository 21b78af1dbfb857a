"""`megascale bench NAME`: measurements, each a module of `megascale.bench` that prints a table and writes JSON."""

from __future__ import annotations

import importlib
import signal
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

# Each module of megascale.bench has `register(app)` and imports heavy packages only inside its functions.
BENCHES: tuple[str, ...] = (
    "training.ablation",
    "training.alternate",
    "training.convergence",
    "training.exposed",
    "training.gradient_error",
    "rendezvous.init",
    "kernels.kernel_bench",
    "training.layouts",
    "observe.observe_bench",
    "observe.dashboard_bench",
    "data.loader_bench",
    "training.overlap",
    "training.peer_comparison",
    "training.restarts",
    "training.schedules",
    "harness.soak",
    "targets.targets",
    "data.tokenize",
    "training.train_bench",
    "checkpoint.checkpoint_bench",
    "resilience.hang_bench",
    "resilience.driver_bench",
    "resilience.fuzz",
    "resilience.hostile",
    "resilience.kubernetes_scale",
    "resilience.machines_bench",
    "resilience.many_nodes",
    "resilience.recovery_bench",
    "resilience.slurm_bench",
    "resilience.kubernetes_bench",
)


class _Benches(TyperGroup):
    """Its commands are read when one of them, or their list, is asked for: no other command waits for them."""

    def _read(self) -> None:
        if not self.commands:
            app = typer.Typer(rich_markup_mode="rich")
            for name in BENCHES:
                importlib.import_module(f"megascale.bench.{name}").register(app)
            self.commands.update(get_group(app).commands)

    def list_commands(self, ctx: Any) -> list[str]:
        self._read()
        return super().list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._read()
        return super().get_command(ctx, cmd_name)


def register(app: typer.Typer) -> None:
    """Add `bench` with one sub-command a module."""
    bench = typer.Typer(
        cls=_Benches,
        no_args_is_help=True,
        rich_markup_mode="rich",
        help="Measure: each prints a table and writes JSON.",
    )

    @bench.callback()
    def _several() -> None:
        """Measure: each bench prints a table and writes JSON. Example: megascale bench kernels --out kernels.json"""
        signal.signal(signal.SIGTERM, _interrupt)  # so that a bench ends the processes that it has started

    app.add_typer(bench, name="bench")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
