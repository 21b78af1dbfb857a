"""A tiny job in a Slurm of one's own: sent off as its `--dry-run` prints it, and broken by benches and tests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.launched import WAIT, Launched
from tests.chaos.image_layout import PROGRAMS, read_image_layout, write_image_folder
from tests.chaos.machines.network import wait
from tests.chaos.slurm.site import SlurmSite

ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")
RUNTIME = Path(__file__).parent / "runtime"  # folder of the stand-in for Apptainer
_ASK = 0.5  # seconds between questions to the controller
_PARTS = ("resilience.agent", "megascale launch")  # agents with their trainers, and drivers


class SlurmJob(Launched):
    """`megascale launch --cluster slurm` of two ranks with a spare.

    Args:
        site: where.
        file: settings (launched.py::make).
        name: of the run, and of the job in Slurm.
        words: more settings.
        pace: least seconds of a step.
        sbatch: further options of sbatch.
        in_container: run agents and trainers in a container. Without Apptainer a stand-in makes it.

    Attributes:
        id: of the first job in Slurm.
    """

    _requested_at = 0.0  # when the controller was asked last, monotonic

    def __init__(
        self,
        site: SlurmSite,
        file: Path,
        name: str,
        arguments: Sequence[str],
        pace: float,
        sbatch: str = "",
        in_container: bool = False,
    ) -> None:
        self.site = site
        self.name = name
        self.id = ""
        self._environment: dict[str, str] = {}
        local = ["--resilience.cluster=slurm", "--resilience.test_spares=false", f"--resilience.sbatch={sbatch}"]
        local.append("--checkpoint.linger=60")  # a driver that comes up on another node takes some seconds
        if in_container:
            local += self._prepare_container(file)
        super().__init__(file, name, local + list(arguments), pace)

    def _prepare_container(self, file: Path) -> list[str]:
        """Write an image folder and return the settings by which it runs what is installed here."""
        layout = read_image_layout()
        image = self.site.folder / "image"
        if not image.exists():
            write_image_folder(layout, image)
        if shutil.which("apptainer") is None:
            self._environment["PATH"] = f"{RUNTIME}:{os.environ['PATH']}"
        data = [str(path) for path in file.parent.glob("train.*")]
        mounts = [f"{path}:{path}:ro" for path in layout.mounts + data]
        return [
            "--slurm.container=apptainer",
            f"--slurm.image={image}",
            f"--slurm.mounts={json.dumps(mounts)}",
            f"--slurm.python=/{PROGRAMS}/python3",
        ]

    def start(self) -> Any:
        """Print the batch script and hand it to sbatch; nothing of the job is a child of this process."""
        self.script = self.output.with_suffix(".sbatch")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        arguments = self.command + ["--dry-run"]
        self.script.write_text(
            subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment).stdout
        )
        self.submit()

    def submit(self) -> str:
        """Hand the script to sbatch (again); the job's id."""
        result = self.site.slurm("sbatch", "--parsable", str(self.script), **self._environment)
        self.id = self.id or result
        return result

    # what Slurm knows -------------------------------------------------------------------------------------------------

    def jobs(self) -> dict[str, str]:
        """The state of each job of this run, in order."""
        try:
            output = self.site.slurm("squeue", "--noheader", "--states=all", f"--name={self.name}", "--format=%i %T")
        except subprocess.CalledProcessError:  # the controller is not there just now
            return {}
        result = dict(line.split() for line in output.splitlines())
        return {job: result[job] for job in sorted(result, key=int)}

    def batch_node(self) -> str:
        """Return the node on which the driver runs."""
        return self.site.slurm("squeue", "--noheader", "--states=running", f"--name={self.name}", "--format=%B")

    def holder(self, rank: int) -> str:
        """The node that holds a rank now."""
        node: str = next(e for e in reversed(self.events()) if e.kind == "attempt_started").nodes[rank]
        return node

    def processes(self, node: str) -> list[str]:
        """Return the command lines of the job's processes on a node."""
        arguments = self.site.machines[node].inside(["ps", "-eo", "args"])
        output = subprocess.run(arguments, capture_output=True, text=True).stdout
        return [line for line in output.splitlines() if any(part in line for part in _PARTS)]

    def processes_outside_container(self, node: str) -> list[str]:
        """Return the command lines of agents and trainers on a node whose root is not the image's."""
        script = (
            "for process in $(pgrep -f '^[^ ]*python[^ ]* .*[r]esilience.agent'); do "
            f"test -e /proc/$process/root/{PROGRAMS} || ps -o args= -p $process; done"
        )
        arguments = self.site.machines[node].inside(["bash", "-c", script])
        return subprocess.run(arguments, capture_output=True, text=True).stdout.splitlines()

    # what it does -----------------------------------------------------------------------------------------------------

    def over(self) -> bool:
        """Return whether no job of this run is left, as Launched.over. The controller is asked now and then."""
        if time.monotonic() - self._requested_at <= _ASK:
            return False
        states, self._requested_at = self.jobs().values(), time.monotonic()
        return bool(states) and all(state in ENDED for state in states)

    def step(self) -> int:
        """The last step that rank 0 has told of."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return max((json.loads(line).get("step", 0) for line in lines if line.endswith("}")), default=0)

    def until_step(self, step: int, seconds: float = WAIT) -> None:
        """Wait for a step; TrainingError if it does not come."""
        wait(lambda: self.step() >= step, f"step {step} of {self.name}", seconds)

    def end(self, grace_period: float = WAIT) -> int:
        """0 if the last job has completed, 1 if it has ended in another way, -1 if it has not."""
        deadline = time.monotonic() + grace_period
        while time.monotonic() < deadline:
            states = self.jobs()
            if states and all(state in ENDED for state in states.values()):
                return 0 if list(states.values())[-1] == "COMPLETED" else 1
            time.sleep(_ASK)
        return -1

    def driver_output(self) -> str:
        """The end of what its jobs wrote."""
        files = sorted(self.run.parent.glob(f"{self.name}.slurm-*.out"))
        return "\n".join(f"{file.name}: {file.read_text()[-2000:]}" for file in files)
