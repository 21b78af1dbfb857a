"""Chunks of foreign files, which a group of processes loads in the same way as the chunks of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from megascale.checkpoint.chunk_source import ChunkSource
from megascale.checkpoint.conversion import Source
from megascale.checkpoint.format.archive import element_size
from megascale.checkpoint.format.chunks import CHUNK_BYTES, split_box
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo
from megascale.checkpoint.saver import to_host_bytes
from megascale.checkpoint.storage.base import Buffer
from megascale.core.tensors import Box
from megascale.errors import DataError


def make_index(tensors: Mapping[str, TensorInfo], limit: int = CHUNK_BYTES) -> CheckpointIndex:
    """Return an index in which each tensor is a file with its elements in row-major order, without checksums.

    Args:
        limit: largest size of a chunk in bytes.
    """
    tensors = dict(sorted(tensors.items()))
    dims = max((len(info.shape) for info in tensors.values()), default=0)
    positions: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    boxes: list[np.ndarray] = []
    for position, info in enumerate(tensors.values()):
        element_bytes = element_size(info.dtype)
        start = 0
        for box in split_box(Box((0,) * len(info.shape), info.shape), element_bytes, limit):
            padded = np.zeros((2, dims), np.int64)
            padded[:, : len(info.shape)] = (box.offsets, box.sizes)
            positions.append(position)
            starts.append(start)
            lengths.append(box.count * element_bytes)
            boxes.append(padded)
            start += box.count * element_bytes
    start_column = np.array(starts, np.int64)
    columns: dict[str, np.ndarray] = {
        "tensor": np.array(positions, np.int32),
        "in_file": np.array(positions, np.int32),
        "start": start_column,
        "length": np.array(lengths, np.int64),
        "data": start_column,
        "crc": np.zeros(len(positions), np.uint32),
        "box": np.array(boxes, np.int64).reshape(len(positions), 2, dims),
    }
    return CheckpointIndex(tensors, list(tensors), columns)


class SourceChunks(ChunkSource):
    """Chunks of tensors that a function reads by box.

    Args:
        name: origin of the tensors in messages.
        index: result of `make_index` for the tensors.
    """

    def __init__(self, name: str, index: CheckpointIndex, source: Source) -> None:
        super().__init__(name, index, {}, has_checksums=False)
        _, self._read_box = source

    def read(self, file: str, start: int, stop: int) -> Buffer:
        info = self.index.tensors[file]
        row_bytes = prod(info.shape[1:]) * element_size(info.dtype)
        first_row = start // row_bytes
        end_row = -(-stop // row_bytes)  # rounded up
        offsets = (first_row,) + (0,) * (len(info.shape) - 1)
        try:
            rows = self._read_box(file, Box(offsets, (end_row - first_row, *info.shape[1:])))
        except DataError as error:
            raise OSError(str(error)) from None  # the loader reports an OSError to all processes
        offset = start - first_row * row_bytes
        return to_host_bytes(rows)[offset : offset + stop - start]
