"""Planning a load: which process reads which stored chunk, so that a group reads each once and evenly. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megascale.checkpoint.format.chunks import intersect_boxes
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.core.tensors import Box

# Bytes that one process sends in one round of an exchange (or reads, where it sends nothing).
ROUND_BYTES = 64 << 20


@dataclass(frozen=True)
class ChunkRequest:
    """The chunks of a checkpoint that one process needs.

    Attributes:
        rows: [chunks] row numbers in the index, ascending.
        box: [chunks, 2, dims] offsets and sizes of the part needed, in the logical tensor: the smallest box around the
            parts that the process's shards take from the chunk.
    """

    rows: np.ndarray
    box: np.ndarray

    @classmethod
    def empty(cls) -> ChunkRequest:
        """Return the request of a process that needs nothing."""
        return cls(np.zeros(0, np.int64), np.zeros((0, 2, 0), np.int64))

    def select(self, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return (row, box [2, dims]) of the needed chunks among `rows`, in the order of `rows`."""
        if not len(self.rows) or not len(rows):
            return []
        positions = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        is_needed = self.rows[positions] == rows
        return [(int(row), self.box[i]) for row, i in zip(rows[is_needed], positions[is_needed], strict=True)]


def request_chunks(index: CheckpointIndex, boxes: Sequence[tuple[str, Box]]) -> ChunkRequest:
    """Return the chunks that some boxes of logical tensors need."""
    dims = index.columns["box"].shape[2]
    bounds: dict[int, tuple[list[int], list[int]]] = {}
    for name, box in boxes:
        for row in index.find_overlapping(name, box).tolist():
            common = intersect_boxes(index.box(row), box)
            if common is None:
                continue
            low = list(common.offsets)
            high = [offset + size for offset, size in zip(common.offsets, common.sizes, strict=True)]
            if row in bounds:
                low = [min(a, b) for a, b in zip(low, bounds[row][0], strict=True)]
                high = [max(a, b) for a, b in zip(high, bounds[row][1], strict=True)]
            bounds[row] = (low, high)
    rows = sorted(bounds)
    table = np.zeros((len(rows), 2, dims), np.int64)
    for i, row in enumerate(rows):
        low, high = bounds[row]
        table[i, 0, : len(low)] = low
        table[i, 1, : len(low)] = np.array(high) - low
    return ChunkRequest(np.array(rows, np.int64), table)


def assign_readers(
    index: CheckpointIndex, requests: Sequence[ChunkRequest], holders: Mapping[str, Sequence[int]] | None = None
) -> np.ndarray:
    """Return [rows] the process that reads each chunk, -1 for a chunk that no process needs.

    A chunk is read by one of the processes that need it. Bytes read are evened out over all processes, and each
    process reads consecutive chunks.

    Args:
        holders: for each data file the processes that can read it (for copies in memory); None: all can.
    """
    start = index.columns["start"]
    length = index.columns["length"]
    rows = np.concatenate([request.rows for request in requests])
    ranks = np.repeat(np.arange(len(requests)), [len(request.rows) for request in requests])
    if holders is not None:
        rows, ranks = _restrict_to_holders(index, rows, ranks, holders, len(requests))
    order = np.lexsort((ranks, rows))
    rows = rows[order]
    ranks = ranks[order]
    reader = np.full(len(index), -1, np.int64)
    if not len(rows):
        return reader
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    count = np.diff(np.append(first, len(rows)))
    rows = rows[first]
    # Chunks with the same candidates form a group. A sum of random numbers, one per process, identifies a set.
    marks = np.random.default_rng(0).integers(0, 1 << 63, len(requests), np.uint64)
    _, group = np.unique(np.add.reduceat(marks[ranks], first), return_inverse=True)
    is_single = count == 1
    reader[rows[is_single]] = ranks[first[is_single]]
    load = np.bincount(ranks[first[is_single]], length[rows[is_single]], minlength=len(requests)).astype(float)
    shared = np.flatnonzero(~is_single)
    in_file = index.columns["in_file"][rows[shared]]
    shared = shared[np.lexsort((start[rows[shared]], in_file, group[shared], count[shared]))]
    for part in np.split(shared, np.flatnonzero(np.diff(group[shared])) + 1):
        if len(part):
            candidates = ranks[first[part[0]] : first[part[0]] + count[part[0]]]
            ends = np.cumsum(length[rows[part]])
            quota = _level_loads(load[candidates], float(ends[-1]))
            # A chunk goes to the process whose share contains its middle.
            share = np.searchsorted(np.cumsum(quota), ends - length[rows[part]] / 2)
            reader[rows[part]] = candidates[np.minimum(share, len(candidates) - 1)]
            load += np.bincount(reader[rows[part]], length[rows[part]], minlength=len(requests))
    return reader


def _restrict_to_holders(
    index: CheckpointIndex, rows: np.ndarray, ranks: np.ndarray, holders: Mapping[str, Sequence[int]], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the (chunk, process) pairs whose process can read the chunk; where none of them can, all that can."""
    in_file = index.columns["in_file"].astype(np.int64)
    file_holders = [np.array(holders[name], np.int64) for name in index.files]
    keys = np.concatenate([number * size + able for number, able in enumerate(file_holders)])
    can_read = np.isin(in_file[rows] * size + ranks, keys)
    stranded = np.setdiff1d(rows, rows[can_read])
    extra = [file_holders[in_file[row]] for row in stranded]
    return (
        np.concatenate([rows[can_read], np.repeat(stranded, [len(able) for able in extra])]),
        np.concatenate([ranks[can_read]] + extra),
    )


def _level_loads(load: np.ndarray, amount: float) -> np.ndarray:
    """Return the additions, `amount` in total, that raise the smallest of unequal loads to one level."""
    order = np.argsort(load, kind="stable")
    sorted_load = load[order]
    total = np.cumsum(sorted_load)
    number = np.arange(1, len(load) + 1)
    level = (amount + total) / number
    # The level that uses the k lowest is right for the largest k whose own load lies below it.
    k = int(np.flatnonzero(level > sorted_load - 1e-9)[-1])
    return np.maximum(level[k] - load, 0.0)


def plan_rounds(
    index: CheckpointIndex, reader: np.ndarray, requests: Sequence[ChunkRequest], limit: int = ROUND_BYTES
) -> list[list[np.ndarray]]:
    """Return [rounds][process] the rows that each process reads and sends, at most about `limit` bytes of either.

    All processes compute the same rounds and go through them together.
    """
    columns = index.columns
    request_count = np.zeros(len(index), np.int64)
    np.add.at(request_count, np.concatenate([request.rows for request in requests]), 1)
    rows = np.flatnonzero(reader >= 0)
    rows = rows[np.lexsort((columns["start"][rows], columns["in_file"][rows], reader[rows]))]
    if not len(rows):
        return []
    ranks = reader[rows]
    cost = np.cumsum(columns["length"][rows] * np.maximum(request_count[rows] - 1, 1))
    begins = np.flatnonzero(np.diff(ranks, prepend=-1))
    cost_before = np.zeros(len(requests), np.int64)
    cost_before[ranks[begins]] = np.append(0, cost)[begins]
    slot = (cost - cost_before[ranks] - 1) // limit
    # Number the rounds of each process from 0 without gaps.
    is_new = (np.diff(ranks, prepend=-1) != 0) | (np.diff(slot, prepend=0) != 0)
    number = np.cumsum(is_new)
    base = np.zeros(len(requests), np.int64)
    base[ranks[begins]] = number[begins]
    number -= base[ranks]
    no_rows = np.zeros(0, np.int64)
    result = [[no_rows] * len(requests) for _ in range(int(number.max()) + 1)]
    for part in np.split(np.arange(len(rows)), np.flatnonzero(is_new)[1:]):
        result[int(number[part[0]])][int(ranks[part[0]])] = rows[part]
    return result


def find_moved_chunks(reader: np.ndarray, requests: Sequence[ChunkRequest]) -> np.ndarray:
    """Return [rows] whether some process needs a chunk that another one reads."""
    result = np.zeros(len(reader), bool)
    for rank, request in enumerate(requests):
        result[request.rows[reader[request.rows] != rank]] = True
    return result


def merge_reads(index: CheckpointIndex, rows: np.ndarray, gap: int = 1 << 16) -> list[tuple[str, int, int, list[int]]]:
    """Return reads that cover some chunks' elements: (file, first byte, past-last byte, rows), in file order.

    Chunks less than `gap` bytes apart are fetched in one read: only their frames lie between neighbours.
    """
    result: list[tuple[str, int, int, list[int]]] = []
    for row in rows.tolist():
        file = index.file(row)
        start = int(index.columns["data"][row])
        stop = start + index.nbytes(row)
        if result and result[-1][0] == file and 0 <= start - result[-1][2] < gap:
            result[-1] = (file, result[-1][1], stop, result[-1][3] + [row])
        else:
            result.append((file, start, stop, [row]))
    return result


def unpack_box(index: CheckpointIndex, row: int, part: np.ndarray) -> Box:
    """Return the box that one row of a ChunkRequest's table [2, dims] describes."""
    dims = len(index.info(row).shape)
    return Box(tuple(part[0, :dims].tolist()), tuple(part[1, :dims].tolist()))
