"""Xid errors out of real kernel lines, drivers' counters of real NICs, bandwidth by the millisecond of real traffic."""

from __future__ import annotations

import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megascale.cli.spans import describe_links
from megascale.observe.store.counters import HostCounters
from megascale.observe.store.ethtool_counters import EthtoolCounters, is_link_counter
from megascale.observe.store.frames import COUNTER, COUNTERS
from megascale.observe.store.ingest import Ingest
from megascale.observe.store.nic_rates import NicRates
from megascale.observe.store.parquet import ParquetWriter
from megascale.observe.store.tables import SpanTables
from megascale.observe.store.xid_events import XidEvents, parse_xid

# Lines as people quoted them in reports of NVIDIA's drivers (open-gpu-kernel-modules, NVSentinel, gpud, distributions).
LINES = [
    ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus", ("0000:44:00", 79)),
    ("NVRM: Xid (PCI:0000:01:00): 32, Channel ID 00000009 intr 00800000", ("0000:01:00", 32)),
    ("NVRM: Xid (PCI:0000:3b:00): 48, pid='<unknown>', name=<unknown>, DBE", ("0000:3b:00", 48)),
    ("[Fri] kernel: NVRM: Xid (PCI:0000:3B:00): 13, pid=42, Graphics Exception", ("0000:3b:00", 13)),
    ("NVRM: The NVIDIA GPU 0000:b3:00.0", ("0000:b3:00", 79)),
    ("NVRM: GPU at PCI:0000:01:00: GPU-34d7319c-5b19-1e75-186d-c187099e4fe5", None),
    ("NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build", None),
    ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link INIT", None),
]


@pytest.mark.parametrize(("line", "report"), LINES)
def test_lines_of_the_kernel_tell_which_gpu_had_which_xid(line, report):
    assert parse_xid(line) == report


def test_what_the_kernel_logs_from_now_on_becomes_a_counter(tmp_path):
    """Of GPUs that NVML names by their number, of others by their address; what was logged before is none of ours."""
    log = tmp_path / "kmsg"
    log.write_text("4,1,100,-;NVRM: Xid (PCI:0000:44:00): 13, pid=1\n")
    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId=[b"00000000:3B:00.0", b"00000000:44:00.0"][gpu]),
    )  # fmt: skip
    counters = HostCounters(tmp_path, tmp_path, nvml, log)

    def list_values() -> list[tuple[str, float]]:
        result = counters.sample(5)
        return [(row["device"].decode(), float(row["value"])) for row in result if row["name"] == b"gpu_xid"]

    assert list_values() == []
    with open(log, "a") as out:
        for number, (line, _) in enumerate(LINES):
            out.write(f"4,{number + 2},{number},-;{line}\n SUBSYSTEM=pci\n")
    assert list_values() == [("gpu1", 79), ("0000:01:00", 32), ("gpu0", 48), ("gpu0", 13), ("0000:b3:00", 79)]
    assert list_values() == []
    counters.close()


def test_events_of_nvml_come_first(tmp_path):
    """Kernel log lines would repeat the events that NVML reports."""
    events = [SimpleNamespace(eventType=8, device=1, eventData=94), SimpleNamespace(eventType=1, device=0, eventData=3)]

    def wait(events_set: object, milliseconds: int) -> SimpleNamespace:
        assert milliseconds == 0
        if not events:
            raise RuntimeError("timeout")
        return events.pop(0)

    nvml = SimpleNamespace(
        nvmlEventSetCreate=object, nvmlDeviceRegisterEvents=lambda *arguments: None, nvmlEventTypeXidCriticalError=8,
        nvmlEventSetWait_v2=wait, nvmlDeviceGetIndex=lambda device: device,
    )  # fmt: skip
    log = tmp_path / "kmsg"
    log.write_text("")
    watched = XidEvents(nvml, [0, 1], log)
    log.write_text("4,1,1,-;NVRM: Xid (PCI:0000:44:00): 94, pid=1\n")
    assert watched.read_new() == [("gpu1", 94)]
    assert watched.read_new() == []


# Of the kernel's documentation of mlx5, and of drivers' sources (ice, bnxt).
@pytest.mark.parametrize(
    ("name", "report"),
    [
        ("rx_prio3_pause", True), ("tx_prio3_pause_duration", True), ("rx_corrected_bits_phy", True),
        ("rx_pcs_symbol_err_phy", True), ("rx_err_lane_0_phy", True), ("link_down_events_phy", True),
        ("rx_priority_3_xoff.nic", True), ("rx_pfc_ena_frames_pri3", True), ("rx_fec_uncorrectable_blocks", True),
        ("rx_discards_phy", True), ("rx0_packets", False), ("tx_prio3_packets", False), ("rx_packets_phy", False),
    ],
)  # fmt: skip
def test_which_counters_tell_of_pauses_and_signals(name, report):
    assert is_link_counter(name) is report
    assert len(f"nic_{name}") <= 32  # a counter's name


def test_the_drivers_of_this_machine_are_asked():
    for _, nic in socket.if_nameindex():
        counters = EthtoolCounters(nic, lambda name: True)
        if counters.names:
            values = counters.read()
            assert len(values) == len(counters.names) == len(set(counters.names))
            assert all(value >= 0 for value in values)
            counters.close()
            return
        assert counters.read() == []
    pytest.skip("no network interface of this machine has counters of its driver")


def wait_for(met) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_bandwidth_by_the_millisecond_while_a_step_is_sampled(tmp_path):
    """A link whose counter grows by 1 MB a burst: what is read adds up, in many intervals, and only while asked for."""
    nic, port = tmp_path / "class/net/eth0", tmp_path / "class/infiniband/mlx5_0/ports/1"
    for path, text in {
        nic / "statistics/rx_bytes": "0\n", nic / "statistics/tx_bytes": "7\n", nic / "speed": "25000\n",
        port / "counters/port_rcv_data": "0\n", port / "counters/port_xmit_data": "0\n",
        port / "rate": "400 Gb/sec (4X NDR)\n", tmp_path / "class/net/lo/statistics/rx_bytes": "1\n",
    }.items():  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    step, requested = [0], threading.Event()

    def keeping() -> int:
        requested.set()
        return step[0]

    def grow(file: Path, value: int) -> None:
        with open(file, "r+") as out:  # at once, as the kernel does
            os.pwrite(out.fileno(), f"{value:020d}\n".encode(), 0)

    rates = NicRates(keeping, tmp_path)
    try:
        assert requested.wait(60)
        grow(nic / "statistics/rx_bytes", 999)
        assert len(rates.take_records()) == 0
        step[0] = 100
        wait_for(lambda: rates._links[0].last_bytes[0] == 999)
        for burst in range(1, 6):
            grow(nic / "statistics/rx_bytes", 999 + burst * 1_000_000)
            grow(port / "counters/port_rcv_data", burst * 1_000_000)
            wait_for(lambda burst=burst: all(link.last_bytes[0] >= burst * 1_000_000 for link in rates._links))
        step[0] = 0
        result: list[np.ndarray] = []
        wait_for(lambda: result.append(rates.take_records()) or len(result[-1]))
        rows = result[-1]
    finally:
        rates.close()

    def bytes_of(name: bytes, device: bytes) -> float:
        local = rows[(rows["name"] == name) & (rows["device"] == device)]
        begin = rows["time_ns"][rows["name"] == b"nic_rate_limit"][0]
        seconds = np.diff(local["time_ns"], prepend=begin) / 1e9
        return float((local["value"] * seconds).sum())

    limits = rows[rows["name"] == b"nic_rate_limit"]
    assert dict(zip(limits["device"].tolist(), limits["value"].tolist(), strict=True)) == {
        b"eth0": 25e9 / 8, b"mlx5_0/1": 400e9 / 8,
    }  # fmt: skip
    assert bytes_of(b"nic_rx_rate", b"eth0") == pytest.approx(5e6, abs=1e4)
    assert bytes_of(b"nic_rx_rate", b"mlx5_0/1") == pytest.approx(20e6, abs=1e4)
    assert bytes_of(b"nic_tx_rate", b"eth0") == 0
    peaks = rows[(rows["name"] == b"nic_rx_rate") & (rows["device"] == b"eth0") & (rows["value"] > 0)]
    assert 1 <= len(peaks) <= 6
    assert len(rows) > 4 * 5


def test_a_link_that_is_full_by_the_millisecond_is_told(tmp_path):
    """Half full by the second, full half the time; a link without a known limit is not spoken of."""
    out = tmp_path / "spans" / "host=3"
    ingest = Ingest(out, job="run", host=3, hostname="n", sink=ParquetWriter, clock_ns=0)
    limit = 25e9 / 8
    rows = [(1, limit, "nic_rate_limit", "eth0")]
    rows += [(ms, limit * (ms % 2) * 0.98, "nic_tx_rate", "eth0") for ms in range(1000)]
    rows += [(ms, 5.0, "nic_tx_rate", "eth1") for ms in range(1000)]
    ingest.add_records(COUNTERS, np.array([(t, v, name.encode(), nic.encode()) for t, v, name, nic in rows], COUNTER))
    ingest.close()
    with SpanTables(tmp_path) as tables:
        assert describe_links(tables) == [
            "host 3 eth0 sent 49% of its 25 Gbit/s in recorded steps; one millisecond in a hundred 98%, the fullest 98%"
        ]
