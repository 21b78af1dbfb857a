"""Plan of a save: which process writes which chunk, and the layout of every file. Needs no torch.

A run makes its plan once and uses it for every save, in which only the checksums and the generation change. The plan is
stored in numpy columns, because with ten thousand processes it has hundreds of thousands of rows.
"""

from __future__ import annotations

import itertools
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
    """Chunks that one process has and could write.

    Attributes:
        tensors: shape and dtype by logical name.
        tensor: [chunks] position of each chunk's tensor in `tensors`.
        box: [chunks, 2, dims] offsets and sizes of each chunk, zero beyond the dimensions of its tensor.
    """

    tensors: dict[str, TensorInfo]
    tensor: np.ndarray
    box: np.ndarray


@dataclass(frozen=True)
class RankFileLayout:
    """Layout of the file that one process writes, with one row per chunk in file order.

    Attributes:
        chunks: [rows] position of the chunk in this process's offer.
        start: [rows] offset of the chunk's archive in the file, in bytes.
        data: [rows] offset of the archive's elements in the file, in bytes.
        length: [rows] size of the archive in bytes, padding included.
        size: size of the file in bytes, a multiple of PAGE, or 0 if the process writes no file.
    """

    chunks: np.ndarray
    start: np.ndarray
    data: np.ndarray
    length: np.ndarray
    size: int


@dataclass(frozen=True)
class WritePlan:
    """Plan of a save.

    Attributes:
        index: index of all chunks, without checksums and without the generation in file names.
        file_layouts: layout of each process's file.
    """

    index: CheckpointIndex
    file_layouts: list[RankFileLayout]

    @property
    def size(self) -> int:
        """Return the total size of all data files in bytes."""
        return sum(file_layout.size for file_layout in self.file_layouts)


@dataclass(frozen=True)
class _ChunkTable:
    """Chunks of several processes as columns.

    Attributes:
        tensor: [rows] position of the chunk's tensor in the tensors of the checkpoint.
        box: [rows, 2, dims] offsets and sizes.
        rank: [rows] rank of the process that has the chunk.
        offer_row: [rows] position of the chunk in the offer of this process.
        nbytes: [rows] size of the chunk's elements in bytes.
    """

    tensor: np.ndarray
    box: np.ndarray
    rank: np.ndarray
    offer_row: np.ndarray
    nbytes: np.ndarray

    def select(self, rows: np.ndarray) -> _ChunkTable:
        """Return a table of the given rows, in the given order."""
        return _ChunkTable(self.tensor[rows], self.box[rows], self.rank[rows], self.offer_row[rows], self.nbytes[rows])


def data_file_name(rank: int) -> str:
    """Return the name of a process's data file, without the generation."""
    return f"{rank:05d}.distcp"


def make_offer(boxes: Iterable[tuple[str, tuple[int, ...], str, Box]]) -> Offer:
    """Cut the boxes of a process into chunks.

    Args:
        boxes: name, shape and dtype of a logical tensor, and the box of it that the process has. Empty boxes of
            non-empty tensors are left out.

    Raises:
        ValueError: two boxes give different shapes or dtypes for a tensor.
    """
    tensors: dict[str, TensorInfo] = {}
    positions: dict[str, int] = {}
    chunk_tensors: list[int] = []
    chunk_boxes: list[Box] = []
    for name, shape, dtype, box in boxes:
        position = positions.setdefault(name, len(positions))
        info = TensorInfo(tuple(shape), dtype)
        first_info = tensors.setdefault(name, info)
        if first_info != info:
            raise ValueError(
                f"{name} is handed in as {first_info.dtype}{list(first_info.shape)} and as {dtype}{list(shape)}"
            )
        for chunk_box in split_box(box, element_size(dtype)):
            if chunk_box.count or 0 in shape:
                chunk_tensors.append(position)
                chunk_boxes.append(chunk_box)
    dims = max((len(info.shape) for info in tensors.values()), default=0)
    columns = np.zeros((len(chunk_boxes), 2, dims), np.int64)
    for row, chunk_box in enumerate(chunk_boxes):
        columns[row, 0, : len(chunk_box.sizes)] = chunk_box.offsets
        columns[row, 1, : len(chunk_box.sizes)] = chunk_box.sizes
    return Offer(tensors, np.array(chunk_tensors, np.int32), columns)


def make_plan(offers: Sequence[Offer]) -> WritePlan:
    """Assign a writer to every chunk: of the processes that offer it, the one with the fewest bytes so far.

    Raises:
        ValueError: the offers do not cover a logical tensor, named in the message, exactly once.
    """
    tensors = _merge_tensors(offers)
    table = _stack_offers(offers, tensors)
    order, group_starts, group_sizes = _group_equal_boxes(table)
    distinct_rows = order[group_starts]
    check_coverage(tensors, table.tensor[distinct_rows], table.box[distinct_rows])
    chosen_rows = _choose_writers(table, order, group_starts, group_sizes, ranks=len(offers))
    return _lay_out_files(tensors, table.select(chosen_rows), len(offers))


def _merge_tensors(offers: Sequence[Offer]) -> dict[str, TensorInfo]:
    """Return the tensors of all offers, sorted by name. Raises ValueError if offers differ in a shape or dtype."""
    tensors: dict[str, TensorInfo] = {}
    for offer in offers:
        for name, info in offer.tensors.items():
            first_info = tensors.setdefault(name, info)
            if first_info is not info and first_info != info:
                raise ValueError(
                    f"{name} is {first_info.dtype}{list(first_info.shape)} "
                    f"on one process and {info.dtype}{list(info.shape)} on another"
                )
    return dict(sorted(tensors.items()))


def _stack_offers(offers: Sequence[Offer], tensors: dict[str, TensorInfo]) -> _ChunkTable:
    positions = {name: i for i, name in enumerate(tensors)}
    dims = max((offer.box.shape[2] for offer in offers), default=0)
    row_count = sum(len(offer.tensor) for offer in offers)
    chunk_tensors = np.empty(row_count, np.int32)
    rank = np.empty(row_count, np.int32)
    offer_rows = np.empty(row_count, np.int32)
    box = np.zeros((row_count, 2, dims), np.int64)
    start = 0
    for offer_rank, offer in enumerate(offers):
        stop = start + len(offer.tensor)
        offer_positions = np.array([positions[name] for name in offer.tensors], np.int32)
        chunk_tensors[start:stop] = offer_positions[offer.tensor]
        box[start:stop, :, : offer.box.shape[2]] = offer.box
        rank[start:stop] = offer_rank
        offer_rows[start:stop] = np.arange(stop - start)
        start = stop
    return _ChunkTable(chunk_tensors, box, rank, offer_rows, count_box_bytes(tensors, chunk_tensors, box))


def _group_equal_boxes(table: _ChunkTable) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Group the rows of the table that have the same tensor and box.

    Returns:
        The rows sorted by tensor and box, and for each group its first position in the sorted rows and its size.
    """
    flat_boxes = table.box.reshape(len(table.box), -1)
    order = np.lexsort((*flat_boxes.T[::-1], table.tensor))
    if not len(order):
        return order, order, order
    is_new = np.empty(len(order), bool)
    is_new[0] = True
    is_new[1:] = (np.diff(table.tensor[order]) != 0) | (np.diff(flat_boxes[order], axis=0) != 0).any(axis=1)
    group_starts = np.flatnonzero(is_new)
    return order, group_starts, np.diff(np.append(group_starts, len(order)))


def _choose_writers(
    table: _ChunkTable, order: np.ndarray, group_starts: np.ndarray, group_sizes: np.ndarray, ranks: int
) -> np.ndarray:
    """Return one row of each group of equal boxes, such that the bytes are balanced over the ranks.

    Groups with one row have no choice and come first. The other groups follow, the largest boxes first. Each goes to
    the rank that has the fewest bytes so far.
    """
    chosen_rows = order[group_starts].copy()
    is_single = group_sizes == 1
    bytes_by_rank = np.bincount(
        table.rank[chosen_rows[is_single]], table.nbytes[chosen_rows[is_single]], minlength=ranks
    )
    shared = np.flatnonzero(~is_single)
    for group in shared[np.argsort(-table.nbytes[chosen_rows[shared]], kind="stable")]:
        candidates = order[group_starts[group] : group_starts[group] + group_sizes[group]]
        lightest = candidates[np.argmin(bytes_by_rank[table.rank[candidates]])]
        bytes_by_rank[table.rank[lightest]] += table.nbytes[lightest]
        chosen_rows[group] = lightest
    return chosen_rows


def _lay_out_files(tensors: dict[str, TensorInfo], table: _ChunkTable, ranks: int) -> WritePlan:
    """Lay out the files of all ranks.

    Args:
        table: the chunks to write, each with the rank that writes it, sorted by tensor and box. The chunks of a file
            keep this order.
    """
    table = table.select(np.argsort(table.rank, kind="stable"))
    frames = [
        (head_length(info.dtype, len(info.shape)), tail_length(info.dtype, len(info.shape)))
        for info in tensors.values()
    ]
    head_bytes, tail_bytes = np.array(frames, np.int64).reshape(-1, 2).T
    tensor = table.tensor
    # Round the size of each archive up to a multiple of ALIGNMENT.
    length = -(-(head_bytes[tensor] + table.nbytes + tail_bytes[tensor]) // ALIGNMENT) * ALIGNMENT
    rank_bounds = np.searchsorted(table.rank, np.arange(ranks + 1))
    archive_ends = np.concatenate([[0], np.cumsum(length)])
    # Offsets in the file: the sum of all earlier archives, minus the archives of lower ranks.
    start = archive_ends[:-1] - archive_ends[rank_bounds[table.rank]]
    # Extend the last archive of each file, so that the size of the file is a multiple of PAGE.
    for first_row, end_row in itertools.pairwise(rank_bounds.tolist()):
        if first_row < end_row:
            file_bytes = archive_ends[end_row] - archive_ends[first_row]
            length[end_row - 1] += -file_bytes % PAGE
    writers = np.flatnonzero(np.diff(rank_bounds))
    file_numbers = np.zeros(ranks, np.int32)
    file_numbers[writers] = np.arange(len(writers))
    columns = {
        "tensor": tensor.astype(np.int32),
        "in_file": file_numbers[table.rank],
        "start": start,
        "length": length,
        "data": start + head_bytes[tensor],
        "crc": np.zeros(len(tensor), np.uint32),
        "box": table.box,
    }
    file_layouts = []
    for rank in range(ranks):
        rows = slice(rank_bounds[rank], rank_bounds[rank + 1])
        size = int(length[rows].sum())
        file_layouts.append(
            RankFileLayout(table.offer_row[rows], start[rows], columns["data"][rows], length[rows], size)
        )
    return WritePlan(
        CheckpointIndex(tensors, [data_file_name(rank) for rank in writers.tolist()], columns), file_layouts
    )
