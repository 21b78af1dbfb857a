"""Loading: the newest committed checkpoint that is whole, checked, into live memory of any layout."""

from __future__ import annotations

import logging
import os
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megascale.checkpoint import folder as folders
from megascale.checkpoint.folder import Commit, Damaged
from megascale.checkpoint.index import Index, Stored
from megascale.checkpoint.layout import Shard, overlap, slices
from megascale.checkpoint.mismatch import explain_mismatch
from megascale.checkpoint.peers import Peers
from megascale.errors import DataError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

log = logging.getLogger(__name__)


def load(
    folder: Path, shards: Sequence[Shard], *, step: int | None = None, group: ProcessGroup | None = None
) -> dict[str, Any]:
    """Fill `shards` in place from the newest committed checkpoint (or that of `step`); collective over `group`.

    Shards may be cut in any way and may be fewer than what is stored; a shard of another dtype is converted. Every
    chunk read is checked. If the newest checkpoint is damaged the one before it is taken, with a warning; then a
    shard may have been written to twice, never left with damaged data.

    Returns the saved state. Raises DataError if there is no committed checkpoint, if it is of another model (naming
    tensors and the key that likely differs), or if all are damaged.
    """
    folder, peers = Path(folder), Peers(group)
    candidates = peers.share(_candidates(folder, step) if peers.rank == 0 else None)
    if isinstance(candidates, str):
        raise DataError(candidates)
    damages: list[str] = []
    for commit in candidates:
        place = folders.step_folder(folder, commit.step)
        outcome = _try_load(place, commit, shards)
        outcomes = peers.exchange(outcome)
        wrong = next((o for o in outcomes if o and o[0] == "mismatch"), None)
        if wrong:
            raise DataError(wrong[1])
        damage = next((o for o in outcomes if o), None)
        if damage is None:
            if damages and peers.rank == 0:
                _say(f"{'; '.join(damages)}. Went back to the checkpoint of step {commit.step}")
            return commit.state
        damages.append(f"the checkpoint {str(place)!r} is damaged: {damage[1]}")
    raise DataError(f"{'; '.join(damages)}. No other committed checkpoint is left to go back to")


def _say(message: str) -> None:
    log.warning(message)
    warnings.warn(message, stacklevel=3)


def _candidates(folder: Path, step: int | None) -> list[Commit] | str:
    """Commits to try in order, or what is wrong."""
    good, unreadable = folders.survey(folder)
    if good and step is None:
        for place, why in unreadable.items():
            _say(f"the checkpoint {str(place)!r} is passed over: {why}")
    if step is not None:
        place = folders.step_folder(folder, step)
        found = [commit for commit in good if commit.step == step]
        if found:
            return found
        if place.is_dir():
            return (
                f"{str(place)!r} is half-written or damaged (no readable COMMIT) and cannot be loaded; "
                f"committed steps: {sorted(c.step for c in good) or 'none'}"
            )
        return f"there is no checkpoint {str(place)!r}; committed steps: {sorted(c.step for c in good) or 'none'}"
    if good:
        return good
    halves = [str(place) for place in folders.places(folder).values()]
    if halves:
        return (
            f"no checkpoint in {str(folder)!r} is whole: {', '.join(halves)} half-written (no readable COMMIT); "
            "remove the folder to start anew"
        )
    return f"there is no checkpoint in {str(folder)!r}; train first, or name another run folder"


def _try_load(place: Path, commit: Commit, shards: Sequence[Shard]) -> tuple[str, str] | None:
    """None if all shards were filled, else ("mismatch" or "damaged", why)."""
    try:
        index = folders.read_index(place, commit)
        folders.check_sizes(place, commit)
        problem = explain_mismatch(place, index, shards, commit.state)
        if problem:
            return "mismatch", problem
        fill(place, index, shards)
    except (Damaged, OSError) as damage:
        return "damaged", str(damage)
    return None


def fill(place: Path, index: Index, shards: Sequence[Shard]) -> None:
    """Read each chunk that a shard needs once, check it and copy the shared parts; Damaged if a check fails."""
    wanted: dict[int, list[Shard]] = {}
    for shard in shards:
        for row in index.overlapping(shard.name, shard.box):
            wanted.setdefault(int(row), []).append(shard)
    by_file: dict[str, list[Stored]] = {}
    rows = {}
    for row in wanted:
        stored = index.stored(row)
        by_file.setdefault(stored.file, []).append(stored)
        rows[stored.file, stored.start] = row
    for file, records in by_file.items():
        with open(place / file, "rb", buffering=0) as handle:
            for stored in sorted(records, key=lambda s: s.data):
                data = read_chunk(handle.fileno(), stored)
                for shard in wanted[rows[file, stored.start]]:
                    copy_part(stored, data, shard)


def read_chunk(handle: int, stored: Stored) -> bytearray:
    """A chunk's bytes, checked."""
    data = bytearray(stored.chunk.nbytes)
    view, at = memoryview(data), stored.data
    while len(view):
        count = os.preadv(handle, [view], at)
        if not count:
            raise Damaged(f"{stored.file} ends inside {stored.chunk.name}")
        view, at = view[count:], at + count
    if zlib.crc32(data) != stored.crc:
        raise Damaged(f"{stored.file} holds other bytes for {stored.chunk.name} than were written")
    return data


def copy_part(stored: Stored, data: bytearray, shard: Shard) -> None:
    """Copy what a chunk and a shard share into the shard's memory."""
    chunk = stored.chunk
    common = overlap(chunk.box, shard.box)
    if common is None:
        return
    source = torch.frombuffer(data, dtype=getattr(torch, chunk.dtype)).reshape(chunk.box.sizes)
    with torch.no_grad():
        target = shard.tensor.detach()
        if common.sizes:
            target[slices(shard.box, common)].copy_(source[slices(chunk.box, common)])
        else:
            target.copy_(source)
