"""Bandwidth of each NIC and port per millisecond, during sampled steps (steps of which all spans are recorded).

A link that is half used over a second may be fully used half of the time. While a rank is in a sampled step, a thread
therefore reads the counters of bytes every millisecond, for at most MAX_SECONDS per step. Each rate is the mean since
the previous reading. A NIC that updates its counters less often shows rates of 0 followed by a high rate.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core.failure import FailureLog
from megascale.observe.store.frames import COUNTER

log = logging.getLogger("megascale.observe.spans")

PERIOD_SECONDS = 0.001  # time between readings
MAX_SECONDS = 5.0  # longest time of readings in a step
_IDLE_SECONDS = 0.02  # time between checks for a sampled step
_MAX_WAITING_ROWS = 200_000
_VIRTUAL_NICS = ("lo", "veth", "docker", "br-", "virbr", "ifb", "dummy")
_MAX_DEVICES = 32

_Row = tuple[int, float, bytes, bytes]  # fields of a COUNTER record: time, value, name, device


class _Link:
    """Open byte counters of one NIC or port.

    Args:
        files: counters of received and of sent bytes.
        scale: bytes per count.

    Attributes:
        limit: bytes per second in one direction, 0 if the kernel does not report it.
        last_bytes: bytes received and sent at the last reading.
        last_time_ns: time of that reading, monotonic nanoseconds.
    """

    def __init__(self, name: str, files: list[Path], scale: int, limit: float) -> None:
        self.name = name
        self.limit = limit
        self.last_time_ns = 0
        self._scale = scale
        self._files: list[int] = []
        try:
            for file in files:
                self._files.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            self.last_bytes = self.read()
        except (OSError, ValueError):
            self.close()
            raise

    def read(self) -> tuple[int, int]:
        """Return the bytes received and sent."""
        received, sent = (int(os.pread(file, 32, 0)) * self._scale for file in self._files)
        return received, sent

    def measure_rates(self) -> list[_Row]:
        """Return the rates of both directions since the last reading."""
        current_bytes = self.read()
        time_ns = time.monotonic_ns()
        seconds = (time_ns - self.last_time_ns) / 1e9
        rows = []
        for name, count, before in zip((b"nic_rx_rate", b"nic_tx_rate"), current_bytes, self.last_bytes, strict=True):
            rows.append((time_ns, max(0, count - before) / seconds, name, self.name.encode()))
        self.last_bytes = current_bytes
        self.last_time_ns = time_ns
        return rows

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


class NicRates:
    """A thread that samples the rates of links. On a machine without links it does not start.

    Args:
        find_sampled_step: returns the sampled step that a rank is in, else 0.
        system: the kernel's folder of devices.
    """

    def __init__(self, find_sampled_step: Callable[[], int], system: Path = Path("/sys")) -> None:
        self._find_sampled_step = find_sampled_step
        self._links = _open_links(system)
        self._rows: list[_Row] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megascale-nic-rates", daemon=True)
        if self._links:
            self._thread.start()

    def take_records(self) -> np.ndarray[Any, Any]:
        """Return the COUNTER records since the last call: nic_rx_rate, nic_tx_rate and nic_rate_limit in bytes/s."""
        with self._lock:
            rows = self._rows
            self._rows = []
        return np.array(rows, COUNTER)

    def _run(self) -> None:
        failures = FailureLog(log, "the sampling of NICs")
        while not self._ending.wait(_IDLE_SECONDS):
            try:
                step = self._find_sampled_step()
                if step:
                    self._sample_step(step)
            except Exception as error:
                failures.note(error, "the next step is sampled again")

    def _sample_step(self, step: int) -> None:
        """Sample until no rank is in this step any more."""
        rows: list[_Row] = []
        begin_ns = time.monotonic_ns()
        for link in self._links:
            link.last_time_ns = begin_ns
            with contextlib.suppress(OSError, ValueError):
                link.last_bytes = link.read()
            if link.limit:
                rows.append((begin_ns, link.limit, b"nic_rate_limit", link.name.encode()))
        while self._find_sampled_step() == step and not self._ending.is_set():
            if time.monotonic_ns() > begin_ns + int(1e9 * MAX_SECONDS):
                self._ending.wait(_IDLE_SECONDS)
                continue
            self._ending.wait(PERIOD_SECONDS)
            for link in self._links:
                with contextlib.suppress(OSError, ValueError):
                    rows += link.measure_rates()
        with self._lock:
            if len(self._rows) < _MAX_WAITING_ROWS:
                self._rows += rows

    def close(self) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        for link in self._links:
            link.close()


def _open_links(system: Path) -> list[_Link]:
    links = []
    for nic in sorted((system / "class" / "net").glob("*"))[:_MAX_DEVICES]:
        if not nic.name.startswith(_VIRTUAL_NICS):
            megabits = _read_leading_number(nic / "speed")  # -1: unknown
            files = [nic / "statistics" / "rx_bytes", nic / "statistics" / "tx_bytes"]
            with contextlib.suppress(OSError, ValueError):
                links.append(_Link(nic.name, files, scale=1, limit=max(0.0, megabits) * 1e6 / 8))
    for port in sorted((system / "class" / "infiniband").glob("*/ports/*"))[:_MAX_DEVICES]:
        gigabits = _read_leading_number(port / "rate")  # "400 Gb/sec (4X NDR)"
        files = [port / "counters" / "port_rcv_data", port / "counters" / "port_xmit_data"]  # words of four bytes
        name = f"{port.parent.parent.name}/{port.name}"
        with contextlib.suppress(OSError, ValueError):
            links.append(_Link(name, files, scale=4, limit=max(0.0, gigabits) * 1e9 / 8))
    return links


def _read_leading_number(file: Path) -> float:
    """Return the number at the beginning of a file, 0 without one."""
    try:
        match = re.match(r"-?\d+(\.\d+)?", file.read_text(errors="replace"))
    except OSError:
        return 0.0
    return float(match[0]) if match else 0.0
