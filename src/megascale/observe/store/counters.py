"""Reading of a host's counters: NICs, InfiniBand and RoCE ports, GPUs, processors, and Xid errors of GPUs.

The span service reads the counters once per second. Counters that the machine lacks are left out. Counters of bytes,
packets and errors count from the start of the device; the other counters are current values. Counters of a NIC's driver
are left out while they are 0, because drivers have many per priority and lane.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megascale.observe.store.ethtool_counters import EthtoolCounters
from megascale.observe.store.frames import COUNTER
from megascale.observe.store.xid_events import XidEvents

# Counters of a NIC, by the names of the kernel's files.
_NIC = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_fifo_errors")
# Counters of an InfiniBand or RoCE port, with the factor from the file's number to the counter's unit. Data is counted
# in words of 4 bytes.
_PORT = {
    "port_rcv_data": 4, "port_xmit_data": 4, "port_xmit_wait": 1, "symbol_error": 1, "link_error_recovery": 1,
    "link_downed": 1, "port_rcv_errors": 1, "port_xmit_discards": 1, "local_link_integrity_errors": 1,
}  # fmt: skip
_PORT_NAMES = {"port_rcv_data": "port_rcv_bytes", "port_xmit_data": "port_xmit_bytes"}
_PORT_HARDWARE = (
    "np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled", "packet_seq_err", "out_of_sequence",
    "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans", "roce_slow_restart", "rx_icrc_encapsulated",
)  # fmt: skip
_VIRTUAL_NICS = ("lo", "veth", "docker", "br-", "virbr")
_MAX_DEVICES = 64
_MAX_NAME = 32  # characters of a counter's name in COUNTER

Sample = tuple[str, str, float]  # name, device, value


class HostCounters:
    """Reader of this host's counters.

    Args:
        system, processes: folders of the kernel's devices and processes.
        nvml: the module pynvml or a replacement; None imports pynvml if it is installed.
        kernel_log: device of the kernel's log.
    """

    def __init__(
        self,
        system: Path = Path("/sys"),
        processes: Path = Path("/proc"),
        nvml: Any = None,
        kernel_log: Path = Path("/dev/kmsg"),
    ) -> None:
        self._processes = processes
        self._files = _list_nic_files(system) + _list_port_files(system)
        # Drivers are asked by device name, so `system` does not matter for them.
        nics = [file.device for file in self._files if file.name == "nic_tx_bytes"]
        drivers = [EthtoolCounters(nic) for nic in nics]
        self._drivers = [driver for driver in drivers if driver.names]
        self._gpus: list[Any] = []
        self._nvml: Any = None
        with contextlib.suppress(Exception):  # no package, no driver or no GPU
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._xids = XidEvents(self._nvml, self._gpus, kernel_log)

    def sample(self, now_ns: int) -> np.ndarray[Any, Any]:
        """Return COUNTER records of the current values."""
        samples: list[Sample] = []
        for file in self._files:
            value = _read_counter(file)
            if value is not None:
                samples.append((file.name, file.device, value))
        for driver in self._drivers:
            for name, count in zip(driver.names, driver.read(), strict=False):  # read() may return no values
                if count:
                    samples.append((f"nic_{name}"[:_MAX_NAME], driver.nic, float(count)))
        samples += [("gpu_xid", device, float(xid)) for device, xid in self._xids.read_new()]
        samples += self._sample_processor()
        for index, gpu in enumerate(self._gpus):
            samples += self._sample_gpu(index, gpu)
        rows = [(now_ns, value, name.encode(), device.encode(errors="replace")) for name, device, value in samples]
        return np.array(rows, COUNTER)

    def close(self) -> None:
        """Close the kernel's log and the drivers."""
        self._xids.close()
        for driver in self._drivers:
            driver.close()

    def _sample_processor(self) -> list[Sample]:
        samples: list[Sample] = []
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The first line has the ticks of all processors: user, nice, system, idle, iowait, irq, softirq, steal.
            fields = (self._processes / "stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, _, iowait, *interrupts = (int(f) / os.sysconf("SC_CLK_TCK") for f in fields)
            samples.append(("cpu_busy_seconds", "", user + nice + system + sum(interrupts)))
            samples.append(("cpu_iowait_seconds", "", iowait))
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (self._processes / "meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    samples.append(("memory_available_bytes", "", int(line.split()[1]) * 1024.0))
        return samples

    def _sample_gpu(self, index: int, gpu: Any) -> list[Sample]:
        nvml = self._nvml
        readers: dict[str, Callable[[], float]] = {
            "gpu_sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM),
            "gpu_power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "gpu_temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
            "gpu_throttle_reasons": lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu),
            "gpu_busy_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "gpu_memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
        }
        samples = []
        for name, read in readers.items():
            with contextlib.suppress(Exception):  # the device does not report this value now
                samples.append((name, f"gpu{index}", float(read())))
        return samples


class _CounterFile(NamedTuple):
    """File of the kernel that holds a counter.

    Attributes:
        scale: factor from the file's number to the counter's unit.
    """

    name: str
    device: str
    path: Path
    scale: float = 1.0


def _list_nic_files(system: Path) -> list[_CounterFile]:
    files: list[_CounterFile] = []
    for nic in sorted((system / "class" / "net").glob("*"))[:_MAX_DEVICES]:
        if nic.name.startswith(_VIRTUAL_NICS):
            continue
        files += [_CounterFile(f"nic_{name}", nic.name, nic / "statistics" / name) for name in _NIC]
        files.append(_CounterFile("nic_carrier_changes", nic.name, nic / "carrier_changes"))
        files.append(_CounterFile("nic_speed_mbit", nic.name, nic / "speed"))
    return _select_readable(files)


def _list_port_files(system: Path) -> list[_CounterFile]:
    files: list[_CounterFile] = []
    for port in sorted((system / "class" / "infiniband").glob("*/ports/*"))[:_MAX_DEVICES]:
        device = f"{port.parent.parent.name}/{port.name}"
        for name, scale in _PORT.items():
            counter = f"ib_{_PORT_NAMES.get(name, name)}"
            files.append(_CounterFile(counter, device, port / "counters" / name, scale=scale))
        files += [_CounterFile(f"ib_{name}", device, port / "hw_counters" / name) for name in _PORT_HARDWARE]
        files.append(_CounterFile("ib_link_state", device, port / "state"))
    return _select_readable(files)


def _select_readable(files: list[_CounterFile]) -> list[_CounterFile]:
    return [file for file in files if _read_counter(file) is not None]


def _read_counter(file: _CounterFile) -> float | None:
    """Return the value of a counter; None if its file has no number."""
    try:
        # The number may be followed by a text, such as "4: ACTIVE".
        return int(file.path.read_text(errors="replace").partition(":")[0]) * file.scale
    except (OSError, ValueError):
        return None
