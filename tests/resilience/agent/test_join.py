"""`megascale agent`: where the secret comes from, and what is said when no driver can be joined."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megascale.core.secrets import JOB_SECRET_VARIABLE
from megascale.errors import ConfigError, DataError, TrainingError
from megascale.resilience.agent import join as joining
from megascale.resilience.agent.join import join_job, parse_driver_address, read_secret

SECRET = "5" * 64


def test_the_secret_comes_from_a_private_file_stdin_or_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    file.chmod(0o644)
    with pytest.raises(DataError, match="can be read by others; run `chmod 600"):
        read_secret(str(file))
    file.chmod(0o600)
    assert read_secret(str(file)) == SECRET.encode()
    monkeypatch.setattr(sys, "stdin", io.StringIO(SECRET + "\nmore"))
    assert read_secret("-") == SECRET.encode()
    monkeypatch.setenv(JOB_SECRET_VARIABLE, SECRET)
    assert read_secret(None) == SECRET.encode()
    with pytest.raises(ConfigError, match="secret is missing"):  # it was forgotten: no child inherits it
        read_secret(None)
    file.write_text("short")
    with pytest.raises(ConfigError, match="secret is malformed"):
        read_secret(str(file))


@pytest.mark.parametrize("arguments", [[], ["--secret-file", "/dev/stdin"]])
def test_an_agent_keeps_no_secret_in_its_environment(arguments):
    """It waits for a driver at an address without a listener, while other processes can read its environment."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        command = [sys.executable, "-m", "megascale", "agent", f"127.0.0.1:{port}", "--job", "job"] + list(arguments)
        environment = os.environ | {JOB_SECRET_VARIABLE: SECRET}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            process.stdin.write(SECRET)
            process.stdin.close()
            silent.accept()[0].close()  # it has the secret, and asks
            observed = Path(f"/proc/{process.pid}/environ").read_bytes()
            process.kill()
    assert b"MEGASCALE_JOB_SECRET=" not in observed
    assert SECRET.encode() not in observed


@pytest.mark.parametrize("text", ["head", "head:", ":1", "head:0", "head:70000", "::1:80", "head:http"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="not the address of a driver"):
        parse_driver_address(text)


def test_addresses():
    assert parse_driver_address("head01:29400") == ("head01", 29400)
    assert parse_driver_address("[2001:db8::1]:1") == ("2001:db8::1", 1)


def attempt(location, tmp_path, output, **changes):
    arguments = {"node": "n0", "folder": tmp_path, "address": "", "interface": "", "timeout": 0.0}
    join_job([location], "job", SECRET.encode(), **arguments | changes, report=output.append)


def test_a_name_that_does_not_resolve_and_a_port_where_nobody_listens_are_told(tmp_path, monkeypatch):
    output: list[str] = []

    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with monkeypatch.context() as patch:
        patch.setattr(joining, "find_local_address", unknown)
        with pytest.raises(TrainingError, match="the name head01 does not resolve on this machine"):
            attempt(("head01", 29400), tmp_path, output)
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(TrainingError, match=r"no driver of job job answered within 0 s: nothing answers at 127"):
            attempt(("127.0.0.1", used.getsockname()[1]), tmp_path, output)
    assert [line.split(":")[0] for line in output] == ["waiting for a driver"] * 2


def test_an_interface_or_address_that_this_machine_lacks_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"--interface=eth77 has no address on this machine; .*lo \(127.0.0.1\)"):
        attempt(("127.0.0.1", 1), tmp_path, [], interface="eth77")
    with pytest.raises(ConfigError, match=r"--address=192\.0\.2\.9 is not an address of this machine"):
        attempt(("127.0.0.1", 1), tmp_path, [], address="192.0.2.9")
