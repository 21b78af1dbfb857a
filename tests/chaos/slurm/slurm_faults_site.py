"""Faults of jobs under a real Slurm: a munged, a slurmctld and four slurmds on network namespaces."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from benchmarks.harness.launched import WAIT, Launched, Steps, make, phases, recovery
from tests.chaos.faults.site import FaultSite, Row, equal_weights
from tests.chaos.machines.network import wait
from tests.chaos.slurm.faults import FAULTS, SlurmFault
from tests.chaos.slurm.job import SlurmJob
from tests.chaos.slurm.session import session
from tests.chaos.slurm.site import SlurmSite, impossible

NODES = 4  # Two with ranks, a spare, and one for requeued and next jobs.
ONE_MACHINE = "one-machine"
PACE = 0.1  # Least seconds per step.
_BEFORE = 20  # Steps before the fault.
_LEARN = 30.0  # Seconds in which Slurm learns of a script's end without the daemons that were killed.


class SlurmFaultSite(FaultSite):
    """Two ranks with a spare under Slurm, submitted by sbatch as `launch --dry-run` prints it.

    The kind `one-machine` is the same job on this machine with a node killed, for comparison.

    Args:
        folder: see FaultSite.
        site: a running Slurm; without one, the context manager starts it.
    """

    name = "slurm"
    kinds = {ONE_MACHINE: FAULTS["node-down"], **FAULTS}  # noqa: RUF012

    def __init__(self, folder: Path, site: SlurmSite | None = None) -> None:
        super().__init__(folder)
        self._file = make(folder)
        self._site = site or SlurmSite(folder / "s", NODES)

    @classmethod
    def find_problem(cls) -> str:
        """See FaultSite."""
        return impossible()

    @classmethod
    def describe(cls) -> dict[str, str]:
        """See FaultSite."""
        return {"slurm": subprocess.run(["slurmctld", "-V"], capture_output=True, text=True).stdout.strip()}

    def __enter__(self) -> Self:
        self._site.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._site.__exit__(*error)

    def show_session(self, write: Callable[[str], None]) -> bool:
        """See FaultSite."""
        work = self.folder / "job"
        work.mkdir()
        return session(self._site, work, write)

    def run_once(self, kind: str, name: str) -> Row:
        """See FaultSite."""
        fault = self.kinds[kind]
        expected = self.reference.after(fault.steps)
        row: Row = {"verdict": None, "lost": None}
        arguments = [f"--train.steps={fault.steps}"]
        if kind == ONE_MACHINE:
            job: Launched = Launched(self._file, name, arguments + ["--resilience.test_spares=false"], PACE)
            try:
                row |= _one_machine(job)
            finally:
                job.end(10.0 if "code" in row else 0.0)
        else:
            job = SlurmJob(
                self._site,
                self._file,
                name,
                arguments + list(fault.settings),
                PACE,
                sbatch=fault.sbatch,
                in_container=fault.in_container,
            )
            try:
                row |= _strike(job, fault)
            finally:
                self._site.repair()
        row["same"] = row.get("code") == 0 and equal_weights(job.weights(), expected)
        few_lost = row["lost"] is None or row["lost"] <= fault.lost
        row["right"] = bool(row["same"] and few_lost and not row["wrong"])
        if not row["right"]:
            row["events"] = [
                f"{e.time:.2f} {e.kind} {e.action} {' '.join(e.nodes)}: {e.evidence}"[:400] for e in job.events()
            ]
            row["said"] = job.driver_output() if isinstance(job, SlurmJob) else job.output.read_text()[-1500:]
        return row


def _one_machine(job: Launched) -> Row:
    """The same without Slurm: all processes of a node are killed, and the spare takes over."""
    from megascale.resilience.faults.inject import Options, inject

    job.first(lambda e: e.kind == "first_step")
    wait(lambda: job.step() >= _BEFORE, f"step {_BEFORE} of {job.run.name}", WAIT)
    injected, before = time.time(), job.events()[-1].id
    with Steps(job) as steps:
        inject(job.run, "kill-node", Options(node="n1"))
        verdict, repeated = recovery(job, FAULTS["node-down"].verdicts, injected, before)
    wrong = [] if verdict else [f"none of {', '.join(FAULTS['node-down'].verdicts)} came"]
    row: Row = dict(phases(job, injected, verdict, repeated, steps))
    row |= {"code": job.end(), "verdict": verdict.kind if verdict else None, "wrong": wrong}
    row["actions"] = [e.action for e in job.events() if e.kind == "recovery_action"]
    return row


def _strike(job: SlurmJob, fault: SlurmFault) -> Row:
    """Let it train, break it, and say what came of it."""
    row: Row = {"wrong": ["no first step"]}
    if job.first(lambda e: e.kind == "first_step") is None:
        return row
    job.until_step(_BEFORE)
    before, began = job.events()[-1].id, time.time()
    verdict = repeated = None
    with Steps(job) as steps:
        injected = fault.strike(job)
        if fault.verdicts:
            verdict, repeated = recovery(job, fault.verdicts, began, before)
            if fault.ends == "next" and verdict:
                injected.at = max(injected.at, verdict.time) if fault.sbatch else injected.at
    row = {"node": injected.node, "verdict": verdict.kind if verdict else None}
    row |= phases(job, injected.at, verdict, repeated, steps)
    job.first(lambda e: e.kind == "job_done")
    job.first(lambda e: e.kind == "driver_ended")
    row["code"] = job.end(_LEARN)
    if row["code"] < 0:
        # A slurmd that comes back kills the batch script of a job that has lost its node: not before that has ended.
        job.site.start_all()
        row["code"] = job.end()
    events = job.events()
    row["actions"] = [e.action for e in events if e.kind == "recovery_action"]
    row["attempts"] = sum(e.kind == "attempt_started" for e in events)
    row["wrong"] = injected.wrong + fault.check(job, injected)
    row["wrong"] += [f"none of {', '.join(fault.verdicts)} came"] if fault.verdicts and verdict is None else []
    row["wrong"] += ["trainers started again"] if fault.ends == "ride" and row["attempts"] > 1 else []
    row["wrong"] += [f"Slurm: {job.jobs()}"] if row["code"] else []
    return row
