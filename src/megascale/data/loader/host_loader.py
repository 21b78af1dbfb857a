"""The host's loader seen from those who use it: `start` it, and read micro-batches as one of its readers. No torch.

Whoever starts the trainers of a host calls `start` and hands `Started.environment` to them: `megascale train`, or an
agent; under torchrun local rank 0 makes the folder and tells the others through the job's store. A `LoaderReader`
finds the loader dead by the end of its connection, and starts it again; the first to get the folder's lock does, the
others wait."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import shutil
import signal
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megascale.config import Config
from megascale.data.loader import ring as rings
from megascale.data.loader.host_layout import HostPlan, plan_host
from megascale.data.loader.loader_messages import FROM_LOADER, FROM_READER, NAME, Attach, Bye, Seated
from megascale.data.loader.loader_service import PLAN, SEGMENT
from megascale.data.loader.ring import Ring
from megascale.errors import MegascaleError, TrainingError, make_error
from megascale.services import host_service
from megascale.services.conversation import Conversation, ErrorReply, peer_credentials
from megascale.services.host_service import Launch, ServiceFailed, ServiceLocation
from megascale.services.private_folder import private_base

log = logging.getLogger("megascale.data.loader")

VARIABLE = "MEGASCALE_LOADER"
LOG = "log"  # name of a link to the log
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
        kill_loader(self.folder)
        self.process.wait()


def start_loader(config: Config, *, world: int, first_rank: int, ranks: int) -> Started | None:
    """Start the loader of the host that runs `ranks` ranks of `world`, from `first_rank` on; None if it needs none.

    Raises MegascaleError subclasses for data that cannot be used and for too little shared memory.
    """
    plan = plan_host(config, world, first_rank, ranks)
    if not plan.needs_loader(gpus=False):
        return None  # or the ranks start one, who know their device
    folder = prepare_folder(plan)
    return Started(folder, host_service.start_service(ServiceLocation(folder, NAME), _launch(folder)))


def prepare_folder(plan: HostPlan, mount: Path = rings.MOUNT) -> Path:
    """Make the folder that a loader of `plan` and its readers share; nothing is started."""
    told = rings.reap(mount)
    rings.check_room(plan.shape.size, mount)
    folder = _private(secrets.token_hex(8))
    (folder / PLAN).write_text(plan.to_json())
    (folder / SEGMENT).write_text(str(rings.new_name(mount)))
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
    """Make a new folder that only this user may enter."""
    base = private_base()
    _sweep(base)
    folder = base / f"loader-{token}"
    folder.mkdir(mode=0o700)
    return folder


def connect_loader(folder: Path) -> Conversation:
    """A conversation with the folder's loader, which is started if none runs. Raises what kept it from starting."""
    place = ServiceLocation(folder, NAME)
    try:
        return host_service.connect_service(place, _launch(folder), FROM_READER, FROM_LOADER, seconds=_COME_UP)
    except ServiceFailed as error:
        raise make_error(error.kind, str(error)) from None
    except OSError as error:
        raise TrainingError(
            f"the data loader of this host does not come up ({error}); its last words in "
            f"{os.path.realpath(folder / LOG)}: {last_words(folder)}; --data.loader=local does without it"
        ) from None


def _launch(folder: Path) -> Launch:
    return Launch(
        "megascale.data.loader.loader_service",
        [str(folder), "--parent", str(os.getpid())],
        folder / LOG,
        {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def owner(folder: Path) -> int | None:
    """Process id of the folder's loader, None if none runs."""
    return ServiceLocation(folder, NAME).owner()


def kill_loader(folder: Path) -> None:
    """Kill the folder's loader, if one runs, and remove all that it has."""
    pid = owner(folder)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path((folder / SEGMENT).read_text()).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


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
        self.stream, self._seat = self.plan.shape.find_reader(rank)
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
        self._loader = self._join()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    # the connection ---------------------------------------------------------------------------------------------

    def _join(self) -> Conversation:
        """Connect, map the segment, say how far this rank is. Raises what keeps the loader from serving."""
        for _ in range(_DEATHS):
            loader = connect_loader(self.folder)
            try:
                loader.send(Attach(self.rank, self.base, self.generation), files=[self._bell])
                answer = loader.receive()
                if isinstance(answer, ErrorReply):
                    loader.close()
                    raise make_error(answer.kind, answer.error)
                self._map(loader.files)
                self.generation = answer.generation
                loader.send(Seated(self.base))
                return loader
            except (OSError, EOFError):
                loader.close()  # it died in the meantime
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
            told = None
            with contextlib.suppress(OSError, EOFError):
                told = self._loader.receive()
            if self._closing:
                return
            try:
                if isinstance(told, ErrorReply):
                    raise make_error(told.kind, told.error)
                self._loader.close()
                self._loader = self._join()
                log.warning("rank %d reads from generation %d of the data loader", self.rank, self.generation)
            except MegascaleError as error:
                self._failure = error
            except Exception as error:  # a reader that nobody tells would wait for ever
                log.exception("rank %d cannot join the data loader", self.rank)
                self._failure = TrainingError(f"the data loader of this host cannot be joined again: {error!r}")
            os.eventfd_write(self._bell, 1)
            if self._failure is not None:
                return

    # reading ----------------------------------------------------------------------------------------------------

    def read(self) -> Taken:
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
            now = self._progress()
            idle = 0.0 if now != work else idle + min(5.0, self._hang_seconds)
            work = now
            if idle >= self._hang_seconds:
                self._replace()
                idle = 0.0

    def _progress(self) -> float:
        """What the loader's process has done so far; -1 if it is not there."""
        try:
            return _worked(peer_credentials(self._loader.sock)[0])
        except OSError:  # the watcher is about to start another
            return -1.0

    def _replace(self) -> None:
        """Kill a loader that hangs; the watcher starts another."""
        with contextlib.suppress(OSError):
            pid, _ = peer_credentials(self._loader.sock)
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
            self._loader.send(Bye())
        self._loader.hang_up()
        self._watcher.join(5.0)
        self._loader.close()


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
