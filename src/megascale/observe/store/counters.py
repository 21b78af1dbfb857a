"""Reading of a host's counters: NICs, InfiniBand and RoCE ports, GPUs, processors, and Xid errors of GPUs.

The span service reads the counters once per second. Counters that the machine lacks are left out. Counters of bytes,
packets and errors count from the start of the device; the other counters are current values. A NIC driver's counters by
priority and lane are left out while they are 0.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import importlib
import os
import re
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megascale.core.gpus import OFF_BUS_XID
from megascale.observe.store.frames import COUNTER

_NIC = ("rx_bytes", "tx_bytes", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_fifo_errors")
# Counters of an InfiniBand or RoCE port, with the factor of a count; data is counted in words of 4 bytes.
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
        drivers = [EthtoolCounters(device) for name, device, _, _ in self._files if name == "nic_tx_bytes"]
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
        for name, device, path, scale in self._files:
            value = _read_number(path, scale)
            if value is not None:
                samples.append((name, device, value))
        for driver in self._drivers:
            for name, count in zip(driver.names, driver.read(), strict=False):  # read() may return no values
                if count:
                    samples.append((f"nic_{name}"[:32], driver.nic, float(count)))
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
            fields = (self._processes / "stat").read_text().split("\n", 1)[0].split()[1:9]
            # The fourth field is idle time; interrupts and stolen time follow.
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


_CounterFile = tuple[str, str, Path, float]  # name of the counter, device, path, factor of the file's number


def _list_nic_files(system: Path) -> list[_CounterFile]:
    files: list[_CounterFile] = []
    for nic in sorted((system / "class" / "net").glob("*"))[:_MAX_DEVICES]:
        if nic.name.startswith(_VIRTUAL_NICS):
            continue
        files += [(f"nic_{name}", nic.name, nic / "statistics" / name, 1.0) for name in _NIC]
        files.append(("nic_carrier_changes", nic.name, nic / "carrier_changes", 1.0))
        files.append(("nic_speed_mbit", nic.name, nic / "speed", 1.0))
    return _select_readable(files)


def _list_port_files(system: Path) -> list[_CounterFile]:
    files: list[_CounterFile] = []
    for port in sorted((system / "class" / "infiniband").glob("*/ports/*"))[:_MAX_DEVICES]:
        device = f"{port.parent.parent.name}/{port.name}"
        for name, scale in _PORT.items():
            files.append((f"ib_{_PORT_NAMES.get(name, name)}", device, port / "counters" / name, scale))
        files += [(f"ib_{name}", device, port / "hw_counters" / name, 1.0) for name in _PORT_HARDWARE]
        files.append(("ib_link_state", device, port / "state", 1.0))  # "4: ACTIVE"
    return _select_readable(files)


def _select_readable(files: list[_CounterFile]) -> list[_CounterFile]:
    return [(name, device, path, scale) for name, device, path, scale in files if _read_number(path, scale) is not None]


def _read_number(path: Path, scale: float) -> float | None:
    try:
        return int(path.read_text(errors="replace").partition(":")[0]) * scale
    except (OSError, ValueError):
        return None


# Counters of NIC drivers ------------------------------------------------------------------------------------------

# Names of counters in the drivers. In mlx5 (see the kernel's documentation of mlx5 counters), rx_prioN_pause and
# tx_prioN_pause count received and sent PFC frames, and ..._duration the microseconds in which PFC paused traffic.
# rx_corrected_bits_phy counts bits that FEC corrected, and rx_symbol_err_phy symbols that FEC could not correct. With a
# failing fibre or transceiver, the first increases long before the second. Other names are from the drivers ice
# (priority), bnxt (pfc, fec) and similar drivers.
_LINK_COUNTERS = re.compile(
    r"[rt]x_prio\d_pause(_duration|_transition)?|[rt]x_pause_ctrl_phy|[rt]x_global_pause(_duration)?"
    r"|[rt]x_priority_\d_xo(n|ff)\.nic|[rt]x_pfc_ena_frames_pri\d|[rt]x_pause(_frames)?"
    r"|rx_corrected_bits_phy|rx_pcs_symbol_err_phy|rx_symbol_err_phy|rx_crc_errors_phy|link_down_events_phy"
    r"|rx_err_lane_\d_phy|rx_fec_(corrected|uncorrectable)_blocks|[rt]x_ecn_mark\w*|rx_discards_phy|rx_out_of_buffer"
)
_SIOCETHTOOL = 0x8946
_GET_STRINGS, _GET_STATISTICS, _GET_SIZES = 0x1B, 0x1D, 0x37
_STATISTICS_SET = 1  # the set of strings that names the statistics
_NAME_BYTES = 32
_MAX_STATISTICS = 4096


def is_link_counter(name: str) -> bool:
    """Return whether a driver's counter is about pauses, FEC, signal quality or congestion."""
    return _LINK_COUNTERS.fullmatch(name) is not None


class EthtoolCounters:
    """Reader of the counters of a NIC's driver, which the kernel's files do not contain (`ethtool -S`).

    Args:
        is_selected: whether to read a counter, by its name.

    Attributes:
        names: names of the selected counters, in the order of `read`; empty without such counters.
    """

    def __init__(self, nic: str, is_selected: Callable[[str], bool] = is_link_counter) -> None:
        self.nic = nic
        self.names: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._count = 0
        self._indices: list[int] = []
        with contextlib.suppress(OSError):
            driver_names = self._read_names()
            self._count = len(driver_names)
            self._indices = [i for i, name in enumerate(driver_names) if is_selected(name)]
            self.names = [driver_names[i] for i in self._indices]
        if not self.names:
            self.close()

    def _send_request(self, request: array.array[int]) -> bytes:
        """Send a request (linux/ethtool.h) to the kernel, which fills it, and return the filled request."""
        address, _ = request.buffer_info()
        fcntl.ioctl(self._socket.fileno(), _SIOCETHTOOL, struct.pack("16sP", self.nic.encode()[:15], address))
        return request.tobytes()

    def _read_names(self) -> list[str]:
        sizes = self._send_request(array.array("B", struct.pack("=IIQI", _GET_SIZES, 0, 1 << _STATISTICS_SET, 0)))
        _, _, sets, count = struct.unpack("=IIQI", sizes)
        if not sets or not 0 < count <= _MAX_STATISTICS:
            return []
        request = struct.pack("=III", _GET_STRINGS, _STATISTICS_SET, count) + bytes(count * _NAME_BYTES)
        text = self._send_request(array.array("B", request))[12:]
        names = (text[i : i + _NAME_BYTES] for i in range(0, len(text), _NAME_BYTES))
        return [name.split(b"\0", 1)[0].decode(errors="replace") for name in names]

    def read(self) -> list[int]:
        """Return the values of `names`; empty if the driver does not answer."""
        if not self.names:
            return []
        # The kernel writes all current values, whatever the requested count is: queues may have been added since the
        # names were read. The buffer is therefore larger than the request needs.
        request = struct.pack("=II", _GET_STATISTICS, self._count) + bytes(8 * 2 * _MAX_STATISTICS)
        try:
            data = self._send_request(array.array("B", request))
        except OSError:
            return []
        if struct.unpack_from("=I", data, 4)[0] != self._count:
            return []
        return [int(struct.unpack_from("=Q", data, 8 + 8 * i)[0]) for i in self._indices]

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


# Xid errors of GPUs ---------------------------------------------------------------------------------------------

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
    """Reader of new Xid errors of a host's GPUs, from NVML's events or, without NVML, from the kernel's log.

    Args:
        nvml: the module pynvml after nvmlInit, or None.
        gpus: NVML's handles of the GPUs.
        kernel_log: device of the kernel's log, which is read from its current end.
    """

    def __init__(self, nvml: Any, gpus: list[Any], kernel_log: Path = Path("/dev/kmsg")) -> None:
        self._nvml = nvml
        self._event_set: Any = None
        self._device_names: dict[str, str] = {}
        self._log = -1
        if nvml is not None:
            for index, gpu in enumerate(gpus):
                with contextlib.suppress(Exception):  # NVML has its own error classes
                    bus = nvml.nvmlDeviceGetPciInfo(gpu).busId
                    address = (bus.decode() if isinstance(bus, bytes) else str(bus)).lower()  # 00000000:3B:00.0
                    self._device_names[_shorten(address.partition(".")[0])] = f"gpu{index}"
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
        with contextlib.suppress(Exception):  # NVML raises an error if no event is left
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
                    errors.append((self._device_names.get(_shorten(address), address), xid))
        return errors

    def close(self) -> None:
        """Close the kernel's log."""
        if self._log >= 0:
            os.close(self._log)
            self._log = -1


def _shorten(address: str) -> str:
    """Return a PCI address with the last four digits of its domain."""
    domain, _, bus = address.partition(":")
    return f"{domain[-4:]}:{bus}"
