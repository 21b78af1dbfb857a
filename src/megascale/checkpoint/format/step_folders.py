"""A folder of checkpoints: `step-N/` each, complete only with its COMMIT file. Listing, committing, pruning. No torch.

Files of one save carry its generation in their names; COMMIT, put in place last and in one piece, names them with
their sizes and checksums. So a step saved again never harms the one that is there, everything that COMMIT does not
name is a leftover, and it works the same on storage that cannot rename. A generation begins with the save's number in
its folder, counted up over all attempts: the newest commit is the one with the highest number, whatever the clock or
the step says (a run that went back to an earlier step goes on from there).
"""

from __future__ import annotations

import contextlib
import errno
import re
import secrets
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from megascale.checkpoint.format.archive import crc32
from megascale.checkpoint.format.commit import COMMIT, COMMIT_BYTES, GENERATION, METADATA, Commit, Damaged
from megascale.checkpoint.format.coverage import check_cover
from megascale.checkpoint.format.index import CheckpointIndex
from megascale.checkpoint.storage.base import Storage
from megascale.checkpoint.storage.opening import open_storage
from megascale.checkpoint.storage.save_errors import OtherOwner
from megascale.config.text_files import decode_text
from megascale.core.untrusted_files import read_bounded
from megascale.errors import DataError

_IDENTITY = "ID"
_MOST_SETTINGS = 1 << 20  # bytes of a config.toml
_OWNER = "RUN"
_DAMAGED = "DAMAGED"
_STEP = re.compile(r"step-([0-9]{1,19})")
_INDEX_BYTES = 1 << 30  # most of an index: ten million chunks
_LOOKS = 10  # at a folder whose checkpoints are removed meanwhile
_WORD_BYTES = 1024  # of the small files that hold a name
Place = Storage | Path | str


def step_name(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step}"


def read_commit(storage: Storage, step: int) -> Commit | None:
    """The commit of a step, None without one; Damaged if it cannot be read, or is another step's."""
    try:
        data = bytes(storage.read(f"{step_name(step)}/{COMMIT}", 0, COMMIT_BYTES + 1))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise Damaged(f"COMMIT cannot be read: {error}") from None
    commit = Commit.from_bytes(data)
    if commit.step != step:
        raise Damaged(f"COMMIT is of step {commit.step}, not of this folder's")
    return commit


def read_index(storage: Storage, commit: Commit) -> CheckpointIndex:
    """The commit's index, checked: its chunks lie in the commit's files, none over another, and fill every logical
    tensor exactly once. Damaged if not, or if the file is not what was written."""
    name = commit.index_file
    if commit.files.get(name, (0, 0))[0] > _INDEX_BYTES:
        raise Damaged(f"{name} is {commit.files[name][0]:,} bytes long; no index has more than {_INDEX_BYTES:,}")
    try:
        data = bytes(storage.read(f"{step_name(commit.step)}/{name}", 0, _INDEX_BYTES + 1))
    except OSError as error:
        raise Damaged(f"{name} cannot be read: {error}") from None
    if (len(data), crc32(data)) != commit.files.get(name):
        raise Damaged(f"{name} is not what was written ({len(data)} bytes)")
    try:
        index = CheckpointIndex.from_bytes(data)
        index.check_places({file: size for file, (size, _) in commit.files.items()})
        check_cover(index.tensors, index.columns["tensor"], index.columns["box"])
    except ValueError as error:
        raise Damaged(f"{name} is no index of this checkpoint: {error}") from None
    return index


def check_sizes(storage: Storage, commit: Commit) -> None:
    """Damaged if a file of the commit is missing or of another length: quick, reads nothing."""
    for name, (size, _) in commit.files.items():
        try:
            actual = storage.size(f"{step_name(commit.step)}/{name}")
        except OSError as error:
            raise Damaged(f"{name} cannot be read: {error}") from None
        if actual is None:
            raise Damaged(f"{name} is missing")
        # torch's own copy of the index is rewritten when a step is saved again; nothing of ours reads it.
        if actual != size and name != METADATA:
            raise Damaged(f"{name} is {actual} bytes long, {size} were written")


def step_folders(storage: Storage) -> list[int]:
    """Steps that have a folder, committed or not, ascending."""
    return sorted(int(m.group(1)) for name in storage.list() if (m := _STEP.fullmatch(name)))


def survey(storage: Storage) -> tuple[list[Commit], dict[int, str]]:
    """Readable commits, newest first, and the steps whose COMMIT cannot be read, with why.

    A training next to this reader may remove all that were there in the meantime: it then looks again.
    """
    for _ in range(_LOOKS):
        steps = step_folders(storage)
        good, damaged = _read_commits(storage, steps)
        if good or steps == step_folders(storage):
            break
    return sorted(good, key=lambda commit: -commit.sequence), damaged


def _read_commits(storage: Storage, steps: list[int]) -> tuple[list[Commit], dict[int, str]]:
    good, damaged = [], {}
    for step in steps:
        try:
            commit = read_commit(storage, step)
            good += [commit] if commit is not None else []
        except Damaged as damage:
            damaged[step] = str(damage)
    return good, damaged


def is_removed(storage: Storage, commit: Commit) -> bool:
    """Return whether a commit that was there is not any more: it was pruned, or its step saved again."""
    try:
        present = read_commit(storage, commit.step)
    except Damaged:
        return False
    return present is None or present.generation != commit.generation


def latest(folder: Place) -> int | None:
    """Step of the newest committed checkpoint, None if there is none."""
    return next((commit.step for commit in survey(open_storage(folder))[0]), None)


def steps(folder: Place) -> list[int]:
    """Steps of all committed checkpoints, ascending."""
    return sorted(commit.step for commit in survey(open_storage(folder))[0])


def new_generation(storage: Storage, above: int = 0) -> str:
    """A generation numbered above every save that was ever begun here, whole or not, and above a given number."""
    highest = above
    for step in step_folders(storage):
        for name in storage.list(step_name(step)):
            if match := GENERATION.match(name):
                highest = max(highest, int(match.group(1)))
    return f"{highest + 1:08d}-{secrets.token_hex(4)}"


def next_generation(generation: str) -> str:
    """The one after it, of the same attempt."""
    number, nonce = generation.split("-")
    return f"{int(number) + 1:08d}-{nonce}"


def identity(storage: Storage, create: bool = False) -> str:
    """A random name of this folder of checkpoints, "" if it has none: what lies in memory belongs to it or to another
    of the same path that was since removed."""
    try:
        return _word(storage, _IDENTITY)
    except (FileNotFoundError, NotADirectoryError):
        if not create:
            return ""
    name = secrets.token_hex(8)
    storage.write(_IDENTITY, name.encode())
    return name


def renew_identity(storage: Storage) -> None:
    """Give a folder that has a name another: a run begins anew here, and what lies in memory is not its own."""
    if identity(storage):
        storage.write(_IDENTITY, secrets.token_hex(8).encode())


def owner(storage: Storage) -> str:
    """Identity of the run that this folder was given to, "" if none."""
    try:
        return _word(storage, _OWNER)
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _word(storage: Storage, name: str) -> str:
    """A name that a small file of the folder holds; DataError if it is anything else."""
    data = bytes(storage.read(name, 0, _WORD_BYTES + 1))
    if len(data) <= _WORD_BYTES and data.isascii():
        return data.decode()
    raise DataError(f"'{storage.url}/{name}' holds no name, and so is none of this program's; move it away")


def claim_folder(storage: Storage, run: str, previous: str) -> bool:
    """Give the folder to a run; return whether it is its own now.

    Of several runs that start at the same moment one gets it. False if another run than `previous` has it.

    Args:
        previous: identity of the run whose folder it was when this start was judged, "" if it was given to none.
    """
    current = owner(storage)
    if current not in (run, previous):
        return False
    if not current:
        storage.create_exclusively(_OWNER, run.encode())
    elif current != run:
        storage.write(_OWNER, run.encode())
    return owner(storage) == run


def check_owner(storage: Storage, state: Mapping[str, Any]) -> None:
    """Refuse to save a state into a folder that was given to another run: OtherOwner.

    Object storage has no locks, so a run that was accepted may still lose the folder to one that takes it over.

    Args:
        state: what the trainer saves beside tensors, which says of which run it is.
    """
    run = (state.get("run") or {}).get("id")
    current = owner(storage)
    if run and current and current != run:
        raise OtherOwner(
            errno.EBUSY,
            f"{storage.url!r} was given to another run (identity {current[:16]}, this run's is {run}) after this "
            "start: two runs would remove each other's checkpoints. Give each its own checkpoint.location",
        )


def mark_damaged(storage: Storage, commit: Commit) -> None:
    """Remember that reading found a commit damaged: `prune` then does not count it, nor is it loaded before others."""
    storage.write(f"{step_name(commit.step)}/{_DAMAGED}", commit.generation.encode())


def marked_damaged(storage: Storage, commit: Commit) -> bool:
    """Whether a commit was marked so; a save of the same step since is another commit."""
    try:
        return _word(storage, f"{step_name(commit.step)}/{_DAMAGED}") == commit.generation
    except (OSError, DataError):
        return False


def commit_save(
    storage: Storage,
    step: int,
    generation: str,
    index: CheckpointIndex,
    files: dict[str, tuple[int, int]],
    metadata: bytes,
    state: dict[str, Any],
) -> Commit:
    """Make a save count. Its data files (`files`: name to bytes and CRC-32) must be written and lasting already."""
    files = dict(files)
    place = step_name(step)
    for name, data in ((f"{generation}-index.npz", index.to_bytes()), (METADATA, metadata)):
        storage.write(f"{place}/{name}", data)
        files[name] = (len(data), crc32(data))
    commit = Commit(step, generation, files, state)
    storage.write(f"{place}/{COMMIT}", commit.to_bytes())
    return commit


def withdraw(storage: Storage, step: int, generation: str, late: bool = False) -> None:
    """Remove what an unfinished save left. A commit that the step's folder holds from before stays, and so does the
    save itself if another has committed it meanwhile.

    Args:
        late: the save was withdrawn before, and another may be under way in the folder by now.
    """
    place = step_name(step)
    with contextlib.suppress(Damaged):
        commit = read_commit(storage, step)
        if commit is not None and commit.generation == generation:
            return
    names = storage.list(place)
    own = [name for name in names if name.startswith(generation)]
    # torch's copy of the index does not say of which save it is.
    alone = not late and set(names) - set(own) <= {METADATA}
    storage.clear(place, names if alone else own)


def remove_step(storage: Storage, step: int, names: list[str]) -> None:
    """Delete what was seen of a checkpoint: its COMMIT first, so that what an interruption leaves never counts as
    whole. What a save of the same step has begun to write since stays."""
    place = step_name(step)
    if COMMIT in names:
        storage.remove(f"{place}/{COMMIT}")
    storage.clear(place, [name for name in names if name != COMMIT])


def linked_steps(storage: Storage) -> list[int]:
    """Return the steps whose folder is a link to a folder elsewhere, ascending."""
    return [step for step in step_folders(storage) if storage.is_link(step_name(step))]


def prune(
    folder: Place, keep: int, is_sound: Callable[[Commit], bool] | None = None, remove_links: bool = False
) -> list[int]:
    """Remove all but the newest `keep` commits and the leftovers of saves before the newest; the steps removed.

    A commit whose files are cut short or gone, or that was found damaged when it was read, does not count among those
    kept. A COMMIT that cannot be read is left for a person to look at, and so is what a save with a higher number than
    the newest commit writes just now. No file of a linked step folder is ever removed: a person has put it elsewhere.

    Args:
        whole: a closer look at each commit that would be kept; default: the lengths of its files.
        remove_links: remove the link of a superfluous step whose folder is elsewhere; default: leave it.
    """
    storage = open_storage(folder)
    sound = (c for c in survey(storage)[0] if _sizes_hold(storage, c) and not marked_damaged(storage, c))
    good = list(islice((c for c in sound if is_sound is None or is_sound(c)), max(keep, 1)))
    kept = {commit.step: commit for commit in good}
    if not good:
        return []
    removed = []
    for step in step_folders(storage):
        names = storage.list(step_name(step))
        if not names:  # a save begins here just now
            continue
        newest = max((int(m.group(1)) for name in names if (m := GENERATION.match(name))), default=0)
        if storage.is_link(step_name(step)):
            if remove_links and step not in kept and newest <= good[0].sequence:
                storage.remove(step_name(step))
                removed.append(step)
        elif step in kept:
            _sweep(storage, kept[step], names, good[0].sequence)
        elif newest <= good[0].sequence:
            try:
                committed = read_commit(storage, step) is not None
            except Damaged:
                continue
            removed += [step] if committed else []
            remove_step(storage, step, names)
    return removed


def _sweep(storage: Storage, commit: Commit, names: list[str], below: int) -> None:
    """Remove from a committed step's folder what belongs to saves up to number `below` and not to the commit."""
    old = [name for name in names if (m := GENERATION.match(name)) and int(m.group(1)) <= below]
    if left := [name for name in old if name not in commit.files]:
        storage.clear(step_name(commit.step), left)


def _sizes_hold(storage: Storage, commit: Commit) -> bool:
    try:
        check_sizes(storage, commit)
    except Damaged:
        return False
    return True


@dataclass(frozen=True)
class TensorSummary:
    """One line of `inspect`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    chunks: int


@dataclass(frozen=True)
class Summary:
    """What a step's folder holds."""

    path: str
    step: int
    committed: bool
    problem: str | None
    sequence: int = 0
    bytes: int = 0
    tensors: list[TensorSummary] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)


def find_steps(path: Place) -> tuple[Storage, list[int]]:
    """The checkpoints folder that a run folder, a checkpoints folder or one step-N folder means, and the steps there.

    DataError if there are none.
    """
    text = str(path).rstrip("/") if isinstance(path, (str, Path)) else path.url
    head, _, last = text.rpartition("/")
    match = _STEP.fullmatch(last)
    if match:
        storage = open_storage(head or ".")
        if storage.list(last):
            return storage, [int(match.group(1))]
    for folder in (*_location(Path(text)), f"{text}/checkpoints", text):
        storage = open_storage(folder)
        if found := step_folders(storage):
            return storage, found
    raise DataError(f"there is no checkpoint in {text!r}; give a run folder, its checkpoints folder or a step-N folder")


def _location(run: Path) -> list[str]:
    """Where the configuration that a run folder keeps has put the checkpoints, if elsewhere."""
    try:
        tree = tomllib.loads(decode_text(read_bounded(run / "config.toml", _MOST_SETTINGS)))
        return [str(tree["checkpoint"]["location"])]
    except (OSError, KeyError, TypeError, ValueError, RecursionError):
        return []


def summarise(storage: Storage, step: int) -> Summary:
    """What one step's folder holds, whole or not."""
    path = f"{storage.url}/{step_name(step)}"
    try:
        commit = read_commit(storage, step)
        if commit is None:
            return Summary(path, step, False, "no COMMIT: the save did not finish")
        index = read_index(storage, commit)
        check_sizes(storage, commit)
    except Damaged as damage:
        return Summary(path, step, False, str(damage))
    counts = np.bincount(index.columns["tensor"], minlength=len(index.tensors)).tolist()
    tensors = [
        TensorSummary(name, info.shape, info.dtype, info.nbytes, count)
        for (name, info), count in zip(index.tensors.items(), counts, strict=True)
    ]
    return Summary(path, commit.step, True, None, commit.sequence, commit.size, tensors, commit.state)


def inspect(folder_or_step: Place) -> Summary:
    """The newest committed checkpoint of a folder (or of the given step-N), or what is there if none is complete."""
    storage, found = find_steps(folder_or_step)
    summaries = [summarise(storage, step) for step in found]
    return max(summaries, key=lambda summary: (summary.committed, summary.sequence, summary.step))
