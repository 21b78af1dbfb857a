"""Another trainer's job in a real Slurm, submitted by sbatch as `launch --dry-run` prints it."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.chaos.foreign.job import TIMEOUT, ForeignJob
from tests.chaos.slurm.site import SlurmSite

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
QUERY_INTERVAL = 0.5  # seconds between questions to the controller


class SlurmForeignJob(ForeignJob):
    """A job of one rank per node with a spare.

    Args:
        site: a running Slurm.
        folder, trainer, fault, rank, steps: as for ForeignJob.
    """

    def __init__(self, site: SlurmSite, folder: Path, trainer: str, fault: str, rank: int, steps: int) -> None:
        self._site = site
        self._id = ""
        self._query_time = 0.0
        options = ["--train.device=cpu", "--per-node=1", "--spares=1", "--cluster=slurm"]
        super().__init__(folder, trainer, fault, rank, steps, options=options)

    def start(self) -> None:
        """Print the batch script and submit it."""
        script = self.output.with_suffix(".sbatch")
        command = list(self.command)
        command.insert(command.index("launch") + 1, "--dry-run")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=True, env=environment)
        script.write_text(result.stdout)
        self._id = self._site.slurm("sbatch", "--parsable", str(script)).strip()

    def read_state(self) -> str:
        """Return the job's state in Slurm."""
        return self._site.slurm("squeue", "--noheader", "--states=all", f"--jobs={self._id}", "--format=%T").strip()

    def is_over(self) -> bool:
        """Return whether Slurm has ended the job. The controller is asked twice a second."""
        current_time = time.monotonic()
        if current_time - self._query_time < QUERY_INTERVAL:
            return False
        self._query_time = current_time
        return self.read_state() in ENDED

    def read_output(self) -> str:
        """Return what the driver printed."""
        return "\n".join(file.read_text() for file in self.run.parent.glob("*.out"))

    def lose_node(self, rank: int) -> str:
        """Switch off the machine of a rank and return its name."""
        started = self.events("attempt_started")[-1]
        self._site.power_off(started.nodes[rank])
        return started.nodes[rank]

    def finish(self) -> int:
        """Wait for the end; return 0 if the job has completed, else 1."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            state = self.read_state()
            if state in ENDED:
                return int(state != "COMPLETED")
            time.sleep(QUERY_INTERVAL)
        raise RuntimeError(f"the job did not end: {self.read_output()[-3000:]}")

    def close(self) -> None:
        """Cancel the job if it still runs, and switch machines on again."""
        if self.read_state() not in ENDED:
            self._site.slurm("scancel", self._id)
            self.finish()
        self._site.start_all()
