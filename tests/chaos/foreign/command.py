"""`python -m tests.chaos foreign`: trainers without MegaScale under the driver, broken with real faults.

A right result has the verdict of its fault, names the rank, and ends with the expected exit code.
"""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from megascale.errors import ConfigError
from tests.chaos.foreign.job import LAST_STEP, TRAINERS, ForeignJob
from tests.chaos.foreign.slurm_job import SlurmForeignJob
from tests.chaos.slurm.site import SlurmSite, impossible

FAULT_STEP = 18  # as in trainers/injected.py
SLOW_STEPS = 110  # a slow rank is judged by 15 s of heartbeats
SLURM_NODES = 5


@dataclass(frozen=True)
class Case:
    """A fault.

    Attributes:
        fault: argument of the trainer.
        verdict: event that the driver must record.
        sentence: part of its evidence.
        exit_code: of the job.
        steps: number of steps of the run.
        needs_gpus: the fault exists on GPUs only.
    """

    fault: str
    verdict: str
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
    "node gone": Case("none", "node_lost"),
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
        slurm: a running Slurm, or None for this machine.
        gpus: GPUs of one node, with a rank each; 0: several nodes with a rank each, on gloo.
    """

    slurm: SlurmSite | None = None
    gpus: int = 0

    def start(self, trainer: str, case: Case, folder: Path, rank: int) -> ForeignJob:
        """Start a job."""
        if self.slurm is not None:
            return SlurmForeignJob(self.slurm, folder, trainer, case.fault, rank, case.steps)
        if self.gpus:
            options = ["--train.device=cuda", f"--per-node={self.gpus}"]
            return ForeignJob(folder, trainer, case.fault, rank, case.steps, nodes=1, options=options)
        return ForeignJob(folder, trainer, case.fault, rank, case.steps)

    def can_run(self, trainer: str, name: str) -> bool:
        """Return whether a trainer and a fault are possible here."""
        if self.gpus:
            return trainer == "ddp" and name != "node gone"  # the other scripts are on gloo
        return not CASES[name].needs_gpus


@contextmanager
def open_site(name: str, gpus: int) -> Iterator[Site]:
    """Open a site. Raise ConfigError if it is impossible here."""
    if name == "local":
        yield Site(gpus=gpus)
        return
    problem = impossible()
    if problem or gpus:
        raise ConfigError(f"--site slurm is impossible: {problem or 'it runs on CPU'}")
    with temporary_folder("ms-") as folder, SlurmSite(Path(folder) / "s", SLURM_NODES) as slurm:
        yield Site(slurm)


def run_case(site: Site, trainer: str, name: str, folder: Path, rank: int) -> Outcome:
    """Launch a trainer, break it and compare the driver's verdict with the fault."""
    case = CASES[name]
    start = 0.0
    node = ""
    job = site.start(trainer, case, folder, rank)
    try:
        job.wait(lambda: job.step() >= 1, "the first step")
        if name == "slow rank":
            start = time.time()
        elif name == "node gone":
            job.wait(lambda: job.step() >= FAULT_STEP, f"step {FAULT_STEP}")
            start = time.time()
            node = job.lose_node(rank)
        last_time = wait_for_verdict(job, case.verdict)
        code = job.finish()
    except (RuntimeError, subprocess.SubprocessError) as error:
        return Outcome(trainer, name, rank, False, 0.0, str(error)[-1500:])
    finally:
        job.close()
    verdicts = job.events(case.verdict)
    if not verdicts:
        return Outcome(trainer, name, rank, False, 0.0, job.read_output()[-1500:])
    verdict = verdicts[0]
    seconds = verdict.time - (start or last_time)
    evidence = " | ".join(verdict.evidence)
    is_named = verdict.nodes == (node,) if node else verdict.ranks == (rank,)
    is_right = is_named and case.sentence in evidence and code == case.exit_code
    return Outcome(trainer, name, rank, is_right, seconds, f"ranks {verdict.ranks}, exit code {code}: {evidence}")


def wait_for_verdict(job: ForeignJob, kind: str) -> float:
    """Wait for the first event of a kind or the end of the job, and return the time of the last step before it."""
    last_step = 0
    last_time = time.time()

    def is_done() -> bool:
        nonlocal last_step, last_time
        step = job.step()
        if job.events(kind):
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
    site_name: Literal["local", "slurm"] = typer.Option("local", "--site", help="This machine, or a Slurm on it."),
    gpus: int = typer.Option(0, "--gpus", min=0, help="Run the DDP script on NCCL, on so many GPUs of this machine."),
    seed: int = typer.Option(0, "--seed", help="Determines the ranks."),
    out: Path = typer.Option(None, "--out", help="Write the outcomes as JSON.", show_default=False),
) -> None:
    """Break trainers that do not know MegaScale, and check each verdict, the named rank and the end of the job."""
    generator = random.Random(seed)
    outcomes = []
    with open_site(site_name, gpus) as site:
        names = [name for name in CASES if kind in name]
        pairs = [(key, name) for key in TRAINERS for name in names if trainer in ("", key) and site.can_run(key, name)]
        for key, name in pairs:
            for _ in range(runs):
                rank = generator.randrange(gpus or TRAINERS[key].nodes)
                with temporary_folder("ms-foreign-") as folder:
                    outcome = run_case(site, key, name, Path(folder), rank)
                outcomes.append(outcome)
                print_outcome(outcome)
    print_table(outcomes)
    if out is not None:
        out.write_text(strict_json.dumps([asdict(outcome) for outcome in outcomes]))
    if not outcomes or not all(outcome.is_right for outcome in outcomes):
        raise typer.Exit(1)


def print_outcome(outcome: Outcome) -> None:
    """Print one outcome, with the whole evidence of a wrong one."""
    word = "right" if outcome.is_right else "WRONG"
    subject = f"{word}  {outcome.trainer:12} {outcome.case:26} rank {outcome.rank}  {outcome.seconds:5.1f} s"
    typer.echo(f"{subject}  {outcome.verdict[:160]}")
    if not outcome.is_right:
        typer.echo(outcome.verdict)


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
