"""The span service of a host: takes over what its ranks write into their rings, and makes it into files. No torch.

A rank hands over its ring and says no more; what it writes is taken over four times a second and put on the disk every
second. It is at a lower priority than trainers. It ends when the last rank has hung up and all is written; killed, it
is started again by the ranks, and goes on where it stopped.

Run as `python -m megascale.observe.store.span_service FOLDER --out SPANS`; ranks start it where none runs.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.json_lines import append_record
from megascale.core.untrusted_files import read_small_text
from megascale.observe.store import network_settings
from megascale.observe.store.counters import HostCounters
from megascale.observe.store.frames import COUNTERS
from megascale.observe.store.host_clock import ClockServer, HostClock
from megascale.observe.store.ingest import STATE, Ingest
from megascale.observe.store.nic_rates import NicRates
from megascale.observe.store.span_messages import FROM_SPANS, NAME, TO_SPANS, Follow
from megascale.observe.store.span_ring import SpanRing
from megascale.observe.store.span_sinks import open_span_sinks
from megascale.observe.store.tables import RANKS
from megascale.services import host_service
from megascale.services.conversation import Conversation, Done, ErrorReply
from megascale.services.host_service import Ready, ServiceLocation
from megascale.services.reception import Reception

log = logging.getLogger("megascale.observe.spans")

PERIOD = 0.25  # seconds between looks at the rings
ASKED = "asked.json"  # in `runs/NAME/spans`: steps of which somebody wants all spans
_SECOND = 1.0
_ALIGN = 5.0  # seconds between questions for the common time
_LINGER = 2.0  # seconds after the last rank has gone
_NOBODY_YET = 60.0


class SpanService:
    """The rings of a host's ranks and where they go.

    Args:
        out: folder of the host's spans.
        ingest: makes what writes there, in the thread that uses it.
        host, hosts: which of the job's hosts this is; host 0 has the common clock.
    """

    reception: Reception

    def __init__(self, out: Path, ingest: Callable[[], Ingest], host: int = 0, hosts: int = 1) -> None:
        self.out, self._host, self._hosts = out, host, hosts
        self._clock: HostClock | None = None
        self._clocks: ClockServer | None = None
        self._aligned = 0.0
        self._make = ingest
        self._rings: dict[SpanRing, bool] = {}  # and whether its rank is still there
        self._lock = threading.Lock()
        self._asked = (0, 0)
        self._lost: dict[int, tuple[int, int]] = {}
        self._network = network_settings.check_network(os.environ)  # as the ranks have it, who start this
        self._ending = threading.Event()
        # A daemon: if this process cannot serve, nothing keeps it alive. `stop` waits for it.
        self._thread = threading.Thread(target=self._pump, name="megascale-spans", daemon=True)

    # ranks -----------------------------------------------------------------------------------------------------------

    def talk(self, rank: Conversation) -> None:
        """Follow one rank until it hangs up or dies."""
        ring: SpanRing | None = None
        try:
            while True:
                message = rank.receive()
                try:
                    ring = self._follow(message, rank.files)
                    rank.send(Done())
                except (ValueError, OSError) as error:
                    log.warning("rank %d is not followed: %s", message.rank, error)
                    rank.send(ErrorReply(str(error)[:2000], type(error).__name__))
        finally:
            with self._lock:
                if ring is not None:
                    self._rings[ring] = False

    def _follow(self, message: Follow, files: list[int]) -> SpanRing:
        if len(files) != 1:
            for file in files:
                os.close(file)
            raise ValueError(f"{len(files)} open files came; a rank brings its ring")
        try:
            ring = SpanRing(files[0])
        except ValueError:
            os.close(files[0])
            raise
        who = {"attempt": message.attempt, "rank": message.rank, "time": time.time(), "hostname": socket.gethostname()}
        with self._lock:
            append_record(self.out / RANKS, who | dict(message.facts))
            ring.request_spans(*self._asked)
            self._rings[ring] = True
        log.info("following rank %d of attempt %d", message.rank, message.attempt)
        return ring

    def done(self) -> bool:
        """Whether nobody needs the service."""
        if self.reception.client_count:
            return False
        return self.reception.deserted(_LINGER if self.reception.has_had_clients else _NOBODY_YET)

    # the thread ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to take over."""
        self._thread.start()

    def stop(self) -> None:
        """Take over what is left, make all of it into files, and end."""
        self._ending.set()
        self._thread.join()

    def _pump(self) -> None:
        """Take over until the service ends. A failure ends the process: ranks would fill their rings for nobody."""
        try:
            self._take_over()
        except Exception:
            log.exception("the span service cannot go on; training does")
            os._exit(1)

    def _take_over(self) -> None:
        """Take over what the ranks write until `stop`, then make all of it into files."""
        ingest = self._make()
        counters, rates = HostCounters(), NicRates(self._sampled)
        for setting in self._network:
            if not setting.good:
                level = logging.WARNING if setting.good is False else logging.INFO
                log.log(level, "%s %s: %s; advised: %s", setting.device, setting.name, setting.value, setting.advised)
        self._begin_clock(ingest)
        told = 0.0
        while not self._ending.wait(PERIOD):
            self._take(ingest)
            if len(found := rates.take()):
                ingest.add_records(COUNTERS, found)
            now = time.monotonic()
            if now - told >= _SECOND:
                told = now
                self._each_second(ingest, counters)
            ingest.tick(now)
        rates.close()
        counters.close()
        self._take(ingest)
        ingest.close()
        self._tell(ingest)
        if self._clocks is not None:
            self._clocks.close()

    def _sampled(self) -> int:
        """The step that a rank of this host is in and keeps all spans of, 0 if none does."""
        with self._lock:
            return max((ring.keeping for ring, here in self._rings.items() if here), default=0)

    def _begin_clock(self, ingest: Ingest) -> None:
        """Host 0 tells the time, the others ask for it; a single host has its own."""
        if self._hosts == 1:
            return
        if self._host:
            self._clock = HostClock(self.out.parent, ingest.clock_ns)
            return
        base = ingest.clock_ns
        try:
            self._clocks = ClockServer(self.out.parent, lambda: time.monotonic_ns() + base)
        except OSError as error:
            log.warning("the common clock cannot be told to other hosts: %s", error)

    def _note_clock(self, ingest: Ingest) -> None:
        if self._clock is None:
            ingest.note_clock(time.monotonic_ns(), ingest.clock_ns, 0)
            return
        if time.monotonic() - self._aligned >= _ALIGN:
            self._aligned = time.monotonic()
            self._clock.exchange()
        ingest.note_clock(*self._clock.read_offset())

    def _take(self, ingest: Ingest) -> None:
        with self._lock:
            rings = list(self._rings.items())
        full = ingest.full()
        for ring, here in rings:
            taken = 0 if full else ingest.take_frames(ring)
            self._lost[ring.rank] = (ring.lost, ring.lost_rollups)
            if not here and (not taken or full):
                with self._lock:
                    del self._rings[ring]
                ring.close()

    def _each_second(self, ingest: Ingest, counters: HostCounters) -> None:
        ingest.flush()
        self._note_clock(ingest)
        if len(found := counters.sample(time.monotonic_ns())):
            ingest.add_records(COUNTERS, found)
        self._look_for_asked()
        self._tell(ingest)

    def _look_for_asked(self) -> None:
        """Tell the ranks which steps somebody wants all spans of."""
        try:
            told = strict_json.loads(read_small_text(self.out.parent / ASKED))
            asked = (max(0, int(told["first"])), max(0, int(told["last"])))
        except (OSError, ValueError, KeyError, TypeError, OverflowError):
            return
        if max(asked) >= 1 << 62:
            return  # rings hold numbers of steps in 64 bits
        if asked != self._asked:
            self._asked = asked
            with self._lock:
                for ring in self._rings:
                    ring.request_spans(*asked)

    def _tell(self, ingest: Ingest) -> None:
        """Write down how it goes."""
        with self._lock:
            steps = {str(ring.rank): ring.step for ring in self._rings}
        state: dict[str, Any] = {
            "time": time.time(),
            "pid": os.getpid(),
            "steps": steps,
            "rows": ingest.rows,
            "lost_spans": {str(rank): lost for rank, (lost, _) in self._lost.items() if lost},
            "lost_rollups": {str(rank): lost for rank, (_, lost) in self._lost.items() if lost},
            "removed_files": ingest.removed_files,
            "given_up_segments": ingest.given_up,
            "failures": ingest.failures,
            "damaged": ingest.damaged,
            "error": ingest.error,
            "network": [asdict(setting) for setting in self._network],
        }
        temporary = self.out / f"{STATE}.tmp"
        with contextlib.suppress(OSError):
            temporary.write_text(strict_json.dumps(state) + "\n")
            os.replace(temporary, self.out / STATE)


def serve(folder: Path, service: SpanService, ready: Ready) -> None:
    """Serve until the ranks have gone. Returns at once if another process serves."""
    place = ServiceLocation(folder, NAME)

    def begin() -> Callable[[Conversation], None]:
        service.out.mkdir(parents=True, exist_ok=True)
        service.start()
        return service.talk

    owned = host_service.claim_service(place, begin, (FROM_SPANS, TO_SPANS), ready, make_folder=True)
    if owned is None:
        return
    service.reception = owned.reception
    try:
        owned.reception.serve(service.done)
    finally:
        owned.reception.stop()
        service.stop()
        place.release(owned.lock)


def main() -> None:
    """Command line of the process; started by ranks, not by people."""
    parser = argparse.ArgumentParser(description="Span service of one host.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the host's spans")
    parser.add_argument("--job", required=True)
    parser.add_argument("--host", type=int, required=True)
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--limit-mib", type=int, default=512)
    parser.add_argument("--sink", action="append", help="one of observe.span_sinks; several times")
    parser.add_argument("--segment-seconds", type=float, default=300.0)
    parser.add_argument("--ready", type=int, help="open file to tell when ready")
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(0))
    with contextlib.suppress(OSError):
        os.nice(5)

    def ingest() -> Ingest:
        return Ingest(
            given.out,
            job=given.job,
            host=given.host,
            hostname=socket.gethostname(),
            sink=open_span_sinks(given.sink or ["parquet"]),
            limit=given.limit_mib << 20,
            segment_seconds=given.segment_seconds,
        )

    serve(given.folder, SpanService(given.out, ingest, given.host, given.hosts), Ready(given.ready, None))


if __name__ == "__main__":
    main()
