"""Kinds of fault of the site `machines`: what is done to a machine or link, and what must follow."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.launched import Launched
from megascale.resilience.agent.node_folder import PROCESS_FILE
from tests.chaos.machines.network import Machine, Machines

LINK = 200.0  # Mbit/s of each machine's link in every run
HEADS = ("head", "head2")  # the driver's machine, and the one that it is started on anew
NODES = ("n0", "n1", "n2")


class MachinesJob(Launched):
    """A job whose driver is on one machine of a network and whose nodes are others, started by ssh.

    Args:
        machines: the network; `head` has the driver.
        file: settings (launched.py::make).
        name: of the run.
        words: more settings.
        pace: least seconds of a step.
    """

    def __init__(self, machines: Machines, file: Path, name: str, arguments: Sequence[str], pace: float) -> None:
        self.machines, self.head = machines, "head"
        self.shared = file.parent / "shared" / name
        hosts = machines.hosts_file(NODES)
        more = [f"--resilience.ssh={machines.ssh}", "--resilience.cluster=ssh", f"--resilience.hosts={hosts}"]
        more += [f"--checkpoint.location={self.shared}", "--checkpoint.linger=60", "--resilience.test_spares=false"]
        super().__init__(file, name, more + list(arguments), pace)

    def start(self) -> Any:
        """The driver, on the machine that it is on now."""
        arguments = self.command[self.command.index(sys.executable) :]
        self.command = self.machines[self.head].inside(arguments)
        return super().start()

    def move(self) -> None:
        """The driver's machine is gone: start it on another from a copy of the run folder, as one keeps by rsync."""
        copy = self.run.parent.parent / "copies" / self.run.name
        shutil.copytree(self.run, copy, ignore_dangling_symlinks=True)
        self.machines["head"].power_off()
        self.process.wait()
        self.run, self.head = copy, "head2"
        self.command = [word for word in self.command if not word.startswith("--train.runs=")]
        self.command.append(f"--train.runs={copy.parent}")
        self.start()

    def step(self) -> int:
        """The last step that rank 0 has told of; its status lies on its machine."""
        file = self.run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        result = [json.loads(line).get("step", 0) for line in lines if line.endswith("}")]
        return max(result, default=0)

    def holder(self, rank: int) -> Machine:
        """The machine that holds a rank now."""
        placed = next(e for e in reversed(self.events()) if e.kind == "attempt_started")
        return self.machines[placed.nodes[rank]]


def cut(machine: Machine, job: MachinesJob) -> None:
    """No packet comes or goes for a minute."""
    machine.cut()
    time.sleep(60.0)
    machine.heal()
    machine.limit(LINK)


def kill_agent(machine: Machine, job: MachinesJob) -> None:
    """SIGKILL to the agent alone."""
    pid = json.loads((machine.folder / machine.name / PROCESS_FILE).read_text())["pid"]  # as the machine counts
    subprocess.run(machine.inside(["kill", f"-{signal.SIGKILL}", str(pid)]), check=True)


@dataclass(frozen=True)
class MachineFault:
    """One kind of fault and what is right.

    Attributes:
        strike: does it to the machine that holds rank 1.
        verdicts: events of which one must come after it; empty: none need come.
        ends: recover: trainers start again; ride: training goes on without.
        back: the machine must be a node again at the end.
        steps: of the run.
    """

    strike: Callable[[Machine, MachinesJob], None]
    verdicts: tuple[str, ...]
    ends: str = "recover"
    back: bool = False
    steps: int = 60


_LOST = ("missed_heartbeat", "process_exit", "node_lost")
FAULTS: dict[str, MachineFault] = {
    "machine-gone": MachineFault(lambda m, job: m.power_off(), _LOST),
    "link-cut": MachineFault(cut, _LOST, back=True, steps=700),
    "one-way-loss": MachineFault(lambda m, job: m.cut(outgoing=False), _LOST + ("hang",)),
    "slow-link": MachineFault(lambda m, job: m.limit(LINK / 10), (), "ride", steps=110),
    "agent-killed": MachineFault(kill_agent, _LOST + ("agent_restarted",)),
    "driver-gone": MachineFault(lambda m, job: job.move(), ("driver_took_over",), "ride", steps=200),
}
