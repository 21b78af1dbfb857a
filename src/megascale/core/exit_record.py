"""The record of why a trainer process ended. The process writes it, and the driver's rules read it.

The record names the fault by a code. The human-readable message is a separate field (`Status.message`,
`Worker.error`) that no rule parses.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeVar

from msgspec import Meta

from megascale.core.failure import DISK_FULL_ERRNOS, find_errno, iterate_causes
from megascale.errors import FitError, MegascaleError

Error = TypeVar("Error", bound=BaseException)


class ExitKind(StrEnum):
    """The fault that ended a process. Comments name the `ExitRecord.subject` of a kind that has one."""

    UNKNOWN = ""  # the process recorded nothing
    DISK_FULL = "disk_full"  # subject: the full disk, "" if unknown
    PORT_TAKEN = "port_taken"
    OUT_OF_MEMORY = "out_of_memory"  # on the device or in Python
    HOST_MEMORY = "host_memory"  # the host has less memory than the settings need
    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_GRADIENT = "nonfinite_gradient"
    WEIGHTS_CHANGED = "weights_changed"  # subject: the changed tensors
    WRONG_BITS = "wrong_bits"  # replicas disagree; subject: the tensor that differs
    LOST_PEER = "lost_peer"  # another rank ended or hangs
    REFUSED = "refused"  # an error with a message for people; the exit code names its class
    INTERRUPTED = "interrupted"
    EXCEPTION = "exception"  # an exception that no code of this package expects


@dataclass(frozen=True)
class ExitRecord:
    """Why a process ended. The types are the schema of the record in status files and heartbeats.

    Attributes:
        rank: the rank at fault, -1 for the rank that wrote the record.
        step: the step in which the fault occurred, 0 if it was outside of a step or the step is unknown.
        subject: the tensor, device or disk that is at fault, "" if unknown.
    """

    kind: ExitKind = ExitKind.UNKNOWN
    rank: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    step: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0
    subject: Annotated[str, Meta(max_length=200)] = ""


NO_RECORD = ExitRecord()


def attach_record(error: Error, kind: ExitKind, *, rank: int = -1, step: int = 0, subject: str = "") -> Error:
    """Attach the record of a fault to the exception that reports it, and return the exception."""
    error.exit_record = ExitRecord(kind, rank, step, subject[:200])  # type: ignore[attr-defined]
    return error


def find_exit_record(error: BaseException) -> ExitRecord:
    """Return the record attached to an exception or to one of its causes.

    Without an attached record, make one from the types of these exceptions and their error number.
    """
    causes = list(iterate_causes(error))
    for cause in causes:
        record = getattr(cause, "exit_record", None)
        if isinstance(record, ExitRecord):
            return record
    return ExitRecord(_classify_exit(causes, find_errno(error)))


def _classify_exit(causes: list[BaseException], errno_value: int) -> ExitKind:
    """Return the kind of fault of an exception and its causes. `errno_value` is 0 if there is no error number."""
    if errno_value in DISK_FULL_ERRNOS:
        return ExitKind.DISK_FULL
    if errno_value == errno.EADDRINUSE:
        return ExitKind.PORT_TAKEN
    if errno_value == errno.ENOMEM:
        # A FitError says that the settings need more memory than the host has.
        is_settings_error = any(isinstance(cause, FitError) for cause in causes)
        if is_settings_error:
            return ExitKind.HOST_MEMORY
        return ExitKind.OUT_OF_MEMORY
    # torch.OutOfMemoryError is known by its name, since this package does not import torch.
    if any(isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError" for cause in causes):
        return ExitKind.OUT_OF_MEMORY
    error = next((cause for cause in causes if not isinstance(cause, SystemExit)), None)
    if error is None:
        return ExitKind.UNKNOWN
    if isinstance(error, KeyboardInterrupt):
        return ExitKind.INTERRUPTED
    if isinstance(error, MegascaleError):
        return ExitKind.REFUSED
    return ExitKind.EXCEPTION
