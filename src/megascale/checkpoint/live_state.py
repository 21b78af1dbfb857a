"""State that processes have kept in their own memory, and its redistribution to the shards of the next attempt.

Processes that outlive an attempt have the newest state on their devices. A process that joins, or a rank whose shards
have other bounds now, receives its elements from them by the collectives of the new group. A save in the memory of
hosts (background/load_from_memory.py) completes what no process has kept: the shards of a lost rank.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from megascale.checkpoint.background.load_from_memory import (
    MemoryChunks,
    MemorySave,
    MemorySnapshots,
    describe_memory_save,
)
from megascale.checkpoint.chunk_source import ChunkSource, LoadReport
from megascale.checkpoint.chunk_transfer import ChunkTransfer
from megascale.checkpoint.copies import ShardCopier
from megascale.checkpoint.format.archive import element_size
from megascale.checkpoint.format.chunks import TensorShard, intersect_boxes
from megascale.checkpoint.format.index import CheckpointIndex, TensorInfo
from megascale.checkpoint.format.read_plan import ChunkRequest, request_chunks
from megascale.checkpoint.format.step_folders import get_nonce
from megascale.checkpoint.format.write_plan import Offer, make_offer
from megascale.checkpoint.loader import AcceptState, fill_shards
from megascale.checkpoint.object_collectives import Peers, decode_value, encode_value
from megascale.checkpoint.saver import cut_chunks, get_dtype_name
from megascale.core.tensors import Box
from megascale.services.conversation import Conversation

if TYPE_CHECKING:
    from megascale.checkpoint.background.staging import StagingSlot

# Bytes that a process sends per round if they are on a GPU, where a round waits for the device once.
_DEVICE_ROUND_BYTES = 256 << 20

# Name of a tensor, first index and size on each dimension
_BoxKey = tuple[str, tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class LiveState:
    """State that this process has kept when it left an attempt. Without arguments: it has kept none.

    Attributes:
        rank: this process's rank in the attempt.
        step: step of the state, or -1.
        shards: the state in the memory of this process.
        is_in_place: whether `shards` are also the shards to fill, so that this process needs no data at `step`.
        state: on the first process of the attempt, the state besides tensors as a checkpoint stores it; otherwise None.
        base_generation: generation of the save that the attempt had loaded from memory, or an empty text.
        generation: generation of the newest save that the attempt has prepared or begun, or an empty text.
        last_sequence: number of the newest save that the attempt began or loaded.
    """

    attempt: int = 0
    rank: int = -1
    step: int = -1
    shards: Sequence[TensorShard] = ()
    is_in_place: bool = False
    state: Mapping[str, Any] | None = None
    base_generation: str = ""
    generation: str = ""
    last_sequence: int = 0


class _Summary(NamedTuple):
    """Announcement of a process about its LiveState, without the shards."""

    attempt: int
    rank: int
    step: int
    has_state: bool
    base_generation: str
    generation: str
    last_sequence: int

    def has_saved(self, save: MemorySave) -> bool:
        """Return whether the attempt began the save or started from it, so that equal steps have equal bits."""
        # The numbers do not suffice, because an attempt that ended early may have begun saves of the same numbers.
        has_begun = bool(self.generation) and get_nonce(save.generation) == get_nonce(self.generation)
        return has_begun or save.generation == self.base_generation


@dataclass(frozen=True)
class LivePlan:
    """Decision to load what processes have kept; equal on all processes except for `elements`.

    Attributes:
        index: chunks that processes have kept, each once.
        holders: processes that have the chunks of a file of the index. A file stands for a set of processes.
        elements: chunks of this process, by row of the index.
        has_state: whether a process has kept the state besides tensors. Otherwise `save` has it.
        save: save in memory that completes the state; None if processes have kept all of it.
        last_sequence: number of the newest save that the kept attempt began or loaded.
    """

    step: int
    index: CheckpointIndex
    holders: Mapping[str, Sequence[int]]
    elements: Mapping[int, torch.Tensor]
    has_state: bool
    save: MemorySave | None
    last_sequence: int


class LiveChunks(ChunkSource):
    """Chunks in the memory of running processes. They need no checksums, because they were never stored."""

    max_rounds_ahead = 2

    def __init__(self, plan: LivePlan, is_on_device: bool) -> None:
        super().__init__("the running ranks", plan.index, {}, plan.holders, has_checksums=False)
        self._elements = plan.elements
        self.round_bytes = _DEVICE_ROUND_BYTES if is_on_device else None

    def read_chunks(self, rows: np.ndarray, report: LoadReport) -> dict[int, torch.Tensor]:
        """Return the elements of the rows as views of this process's memory."""
        return {row: self._elements[row] for row in rows.tolist()}


def plan_live_load(
    live: LiveState, saves: Sequence[MemorySave], stored_sequence: int, shards: Sequence[TensorShard], peers: Peers
) -> LivePlan | None:
    """Decide whether the state that processes have kept can be loaded, alone or with a save. Collective.

    The newest step is chosen for which the kept chunks, together with a save of the same step, cover all tensors. Such
    a save may be incomplete: the snapshots of ranks that have kept their shards are not needed.

    Args:
        saves: saves in memory, the newest first.
        stored_sequence: number of the newest commit in storage.

    Returns:
        The plan, or None if a complete save or a commit is newer than what processes have kept, or if data would be
        missing.
    """
    summary = _Summary(
        live.attempt,
        live.rank,
        live.step,
        live.state is not None,
        live.base_generation,
        live.generation,
        live.last_sequence,
    )
    summaries = peers.all_gather(summary, _Summary)
    attempts = [entry.attempt for entry in summaries if entry.step >= 0]
    if not attempts:
        return None
    attempt = max(attempts)
    holders = [rank for rank, entry in enumerate(summaries) if entry.step >= 0 and entry.attempt == attempt]
    last_sequence = max(summaries[rank].last_sequence for rank in holders)
    complete_save = next((save for save in saves if save.is_complete), None)
    newest_sequence = max(stored_sequence, complete_save.sequence if complete_save is not None else 0)
    if last_sequence < newest_sequence:
        return None
    offer = None
    if peers.rank in holders:
        offer = make_offer((s.name, s.shape, get_dtype_name(s.tensor), s.box) for s in live.shards)
    offers = peers.all_gather(offer, Offer | None)
    for step in sorted({summaries[rank].step for rank in holders}, reverse=True):
        if complete_save is not None and step < complete_save.step:
            break
        step_holders = [rank for rank in holders if summaries[rank].step == step]
        step_summaries = [summaries[rank] for rank in step_holders]
        index, file_holders = _join_offers({rank: offers[rank] for rank in step_holders})
        is_complete = not _find_incomplete(index) and all(shard.name in index.tensors for shard in shards)
        has_state = any(entry.has_state for entry in step_summaries)
        save = None
        if not peers.all_true(is_complete) or not has_state:
            save = next((save for save in saves if _completes(save, step, step_summaries, has_state)), None)
            if save is None:
                continue
        elements = {}
        if peers.rank in step_holders:
            elements = _find_local_elements(index, live.shards)
        return LivePlan(step, index, file_holders, elements, has_state, save, last_sequence)
    return None


class _RehearsalPeers(Peers):
    """A single process that encodes and decodes its values as the processes of a group do."""

    def all_gather(self, value: Any, value_type: Any) -> list[Any]:
        return [decode_value(encode_value(value), value_type)]


def rehearse_live_load() -> bool:
    """Load a small state from this process itself, and return whether the elements arrived.

    The first load of a process takes longer than later ones, because types of messages are analysed at their first use.
    Call this function in a process without groups that will join running processes, while they still train.
    """
    source = torch.ones(2, 2)
    loaded = torch.zeros(2, 2)
    shards = [TensorShard("rehearsal", (2, 2), (0, 0), loaded)]
    source_shards = [replace(shards[0], tensor=source)]
    live = LiveState(attempt=1, rank=0, step=1, shards=source_shards, state={})
    peers = _RehearsalPeers()
    plan = plan_live_load(live, [], stored_sequence=0, shards=shards, peers=peers)
    if plan is not None:
        load_live(plan, live, None, shards, peers)
    return torch.equal(source, loaded)


def _completes(save: MemorySave, step: int, summaries: Sequence[_Summary], has_state: bool) -> bool:
    """Return whether a save has what processes have not kept of the state of a step, with the same bits.

    Args:
        summaries: those of the processes that have kept the step.
        has_state: whether one of them has kept the state besides tensors.
    """
    if save.step != step or not all(summary.has_saved(save) for summary in summaries):
        return False
    live_ranks = {summary.rank for summary in summaries}
    has_all_ranks = all(holders or rank in live_ranks for rank, holders in enumerate(save.holders))
    return has_all_ranks and (has_state or bool(save.holders[0]))


def load_live(
    plan: LivePlan,
    live: LiveState,
    service: Conversation | None,
    shards: Sequence[TensorShard],
    peers: Peers,
    report: LoadReport | None = None,
    *,
    accept: AcceptState | None = None,
    begin: Callable[[], None] = lambda: None,
    slots: Sequence[StagingSlot] = (),
) -> dict[str, Any] | str:
    """Fill shards from the memory of running processes and, if the plan needs it, from a save. Collective.

    Args:
        live: as for `plan_live_load`.
        service: conversation with the host's checkpoint service.
        shards: shards to fill; none on a process whose shards have the state already.
        accept: see `loader.AcceptState`.
        begin: called before the exchange if the load needs no save, which might be damaged.
        slots: as for `load_memory_save`.

    Returns:
        The state besides tensors, or a description of damage to the save, the same on all processes.
    """
    report = report or LoadReport()
    name = f"the running ranks, step {plan.step}"
    part_start = time.monotonic()
    if plan.save is None:
        state = _share_state(plan, live, peers)
        part_start = report.measure("state", part_start)
        if accept is not None:
            accept(state, name)
        report.measure("checks", part_start)
        begin()
        _fill_from_processes(plan, shards, peers, report)
        return state
    snapshots = MemorySnapshots(service, plan.save.generation, slots)
    described = describe_memory_save(snapshots, plan.save, peers)
    if isinstance(described, str):
        return described
    state = described.state
    if plan.has_state:
        state = _share_state(plan, live, peers)
    if accept is not None:
        accept(state, name)
    _fill_from_processes(plan, shards, peers, report)
    remaining = _select_rows(described.index, _find_missing_rows(described.index, plan.index))
    is_on_device = peers.exchange_device.type == "cuda"
    source = MemoryChunks(name, remaining, state, plan.save, snapshots, is_on_device=is_on_device)
    # An incomplete save lacks tensors that running ranks have kept whole.
    saved_shards = [shard for shard in shards if shard.name in remaining.tensors]
    return fill_shards(source, saved_shards, peers, report) or state


def _share_state(plan: LivePlan, live: LiveState, peers: Peers) -> dict[str, Any]:
    """Return the state besides tensors that a process has kept. Collective."""
    text = ""
    if plan.elements and live.state is not None:  # a state of another attempt may have the same step
        text = json.dumps(live.state)
    state: dict[str, Any] = json.loads(next(entry for entry in peers.all_gather(text, str) if entry))
    return state


def _fill_from_processes(plan: LivePlan, shards: Sequence[TensorShard], peers: Peers, report: LoadReport) -> None:
    """Fill the elements of the shards that processes have kept. Collective."""
    part_start = time.monotonic()
    live_shards = [shard for shard in shards if shard.name in plan.index.tensors]
    request = request_chunks(plan.index, [(shard.name, shard.box) for shard in live_shards])
    requests = peers.all_gather(request, ChunkRequest)
    part_start = report.measure("requests", part_start)
    source = LiveChunks(plan, is_on_device=peers.exchange_device.type == "cuda")
    with ShardCopier(live_shards) as copier:
        part_start = report.measure("initial values", part_start)
        transfer = ChunkTransfer(source, live_shards, requests, peers, copier)
        report.measure("rounds", part_start)
        transfer.run(report)
        part_start = time.monotonic()
    report.measure("copy", part_start)


def _join_offers(offers: Mapping[int, Offer]) -> tuple[CheckpointIndex, dict[str, list[int]]]:
    """Return an index in which each box that is offered has one row, and the holders of each of its files.

    Processes that have copies of the same boxes share a file.

    Args:
        offers: chunks by rank of the process that has them.
    """
    tensors: dict[str, TensorInfo] = {}
    ranks_by_box: dict[_BoxKey, list[int]] = {}
    for rank, offer in offers.items():
        tensors |= offer.tensors
        for key in _list_keys(offer.tensors, offer.tensor, offer.box):
            ranks_by_box.setdefault(key, []).append(rank)
    tensors = dict(sorted(tensors.items()))
    positions = {name: i for i, name in enumerate(tensors)}
    item_bytes = {name: element_size(info.dtype) for name, info in tensors.items()}
    dims = max((len(info.shape) for info in tensors.values()), default=0)
    files: dict[tuple[int, ...], int] = {}
    ends: list[int] = []  # bytes in each file so far
    tensor_positions: list[int] = []
    file_numbers: list[int] = []
    starts: list[int] = []
    lengths: list[int] = []
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for (name, offsets, sizes), ranks in ranks_by_box.items():
        file = files.setdefault(tuple(ranks), len(files))
        if file == len(ends):
            ends.append(0)
        padding = (0,) * (dims - len(sizes))
        length = prod(sizes) * item_bytes[name]
        tensor_positions.append(positions[name])
        file_numbers.append(file)
        starts.append(ends[file])
        lengths.append(length)
        boxes.append((offsets + padding, sizes + padding))
        ends[file] += length
    start = np.array(starts, np.int64)
    columns: dict[str, np.ndarray] = {
        "tensor": np.array(tensor_positions, np.int32),
        "in_file": np.array(file_numbers, np.int32),
        "start": start,
        "length": np.array(lengths, np.int64),
        "data": start,
        "crc": np.zeros(len(lengths), np.uint32),
        "box": np.array(boxes, np.int64).reshape(len(lengths), 2, dims),
    }
    names = [f"kept-{file}" for file in range(len(files))]
    index = CheckpointIndex(tensors, names, columns)
    return index, {name: list(ranks) for name, ranks in zip(names, files, strict=True)}


def _list_keys(tensors: Mapping[str, TensorInfo], tensor: np.ndarray, box: np.ndarray) -> list[_BoxKey]:
    """Return a key for each row of an offer or of an index."""
    names = list(tensors)
    dims = [len(info.shape) for info in tensors.values()]
    keys = []
    for position, (offsets, sizes) in zip(tensor.tolist(), box.tolist(), strict=True):
        count = dims[position]
        keys.append((names[position], tuple(offsets[:count]), tuple(sizes[:count])))
    return keys


def _find_incomplete(index: CheckpointIndex) -> list[str]:
    """Return the tensors of which the rows, which do not overlap, lack elements."""
    tensor_bytes = np.zeros(len(index.tensors), np.int64)
    np.add.at(tensor_bytes, index.columns["tensor"], index.columns["length"])
    pairs = zip(index.tensors.items(), tensor_bytes.tolist(), strict=True)
    return [name for (name, info), byte_count in pairs if byte_count != info.nbytes]


def _find_local_elements(index: CheckpointIndex, shards: Sequence[TensorShard]) -> dict[int, torch.Tensor]:
    """Return the chunks of this process's shards by row of the index."""
    rows = {
        key: row for row, key in enumerate(_list_keys(index.tensors, index.columns["tensor"], index.columns["box"]))
    }
    elements = {}
    for chunk in cut_chunks(shards):
        elements[rows[chunk.shard.name, tuple(chunk.box.offsets), tuple(chunk.box.sizes)]] = chunk.view()
    return elements


def _find_missing_rows(saved: CheckpointIndex, live: CheckpointIndex) -> np.ndarray:
    """Return the rows of `saved` with elements that no row of `live` has."""
    live_keys = set(_list_keys(live.tensors, live.columns["tensor"], live.columns["box"]))
    missing = []
    for row, key in enumerate(_list_keys(saved.tensors, saved.columns["tensor"], saved.columns["box"])):
        if key not in live_keys and not _covers(live, key[0], saved.box(row)):
            missing.append(row)
    return np.array(missing, np.int64)


def _covers(index: CheckpointIndex, name: str, box: Box) -> bool:
    """Return whether the rows of a tensor, which do not overlap, have all elements of a box."""
    if name not in index.tensors:
        return False
    count = 0
    for row in index.find_overlapping(name, box).tolist():
        common = intersect_boxes(index.box(row), box)
        if common is not None:
            count += common.count
    return count == box.count


def _select_rows(index: CheckpointIndex, rows: np.ndarray) -> CheckpointIndex:
    """Return an index with the same tensors and files, and only some of the rows."""
    columns = {name: column[rows] for name, column in index.columns.items()}
    return CheckpointIndex(index.tensors, index.files, columns)
