"""Loading of the newest complete checkpoint into live memory of any layout.

One process of the group reads a stored chunk and sends its elements to the other processes that need them. Storage is
therefore read once for any number of replicas (MegaScale section 4.4). The bytes are divided evenly over the readers.
Chunks that other processes wait for move first, in rounds: later rounds are read while earlier ones are sent. Meanwhile
threads that have nothing to send copy the chunks that only their own process needs. `load` tries the commits in order,
`load_commit` opens a commit, and `fill_shards` moves its chunks.
"""

from __future__ import annotations

import contextlib
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from megascale.checkpoint.copies import CopiedPiece, FileRange, ShardCopier
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import combine_crc32, crc32, element_size
from megascale.checkpoint.format.chunks import TensorShard, box_slices, intersect_boxes
from megascale.checkpoint.format.commit import Commit, DamagedCheckpoint
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.mismatch import explain_leftovers, explain_mismatch
from megascale.checkpoint.format.read_plan import (
    ChunkRequest,
    assign_readers,
    find_moved_chunks,
    merge_reads,
    plan_rounds,
    request_chunks,
    unpack_box,
)
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.base import Buffer, Storage
from megascale.checkpoint.storage.opening import open_storage
from megascale.core.capacity import usable_cores
from megascale.core.tensors import Box
from megascale.errors import DataError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
# Training may remove old checkpoints while another job loads them. The load then tries a newer one, at most this often.
_MAX_REMOVED = 100

# Function that is called with the saved state and the checkpoint's name before any tensor is read. It raises DataError,
# on all processes, if the run must not continue from the checkpoint. It returns whether the optimizer differs from the
# saved one. In that case optimizer tensors that the checkpoint lacks become zero, as before the first step.
AcceptState = Callable[[Mapping[str, Any], str], bool]


class BoxElements(NamedTuple):
    """Elements of a box within a chunk, with the chunk's row in the index."""

    row: int
    box: Box
    elements: torch.Tensor


@dataclass
class LoadReport:
    """Costs and findings of a load on this process.

    Attributes:
        step: step of the loaded checkpoint; None before the load.
        read_bytes: bytes read from storage or memory.
        sent_bytes: bytes sent to other processes.
        damage: descriptions of damaged chunks.
        zeroed_states: optimizer states that the checkpoint lacks and that were set to zero.
        skipped_commits: damaged commits, in place of which an earlier one was loaded.
        seconds: seconds of parts of the load.
        copy_threads: seconds of the threads that copy, as text.
    """

    step: int | None = None
    read_bytes: int = 0
    sent_bytes: int = 0
    damage: list[str] = field(default_factory=list)
    zeroed_states: set[str] = field(default_factory=set)
    skipped_commits: list[Commit] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    copy_threads: str = ""

    def measure(self, part: str, start_time: float) -> float:
        """Add the seconds of a part that began at `start_time` (`time.monotonic`), and return the present time."""
        present_time = time.monotonic()
        self.seconds[part] = self.seconds.get(part, 0.0) + present_time - start_time
        return present_time

    def describe_seconds(self) -> str:
        """Return the parts of the load and their seconds as text."""
        text = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self.seconds.items())
        if self.copy_threads:
            text += f"; {self.copy_threads}"
        return text

    def add(self, report: LoadReport) -> None:
        """Add the bytes and the damage of `report`."""
        self.read_bytes += report.read_bytes
        self.sent_bytes += report.sent_bytes
        self.damage += report.damage


class ChunkSource:
    """Chunks of one checkpoint, in storage or in memory. A subclass implements `read`.

    Args:
        name: name of the checkpoint in messages.
        state: saved state besides tensors.
        holders: processes that can read each data file, by name of the file. Default: all processes can.
        has_checksums: whether the index has the checksums of the chunks.

    Attributes:
        max_rounds_ahead: number of rounds that are read in advance, in one thread per round.
        round_bytes: bytes that a process sends per round. Default: `read_plan.ROUND_BYTES`.
        has_ranges: whether `find_range` is available.
    """

    max_rounds_ahead = 3
    round_bytes: int | None = None
    has_ranges = False

    def __init__(
        self,
        name: str,
        index: CheckpointIndex,
        state: Mapping[str, Any],
        holders: Mapping[str, Sequence[int]] | None = None,
        has_checksums: bool = True,
    ) -> None:
        self.name = name
        self.index = index
        self.state = state
        self.holders = holders
        self.has_checksums = has_checksums

    def read(self, file: str, start: int, stop: int) -> Buffer:
        """Return the bytes from `start` up to `stop` of a data file. Several threads may read at the same time."""
        raise NotImplementedError

    def find_range(self, file: str, start: int, stop: int) -> FileRange:
        """Return where threads can read the bytes from `start` up to `stop` of a data file themselves.

        Raises OSError if the file is no longer available.
        """
        raise NotImplementedError

    def read_chunks(self, rows: np.ndarray, report: LoadReport) -> dict[int, torch.Tensor]:
        """Return the elements of the chunks of some rows of the index. Arguments and result as for `read_chunks`."""
        return read_chunks(self, rows, report)


class StorageChunks(ChunkSource):
    """Chunks of a committed checkpoint in storage."""

    def __init__(self, storage: Storage, commit: Commit, index: CheckpointIndex) -> None:
        self._storage = storage
        self._folder = folders.step_name(commit.step)
        super().__init__(f"{storage.url}/{self._folder}", index, commit.state)

    def read(self, file: str, start: int, stop: int) -> Buffer:
        return self._storage.read(f"{self._folder}/{file}", start, stop - start)


def load(
    folder: Path | str,
    shards: Sequence[TensorShard],
    *,
    step: int | None = None,
    group: ProcessGroup | None = None,
    report: LoadReport | None = None,
    initial: Sequence[TensorShard] | None = None,
    accept: AcceptState | None = None,
    covers_model: bool = False,
) -> dict[str, Any]:
    """Fill `shards` in place from a committed checkpoint. Collective over `group`.

    Shards may be cut in any way, and may cover only a part of the stored tensors. A shard of another dtype is
    converted. Every chunk that is read is checked. If the newest checkpoint is damaged, the load warns and tries the
    one before it. If training removes the checkpoint during the load, the newest one at that time is loaded. Shards may
    be written several times, but damaged data never remains in them.

    Args:
        folder: checkpoints folder of the run, a path or an fsspec URL.
        shards: shards that this process needs.
        step: a committed step. Default: the step of the newest commit.
        group: processes that load together and send each other the chunks they read. It may differ from the group that
            saved. Default: the default group, or this process alone.
        report: filled with this process's costs and findings.
        initial: the weights among `shards`. A checkpoint of step 0 has weights only. From such a checkpoint only these
            shards are filled, and the others become zero, as before the first step.
        accept: see AcceptState.
        covers_model: whether every model tensor of the checkpoint must be in the shards of some process.

    Returns:
        The saved state besides tensors.

    Raises:
        DataError: there is no committed checkpoint, all are damaged, or the checkpoint is of another model. The message
            names the tensors and the key that probably differs.
    """
    storage = open_storage(folder)
    peers = Peers(group)
    candidates = _share_candidates(storage, step, peers)
    damages: list[str] = []
    damaged_generations: set[str] = set()
    removed_count = 0
    while candidates:
        commit = candidates.pop(0)
        name = f"{storage.url}/{folders.step_name(commit.step)}"
        is_new_optimizer = False
        if accept is not None:
            try:
                is_new_optimizer = accept(commit.state, name)
            except DataError as error:
                raise DataError("; ".join(damages + [str(error)])) from None
        if commit.step or initial is None:
            filled = shards
        else:
            filled = initial
        if filled is not shards:
            _zero_unfilled_shards(shards, filled)
        damage = load_commit(
            storage, commit, filled, peers, report, covers_model=covers_model, is_new_optimizer=is_new_optimizer
        )
        if damage is None:
            if damages and peers.rank == 0:
                warn(f"{'; '.join(damages)}. Went back to the checkpoint of step {commit.step}")
            if report is not None:
                report.step = commit.step
            return commit.state
        if peers.compute_once(partial(folders.is_removed, storage, commit), bool):
            removed_count += 1
            if step is not None or removed_count == _MAX_REMOVED:
                raise DataError(
                    f"the checkpoint {name!r} was removed while it was read: training goes on there and keeps "
                    "checkpoint.keep of them. Name a newer one, raise checkpoint.keep, or wait until training ends"
                )
            candidates = [c for c in _share_candidates(storage, step, peers) if c.generation not in damaged_generations]
            continue
        damaged_generations.add(commit.generation)
        damages.append(f"the checkpoint {name!r} is damaged: {damage}")
        if report is not None:
            report.skipped_commits.append(commit)
    raise DataError(f"{'; '.join(damages)}. No other committed checkpoint is left to load")


def find_candidates(storage: Storage, step: int | None) -> list[Commit] | str:
    """Return the commits to try, in this order, or text that says why there are none."""
    commits, unreadable = folders.list_commits(storage)
    committed_steps = f"committed steps: {sorted(c.step for c in commits) or 'none'}"
    if step is not None:
        name = f"{storage.url}/{folders.step_name(step)}"
        matches = [commit for commit in commits if commit.step == step]
        if matches:
            return matches
        if step in folders.list_steps(storage):
            return f"{name!r} is half-written or damaged (no readable COMMIT) and cannot be loaded; {committed_steps}"
        return f"there is no checkpoint {name!r}; {committed_steps}"
    if commits:
        for unreadable_step, reason in unreadable.items():
            warn(f"the checkpoint '{storage.url}/{folders.step_name(unreadable_step)}' is passed over: {reason}")
        return sorted(commits, key=lambda commit: folders.is_marked_damaged(storage, commit))
    incomplete = [f"{storage.url}/{folders.step_name(s)}" for s in folders.list_steps(storage)]
    if incomplete:
        return (
            f"no checkpoint in {storage.url!r} is complete: {', '.join(incomplete)} half-written (no readable COMMIT); "
            "restore one, or start over from step 0 with --checkpoint.resume=false"
        )
    return f"there is no checkpoint in {storage.url!r}; train first, or name another run folder"


def _share_candidates(storage: Storage, step: int | None, peers: Peers) -> list[Commit]:
    """Return the commits to try in order, the same on all processes. Raises DataError if there are none."""
    candidates = peers.compute_once(lambda: find_candidates(storage, step), list[Commit] | str)
    if isinstance(candidates, str):
        raise DataError(candidates)
    return list(candidates)


@torch.no_grad()
def _zero_unfilled_shards(shards: Sequence[TensorShard], filled: Sequence[TensorShard]) -> None:
    """Set the shards that are not in `filled` to zero. A damaged checkpoint may have been copied into them before."""
    names = {shard.name for shard in filled}
    for shard in shards:
        if shard.name not in names:
            shard.tensor.zero_()


@torch.no_grad()
def _zero_new_state(index: CheckpointIndex, shards: Sequence[TensorShard], report: LoadReport) -> list[TensorShard]:
    """Set the optimizer states that the checkpoint lacks to zero, and return the other shards."""
    stored = []
    for shard in shards:
        if shard.name.startswith("optimizer.") and shard.name not in index.tensors:
            shard.tensor.zero_()
            report.zeroed_states.add(".".join(shard.name.split(".")[:2]))
        else:
            stored.append(shard)
    return stored


def warn(message: str) -> None:
    """Log a message as a warning, and issue it as a Python warning for the caller."""
    log.warning(message)
    warnings.warn(message, stacklevel=3)


def load_commit(
    storage: Storage,
    commit: Commit,
    shards: Sequence[TensorShard],
    peers: Peers,
    report: LoadReport | None = None,
    *,
    covers_model: bool = False,
    is_new_optimizer: bool = False,
) -> str | None:
    """Fill shards from one commit. Collective. Arguments, result and errors are those of `fill_shards`."""
    index_bytes, damage = peers.compute_once(lambda: _open_commit(storage, commit), tuple[bytes, str])
    if damage:
        return damage
    source = StorageChunks(storage, commit, CheckpointIndex.from_bytes(index_bytes))
    return fill_shards(source, shards, peers, report, covers_model=covers_model, is_new_optimizer=is_new_optimizer)


def _open_commit(storage: Storage, commit: Commit) -> tuple[bytes, str]:
    """Return the index as bytes, and which file is missing, truncated or unreadable (empty text if none is)."""
    try:
        index = folders.read_index(storage, commit)
        folders.check_sizes(storage, commit)
    except DamagedCheckpoint as damage:
        return b"", str(damage)
    return index.to_bytes(), ""


def fill_shards(
    source: ChunkSource,
    shards: Sequence[TensorShard],
    peers: Peers,
    report: LoadReport | None = None,
    *,
    covers_model: bool = False,
    is_new_optimizer: bool = False,
) -> str | None:
    """Fill shards from the chunks of a checkpoint. Collective.

    Args:
        report: filled with this process's costs and findings.
        covers_model: whether every model tensor of the checkpoint must be in the shards of some process.
        is_new_optimizer: whether to set optimizer states that the checkpoint lacks to zero (see AcceptState).

    Returns:
        A description of the damage, the same on all processes, or None if every chunk is as written.

    Raises:
        DataError: the checkpoint is of another model.
    """
    report = report or LoadReport()
    index = source.index
    if is_new_optimizer:
        shards = _zero_new_state(index, shards, report)
    problem = explain_mismatch(source.name, index, shards, source.state)
    request = ChunkRequest.empty()
    if problem is None:
        request = request_chunks(index, [(shard.name, shard.box) for shard in shards])
    answers = peers.all_gather((problem, request), tuple[str | None, ChunkRequest])
    problem = next((text for text, _ in answers if text), None)
    requests = [answer for _, answer in answers]
    if problem is None and covers_model:
        problem = explain_leftovers(source.name, index, np.concatenate([r.rows for r in requests]))
    if problem:
        raise DataError(problem)
    with ShardCopier(shards) as copier:
        ChunkTransfer(source, shards, requests, peers, copier).run(report)
    report.copy_threads = copier.describe_threads()
    damage = report.damage[0] if report.damage else None
    report.damage = []  # the caller reports the damage that is returned
    return peers.find_first_problem(damage)


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


def read_chunks(source: ChunkSource, rows: np.ndarray, report: LoadReport) -> dict[int, torch.Tensor]:
    """Read the chunks of some rows of the index and check them.

    Returns:
        The elements by row. A damaged chunk is recorded in the report, and its elements are zeros.
    """
    index = source.index
    elements_by_row: dict[int, torch.Tensor] = {}
    for file, start, stop, file_rows in merge_reads(index, rows):
        try:
            data = memoryview(source.read(file, start, stop))
            report.read_bytes += len(data)
        except OSError as error:
            data = memoryview(b"")
            report.damage.append(f"{file} cannot be read: {error}")
        for row in file_rows:
            offset = int(index.columns["data"][row]) - start
            chunk_bytes = index.nbytes(row)
            chunk_data = data[offset : offset + chunk_bytes]
            is_intact = len(chunk_data) == chunk_bytes
            if is_intact and source.has_checksums:
                is_intact = crc32(chunk_data) == int(index.columns["crc"][row])
            if not is_intact:
                report.damage.append(f"{file} holds other bytes for {index.name(row)} than were written")
                chunk_data = memoryview(bytearray(chunk_bytes))
            dtype = getattr(torch, index.info(row).dtype)
            with warnings.catch_warnings():
                # torch warns of read-only memory, which is not written here.
                warnings.simplefilter("ignore", UserWarning)
                elements_by_row[row] = torch.frombuffer(chunk_data, dtype=dtype).reshape(index.box(row).sizes)
    return elements_by_row


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
