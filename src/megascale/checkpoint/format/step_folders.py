"""A folder of checkpoints: `step-N/` each, complete only with its COMMIT file. Listing, committing, pruning. No torch.

The names of a save's files begin with its generation. COMMIT, written last and atomically, names them with their sizes
and checksums. Saving a step again therefore never harms the existing checkpoint, every file that COMMIT does not name
is a leftover, and storage that cannot rename works the same. A generation begins with the save's number in its folder,
counted up over all attempts. The newest commit is the one with the highest number, whatever its step and the clock: a
run that went back to an earlier step continues from there.
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import tomllib
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.chunks import check_coverage
from megascale.checkpoint.format.commit import COMMIT, COMMIT_BYTES, GENERATION, METADATA, Commit, DamagedCheckpoint
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.storage.base import OwnerChangedError, Storage
from megascale.checkpoint.storage.opening import open_storage
from megascale.config.text_files import decode_text
from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError

_IDENTITY_FILE = "ID"
_OWNER_FILE = "RUN"
_DAMAGED_FILE = "DAMAGED"
_STEP = re.compile(r"step-([0-9]{1,19})")
_INDEX_BYTES = 1 << 30  # upper limit of an index: ten million chunks
_CONFIG_BYTES = 1 << 20  # upper limit of a config.toml
_NAME_FILE_BYTES = 1024  # upper limit of the small files that hold a name
_MAX_LISTINGS = 10  # of a folder whose checkpoints are removed meanwhile
StorageLike = Storage | Path | str


def step_name(step: int) -> str:
    """Return the name of a step's folder."""
    return f"step-{step}"


# Reading ----------------------------------------------------------------------------------------------------------


def read_commit(storage: Storage, step: int) -> Commit | None:
    """Return the commit of a step, None without one.

    Raises DamagedCheckpoint if it cannot be read or belongs to another step.
    """
    try:
        data = bytes(storage.read(f"{step_name(step)}/{COMMIT}", 0, COMMIT_BYTES + 1))
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

    Raises DamagedCheckpoint if the file differs from what was written, if a chunk lies outside the commit's files or
    shares bytes with another, or if the chunks do not fill every logical tensor exactly once.
    """
    name = commit.index_file
    if commit.files.get(name, (0, 0))[0] > _INDEX_BYTES:
        raise DamagedCheckpoint(
            f"{name} is {commit.files[name][0]:,} bytes long; an index has at most {_INDEX_BYTES:,}"
        )
    try:
        data = bytes(storage.read(f"{step_name(commit.step)}/{name}", 0, _INDEX_BYTES + 1))
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
    """Raise DamagedCheckpoint if a file of the commit is missing or of another size; read no contents."""
    for name, (size, _) in commit.files.items():
        try:
            actual = storage.size(f"{step_name(commit.step)}/{name}")
        except OSError as error:
            raise DamagedCheckpoint(f"{name} cannot be read: {error}") from None
        if actual is None:
            raise DamagedCheckpoint(f"{name} is missing")
        # torch's own copy of the index is rewritten when a step is saved again; this program never reads it.
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
    return sorted(int(m.group(1)) for name in storage.list() if (m := _STEP.fullmatch(name)))


def list_linked_steps(storage: Storage) -> list[int]:
    """Return the steps whose folder is a link to a folder elsewhere, ascending."""
    return [step for step in list_steps(storage) if storage.is_link(step_name(step))]


def list_commits(storage: Storage) -> tuple[list[Commit], dict[int, str]]:
    """Return the readable commits, newest first, and why each other step's COMMIT cannot be read.

    A run that trains meanwhile may remove all the checkpoints that were listed; the folder is then listed again.
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
    """Return whether a commit that was read is no longer there: it was pruned, or its step was saved again."""
    try:
        present = read_commit(storage, commit.step)
    except DamagedCheckpoint:
        return False
    return present is None or present.generation != commit.generation


def latest(folder: StorageLike) -> int | None:
    """Return the step of the newest committed checkpoint, None if there is none."""
    return next((commit.step for commit in list_commits(open_storage(folder))[0]), None)


def steps(folder: StorageLike) -> list[int]:
    """Return the steps of all committed checkpoints, ascending."""
    return sorted(commit.step for commit in list_commits(open_storage(folder))[0])


def find_steps(path: StorageLike) -> tuple[Storage, list[int]]:
    """Return the checkpoints folder of a run folder, checkpoints folder or step-N folder, and the steps in it.

    Raises DataError if there are none.
    """
    if isinstance(path, (str, Path)):
        text = str(path).rstrip("/")
    else:
        text = path.url
    head, _, last = text.rpartition("/")
    match = _STEP.fullmatch(last)
    if match:
        storage = open_storage(head or ".")
        if storage.list(last):
            return storage, [int(match.group(1))]
    for folder in tuple(_configured_location(Path(text))) + (f"{text}/checkpoints", text):
        storage = open_storage(folder)
        listed = list_steps(storage)
        if listed:
            return storage, listed
    raise DataError(f"there is no checkpoint in {text!r}; give a run folder, its checkpoints folder or a step-N folder")


def _configured_location(run: Path) -> list[str]:
    """Return the checkpoint.location of a run folder's configuration, if it has one."""
    try:
        tree = tomllib.loads(decode_text(read_bounded(run / "config.toml", _CONFIG_BYTES)))
        return [str(tree["checkpoint"]["location"])]
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return []


# Generations and owners -------------------------------------------------------------------------------------------


def new_generation(storage: Storage, above: int = 0) -> str:
    """Return a generation with a number above that of every save that was ever begun here, and above `above`."""
    highest = above
    for step in list_steps(storage):
        for name in storage.list(step_name(step)):
            match = GENERATION.match(name)
            if match:
                highest = max(highest, int(match.group(1)))
    return f"{highest + 1:08d}-{secrets.token_hex(4)}"


def next_generation(generation: str) -> str:
    """Return the following generation of the same attempt."""
    number, nonce = generation.split("-")
    return f"{int(number) + 1:08d}-{nonce}"


def read_identity(storage: Storage, create: bool = False) -> str:
    """Return the random identity of a folder of checkpoints, "" if it has none.

    It tells snapshots in memory that belong to this folder from those of a removed folder at the same path.

    Args:
        create: create the identity if there is none.
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
    """Replace a folder's identity: a run starts anew here, and existing snapshots in memory are not its own."""
    if read_identity(storage):
        storage.write(_IDENTITY_FILE, secrets.token_hex(8).encode())


def read_owner(storage: Storage) -> str:
    """Return the identity of the run that claimed this folder, "" if none has."""
    try:
        return _read_name_file(storage, _OWNER_FILE)
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _read_name_file(storage: Storage, name: str) -> str:
    """Return the name in a small file of the folder. Raises DataError if it holds anything else."""
    data = bytes(storage.read(name, 0, _NAME_FILE_BYTES + 1))
    if len(data) <= _NAME_FILE_BYTES and data.isascii():
        return data.decode()
    raise DataError(f"'{storage.url}/{name}' holds no name, so this program did not write it; move it away")


def claim_folder(storage: Storage, run: str, previous: str) -> bool:
    """Claim the folder for a run and return whether the run owns it now.

    Of several runs that start at the same moment one gets it.

    Args:
        previous: identity of the owner when this start was checked, "" if there was none. If the owner is another run
            by now, the folder is not claimed.
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
    """Raise OwnerChangedError if the folder belongs to another run than the state that is about to be saved.

    Object storage has no locks, so a run that was accepted may lose the folder to one that takes it over.

    Args:
        state: the trainer's state besides tensors, which names the run.
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
    """Record that a commit was found damaged: `prune` then does not count it, and loads try it last."""
    storage.write(f"{step_name(commit.step)}/{_DAMAGED_FILE}", commit.generation.encode())


def is_marked_damaged(storage: Storage, commit: Commit) -> bool:
    """Return whether a commit was marked as damaged; a later save of the same step is another commit."""
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
    """Write a save's index and COMMIT.

    Args:
        files: (bytes, CRC-32) by name of its data files, which must be written and durable already.
        metadata: torch's form of the index.
        state: the trainer's state besides tensors.
    """
    files = dict(files)
    folder = step_name(step)
    for name, data in ((f"{generation}-index.npz", index.to_bytes()), (METADATA, metadata)):
        storage.write(f"{folder}/{name}", data)
        files[name] = (len(data), crc32(data))
    commit = Commit(step, generation, files, state)
    storage.write(f"{folder}/{COMMIT}", commit.to_bytes())
    return commit


def withdraw(storage: Storage, step: int, generation: str, late: bool = False) -> None:
    """Remove the files of an unfinished save.

    An earlier commit in the step's folder stays, and so does the save itself if another process has committed it.

    Args:
        late: the save was withdrawn before, so another one may be under way in the folder.
    """
    folder = step_name(step)
    with contextlib.suppress(DamagedCheckpoint):
        commit = read_commit(storage, step)
        if commit is not None and commit.generation == generation:
            return
    names = storage.list(folder)
    save_files = [name for name in names if name.startswith(generation)]
    # The name of torch's copy of the index does not identify its save, so it is removed only with nothing else left.
    is_alone = not late and set(names) - set(save_files) <= {METADATA}
    storage.clear(folder, names if is_alone else save_files)


def prune(
    folder: StorageLike, keep: int, is_sound: Callable[[Commit], bool] | None = None, remove_links: bool = False
) -> list[int]:
    """Remove all but the newest `keep` commits and the leftovers of saves before the newest; return the removed steps.

    A commit with missing or truncated files, or one that was marked as damaged, does not count among those kept. A
    COMMIT that cannot be read is left for a person to examine. So are files of a save with a higher number than the
    newest commit, which may be under way. Files of a linked step folder are never removed: a person has moved it.

    Args:
        is_sound: an additional check of each commit that would be kept.
        remove_links: remove the link of a superfluous step whose folder is elsewhere; False: leave it.
    """
    storage = open_storage(folder)
    intact = (c for c in list_commits(storage)[0] if _sizes_match(storage, c) and not is_marked_damaged(storage, c))
    retained = list(islice((c for c in intact if is_sound is None or is_sound(c)), max(keep, 1)))
    if not retained:
        return []
    newest = retained[0].sequence
    retained_by_step = {commit.step: commit for commit in retained}
    removed = []
    for step in list_steps(storage):
        names = storage.list(step_name(step))
        if not names:  # a save is just beginning here
            continue
        sequence = max((int(m.group(1)) for name in names if (m := GENERATION.match(name))), default=0)
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


def _remove_step(storage: Storage, step: int, names: list[str]) -> None:
    """Delete the listed files of a checkpoint, COMMIT first, so that an interruption never leaves a damaged commit.

    Files that a new save of the same step has written since the listing stay.
    """
    folder = step_name(step)
    if COMMIT in names:
        storage.remove(f"{folder}/{COMMIT}")
    storage.clear(folder, [name for name in names if name != COMMIT])


def _remove_leftovers(storage: Storage, commit: Commit, names: list[str], newest: int) -> None:
    """Remove from a committed step's folder the files of saves up to number `newest` that the commit does not name."""
    old = [name for name in names if (m := GENERATION.match(name)) and int(m.group(1)) <= newest]
    leftovers = [name for name in old if name not in commit.files]
    if leftovers:
        storage.clear(step_name(commit.step), leftovers)
