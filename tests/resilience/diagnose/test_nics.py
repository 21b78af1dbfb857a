"""Checks of NICs with a stand-in for perftest's ib_write_bw, which needs an RDMA device."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megascale.resilience.diagnose import nics

# The client is the call whose last argument is an address.
SCRIPT = """#!/bin/sh
for address; do :; done
[ "$address" = 127.0.0.1 ] || exec sleep 1000
{client}
"""


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nics, "_RDMA_START_SECONDS", 0.0)


def install_client(folder: Path, monkeypatch: pytest.MonkeyPatch, client: str) -> None:
    """Put an ib_write_bw into the path whose client runs the shell command `client`."""
    program = folder / "ib_write_bw"
    program.write_text(SCRIPT.format(client=client))
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_rate_of_an_rdma_device_is_read_from_the_clients_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_client(tmp_path, monkeypatch, 'echo " 65536      100000           391.20             388.00     0.74"')
    check = nics._measure_rdma("mlx5_0", 18600)
    assert (check.name, check.result, check.measured) == ("rdma loopback mlx5_0", "passed", 388.0 / 8)


def test_the_clients_error_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_client(tmp_path, monkeypatch, "echo ' Unable to open the device' >&2; exit 1")
    check = nics._measure_rdma("mlx5_0", 18600)
    assert (check.result, check.details) == ("failed", "Unable to open the device")


def test_an_output_that_stays_open_does_not_stop_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that the kernel cannot end keeps it open."""
    pid_file = tmp_path / "pid"
    install_client(tmp_path, monkeypatch, f"sleep 1000 & echo $! > {pid_file}; echo '1 1 391.20 388.00'")
    try:
        check = nics._measure_rdma("mlx5_0", 18600)
    finally:
        os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert check.result == "passed"


def test_a_client_without_an_end_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nics, "_RDMA_SECONDS", 0.2)
    install_client(tmp_path, monkeypatch, "exec sleep 1000")
    check = nics._measure_rdma("mlx5_0", 18600)
    assert (check.result, check.details) == ("failed", "no result within 0.2 s")
