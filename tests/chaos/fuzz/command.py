"""`python -m tests.chaos fuzz`: readers of untrusted files and messages, fed with randomly changed input."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import typer

from megascale.core import strict_json

SLOW = 10.0  # seconds of processor time for one input that are a find as well
STUCK = 300.0  # seconds of any time


@dataclass(frozen=True)
class FuzzResult:
    """Result of a fuzz target.

    Attributes:
        target: its name.
        inputs: how many it was fed.
        seed: of the find, 0 without one.
        find: what went wrong; empty if nothing did.
        mib: the most memory that its process took above what it began with.
    """

    target: str
    inputs: int
    seed: int
    find: str
    mib: float


def register(app: typer.Typer) -> None:
    """Add `python -m tests.chaos fuzz`."""
    app.command("fuzz")(fuzz)


def fuzz(
    minutes: float = typer.Option(1.0, min=0.01, help="For each target."),
    targets: str = typer.Option("", help="Which, comma-separated; default: all."),
    seed: int = typer.Option(1, help="The first input's; each next is one more."),
    out: Path = typer.Option(Path("bench-fuzz.json"), help="JSON file for the results."),
) -> None:
    """Feed readers of files and frames with sound input that was changed at random.

    Each must read it or refuse it with an error of its own; a crash, another exception or ten seconds are a find,
    whose seed makes it again (`--targets NAME --seed SEED --minutes 0.01`). Exit 1 with a find.

    Example: python -m tests.chaos fuzz --minutes 10
    """
    from rich.console import Console
    from rich.table import Table

    from megascale.errors import ConfigError, TrainingError
    from tests.chaos.fuzz.targets import TARGETS

    expected = [target.name for target in TARGETS]
    chosen = [name.strip() for name in targets.split(",") if name.strip()] or expected
    unknown = [name for name in chosen if name not in expected]
    if unknown:
        raise ConfigError(f"--targets={targets}: there is no {unknown[0]}; choose from {', '.join(expected)}")
    console = Console(highlight=False, soft_wrap=True)
    results = []
    for name in chosen:
        results.append(_in_a_process(name, minutes * 60, seed))
        report = results[-1].find or "no find"
        console.print(f"{name}: {results[-1].inputs:,} inputs, {results[-1].mib:.0f} MiB, {report}", markup=False)
    table = Table("target", "inputs", "MiB", "find", title="fuzz")
    for result in results:
        table.add_row(
            result.target, f"{result.inputs:,}", f"{result.mib:.0f}", f"seed {result.seed}" * bool(result.find)
        )
    console.print(table)
    details = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "minutes": minutes, "seed": seed}
    out.write_text(strict_json.dumps(details | {"results": [asdict(result) for result in results]}, indent=1))
    finds = [f"{r.target} with seed {r.seed}: {r.find.splitlines()[-1]}" for r in results if r.find]
    if finds:
        raise TrainingError("; ".join(finds))


def _in_a_process(name: str, seconds: float, seed: int) -> FuzzResult:
    """A crash must not end the bench, so each target has a process of its own."""
    with tempfile.TemporaryDirectory(prefix="megascale-fuzz-") as folder:
        arguments = [sys.executable, "-m", "tests.chaos.fuzz.command", name, str(seconds), str(seed), folder]
        done = subprocess.run(arguments, capture_output=True, text=True)
        at = Path(folder) / "seed"
        last = int(at.read_text() or seed) if at.exists() else seed
        if done.returncode == 0:
            return FuzzResult(**json.loads(done.stdout.splitlines()[-1]))
        return FuzzResult(name, last - seed, last, f"ended by {done.returncode}: {done.stderr[-500:]}", 0.0)


def feed(name: str, seconds: float, seed: int, folder: Path) -> FuzzResult:
    """Feed a target until the time is over or something is found."""
    import resource

    from tests.chaos.fuzz.targets import TARGETS

    location = folder / "target"
    location.mkdir()
    give = next(target for target in TARGETS if target.name == name).make(location)
    give(random.Random(seed))  # Imports at the first input are not part of its cost.
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    find = ""
    at = seed
    deadline = time.monotonic() + seconds
    with open(folder / "seed", "w") as file:
        while True:
            file.seek(0)
            file.write(f"{at:020d}")
            file.flush()
            began, worked = time.monotonic(), time.process_time()
            try:
                give(random.Random(at))
            except Exception:
                find = traceback.format_exc(limit=-4)
            duration, work = time.monotonic() - began, time.process_time() - worked
            if duration > STUCK or work > SLOW:
                find = find or f"{duration:.0f} seconds, {work:.0f} of work"
            if find or time.monotonic() > deadline:
                break
            at += 1
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return FuzzResult(name, at - seed + 1, at if find else 0, find, most / 1024)


if __name__ == "__main__":
    finding = feed(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    print(json.dumps(asdict(finding)))
