"""When a run's state is saved, and what becomes of saves: told, and a reason to stop where the last one is lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megascale import checkpoint
from megascale.config import CheckpointConfig
from megascale.core.events import Event
from megascale.core.exit_record import ExitKind, attach_record
from megascale.errors import TrainingError
from megascale.train.reporter import Reporter


class CheckpointPolicy:
    """Saves of one run.

    Args:
        config: how often, and whether at the end.
        checkpointer: what saves.
        reporter: who tells.
    """

    def __init__(self, config: CheckpointConfig, checkpointer: checkpoint.Checkpointer, reporter: Reporter) -> None:
        self.config, self.checkpointer, self._reporter = config, checkpointer, reporter
        self._last_saved, self._snapshots = -1, 0

    def begin(self, step: int) -> None:
        """Training goes on after `step`."""
        # A state that came from memory is in storage only once it is saved there.
        self._last_saved = step if self.checkpointer.loaded_from in ("nothing", "storage") else -1

    def due(self, step: int) -> bool | None:
        """Whether the state after `step`, which is not the last, is saved to storage (True) or to memory alone (False);
        None: not at all."""
        due = self.checkpointer.save_target(step)
        return None if due is None else due == "storage"

    def due_at_end(self, step: int) -> bool:
        """Whether the last state is still to be saved."""
        return step > self._last_saved and self.config.at_end

    def save(self, step: int, state: dict[str, Any], persist: bool = True, last: bool = False) -> None:
        """Save the state; in the background this begins it and `handle` tells what became of it."""
        try:
            begun = self.checkpointer.save(step, state, persist=persist, wait=last)
        except TrainingError as error:
            self._reporter.event(Event.CHECKPOINT_FAILED, step=step, message=str(error))
            raise
        if not begun and persist:
            why = "the save before it is still being written"
            self._reporter.event(Event.CHECKPOINT_SKIPPED, step=step, message=why)
        if begun and persist:
            self._last_saved = step
        self.poll()

    def poll(self) -> None:
        """Tell what became of saves since."""
        self._tell(self.checkpointer.poll())

    def finish(self, step: int) -> None:
        """Wait for what is being written. Raises TrainingError where the last state, of `step`, was lost: training must
        not end as if its result were kept."""
        outcomes = self.checkpointer.finish(run_ended=self.config.at_end)
        self._tell(outcomes)
        failed = next((o for o in outcomes if o.reason and o.step == step), None)
        if failed is not None:
            lost = TrainingError(
                f"the checkpoint of the last step, {failed.step}, failed: {failed.reason}; {self.kept()}. "
                "Remove the cause and start the same command again"
            )
            if failed.record.kind is ExitKind.DISK_FULL:
                attach_record(lost, ExitKind.DISK_FULL, subject=failed.record.subject)
            raise lost

    def latest(self) -> int | None:
        """The newest step in storage."""
        return checkpoint.latest(self.checkpointer.folder)

    def kept(self) -> str:
        """What is in storage, for people."""
        return kept(self.checkpointer.folder)

    def _tell(self, outcomes: Sequence[checkpoint.SaveOutcome]) -> None:
        """A save in the background that failed is told and training goes on."""
        for outcome in outcomes:
            if self.config.memory_interval and not outcome.reason and not outcome.replica:
                self._snapshots += 1
                if self._snapshots == 1:
                    about = {"seconds": outcome.seconds, "bytes": outcome.bytes}
                    self._reporter.event(Event.FIRST_SNAPSHOT, step=outcome.step, **about)
            if outcome.committed:
                took = {"seconds": outcome.seconds, "stall": outcome.stall, "bytes": outcome.bytes}
                self._reporter.event(Event.CHECKPOINT_SAVED, step=outcome.step, path=f"step-{outcome.step}", **took)
            if outcome.reason:
                self._reporter.event(Event.CHECKPOINT_FAILED, step=outcome.step, message=outcome.reason)
                self._reporter.say(f"the checkpoint of step {outcome.step} failed: {outcome.reason}; {self.kept()}")
            if outcome.replica:
                self._reporter.event(Event.REPLICA_FAILED, step=outcome.step, message=outcome.replica)


def kept(folder: Any) -> str:
    """What is in storage, for people."""
    last = checkpoint.latest(folder)
    return f"the checkpoint of step {last} is kept" if last is not None else "no checkpoint had been saved yet"
