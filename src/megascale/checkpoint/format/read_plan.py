"""Who reads which stored chunk, so that a group reads each once and evenly. Pure planning, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megascale.checkpoint.format.chunks import intersect_boxes
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo
from megascale.core.tensors import Box

# Bytes that one process sends in one round of an exchange (and, with nobody to send to, reads).
ROUND_BYTES = 64 << 20


@dataclass(frozen=True)
class Want:
    """What one process needs of a checkpoint.

    Attributes:
        rows: [chunks] row numbers in the index, ascending.
        box: [chunks, 2, dims] offsets and sizes of the part needed, in the logical tensor: the smallest box around
            what all its shards take from the chunk.
    """

    rows: np.ndarray
    box: np.ndarray


def want(index: CheckpointIndex, boxes: Sequence[tuple[str, Box]]) -> Want:
    """The chunks that some boxes of logical tensors need."""
    dims = index.columns["box"].shape[2]
    found: dict[int, tuple[list[int], list[int]]] = {}
    for name, box in boxes:
        for row in index.overlapping(name, box).tolist():
            common = intersect_boxes(index.box(row), box)
            if common is None:
                continue
            low, high = list(common.offsets), [o + n for o, n in zip(common.offsets, common.sizes, strict=True)]
            if row in found:
                low = [min(a, b) for a, b in zip(low, found[row][0], strict=True)]
                high = [max(a, b) for a, b in zip(high, found[row][1], strict=True)]
            found[row] = (low, high)
    rows = sorted(found)
    table = np.zeros((len(rows), 2, dims), np.int64)
    for i, row in enumerate(rows):
        low, high = found[row]
        table[i, 0, : len(low)] = low
        table[i, 1, : len(low)] = np.array(high) - low
    return Want(np.array(rows, np.int64), table)


def assign_readers(
    index: CheckpointIndex, wants: Sequence[Want], holders: Mapping[str, Sequence[int]] | None = None
) -> np.ndarray:
    """[rows] which process reads each chunk, -1 where nobody needs it.

    A chunk is read by one of those that need it; among all of them, bytes read are evened out, and each reads runs
    of neighbouring chunks.

    Args:
        holders: for each data file the processes that can read it (for copies in memory); None: all can.
    """
    c = index.columns
    rows = np.concatenate([w.rows for w in wants])
    ranks = np.repeat(np.arange(len(wants)), [len(w.rows) for w in wants])
    if holders is not None:
        rows, ranks = _able(index, rows, ranks, holders, len(wants))
    order = np.lexsort((ranks, rows))
    rows, ranks = rows[order], ranks[order]
    reader = np.full(len(index), -1, np.int64)
    if not len(rows):
        return reader
    first = np.flatnonzero(np.diff(rows, prepend=-1))
    count = np.diff(np.append(first, len(rows)))
    rows = rows[first]
    # Chunks with the same candidates form a kind. A sum of random numbers, one a process, tells sets apart.
    marks = np.random.default_rng(0).integers(0, 1 << 63, len(wants), np.uint64)
    _, kind = np.unique(np.add.reduceat(marks[ranks], first), return_inverse=True)
    alone = count == 1
    reader[rows[alone]] = ranks[first[alone]]
    load = np.bincount(ranks[first[alone]], c["length"][rows[alone]], minlength=len(wants)).astype(float)
    shared = np.flatnonzero(~alone)
    shared = shared[np.lexsort((c["start"][rows[shared]], c["in_file"][rows[shared]], kind[shared], count[shared]))]
    for part in np.split(shared, np.flatnonzero(np.diff(kind[shared])) + 1):
        if len(part):
            candidates = ranks[first[part[0]] : first[part[0]] + count[part[0]]]
            ends = np.cumsum(c["length"][rows[part]])
            quota = _fill_up(load[candidates], float(ends[-1]))
            # A chunk goes to the process in whose share its middle lies.
            which = np.searchsorted(np.cumsum(quota), ends - c["length"][rows[part]] / 2)
            reader[rows[part]] = candidates[np.minimum(which, len(candidates) - 1)]
            load += np.bincount(reader[rows[part]], c["length"][rows[part]], minlength=len(wants))
    return reader


def _able(
    index: CheckpointIndex, rows: np.ndarray, ranks: np.ndarray, holders: Mapping[str, Sequence[int]], size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Of the pairs (chunk, process that needs it) those whose process can read it; where none can, all that can."""
    in_file = index.columns["in_file"].astype(np.int64)
    able = [np.array(holders[name], np.int64) for name in index.files]
    keys = np.concatenate([number * size + ranks_able for number, ranks_able in enumerate(able)])
    hit = np.isin(in_file[rows] * size + ranks, keys)
    stranded = np.setdiff1d(rows, rows[hit])
    more = [able[in_file[row]] for row in stranded]
    return (
        np.concatenate([rows[hit], np.repeat(stranded, [len(m) for m in more])]),
        np.concatenate([ranks[hit], *more]),
    )


def _fill_up(load: np.ndarray, amount: float) -> np.ndarray:
    """How to add `amount` to unequal loads so that the smallest ones rise to one level."""
    order = np.argsort(load, kind="stable")
    sorted_load = load[order]
    total = np.cumsum(sorted_load)
    number = np.arange(1, len(load) + 1)
    level = (amount + total) / number
    # The level that uses the k lowest is right for the largest k whose own load lies below it.
    k = int(np.flatnonzero(level > sorted_load - 1e-9)[-1])
    return np.maximum(level[k] - load, 0.0)


def rounds(
    index: CheckpointIndex, reader: np.ndarray, wants: Sequence[Want], limit: int = ROUND_BYTES
) -> list[list[np.ndarray]]:
    """[rounds][process] rows that each process reads and sends: at most about `limit` bytes to send or to read.

    All processes compute the same rounds and walk through them together.
    """
    c = index.columns
    fans = np.zeros(len(index), np.int64)
    np.add.at(fans, np.concatenate([w.rows for w in wants]), 1)
    rows = np.flatnonzero(reader >= 0)
    rows = rows[np.lexsort((c["start"][rows], c["in_file"][rows], reader[rows]))]
    if not len(rows):
        return []
    who = reader[rows]
    cost = np.cumsum(c["length"][rows] * np.maximum(fans[rows] - 1, 1))
    begins = np.flatnonzero(np.diff(who, prepend=-1))
    before = np.zeros(len(wants), np.int64)
    before[who[begins]] = np.append(0, cost)[begins]
    slot = (cost - before[who] - 1) // limit
    # Numbers of rounds without gaps, from 0 for each process.
    new = (np.diff(who, prepend=-1) != 0) | (np.diff(slot, prepend=0) != 0)
    number = np.cumsum(new)
    base = np.zeros(len(wants), np.int64)
    base[who[begins]] = number[begins]
    number -= base[who]
    nothing = np.zeros(0, np.int64)
    result = [[nothing] * len(wants) for _ in range(int(number.max()) + 1)]
    for part in np.split(np.arange(len(rows)), np.flatnonzero(new)[1:]):
        result[int(number[part[0]])][int(who[part[0]])] = rows[part]
    return result


def find_moved_chunks(reader: np.ndarray, wants: Sequence[Want]) -> np.ndarray:
    """[rows] whether some process needs a chunk that another reads."""
    result = np.zeros(len(reader), bool)
    for rank, w in enumerate(wants):
        result[w.rows[reader[w.rows] != rank]] = True
    return result


def spans(index: CheckpointIndex, rows: np.ndarray, gap: int = 1 << 16) -> list[tuple[str, int, int, list[int]]]:
    """Runs of one file that hold some chunks' elements: (file, first byte, past-last byte, rows), in file order.

    Chunks less than `gap` bytes apart are fetched in one read: what stands between neighbours is their frames.
    """
    result: list[tuple[str, int, int, list[int]]] = []
    for row in rows.tolist():
        file, start = index.file(row), int(index.columns["data"][row])
        stop = start + index.nbytes(row)
        if result and result[-1][0] == file and 0 <= start - result[-1][2] < gap:
            result[-1] = (file, result[-1][1], stop, [*result[-1][3], row])
        else:
            result.append((file, start, stop, [row]))
    return result


def info_of(index: CheckpointIndex, row: int, part: np.ndarray) -> tuple[TensorInfo, Box]:
    """A chunk's tensor, and the box that row of a Want's table means."""
    info = index.info(row)
    dims = len(info.shape)
    return info, Box(tuple(part[0, :dims].tolist()), tuple(part[1, :dims].tolist()))
