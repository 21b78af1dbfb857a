"""Saves that several services complete together without the trainers and without talking to each other. No torch.

Each service writes the files of its own processes and then one small part record. The save is complete as soon as all
parts exist: the first process's service waits for them and commits. Any other process can commit too, also after a
crash, since the step's folder holds everything that a commit needs (begin record, plan, parts).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.checkpoint.format import step_folders as folders
from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.commit import Commit
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.format.write_plan import data_file_name
from megascale.checkpoint.storage.base import UNFINISHED, Storage
from megascale.core.exit_record import NO_RECORD, ExitKind, ExitRecord, attach_record

# Placeholder for the generation in a plan's torch metadata, of the same length.
BLANK = "00000000-00000000"


class SaveFailed(Exception):
    """A part of the save could not be written; the message says why."""


@dataclass(frozen=True)
class WrittenFile:
    """One process's file.

    Attributes:
        size: bytes, 0 if there is no file.
        crc: CRC-32 of the file.
        chunks: CRC-32 of its chunks in file order.
    """

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
    """Write the records that a commit needs besides the parts.

    Args:
        ranks: number of processes that save.
        keep: number of checkpoints to keep.
        plan: the plan's index, without generation and checksums.
        metadata: torch's form of it, with BLANK for the generation.
    """
    base = f"{folders.step_name(step)}/{generation}"
    storage.write(f"{base}-plan.npz", plan)
    storage.write(f"{base}-metadata", metadata)
    record = {"step": step, "ranks": ranks, "keep": keep, "state": state}
    storage.write(f"{base}-begin.json", _encode_record(record))


def add_part(storage: Storage, step: int, generation: str, written: dict[int, WrittenFile]) -> None:
    """Record that the files of some processes are written and durable."""
    record = {str(rank): [file.size, file.crc, file.chunks] for rank, file in written.items()}
    name = f"{generation}-part-{min(written):05d}.json"
    storage.write(f"{folders.step_name(step)}/{name}", _encode_record(record))


def add_failure(
    storage: Storage,
    step: int,
    generation: str,
    rank: int,
    reason: str,
    ended: Iterable[int] = (),
    fault: ExitRecord = NO_RECORD,
) -> None:
    """Record that a process's file could not be written, so that no service waits for it.

    Args:
        ended: processes of its host that write nothing more of this save.
        fault: the fault as a code.
    """
    record = {"why": reason, "ended": sorted({rank, *ended}), "kind": fault.kind, "subject": fault.subject}
    name = f"{generation}-failed-{rank:05d}.json"
    storage.write(f"{folders.step_name(step)}/{name}", _encode_record(record))


def ended_ranks(storage: Storage, step: int, generation: str) -> set[int]:
    """Return the processes that write nothing more of a save, according to part and failure records."""
    folder = folders.step_name(step)
    ended: set[int] = set()
    for name in _list_records(storage, step, generation):
        if "-failed-" in name or "-part-" in name:
            record = _read_record(storage, f"{folder}/{name}") or {}
            ended.update(int(rank) for rank in record.get("ended", record))
    return ended


def try_commit(storage: Storage, step: int, generation: str) -> tuple[Commit, int] | None:
    """Commit a save if all its parts exist; return the commit and the number of checkpoints to keep.

    Returns None if parts are missing; raises SaveFailed if one will never exist. Pruning is left to the caller. Several
    processes may call it at once: they write the same COMMIT.
    """
    folder = folders.step_name(step)
    names = _list_records(storage, step, generation)
    for name in names:
        if "-failed-" in name:
            record = _read_record(storage, f"{folder}/{name}")
            failure = SaveFailed(record["why"] if record else "a process failed to write its part")
            fault = record or {}
            raise attach_record(failure, ExitKind(fault.get("kind", "")), subject=str(fault.get("subject", "")))
    if f"{generation}-begin.json" not in names:
        return None
    begin = _read_record(storage, f"{folder}/{generation}-begin.json")
    if begin is None:
        return None
    written: dict[int, WrittenFile] = {}
    for name in names:
        if "-part-" in name:
            part = _read_record(storage, f"{folder}/{name}") or {}
            written |= {int(rank): WrittenFile(*values) for rank, values in part.items()}
    if len(written) < begin["ranks"]:
        return None
    files = sorted(written.items())
    plan = CheckpointIndex.from_bytes(bytes(storage.read(f"{folder}/{generation}-plan.npz")))
    crcs = np.array([crc for _, file in files for crc in file.chunks], np.uint32)
    index = plan.with_generation(generation, crcs)
    data_files = {f"{generation}-{data_file_name(rank)}": (file.size, file.crc) for rank, file in files if file.size}
    template = bytes(storage.read(f"{folder}/{generation}-metadata"))
    metadata = template.replace(BLANK.encode(), generation.encode())
    commit = folders.commit_save(storage, step, generation, index, data_files, metadata, begin["state"])
    return commit, begin["keep"]


def finish_pending(storage: Storage) -> list[int]:
    """Commit the completely written saves whose committer died, and return their steps.

    Only saves newer than the newest commit count: an older one was given up.
    """
    newest = max((commit.sequence for commit in folders.list_commits(storage)[0]), default=0)
    committed = []
    for step in folders.list_steps(storage):
        for name in storage.list(folders.step_name(step)):
            generation = name.removesuffix("-begin.json")
            if generation == name or int(generation[:8]) <= newest:
                continue
            try:
                result = try_commit(storage, step, generation)
                if result is not None:
                    committed.append(step)
                    folders.prune(storage, result[1])
            except (SaveFailed, OSError, ValueError, KeyError):
                continue
    return committed


def _list_records(storage: Storage, step: int, generation: str) -> list[str]:
    """Return the complete files of a save in its step's folder."""
    # A file that is being written has another suffix, and may be renamed before it could be read.
    names = storage.list(folders.step_name(step))
    return [name for name in names if name.startswith(generation) and not name.endswith(UNFINISHED)]


def _encode_record(record: dict[str, Any]) -> bytes:
    body = json.dumps(record).encode()
    return body + b"\n" + f"{crc32(body):08x}".encode()


def _read_record(storage: Storage, path: str) -> dict[str, Any] | None:
    """Return a record, None if it does not match its checksum."""
    body, _, checksum = bytes(storage.read(path)).partition(b"\n")
    if checksum.strip() == f"{crc32(body):08x}".encode():
        return json.loads(body)
    return None
