"""Programs that ranks run: the trainer of this package, or the command of a foreign trainer.

A program makes the order with which the fork server starts a rank, and reads the progress of the rank's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megascale.config import ForeignConfig
from megascale.core import strict_json
from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.core.secrets import REPLICA_VARIABLE
from megascale.core.status import PARKED, UNOBSERVED, StartReport, read_status
from megascale.core.untrusted_files import open_regular
from megascale.errors import DataError
from megascale.observe.hang.evidence import ask_for_flight
from megascale.observe.hang.flight import read_flight
from megascale.resilience.agent.file_tails import LogTail
from megascale.resilience.agent.progress_patterns import BAR, ProgressReader, Reading
from megascale.resilience.agent.saved_checkpoints import SavedCheckpoints
from megascale.resilience.protocol.agent_messages import Start
from megascale.resilience.protocol.fork_messages import Fork
from megascale.resilience.protocol.heartbeat import TAIL_CHARACTERS, truncate

COUNT_INTERVAL = 30.0  # seconds between counts of a rank's collectives, because each count takes milliseconds
# Folder of the module that Python imports at the start of a foreign trainer's ranks.
SITE_FOLDER = Path(__file__).parent / "site"


class Progress(NamedTuple):
    """Fields of a status record that change while a trainer makes progress (see megascale.core.status)."""

    phase: str = ""
    step: int = 0
    action: str = ""
    microbatch: int = -1
    message: str = ""
    time_ns: int = 0
    completed_steps: int = 0


@dataclass
class TrainerProcess:
    """Process of one rank. Times are of time.monotonic() unless the name ends in `_ns`.

    Attributes:
        log_start: offset in the log where the output of this attempt begins.
        pid: process id, or 0 before the fork.
        status: wait status, or None while the process runs.
        progress: newest status record, or None before the first.
        progress_time: time of the last change of the progress.
        first_step: first step of this attempt, or -1 before it.
        checksum: newest checksum of weights as "STEP:VALUE", or an empty text.
        compute_seconds: compute time of the last step.
        start: progress of the rank's start, or None before the rank reports it.
        attempt_start_ns: start of this attempt in a process of an earlier one (time.time_ns()). Older status records
            belong to the earlier attempt.
        exit_reason: reason why the rank ended its process after a fault of another rank, instead of waiting for the
            next attempt; otherwise an empty text. The status file calls it `doubt`.
        replacement_reason: reason why the process before this one was replaced, although its rank had no fault.
        record, error: fault and exception that ended the process.
        ended: time of the end.
        by_agent: whether the process ended, or will end, because of a signal of the agent.
        tail: text to report instead of the end of the log, for a process that wrote no log.
    """

    rank: int
    log: Path
    log_start: int
    pid: int = 0
    status: int | None = None
    progress: Progress | None = None
    progress_time: float = 0.0
    first_step: int = -1
    checksum: str = ""
    compute_seconds: float = 0.0
    start: StartReport | None = None
    attempt_start_ns: int = 0
    exit_reason: str = ""
    replacement_reason: str = ""
    record: ExitRecord = NO_RECORD
    error: str = ""
    ended: float = 0.0
    by_agent: bool = False
    tail: str = ""

    @property
    def is_parked(self) -> bool:
        """Return whether the rank has left its attempt and its process waits for the next one."""
        return self.status is None and self.progress is not None and self.progress.phase == PARKED

    def end(self, status: int, **fields: Any) -> None:
        """Record the end of the process with its wait status, and set further attributes."""
        self.status = status
        self.ended = time.monotonic()
        for name, value in fields.items():
            setattr(self, name, value)

    def advance(self, progress: Progress) -> None:
        """Store the progress and, if it has changed, the time."""
        if progress == self.progress:
            return
        self.progress = progress
        self.progress_time = time.monotonic()
        if progress.phase == "train" and self.first_step < 0:
            self.first_step = progress.step - progress.completed_steps

    def read_tail(self) -> str:
        """Return the end of the output that this attempt wrote into the rank's log."""
        try:
            with open(self.log, "rb", opener=open_regular) as file:
                size = file.seek(0, os.SEEK_END)
                start = self.log_start if self.log_start <= size else 0  # 0 if a rotation has emptied the log
                file.seek(max(start, size - TAIL_CHARACTERS))
                text = file.read(TAIL_CHARACTERS).decode(errors="replace")
        except OSError:
            return ""
        return truncate(text, TAIL_CHARACTERS)


class RankProgram(ABC):
    """Program that ranks run.

    Attributes:
        modules: modules that the fork server imports before the first order. Functions, given as MODULE:FUNCTION, are
            called when the server is idle.
    """

    modules: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def prepare(self, order: Start) -> None:
        """Write the files that the ranks of a start order read. Called before any of them starts."""

    @abstractmethod
    def make_fork(self, rank: int, attempt: int, environment: Mapping[str, str], log: Path) -> Fork:
        """Return the order to the fork server that starts a rank."""

    @abstractmethod
    def read_progress(self, trainer: TrainerProcess) -> None:
        """Update the progress of a rank from its files."""

    def writes_metrics(self, ranks: Collection[int]) -> bool:
        """Return whether the node with these ranks writes metrics.jsonl of the run."""
        return 0 in ranks

    def find_saved_step(self) -> int:
        """Return the step of the newest complete checkpoint, or 0 if it is unknown."""
        return 0

    def close(self) -> None:  # noqa: B027 - most programs have nothing to close
        """Stop threads that observe the ranks."""

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a rank's process. Raises ProcessLookupError if it has ended."""
        os.kill(pid, number)


class MegascaleTrainer(RankProgram):
    """Trainer of this package. It is forked with its modules imported, and its status files show its progress.

    Args:
        run: folder to which trainers write.
        settings: file that receives the configuration.
        shared: whether `run` is the run folder of the settings. Otherwise trainers get an option that sets it.
        keeps_processes: whether ranks without a fault stay in their processes after a failed attempt.
    """

    # Modules are given by name, because this package must not import the trainer.
    modules = (
        "megascale.cli.main",
        "megascale.cli.train",
        "megascale.api",
        "rich.table",
        "megascale.train.loop",
        "megascale.train.rank_info",
        "megascale.ops.launch:warm_up_forks",
    )

    def __init__(self, run: Path, settings: Path, shared: bool, keeps_processes: bool = False) -> None:
        self._keeps_processes = keeps_processes
        self._run = run
        self._settings = settings
        self._shared = shared
        self._arguments: tuple[str, ...] = ()

    def prepare(self, order: Start) -> None:
        """Write the configuration and the run's identity."""
        if not self._shared and order.identity:
            # Checkpoints outside the run folder have this identity as their owner. A node that gets rank 0 for the
            # first time lacks the file.
            (self._run / "identity").write_text(order.identity + "\n")
        self._settings.write_text(order.settings, encoding="utf-8")
        arguments = ["train", str(self._settings)]
        if not self._shared:
            arguments.append(f"--train.runs={self._run.parent}")
        self._arguments = tuple(arguments) + tuple(order.words)

    def make_fork(self, rank: int, attempt: int, environment: Mapping[str, str], log: Path) -> Fork:
        """Return the order to fork a rank of `megascale train`."""
        return Fork(rank, attempt, dict(environment), self._arguments, str(log), is_reused=self._keeps_processes)

    def read_progress(self, trainer: TrainerProcess) -> None:
        """Read the status file of a rank."""
        status = read_status(self._run / "status" / f"rank-{trainer.rank}.status")
        if status is None or status.pid != trainer.pid or status.time_ns < trainer.attempt_start_ns:
            return
        trainer.advance(
            Progress(status.phase, status.step, status.action, status.microbatch, status.message, status.time_ns)
        )
        if status.exit is not None:
            trainer.record = status.exit  # has the rank at fault, which the record of the exception may lack
        trainer.checksum = status.checksum
        trainer.start = status.start
        trainer.exit_reason = status.doubt
        trainer.compute_seconds = status.compute_seconds


@dataclass
class CallCount:
    """Number of collectives that a rank has started, from its newest flight record.

    Attributes:
        total: number of collectives, or 0 before the first record.
        request_time: time of the last request for a record (time.monotonic()).
    """

    total: int = 0
    request_time: float = 0.0

    def update(self, rank: int, status: Path, flight: Path) -> None:
        """Every COUNT_INTERVAL seconds, read the record that was requested last and request the next one."""
        current_time = time.monotonic()
        if current_time - self.request_time < COUNT_INTERVAL:
            return
        self.request_time = current_time
        with contextlib.suppress(OSError, DataError):
            groups = read_flight(flight / f"rank-{rank}.json").record.groups
            self.total = sum(counts.started for counts in groups.values())
        ask_for_flight(status, rank)


@dataclass
class ObservedRank:
    """Log of a rank in one attempt, and the progress that the log shows.

    Attributes:
        tail: reader of the log.
        calls: counter of the rank's collectives.
        other_bar_lines: number of lines of progress bars other than the training's.
        step_count: number of steps of the training's progress bar, which is the first one, or None before it.
        first_step: first complete step, or None before it.
    """

    tail: LogTail
    calls: CallCount
    other_bar_lines: int = 0
    step_count: int | None = None
    first_step: int | None = None

    def read(self, lines: Sequence[str], reader: ProgressReader) -> list[Reading]:
        """Return the readings of training steps in new lines, and count lines of other progress bars."""
        step_readings = []
        for line in lines:
            reading = reader.read(line)
            if reading is not None and self.step_count is None:
                self.step_count = reading.total
            if reading is not None and reading.total in (None, self.step_count):
                step_readings.append(reading)
            elif BAR.search(line[:4000]):
                self.other_bar_lines += 1
        return step_readings

    def make_progress(self, first_step: int, step: int, time_ns: int = 0) -> Progress:
        """Return the progress of a rank whose new readings are of the steps `first_step` to `step`."""
        if self.first_step is None:
            self.first_step = max(1, first_step)  # a progress bar shows 0 before the first step
        completed_steps = max(0, step - self.first_step + 1)
        return Progress("train", step, self.describe_bars(), time_ns=time_ns, completed_steps=completed_steps)

    def describe_bars(self) -> str:
        """Return the count of lines of other progress bars as the rank's action, or an empty text if there are none."""
        return f"{self.other_bar_lines} states of other progress bars" if self.other_bar_lines else ""


class ForeignProgram(RankProgram):
    """Command of a foreign trainer, with the environment variables of torchrun.

    Progress is read from the lines of the rank's log, or from the status file that `megascale.watch` writes. A rank
    with neither is unobserved. Its progress is then the size of its log and the number of its collectives.

    Args:
        run: run folder on this node.
        foreign: section `foreign` of the configuration.
        max_restarts: number of starts without a new step after which the driver ends the job.
    """

    def __init__(self, run: Path, foreign: ForeignConfig, max_restarts: int) -> None:
        self._foreign = foreign
        self._max_restarts = max_restarts
        self._status = run / "status"
        self._flight = run / "flight"
        self._reader = ProgressReader(foreign.patterns)
        self._metrics = MetricsWriter(run / "metrics.jsonl")
        self._last_rank = 0
        self._has_metrics = False
        self._environment: dict[str, str] = {}
        self._ranks: dict[int, ObservedRank] = {}
        self._checkpoints: SavedCheckpoints | None = None

    def prepare(self, order: Start) -> None:
        """Make the folders for status files and flight records, and remove files of an earlier attempt's processes."""
        for folder in (self._status, self._flight):
            folder.mkdir(exist_ok=True)
        for rank in order.ranks:
            files = [self._flight / f"nccl_trace_rank_{rank}"]
            files += self._status.glob(f"rank-{rank}.*")
            files += self._flight.glob(f"rank-{rank}.*")
            for file in files:
                file.unlink(missing_ok=True)
        if self._foreign.checkpoints and 0 in order.ranks:
            self._checkpoints = SavedCheckpoints(self._foreign.folder, self._foreign.checkpoints)
        self._last_rank = order.world - 1
        self._environment = self._make_environment(order)

    def _make_environment(self, order: Start) -> dict[str, str]:
        """Return torchrun's variables, and variables for the diagnosis unless the user has set them."""
        diagnosis_variables = {
            # The next two are one variable: its name since torch 2.9, and its earlier name.
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # Without it, the flight record lacks the durations of calls, and whether the device has reached a call.
            "TORCH_NCCL_ENABLE_TIMING": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(self._flight / "nccl_trace_rank_"),
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(self._status / "nccl-"),
            "PYTHONUNBUFFERED": "1",
        }
        if len(order.ranks) > 1:
            # As torchrun, so that the threads of several ranks do not share cores.
            diagnosis_variables["OMP_NUM_THREADS"] = "1"
        variables = {name: value for name, value in diagnosis_variables.items() if name not in os.environ}
        paths = [str(SITE_FOLDER), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        variables |= {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "MEGASCALE_STATUS": str(self._status),
            "MEGASCALE_FLIGHT": str(self._flight),
            "GROUP_RANK": str(order.ranks[0] // len(order.ranks)),
            "GROUP_WORLD_SIZE": str(order.world // len(order.ranks)),
            "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": str(order.world),
            "TORCHELASTIC_RESTART_COUNT": str(order.attempt - 1),
            "TORCHELASTIC_MAX_RESTARTS": str(self._max_restarts),
            "TORCHELASTIC_RUN_ID": order.job,
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store at MASTER_PORT
        }
        return variables

    def make_fork(self, rank: int, attempt: int, environment: Mapping[str, str], log: Path) -> Fork:
        """Return the order to the fork server to execute the command as a rank."""
        log_start = log.stat().st_size if log.exists() else 0
        self._ranks[rank] = ObservedRank(LogTail(log, log_start), CallCount(request_time=time.monotonic()))
        variables = self._environment | dict(environment) | {"ROLE_RANK": str(rank)}
        del variables[REPLICA_VARIABLE]  # a secret of checkpoint services, which this program does not have
        return Fork(
            rank=rank,
            attempt=attempt,
            env=variables,
            arguments=tuple(self._foreign.command),
            log=str(log),
            executes=True,
            folder=self._foreign.folder,
        )

    def writes_metrics(self, ranks: Collection[int]) -> bool:
        """Return whether a rank of this node has printed metrics, which the agent then writes."""
        return self._has_metrics

    def find_saved_step(self) -> int:
        """Return the step of the newest complete checkpoint, or 0 on nodes without rank 0 or if it is unknown."""
        return self._checkpoints.step if self._checkpoints is not None else 0

    def close(self) -> None:
        """Stop the thread that searches for checkpoints."""
        if self._checkpoints is not None:
            self._checkpoints.stop()

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to the rank's process group, because the command may be a script that started the trainer."""
        os.killpg(pid, number)

    def read_progress(self, trainer: TrainerProcess) -> None:
        """Update the progress from new lines of a rank's log, or from the status file of `megascale.watch`."""
        observed_rank = self._ranks[trainer.rank]
        lines = observed_rank.tail.read_lines(at_carriage_returns=True)
        readings = observed_rank.read(lines, self._reader)
        status = read_status(self._status / f"rank-{trainer.rank}.status")
        if status is not None:
            trainer.compute_seconds = status.compute_seconds
            trainer.advance(observed_rank.make_progress(status.step, status.step, status.time_ns))
        elif readings:
            trainer.advance(observed_rank.make_progress(readings[0].step, readings[-1].step))
        elif trainer.progress is not None and trainer.progress.phase == "train":
            trainer.advance(trainer.progress._replace(action=observed_rank.describe_bars()))
        elif trainer.progress is None or trainer.progress.phase == UNOBSERVED:
            observed_rank.calls.update(trainer.rank, self._status, self._flight)
            action = f"{observed_rank.tail.size} bytes of output, {observed_rank.calls.total} collectives"
            problems = self._reader.describe_problems()
            if problems:
                action += f"; {problems}"
            trainer.advance(Progress(UNOBSERVED, 0, action=action))
        self._write_metrics(trainer.rank, readings)

    def _write_metrics(self, rank: int, readings: Sequence[Reading]) -> None:
        """Write metrics from readings of the one rank that prints them: the last rank or rank 0."""
        printed_readings = []
        for reading in readings:
            printing_rank = self._last_rank if reading.is_last_rank else 0
            if rank == printing_rank:
                printed_readings.append(reading)
        if printed_readings:
            self._has_metrics = True
            self._metrics.write(printed_readings)


class MetricsWriter:
    """Writer of metrics.jsonl for one attempt of a trainer that does not write the file.

    A resumed trainer repeats steps, so the first step of an attempt removes earlier records of that step and later
    ones. A step that is lower than the step before does the same, because the trainer has returned to a checkpoint.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last: tuple[int, float] | None = None  # last step, and when it was read (time.monotonic())

    def write(self, readings: Sequence[Reading]) -> None:
        """Append the records of steps that were read together. They share the mean step time since the last call."""
        current_time = time.monotonic()
        step_seconds: float | None = None
        previous_step = -1
        lowest_step = min(reading.step for reading in readings)
        if self._last is not None:
            previous_step, previous_time = self._last
            if readings[-1].step > previous_step:
                step_seconds = (current_time - previous_time) / (readings[-1].step - previous_step)
        if self._last is None or lowest_step < previous_step:
            self._remove_from(lowest_step)
        new_readings: list[Reading] = []
        for reading in readings:
            if reading.step < previous_step:  # the trainer has returned to a checkpoint
                new_readings = [earlier for earlier in new_readings if earlier.step < reading.step]
            if reading.step != previous_step:  # a second line of a step is left out
                new_readings.append(reading)
            previous_step = reading.step
        lines = [_format_record(reading, step_seconds) for reading in new_readings]
        self._last = (previous_step, current_time)
        with contextlib.suppress(OSError), open(self._file, "a") as file:
            file.writelines(lines)

    def _remove_from(self, step: int) -> None:
        """Remove the records of `step` and later steps, and an incomplete last record."""
        try:
            lines = self._file.read_bytes().splitlines(keepends=True)
        except OSError:
            return
        # Records are sorted by step, so the loop parses only the last ones. Parsing all records of a long run would
        # delay heartbeats.
        while lines and not 0 <= _read_step(lines[-1]) < step:
            lines.pop()
        temporary = self._file.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            temporary.write_bytes(b"".join(lines))
            os.replace(temporary, self._file)


def _format_record(reading: Reading, seconds: float | None) -> str:
    record: dict[str, float | int | None] = {
        "step": reading.step,
        "time": time.time(),
        "loss": reading.loss,
        "grad_norm": reading.grad_norm,
        "tokens_per_second": reading.tokens_per_second,
        "seconds": seconds,
    }
    return strict_json.dumps({name: value for name, value in record.items() if value is not None}) + "\n"


def _read_step(line: bytes) -> int:
    """Return the step of a record, or -1 if the record is damaged."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
