"""Who reads which stored chunk, so that a group reads each once and evenly. Pure planning, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from megascale.checkpoint.index import Index, TensorInfo
from megascale.checkpoint.layout import overlap
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


def want(index: Index, boxes: Sequence[tuple[str, Box]]) -> Want:
    """The chunks that some boxes of logical tensors need."""
    dims = index.columns["box"].shape[2]
    found: dict[int, tuple[list[int], list[int]]] = {}
    for name, box in boxes:
        for row in index.overlapping(name, box).tolist():
            common = overlap(index.box(row), box)
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
    index: Index, wants: Sequence[Want], holders: Mapping[str, Sequence[int]] | None = None
) -> np.ndarray:
    """[rows] which process reads each chunk, -1 where nobody needs it.

    A chunk is read by one of those that need it; among all of them, bytes read are evened out, and each reads runs
    of neighbouring chunks.

    Args:
        holders: for each data file the processes that can read it (for copies in memory); None: all can.
    """
    c = index.columns
    need = np.zeros((len(index), len(wants)), bool)
    for rank, w in enumerate(wants):
        need[w.rows, rank] = True
    allowed = need
    if holders is not None:
        can = np.zeros((len(index.files), len(wants)), bool)
        for number, name in enumerate(index.files):
            can[number, list(holders[name])] = True
        allowed = need & can[c["in_file"]]
        # Nobody who needs it has it: any of those that have it reads it for them.
        stranded = need.any(axis=1) & ~allowed.any(axis=1)
        allowed[stranded] = can[c["in_file"][stranded]]
    reader = np.full(len(index), -1, np.int64)
    kinds, kind = np.unique(np.packbits(allowed, axis=1), axis=0, return_inverse=True)
    members = np.unpackbits(kinds, axis=1, count=len(wants)).astype(bool)
    load = np.zeros(len(wants))
    for k in np.argsort(members.sum(axis=1), kind="stable"):
        candidates = np.flatnonzero(members[k])
        rows = np.flatnonzero(kind.reshape(-1) == k)
        if not len(candidates):
            continue
        rows = rows[np.lexsort((c["start"][rows], c["in_file"][rows]))]
        ends = np.cumsum(c["length"][rows])
        quota = _fill_up(load[candidates], float(ends[-1]))
        # A chunk goes to the process in whose share its middle lies.
        which = np.searchsorted(np.cumsum(quota), ends - c["length"][rows] / 2)
        reader[rows] = candidates[np.minimum(which, len(candidates) - 1)]
        load += np.bincount(reader[rows], c["length"][rows], minlength=len(wants))
    return reader


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


def rounds(index: Index, reader: np.ndarray, wants: Sequence[Want], limit: int = ROUND_BYTES) -> list[list[np.ndarray]]:
    """[rounds][process] rows that each process reads and sends: at most about `limit` bytes to send or to read.

    All processes compute the same rounds and walk through them together.
    """
    fans = np.zeros(len(index), np.int64)
    for w in wants:
        fans[w.rows] += 1
    result: list[list[np.ndarray]] = []
    per_rank = []
    for rank in range(len(wants)):
        rows = np.flatnonzero(reader == rank)
        rows = rows[np.lexsort((index.columns["start"][rows], index.columns["in_file"][rows]))]
        cost = np.cumsum(index.columns["length"][rows] * np.maximum(fans[rows] - 1, 1))
        cuts = (np.flatnonzero(np.diff(cost // limit)) + 1).tolist()
        per_rank.append([part for part in np.split(rows, cuts) if len(part)])
    for number in range(max((len(parts) for parts in per_rank), default=0)):
        result.append([p[number] if number < len(p) else np.zeros(0, np.int64) for p in per_rank])
    return result


def spans(index: Index, rows: np.ndarray, gap: int = 1 << 16) -> list[tuple[str, int, int, list[int]]]:
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


def info_of(index: Index, row: int, part: np.ndarray) -> tuple[TensorInfo, Box]:
    """A chunk's tensor, and the box that row of a Want's table means."""
    info = index.info(row)
    dims = len(info.shape)
    return info, Box(tuple(part[0, :dims].tolist()), tuple(part[1, :dims].tolist()))
