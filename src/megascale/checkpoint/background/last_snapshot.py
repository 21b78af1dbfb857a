"""Updates wait until the last snapshot is in the peer's memory: then a lost host costs one step, never two.

The weights of step n+1 exist only once the snapshot of step n does not need its host any more. Where the network is
slower than a step, that makes the step as long as the copy; where the peer does not answer, training goes on without.
"""

from __future__ import annotations

import logging
import time

from megascale.checkpoint.background.staging import SnapshotCopy

log = logging.getLogger(__name__)
MOST = 5.0  # seconds of waiting for one copy: those that a silent peer gets before it counts as gone


class LastSnapshot:
    """The last snapshot of this process, and the wait for its copy."""

    def __init__(self, timeout: float = MOST) -> None:
        self._most = timeout
        self._last: SnapshotCopy | None = None
        self._late: SnapshotCopy | None = None

    def track(self, copy: SnapshotCopy) -> None:
        """This is the last one now."""
        self._last = copy

    def wait(self) -> None:
        """Until it is kept, for some seconds. As long as one is late no other is waited for."""
        copy, late = self._last, self._late
        if copy is None or copy.message.peer is None or (late is not None and not late.replicated.is_set()):
            return
        self._late, begun = None, time.monotonic()
        if not copy.replicated.wait(self._most):
            self._late = copy
            log.warning(
                "the snapshot of step %s is not at the peer after %g s; training goes on, and a host that is lost now "
                "costs more than one step (checkpoint.memory_interval, or a faster network)",
                copy.message.step,
                self._most,
            )
        copy.outcome.stall += time.monotonic() - begun
