"""Records by which several services complete a save together, without messages and without trainers. No torch.

Each service writes the files of its ranks, and then a small part record that lists them. The save is complete once the
part records of all services exist. The service of rank 0 waits for the records and commits the save. After a crash any
other process can commit it, because the step's folder has everything that a commit needs: begin record, plan and part
records.
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

# Placeholder for the generation in the plan's torch metadata. It has the length of a generation.
BLANK = "00000000-00000000"


class SaveFailed(Exception):
    """Error for a save of which a rank could not write its file. The message has the reason."""


@dataclass(frozen=True)
class WrittenFile:
    """Complete data file of one rank.

    Attributes:
        size: size in bytes, or 0 if the rank writes no file.
        crc: CRC-32 of the file.
        chunks: CRC-32 of each chunk in file order.
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
    """Write the begin record and the plan of a save.

    Args:
        ranks: number of ranks that save.
        keep: number of checkpoints to keep.
        state: saved state besides tensors.
        plan: index of the plan, without generation and checksums.
        metadata: the index in torch's format, with BLANK in place of the generation.
    """
    base = f"{folders.step_name(step)}/{generation}"
    storage.write(f"{base}-plan.npz", plan)
    storage.write(f"{base}-metadata", metadata)
    record = {"step": step, "ranks": ranks, "keep": keep, "state": state}
    storage.write(f"{base}-begin.json", _encode_record(record))


def add_part(storage: Storage, step: int, generation: str, written_files: dict[int, WrittenFile]) -> None:
    """Write the part record of a service: the files of its ranks, which are durable."""
    record = {str(rank): [file.size, file.crc, file.chunks] for rank, file in written_files.items()}
    name = f"{generation}-part-{min(written_files):05d}.json"
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
    """Write the failure record of a rank whose file could not be written, so that no service waits for it.

    Args:
        ended: other ranks of the host whose files of this save are complete or have failed.
    """
    record = {"why": reason, "ended": sorted({rank, *ended}), "kind": fault.kind, "subject": fault.subject}
    name = f"{generation}-failed-{rank:05d}.json"
    storage.write(f"{folders.step_name(step)}/{name}", _encode_record(record))


def read_ended_ranks(storage: Storage, step: int, generation: str) -> set[int]:
    """Return the ranks whose files of a save are complete or have failed, from part and failure records."""
    folder = folders.step_name(step)
    ended: set[int] = set()
    for name in _list_records(storage, step, generation):
        if "-failed-" in name or "-part-" in name:
            record = _read_record(storage, f"{folder}/{name}") or {}
            if "ended" in record:  # a failure record
                ended.update(int(rank) for rank in record["ended"])
            else:  # the keys of a part record are the ranks
                ended.update(int(rank) for rank in record)
    return ended


def try_commit(storage: Storage, step: int, generation: str) -> tuple[Commit, int] | None:
    """Commit a save if the part records of all services exist. The caller should prune afterwards.

    Several processes may call this function at the same time, because they write the same COMMIT.

    Returns:
        The commit and the number of checkpoints to keep, or None if part records are missing.

    Raises:
        SaveFailed: a rank could not write its file.
    """
    folder = folders.step_name(step)
    names = _list_records(storage, step, generation)
    for name in names:
        if "-failed-" in name:
            record = _read_record(storage, f"{folder}/{name}")
            if record is None:
                record = {"why": "a rank failed to write its file"}
            kind = ExitKind(record.get("kind", ""))
            raise attach_record(SaveFailed(record["why"]), kind, subject=str(record.get("subject", "")))
    if f"{generation}-begin.json" not in names:
        return None
    begin = _read_record(storage, f"{folder}/{generation}-begin.json")
    if begin is None:
        return None
    written_files: dict[int, WrittenFile] = {}
    for name in names:
        if "-part-" in name:
            part_record = _read_record(storage, f"{folder}/{name}") or {}
            for rank, (size, crc, chunk_crcs) in part_record.items():
                written_files[int(rank)] = WrittenFile(size, crc, chunk_crcs)
    if len(written_files) < begin["ranks"]:
        return None
    files = sorted(written_files.items())
    plan = CheckpointIndex.from_bytes(bytes(storage.read(f"{folder}/{generation}-plan.npz")))
    crcs = np.array([crc for _, file in files for crc in file.chunks], np.uint32)
    index = plan.with_generation(generation, crcs)
    data_files = {f"{generation}-{data_file_name(rank)}": (file.size, file.crc) for rank, file in files if file.size}
    template = bytes(storage.read(f"{folder}/{generation}-metadata"))
    metadata = template.replace(BLANK.encode(), generation.encode())
    commit = folders.commit_save(storage, step, generation, index, data_files, metadata, begin["state"])
    return commit, begin["keep"]


def finish_pending(storage: Storage) -> list[int]:
    """Commit the complete saves whose committer died, and return their steps.

    A save that is older than the newest commit was given up, so only newer ones are committed.
    """
    commits, _ = folders.list_commits(storage)
    newest = max((commit.sequence for commit in commits), default=0)
    committed_steps = []
    for step in folders.list_steps(storage):
        for name in storage.list(folders.step_name(step)):
            if not name.endswith("-begin.json"):
                continue
            generation = name.removesuffix("-begin.json")
            if int(generation[:8]) <= newest:
                continue
            try:
                result = try_commit(storage, step, generation)
                if result is not None:
                    _, keep = result
                    committed_steps.append(step)
                    folders.prune(storage, keep)
            except (SaveFailed, OSError, ValueError, KeyError):
                continue
    return committed_steps


def _list_records(storage: Storage, step: int, generation: str) -> list[str]:
    """Return the names of a save's complete files in its step's folder."""
    # A file that is being written has the suffix UNFINISHED, and is renamed once it is complete.
    names = storage.list(folders.step_name(step))
    return [name for name in names if name.startswith(generation) and not name.endswith(UNFINISHED)]


def _encode_record(record: dict[str, Any]) -> bytes:
    """Return a record as one line of JSON and one line with its checksum."""
    body = json.dumps(record).encode()
    return body + b"\n" + f"{crc32(body):08x}".encode()


def _read_record(storage: Storage, path: str) -> dict[str, Any] | None:
    """Return a record, or None if it does not match its checksum."""
    body, _, checksum = bytes(storage.read(path)).partition(b"\n")
    if checksum.strip() == f"{crc32(body):08x}".encode():
        return json.loads(body)
    return None
