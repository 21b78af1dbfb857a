"""Runs of `benchmarks targets`: which starts next on which GPUs, the processes, and the file that keeps them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.training_runs import LAST_LINES
from benchmarks.targets.cases import TargetCase
from megascale.core import strict_json
from megascale.core.terminal import termination_signals
from megascale.errors import ConfigError

GRACE_PERIOD = 10.0  # seconds that a run has to end after the signal
BENCHMARKS = (sys.executable, "-m", "benchmarks")


@dataclass(frozen=True)
class TargetJob:
    """A run to make: `case` with so many replicas, for the repeat of that number."""

    case: TargetCase
    repeat: int
    replicas: int
    seconds: float  # that it is expected to take

    @property
    def gpus(self) -> int:
        """GPUs it takes."""
        return self.case.gpus * self.replicas


@dataclass
class TargetRun:
    """A run that was made.

    Attributes:
        key: Case.key of what was run.
        command: the same as a line to type.
        seconds: from its start to its end.
        told: what the bench wrote; None if it failed.
        failed: its last lines if it did.
    """

    key: str
    replicas: int
    command: str
    seconds: float
    told: dict[str, Any] | None = None
    failed: list[str] = field(default_factory=list)


class Record:
    """The file of runs, written anew after each."""

    def __init__(self, file: Path, gpus: int) -> None:
        """Reads `file` if it is there; ConfigError if it holds something else, or runs of another number of GPUs."""
        self.file, self.gpus = file, gpus
        self._cases: dict[str, dict[int, TargetRun]] = {}
        if not file.exists():
            return
        try:
            report = json.loads(file.read_text())
            present = int(report["gpus"])
            for name, runs in report["cases"].items():
                self._cases[name] = {int(repeat): TargetRun(**run) for repeat, run in runs.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(f"--out={file} is there and holds no figures of this bench; name another file") from None
        if present != gpus:
            raise ConfigError(
                f"--out={file} holds runs on a machine of {present} GPUs and this call has {gpus}: cases have other "
                f"sizes; name another file, or give --gpus={present} where so many are"
            )

    def runs(self, case: TargetCase, replicas: int | None) -> dict[int, TargetRun]:
        """Runs of a case as it is now, by repeat."""
        if replicas is None:
            key = None
        else:
            key = case.key(replicas)
        return {repeat: run for repeat, run in sorted(self._cases.get(case.name, {}).items()) if run.key == key}

    def has_other(self, case: TargetCase, replicas: int) -> bool:
        """Return whether the folder holds runs of this name with other arguments."""
        return any(run.key != case.key(replicas) for run in self._cases.get(case.name, {}).values())

    def keep(self, job: TargetJob, run: TargetRun) -> None:
        """Add a run and write the file, whole or not at all; runs of its case with other words go."""
        self._cases[job.case.name] = self.runs(job.case, job.replicas) | {job.repeat: run}
        report = {
            "gpus": self.gpus,
            "cases": {name: {str(n): asdict(r) for n, r in runs.items()} for name, runs in self._cases.items()},
        }
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_name(f".{self.file.name}.part")
        unfinished.write_text(strict_json.dumps(report, indent=1) + "\n")
        os.replace(unfinished, self.file)


def missing(cases: Iterable[TargetCase], record: Record, repeats: int) -> list[TargetJob]:
    """Return the runs that remain, repeat by repeat, every second repeat in reverse order. Failed runs are repeated."""
    jobs = []
    for repeat in range(repeats):
        if repeat % 2 == 0:
            ordered = list(cases)
        else:
            ordered = list(cases)[::-1]
        for case in ordered:
            replicas = case.replicas(record.gpus)
            if replicas is None:
                continue
            built = record.runs(case, replicas)
            if repeat in built and built[repeat].told is not None:
                continue
            duration = [run.seconds for run in built.values() if run.told is not None]
            jobs.append(TargetJob(case, repeat, replicas, max(duration) if duration else case.seconds))
    return jobs


def choose(waiting: Sequence[TargetJob], free: int, host: bool, remaining: float) -> TargetJob | None:
    """Which of the waiting runs starts now, if any.

    The first that `free` GPUs hold, one on the CPU only if the `host` is free, and whose time fits into the `left`
    seconds. Runs of a later repeat wait until all of the one before have started: so a large one, which smaller ones
    overtake, has its turn.
    """
    on_time = [job for job in waiting if job.seconds <= remaining]
    repeat = min((job.repeat for job in on_time), default=0)
    for job in on_time:
        if job.repeat == repeat and (host if job.gpus == 0 else job.gpus <= free):
            return job
    return None


@dataclass
class _Running:
    job: TargetJob
    gpus: list[str]
    began: float
    folder: Path
    process: subprocess.Popen[bytes]


def run_all(
    jobs: Sequence[TargetJob],
    gpus: Sequence[str],
    deadline: float,
    keep: Callable[[TargetJob, TargetRun], None],
    alone: bool = False,
    program: Sequence[str] = BENCHMARKS,
) -> None:
    """Make the runs, side by side on GPUs of their own, and end those that are not done at `until`.

    Args:
        gpus: names of the devices, as CUDA_VISIBLE_DEVICES has them.
        until: of time.monotonic.
        keep: told each run that has ended by itself.
        alone: one run at a time.
        program: what a case's words are given to.

    After a failure the case's other runs are left out. An interruption ends all runs and goes on to the caller.
    """
    from rich.progress import Progress

    waiting, free = list(jobs), list(gpus)
    running: list[_Running] = []
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Progress(transient=True) as progress:
        bar = progress.add_task("", total=len(jobs))
        try:
            while True:
                for item in [r for r in running if r.process.poll() is not None]:
                    running.remove(item)
                    free = [gpu for gpu in gpus if gpu in free or gpu in item.gpus]  # neighbours stay neighbours
                    run = _read(item)
                    keep(item.job, run)
                    if run.told is None:
                        waiting = [job for job in waiting if job.case is not item.job.case]
                    progress.advance(bar)
                    became = "done" if run.told is not None else "failed"
                    progress.console.print(
                        f"{item.job.case.name}, repeat {item.job.repeat + 1}: {became} in {run.seconds:.0f} s",
                        highlight=False,
                    )
                remaining = deadline - time.monotonic()
                while not (alone and running):
                    host = all(r.gpus for r in running)
                    job = choose(waiting, len(free), host, remaining)
                    if job is None:
                        break
                    waiting.remove(job)
                    used, free = free[: job.gpus], free[job.gpus :]
                    running.append(_start(job, used, Path(folder), program))
                if not running or remaining <= 0:
                    return
                progress.update(bar, description=", ".join(r.job.case.name for r in running))
                time.sleep(0.1)
        finally:
            _end([r.process for r in running])


def _start(job: TargetJob, gpus: list[str], folder: Path, program: Sequence[str]) -> _Running:
    from megascale.train.launcher import die_with_parent

    local = folder / f"{job.case.name}-{job.repeat}"
    local.mkdir()
    command = list(program) + job.case.words(job.replicas) + [f"--train.runs={local}", f"--out={local / 'told.json'}"]
    variables = os.environ | {"COLUMNS": "120"} | job.case.environment | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with open(local / "output.log", "wb") as log:
        # A Ctrl-C at the terminal is for this process alone, which tells its runs.
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return _Running(job, gpus, time.monotonic(), local, process)


def _read(single: _Running) -> TargetRun:
    """Return the result of a run that has ended."""
    job = single.job
    run = TargetRun(
        job.case.key(job.replicas), job.replicas, job.case.line(job.replicas), round(time.monotonic() - single.began, 1)
    )
    try:
        if single.process.returncode == 0:
            run.told = _slim(json.loads((single.folder / "told.json").read_text()))
            return run
        why = f"exit code {single.process.returncode}"
    except (OSError, ValueError) as error:
        why = f"it left no figures: {error}"
    output = (single.folder / "output.log").read_text(errors="replace").strip().splitlines()
    run.failed = [why] + output[-LAST_LINES:]
    return run


def _slim(report: dict[str, Any]) -> dict[str, Any]:
    """Without what is large and what was only for this call."""
    for rank in report.get("ranks", []):
        rank.pop("stretches", None)
    report.get("settings", {}).get("train", {}).pop("runs", None)
    return report


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Tell runs to end, which end their ranks; those that do not hear are killed, and their ranks with them.

    A second interruption changes nothing meanwhile: `timeout` sends each twice.
    """
    from megascale.train.launcher import end_processes

    if not processes:
        return
    old = {number: signal.signal(number, signal.SIG_IGN) for number in termination_signals()}
    try:
        end_processes(processes, GRACE_PERIOD)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
