"""Saves that several services finish together, without the trainers and without talking to each other. No torch.

Each service writes the files of its own processes and then one small part record. The save counts as soon as all
parts are there: the first process's service looks for them and commits, but anyone may, also after a crash, since
all that a commit needs lies in the step's folder (begin record, plan, parts).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.step_folders import Commit
from megascale.checkpoint.format.write_plan import data_file
from megascale.checkpoint.storage.base import UNFINISHED, Storage
from megascale.core.exit_record import NO_RECORD, ExitKind, ExitRecord, attach_record

# Stands for the generation in a plan's torch metadata; a generation has the same length.
BLANK = "00000000-00000000"


class Failed(Exception):
    """A part of the save could not be written: why."""


@dataclass(frozen=True)
class Written:
    """One process's file: its bytes (0: none) and checksum, the checksums of its chunks in file order."""

    size: int
    crc: int
    chunks: list[int]


def begin_save(
    storage: Storage,
    step: int,
    generation: str,
    ranks: int,
    keep: int,
    state: dict[str, Any],
    plan: bytes,
    metadata: bytes,
) -> None:
    """Write what a commit will need besides the parts.

    Args:
        ranks: processes that save.
        plan: the plan's index (no generation, no checksums).
        metadata: torch's form of it, with BLANK for the generation.
    """
    base = f"{folders.step_name(step)}/{generation}"
    storage.write(f"{base}-plan.npz", plan)
    storage.write(f"{base}-metadata", metadata)
    record = {"step": step, "ranks": ranks, "keep": keep, "state": state}
    storage.write(f"{base}-begin.json", _sealed(record))


def add_part(storage: Storage, step: int, generation: str, written: dict[int, Written]) -> None:
    """Say that the files of some processes are written and lasting."""
    record = {str(rank): [w.size, w.crc, w.chunks] for rank, w in written.items()}
    storage.write(f"{folders.step_name(step)}/{generation}-part-{min(written):05d}.json", _sealed(record))


def add_failure(
    storage: Storage,
    step: int,
    generation: str,
    rank: int,
    why: str,
    ended: Iterable[int] = (),
    fault: ExitRecord = NO_RECORD,
) -> None:
    """Say that a process's file could not be written, so that nobody waits for it.

    Args:
        ended: processes of its host that write nothing more of this save.
        fault: the fault as a code.
    """
    record = {"why": why, "ended": sorted({rank, *ended}), "kind": fault.kind, "subject": fault.subject}
    storage.write(f"{folders.step_name(step)}/{generation}-failed-{rank:05d}.json", _sealed(record))


def ended_ranks(storage: Storage, step: int, generation: str) -> set[int]:
    """Return the processes that write nothing more of a save, as part and failure records tell."""
    place = folders.step_name(step)
    ended: set[int] = set()
    for name in storage.list(place):
        if not name.startswith(generation) or name.endswith(UNFINISHED):
            continue
        if "-failed-" in name or "-part-" in name:
            record = _opened(bytes(storage.read(f"{place}/{name}"))) or {}
            ended.update(int(rank) for rank in record.get("ended", record))
    return ended


def _sealed(record: dict[str, Any]) -> bytes:
    body = json.dumps(record).encode()
    return body + b"\n" + f"{crc32(body):08x}".encode()


def _opened(data: bytes) -> dict[str, Any] | None:
    body, _, checksum = data.partition(b"\n")
    return json.loads(body) if checksum.strip() == f"{crc32(body):08x}".encode() else None


def try_commit(storage: Storage, step: int, generation: str) -> tuple[Commit, int] | None:
    """Commit a save if all its parts are there; None if some are missing. Failed if one never will be.

    Returns the commit and how many the save wants to be kept: pruning is the caller's.

    Safe to call by several at once: they write the same COMMIT.
    """
    place = folders.step_name(step)
    # A record that is just being put in place lies there under another ending, and may be gone when it is read.
    names = [n for n in storage.list(place) if n.startswith(generation) and not n.endswith(UNFINISHED)]
    for name in names:
        if "-failed-" in name:
            record = _opened(bytes(storage.read(f"{place}/{name}")))
            failed = Failed(record["why"] if record else "a process failed to write its part")
            fault = record or {}
            raise attach_record(failed, ExitKind(fault.get("kind", "")), subject=str(fault.get("subject", "")))
    if f"{generation}-begin.json" not in names:
        return None
    start = _opened(bytes(storage.read(f"{place}/{generation}-begin.json")))
    if start is None:
        return None
    written: dict[int, Written] = {}
    for name in names:
        if "-part-" in name:
            for rank, values in (_opened(bytes(storage.read(f"{place}/{name}"))) or {}).items():
                written[int(rank)] = Written(*values)
    if len(written) < start["ranks"]:
        return None
    plan = CheckpointIndex.from_bytes(bytes(storage.read(f"{place}/{generation}-plan.npz")))
    chunks = [w.chunks for _, w in sorted(written.items())]
    index = plan.with_generation(generation, np.array([crc for part in chunks for crc in part], np.uint32))
    files = {f"{generation}-{data_file(rank)}": (w.size, w.crc) for rank, w in sorted(written.items()) if w.size}
    template = bytes(storage.read(f"{place}/{generation}-metadata"))
    metadata = template.replace(BLANK.encode(), generation.encode())
    commit = folders.commit_save(storage, step, generation, index, files, metadata, start["state"])
    return commit, start["keep"]


def finish_pending(storage: Storage) -> list[int]:
    """Commit saves that were written whole but whose committer died; the steps.

    Only saves newer than the newest commit: an older one was given up.
    """
    newest = max((commit.sequence for commit in folders.survey(storage)[0]), default=0)
    done = []
    for step in folders.step_folders(storage):
        for name in storage.list(folders.step_name(step)):
            generation = name.removesuffix("-begin.json")
            if generation != name and int(generation[:8]) > newest:
                try:
                    if (found := try_commit(storage, step, generation)) is not None:
                        done.append(step)
                        folders.prune(storage, found[1])
                except (Failed, OSError, ValueError, KeyError):
                    continue
    return done
