"""Faults of jobs on a real Kubernetes: etcd, an API server, controllers and kubelets on network namespaces."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from benchmarks.harness.launched import WAIT, Launched, Steps, make, phases, recovery
from tests.chaos.faults.site import FaultSite, Row, equal_weights
from tests.chaos.image_layout import read_image_layout
from tests.chaos.kubernetes.faults import FAULTS, Injected, KubernetesFault
from tests.chaos.kubernetes.job import DriverPodJob, KubernetesJob
from tests.chaos.kubernetes.session import session
from tests.chaos.kubernetes.site import KubernetesSite, impossible, programs
from tests.chaos.machines.network import wait

NODES = 4  # Two with ranks, a spare, and one where what was lost is started again.
# The same job on nodes of this machine, for comparison: kind -> fault (resilience/faults/inject.py). The end of a
# process is seen at once, a silent node only after resilience.window.
LOCAL = {"one-machine": "kill-node", "one-machine-cut": "partition"}
PACE = 0.1  # Least seconds per step.
_BEFORE = 20  # Steps before the fault.


class KubernetesFaultSite(FaultSite):
    """Two ranks with a spare in real pods. Two trainers of one rank at the same time are wrong ("doubles").

    Args:
        folder: see FaultSite.
        site: a running Kubernetes; without one, the context manager starts it.
    """

    name = "kubernetes"
    kinds = {**dict.fromkeys(LOCAL, FAULTS["pod-deleted"]), **FAULTS}  # noqa: RUF012

    def __init__(self, folder: Path, site: KubernetesSite | None = None) -> None:
        super().__init__(folder)
        self._file = make(folder)
        self._site = site or KubernetesSite(folder / "s", NODES, gpus=1)

    @classmethod
    def find_problem(cls) -> str:
        """See FaultSite."""
        return impossible()

    @classmethod
    def describe(cls) -> dict[str, str]:
        """See FaultSite."""
        return {"kubernetes": (programs() / "VERSION").read_text().strip()}

    def __enter__(self) -> Self:
        self._site.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._site.__exit__(*error)

    def show_session(self, write: Callable[[str], None]) -> bool:
        """See FaultSite."""
        return session(self._site, self.folder, write)

    def run_once(self, kind: str, name: str) -> Row:
        """See FaultSite."""
        if kind in LOCAL:
            return self._run_local(kind, name)
        fault = FAULTS[kind]
        row: Row = {"verdict": None, "lost": None, "wrong": ["it did not start"]}
        expected = {} if fault.ends == "stop" else self.reference.after(fault.steps)
        kind_of_job = DriverPodJob if fault.driver_pod else KubernetesJob
        job = kind_of_job(self._site, self._file, name, [f"--train.steps={fault.steps}"] + list(fault.words), PACE)
        try:
            try:
                row |= _stopped(job, fault) if fault.ends == "stop" else _strike(job, fault)
            except Exception as error:  # A timeout or a broken job is the result of the run.
                row["wrong"] = [f"{type(error).__name__}: {error}"[:600]]
            row["doubles"] = job.witness.doubles()
            if fault.ends == "stop":
                row["same"] = None
                row["right"] = not row["wrong"]
            else:
                row["same"] = row.get("code") == 0 and equal_weights(job.weights(), expected)
                few_lost = row["lost"] is None or row["lost"] <= fault.lost
                row["right"] = bool(row["same"] and few_lost and not row["wrong"] and not row["doubles"])
            if not row["right"]:
                _write_evidence(row, job, self.folder / name)
        finally:
            job.close()
            self._site.repair()
        return row

    def _run_local(self, kind: str, name: str) -> Row:
        """Lose a node of a job without a cluster; the spare takes over."""
        from megascale.resilience.faults.inject import Options, inject

        steps_to_train = FAULTS["pod-deleted"].steps
        expected = self.reference.after(steps_to_train)
        arguments = [f"--train.steps={steps_to_train}", "--resilience.test_spares=false"]
        job = Launched(self._file, name, arguments, PACE, own_network=kind == "one-machine-cut")
        row: Row = {"verdict": None, "lost": None, "wrong": [], "doubles": []}
        try:
            job.first(lambda e: e.kind == "first_step")
            wait(lambda: job.step() >= _BEFORE, f"step {_BEFORE} of {name}", WAIT)
            injected, before = time.time(), job.events()[-1].id
            with Steps(job) as steps:
                inject(job.run, LOCAL[kind], Options(node="n1"))
                verdict, repeated = recovery(job, FAULTS["node-off"].verdicts, injected, before)
            row |= phases(job, injected, verdict, repeated, steps)
            row |= {"code": job.end(), "verdict": verdict.kind if verdict else None}
            row["wrong"] = [] if verdict else [f"none of {', '.join(FAULTS['node-off'].verdicts)} came"]
            row["actions"] = [e.action for e in job.events() if e.kind == "recovery_action"]
        finally:
            job.end(10.0 if "code" in row else 0.0)
        row["same"] = row["code"] == 0 and equal_weights(job.weights(), expected)
        few_lost = row["lost"] is None or row["lost"] <= 1
        row["right"] = bool(row["same"] and few_lost and not row["wrong"])
        return row


def _strike(job: KubernetesJob, fault: KubernetesFault) -> Row:
    """Let it train, break it, and say what came of it."""
    row: Row = {"wrong": ["no first step"]}
    if job.first(lambda e: e.kind == "first_step", fault.start_timeout) is None:
        return row
    job.until_joined(fault.pods)
    job.until_step(_BEFORE)
    wrong = _find_other_users(job)
    before = job.events()[-1].id
    began = time.time()
    job.step_before = job.step()
    verdict = repeated = None
    with Steps(job) as steps:
        injected = fault.strike(job)
        if fault.verdicts:
            verdict, repeated = recovery(job, fault.verdicts, began, before)
    row = {"node": injected.node, "verdict": verdict.kind if verdict else None}
    row |= phases(job, injected.at, verdict, repeated, steps)
    job.first(lambda e: e.kind == "job_done")
    row["code"] = job.end()
    row["actions"] = [e.action for e in job.events() if e.kind == "recovery_action"]
    row["attempts"] = job.attempts()
    if injected.work is not None:
        injected.work.join()
    row["wrong"] = wrong + injected.wrong + fault.check(job, injected) + _bad(row, fault)
    if not job.witness.trainers():
        row["wrong"].append("no trainer was seen, so that two trainers of a rank would not be seen either")
    return row


def _find_other_users(job: KubernetesJob) -> list[str]:
    """Return a sentence per node where agents or trainers do not run as the image's user."""
    user = str(read_image_layout().user)
    wrong = []
    count = 0
    for node in job.site.nodes.values():
        lines = [line.split(maxsplit=1) for line in node.run("ps", "-eo", "uid,args").splitlines()]
        users = {uid for uid, command in lines if "-m megascale.resilience.agent" in command}
        count += len(users)
        if users - {user}:
            wrong.append(f"{node.name}: agents run as users {', '.join(sorted(users))} instead of {user}")
    return wrong if count else ["no agent was seen"]


def _bad(row: Row, fault: KubernetesFault) -> list[str]:
    """Return the errors that count for every fault."""
    wrong = [f"none of {', '.join(fault.verdicts)} came"] if fault.verdicts and row["verdict"] is None else []
    wrong += ["trainers started again"] if fault.ends == "ride" and row["attempts"] > 1 else []
    wrong += ["trainers did not start again"] if fault.ends == "recover" and row["attempts"] < 2 else []
    return wrong + ([f"exit code {row['code']}"] if row["code"] else [])


def _stopped(job: KubernetesJob, fault: KubernetesFault) -> Row:
    """It must end by itself, with the verdict and another exit code than 0, and without one step."""
    began = time.time()
    verdict = job.first(lambda e: e.kind in fault.verdicts)
    code = job.end()
    row: Row = {"verdict": verdict.kind if verdict else None, "code": code, "attempts": job.attempts()}
    row["detect"] = verdict.time - began if verdict else None
    row["wrong"] = [] if verdict else [f"none of {', '.join(fault.verdicts)} came"]
    row["wrong"] += ["the job did not end by itself"] if code == -1 else []
    row["wrong"] += ["exit code 0"] if code == 0 else []
    row["wrong"] += fault.check(job, Injected(began))
    return row


def _write_evidence(row: Row, job: KubernetesJob, folder: Path) -> None:
    """Return evidence for a person: events, the driver's output, logs of the run folder, events of the cluster."""
    report = [f"{e.time:.2f} {e.kind} {e.action} {' '.join(e.nodes)}: {e.evidence}"[:400] for e in job.events()]
    row["events"], row["said"] = report, job.driver_output()[-1500:]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "driver.out").write_text(job.driver_output())
    (folder / "events").write_text("\n".join(report))
    observed = (
        f"{s.born} rank {s.rank} pid {s.pid}: {s.first:.2f} to {s.last:.2f}, step {s.step}"
        for s in job.witness.trainers()
    )
    (folder / "trainers").write_text("\n".join(observed))
    with contextlib.suppress(Exception):
        (folder / "cluster").write_text(job.kubectl("get", "events,pods", "-o", "wide"))
    with contextlib.suppress(OSError):
        shutil.copytree(job.run / "logs", folder / "logs", dirs_exist_ok=True)
