"""A launched job of a trainer that does not know MegaScale, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megascale.resilience.agent.leftover_processes import find_rank_processes
from megascale.resilience.driver.state.journal_reader import Entry, read_journal_events

FOLDER = Path(__file__).with_name("trainers")
TIMEOUT = 600.0  # seconds of a wait; only a broken job or a very busy machine takes them
LAST_STEP = 40


@dataclass(frozen=True)
class Trainer:
    """A trainer of the folder `trainers`.

    Attributes:
        file: its script.
        nodes: number of nodes with one rank each.
        package: optional package that it needs, "" if none.
        has_gpus: the script also runs on NCCL.
        settings: settings of `megascale launch` for it.
    """

    file: str
    nodes: int = 3
    package: str = ""
    has_gpus: bool = False
    settings: tuple[str, ...] = ()


DDP_PATTERN = r"--foreign.patterns=['^iter (?P<step>[0-9]+), loss (?P<loss>[0-9.]+)']"
TRAINERS = {
    "ddp": Trainer("train_ddp.py", has_gpus=True, settings=(DDP_PATTERN,)),
    "fsdp": Trainer("train_fsdp.py"),
    "nanochat": Trainer("train_nanochat.py"),
    "huggingface": Trainer("train_huggingface.py", nodes=2, package="transformers"),
    "lightning": Trainer("train_lightning.py", nodes=2, package="pytorch_lightning"),
    "megatron": Trainer("train_megatron.py", nodes=2, package="megatron.core", has_gpus=True),
}


class ForeignJob:
    """A launched job of a trainer in `folder`. `close` ends it.

    Args:
        folder: folder of the run and of the trainer's checkpoints.
        trainer: key of TRAINERS.
        fault, rank, steps: arguments of the trainer.
        nodes: number of nodes; default: the trainer's.
        options: further options of `megascale launch`.

    Attributes:
        timeout: seconds of a wait.
    """

    timeout = TIMEOUT

    def __init__(
        self,
        folder: Path,
        trainer: str,
        fault: str,
        rank: int,
        steps: int = LAST_STEP,
        nodes: int | None = None,
        options: Sequence[str] = ("--train.device=cpu", "--per-node=1", "--spares=1"),
    ) -> None:
        self.folder = folder
        # Machines of a Slurm keep state by the name of the job, and a namespace of Kubernetes has no underscore.
        self.name = f"foreign-{folder.name[-8:]}".replace("_", "-").rstrip("-")
        self.run = folder / "runs" / self.name
        self.output = folder / "output"
        kind = TRAINERS[trainer]
        self.command = [sys.executable, "-m", "megascale.cli.main", "launch", f"--nodes={nodes or kind.nodes}"]
        self.command += [f"--train.name={self.name}", "--resilience.test_spares=false", "--resilience.interval=0.3"]
        self.command += [*options, *kind.settings, "--"]
        self.command += [sys.executable, str(FOLDER / kind.file), str(steps), str(folder), fault, str(rank)]
        self.start()

    def start(self) -> None:
        """Start the driver."""
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(self.command, cwd=self.folder, env=environment, stdout=out, stderr=out)

    def is_over(self) -> bool:
        """Return whether the job has ended."""
        return self.process.poll() is not None

    def read_output(self) -> str:
        """Return what the driver printed."""
        return self.output.read_text()

    def wait(self, find: Callable[[], object], subject: str) -> None:
        """Wait until `find` returns a true value. Raise RuntimeError if the job ends first, or after `timeout`."""
        deadline = time.monotonic() + self.timeout
        while not find():
            if time.monotonic() > deadline or self.is_over():
                if find():
                    return
                raise RuntimeError(f"{subject} did not come: {self.read_output()[-3000:]}")
            time.sleep(0.05)

    def events(self, kind: str = "") -> list[Entry]:
        """Return the events of a kind, or all."""
        if not (self.run / "journal.sqlite").exists():
            return []
        return [event for event in read_journal_events(self.run) if kind in ("", event.kind)]

    def step(self) -> int:
        """Return the last step in the run's metrics, 0 before the first."""
        try:
            lines = (self.run / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (OSError, IndexError, ValueError):
            return 0

    def kill_rank(self, rank: int) -> None:
        """Kill the process of a rank."""
        pid = int((self.run / "status" / f"rank-{rank}.process").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    def lose_node(self, rank: int) -> str:
        """Kill all processes of a rank's node, let no agent start there, and return the node's name.

        The ranks end with their agent. Processes that they have started, such as writers of checkpoints, do not.
        """
        node = f"n{rank}"
        folder = self.run / "nodes" / node
        (folder / "down").touch()
        trainers = find_rank_processes(self.run, self.run.name, node)
        os.kill(json.loads((folder / "agent.json").read_text())["pid"], signal.SIGKILL)
        for pid in trainers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return node

    def finish(self) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(TIMEOUT)

    def close(self) -> None:
        """End what still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
