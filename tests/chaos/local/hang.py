"""`python -m tests.chaos hang`: real hangs among real processes, and whether rank and collective are named right.

Ranks of a tiny model, four on gloo or one a GPU on NCCL, train until a random one is stopped, makes a collective too
many, leaves out a send or loses its reader, at a random step. Nothing tells the verdict which case it is.
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

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from megascale.errors import ConfigError

CASES = ("stopped rank", "mismatched collective", "missing send", "dead reader")
# (tensor, pipeline, data): four ranks each, two stages so that there is something to send.
LAYOUTS = ((1, 2, 2), (2, 2, 1))
_OF_TWO = ((1, 2, 1), (2, 1, 1), (1, 1, 2))  # on two GPUs
_KINDS = {
    "stopped rank": "stopped",
    "mismatched collective": "mismatched collective",
    "missing send": "missing send",
    "dead reader": "reader",
}
_START = 90.0  # seconds that a start and the first steps may take
_HANG_SECONDS = 1.0  # seconds without movement after which it is a hang
_LOOKS = 3  # at a run of which a rank moved on while it was looked at: it had only been slow, and the hang is to come

CONFIG = """
[model]
layers = 2
hidden = {hidden}
heads = 4
sequence_length = {length}
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
device = "{device}"
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
    """One hang. right: whether kind, rank and collective were named. seconds: the verdict's, with `evidence`."""

    case: str
    layout: str
    rank: int
    step: int
    right: bool
    found: str
    seconds: float
    evidence: tuple[str, ...]


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
    case: str,
    folder: Path,
    rng: random.Random,
    layout: tuple[int, int, int] = LAYOUTS[0],
    graphs: bool = False,
    device: str = "cpu",
    step: int | None = None,
    rank: int | None = None,
) -> HangOutcome:
    """Train in `folder`, hang `rank` by `case` in `step` (None: random ones), judge.

    graphs: micro-batches are replayed by the step of the fault, or captured in it.

    Raises RuntimeError where the training or the fault did not come.
    """
    from megascale.observe.hang import verdict as hang_report
    from megascale.parallel.chunk_graphs import EAGER_STEPS

    tensor, pipeline, copies = layout
    world = tensor * pipeline * copies
    if rank is None:
        rank = rng.randrange(world)
    step = step or rng.randrange(EAGER_STEPS + 1 if graphs else 2, EAGER_STEPS + 9)
    run = folder / "run"
    (run / "faults").mkdir(parents=True)
    config = folder / "hang.toml"
    hidden, length = (256, 128) if device == "cuda" else (32, 16)
    arguments = {"data": make_tokens(folder), "folder": folder, "copies": copies, "device": device}
    arguments |= {"hidden": hidden, "length": length}
    config.write_text(CONFIG.format(tensor=tensor, pipeline=pipeline, **arguments))
    _place_fault(run, case, rank, step, rng, layout)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    more = ["--kernels.graphs=on"] if graphs else []
    command = [sys.executable, "-m", "megascale.cli.main", "train", str(config)] + more
    with open(folder / "out", "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
    try:
        _wait_until(lambda: _reached(run, world, step) or process.poll() is not None, "training did not start", folder)
        if case == "stopped rank":
            time.sleep(rng.uniform(0, 0.3))
            os.kill(_pid(run, rank), signal.SIGSTOP)
        else:
            injected = lambda: any((run / "faults").glob("*.injected"))
            _wait_until(lambda: injected() or process.poll() is not None, "the fault was not injected", folder)
        if process.poll() is not None:
            raise RuntimeError(f"training ended: {(folder / 'out').read_text()[-500:]}")
        for _ in range(_LOOKS):
            _wait_until(lambda: has_stopped(run, world), "the run did not come to a stop", folder)
            started = time.perf_counter()
            scene, hang = hang_report.examine_run(run)
            seconds = time.perf_counter() - started
            if not scene.moving:
                break
        record = scene.ranks[rank].record
        named = hang.group in (record.groups if record else ()) and bool(hang.op)
        if process.poll() is not None:
            raise RuntimeError(f"training ended instead of hanging: {(folder / 'out').read_text()[-500:]}")
        right = hang.kind == _KINDS[case] and hang.ranks == (rank,) and named
        result = hang_report.format_headline(hang)
        return HangOutcome(case, _name(layout, graphs), rank, step, right, result, seconds, hang.evidence)
    finally:
        _end(run, process)


def _place_fault(run: Path, case: str, rank: int, step: int, rng: random.Random, layout: tuple[int, int, int]) -> None:
    tensor, _, copies = layout
    group = rng.choice(["data_reduce", "data_gather"]) if copies > 1 else "tensor" if tensor > 1 else "world"
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


def has_stopped(run: Path, world: int) -> bool:
    before = [record.events for record in _records(run, world)]
    time.sleep(_HANG_SECONDS)
    return before == [record.events for record in _records(run, world)]


def _wait_until(ready, subject: str, folder: Path) -> None:
    deadline = time.monotonic() + _START
    while not ready():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{subject}: {(folder / 'out').read_text()[-500:]}")
        time.sleep(0.02)


def _end(run: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Kill what started the ranks; all of them die with it, stopped or not, and RuntimeError where one does not."""
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 20  # a GPU takes its time to end what hangs on it
    while remaining := _trainers(run.parent):
        if time.monotonic() > deadline:
            for pid in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise RuntimeError(f"processes {remaining} outlived the launcher of {run}")
        time.sleep(0.02)


def _trainers(folder: Path) -> list[int]:
    """Processes that have not ended and whose command names a file of `folder`: the ranks and their children."""
    from megascale.observe.hang.evidence import read_process_state

    result = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(folder / "hang.toml") in command and read_process_state(int(entry.name)) != "gone":
                result.append(int(entry.name))
    return result


def _name(layout: tuple[int, int, int], graphs: bool) -> str:
    return "tp{} pp{} dp{}".format(*layout) + ", replayed" * graphs


def _layouts(device: str) -> tuple[tuple[int, int, int], ...]:
    """Return the layouts of a device's ranks. Raise ConfigError if there are none."""
    if device == "cpu":
        return LAYOUTS
    if device != "cuda":
        raise ConfigError(f"--device={device} is unsupported for hangs; give cpu or cuda")
    import torch

    gpus = torch.cuda.device_count()
    if gpus < 2:
        raise ConfigError(f"--device=cuda needs two GPUs, or four, and here are {gpus}; --device=cpu needs none")
    return LAYOUTS if gpus >= 4 else _OF_TWO


def _save(out: Path | None, outcomes: list[HangOutcome], device: str) -> None:
    """Write what is known so far: a bench that is cut off has told what it found."""
    import platform

    import torch

    if out is None:
        return
    facts = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    if device == "cuda":
        facts["gpus"] = f"{torch.cuda.device_count()} {torch.cuda.get_device_name()}"
    out.write_text(strict_json.dumps({"facts": facts, "hangs": [asdict(o) for o in outcomes]}, indent=1))


def register(app: typer.Typer) -> None:
    """Add the bench."""

    @app.command()
    def hang(
        runs: int = typer.Option(5, min=1, help="Hangs of each of the four cases."),
        seed: int = typer.Option(0, help="Chooses ranks and steps."),
        graphs: bool = typer.Option(False, "--graphs", help="With micro-batches replayed (kernels.graphs=on)."),
        device: str = typer.Option("cpu", help="cpu: four ranks on gloo; cuda: a rank per GPU on NCCL, two or four."),
        case: list[str] = typer.Option([], "--case", help=f"Only this one, repeatable: {', '.join(CASES)}."),
        out: Path = typer.Option(None, help="Write JSON here, after each hang."),
    ) -> None:
        """Hang real trainings in four ways and count how often rank and collective are named right.

        Example: python -m tests.chaos hang --runs 5 --out hang.json
        """
        from rich.console import Console
        from rich.table import Table

        unknown = [item for item in case if item not in CASES]
        if unknown:
            raise ConfigError(f"--case={unknown[0]!r} is unknown; choose among: {', '.join(CASES)}")
        cases = case or list(CASES)
        layouts = _layouts(device)
        rng = random.Random(seed)
        outcomes = []
        console = Console(highlight=False)
        for kind in cases:
            suited = [shape for shape in layouts if shape[1] > 1] if kind == "missing send" else layouts
            for number in range(runs):
                layout = suited[number % len(suited)]
                with temporary_folder() as folder:
                    try:
                        outcome = run_case(kind, Path(folder), rng, layout, graphs, device)
                    except RuntimeError as error:  # nothing hung, or training failed: told with all others
                        outcome = HangOutcome(kind, _name(layout, graphs), -1, 0, False, str(error), 0.0, ())
                outcomes.append(outcome)
                mark = "[green]right[/]" if outcome.right else "[red]wrong[/]"
                console.print(
                    f"{mark} {kind}, rank {outcome.rank}, step {outcome.step}, {outcome.layout}: {outcome.found}"
                )
                if not outcome.right:
                    console.print("\n".join(f"  {line}" for line in outcome.evidence), markup=False)
                _save(out, outcomes, device)
        table = Table("case", "hangs", "named right", "median s", box=None, padding=(0, 2))
        for kind in cases:
            local = [o for o in outcomes if o.case == kind]
            seconds = sorted(o.seconds for o in local)
            table.add_row(kind, str(len(local)), str(sum(o.right for o in local)), f"{seconds[len(seconds) // 2]:.2f}")
        console.print(table)
        total = sum(o.right for o in outcomes)
        console.print(f"{total} of {len(outcomes)} right")
        if total < len(outcomes):
            raise typer.Exit(1)
