"""A launched job in processes of its own, and ways to break it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megascale.core.status import read_status
from megascale.resilience.process_birth import read_birth_time
from tests.forked import COMMAND, PACED, Forked
from tests.resilience.job_events import JobEvents

WAIT = 120.0  # seconds; only a broken test takes them

# Quick windows; what is tested here is order, not grace periods.
QUICK = [
    "--resilience.interval=0.3",
    "--resilience.test_spares=false",
    "--parallel.data=2",
    "--observe.progress=false",
]


class Launched(JobEvents):
    """`megascale launch` of a tiny model, whose trainers rest between steps.

    new: its processes are new ones, as a person's would be; else they are forked where torch is loaded already, and
    the driver runs `before`, Python, first.
    """

    def __init__(self, file: Path, name: str, *arguments: str, cwd: Path, new: bool, before: str) -> None:
        self.run = cwd / "runs" / name
        self.cwd = cwd
        self.new = new
        self.before = f"{PACED}\n{before}"
        self.words = ["launch", str(file), f"--train.name={name}"] + QUICK + list(arguments)
        self.seen = 0
        self.output = cwd / f"{name}.out"
        self.process = self.start()

    @property
    def environment(self) -> dict[str, str]:
        # What this machine reached when it was less busy must not fail its self-checks.
        more = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "XDG_CACHE_HOME": str(self.cwd / "cache")}
        more["MEGASCALE_TEST_REST"] = "0.1"  # what a test does to a job takes time and not steps
        paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        return os.environ | more | {"PYTHONPATH": os.pathsep.join(paths + [str(Path(__file__).parents[1] / "paced")])}

    def start(self) -> subprocess.Popen[bytes] | Forked:
        """The driver, for the first time or again."""
        if not self.new:
            more: dict[str, Any] = {"env": self.environment, "before": self.before, "output": self.output}
            self.process = Forked(self.words, cwd=self.cwd, **more)
            return self.process
        command = [sys.executable, "-m", COMMAND] + self.words
        with open(self.output, "ab") as out:
            self.process = subprocess.Popen(
                command, cwd=self.cwd, env=self.environment, stdout=out, stderr=out, start_new_session=True
            )
        return self.process

    def wait(self, find: Callable[[], object], subject: str):
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            result = find()
            if result:
                return result
            if self.process.poll() is not None:
                result = find()
                if result:
                    return result
                break
            time.sleep(0.02)
        raise AssertionError(f"{subject} did not come:\n{self.story()}")

    def story(self) -> str:
        lines = [f"{e.id} {e.kind} {e.action} {e.nodes} {e.evidence}" for e in self.events()]
        return "\n".join(lines + [self.output.read_text()[-6000:]])

    def until_step(self, step: int) -> None:
        metrics = self.run / "metrics.jsonl"
        self.wait(lambda: metrics.exists() and f'"step": {step},' in metrics.read_text(), f"step {step}")

    def pid(self, rank: int) -> int:
        """Return the process id of a rank's newest process in any node's folder."""

        def find() -> int:
            folders = [self.run] + list(self.run.parent.glob(f"{self.run.name}.apart/*/runs/{self.run.name}"))
            result = [read_status(folder / "status" / f"rank-{rank}.status") for folder in folders]
            newest = max((status for status in result if status), key=lambda s: s.time_ns, default=None)
            return newest.pid if newest is not None else 0

        return self.wait(find, "a whole status")

    def agent(self, node: str) -> int:
        return json.loads((self.run / "nodes" / node / "agent.json").read_text())["pid"]

    def kill_rank(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid(rank), number)

    def kill_agent(self, node: str, down: bool = False) -> None:
        if down:
            (self.run / "nodes" / node / "down").touch()
        os.kill(self.agent(node), signal.SIGKILL)

    def finish(self) -> int:
        """Exit code at the end."""
        return self.process.wait(WAIT)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for state in self.run.glob("nodes/*/agent.json"):
            record = json.loads(state.read_text())
            if read_birth_time(record["pid"]) == record["born"] != 0:
                os.kill(record["pid"], signal.SIGKILL)


@pytest.fixture
def launch(tiny: Path, tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Start jobs. Kill all remaining processes at the end."""
    pytest.importorskip("fastapi")
    started: list[Launched] = []

    def begin(name: str, *arguments: str, new: bool = False, before: str = "") -> Launched:
        started.append(Launched(tiny, name, *arguments, cwd=tmp_path, new=new, before=before))
        return started[-1]

    yield begin
    for job in started:
        job.close()
