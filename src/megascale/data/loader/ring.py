"""A ring of micro-batches in shared memory, from the loader process of a host to its ranks. No torch.

A host has one shared-memory segment per start of a run. A stream is the sequence of micro-batches of one data-parallel
coordinate. All ranks of the host with this coordinate read the same copy: the tensor-parallel ranks of the first and
the last pipeline stage.

Micro-batch n of a stream is in slot n mod depth. The loader writes the slot, and then the word `ready` of the slot's
label. Each reader counts the micro-batches that it has released in a word of its own. The loader overwrites a slot
after every reader has released it. So the segment records the position of every process. If the loader is killed, its
successor resumes from these positions, and complete micro-batches stay readable.

A segment is a file of the shared-memory mount. Its pages are reserved before use, since writing to a full mount would
kill the process. Every process that uses the segment holds a shared file lock on it, which ends with the process. If a
segment can be locked exclusively, its job is dead, and the next start removes the segment.
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
        ("base", "<i8"),  # samples consumed before this start of the run; -1: unknown
        ("shape", "<u8"),  # hash of the plan for which the ring was made
        ("job", "S256"),  # run folder
        ("bytes_read", "<f8"),
        ("read_seconds", "<f8"),
        ("unpack_seconds", "<f8"),
        ("encode_seconds", "<f8"),
        ("encode_cpu_seconds", "<f8"),
        ("full_seconds", "<f8"),  # time that the loader waited for readers
    ]
)
# Counters of the header, as feed.py and metrics name them.
COUNTERS = ("bytes_read", "read_seconds", "unpack_seconds", "encode_seconds", "encode_cpu_seconds", "full_seconds")
_LABEL = np.dtype([("ready", "<i8"), ("first", "<i8"), ("ids", "<u8"), ("epochs", "<f8"), ("weight_sum", "<f8")])
_CACHE_LINE_BYTES = 64  # words that different processes write are on different cache lines
_PAGE_BYTES = 4096
_fence_lock = threading.Lock()


def fence_memory() -> None:
    """Order all memory accesses before this call before all accesses after it.

    Python has no memory fence. Acquiring a lock keeps later accesses after it, and releasing keeps earlier accesses
    before it. Since accesses of both sides may still move into the locked region, two regions in a row are needed.
    """
    for _ in range(2):
        with _fence_lock:
            pass


@dataclass(frozen=True)
class RingShape:
    """Sizes of a ring.

    Attributes:
        readers: ranks that read each stream, by stream.
        depth: number of slots of a stream.
        rows, columns: tokens per sample and samples per micro-batch; a slot holds int32 [rows, columns].
        fields: optional fields of the samples, which follow the tokens in a slot.
    """

    readers: tuple[tuple[int, ...], ...]
    depth: int
    rows: int
    columns: int
    fields: SampleFields = NO_FIELDS

    @property
    def arrays(self) -> dict[str, tuple[str, int]]:
        """(dtype, rows) of each array in a slot, by the array's name in `Samples`. Elements have four bytes."""
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
        """Bytes of a slot, which are its label and its arrays."""
        rows = sum(rows for _, rows in self.arrays.values())
        return _round_up(_CACHE_LINE_BYTES + 4 * rows * self.columns, _CACHE_LINE_BYTES)

    @property
    def control_words(self) -> int:
        """Number of control words: a count of complete micro-batches per stream, and of released ones per reader."""
        return len(self.readers) + sum(map(len, self.readers))

    @property
    def data_offset(self) -> int:
        """Offset of the slots in the segment."""
        return _PAGE_BYTES + _round_up(_CACHE_LINE_BYTES * self.control_words, _PAGE_BYTES)

    @property
    def size(self) -> int:
        """Bytes of the segment."""
        return _round_up(self.data_offset + len(self.readers) * self.depth * self.slot_bytes, _PAGE_BYTES)

    def find_reader(self, rank: int) -> tuple[int, int]:
        """Return the index of a rank's stream, and the rank's index among the readers of the stream.

        Raises ValueError for a rank without a stream.
        """
        for stream, ranks in enumerate(self.readers):
            if rank in ranks:
                return stream, ranks.index(rank)
        raise ValueError(f"rank {rank} is not among the readers {self.readers}")


@dataclass
class MicroBatch:
    """A micro-batch in shared memory, whose arrays are valid until its slot is released.

    Attributes:
        samples: the samples; tokens are int32.
        first: number of the first sample.
        ids: hash of the ids of all samples of the step; 0 on hosts without rank 0.
        epochs: passes over the data at the end of the step; 0 on hosts without rank 0.
        weight_sum: sum of the loss weights of the stream's samples in the step; 0 if samples carry no weights.
    """

    samples: Samples
    first: int
    ids: int
    epochs: float
    weight_sum: float


class Ring:
    """A segment mapped into memory: by the loader through `create_segment`, by readers from an open file.

    Args:
        handle: descriptor of the segment's file, which the ring then owns.
        shape: sizes of the ring.
    """

    def __init__(self, handle: int, shape: RingShape) -> None:
        self.handle = handle
        self.shape = shape
        self.memory = mmap.mmap(handle, shape.size)
        segment = np.frombuffer(self.memory, np.uint8)
        self.header = segment[: _HEADER.itemsize].view(_HEADER)[0]
        control_end = _PAGE_BYTES + _CACHE_LINE_BYTES * shape.control_words
        # The first word of each cache line.
        control_words = segment[_PAGE_BYTES:control_end].view("<i8")[:: _CACHE_LINE_BYTES // 8]
        self._produced_counts = control_words[: len(shape.readers)]
        stops = np.cumsum([len(ranks) for ranks in shape.readers])
        self._released_counts = np.split(control_words[len(shape.readers) :], stops[:-1])
        slots = segment[shape.data_offset :][: len(shape.readers) * shape.depth * shape.slot_bytes]
        slots = slots.reshape(len(shape.readers), shape.depth, shape.slot_bytes)
        self._labels = slots[:, :, : _LABEL.itemsize].view(_LABEL)[..., 0]
        self._arrays: dict[str, NDArray] = {}  # by name: [streams, depth, rows, columns]
        offset = _CACHE_LINE_BYTES
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

    def count_produced(self, stream: int) -> int:
        """Return the number of micro-batches of a stream that the loader has completed."""
        return int(self._produced_counts[stream])

    def rewind(self, stream: int, number: int) -> None:
        """Let the loader resume at micro-batch `number`. It then writes later slots again, with the same contents."""
        self._produced_counts[stream] = number

    def put(self, stream: int, samples: Samples, first: int, ids: int, epochs: float, weight_sum: float = 0.0) -> None:
        """Write the next micro-batch of a stream and its label. The arguments are the attributes of `MicroBatch`."""
        number = self.count_produced(stream)
        slot = number % self.shape.depth
        label = self._labels[stream, slot]
        if int(label["ready"]) != number + 1:  # after a rewind, a ready slot gets the same contents again
            label["ready"] = 0
            fence_memory()
        for name, data in self._arrays.items():
            data[stream, slot] = getattr(samples, name)
        label["first"] = first
        label["ids"] = ids
        label["epochs"] = epochs
        label["weight_sum"] = weight_sum
        fence_memory()
        label["ready"] = number + 1
        self._produced_counts[stream] = number + 1

    # the readers' side --------------------------------------------------------------------------------------------

    def count_released(self, stream: int, reader: int) -> int:
        """Return the number of micro-batches that a reader has released."""
        return int(self._released_counts[stream][reader])

    def release(self, stream: int, reader: int, number: int) -> None:
        """Release all micro-batches below `number` for a reader."""
        fence_memory()
        self._released_counts[stream][reader] = number

    def is_ready(self, stream: int, number: int) -> bool:
        """Return whether micro-batch `number` of a stream is complete."""
        is_ready = int(self._labels[stream, number % self.shape.depth]["ready"]) == number + 1
        fence_memory()
        return is_ready

    def view_micro_batch(self, stream: int, number: int) -> MicroBatch:
        """Return micro-batch `number` of a stream, whose arrays are views of the slot."""
        slot = number % self.shape.depth
        label = self._labels[stream, slot]
        return MicroBatch(
            self._samples[stream][slot],
            first=int(label["first"]),
            ids=int(label["ids"]),
            epochs=float(label["epochs"]),
            weight_sum=float(label["weight_sum"]),
        )

    def is_full(self, stream: int) -> bool:
        """Return whether a stream has no slot that all its readers have released."""
        return self.count_produced(stream) - int(self._released_counts[stream].min()) >= self.shape.depth

    def measure_fill(self, stream: int, number: int) -> float:
        """Return the fraction of a stream's slots that hold complete micro-batches from `number` on."""
        return max(0, self.count_produced(stream) - number) / self.shape.depth

    def read_counters(self) -> dict[str, float]:
        """Return the loader's counters by name, summed over all loader processes that have used the segment."""
        return {name: float(self.header[name]) for name in COUNTERS}

    def close(self) -> None:
        """Close the file, which releases its lock. The mapping ends with its last view."""
        os.close(self.handle)


def create_segment(path: Path, shape: RingShape, plan_hash: int, job: str) -> tuple[Ring, bool]:
    """Open or make the segment at `path` as its loader.

    Args:
        path: path of the segment.
        shape: sizes of the ring.
        plan_hash: hash of the host's plan.
        job: run folder, which messages about a dead segment name.

    Returns:
        The ring, and True if an earlier loader of the same plan made it, so that its readers continue.

    Raises FitError if the mount has too little room, PermissionError if the path belongs to another user.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if not _is_file_of_user(handle) or os.fstat(handle).st_mode & 0o077:
            os.close(handle)
            raise PermissionError(errno.EACCES, "not a file of this user alone", str(path))
        fcntl.flock(handle, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(handle).st_ino:
                break
        os.close(handle)  # before it was locked, another start removed it as a segment of a dead job
    is_continued = os.fstat(handle).st_size == shape.size
    if is_continued:
        ring = Ring(handle, shape)
        is_continued = ring.header["magic"] == MAGIC.rstrip(b"\0") and int(ring.header["shape"]) == plan_hash
    if not is_continued:
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
    return ring, is_continued


def check_room(size: int, mount: Path = MOUNT) -> None:
    """Raise FitError if the shared-memory mount has fewer than `size` free bytes, or is unusable."""
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
    """Empty the file and reserve `size` bytes of zeroed pages. Raises FitError if the mount has too few."""
    os.ftruncate(handle, 0)
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
            raise
        raise _no_room_error(size, path.parent, os.fstatvfs(handle)) from None


def get_segment_prefix() -> str:
    """Return the prefix of the names of this user's segments."""
    return f"megascale-ring-{os.getuid()}-"


def find_dead_segments(mount: Path = MOUNT) -> Iterator[tuple[Path, int]]:
    """Yield (path, descriptor) of each segment of this user that no process uses, locked until the next is yielded."""
    for path in sorted(mount.glob(f"{get_segment_prefix()}*")):
        # Skip files, links and pipes that other users have put there under such a name.
        with suppress(OSError):
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if not _is_file_of_user(handle):
                    continue
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path, handle
            except BlockingIOError:
                pass
            finally:
                os.close(handle)


def _is_file_of_user(handle: int) -> bool:
    """Return whether a descriptor is of a regular file of this user."""
    status = os.fstat(handle)
    return stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()


def make_segment_path(mount: Path = MOUNT) -> Path:
    """Return an unguessable path for a new segment."""
    return mount / f"{get_segment_prefix()}{secrets.token_hex(16)}"


def remove_dead_segments(mount: Path = MOUNT) -> list[str]:
    """Remove segments of dead jobs, and return a sentence per segment that names its job."""
    sentences = []
    for path, handle in find_dead_segments(mount):
        header = os.pread(handle, _HEADER.itemsize, 0)
        size = os.fstat(handle).st_size
        job = "?"
        if len(header) == _HEADER.itemsize:
            job = np.frombuffer(header, _HEADER)[0]["job"].decode(errors="replace")
        with suppress(FileNotFoundError):
            path.unlink()
            sentences.append(f"removed {path} ({size:,} bytes), left behind by {job or 'a job that did not begin'}")
    return sentences


def _round_up(size: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple
