"""A port to listen on later, or one that is held from the start."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import socket
from collections.abc import Container
from pathlib import Path

# In the environment of rank 0: the file descriptor of the listening socket for its store that its launcher holds.
LISTENER = "MEGASCALE_STORE_LISTENER"


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name counts where all its addresses do."""
    try:
        found = {about[4][0] for about in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return bool(found) and all(ipaddress.ip_address(str(each).partition("%")[0]).is_loopback for each in found)


def find_free_port(address: str = "127.0.0.1", avoid: Container[int] = ()) -> int:
    """A port of `address` that is free now, none of `avoid`.

    It is below those that the kernel gives to outgoing connections and to whoever binds port 0, so that only another
    process that wants this very port can take it before its user listens. OSError if none of 1000 is free.
    """
    outgoing = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first = int(outgoing.read_text().split()[0]) if outgoing.exists() else 32768
    for _ in range(1000):
        port = random.randrange(min(10_000, max(1024, first - 1000)), max(first, 2048))
        if port in avoid:
            continue
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    raise OSError(f"no free port at {address}")
