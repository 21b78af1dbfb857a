"""Who writes which chunk where: from what every process holds to the layout of all files. Integer columns, no torch.

The plan of a run is made once and used for every save: only checksums and the generation in file names change. It is
kept in numpy columns because at ten thousand processes it has hundreds of thousands of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megascale.checkpoint.format.archive import ALIGNMENT, element_size, head_length, tail_length
from megascale.checkpoint.format.chunks import split_box
from megascale.checkpoint.format.coverage import check_cover, used_dimensions
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo
from megascale.checkpoint.storage.base import PAGE
from megascale.core.tensors import Box


@dataclass(frozen=True)
class Offer:
    """What one process holds, cut into chunks.

    Attributes:
        tensors: logical name to shape and dtype.
        tensor: [chunks] number of each chunk's tensor in `tensors`.
        box: [chunks, 2, dims] offsets and sizes, zero beyond a tensor's dimensions.
    """

    tensors: dict[str, TensorInfo]
    tensor: np.ndarray
    box: np.ndarray


@dataclass(frozen=True)
class RankPart:
    """What one process writes: its file's layout.

    Attributes:
        chunks: [rows] numbers of chunks in this process's offer, in file order.
        start, data, length: [rows] bytes; an archive begins at `start`, its elements at `data`, it is `length` long.
        size: bytes of the file, a multiple of PAGE (0: this process writes nothing).
    """

    chunks: np.ndarray
    start: np.ndarray
    data: np.ndarray
    length: np.ndarray
    size: int


@dataclass(frozen=True)
class WritePlan:
    """The whole save: `index` of all chunks (checksums and file names still blank) and each process's part."""

    index: CheckpointIndex
    parts: list[RankPart]

    @property
    def size(self) -> int:
        """Bytes of all data files."""
        return sum(part.size for part in self.parts)


def data_file(rank: int) -> str:
    """Name of a process's data file, without its generation."""
    return f"{rank:05d}.distcp"


def make_offer(boxes: Iterable[tuple[str, tuple[int, ...], str, Box]]) -> Offer:
    """Cut (name, shape, dtype, box) into chunks; boxes that hold nothing of a tensor are left out."""
    tensors: dict[str, TensorInfo] = {}
    numbers: dict[str, int] = {}
    owner: list[int] = []
    parts: list[Box] = []
    for name, shape, dtype, box in boxes:
        number = numbers.setdefault(name, len(numbers))
        known = tensors.setdefault(name, TensorInfo(tuple(shape), dtype))
        if known != TensorInfo(tuple(shape), dtype):
            raise ValueError(f"{name} is handed in as {known.dtype}{list(known.shape)} and as {dtype}{list(shape)}")
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
    """Decide who writes what. A box offered by several is written once, by the holder with the fewest bytes so far.

    Raises ValueError, naming the tensor, if the offers do not cover each logical tensor exactly once.
    """
    tensors = _unite(offers)
    owner, box, rank, local = _stack(offers, tensors)
    order, first, count = _same_boxes(owner, box)
    check_cover(tensors, owner[order[first]], box[order[first]])
    item = np.array([element_size(info.dtype) for info in tensors.values()], np.int64)
    scalar_safe = np.where(used_dimensions(tensors, box.shape[2])[owner], box[:, 1], 1)
    nbytes = scalar_safe.prod(axis=1) * item[owner]
    chosen = _choose(order, first, count, rank, nbytes, len(offers))
    return _lay_out(tensors, owner[chosen], box[chosen], rank[chosen], local[chosen], nbytes[chosen], len(offers))


def _unite(offers: Sequence[Offer]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for offer in offers:
        for name, info in offer.tensors.items():
            known = tensors.setdefault(name, info)
            if known is not info and known != info:
                raise ValueError(
                    f"{name} is {known.dtype}{list(known.shape)} on one process and {info.dtype}{list(info.shape)} "
                    "on another"
                )
    return dict(sorted(tensors.items()))


def _stack(
    offers: Sequence[Offer], tensors: dict[str, TensorInfo]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """All offers as one table: tensor, box, rank, number within the rank's offer."""
    number = {name: i for i, name in enumerate(tensors)}
    dims = max((offer.box.shape[2] for offer in offers), default=0)
    total = sum(len(offer.tensor) for offer in offers)
    owner, rank, local = (np.empty(total, np.int32) for _ in range(3))
    box = np.zeros((total, 2, dims), np.int64)
    at = 0
    for r, offer in enumerate(offers):
        stop = at + len(offer.tensor)
        numbers = np.array([number[name] for name in offer.tensors], np.int32)
        owner[at:stop] = numbers[offer.tensor] if len(numbers) else 0
        box[at:stop, :, : offer.box.shape[2]] = offer.box
        rank[at:stop] = r
        local[at:stop] = np.arange(stop - at)
        at = stop
    return owner, box, rank, local


def _same_boxes(owner: np.ndarray, box: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows sorted by tensor and box; where each run of equal boxes begins, and how long it is."""
    flat = box.reshape(len(box), -1)
    order = np.lexsort((*flat.T[::-1], owner))
    if not len(order):
        return order, order, order
    new = np.empty(len(order), bool)
    new[0] = True
    new[1:] = (np.diff(owner[order]) != 0) | (np.diff(flat[order], axis=0) != 0).any(axis=1)
    first = np.flatnonzero(new)
    return order, first, np.diff(np.append(first, len(order)))


def _choose(
    order: np.ndarray, first: np.ndarray, count: np.ndarray, rank: np.ndarray, nbytes: np.ndarray, ranks: int
) -> np.ndarray:
    """One row of each run of equal boxes: those with one holder first, then the largest shared ones, greedily."""
    chosen = order[first].copy()
    alone = count == 1
    load = np.bincount(rank[chosen[alone]], nbytes[chosen[alone]], minlength=ranks)
    shared = np.flatnonzero(~alone)
    for run in shared[np.argsort(-nbytes[chosen[shared]], kind="stable")]:
        holders = order[first[run] : first[run] + count[run]]
        best = holders[np.argmin(load[rank[holders]])]
        load[rank[best]] += nbytes[best]
        chosen[run] = best
    return chosen


def _lay_out(
    tensors: dict[str, TensorInfo],
    owner: np.ndarray,
    box: np.ndarray,
    rank: np.ndarray,
    local: np.ndarray,
    nbytes: np.ndarray,
    ranks: int,
) -> WritePlan:
    """Place the chosen chunks in their writers' files, tensor after tensor."""
    order = np.argsort(rank, kind="stable")  # rows come sorted by tensor and box
    owner, box, rank, local, nbytes = owner[order], box[order], rank[order], local[order], nbytes[order]
    frames = [(head_length(i.dtype, len(i.shape)), tail_length(i.dtype, len(i.shape))) for i in tensors.values()]
    head, tail = np.array(frames, np.int64).reshape(-1, 2).T
    length = -(-(head[owner] + nbytes + tail[owner]) // ALIGNMENT) * ALIGNMENT
    bounds = np.searchsorted(rank, np.arange(ranks + 1))
    total = np.concatenate([[0], np.cumsum(length)])
    start = total[:-1] - total[bounds[rank]]
    for r in range(ranks):
        if bounds[r] < bounds[r + 1]:
            length[bounds[r + 1] - 1] += -(total[bounds[r + 1]] - total[bounds[r]]) % PAGE
    writers = np.flatnonzero(np.diff(bounds))
    file_of = np.zeros(ranks, np.int32)
    file_of[writers] = np.arange(len(writers))
    columns = {
        "tensor": owner.astype(np.int32),
        "in_file": file_of[rank],
        "start": start,
        "length": length,
        "data": start + head[owner],
        "crc": np.zeros(len(owner), np.uint32),
        "box": box,
    }
    parts = []
    for r in range(ranks):
        rows = slice(bounds[r], bounds[r + 1])
        size = int(start[rows][-1] + length[rows][-1]) if rows.stop > rows.start else 0
        parts.append(RankPart(local[rows], start[rows], columns["data"][rows], length[rows], size))
    return WritePlan(CheckpointIndex(tensors, [data_file(r) for r in writers.tolist()], columns), parts)
