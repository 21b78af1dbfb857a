"""Loading: the newest committed checkpoint that is complete, checked, into live memory of any layout.

Each stored chunk is read by one process of the group and sent to the others that need part of it, so storage is read
once however many replicas there are (MegaScale section 4.4). Readers share the bytes evenly; reading runs some rounds
ahead of sending.
"""

from __future__ import annotations

import logging
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megascale.checkpoint.copies import Copies
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import crc32, element_size
from megascale.checkpoint.format.chunks import TensorShard, slices
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.mismatch import explain_leftovers, explain_mismatch
from megascale.checkpoint.format.read_plan import Want, assign_readers, find_moved_chunks, info_of, rounds, spans, want
from megascale.checkpoint.format.step_folders import Commit, Damaged
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.opening import open_storage
from megascale.core.capacity import usable_cores
from megascale.core.tensors import Box
from megascale.errors import DataError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)
_REMOVED = 100  # checkpoints that are removed under a reader before it gives up
_AHEAD = 3  # rounds at most that are read and checked before their turn, each by a thread

# Reads bytes `start .. stop` of a data file, given its name.
Read = Callable[[str, int, int], "memoryview | bytes | bytearray"]

# Told the saved state and what to call it before anything is read from it; raises DataError, on all processes alike,
# if it may not be gone on from. Returns whether the optimizer is another one than the saved state's: tensors that it
# keeps and the checkpoint lacks then become zero, as before the first step.
Accept = Callable[[Mapping[str, Any], str], bool]


@dataclass
class LoadReport:
    """What a load cost this process: bytes it read from storage or memory, bytes it sent to others."""

    read_bytes: int = 0
    sent_bytes: int = 0
    damage: list[str] = field(default_factory=list)
    zeroed: set[str] = field(default_factory=set)  # state of a new optimizer that the checkpoint lacks
    passed_over: list[Commit] = field(default_factory=list)  # found damaged, the one before was taken


def load(
    folder: Path | str,
    shards: Sequence[TensorShard],
    *,
    step: int | None = None,
    group: ProcessGroup | None = None,
    report: LoadReport | None = None,
    initial: Sequence[TensorShard] | None = None,
    accept: Accept | None = None,
    complete: bool = False,
) -> dict[str, Any]:
    """Fill `shards` in place from the newest committed checkpoint (or that of `step`); collective over `group`.

    Shards may be cut in any way and may be fewer than what is stored; a shard of another dtype is converted. Every
    chunk read is checked. If the newest checkpoint is damaged the one before it is taken, with a warning; if training
    removes it meanwhile, the newest one then. Shards may then have been written to twice, but damaged data never stays.

    Args:
        folder: the run's checkpoints folder, a path or an fsspec URL.
        shards: what this process needs.
        step: a committed step; None: the newest commit.
        group: the processes that load together and share what they read; None: the default group, or this process
            alone. It need not be the group that saved.
        report: filled with what this process read and sent.
        initial: the shards to fill instead if the checkpoint is of step 0, which holds weights alone; the others
            become zero, as before the first step.
        accept: see Accept.
        complete: the model tensors of the checkpoint must all have a place in somebody's shards.

    Returns the saved state. Raises DataError if there is no committed checkpoint, if it is of another model (naming
    tensors and the key that likely differs), or if all are damaged.
    """
    storage, peers = open_storage(folder), Peers(group)
    candidates = _share_candidates(storage, step, peers)
    damages: list[str] = []
    damaged: set[str] = set()
    removed = 0
    while candidates:
        commit = candidates.pop(0)
        place = f"{storage.url}/{folders.step_name(commit.step)}"
        new_optimizer = False
        if accept is not None:
            try:
                new_optimizer = accept(commit.state, place)
            except DataError as error:
                raise DataError("; ".join([*damages, str(error)])) from None
        wanted = shards if commit.step or initial is None else initial
        if wanted is not shards:
            _clear_others(shards, wanted)
        damage = load_commit(storage, commit, wanted, peers, report, complete=complete, new_optimizer=new_optimizer)
        if damage is None:
            if damages and peers.rank == 0:
                say(f"{'; '.join(damages)}. Went back to the checkpoint of step {commit.step}")
            return commit.state
        if peers.broadcast(folders.is_removed(storage, commit) if peers.rank == 0 else None, bool | None):
            removed += 1
            if step is not None or removed == _REMOVED:
                raise DataError(
                    f"the checkpoint {place!r} was removed while it was read: training goes on there and keeps "
                    "checkpoint.keep of them. Name a newer one, raise checkpoint.keep, or wait until training ends"
                )
            candidates = [c for c in _share_candidates(storage, step, peers) if c.generation not in damaged]
            continue
        damaged.add(commit.generation)
        damages.append(f"the checkpoint {place!r} is damaged: {damage}")
        if report is not None:
            report.passed_over.append(commit)
    raise DataError(f"{'; '.join(damages)}. No other committed checkpoint is left to go back to")


def _share_candidates(storage: Storage, step: int | None, peers: Peers) -> list[Commit]:
    """Return the commits to try in order, the same on all processes. Raises DataError if there is none."""
    candidates = peers.broadcast(find_candidates(storage, step) if peers.rank == 0 else None, list[Commit] | str | None)
    if isinstance(candidates, str):
        raise DataError(candidates)
    return list(candidates)


@torch.no_grad()
def _clear_others(shards: Sequence[TensorShard], wanted: Sequence[TensorShard]) -> None:
    """A damaged checkpoint, in storage or in memory, may have been read into them before."""
    names = {shard.name for shard in wanted}
    for shard in shards:
        if shard.name not in names:
            shard.tensor.zero_()


@torch.no_grad()
def _clear_new_state(index: CheckpointIndex, shards: Sequence[TensorShard], report: LoadReport) -> list[TensorShard]:
    """Set optimizer state that the checkpoint lacks to zero; return the other shards."""
    present = []
    for shard in shards:
        if shard.name.startswith("optimizer.") and shard.name not in index.tensors:
            shard.tensor.zero_()
            report.zeroed.add(".".join(shard.name.split(".")[:2]))
        else:
            present.append(shard)
    return present


def say(message: str) -> None:
    """Tell the log and the caller."""
    log.warning(message)
    warnings.warn(message, stacklevel=3)


def find_candidates(storage: Storage, step: int | None) -> list[Commit] | str:
    """Commits to try in order, or what is wrong."""
    good, unreadable = folders.survey(storage)
    have = f"committed steps: {sorted(c.step for c in good) or 'none'}"
    if step is not None:
        place = f"{storage.url}/{folders.step_name(step)}"
        found = [commit for commit in good if commit.step == step]
        if found:
            return found
        if step in folders.step_folders(storage):
            return f"{place!r} is half-written or damaged (no readable COMMIT) and cannot be loaded; {have}"
        return f"there is no checkpoint {place!r}; {have}"
    for bad, why in unreadable.items() if good else ():
        say(f"the checkpoint '{storage.url}/{folders.step_name(bad)}' is passed over: {why}")
    if good:
        return sorted(good, key=lambda commit: folders.marked_damaged(storage, commit))
    halves = [f"{storage.url}/{folders.step_name(s)}" for s in folders.step_folders(storage)]
    if halves:
        return (
            f"no checkpoint in {storage.url!r} is complete: {', '.join(halves)} half-written (no readable COMMIT); "
            "restore one, or start over from step 0 with --checkpoint.resume=false"
        )
    return f"there is no checkpoint in {storage.url!r}; train first, or name another run folder"


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
    """Fill shards from one commit; None if all is well, else what is damaged, the same on all. DataError if the
    checkpoint is of another model."""
    table, damage = peers.broadcast(_open(storage, commit) if peers.rank == 0 else None, tuple[bytes, str])
    if damage:
        return damage
    index = CheckpointIndex.from_bytes(table)
    place = folders.step_name(commit.step)

    def read(file: str, start: int, stop: int) -> memoryview | bytes | bytearray:
        return storage.read(f"{place}/{file}", start, stop - start)

    name = f"{storage.url}/{place}"
    return fill_shards(
        index,
        shards,
        peers,
        read,
        name=name,
        state=commit.state,
        report=report,
        complete=complete,
        new_optimizer=new_optimizer,
    )


def _open(storage: Storage, commit: Commit) -> tuple[bytes, str]:
    """The index as bytes, and what is damaged: read by one process for all."""
    try:
        index = folders.read_index(storage, commit)
        folders.check_sizes(storage, commit)
    except Damaged as damage:
        return b"", str(damage)
    return index.to_bytes(), ""


def fill_shards(
    index: CheckpointIndex,
    shards: Sequence[TensorShard],
    peers: Peers,
    read: Read,
    *,
    name: str,
    state: Mapping[str, Any],
    holders: Mapping[str, Sequence[int]] | None = None,
    report: LoadReport | None = None,
    complete: bool = False,
    new_optimizer: bool = False,
) -> str | None:
    """Fill shards from the chunks of an index; collective.

    Args:
        read: fetches bytes of a data file on this process.
        name: what to call this checkpoint in messages.
        state: its saved state, for naming the key that differs.
        holders: for each data file the processes that can read it; None: all.
        complete: DataError if a tensor of the model has no place anywhere.
        new_optimizer: see Accept.

    Returns None if every chunk was as written, else what is damaged, the same on all processes.
    """
    report = report if report is not None else LoadReport()
    if new_optimizer:
        shards = _clear_new_state(index, shards, report)
    problem = explain_mismatch(name, index, shards, state)
    mine = Want(np.zeros(0, np.int64), np.zeros((0, 2, 0), np.int64))
    if problem is None:
        mine = want(index, [(s.name, s.box) for s in shards])
    answers = peers.all_gather((problem, mine), tuple[str | None, Want])
    wrong = next((p for p, _ in answers if p), None)
    if wrong:
        raise DataError(wrong)
    wants = [w for _, w in answers]
    if complete and (left := explain_leftovers(name, index, np.concatenate([w.rows for w in wants]))):
        raise DataError(left)
    by_name: dict[str, list[TensorShard]] = {}
    for shard in shards:
        by_name.setdefault(shard.name, []).append(shard)
    reader = assign_readers(index, wants, holders)
    schedule, moved = rounds(index, reader, wants), find_moved_chunks(reader, wants)
    # All know which rounds move anything; where each reads its own, nobody waits for anybody.
    moving = [any(moved[rows].any() for rows in parts) for parts in schedule]
    wire, early = peers.wire, max(1, min(_AHEAD, usable_cores() // 2))
    with ThreadPoolExecutor(early) as ahead, Copies(shards) as copies:

        def begin(number: int) -> Future[_Round]:
            rows = schedule[number][peers.rank]
            return ahead.submit(_prepare, index, rows, wants, peers, read, copies, wire, moving[number])

        pending = deque(map(begin, range(min(early, len(schedule)))))
        for number, parts in enumerate(schedule):
            ready = pending.popleft().result()
            report.read_bytes += ready.report.read_bytes
            report.sent_bytes += ready.report.sent_bytes
            report.damage += ready.report.damage
            for row, box, tensor in [*ready.own, *_received(index, parts, wants, peers, ready)]:
                for shard in by_name[index.name(row)]:
                    copies.copy_to_shard(box, tensor, shard)
            copies.end_round()
            if number + early < len(schedule):
                pending.append(begin(number + early))
    found, report.damage = report.damage, []
    return next((d[0] for d in peers.all_gather(found[:1], list[str]) if d), None)


def fetch(index: CheckpointIndex, rows: np.ndarray, read: Read, report: LoadReport) -> dict[int, torch.Tensor]:
    """Read some chunks and check them; chunks that fail stand in the report and come back as zeros."""
    result: dict[int, torch.Tensor] = {}
    for file, start, stop, inside in spans(index, rows):
        try:
            data = memoryview(read(file, start, stop))
            report.read_bytes += len(data)
        except OSError as error:
            data = memoryview(b"")
            report.damage.append(f"{file} cannot be read: {error}")
        for row in inside:
            at, count = int(index.columns["data"][row]) - start, index.nbytes(row)
            part = data[at : at + count]
            if len(part) != count or crc32(part) != int(index.columns["crc"][row]):
                report.damage.append(f"{file} holds other bytes for {index.name(row)} than were written")
                part = memoryview(bytearray(count))
            dtype = getattr(torch, index.info(row).dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # the memory may be read-only; it is only read
                result[row] = torch.frombuffer(part, dtype=dtype).reshape(index.box(row).sizes)
    return result


@dataclass(frozen=True)
class _Round:
    """What this process has for a round.

    Attributes:
        own: (row, box, elements) that it needs itself.
        outgoing: bytes for the others, one process after the other; None where nothing moves in this round.
        counts: how many for each.
        report: what it read, sends and found damaged.
    """

    own: list[tuple[int, Box, torch.Tensor]]
    outgoing: torch.Tensor | None
    counts: list[int]
    report: LoadReport


def _prepare(
    index: CheckpointIndex,
    rows: np.ndarray,
    wants: Sequence[Want],
    peers: Peers,
    read: Read,
    copies: Copies,
    wire: torch.device,
    moving: bool,
) -> _Round:
    """Read and check a round's chunks, and put together on `wire` what the others need of them."""
    report = LoadReport()
    data = fetch(index, rows, read, report)
    own: list[tuple[int, Box, torch.Tensor]] = []
    pieces: list[torch.Tensor] = []
    counts = [0] * len(wants)
    for rank, w in enumerate(wants):
        if rank != peers.rank and not moving:
            continue
        for row, part in _chosen(w, rows):
            _, box = info_of(index, row, part)
            cut = data[row][slices(index.box(row), box)] if box.sizes else data[row]
            if rank == peers.rank:
                own.append((row, box, cut))
            else:
                pieces.append(cut)
                counts[rank] += cut.nbytes
    report.sent_bytes = sum(counts)
    return _Round(own, copies.join_pieces(pieces, wire) if moving else None, counts, report)


def _received(
    index: CheckpointIndex, parts: Sequence[np.ndarray], wants: Sequence[Want], peers: Peers, ready: _Round
) -> list[tuple[int, Box, torch.Tensor]]:
    """Give the others what they need of a round, get what this process needs of theirs: (row, box, elements)."""
    result: list[tuple[int, Box, torch.Tensor]] = []
    if ready.outgoing is None:
        return result
    expected: list[list[tuple[int, Box, str]]] = []
    for rank in range(peers.size):
        mine = _chosen(wants[peers.rank], parts[rank]) if rank != peers.rank else []
        expected.append([(row, info_of(index, row, p)[1], index.info(row).dtype) for row, p in mine])
    sizes = [sum(_bytes(box, dtype) for _, box, dtype in items) for items in expected]
    for items, flat in zip(expected, peers.swap(ready.outgoing, ready.counts, sizes), strict=True):
        at = 0
        for row, box, dtype in items:
            count = _bytes(box, dtype)
            piece = flat[at : at + count]
            if piece.data_ptr() % element_size(dtype):
                piece = _aligned(piece)
            result.append((row, box, piece.view(getattr(torch, dtype)).reshape(box.sizes)))
            at += count
    return result


def _aligned(piece: torch.Tensor) -> torch.Tensor:
    """Odd-sized neighbours of another type may leave a piece where its own type cannot lie."""
    piece = piece.clone()
    if piece.is_cuda:  # copies do not wait for this thread's stream
        torch.cuda.current_stream(piece.device).synchronize()
    return piece


def _bytes(box: Box, dtype: str) -> int:
    return box.count * element_size(dtype)


def _chosen(w: Want, rows: np.ndarray) -> list[tuple[int, np.ndarray]]:
    """Of some rows those that a process wants, with the part wanted, in the order of `rows`."""
    if not len(w.rows) or not len(rows):
        return []
    at = np.minimum(np.searchsorted(w.rows, rows), len(w.rows) - 1)
    hit = w.rows[at] == rows
    return [(int(row), w.box[i]) for row, i in zip(rows[hit], at[hit], strict=True)]
