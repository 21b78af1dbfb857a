"""Premature end of a rank: a signal becomes a request to stop; an error becomes an event, a status and a message."""

from __future__ import annotations

import contextlib
import signal
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from megascale.config import Config
from megascale.core.events import Event
from megascale.core.exit_record import ExitKind, attach_record, find_exit_record
from megascale.core.failure import DISK_FULL_ERRNOS, NOT_WRITABLE_ERRNOS, describe_write_failure
from megascale.core.status import FAILED_IN_STEP, StatusFile
from megascale.core.terminal import termination_signals
from megascale.errors import MegascaleError, TrainingError
from megascale.rendezvous.groups import describe_lost_peer
from megascale.train.checkpoint_policy import describe_latest
from megascale.train.claim import write_failed_status
from megascale.train.parking import Parking
from megascale.train.rank_info import RankInfo
from megascale.train.run_folder import RunFolder


class Interrupts:
    """A context in which the first signal that would end the process sets a request to stop after the step.

    The second SIGINT raises KeyboardInterrupt at once.

    Attributes:
        requested: whether a signal has come.
    """

    def __init__(self) -> None:
        self.requested = False
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in termination_signals():
            try:
                self._handlers[number] = signal.signal(number, self._request_stop)
            except ValueError:  # Only the main thread may set handlers; elsewhere the caller handles signals.
                return self
        return self

    def _request_stop(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


class Ending:
    """A context that reports an error of this rank before anything is closed.

    Attributes:
        owns_folder: whether this start has the lock of the run folder and may write into the folder.
        status: this rank's status file; None before it exists.
        step: the last complete step.
        in_step: whether a step has begun and its last operation is not queued yet.
        is_reported: whether the reason for the end is known to all ranks and reported already.
        has_lost_peers: whether other ranks may have ended, so that closing must not wait for them.
        is_parking: whether this process stays for the next attempt after this one has failed.
    """

    def __init__(self, config: Config, rank_info: RankInfo, folder: RunFolder, parking: Parking | None = None) -> None:
        self._parking = parking
        self._config = config
        self._rank_info = rank_info
        self._folder = folder
        self.owns_folder = False
        self.in_step = False
        self.is_reported = False
        self.has_lost_peers = False
        self.is_parking = False
        self.status: StatusFile | None = None
        self.step = 0

    def __enter__(self) -> Ending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        explained_error = self._explain(error)
        try:
            self.is_parking = self._parking is not None and self._parking.decide_stay(explained_error)
            if not self.is_parking:
                self._report(explained_error)
        finally:
            self.has_lost_peers = not self.is_reported
        if explained_error is not error:
            raise explained_error from error

    def _explain(self, error: BaseException) -> BaseException:
        """Return an error whose message has cause and remedy for a full disk or a lost peer, else `error` itself."""
        rank = self._rank_info.rank
        if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
            full = TrainingError(f"rank {rank}: {self._describe_write_failure(error)}")
            full.errno = error.errno
            return attach_record(full, ExitKind.DISK_FULL, step=self._current_step(), subject=str(error.filename or ""))
        if isinstance(error, OSError) and error.errno in NOT_WRITABLE_ERRNOS and self._is_of_run(error.filename):
            read_only = TrainingError(f"rank {rank}: {self._describe_write_failure(error)}")
            # Another host may write there, so the fault is no wrong setting.
            return attach_record(read_only, ExitKind.EXCEPTION, step=self._current_step(), subject=error.filename)
        if not isinstance(error, RuntimeError):
            return error
        reason = describe_lost_peer(error)
        if reason is None:
            return error
        moment = f"in step {self.step + 1}"
        if self.status is None:
            moment = "while starting"
        location = self._config.checkpoint.location or self._folder.checkpoints
        lost = TrainingError(
            f"rank {rank} lost contact with another rank {moment} ({reason}): a rank ended, hung for "
            f"rendezvous.group_timeout={self._config.rendezvous.group_timeout:g} seconds, or its network failed. The "
            f"log of the rank that stopped first shows why ({self._folder.logs}); {describe_latest(location)}. Start "
            "the same command again to continue"
        )
        return attach_record(lost, ExitKind.LOST_PEER, step=self._current_step())

    def _is_of_run(self, path: object) -> bool:
        """Return whether a path is in a folder whose files the run writes."""
        folders = (self._folder.path, self._config.checkpoint.location)
        return isinstance(path, str) and any(folder and _is_in_folder(path, folder) for folder in folders)

    def _describe_write_failure(self, error: OSError) -> str:
        """Return the cause and the remedy of a failed write: the path, its space and the key that moves it."""
        location = self._config.checkpoint.location
        if location and isinstance(error.filename, str) and _is_in_folder(error.filename, location):
            cause = describe_write_failure(error, location, "checkpoint.location")
        else:
            cause = describe_write_failure(error, self._folder.path, "train.runs")
        return f"{cause}, and start the same command again"

    def _current_step(self) -> int:
        """Return the step that is running, 0 between steps."""
        return self.step + 1 if self.in_step else 0

    def _report(self, error: BaseException) -> None:
        """Write the error to the status file and to the run's events, unless it is reported already."""
        if self.is_reported:
            return
        event = Event.RUN_FAILED
        message = str(error)
        if isinstance(error, KeyboardInterrupt):
            event = Event.INTERRUPTED
            message = f"interrupted at once, in step {self.step + 1}, which is not saved"
        elif not isinstance(error, MegascaleError):
            message = f"{type(error).__name__}: {error}"
        record = find_exit_record(error)
        doubt = ""
        if self._parking is not None and record.kind is ExitKind.LOST_PEER:
            doubt = self._parking.doubt
        with contextlib.suppress(OSError):  # the error is raised even if a full disk prevents its report
            if self.owns_folder:
                self._folder.create()
            if self.status is None:
                write_failed_status(self._folder, self._rank_info.rank, self.owns_folder, message, record)
            elif self.in_step:
                self.status.update(FAILED_IN_STEP, self.step + 1, message=message, exit_record=record, doubt=doubt)
            else:
                self.status.update("failed", self.step, message=message, exit_record=record, doubt=doubt)
            if self.owns_folder and self._rank_info.rank == 0:
                # After the loss of a peer the driver starts the next attempt, which must not wait for a busy disk.
                awaits_disk = record.kind is not ExitKind.LOST_PEER
                self._folder.append_event(event, awaits_disk=awaits_disk, step=self.step, message=message[:2000])


def _is_in_folder(path: str, folder: str | Path) -> bool:
    """Return whether a path is a folder or in it."""
    return Path(path).absolute().is_relative_to(Path(folder).absolute())
