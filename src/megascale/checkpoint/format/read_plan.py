"""Plan of a load: which process reads which stored chunk. A group reads each chunk once. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from megascale.checkpoint.format.chunks import intersect_boxes
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.core.tensors import Box

# Bytes that one process sends in one round of an exchange, or reads if it sends nothing.
ROUND_BYTES = 64 << 20


@dataclass(frozen=True)
class ChunkRequest:
    """Chunks of a checkpoint that one process needs.

    Attributes:
        rows: [chunks] row numbers in the index, ascending.
        box: [chunks, 2, dims] offsets and sizes of the needed box within the logical tensor. It is the smallest box
            that contains everything that the process's shards need of the chunk.
    """

    rows: np.ndarray
    box: np.ndarray

    @classmethod
    def empty(cls) -> ChunkRequest:
        """Return the request of a process that needs no chunk."""
        return cls(np.zeros(0, np.int64), np.zeros((0, 2, 0), np.int64))

    def select(self, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Return row and box [2, dims] of the needed chunks among `rows`, in the order of `rows`."""
        if not len(self.rows) or not len(rows):
            return []
        positions = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        is_needed = self.rows[positions] == rows
        return [(int(row), self.box[i]) for row, i in zip(rows[is_needed], positions[is_needed], strict=True)]


def request_chunks(index: CheckpointIndex, boxes: Sequence[tuple[str, Box]]) -> ChunkRequest:
    """Return the chunks that are needed for the given boxes of logical tensors."""
    dims = index.columns["box"].shape[2]
    bounds: dict[int, tuple[list[int], list[int]]] = {}  # by row: first index and end of the needed box
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
    """Return [rows] the process that reads each chunk, or -1 for a chunk that no process needs.

    One of the processes that need a chunk reads it. The bytes are balanced over the processes, and each process reads
    consecutive chunks.

    Args:
        holders: processes that can read each data file, by name of the file (for snapshots in memory). Default: all
            processes can.
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
    # The candidates of chunk i are `ranks` from candidate_starts[i] on, as many as candidate_counts[i].
    candidate_starts = np.flatnonzero(np.diff(rows, prepend=-1))
    candidate_counts = np.diff(np.append(candidate_starts, len(rows)))
    rows = rows[candidate_starts]
    # Chunks with the same candidates form a group. Each process has a random number, and the sum of the candidates'
    # numbers identifies their set.
    random_numbers = np.random.default_rng(0).integers(0, 1 << 63, len(requests), np.uint64)
    _, group = np.unique(np.add.reduceat(random_numbers[ranks], candidate_starts), return_inverse=True)
    is_single = candidate_counts == 1
    reader[rows[is_single]] = ranks[candidate_starts[is_single]]
    bytes_by_rank = np.bincount(
        ranks[candidate_starts[is_single]], length[rows[is_single]], minlength=len(requests)
    ).astype(float)
    shared = np.flatnonzero(~is_single)
    in_file = index.columns["in_file"][rows[shared]]
    shared = shared[np.lexsort((start[rows[shared]], in_file, group[shared], candidate_counts[shared]))]
    for group_chunks in np.split(shared, np.flatnonzero(np.diff(group[shared])) + 1):
        if len(group_chunks):
            first_chunk = group_chunks[0]
            first_candidate = candidate_starts[first_chunk]
            candidates = ranks[first_candidate : first_candidate + candidate_counts[first_chunk]]
            chunk_bytes = length[rows[group_chunks]]
            ends = np.cumsum(chunk_bytes)
            quota = _level_loads(bytes_by_rank[candidates], float(ends[-1]))
            # The quotas divide the group's bytes into ranges. A chunk goes to the candidate of its middle byte.
            position = np.searchsorted(np.cumsum(quota), ends - chunk_bytes / 2)
            reader[rows[group_chunks]] = candidates[np.minimum(position, len(candidates) - 1)]
            bytes_by_rank += np.bincount(reader[rows[group_chunks]], chunk_bytes, minlength=len(requests))
    return reader


def _restrict_to_holders(
    index: CheckpointIndex, rows: np.ndarray, ranks: np.ndarray, holders: Mapping[str, Sequence[int]], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keep the pairs of a chunk and a process in which the process can read the chunk.

    If no process that needs a chunk can read it, all processes that can read it become its candidates.

    Returns:
        The chunks and the processes of the pairs.
    """
    in_file = index.columns["in_file"].astype(np.int64)
    file_holders = [np.array(holders[name], np.int64) for name in index.files]
    keys = np.concatenate([number * size + file_ranks for number, file_ranks in enumerate(file_holders)])
    can_read = np.isin(in_file[rows] * size + ranks, keys)
    unreadable = np.setdiff1d(rows, rows[can_read])
    added_ranks = [file_holders[in_file[row]] for row in unreadable]
    return (
        np.concatenate([rows[can_read], np.repeat(unreadable, [len(file_ranks) for file_ranks in added_ranks])]),
        np.concatenate([ranks[can_read]] + added_ranks),
    )


def _level_loads(load: np.ndarray, amount: float) -> np.ndarray:
    """Return for each load the addition, such that the additions sum to `amount` and raise the lowest loads equally."""
    order = np.argsort(load, kind="stable")
    sorted_load = load[order]
    total = np.cumsum(sorted_load)
    counts = np.arange(1, len(load) + 1)
    level = (amount + total) / counts
    # level[i] is the height if the i + 1 lowest loads are raised. The right i is the largest whose load is below it.
    last = int(np.flatnonzero(level > sorted_load - 1e-9)[-1])
    return np.maximum(level[last] - load, 0.0)


def plan_rounds(
    index: CheckpointIndex, reader: np.ndarray, requests: Sequence[ChunkRequest], limit: int = ROUND_BYTES
) -> list[list[np.ndarray]]:
    """Return the rows that each process reads and sends in each round, as [rounds][process].

    All processes compute the same rounds and execute them together.

    Args:
        limit: bytes that a process reads or sends per round; a single larger chunk is a round by itself.
    """
    columns = index.columns
    request_count = np.zeros(len(index), np.int64)
    np.add.at(request_count, np.concatenate([request.rows for request in requests]), 1)
    rows = np.flatnonzero(reader >= 0)
    rows = rows[np.lexsort((columns["start"][rows], columns["in_file"][rows], reader[rows]))]
    if not len(rows):
        return []
    ranks = reader[rows]
    # Sum of the bytes that the readers send for each chunk, or read if only the reader itself needs the chunk.
    cost = np.cumsum(columns["length"][rows] * np.maximum(request_count[rows] - 1, 1))
    rank_starts = np.flatnonzero(np.diff(ranks, prepend=-1))
    cost_before = np.zeros(len(requests), np.int64)
    cost_before[ranks[rank_starts]] = np.append(0, cost)[rank_starts]
    # A new round begins where the process's cost passes a multiple of the limit. A chunk above the limit may pass
    # several multiples at once, so the rounds of each process are then numbered from 0 without gaps.
    limit_multiple = (cost - cost_before[ranks] - 1) // limit
    is_new = (np.diff(ranks, prepend=-1) != 0) | (np.diff(limit_multiple, prepend=0) != 0)
    round_number = np.cumsum(is_new)
    first_round = np.zeros(len(requests), np.int64)
    first_round[ranks[rank_starts]] = round_number[rank_starts]
    round_number -= first_round[ranks]
    no_rows = np.zeros(0, np.int64)
    rounds = [[no_rows] * len(requests) for _ in range(int(round_number.max()) + 1)]
    for round_rows in np.split(np.arange(len(rows)), np.flatnonzero(is_new)[1:]):
        rounds[int(round_number[round_rows[0]])][int(ranks[round_rows[0]])] = rows[round_rows]
    return rounds


def find_moved_chunks(reader: np.ndarray, requests: Sequence[ChunkRequest]) -> np.ndarray:
    """Return a mask [rows] of the chunks that a process needs and another process reads."""
    is_moved = np.zeros(len(reader), bool)
    for rank, request in enumerate(requests):
        is_moved[request.rows[reader[request.rows] != rank]] = True
    return is_moved


class MergedRead(NamedTuple):
    """Range of a file that contains the elements of some chunks: bytes from `start` up to `stop`."""

    file: str
    start: int
    stop: int
    rows: list[int]


def merge_reads(index: CheckpointIndex, rows: np.ndarray, gap: int = 1 << 16) -> list[MergedRead]:
    """Return the reads for the elements of some chunks, which `rows` gives in file order.

    Chunks that are less than `gap` bytes apart are in one read, because only their frames are between them.
    """
    reads: list[MergedRead] = []
    for row in rows.tolist():
        file = index.file(row)
        start = int(index.columns["data"][row])
        stop = start + index.nbytes(row)
        if reads and reads[-1].file == file and 0 <= start - reads[-1].stop < gap:
            reads[-1] = MergedRead(file, reads[-1].start, stop, reads[-1].rows + [row])
        else:
            reads.append(MergedRead(file, start, stop, [row]))
    return reads


def unpack_box(index: CheckpointIndex, row: int, packed_box: np.ndarray) -> Box:
    """Return a box of a ChunkRequest ([2, dims]) without the dimensions that the tensor of `row` lacks."""
    dims = len(index.info(row).shape)
    return Box(tuple(packed_box[0, :dims].tolist()), tuple(packed_box[1, :dims].tolist()))
