"""Client side of the host's loader: starting the loader, and reading micro-batches from its ring. No torch.

The process that starts the trainers of a host (`megascale train`, or an agent) calls `start_loader` and adds
`StartedLoader.environment` to the trainers' environment. Under torchrun, local rank 0 makes the loader's folder and
sends the path to the other ranks through the job's store.

Each rank reads through a `LoaderReader`. When the loader dies, the connections of its readers end. The reader that
locks the folder first then starts another loader, and the other readers wait for it.
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
from megascale.services.host_service import Launch, ServiceFailed
from megascale.services.service_location import ServiceLocation, make_private_base_folder

log = logging.getLogger("megascale.data.loader")

FOLDER_VARIABLE = "MEGASCALE_LOADER"  # environment variable with the loader's folder
LOG_LINK = "log"  # link in the folder to the loader's log
# A loader that makes no progress for this time while readers wait is killed and replaced.
HANG_SECONDS = 60.0
_START_SECONDS = 60.0  # limit for the start of a loader
_STOP_SECONDS = 5.0  # limit for a stopping loader to save the token counts of text
_DEAD_FOLDER_SECONDS = 600.0  # age after which the folder of a dead job is removed
_MAX_DEATHS = 20  # loaders that may die one after another before a reader can join


@dataclass
class StartedLoader:
    """A loader that `start_loader` has started.

    Attributes:
        folder: folder that the loader shares with its readers.
        process: the first loader process. A reader that replaces a dead loader is the parent of the new process.
    """

    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that trainers need to find the loader."""
        return {FOLDER_VARIABLE: str(self.folder)}

    def stop(self) -> None:
        """End the present loader process, and remove its folder and segment. Call it after the trainers have ended."""
        pid = find_owner(self.folder)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        if self.process.poll() is None and pid != self.process.pid:
            self.process.terminate()  # the first process has not locked the folder yet
        deadline = time.monotonic() + _STOP_SECONDS
        while find_owner(self.folder) is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, deadline - time.monotonic()))
        kill_loader(self.folder)
        self.process.wait()


def start_loader(layout: Layout, *, first_rank: int, ranks: int) -> StartedLoader | None:
    """Start the loader of the host that runs `ranks` ranks from `first_rank` on.

    Returns None if this host needs no loader, as far as is known before the ranks start. Raises subclasses of
    MegascaleError for unusable data and for too little shared memory.
    """
    plan = plan_host(layout, first_rank, ranks)
    if not plan.needs_loader(gpus=False):
        return None  # the ranks know their device, and start a loader if they train on GPUs
    return start_planned_loader(plan)


def start_planned_loader(plan: HostPlan) -> StartedLoader:
    """Make the folder of a plan's loader, and start the loader without waiting for it."""
    folder = prepare_folder(plan)
    return StartedLoader(folder, host_service.start_service(ServiceLocation(folder, SERVICE), _make_launch(folder)))


def prepare_folder(plan: HostPlan, mount: Path = rings.MOUNT) -> Path:
    """Make the folder that a loader of `plan` and its readers share, without starting a process."""
    removal_notes = rings.remove_dead_segments(mount)
    rings.check_room(plan.shape.size, mount)
    folder = _make_folder(secrets.token_hex(8))
    (folder / PLAN).write_text(plan.to_json())
    (folder / SEGMENT).write_text(str(rings.make_segment_path(mount)))
    logs = Path(plan.run) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    first_reader = min(min(ranks) for ranks in plan.shape.readers)
    (folder / LOG_LINK).symlink_to((logs / f"loader-{first_reader}.log").absolute())
    if removal_notes:
        with open(folder / LOG_LINK, "a") as log_file:
            log_file.writelines(note + "\n" for note in removal_notes)
    return folder


def _remove_dead_folders(base: Path) -> None:
    """Remove folders of jobs whose segments no longer exist."""
    for folder in base.glob("loader-*"):
        with contextlib.suppress(OSError):
            segment = Path((folder / SEGMENT).read_text())
            if not segment.exists() and time.time() - folder.stat().st_mtime > _DEAD_FOLDER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _make_folder(token: str) -> Path:
    """Make a new folder that only this user may enter."""
    base = make_private_base_folder()
    _remove_dead_folders(base)
    folder = base / f"loader-{token}"
    folder.mkdir(mode=0o700)
    return folder


def connect_loader(folder: Path) -> Conversation:
    """Connect to the folder's loader, and start it if it does not run. Raises its error if it cannot start."""
    service = ServiceLocation(folder, SERVICE)
    try:
        return host_service.connect_service(
            service, _make_launch(folder), FROM_READER, FROM_LOADER, seconds=_START_SECONDS
        )
    except ServiceFailed as error:
        raise make_error(error.kind, str(error)) from None
    except OSError as error:
        raise TrainingError(
            f"the data loader of this host does not start ({error}); the last lines of its log "
            f"{os.path.realpath(folder / LOG_LINK)} are: {read_last_log_lines(folder)}; --data.loader=local trains "
            "without it"
        ) from None


def _make_launch(folder: Path) -> Launch:
    return Launch(
        "megascale.data.loader.loader_service",
        [str(folder), "--parent", str(os.getpid())],
        folder / LOG_LINK,
        {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )


def find_owner(folder: Path) -> int | None:
    """Return the process id of the folder's loader, or None if no loader runs."""
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


def read_last_log_lines(folder: Path) -> str:
    """Return the last three lines of the loader's log as one line, or "nothing"."""
    with contextlib.suppress(OSError):
        lines = (folder / LOG_LINK).read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:]) or "nothing"
    return "nothing"


class LoaderReader:
    """Reader of a rank's micro-batches from the ring of the host's loader.

    Args:
        folder: folder of the loader.
        rank: rank that reads.
        start_sample: samples consumed before this start of the run; the same on all ranks.
        hang_seconds: time without progress after which this reader kills the loader.

    Attributes:
        stream: index of the rank's stream in the ring.
        wait_seconds: total seconds of waiting in `read`.
        generation: number of loader processes so far.
        ring: the mapped segment; a new object after the segment was lost.
    """

    ring: Ring

    def __init__(self, folder: Path, rank: int, start_sample: int, hang_seconds: float = HANG_SECONDS) -> None:
        self.folder = folder
        self.rank = rank
        self.start_sample = start_sample
        self.plan = HostPlan.from_json((folder / PLAN).read_text())
        self.stream, self._reader_index = self.plan.shape.find_reader(rank)
        self.wait_seconds = 0.0
        self.generation = 0
        self._hang_seconds = hang_seconds
        self._next_number = 0  # of the micro-batch that is read next
        self._released_count = 0
        self._is_closing = False
        self._failure: MegascaleError | None = None
        self._segment_inode = -1
        self._loader_bell = -1  # eventfd that wakes the loader
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC)  # wakes this reader when a micro-batch is ready
        self._poll = select.poll()
        self._poll.register(self._bell, select.POLLIN)
        self._loader = self._join()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    # the connection ---------------------------------------------------------------------------------------------

    def _join(self) -> Conversation:
        """Connect to the loader, map the segment and write this rank's position. Raises the loader's errors."""
        for _ in range(_MAX_DEATHS):
            loader = connect_loader(self.folder)
            try:
                loader.send(Attach(self.rank, self.start_sample, self.generation), files=[self._bell])
                answer = loader.receive()
                if isinstance(answer, ErrorReply):
                    loader.close()
                    raise make_error(answer.kind, answer.error)
                self._map_segment(loader.files)
                self.generation = answer.generation
                loader.send(Seated(self.start_sample))
                return loader
            except (OSError, EOFError):
                loader.close()  # the loader died in the meantime
        raise TrainingError(
            f"the data loader of this host died {_MAX_DEATHS} times in a row; its log is "
            f"{os.path.realpath(self.folder / LOG_LINK)}: {read_last_log_lines(self.folder)}"
        )

    def _map_segment(self, handles: list[int]) -> None:
        """Map the segment unless it is mapped already, and write this rank's position.

        Args:
            handles: descriptors of the segment and of the loader's bell, which this reader then owns.
        """
        handle, loader_bell = handles
        inode = os.fstat(handle).st_ino
        with self._lock:
            if self._loader_bell >= 0:
                os.close(self._loader_bell)
            self._loader_bell = loader_bell
            if inode == self._segment_inode:
                os.close(handle)
            else:
                self.ring = Ring(handle, self.plan.shape)
                self._segment_inode = inode
            self.ring.release(self.stream, self._reader_index, self._released_count)

    def _watch(self) -> None:
        """Handle a failure that the loader sends, and join a new loader when the connection ends."""
        while not self._is_closing:
            message = None
            with contextlib.suppress(OSError, EOFError):
                message = self._loader.receive()
            if self._is_closing:
                return
            try:
                if isinstance(message, ErrorReply):
                    raise make_error(message.kind, message.error)
                self._loader.close()
                self._loader = self._join()
                log.warning("rank %d reads from generation %d of the data loader", self.rank, self.generation)
            except MegascaleError as error:
                self._failure = error
            except Exception as error:  # report it to the reader, which would otherwise wait forever
                log.exception("rank %d cannot join the data loader", self.rank)
                self._failure = TrainingError(f"the data loader of this host cannot be joined again: {error!r}")
            os.eventfd_write(self._bell, 1)
            if self._failure is not None:
                return

    # reading ----------------------------------------------------------------------------------------------------

    def read(self) -> MicroBatch:
        """Return the next micro-batch, waiting until it is ready. Raises the loader's failure."""
        number = self._next_number
        if not self._is_ready(number):
            started = time.perf_counter()
            self._wait_until_ready(number)
            self.wait_seconds += time.perf_counter() - started
        self._next_number = number + 1
        batch = self.ring.view_micro_batch(self.stream, number)
        expected = self.plan.find_first_sample(self.start_sample, self.stream, number)
        if batch.first != expected:
            raise TrainingError(
                f"the data loader delivered sample {batch.first} instead of sample {expected}; start the run again"
            )
        return batch

    def peek(self) -> MicroBatch:
        """Return the micro-batch that the next `read` will return, waiting until it is ready."""
        batch = self.read()
        self._next_number -= 1
        return batch

    def _is_ready(self, number: int) -> bool:
        with self._lock:
            return self.ring.is_ready(self.stream, number)

    def _wait_until_ready(self, number: int) -> None:
        """Wait for micro-batch `number`. Raises the loader's failure, and kills a loader that hangs."""
        idle_seconds = 0.0
        progress = -1.0
        interval = min(5.0, self._hang_seconds)
        while not self._is_ready(number):
            if self._failure is not None:
                raise self._failure
            if self._poll.poll(1000 * interval):
                os.eventfd_read(self._bell)
                continue
            if self.ring.is_full(self.stream):
                continue  # the loader waits for another rank, which is behind
            # No micro-batch became ready in `interval`: the loader is slow, or it hangs.
            last_progress = progress
            progress = self._measure_progress()
            if progress == last_progress:
                idle_seconds += interval
            else:
                idle_seconds = 0.0
            if idle_seconds >= self._hang_seconds:
                self._kill_loader_process()
                idle_seconds = 0.0

    def _measure_progress(self) -> float:
        """Return a measure of the work of the loader's process so far; -1 if there is no process."""
        try:
            return _measure_work(read_peer_credentials(self._loader.sock)[0])
        except OSError:  # the process has died, and the watcher starts another
            return -1.0

    def _kill_loader_process(self) -> None:
        """Kill a loader that hangs. The watcher then starts another."""
        with contextlib.suppress(OSError):
            pid, _ = read_peer_credentials(self._loader.sock)
            log.warning("the data loader (process %d) made no progress for %g s: killing it", pid, self._hang_seconds)
            os.kill(pid, signal.SIGKILL)

    def release(self) -> None:
        """Release the oldest unreleased micro-batch, whose memory the loader may then overwrite."""
        with self._lock:
            self._released_count += 1
            self.ring.release(self.stream, self._reader_index, self._released_count)
            os.eventfd_write(self._loader_bell, 1)

    @property
    def fill(self) -> float:
        """Fraction of the stream's slots that are ready for this rank."""
        return self.ring.measure_fill(self.stream, self._next_number)

    def close(self) -> None:
        """Tell the loader that this rank needs no further samples, and disconnect."""
        self._is_closing = True
        with contextlib.suppress(OSError):
            self._loader.send(Bye())
        self._loader.shut_down()
        self._watcher.join(5.0)
        self._loader.close()


def _measure_work(pid: int) -> float:
    """Return a measure of a process's work, which grows while the process runs or reads; -1 if it does not exist.

    The measure is the sum of processor ticks and bytes read.
    """
    try:
        # Fields after the command's name, which may contain blanks and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        user_ticks, system_ticks = int(fields[11]), int(fields[12])
        bytes_read = int(Path(f"/proc/{pid}/io").read_text().split()[1])
        return float(user_ticks + system_ticks + bytes_read)
    except (OSError, IndexError, ValueError):
        return -1.0
