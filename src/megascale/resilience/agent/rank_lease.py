"""Lease of a node's ranks, which limits how long they may run without an answer of the driver.

The driver answers each heartbeat. If an agent's heartbeats stay unanswered for `resilience.agent_lease` seconds, the
agent ends its ranks. The agent counts from the time at which it sent the last answered heartbeat, and the driver from
its arrival. The agent's lease therefore ends first, however long the network delays messages.

A driver that removes a node sends a message before it closes the connection. If the connection closes without this
message, the driver's process has ended. The ranks then continue for `resilience.orphan` seconds, so that the next
driver can take them over. The next driver waits as long for silent nodes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from megascale.core.failure import FailureLog

log = logging.getLogger("megascale.agent")
CHECK_INTERVAL = 0.05  # seconds between two checks of the lease


class RankLease:
    """Lease of one agent.

    Args:
        seconds: duration of the lease, or None if the ranks need no lease.
        orphan: seconds for which ranks continue after the end of a driver.
        on_expiry: called with the reason once the lease has expired, repeatedly and in a thread.
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
        self._orphan_seconds = orphan
        self._on_expiry = on_expiry
        self._clock = clock
        self._lock = threading.Lock()
        self._send_times: dict[int, float] = {}  # of unanswered heartbeats, by their number
        self._expiry = clock() + (seconds or 0.0)  # end of the lease
        self._reason = "no driver has answered yet"  # why ranks must not run after the expiry
        self._is_revoked = False

    @property
    def is_enabled(self) -> bool:
        """Return whether the ranks need a lease."""
        return self._seconds is not None

    def start(self) -> None:
        """Start to check the lease in a thread, which is punctual even if the agent's event loop is busy."""
        if self._seconds is not None:
            threading.Thread(target=self._watch, name="lease", daemon=True).start()

    def begin_session(self, send_time: float) -> None:
        """Renew the lease, because a driver has accepted the greeting that was sent at `send_time`."""
        reason = self.get_expiry_reason()
        if reason:
            # The driver may have started the ranks on another node, so end them before a heartbeat reports them.
            self._on_expiry(reason)
        with self._lock:
            self._send_times.clear()
            self._is_revoked = False
            self._expiry = send_time + (self._seconds or 0.0)
            self._renew(send_time)

    def record_sent(self, sequence: int) -> None:
        """Record that a heartbeat is being sent."""
        if self._seconds is not None:
            with self._lock:
                self._send_times[sequence] = self._clock()

    def confirm(self, sequence: int) -> None:
        """Renew the lease, because the driver has received the heartbeat with this number."""
        with self._lock:
            send_time = self._send_times.pop(sequence, None)
            if send_time is not None:
                self._send_times = {number: time for number, time in self._send_times.items() if number > sequence}
                self._renew(send_time)

    def revoke(self) -> None:
        """End the lease at once, because the driver has removed the node."""
        with self._lock:
            self._is_revoked = True
            self._expiry = self._clock()
            self._reason = "the driver has removed this node from the job"

    def record_close(self, process_ended: bool) -> None:
        """Record the end of the connection.

        Args:
            process_ended: whether the driver's process has ended, so that the kernel of its machine closed the
                connection.
        """
        with self._lock:
            current_time = self._clock()
            if process_ended and not self._is_revoked and current_time < self._expiry:
                self._expiry = max(self._expiry, current_time + self._orphan_seconds)
                self._reason = (
                    f"the driver has ended and no other came for resilience.orphan={self._orphan_seconds:g} s"
                )

    def get_expiry_reason(self) -> str:
        """Return the reason why ranks must not run now, or an empty text if they may run."""
        with self._lock:
            has_expired = self._seconds is not None and self._clock() >= self._expiry
            return self._reason if has_expired else ""

    def _renew(self, send_time: float) -> None:
        """Extend the lease to its duration after `send_time`. The caller holds the lock."""
        if self._seconds is None or self._is_revoked:
            return
        self._expiry = max(self._expiry, send_time + self._seconds)
        self._reason = f"no answer of the driver for resilience.agent_lease={self._seconds:g} s"

    def _watch(self) -> None:
        """Check the lease until the process ends. Runs in the thread."""
        failures = FailureLog(log, "the check of the lease")
        while True:
            try:
                reason = self.get_expiry_reason()
                if reason:
                    self._on_expiry(reason)
            except Exception as error:  # without the checks, ranks could run on two nodes
                failures.note(error, f"the check is repeated in {CHECK_INTERVAL:g} s")
            time.sleep(CHECK_INTERVAL)
