"""One run of `python -m tests.chaos kubernetes`: train, break, look at what follows, compare weights."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.launched import Launched, Steps, make, phases, recovery
from tests.chaos.kubernetes.faults import FAULTS, Injected, KubernetesFault
from tests.chaos.kubernetes.job import DriverPodJob, KubernetesJob
from tests.chaos.kubernetes.site import KubernetesSite

# The same on nodes of one machine, for comparison: kind of this bench -> fault (resilience/faults/inject.py). The end
# of a process is seen at once, a node that falls silent only after resilience.window.
LOCAL = {"one-machine": "kill-node", "one-machine-cut": "partition"}
PACE = 0.1  # least seconds of a step
_BEFORE = 20  # steps before the fault


def one_of(
    site: KubernetesSite, file: Path, fault: KubernetesFault, kind: str, name: str, folder: Path
) -> dict[str, Any]:
    """One fault on the cluster; see kubernetes_bench.one."""
    row: dict[str, Any] = {"kind": kind, "name": name, "verdict": None, "lost": None, "wrong": ["it did not start"]}
    calm = _calm(folder, fault.steps) if fault.ends != "stop" else {}
    kind_of_job = DriverPodJob if fault.driver_pod else KubernetesJob
    job = kind_of_job(site, file, name, [f"--train.steps={fault.steps}", *fault.words], PACE)
    try:
        try:
            row |= _stopped(job, fault) if fault.ends == "stop" else _strike(job, fault)
        except Exception as error:  # what did not come in time, or a job that broke: that is the result
            row["wrong"] = [f"{type(error).__name__}: {error}"[:600]]
        row["doubles"] = job.witness.doubles()
        if fault.ends == "stop":
            row["same"] = None
            row["right"] = not row["wrong"]
        else:
            row["same"] = row.get("code") == 0 and _same(job.weights(), calm)
            lost = row["lost"] is None or row["lost"] <= fault.lost
            row["right"] = bool(row["same"] and lost and not row["wrong"] and not row["doubles"])
        if not row["right"]:
            _tell(row, job, folder / name)
    finally:
        job.close()
        site.repair()
    return row


def one_local(file: Path, kind: str, name: str, folder: Path) -> dict[str, Any]:
    """The same without a cluster: a node is lost, and the spare takes over."""
    from megascale.resilience.faults.inject import Options, inject

    count = FAULTS["pod-deleted"].steps
    calm = _calm(folder, count)
    words = [f"--train.steps={count}", "--resilience.test_spares=false"]
    job = Launched(file, name, words, PACE, own_network=kind == "one-machine-cut")
    row: dict[str, Any] = {"kind": kind, "name": name, "verdict": None, "lost": None, "wrong": [], "doubles": []}
    try:
        while job.first(lambda e: e.kind == "first_step") and job.step() < _BEFORE:
            time.sleep(0.02)
        injected, before = time.time(), job.events()[-1].id
        with Steps(job) as steps:
            inject(job.run, LOCAL[kind], Options(node="n1"))
            verdict, again = recovery(job, FAULTS["node-off"].verdicts, injected, before)
        row |= phases(job, injected, verdict, again, steps)
        row |= {"code": job.end(), "verdict": verdict.kind if verdict else None}
        row["actions"] = [e.action for e in job.events() if e.kind == "recovery_action"]
    finally:
        job.end(0.0 if "code" not in row else 10.0)
    row["same"] = row["code"] == 0 and _same(job.weights(), calm)
    row["right"] = bool(row["same"] and (row["lost"] is None or row["lost"] <= 1))
    return row


def _strike(job: KubernetesJob, fault: KubernetesFault) -> dict[str, Any]:
    """Let it train, break it, and say what came of it."""
    row: dict[str, Any] = {"wrong": ["no first step"]}
    if job.first(lambda e: e.kind == "first_step") is None:
        return row
    job.until_joined(fault.pods)
    job.until_step(_BEFORE)
    before, began, job.step_before = job.events()[-1].id, time.time(), job.step()
    verdict = again = None
    with Steps(job) as steps:
        injected = fault.strike(job)
        if fault.verdicts:
            verdict, again = recovery(job, fault.verdicts, began, before)
    row = {"node": injected.node, "verdict": verdict.kind if verdict else None}
    row |= phases(job, injected.at, verdict, again, steps)
    job.first(lambda e: e.kind == "job_done")
    row["code"] = job.end()
    row["actions"] = [e.action for e in job.events() if e.kind == "recovery_action"]
    row["attempts"] = job.attempts()
    if injected.work is not None:
        injected.work.join()
    row["wrong"] = injected.wrong + fault.check(job, injected) + _bad(row, fault)
    return row


def _bad(row: dict[str, Any], fault: KubernetesFault) -> list[str]:
    """What is wrong whatever the fault was."""
    wrong = [f"none of {', '.join(fault.verdicts)} came"] if fault.verdicts and row["verdict"] is None else []
    wrong += ["trainers started again"] if fault.ends == "ride" and row["attempts"] > 1 else []
    wrong += ["trainers did not start again"] if fault.ends == "recover" and row["attempts"] < 2 else []
    return wrong + ([f"exit code {row['code']}"] if row["code"] else [])


def _stopped(job: KubernetesJob, fault: KubernetesFault) -> dict[str, Any]:
    """It must end by itself, with the verdict and another exit code than 0, and without one step."""
    began = time.time()
    verdict = job.first(lambda e: e.kind in fault.verdicts)
    code = job.end()
    row: dict[str, Any] = {"verdict": verdict.kind if verdict else None, "code": code, "attempts": job.attempts()}
    row["detect"] = verdict.time - began if verdict else None
    row["wrong"] = [] if verdict else [f"none of {', '.join(fault.verdicts)} came"]
    row["wrong"] += ["the job did not end by itself"] if code == -1 else []
    row["wrong"] += ["exit code 0"] if code == 0 else []
    row["wrong"] += fault.check(job, Injected(began))
    return row


# weights --------------------------------------------------------------------------------------------------------------


def _calm(folder: Path, steps: int) -> dict[str, Any]:
    """The weights of an undisturbed run of so many steps: trained once and kept."""
    import torch

    from megascale.errors import TrainingError

    kept, work = folder / f"calm-{steps}.pt", folder / "calm"
    if not kept.exists():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        job = Launched(make(work), f"calm-{steps}", [f"--train.steps={steps}", "--resilience.spares=0"], pace=0.001)
        if code := job.end():
            raise TrainingError(f"the undisturbed run ended with {code}: {job.output.read_text()[-2000:]}")
        torch.save(job.weights(), kept.with_suffix(".tmp"))
        kept.with_suffix(".tmp").replace(kept)
        shutil.rmtree(work, ignore_errors=True)
    weights: dict[str, Any] = torch.load(kept, weights_only=True)
    return weights


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    import torch

    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def _tell(row: dict[str, Any], job: KubernetesJob, folder: Path) -> None:
    """What a person needs to see why: events, what the driver said, the run folder's logs, the cluster's events."""
    told = [f"{e.time:.2f} {e.kind} {e.action} {' '.join(e.nodes)}: {e.evidence}"[:400] for e in job.events()]
    row["events"], row["said"] = told, job.said()[-1500:]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "driver.out").write_text(job.said())
    (folder / "events").write_text("\n".join(told))
    seen = (
        f"{s.born} rank {s.rank} pid {s.pid}: {s.first:.2f} to {s.last:.2f}, step {s.step}"
        for s in job.witness.trainers()
    )
    (folder / "trainers").write_text("\n".join(seen))
    with contextlib.suppress(Exception):
        (folder / "cluster").write_text(job.kubectl("get", "events,pods", "-o", "wide"))
    with contextlib.suppress(OSError):
        shutil.copytree(job.run / "logs", folder / "logs", dirs_exist_ok=True)
