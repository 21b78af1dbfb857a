"""Addresses of this machine: network interfaces, loopback, and free ports."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import random
import socket
import struct
from collections.abc import Container
from pathlib import Path

from megascale.errors import ConfigError

# Environment variable of rank 0 with the file descriptor of a listening socket, which the launcher opened for the
# rendezvous store.
STORE_LISTENER_VARIABLE = "MEGASCALE_STORE_LISTENER"
_SIOCGIFADDR = 0x8915  # Linux: ioctl that returns the first IPv4 address of an interface
_LINK_LOCAL_SCOPE = "20"
_PORT_ATTEMPTS = 1000


def find_local_address(host: str) -> str:
    """Return the local address from which the kernel would send to `host`. Nothing is sent.

    Raises OSError if the name does not resolve or no route leads to it.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def list_interface_addresses() -> dict[str, str]:
    """Return an address by interface, IPv4 rather than IPv6. Interfaces without an address are left out."""
    addresses: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if scope != _LINK_LOCAL_SCOPE:  # link-local addresses need a zone, which few programs pass on
                addresses[name] = str(ipaddress.ip_address(bytes.fromhex(digits)))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()))
                addresses[name] = socket.inet_ntoa(reply[20:24])
    return addresses


def get_interface_address(interface: str) -> str:
    """Return the address of an interface. Raises ConfigError, listing the interfaces, if it has none."""
    addresses = list_interface_addresses()
    if interface not in addresses:
        listing = ", ".join(f"{name} ({address})" for name, address in sorted(addresses.items())) or "none"
        raise ConfigError(
            f"--interface={interface} has no address on this machine; choose an interface with an address: {listing}"
        )
    return addresses[interface]


def find_interface(address: str) -> str:
    """Return the interface whose first address is `address`, or "" if there is none or `address` is a host name."""
    for name, interface_address in list_interface_addresses().items():
        if interface_address == address:
            return name
    return ""


def is_loopback(host: str) -> bool:
    """Return whether all addresses of `host` are loopback addresses, which only this machine reaches."""
    try:
        results = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    addresses = {str(socket_address[0]).partition("%")[0] for _, _, _, _, socket_address in results}
    return bool(addresses) and all(ipaddress.ip_address(address).is_loopback for address in addresses)


def find_free_port(address: str = "127.0.0.1", avoid: Container[int] = ()) -> int:
    """Return a port of `address` that is free now and not in `avoid`.

    The port lies below the range from which the kernel assigns ports itself. So only a process that requests this very
    port can take it before the caller listens. Raises OSError if none of 1,000 attempts finds a free port.
    """
    outgoing_range = Path("/proc/sys/net/ipv4/ip_local_port_range")
    if outgoing_range.exists():
        first_outgoing = int(outgoing_range.read_text().split()[0])
    else:
        first_outgoing = 32768
    lowest = min(10_000, max(1024, first_outgoing - 1000))
    highest = max(first_outgoing, 2048)
    for _ in range(_PORT_ATTEMPTS):
        port = random.randrange(lowest, highest)
        if port in avoid:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise OSError(f"no free port at {address} between {lowest} and {highest}")
