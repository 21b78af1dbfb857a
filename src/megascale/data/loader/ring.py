"""A ring of ready micro-batches in shared memory: one segment a host and start of a run. No torch.

A stream is what one data-parallel coordinate trains on; all ranks of the host that need it (its tensor-parallel ranks,
its first and last pipeline stage) read the one copy. Micro-batch n of a stream lies in slot n mod depth. The loader
writes a slot and then its `ready` word; each reader counts in a word of its own how many it has taken, and a slot is
written anew only when every reader has passed it. So the segment alone tells where everybody stands: a loader that was
killed anywhere leaves whole micro-batches and a position to go on from.

A segment is a file of the shared-memory mount whose pages are reserved before use (writing to a full mount would kill
the process). Everybody who uses it holds a shared file lock on it, which the kernel drops with the last of them: one
that can be locked exclusively belongs to a dead job and is removed by the next start.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megascale.errors import FitError

MOUNT = Path("/dev/shm")
MAGIC = b"MSRING1\0"
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("generation", "<i8"),  # loaders that have owned the segment so far
        ("owner", "<i8"),  # process id of the loader
        ("base", "<i8"),  # samples consumed when this start of the run began; -1: not yet known
        ("shape", "<u8"),  # hash of what the ring was made for
        ("job", "S256"),
        ("bytes_read", "<f8"),
        ("read_seconds", "<f8"),
        ("unpack_seconds", "<f8"),
        ("encode_seconds", "<f8"),
        ("encode_cpu_seconds", "<f8"),
        ("full_seconds", "<f8"),  # the loader waited for readers
    ]
)
MEASURES = ("bytes_read", "read_seconds", "unpack_seconds", "encode_seconds", "encode_cpu_seconds", "full_seconds")
_SLOT = np.dtype([("ready", "<i8"), ("first", "<i8"), ("ids", "<u8"), ("epochs", "<f8")])
_LINE = 64  # bytes; words that different processes write lie on lines of their own
_PAGE = 4096
_fence_lock = threading.Lock()


def fence() -> None:
    """Keep what was stored before from becoming visible after what is stored next (a lock's barriers, twice)."""
    for _ in range(2):
        with _fence_lock:
            pass


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring.

    Attributes:
        readers: ranks that read each stream.
        depth: slots of a stream.
        rows, columns: tokens and samples of a micro-batch; a slot holds int32 [rows, columns].
    """

    readers: tuple[tuple[int, ...], ...]
    depth: int
    rows: int
    columns: int

    @property
    def slot_bytes(self) -> int:
        """Of one slot with its label."""
        return _up(_LINE + 4 * self.rows * self.columns, _LINE)

    @property
    def words(self) -> int:
        """Lines of control words: one a stream and one a reader."""
        return len(self.readers) + sum(map(len, self.readers))

    @property
    def data_at(self) -> int:
        """Where slots begin."""
        return _PAGE + _up(_LINE * self.words, _PAGE)

    @property
    def size(self) -> int:
        """Bytes of the segment."""
        return _up(self.data_at + len(self.readers) * self.depth * self.slot_bytes, _PAGE)

    def find_reader(self, rank: int) -> tuple[int, int]:
        """Stream of a rank and its number among the stream's readers; ValueError for one that reads nothing."""
        for stream, ranks in enumerate(self.readers):
            if rank in ranks:
                return stream, ranks.index(rank)
        raise ValueError(f"rank {rank} is none of the readers {self.readers}")


class Ring:
    """A mapped segment. Made by `create` (the loader) or of an open file (readers)."""

    def __init__(self, handle: int, shape: RingShape) -> None:
        self.handle, self.shape = handle, shape
        self.memory = mmap.mmap(handle, shape.size)
        whole = np.frombuffer(self.memory, np.uint8)
        self.header = whole[: _HEADER.itemsize].view(_HEADER)[0]
        words = whole[_PAGE : _PAGE + _LINE * shape.words].view("<i8")[:: _LINE // 8]
        self._produced = words[: len(shape.readers)]
        stops = np.cumsum([len(ranks) for ranks in shape.readers])
        self._taken = np.split(words[len(shape.readers) :], stops[:-1])
        slots = whole[shape.data_at :][: len(shape.readers) * shape.depth * shape.slot_bytes]
        slots = slots.reshape(len(shape.readers), shape.depth, shape.slot_bytes)
        self._labels = slots[:, :, : _SLOT.itemsize].view(_SLOT)[..., 0]
        data = slots[:, :, _LINE : _LINE + 4 * shape.rows * shape.columns].view("<i4")
        self._data = data.reshape(len(shape.readers), shape.depth, shape.rows, shape.columns)

    @property
    def address(self) -> int:
        """Where the segment is mapped in this process."""
        return np.frombuffer(self.memory, np.uint8).ctypes.data

    # the loader's side ------------------------------------------------------------------------------------------

    def produced(self, stream: int) -> int:
        """Micro-batches of a stream that are complete."""
        return int(self._produced[stream])

    def rewind(self, stream: int, number: int) -> None:
        """Make the loader go on at `number`; what is there already is written again with the same contents."""
        self._produced[stream] = number

    def put(self, stream: int, rows: NDArray, first: int, ids: int, epochs: float) -> None:
        """Write the next micro-batch of a stream: tokens [columns, rows] and what it is."""
        number = self.produced(stream)
        slot = number % self.shape.depth
        label = self._labels[stream, slot]
        if int(label["ready"]) != number + 1:  # not when written again after a rewind
            label["ready"] = 0
            fence()
        self._data[stream, slot] = rows.T
        label["first"], label["ids"], label["epochs"] = first, ids, epochs
        fence()
        label["ready"] = number + 1
        self._produced[stream] = number + 1

    # a reader's side --------------------------------------------------------------------------------------------

    def released(self, stream: int, reader: int) -> int:
        """Micro-batches a reader has let go."""
        return int(self._taken[stream][reader])

    def let_go(self, stream: int, reader: int, number: int) -> None:
        """A reader is done with all micro-batches below `number`."""
        fence()
        self._taken[stream][reader] = number

    def ready(self, stream: int, number: int) -> bool:
        """Whether micro-batch `number` is complete."""
        there = int(self._labels[stream, number % self.shape.depth]["ready"]) == number + 1
        fence()
        return there

    def slot(self, stream: int, number: int) -> tuple[NDArray[np.int32], int, int, float]:
        """Tokens [rows, columns] (a view), first sample, hash of the step's sample ids, epochs at the step's end."""
        label = self._labels[stream, number % self.shape.depth]
        view = self._data[stream, number % self.shape.depth]
        return view, int(label["first"]), int(label["ids"]), float(label["epochs"])

    def full(self, stream: int) -> bool:
        """Whether a stream has no slot that all its readers are done with."""
        return self.produced(stream) - int(self._taken[stream].min()) >= self.shape.depth

    def fill(self, stream: int, number: int) -> float:
        """Part of a stream's slots that hold micro-batches from `number` on."""
        return max(0, self.produced(stream) - number) / self.shape.depth

    def measures(self) -> dict[str, float]:
        """The loader's counters, from the first loader of the segment on."""
        return {name: float(self.header[name]) for name in MEASURES}

    def close(self) -> None:
        """Let go of the lock; the mapping goes with its last view."""
        os.close(self.handle)


def create_segment(path: Path, shape: RingShape, spec: int, job: str) -> tuple[Ring, bool]:
    """The segment at `path`, and whether it was there: a loader before this one made it and its readers go on.

    Raises FitError if the mount has too little room, PermissionError if somebody else has put something there.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not _own(handle) or os.fstat(handle).st_mode & 0o077:
            os.close(handle)
            raise PermissionError(errno.EACCES, "not a file of this user alone", str(path))
        fcntl.flock(handle, fcntl.LOCK_SH)
        try:
            current = os.stat(path).st_ino == os.fstat(handle).st_ino
        except FileNotFoundError:
            current = False
        if current:
            break
        os.close(handle)  # it was taken for a dead job's between opening and locking
    there = os.fstat(handle).st_size == shape.size
    if there:
        ring = Ring(handle, shape)
        there = ring.header["magic"] == MAGIC.rstrip(b"\0") and int(ring.header["shape"]) == spec
    if not there:
        try:
            _reserve(handle, path, shape.size)
        except FitError:
            os.unlink(path)
            os.close(handle)
            raise
        ring = Ring(handle, shape)
        ring.header["base"], ring.header["shape"], ring.header["job"] = -1, spec, job.encode()[:256]
        ring.header["magic"] = MAGIC
    ring.header["owner"] = os.getpid()
    ring.header["generation"] += 1
    return ring, there


def check_room(size: int, mount: Path = MOUNT) -> None:
    """FitError if the shared-memory mount has less than `size` bytes free, or is none."""
    try:
        room = os.statvfs(mount)
    except OSError as error:
        raise FitError(
            f"shared memory {mount} cannot be used ({error.strerror}); mount a tmpfs there or set --data.loader=local"
        ) from None
    free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    if free < size:
        raise FitError(_no_room(size, mount, free, whole))


def _no_room(size: int, mount: Path, free: int, whole: int) -> str:
    return (
        f"the data loader's ring needs {size:,} bytes of shared memory and {mount} has {free:,} free of {whole:,}; "
        "enlarge the mount (docker run --shm-size=1g, on Kubernetes an emptyDir with medium: Memory, or mount -o "
        "remount,size=1g), remove what fills it, lower data.ring_steps, or set --data.loader=local"
    )


def _reserve(handle: int, path: Path, size: int) -> None:
    """Zeroed pages that are there: FitError where they are not to be had."""
    os.ftruncate(handle, 0)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        room = os.fstatvfs(handle)
        free, whole = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
        raise FitError(_no_room(size, path.parent, free, whole)) from None


def name_prefix() -> str:
    """How this user's segments' names begin."""
    return f"megascale-ring-{os.getuid()}-"


def stale(mount: Path = MOUNT) -> Iterator[tuple[Path, int]]:
    """This user's segments that nobody uses any more, and an open file that keeps each locked meanwhile."""
    for path in sorted(mount.glob(f"{name_prefix()}*")):
        # Anybody may put a file, a link or a pipe there under such a name: it is not ours, and stops nothing.
        with suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not _own(handle):
                    continue
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, handle
            except BlockingIOError:
                pass
            finally:
                os.close(handle)


def _own(handle: int) -> bool:
    """Whether an open file is a plain one of this user."""
    about = os.fstat(handle)
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid()


def new_name(mount: Path = MOUNT) -> Path:
    """Where a new segment goes; nobody knows the name before it is there."""
    return mount / f"{name_prefix()}{secrets.token_hex(16)}"


def reap(mount: Path = MOUNT) -> list[str]:
    """Remove segments of jobs that are dead; a sentence for each, naming the job."""
    told = []
    for path, handle in stale(mount):
        head = os.pread(handle, _HEADER.itemsize, 0)
        size = os.fstat(handle).st_size
        job = np.frombuffer(head, _HEADER)[0]["job"].decode(errors="replace") if len(head) == _HEADER.itemsize else "?"
        with suppress(FileNotFoundError):
            path.unlink()
            told.append(f"removed {path} ({size:,} bytes), left behind by {job or 'a job that never began'}")
    return told


def _up(size: int, to: int) -> int:
    return -(-size // to) * to
