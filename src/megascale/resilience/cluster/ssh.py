"""`--cluster ssh --hosts FILE`: nodes are the machines of a list, which the system's ssh reaches."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.config import Config
from megascale.config.text_files import read_text
from megascale.core.addresses import find_local_address, is_loopback
from megascale.errors import ConfigError
from megascale.resilience.cluster.base import ClusterRequest
from megascale.resilience.cluster.cluster_registry import CLUSTERS
from megascale.resilience.cluster.remote import Host, RemoteCluster

# ssh must not prompt on a terminal, and must notice within seconds that a machine has failed.
SSH_OPTIONS = [
    "-T",
    "-oBatchMode=yes",
    "-oConnectTimeout=10",
    "-oServerAliveInterval=5",
    "-oServerAliveCountMax=3",
    "-oLogLevel=ERROR",
]
# [user@]host[:port] or [user@][IPV6][:port]
_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*))(?::(?P<port>[0-9]{1,5}))?"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MAX_GPUS = 4096  # per machine
# Keys of a line of a hosts file, which are fields of `Host`, and the type of each value.
_HOST_OPTIONS: dict[str, Callable[[str], Any]] = {
    "name": str,
    "user": str,
    "port": int,
    "gpus": int,
    "address": str,
    "interface": str,
    "folder": str,
    "python": str,
}


class SshCluster(RemoteCluster):
    """A cluster of the machines in a hosts file."""

    def __init__(self, request: ClusterRequest) -> None:
        super().__init__(request, read_hosts(request.config.resilience.hosts))
        self._ssh = split_command(request.config.resilience.ssh)

    @classmethod
    def describe_remote_machines(cls, config: Config) -> tuple[int, str]:
        """Return (GPUs per machine, address at which the machines reach this one).

        Raises ConfigError for a malformed or too short list, or if the number of GPUs is unknown.
        """
        limits = config.resilience
        hosts = read_hosts(limits.hosts)
        required_count = limits.nodes + limits.spares
        if required_count > len(hosts):
            raise ConfigError(
                f"resilience.nodes={limits.nodes} and spares={limits.spares} take {required_count} machines, but "
                f"{limits.hosts} names {len(hosts)}; lower --nodes or --spares, or add machines"
            )
        if not hosts[0].gpus and config.train.device != "cpu" and config.parallel.data is None:
            raise ConfigError(
                f"the number of ranks per machine is unknown: write gpus=8 (their number) after each machine in "
                f"{limits.hosts}, or set --parallel.data or --train.device=cpu"
            )
        return hosts[0].gpus, _find_own_address(hosts, limits.ssh, is_required=is_loopback(limits.listen))

    def make_command(self, host: Host, program: Sequence[str]) -> list[str]:
        command = self._ssh + SSH_OPTIONS
        if host.port:
            command += ["-p", str(host.port)]
        if host.user:
            command += ["-l", host.user]
        command += ["--", host.host, f"exec {shlex.join(program)}"]
        return command


def split_command(ssh: str) -> list[str]:
    """Return the words of `resilience.ssh` as a shell splits them, with home folders for a leading ~."""
    return [os.path.expanduser(word) for word in shlex.split(ssh)]


def _find_own_address(hosts: Sequence[Host], ssh: str, *, is_required: bool) -> str:
    """Return the address at which the machines reach this one, "" if all of them are this machine.

    Raises ConfigError if an address is required and no host name resolves.
    """
    unresolved_count = 0
    for host in hosts:
        try:
            address = _find_address_towards(host, ssh)
        except OSError:
            unresolved_count += 1
            continue
        if not is_loopback(address):
            return address
    if is_required and unresolved_count == len(hosts):
        raise ConfigError(
            f"none of the machines' names ({hosts[0].host}, ...) resolves here, and `{ssh} -G` gives no address: set "
            "the address of this machine at which they reach the driver, --resilience.listen=ADDRESS"
        )
    return ""


def _find_address_towards(host: Host, ssh: str) -> str:
    """Return the local address of a connection to a machine. Raises OSError if the machine's name does not resolve."""
    try:
        return find_local_address(host.address or host.host)
    except OSError:  # The name may be defined only in ssh's configuration.
        command = split_command(ssh) + ["-G", host.host]
        settings = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL).stdout
        name = re.search(r"^hostname (\S+)$", settings, re.MULTILINE)
        return find_local_address(name[1] if name else host.host)


# The hosts file -------------------------------------------------------------------------------------------------------


def read_hosts(file: str) -> list[Host]:
    """Return the machines of a hosts file in the order of its lines.

    A line is `[user@]host[:port] [key=value ...]`, and `#` begins a comment. Raises ConfigError that names the line.
    """
    if not file:
        raise ConfigError(
            "cluster ssh needs a list of machines: --hosts FILE (resilience.hosts), with one machine per line"
        )
    try:
        text = read_text(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts={file} cannot be read: {getattr(error, 'strerror', error)}") from None
    hosts: dict[str, Host] = {}
    for line_number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        location = f"{file}, line {line_number}"
        host = _parse_host(words, location)
        if host.name in hosts:
            raise ConfigError(f"{location}: {host.name} is listed already; give each of the two nodes a name=")
        hosts[host.name] = host
    if not hosts:
        raise ConfigError(f"--hosts={file} names no machine; write one per line, such as `gpu01 gpus=8`")
    _check_equal_gpus(file, list(hosts.values()))
    return list(hosts.values())


def _check_equal_gpus(file: str, hosts: Sequence[Host]) -> None:
    """Raise ConfigError if machines have different numbers of GPUs."""
    different = [f"{host.name} {host.gpus}" for host in hosts if host.gpus != hosts[0].gpus]
    if different:
        raise ConfigError(
            f"{file}: all machines of a job have equally many ranks, but {hosts[0].name} has gpus={hosts[0].gpus} and "
            f"others differ ({', '.join(different)}); give all the smallest number, or remove these machines"
        )


def _parse_host(words: Sequence[str], location: str) -> Host:
    """Return the machine of a line. `location` names the line in errors."""
    match = _HOST.fullmatch(words[0])
    if match is None:
        raise ConfigError(
            f"{location}: {words[0]!r} is not a machine; write [user@]host[:port], IPv6 as [2001:db8::1]:22"
        )
    host = Host(name="", host=match["host"] or match["v6"], user=match["user"] or "", port=int(match["port"] or 0))
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _HOST_OPTIONS:
            raise ConfigError(
                f"{location}: {word!r} is not known; write key=value with a key among {', '.join(_HOST_OPTIONS)}"
            )
        try:
            host = replace(host, **{key: _HOST_OPTIONS[key](value)})
        except ValueError:
            raise ConfigError(f"{location}: {key}={value} is not an integer") from None
    if not 0 <= host.port < 65536 or not 0 <= host.gpus <= _MAX_GPUS:
        raise ConfigError(f"{location}: port must be 1 to 65535 and gpus 0 to {_MAX_GPUS}")
    host = replace(host, name=host.name or host.host.replace(":", "-"))
    if not _NAME.fullmatch(host.name):
        raise ConfigError(f"{location}: name={host.name} is not a node's name; use letters, digits, dots and dashes")
    return host


CLUSTERS.register("ssh", SshCluster)
