"""How a rank ends before its time: signals become a wish to stop, errors become an event, a status and one message."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType, TracebackType
from typing import Any

from megascale.config import Config
from megascale.core.events import Event
from megascale.core.failure import NO_ROOM
from megascale.core.status import FAILED_IN_STEP, StatusFile
from megascale.core.terminal import termination_signals
from megascale.errors import MegascaleError, TrainingError
from megascale.rendezvous.groups import describe_lost_peer
from megascale.train.checkpoint_policy import kept
from megascale.train.claim import write_failed_status
from megascale.train.rank_info import RankInfo
from megascale.train.run_folder import RunFolder


class Interrupts:
    """Turns the first signal that asks a process to end into a wish to stop after the step.

    The second SIGINT stops at once.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._old: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in termination_signals():
            try:
                self._old[number] = signal.signal(number, self._ask)
            except ValueError:  # not the main thread: the caller handles signals
                return self
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.wanted = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)


class Ending:
    """A context in which however this rank ends before its time is told, before anything is closed.

    Attributes:
        mine: the folder is this run's to write in.
        status: this rank's status file, once it has its files there.
        step: the last whole step.
        in_step: between a step's first operation and its last.
        told: all ranks end together, and it is told why.
        lost: the other ranks may be: nothing waits for them.
    """

    def __init__(self, config: Config, place: RankInfo, folder: RunFolder) -> None:
        self._config, self._place, self._folder = config, place, folder
        self.mine = self.in_step = self.told = self.lost = False
        self.status: StatusFile | None = None
        self.step = 0

    def __enter__(self) -> Ending:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        told = self._explained(error)
        try:
            self._tell(told)
        finally:
            self.lost = not self.told
        if told is not error:
            raise told from error

    def _explained(self, error: BaseException) -> BaseException:
        """What a person is told instead of a library's words."""
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            full = TrainingError(
                f"rank {self._place.rank}: the disk is full ({error}); free room there and start the same command again"
            )
            full.errno = error.errno  # the driver's rules go by it
            return full
        why = describe_lost_peer(error) if isinstance(error, RuntimeError) else None
        if why is None:
            return error
        where = "while starting" if self.status is None else f"in step {self.step + 1}"
        location = self._config.checkpoint.location or self._folder.checkpoints
        return TrainingError(
            f"rank {self._place.rank} lost contact with another rank {where} ({why}): a rank ended, "
            f"hung for rendezvous.group_timeout={self._config.rendezvous.group_timeout:g} seconds, or its network "
            f"broke. The log of the rank that stopped first tells why ({self._folder.logs}); {kept(location)}. "
            "Start the same command again to go on"
        )

    def _tell(self, error: BaseException) -> None:
        if self.told:
            return
        if isinstance(error, KeyboardInterrupt):
            message, event = f"interrupted at once, in step {self.step + 1}, which is not saved", Event.INTERRUPTED
        else:
            message, event = str(error), Event.RUN_FAILED
            if not isinstance(error, MegascaleError):
                message = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # a full disk: what broke the run must still be raised
            if self.mine:
                self._folder.create()
            if self.status is not None:
                phase, at = (FAILED_IN_STEP, self.step + 1) if self.in_step else ("failed", self.step)
                self.status.update(phase, at, message=message)
            else:
                write_failed_status(self._folder, self._place.rank, self.mine, message)
            if self.mine and self._place.rank == 0:
                self._folder.append_event(event, step=self.step, message=message[:2000])
