"""The record of why a trainer process ended, which the process writes and the driver's rules read.

A fault crosses process boundaries as a code. The text for people is next to the record (`Status.message`,
`Worker.error`), and no rule reads it back.
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
    """The fault that ended a process."""

    UNKNOWN = ""  # the process recorded nothing
    DISK_FULL = "disk_full"  # subject: the disk, "" if unknown
    PORT_TAKEN = "port_taken"
    OUT_OF_MEMORY = "out_of_memory"  # on the device or in Python
    HOST_MEMORY = "host_memory"  # the host has too little memory for what the settings need
    NONFINITE_LOSS = "nonfinite_loss"
    NONFINITE_GRADIENT = "nonfinite_gradient"
    WEIGHTS_CHANGED = "weights_changed"  # subject: the tensors
    WRONG_BITS = "wrong_bits"  # another replica computed other bits; subject: the tensor
    LOST_PEER = "lost_peer"  # another rank ended or hangs
    REFUSED = "refused"  # an error with a message for people; the exit code names its class
    INTERRUPTED = "interrupted"
    EXCEPTION = "exception"  # an exception that no code of this package expects


@dataclass(frozen=True)
class ExitRecord:
    """Why a process ended. The types are the schema of the record in status files and heartbeats.

    Attributes:
        kind: the fault.
        rank: the rank where the fault is, -1 if it is the rank that ended.
        step: the step in which the fault occurred, 0 if it was outside of a step or the step is unknown.
        subject: the tensor, device or disk that is at fault, "" if unknown.
    """

    kind: ExitKind = ExitKind.UNKNOWN
    rank: Annotated[int, Meta(ge=-1, lt=1 << 31)] = -1
    step: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0
    subject: Annotated[str, Meta(max_length=200)] = ""


NO_RECORD = ExitRecord()


def attach_record(error: Error, kind: ExitKind, *, rank: int = -1, step: int = 0, subject: str = "") -> Error:
    """Attach the record of its fault to an exception that is about to be raised, and return the exception."""
    error.exit_record = ExitRecord(kind, rank, step, subject[:200])  # type: ignore[attr-defined]
    return error


def record_of(error: BaseException) -> ExitRecord:
    """Return the record attached to an exception or to one that caused it, else one by its type and error number."""
    links = list(iterate_causes(error))
    for link in links:
        record = getattr(link, "exit_record", None)
        if isinstance(record, ExitRecord):
            return record
    return ExitRecord(_classify(links, find_errno(error)))


def _classify(links: list[BaseException], number: int) -> ExitKind:
    if number in DISK_FULL_ERRNOS:
        return ExitKind.DISK_FULL
    if number == errno.EADDRINUSE:
        return ExitKind.PORT_TAKEN
    if number == errno.ENOMEM:
        is_refusal = any(isinstance(link, FitError) for link in links)
        if is_refusal:
            return ExitKind.HOST_MEMORY
        return ExitKind.OUT_OF_MEMORY
    # torch.OutOfMemoryError is known by its name, since this package does not import torch.
    if any(isinstance(link, MemoryError) or type(link).__name__ == "OutOfMemoryError" for link in links):
        return ExitKind.OUT_OF_MEMORY
    error = next((link for link in links if not isinstance(link, SystemExit)), None)
    if error is None:
        return ExitKind.UNKNOWN
    if isinstance(error, KeyboardInterrupt):
        return ExitKind.INTERRUPTED
    if isinstance(error, MegascaleError):
        return ExitKind.REFUSED
    return ExitKind.EXCEPTION
