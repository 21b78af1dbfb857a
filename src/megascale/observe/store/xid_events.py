"""Xid errors of a host's GPUs as they come: from NVML's events, else from the lines that the kernel logs."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from megascale.core.xid import OFF_BUS_XID

_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.\d)?\): (?P<xid>\d+)")
_GONE = re.compile(r"NVRM: The NVIDIA GPU (?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\.\d")
_RECORD = 8192  # bytes that a record of the kernel's log may have
_MOST = 1000  # records that are read at once
_EVENTS = 64  # events that are


def xid_of(line: str) -> tuple[str, int] | None:
    """PCI address (domain:bus:device) and number of the Xid that a line of the kernel's log tells of, if it does.

    A GPU that has fallen off the bus is Xid 79 also where the driver tells it without a number.
    """
    if found := _XID.search(line):
        return found["bus"].lower(), int(found["xid"])
    if found := _GONE.search(line):
        return found["bus"].lower(), OFF_BUS_XID
    return None


class XidEvents:
    """Args:
    nvml: the module pynvml after nvmlInit, None without one.
    gpus: its handles.
    kernel_log: read where NVML tells no events; only what comes from now on.
    """

    def __init__(self, nvml: Any, gpus: list[Any], kernel_log: Path = Path("/dev/kmsg")) -> None:
        self._nvml, self._gpus, self._set = nvml, gpus, None
        self._names: dict[str, str] = {}
        self._log = -1
        if nvml is not None:
            for index, gpu in enumerate(gpus):
                with contextlib.suppress(Exception):  # NVML's errors are its own
                    bus = nvml.nvmlDeviceGetPciInfo(gpu).busId
                    text = (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()  # 00000000:3B:00.0
                    self._names[_short(text.partition(".")[0])] = f"gpu{index}"
            with contextlib.suppress(Exception):
                events = nvml.nvmlEventSetCreate()
                for gpu in gpus:
                    nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
                self._set = events
        if self._set is None:
            with contextlib.suppress(OSError):
                self._log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._log, 0, os.SEEK_END)

    def take(self) -> list[tuple[str, int]]:
        """(device, Xid) since the last call. The device is gpuN, or its PCI address where NVML does not name it."""
        return self._from_nvml() if self._set is not None else self._from_log()

    def _from_nvml(self) -> list[tuple[str, int]]:
        n, found = self._nvml, []
        with contextlib.suppress(Exception):  # no more events
            for _ in range(_EVENTS):
                event = n.nvmlEventSetWait_v2(self._set, 0)
                if event.eventType & n.nvmlEventTypeXidCriticalError:
                    found.append((self._device(event.device), int(event.eventData)))
        return found

    def _device(self, gpu: Any) -> str:
        with contextlib.suppress(Exception):
            return f"gpu{int(self._nvml.nvmlDeviceGetIndex(gpu))}"
        return "gpu"  # off the bus: which it was is in the kernel's log

    def _from_log(self) -> list[tuple[str, int]]:
        found = []
        for _ in range(_MOST if self._log >= 0 else 0):
            try:
                record = os.read(self._log, _RECORD)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            if not record:
                break
            for line in record.decode(errors="replace").splitlines():
                if told := xid_of(line):
                    found.append((self._names.get(_short(told[0]), told[0]), told[1]))
        return found

    def close(self) -> None:
        """Look no more."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def _short(bus: str) -> str:
    """A PCI address with the domain's last four digits."""
    domain, _, rest = bus.partition(":")
    return f"{domain[-4:]}:{rest}"
