"""The span service: a process per host that stores the spans of the host's ranks. It does not import torch.

A rank connects, hands over its ring buffer (span_ring.py) and sends no further messages. A *frame* is a block of spans
or roll-ups in a ring (frames.py). The service takes the frames from all rings four times per second and flushes them to
the disk every second, at a lower priority than trainers. It ends when the last rank has disconnected and all frames are
stored. If the service is killed, the ranks start it again, and it continues where it stopped.

Ranks start it as `python -m megascale.observe.store.span_service FOLDER --out SPANS` unless it runs already.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megascale.core import strict_json
from megascale.core.atomic_files import write_atomically
from megascale.core.json_lines import append_record
from megascale.core.untrusted_files import read_small_text
from megascale.observe.store.counters import HostCounters
from megascale.observe.store.frames import COUNTERS
from megascale.observe.store.host_clock import ClockServer, HostClock
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.network_settings import check_network
from megascale.observe.store.nic_rates import NicRates
from megascale.observe.store.span_messages import (
    FROM_SPANS,
    NAME,
    RANKS_FILE,
    REQUEST_FILE,
    STATE_FILE,
    TO_SPANS,
    Follow,
)
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.span_sinks import open_span_sinks
from megascale.services import host_service
from megascale.services.connection_server import ConnectionServer
from megascale.services.conversation import Conversation, Done, ErrorReply
from megascale.services.host_service import ReadySignal
from megascale.services.service_location import ServiceLocation

log = logging.getLogger("megascale.observe.spans")

PERIOD_SECONDS = 0.25  # time between readings of the rings
_FLUSH_SECONDS = 1.0  # time between flushes to the disk and readings of the counters
_CLOCK_SECONDS = 5.0  # time between comparisons with the common clock
_LINGER_SECONDS = 2.0  # time from the disconnection of the last rank to the end of the service
_FIRST_RANK_SECONDS = 60.0  # time limit for the first rank to connect


class LostCounts(NamedTuple):
    """Numbers of records that a rank dropped because its ring was full."""

    spans: int
    rollups: int


class SpanService:
    """Takes frames from the rings of a host's ranks and stores them, in a thread.

    Args:
        out: folder of the host's spans.
        make_ingest: makes the writer of that folder (`Ingest`); called in the thread that uses the writer.
        host, hosts: index of this host and number of the job's hosts; host 0 has the common clock.

    Attributes:
        server: server of the ranks' connections; set before ranks connect.
    """

    server: ConnectionServer

    def __init__(self, out: Path, make_ingest: Callable[[], Ingest], host: int = 0, hosts: int = 1) -> None:
        self.out = out
        self._host = host
        self._hosts = hosts
        self._host_clock: HostClock | None = None
        self._clock_server: ClockServer | None = None
        self._last_comparison = 0.0
        self._make_ingest = make_ingest
        self._rings: dict[SpanRing, bool] = {}  # value: whether the ring's rank is connected
        self._lock = threading.Lock()  # protects `_rings`, which connections and the thread change
        self._requested_steps = (0, 0)  # all spans of the steps from the first to the second one are requested
        self._lost: dict[int, LostCounts] = {}  # by rank
        self._network = check_network(os.environ)  # the environment of the ranks, which start this process
        self._ending = threading.Event()
        # A daemon thread does not keep a process alive that fails to serve. `stop` waits for the thread.
        self._thread = threading.Thread(target=self._run, name="megascale-spans", daemon=True)

    # Connections of ranks --------------------------------------------------------------------------------------------

    def serve_rank(self, conversation: Conversation) -> None:
        """Serve the connection of one rank until the rank disconnects or dies."""
        ring: SpanRing | None = None
        try:
            while True:
                message = conversation.receive()
                try:
                    ring = self._add_ring(message, conversation.files)
                    conversation.send(Done())
                except (ValueError, OSError) as error:
                    log.warning("the ring of rank %d cannot be used: %s", message.rank, error)
                    conversation.send(ErrorReply(str(error)[:2000], type(error).__name__))
        finally:
            with self._lock:
                if ring is not None:
                    self._rings[ring] = False

    def _add_ring(self, message: Follow, files: list[int]) -> SpanRing:
        """Add the ring in a rank's message, and record the rank's location.

        Args:
            files: descriptors of the open files that came with the message: the memory of the ring.

        Raises ValueError if these are not one file with a ring.
        """
        try:
            if len(files) != 1:
                raise ValueError(f"the message has {len(files)} open files; it must have the ring only")
            ring = SpanRing(files[0])
        except ValueError:
            for file in files:
                os.close(file)
            raise
        location = {
            "attempt": message.attempt, "rank": message.rank, "time": time.time(), "hostname": socket.gethostname(),
        }  # fmt: skip
        with self._lock:
            append_record(self.out / RANKS_FILE, location | dict(message.facts))
            ring.request_spans(*self._requested_steps)
            self._rings[ring] = True
        log.info("following rank %d of attempt %d", message.rank, message.attempt)
        return ring

    def is_done(self) -> bool:
        """Return whether no rank needs the service."""
        if self.server.client_count:
            return False
        if self.server.has_had_clients:
            return self.server.is_idle(_LINGER_SECONDS)
        return self.server.is_idle(_FIRST_RANK_SECONDS)

    # The thread ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread that takes frames."""
        self._thread.start()

    def stop(self) -> None:
        """Take and store the remaining frames, and end the thread."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        """Take frames until the service stops. A failure ends the process, so that the ranks start a new one."""
        try:
            self._take_all_frames()
        except Exception:
            log.exception("the span service cannot continue; training does")
            os._exit(1)

    def _take_all_frames(self) -> None:
        """Take and store frames until the service stops, and the remaining frames then."""
        ingest = self._make_ingest()
        counters = HostCounters()
        rates = NicRates(self._find_sampled_step)
        self._log_network_settings()
        self._start_clock(ingest)
        last_flush_time = 0.0
        while not self._ending.wait(PERIOD_SECONDS):
            self._take_frames(ingest)
            # Rates of NICs within sampled steps are recorded more often than the counters.
            rate_records = rates.take_records()
            if len(rate_records):
                ingest.add_records(COUNTERS, rate_records)
            time_s = time.monotonic()
            if time_s - last_flush_time >= _FLUSH_SECONDS:
                last_flush_time = time_s
                self._run_each_second(ingest, counters)
            ingest.maintain(time_s)
        rates.close()
        counters.close()
        self._take_frames(ingest)
        ingest.close()
        self._write_state(ingest)
        if self._clock_server is not None:
            self._clock_server.close()

    def _log_network_settings(self) -> None:
        """Log the network settings that are not good, as warnings, and those that cannot be read, as information."""
        for setting in self._network:
            if setting.good:
                continue
            level = logging.WARNING
            if setting.good is None:  # the setting cannot be read
                level = logging.INFO
            log.log(level, "%s %s: %s; advised: %s", setting.device, setting.name, setting.value, setting.advised)

    def _find_sampled_step(self) -> int:
        """Return the newest step for which connected ranks record all spans; 0 if they record roll-ups only."""
        with self._lock:
            return max((ring.sampled_step for ring, is_connected in self._rings.items() if is_connected), default=0)

    def _start_clock(self, ingest: Ingest) -> None:
        """Serve the common clock on host 0, or prepare to read it on another host. A job of one host needs neither."""
        if self._hosts == 1:
            return
        if self._host:
            self._host_clock = HostClock(self.out.parent, ingest.clock_ns)
            return
        offset_ns = ingest.clock_ns
        try:
            self._clock_server = ClockServer(self.out.parent, lambda: time.monotonic_ns() + offset_ns)
        except OSError as error:
            log.warning("other hosts cannot read the common clock: %s", error)

    def _store_clock_offset(self, ingest: Ingest) -> None:
        """Store the offset between this host's clock and the common clock, with its error."""
        if self._host_clock is None:  # this host's clock is the common clock
            ingest.add_clock(time.monotonic_ns(), ingest.clock_ns, error_ns=0)
            return
        if time.monotonic() - self._last_comparison >= _CLOCK_SECONDS:
            self._last_comparison = time.monotonic()
            self._host_clock.compare()
        ingest.add_clock(*self._host_clock.read_offset())

    def _take_frames(self, ingest: Ingest) -> None:
        """Take the frames of all rings. Close the empty rings of disconnected ranks."""
        with self._lock:
            rings = list(self._rings.items())
        is_full = ingest.is_full()
        for ring, is_connected in rings:
            frame_bytes = 0
            if not is_full:
                frame_bytes = ingest.take_frames(ring)
            self._lost[ring.rank] = LostCounts(ring.lost_spans, ring.lost_rollups)
            if not is_connected and not frame_bytes:
                with self._lock:
                    del self._rings[ring]
                ring.close()

    def _run_each_second(self, ingest: Ingest, counters: HostCounters) -> None:
        ingest.flush()
        self._store_clock_offset(ingest)
        records = counters.sample(time.monotonic_ns())
        if len(records):
            ingest.add_records(COUNTERS, records)
        self._read_request()
        self._write_state(ingest)

    def _read_request(self) -> None:
        """Read for which steps all spans are requested (`megascale spans RUN --steps N`), and inform the ranks."""
        try:
            record = strict_json.loads(read_small_text(self.out.parent / REQUEST_FILE))
            requested = (max(0, int(record["first"])), max(0, int(record["last"])))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return
        # Rings store step numbers in 64 bits.
        if requested != self._requested_steps and max(requested) < 1 << 62:
            self._requested_steps = requested
            with self._lock:
                for ring in self._rings:
                    ring.request_spans(*requested)

    def _write_state(self, ingest: Ingest) -> None:
        """Write the progress of the service to STATE_FILE."""
        with self._lock:
            steps = {str(ring.rank): ring.step for ring in self._rings}
        state: dict[str, Any] = {
            "time": time.time(),
            "pid": os.getpid(),
            "steps": steps,
            "rows": ingest.rows,
            "lost_spans": {str(rank): lost.spans for rank, lost in self._lost.items() if lost.spans},
            "lost_rollups": {str(rank): lost.rollups for rank, lost in self._lost.items() if lost.rollups},
            "removed_files": ingest.removed_files,
            "given_up_segments": ingest.dropped_segments,
            "failures": ingest.failures,
            "damaged": ingest.damaged,
            "error": ingest.error,
            "network": [
                {
                    "device": setting.device,
                    "name": setting.name,
                    "found": setting.value,
                    "advised": setting.advised,
                    "good": setting.good,
                }
                for setting in self._network
            ],
        }
        with contextlib.suppress(OSError):
            write_atomically(self.out / STATE_FILE, strict_json.dumps(state) + "\n")


def serve(folder: Path, service: SpanService, ready: ReadySignal) -> None:
    """Serve until the ranks have disconnected. Return at once if another process serves."""
    location = ServiceLocation(folder, NAME)

    def start_service() -> Callable[[Conversation], None]:
        service.out.mkdir(parents=True, exist_ok=True)
        service.start()
        return service.serve_rank

    claim = host_service.claim_service(location, start_service, (FROM_SPANS, TO_SPANS), ready, make_folder=True)
    if claim is None:
        return
    service.server = claim.server
    try:
        claim.server.serve(service.is_done)
    finally:
        claim.server.stop()
        service.stop()
        location.release(claim.lock)


def main() -> None:
    """Run the process's command line, which ranks use."""
    parser = argparse.ArgumentParser(description="Span service of one host.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the host's spans")
    parser.add_argument("--job", required=True)
    parser.add_argument("--host", type=int, required=True)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--limit-mib", type=int, default=512)
    parser.add_argument("--sink", action="append", help="one of observe.span_sinks; may be repeated")
    parser.add_argument("--segment-seconds", type=float, default=300.0)
    parser.add_argument("--ready", type=int, help="open file that is written when the service is ready")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(0))
    with contextlib.suppress(OSError):
        os.nice(5)

    def make_ingest() -> Ingest:
        return Ingest(
            options.out,
            job=options.job,
            host=options.host,
            hostname=socket.gethostname(),
            sink=open_span_sinks(options.sink or ["parquet"]),
            limit=options.limit_mib << 20,
            segment_seconds=options.segment_seconds,
        )

    service = SpanService(options.out, make_ingest, options.host, options.hosts)
    serve(options.folder, service, ReadySignal(options.ready, None))


if __name__ == "__main__":
    main()
