"""Loading of the newest complete checkpoint into live memory of any layout.

`load` tries the commits in order, `load_commit` opens a commit, and `fill_shards` moves its chunks (chunk_transfer.py).
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megascale.checkpoint.chunk_source import ChunkSource, LoadReport, StorageChunks
from megascale.checkpoint.chunk_transfer import ChunkTransfer
from megascale.checkpoint.copies import ShardCopier
from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.commit import Commit, DamagedCheckpoint
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.mismatch import explain_leftovers, explain_mismatch
from megascale.checkpoint.format.read_plan import (
    ChunkRequest,
    request_chunks,
)
from megascale.checkpoint.object_collectives import Peers
from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.opening import open_storage
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
