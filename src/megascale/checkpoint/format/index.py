"""The index of a checkpoint: for each stored chunk its tensor, box, file, position and checksum. No torch.

Kept as columns of integers in one `.npz` without pickles, since a large run stores hundreds of thousands of chunks.
Beside it `.metadata` says the same in torch's own (pickled) form, for plain `dcp.load`; our loader never opens that.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from megascale.checkpoint.format.archive import element_size
from megascale.core.tensors import Box


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

    def committed(self, generation: str, crc: np.ndarray) -> CheckpointIndex:
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
        np.savez(out, allow_pickle=False, header=text, **self.columns)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> CheckpointIndex:
        """The inverse of `to_bytes`; ValueError if it is not such a file."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
                header = json.loads(arrays["header"].tobytes())
                columns = {name: arrays[name] for name in arrays.files if name != "header"}
        except (zipfile.BadZipFile, KeyError) as error:
            raise ValueError(f"not an index: {error}") from None
        tensors = {name: TensorInfo(tuple(shape), dtype) for name, (shape, dtype) in header["tensors"].items()}
        return cls(tensors, header["files"], columns)

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
