"""A start before the run folder is its own: the locks that rank 0 takes, and what a start that fails leaves there."""

from __future__ import annotations

import contextlib
import os

from megascale.checkpoint.storage.opening import local_folder
from megascale.config import Config
from megascale.core import run_lock
from megascale.core.events import Event
from megascale.core.exit_record import ExitRecord, record_of
from megascale.core.run_lock import RunLock
from megascale.core.status import StatusFile, read_status
from megascale.core.terminal import print_error
from megascale.errors import MegascaleError
from megascale.train.run_folder import RunFolder


def take_run_locks(config: Config) -> list[RunLock]:
    """The locks of one training: of its run folder, and of a folder of checkpoints that several runs might name.

    Raises as `run_lock.take`, with nothing held.
    """
    grace_period = run_lock.GRACE_PERIOD
    if run_lock.started_by_driver():
        grace_period = min(60.0, config.rendezvous.timeout / 2)  # ranks of the attempt before may be dying
    places, location = [config.run_folder], config.checkpoint.location
    if location is not None and (folder := local_folder(location)) is not None:
        places.append(folder)
    elif location is None and (shared := config.run_folder / "checkpoints").is_symlink():
        # A node with a run folder of its own: what it shares with the others, cut off ones too, is this.
        places.append(shared.resolve())
    with contextlib.ExitStack() as undo:
        locks = [
            undo.enter_context(run_lock.acquire_trainer_lock(path, "megascale train", grace_period)) for path in places
        ]
        undo.pop_all()
    for lock in locks:
        if lock.warning:
            print_error(lock.warning)
    return locks


def write_failed_status(
    folder: RunFolder, rank: int, mine: bool, message: str, exit_record: ExitRecord | None = None
) -> None:
    """Why a rank ended that had not come to its own status file yet. `mine`: nobody else trains in the folder;
    without that nothing is made, and the status of a rank that lives on this host is left alone."""
    path = folder.status / f"rank-{rank}.status"
    if not mine:
        if not folder.status.is_dir():
            return
        last = read_status(path)
        if last is not None and last.phase not in ("done", "failed") and last.pid != os.getpid() and _lives(last.pid):
            return
    status = StatusFile(folder.status, rank)
    status.update("failed", 0, message=message, exit_record=exit_record)
    status.close()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


def tell_refusal(config: Config, message: str, error: BaseException | None = None) -> None:
    """A start that was refused before it came to its folder: tell it there, if there is one that nobody trains in."""
    folder, rank = RunFolder(config.run_folder), os.environ.get("RANK", "0")
    if not folder.path.is_dir() or not rank.isdecimal():
        return
    try:
        lock = run_lock.acquire_trainer_lock(folder.path, "a start that failed", 0.0) if rank == "0" else None
    except MegascaleError:
        return
    with contextlib.suppress(OSError):
        write_failed_status(
            folder, int(rank), lock is not None, message, record_of(error) if error is not None else None
        )
        if lock is not None:
            folder.append_event(Event.RUN_FAILED, step=0, message=message)
    if lock is not None:
        lock.release()
