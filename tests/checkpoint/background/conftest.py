"""Runs with a checkpoint service of their own, and what their tests share."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megascale.checkpoint.background import service, service_protocol
from megascale.checkpoint.background.service_protocol import Register
from megascale.config import CheckpointConfig


def background(**keys: Any) -> CheckpointConfig:
    return CheckpointConfig(**{"background": True, "linger": 20.0, **keys})


def await_other(condition: Any, seconds: float = 20.0) -> Any:
    """Wait for another process; fails if it does not come."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.005)
    return value


def service_pid(run: Path) -> int:
    sock = service.connect_checkpoint_service(service_protocol.private_folder(run))
    pid = sock.request(Register()).pid
    sock.close()
    return pid


def large_state(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((2048, 4096), float(step)), "b": torch.arange(10) + step}


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """A run folder; its service (and those of host-* folders in it) is stopped afterwards."""
    folder = tmp_path / "run"
    folder.mkdir()
    yield folder
    for host in (folder,) + tuple(folder.glob("host-*")):
        pid = service_protocol.locate_service(service_protocol.private_folder(host)).find_service_pid()
        if pid:
            os.kill(pid, signal.SIGKILL)
