"""A rank's link to its host's span service: a thread that starts the service and hands over the rank's ring.

If the service dies, the thread starts it and hands over the ring again; otherwise the thread sleeps. The thread of the
training step only writes into the ring. If the run ends within START_SECONDS, or if the service does not start, the
content of the ring is saved as a file, which readers and the next service read.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megascale.core.failure import FailureLog
from megascale.core.spans import SPAN_SCHEMA
from megascale.observe.store.span_messages import FROM_SPANS, TO_SPANS, Follow, locate_service, make_launch_command
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.spool import save_orphan
from megascale.services import host_service
from megascale.services.conversation import Conversation
from megascale.services.host_service import ServiceFailed

log = logging.getLogger("megascale.observe.spans")

START_SECONDS = 3.0  # delay before the service is started; a ring holds the frames of minutes
_END_SECONDS = 10.0  # longest wait at the end of a run for a service that is starting
_FIRST_PAUSE_SECONDS = 1.0  # pause before a failed service is started again; doubles with each failure
_LONGEST_PAUSE_SECONDS = 60.0


class SpanLink:
    """The link, whose thread starts at once; `close` ends the link.

    Args:
        ring: this rank's ring.
        out: folder of the host's spans.
        job, host: origin of the spans.
        facts: location of the rank, such as its coordinates; see span_messages.Follow.
        limit_mib: size limit of the folder in MiB.
        log_file: log of the service.
        wait: seconds before the service is started.
        hosts: number of the job's hosts.
        sinks: names of the service's sinks.
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
        self.ring = ring
        self.out = out
        self._wait = wait
        self._header: dict[str, Any] = {
            "job": job,
            "host": host,
            "schema": SPAN_SCHEMA,
            "clock_ns": time.time_ns() - time.monotonic_ns(),
            "ranks": [{"attempt": ring.attempt, "rank": ring.rank, **facts}],
        }
        self._follow = Follow(ring.rank, ring.attempt, facts)
        self._service_location = locate_service(out)
        self._launch = make_launch_command(out, job, host, hosts, limit_mib, log_file, sinks)
        self._conversation: Conversation | None = None
        self._is_handed_over = False  # whether the service has the ring when the link is closed
        self._is_connecting = True  # whether the link is not connected to the service yet
        self._is_abandoned = False  # whether the link was closed meanwhile, so that the ring is not handed over
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="megascale-span-link", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        pause = _FIRST_PAUSE_SECONDS
        failures = FailureLog(log, f"the link of rank {self.ring.rank} to the span service")
        if self._closing.wait(self._wait):
            return
        while not self._closing.is_set():
            begin = time.monotonic()
            try:
                self._hand_over()
            except (OSError, EOFError, ServiceFailed) as error:
                if not self._closing.is_set():
                    reason = str(error) or "it ended"
                    log.warning("rank %d: the span service is unavailable: %s", self.ring.rank, reason)
            except Exception as error:
                failures.note(error, "the link is tried again; spans stay in the ring meanwhile")
            if time.monotonic() - begin > _LONGEST_PAUSE_SECONDS:
                pause = _FIRST_PAUSE_SECONDS  # the service has worked for a while
            else:
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
            self._closing.wait(pause)

    def _hand_over(self) -> None:
        """Hand over the ring, and wait until the service or this link ends. Raises an error if the service is gone."""
        with self._lock:
            self._is_connecting = True
        conversation = host_service.connect_service(
            self._service_location, self._launch, TO_SPANS, FROM_SPANS, make_folder=True
        )
        with conversation:
            with self._lock:
                if self._is_abandoned:
                    return
                self._is_connecting = False
            conversation.send(self._follow, files=[self.ring.handle])
            conversation.receive_reply()
            with self._lock:
                if self._closing.is_set():
                    self._is_handed_over = True
                    return
                self._conversation = conversation
            try:
                conversation.receive()
            finally:
                with self._lock:
                    self._conversation = None

    def close(self, awaits_service: bool = True) -> None:
        """End the link. The service takes the remaining frames; without a service they are saved as a file.

        Args:
            awaits_service: whether to wait for a service that is starting.
        """
        self._closing.set()
        with self._lock:
            self._is_abandoned = self._is_connecting and not awaits_service
            if self._conversation is not None:
                self._is_handed_over = True
                self._conversation.shut_down()
        if self._thread.is_alive() and not self._is_abandoned:
            self._thread.join(_END_SECONDS)
        if self._is_handed_over:
            frames = b""
        else:
            frames = self.ring.read()
        if frames:
            with contextlib.suppress(OSError):
                save_orphan(self.out, self._header, self.ring.identity, frames)
