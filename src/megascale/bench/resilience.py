"""What recovery costs: for each kind of fault, seconds to detect it and to the next new step, and the same weights."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer

# Of the injector's kinds, those that a job recovers from by itself with the layout kept.
KINDS = ("kill-rank", "segfault", "exception", "stop-rank", "kill-agent", "kill-node", "kill-driver")
_WAIT = 180.0

_SETTINGS = """
[model]
layers = 2
hidden = 32
heads = 4
sequence_length = 16
vocab_size = 64
vocab_multiple = 8
[data]
train = ["{folder}/train"]
[lr]
peak = 1e-2
[train]
runs = "{folder}/runs"
steps = {steps}
micro_batch = 2
global_batch = 4
device = "cpu"
threads = 1
[parallel]
data = 2
[checkpoint]
interval = 50
[resilience]
nodes = 2
spares = 1
faults = true
[observe]
tensorboard = false
progress = false
"""


def register(app: typer.Typer) -> None:
    """Add `bench resilience`."""
    app.command("resilience")(resilience)


def resilience(
    kinds: list[str] = typer.Option(list(KINDS), "--kind", help="Kinds of fault (`megascale faults list`)."),
    runs: int = typer.Option(5, min=1, help="Runs of each kind."),
    steps: int = typer.Option(1500, min=200, help="Steps of each run."),
    out: Path = typer.Option(Path("bench-resilience.json"), help="JSON file for the figures."),
) -> None:
    """Break launched jobs of a tiny model, one fault a run, and time what follows. CPU, two ranks, one spare.

    Detection: from the fault to the driver's verdict. Recovery: to the first new step. Weights: whether they equal
    those of an undisturbed run bit for bit. Example: megascale bench resilience --kind kill-rank --runs 3
    """
    from rich.console import Console
    from rich.table import Table

    from megascale.errors import ConfigError
    from megascale.resilience.faults import FAULTS

    for kind in kinds:
        if kind not in KINDS:
            raise ConfigError(
                f"--kind={kind}: this bench times {', '.join(KINDS)} (of the {len(FAULTS)} faults there are)"
            )
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="megascale-bench-") as name:
        folder = Path(name)
        file = _make(folder, steps)
        calm = _Job(file, "calm")
        code = calm.end()
        if code:
            raise ConfigError(f"the undisturbed run ended with {code}: {calm.output.read_text()[-2000:]}")
        expected = _weights(calm.run)
        for kind in kinds:
            for i in range(runs):
                rows.append(_once(file, kind, i, expected))
                typer.echo(json.dumps(rows[-1]))
    table = Table(
        "fault", "runs", "recovered", "same weights", "detected s (worst)", "first new step s (worst)", "rung"
    )
    for kind in kinds:
        mine = [r for r in rows if r["kind"] == kind]
        table.add_row(
            kind,
            str(len(mine)),
            str(sum(r["recovered"] for r in mine)),
            str(sum(r["same_weights"] for r in mine)),
            _worst(mine, "detected"),
            _worst(mine, "recovery"),
            ", ".join(sorted({r["rung"] for r in mine})),
        )
    Console().print(table)
    about = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "cores": os.cpu_count()}
    about |= {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
    out.write_text(json.dumps(about | {"rows": rows}, indent=1))
    typer.echo(f"figures: {out}")


def _worst(rows: list[dict[str, Any]], name: str) -> str:
    values = sorted(r[name] for r in rows if r[name] is not None)
    return f"{values[len(values) // 2]:.2f} ({values[-1]:.2f})" if values else "-"


def _make(folder: Path, steps: int) -> Path:
    import numpy as np

    from megascale.data.indexed import IndexedWriter

    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "train", np.uint16) as writer:
        for _ in range(400):
            writer.add_document([np.cumsum(rng.choice([1, 2, 5], p=[0.8, 0.1, 0.1], size=101)) % 64])
    file = folder / "job.toml"
    file.write_text(_SETTINGS.format(folder=folder, steps=steps))
    return file


def _weights(run: Path) -> dict[str, Any]:
    from megascale.train.restore import restore

    engine, _ = restore(run, device="cpu")
    return {name: tensor.clone() for name, _, _, tensor in engine.optimizer.logical() if name.startswith("model.")}


class _Job:
    """A launched job."""

    def __init__(self, file: Path, name: str) -> None:
        self.run, self.output = file.parent / "runs" / name, file.parent / f"{name}.out"
        self.command = [sys.executable, "-m", "megascale.cli.main", "launch", str(file), f"--train.name={name}"]
        self.process = self.start()

    def start(self) -> subprocess.Popen[bytes]:
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                self.command, stdout=out, stderr=out, env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True
            )
        return self.process

    def end(self) -> int:
        """Exit code; a job that does not end is interrupted."""
        try:
            return self.process.wait(_WAIT)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGINT)
            self.process.wait(_WAIT)
            return -1

    def events(self) -> list[Any]:
        from megascale.errors import DataError
        from megascale.resilience.journal import Reader

        try:
            reader = Reader(self.run)
        except DataError:
            return []
        try:
            return reader.events()
        finally:
            reader.close()

    def first(self, wanted: Callable[[Any], bool]) -> Any:
        """The first event that is wanted, once it is there; None if the job ends before."""
        deadline = time.monotonic() + _WAIT
        while time.monotonic() < deadline:
            over = self.process.poll() is not None
            if found := next((e for e in self.events() if wanted(e)), None):
                return found
            if over:
                return None
            time.sleep(0.02)
        return None


def _once(file: Path, kind: str, number: int, expected: dict[str, Any]) -> dict[str, Any]:
    import torch

    from megascale.resilience.faults import FAULTS, Options, inject

    job = _Job(file, f"{kind}-{number}")
    job.first(lambda e: e.kind == "first_step")
    time.sleep(1.0 + 0.3 * number)  # the fault falls on another step each time
    node = "n1" if FAULTS[kind].target == "node" else None
    struck = time.time()
    inject(job.run, kind, Options(rank=1 if FAULTS[kind].target == "rank" else None, node=node))
    if kind == "kill-driver":
        job.process.wait()
        job.start()
        verdict = again = job.first(lambda e: e.kind == "node_joined" and e.time > struck)
    else:
        verdict = job.first(lambda e: e.time > struck and e.action in ("respawn", "evict", "diagnose", "stop"))
        again = job.first(lambda e: e.kind == "first_step" and e.time > struck)
    code = job.end()
    events = job.events()
    rung = [e.action for e in events if e.kind == "ladder" and e.time > struck]
    same = False
    if code == 0:
        found = _weights(job.run)
        same = all(torch.equal(found[name], value) for name, value in expected.items())
    return {
        "kind": kind,
        "recovered": code == 0,
        "same_weights": same,
        "detected": verdict.time - struck if verdict else None,
        "recovery": again.time - struck if again else None,
        "rung": rung[-1] if rung else "none needed",
        "verdict": verdict.kind if verdict else "",
        "evidence": list(verdict.evidence)[:2] if verdict else [],
    }
