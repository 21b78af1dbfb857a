"""Checks of the host's NICs: link state, streams to and between the host's own addresses, and RDMA loopback.

Linux passes traffic between addresses of one host through memory. So a TCP stream tests sockets, addresses and memory,
but not the NIC's link. RDMA loopback goes through the NIC, and is measured if perftest's ib_write_bw is installed.
MegaScale section 4.3 tests loopback from every NIC to memory and GPUs, and from NIC to NIC.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from megascale.core.addresses import list_interface_addresses
from megascale.observe.store.network_settings import read_text
from megascale.resilience.diagnose.check import Result, SelfCheck, make_absent_check, make_failed_check

_STREAM_BYTES = 256 << 20  # sent per measurement of a TCP stream
_BLOCK_BYTES = 1 << 20  # sent at once
_STREAM_SECONDS = 10.0  # to connect, and to receive the rest of a stream
_MIN_ERRORS = 10  # fewer errors since the boot do not fail a link
_MAX_ERROR_SHARE = 1e-3  # largest share of packets with errors
_RDMA_START_SECONDS = 0.5  # for ib_write_bw's server to listen
_RDMA_SECONDS = 20.0  # for the client, which sends for one second
_KILL_SECONDS = 5.0  # to wait for the end of a killed process
_ERROR_CHARACTERS = 300  # of ib_write_bw's error output
_RDMA_PORT = 18600  # first port of ib_write_bw
_NET = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")


def _list_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, loopback included, by name."""
    return {name: address for name, address in list_interface_addresses().items() if ":" not in address}


def check_links() -> Iterator[SelfCheck]:
    """Check that every interface with an address has a carrier, and few errors since the boot."""
    names = [name for name in sorted(_list_addresses()) if name != "lo"]
    if not names:
        yield make_absent_check("nic link", "no network interface but loopback has an address")
    for name in names:
        yield _check_link(name)


def _check_link(name: str) -> SelfCheck:
    """Return the check of one interface, with its nominal rate."""
    folder = _NET / name
    check_name = f"nic link {name}"
    if read_text(folder / "carrier") == "0":
        return make_failed_check(check_name, "no carrier: cable, transceiver or switch port")
    errors = _sum_counters(folder, "rx_errors", "tx_errors")
    packets = _sum_counters(folder, "rx_packets", "tx_packets")
    if errors > _MIN_ERRORS and errors > _MAX_ERROR_SHARE * packets:
        return make_failed_check(check_name, f"{errors} errors in {packets} packets since boot")
    speed = read_text(folder / "speed")  # Mbit/s, -1 if unknown
    rate = None
    if speed.isdigit() and int(speed) > 0:
        rate = int(speed) / 8e3  # GB/s
    return SelfCheck(check_name, "passed", rate, "GB/s", details=f"{errors} errors in {packets} packets")


def _sum_counters(folder: Path, *counters: str) -> int:
    """Return the sum of an interface's counters. A missing counter counts as 0."""
    return sum(int(read_text(folder / "statistics" / counter) or 0) for counter in counters)


def check_rdma_ports() -> Iterator[SelfCheck]:
    """Check the state of InfiniBand and RoCE ports."""
    ports = sorted(_RDMA.glob("*/ports/*"))
    if not ports:
        yield make_absent_check("rdma port", "no RDMA device")
    for port in ports:
        state = read_text(port / "state")
        link_downs = read_text(port / "counters" / "link_downed") or "0"
        result: Result = "passed" if "ACTIVE" in state else "failed"
        details = f"state {state}, link went down {link_downs} times"
        yield SelfCheck(f"rdma port {port.parts[-3]}:{port.name}", result, details=details)


def check_rdma_loopback() -> Iterator[SelfCheck]:
    """Measure the bandwidth of each RDMA device to itself."""
    devices = sorted(path.name for path in _RDMA.glob("*"))
    if not devices:
        yield make_absent_check("rdma loopback", "no RDMA device")
    elif shutil.which("ib_write_bw") is None:
        yield make_absent_check(
            "rdma loopback", f"{len(devices)} RDMA devices, but perftest's ib_write_bw is not installed"
        )
    else:
        for number, device in enumerate(devices):
            yield _measure_rdma(device, _RDMA_PORT + number)


def _measure_rdma(device: str, port: int) -> SelfCheck:
    """Run ib_write_bw as server and client on one device."""
    name = f"rdma loopback {device}"
    command = ["ib_write_bw", "-d", device, "-p", str(port), "--report_gbits", "-D", "1"]
    # Files instead of pipes: a process that the kernel cannot end would keep the pipes open, and a read would wait.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = None
        try:
            time.sleep(_RDMA_START_SECONDS)
            client = subprocess.Popen(command + ["127.0.0.1"], stdout=output, stderr=errors)
            code = client.wait(_RDMA_SECONDS)
        except subprocess.TimeoutExpired:
            return make_failed_check(name, f"no result within {_RDMA_SECONDS:g} s")
        finally:
            for process in (client, server):
                if process is not None:
                    _kill(process)
        output.seek(0)
        errors.seek(0)
        # Columns of a result: bytes, iterations, peak and average rate in Gbit/s.
        text = output.read().decode(errors="replace")
        rates = re.findall(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)", text, re.M)
        if code or not rates:
            reason = errors.read().decode(errors="replace").strip()
            return make_failed_check(name, reason[:_ERROR_CHARACTERS] or "no result")
    return SelfCheck(name, "passed", float(rates[-1]) / 8, "GB/s", details="ib_write_bw, 1 s")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process, and wait for its end for at most _KILL_SECONDS. A failed device may prevent the end."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_SECONDS)


def check_streams() -> Iterator[SelfCheck]:
    """Measure a TCP stream from each address of the host to itself, and between each pair of its NICs."""
    addresses = _list_addresses()
    if not addresses:
        yield make_absent_check("nic loopback", "no interface has an address")
    for name, address in sorted(addresses.items()):
        yield _measure_stream(f"nic loopback {name}", address, address)
    nics = sorted(name for name in addresses if name != "lo")
    if len(nics) < 2:
        yield make_absent_check("nic to nic", f"{len(nics)} NICs with an address")
    for source in nics:
        for target in nics:
            if source != target:
                yield _measure_stream(f"nic to nic {source} {target}", addresses[source], addresses[target])


def _measure_stream(name: str, source: str, target: str) -> SelfCheck:
    """Send _STREAM_BYTES from one address of this host to another by TCP."""
    listener = socket.create_server((target, 0))
    received_bytes = 0

    def receive() -> None:
        nonlocal received_bytes
        connection, _ = listener.accept()
        with connection:
            buffer = bytearray(_BLOCK_BYTES)
            while count := connection.recv_into(buffer):
                received_bytes += count

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    block = bytes(_BLOCK_BYTES)
    try:
        address = listener.getsockname()
        with socket.create_connection(address, timeout=_STREAM_SECONDS, source_address=(source, 0)) as connection:
            started = time.perf_counter()
            for _ in range(_STREAM_BYTES // _BLOCK_BYTES):
                connection.sendall(block)
        thread.join(_STREAM_SECONDS)
    except OSError as error:
        return make_failed_check(name, f"{source} to {target}: {error}")
    finally:
        listener.close()
    rate = received_bytes / (time.perf_counter() - started) / 1e9
    if received_bytes != _STREAM_BYTES:
        return make_failed_check(name, f"{received_bytes} of {_STREAM_BYTES} bytes arrived")
    details = f"TCP, {_STREAM_BYTES >> 20} MiB, {source} to {target}"
    return SelfCheck(name, "passed", rate, "GB/s", details=details)
