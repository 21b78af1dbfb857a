"""Client side of the host's loader: `start_loader`, and reading micro-batches as one of its readers. No torch.

The process that starts the trainers of a host (`megascale train`, or an agent) calls `start_loader` and adds
`StartedLoader.environment` to theirs. Under torchrun, local rank 0 makes the folder and sends its path to the others
through the job's store. The end of its connection shows a `LoaderReader` that the loader has died. The first reader to
get the folder's lock starts it again, the others wait.
"""

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

from megascale.core.layout import Layout
from megascale.data.loader import ring as rings
from megascale.data.loader.host_plan import (
    FROM_LOADER,
    FROM_READER,
    SERVICE,
    Attach,
    Bye,
    HostPlan,
    Seated,
    plan_host,
)
from megascale.data.loader.loader_service import PLAN, SEGMENT
from megascale.data.loader.ring import MicroBatch, Ring
from megascale.errors import MegascaleError, TrainingError, make_error
from megascale.services import host_service
from megascale.services.conversation import Conversation, ErrorReply, read_peer_credentials
from megascale.services.host_service import Launch, ServiceFailed, ServiceLocation, make_private_base_folder

log = logging.getLogger("megascale.data.loader")

VARIABLE = "MEGASCALE_LOADER"
LOG = "log"  # name of the link to the log
HANG_SECONDS = 60.0  # without any progress while readers wait, after which the loader is killed and replaced
_START_SECONDS = 60.0
_STOP_SECONDS = 5.0  # to save the token counts of text
_STALE_SECONDS = 600.0  # after which the folder of a dead job is removed
_MAX_DEATHS = 20  # in a row, without a micro-batch read between them


@dataclass
class StartedLoader:
    """A loader that was started.

    Attributes:
        folder: shared with its readers.
        process: the first loader process; a successor is a child of the reader that starts it.
    """

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that trainers need in their environment."""
        return {VARIABLE: str(self.folder)}

    def stop(self) -> None:
        """End the present loader process and remove its folder and segment, after the trainers have ended."""
        pid = find_owner(self.folder)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if self.process.poll() is None and pid != self.process.pid:
            self.process.terminate()  # it is still starting
        deadline = time.monotonic() + _STOP_SECONDS
        while find_owner(self.folder) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        kill_loader(self.folder)
        self.process.wait()


def start_loader(layout: Layout, *, first_rank: int, ranks: int) -> StartedLoader | None:
    """Start the loader of the host that runs `ranks` ranks from `first_rank` on; None if it needs no loader here.

    Raises subclasses of MegascaleError for unusable data and for too little shared memory.
    """
    plan = plan_host(layout, first_rank, ranks)
    if not plan.needs_loader(gpus=False):
        return None  # the ranks, which know their device, may start one
    return start_planned_loader(plan)


def start_planned_loader(plan: HostPlan) -> StartedLoader:
    """Make the folder of a plan's loader, and start the loader without waiting for it."""
    folder = prepare_folder(plan)
    return StartedLoader(folder, host_service.start_service(ServiceLocation(folder, SERVICE), _launch(folder)))


def prepare_folder(plan: HostPlan, mount: Path = rings.MOUNT) -> Path:
    """Make the folder that a loader of `plan` and its readers share; no process is started."""
    removed = rings.remove_dead_segments(mount)
    rings.check_room(plan.shape.size, mount)
    folder = _make_folder(secrets.token_hex(8))
    (folder / PLAN).write_text(plan.to_json())
    (folder / SEGMENT).write_text(str(rings.new_name(mount)))
    logs = Path(plan.run) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    first = min(min(ranks) for ranks in plan.shape.readers)
    (folder / LOG).symlink_to((logs / f"loader-{first}.log").absolute())
    if removed:
        with open(folder / LOG, "a") as log_file:
            log_file.writelines(sentence + "\n" for sentence in removed)
    return folder


def _remove_stale(base: Path) -> None:
    """Remove folders of jobs whose segments no longer exist."""
    for folder in base.glob("loader-*"):
        with contextlib.suppress(OSError):
            segment = Path((folder / SEGMENT).read_text())
            if not segment.exists() and time.time() - folder.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _make_folder(token: str) -> Path:
    """Make a new folder that only this user may enter."""
    base = make_private_base_folder()
    _remove_stale(base)
    folder = base / f"loader-{token}"
    folder.mkdir(mode=0o700)
    return folder


def connect_loader(folder: Path) -> Conversation:
    """Return a conversation with the folder's loader, which is started if none runs; raises its error at the start."""
    service = ServiceLocation(folder, SERVICE)
    try:
        return host_service.connect_service(service, _launch(folder), FROM_READER, FROM_LOADER, seconds=_START_SECONDS)
    except ServiceFailed as error:
        raise make_error(error.kind, str(error)) from None
    except OSError as error:
        raise TrainingError(
            f"the data loader of this host does not start ({error}); the last lines of its log "
            f"{os.path.realpath(folder / LOG)} are: {last_log_lines(folder)}; --data.loader=local trains without it"
        ) from None


def _launch(folder: Path) -> Launch:
    return Launch(
        "megascale.data.loader.loader_service",
        [str(folder), "--parent", str(os.getpid())],
        folder / LOG,
        {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def find_owner(folder: Path) -> int | None:
    """Return the process id of the folder's loader, None if none runs."""
    return ServiceLocation(folder, SERVICE).find_service_pid()


def kill_loader(folder: Path) -> None:
    """Kill the folder's loader, if one runs, and remove its segment and folder."""
    pid = find_owner(folder)
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(OSError):
        Path((folder / SEGMENT).read_text()).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def last_log_lines(folder: Path) -> str:
    """Return the end of the loader's log as one line."""
    with contextlib.suppress(OSError):
        lines = (folder / LOG).read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) or "nothing"
    return "nothing"


class LoaderReader:
    """One rank's end of the ring.

    Args:
        folder: of the loader.
        base: samples consumed before this start of the run; the same on all ranks.

    Attributes:
        wait_seconds: total waiting of `read`.
        generation: number of loader processes so far.
        ring: the mapped segment; a new object after a segment was lost.
    """

    ring: Ring

    def __init__(self, folder: Path, rank: int, base: int, hang_seconds: float = HANG_SECONDS) -> None:
        self.folder = folder
        self.rank = rank
        self.base = base
        self.plan = HostPlan.from_json((folder / PLAN).read_text())
        self.stream, self._seat = self.plan.shape.find_reader(rank)
        self.wait_seconds = 0.0
        self.generation = 0
        self._hang_seconds = hang_seconds
        self._next = 0  # micro-batch
        self._released = 0
        self._closing = False
        self._failure: MegascaleError | None = None
        self._inode = -1  # of the mapped segment
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
        """Connect, map the segment and send this rank's position. Raises the loader's errors."""
        for _ in range(_MAX_DEATHS):
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
                loader.close()  # the loader died in the meantime
        raise TrainingError(
            f"the data loader of this host died {_MAX_DEATHS} times in a row; its log is "
            f"{os.path.realpath(self.folder / LOG)}: {last_log_lines(self.folder)}"
        )

    def _map(self, handles: list[int]) -> None:
        handle, work = handles
        inode = os.fstat(handle).st_ino
        with self._lock:
            if self._work >= 0:
                os.close(self._work)
            self._work = work
            if inode == self._inode:
                os.close(handle)
            else:
                self.ring = Ring(handle, self.plan.shape)
                self._inode = inode
            self.ring.release(self.stream, self._seat, self._released)

    def _watch(self) -> None:
        """Wait for a message or the end of the connection: the loader sends one only when it fails."""
        while not self._closing:
            message = None
            with contextlib.suppress(OSError, EOFError):
                message = self._loader.receive()
            if self._closing:
                return
            try:
                if isinstance(message, ErrorReply):
                    raise make_error(message.kind, message.error)
                self._loader.close()
                self._loader = self._join()
                log.warning("rank %d reads from generation %d of the data loader", self.rank, self.generation)
            except MegascaleError as error:
                self._failure = error
            except Exception as error:  # without a failure the reader would wait forever
                log.exception("rank %d cannot join the data loader", self.rank)
                self._failure = TrainingError(f"the data loader of this host cannot be joined again: {error!r}")
            os.eventfd_write(self._bell, 1)
            if self._failure is not None:
                return

    # reading ----------------------------------------------------------------------------------------------------

    def read(self) -> MicroBatch:
        """Return the next micro-batch, waiting until it is ready. Raises the loader's failure."""
        number = self._next
        if not self._is_ready(number):
            started = time.perf_counter()
            self._wait(number)
            self.wait_seconds += time.perf_counter() - started
        self._next = number + 1
        batch = self.ring.slot(self.stream, number)
        expected = self.plan.first_sample(self.base, self.stream, number)
        if batch.first != expected:
            raise TrainingError(
                f"the data loader gave sample {batch.first} where {expected} was due; start the run again"
            )
        return batch

    def peek(self) -> MicroBatch:
        """Return the micro-batch that the next `read` returns too, waiting until it is ready."""
        batch = self.read()
        self._next -= 1
        return batch

    def _is_ready(self, number: int) -> bool:
        with self._lock:
            return self.ring.ready(self.stream, number)

    def _wait(self, number: int) -> None:
        idle = 0.0
        progress = -1.0
        interval = min(5.0, self._hang_seconds)
        while not self._is_ready(number):
            if self._failure is not None:
                raise self._failure
            if self._poll.poll(1000 * interval):
                os.eventfd_read(self._bell)
                continue
            if self.ring.full(self.stream):
                continue  # the loader waits too, for a rank that is behind
            # No micro-batch came for seconds: the loader is slow, or its process makes no progress at all.
            last_progress = progress
            progress = self._progress()
            if progress == last_progress:
                idle = idle + interval
            else:
                idle = 0.0
            if idle >= self._hang_seconds:
                self._replace()
                idle = 0.0

    def _progress(self) -> float:
        """Return the work of the loader's process so far; -1 if there is no process."""
        try:
            return _process_work(read_peer_credentials(self._loader.sock)[0])
        except OSError:  # the watcher is about to start another
            return -1.0

    def _replace(self) -> None:
        """Kill a loader that hangs; the watcher starts another."""
        with contextlib.suppress(OSError):
            pid, _ = read_peer_credentials(self._loader.sock)
            log.warning("the data loader (process %d) made no progress for %g s: killing it", pid, self._hang_seconds)
            os.kill(pid, signal.SIGKILL)

    def release(self) -> None:
        """Release the oldest unreleased micro-batch: its memory may be rewritten."""
        with self._lock:
            self._released += 1
            self.ring.release(self.stream, self._seat, self._released)
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
        self._loader.shut_down()
        self._watcher.join(5.0)
        self._loader.close()


def _process_work(pid: int) -> float:
    """Return a measure of a process's work: processor ticks plus bytes read; -1 if it does not exist."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return float(int(fields[11]) + int(fields[12])) + float(Path(f"/proc/{pid}/io").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return -1.0
