"""Planning a save: which process writes which chunk, and the layout of every file. Integer columns, no torch.

The plan of a run is made once and used for every save: only the checksums and the generation in file names change. It
is kept in numpy columns because at ten thousand processes it has hundreds of thousands of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megascale.checkpoint.format.archive import ALIGNMENT, element_size, head_length, tail_length
from megascale.checkpoint.format.chunks import check_coverage, split_box
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo, count_box_bytes
from megascale.checkpoint.storage.base import PAGE
from megascale.core.tensors import Box


@dataclass(frozen=True)
class Offer:
    """The chunks that one process holds.

    Attributes:
        tensors: shape and dtype by logical name.
        tensor: [chunks] number of each chunk's tensor in `tensors`.
        box: [chunks, 2, dims] offsets and sizes, zero beyond a tensor's dimensions.
    """

    tensors: dict[str, TensorInfo]
    tensor: np.ndarray
    box: np.ndarray


@dataclass(frozen=True)
class RankPart:
    """The layout of the file that one process writes.

    Attributes:
        chunks: [rows] numbers of chunks in this process's offer, in file order.
        start: [rows] first byte of each archive.
        data: [rows] first byte of each archive's elements.
        length: [rows] bytes of each archive.
        size: bytes of the file, a multiple of PAGE (0: this process writes nothing).
    """

    chunks: np.ndarray
    start: np.ndarray
    data: np.ndarray
    length: np.ndarray
    size: int


@dataclass(frozen=True)
class WritePlan:
    """The plan of a save.

    Attributes:
        index: all chunks, without checksums and without the generation in file names.
        parts: the file layout of each process.
    """

    index: CheckpointIndex
    parts: list[RankPart]

    @property
    def size(self) -> int:
        """Return the bytes of all data files."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class _ChunkTable:
    """Chunks of several processes as columns.

    Attributes:
        owner: [rows] number of the chunk's tensor.
        box: [rows, 2, dims] offsets and sizes.
        rank: [rows] process that holds the chunk.
        number: [rows] the chunk's number in its process's offer.
        nbytes: [rows] bytes of its elements.
    """

    owner: np.ndarray
    box: np.ndarray
    rank: np.ndarray
    number: np.ndarray
    nbytes: np.ndarray

    def select(self, rows: np.ndarray) -> _ChunkTable:
        """Return the table of some rows."""
        return _ChunkTable(self.owner[rows], self.box[rows], self.rank[rows], self.number[rows], self.nbytes[rows])


def data_file_name(rank: int) -> str:
    """Return the name of a process's data file, without its generation."""
    return f"{rank:05d}.distcp"


def make_offer(boxes: Iterable[tuple[str, tuple[int, ...], str, Box]]) -> Offer:
    """Cut (name, shape, dtype, box) entries into chunks; leave out empty boxes of non-empty tensors."""
    tensors: dict[str, TensorInfo] = {}
    numbers: dict[str, int] = {}
    owner: list[int] = []
    parts: list[Box] = []
    for name, shape, dtype, box in boxes:
        number = numbers.setdefault(name, len(numbers))
        info = TensorInfo(tuple(shape), dtype)
        first = tensors.setdefault(name, info)
        if first != info:
            raise ValueError(f"{name} is handed in as {first.dtype}{list(first.shape)} and as {dtype}{list(shape)}")
        for part in split_box(box, element_size(dtype)):
            if part.count or 0 in shape:
                owner.append(number)
                parts.append(part)
    dims = max((len(info.shape) for info in tensors.values()), default=0)
    columns = np.zeros((len(parts), 2, dims), np.int64)
    for row, part in enumerate(parts):
        columns[row, 0, : len(part.sizes)] = part.offsets
        columns[row, 1, : len(part.sizes)] = part.sizes
    return Offer(tensors, np.array(owner, np.int32), columns)


def make_plan(offers: Sequence[Offer]) -> WritePlan:
    """Assign every chunk to a writer. A box offered by several is written by the holder with the fewest bytes so far.

    Raises ValueError, naming the tensor, if the offers do not cover each logical tensor exactly once.
    """
    tensors = _merge_tensors(offers)
    table = _stack_offers(offers, tensors)
    order, first, count = _group_equal_boxes(table)
    distinct = order[first]
    check_coverage(tensors, table.owner[distinct], table.box[distinct])
    chosen = _choose_writers(table, order, first, count, ranks=len(offers))
    return _lay_out_files(tensors, table.select(chosen), len(offers))


def _merge_tensors(offers: Sequence[Offer]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for offer in offers:
        for name, info in offer.tensors.items():
            first = tensors.setdefault(name, info)
            if first is not info and first != info:
                raise ValueError(
                    f"{name} is {first.dtype}{list(first.shape)} on one process and {info.dtype}{list(info.shape)} "
                    "on another"
                )
    return dict(sorted(tensors.items()))


def _stack_offers(offers: Sequence[Offer], tensors: dict[str, TensorInfo]) -> _ChunkTable:
    """Return all offers as one table."""
    number = {name: i for i, name in enumerate(tensors)}
    dims = max((offer.box.shape[2] for offer in offers), default=0)
    total = sum(len(offer.tensor) for offer in offers)
    owner = np.empty(total, np.int32)
    rank = np.empty(total, np.int32)
    local = np.empty(total, np.int32)
    box = np.zeros((total, 2, dims), np.int64)
    start = 0
    for r, offer in enumerate(offers):
        stop = start + len(offer.tensor)
        numbers = np.array([number[name] for name in offer.tensors], np.int32)
        owner[start:stop] = numbers[offer.tensor]
        box[start:stop, :, : offer.box.shape[2]] = offer.box
        rank[start:stop] = r
        local[start:stop] = np.arange(stop - start)
        start = stop
    return _ChunkTable(owner, box, rank, local, count_box_bytes(tensors, owner, box))


def _group_equal_boxes(table: _ChunkTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return rows sorted by tensor and box, the first position of each group of equal boxes, and its length."""
    flat = table.box.reshape(len(table.box), -1)
    order = np.lexsort((*flat.T[::-1], table.owner))
    if not len(order):
        return order, order, order
    is_new = np.empty(len(order), bool)
    is_new[0] = True
    is_new[1:] = (np.diff(table.owner[order]) != 0) | (np.diff(flat[order], axis=0) != 0).any(axis=1)
    first = np.flatnonzero(is_new)
    return order, first, np.diff(np.append(first, len(order)))


def _choose_writers(
    table: _ChunkTable, order: np.ndarray, first: np.ndarray, count: np.ndarray, ranks: int
) -> np.ndarray:
    """Return one row of each group of equal boxes: first those with one holder, then the largest shared, greedily."""
    chosen = order[first].copy()
    is_single = count == 1
    load = np.bincount(table.rank[chosen[is_single]], table.nbytes[chosen[is_single]], minlength=ranks)
    shared = np.flatnonzero(~is_single)
    for group in shared[np.argsort(-table.nbytes[chosen[shared]], kind="stable")]:
        holders = order[first[group] : first[group] + count[group]]
        best = holders[np.argmin(load[table.rank[holders]])]
        load[table.rank[best]] += table.nbytes[best]
        chosen[group] = best
    return chosen


def _lay_out_files(tensors: dict[str, TensorInfo], table: _ChunkTable, ranks: int) -> WritePlan:
    """Position the chosen chunks in their writers' files, tensor after tensor; rows come sorted by tensor and box."""
    table = table.select(np.argsort(table.rank, kind="stable"))
    frames = [(head_length(i.dtype, len(i.shape)), tail_length(i.dtype, len(i.shape))) for i in tensors.values()]
    head, tail = np.array(frames, np.int64).reshape(-1, 2).T
    owner = table.owner
    length = -(-(head[owner] + table.nbytes + tail[owner]) // ALIGNMENT) * ALIGNMENT
    bounds = np.searchsorted(table.rank, np.arange(ranks + 1))
    total = np.concatenate([[0], np.cumsum(length)])
    start = total[:-1] - total[bounds[table.rank]]
    for r in range(ranks):
        if bounds[r] < bounds[r + 1]:
            length[bounds[r + 1] - 1] += -(total[bounds[r + 1]] - total[bounds[r]]) % PAGE
    writers = np.flatnonzero(np.diff(bounds))
    file_number = np.zeros(ranks, np.int32)
    file_number[writers] = np.arange(len(writers))
    columns = {
        "tensor": owner.astype(np.int32),
        "in_file": file_number[table.rank],
        "start": start,
        "length": length,
        "data": start + head[owner],
        "crc": np.zeros(len(owner), np.uint32),
        "box": table.box,
    }
    parts = []
    for r in range(ranks):
        rows = slice(bounds[r], bounds[r + 1])
        size = int(length[rows].sum())
        parts.append(RankPart(table.number[rows], start[rows], columns["data"][rows], length[rows], size))
    return WritePlan(CheckpointIndex(tensors, [data_file_name(r) for r in writers.tolist()], columns), parts)
