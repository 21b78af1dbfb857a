"""The index of a checkpoint: for each stored chunk its tensor, box, file, position and checksum. No torch.

Kept as columns of integers in one `.npz` without pickles, since a large run stores millions of chunks. Beside it
`.metadata` says the same in torch's own (pickled) form, for plain `dcp.load`; our loader never opens that one.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megascale.checkpoint.archive import element_size
from megascale.checkpoint.layout import Chunk
from megascale.core.tensors import Box


@dataclass(frozen=True)
class Stored:
    """A chunk in a file: bytes `data .. data + chunk.nbytes` hold its elements; the archive around them begins at
    `start` and is `length` long. `crc` is zlib.crc32 of the elements."""

    chunk: Chunk
    file: str
    start: int
    length: int
    data: int
    crc: int


@dataclass(frozen=True)
class TensorInfo:
    """A stored logical tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return int(np.prod(self.shape, dtype=np.int64)) * element_size(self.dtype)


class Index:
    """All chunks of a checkpoint, found by tensor name."""

    def __init__(self, tensors: dict[str, TensorInfo], files: list[str], columns: dict[str, np.ndarray]) -> None:
        self.tensors = tensors
        self.files = files
        self.columns = columns
        self._names = list(tensors)
        owner = columns["tensor"]
        self._order = np.argsort(owner, kind="stable")
        self._bounds = np.searchsorted(owner[self._order], np.arange(len(self._names) + 1))
        self._number = {name: i for i, name in enumerate(self._names)}

    @classmethod
    def build(cls, stored: Sequence[Stored]) -> Index:
        """Columns from records."""
        tensors = {s.chunk.name: TensorInfo(s.chunk.shape, s.chunk.dtype) for s in stored}
        tensors = dict(sorted(tensors.items()))
        number = {name: i for i, name in enumerate(tensors)}
        files = sorted({s.file for s in stored})
        file_number = {name: i for i, name in enumerate(files)}
        dims = max((len(info.shape) for info in tensors.values()), default=0)
        boxes = np.zeros((len(stored), 2, dims), np.int64)
        for i, s in enumerate(stored):
            boxes[i, 0, : len(s.chunk.shape)] = s.chunk.box.offsets
            boxes[i, 1, : len(s.chunk.shape)] = s.chunk.box.sizes
        columns: dict[str, np.ndarray] = {
            "tensor": np.array([number[s.chunk.name] for s in stored], np.int32),
            "in_file": np.array([file_number[s.file] for s in stored], np.int32),
            "start": np.array([s.start for s in stored], np.int64),
            "length": np.array([s.length for s in stored], np.int64),
            "data": np.array([s.data for s in stored], np.int64),
            "crc": np.array([s.crc for s in stored], np.uint32),
            "box": boxes,
        }
        return cls(tensors, files, columns)

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
    def from_bytes(cls, data: bytes) -> Index:
        """The inverse of `to_bytes`; ValueError if it is not such a file."""
        with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            columns = {name: arrays[name] for name in arrays.files if name != "header"}
        tensors = {name: TensorInfo(tuple(shape), dtype) for name, (shape, dtype) in header["tensors"].items()}
        return cls(tensors, header["files"], columns)

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

    def stored(self, row: int) -> Stored:
        """One row as a record."""
        c = self.columns
        name = self._names[c["tensor"][row]]
        info = self.tensors[name]
        dims = len(info.shape)
        box = Box(tuple(map(int, c["box"][row, 0, :dims])), tuple(map(int, c["box"][row, 1, :dims])))
        return Stored(
            Chunk(name, info.shape, info.dtype, box),
            self.files[c["in_file"][row]],
            int(c["start"][row]),
            int(c["length"][row]),
            int(c["data"][row]),
            int(c["crc"][row]),
        )

    def __len__(self) -> int:
        return len(self.columns["tensor"])


def torch_metadata(index: Index) -> bytes:
    """The same index as torch's distributed checkpoint writes it (`.metadata`)."""
    import pickle

    import torch
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        BytesStorageMetadata,
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        StorageMeta,
        TensorProperties,
        TensorStorageMetadata,
    )

    tensors: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places = {}
    for name, info in index.tensors.items():
        chunks: list[ChunkStorageMetadata] = []
        for row in index.rows(name):
            s = index.stored(row)
            offsets, sizes = torch.Size(s.chunk.box.offsets), torch.Size(s.chunk.box.sizes)
            places[MetadataIndex(name, offsets, len(chunks))] = _StorageInfo(s.file, s.start, s.length)
            chunks.append(ChunkStorageMetadata(offsets, sizes))
        properties = TensorProperties(dtype=getattr(torch, info.dtype))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(info.shape), chunks)
    metadata = Metadata(tensors, planner_data={}, storage_data=places, storage_meta=StorageMeta())
    metadata.version = CURRENT_DCP_VERSION
    return pickle.dumps(metadata)
