"""Hosts' clocks laid on host 0's over a real socket, and counters as a machine shows them."""

from __future__ import annotations

import os
import random
import socket
import stat
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megascale.core import strict_json
from megascale.observe.store.counters import HostCounters
from megascale.observe.store.host_clock import UNKNOWN, ClockServer, HostClock

MINUTES = 7 * 60 * 10**9


@pytest.fixture
def server(tmp_path):
    built = ClockServer(tmp_path, lambda: time.monotonic_ns() + 10**18, "127.0.0.1")
    yield built
    built.close()


@pytest.mark.parametrize("drift", [0.0, 50e-6])
def test_a_clock_that_is_minutes_off_and_drifts_is_within_its_error(server, tmp_path, drift):
    """The truth is known here: both clocks are made of one."""
    begun = time.monotonic_ns()

    def read_own() -> int:
        return round((time.monotonic_ns() - begun) * (1 + drift)) + MINUTES

    clock = HostClock(tmp_path, 10**18 - 5 * MINUTES, read_own)
    assert clock.read_offset()[1:] == (10**18 - 5 * MINUTES, UNKNOWN)
    for _ in range(20):
        assert clock.compare()
        at, offset, error = clock.read_offset()
        true = begun + round((at - MINUTES) / (1 + drift)) + 10**18 - at
        assert abs(offset - true) <= error
        assert error < 20_000_000
        time.sleep(random.random() / 100)


def test_strangers_get_no_answer_and_are_not_believed(server, tmp_path):
    file = tmp_path / "clock.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    report = strict_json.loads(file.read_text())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.2)
        stranger.connect((report["address"], report["port"]))
        for data in (b"", b"x", b"x" * 32, b"x" * 1000):
            stranger.send(data)
        with pytest.raises(TimeoutError):
            stranger.recv(64)
    file.write_text(strict_json.dumps(report | {"token": "another" * 9}))
    clock = HostClock(tmp_path, 0)
    assert not clock.compare()
    assert clock.read_offset()[2] == UNKNOWN
    file.write_text(strict_json.dumps(report))
    assert clock.compare()


@pytest.mark.parametrize("text", ["", "[]", '{"address": 5}', '{"address": "no such host", "port": 5, "token": "x"}'])
def test_a_file_that_says_nothing_leaves_the_clock_alone(tmp_path, text):
    (tmp_path / "clock.json").write_text(text)
    clock = HostClock(tmp_path, 77)
    assert not clock.compare()
    assert clock.read_offset()[1:] == (77, UNKNOWN)


def test_counters_are_what_the_machine_shows(tmp_path):
    port = tmp_path / "class/infiniband/mlx5_0/ports/1"
    nic = tmp_path / "class/net/eth0"
    for path, text in {
        nic / "statistics/rx_bytes": "100\n", nic / "carrier_changes": "3\n", nic / "speed": "-1\n",
        tmp_path / "class/net/lo/statistics/rx_bytes": "5\n", port / "counters/port_rcv_data": "25\n",
        port / "hw_counters/np_cnp_sent": "9\n", port / "state": "4: ACTIVE\n", port / "counters/symbol_error": "N/A\n",
    }.items():  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def power(gpu: int) -> int:
        if gpu == 1:
            raise RuntimeError("it is off the bus")
        return 500_000

    nvml = SimpleNamespace(
        nvmlInit=lambda: None, nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetHandleByIndex=int, NVML_CLOCK_SM=1,
        nvmlDeviceGetPowerUsage=power, nvmlDeviceGetClockInfo=lambda gpu, kind: 1500 + gpu,
    )  # fmt: skip
    result = HostCounters(tmp_path, tmp_path, nvml).sample(123)
    report = {(row["name"].decode(), row["device"].decode()): float(row["value"]) for row in result}
    assert report == {
        ("nic_rx_bytes", "eth0"): 100, ("nic_carrier_changes", "eth0"): 3, ("nic_speed_mbit", "eth0"): -1,
        ("ib_port_rcv_bytes", "mlx5_0/1"): 100, ("ib_np_cnp_sent", "mlx5_0/1"): 9, ("ib_link_state", "mlx5_0/1"): 4,
        ("gpu_power_watts", "gpu0"): 500, ("gpu_sm_clock_mhz", "gpu0"): 1500, ("gpu_sm_clock_mhz", "gpu1"): 1501,
    }  # fmt: skip
    assert set(result["time_ns"].tolist()) == {123}


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="no Linux")
def test_this_machine_has_a_processor_and_memory():
    first = HostCounters().sample(1)
    names = {name.decode() for name in np.unique(first["name"])}
    assert {"cpu_busy_seconds", "memory_available_bytes"} <= names
