"""Stores through which the ranks of a job meet, by the scheme of `rendezvous.url`.

`env://` is torch's TCPStore on MASTER_ADDR:MASTER_PORT, served by rank 0 or by torchrun's agent. Plugins register other
schemes, such as `redis://` and `rediss://` (`megascale.plugins.redis`).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import urlsplit

from torch.distributed import DistError, DistStoreError, HashStore, Store, TCPStore

from megascale.config import RendezvousConfig
from megascale.config.registry import Registry
from megascale.core.addresses import STORE_LISTENER_VARIABLE
from megascale.errors import ConfigError, TrainingError, missing_extra

log = logging.getLogger(__name__)
_LEAST_CONNECT_SECONDS = 1.0  # of a start's time that remain for TCPStore
_CONNECT_SECONDS = 2.0  # limit of one attempt to reach the server
_CONNECT_POLL = 0.02  # seconds between two attempts
_ERROR_CHARACTERS = 200  # of a message of torch that appears in another error
_STORE_SCHEMES = {"rediss": "redis"}  # registered scheme by the scheme of a URL with TLS


class StoreFault(DistStoreError):
    """The store fails: it is unreachable for too long, out of memory, or refuses access."""


class StoreFenced(StoreFault):
    """The attempt of this process is over: a newer attempt holds the job, or the job has ended."""


class Superseded(StoreFenced):
    """The start that this process tried to join is over: another rank 0 has opened the job again."""


class ExternalStore(Store):
    """Store of a job on a server that outlives the job. Rank 0 owns the job's keys on the server."""

    def seal(self) -> None:
        """Let no further process join the job. All ranks call this method once all have joined."""
        raise NotImplementedError

    def remove_all(self) -> None:
        """Remove all keys of the job. The last rank that leaves the job calls this method."""
        raise NotImplementedError

    def expire_soon(self, seconds: float) -> None:
        """Let the job's keys expire after `seconds`, so that other ranks can still read why the job failed."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection to the server without removing keys."""
        raise NotImplementedError


@dataclass(frozen=True)
class StoreRequest:
    """Request of a rank for the store of its job.

    Attributes:
        settings: section `rendezvous` of the configuration.
        run_name: `train.name`, from which `read_job_and_attempt` makes the job's name on a shared server.
        world: number of ranks.
        timeout: seconds within which the store must be open. Earlier steps may have used a part of `settings.timeout`.
        check: called while the rank waits for the server. It raises an error if the start must end.
    """

    settings: RendezvousConfig
    run_name: str
    rank: int
    world: int
    timeout: float
    check: Callable[[], None] | None = None


def open_store(request: StoreRequest) -> Store:
    """Open the store that `rendezvous.url` names.

    Raises:
        ConfigError: the address is wrong, access is refused, or the extra for the scheme is not installed.
        TrainingError: rank 0 or the server was not reached within `request.timeout` seconds.
    """
    scheme = urlsplit(request.settings.url).scheme
    try:
        open_scheme = STORES[_STORE_SCHEMES.get(scheme, scheme)]
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from None
    return open_scheme(request)


def read_job_and_attempt(run_name: str) -> tuple[str, int]:
    """Return the job's name on a shared server and the number of its attempt, both equal on all ranks.

    A launcher sets them in MEGASCALE_JOB and MEGASCALE_ATTEMPT. The default name is `run_name` with torchrun's id and
    MASTER_ADDR:MASTER_PORT, and the default attempt is 0. torchrun's restart count cannot be the attempt, because it
    differs between nodes: a node does not count a restart that another node caused. The store itself distinguishes
    several starts of one attempt.

    Raises:
        ConfigError: MEGASCALE_ATTEMPT is not a number.
    """
    environment = os.environ
    address = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
    default_name = f"{run_name}-{environment.get('TORCHELASTIC_RUN_ID', '')}@{address}"
    attempt = environment.get("MEGASCALE_ATTEMPT") or "0"
    if not attempt.isdigit():
        raise ConfigError(f"MEGASCALE_ATTEMPT={attempt!r} is not a number; count attempts from 0")
    return environment.get("MEGASCALE_JOB") or default_name, int(attempt)


def has_agent_store() -> bool:
    """Return whether torchrun's agent serves the store on MASTER_ADDR:MASTER_PORT."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _await_server(address: tuple[str, int], seconds: float, check: Callable[[], None]) -> float:
    """Wait until a server listens on `address`, because TCPStore cannot be interrupted while it tries to connect.

    Returns:
        The rest of the `seconds`, at least _LEAST_CONNECT_SECONDS, within which TCPStore reports a missing server.
    """
    deadline = time.monotonic() + seconds
    while (remaining := deadline - time.monotonic()) > _LEAST_CONNECT_SECONDS:
        check()
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=_CONNECT_SECONDS):
            return remaining
        time.sleep(_CONNECT_POLL)
    return min(seconds, _LEAST_CONNECT_SECONDS)


def open_tcp_store(request: StoreRequest) -> Store:
    """Open a TCPStore on MASTER_ADDR:MASTER_PORT, which rank 0 serves unless torchrun's agent does.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is unset or wrong, or rank 0 cannot listen on the port.
        TrainingError: rank 0 was not reached within `request.timeout` seconds.
    """
    host = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    if host is None or port is None:
        if request.world == 1:
            return HashStore()  # within this process, since no other rank needs the store
        raise ConfigError(
            f"WORLD_SIZE={request.world} is set, but MASTER_ADDR and MASTER_PORT are not: start the ranks with "
            "`megascale train` or torchrun, or set --rendezvous.url=redis://HOST:PORT. If an earlier job has left "
            "WORLD_SIZE and RANK in the shell, unset them"
        )
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"MASTER_PORT={port!r} is not a port; use a free port from 1024 to 65535")
    if os.environ.get("USE_LIBUV") == "0":
        # torch's older server does not wake ranks that wait for a key which compare_set creates.
        raise ConfigError("USE_LIBUV=0 selects torch's older TCPStore server, which loses wake-ups; unset USE_LIBUV")
    is_server = request.rank == 0 and not has_agent_store()
    inherited_listener = os.environ.pop(STORE_LISTENER_VARIABLE, None)  # descriptor, if the launcher has opened it
    listener = None
    if is_loopback(host):
        restrict_to_loopback()
        if is_server:
            if inherited_listener:
                listener = int(inherited_listener)
            else:
                listener = open_listener(host, int(port)).detach()
    elif is_server:
        log.warning(
            "MASTER_ADDR=%s: other machines reach the job's store (torch's TCPStore, port %s), and nothing protects "
            "it: keep it on a network that only the job's machines reach, or use rendezvous.url=rediss://... with a "
            "password (docs/security.md)",
            host,
            port,
        )
    remaining_seconds = request.timeout
    if not is_server and request.check is not None:
        remaining_seconds = _await_server((host, int(port)), request.timeout, request.check)
    try:
        return TCPStore(
            host,
            int(port),
            request.world,
            is_master=is_server,
            timeout=timedelta(seconds=remaining_seconds),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except (DistError, RuntimeError) as error:
        if is_server:
            raise _make_serving_error(host, int(port), error) from None
        raise TrainingError(
            f"rank {request.rank} could not reach the store of rank 0 at MASTER_ADDR={host} MASTER_PORT={port} within "
            f"rendezvous.timeout={request.settings.timeout:g} seconds: rank 0 did not start, or the address is wrong "
            f"({summarise_error(error)})"
        ) from None


def open_client(address: tuple[str, int], world: int, *, timeout: float, check: Callable[[], None]) -> Store:
    """Open a further connection to a TCPStore that another process, or this one, serves.

    Args:
        check: called while this process waits for the server. It raises an error if the wait must end.

    Raises:
        DistError: the server was not reached within `timeout` seconds.
    """
    host, port = address
    if is_loopback(host):
        restrict_to_loopback()
    remaining_seconds = _await_server(address, timeout, check)
    return TCPStore(
        host, port, world, is_master=False, timeout=timedelta(seconds=remaining_seconds), wait_for_workers=False
    )


def _make_serving_error(host: str, port: int, error: Exception) -> ConfigError:
    """Return the error for a port that rank 0 cannot use. Its `errno` says whether another process has the port."""
    serving_error = ConfigError(
        f"rank 0 cannot serve the store on MASTER_ADDR={host} MASTER_PORT={port}: {summarise_error(error)}; "
        "choose a free port and an address of this host"
    )
    # torch's DistNetworkError has no errno, so only its text tells whether the port is in use.
    is_port_used = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
    serving_error.errno = errno.EADDRINUSE if is_port_used else 0
    return serving_error


def open_listener(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` only. A socket of torch would listen on all interfaces of the machine.

    Raises:
        ConfigError: the port is in use or the address is not one of this host.
    """
    family, socket_type, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, socket_type, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        serving_error = ConfigError(
            f"rank 0 cannot serve the store on MASTER_ADDR={host} MASTER_PORT={port}: {error.strerror}; "
            "choose a free port"
        )
        serving_error.errno = error.errno or 0
        raise serving_error from None
    return listener


def is_loopback(host: str) -> bool:
    """Return whether `host` is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def restrict_to_loopback() -> None:
    """Make gloo and NCCL's bootstrap listen on loopback only, unless the user has chosen an interface."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def summarise_error(error: Exception) -> str:
    """Return the first line of an error's message, or the error's type if it has no message; at most 200 characters."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    return text[:_ERROR_CHARACTERS]


STORES: Registry[Callable[[StoreRequest], Store]] = Registry(
    "rendezvous.url", {"env": open_tcp_store}, home="megascale.plugins"
)
