"""Transfer of the chunks of a checkpoint into the shards of a group of processes.

One process of the group reads a stored chunk and sends its elements to the other processes that need them. Storage is
therefore read once for any number of replicas (MegaScale section 4.4). The bytes are divided evenly over the readers.
Chunks that other processes wait for move first, in rounds: later rounds are read while earlier ones are sent. Meanwhile
threads that have nothing to send copy the chunks that only their own process needs.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from megascale.checkpoint.chunk_source import ChunkSource, LoadReport
from megascale.checkpoint.copies import CopiedPiece, FileRange, ShardCopier
from megascale.checkpoint.format.archive import combine_crc32, element_size
from megascale.checkpoint.format.chunks import TensorShard, box_slices, intersect_boxes
from megascale.checkpoint.format.read_plan import (
    ChunkRequest,
    assign_readers,
    find_moved_chunks,
    plan_rounds,
    unpack_box,
)
from megascale.checkpoint.object_collectives import Peers
from megascale.core.capacity import usable_cores
from megascale.core.tensors import Box


class BoxElements(NamedTuple):
    """Elements of a box within a chunk, with the chunk's row in the index."""

    row: int
    box: Box
    elements: torch.Tensor


@dataclass(frozen=True)
class _DirectChunk:
    """Chunk whose bytes are copied to one range of a shard's memory, without a step in between.

    Attributes:
        target: the elements in the shard's memory.
        copies: copies of the chunk's pieces, in order.
    """

    row: int
    target: torch.Tensor
    copies: list[Future[CopiedPiece]]


@dataclass(frozen=True)
class _Round:
    """Chunks that this process has read for one round.

    Attributes:
        local: elements that this process needs.
        outgoing: bytes for the other processes in the order of their ranks, or None if no chunk moves in this round.
        outgoing_bytes: number of bytes of `outgoing` for each process.
        report: costs and damage of the round.
    """

    local: list[BoxElements]
    outgoing: torch.Tensor | None
    outgoing_bytes: list[int]
    report: LoadReport


class ChunkTransfer:
    """Transfer of the chunks of a checkpoint: read, exchange and copy.

    Chunks that move to other processes are transferred first, in rounds that are the same on all processes. The rounds
    of a process's own chunks follow, which need no exchange. Own chunks that can be copied directly have no round.
    """

    def __init__(
        self,
        source: ChunkSource,
        shards: Sequence[TensorShard],
        requests: Sequence[ChunkRequest],
        peers: Peers,
        copier: ShardCopier,
    ) -> None:
        self._source = source
        self._index = source.index
        self._requests = requests
        self._peers = peers
        self._copier = copier
        self._device = peers.exchange_device
        self._shards: dict[str, list[TensorShard]] = {}
        for shard in shards:
            self._shards.setdefault(shard.name, []).append(shard)
        reader = assign_readers(self._index, requests, source.holders)
        is_moved = find_moved_chunks(reader, requests)
        is_own = (reader == peers.rank) & ~is_moved
        self._targets: dict[int, torch.Tensor] = {}  # by row of the direct chunks
        if source.has_ranges:
            self._targets = self._find_direct_targets(np.flatnonzero(is_own))
            is_own[list(self._targets)] = False
        self._rounds = self._plan_rounds(np.where(is_moved, reader, -1))
        self._exchange_count = len(self._rounds)  # the same on all processes
        self._rounds += self._plan_rounds(np.where(is_own, reader, -1))

    def _plan_rounds(self, reader: np.ndarray) -> list[list[np.ndarray]]:
        """Return the rounds of the chunks that have a reader, as `plan_rounds`."""
        if self._source.round_bytes is None:
            return plan_rounds(self._index, reader, self._requests)
        return plan_rounds(self._index, reader, self._requests, self._source.round_bytes)

    def run(self, report: LoadReport) -> None:
        """Transfer all chunks. Threads read later rounds and copy own chunks while this thread exchanges rounds."""
        rounds_ahead = max(1, min(self._source.max_rounds_ahead, usable_cores() // 2))
        with ThreadPoolExecutor(rounds_ahead + 1) as pool:
            direct_chunks = pool.submit(self._copy_direct_chunks)
            first_rounds = range(min(rounds_ahead, len(self._rounds)))
            pending: deque[Future[_Round]] = deque(pool.submit(self._read_round, number) for number in first_rounds)
            for number in range(len(self._rounds)):
                part_start = time.monotonic()
                read_round = pending.popleft().result()
                report.add(read_round.report)
                part_start = report.measure("read", part_start)
                received = self._exchange_round(number, read_round)
                # The first exchange also connects the processes.
                part_start = report.measure("exchange" if number else "first exchange", part_start)
                for row, box, tensor in read_round.local + received:
                    for shard in self._shards[self._index.name(row)]:
                        self._copier.copy_to_shard(box, tensor, shard)
                self._copier.wait_for_previous_round()
                report.measure("copy", part_start)
                if number + rounds_ahead < len(self._rounds):
                    pending.append(pool.submit(self._read_round, number + rounds_ahead))
            part_start = time.monotonic()
            chunks, direct_report = direct_chunks.result()
        report.add(direct_report)
        self._check_direct_chunks(chunks, report)
        report.measure("own chunks", part_start)

    def _find_direct_targets(self, rows: np.ndarray) -> dict[int, torch.Tensor]:
        """Return the target of each chunk that one contiguous range of a shard's memory receives as it is stored.

        Args:
            rows: chunks that this process reads, and no other process needs.
        """
        targets: dict[int, torch.Tensor] = {}
        for row in rows.tolist():
            box = self._index.box(row)
            overlaps = [
                shard for shard in self._shards.get(self._index.name(row), []) if intersect_boxes(box, shard.box)
            ]
            if len(overlaps) != 1 or intersect_boxes(box, overlaps[0].box) != box:
                continue
            shard = overlaps[0]
            target = shard.tensor.detach()[box_slices(shard.box, box)]
            if target.is_contiguous() and target.dtype == getattr(torch, self._index.info(row).dtype):
                targets[row] = target
        return targets

    def _copy_direct_chunks(self) -> tuple[list[_DirectChunk], LoadReport]:
        """Start to copy the direct chunks, and return them. Chunks for other processes have precedence."""
        report = LoadReport()
        chunks = []
        for row, target in self._targets.items():
            try:
                source = self._find_range(row)
            except OSError as error:
                report.damage.append(f"{self._index.file(row)} cannot be read: {error}")
                continue
            copies = self._copier.copy_from_file(source, target, is_urgent=False)
            chunks.append(_DirectChunk(row, target, copies))
            report.read_bytes += source.size
        return chunks, report

    def _check_direct_chunks(self, chunks: Sequence[_DirectChunk], report: LoadReport) -> None:
        """Wait for the copies of direct chunks and check them. A damaged chunk is reported and its target zeroed."""
        for chunk in chunks:
            damage = self._find_damage(chunk.row, [copy.result() for copy in chunk.copies])
            if damage:
                report.damage.append(damage)
                chunk.target.zero_()

    def _read_round(self, number: int) -> _Round:
        """Read and check the chunks that this process reads in a round, and collect the bytes for other processes."""
        rows = self._rounds[number][self._peers.rank]
        report = LoadReport()
        forwarded_rows = self._find_forwarded(rows)
        read_rows = [row for row in rows.tolist() if row not in forwarded_rows]
        chunks = self._source.read_chunks(np.array(read_rows, np.int64), report)
        local: list[BoxElements] = []
        outgoing: list[torch.Tensor | FileRange] = []
        outgoing_rows: list[int] = []  # rows of the ranges among `outgoing`
        outgoing_bytes = [0] * len(self._requests)
        for rank, request in enumerate(self._requests):
            if rank != self._peers.rank and number >= self._exchange_count:
                continue
            for row, packed_box in request.select(rows):
                if row in forwarded_rows:
                    outgoing.append(forwarded_rows[row])
                    outgoing_rows.append(row)
                    outgoing_bytes[rank] += forwarded_rows[row].size
                    continue
                box = unpack_box(self._index, row, packed_box)
                elements = chunks[row][box_slices(self._index.box(row), box)]
                if rank == self._peers.rank:
                    local.append(BoxElements(row, box, elements))
                else:
                    outgoing.append(elements)
                    outgoing_bytes[rank] += elements.nbytes
        report.sent_bytes = sum(outgoing_bytes)
        joined = None
        if number < self._exchange_count:
            joined, copied_pieces = self._copier.join(outgoing, self._device)
            for row, pieces in zip(outgoing_rows, copied_pieces, strict=True):
                report.read_bytes += sum(piece.size for piece in pieces)
                damage = self._find_damage(row, pieces)
                if damage:
                    report.damage.append(damage)
        return _Round(local, joined, outgoing_bytes, report)

    def _find_forwarded(self, rows: np.ndarray) -> dict[int, FileRange]:
        """Return the chunks that only other processes need, each as a whole, with the ranges of their bytes.

        A chunk whose file is not available is not among them, so that reading it reports the damage.
        """
        if not self._source.has_ranges:
            return {}
        partial_rows: set[int] = set()
        for rank, request in enumerate(self._requests):
            for row, packed_box in request.select(rows):
                if rank == self._peers.rank or unpack_box(self._index, row, packed_box) != self._index.box(row):
                    partial_rows.add(row)
        ranges: dict[int, FileRange] = {}
        for row in rows.tolist():
            if row not in partial_rows:
                with contextlib.suppress(OSError):
                    ranges[row] = self._find_range(row)
        return ranges

    def _find_range(self, row: int) -> FileRange:
        """Return the range of a chunk's bytes. Raises OSError if its file is not available."""
        start = int(self._index.columns["data"][row])
        return self._source.find_range(self._index.file(row), start, start + self._index.nbytes(row))

    def _find_damage(self, row: int, pieces: Sequence[CopiedPiece]) -> str:
        """Return the damage of a chunk whose pieces were copied from its file, or an empty text."""
        file = self._index.file(row)
        crc = 0
        for piece in pieces:
            if piece.problem:
                return f"{file} cannot be read: {piece.problem}"
            crc = combine_crc32(crc, piece.crc, piece.size)
        if self._source.has_checksums and crc != int(self._index.columns["crc"][row]):
            return f"{file} holds other bytes for {self._index.name(row)} than were written"
        return ""

    def _exchange_round(self, number: int, read_round: _Round) -> list[BoxElements]:
        """Send the bytes that other processes need, and return the elements that this process needs from them."""
        received_boxes: list[BoxElements] = []
        if read_round.outgoing is None:
            return received_boxes
        request = self._requests[self._peers.rank]
        expected: list[list[tuple[int, Box, str]]] = []  # row, box and dtype of the elements from each process
        for rank in range(self._peers.size):
            boxes = []
            if rank != self._peers.rank:
                for row, packed_box in request.select(self._rounds[number][rank]):
                    boxes.append((row, unpack_box(self._index, row, packed_box), self._index.info(row).dtype))
            expected.append(boxes)
        incoming_bytes = [sum(_count_box_bytes(box, dtype) for _, box, dtype in boxes) for boxes in expected]
        received = self._peers.all_to_all(read_round.outgoing, read_round.outgoing_bytes, incoming_bytes)
        for boxes, data in zip(expected, received, strict=True):
            offset = 0
            for row, box, dtype in boxes:
                box_bytes = _count_box_bytes(box, dtype)
                elements = _align(data[offset : offset + box_bytes], dtype)
                elements = elements.view(getattr(torch, dtype)).reshape(box.sizes)
                received_boxes.append(BoxElements(row, box, elements))
                offset += box_bytes
        return received_boxes


def _align(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return `data`, or a copy if its address is not a multiple of the size of `dtype`.

    Elements of a smaller dtype in front of `data` in the same buffer may have caused such an address.
    """
    if data.data_ptr() % element_size(dtype) == 0:
        return data
    aligned = data.clone()
    if aligned.is_cuda:  # other streams read the copy without waiting for this thread's stream
        torch.cuda.current_stream(aligned.device).synchronize()
    return aligned


def _count_box_bytes(box: Box, dtype: str) -> int:
    return box.count * element_size(dtype)
