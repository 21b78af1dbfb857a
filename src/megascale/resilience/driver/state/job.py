"""The job of a driver: its state, which only events of the table (transitions.py) change, each written down first."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from megascale.resilience.driver.state.job_state import ENDED, JobState, Phase
from megascale.resilience.driver.state.journal import Journal, NodeRow
from megascale.resilience.driver.state.transitions import ImpossibleTransition, JobEvent, NodeEvent, follow, follow_node

log = logging.getLogger("megascale.driver")
# Set in tests: what the table does not have is an error. In a job the driver refuses it, says so and goes on.
STRICT = "MEGASCALE_STRICT_TRANSITIONS"


class Job:
    """Args:
    state: where it stands; its nodes as the journal has them.
    journal: where each transition goes; it replays to this state.
    refused: called with the reason when an event was refused that the table does not have.
    moved: called when it has come to another phase.

    Attributes:
        entered: when it came to its phase, on the monotonic clock.
    """

    def __init__(
        self,
        state: JobState,
        journal: Journal,
        refused: Callable[[str], None] = lambda why: None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.state, self._journal, self._refused, self._moved = state, journal, refused, moved
        self.entered = time.monotonic()
        self._late: int | None = None  # the furthest step, which is written down now and then
        journal.save_job(state)

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return self.state.phase

    @property
    def ending(self) -> bool:
        """Whether it has ended, or will once everything has stopped."""
        return self.phase in ENDED or (self.phase is Phase.STOPPING and self.state.goal in ENDED)

    def apply(self, event: JobEvent, **changes: Any) -> bool:
        """Something happened to the job. False: it was refused, and nothing has changed."""
        try:
            after = follow(self.state, event, changes)
        except ImpossibleTransition as error:
            return self._refuse(error)
        self.flush()
        self._journal.record(event, changes, after)
        before, self.state = self.state, after
        if after.phase is not before.phase:
            self.entered = time.monotonic()
            self._moved()
        return True

    def apply_node(self, event: NodeEvent, name: str, **changes: Any) -> bool:
        """Something happened to a node. False: it was refused, and nothing has changed."""
        try:
            after = follow_node(self.state, name, event, {"since": time.time()} | changes)
        except ImpossibleTransition as error:
            return self._refuse(error)
        self._journal.save_node(NodeRow.of(name, after.nodes[name]))
        self.state = after
        return True

    def saw_step(self, step: int) -> None:
        """Trainers have come to `step`; written down with the next transition or `flush`: there are many."""
        if step > self.state.step:
            self.state = follow(self.state, JobEvent.STEP, {"step": step})
            self._late = step

    def flush(self) -> None:
        """Write down how far trainers have come."""
        if self._late is not None:
            step, self._late = self._late, None
            self._journal.record(JobEvent.STEP, {"step": step}, self.state)

    def _refuse(self, error: ImpossibleTransition) -> bool:
        if os.environ.get(STRICT):
            raise error
        log.error("refused: %s", error)
        self._refused(str(error))
        return False
