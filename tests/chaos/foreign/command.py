"""`python -m tests.chaos foreign`: trainers without MegaScale under the driver, broken with real faults.

A right result has the verdict of its fault, names the rank, and ends with the expected exit code.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from benchmarks.harness.temporary import temporary_folder
from megascale.core import strict_json
from megascale.resilience.driver.state.journal_reader import Entry, read_journal_events

FOLDER = Path(__file__).with_name("trainers")
TIMEOUT = 240.0  # seconds of a run
FAULT_STEP = 18  # as in trainers/injected.py
LAST_STEP = 40
SLOW_STEPS = 110  # a slow rank is judged by 15 s of heartbeats


@dataclass(frozen=True)
class Trainer:
    """A trainer of the folder `trainers`.

    Attributes:
        file: its script.
        nodes: number of nodes with one rank each.
        settings: settings of `megascale launch` for it.
    """

    file: str
    nodes: int = 3
    settings: tuple[str, ...] = ()


DDP_PATTERN = r"--foreign.patterns=['^iter (?P<step>[0-9]+), loss (?P<loss>[0-9.]+)']"
TRAINERS = {
    "ddp": Trainer("train_ddp.py", settings=(DDP_PATTERN,)),
    "fsdp": Trainer("train_fsdp.py"),
    "nanochat": Trainer("train_nanochat.py"),
    "huggingface": Trainer("train_huggingface.py", nodes=2),
    "lightning": Trainer("train_lightning.py", nodes=2),
}


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
    "kill": Case("none", "process_killed", "SIGKILL"),
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
        seconds: from the last step before the fault to the verdict.
        verdict: the decisive evidence, or the end of the output.
    """

    trainer: str
    case: str
    rank: int
    is_right: bool
    seconds: float
    verdict: str


class ForeignJob:
    """A launched job of a trainer in `folder`. `close` ends it.

    Args:
        folder: folder of the run and of the trainer's checkpoints.
        trainer: key of TRAINERS.
        fault, rank, steps: arguments of the trainer.
        nodes: number of nodes; default: the trainer's.
        options: further options of `megascale launch`.
    """

    def __init__(
        self,
        folder: Path,
        trainer: str,
        fault: str,
        rank: int,
        steps: int = LAST_STEP,
        nodes: int | None = None,
        options: Sequence[str] = ("--train.device=cpu", "--per-node=1", "--spares=1"),
    ) -> None:
        self.run = folder / "runs" / "foreign"
        self.output = folder / "output"
        kind = TRAINERS[trainer]
        command = [sys.executable, "-m", "megascale.cli.main", "launch", f"--nodes={nodes or kind.nodes}"]
        command += ["--train.name=foreign", "--resilience.test_spares=false", "--resilience.interval=0.3"]
        command += [*options, *kind.settings, "--"]
        command += [sys.executable, str(FOLDER / kind.file), str(steps), str(folder), fault, str(rank)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        with open(self.output, "wb") as out:
            self.process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=out)

    def wait(self, find: Callable[[], object], subject: str) -> None:
        """Wait until `find` returns a true value. Raise RuntimeError if the job ends first, or after TIMEOUT."""
        deadline = time.monotonic() + TIMEOUT
        while not find():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"{subject} did not come: {self.output.read_text()[-3000:]}")
            time.sleep(0.05)

    def events(self, kind: str = "") -> list[Entry]:
        """Return the events of a kind, or all."""
        if not (self.run / "journal.sqlite").exists():
            return []
        return [event for event in read_journal_events(self.run) if kind in ("", event.kind)]

    def step(self) -> int:
        """Return the last step in the run's metrics, 0 before the first."""
        try:
            lines = (self.run / "metrics.jsonl").read_text().splitlines()
            return int(json.loads(lines[-1])["step"])
        except (OSError, IndexError):
            return 0

    def kill_rank(self, rank: int) -> None:
        """Kill the process of a rank."""
        pid = int((self.run / "status" / f"rank-{rank}.process").read_text().split()[0])
        os.kill(pid, signal.SIGKILL)

    def lose_node(self, node: str) -> None:
        """Kill the agent of a node, and let no agent start there."""
        folder = self.run / "nodes" / node
        (folder / "down").touch()
        os.kill(json.loads((folder / "agent.json").read_text())["pid"], signal.SIGKILL)

    def finish(self) -> int:
        """Wait for the end and return the exit code."""
        return self.process.wait(TIMEOUT)

    def close(self) -> None:
        """End what still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def run_case(trainer: str, name: str, folder: Path, rank: int, gpus: int = 0) -> Outcome:
    """Launch a trainer, break it and compare the driver's verdict with the fault.

    Args:
        trainer, name: keys of TRAINERS and CASES.
        folder: empty folder of the run.
        rank: the rank to break.
        gpus: GPUs of one node, with a rank each; 0: several nodes with a rank each, on gloo.
    """
    case = CASES[name]
    if gpus:
        options = ["--train.device=cuda", f"--per-node={gpus}"]
        job = ForeignJob(folder, trainer, case.fault, rank, steps=case.steps, nodes=1, options=options)
    else:
        job = ForeignJob(folder, trainer, case.fault, rank, steps=case.steps)
    seconds = 0.0
    try:
        job.wait(lambda: job.step() >= FAULT_STEP - 2, f"step {FAULT_STEP - 2}")
        if name == "kill":
            job.kill_rank(rank)
        elif name == "node gone":
            job.lose_node(f"n{rank}")
        broken = time.time()
        job.wait(lambda: job.events(case.verdict) or job.process.poll() is not None, "a verdict")
        seconds = time.time() - broken
        code = job.finish()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Outcome(trainer, name, rank, False, seconds, str(error)[-1500:])
    finally:
        job.close()
    return judge(job, trainer, name, rank, seconds, code)


def judge(job: ForeignJob, trainer: str, name: str, rank: int, seconds: float, code: int) -> Outcome:
    """Compare the first verdict of an ended job with the fault."""
    case = CASES[name]
    verdicts = job.events(case.verdict)
    if not verdicts:
        return Outcome(trainer, name, rank, False, seconds, job.output.read_text()[-1500:])
    verdict = verdicts[0]
    evidence = " | ".join(verdict.evidence)
    names_rank = verdict.ranks == (rank,) or (name == "node gone" and verdict.nodes == (f"n{rank}",))
    is_right = names_rank and case.sentence in evidence and code == case.exit_code
    return Outcome(trainer, name, rank, is_right, seconds, f"ranks {verdict.ranks}, exit code {code}: {evidence}")


def foreign(
    runs: int = typer.Option(5, "--runs", min=1, help="Runs per trainer and fault."),
    trainer: str = typer.Option("", "--trainer", help=f"Only this trainer: {', '.join(TRAINERS)}."),
    kind: str = typer.Option("", "--kind", help="Only the faults whose names contain this text."),
    gpus: int = typer.Option(0, "--gpus", min=0, help="Run the DDP script on NCCL, on so many GPUs of this machine."),
    seed: int = typer.Option(0, "--seed", help="Determines the ranks."),
    out: Path = typer.Option(None, "--out", help="Write the outcomes as JSON.", show_default=False),
) -> None:
    """Break trainers that do not know MegaScale, and check each verdict, the named rank and the end of the job."""
    generator = random.Random(seed)
    outcomes = []
    if gpus:
        trainer = "ddp"  # the other scripts are on gloo
    names = [name for name in CASES if kind in name and is_possible(name, gpus)]
    for key, name in [(key, name) for key in TRAINERS for name in names if trainer in ("", key)]:
        for _ in range(runs):
            with temporary_folder("megascale-foreign-") as folder:
                outcome = run_case(key, name, Path(folder), generator.randrange(gpus or TRAINERS[key].nodes), gpus)
            outcomes.append(outcome)
            print_outcome(outcome)
    print_table(outcomes)
    if out is not None:
        out.write_text(strict_json.dumps([asdict(outcome) for outcome in outcomes]))
    if not outcomes or not all(outcome.is_right for outcome in outcomes):
        raise typer.Exit(1)


def is_possible(name: str, gpus: int) -> bool:
    """Return whether a fault can be injected on so many GPUs of one node."""
    if gpus:
        return name != "node gone"
    return not CASES[name].needs_gpus


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
