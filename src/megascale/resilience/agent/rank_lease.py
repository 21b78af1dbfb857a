"""For how long ranks may run without an answer of the driver, so that nobody starts them elsewhere beside them.

The driver answers each heartbeat. An agent whose heartbeats stay unanswered for `resilience.agent_lease` seconds ends
its ranks: it counts from when it sent the last one that was answered, the driver from when that one came, so the agent
is first, whatever the network holds back. A driver that gives a node up says so before it hangs up. Where its
connection ends without that, its process has ended (the kernel closes what it leaves): ranks then run on for its
successor, for `resilience.orphan` seconds, and a successor waits that long for nodes that it does not hear.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megascale.core.failure import FailureLog

log = logging.getLogger("megascale.agent")
LOOK = 0.05  # seconds between looks


class RankLease:
    """Args:
    seconds: the lease; None: ranks run on whatever happens.
    orphan: seconds for which a driver's end is waited out.
    end: called in a thread with the reason when it is over; again each LOOK for as long as it is.
    clock: seconds, monotonic.
    """

    def __init__(
        self,
        seconds: float | None,
        orphan: float,
        end: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds, self._orphan, self._end, self._clock = seconds, orphan, end, clock
        self._lock = threading.Lock()
        self._sent: dict[int, float] = {}
        self._until = clock() + (seconds or 0.0)
        self._why = "no driver has answered yet"
        self._over = False
        self._parted = False

    @property
    def given(self) -> bool:
        """Whether there is one."""
        return self._seconds is not None

    def start(self) -> None:
        """Watch in a thread: an agent that is busy must not be late."""
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def opened(self, sent: float) -> None:
        """A driver has taken the agent in, in answer to what was sent then."""
        with self._lock:
            late = self._why if self._seconds is not None and self._clock() >= self._until else ""
        if late:
            self._end(late)  # before it may be told that they run on: they may have been started elsewhere
        with self._lock:
            self._sent.clear()
            self._parted = False
            self._until = sent + (self._seconds or 0.0)
            self._renew(sent)

    def sent(self, sequence: int) -> None:
        """A heartbeat goes out now."""
        if self._seconds is not None:
            with self._lock:
                self._sent[sequence] = self._clock()

    def answered(self, sequence: int) -> None:
        """The driver has had a heartbeat."""
        with self._lock:
            at = self._sent.pop(sequence, None)
            if at is not None:
                self._sent = {n: t for n, t in self._sent.items() if n > sequence}
                self._renew(at)

    def parted(self) -> None:
        """The driver has given the node up: its ranks end at once."""
        with self._lock:
            self._parted = True
            self._until, self._why = self._clock(), "the driver has given this node up"

    def closed(self, by_end: bool) -> None:
        """The connection is gone; by_end: the other side's kernel has closed it."""
        with self._lock:
            if by_end and not self._parted and self._clock() < self._until:
                self._until = max(self._until, self._clock() + self._orphan)
                self._why = f"the driver has ended, and none came for resilience.orphan={self._orphan:g} s"

    def over(self) -> str:
        """Why ranks may not run now, "" if they may."""
        with self._lock:
            return self._why if self._seconds is not None and self._clock() >= self._until else ""

    def _renew(self, at: float) -> None:
        if self._seconds is None or self._parted:
            return
        self._until = max(self._until, at + self._seconds)
        self._why = f"no answer of the driver for resilience.agent_lease={self._seconds:g} s"

    def _watch(self) -> None:
        failures = FailureLog(log, "the watch over the lease")
        while True:
            try:
                if why := self.over():
                    self._end(why)
            except Exception as error:  # a lease that nobody watches would let ranks run twice
                failures.note(error, f"it looks again in {LOOK:g} s")
            time.sleep(LOOK)
