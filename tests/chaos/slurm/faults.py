"""Kinds of fault of the site `slurm`: what Slurm or its administrator does to a job, and what must follow."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from megascale.errors import TrainingError
from tests.chaos.machines.network import wait
from tests.chaos.slurm.job import SlurmJob

_AGENT = "resilience.agent.main"
_TRAINED = 20  # steps that training goes on where it is to go on


@dataclass
class Injected:
    """Injected fault.

    Attributes:
        at: when Slurm or the node did it, seconds since 1970: detection counts from there.
        node: to which node, "" for none.
        wrong: what was not as it should be, in words.
        seen: when anything of the job's agent was last seen on the node, while somebody looks.
    """

    at: float
    node: str = ""
    wrong: list[str] = field(default_factory=list)
    seen: float = 0.0


def other(job: SlurmJob) -> str:
    """The node of rank 1, moved from the batch node."""
    batch = job.batch_node()
    return next(node for node in (job.holder(1), job.holder(0)) if node != batch)


def set_down(job: SlurmJob) -> Injected:
    """Set a node down as an administrator does: Slurm kills its processes, and the job continues without it."""
    node, at = other(job), time.time()
    job.site.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
    return Injected(at, node)


def set_down_in_container(job: SlurmJob) -> Injected:
    """The same with agents and trainers in containers."""
    outside = [line for node in job.site.names for line in job.processes_outside_container(node)]
    injected = set_down(job)
    if outside:
        injected.wrong.append(f"not in the container: {'; '.join(outside)[:300]}")
    return injected


def kill_slurmd(job: SlurmJob) -> Injected:
    """The node's daemon only: its task runs on, and Slurm takes the node away once it has been silent for long."""
    return _without_slurmd(job, other(job))


def kill_batch_slurmd(job: SlurmJob) -> Injected:
    """The same on the node of the driver, which another one takes over from."""
    return _without_slurmd(job, job.batch_node())


def return_batch_slurmd(job: SlurmJob) -> Injected:
    """The same, and slurmd is back as soon as Slurm has taken the node, when the driver is at work on its loss: all
    that the job has there is killed."""
    injected = _without_slurmd(job, job.batch_node())
    job.site.start_slurmd(injected.node)
    return injected


def return_later(job: SlurmJob) -> Injected:
    """The same, and slurmd is back once the job has a driver elsewhere and trains."""
    injected = _without_slurmd(job, job.batch_node())
    _await_driver(job)
    job.until_step(job.step() + _TRAINED)
    job.site.start_slurmd(injected.node)
    return injected


def lose_batch_node(job: SlurmJob) -> Injected:
    """The driver's node loses its power."""
    injected = Injected(time.time(), job.batch_node())
    job.site.power_off(injected.node)
    job.site.until_state([injected.node], "down", seconds=120.0)
    injected.at = time.time()
    return injected


def _await_driver(job: SlurmJob) -> None:
    if job.first(lambda e: e.kind == "driver_took_over", 120.0) is None:
        raise TrainingError("no driver took the job over")


def _without_slurmd(job: SlurmJob, node: str) -> Injected:
    injected = Injected(time.time(), node)
    job.site.kill(node)
    threading.Thread(target=_look, args=(job, injected), daemon=True).start()
    job.site.until_state([node], "down", seconds=120.0)
    injected.at = time.time()
    return injected


def _look(job: SlurmJob, injected: Injected) -> None:
    """Note again and again that an agent or trainer is there, until none is: then none comes again by itself."""
    while any(_AGENT in line or "fork_server" in line for line in job.processes(injected.node)):
        injected.seen = time.time()
        time.sleep(0.05)


def drain(job: SlurmJob) -> Injected:
    """Training goes on there; when the agent ends later, the node gets no ranks again."""
    node, started = other(job), _attempts(job)
    job.site.slurm("scontrol", "update", f"nodename={node}", "state=drain", "reason=fan")
    report = job.first(lambda e: e.kind == "node_cordoned" and e.nodes == (node,), 60.0)
    job.until_step(job.step() + _TRAINED)
    injected = Injected(time.time(), node)
    if report is None or "fan" not in report.evidence[0]:
        injected.wrong.append(f"the drain was not noticed with its reason: {report}")
    if _attempts(job) != started:
        injected.wrong.append("training did not go on undisturbed when its node was drained")
    arguments = job.site.machines[node].inside(["pkill", f"-{signal.SIGKILL}", "-f", _AGENT])
    subprocess.run(arguments, check=True)
    return injected


def restart_controller(job: SlurmJob) -> Injected:
    """slurmctld is killed, away for a while, and started again."""
    at = time.time()
    job.site.kill("slurmctld")
    job.until_step(job.step() + _TRAINED)
    job.site.start_controller()
    wait(job.jobs, "the controller")
    job.until_step(job.step() + _TRAINED)
    return Injected(at)


def requeue(job: SlurmJob) -> Injected:
    """Slurm ends the job and starts it again: two minutes later, or when somebody says now."""
    at = time.time()
    job.site.slurm("scontrol", "requeue", job.id)
    wait(lambda: "PENDING" in job.jobs().values(), "the job to be requeued", 60.0)
    job.site.slurm("scontrol", "update", f"jobid={job.id}", "StartTime=now")
    return Injected(at)


def reach_limit(job: SlurmJob) -> Injected:
    """The signal before the time limit comes now; the job has itself requeued, and starts when somebody says now."""
    at = time.time()
    job.site.slurm("scancel", "--batch", "--signal=USR1", job.id)
    wait(lambda: "PENDING" in job.jobs().values(), "the job to be requeued", 60.0)
    job.site.slurm("scontrol", "update", f"jobid={job.id}", "StartTime=now")
    return Injected(at)


def nothing(job: SlurmJob) -> Injected:
    """The time limit comes by itself."""
    return Injected(time.time())


def cancel(job: SlurmJob) -> Injected:
    """scancel; and, once nothing of the job is left, the same job again."""
    injected = Injected(time.time())
    job.site.slurm("scancel", job.id)
    job.site.until_state(job.site.names, "idle")
    if job.jobs()[job.id] != "CANCELLED":
        injected.wrong.append(f"the job is {job.jobs()[job.id]} after scancel")
    for node in job.site.names:
        remaining = job.processes(node)
        if remaining:
            injected.wrong.append(f"on {node} is left: {'; '.join(remaining)[:300]}")
    job.submit()
    return injected


def _attempts(job: SlurmJob) -> int:
    return sum(e.kind == "attempt_started" for e in job.events())


# What must be so in the end; each says what was not.


def replaced(job: SlurmJob, injected: Injected) -> list[str]:
    """The node has no ranks any more, and the allocation was the same one."""
    last = next(e for e in reversed(job.events()) if e.kind == "attempt_started")
    wrong = [f"{injected.node} has got ranks again"] if injected.node in last.nodes else []
    return wrong + ([] if len(job.jobs()) == 1 else [f"several jobs: {job.jobs()}"])


def fenced(job: SlurmJob, injected: Injected) -> list[str]:
    """Nothing of the killed slurmd's task was there when its replacement did its first step."""
    repeated = next(e for e in reversed(job.events()) if e.kind == "first_step")
    late = injected.seen - repeated.time
    wrong = [] if injected.seen else ["no orphan was seen: nothing was tested"]
    wrong += [f"the orphan was there for {late:.1f} s beside its replacement"] if late > 0 else []
    return replaced(job, injected) + wrong


def moved(job: SlurmJob, injected: Injected) -> list[str]:
    """A driver on another node has gone on, once, and the ranks of the lost one were replaced."""
    overs = sum(e.kind == "driver_took_over" for e in job.events())
    return replaced(job, injected) + ([] if overs == 1 else [f"drivers that took over: {overs}"])


def fenced_and_moved(job: SlurmJob, injected: Injected) -> list[str]:
    """Both."""
    return fenced(job, injected) + moved(job, injected)


def one_job(job: SlurmJob, injected: Injected) -> list[str]:
    """No other job was submitted."""
    return [] if len(job.jobs()) == 1 else [f"several jobs: {job.jobs()}"]


def next_job(job: SlurmJob, injected: Injected) -> list[str]:
    """Another job went on."""
    return [] if len(job.jobs()) > 1 else ["no further job was submitted"]


def any_job(job: SlurmJob, injected: Injected) -> list[str]:
    """Accept any job."""
    return []


@dataclass(frozen=True)
class SlurmFault:
    """One kind of fault and what is right.

    Attributes:
        strike: does it.
        check: what was wrong in the end.
        verdicts: events of which one must come after it; empty: none.
        ends: recover: trainers start again; next: the job saves, and goes on when Slurm starts it again; ride: training
            goes on without.
        steps: of the run; lost: steps that may be done twice, as each is copied to a peer.
        sbatch: further options.
        settings: further settings of the job.
        in_container: whether agents and trainers run in a container.
    """

    strike: Callable[[SlurmJob], Injected]
    check: Callable[[SlurmJob, Injected], list[str]]
    verdicts: tuple[str, ...]
    ends: Literal["recover", "next", "ride"] = "recover"
    steps: int = 150
    lost: int = 1
    sbatch: str = ""
    settings: tuple[str, ...] = ()
    in_container: bool = False


_LOST = ("missed_heartbeat", "process_exit", "node_lost")
_SAVED = ("job_interrupted",)
FAULTS: dict[str, SlurmFault] = {
    "node-down": SlurmFault(set_down, replaced, _LOST),
    "node-down-in-container": SlurmFault(set_down_in_container, replaced, _LOST, in_container=True),
    "slurmd-killed": SlurmFault(kill_slurmd, fenced, ("node_lost",), steps=450),
    "batch-slurmd-killed": SlurmFault(kill_batch_slurmd, fenced_and_moved, ("node_lost",), steps=450),
    "batch-slurmd-returns": SlurmFault(return_batch_slurmd, moved, _LOST, steps=450),
    "batch-slurmd-returns-later": SlurmFault(return_later, fenced_and_moved, ("node_lost",), steps=450),
    "batch-node-gone": SlurmFault(lose_batch_node, moved, _LOST, steps=450),
    "drain": SlurmFault(drain, replaced, _LOST + ("agent_restarted",)),
    "requeue": SlurmFault(requeue, one_job, _SAVED, "next", lost=0),
    "time-limit": SlurmFault(nothing, next_job, _SAVED, "next", 1000, 0, "--time=4 --signal=B:USR1@120"),
    "time-limit-requeued": SlurmFault(
        reach_limit, one_job, _SAVED, "next", lost=0, settings=("--slurm.resubmission=requeue", "--slurm.time=10")
    ),
    "scancel": SlurmFault(cancel, any_job, _SAVED, "next", lost=0),
    "controller-restarted": SlurmFault(restart_controller, one_job, (), "ride"),
}
