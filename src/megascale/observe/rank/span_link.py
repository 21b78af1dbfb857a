"""A rank's link to its host's span service: a thread that hands over the ring, and does so again if the service dies.

The thread sleeps but for that. The step's thread only writes into the ring. A run that ends within START_SECONDS, and
one whose service does not come up, leaves what is in its ring as a file, which readers and the next service take.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from megascale.core.background import FailureLog
from megascale.core.spans import SPAN_SCHEMA
from megascale.observe.store.span_messages import FROM_SPANS, TO_SPANS, Follow, launch, service_place
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.spool import save_orphan
from megascale.services import host_service
from megascale.services.conversation import Conversation
from megascale.services.host_service import ServiceFailed

log = logging.getLogger("megascale.observe.spans")

START_SECONDS = 3.0  # before the service is looked for: a ring holds minutes
_LAST = 10.0  # seconds that the end of a run waits for a service that is just coming up
_AGAIN = (1.0, 60.0)  # seconds before a service that died or did not come up is looked for again: first, at most


class SpanLink:
    """Begins to hand over at once; `close` ends it.

    Args:
        ring: of this rank.
        out: folder of the host's spans.
        job, host: whose they are.
        facts: who the rank is, such as its coordinates.
        limit_mib: that the folder may take.
        log_file: of the service.
        wait: seconds before it begins.
        hosts: of the job.
        sinks: of the service, by name.
    """

    def __init__(
        self,
        ring: SpanRing,
        out: Path,
        job: str,
        host: int,
        facts: dict[str, str],
        limit_mib: int,
        log_file: Path | None = None,
        wait: float = START_SECONDS,
        hosts: int = 1,
        sinks: Sequence[str] = ("parquet",),
    ) -> None:
        self.ring, self.out, self._wait = ring, out, wait
        self._about = {
            "job": job,
            "host": host,
            "schema": SPAN_SCHEMA,
            "clock_ns": time.time_ns() - time.monotonic_ns(),
        }
        self._about["ranks"] = [{"attempt": ring.attempt, "rank": ring.rank, **facts}]
        self._follow = Follow(ring.rank, ring.attempt, facts)
        self._place, self._launch = service_place(out), launch(out, job, host, hosts, limit_mib, log_file, sinks)
        self._conversation: Conversation | None = None
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="megascale-span-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = _AGAIN[0]
        failures = FailureLog(log, f"the link of rank {self.ring.rank} to the span service")
        if self._closing.wait(self._wait):
            return
        while not self._closing.is_set():
            begun = time.monotonic()
            try:
                self._hand_over()
            except (OSError, EOFError, ServiceFailed) as error:
                if not self._closing.is_set():  # who hangs up is not told so
                    why = str(error) or "it ended"
                    log.warning("rank %d: the span service is not there: %s", self.ring.rank, why)
            except Exception as error:
                failures.note(error, "it is tried again; spans stay in the ring meanwhile")
            pause = _AGAIN[0] if time.monotonic() - begun > _AGAIN[1] else min(2 * pause, _AGAIN[1])
            self._closing.wait(pause)

    def _hand_over(self) -> None:
        """Returns or raises when the service is gone."""
        conversation = host_service.connect_service(self._place, self._launch, TO_SPANS, FROM_SPANS, make_folder=True)
        with conversation:
            conversation.send(self._follow, files=[self.ring.handle])
            conversation.receive_reply()
            with self._lock:
                if self._closing.is_set():
                    self._handed = True
                    return
                self._conversation = conversation
            try:
                conversation.receive()
            finally:
                with self._lock:
                    self._conversation = None

    _handed = False  # the service has the ring, and this end is closing

    def close(self) -> None:
        """Leave; the service takes over what is left in the ring."""
        self._closing.set()
        with self._lock:
            if self._conversation is not None:
                self._handed = True
                self._conversation.hang_up()
        if self._thread.is_alive():
            self._thread.join(_LAST)
        if not self._handed and (frames := self.ring.read()):
            with contextlib.suppress(OSError):
                save_orphan(self.out, self._about, self.ring.identity, frames)
