"""Loading: the newest complete checkpoint is checked and copied into live memory of any layout.

Each stored chunk is read by one process of the group and sent to the others that need part of it, so storage is read
once however many replicas there are (MegaScale section 4.4). Readers share the bytes evenly, and rounds are read ahead
of being sent. `load` tries the commits in order, `load_commit` opens one, and `fill_shards` moves its chunks.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megascale.checkpoint.copies import ShardCopier
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import crc32, element_size
from megascale.checkpoint.format.chunks import TensorShard, box_slices
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
_MAX_REMOVED = 100  # checkpoints that training may remove during one load before it gives up

# Called with the saved state and the checkpoint's name before any tensor is read. Raises DataError, on all processes
# alike, if the run may not continue from it. Returns whether the optimizer differs from the saved one: optimizer
# tensors that the checkpoint lacks then become zero, as before the first step.
AcceptState = Callable[[Mapping[str, Any], str], bool]
Piece = tuple[int, Box, torch.Tensor]  # (row of the index, box, elements) of a chunk's part


@dataclass
class LoadReport:
    """The cost and the findings of a load on this process.

    Attributes:
        read_bytes: bytes read from storage or memory.
        sent_bytes: bytes sent to other processes.
        damage: descriptions of damaged chunks.
        zeroed_states: states of a new optimizer that the checkpoint lacks.
        skipped_commits: commits that were found damaged, so that an earlier one was loaded.
    """

    read_bytes: int = 0
    sent_bytes: int = 0
    damage: list[str] = field(default_factory=list)
    zeroed_states: set[str] = field(default_factory=set)
    skipped_commits: list[Commit] = field(default_factory=list)

    def add(self, report: LoadReport) -> None:
        """Add the bytes and the damage of another report."""
        self.read_bytes += report.read_bytes
        self.sent_bytes += report.sent_bytes
        self.damage += report.damage


class ChunkSource:
    """The chunks of one checkpoint, in storage or in memory; a subclass implements `read`.

    Args:
        name: the checkpoint's name in messages.
        index: its chunks.
        state: its saved state besides tensors.
        holders: for each data file the processes that can read it; None: all can.
        has_checksums: whether the index has the checksums of the chunks.

    Attributes:
        max_rounds_ahead: rounds that are read and checked before they are sent, one thread each.
    """

    max_rounds_ahead = 3

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
        """Return the bytes `start .. stop` of a data file. Several threads may read at once."""
        raise NotImplementedError


class StorageChunks(ChunkSource):
    """The chunks of a committed checkpoint in storage."""

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
    complete: bool = False,
) -> dict[str, Any]:
    """Fill `shards` in place from the newest committed checkpoint (or that of `step`); collective over `group`.

    Shards may be cut in any way and may be fewer than stored; a shard of another dtype is converted. Every chunk that
    is read is checked. If the newest checkpoint is damaged, the one before it is loaded with a warning. If training
    removes it meanwhile, the newest one at that time is loaded. Shards may be written twice, but damaged data never
    remains.

    Args:
        folder: the run's checkpoints folder, a path or an fsspec URL.
        shards: the shards that this process needs.
        step: a committed step; None: the newest commit.
        group: the processes that load together and share the chunks they read; None: the default group, or this process
            alone. It need not be the group that saved.
        report: filled with this process's cost and findings.
        initial: the shards to fill instead if the checkpoint is of step 0, which holds weights alone; the others
            become zero, as before the first step.
        accept: see AcceptState.
        complete: every model tensor of the checkpoint must be in some process's shards.

    Returns the saved state. Raises DataError if there is no committed checkpoint, if it is of another model (naming
    tensors and the key that likely differs), or if all are damaged.
    """
    storage = open_storage(folder)
    peers = Peers(group)
    candidates = _share_candidates(storage, step, peers)
    damages: list[str] = []
    damaged_generations: set[str] = set()
    removed = 0
    while candidates:
        commit = candidates.pop(0)
        name = f"{storage.url}/{folders.step_name(commit.step)}"
        new_optimizer = False
        if accept is not None:
            try:
                new_optimizer = accept(commit.state, name)
            except DataError as error:
                raise DataError("; ".join(damages + [str(error)])) from None
        if commit.step or initial is None:
            filled = shards
        else:
            filled = initial
        if filled is not shards:
            _zero_other_shards(shards, filled)
        damage = load_commit(storage, commit, filled, peers, report, complete=complete, new_optimizer=new_optimizer)
        if damage is None:
            if damages and peers.rank == 0:
                warn(f"{'; '.join(damages)}. Went back to the checkpoint of step {commit.step}")
            return commit.state
        if peers.compute_once(partial(folders.is_removed, storage, commit), bool):
            removed += 1
            if step is not None or removed == _MAX_REMOVED:
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
    raise DataError(f"{'; '.join(damages)}. No other committed checkpoint is left to go back to")


def find_candidates(storage: Storage, step: int | None) -> list[Commit] | str:
    """Return the commits to try in order, or why there is none."""
    commits, unreadable = folders.list_commits(storage)
    committed = f"committed steps: {sorted(c.step for c in commits) or 'none'}"
    if step is not None:
        name = f"{storage.url}/{folders.step_name(step)}"
        matches = [commit for commit in commits if commit.step == step]
        if matches:
            return matches
        if step in folders.list_steps(storage):
            return f"{name!r} is half-written or damaged (no readable COMMIT) and cannot be loaded; {committed}"
        return f"there is no checkpoint {name!r}; {committed}"
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
    """Return the commits to try in order, the same on all processes. Raises DataError if there is none."""
    candidates = peers.compute_once(lambda: find_candidates(storage, step), list[Commit] | str)
    if isinstance(candidates, str):
        raise DataError(candidates)
    return list(candidates)


@torch.no_grad()
def _zero_other_shards(shards: Sequence[TensorShard], filled: Sequence[TensorShard]) -> None:
    """Zero the shards that are not filled: an earlier attempt may have copied a damaged checkpoint into them."""
    names = {shard.name for shard in filled}
    for shard in shards:
        if shard.name not in names:
            shard.tensor.zero_()


@torch.no_grad()
def _zero_new_state(index: CheckpointIndex, shards: Sequence[TensorShard], report: LoadReport) -> list[TensorShard]:
    """Zero the optimizer states that the checkpoint lacks; return the other shards."""
    stored = []
    for shard in shards:
        if shard.name.startswith("optimizer.") and shard.name not in index.tensors:
            shard.tensor.zero_()
            report.zeroed_states.add(".".join(shard.name.split(".")[:2]))
        else:
            stored.append(shard)
    return stored


def warn(message: str) -> None:
    """Log a warning, and issue it to the caller."""
    log.warning(message)
    warnings.warn(message, stacklevel=3)


def load_commit(
    storage: Storage,
    commit: Commit,
    shards: Sequence[TensorShard],
    peers: Peers,
    report: LoadReport | None = None,
    *,
    complete: bool = False,
    new_optimizer: bool = False,
) -> str | None:
    """Fill shards from one commit; collective. Arguments and result as for `fill_shards`."""
    index_bytes, damage = peers.compute_once(lambda: _open_commit(storage, commit), tuple[bytes, str])
    if damage:
        return damage
    source = StorageChunks(storage, commit, CheckpointIndex.from_bytes(index_bytes))
    return fill_shards(source, shards, peers, report, complete=complete, new_optimizer=new_optimizer)


def _open_commit(storage: Storage, commit: Commit) -> tuple[bytes, str]:
    """Return the index as bytes, and how the checkpoint is damaged ("": not visibly)."""
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
    complete: bool = False,
    new_optimizer: bool = False,
) -> str | None:
    """Fill shards from the chunks of a checkpoint; collective.

    Args:
        report: filled with this process's cost and findings.
        complete: every model tensor of the checkpoint must be in some process's shards.
        new_optimizer: zero the optimizer states that the checkpoint lacks (see AcceptState).

    Returns None if every chunk was as written, else a description of the damage, the same on all processes. Raises
    DataError if the checkpoint is of another model.
    """
    report = report or LoadReport()
    index = source.index
    if new_optimizer:
        shards = _zero_new_state(index, shards, report)
    problem = explain_mismatch(source.name, index, shards, source.state)
    request = ChunkRequest.empty()
    if problem is None:
        request = request_chunks(index, [(shard.name, shard.box) for shard in shards])
    answers = peers.all_gather((problem, request), tuple[str | None, ChunkRequest])
    problem = next((text for text, _ in answers if text), None)
    requests = [answer for _, answer in answers]
    if problem is None and complete:
        problem = explain_leftovers(source.name, index, np.concatenate([r.rows for r in requests]))
    if problem:
        raise DataError(problem)
    with ShardCopier(shards) as copier:
        _ChunkTransfer(source, shards, requests, peers, copier).run(report)
    damage = next(iter(report.damage), None)
    report.damage = []
    return peers.first_problem(damage)


@dataclass(frozen=True)
class _Round:
    """The chunks that this process has read for one round.

    Attributes:
        local: the parts that this process needs.
        outgoing: bytes for the other processes, one after the other; None where no chunk moves in this round.
        counts: bytes of `outgoing` for each process.
        report: its cost and damage.
    """

    local: list[Piece]
    outgoing: torch.Tensor | None
    counts: list[int]
    report: LoadReport


class _ChunkTransfer:
    """Reads, exchanges and copies the chunks of a checkpoint round by round, in the same order on all processes."""

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
        self._rounds = plan_rounds(self._index, reader, requests)
        is_moved = find_moved_chunks(reader, requests)
        # Every process knows the rounds in which a chunk moves; in the others no process waits for another.
        self._moves = [any(is_moved[rows].any() for rows in rank_rows) for rank_rows in self._rounds]

    def run(self, report: LoadReport) -> None:
        """Move all chunks, reading some rounds ahead."""
        rounds_ahead = max(1, min(self._source.max_rounds_ahead, usable_cores() // 2))
        with ThreadPoolExecutor(rounds_ahead) as pool:
            first = range(min(rounds_ahead, len(self._rounds)))
            pending: deque[Future[_Round]] = deque(pool.submit(self._read_round, number) for number in first)
            for number in range(len(self._rounds)):
                ready = pending.popleft().result()
                report.add(ready.report)
                for row, box, tensor in ready.local + self._exchange_round(number, ready):
                    for shard in self._shards[self._index.name(row)]:
                        self._copier.copy_to_shard(box, tensor, shard)
                self._copier.wait_for_previous_round()
                if number + rounds_ahead < len(self._rounds):
                    pending.append(pool.submit(self._read_round, number + rounds_ahead))

    def _read_round(self, number: int) -> _Round:
        """Read and check this process's chunks of a round, and collect the bytes that other processes need."""
        rows = self._rounds[number][self._peers.rank]
        report = LoadReport()
        chunks = read_chunks(self._source, rows, report)
        local: list[Piece] = []
        outgoing: list[torch.Tensor] = []
        counts = [0] * len(self._requests)
        for rank, request in enumerate(self._requests):
            if rank != self._peers.rank and not self._moves[number]:
                continue
            for row, part in request.select(rows):
                box = unpack_box(self._index, row, part)
                piece = chunks[row][box_slices(self._index.box(row), box)]
                if rank == self._peers.rank:
                    local.append((row, box, piece))
                else:
                    outgoing.append(piece)
                    counts[rank] += piece.nbytes
        report.sent_bytes = sum(counts)
        if self._moves[number]:
            joined = self._copier.join_pieces(outgoing, self._device)
        else:
            joined = None
        return _Round(local, joined, counts, report)

    def _exchange_round(self, number: int, ready: _Round) -> list[Piece]:
        """Send the other processes their parts of a round and return the parts that this process needs of theirs."""
        pieces: list[Piece] = []
        if ready.outgoing is None:
            return pieces
        request = self._requests[self._peers.rank]
        expected: list[list[tuple[int, Box, str]]] = []
        for rank in range(self._peers.size):
            if rank != self._peers.rank:
                selected = request.select(self._rounds[number][rank])
            else:
                selected = []
            expected.append(
                [(row, unpack_box(self._index, row, part), self._index.info(row).dtype) for row, part in selected]
            )
        sizes = [sum(_box_bytes(box, dtype) for _, box, dtype in items) for items in expected]
        received = self._peers.all_to_all(ready.outgoing, ready.counts, sizes)
        for items, data in zip(expected, received, strict=True):
            offset = 0
            for row, box, dtype in items:
                count = _box_bytes(box, dtype)
                piece = _align(data[offset : offset + count], dtype)
                pieces.append((row, box, piece.view(getattr(torch, dtype)).reshape(box.sizes)))
                offset += count
        return pieces


def read_chunks(source: ChunkSource, rows: np.ndarray, report: LoadReport) -> dict[int, torch.Tensor]:
    """Read some chunks and check them, by row; damaged chunks are recorded in the report and returned as zeros."""
    index = source.index
    result: dict[int, torch.Tensor] = {}
    for file, start, stop, file_rows in merge_reads(index, rows):
        try:
            data = memoryview(source.read(file, start, stop))
            report.read_bytes += len(data)
        except OSError as error:
            data = memoryview(b"")
            report.damage.append(f"{file} cannot be read: {error}")
        for row in file_rows:
            offset = int(index.columns["data"][row]) - start
            count = index.nbytes(row)
            part = data[offset : offset + count]
            is_intact = len(part) == count
            if is_intact and source.has_checksums:
                is_intact = crc32(part) == int(index.columns["crc"][row])
            if not is_intact:
                report.damage.append(f"{file} holds other bytes for {index.name(row)} than were written")
                part = memoryview(bytearray(count))
            dtype = getattr(torch, index.info(row).dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the memory may be read-only; it is only read
                result[row] = torch.frombuffer(part, dtype=dtype).reshape(index.box(row).sizes)
    return result


def _align(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """Return the bytes at an address that suits `dtype`: odd-sized neighbours of another dtype can shift them."""
    if data.data_ptr() % element_size(dtype) == 0:
        return data
    aligned = data.clone()
    if aligned.is_cuda:  # later copies do not wait for this thread's stream
        torch.cuda.current_stream(aligned.device).synchronize()
    return aligned


def _box_bytes(box: Box, dtype: str) -> int:
    return box.count * element_size(dtype)
