"""Base class of the programs that ranks run, and this package's trainer.

foreign_program.py has the other program: a foreign trainer, which is any command of another package. A program makes
the order with which the fork server starts a rank, and reads the progress of the rank's process.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.core.status import PARKED, StartReport, name_status_file, read_status
from megascale.core.untrusted_files import open_regular
from megascale.resilience.agent.fork_server_process import TRAINER_MODULES
from megascale.resilience.protocol.agent_messages import Start
from megascale.resilience.protocol.fork_messages import Fork
from megascale.resilience.protocol.heartbeat import TAIL_CHARACTERS, truncate

# Seconds without a change, shorter than those after which the driver examines the ranks. The driver must learn at once
# that such a rank continues.
LONG_SILENCE = 5.0


class Progress(NamedTuple):
    """Progress of a rank: it has made progress if any field has changed. core/status.py explains the fields."""

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
        log_start: byte offset in the log where the output of this attempt begins.
        is_waiting: whether the process waits for its first attempt, in which it may have another rank.
        pid: process id, or 0 before the fork.
        status: wait status, or None while the process runs.
        progress: newest status record, or None before the first.
        progress_time: time of the last change of the progress.
        ended_silences: how often the progress has changed after LONG_SILENCE without a change.
        first_step: a higher step shows that this attempt has completed a step. -1 before the training begins.
        checksum: newest checksum of weights as "STEP:VALUE", or an empty text.
        compute_seconds: compute time of the last step, or 0 before it.
        start: progress of the rank's start, or None before the rank reports it.
        attempt_start_ns: when this attempt began in a process of an earlier attempt (time.time_ns()), or 0 in a new
            process. Older status records belong to the earlier attempt.
        exit_reason: reason why the rank ended its process after a fault of another rank, instead of waiting for the
            next attempt; otherwise an empty text. Its name in status files is `doubt`.
        replacement_reason: reason why the process before this one was replaced, although its rank had no fault.
        record: fault that ended the process.
        error: text of the exception that ended the process.
        ended: time of the end.
        by_agent: whether the process ended, or will end, because of a signal of the agent.
        kill_time: time of the agent's first SIGKILL, 0 before it.
        tail: text to report instead of the end of the log, for a process that wrote no log.
    """

    rank: int
    log: Path
    log_start: int
    is_waiting: bool = False
    pid: int = 0
    status: int | None = None
    progress: Progress | None = None
    progress_time: float = 0.0
    ended_silences: int = 0
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
    kill_time: float = 0.0
    tail: str = ""

    @property
    def is_parked(self) -> bool:
        """Return whether the rank has left its attempt and its process waits for the next one."""
        return self.status is None and self.progress is not None and self.progress.phase == PARKED

    @property
    def has_stepped(self) -> bool:
        """Return whether the running rank has completed a step of its attempt."""
        if self.status is not None or self.progress is None or self.progress.phase == PARKED:
            return False
        return 0 <= self.first_step < self.progress.step

    def end(self, status: int, **fields: Any) -> None:
        """Record the end of the process with its wait status, and set the attributes `fields`."""
        self.status = status
        self.ended = time.monotonic()
        for name, value in fields.items():
            setattr(self, name, value)

    def advance(self, progress: Progress) -> None:
        """Store the progress and its time, if it has changed."""
        if progress == self.progress:
            return
        current_time = time.monotonic()
        if self.progress is not None and current_time - self.progress_time > LONG_SILENCE:
            self.ended_silences += 1
        self.progress = progress
        self.progress_time = current_time
        if progress.phase == "train" and self.first_step < 0:
            # A program that reports steps at their end may have completed some before this first report.
            self.first_step = progress.step - progress.completed_steps

    def read_tail(self) -> str:
        """Return the end of the output that this attempt wrote into the rank's log, or "" if the log is unreadable."""
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
        modules: modules that the fork server imports before the first order. The server calls functions, which are
            given as MODULE:FUNCTION, when it is idle.
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
        settings: path of the configuration file that `prepare` writes.
        shared: whether `run` is the run folder of the settings. Otherwise trainers get an option that sets it.
        keeps_processes: whether ranks without a fault stay in their processes after a failed attempt.
    """

    modules = TRAINER_MODULES

    def __init__(self, run: Path, settings: Path, shared: bool, keeps_processes: bool = False) -> None:
        self._keeps_processes = keeps_processes
        self._run = run
        self._settings = settings
        self._shared = shared
        self._arguments: tuple[str, ...] = ()  # command line after `megascale`

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
        return Fork(
            rank=rank,
            attempt=attempt,
            env=dict(environment),
            arguments=self._arguments,
            log=str(log),
            is_reused=self._keeps_processes,
        )

    def read_progress(self, trainer: TrainerProcess) -> None:
        """Read the status file of a rank."""
        waiting_node = self._settings.parent.name if trainer.is_waiting else ""
        status = read_status(self._run / "status" / name_status_file(trainer.rank, waiting_node))
        if status is None or status.pid != trainer.pid or status.time_ns < trainer.attempt_start_ns:
            return
        trainer.advance(
            Progress(
                phase=status.phase,
                step=status.step,
                action=status.action,
                microbatch=status.microbatch,
                message=status.message,
                time_ns=status.time_ns,
            )
        )
        if status.exit is not None:
            trainer.record = status.exit  # has the rank at fault, which the record of the exception may lack
        trainer.checksum = status.checksum
        trainer.start = status.start
        trainer.exit_reason = status.doubt
        trainer.compute_seconds = status.compute_seconds
