"""The job of a driver: its state changes only by events, and each event is written to the journal first."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

from megascale.resilience.driver.state.job_state import (
    ENDED,
    ImpossibleTransition,
    JobEvent,
    JobState,
    NodeEvent,
    Phase,
    apply_event,
    apply_node_event,
)
from megascale.resilience.driver.state.journal import Journal

log = logging.getLogger("megascale.driver")
# Tests set this environment variable, so that an event that the table lacks raises an error. Without the variable, a
# job refuses such an event, logs it and continues.
STRICT = "MEGASCALE_STRICT_TRANSITIONS"


class Job:
    """The job that a driver runs.

    Args:
        state: the initial state, with the journal's records of the nodes.
        journal: receives each transition, and replays to this state.
        on_refusal: called with the reason when an event was refused.
        on_phase: called after each change of the phase.

    Attributes:
        phase_entered: when the job entered its phase, on the monotonic clock.
    """

    def __init__(
        self,
        state: JobState,
        journal: Journal,
        on_refusal: Callable[[str], None] = lambda reason: None,
        on_phase: Callable[[], None] = lambda: None,
    ) -> None:
        self.state = state
        self._journal = journal
        self._on_refusal = on_refusal
        self._on_phase = on_phase
        self.phase_entered = time.monotonic()
        self._unsaved_step: int | None = None  # furthest step, if the journal lacks it
        journal.save_job(state)

    @property
    def phase(self) -> Phase:
        return self.state.phase

    @property
    def is_ending(self) -> bool:
        """True if the job has ended, or will once everything has stopped."""
        return self.phase in ENDED or (self.phase is Phase.STOPPING and self.state.goal in ENDED)

    @property
    def is_at_work(self) -> bool:
        """True while trainers start or run."""
        return self.phase in (Phase.STARTING, Phase.RUNNING, Phase.DEGRADED)

    @property
    def is_running(self) -> bool:
        """True once the trainers of the present attempt have completed a step."""
        return self.phase in (Phase.RUNNING, Phase.DEGRADED)

    def apply(self, event: JobEvent, **changes: Any) -> bool:
        """Apply an event of the job; return False if it was refused and nothing has changed."""
        try:
            next_state = apply_event(self.state, event, changes)
        except ImpossibleTransition as error:
            return self._refuse(error)
        self.flush()
        self._journal.record(event, changes, next_state)
        enters_phase = next_state.phase is not self.state.phase
        self.state = next_state
        if enters_phase:
            self.phase_entered = time.monotonic()
            self._on_phase()
        return True

    def apply_node(self, event: NodeEvent, name: str, **changes: Any) -> bool:
        """Apply an event of a node; return False if it was refused and nothing has changed."""
        try:
            next_state = apply_node_event(self.state, name, event, {"changed_at": time.time()} | changes)
        except ImpossibleTransition as error:
            return self._refuse(error)
        self._journal.save_node(name, next_state.nodes[name])
        self.state = next_state
        return True

    def advance(self, step: int) -> None:
        """Set the furthest step. The journal gets only the last of many steps, by `flush` or the next transition."""
        if step > self.state.step:
            self.state = apply_event(self.state, JobEvent.STEP, {"step": step})
            self._unsaved_step = step

    def flush(self) -> None:
        """Write the furthest step to the journal."""
        if self._unsaved_step is not None:
            self._journal.record(JobEvent.STEP, {"step": self._unsaved_step}, self.state)
            self._unsaved_step = None

    def _refuse(self, error: ImpossibleTransition) -> bool:
        """Report a refused event and return False; raise the error in tests (STRICT)."""
        if os.environ.get(STRICT):
            raise error
        log.error("refused: %s", error)
        self._on_refusal(str(error))
        return False
