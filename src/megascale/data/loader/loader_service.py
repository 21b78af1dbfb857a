"""The loader process of a host: fills the ring ahead of its readers. No torch.

A thread a reader answers, one fills the ring. None polls: readers and loader ring each other's bell (an
eventfd). The loader keeps nothing that cannot be had again: sample order is a function of (seed, number), and how far
everybody is stands in the segment, so another process goes on where a killed one stopped.

Run as `python -m megascale.data.loader.loader_service FOLDER --parent PID`; `host_loader.connect` starts it where none
runs."""

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

from megascale.data.dataset.samples import SampleSource, hash_ids
from megascale.data.loader import ring as rings
from megascale.data.loader.host_layout import HostPlan, index_folder
from megascale.data.loader.loader_messages import (
    FROM_LOADER,
    FROM_READER,
    NAME,
    Attach,
    Attached,
    Seated,
)
from megascale.errors import MegascaleError, kind_of
from megascale.services import host_service
from megascale.services.conversation import Conversation, ErrorReply
from megascale.services.host_service import Ready, ServiceLocation
from megascale.services.reception import Reception

log = logging.getLogger("megascale.data.loader")

PLAN, SEGMENT = "plan.json", "segment"
_NOBODY_YET = 900.0  # seconds to wait for the first reader
_LINGER = 2.0  # seconds after the last one has gone without a word


@dataclass
class Seat:
    """A reader's place: its bell and its conversation once it is here, `gone` after it has left or died."""

    bell: int = -1
    reader: Conversation | None = None
    gone: bool = False


class LoaderService:
    """The loader of one host and start of a run; `parent` is the process that started this one."""

    reception: Reception

    def __init__(self, folder: Path, parent: int) -> None:
        self.folder, self.parent = folder, parent
        self.plan = HostPlan.from_json((folder / PLAN).read_text())
        self.segment = Path((folder / SEGMENT).read_text())
        for sentence in rings.reap(self.segment.parent):
            log.warning("%s", sentence)
        shape = self.plan.shape
        job = str(self.plan.config.run_folder.absolute())
        try:
            self.ring, there = rings.create_segment(self.segment, shape, self.plan.hash, job)
        except OSError as error:  # another user has taken the name since the segment was lost: readers ask for no name
            log.warning("%s; another name is taken", error)
            self.segment = rings.new_name(self.segment.parent)
            (folder / SEGMENT).write_text(str(self.segment))
            self.ring, there = rings.create_segment(self.segment, shape, self.plan.hash, job)
        generation = int(self.ring.header["generation"])
        log.info("generation %d owns %s: %s bytes, streams %s", generation, self.segment, shape.size, shape.readers)
        if there:
            log.info("going on at micro-batches %s", [self.ring.produced(i) for i in range(len(shape.readers))])
        self.source = SampleSource(self.plan.config, index_folder(self.plan.config))
        self.seats = [[Seat() for _ in ranks] for ranks in shape.readers]
        self.failure: ErrorReply | None = None
        self.work = os.eventfd(0, os.EFD_CLOEXEC)  # there may be something to fill
        self.lock = threading.RLock()  # what several threads change: seats, and where a stream goes on
        self.filler: threading.Thread | None = None
        self.came = self.ending = False
        self._step: tuple[int, int, float] = (-1, 0, 0.0)

    # filling ----------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """Keep all streams full, the emptiest first; the body of the filling thread."""
        try:
            while not self.ending:
                stream = self._next_stream()
                if stream is None:
                    started = time.perf_counter()
                    os.eventfd_read(self.work)
                    if self.came:
                        self.ring.header["full_seconds"] += time.perf_counter() - started
                    continue
                self._fill(stream)
        except MegascaleError as error:
            self._fail(str(error), kind_of(error))
        except Exception as error:
            log.exception("the loader failed")
            self._fail(f"the data loader failed: {type(error).__name__}: {error}", "TrainingError")

    def _fail(self, text: str, kind: str) -> None:
        log.error("%s", text)
        with self.lock:
            self.failure = ErrorReply(text[:2000], kind)
            for seats in self.seats:
                for seat in seats:
                    if seat.reader is not None:
                        with contextlib.suppress(OSError):
                            seat.reader.send(self.failure)

    def _next_stream(self) -> int | None:
        """The stream with the fewest micro-batches ready, None if all are full or nobody has come."""
        if int(self.ring.header["base"]) < 0:
            return None
        ahead = []
        for stream, seats in enumerate(self.seats):
            taken = [self.ring.released(stream, j) for j, seat in enumerate(seats) if not seat.gone]
            if taken and (left := self.ring.produced(stream) - min(taken)) < self.plan.shape.depth:
                ahead.append((left, stream))
        return min(ahead)[1] if ahead else None

    def _fill(self, stream: int) -> None:
        plan, ring = self.plan, self.ring
        number, base = ring.produced(stream), int(ring.header["base"])
        first = plan.first_sample(base, stream, number)
        rows = self.source.batch(first, plan.config.train.micro_batch)
        step = number // plan.microbatches
        ids, epochs = self._ids(base, step) if plan.leader else (0, 0.0)
        with self.lock:
            if ring.produced(stream) == number:
                ring.put(stream, rows, first, ids, epochs)
            for seat in self.seats[stream]:
                if seat.bell >= 0:
                    os.eventfd_write(seat.bell, 1)
        meter = self.source.meter
        for name in rings.MEASURES[:-1]:
            ring.header[name] += getattr(meter, name)
            setattr(meter, name, 0)

    def _ids(self, base: int, step: int) -> tuple[int, float]:
        """Hash of the ids of a whole step's samples, and the epochs when it is done."""
        if self._step[0] != step:
            batch = self.plan.config.train.global_batch
            ids = self.source.ids(base + step * batch, batch)
            self._step = (step, hash_ids(ids), self.source.epochs(base + (step + 1) * batch))
        return self._step[1:]

    # readers ----------------------------------------------------------------------------------------------------

    def serve(self, reception: Reception) -> None:
        """Answer readers until all have left."""
        self.reception = reception
        self.filler = threading.Thread(target=self.fill, daemon=True)
        self.filler.start()
        reception.serve(self._done)

    def close(self) -> None:
        """Keep what was learnt of text; after the last reader nothing of this start is left on the host."""
        self.ending = True
        os.eventfd_write(self.work, 1)
        if self.filler is not None:
            self.filler.join(5.0)
        self.source.close()
        if not self.reception.client_count:
            self.segment.unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _done(self) -> bool:
        if self.reception.client_count:
            return False
        if all(seat.gone for seats in self.seats for seat in seats):
            return True
        if self.came:
            return self.reception.deserted(_LINGER)
        # Before the first reader the loader is its starter's; after that it is theirs.
        return os.getppid() != self.parent or self.reception.deserted(_NOBODY_YET)

    def talk(self, reader: Conversation) -> None:
        """Serve one reader until it leaves or dies: then nobody waits for it."""
        try:
            while True:
                message = reader.receive()
                try:
                    if isinstance(message, Attach):
                        self._attach(reader, message)
                    elif isinstance(message, Seated):
                        self._seated(reader, message)
                    else:
                        self._leave(reader)
                except (ValueError, LookupError) as error:
                    reader.send(ErrorReply(str(error)[:2000], "TrainingError"))
        finally:
            self._leave(reader)
            os.eventfd_write(self.work, 1)

    def _attach(self, reader: Conversation, message: Attach) -> None:
        """A reader sits down: it gets the segment and the loader's bell."""
        (bell,) = reader.files
        stream, j = self.plan.shape.find_reader(message.rank)
        with self.lock:
            header = self.ring.header
            if int(header["base"]) not in (-1, message.base):
                raise ValueError(
                    f"rank {message.rank} wants to go on after {message.base} samples and others of this host after "
                    f"{int(header['base'])}: the ranks have not loaded the same checkpoint; start the run again"
                )
            if message.generation >= int(header["generation"]):
                header["generation"] = message.generation + 1  # the segment with the count was lost
            seat = self.seats[stream][j]
            if seat.bell >= 0:
                os.close(seat.bell)
            seat.bell, seat.reader = bell, reader
            if self.failure is not None:
                reader.send(self.failure)
                return
            answer = Attached(int(header["generation"]), os.getpid())
            reader.send(answer, files=[self.ring.handle, self.work])

    def _seat(self, reader: Conversation) -> tuple[int, int] | None:
        places = ((i, j) for i, seats in enumerate(self.seats) for j, seat in enumerate(seats) if seat.reader is reader)
        return next(places, None)

    def _seated(self, reader: Conversation, message: Seated) -> None:
        """A reader has mapped the segment and written how far it is."""
        with self.lock:
            place = self._seat(reader)
            if place is None:
                raise ValueError("a reader that has no seat")
            stream, j = place
            taken, produced = self.ring.released(stream, j), self.ring.produced(stream)
            # Only where the segment was lost under a running job: begin where its readers are.
            if (produced < taken and not self.came) or (taken < produced and not self.ring.ready(stream, taken)):
                self.ring.rewind(stream, taken)
            self.seats[stream][j].gone = False
            self.came = True
            if int(self.ring.header["base"]) < 0:
                self.ring.header["base"] = message.base
        os.eventfd_write(self.work, 1)

    def _leave(self, reader: Conversation) -> None:
        with self.lock:
            place = self._seat(reader)
            if place is not None:
                seat = self.seats[place[0]][place[1]]
                seat.gone, seat.reader = True, None


def serve(folder: Path, parent: int, ready: Ready) -> None:
    """Serve until all readers have left. Returns at once if another process already serves the folder.

    Args:
        parent: who started this process (it may be dead by now, so getppid cannot tell).
        ready: told when readers can connect.
    """
    made: list[LoaderService] = []

    def begin() -> Callable[[Conversation], None]:
        made.append(LoaderService(folder, parent))
        return made[0].talk

    owned = host_service.claim_service(ServiceLocation(folder, NAME), begin, (FROM_LOADER, FROM_READER), ready)
    if owned is None:
        return
    (service,) = made
    try:
        service.serve(owned.reception)
    finally:
        owned.reception.stop()
        service.close()


def main() -> None:
    """Command line of the process; started by `host_loader.connect`, not by people."""
    parser = argparse.ArgumentParser(description="Data loader of one host.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process that starts this one")
    parser.add_argument("--ready", type=int, help="open file to tell when ready")
    parser.add_argument("--starting", type=int, help="open lock to let go of when ready")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(0))
    ready = Ready(arguments.ready, arguments.starting)
    try:
        serve(arguments.folder, arguments.parent, ready)
    except MegascaleError as error:
        ready.send(ErrorReply(str(error)[:2000], kind_of(error)))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
