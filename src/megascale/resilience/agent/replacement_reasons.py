"""Reasons why the processes of ranks without a fault of their own are replaced between two attempts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from megascale.core.exit_record import ExitKind
from megascale.core.untrusted_files import read_tail
from megascale.resilience.agent.rank_programs import TrainerProcess


class ReplacementReasons:
    """Collects the reasons since the last start of an attempt, by rank.

    Args:
        status_folder: folder in which ranks write their stacks.
        keep_seconds: seconds in which a rank must leave its attempt (`resilience.keep_seconds`).
    """

    def __init__(self, status_folder: Path, keep_seconds: float) -> None:
        self._status_folder = status_folder
        self._keep_seconds = keep_seconds
        self._reasons: dict[int, str] = {}

    def add(self, ranks: Iterable[int], reason: str) -> None:
        """Store one reason for several ranks, in place of earlier reasons."""
        self._reasons |= dict.fromkeys(ranks, reason)

    def add_delay(self, trainer: TrainerProcess) -> None:
        """Store that a rank does not leave its attempt: in which step and, if known, at which line of code."""
        step = trainer.progress.step if trainer.progress is not None else 0
        text = f"it did not leave step {step} within {self._keep_seconds:g} s"
        stack = ""
        with contextlib.suppress(OSError):
            stack = read_tail(self._status_folder / f"rank-{trainer.rank}.stack")
        stack = stack.rpartition("most recent call first")[2]  # the newest stack of the file
        frame = re.search(r'File ".*?([^/"]+)", line (\d+) in (\S+)', stack)
        if frame is not None:
            text += f", in {frame[3]} ({frame[1]}:{frame[2]})"
        self._reasons[trainer.rank] = text

    def take(self, ended_trainers: Iterable[TrainerProcess]) -> dict[int, str]:
        """Return the reasons by rank, and forget them.

        Args:
            ended_trainers: trainers of the attempt that has ended. Those that ended only because a peer was lost are
                replaced without a reason of their own.
        """
        reasons = {}
        for trainer in ended_trainers:
            has_ended = trainer.status is not None and not trainer.by_agent
            if has_ended and trainer.record.kind is ExitKind.LOST_PEER:
                reasons[trainer.rank] = trainer.exit_reason or "it ended although only a peer was lost"
        reasons |= self._reasons
        self._reasons = {}
        return reasons
