"""The table of messages of other programs (Python, PyTorch, CUDA, NCCL, the kernel) that indicate a fault.

This package's processes record their faults as codes (core/exit_record.py). If a process could not record its fault,
the patterns of this table are searched in its exception and in the end of its log. Some are searched in all lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum


class Fault(StrEnum):
    """The fault that a message indicates."""

    OUT_OF_MEMORY = "out_of_memory"
    CODE = "code"
    DEVICE = "device"
    NETWORK = "network"
    CRASH = "crash"


@dataclass(frozen=True)
class ForeignMessage:
    """A message of another program.

    Attributes:
        pattern: regular expression of the message.
        example: a line that the pattern matches.
    """

    source: str
    pattern: str
    fault: Fault
    example: str


# Messages about the end of a process. The first row that matches counts.
ENDS = (
    ForeignMessage(
        source="PyTorch",
        pattern=r"out of memory|OutOfMemoryError",
        fault=Fault.OUT_OF_MEMORY,
        example="torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    ),
    ForeignMessage(
        source="Python and libc",
        pattern=r"can't allocate memory|Cannot allocate memory|MemoryError",
        fault=Fault.OUT_OF_MEMORY,
        example="OSError: [Errno 12] Cannot allocate memory",
    ),
    ForeignMessage(
        source="CUDA",
        pattern=r"device-side assert",
        fault=Fault.CODE,
        example="RuntimeError: CUDA error: device-side assert triggered",
    ),
    ForeignMessage(
        source="CUDA, cuBLAS, cuDNN",
        pattern=r"CUDA error|CUBLAS_STATUS|cuDNN error",
        fault=Fault.DEVICE,
        example="RuntimeError: CUDA error: an illegal memory access was encountered",
    ),
    ForeignMessage(
        source="NVIDIA driver",
        pattern=r"uncorrectable|NVLink|Xid",
        fault=Fault.DEVICE,
        example="NVRM: Xid (PCI:0000:81:00): 79, pid=1234, GPU has fallen off the bus.",
    ),
    ForeignMessage(
        source="NCCL",
        pattern=r"NCCL error|ncclSystemError|ncclRemoteError",
        fault=Fault.NETWORK,
        example="torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2026, ncclSystemError",
    ),
    ForeignMessage(
        source="kernel and gloo",
        pattern=r"Connection (reset|refused|closed)|ECONNRESET|Broken pipe",
        fault=Fault.NETWORK,
        example="RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:24510",
    ),
    ForeignMessage(
        source="C library",
        pattern=r"Segmentation fault|Bus error|Illegal instruction",
        fault=Fault.CRASH,
        example="Fatal Python error: Segmentation fault",
    ),
)

# Lines that indicate broken hardware even while the processes run.
BROKEN_HARDWARE = (
    ForeignMessage(
        source="NVIDIA driver",
        pattern=r"(?i)uncorrectable|double.bit|fallen off the bus",
        fault=Fault.DEVICE,
        example="NVRM: GPU 0000:81:00.0: GPU has fallen off the bus.",
    ),
    ForeignMessage(
        source="NVIDIA driver",
        pattern=r"(?i)Xid.*\b(48|64|74|79|92|94|95|119|120)\b",
        fault=Fault.DEVICE,
        example="NVRM: Xid (PCI:0000:41:00): 48, pid=77, Double Bit ECC Error",
    ),
)

# The line at which the message about a process's end begins.
END_MARK = ForeignMessage(
    source="Python and C++",
    pattern=r"Traceback \(most recent call last\)|terminate called|Fatal Python error",
    fault=Fault.CODE,
    example="Traceback (most recent call last):",
)
# The line that names an exception. Later lines, such as a library's advice, say less about the fault.
EXCEPTION_LINE = ForeignMessage(
    source="Python",
    pattern=r"^(?:\[rank\d+\]: )?(?:[\w.]+(?:Error|Exception|Interrupt|Exit)\b|error:|Fatal)",
    fault=Fault.CODE,
    example="KeyError: 'text'",
)


def find_fault(text: str, messages: tuple[ForeignMessage, ...] = ENDS) -> Fault | None:
    """Return the fault of the first row whose pattern occurs in `text`, None if there is none."""
    for message in messages:
        if re.search(message.pattern, text):
            return message.fault
    return None
