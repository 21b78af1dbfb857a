"""Counters of a host: its NICs, InfiniBand and RoCE ports, GPUs and processors, read once a second; Xid errors.

All that the machine has is read, and what it has not is left out: no counter is made up. Counters of bytes, packets and
errors count up since the device came; the others are as they are now. What a NIC's driver counts by priority and lane
is left out while it is 0.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from megascale.observe.store.ethtool_counters import EthtoolCounters
from megascale.observe.store.frames import COUNTER
from megascale.observe.store.xid_events import XidEvents

_NIC = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_fifo_errors")
# Of a port of InfiniBand or RoCE; data is counted in words of 4 bytes.
_PORT = {
    "port_rcv_data": 4, "port_xmit_data": 4, "port_xmit_wait": 1, "symbol_error": 1, "link_error_recovery": 1,
    "link_downed": 1, "port_rcv_errors": 1, "port_xmit_discards": 1, "local_link_integrity_errors": 1,
}  # fmt: skip
_PORT_HARDWARE = (
    "np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled", "packet_seq_err", "out_of_sequence",
    "local_ack_timeout_err", "rnr_nak_retry_err", "roce_adp_retrans", "roce_slow_restart", "rx_icrc_encapsulated",
)  # fmt: skip
_SKIPPED = ("lo", "veth", "docker", "br-", "virbr")
_MOST_DEVICES = 64
_SENT = "nic_tx_bytes"


class HostCounters:
    """Args:
    system, processes: where the kernel shows what it counts.
    nvml: the module pynvml, or one that does as it does; None: the real one if there is one.
    kernel_log: where the kernel's lines come.
    """

    def __init__(
        self,
        system: Path = Path("/sys"),
        processes: Path = Path("/proc"),
        nvml: Any = None,
        kernel_log: Path = Path("/dev/kmsg"),
    ) -> None:
        self._processes = processes
        self._files = [*_nics(system), *_ports(system)]
        # This machine's, whichever folder its counters are read from.
        drivers = {device: EthtoolCounters(device) for device in {one[1] for one in self._files if one[0] == _SENT}}
        self._drivers = {device: driver for device, driver in sorted(drivers.items()) if driver.names}
        self._gpus: list[Any] = []
        self._nvml: Any = None
        with contextlib.suppress(Exception):  # no package, no driver, no GPU
            nvml = nvml or importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
            self._gpus = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        self._xids = XidEvents(self._nvml, self._gpus, kernel_log)

    def sample(self, now_ns: int) -> np.ndarray[Any, Any]:
        """COUNTER records of this moment."""
        found = []
        for name, device, path, scale in self._files:
            if (value := _read(path, scale)) is not None:
                found.append((name, device, value))
        for device, driver in self._drivers.items():
            counted = zip(driver.names, driver.read(), strict=False)
            found += [(f"nic_{name}"[:32], device, float(value)) for name, value in counted if value]
        found += [("gpu_xid", device, float(xid)) for device, xid in self._xids.take()]
        found += self._processor() + [one for i, gpu in enumerate(self._gpus) for one in self._gpu(i, gpu)]
        records = np.zeros(len(found), COUNTER)
        records["time_ns"] = now_ns
        for row, (name, device, value) in zip(records, found, strict=True):
            row["name"], row["device"], row["value"] = name.encode(), device.encode(errors="replace"), value
        return records

    def close(self) -> None:
        """Look no more."""
        self._xids.close()
        for driver in self._drivers.values():
            driver.close()

    def _processor(self) -> list[tuple[str, str, float]]:
        found = []
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = (self._processes / "stat").read_text().split("\n", 1)[0].split()[1:]
            ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words[:8]]
            found += [("cpu_busy_seconds", "", sum(ticks) - ticks[3] - ticks[4]), ("cpu_iowait_seconds", "", ticks[4])]
        with contextlib.suppress(OSError, ValueError, IndexError):
            for line in (self._processes / "meminfo").read_text().splitlines():
                if line.startswith("MemAvailable:"):
                    found.append(("memory_available_bytes", "", int(line.split()[1]) * 1024.0))
        return found

    def _gpu(self, index: int, gpu: Any) -> list[tuple[str, str, float]]:
        n, device, found = self._nvml, f"gpu{index}", []
        for name, ask in (
            ("gpu_sm_clock_mhz", lambda: n.nvmlDeviceGetClockInfo(gpu, n.NVML_CLOCK_SM)),
            ("gpu_power_watts", lambda: n.nvmlDeviceGetPowerUsage(gpu) / 1e3),
            ("gpu_temperature_celsius", lambda: n.nvmlDeviceGetTemperature(gpu, n.NVML_TEMPERATURE_GPU)),
            ("gpu_throttle_reasons", lambda: n.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)),
            ("gpu_busy_percent", lambda: n.nvmlDeviceGetUtilizationRates(gpu).gpu),
            ("gpu_memory_used_bytes", lambda: n.nvmlDeviceGetMemoryInfo(gpu).used),
        ):
            with contextlib.suppress(Exception):  # this device does not say; another second it may
                found.append((name, device, float(ask())))
        return found


_File = tuple[str, str, Path, float]  # name, device, path, what a count is in the counter's unit


def _nics(system: Path) -> list[_File]:
    found: list[_File] = []
    for nic in sorted((system / "class" / "net").glob("*"))[:_MOST_DEVICES]:
        if nic.name.startswith(_SKIPPED):
            continue
        found += [(f"nic_{name}", nic.name, nic / "statistics" / name, 1.0) for name in _NIC]
        found += [("nic_carrier_changes", nic.name, nic / "carrier_changes", 1.0)]
        found += [("nic_speed_mbit", nic.name, nic / "speed", 1.0)]
    return [one for one in found if _read(one[2], one[3]) is not None]


def _ports(system: Path) -> list[_File]:
    found: list[_File] = []
    for port in sorted((system / "class" / "infiniband").glob("*/ports/*"))[:_MOST_DEVICES]:
        device = f"{port.parent.parent.name}/{port.name}"
        for name, scale in _PORT.items():
            shown = {"port_rcv_data": "port_rcv_bytes", "port_xmit_data": "port_xmit_bytes"}.get(name, name)
            found.append((f"ib_{shown}", device, port / "counters" / name, scale))
        found += [(f"ib_{name}", device, port / "hw_counters" / name, 1.0) for name in _PORT_HARDWARE]
        found.append(("ib_link_state", device, port / "state", 1.0))  # "4: ACTIVE"
    return [one for one in found if _read(one[2], one[3]) is not None]


def _read(path: Path, scale: float) -> float | None:
    try:
        return int(path.read_text(errors="replace").partition(":")[0]) * scale
    except (OSError, ValueError):
        return None
