"""`megascale bench NAME`: measurements, each a module of `megascale.bench` that prints a table and writes JSON."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Iterable
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from megascale.core.python_command import protect_children

# Name of a bench -> its module of megascale.bench, which has `register(app)` and imports heavy packages only inside its
# functions.
BENCHES: dict[str, str] = {
    "ablation": "training.ablation",
    "alternate": "training.alternate",
    "convergence": "training.convergence",
    "exposed": "training.exposed",
    "gradients": "training.gradient_error",
    "init": "rendezvous.init",
    "kernels": "kernels.kernel_bench",
    "layouts": "training.layouts",
    "observe": "observe.observe_bench",
    "dashboard": "observe.dashboard_bench",
    "loader": "data.loader_bench",
    "overlap": "training.overlap",
    "peers": "training.peer_comparison",
    "restarts": "training.restarts",
    "schedules": "training.schedules",
    "soak": "harness.soak",
    "targets": "targets.targets",
    "tokenize": "data.tokenize",
    "train": "training.train_bench",
    "checkpoint": "checkpoint.checkpoint_bench",
    "hang": "resilience.hang_bench",
    "driver": "resilience.driver_bench",
    "fuzz": "resilience.fuzz",
    "hostile": "resilience.hostile",
    "kubernetes": "resilience.kubernetes_scale",
    "machines": "resilience.machines_bench",
    "many-nodes": "resilience.many_nodes",
    "resilience": "resilience.recovery_bench",
    "slurm": "resilience.slurm_bench",
    "kubernetes-faults": "resilience.kubernetes_bench",
}


class _Benches(TyperGroup):
    """Its commands are read when one of them, or their list, is asked for: no other command waits for them."""

    def _read(self, names: Iterable[str]) -> None:
        if wanted := [name for name in names if name not in self.commands]:
            app = typer.Typer(rich_markup_mode="rich")
            for name in wanted:
                importlib.import_module(f"megascale.bench.{BENCHES[name]}").register(app)
            self.commands.update(get_group(app).commands)

    def list_commands(self, ctx: Any) -> list[str]:
        self._read(BENCHES)
        return list(BENCHES)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        self._read([cmd_name] if cmd_name in BENCHES else BENCHES)  # all, to say which was meant
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
        protect_children()
        signal.signal(signal.SIGTERM, _interrupt)  # so that a bench ends the processes that it has started

    app.add_typer(bench, name="bench")


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
