"""A ring of ready micro-batches in shared memory: one segment per host and start of a run. No torch.

A stream is the data of one data-parallel coordinate. All ranks of the host that need it (its tensor-parallel ranks, its
first and last pipeline stage) read one copy. Micro-batch n of a stream is in slot n mod depth. The loader writes a slot
and then its `ready` word. Each reader counts the micro-batches it has released in a word of its own, and a slot is
rewritten only when every reader has released it. So the segment alone has the position of every process: a loader that
was killed anywhere leaves complete micro-batches and a position to resume from.

A segment is a file of the shared-memory mount whose pages are reserved before use (writing to a full mount would kill
the process). Every process that uses it holds a shared file lock on it, which the kernel drops with the last process. A
segment that can be locked exclusively belongs to a dead job and is removed by the next start.
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

from megascale.core.batch import NO_FIELDS, SampleFields
from megascale.data.dataset.sample_fields import Samples
from megascale.errors import FitError

MOUNT = Path("/dev/shm")
MAGIC = b"MSRING2\0"
_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("generation", "<i8"),  # number of loader processes so far
        ("owner", "<i8"),  # process id of the loader
        ("base", "<i8"),  # samples consumed when this start of the run began; -1: unknown
        ("shape", "<u8"),  # hash of the plan that the ring was made for
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
_SLOT = np.dtype([("ready", "<i8"), ("first", "<i8"), ("ids", "<u8"), ("epochs", "<f8"), ("weight_sum", "<f8")])
_LINE = 64  # bytes of a cache line; words that different processes write are on different lines
_PAGE = 4096
_fence_lock = threading.Lock()


def fence() -> None:
    """Order all stores before this call before all stores after it (a lock's barriers, twice)."""
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
        fields: optional fields of the samples, which follow the tokens in a slot.
    """

    readers: tuple[tuple[int, ...], ...]
    depth: int
    rows: int
    columns: int
    fields: SampleFields = NO_FIELDS

    @property
    def arrays(self) -> dict[str, tuple[str, int]]:
        """Arrays of a slot by their names in `Samples`: type and rows. All elements have four bytes."""
        arrays = {"tokens": ("<i4", self.rows)}
        if self.fields.loss_weights:
            arrays["loss_weights"] = ("<f4", self.rows - 1)
        if self.fields.positions:
            arrays["positions"] = ("<i4", self.rows - 1)
        if self.fields.max_documents:
            arrays["document_boundaries"] = ("<i4", self.fields.max_documents + 1)
        return arrays

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot with its label."""
        rows = sum(rows for _, rows in self.arrays.values())
        return _round_up(_LINE + 4 * rows * self.columns, _LINE)

    @property
    def control_words(self) -> int:
        """Number of control words: one per stream and one per reader."""
        return len(self.readers) + sum(map(len, self.readers))

    @property
    def data_offset(self) -> int:
        """Offset of the slots in the segment."""
        return _PAGE + _round_up(_LINE * self.control_words, _PAGE)

    @property
    def size(self) -> int:
        """Bytes of the segment."""
        return _round_up(self.data_offset + len(self.readers) * self.depth * self.slot_bytes, _PAGE)

    def find_reader(self, rank: int) -> tuple[int, int]:
        """Return a rank's stream and its number among the stream's readers; ValueError for a rank without a stream."""
        for stream, ranks in enumerate(self.readers):
            if rank in ranks:
                return stream, ranks.index(rank)
        raise ValueError(f"rank {rank} is not among the readers {self.readers}")


@dataclass
class MicroBatch:
    """A micro-batch in shared memory: views that are valid until its slot is released.

    Attributes:
        samples: the samples; tokens are int32.
        first: number of its first sample.
        ids: hash of the ids of all samples of the step (for rank 0).
        epochs: passes over the data at the end of the step (for rank 0).
        weight_sum: sum of the loss weights of the stream's samples in the step; 0 if samples carry no weights.
    """

    samples: Samples
    first: int
    ids: int
    epochs: float
    weight_sum: float


class Ring:
    """A mapped segment, made by `create_segment` (the loader) or from an open file (readers)."""

    def __init__(self, handle: int, shape: RingShape) -> None:
        self.handle = handle
        self.shape = shape
        self.memory = mmap.mmap(handle, shape.size)
        segment = np.frombuffer(self.memory, np.uint8)
        self.header = segment[: _HEADER.itemsize].view(_HEADER)[0]
        counters = segment[_PAGE : _PAGE + _LINE * shape.control_words].view("<i8")[:: _LINE // 8]
        self._produced = counters[: len(shape.readers)]
        stops = np.cumsum([len(ranks) for ranks in shape.readers])
        self._released = np.split(counters[len(shape.readers) :], stops[:-1])
        slots = segment[shape.data_offset :][: len(shape.readers) * shape.depth * shape.slot_bytes]
        slots = slots.reshape(len(shape.readers), shape.depth, shape.slot_bytes)
        self._labels = slots[:, :, : _SLOT.itemsize].view(_SLOT)[..., 0]
        self._arrays: dict[str, NDArray] = {}  # by name: [streams, depth, rows, columns]
        offset = _LINE
        for name, (dtype, rows) in shape.arrays.items():
            stop = offset + 4 * rows * shape.columns
            data = slots[:, :, offset:stop].view(dtype)
            self._arrays[name] = data.reshape(len(shape.readers), shape.depth, rows, shape.columns)
            offset = stop
        self._samples = [
            [
                Samples(**{name: data[stream, slot] for name, data in self._arrays.items()})
                for slot in range(shape.depth)
            ]
            for stream in range(len(shape.readers))
        ]

    @property
    def address(self) -> int:
        """Address of the segment in this process."""
        return np.frombuffer(self.memory, np.uint8).ctypes.data

    # the loader's side ------------------------------------------------------------------------------------------

    def produced(self, stream: int) -> int:
        """Return the number of complete micro-batches of a stream."""
        return int(self._produced[stream])

    def rewind(self, stream: int, number: int) -> None:
        """Let the loader resume at `number`; later slots are written again with the same contents."""
        self._produced[stream] = number

    def put(self, stream: int, samples: Samples, first: int, ids: int, epochs: float, weight_sum: float = 0.0) -> None:
        """Write the next micro-batch of a stream: samples and their label."""
        number = self.produced(stream)
        slot = number % self.shape.depth
        label = self._labels[stream, slot]
        if int(label["ready"]) != number + 1:  # a slot that is written again after a rewind stays ready
            label["ready"] = 0
            fence()
        for name, data in self._arrays.items():
            data[stream, slot] = getattr(samples, name)
        label["first"] = first
        label["ids"] = ids
        label["epochs"] = epochs
        label["weight_sum"] = weight_sum
        fence()
        label["ready"] = number + 1
        self._produced[stream] = number + 1

    # a reader's side --------------------------------------------------------------------------------------------

    def released(self, stream: int, reader: int) -> int:
        """Return the number of micro-batches that a reader has released."""
        return int(self._released[stream][reader])

    def release(self, stream: int, reader: int, number: int) -> None:
        """Release all micro-batches below `number` for a reader."""
        fence()
        self._released[stream][reader] = number

    def ready(self, stream: int, number: int) -> bool:
        """Return whether micro-batch `number` is complete."""
        is_ready = int(self._labels[stream, number % self.shape.depth]["ready"]) == number + 1
        fence()
        return is_ready

    def slot(self, stream: int, number: int) -> MicroBatch:
        """Return micro-batch `number`, whose arrays are views of the slot."""
        slot = number % self.shape.depth
        label = self._labels[stream, slot]
        return MicroBatch(
            self._samples[stream][slot],
            first=int(label["first"]),
            ids=int(label["ids"]),
            epochs=float(label["epochs"]),
            weight_sum=float(label["weight_sum"]),
        )

    def full(self, stream: int) -> bool:
        """Return whether a stream has no slot that all its readers have released."""
        return self.produced(stream) - int(self._released[stream].min()) >= self.shape.depth

    def fill(self, stream: int, number: int) -> float:
        """Return the part of a stream's slots that hold micro-batches from `number` on."""
        return max(0, self.produced(stream) - number) / self.shape.depth

    def measures(self) -> dict[str, float]:
        """Return the loader's counters, summed over all loader processes of the segment."""
        return {name: float(self.header[name]) for name in MEASURES}

    def close(self) -> None:
        """Release the lock; the mapping ends with its last view."""
        os.close(self.handle)


def create_segment(path: Path, shape: RingShape, plan_hash: int, job: str) -> tuple[Ring, bool]:
    """Return the segment at `path`, and True if an earlier loader made it, whose readers continue.

    Raises FitError if the mount has too little room, PermissionError if the path belongs to another user.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not _is_own(handle) or os.fstat(handle).st_mode & 0o077:
            os.close(handle)
            raise PermissionError(errno.EACCES, "not a file of this user alone", str(path))
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                break
        os.close(handle)  # between opening and locking, another start removed it as a dead job's segment
    is_known = os.fstat(handle).st_size == shape.size
    if is_known:
        ring = Ring(handle, shape)
        is_known = ring.header["magic"] == MAGIC.rstrip(b"\0") and int(ring.header["shape"]) == plan_hash
    if not is_known:
        try:
            _reserve(handle, path, shape.size)
        except FitError:
            os.unlink(path)
            os.close(handle)
            raise
        ring = Ring(handle, shape)
        ring.header["base"] = -1
        ring.header["shape"] = plan_hash
        ring.header["job"] = job.encode()[:256]
        ring.header["magic"] = MAGIC
    ring.header["owner"] = os.getpid()
    ring.header["generation"] += 1
    return ring, is_known


def check_room(size: int, mount: Path = MOUNT) -> None:
    """Raise FitError if the shared-memory mount has less than `size` bytes free, or is unusable."""
    try:
        usage = os.statvfs(mount)
    except OSError as error:
        raise FitError(
            f"shared memory {mount} cannot be used ({error.strerror}); mount a tmpfs there or set --data.loader=local"
        ) from None
    if usage.f_bavail * usage.f_frsize < size:
        raise _no_room_error(size, mount, usage)


def _no_room_error(size: int, mount: Path, usage: os.statvfs_result) -> FitError:
    free, total = usage.f_bavail * usage.f_frsize, usage.f_blocks * usage.f_frsize
    return FitError(
        f"the data loader's ring needs {size:,} bytes of shared memory and {mount} has {free:,} free of {total:,}; "
        "enlarge the mount (docker run --shm-size=1g, on Kubernetes an emptyDir with medium: Memory, or mount -o "
        "remount,size=1g), remove other files from it, lower data.ring_steps, or set --data.loader=local"
    )


def _reserve(handle: int, path: Path, size: int) -> None:
    """Reserve zeroed pages; FitError if the mount has too few."""
    os.ftruncate(handle, 0)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        raise _no_room_error(size, path.parent, os.fstatvfs(handle)) from None


def name_prefix() -> str:
    """Return the prefix of the names of this user's segments."""
    return f"megascale-ring-{os.getuid()}-"


def find_dead_segments(mount: Path = MOUNT) -> Iterator[tuple[Path, int]]:
    """Yield this user's segments that no process uses, each with an open file that locks it meanwhile."""
    for path in sorted(mount.glob(f"{name_prefix()}*")):
        # Any user may put a file, a link or a pipe there under such a name: it is skipped.
        with suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not _is_own(handle):
                    continue
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, handle
            except BlockingIOError:
                pass
            finally:
                os.close(handle)


def _is_own(handle: int) -> bool:
    """Return whether an open file is a regular file of this user."""
    status = os.fstat(handle)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def new_name(mount: Path = MOUNT) -> Path:
    """Return an unguessable path for a new segment."""
    return mount / f"{name_prefix()}{secrets.token_hex(16)}"


def remove_dead_segments(mount: Path = MOUNT) -> list[str]:
    """Remove segments of dead jobs and return a sentence for each, naming the job."""
    sentences = []
    for path, handle in find_dead_segments(mount):
        header = os.pread(handle, _HEADER.itemsize, 0)
        size = os.fstat(handle).st_size
        job = "?"
        if len(header) == _HEADER.itemsize:
            job = np.frombuffer(header, _HEADER)[0]["job"].decode(errors="replace")
        with suppress(FileNotFoundError):
            path.unlink()
            sentences.append(f"removed {path} ({size:,} bytes), left behind by {job or 'a job that never began'}")
    return sentences


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
