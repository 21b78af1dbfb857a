"""Tensors outside a checkpoint as chunks that a group of processes reads once and spreads like a checkpoint's."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from megascale.checkpoint.conversion import Source
from megascale.checkpoint.format.archive import element_size
from megascale.checkpoint.format.chunks import CHUNK_BYTES, split_box
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo
from megascale.checkpoint.loader import ChunkSource
from megascale.checkpoint.saver import to_host_bytes
from megascale.checkpoint.storage.base import Buffer
from megascale.core.tensors import Box
from megascale.errors import DataError


def make_index(tensors: Mapping[str, TensorInfo], limit: int = CHUNK_BYTES) -> CheckpointIndex:
    """Return an index in which each tensor is a file of its elements in row-major order, without checksums.

    Args:
        limit: bytes of a chunk.
    """
    tensors = dict(sorted(tensors.items()))
    dims = max((len(info.shape) for info in tensors.values()), default=0)
    numbers: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    boxes: list[np.ndarray] = []
    for number, info in enumerate(tensors.values()):
        item = element_size(info.dtype)
        start = 0
        for box in split_box(Box((0,) * len(info.shape), info.shape), item, limit):
            padded = np.zeros((2, dims), np.int64)
            padded[:, : len(info.shape)] = (box.offsets, box.sizes)
            numbers.append(number)
            starts.append(start)
            lengths.append(box.count * item)
            boxes.append(padded)
            start += box.count * item
    begin = np.array(starts, np.int64)
    columns: dict[str, np.ndarray] = {
        "tensor": np.array(numbers, np.int32),
        "in_file": np.array(numbers, np.int32),
        "start": begin,
        "length": np.array(lengths, np.int64),
        "data": begin,
        "crc": np.zeros(len(numbers), np.uint32),
        "box": np.array(boxes, np.int64).reshape(len(numbers), 2, dims),
    }
    return CheckpointIndex(tensors, list(tensors), columns)


class SourceChunks(ChunkSource):
    """The chunks of tensors that a function reads by box.

    Args:
        name: their origin in messages.
        index: as `make_index` returns it.
        source: the tensors.
    """

    def __init__(self, name: str, index: CheckpointIndex, source: Source) -> None:
        super().__init__(name, index, {}, has_checksums=False)
        _, self._read_box = source

    def read(self, file: str, start: int, stop: int) -> Buffer:
        info = self.index.tensors[file]
        row_bytes = prod(info.shape[1:]) * element_size(info.dtype)
        first_row = start // row_bytes
        last_row = -(-stop // row_bytes)
        offsets = (first_row,) + (0,) * (len(info.shape) - 1)
        try:
            rows = self._read_box(file, Box(offsets, (last_row - first_row, *info.shape[1:])))
        except DataError as error:
            raise OSError(str(error)) from None  # the loader reports it to all processes
        skipped = start - first_row * row_bytes
        return to_host_bytes(rows)[skipped : skipped + stop - start]
