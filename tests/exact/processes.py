"""Real ranks of the command line: started one by one under torchrun's variables, or by `megascale train` itself."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.forked import PACED, Forked

ENVIRONMENT = {"COLUMNS": "200"}
LIMIT = 200.0  # seconds for what takes some; the machine may be busy


@dataclass(frozen=True)
class Start:
    """One process: its rank, the world it believes in, its own overrides, and Python run before the command."""

    rank: int
    world: int
    words: tuple[str, ...] = ()
    before: str = ""


@dataclass(frozen=True)
class Ended:
    """End of a process. `said` is its output as one line."""

    code: int
    said: str


@contextmanager
def ranks(file: Path, common: list[str], starts: list[Start]) -> Iterator[list[Forked]]:
    """`megascale train FILE` as several ranks of this host; none outlives the context."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    processes = []
    for start in starts:
        variables = {
            "RANK": start.rank,
            "LOCAL_RANK": start.rank,
            "WORLD_SIZE": start.world,
            "LOCAL_WORLD_SIZE": start.world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        processes.append(
            Forked(
                ["train", file, *common, *start.words],
                env=ENVIRONMENT | {name: str(value) for name, value in variables.items()},
                before=start.before,
            )
        )
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def end(process: Forked) -> Ended:
    """Wait for a process."""
    text, _ = process.communicate(timeout=LIMIT)
    return Ended(process.wait(), " ".join(text.split()))


def run_ranks(file: Path, common: list[str], starts: list[Start]) -> list[Ended]:
    """Start ranks and wait for all of them."""
    with ranks(file, common, starts) as processes:
        return [end(process) for process in processes]


@contextmanager
def launched(file: Path, *arguments: str) -> Iterator[tuple[Forked, dict[int, psutil.Process]]]:
    """Start `megascale train FILE`; yield it and its ranks once the first step is in the metrics.

    Ranks rest between steps.
    """
    from megascale.config import load
    from megascale.core.status import read_status

    launcher = Forked(["train", file] + list(arguments), env=ENVIRONMENT, before=PACED)
    children: list[psutil.Process] = []
    try:
        wait_for_step(load(file, arguments).run_folder, 1, launcher)
        children = psutil.Process(launcher.pid).children(recursive=True)
        status = [read_status(file) for file in (load(file, arguments).run_folder / "status").glob("rank-*.status")]
        yield launcher, {s.rank: psutil.Process(s.pid) for s in status if s is not None}
    finally:
        launcher.kill()
        launcher.wait()
        for child in children:
            if child.is_running():
                child.kill()


def wait_for_step(run: Path, step: int, process: Forked) -> None:
    """Return once `step` stands in the metrics, or the process has ended."""
    metrics, deadline = run / "metrics.jsonl", time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and f'"step": {step},' in metrics.read_text():
            return
        time.sleep(0.01)
    raise AssertionError(f"no step {step}: {process.communicate(timeout=5) if process.poll() is not None else 'slow'}")
