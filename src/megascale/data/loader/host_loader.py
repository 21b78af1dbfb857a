"""The host's loader seen from those who use it: `start` it, and read micro-batches as one of its readers. No torch.

Whoever starts the trainers of a host calls `start` and hands `Started.environment` to them: `megascale train`, or an
agent; under torchrun local rank 0 makes the folder and tells the others through the job's store. A `LoaderReader`
finds the loader dead by the end of its connection, and starts it again; the first to get the folder's lock does, the
others wait."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale import errors
from megascale.config import Config
from megascale.core.private_folder import private_base
from megascale.data.loader import ring as rings
from megascale.data.loader.host_layout import HostPlan, plan_host
from megascale.data.loader.loader_service import MESSAGE, PLAN, SEGMENT, SOCKET
from megascale.data.loader.ring import Ring
from megascale.errors import MegascaleError, TrainingError

log = logging.getLogger("megascale.data.loader")

VARIABLE = "MEGASCALE_LOADER"
LOG = "log"  # name of a link to the log
STARTING = "start.lock"  # held by who starts a loader until it answers
HANG_SECONDS = 60.0  # without any work while readers wait; then the loader is killed and replaced
_COME_UP = 60.0
_GO_DOWN = 5.0  # seconds to keep what was learnt of text
_OLD = 600.0  # seconds after which what is left of a job's folder is rubbish
_DEATHS = 20  # in a row, nothing read between them


@dataclass
class Started:
    """A loader that was started.

    Attributes:
        folder: where readers find it.
        process: the first of its processes; a successor is some reader's child.
    """

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """What trainers need in their environment."""
        return {VARIABLE: str(self.folder)}

    def stop(self) -> None:
        """After the trainers have ended: end the loader, whichever process it is now, and what it left."""
        pid = owner(self.folder)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if self.process.poll() is None and pid != self.process.pid:
            self.process.terminate()  # it has not come up yet
        deadline = time.monotonic() + _GO_DOWN
        while owner(self.folder) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        end(self.folder)
        self.process.wait()


def start(config: Config, *, world: int, first_rank: int, ranks: int) -> Started | None:
    """Start the loader of the host that runs `ranks` ranks of `world`, from `first_rank` on; None if it needs none.

    Raises MegascaleError subclasses for data that cannot be used and for too little shared memory.
    """
    plan = plan_host(config, world, first_rank, ranks)
    if not plan.wanted(gpus=False):
        return None  # or the ranks start one, who know their device
    folder = prepare(plan)
    with open(folder / STARTING, "ab") as lock:
        # The child inherits the lock and drops it when it is ready: readers wait for it instead of starting another.
        fcntl.flock(lock, fcntl.LOCK_EX)
        return Started(folder, _spawn(folder, lock.fileno()))


def prepare(plan: HostPlan, mount: Path = rings.MOUNT) -> Path:
    """Make the folder that a loader of `plan` and its readers share; nothing is started."""
    told = rings.reap(mount)
    rings.check_room(plan.shape.size, mount)
    folder = _private(secrets.token_hex(8))
    (folder / PLAN).write_text(plan.to_json())
    (folder / SEGMENT).write_text(str(mount / f"{rings.prefix()}{folder.name.removeprefix('loader-')}"))
    logs = plan.config.run_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    first = min(min(ranks) for ranks in plan.shape.readers)
    (folder / LOG).symlink_to((logs / f"loader-{first}.log").absolute())
    if told:
        with open(folder / LOG, "a") as out:
            out.writelines(sentence + "\n" for sentence in told)
    return folder


def _sweep(base: Path) -> None:
    """Remove folders of jobs whose segments are gone."""
    for folder in base.glob("loader-*"):
        with contextlib.suppress(OSError):
            segment = Path((folder / SEGMENT).read_text())
            if not segment.exists() and time.time() - folder.stat().st_mtime > _OLD:
                shutil.rmtree(folder, ignore_errors=True)


def _private(token: str) -> Path:
    """A new folder that only this user may enter; it holds a socket, so its path must be short."""
    try:
        base = private_base()
    except PermissionError as error:
        raise TrainingError(str(error)) from None
    _sweep(base)
    folder = base / f"loader-{token}"
    folder.mkdir(mode=0o700)
    return folder


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def connect(folder: Path) -> socket.socket:
    """A connection to the folder's loader, which is started if none runs. Raises what kept it from starting."""
    deadline = time.monotonic() + _COME_UP
    while True:
        with _locked(folder / STARTING):
            sock = _try(folder)
            if sock is not None:
                return sock
            process = _spawn(folder)
            assert process.stdout is not None
            line = process.stdout.readline()  # "ready", what is wrong, or the end if another holds the folder
            if line.startswith(b"{"):
                process.wait()
                raise failure(json.loads(line))
            sock = _try(folder)
            if sock is not None:
                return sock
            process.poll()
        if time.monotonic() > deadline:
            raise TrainingError(
                f"the data loader of this host does not come up (socket {folder / SOCKET}); its last words in "
                f"{os.path.realpath(folder / LOG)}: {last_words(folder)}; --data.loader=local does without it"
            )
        time.sleep(0.05)


def _try(folder: Path) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        sock.connect(str(folder / SOCKET))
        return sock
    except OSError:
        sock.close()
        return None


def _spawn(folder: Path, lock: int | None = None) -> subprocess.Popen[bytes]:
    """A loader in a session of its own: a terminal's interrupt is for the trainers, who tell it when they end."""
    command = [sys.executable, "-m", "megascale.data.loader.loader_service", str(folder), "--parent", str(os.getpid())]
    with open(folder / LOG, "ab") as out:
        return subprocess.Popen(
            command if lock is None else [*command, "--lock", str(lock)],
            pass_fds=() if lock is None else (lock,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=out,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )


def owner(folder: Path) -> int | None:
    """Process id of the folder's loader, None if none runs."""
    sock = _try(folder)
    if sock is None:
        return None
    with sock:
        return _peer(sock)


def _peer(sock: socket.socket) -> int:
    """Who listens at the other end."""
    size = struct.calcsize("3i")
    return struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]


def end(folder: Path) -> None:
    """Kill the folder's loader, if one runs, and remove all that it has."""
    pid = owner(folder)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path((folder / SEGMENT).read_text()).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def failure(told: dict[str, str]) -> MegascaleError:
    """The error that a loader tells of."""
    kind = getattr(errors, told["kind"], TrainingError)
    return kind(told["error"])


def last_words(folder: Path) -> str:
    """The end of the loader's log, as one line."""
    with contextlib.suppress(OSError):
        lines = (folder / LOG).read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) or "nothing"
    return "nothing"


@dataclass
class Taken:
    """A micro-batch in shared memory: a view that holds until `LoaderReader.let_go`.

    Attributes:
        tokens: int32 [sequence_length + 1, micro_batch].
        first: number of its first sample.
        ids: hash of the ids of the whole step's samples (for rank 0).
        epochs: passes over the data when the step is done (for rank 0).
    """

    tokens: NDArray[np.int32]
    first: int
    ids: int
    epochs: float


class LoaderReader:
    """One rank's end of the ring.

    Args:
        folder: of the loader.
        rank: this rank.
        base: samples consumed before this start of the run; the same on all ranks.

    Attributes:
        wait_seconds: in which `take` waited, in all.
        generation: how many processes the loader has had.
        ring: the mapped segment; another object after a segment was lost.
    """

    ring: Ring

    def __init__(self, folder: Path, rank: int, base: int, hang_seconds: float = HANG_SECONDS) -> None:
        self.folder, self.rank, self.base = folder, rank, base
        self.plan = HostPlan.from_json((folder / PLAN).read_text())
        self.stream, self._seat = self.plan.shape.place(rank)
        self.wait_seconds = 0.0
        self.generation = 0
        self._hang_seconds = hang_seconds
        self._next = self._done = 0
        self._closing = False
        self._failure: MegascaleError | None = None
        self._identity = -1
        self._work = -1
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._sock = self._join()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    # the connection ---------------------------------------------------------------------------------------------

    def _join(self) -> socket.socket:
        """Connect, map the segment, say how far this rank is. Raises what keeps the loader from serving."""
        for _ in range(_DEATHS):
            sock = connect(self.folder)
            try:
                hello = {"do": "attach", "rank": self.rank, "base": self.base, "generation": self.generation}
                socket.send_fds(sock, [json.dumps(hello).encode()], [self._bell])
                data, handles, _, _ = socket.recv_fds(sock, MESSAGE, 4)
                if not data:
                    raise ConnectionResetError
                answer = json.loads(data)
                if "error" in answer:
                    sock.close()
                    raise failure(answer)
                self._map(handles)
                self.generation = answer["generation"]
                sock.send(json.dumps({"do": "ready", "base": self.base}).encode())
                return sock
            except OSError:
                sock.close()  # it died in the meantime
        raise TrainingError(
            f"the data loader of this host died {_DEATHS} times in a row; its log is "
            f"{os.path.realpath(self.folder / LOG)}: {last_words(self.folder)}"
        )

    def _map(self, handles: list[int]) -> None:
        handle, work = handles
        identity = os.fstat(handle).st_ino
        with self._lock:
            if self._work >= 0:
                os.close(self._work)
            self._work = work
            if identity == self._identity:
                os.close(handle)
            else:
                self.ring, self._identity = Ring(handle, self.plan.shape), identity
            self.ring.let_go(self.stream, self._seat, self._done)

    def _watch(self) -> None:
        """Sleep until the loader says something: it does so only when it fails or dies."""
        while not self._closing:
            try:
                data = self._sock.recv(MESSAGE)
            except OSError:
                data = b""
            if self._closing:
                return
            try:
                if data:
                    raise failure(json.loads(data))
                self._sock.close()
                self._sock = self._join()
                log.warning("rank %d reads from generation %d of the data loader", self.rank, self.generation)
            except MegascaleError as error:
                self._failure = error
            os.eventfd_write(self._bell, 1)
            if self._failure is not None:
                return

    # reading ----------------------------------------------------------------------------------------------------

    def take(self) -> Taken:
        """The next micro-batch, waiting until it is ready. Raises what the loader failed of."""
        number = self._next
        if not self._ready(number):
            started = time.perf_counter()
            self._wait(number)
            self.wait_seconds += time.perf_counter() - started
        self._next = number + 1
        taken = Taken(*self.ring.slot(self.stream, number))
        wanted = self.plan.first_sample(self.base, self.stream, number)
        if taken.first != wanted:
            raise TrainingError(
                f"the data loader gave sample {taken.first} where {wanted} was due; start the run again"
            )
        return taken

    def _ready(self, number: int) -> bool:
        with self._lock:
            return self.ring.ready(self.stream, number)

    def _wait(self, number: int) -> None:
        idle, work = 0.0, -1.0
        while not self._ready(number):
            if self._failure is not None:
                raise self._failure
            if self._poll.poll(1000 * min(5.0, self._hang_seconds)):
                os.eventfd_read(self._bell)
                continue
            if self.ring.full(self.stream):
                continue  # the loader waits too, for a rank that is behind
            # Nothing for seconds: slow is one thing, a process that does not run at all another.
            now = _worked(_peer(self._sock)) if self._sock.fileno() >= 0 else -1.0
            idle = 0.0 if now != work else idle + min(5.0, self._hang_seconds)
            work = now
            if idle >= self._hang_seconds:
                self._replace()
                idle = 0.0

    def _replace(self) -> None:
        """Kill a loader that hangs; the watcher starts another."""
        with contextlib.suppress(OSError):
            pid = _peer(self._sock)
            log.warning("the data loader (process %d) did nothing for %g seconds: killed", pid, self._hang_seconds)
            os.kill(pid, signal.SIGKILL)

    def let_go(self) -> None:
        """Done with the oldest micro-batch taken and not let go yet: its memory may be written anew."""
        with self._lock:
            self._done += 1
            self.ring.let_go(self.stream, self._seat, self._done)
            os.eventfd_write(self._work, 1)

    @property
    def fill(self) -> float:
        """Part of the ring that is ready for this rank."""
        return self.ring.fill(self.stream, self._next)

    def close(self) -> None:
        """Leave for good."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.send(json.dumps({"do": "bye"}).encode())
            self._sock.shutdown(socket.SHUT_RDWR)
        self._watcher.join(5.0)
        self._sock.close()


def _worked(pid: int) -> float:
    """Processor ticks and bytes read of a process so far; -1 if it is not there."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return float(int(words[11]) + int(words[12])) + float(Path(f"/proc/{pid}/io").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return -1.0


def usage(folder: Path) -> dict[str, Any]:
    """What /proc tells of the folder's loader: its process id, memory and processor time; empty if none runs."""
    pid = owner(folder)
    if pid is None:
        return {}
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    seconds = (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")
    return {"pid": pid, "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "cpu_seconds": seconds}
