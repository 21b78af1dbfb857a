"""The file with a list of machines: one a line, with what is special about each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megascale.config.text_files import read_text
from megascale.errors import ConfigError

_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]*)@)?"
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9][A-Za-z0-9._-]*))(?::(?P<port>[0-9]{1,5}))?"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class Host:
    """A machine that agents can be started on.

    Attributes:
        name: of the node.
        host: name or address by which ssh reaches it; user, port: "" and 0: as ssh's own configuration has them.
        gpus: how many of its GPUs are used, 0: none or not said.
        address: at which the other nodes reach it, "": that of `interface`, else the one that leads to the driver.
        interface: whose network the ranks use, "": as above.
        folder: for the node's own things, "": ~/.megascale.
        python: interpreter there, "": the same path as here.
    """

    name: str
    host: str
    user: str = ""
    port: int = 0
    gpus: int = 0
    address: str = ""
    interface: str = ""
    folder: str = ""
    python: str = ""


_OPTIONS: dict[str, Callable[[str], Any]] = {
    "name": str,
    "user": str,
    "port": int,
    "gpus": int,
    "address": str,
    "interface": str,
    "folder": str,
    "python": str,
}


def read_hosts(file: str) -> list[Host]:
    """The machines of a hosts file, in its order. ConfigError that names the line for one that cannot be used.

    Args:
        file: its path; a line is `[user@]host[:port] [key=value ...]`, `#` begins a comment.
    """
    if not file:
        raise ConfigError("cluster ssh needs a list of machines: --hosts FILE (resilience.hosts), a machine a line")
    try:
        text = read_text(Path(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--hosts={file} cannot be read: {getattr(error, 'strerror', error)}") from None
    hosts: list[Host] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"{file}, line {number}")
        for other in hosts:
            if other.name == host.name:
                raise ConfigError(f"{file}, line {number}: {host.name} is there already; two nodes need a name= each")
        hosts.append(host)
    if not hosts:
        raise ConfigError(f"--hosts={file} names no machine; write one a line, such as `gpu01 gpus=8`")
    counts = {host.gpus for host in hosts}
    if len(counts) > 1:
        shown = ", ".join(f"{host.name} {host.gpus}" for host in hosts if host.gpus != hosts[0].gpus)
        raise ConfigError(
            f"{file}: all machines of a job have equally many ranks, but {hosts[0].name} has gpus={hosts[0].gpus} and "
            f"others differ ({shown}); give the least to all, or leave the odd ones out"
        )
    return hosts


def _host(words: list[str], where: str) -> Host:
    found = _HOST.fullmatch(words[0])
    if found is None:
        raise ConfigError(f"{where}: {words[0]!r} is no machine; write [user@]host[:port], IPv6 as [2001:db8::1]:22")
    host = Host("", found["host"] or found["v6"], found["user"] or "", int(found["port"] or 0))
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals or key not in _OPTIONS:
            raise ConfigError(
                f"{where}: {word!r} is not known; after the machine may stand {', '.join(_OPTIONS)}, as key=value"
            )
        try:
            host = replace(host, **{key: _OPTIONS[key](value)})
        except ValueError:
            raise ConfigError(f"{where}: {key}={value} is no whole number") from None
    if not 0 <= host.port < 65536 or not 0 <= host.gpus <= 4096:
        raise ConfigError(f"{where}: port must be 1 to 65535 and gpus 0 to 4096")
    host = replace(host, name=host.name or host.host.replace(":", "-"))
    if not _NAME.fullmatch(host.name):
        raise ConfigError(f"{where}: name={host.name} is no node's name; use letters, digits, dots and dashes")
    return host
