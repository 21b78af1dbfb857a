"""Stores through which the ranks of a job meet, by the scheme of `rendezvous.url`.

`env://` is torch's TCPStore on MASTER_ADDR:MASTER_PORT, torchrun's agent store included. A plugin registers any other
scheme (`megascale.plugins.redis`: `redis://` and `rediss://`).
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import socket
import sys
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
# The scheme of a URL with TLS -> the scheme of the store that serves it.
_TLS_SCHEMES = {"rediss": "redis"}


class StoreFault(DistStoreError):
    """The store cannot do its work: unreachable for too long, out of memory, or access refused."""


class StoreFenced(StoreFault):
    """This process belongs to an attempt that is over: a newer attempt holds the job, or the job has ended."""


class Superseded(StoreFenced):
    """The owner of the start that this process tried to join has died, and a successor opened the job again."""


class ExternalStore(Store):
    """A job's store on a server that outlives the job; rank 0 owns the job's keys there."""

    def seal(self) -> None:
        """Close the job to further processes; called on all ranks once every rank has come."""
        raise NotImplementedError

    def remove_all(self) -> None:
        """Remove every key of the job; the last rank to leave calls it."""
        raise NotImplementedError

    def expire_soon(self, seconds: float) -> None:
        """Let the job's keys expire after `seconds`, in which other ranks can read why the job failed."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the connection to the server; the keys stay."""
        raise NotImplementedError


@dataclass(frozen=True)
class StoreRequest:
    """A rank's request for the store of its job.

    Attributes:
        run_name: `train.name`, part of the job's name (`job_name`) on a server that serves several jobs.
        timeout: seconds within which the store must be open, the remaining part of `settings.timeout`.
    """

    settings: RendezvousConfig
    run_name: str
    rank: int
    world: int
    timeout: float


def open_store(request: StoreRequest) -> Store:
    """Open the store that `rendezvous.url` names.

    Raises:
        ConfigError: the address is wrong, access is refused, or the extra that serves the scheme is not installed.
        TrainingError: rank 0 or the server was not reached within `request.timeout`.
    """
    scheme = urlsplit(request.settings.url).scheme
    try:
        open_kind = STORES[_TLS_SCHEMES.get(scheme, scheme)]
    except ModuleNotFoundError as error:
        raise missing_extra(error) or error from None
    return open_kind(request)


def job_name(run_name: str) -> tuple[str, int]:
    """Return the names of this job and of its attempt on a shared server, equal on all ranks.

    They come from MEGASCALE_JOB and MEGASCALE_ATTEMPT, which a launcher sets. Otherwise the job is `run_name` with
    torchrun's id and MASTER_ADDR:MASTER_PORT, and the attempt is 0. torchrun's restart count differs between nodes: a
    node that is restarted because another node failed does not count it. The store distinguishes starts of one attempt.
    """
    environment = os.environ
    address = f"{environment.get('MASTER_ADDR', '')}:{environment.get('MASTER_PORT', '')}"
    default = f"{run_name}-{environment.get('TORCHELASTIC_RUN_ID', '')}@{address}"
    attempt = environment.get("MEGASCALE_ATTEMPT") or "0"
    if not attempt.isdigit():
        raise ConfigError(f"MEGASCALE_ATTEMPT={attempt!r} is not a number; count attempts from 0")
    return environment.get("MEGASCALE_JOB") or default, int(attempt)


def has_agent_store() -> bool:
    """Return whether torchrun's agent serves the store of this process."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def open_tcp_store(request: StoreRequest) -> Store:
    """Open TCPStore on MASTER_ADDR:MASTER_PORT, served by rank 0 unless torchrun's agent serves it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        if request.world == 1:
            return HashStore()
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT are not set: start the ranks with `megascale train` or torchrun, or set "
            "--rendezvous.url=redis://HOST:PORT"
        )
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"MASTER_PORT={port!r} is not a port; use a free port from 1024 to 65535")
    if os.environ.get("USE_LIBUV") == "0":
        # The older server does not wake ranks that wait for a key made by compare_set.
        raise ConfigError("USE_LIBUV=0 selects torch's older TCPStore server, which loses wake-ups; unset USE_LIBUV")
    serves = request.rank == 0 and not has_agent_store()
    inherited = os.environ.pop(STORE_LISTENER_VARIABLE, None)  # the launcher may have opened the listener
    listener = None
    if is_loopback(host):
        stay_on_loopback()
        if serves:
            if inherited:
                listener = int(inherited)
            else:
                listener = listen(host, int(port)).detach()
    elif serves:
        log.warning(
            "MASTER_ADDR=%s: other machines reach the job's store (torch's TCPStore, port %s), and nothing protects "
            "it: keep it on a network that only the job's machines reach, or use rendezvous.url=rediss://... with a "
            "password (docs/security.md)",
            host,
            port,
        )
    try:
        return TCPStore(
            host,
            int(port),
            request.world,
            is_master=serves,
            timeout=timedelta(seconds=request.timeout),
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except (DistError, RuntimeError) as error:
        if serves:
            raise _cannot_serve(host, int(port), error) from None
        raise TrainingError(
            f"rank {request.rank} could not reach the store of rank 0 at MASTER_ADDR={host} MASTER_PORT={port} within "
            f"rendezvous.timeout={request.settings.timeout:g} seconds: rank 0 did not come, or the address is wrong "
            f"({first_line(error)})"
        ) from None


def _cannot_serve(host: str, port: int, error: Exception) -> ConfigError:
    refusal = ConfigError(
        f"rank 0 cannot serve the store on MASTER_ADDR={host} MASTER_PORT={port}: {first_line(error)}; "
        "choose a free port and an address of this host"
    )
    # torch's DistNetworkError has no errno, so only its text tells whether the port is in use.
    in_use = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
    refusal.errno = errno.EADDRINUSE if in_use else 0
    return refusal


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` only; torch's own would listen on every interface of the machine."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        refusal = ConfigError(
            f"rank 0 cannot serve the store on MASTER_ADDR={host} MASTER_PORT={port}: {error.strerror}; "
            "choose a free port"
        )
        refusal.errno = error.errno or 0
        raise refusal from None
    return listener


def is_loopback(host: str) -> bool:
    """Return whether `host` is an address of loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def stay_on_loopback() -> None:
    """Let gloo and NCCL's bootstrap listen on loopback only, unless the user has chosen an interface."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, at most 200 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


STORES: Registry[Callable[[StoreRequest], Store]] = Registry(
    "rendezvous.url", {"env": open_tcp_store}, home="megascale.plugins"
)
