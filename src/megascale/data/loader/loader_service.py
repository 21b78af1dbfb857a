"""The loader process of a host: fills the ring ahead of its readers. No torch.

One thread per reader answers it, one thread fills the ring. No thread polls: readers and loader ring each other's bell
(an eventfd). The loader's state can always be rebuilt: the sample order is a function of (seed, number), and the
segment has the position of every process, so another process resumes where a killed one stopped.

Run as `python -m megascale.data.loader.loader_service FOLDER --parent PID`; `host_loader.connect_loader` starts it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megascale.data.dataset.samples import hash_ids
from megascale.data.loader import ring as rings
from megascale.data.loader.host_plan import FROM_LOADER, FROM_READER, SERVICE, Attach, Attached, HostPlan, Seated
from megascale.errors import MegascaleError, error_class_name
from megascale.services import host_service
from megascale.services.connection_server import ConnectionServer
from megascale.services.conversation import Conversation, ErrorReply
from megascale.services.host_service import ReadySignal, ServiceLocation

log = logging.getLogger("megascale.data.loader")

PLAN, SEGMENT = "plan.json", "segment"
_FIRST_FULL_BUFFER_SECONDS = 900.0  # to wait for the first reader
_LINGER_SECONDS = 2.0  # after the last connection has ended without a word


@dataclass
class Seat:
    """A reader's seat: its bell and conversation while it is connected; `has_left` after it has left or died."""

    bell: int = -1
    reader: Conversation | None = None
    has_left: bool = False


class LoaderService:
    """The loader of one host and start of a run; `parent` is the process that started this one."""

    reception: ConnectionServer

    def __init__(self, folder: Path, parent: int) -> None:
        self.folder = folder
        self.parent = parent
        self.plan = HostPlan.from_json((folder / PLAN).read_text())
        self.segment = Path((folder / SEGMENT).read_text())
        for sentence in rings.remove_dead_segments(self.segment.parent):
            log.warning("%s", sentence)
        shape = self.plan.shape
        try:
            self.ring, is_known = self._create_segment()
        except OSError as error:
            # Another user has created the path since the segment was lost. Readers receive the file, not its path.
            log.warning("%s; the segment gets another name", error)
            self.segment = rings.new_name(self.segment.parent)
            (folder / SEGMENT).write_text(str(self.segment))
            self.ring, is_known = self._create_segment()
        generation = int(self.ring.header["generation"])
        log.info("generation %d owns %s: %s bytes, streams %s", generation, self.segment, shape.size, shape.readers)
        if is_known:
            log.info("resuming at micro-batches %s", [self.ring.produced(i) for i in range(len(shape.readers))])
        self.source = self.plan.open_source()
        self.seats = [[Seat() for _ in ranks] for ranks in shape.readers]
        self.failure: ErrorReply | None = None
        self.work = os.eventfd(0, os.EFD_CLOEXEC)  # rung when slots may have become free
        self.lock = threading.RLock()  # guards seats and stream positions
        self.filler: threading.Thread | None = None
        self.has_readers = False  # a reader has joined
        self.ending = False
        self._step: tuple[int, int, float] = (-1, 0, 0.0)  # step, hash of its ids, epochs at its end
        self._weight_sums: dict[int, tuple[int, float]] = {}  # by stream: step, sum of its loss weights

    def _create_segment(self) -> tuple[rings.Ring, bool]:
        return rings.create_segment(self.segment, self.plan.shape, self.plan.hash, self.plan.run)

    # filling ----------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Keep all streams full, the emptiest first; the body of the filling thread."""
        try:
            while not self.ending:
                stream = self._emptiest_stream()
                if stream is None:
                    started = time.perf_counter()
                    os.eventfd_read(self.work)
                    if self.has_readers:
                        self.ring.header["full_seconds"] += time.perf_counter() - started
                    continue
                self._fill_slot(stream)
        except MegascaleError as error:
            self._fail(str(error), error_class_name(error))
        except Exception as error:
            log.exception("the loader failed")
            self._fail(f"the data loader failed: {type(error).__name__}: {error}", "TrainingError")

    def _fail(self, text: str, kind: str) -> None:
        """Send a failure to all readers, and to those that come later."""
        log.error("%s", text)
        with self.lock:
            self.failure = ErrorReply(text[:2000], kind)
            for reader in (seat.reader for seats in self.seats for seat in seats):
                if reader is not None:
                    with contextlib.suppress(OSError):
                        reader.send(self.failure)

    def _emptiest_stream(self) -> int | None:
        """Return the stream with the fewest ready micro-batches, None if all are full or no reader has joined."""
        if int(self.ring.header["base"]) < 0:
            return None
        candidates = []
        for stream, seats in enumerate(self.seats):
            released = [self.ring.released(stream, j) for j, seat in enumerate(seats) if not seat.has_left]
            if released:
                ready = self.ring.produced(stream) - min(released)
                if ready < self.plan.shape.depth:
                    candidates.append((ready, stream))
        return min(candidates)[1] if candidates else None

    def _fill_slot(self, stream: int) -> None:
        plan, ring = self.plan, self.ring
        number, base = ring.produced(stream), int(ring.header["base"])
        first = plan.first_sample(base, stream, number)
        samples = self.source.read(first, plan.shape.columns)
        step = number // plan.shares[stream][1]
        ids, epochs = self._step_ids(base, step) if plan.leader else (0, 0.0)
        weight_sum = self._sum_step_weights(base, stream, step)
        with self.lock:
            if ring.produced(stream) == number:
                ring.put(stream, samples, first, ids, epochs, weight_sum)
            for seat in self.seats[stream]:
                if seat.bell >= 0:
                    os.eventfd_write(seat.bell, 1)
        meter = self.source.meter
        for name in rings.MEASURES[:-1]:
            ring.header[name] += getattr(meter, name)
            setattr(meter, name, 0)

    def _step_ids(self, base: int, step: int) -> tuple[int, float]:
        """Return the hash of the ids of all samples of a step, and the epochs at its end."""
        if self._step[0] != step:
            batch = self.plan.global_batch
            ids = self.source.ids(base + step * batch, batch)
            self._step = (step, hash_ids(ids), self.source.count_epochs(base + (step + 1) * batch))
        return self._step[1:]

    def _sum_step_weights(self, base: int, stream: int, step: int) -> float:
        """Return the sum of the loss weights of a stream's samples in a step; 0 if samples carry no weights."""
        plan = self.plan
        if not plan.shape.fields.loss_weights:
            return 0.0
        key, weight_sum = self._weight_sums.get(stream, (-1, 0.0))
        if key != step:
            _, count = plan.shares[stream]
            first = plan.first_sample(base, stream, step * count)
            weight_sum = self.source.sum_weights(first, count * plan.shape.columns)
            self._weight_sums[stream] = (step, weight_sum)
        return weight_sum

    # readers ----------------------------------------------------------------------------------------------------

    def serve(self, reception: ConnectionServer) -> None:
        """Answer readers until all have left."""
        self.reception = reception
        self.filler = threading.Thread(target=self.fill, daemon=True)
        self.filler.start()
        reception.serve(self._is_done)

    def close(self) -> None:
        """Save the token counts of text; after the last reader, remove the segment and the folder."""
        self.ending = True
        os.eventfd_write(self.work, 1)
        if self.filler is not None:
            self.filler.join(5.0)
        self.source.close()
        if not self.reception.client_count:
            self.segment.unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _is_done(self) -> bool:
        if self.reception.client_count:
            return False
        if all(seat.has_left for seats in self.seats for seat in seats):
            return True
        if self.has_readers:
            return self.reception.is_idle(_LINGER_SECONDS)
        # Until the first reader joins, the loader ends with the process that started it.
        return os.getppid() != self.parent or self.reception.is_idle(_FIRST_FULL_BUFFER_SECONDS)

    def talk(self, reader: Conversation) -> None:
        """Serve one reader until it leaves or dies; the ring then no longer waits for it."""
        try:
            while True:
                message = reader.receive()
                try:
                    if isinstance(message, Attach):
                        self._attach(reader, message)
                    elif isinstance(message, Seated):
                        self._confirm_seat(reader, message)
                    else:
                        self._leave(reader)
                except (ValueError, LookupError) as error:
                    reader.send(ErrorReply(str(error)[:2000], "TrainingError"))
        finally:
            self._leave(reader)
            os.eventfd_write(self.work, 1)

    def _attach(self, reader: Conversation, message: Attach) -> None:
        """Give a reader its seat, the segment and the loader's bell."""
        (bell,) = reader.files
        stream, j = self.plan.shape.find_reader(message.rank)
        with self.lock:
            header = self.ring.header
            if int(header["base"]) not in (-1, message.base):
                raise ValueError(
                    f"rank {message.rank} resumes after {message.base} samples and other ranks of this host after "
                    f"{int(header['base'])}: the ranks have not loaded the same checkpoint; start the run again"
                )
            if message.generation >= int(header["generation"]):
                header["generation"] = message.generation + 1  # the segment with the count was lost
            seat = self.seats[stream][j]
            if seat.bell >= 0:
                os.close(seat.bell)
            seat.bell = bell
            seat.reader = reader
            if self.failure is not None:
                reader.send(self.failure)
                return
            answer = Attached(int(header["generation"]), os.getpid())
            reader.send(answer, files=[self.ring.handle, self.work])

    def _find_seat(self, reader: Conversation) -> tuple[int, int] | None:
        """Return the stream of a reader and its number there, None for a reader without a seat."""
        for stream, seats in enumerate(self.seats):
            for j, seat in enumerate(seats):
                if seat.reader is reader:
                    return stream, j
        return None

    def _confirm_seat(self, reader: Conversation, message: Seated) -> None:
        """Adopt the position that a reader has written into the mapped segment."""
        with self.lock:
            position = self._find_seat(reader)
            if position is None:
                raise ValueError("the reader has no seat")
            stream, j = position
            released, produced = self.ring.released(stream, j), self.ring.produced(stream)
            # If the segment was lost during the job, resume at the readers' positions.
            is_behind = produced < released and not self.has_readers
            if is_behind or (released < produced and not self.ring.ready(stream, released)):
                self.ring.rewind(stream, released)
            self.seats[stream][j].has_left = False
            self.has_readers = True
            if int(self.ring.header["base"]) < 0:
                self.ring.header["base"] = message.base
        os.eventfd_write(self.work, 1)

    def _leave(self, reader: Conversation) -> None:
        with self.lock:
            position = self._find_seat(reader)
            if position is not None:
                stream, j = position
                self.seats[stream][j].has_left = True
                self.seats[stream][j].reader = None


def serve(folder: Path, parent: int, ready: ReadySignal) -> None:
    """Serve until all readers have left. Returns at once if another process already serves the folder.

    Args:
        parent: the process that started this one (it may have ended, so getppid is not reliable).
        ready: notified when readers can connect.
    """
    services: list[LoaderService] = []

    def begin() -> Callable[[Conversation], None]:
        services.append(LoaderService(folder, parent))
        return services[0].talk

    owned = host_service.claim_service(ServiceLocation(folder, SERVICE), begin, (FROM_LOADER, FROM_READER), ready)
    if owned is None:
        return
    (service,) = services
    try:
        service.serve(owned.server)
    finally:
        owned.server.stop()
        service.close()


def main() -> None:
    """Run the process; `host_loader.connect_loader` starts it."""
    parser = argparse.ArgumentParser(description="Data loader of one host.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process that starts this one")
    parser.add_argument("--ready", type=int, help="descriptor that is written to when the loader is ready")
    parser.add_argument("--starting", type=int, help="descriptor of the lock that is released when the loader is ready")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(0))
    ready = ReadySignal(arguments.ready, arguments.starting)
    try:
        serve(arguments.folder, arguments.parent, ready)
    except MegascaleError as error:
        ready.send(ErrorReply(str(error)[:2000], error_class_name(error)))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
