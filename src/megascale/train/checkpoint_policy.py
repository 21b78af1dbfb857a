"""Policy of saves: whether the last state must be saved, events about saves, and the error for a lost last state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from megascale import checkpoint
from megascale.config import CheckpointConfig
from megascale.core.events import Event
from megascale.core.exit_record import ExitKind, attach_record
from megascale.errors import TrainingError
from megascale.train.reporter import Reporter

log = logging.getLogger("megascale.train")


class CheckpointPolicy:
    """Begins the saves of one run and reports their outcomes.

    Args:
        config: intervals of saves, and whether the last state is saved.
        reporter: writes events and lines about saves.
    """

    def __init__(self, config: CheckpointConfig, checkpointer: checkpoint.Checkpointer, reporter: Reporter) -> None:
        self.config = config
        self.checkpointer = checkpointer
        self._reporter = reporter
        self._last_saved = -1  # newest step whose save to storage has begun, or that was loaded from there
        self._last_begun = -1  # newest step whose save has begun
        self._has_reported_snapshot = False
        self._failed_saves: dict[int, checkpoint.SaveOutcome] = {}  # by step; a later save of the step removes it

    def begin(self, step: int) -> None:
        """Store that training starts after `step`."""
        # A state that was loaded from memory is in storage only once it is saved there. Initial weights are the result
        # of a run without steps, so they are saved at its end.
        if self.checkpointer.loaded_from == "storage":
            self._last_saved = step

    def is_due_at_end(self, step: int) -> bool:
        """Return whether the run's last state, that of `step`, must still be saved."""
        return step > self._last_saved and self.config.at_end

    def has_begun(self, step: int) -> bool:
        """Return whether this start has begun to save the state of `step`, to storage or to memory."""
        return step == self._last_begun

    def save(self, step: int, state: dict[str, Any], *, persist: bool, wait: bool) -> None:
        """Save the state, or begin a save in the background, whose outcome a later `poll` reports.

        Args:
            persist: save to storage, not only to memory.
            wait: return only when the save is written.

        Raises TrainingError if a save that is waited for fails.
        """
        try:
            has_begun = self.checkpointer.save(step, state, persist=persist, wait=wait)
        except TrainingError as error:
            self._reporter.write_event(Event.CHECKPOINT_FAILED, step=step, message=str(error))
            raise
        if has_begun:
            self._last_begun = step
        if persist and has_begun:
            self._last_saved = step
        elif persist:
            if wait:
                reason = "a process cannot use its staging memory; the log of its rank has the cause"
            else:
                reason = "the save before it is still being written"
            self._reporter.write_event(Event.CHECKPOINT_SKIPPED, step=step, message=reason)
        self.poll()

    def poll(self) -> None:
        """Report the outcomes of saves since the last call."""
        self._report(self.checkpointer.poll())

    def finish(self, step: int) -> None:
        """Wait for the save that is being written.

        Raises TrainingError if the save of the last step, `step`, failed or did not begin: the run must not end as if
        its result were saved. An earlier call may have reported the failure already.
        """
        self._report(self.checkpointer.finish(run_ended=self.config.at_end))
        failed_save = self._failed_saves.get(step)
        if failed_save is None and self.is_due_at_end(step):
            failed_save = checkpoint.SaveOutcome(step, reason="its save did not begin")
        if failed_save is None:
            return
        lost = TrainingError(
            f"the checkpoint of the last step, {step}, failed: {failed_save.reason}; {self.describe_latest()}. "
            "Remove the cause and start the same command again"
        )
        if failed_save.record.kind is ExitKind.DISK_FULL:
            attach_record(lost, ExitKind.DISK_FULL, subject=failed_save.record.subject)
        raise lost

    def latest(self) -> int | None:
        """Return the newest step in storage, None without a checkpoint."""
        return checkpoint.latest(self.checkpointer.folder)

    def describe_latest(self) -> str:
        """Return a clause that names the newest checkpoint in storage."""
        return describe_latest(self.checkpointer.folder)

    def describe_interruption(self, step: int, saved: int | None) -> str:
        """Return a line that says from which step the next start goes on.

        Args:
            step: the last complete step.
            saved: newest step in storage, None without a checkpoint.
        """
        if saved == step:
            return f"interrupted; step {step} is saved, and the same command resumes from it"
        text = f"interrupted; step {step} is not saved"
        if not self.config.at_end:
            text += " (checkpoint.at_end=false)"
        if saved is None:
            resumption = "starts from step 0"
        else:
            resumption = f"resumes from step {saved}, the last saved one"
        return f"{text}: the same command {resumption}"

    def _report(self, outcomes: Sequence[checkpoint.SaveOutcome]) -> None:
        """Write the events of saves. A failed save in the background does not end training."""
        write_event = self._reporter.write_event
        for outcome in outcomes:
            step, sizes = outcome.step, {"seconds": outcome.seconds, "bytes": outcome.bytes}
            is_snapshot = self.config.memory_interval > 0 and not outcome.reason and not outcome.replica
            if is_snapshot and not self._has_reported_snapshot:
                self._has_reported_snapshot = True
                log.info("first snapshot complete: step %d", step)  # on every rank, unlike the event
                write_event(Event.FIRST_SNAPSHOT, step=step, **sizes)
            if outcome.committed:
                write_event(Event.CHECKPOINT_SAVED, step=step, path=f"step-{step}", stall=outcome.stall, **sizes)
            if not outcome.reason:
                self._failed_saves.pop(step, None)
            else:
                self._failed_saves[step] = outcome
                write_event(Event.CHECKPOINT_FAILED, step=step, message=outcome.reason)
                line = f"the checkpoint of step {step} failed: {outcome.reason}; {self.describe_latest()}"
                self._reporter.log_line(line)
            if outcome.replica:  # why the copy on another host failed
                write_event(Event.REPLICA_FAILED, step=step, message=outcome.replica)


def describe_latest(folder: Any) -> str:
    """Return a clause that names the newest checkpoint in `folder`, for the end of a message."""
    step = checkpoint.latest(folder)
    if step is None:
        return "no checkpoint had been saved yet"
    return f"the checkpoint of step {step} is kept"
