"""Which of a machine's network interfaces an address belongs to, and which address leads to another machine."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from megascale.errors import ConfigError

_SIOCGIFADDR = 0x8915  # Linux: the first IPv4 address of an interface


def address_towards(host: str) -> str:
    """The address of this machine from which its kernel would talk to `host`; nothing is sent.

    OSError where the name does not resolve or no route leads there.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        return str(probe.getsockname()[0])


def list_interface_addresses() -> dict[str, str]:
    """Interface -> its first address, IPv4 before IPv6, of those that have one."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != "20":  # link-local addresses need a zone, which few programs pass on
                found[name] = str(ipaddress.ip_address(bytes.fromhex(digits)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_of(interface: str) -> str:
    """The address of an interface; ConfigError, with those there are, if it has none."""
    there = list_interface_addresses()
    if interface not in there:
        shown = ", ".join(f"{name} ({address})" for name, address in sorted(there.items())) or "none"
        raise ConfigError(f"--interface={interface} has no address on this machine; interfaces with one: {shown}")
    return there[interface]


def interface_of(address: str) -> str:
    """The interface that has `address` as its first one; "" if none does, or it is a name."""
    return next((name for name, own in list_interface_addresses().items() if own == address), "")
