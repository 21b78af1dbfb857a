"""Faults of machines: five network namespaces play machines with links of 200 Mbit/s, one fault per run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.harness.launched import Steps, make, phases, weights
from tests.chaos.faults.site import FaultSite, Row, equal_weights
from tests.chaos.machines import torchrun
from tests.chaos.machines.faults import FAULTS, HEADS, LINK, NODES, MachinesJob
from tests.chaos.machines.network import Machines, impossible
from tests.chaos.machines.session import hosts_session, torchrun_session

TORCHRUN = "torchrun"
PACE = 0.1  # Least seconds per step.
_BEFORE = 20  # Steps before the fault.


class MachinesSite(FaultSite):
    """Two machines for the driver, three where it starts agents by ssh: two ranks and one spare.

    Every step is copied to a peer's memory; checkpoints are on shared storage. The kind `torchrun` is two machines
    without a driver: a rank is killed, both end, and the same commands continue from the newest checkpoint.
    """

    name = "machines"
    kinds = {**FAULTS, TORCHRUN: None}  # noqa: RUF012

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._file = make(folder)

    @classmethod
    def find_problem(cls) -> str:
        """See FaultSite."""
        return impossible()

    def show_session(self, write: Callable[[str], None]) -> bool:
        """See FaultSite."""
        results = [torchrun_session(self.folder / "two", write), hosts_session(self.folder / "hosts", write)]
        return all(results)

    def run_once(self, kind: str, name: str) -> Row:
        """See FaultSite."""
        network = self.folder / f"machines-{name}"
        if kind == TORCHRUN:
            row, run = torchrun.torchrun(network, self._file, name)
            row["same"] = row["code"] == 0 and equal_weights(weights(run), self.reference.after(torchrun.STEPS))
            return row | {"right": row["same"] and row["right_end"]}
        return self._run_fault(kind, name, network)

    def _run_fault(self, kind: str, name: str, network: Path) -> Row:
        fault = FAULTS[kind]
        expected = self.reference.after(fault.steps)
        shutil.rmtree(network, ignore_errors=True)
        row: Row = {}
        with Machines(network, list(HEADS) + list(NODES)) as machines:
            for machine in machines:
                machine.limit(LINK)
            job = MachinesJob(machines, self._file, name, [f"--train.steps={fault.steps}"], PACE)
            try:
                row = _strike(job, kind)
            finally:
                job.end(10.0 if "code" in row else 0.0)
        row["same"] = row.get("code") == 0 and equal_weights(job.weights(), expected)
        attempts_right = row["attempts"] == 1 if fault.ends == "ride" else row["attempts"] > 1
        row["right"] = bool(
            row["same"]
            and attempts_right
            and (row["verdict"] or not fault.verdicts)
            and (row["lost"] or 0) <= 1
            and (row["back"] or not fault.back)
        )
        if not row["right"]:
            row["said"] = job.output.read_text()[-1500:]
        return row


def _strike(job: MachinesJob, kind: str) -> Row:
    """Let it train, break it, and say what came of it."""
    fault = FAULTS[kind]
    row: Row = {"verdict": None, "attempts": 0, "lost": None, "back": False}
    if job.first(lambda e: e.kind == "first_step") is None:
        return row | {"why": "no first step"}
    deadline = time.monotonic() + 120.0
    while job.step() < _BEFORE and time.monotonic() < deadline:
        time.sleep(0.05)
    machine, before = job.holder(1), job.events()[-1].id
    verdict = repeated = None
    with Steps(job) as steps:
        injected = time.time()
        fault.strike(machine, job)
        if fault.verdicts:
            verdict = job.first(lambda e: e.kind in fault.verdicts and e.time > injected - 0.01)
        if fault.ends == "recover":
            repeated = job.first(lambda e: e.kind == "first_step" and e.id > before)
    row |= phases(job, injected, verdict, repeated, steps)
    row["code"] = job.end()
    row["verdict"] = verdict.kind if verdict else None
    events = job.events()
    row["attempts"] = sum(e.kind == "attempt_started" for e in events)
    row["actions"] = [e.action for e in events if e.kind == "recovery_action"]
    row["back"] = any(e.kind == "node_joined" and e.nodes == (machine.name,) and e.id > before for e in events)
    return row
