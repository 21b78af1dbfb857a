"""Runs of `benchmarks targets`: the choice of the next job and its GPUs, the processes, and the file of results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.training_runs import LAST_LINES
from benchmarks.targets.cases import TargetCase
from megascale.core import strict_json
from megascale.core.terminal import termination_signals
from megascale.errors import ConfigError

GRACE_PERIOD = 10.0  # seconds between the termination signal and SIGKILL
POLL_INTERVAL = 0.1  # seconds between two checks for ended processes
BENCHMARKS = (sys.executable, "-m", "benchmarks")


@dataclass(frozen=True)
class TargetJob:
    """A run to make.

    Attributes:
        case: what to run.
        repeat: index of the repeat, from 0.
        replicas: number of data-parallel replicas.
        seconds: expected duration.
    """

    case: TargetCase
    repeat: int
    replicas: int
    seconds: float

    @property
    def gpus(self) -> int:
        """Return the number of GPUs."""
        return self.case.gpus * self.replicas


@dataclass
class TargetRun:
    """A run that has ended.

    Attributes:
        key: TargetCase.make_key of the case at that time.
        replicas: number of data-parallel replicas.
        command: the shell command of the same run.
        seconds: duration from start to end.
        report: JSON that the benchmark wrote, or None after a failure.
        failure: reason and last lines of output after a failure, else empty.
    """

    key: str
    replicas: int
    command: str
    seconds: float
    report: dict[str, Any] | None = None
    failure: list[str] = field(default_factory=list)


class ResultFile:
    """The JSON file of runs, written after each run.

    Args:
        file: path. An existing file is read.
        gpus: number of GPUs of this call, from which the sizes of the cases follow.

    Raises ConfigError if the file holds something else, or runs on another number of GPUs.
    """

    def __init__(self, file: Path, gpus: int) -> None:
        self.file = file
        self.gpus = gpus
        self._cases: dict[str, dict[int, TargetRun]] = {}
        if not file.exists():
            return
        try:
            tree = json.loads(file.read_text())
            file_gpus = int(tree["gpus"])
            for name, runs in tree["cases"].items():
                self._cases[name] = {int(repeat): _decode_run(run) for repeat, run in runs.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ConfigError(
                f"--out={file} exists and is not a result file of this benchmark; name another file"
            ) from None
        if file_gpus != gpus:
            raise ConfigError(
                f"--out={file} holds runs on {file_gpus} GPUs, but this call has {gpus}, where cases have other sizes; "
                f"name another file, or give --gpus={file_gpus} on a machine with that many"
            )

    def get_runs(self, case: TargetCase, replicas: int | None) -> dict[int, TargetRun]:
        """Return the runs of the case by repeat. Runs of an earlier version of the case are left out."""
        if replicas is None:
            return {}
        key = case.make_key(replicas)
        runs = self._cases.get(case.name, {})
        return {repeat: run for repeat, run in sorted(runs.items()) if run.key == key}

    def has_outdated_run(self, case: TargetCase, replicas: int) -> bool:
        """Return whether the file holds a run of this name with other arguments."""
        key = case.make_key(replicas)
        return any(run.key != key for run in self._cases.get(case.name, {}).values())

    def save(self, job: TargetJob, run: TargetRun) -> None:
        """Add a run, remove outdated runs of its case, and replace the file atomically."""
        self._cases[job.case.name] = self.get_runs(job.case, job.replicas) | {job.repeat: run}
        cases = {}
        for name, runs in self._cases.items():
            cases[name] = {str(repeat): _encode_run(run) for repeat, run in runs.items()}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.file.with_name(f".{self.file.name}.part")
        unfinished.write_text(strict_json.dumps({"gpus": self.gpus, "cases": cases}, indent=1) + "\n")
        os.replace(unfinished, self.file)


# `megascale simulate calibrate --run` reads these files too (simulate/measured_runs.py). If the key `told` is renamed
# here, it must change as well, and both must read the files of earlier releases.
def _encode_run(run: TargetRun) -> dict[str, Any]:
    return {
        "key": run.key,
        "replicas": run.replicas,
        "command": run.command,
        "seconds": run.seconds,
        "told": run.report,
        "failed": run.failure,
    }


def _decode_run(tree: Mapping[str, Any]) -> TargetRun:
    """Return the run of an entry of the file. Raises KeyError for an incomplete entry."""
    return TargetRun(
        key=tree["key"],
        replicas=tree["replicas"],
        command=tree["command"],
        seconds=tree["seconds"],
        report=tree["told"],
        failure=tree["failed"],
    )


def list_remaining_jobs(cases: Sequence[TargetCase], results: ResultFile, repeats: int) -> list[TargetJob]:
    """Return the jobs without a report, in the order of their starts. Failed runs are repeated.

    The repeats follow each other, and every second one has the cases in reverse order. Cases that need more GPUs than
    there are have no jobs.
    """
    jobs = []
    for repeat in range(repeats):
        ordered_cases = list(cases)
        if repeat % 2 == 1:
            ordered_cases.reverse()
        for case in ordered_cases:
            replicas = case.count_replicas(results.gpus)
            if replicas is None:
                continue
            runs = results.get_runs(case, replicas)
            if repeat in runs and runs[repeat].report is not None:
                continue
            durations = [run.seconds for run in runs.values() if run.report is not None]
            seconds = max(durations, default=case.seconds)
            jobs.append(TargetJob(case, repeat, replicas=replicas, seconds=seconds))
    return jobs


def choose_next_job(
    waiting: Sequence[TargetJob], free_gpus: int, *, is_host_free: bool, remaining_seconds: float
) -> TargetJob | None:
    """Return the first waiting job that can start now, or None.

    Its GPUs are free, or it runs on the CPU and no other job does, and it is expected to end in `remaining_seconds`.
    Jobs of a repeat start only after all jobs of the repeat before have started. So a large job, which smaller ones
    overtake, waits for at most the rest of its repeat.
    """
    timely = [job for job in waiting if job.seconds <= remaining_seconds]
    repeat = min((job.repeat for job in timely), default=0)
    for job in timely:
        if job.repeat != repeat:
            continue
        if job.gpus == 0:
            can_start = is_host_free
        else:
            can_start = job.gpus <= free_gpus
        if can_start:
            return job
    return None


@dataclass
class _RunningJob:
    job: TargetJob
    gpus: list[str]
    start: float
    folder: Path
    process: subprocess.Popen[bytes]


class _JobRunner:
    """Starts jobs on GPUs of their own and collects the runs that have ended."""

    def __init__(
        self,
        jobs: Sequence[TargetJob],
        gpus: Sequence[str],
        folder: Path,
        *,
        program: Sequence[str],
        is_sequential: bool,
    ) -> None:
        self.running: list[_RunningJob] = []
        self._waiting = list(jobs)
        self._gpus = gpus
        self._free_gpus = list(gpus)
        self._folder = folder
        self._program = program
        self._is_sequential = is_sequential

    def start_jobs(self, remaining_seconds: float) -> None:
        """Start the jobs whose GPUs are free and which end in `remaining_seconds`."""
        while not (self._is_sequential and self.running):
            job = choose_next_job(
                self._waiting,
                len(self._free_gpus),
                is_host_free=all(item.gpus for item in self.running),
                remaining_seconds=remaining_seconds,
            )
            if job is None:
                return
            self._waiting.remove(job)
            gpus = self._free_gpus[: job.gpus]
            self._free_gpus = self._free_gpus[job.gpus :]
            self.running.append(_start(job, gpus, self._folder, self._program))

    def collect_ended(self) -> Iterator[tuple[TargetJob, TargetRun]]:
        """Yield the jobs that have ended, and their runs. After a failure the other jobs of the case do not start."""
        ended = [item for item in self.running if item.process.poll() is not None]
        for item in ended:
            self.running.remove(item)
            # Keep the order of the GPUs, so that a job of several GPUs gets neighbours.
            self._free_gpus = [gpu for gpu in self._gpus if gpu in self._free_gpus or gpu in item.gpus]
            run = _read_run(item)
            if run.report is None:
                self._waiting = [job for job in self._waiting if job.case is not item.job.case]
            yield item.job, run


def run_jobs(
    jobs: Sequence[TargetJob],
    gpus: Sequence[str],
    deadline: float,
    save: Callable[[TargetJob, TargetRun], None],
    *,
    is_sequential: bool = False,
    program: Sequence[str] = BENCHMARKS,
) -> None:
    """Run the jobs side by side on GPUs of their own, and end those that still run at the deadline.

    After a failure the other jobs of the case are left out. An interruption ends all processes and is raised again.

    Args:
        jobs: in the order of their starts.
        gpus: names of the GPUs, as in CUDA_VISIBLE_DEVICES.
        deadline: value of time.monotonic, in seconds.
        save: called with each job that has ended by itself, and its run.
        is_sequential: whether a job starts only after the previous one has ended.
        program: command that receives the arguments of a case.
    """
    from rich.progress import Progress

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, Progress(transient=True) as progress:
        task = progress.add_task("", total=len(jobs))
        runner = _JobRunner(jobs, gpus, Path(folder), program=program, is_sequential=is_sequential)
        try:
            runner.start_jobs(deadline - time.monotonic())
            while runner.running and time.monotonic() < deadline:
                progress.update(task, description=", ".join(item.job.case.name for item in runner.running))
                time.sleep(POLL_INTERVAL)
                for job, run in runner.collect_ended():
                    save(job, run)
                    progress.advance(task)
                    progress.console.print(_describe_end(job, run), highlight=False)
                runner.start_jobs(deadline - time.monotonic())
        finally:
            _end([item.process for item in runner.running])


def _describe_end(job: TargetJob, run: TargetRun) -> str:
    outcome = "failed after" if run.report is None else "done in"
    return f"{job.case.name}, repeat {job.repeat + 1}: {outcome} {run.seconds:.0f} s"


def _start(job: TargetJob, gpus: list[str], folder: Path, program: Sequence[str]) -> _RunningJob:
    from megascale.train.launcher import die_with_parent

    job_folder = folder / f"{job.case.name}-{job.repeat}"
    job_folder.mkdir()
    command = [*program, *job.case.list_arguments(job.replicas)]
    command += [f"--train.runs={job_folder}", f"--out={job_folder / 'report.json'}"]
    variables = os.environ | {"COLUMNS": "120"} | job.case.environment | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    with open(job_folder / "output.log", "wb") as log:
        # A new session keeps Ctrl-C at the terminal from the process. This process ends it instead.
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    return _RunningJob(job, gpus, start=time.monotonic(), folder=job_folder, process=process)


def _read_run(ended: _RunningJob) -> TargetRun:
    """Return the run of a job whose process has ended."""
    job = ended.job
    run = TargetRun(
        key=job.case.make_key(job.replicas),
        replicas=job.replicas,
        command=job.case.format_command(job.replicas),
        seconds=round(time.monotonic() - ended.start, 1),
    )
    try:
        if ended.process.returncode == 0:
            report = json.loads((ended.folder / "report.json").read_text())
            run.report = _remove_details(report)
            return run
        reason = f"exit code {ended.process.returncode}"
    except (OSError, ValueError) as error:
        reason = f"the benchmark wrote no report: {error}"
    output = (ended.folder / "output.log").read_text(errors="replace").strip().splitlines()
    run.failure = [reason] + output[-LAST_LINES:]
    return run


def _remove_details(report: dict[str, Any]) -> dict[str, Any]:
    """Return the report without its traces, which are large, and without the run folder, which is temporary."""
    for rank in report.get("ranks", []):
        rank.pop("stretches", None)
    report.get("settings", {}).get("train", {}).pop("runs", None)
    return report


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate benchmarks and their ranks, and kill those that run on after GRACE_PERIOD.

    Termination signals are ignored meanwhile, because `timeout` sends each of them twice.
    """
    from megascale.train.launcher import end_processes

    if not processes:
        return
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in termination_signals()}
    try:
        end_processes(processes, GRACE_PERIOD)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
