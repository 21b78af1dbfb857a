"""A save that failed, in one paragraph. No torch."""

from __future__ import annotations

from megascale.checkpoint.storage.base import Storage
from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.failure import DISK_FULL_ERRNOS
from megascale.errors import TrainingError


class OtherOwner(OSError):
    """The folder of checkpoints was given to another run since this one started."""


def explain(error: Exception, storage: Storage, needed: int) -> TrainingError:
    """A failed save in one paragraph."""
    if isinstance(error, OSError) and error.errno in DISK_FULL_ERRNOS:
        free = storage.free()
        room = f"{free:,} are free" if free is not None else "less is free"
        if free is not None and free >= needed:
            room = f"its index, and {room}"
        full = TrainingError(
            f"the disk of {storage.url!r} is full: a checkpoint needs {needed:,} bytes and {room}; the previous "
            "checkpoint stays as it is. Make room, lower checkpoint.keep, or put train.runs on a larger disk"
        )
        full.errno = error.errno
        return attach_record(full, ExitKind.DISK_FULL, subject=storage.url)
    if isinstance(error, OtherOwner):
        return TrainingError(str(error.strerror))
    why = getattr(error, "strerror", None) or repr(error)
    return TrainingError(
        f"the checkpoint could not be written to {storage.url!r}: {why}; the previous checkpoint stays as it is. "
        "Check the folder's rights and the storage, or put train.runs elsewhere"
    )
