"""Messages of a driver that cannot start."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

import pytest

from megascale.config import ResilienceConfig, load
from megascale.errors import ConfigError
from megascale.resilience.driver.api.access import describe_open_addresses
from megascale.resilience.driver.serve_driver import make_listen_error
from megascale.resilience.driver.start_driver import prepare


def test_an_address_that_does_not_resolve_and_a_port_that_is_taken_are_told_in_words() -> None:
    with pytest.raises(OSError) as result:
        socket.getaddrinfo("no such host", 0, flags=socket.AI_NUMERICHOST)
    output = str(make_listen_error("port", "no such host", 0, result.value))
    assert "resilience.listen=no such host" in output
    assert "Unknown error" not in output
    assert "known" in output.lower() or "resol" in output.lower()
    assert "already in use" in str(make_listen_error("port", "127.0.0.1", 80, OSError(errno.EADDRINUSE, "long words")))


def test_an_address_that_other_machines_reach_is_told_with_what_keeps_it_and_how_to_close_it() -> None:
    agents, api = ("0.0.0.0", 7001), "https://0.0.0.0:7002"
    for host in ("127.0.0.1", "::1", "localhost"):
        assert describe_open_addresses(ResilienceConfig(listen=host), agents, api) == ()
    report = describe_open_addresses(ResilienceConfig(listen="0.0.0.0"), agents, api)
    assert all("resilience.listen=0.0.0.0" in text and "set resilience.listen=127.0.0.1" in text for text in report)
    (of_api, of_agents) = report
    assert api in of_api
    assert "TLS with a certificate of the job's own" in of_api
    assert "token.act" in of_api
    assert "port 7001" in of_agents
    assert "not encrypted" in of_agents or "none is encrypted" in of_agents
    (page,) = describe_open_addresses(ResilienceConfig(agent_metrics="[::]:9100"), agents, api)
    assert "resilience.agent_metrics=[::]:9100" in page
    assert "without a token" in page
    assert describe_open_addresses(ResilienceConfig(agent_metrics="127.0.0.1:9100"), agents, api) == ()
    local = ResilienceConfig(listen="::", tls_certificate="a.crt", tls_key="a.key")
    assert "resilience.tls_certificate=a.crt" in describe_open_addresses(local, agents, api)[0]


def test_a_relative_folder_of_another_trainer_is_that_of_the_launching_shell(tmp_path, monkeypatch):
    """An agent has another working directory, and looks for checkpoints below an absolute folder."""
    monkeypatch.chdir(tmp_path)
    overrides = ["--train.device=cpu", "--foreign.command=['true']", "--foreign.per_node=1"]
    for folder, expected in (("", tmp_path), ("work", tmp_path / "work"), ("/data", Path("/data"))):
        config, _ = prepare(load(None, [*overrides, f"--foreign.folder={folder}"]))
        assert config.foreign.folder == str(expected)


def test_standby_processes_of_another_trainer_are_refused():
    overrides = ["--train.device=cpu", "--foreign.command=['true']", "--resilience.standby_processes=true"]
    with pytest.raises(ConfigError, match=r"set --resilience\.standby_processes=false"):
        prepare(load(None, overrides))
