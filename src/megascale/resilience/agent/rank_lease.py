"""The lease of a node's ranks: how long they may run without an answer of the driver.

The driver answers each heartbeat. An agent whose heartbeats stay unanswered for `resilience.agent_lease` seconds ends
its ranks. It counts from the sending of the last answered heartbeat and the driver from its arrival, so the agent's
lease ends first, however long the network delays messages. A driver that removes a node says so before it closes the
connection. If the connection closes without that, the driver's process has ended. The ranks then continue for a
successor for `resilience.orphan` seconds, and a successor waits that long for nodes that are silent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megascale.core.failure import FailureLog

log = logging.getLogger("megascale.agent")
CHECK_INTERVAL = 0.05  # seconds


class RankLease:
    """The lease of one agent.

    Args:
        seconds: duration of the lease; None: the ranks need no lease.
        orphan: seconds for which ranks continue after the end of a driver.
        on_expiry: called in a thread with the reason after the lease has expired, again at each check.
        clock: monotonic clock in seconds.
    """

    def __init__(
        self,
        seconds: float | None,
        orphan: float,
        on_expiry: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._orphan = orphan
        self._on_expiry = on_expiry
        self._clock = clock
        self._lock = threading.Lock()
        self._sent: dict[int, float] = {}  # time of sending of unanswered heartbeats, by number
        self._expiry = clock() + (seconds or 0.0)
        self._reason = "no driver has answered yet"
        self._revoked = False

    @property
    def is_enabled(self) -> bool:
        """True if the ranks need a lease."""
        return self._seconds is not None

    def start(self) -> None:
        """Check the lease in a thread, which is punctual while the agent's loop is busy."""
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def begin_session(self, sent: float) -> None:
        """Renew the lease, since a driver accepted the greeting that was sent at time `sent`."""
        reason = self.expired_reason()
        if reason:
            # First: the driver may have started the ranks on another node, and must not hear that they run here.
            self._on_expiry(reason)
        with self._lock:
            self._sent.clear()
            self._revoked = False
            self._expiry = sent + (self._seconds or 0.0)
            self._renew(sent)

    def record_sent(self, sequence: int) -> None:
        """Record the time of sending of a heartbeat."""
        if self._seconds is not None:
            with self._lock:
                self._sent[sequence] = self._clock()

    def confirm(self, sequence: int) -> None:
        """Renew the lease, since the driver received a heartbeat."""
        with self._lock:
            sent = self._sent.pop(sequence, None)
            if sent is not None:
                self._sent = {number: time for number, time in self._sent.items() if number > sequence}
                self._renew(sent)

    def revoke(self) -> None:
        """End the lease at once, since the driver removed the node."""
        with self._lock:
            self._revoked = True
            self._expiry = self._clock()
            self._reason = "the driver has removed this node from the job"

    def record_close(self, process_ended: bool) -> None:
        """Record the end of the connection; process_ended: the kernel of the driver's machine closed it."""
        with self._lock:
            current_time = self._clock()
            if process_ended and not self._revoked and current_time < self._expiry:
                self._expiry = max(self._expiry, current_time + self._orphan)
                self._reason = f"the driver has ended and no other came for resilience.orphan={self._orphan:g} s"

    def expired_reason(self) -> str:
        """Return the reason why ranks may not run now, "" if they may."""
        with self._lock:
            expired = self._seconds is not None and self._clock() >= self._expiry
            return self._reason if expired else ""

    def _renew(self, sent: float) -> None:
        if self._seconds is None or self._revoked:
            return
        self._expiry = max(self._expiry, sent + self._seconds)
        self._reason = f"no answer of the driver for resilience.agent_lease={self._seconds:g} s"

    def _watch(self) -> None:
        failures = FailureLog(log, "the check of the lease")
        while True:
            try:
                reason = self.expired_reason()
                if reason:
                    self._on_expiry(reason)
            except Exception as error:  # An unchecked lease could let ranks run twice.
                failures.note(error, f"the check is repeated in {CHECK_INTERVAL:g} s")
            time.sleep(CHECK_INTERVAL)
