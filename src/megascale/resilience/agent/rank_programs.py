"""The programs that ranks run: this package's trainer, or another trainer's command.

A program makes the order by which the fork server starts a rank, and reads the progress of the rank's process.
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

COUNT_INTERVAL = 30.0  # seconds between counts of an unobserved rank's collectives, each of which takes milliseconds
# Folder of the module that Python imports at the start of another trainer's ranks.
SITE_FOLDER = Path(__file__).parent / "site"


class Progress(NamedTuple):
    """The fields of a status record that change while a trainer makes progress."""

    phase: str = ""
    step: int = 0
    action: str = ""
    microbatch: int = -1
    message: str = ""
    time_ns: int = 0
    completed_steps: int = 0


@dataclass
class TrainerProcess:
    """The process of one rank.

    Attributes:
        log_start: offset in the log where the output of this attempt begins.
        pid: process id, 0 before the fork.
        status: wait status, None while the process runs.
        progress: newest status record, None before the first.
        changed: time of its last change, on the monotonic clock.
        first_step: the first step of this attempt, -1 before it.
        checksum: "STEP:VALUE", the newest checksum of weights, or "".
        start: how far its start has come, None before it reports that.
        since_ns: when this attempt began in a kept process, on the wall clock; older status records do not count.
        doubt: why it did not stay in its process, "" if it did not try to.
        replacement_reason: why the process before it, which outlived a fault, was replaced.
        record, error: fault and exception that ended the process.
        ended: time of the end, on the monotonic clock.
        by_agent: the agent ended the process.
        tail: text that replaces the end of the log for a process that wrote none.
    """

    rank: int
    log: Path
    log_start: int
    pid: int = 0
    status: int | None = None
    progress: Progress | None = None
    changed: float = 0.0
    first_step: int = -1
    checksum: str = ""
    compute_seconds: float = 0.0
    start: StartReport | None = None
    since_ns: int = 0
    doubt: str = ""
    replacement_reason: str = ""
    record: ExitRecord = NO_RECORD
    error: str = ""
    ended: float = 0.0
    by_agent: bool = False
    tail: str = ""

    @property
    def is_parked(self) -> bool:
        """True if it has left its attempt and waits in its process for the next one."""
        return self.status is None and self.progress is not None and self.progress.phase == PARKED

    def end(self, status: int, **fields: Any) -> None:
        """Record the end of the process with its wait status and further fields."""
        self.status = status
        self.ended = time.monotonic()
        for name, value in fields.items():
            setattr(self, name, value)

    def advance(self, progress: Progress) -> None:
        """Store new progress and the time of its change."""
        if progress == self.progress:
            return
        self.progress = progress
        self.changed = time.monotonic()
        if progress.phase == "train" and self.first_step < 0:
            self.first_step = progress.step - progress.completed_steps

    def read_tail(self) -> str:
        """Return the end of the output that this attempt wrote into the rank's log."""
        try:
            with open(self.log, "rb", opener=open_regular) as file:
                size = file.seek(0, os.SEEK_END)
                start = self.log_start if self.log_start <= size else 0  # a rotation has emptied it
                file.seek(max(start, size - TAIL_CHARACTERS))
                text = file.read(TAIL_CHARACTERS).decode(errors="replace")
        except OSError:
            return ""
        return truncate(text, TAIL_CHARACTERS)


class RankProgram(ABC):
    """A program that ranks run.

    Attributes:
        modules: imported by the fork server before the first order; MODULE:FUNCTION is called when it is idle.
    """

    modules: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def prepare(self, order: Start) -> None:
        """Write what the ranks of a start order read, before any of them starts."""

    @abstractmethod
    def make_fork(self, rank: int, attempt: int, environment: Mapping[str, str], log: Path) -> Fork:
        """Return the order that starts a rank."""

    @abstractmethod
    def read_progress(self, trainer: TrainerProcess) -> None:
        """Update what is known about the progress of a rank."""

    def writes_metrics(self, ranks: Collection[int]) -> bool:
        """Return True if a node with these ranks writes the run's metrics.jsonl."""
        return 0 in ranks

    def saved_step(self) -> int:
        """Return the step of the newest complete checkpoint, 0 if unknown."""
        return 0

    def close(self) -> None:  # noqa: B027 - most programs have nothing to close
        """End what observes the ranks."""

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a rank's process. Raise ProcessLookupError if it has ended."""
        os.kill(pid, number)


class OwnTrainer(RankProgram):
    """This package's trainer: forked with everything imported. Its status files show its progress.

    Args:
        run: the folder that trainers write to.
        settings: file that receives the configuration.
        shared: `run` is the folder that the settings name; otherwise trainers get an override.
        keeps_processes: ranks that outlive a failed attempt stay in their processes.
    """

    # They are given by name, since this package must not import the trainer.
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
            # Checkpoints outside the run folder belong to this run, also on a node that has rank 0 for the first time.
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
        if status is None or status.pid != trainer.pid or status.time_ns < trainer.since_ns:
            return
        trainer.advance(
            Progress(status.phase, status.step, status.action, status.microbatch, status.message, status.time_ns)
        )
        if status.exit is not None:
            trainer.record = status.exit  # it names the rank, which the exception itself may not
        trainer.checksum = status.checksum
        trainer.start = status.start
        trainer.doubt = status.doubt
        trainer.compute_seconds = status.compute_seconds


@dataclass
class CallCount:
    """Number of the collectives that a rank has started, by the flight record that it wrote last.

    Attributes:
        total: the number, 0 before the first record.
        asked: time of the last request for a record, on the monotonic clock.
    """

    total: int = 0
    asked: float = 0.0

    def update(self, rank: int, status: Path, flight: Path) -> None:
        """Read the record that was requested last, and request the next one."""
        current_time = time.monotonic()
        if current_time - self.asked < COUNT_INTERVAL:
            return
        self.asked = current_time
        with contextlib.suppress(OSError, DataError):
            groups = read_flight(flight / f"rank-{rank}.json").record.groups
            self.total = sum(counts.started for counts in groups.values())
        ask_for_flight(status, rank)


@dataclass
class ObservedRank:
    """The log of a rank in one attempt, and the counts that it shows.

    Attributes:
        tail: reader of the log.
        calls: counter of the rank's collectives.
        bars: number of states of progress bars other than the trainer's own.
        total: steps of the trainer's own progress bar, the first one; None before it.
        first_step: the first complete step, None before it.
    """

    tail: LogTail
    calls: CallCount
    bars: int = 0
    total: int | None = None
    first_step: int | None = None

    def read(self, lines: Sequence[str], reader: ProgressReader) -> list[Reading]:
        """Return the steps in new lines, and count other progress bars."""
        readings = []
        for line in lines:
            reading = reader.read(line)
            if reading is not None and self.total is None:
                self.total = reading.total
            if reading is not None and reading.total in (None, self.total):
                readings.append(reading)
            elif BAR.search(line[:4000]):
                self.bars += 1
        return readings

    def make_progress(self, first_step: int, step: int, time_ns: int = 0) -> Progress:
        """Return the progress of a rank whose newly seen steps are `first_step` to `step`."""
        if self.first_step is None:
            self.first_step = first_step or 1  # a progress bar is shown at 0 before the first step
        completed_steps = max(0, step - self.first_step + 1)
        return Progress("train", step, self.describe_bars(), time_ns=time_ns, completed_steps=completed_steps)

    def describe_bars(self) -> str:
        """Return the count of other progress bars as an action, "" without such a bar."""
        return f"{self.bars} states of other progress bars" if self.bars else ""


class ForeignProgram(RankProgram):
    """Another trainer's command, in torchrun's environment.

    Its progress is read from the lines of its log, or from the status file that `megascale.watch` writes. A rank that
    shows neither is unobserved: its progress is the growth of its log and the number of its collectives.

    Args:
        run: the run folder on this node.
        foreign: the configuration section [foreign].
        restarts: number of starts without a new step after which the driver ends the job.
    """

    def __init__(self, run: Path, foreign: ForeignConfig, restarts: int) -> None:
        self._foreign = foreign
        self._restarts = restarts
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
        """Make the folders of the diagnosis, and remove files that describe processes of an earlier attempt."""
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
        """Return torchrun's variables and those of the diagnosis. The user's own values of the latter count."""
        own = {
            # Names before and after torch 2.9.
            "TORCH_FR_BUFFER_SIZE": "2000",
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",  # as torchrun
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
            # Without it the record does not say whether the device has reached a call, nor how long calls take.
            "TORCH_NCCL_ENABLE_TIMING": "1",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": str(self._flight / "nccl_trace_rank_"),
            "TORCH_NCCL_DEBUG_INFO_PIPE_FILE": str(self._status / "nccl-"),
            "PYTHONUNBUFFERED": "1",
        }
        if len(order.ranks) > 1:
            own["OMP_NUM_THREADS"] = "1"  # as torchrun, so that the threads of several ranks do not share cores
        variables = {name: value for name, value in own.items() if name not in os.environ}
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
            "TORCHELASTIC_MAX_RESTARTS": str(self._restarts),
            "TORCHELASTIC_RUN_ID": order.job,
            "TORCHELASTIC_USE_AGENT_STORE": "False",  # rank 0 serves the store at MASTER_PORT
        }
        return variables

    def make_fork(self, rank: int, attempt: int, environment: Mapping[str, str], log: Path) -> Fork:
        """Return the order to execute the command as a rank."""
        log_start = log.stat().st_size if log.exists() else 0
        self._ranks[rank] = ObservedRank(LogTail(log, log_start), CallCount(asked=time.monotonic()))
        variables = self._environment | dict(environment) | {"ROLE_RANK": str(rank)}
        del variables[REPLICA_VARIABLE]  # a secret of this package's checkpoint services, which do not run
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
        """Return True if a rank of this node has printed the run's metrics."""
        return self._has_metrics

    def saved_step(self) -> int:
        """Return the step of the newest complete checkpoint on the node of rank 0, 0 if unknown."""
        return self._checkpoints.step if self._checkpoints is not None else 0

    def close(self) -> None:
        """End the search for checkpoints."""
        if self._checkpoints is not None:
            self._checkpoints.stop()

    def signal(self, pid: int, number: int) -> None:
        """Signal the rank's process group, since the command may be a script that started the trainer."""
        os.killpg(pid, number)

    def read_progress(self, trainer: TrainerProcess) -> None:
        """Read the new lines of a rank's log and the file of `megascale.watch`."""
        log = self._ranks[trainer.rank]
        lines = log.tail.read_lines(at_carriage_returns=True)
        readings = log.read(lines, self._reader)
        status = read_status(self._status / f"rank-{trainer.rank}.status")
        if status is not None:
            trainer.compute_seconds = status.compute_seconds
            trainer.advance(log.make_progress(status.step, status.step, status.time_ns))
        elif readings:
            trainer.advance(log.make_progress(readings[0].step, readings[-1].step))
        elif trainer.progress is not None and trainer.progress.phase == "train":
            trainer.advance(trainer.progress._replace(action=log.describe_bars()))
        elif trainer.progress is None or trainer.progress.phase == UNOBSERVED:
            log.calls.update(trainer.rank, self._status, self._flight)
            action = f"{log.tail.size} bytes of output, {log.calls.total} collectives"
            problems = self._reader.describe_problems()
            if problems:
                action += f"; {problems}"
            trainer.advance(Progress(UNOBSERVED, 0, action=action))
        self._write_metrics(trainer.rank, readings)

    def _write_metrics(self, rank: int, readings: Sequence[Reading]) -> None:
        printed = [r for r in readings if rank == (self._last_rank if r.is_last_rank else 0)]
        if printed:
            self._has_metrics = True
            self._metrics.write(printed)


class MetricsWriter:
    """Writer of metrics.jsonl for one attempt of a trainer that does not write it.

    A resumed trainer repeats steps, so the first step of an attempt removes the earlier records from that step on. So
    does a step that is lower than the one before, as after a trainer's own return to a checkpoint.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._last: tuple[int, float] | None = None  # step, and the time of its line on the monotonic clock

    def write(self, readings: Sequence[Reading]) -> None:
        """Append steps that were read together. The step time is the mean since the last step that was read before."""
        current_time = time.monotonic()
        seconds: float | None = None
        previous = -1
        lowest = min(reading.step for reading in readings)
        if self._last is not None:
            previous, previous_time = self._last
            if readings[-1].step > previous:
                seconds = (current_time - previous_time) / (readings[-1].step - previous)
        if self._last is None or lowest < previous:
            self._remove_from(lowest)
        kept: list[Reading] = []
        for reading in readings:
            if reading.step < previous:
                kept = [earlier for earlier in kept if earlier.step < reading.step]
            if reading.step != previous:
                kept.append(reading)
            previous = reading.step
        lines = [_format_record(reading, seconds) for reading in kept]
        self._last = (previous, current_time)
        with contextlib.suppress(OSError), open(self._file, "a") as file:
            file.writelines(lines)

    def _remove_from(self, step: int) -> None:
        """Remove the records of `step` and later steps, and a last record that was not completely written."""
        try:
            lines = self._file.read_bytes().splitlines(keepends=True)
        except OSError:
            return
        # Steps ascend, and parsing all records of a long run would delay heartbeats.
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
    """Return the step of a record, -1 for a damaged one."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
