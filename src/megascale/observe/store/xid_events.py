"""Xid errors of GPUs: numbers by which NVIDIA's driver reports faults."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from megascale.core.gpus import OFF_BUS_XID

_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.\d)?\): (?P<xid>\d+)")
_GPU_LOST = re.compile(r"NVRM: The NVIDIA GPU (?P<bus>[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})\.\d")
_LOG_RECORD_BYTES = 8192  # largest record of the kernel's log
_MAX_LOG_RECORDS = 1000  # records read at once
_MAX_EVENTS = 64  # events read at once


def parse_xid(line: str) -> tuple[str, int] | None:
    """Return PCI address (domain:bus:device) and Xid number in a line of the kernel's log; None without an Xid.

    The message that a GPU has fallen off the bus counts as Xid 79, although the driver does not log a number.
    """
    match = _XID.search(line)
    if match:
        return match["bus"].lower(), int(match["xid"])
    match = _GPU_LOST.search(line)
    if match:
        return (match["bus"].lower(), OFF_BUS_XID)
    return None


class XidEvents:
    """Reader of new Xid errors of a host's GPUs, from NVML's events or, if NVML cannot report them, the kernel's log.

    Args:
        nvml: the module pynvml after nvmlInit, or None.
        kernel_log: device of the kernel's log, which is read from its current end.
    """

    def __init__(self, nvml: Any, gpus: list[Any], kernel_log: Path = Path("/dev/kmsg")) -> None:
        self._nvml = nvml
        self._event_set: Any = None
        self._device_names: dict[str, str] = {}  # gpuN by short PCI address
        self._log = -1  # file descriptor; -1: not open
        if nvml is not None:
            for index, gpu in enumerate(gpus):
                with contextlib.suppress(Exception):  # NVML has its own error classes
                    bus_id = nvml.nvmlDeviceGetPciInfo(gpu).busId  # such as 00000000:3B:00.0
                    address = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
                    address = address.lower().partition(".")[0]
                    self._device_names[_shorten_domain(address)] = f"gpu{index}"
            with contextlib.suppress(Exception):
                events = nvml.nvmlEventSetCreate()
                for gpu in gpus:
                    nvml.nvmlDeviceRegisterEvents(gpu, nvml.nvmlEventTypeXidCriticalError, events)
                self._event_set = events
        if self._event_set is None:
            with contextlib.suppress(OSError):
                self._log = os.open(kernel_log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                os.lseek(self._log, 0, os.SEEK_END)

    def read_new(self) -> list[tuple[str, int]]:
        """Return (device, Xid) of the errors since the last call.

        The device is gpuN, or the PCI address of a GPU that NVML does not list.
        """
        if self._event_set is not None:
            return self._read_nvml()
        return self._read_log()

    def _read_nvml(self) -> list[tuple[str, int]]:
        nvml = self._nvml
        errors = []
        with contextlib.suppress(Exception):  # NVML raises an error once it has no further event
            for _ in range(_MAX_EVENTS):
                event = nvml.nvmlEventSetWait_v2(self._event_set, 0)
                if event.eventType & nvml.nvmlEventTypeXidCriticalError:
                    errors.append((self._name_device(event.device), int(event.eventData)))
        return errors

    def _name_device(self, gpu: Any) -> str:
        with contextlib.suppress(Exception):
            return f"gpu{int(self._nvml.nvmlDeviceGetIndex(gpu))}"
        return "gpu"  # it has fallen off the bus; the kernel's log has its address

    def _read_log(self) -> list[tuple[str, int]]:
        errors: list[tuple[str, int]] = []
        if self._log < 0:
            return errors
        for _ in range(_MAX_LOG_RECORDS):
            try:
                record = os.read(self._log, _LOG_RECORD_BYTES)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:
                break
            if not record:
                break
            for line in record.decode(errors="replace").splitlines():
                error = parse_xid(line)
                if error is not None:
                    address, xid = error
                    errors.append((self._device_names.get(_shorten_domain(address), address), xid))
        return errors

    def close(self) -> None:
        """Close the kernel's log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def _shorten_domain(address: str) -> str:
    """Return a PCI address with the last four digits of its domain."""
    domain, _, bus = address.partition(":")
    return f"{domain[-4:]}:{bus}"
