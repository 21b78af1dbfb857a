"""Folder of checkpoints: listing, committing and pruning of its step folders `step-N/`. Needs no torch.

The names of a save's files begin with its generation. COMMIT is written last and atomically, and lists the files with
their sizes and checksums. A checkpoint without COMMIT is incomplete. Saving a step again therefore never harms the
existing checkpoint, and a file that COMMIT does not list is a leftover. Storage need not be able to rename files.

A generation begins with the number of the save, which increases over all attempts. The newest commit is the commit with
the highest number, whichever step it has. A run that went back to an earlier step thus continues from that step.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.chunks import check_coverage
from megascale.checkpoint.format.commit import COMMIT, GENERATION, MAX_COMMIT_BYTES, METADATA, Commit, DamagedCheckpoint
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.storage.base import OwnerChangedError, Storage
from megascale.checkpoint.storage.opening import open_storage
from megascale.config.text_files import decode_text
from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError

_IDENTITY_FILE = "ID"  # in the checkpoints folder
_OWNER_FILE = "RUN"  # in the checkpoints folder
_DAMAGED_FILE = "DAMAGED"  # in a step folder
_STEP = re.compile(r"step-([0-9]{1,19})")
_MAX_INDEX_BYTES = 1 << 30  # size of an index with ten million chunks
_MAX_CONFIG_BYTES = 1 << 20  # largest config.toml that is read
_MAX_NAME_FILE_BYTES = 1024  # largest of the small files that contain a name
_MAX_LISTINGS = 10  # attempts to list a folder whose checkpoints another process removes
StorageLike = Storage | Path | str


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step}"


# Reading ----------------------------------------------------------------------------------------------------------


def read_commit(storage: Storage, step: int) -> Commit | None:
    """Return the commit of a step, or None if the step has none.

    Raises:
        DamagedCheckpoint: COMMIT is unreadable or belongs to another step.
    """
    try:
        data = bytes(storage.read(f"{step_name(step)}/{COMMIT}", 0, MAX_COMMIT_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise DamagedCheckpoint(f"COMMIT cannot be read: {error}") from None
    commit = Commit.from_bytes(data)
    if commit.step != step:
        raise DamagedCheckpoint(f"COMMIT is of step {commit.step}, not of this folder's")
    return commit


def read_index(storage: Storage, commit: Commit) -> CheckpointIndex:
    """Return a commit's index after checking it.

    Raises:
        DamagedCheckpoint: the file differs from the written one, a chunk lies outside the commit's files or overlaps
            another chunk, or the chunks do not fill every logical tensor exactly once.
    """
    name = commit.index_file
    written_bytes, _ = commit.files.get(name, (0, 0))
    if written_bytes > _MAX_INDEX_BYTES:
        raise DamagedCheckpoint(f"{name} is {written_bytes:,} bytes long; an index has at most {_MAX_INDEX_BYTES:,}")
    try:
        data = bytes(storage.read(f"{step_name(commit.step)}/{name}", 0, _MAX_INDEX_BYTES + 1))
    except OSError as error:
        raise DamagedCheckpoint(f"{name} cannot be read: {error}") from None
    if (len(data), crc32(data)) != commit.files.get(name):
        raise DamagedCheckpoint(f"{name} is not what was written ({len(data)} bytes)")
    try:
        index = CheckpointIndex.from_bytes(data)
        index.check_bounds({file: size for file, (size, _) in commit.files.items()})
        check_coverage(index.tensors, index.columns["tensor"], index.columns["box"])
    except ValueError as error:
        raise DamagedCheckpoint(f"{name} is not a valid index of this checkpoint: {error}") from None
    return index


def check_sizes(storage: Storage, commit: Commit) -> None:
    """Raise DamagedCheckpoint if a file of the commit is missing or has another size. Contents are not read."""
    for name, (size, _) in commit.files.items():
        try:
            actual = storage.size(f"{step_name(commit.step)}/{name}")
        except OSError as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {error}") from None
        if actual is None:
            raise DamagedCheckpoint(f"{name} is missing")
        # Saving a step again rewrites torch's copy of the index, METADATA, which this program never reads.
        if actual != size and name != METADATA:
            raise DamagedCheckpoint(f"{name} is {actual} bytes long, {size} were written")


def _sizes_match(storage: Storage, commit: Commit) -> bool:
    try:
        check_sizes(storage, commit)
    except DamagedCheckpoint:
        return False
    return True


# Listing ----------------------------------------------------------------------------------------------------------


def list_steps(storage: Storage) -> list[int]:
    """Return the steps that have a folder, committed or not, ascending."""
    matches = [_STEP.fullmatch(name) for name in storage.list()]
    return sorted(int(match.group(1)) for match in matches if match)


def list_linked_steps(storage: Storage) -> list[int]:
    """Return the steps whose folder is a link to a folder elsewhere, ascending."""
    return [step for step in list_steps(storage) if storage.is_link(step_name(step))]


def list_commits(storage: Storage) -> tuple[list[Commit], dict[int, str]]:
    """Return the readable commits, newest first, and the reason by step for each unreadable COMMIT.

    If a training run has removed all listed checkpoints meanwhile, the folder is listed again.
    """
    for _ in range(_MAX_LISTINGS):
        listed = list_steps(storage)
        commits: list[Commit] = []
        unreadable: dict[int, str] = {}
        for step in listed:
            try:
                commit = read_commit(storage, step)
            except DamagedCheckpoint as damage:
                unreadable[step] = str(damage)
                continue
            if commit is not None:
                commits.append(commit)
        if commits or listed == list_steps(storage):
            break
    return sorted(commits, key=lambda commit: -commit.sequence), unreadable


def is_removed(storage: Storage, commit: Commit) -> bool:
    """Return whether a commit that was read has been removed since, by pruning or by another save of its step."""
    try:
        present = read_commit(storage, commit.step)
    except DamagedCheckpoint:
        return False
    return present is None or present.generation != commit.generation


def latest(folder: StorageLike) -> int | None:
    """Return the step of the newest committed checkpoint, or None if there is none."""
    commits, _ = list_commits(open_storage(folder))
    return commits[0].step if commits else None


def steps(folder: StorageLike) -> list[int]:
    """Return the steps of all committed checkpoints, ascending."""
    commits, _ = list_commits(open_storage(folder))
    return sorted(commit.step for commit in commits)


def find_steps(path: StorageLike) -> tuple[Storage, list[int]]:
    """Return the checkpoints folder that `path` names, and its steps.

    Args:
        path: a run folder, a checkpoints folder, or a step-N folder, of which only that step is returned.

    Raises:
        DataError: the folder has no checkpoints.
    """
    if isinstance(path, (str, Path)):
        text = str(path).rstrip("/")
    else:
        text = path.url
    parent, _, name = text.rpartition("/")
    match = _STEP.fullmatch(name)
    if match:
        storage = open_storage(parent or ".")
        if storage.list(name):
            return storage, [int(match.group(1))]
    for folder in [*_read_configured_location(Path(text)), f"{text}/checkpoints", text]:
        storage = open_storage(folder)
        listed = list_steps(storage)
        if listed:
            return storage, listed
    raise DataError(f"there is no checkpoint in {text!r}; give a run folder, its checkpoints folder or a step-N folder")


def _read_configured_location(run: Path) -> list[str]:
    """Return the checkpoint.location of a run folder's configuration in a list, which is empty without one."""
    try:
        tree = tomllib.loads(decode_text(read_bounded(run / "config.toml", _MAX_CONFIG_BYTES)))
        return [str(tree["checkpoint"]["location"])]
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return []


# Generations and owners -------------------------------------------------------------------------------------------


def make_generation(storage: Storage, above: int = 0) -> str:
    """Return a generation with a higher number than all saves that were begun in this folder, and than `above`."""
    highest = above
    for step in list_steps(storage):
        for name in storage.list(step_name(step)):
            highest = max(highest, _parse_sequence(name))
    return f"{highest + 1:08d}-{secrets.token_hex(4)}"


def get_sequence(generation: str) -> int:
    """Return the number of a save in its folder, or 0 for an empty generation."""
    return int(generation[:8] or 0)


def get_nonce(generation: str) -> str:
    """Return the random part of a generation, which all saves of one attempt share."""
    return generation.partition("-")[2]


def make_next_generation(generation: str) -> str:
    """Return the generation of the next save of the same attempt, whose number is higher by one."""
    number, nonce = generation.split("-")
    return f"{int(number) + 1:08d}-{nonce}"


def read_identity(storage: Storage, create: bool = False) -> str:
    """Return the random identity of a folder of checkpoints, or an empty text if it has none.

    The identity shows whether a snapshot in memory belongs to this folder or to a removed folder of the same path.

    Args:
        create: whether to create the identity if there is none.
    """
    try:
        return _read_name_file(storage, _IDENTITY_FILE)
    except (FileNotFoundError, NotADirectoryError):
        if not create:
            return ""
    name = secrets.token_hex(8)
    storage.write(_IDENTITY_FILE, name.encode())
    return name


def renew_identity(storage: Storage) -> None:
    """Replace a folder's identity for a run that starts from step 0, so that it loads no snapshot of an earlier run."""
    if read_identity(storage):
        storage.write(_IDENTITY_FILE, secrets.token_hex(8).encode())


def read_owner(storage: Storage) -> str:
    """Return the identity of the run that owns this folder, or an empty text if no run does."""
    try:
        return _read_name_file(storage, _OWNER_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _read_name_file(storage: Storage, name: str) -> str:
    """Return the name in a small file of the folder. Raises DataError if the file is too long or not ASCII."""
    data = bytes(storage.read(name, 0, _MAX_NAME_FILE_BYTES + 1))
    if len(data) <= _MAX_NAME_FILE_BYTES and data.isascii():
        return data.decode()
    raise DataError(f"'{storage.url}/{name}' holds no name, so this program did not write it; move it away")


def claim_folder(storage: Storage, run: str, previous: str) -> bool:
    """Claim the folder for a run, and return whether the run owns it now.

    If several runs start at the same moment, one of them gets the folder.

    Args:
        run: identity of the run.
        previous: identity of the owner when this start was checked, or an empty text. If the owner has changed since,
            the folder is not claimed.
    """
    current = read_owner(storage)
    if current not in (run, previous):
        return False
    if not current:
        storage.create_exclusively(_OWNER_FILE, run.encode())
    elif current != run:
        storage.write(_OWNER_FILE, run.encode())
    return read_owner(storage) == run


def check_owner(storage: Storage, state: Mapping[str, Any]) -> None:
    """Raise OwnerChangedError if another run owns the folder than the run whose state is about to be saved.

    Object storage has no locks, so another run may have taken the folder over.

    Args:
        state: state of the trainer besides tensors, which names the run.
    """
    run = (state.get("run") or {}).get("id")
    current = read_owner(storage)
    if run and current and current != run:
        raise OwnerChangedError(
            errno.EBUSY,
            f"{storage.url!r} was given to another run (identity {current[:16]}, this run's is {run}) after this "
            "start: two runs would remove each other's checkpoints. Give each its own checkpoint.location",
        )


def mark_damaged(storage: Storage, commit: Commit) -> None:
    """Record that a commit is damaged. `prune` then does not count it, and loads try it last."""
    storage.write(f"{step_name(commit.step)}/{_DAMAGED_FILE}", commit.generation.encode())


def is_marked_damaged(storage: Storage, commit: Commit) -> bool:
    """Return whether this commit was marked as damaged. The mark of an earlier save of the step does not count."""
    try:
        return _read_name_file(storage, f"{step_name(commit.step)}/{_DAMAGED_FILE}") == commit.generation
    except (OSError, DataError):
        return False


# Committing and removing ------------------------------------------------------------------------------------------


def commit_save(
    storage: Storage,
    step: int,
    generation: str,
    index: CheckpointIndex,
    files: dict[str, tuple[int, int]],
    metadata: bytes,
    state: dict[str, Any],
) -> Commit:
    """Write the index and COMMIT of a save, and return the commit.

    Args:
        files: size in bytes and CRC-32 of the data files by name. The files must already be durable.
        metadata: the index in the format of torch.distributed.checkpoint.
        state: state of the trainer besides tensors.
    """
    files = dict(files)
    folder = step_name(step)
    for name, data in ((f"{generation}-index.npz", index.to_bytes()), (METADATA, metadata)):
        storage.write(f"{folder}/{name}", data)
        files[name] = (len(data), crc32(data))
    commit = Commit(step, generation, files, state)
    storage.write(f"{folder}/{COMMIT}", commit.to_bytes())
    return commit


def withdraw_save(storage: Storage, step: int, generation: str, is_repeated: bool = False) -> None:
    """Remove the files of a save that will not be committed.

    An earlier commit in the step's folder stays. If another process has committed the save, nothing is removed.

    Args:
        is_repeated: whether the save was withdrawn before. Another save may then be under way in the folder.
    """
    folder = step_name(step)
    with contextlib.suppress(DamagedCheckpoint):
        commit = read_commit(storage, step)
        if commit is not None and commit.generation == generation:
            return
    names = storage.list(folder)
    save_files = [name for name in names if name.startswith(generation)]
    # The name of METADATA does not identify its save, so it is removed only if no other file would remain.
    remaining_files = set(names) - set(save_files)
    has_other_saves = is_repeated or not remaining_files <= {METADATA}
    storage.clear(folder, save_files if has_other_saves else names)


def prune(
    folder: StorageLike, keep: int, is_sound: Callable[[Commit], bool] | None = None, remove_links: bool = False
) -> list[int]:
    """Remove all but the newest `keep` commits, and leftovers of saves older than the newest commit.

    Commits with missing or truncated files, and commits that are marked as damaged, do not count as kept ones. Three
    kinds of files always stay: those with an unreadable COMMIT, which a person should examine; those of a save with a
    higher number than the newest commit, which may be under way; and those in a linked step folder, which a person has
    moved.

    Args:
        is_sound: additional check of each commit that would be kept.
        remove_links: whether to remove the links of superfluous steps whose folders are elsewhere.

    Returns:
        The removed steps.
    """
    storage = open_storage(folder)
    retained: list[Commit] = []
    commits, _ = list_commits(storage)
    for commit in commits:
        if len(retained) == max(keep, 1):
            break
        is_intact = _sizes_match(storage, commit) and not is_marked_damaged(storage, commit)
        if is_intact and (is_sound is None or is_sound(commit)):
            retained.append(commit)
    if not retained:
        return []
    newest = retained[0].sequence
    retained_by_step = {commit.step: commit for commit in retained}
    removed = []
    for step in list_steps(storage):
        names = storage.list(step_name(step))
        if not names:  # a save has just made the folder
            continue
        sequence = max(_parse_sequence(name) for name in names)
        if storage.is_link(step_name(step)):
            if remove_links and step not in retained_by_step and sequence <= newest:
                storage.remove(step_name(step))
                removed.append(step)
        elif step in retained_by_step:
            _remove_leftovers(storage, retained_by_step[step], names, newest)
        elif sequence <= newest:
            try:
                is_committed = read_commit(storage, step) is not None
            except DamagedCheckpoint:
                continue
            if is_committed:
                removed.append(step)
            _remove_step(storage, step, names)
    return removed


def _parse_sequence(name: str) -> int:
    """Return the number of the save to which a file belongs, or -1 if its name has no generation."""
    match = GENERATION.match(name)
    return int(match.group(1)) if match else -1


def _remove_step(storage: Storage, step: int, names: list[str]) -> None:
    """Remove the listed files of a checkpoint. COMMIT is first, so that an interruption leaves no damaged commit.

    Files that a new save of the same step has written since the listing stay.
    """
    folder = step_name(step)
    if COMMIT in names:
        storage.remove(f"{folder}/{COMMIT}")
    storage.clear(folder, [name for name in names if name != COMMIT])


def _remove_leftovers(storage: Storage, commit: Commit, names: list[str], newest: int) -> None:
    """Remove the files of saves up to number `newest` that the commit of their folder does not list."""
    leftovers = [name for name in names if name not in commit.files and 0 <= _parse_sequence(name) <= newest]
    if leftovers:
        storage.clear(step_name(commit.step), leftovers)
