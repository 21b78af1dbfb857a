"""`--cluster ssh --hosts FILE`: nodes are machines of a list, reached by this system's ssh and its configuration."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Sequence

from megascale.config import Config
from megascale.core.interfaces import address_towards
from megascale.core.ports import is_loopback
from megascale.errors import ConfigError
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.hosts_file import Host, read_hosts
from megascale.resilience.cluster.remote import RemoteCluster, quoted

# No question on a terminal that nobody watches; a machine that is gone is known within seconds.
OPTIONS: tuple[str, ...] = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=5")
OPTIONS += ("-o", "ServerAliveCountMax=3", "-o", "LogLevel=ERROR")


class SshCluster(RemoteCluster):
    """See RemoteCluster."""

    def __init__(self, request: ClusterRequest) -> None:
        super().__init__(request, read_hosts(request.config.resilience.hosts))
        self._ssh = _words(request.config.resilience.ssh)

    @classmethod
    def on_other_machines(cls, config: Config) -> tuple[int, str]:
        """ConfigError for a list that cannot be used or is too short, and where GPUs are not counted."""
        limits, hosts = config.resilience, read_hosts(config.resilience.hosts)
        wanted = limits.nodes + limits.spares
        if wanted > len(hosts):
            raise ConfigError(
                f"resilience.nodes={limits.nodes} and spares={limits.spares} take {wanted} machines, but "
                f"{limits.hosts} names {len(hosts)}; lower --nodes or --spares, or add machines"
            )
        if not hosts[0].gpus and config.train.device != "cpu" and config.parallel.data is None:
            raise ConfigError(
                f"how many ranks has a machine? Say gpus=8 (or how many there are) behind each in {limits.hosts}, or "
                "--parallel.data, or --train.device=cpu"
            )
        return hosts[0].gpus, _own_address(hosts, limits.ssh, is_loopback(limits.listen))

    def command(self, host: Host, words: Sequence[str]) -> list[str]:
        port = ["-p", str(host.port)] if host.port else []
        login = ["-l", host.user] if host.user else []
        return [*self._ssh, *OPTIONS, *port, *login, "--", host.host, f"exec {quoted(words)}"]


def _own_address(hosts: Sequence[Host], ssh: str, needed: bool) -> str:
    """Where the machines reach this one, "" on this very machine; ConfigError where that is needed and not to be
    found out."""
    unknown = 0
    for host in hosts:
        try:
            found = _towards(host, ssh)
        except OSError:
            unknown += 1
            continue
        if not is_loopback(found):
            return found
    if needed and unknown == len(hosts):
        raise ConfigError(
            f"none of the names of machines ({hosts[0].host}, ...) resolves here, nor does `{ssh} -G` give an address: "
            "say at which address of this machine they reach the driver: --resilience.listen=ADDRESS"
        )
    return ""


def _words(ssh: str) -> list[str]:
    """Return the words of `resilience.ssh` as a shell does, with home folders for a leading ~."""
    return [os.path.expanduser(word) for word in shlex.split(ssh)]


def _towards(host: Host, ssh: str) -> str:
    try:
        return address_towards(host.address or host.host)
    except OSError:  # a name that only ssh's configuration knows
        words = [*_words(ssh), "-G", host.host]
        said = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
        name = re.search(r"^hostname (\S+)$", said, re.MULTILINE)
        return address_towards(name[1] if name else host.host)


CLUSTERS.register("ssh", SshCluster)
