"""Measurements of a node by its agent: network traffic, and descriptions of hardware and software."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from megascale.core.gpus import visible_gpu_names
from megascale.resilience.protocol.heartbeat import NetworkTraffic

log = logging.getLogger("megascale.agent")
SAMPLE_PERIOD = 0.01  # seconds between two samples of the network counters
_MAX_INTERFACES = 64
_CLOSE_SECONDS = 1.0  # for the sampling thread to end
_VERSION_CHARACTERS = 200  # of the NVIDIA driver's version
# Names of the counters' files: received bytes, transmitted bytes, then errors.
_COUNTERS = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped")
_INFINIBAND_COUNTERS = ("port_rcv_data", "port_xmit_data", "port_rcv_errors", "port_xmit_discards")
_PACKAGES = ("megascale", "torch", "numpy", "triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12")


class NetworkInterface:
    """Traffic of one network interface, measured from its counters.

    Args:
        files: open files of the counters: received bytes, transmitted bytes, then errors.
        scale: bytes per unit of the first two counters. InfiniBand counts words of four bytes.
    """

    def __init__(self, name: str, files: list[Any], scale: int = 1) -> None:
        self.name = name
        self._files = files
        self._scale = scale
        self._first: list[int] = []  # counters at the start of the interval that `summarise` reports
        self._first_time = 0.0
        self._last: list[int] = []  # counters of the last sample
        self._last_time = 0.0
        self._rx_rates: list[float] = []  # bytes/s between successive samples
        self._tx_rates: list[float] = []

    def read(self) -> list[int]:
        """Return the counters. The call may block for long if the adapter hangs."""
        values = []
        for file in self._files:
            file.seek(0)
            values.append(int(file.read()))
        return [values[0] * self._scale, values[1] * self._scale] + values[2:]

    def add_sample(self, values: list[int], current_time: float) -> None:
        """Add counters that were read at `current_time`."""
        if not self._last:
            self._first = values
            self._first_time = current_time
        else:
            seconds = current_time - self._last_time
            self._rx_rates.append((values[0] - self._last[0]) / seconds)
            self._tx_rates.append((values[1] - self._last[1]) / seconds)
        self._last = values
        self._last_time = current_time

    def summarise(self) -> NetworkTraffic | None:
        """Return the traffic since the last call, or None without a sample."""
        if not self._rx_rates:
            return None
        seconds = self._last_time - self._first_time
        traffic = NetworkTraffic(
            self.name,
            rx_bytes_per_s=max(0.0, (self._last[0] - self._first[0]) / seconds),
            tx_bytes_per_s=max(0.0, (self._last[1] - self._first[1]) / seconds),
            rx_min=max(0.0, min(self._rx_rates)),
            rx_max=max(self._rx_rates),
            tx_min=max(0.0, min(self._tx_rates)),
            tx_max=max(self._tx_rates),
            errors=max(0, sum(self._last[2:]) - sum(self._first[2:])),
            samples=len(self._rx_rates),
        )
        self._first = self._last
        self._first_time = self._last_time
        self._rx_rates = []
        self._tx_rates = []
        return traffic


class TrafficSampler:
    """Thread that samples the counters of all network interfaces."""

    def __init__(self, period: float = SAMPLE_PERIOD) -> None:
        self._period = period
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._interfaces = open_interfaces()
        self._thread = threading.Thread(target=self._run, name="megascale-traffic", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        """Sample all interfaces until `close`. Runs in the thread."""
        while not self._stopped.wait(self._period):
            for interface in list(self._interfaces):
                try:
                    current_time = time.monotonic()
                    values = interface.read()  # without the lock, so that a hanging adapter does not delay heartbeats
                    with self._lock:
                        interface.add_sample(values, current_time)
                except Exception:  # the interface was removed, or a counter is not a number
                    log.debug("interface %s is no longer sampled", interface.name, exc_info=True)
                    with self._lock:
                        self._interfaces.remove(interface)

    def take(self) -> tuple[NetworkTraffic, ...]:
        """Return the traffic of each interface since the last call."""
        with self._lock:
            summaries = [interface.summarise() for interface in self._interfaces]
        return tuple(summary for summary in summaries if summary is not None)

    def close(self) -> None:
        """End the thread, without waiting long for an adapter that hangs."""
        self._stopped.set()
        self._thread.join(_CLOSE_SECONDS)


def open_interfaces() -> list[NetworkInterface]:
    """Open the counters of all network interfaces and InfiniBand ports."""
    interfaces = []
    for folder in sorted(Path("/sys/class/net").glob("*/statistics")):
        interfaces.append(_open_interface(folder.parent.name, folder, _COUNTERS, scale=1))
    for folder in sorted(Path("/sys/class/infiniband").glob("*/ports/*/counters")):
        name = f"{folder.parts[-4]}/{folder.parts[-2]}"
        interfaces.append(_open_interface(name, folder, _INFINIBAND_COUNTERS, scale=4))
    return [interface for interface in interfaces if interface is not None][:_MAX_INTERFACES]


def _open_interface(name: str, folder: Path, counters: Sequence[str], scale: int) -> NetworkInterface | None:
    """Return an interface with its open counters, None if one of them is missing."""
    try:
        return NetworkInterface(name, [open(folder / counter) for counter in counters], scale)
    except OSError:
        return None


def read_versions() -> dict[str, str]:
    """Return the versions of software that affects a run, by name and without importing it."""
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        versions["nvidia-driver"] = driver.read_text().splitlines()[0][:_VERSION_CHARACTERS]
    return versions


def describe_hardware() -> dict[str, str]:
    """Return a description of processor, memory and GPUs by key."""
    cpu_info = ""  # Systems other than Linux lack the file.
    if Path("/proc/cpuinfo").exists():
        cpu_info = Path("/proc/cpuinfo").read_text()
    models = [line.partition(":")[2].strip() for line in cpu_info.splitlines() if line.startswith("model name")]
    memory = _read_memory_bytes()
    description = {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(os.cpu_count()),
        "memory_gib": f"{memory / 2**30:.1f}",
        "memory_bytes": str(memory),  # by which the driver recognises a process that was killed for lack of memory
    }
    gpus = count_gpus()
    if gpus:
        description["gpus"] = str(gpus)
    return description


def _read_memory_bytes() -> int:
    """Return the memory of the machine in bytes, or the limit of this process's container if it is lower."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max" means no limit
            memory = min(memory, int(Path(file).read_text()))
    return memory


def count_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use, from device files and CUDA_VISIBLE_DEVICES."""
    devices = [path for path in Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdigit()]
    return len(visible_gpu_names(len(devices)))
