"""The index of a checkpoint: for each stored chunk its tensor, box, file, position and checksum. No torch.

Kept as columns of integers in one `.npz` without pickles, since a large run stores hundreds of thousands of chunks.
An index that is read may be anybody's: every number is checked before something is made or found by it. Beside it
`.metadata` says the same in torch's own (pickled) form, for plain `dcp.load`; our loader never opens that.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from megascale.checkpoint.format.archive import DTYPES, element_size
from megascale.checkpoint.format.plain_npz import read_columns
from megascale.core import strict_json
from megascale.core.tensors import Box
from megascale.core.untrusted_files import is_plain_name

_COLUMNS = ("tensor", "in_file", "start", "length", "data", "crc", "box")
_HEADER_BYTES = 32 << 20  # of names: those of a thousand layers written by a hundred thousand processes take ten
_NAME_LENGTH = 512
_MOST_BYTES = 1 << 62  # of a tensor; more than any storage holds, and sums of it stay whole numbers of 64 bits
_MOST_DIMS = 32


@dataclass(frozen=True)
class TensorInfo:
    """A stored logical tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * element_size(self.dtype)


class CheckpointIndex:
    """All chunks of a checkpoint, found by tensor name.

    Attributes:
        tensors: logical name to shape and dtype, sorted by name.
        files: names of data files.
        columns: by chunk: `tensor` (number in tensors), `in_file` (number in files), `start` and `length` of its
            archive and `data`, where its elements begin (bytes), `crc` (CRC-32 of its elements) and `box`
            ([2, dims]: offsets and sizes).
    """

    def __init__(self, tensors: dict[str, TensorInfo], files: list[str], columns: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.files = files
        self.columns = columns
        self.names = list(tensors)
        owner = columns["tensor"]
        self._order = np.argsort(owner, kind="stable")
        self._bounds = np.searchsorted(owner[self._order], np.arange(len(self.names) + 1))
        self._number = {name: i for i, name in enumerate(self.names)}

    def __len__(self) -> int:
        return len(self.columns["tensor"])

    def with_generation(self, generation: str, crc: np.ndarray) -> CheckpointIndex:
        """The same layout with the file names of a generation and its checksums."""
        return CheckpointIndex(
            self.tensors, [f"{generation}-{name}" for name in self.files], {**self.columns, "crc": crc}
        )

    def to_bytes(self) -> bytes:
        """The `.npz` file."""
        header = {
            "tensors": {name: [list(info.shape), info.dtype] for name, info in self.tensors.items()},
            "files": self.files,
        }
        out = io.BytesIO()
        text = np.frombuffer(json.dumps(header, separators=(",", ":")).encode(), np.uint8)
        np.savez(out, header=text, **self.columns)  # type: ignore[arg-type]
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> CheckpointIndex:
        """The inverse of `to_bytes`.

        ValueError if it is not such a file, or if a number in it is not one that an index can have: what is read by
        it lies inside its tensors and files. Whether the chunks fill the tensors is for coverage.py.
        """
        columns = read_columns(data, ("header", *_COLUMNS))
        text = columns.pop("header")
        if text.dtype != np.uint8:
            raise ValueError("its header is no text")
        header = strict_json.loads(text.tobytes(), _HEADER_BYTES)
        if not isinstance(header, dict) or not {"tensors", "files"} <= header.keys():
            raise ValueError("its header does not name tensors and files")
        tensors, files = _tensors(header["tensors"]), header["files"]
        if not isinstance(files, list):
            raise ValueError(f"its files are {str(files)[:200]!r}, not a list of names")
        if wrong := [name for name in files if not isinstance(name, str) or not is_plain_name(name)]:
            raise ValueError(f"it names the file {str(wrong[0])[:200]!r}, which is not one of the checkpoint's folder")
        if len(set(files)) != len(files):
            raise ValueError("it names a file twice")
        _check_columns(tensors, files, columns)
        return cls(tensors, files, columns)

    def check_places(self, sizes: Mapping[str, int]) -> None:
        """ValueError unless every chunk lies within one of the files of these lengths, and none over another: what is
        read is then no more than what is stored."""
        if missing := [name for name in self.files if name not in sizes]:
            raise ValueError(f"it names the file {missing[0]}, which the checkpoint does not have")
        if not len(self):
            return
        c = self.columns
        start, length, data, file = (c[name].astype(np.int64) for name in ("start", "length", "data", "in_file"))
        held = self._bytes()
        room = np.array([sizes[name] for name in self.files], np.int64)[file]
        # Each is compared with what is left of the one before, so that no sum leaves 64 bits.
        if ((start > room) | (length > room - np.minimum(start, room))).any():
            raise ValueError("a chunk reaches outside its file")
        if ((data < start) | (data - start > length) | (held > length - (data - start))).any():
            raise ValueError("a chunk's elements reach outside its part of the file")
        order = np.lexsort((start, file))
        same_file = np.diff(file[order]) == 0
        if (same_file & ((start + length)[order][:-1] > start[order][1:])).any():
            raise ValueError("two chunks lie in the same bytes of a file")

    def _bytes(self) -> np.ndarray:
        """[rows] bytes of each chunk's elements."""
        dims = self.columns["box"].shape[2]
        used = np.arange(dims) < np.array([len(i.shape) for i in self.tensors.values()], np.int64).reshape(-1, 1)
        item = np.array([element_size(info.dtype) for info in self.tensors.values()], np.int64)
        owner = self.columns["tensor"]
        return np.where(used[owner], self.columns["box"][:, 1], 1).prod(axis=1, dtype=np.int64) * item[owner]

    def subset(self, rows: np.ndarray) -> CheckpointIndex:
        """Some of the chunks, as an index of their own with the same tensors and files."""
        return CheckpointIndex(self.tensors, self.files, {name: column[rows] for name, column in self.columns.items()})

    def rows(self, name: str) -> np.ndarray:
        """Row numbers of a tensor's chunks."""
        i = self._number[name]
        return self._order[self._bounds[i] : self._bounds[i + 1]]

    def overlapping(self, name: str, box: Box) -> np.ndarray:
        """Row numbers of a tensor's chunks that share elements with `box`."""
        rows = self.rows(name)
        dims = len(box.sizes)
        if 0 in box.sizes:
            return rows[:0]
        starts, sizes = self.columns["box"][rows, 0, :dims], self.columns["box"][rows, 1, :dims]
        low, size = np.array(box.offsets, np.int64), np.array(box.sizes, np.int64)
        hit = ((starts < low + size) & (low < starts + sizes)).all(axis=1)
        return rows[hit]

    def info(self, row: int) -> TensorInfo:
        """The tensor that a chunk belongs to."""
        return self.tensors[self.names[self.columns["tensor"][row]]]

    def name(self, row: int) -> str:
        """Its name."""
        return self.names[self.columns["tensor"][row]]

    def box(self, row: int) -> Box:
        """The box that a chunk holds."""
        dims = len(self.info(row).shape)
        offsets, sizes = self.columns["box"][row, :, :dims].tolist()
        return Box(tuple(offsets), tuple(sizes))

    def nbytes(self, row: int) -> int:
        """Bytes of a chunk's elements."""
        info = self.info(row)
        return int(prod(self.columns["box"][row, 1, : len(info.shape)].tolist())) * element_size(info.dtype)

    def file(self, row: int) -> str:
        """Name of the file that holds a chunk."""
        return self.files[self.columns["in_file"][row]]


def _tensors(found: Any) -> dict[str, TensorInfo]:
    if not isinstance(found, dict):
        raise ValueError("its tensors have no names")
    tensors = {}
    for name, about in found.items():
        if not is_tensor_name(name):
            raise ValueError(f"{name[:_NAME_LENGTH]!r} is no name of a tensor")
        if not isinstance(about, list) or len(about) != 2 or not isinstance(about[0], list):
            raise ValueError(f"{name} has no shape and type")
        shape, dtype = about
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise ValueError(f"{name} is of type {str(dtype)[:50]!r}; known: {', '.join(DTYPES)}")
        if len(shape) > _MOST_DIMS or any(type(n) is not int or not 0 <= n < _MOST_BYTES for n in shape):
            raise ValueError(f"{name} has the shape {str(shape)[:200]}")
        # Counted without its empty dimensions, or a zero would hide a product of 64 bits and more.
        if prod(n for n in shape if n) * element_size(dtype) > _MOST_BYTES:
            raise ValueError(f"{name} of shape {str(shape)[:200]} is larger than any storage")
        tensors[name] = TensorInfo(tuple(shape), dtype)
    return tensors


def is_tensor_name(name: str) -> bool:
    """Whether a logical tensor may be called so: text that a terminal shows as it is, of bounded length."""
    return 0 < len(name) <= _NAME_LENGTH and name.isprintable()


def _check_columns(tensors: dict[str, TensorInfo], files: list[str], columns: dict[str, np.ndarray]) -> None:
    """ValueError unless every row speaks of a tensor, a file and a box that are there."""
    count = len(columns["tensor"]) if columns["tensor"].ndim == 1 else -1
    box = columns["box"]
    dims = max((len(info.shape) for info in tensors.values()), default=0)
    if box.ndim != 3 or box.shape[:2] != (count, 2) or not (dims <= box.shape[2] <= _MOST_DIMS or not count):
        raise ValueError(f"its boxes are of shape {list(box.shape)} for {count} chunks of up to {dims} dimensions")
    for name in _COLUMNS[:-1]:
        if columns[name].shape != (count,):
            raise ValueError(f"its column {name} is of shape {list(columns[name].shape)} for {count} chunks")
        if count and int(columns[name].min()) < 0:
            raise ValueError(f"its column {name} holds a number below 0")
    if not count:
        return
    for name, known in (("tensor", tensors), ("in_file", files)):
        if int(columns[name].max()) >= len(known):
            raise ValueError(f"its column {name} says {int(columns[name].max())} where there are {len(known)}")
    whole = np.zeros((len(tensors), box.shape[2]), np.int64)
    for i, info in enumerate(tensors.values()):
        whole[i, : len(info.shape)] = info.shape
    room = whole[columns["tensor"]]
    if ((box < 0).any(axis=1) | (box[:, 0] > room) | (box[:, 1] > room - np.minimum(box[:, 0], room))).any():
        raise ValueError("a chunk reaches outside its tensor")
    if int(columns["crc"].max()) >> 32:
        raise ValueError("a checksum is longer than 32 bits")


def join(parts: Sequence[CheckpointIndex]) -> CheckpointIndex:
    """One index of several that speak of the same tensors (or of some of them) and of different files."""
    tensors = dict(sorted({name: info for part in parts for name, info in part.tensors.items()}.items()))
    number = {name: i for i, name in enumerate(tensors)}
    files: list[str] = []
    columns: dict[str, list[np.ndarray]] = {}
    dims = max((part.columns["box"].shape[2] for part in parts), default=0)
    for part in parts:
        mine = dict(part.columns)
        mine["tensor"] = np.array([number[name] for name in part.names], np.int32)[mine["tensor"]]
        mine["in_file"] = mine["in_file"] + np.int32(len(files))
        mine["box"] = np.pad(mine["box"], ((0, 0), (0, 0), (0, dims - mine["box"].shape[2])))
        files += part.files
        for name, column in mine.items():
            columns.setdefault(name, []).append(column)
    return CheckpointIndex(tensors, files, {name: np.concatenate(columns[name]) for name in columns})
