"""The list of machines: what a line may say, and what is said of one that cannot be used."""

from __future__ import annotations

import socket

import pytest

from megascale.config import Config, ResilienceConfig
from megascale.errors import ConfigError
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.ssh import Host, read_hosts


def test_a_line_is_a_machine_with_what_is_special_about_it(tmp_path):
    file = tmp_path / "hosts"
    file.write_text(
        "# the first rack\n\ngpu01 gpus=8\nroot@gpu02.example.org:2222 gpus=8 interface=eth1 folder=/scratch # slow\n"
        "[2001:db8::7]:22 gpus=8 name=v6 address=2001:db8::7 python=/opt/venv/bin/python\n"
    )
    assert read_hosts(str(file)) == [
        Host("gpu01", "gpu01", gpus=8),
        Host("gpu02.example.org", "gpu02.example.org", "root", 2222, 8, interface="eth1", folder="/scratch"),
        Host("v6", "2001:db8::7", "", 22, 8, address="2001:db8::7", python="/opt/venv/bin/python"),
    ]


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("", "names no machine"),
        ("-oProxyCommand=id\n", "line 1: '-oProxyCommand=id' is not a machine"),
        ("a;reboot\n", "is not a machine"),
        ("a gpu=8\n", "line 1: 'gpu=8' is not known; write key=value with a key among name, user, port, gpus"),
        ("a gpus=eight\n", "gpus=eight is not an integer"),
        ("a:99999\n", "port must be 1 to 65535"),
        ("a\n\nb\na\n", "line 4: a is listed already"),
        ("a gpus=8\nb gpus=8\nc gpus=4\n", r"a has gpus=8 and others differ \(c 4\)"),
        ("a name=../x\n", "is not a node's name"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, text, output):
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ConfigError, match=output):
        read_hosts(str(file))


def test_a_list_that_is_missing_short_or_counts_no_gpus_is_told_before_anything_starts(tmp_path):
    ssh = CLUSTERS["ssh"]

    def ask(hosts: str, device: str = "cpu", nodes: int = 2):
        config = Config(resilience=ResilienceConfig(hosts=hosts, nodes=nodes, spares=1))
        return ssh.describe_remote_machines(
            config.model_copy(update={"train": config.train.model_copy(update={"device": device})})
        )

    with pytest.raises(ConfigError, match="needs a list of machines: --hosts FILE"):
        ask("")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        ask(str(tmp_path / "none"))
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1\n127.0.0.2\n127.0.0.3\n")
    with pytest.raises(ConfigError, match=r"nodes=4 and spares=1 take 5 machines, but .* names 3"):
        ask(str(file), nodes=4)
    with pytest.raises(ConfigError, match="number of ranks per machine is unknown"):
        ask(str(file), device="auto")
    assert ask(str(file)) == (0, "")  # on loopback only this machine is reached


def test_names_that_only_sshs_configuration_knows_lead_to_the_drivers_address(tmp_path):
    file, configuration = tmp_path / "hosts", tmp_path / "config"
    file.write_text("no.such.host.invalid\n")
    config = Config(resilience=ResilienceConfig(hosts=str(file), nodes=1, spares=0, ssh=f"ssh -F {configuration}"))
    config = config.model_copy(update={"train": config.train.model_copy(update={"device": "cpu"})})
    configuration.write_text("")
    with pytest.raises(ConfigError, match=r"no.such.host.invalid, .*--resilience.listen=ADDRESS"):
        CLUSTERS["ssh"].describe_remote_machines(config)
    local = socket.gethostbyname(socket.gethostname())
    configuration.write_text(f"Host no.such.host.invalid\nHostName {local}\n")
    assert CLUSTERS["ssh"].describe_remote_machines(config) == (0, "" if local.startswith("127.") else local)
