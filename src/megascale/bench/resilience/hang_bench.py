"""`megascale bench hang`: real hangs among real processes, and whether rank and collective are named right.

Four ranks of a tiny model on gloo train until a random rank is stopped, makes a collective too many, leaves out a send
or loses its reader, at a random step. Nothing tells the verdict which case it is.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from megascale.bench.harness.temporary import temporary_folder
from megascale.core import strict_json

CASES = ("stopped rank", "mismatched collective", "missing send", "dead reader")
# (tensor, pipeline, data): four ranks each, two stages so that there is something to send.
LAYOUTS = ((1, 2, 2), (2, 2, 1))
_KINDS = {
    "stopped rank": "stopped",
    "mismatched collective": "mismatched collective",
    "missing send": "missing send",
    "dead reader": "reader",
}
_START = 90.0  # seconds that a start and the first steps may take
_STILL = 1.0  # seconds without movement after which it is a hang

CONFIG = """
[model]
layers = 2
hidden = 32
heads = 4
sequence_length = 16
vocab_size = 64
vocab_multiple = 8
tied_embeddings = false
[data]
train = ["{data}"]
[parallel]
tensor = {tensor}
pipeline = {pipeline}
data = {copies}
[train]
runs = "{folder}"
name = "run"
steps = 1000000
micro_batch = 2
global_batch = 8
log_interval = 1000
device = "cpu"
threads = 1
[checkpoint]
interval = 0
at_end = false
[observe]
tensorboard = false
progress = false
[resilience]
faults = true
"""


@dataclass(frozen=True)
class HangOutcome:
    """One hang. right: whether kind, rank and collective were named. seconds: that the verdict took."""

    case: str
    layout: str
    rank: int
    step: int
    right: bool
    found: str
    seconds: float
    first: str


def make_tokens(folder: Path) -> Path:
    """A small file of random tokens."""
    import numpy as np

    from megascale.data.dataset.indexed import IndexedWriter

    rng = np.random.default_rng(0)
    with IndexedWriter(folder / "tokens", np.uint16) as writer:
        for _ in range(40):
            writer.add_document([rng.integers(0, 64, 101)])
    return folder / "tokens"


def run_case(
    case: str, folder: Path, rng: random.Random, layout: tuple[int, int, int] = LAYOUTS[0], graphs: bool = False
) -> HangOutcome:
    """Train in `folder`, hang by `case`, judge. graphs: micro-batches are replayed by the step of the fault.

    Raises RuntimeError where the training or the fault did not come.
    """
    from megascale.observe.hang import hang_report
    from megascale.parallel.chunk_graphs import EAGER_STEPS

    tensor, pipeline, copies = layout
    world = tensor * pipeline * copies
    rank, step = rng.randrange(world), rng.randrange(2, 9) + graphs * EAGER_STEPS
    run = folder / "run"
    (run / "faults").mkdir(parents=True)
    config = folder / "hang.toml"
    words = {"data": make_tokens(folder), "folder": folder, "copies": copies}
    config.write_text(CONFIG.format(tensor=tensor, pipeline=pipeline, **words))
    _place_fault(run, case, rank, step, rng, copies)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    more = ["--kernels.graphs=on"] if graphs else []
    command = [sys.executable, "-m", "megascale.cli.main", "train", str(config), *more]
    with open(folder / "out", "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        _until(lambda: _reached(run, world, step) or process.poll() is not None, "training did not start", folder)
        if case == "stopped rank":
            time.sleep(rng.uniform(0, 0.3))
            os.kill(_pid(run, rank), signal.SIGSTOP)
        else:
            injected = lambda: any((run / "faults").glob("*.injected"))
            _until(lambda: injected() or process.poll() is not None, "the fault was not injected", folder)
        if process.poll() is not None:
            raise RuntimeError(f"training ended: {(folder / 'out').read_text()[-500:]}")
        _until(lambda: _stands(run, world), "the run did not come to a stop", folder)
        started = time.perf_counter()
        scene, hang = hang_report.examine(run)
        seconds = time.perf_counter() - started
        record = scene.ranks[rank].record
        named = hang.group in (record.groups if record else ()) and bool(hang.op)
        right = hang.kind == _KINDS[case] and hang.ranks == (rank,) and named
        name = f"tp{tensor} pp{pipeline} dp{copies}" + ", replayed" * graphs
        first = hang.evidence[0] if hang.evidence else ""
        return HangOutcome(case, name, rank, step, right, hang_report.headline(hang), seconds, first)
    finally:
        _end(run, process)


def _place_fault(run: Path, case: str, rank: int, step: int, rng: random.Random, copies: int) -> None:
    group = rng.choice(["data_reduce", "data_gather"]) if copies > 1 else "tensor"
    kind = {"mismatched collective": "mismatch", "missing send": "missing-send", "dead reader": "dead-reader"}.get(case)
    if kind is not None:
        fault = {"kind": kind, "rank": rank, "step": step, "group": group, "number": rng.randrange(2)}
        (run / "faults" / "a.json").write_text(strict_json.dumps(fault | {"kill": rng.random() < 0.5}))


def _records(run: Path, world: int):
    from megascale.core.calls import read_calls

    return [read_calls(run / "status" / f"rank-{r}.calls", history=False) for r in range(world)]


def _pid(run: Path, rank: int) -> int:
    return _records(run, rank + 1)[rank].pid


def _reached(run: Path, world: int, step: int) -> bool:
    return all(record is not None and record.step >= step for record in _records(run, world))


def _stands(run: Path, world: int) -> bool:
    before = [record.events for record in _records(run, world)]
    time.sleep(_STILL)
    return before == [record.events for record in _records(run, world)]


def _until(ready, what: str, folder: Path) -> None:
    deadline = time.monotonic() + _START
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what}: {(folder / 'out').read_text()[-500:]}")
        time.sleep(0.02)


def _end(run: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Kill what started the ranks; all of them die with it, stopped or not, and RuntimeError where one does not."""
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 5
    while left := _trainers(run.parent):
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise RuntimeError(f"processes {left} outlived the launcher of {run}")
        time.sleep(0.02)


def _trainers(folder: Path) -> list[int]:
    """Processes that have not ended and whose command names a file of `folder`: the ranks and their children."""
    from megascale.observe.hang.evidence import process_state

    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(folder / "hang.toml") in command and process_state(int(entry.name)) != "gone":
                found.append(int(entry.name))
    return found


def register(app: typer.Typer) -> None:
    """Add the bench."""

    @app.command()
    def hang(
        runs: int = typer.Option(5, help="Hangs of each of the four cases."),
        seed: int = typer.Option(0, help="Chooses ranks and steps."),
        graphs: bool = typer.Option(False, "--graphs", help="With micro-batches replayed (kernels.graphs=on)."),
        out: Path = typer.Option(None, help="Write JSON here."),
    ) -> None:
        """Hang real trainings in four ways and count how often rank and collective are named right.

        Example: megascale bench hang --runs 5 --out hang.json
        """
        import platform

        from rich.console import Console
        from rich.table import Table

        rng = random.Random(seed)
        outcomes = []
        console = Console(highlight=False)
        for case in CASES:
            for number in range(runs):
                with temporary_folder() as folder:
                    outcome = run_case(case, Path(folder), rng, LAYOUTS[number % len(LAYOUTS)], graphs)
                outcomes.append(outcome)
                mark = "[green]right[/]" if outcome.right else "[red]wrong[/]"
                console.print(
                    f"{mark} {case}, rank {outcome.rank}, step {outcome.step}, {outcome.layout}: {outcome.found}"
                )
        table = Table("case", "hangs", "named right", "median s", box=None, padding=(0, 2))
        for case in CASES:
            mine = [o for o in outcomes if o.case == case]
            seconds = sorted(o.seconds for o in mine)
            table.add_row(case, str(len(mine)), str(sum(o.right for o in mine)), f"{seconds[len(seconds) // 2]:.2f}")
        console.print(table)
        total = sum(o.right for o in outcomes)
        console.print(f"{total} of {len(outcomes)} right")
        if out is not None:
            import torch

            facts = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
            out.write_text(strict_json.dumps({"facts": facts, "hangs": [asdict(o) for o in outcomes]}, indent=1))
        if total < len(outcomes):
            raise typer.Exit(1)
