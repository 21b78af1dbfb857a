"""Locks of a run, which rank 0 takes at a start, and the status of a start that fails or is refused."""

from __future__ import annotations

import contextlib
import os

from megascale.checkpoint.storage.opening import local_folder
from megascale.config import Config
from megascale.core import run_lock
from megascale.core.events import Event
from megascale.core.exit_record import ExitRecord, find_exit_record
from megascale.core.run_lock import RunLock
from megascale.core.status import StatusFile, read_status
from megascale.core.terminal import print_error
from megascale.errors import MegascaleError
from megascale.train.run_folder import RunFolder


def take_run_locks(config: Config) -> list[RunLock]:
    """Take the locks of the run folder, and of a local checkpoint folder that other runs might write to.

    Raises RunBusyError if another training holds one of them; then no lock is kept.
    """
    grace_period = run_lock.GRACE_PERIOD
    if run_lock.started_by_driver():
        grace_period = min(60.0, config.rendezvous.timeout / 2)  # ranks of the previous attempt may still be ending
    folders = [config.run_folder]
    location, checkpoints = config.checkpoint.location, config.run_folder / "checkpoints"
    if location is not None:
        shared_folder = local_folder(location)
        if shared_folder is not None:
            folders.append(shared_folder)
    elif checkpoints.is_symlink():
        # Nodes with run folders of their own share this folder, and a node without contact to the driver may use it.
        folders.append(checkpoints.resolve())
    with contextlib.ExitStack() as stack:
        locks = [
            stack.enter_context(run_lock.acquire_trainer_lock(folder, "megascale train", grace_period))
            for folder in folders
        ]
        stack.pop_all()
    for lock in locks:
        if lock.warning:
            print_error(lock.warning)
    return locks


def write_failed_status(
    folder: RunFolder, rank: int, owns_folder: bool, message: str, exit_record: ExitRecord | None = None
) -> None:
    """Write the status of a rank that ended before it had a status file of its own.

    Args:
        owns_folder: whether no other training uses the folder. Otherwise nothing is created, and the status of a rank
            that runs on this host is left unchanged.
    """
    if not owns_folder:
        if not folder.status.is_dir():
            return
        status = read_status(folder.status / f"rank-{rank}.status")
        if status is not None:
            has_ended = status.phase in ("done", "failed")
            if not has_ended and status.pid != os.getpid() and _is_running(status.pid):
                return
    status_file = StatusFile(folder.status, rank)
    status_file.update("failed", 0, message=message, exit_record=exit_record)
    status_file.close()


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass  # the process belongs to another user
    return True


def record_refusal(config: Config, message: str, error: BaseException | None = None) -> None:
    """Write status and event of a start that was refused before it took its locks.

    Do nothing if the run folder does not exist or a training uses it.
    """
    folder = RunFolder(config.run_folder)
    rank = os.environ.get("RANK", "0")
    if not folder.path.is_dir() or not rank.isdecimal():
        return
    lock = None
    if rank == "0":
        try:
            lock = run_lock.acquire_trainer_lock(folder.path, "a start that failed", 0.0)
        except MegascaleError:
            return
    with contextlib.suppress(OSError):
        exit_record = find_exit_record(error) if error is not None else None
        write_failed_status(folder, int(rank), lock is not None, message, exit_record)
        if lock is not None:
            folder.append_event(Event.RUN_FAILED, step=0, message=message)
    if lock is not None:
        lock.release()
