"""The checkpoint service of a host: owns the staging memory, outlives the trainers, writes what they staged. No torch.

A trainer asks for memory, fills it under the next forward and backward pass, says so, and goes on; writing, copying
to a peer host and committing happen here. If trainers die, what was staged is still saved, and new trainers find it
in memory. The service ends by itself once nobody has talked to it for a while.

Run as `python -m megascale.checkpoint.background.service FOLDER`; `connect` starts it where none runs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megascale.checkpoint.background import replica, service_protocol
from megascale.checkpoint.background.commit_writer import Writer
from megascale.checkpoint.background.pending_saves import Failed
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.staged_file import Progress, Slot, StagingMemory, frame
from megascale.errors import TrainingError

log = logging.getLogger("megascale.checkpoint.background.service")

_SOCKET, _LOCK = "checkpoint.sock", "checkpoint.lock"


class CheckpointService:
    """State shared by the connections. One lock guards the tables; slots have their own."""

    def __init__(self, linger: float) -> None:
        self.name = os.urandom(8).hex()
        self.linger = linger
        self.slots: dict[int, list[Slot]] = {}
        self.replicas = replica.Replicas()
        self.layouts: dict[int, CheckpointIndex] = {}
        self.writer = Writer(self._work, self._deserted)
        self.changed = threading.Condition()
        self.connections = 0
        self.working = 0
        self.last_left = time.monotonic()
        self.goodbye = False

    def done(self) -> bool:
        """Whether to end: nobody connected for a while (or all said goodbye) and nothing left to do."""
        with self.changed:
            idle = not self.connections and not self.working
            return idle and (self.goodbye or self._deserted())

    def _deserted(self) -> bool:
        """Whether no trainer has been here for longer than the service waits for one."""
        return not self.connections and time.monotonic() - self.last_left > self.linger

    def talk(self, sock: socket.socket) -> None:
        """Serve one trainer until it leaves."""
        with self.changed:
            self.connections += 1
            self.goodbye = False
        try:
            while True:
                message = service_protocol.receive(sock)
                try:
                    getattr(self, f"on_{message['do']}")(sock, message)
                except (OSError, Failed, TrainingError, ValueError, KeyError) as error:
                    log.exception("%s failed", message["do"])
                    service_protocol.send(sock, {"error": str(error), "kind": type(error).__name__})
        except (EOFError, ConnectionError, BrokenPipeError):
            pass
        finally:
            sock.close()
            with self.changed:
                self.connections -= 1
                self.last_left = time.monotonic()

    def on_ping(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """Here."""
        service_protocol.send(sock, {})

    def on_hello(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """Who this is, and the port where it takes replicas."""
        token = bytes.fromhex(message["token"]) if message.get("token") else b""
        port = self.replicas.listen(message.get("listen", "127.0.0.1"), token) if token else 0
        service_protocol.send(sock, {"service": self.name, "pid": os.getpid(), "port": port})

    def on_goodbye(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """The run is over: end as soon as the work is done."""
        with self.changed:
            self.goodbye = True
        service_protocol.send(sock, {})

    def on_allocate(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """Memory for one process's snapshots; the same memory again if its size has not changed."""
        rank, size, count = message["rank"], message["size"], message["slots"]
        index = CheckpointIndex.from_bytes(bytes(message.body))
        with self.changed:
            slots = self.slots.get(rank, [])
        for slot in slots:
            slot.busy.acquire()  # a dead trainer's snapshot may still be on its way to the disk
            slot.busy.release()
        if [slot.memory.size for slot in slots] != [size] * count:
            for slot in slots:
                slot.memory.close()
            slots = [Slot(StagingMemory(size), index) for _ in range(count)]
        with self.changed:
            self.slots[rank], self.layouts[rank] = slots, index
        service_protocol.send(
            sock, {"held": [s.generation for s in slots]}, handles=[slot.memory.handle for slot in slots]
        )

    def on_fill(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """The trainer is about to overwrite a slot: from here on its snapshot is not complete."""
        slot = self.slots[message["rank"]][message["slot"]]
        slot.generation = ""
        service_protocol.send(sock, {})

    def on_staged(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """A slot is filled, or with "follow" is being filled: complete it, copy it to the peer, write it meanwhile.

        Answers when the snapshot is complete here and at the peer, and again when the slot may be filled anew.
        """
        started = time.monotonic()
        rank = message["rank"]
        slot = self.slots[rank][message["slot"]]
        with self._work(), slot.busy:
            slot.index = self.layouts[rank]
            staged = _staged(sock, len(slot.index), message.get("follow", False))
            writing = self.writer.start(message, slot) if message["persist"] else None
            progress = writing.progress if writing else Progress()
            crc = problem = None
            try:
                try:
                    crcs, crc = frame(slot.memory.view[: message["size"]], slot.index, staged, progress)
                finally:
                    for _ in staged:  # the trainer's next question comes after these
                        pass
                slot.become(message, crcs.tolist())
                if message.get("peer"):
                    problem = self._replicate(message, slot)
                with contextlib.suppress(OSError):  # copies and files are made without the trainer too
                    service_protocol.send(sock, {})
            finally:
                if writing:
                    writing.finish(crc)
        service_protocol.send(sock, {"seconds": time.monotonic() - started, "replica": problem})

    def _replicate(self, message: service_protocol.Message, slot: Slot) -> str | None:
        host, port = message["peer"]
        try:
            whose = {name: message[name] for name in ("rank", "slot", "size", "above")}
            whose["slots"] = len(self.slots[message["rank"]])
            replica.push(host, port, bytes.fromhex(message["token"]), whose, slot)
        except OSError as error:
            log.warning("the copy of process %s to %s:%s failed: %s", message["rank"], host, port, error)
            return f"{host}:{port}: {error}"
        return None

    def on_plan(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """The whole plan and torch's form of it, from the first process: sent once, used for every save."""
        size = message["index_bytes"]
        self.writer.plans = {message["plan"]: (bytes(message.body[:size]), bytes(message.body[size:]))}
        service_protocol.send(sock, {})

    def on_pruned(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """Answer when the checkpoints that a commit made superfluous are gone."""
        with self.writer.pruned():
            service_protocol.send(sock, {})

    def on_wait(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """Answer when a save is committed or given up."""
        service_protocol.send(sock, self.writer.wait(message["generation"], lambda: service_protocol.alive(sock)))

    def on_list(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """What lies in memory here: own snapshots and replicas of other hosts'."""
        with self.changed:
            own = [(rank, slot) for rank, slots in self.slots.items() for slot in slots]
        found = [
            {"rank": rank, "replica": copy, **s.label(), "state": ""}
            for copy, items in ((False, own), (True, self.replicas.held()))
            for rank, s in items
            if s.generation
        ]
        service_protocol.send(sock, {"held": found, "service": self.name})

    def on_open(self, sock: socket.socket, message: service_protocol.Message) -> None:
        """One snapshot: its memory, its chunks with their checksums, the state saved with it."""
        with self.changed:
            own = list(self.slots.get(message["rank"], []))
        copies = [slot for rank, slot in self.replicas.held() if rank == message["rank"]]
        for slot in own + copies:
            if slot.generation == message["generation"]:
                header = {"state": slot.state, "crcs": slot.crcs, "step": slot.step, "size": slot.memory.size}
                service_protocol.send(sock, header, slot.index.to_bytes(), [slot.memory.handle])
                return
        raise KeyError(f"no snapshot of process {message['rank']} and {message['generation']}")

    @contextlib.contextmanager
    def _work(self) -> Any:
        with self.changed:
            self.working += 1
        try:
            yield
        finally:
            with self.changed:
                self.working -= 1
                self.last_left = time.monotonic()


def _staged(sock: socket.socket, count: int, follow: bool) -> Iterator[int]:
    """How many chunks of a snapshot have their elements, as the trainer tells it; EOFError if it ends before."""
    rows = count if not follow else -1
    while rows < count:
        rows = service_protocol.receive(sock)["rows"]
        yield rows
    if not follow:
        yield count


def serve(folder: Path, linger: float) -> None:
    """Serve until there is nothing left to do. Returns at once if another service already has the folder."""
    lock = _take(folder, create=True)
    if lock is None:
        return
    path = folder / _SOCKET
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(128)
    listener.settimeout(0.2)
    service = CheckpointService(linger)
    while not service.done():
        with contextlib.suppress(TimeoutError):
            sock, _ = listener.accept()
            sock.settimeout(None)
            threading.Thread(target=service.talk, args=(sock,), daemon=True).start()
    _leave(folder, lock)
    listener.close()
    # Those that were killed could not tidy up.
    for other in folder.parent.glob(f"*/{_LOCK}"):
        with contextlib.suppress(OSError):
            if (left := _take(other.parent, create=False)) is not None:
                _leave(other.parent, left)


def _take(folder: Path, create: bool) -> int | None:
    """The lock of a service's folder, None if a service has it (or, without `create`, if there is none)."""
    path = folder / _LOCK
    while True:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            if create:
                continue  # a service that ended has just removed the folder
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except BlockingIOError:
            os.close(lock)
            return None
        except FileNotFoundError:
            pass
        # Its holder has ended between our two calls, and removed it: what we hold keeps nobody out.
        os.close(lock)


def _leave(folder: Path, lock: int) -> None:
    """Remove what a service leaves, while nobody else can come, and let go."""
    for name in (_SOCKET, _LOCK):
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # there is more in it, or somebody comes just now
        folder.rmdir()
    os.close(lock)


def connect(folder: Path, linger: float = 60.0, log_file: Path | None = None) -> socket.socket:
    """A connection to the service of `folder` (see service_protocol.private_folder), which is started if none runs.

    Raises TrainingError if it does not come up.
    """
    deadline = time.monotonic() + 30
    child: subprocess.Popen | None = None
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(folder / _SOCKET))
            # One that is just ending, or was killed, may still take connections: only an answer counts.
            sock.settimeout(max(deadline - time.monotonic(), 0.1))
            service_protocol.send(sock, {"do": "ping"})
            service_protocol.receive(sock)
            sock.settimeout(None)
            return sock
        except (OSError, EOFError):
            sock.close()
        if child is None or child.poll() is not None:
            child = _start(folder, linger, log_file)
        if time.monotonic() > deadline:
            raise TrainingError(
                f"the checkpoint service does not answer on {str(folder / _SOCKET)!r}; "
                f"look into {str(log_file or folder)!r}, or set checkpoint.background=false"
            )
        time.sleep(0.02)


def _start(folder: Path, linger: float, log_file: Path | None) -> subprocess.Popen:
    """Start the service in a session of its own: it must survive the trainer and the terminal's interrupt."""
    if log_file is not None:
        log_file.parent.mkdir(parents=True, exist_ok=True)
    with open(log_file or os.devnull, "ab") as out:
        command = [
            sys.executable,
            "-m",
            "megascale.checkpoint.background.service",
            str(folder),
            "--linger",
            str(linger),
        ]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)


def main() -> None:
    """Command line of the service; started by `connect`, not by people."""
    parser = argparse.ArgumentParser(description="Checkpoint service of one host.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--linger", type=float, default=60.0, help="seconds to wait for trainers before ending")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    serve(arguments.folder, arguments.linger)


if __name__ == "__main__":
    main()
