"""The loader process of a host: fills the ring ahead of its readers. No torch.

One thread answers the readers, one fills the ring. Neither polls: readers and loader ring each other's bell (an
eventfd). The loader keeps nothing that cannot be had again: sample order is a function of (seed, number), and how far
everybody is stands in the segment, so another process goes on where a killed one stopped.

Run as `python -m megascale.data.loader.loader_service FOLDER --parent PID`; `host_loader.connect` starts it where none
runs."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megascale.data.dataset.samples import SampleSource, hash_ids
from megascale.data.loader import ring as rings
from megascale.data.loader.host_layout import HostPlan, index_folder
from megascale.errors import MegascaleError

log = logging.getLogger("megascale.data.loader")

SOCKET, LOCK, PLAN, SEGMENT = "loader.sock", "loader.lock", "plan.json", "segment"
MESSAGE = 1 << 16
_NOBODY_YET = 900.0  # seconds to wait for the first reader
_LINGER = 2.0  # seconds after the last one has gone without a word


@dataclass
class Seat:
    """A reader's place: its bell once it is here, `gone` after it has left or died."""

    bell: int = -1
    gone: bool = False


class LoaderService:
    """The loader of one host and start of a run; `parent` is the process that started this one."""

    def __init__(self, folder: Path, parent: int) -> None:
        self.folder, self.parent = folder, parent
        self.plan = HostPlan.from_json((folder / PLAN).read_text())
        self.segment = Path((folder / SEGMENT).read_text())
        for sentence in rings.reap(self.segment.parent):
            log.warning("%s", sentence)
        shape = self.plan.shape
        job = str(self.plan.config.run_folder.absolute())
        self.ring, there = rings.create(self.segment, shape, self.plan.hash, job)
        generation = int(self.ring.header["generation"])
        log.info("generation %d owns %s: %s bytes, streams %s", generation, self.segment, shape.size, shape.readers)
        if there:
            log.info("going on at micro-batches %s", [self.ring.produced(i) for i in range(len(shape.readers))])
        self.source = SampleSource(self.plan.config, index_folder(self.plan.config))
        self.seats = [[Seat() for _ in ranks] for ranks in shape.readers]
        self.connections: dict[socket.socket, tuple[int, int] | None] = {}
        self.failure: dict[str, str] | None = None
        self.work = os.eventfd(0, os.EFD_CLOEXEC)  # there may be something to fill
        self.attention = os.eventfd(0, os.EFD_CLOEXEC)  # the filling thread has something to say
        self.lock = threading.Lock()  # what both threads change: seats, and where a stream goes on
        self.filler: threading.Thread | None = None
        self.came = self.ending = False
        self.left_at = time.monotonic()
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
            self._fail(str(error), type(error).__name__)
        except Exception as error:
            log.exception("the loader failed")
            self._fail(f"the data loader failed: {type(error).__name__}: {error}", "TrainingError")

    def _fail(self, text: str, kind: str) -> None:
        log.error("%s", text)
        self.failure = {"error": text, "kind": kind}
        os.eventfd_write(self.attention, 1)

    def _next_stream(self) -> int | None:
        """The stream with the fewest micro-batches ready, None if all are full or nobody has come."""
        if int(self.ring.header["base"]) < 0:
            return None
        ahead = []
        for stream, seats in enumerate(self.seats):
            taken = [self.ring.taken(stream, j) for j, seat in enumerate(seats) if not seat.gone]
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

    def serve(self, listener: socket.socket) -> None:
        """Answer readers until all have left."""
        self.filler = threading.Thread(target=self.fill, daemon=True)
        self.filler.start()
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ, self._welcome)
            selector.register(self.attention, selectors.EVENT_READ, self._tell)
            while not self._done():
                # Readers at work keep it asleep; only with none here does time matter.
                for key, _ in selector.select(None if self.connections else 0.2):
                    key.data(selector, key.fileobj)

    def close(self) -> None:
        """Keep what was learnt of text; after the last reader nothing of this start is left on the host."""
        self.ending = True
        os.eventfd_write(self.work, 1)
        if self.filler is not None:
            self.filler.join(5.0)
        self.source.close()
        if not self.connections:
            self.segment.unlink(missing_ok=True)
            shutil.rmtree(self.folder, ignore_errors=True)

    def _done(self) -> bool:
        waited = time.monotonic() - self.left_at
        if all(seat.gone for seats in self.seats for seat in seats):
            return not self.connections
        if self.connections:
            return False
        if self.came:
            return waited > _LINGER
        # Before the first reader the loader is its starter's; after that it is theirs.
        return os.getppid() != self.parent or waited > _NOBODY_YET

    def _welcome(self, selector: selectors.BaseSelector, listener: Any) -> None:
        sock, _ = listener.accept()
        self.connections[sock] = None
        selector.register(sock, selectors.EVENT_READ, self._receive)

    def _tell(self, selector: selectors.BaseSelector, attention: Any) -> None:
        """Tell all readers what went wrong."""
        os.eventfd_read(attention)
        for sock, place in self.connections.items():
            if place is not None and self.failure:
                with contextlib.suppress(OSError):
                    sock.send(json.dumps(self.failure).encode())

    def _receive(self, selector: selectors.BaseSelector, sock: Any) -> None:
        try:
            data, handles, _, _ = socket.recv_fds(sock, MESSAGE, 4)
        except OSError:
            data, handles = b"", []
        if not data:
            self._leave(selector, sock)
            return
        message = json.loads(data)
        try:
            getattr(self, f"_on_{message['do']}")(sock, message, handles)
        except (OSError, ValueError, KeyError) as error:
            with contextlib.suppress(OSError):
                sock.send(json.dumps({"error": str(error), "kind": "TrainingError"}).encode())

    def _on_attach(self, sock: socket.socket, message: dict[str, Any], handles: list[int]) -> None:
        """A reader sits down: it gets the segment and the loader's bell."""
        rank, base = message["rank"], message["base"]
        stream, j = self.plan.shape.place(rank)
        header = self.ring.header
        if int(header["base"]) not in (-1, base):
            raise ValueError(
                f"rank {rank} wants to go on after {base} samples and others of this host after {int(header['base'])}: "
                "the ranks have not loaded the same checkpoint; start the run again"
            )
        if message["generation"] >= int(header["generation"]):
            header["generation"] = message["generation"] + 1  # the segment with the count was lost
        self.connections[sock] = (stream, j)
        seat = self.seats[stream][j]
        with self.lock:
            if seat.bell >= 0:
                os.close(seat.bell)
            seat.bell = handles[0]
        if self.failure:
            sock.send(json.dumps(self.failure).encode())
            return
        answer = {"generation": int(header["generation"]), "pid": os.getpid()}
        socket.send_fds(sock, [json.dumps(answer).encode()], [self.ring.handle, self.work])

    def _on_ready(self, sock: socket.socket, message: dict[str, Any], handles: list[int]) -> None:
        """A reader has mapped the segment and written how far it is."""
        place = self.connections[sock]
        assert place is not None
        stream, j = place
        with self.lock:
            taken, produced = self.ring.taken(stream, j), self.ring.produced(stream)
            # Only where the segment was lost under a running job: begin where its readers are.
            if (produced < taken and not self.came) or (taken < produced and not self.ring.ready(stream, taken)):
                self.ring.rewind(stream, taken)
            self.seats[stream][j].gone = False
        self.came = True
        if int(self.ring.header["base"]) < 0:
            self.ring.header["base"] = message["base"]
        os.eventfd_write(self.work, 1)

    def _on_bye(self, sock: socket.socket, message: dict[str, Any], handles: list[int]) -> None:
        """A reader is done with the run."""
        place = self.connections[sock]
        if place is not None:
            self.seats[place[0]][place[1]].gone = True

    def _leave(self, selector: selectors.BaseSelector, sock: Any) -> None:
        """A reader has left or died: nobody waits for it."""
        selector.unregister(sock)
        place = self.connections.pop(sock)
        sock.close()
        self.left_at = time.monotonic()
        if place is not None:
            self.seats[place[0]][place[1]].gone = True
            os.eventfd_write(self.work, 1)


def serve(folder: Path, parent: int, starting: int | None = None) -> None:
    """Serve until all readers have left. Returns at once if another process already serves the folder.

    Args:
        parent: who started this process (it may be dead by now, so getppid cannot tell).
        starting: an open lock to let go of when readers can connect.
    """
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    service = LoaderService(folder, parent)
    path = folder / SOCKET
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(path))
    listener.listen(256)
    with contextlib.suppress(BrokenPipeError):  # who started this has died meanwhile
        print("ready", flush=True)
    if starting is not None:
        os.close(starting)
    try:
        service.serve(listener)
    finally:
        listener.close()
        service.close()


def main() -> None:
    """Command line of the process; started by `host_loader.connect`, not by people."""
    parser = argparse.ArgumentParser(description="Data loader of one host.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--parent", type=int, required=True, help="process that starts this one")
    parser.add_argument("--lock", type=int, help="open file to close when ready")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        serve(arguments.folder, arguments.parent, arguments.lock)
    except MegascaleError as error:
        print(json.dumps({"error": str(error), "kind": type(error).__name__}), flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
