"""NICs of this host: link state, a stream to the host's own addresses and between them, RDMA loopback.

Linux carries traffic between addresses of one host through memory, so a TCP stream tests sockets, drivers' addresses
and memory, not the NIC's link; RDMA loopback (perftest's ib_write_bw) goes through the NIC, and is used where it is
installed. MegaScale section 4.3 tests loopback from every NIC to memory and devices, and NIC to NIC.
"""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from megascale.resilience.diagnose.check import SelfCheck, absent_hardware

_STREAM_BYTES = 256 << 20
_BLOCK = 1 << 20
_NET = Path("/sys/class/net")
_RDMA = Path("/sys/class/infiniband")


def addresses() -> dict[str, str]:
    """IPv4 address of each interface that is up, loopback included."""
    import fcntl
    import struct

    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                data = fcntl.ioctl(probe.fileno(), 0x8915, struct.pack("256s", name.encode()[:15]))  # SIOCGIFADDR
                found[name] = socket.inet_ntoa(data[20:24])
            except OSError:
                continue
    return found


def links() -> Iterator[SelfCheck]:
    """Every interface that is meant to be up has a carrier and counts few errors."""
    nics = [name for name in sorted(addresses()) if name != "lo"]
    if not nics:
        yield absent_hardware("nic link", "no network interface but loopback has an address")
    for name in nics:
        carrier, speed = _text(_NET / name / "carrier"), _text(_NET / name / "speed")
        bad = sum(int(_text(_NET / name / "statistics" / c) or 0) for c in ("rx_errors", "tx_errors"))
        all_packets = sum(int(_text(_NET / name / "statistics" / c) or 0) for c in ("rx_packets", "tx_packets"))
        rate = int(speed) / 8e3 if speed.lstrip("-").isdigit() and int(speed) > 0 else None
        if carrier == "0":
            yield SelfCheck(f"nic link {name}", "failed", details="no carrier: cable, transceiver or switch port")
        elif bad > 10 and bad * 1000 > all_packets:
            yield SelfCheck(f"nic link {name}", "failed", details=f"{bad} errors in {all_packets} packets since boot")
        else:
            yield SelfCheck(
                f"nic link {name}", "passed", rate, "GB/s", details=f"{bad} errors in {all_packets} packets"
            )


def rdma_ports() -> Iterator[SelfCheck]:
    """State of InfiniBand or RoCE ports."""
    ports = sorted(_RDMA.glob("*/ports/*")) if _RDMA.is_dir() else []
    if not ports:
        yield absent_hardware("rdma port", "no RDMA device")
    for port in ports:
        name, state = f"rdma port {port.parts[-3]}:{port.name}", _text(port / "state")
        downs = _text(port / "counters" / "link_downed") or "0"
        result = "passed" if "ACTIVE" in state else "failed"
        yield SelfCheck(name, result, details=f"state {state}, link went down {downs} times")  # type: ignore[arg-type]


def rdma_loopback() -> Iterator[SelfCheck]:
    """Bandwidth of each RDMA device to itself."""
    found = sorted(p.name for p in _RDMA.iterdir()) if _RDMA.is_dir() else []
    if not found:
        yield absent_hardware("rdma loopback", "no RDMA device")
    elif shutil.which("ib_write_bw") is None:
        yield absent_hardware(
            "rdma loopback", f"{len(found)} RDMA devices, but perftest's ib_write_bw is not installed"
        )
    else:
        for number, device in enumerate(found):
            yield _ib_write(device, 18600 + number)


def _ib_write(device: str, port: int) -> SelfCheck:
    command = ["ib_write_bw", "-d", device, "-p", str(port), "--report_gbits", "-D", "1"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        time.sleep(0.5)
        client = subprocess.run([*command, "127.0.0.1"], capture_output=True, text=True, timeout=20)
        rates = re.findall(r"^\s*\d+\s+\d+\s+[\d.]+\s+([\d.]+)", client.stdout, re.M)
        if client.returncode or not rates:
            return SelfCheck(f"rdma loopback {device}", "failed", details=client.stderr.strip()[:300] or "no result")
        return SelfCheck(f"rdma loopback {device}", "passed", float(rates[-1]) / 8, "GB/s", details="ib_write_bw, 1 s")
    finally:
        server.kill()
        server.wait()


def streams() -> Iterator[SelfCheck]:
    """A TCP stream to each address of the host from itself, and between each pair of its NICs; bytes counted."""
    known = addresses()
    if not known:
        yield absent_hardware("nic loopback", "no interface has an address")
    for name, address in sorted(known.items()):
        yield _stream(f"nic loopback {name}", address, address)
    nics = sorted(name for name in known if name != "lo")
    if len(nics) < 2:
        yield absent_hardware("nic to nic", f"{len(nics)} NICs with an address")
    for source in nics:
        for target in nics:
            if source != target:
                yield _stream(f"nic to nic {source} {target}", known[source], known[target])


def _stream(name: str, source: str, target: str) -> SelfCheck:
    listener = socket.create_server((target, 0))
    received = 0

    def receive() -> None:
        nonlocal received
        link, _ = listener.accept()
        with link:
            buffer = bytearray(_BLOCK)
            while count := link.recv_into(buffer):
                received += count

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    block = bytes(_BLOCK)
    try:
        with socket.create_connection(listener.getsockname(), timeout=10, source_address=(source, 0)) as link:
            started = time.perf_counter()
            for _ in range(_STREAM_BYTES // _BLOCK):
                link.sendall(block)
        thread.join(10)
    except OSError as error:
        return SelfCheck(name, "failed", details=f"{source} to {target}: {error}")
    finally:
        listener.close()
    rate = received / (time.perf_counter() - started) / 1e9
    if received != _STREAM_BYTES:
        return SelfCheck(name, "failed", details=f"{received} of {_STREAM_BYTES} bytes arrived")
    return SelfCheck(name, "passed", rate, "GB/s", details=f"TCP, {_STREAM_BYTES >> 20} MiB, {source} to {target}")


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
