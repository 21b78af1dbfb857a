"""`megascale launch --dashboard PORT` with a port that is in use."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from megascale.cli.dashboard import check_port
from megascale.errors import ConfigError


def test_a_used_port_is_refused_before_the_job_starts(megascale: Any, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        result = megascale("launch", "--dashboard", str(port), "--train.runs=runs", "--nodes", "1")
    assert result.returncode == 2
    assert f"--dashboard {port}: the page cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "choose another port, or 0" in result.stderr
    assert not (tmp_path / "runs").exists()


def test_free_ports_are_accepted() -> None:
    check_port(0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError):
            check_port(port)
    check_port(port)
