"""What an agent measures about its node: network counters every few milliseconds, facts. GPUs: gpu_health.py."""

from __future__ import annotations

import contextlib
import logging
import platform
import threading
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from megascale.core.gpu_names import visible_gpu_names
from megascale.resilience.protocol.heartbeat import NetworkTraffic

log = logging.getLogger("megascale.agent")
PERIOD = 0.01  # seconds between samples
_COUNTERS = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped")


@dataclass
class _Interface:
    name: str
    files: list[Any]
    scale: int = 1  # InfiniBand counts words of four bytes
    last: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    began: float = 0.0
    at: float = 0.0
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    samples: int = 0

    def read(self) -> list[int]:
        values = []
        for file in self.files:
            file.seek(0)
            values.append(int(file.read()))
        return [values[0] * self.scale, values[1] * self.scale, *values[2:]]

    def add(self, values: list[int], now: float) -> None:
        if not self.last:
            self.last, self.first, self.began, self.at = values, values, now, now
            return
        rates = [(new - old) / (now - self.at) for new, old in zip(values[:2], self.last[:2], strict=True)]
        self.low = [min(pair) for pair in zip(self.low, rates, strict=True)] if self.samples else rates
        self.high = [max(pair) for pair in zip(self.high, rates, strict=True)] if self.samples else rates
        self.last, self.at, self.samples = values, now, self.samples + 1

    def summarise(self) -> NetworkTraffic | None:
        if not self.samples:
            return None
        span = self.at - self.began
        mean = [max(0.0, (new - old) / span) for new, old in zip(self.last[:2], self.first[:2], strict=True)]
        found = NetworkTraffic(
            self.name,
            mean[0],
            mean[1],
            max(0.0, self.low[0]),
            self.high[0],
            max(0.0, self.low[1]),
            self.high[1],
            max(0, sum(self.last[2:]) - sum(self.first[2:])),
            self.samples,
        )
        self.first, self.began, self.samples = self.last, self.at, 0
        return found


class TrafficSampler:
    """Samples every interface in a thread of its own; `take` sums up since the last call."""

    def __init__(self, period: float = PERIOD) -> None:
        self._period = period
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._interfaces = _interfaces()
        self._thread = threading.Thread(target=self._run, name="megascale-traffic", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.wait(self._period):
            for interface in list(self._interfaces):
                try:  # without the lock: an adapter that hangs answers late, and heartbeats must not wait for it
                    now, values = time.monotonic(), interface.read()
                    with self._lock:
                        interface.add(values, now)
                except Exception:  # taken away, or its counters are none
                    log.debug("interface %s is not sampled any more", interface.name, exc_info=True)
                    with self._lock:
                        self._interfaces.remove(interface)

    def take(self) -> tuple[NetworkTraffic, ...]:
        """One summary an interface."""
        with self._lock:
            return tuple(t for i in self._interfaces if (t := i.summarise()) is not None)

    def close(self) -> None:
        """End the thread; an adapter that does not answer is not waited for."""
        self._stopped.set()
        self._thread.join(1.0)


def _interfaces() -> list[_Interface]:
    found = []
    for folder in sorted(Path("/sys/class/net").glob("*/statistics")):
        found.append(_opened(folder.parent.name, [folder / name for name in _COUNTERS], 1))
    names = ("port_rcv_data", "port_xmit_data", "port_rcv_errors", "port_xmit_discards")
    for folder in sorted(Path("/sys/class/infiniband").glob("*/ports/*/counters")):
        device, port = folder.parts[-4], folder.parts[-2]
        found.append(_opened(f"{device}/{port}", [folder / name for name in names], 4))
    return [interface for interface in found if interface is not None][:64]


def _opened(name: str, paths: list[Path], scale: int) -> _Interface | None:
    try:
        return _Interface(name, [open(path) for path in paths], scale)
    except OSError:
        return None


def versions() -> dict[str, str]:
    """Versions that matter to a run, without importing anything heavy."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for package in ("megascale", "torch", "numpy", "triton", "nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        found["nvidia-driver"] = driver.read_text().splitlines()[0][:200]
    return found


def hardware() -> dict[str, str]:
    """Processor, memory, devices."""
    import os

    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")), "")
    memory = _memory_bytes()
    found = {"cpu": model or platform.machine(), "cores": str(os.cpu_count()), "memory_gib": f"{memory / 2**30:.1f}"}
    found["memory_bytes"] = str(memory)  # by which the rules know a process that was killed for want of it
    if gpus := gpu_count():
        found["gpus"] = str(gpus)
    return found


def _memory_bytes() -> int:
    """Memory of the machine, or of the container that this process is in."""
    import os

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):  # "max": no limit
            memory = min(memory, int(Path(file).read_text()))
    return memory


def gpu_count() -> int:
    """NVIDIA devices that this process may use, without torch: CUDA_VISIBLE_DEVICES, else the device files."""
    return len(visible_gpu_names(len([p for p in Path("/dev").glob("nvidia[0-9]*") if p.name[6:].isdigit()])))
