"""Bandwidth of each NIC and port by the millisecond, beside the link's limit, while a rank's spans are all kept.

Second by second a link that is half used may be a link that is full half the time. A thread reads the counters of
bytes every millisecond while a ring says that its rank is in such a step, for at most MOST_SECONDS of it. What a NIC
counts in coarser steps shows so: a rate of 0 and then a high one. Where reading takes longer, intervals are longer; a
rate is over the interval that it was.
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

PERIOD = 0.001
MOST_SECONDS = 5.0  # of a step
_IDLE = 0.02  # seconds between looks whether a sample has begun
_MOST_ROWS = 200_000  # that wait to be taken
_SKIPPED = ("lo", "veth", "docker", "br-", "virbr", "ifb", "dummy")
_DEVICES = 32


class _Nic:
    """Counters of bytes of one link, open.

    Attributes:
        limit: bytes a second in one direction, 0 if the kernel does not say it.
    """

    def __init__(self, name: str, files: list[Path], scale: int, limit: float) -> None:
        self.name, self._scale, self.limit = name, scale, limit
        self._files: list[int] = []
        try:
            for file in files:
                self._files.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
            self.last = self.read()
        except (OSError, ValueError):
            self.close()
            raise

    def read(self) -> tuple[int, int]:
        """Bytes received and sent."""
        received, sent = (int(os.pread(file, 32, 0)) * self._scale for file in self._files)
        return received, sent

    def close(self) -> None:
        """Let go of the files."""
        while self._files:
            os.close(self._files.pop())


class NicRates:
    """The thread; does nothing but look where there is no NIC.

    Args:
        keeping: what says which step is sampled now, 0 while none is.
        system: where the kernel shows its devices.
    """

    def __init__(self, keeping: Callable[[], int], system: Path = Path("/sys")) -> None:
        self._keeping = keeping
        self._nics = _open_links(system)
        self._rows: list[tuple[int, str, float, str]] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megascale-nic-rates", daemon=True)
        if self._nics:
            self._thread.start()

    def take(self) -> np.ndarray[Any, Any]:
        """COUNTER records since the last call: nic_rx_rate, nic_tx_rate and nic_rate_limit, bytes a second."""
        with self._lock:
            rows, self._rows = self._rows, []
        records = np.zeros(len(rows), COUNTER)
        if rows:
            times, names, values, devices = zip(*rows, strict=True)
            records["time_ns"], records["value"] = times, values
            records["name"], records["device"] = [n.encode() for n in names], [d.encode()[:16] for d in devices]
        return records

    def _run(self) -> None:
        failures = FailureLog(log, "the sampling of NICs")
        while not self._ending.wait(_IDLE):
            try:
                if step := self._keeping():
                    self._sample(step)
            except Exception as error:
                failures.note(error, "the next step is sampled again")

    def _sample(self, step: int) -> None:
        """Read until the step has ended, and its rank is in no other that is sampled too."""
        found: list[tuple[int, str, float, str]] = []
        before = time.monotonic_ns()
        until = before + int(1e9 * MOST_SECONDS)
        for nic in self._nics:
            with contextlib.suppress(OSError, ValueError):
                nic.last = nic.read()
            if nic.limit:
                found.append((before, "nic_rate_limit", nic.limit, nic.name))
        at = dict.fromkeys(self._nics, before)
        while self._keeping() == step and not self._ending.is_set():
            now = time.monotonic_ns()
            if now > until:
                self._ending.wait(_IDLE)
                continue
            self._ending.wait(PERIOD)
            for nic in self._nics:
                with contextlib.suppress(OSError, ValueError):
                    both, now = nic.read(), time.monotonic_ns()
                    seconds = (now - at[nic]) / 1e9
                    for name, new, old in zip(("nic_rx_rate", "nic_tx_rate"), both, nic.last, strict=True):
                        found.append((now, name, max(0, new - old) / seconds, nic.name))
                    nic.last, at[nic] = both, now
        with self._lock:
            if len(self._rows) < _MOST_ROWS:
                self._rows += found

    def close(self) -> None:
        """End the thread."""
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join()
        for nic in self._nics:
            nic.close()


def _open_links(system: Path) -> list[_Nic]:
    found = []
    for nic in sorted((system / "class" / "net").glob("*"))[:_DEVICES]:
        if not nic.name.startswith(_SKIPPED):
            speed = _number(nic / "speed")  # Mbit/s, -1: unknown
            files = [nic / "statistics" / "rx_bytes", nic / "statistics" / "tx_bytes"]
            with contextlib.suppress(OSError, ValueError):
                found.append(_Nic(nic.name, files, 1, max(0.0, speed) * 1e6 / 8))
    for port in sorted((system / "class" / "infiniband").glob("*/ports/*"))[:_DEVICES]:
        gigabits = _number(port / "rate")  # "400 Gb/sec (4X NDR)"
        files = [port / "counters" / "port_rcv_data", port / "counters" / "port_xmit_data"]  # words of four bytes
        with contextlib.suppress(OSError, ValueError):
            found.append(_Nic(f"{port.parent.parent.name}/{port.name}", files, 4, max(0.0, gigabits) * 1e9 / 8))
    return found


def _number(file: Path) -> float:
    """The number that a file begins with, 0 if it has none."""
    try:
        told = re.match(r"-?\d+(\.\d+)?", file.read_text(errors="replace"))
    except OSError:
        return 0.0
    return float(told[0]) if told else 0.0
