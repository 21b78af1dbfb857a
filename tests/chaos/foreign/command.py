"""`python -m tests.chaos foreign`: trainers without MegaScale under the driver, broken with real faults.

A right result has the verdict of its fault, names the rank, and ends with the expected exit code.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from megascale.errors import ConfigError
from megascale.resilience.driver.state.journal_reader import Entry
from tests.chaos.foreign.job import LAST_STEP, TRAINERS, ForeignJob
from tests.chaos.foreign.kubernetes_job import KubernetesForeignJob
from tests.chaos.foreign.slurm_job import SlurmForeignJob
from tests.chaos.kubernetes import site as kubernetes
from tests.chaos.kubernetes.site import KubernetesSite
from tests.chaos.slurm import site as slurm
from tests.chaos.slurm.site import SlurmSite

FAULT_STEP = 18  # as in trainers/injected.py
SHORT_TIMEOUT = 60.0  # seconds; a job whose verdict does not come must not keep GPUs
SLOW_STEPS = 110  # a slow rank is judged by 15 s of heartbeats
CLUSTER_NODES = 5  # three with ranks, a spare, and one that replaces it


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        fault: argument of the trainer.
        verdict: event that the driver must record, or several events of which one is right.
        sentence: part of its evidence.
        exit_code: of the job.
        steps: number of steps of the run.
        needs_gpus: the fault exists on GPUs only.
    """

    fault: str
    verdict: str | tuple[str, ...]
    sentence: str = ""
    exit_code: int = 0
    steps: int = LAST_STEP
    needs_gpus: bool = False


CASES = {
    "kill": Case("kill", "process_killed", "SIGKILL"),
    "hang: skipped collective": Case("skip", "hang", "mismatched collective"),
    "hang: stopped before it": Case("sleep", "hang", "break_rank"),
    "hang: loop in Python": Case("loop", "hang", "break_rank"),
    "hang: kernel without end": Case("kernel", "hang", "busy", needs_gpus=True),
    "crash loop": Case("raise", "user_error", "KeyError", exit_code=1),
    "out of memory": Case("memory", "out_of_memory", "CUDA out of memory"),
    "node gone": Case("none", ("node_lost", "missed_heartbeat")),  # the latter if the machine says nothing more
    "slow rank": Case("slow", "slow_node", "computes", steps=SLOW_STEPS),
}


@dataclass(frozen=True)
class Outcome:
    """The result of one run.

    Attributes:
        trainer: the trainer.
        case: the fault.
        rank: where it was injected.
        is_right: verdict, rank and exit code are the expected ones.
        seconds: from the last step to the verdict; from the loss of a node; from the first step of a slow rank.
        verdict: the decisive evidence, or the end of the output.
    """

    trainer: str
    case: str
    rank: int
    is_right: bool
    seconds: float
    verdict: str


@dataclass(frozen=True)
class Site:
    """A site for jobs.

    Attributes:
        cluster: a running Slurm or Kubernetes, or None for this machine.
        gpus: GPUs of one node, with a rank each; 0: several nodes with a rank each, on gloo.
        is_short: a job is ended at its verdict, so that restart and exit code are not checked.
    """

    cluster: SlurmSite | KubernetesSite | None = None
    gpus: int = 0
    is_short: bool = False

    def start(self, trainer: str, case: Case, folder: Path, rank: int) -> ForeignJob:
        """Start a job."""
        if isinstance(self.cluster, SlurmSite):
            return SlurmForeignJob(self.cluster, folder, trainer, case.fault, rank, case.steps)
        if isinstance(self.cluster, KubernetesSite):
            return KubernetesForeignJob(self.cluster, folder, trainer, case.fault, rank, case.steps)
        if self.gpus:
            options = ["--train.device=cuda", f"--per-node={self.gpus}"]
            return ForeignJob(folder, trainer, case.fault, rank, case.steps, nodes=1, options=options)
        return ForeignJob(folder, trainer, case.fault, rank, case.steps)

    def can_run(self, trainer: str, name: str) -> bool:
        """Return whether a trainer and a fault are possible here."""
        if self.gpus:
            return TRAINERS[trainer].has_gpus and name != "node gone"
        return not CASES[name].needs_gpus


@contextmanager
def open_site(name: str, gpus: int = 0, is_short: bool = False) -> Iterator[Site]:
    """Open a site. Raise ConfigError if it is impossible here."""
    if name == "local":
        yield Site(gpus=gpus, is_short=is_short)
        return
    problem = slurm.impossible() if name == "slurm" else kubernetes.impossible()
    if problem or gpus:
        raise ConfigError(f"--site {name} is impossible: {problem or 'it runs on CPU'}")
    with temporary_folder("ms-") as folder:
        path = Path(folder) / "s"
        cluster = SlurmSite(path, CLUSTER_NODES) if name == "slurm" else KubernetesSite(path, CLUSTER_NODES, gpus=1)
        with cluster:
            yield Site(cluster, is_short=is_short)


def run_case(site: Site, trainer: str, name: str, folder: Path, rank: int) -> Outcome:
    """Launch a trainer, break it and compare the driver's verdict with the fault."""
    case = CASES[name]
    start = 0.0
    node = ""
    job = site.start(trainer, case, folder, rank)
    if site.is_short:
        job.timeout = SHORT_TIMEOUT
    try:
        job.wait(lambda: job.step() >= 1, "the first step")
        if name == "slow rank":
            start = time.time()
        elif name == "node gone":
            job.wait(lambda: job.step() >= FAULT_STEP, f"step {FAULT_STEP}")
            start = time.time()
            node = job.lose_node(rank)
        last_time = wait_for_verdict(job, case)
        code = case.exit_code if site.is_short else job.finish()
    except (RuntimeError, subprocess.SubprocessError) as error:
        return Outcome(trainer, name, rank, False, 0.0, str(error)[-1500:])
    finally:
        output = job.read_output()
        job.close()
    verdicts = find_verdicts(job, case)
    if not verdicts:
        return Outcome(trainer, name, rank, False, 0.0, output[-1500:])
    verdict = verdicts[0]
    seconds = verdict.time - (start or last_time)
    ending = "ended at the verdict" if site.is_short else f"exit code {code}"
    evidence = " | ".join(verdict.evidence)
    is_named = verdict.nodes == (node,) if node else verdict.ranks == (rank,)
    is_right = is_named and case.sentence in evidence and code == case.exit_code
    return Outcome(trainer, name, rank, is_right, seconds, f"ranks {verdict.ranks}, {ending}: {evidence}")


def find_verdicts(job: ForeignJob, case: Case) -> list[Entry]:
    """Return the events of a job that are the verdict of a fault. An alert of a pause, such as a save, is not one."""
    kinds = (case.verdict,) if isinstance(case.verdict, str) else case.verdict
    return [event for event in job.events() if event.kind in kinds and (event.kind, event.action) != ("hang", "alert")]


def wait_for_verdict(job: ForeignJob, case: Case) -> float:
    """Wait for the verdict of a fault or the end of the job, and return the time of the last step before it."""
    last_step = 0
    last_time = time.time()

    def is_done() -> bool:
        nonlocal last_step, last_time
        step = job.step()
        if find_verdicts(job, case):
            return True
        if step > last_step:
            last_step = step
            last_time = time.time()
        return job.is_over()

    job.wait(is_done, "a verdict")
    return last_time


def foreign(
    runs: int = typer.Option(5, "--runs", min=1, help="Runs per trainer and fault."),
    trainer: str = typer.Option("", "--trainer", help=f"Only this trainer: {', '.join(TRAINERS)}."),
    kind: str = typer.Option("", "--kind", help="Only the faults whose names contain this text."),
    site_name: Literal["local", "slurm", "kubernetes"] = typer.Option(
        "local", "--site", help="This machine, or a cluster on it."
    ),
    gpus: int = typer.Option(0, "--gpus", min=0, help="Run on NCCL, on so many GPUs of this machine (ddp, megatron)."),
    is_short: bool = typer.Option(
        False, "--until-verdict", help="End each job at its verdict: faster, without a check of restart and exit code."
    ),
    seed: int = typer.Option(0, "--seed", help="Determines the ranks."),
    resume: Path = typer.Option(
        None, "--resume", help="Append each outcome to this file, and skip the runs that it has.", show_default=False
    ),
    out: Path = typer.Option(None, "--out", help="Write the outcomes as JSON.", show_default=False),
) -> None:
    """Break trainers that do not know MegaScale, and check each verdict, the named rank and the end of the job.

    Example: python -m tests.chaos foreign --trainer ddp --kind kill --runs 1
    """
    if trainer and trainer not in TRAINERS:
        raise ConfigError(f"--trainer={trainer} is unknown; choose among: {', '.join(TRAINERS)}")
    if not any(kind in name for name in CASES):
        raise ConfigError(f"--kind={kind} is in no name of a fault; choose a part of: {', '.join(CASES)}")
    outcomes = read_outcomes(resume)
    done = Counter((outcome.trainer, outcome.case) for outcome in outcomes)
    with open_site(site_name, gpus, is_short) as site:
        names = [name for name in CASES if kind in name]
        trainers = [key for key in TRAINERS if trainer in ("", key) and is_installed(key)]
        pairs = [(key, name) for key in trainers for name in names if site.can_run(key, name)]
        # All pairs run once before any runs again, so that an interrupted campaign has a whole table.
        for run in range(runs):
            for key, name in pairs:
                if run < done[key, name]:
                    continue
                rank = random.Random(f"{seed} {key} {name} {run}").randrange(gpus or TRAINERS[key].nodes)
                with temporary_folder("ms-foreign-") as folder:
                    outcome = run_case(site, key, name, Path(folder), rank)
                outcomes.append(outcome)
                print_outcome(outcome)
                append_outcome(resume, outcome)
    print_table(outcomes)
    if out is not None:
        out.write_text(strict_json.dumps([asdict(outcome) for outcome in outcomes]))
    if not outcomes or not all(outcome.is_right for outcome in outcomes):
        raise typer.Exit(1)


def is_installed(trainer: str) -> bool:
    """Return whether the package of a trainer is installed. If not, print that the trainer is skipped."""
    package = TRAINERS[trainer].package
    try:
        installed = not package or importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package that contains it
        installed = False
    if not installed:
        print(f"skipped  {trainer}: the package {package} is not installed", flush=True)
    return installed


def read_outcomes(file: Path | None) -> list[Outcome]:
    """Return the outcomes of an interrupted campaign, [] without its file."""
    if file is None or not file.exists():
        return []
    return [Outcome(**json.loads(line)) for line in file.read_text().splitlines()]


def append_outcome(file: Path | None, outcome: Outcome) -> None:
    """Append an outcome as a line of JSON."""
    if file is not None:
        with open(file, "a") as lines:
            lines.write(json.dumps(asdict(outcome)) + "\n")


def print_outcome(outcome: Outcome) -> None:
    """Print one outcome, with the whole evidence of a wrong one."""
    word = "right" if outcome.is_right else "WRONG"
    subject = f"{word}  {outcome.trainer:12} {outcome.case:26} rank {outcome.rank}  {outcome.seconds:5.1f} s"
    # A pipe would keep the lines of an interrupted campaign.
    print(f"{subject}  {outcome.verdict[:160]}", flush=True)
    if not outcome.is_right:
        print(outcome.verdict, flush=True)


def print_table(outcomes: list[Outcome]) -> None:
    """Print the number of right outcomes and the slowest verdict per trainer and fault."""
    for trainer, name in dict.fromkeys((outcome.trainer, outcome.case) for outcome in outcomes):
        of_case = [outcome for outcome in outcomes if (outcome.trainer, outcome.case) == (trainer, name)]
        right = sum(outcome.is_right for outcome in of_case)
        slowest = max(outcome.seconds for outcome in of_case)
        typer.echo(f"{trainer:12} {name:26} {right} of {len(of_case)} right, slowest verdict {slowest:.1f} s")


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(foreign)
