"""Start of a job on one rank: find the others, agree, make and warm the groups.

The default store is torch's TCPStore on MASTER_ADDR:MASTER_PORT (torchrun's agent store included); with
`rendezvous.url=redis://...` it is the Redis store. All the rest is the same code.
"""

from __future__ import annotations

import ipaddress
import json
import os
import platform
import socket
import sys
import time
from datetime import timedelta
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

import megascale
from megascale.config import Config
from megascale.core.grid import Grid
from megascale.errors import ConfigError, TrainingError
from megascale.rendezvous.agree import agree
from megascale.rendezvous.groups import Groups, make_groups

# Above this many ranks gloo's default full mesh of connections (each rank to all) is made on demand instead.
_GLOO_MESH = 256


def initialise(config: Config, *, rank: int, world: int, local_rank: int, device: torch.device | str) -> Groups:
    """Meet the other `world - 1` ranks and make this rank's groups.

    Args:
        config: the resolved configuration; `parallel`, `model.tied_embeddings` and `rendezvous` are used, and all
            of it must be equal on every rank.
        rank, world, local_rank: as torchrun's RANK, WORLD_SIZE, LOCAL_RANK.
        device: where this rank's tensors live; on "cuda" without index, `local_rank` is the index.

    Raises:
        ConfigError: ranks that differ in settings, versions or world size; an address that is wrong; a password or
            certificate that is refused.
        FitError: the world cannot be laid out as `parallel` says.
        TrainingError: a rank or the store that did not come within `rendezvous.timeout` seconds.
    """
    settings = config.rendezvous
    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    timings: dict[str, float] = {}
    clock = time.perf_counter()

    def lap(phase: str) -> None:
        nonlocal clock
        now = time.perf_counter()
        timings[phase] = now - clock
        clock = now

    store = connect(config, rank, world)
    lap("connect")
    agree(store, rank, world, job_facts(config), settings.timeout)
    lap("agree")
    layout = config.parallel
    grid = Grid.of_world(world, layout.tensor, layout.pipeline, layout.data, layout.gpus_per_host)
    if world > _GLOO_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    group_timeout = timedelta(seconds=settings.group_timeout)
    dist.init_process_group(
        # No device is bound to the default group: see groups._new_group.
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("torch", store),
        rank=rank,
        world_size=world,
        timeout=group_timeout,
    )
    lap("world")
    groups = make_groups(
        grid,
        rank,
        virtual_stages=layout.virtual_stages,
        tied=config.model.tied_embeddings,
        device=device,
        timeout=group_timeout,
        store=dist.PrefixStore("job", store),
    )
    clock = time.perf_counter()
    if world > 1:
        dist.all_reduce(torch.ones(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    groups.timings = {**timings, **groups.timings, "warm world": time.perf_counter() - clock}
    return groups


def job_facts(config: Config) -> dict[str, str]:
    """What must be equal on every rank: versions first, then every setting; nothing secret."""
    facts = {"megascale": megascale.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for name, section in config.model_dump(mode="json").items():
        for key, value in section.items():
            facts[f"{name}.{key}"] = json.dumps(value)
    return facts


def connect(config: Config, rank: int, world: int) -> dist.Store:
    """The job's store, reached within `rendezvous.timeout` seconds."""
    url = config.rendezvous.url
    scheme = urlsplit(url).scheme
    if scheme == "env":
        return _tcp_store(rank, world, config.rendezvous.timeout)
    raise ConfigError(f"rendezvous.url={url!r} has an unknown scheme; use env:// or redis://HOST:PORT")


def _tcp_store(rank: int, world: int, timeout: float) -> dist.Store:
    """TCPStore on MASTER_ADDR:MASTER_PORT, served by rank 0 unless torchrun's agent serves it."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if host is None or port is None:
        if world == 1:
            return dist.HashStore()
        raise ConfigError(
            "MASTER_ADDR and MASTER_PORT are not set: start the ranks with `megascale train` or torchrun, or set "
            "--rendezvous.url=redis://HOST:PORT"
        )
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"MASTER_PORT={port!r} is not a port; use a free port from 1024 to 65535")
    serve = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    loopback = is_loopback(host)
    if loopback:
        stay_on_loopback()
    listener = _listen(host, int(port)) if serve and loopback else None
    try:
        store = dist.TCPStore(
            host,
            int(port),
            world,
            is_master=serve,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )
    except (dist.DistError, RuntimeError) as error:
        if serve:
            raise ConfigError(
                f"rank 0 cannot serve the store on MASTER_ADDR={host} MASTER_PORT={port}: {_first_line(error)}; "
                "choose a free port and an address of this host"
            ) from None
        raise TrainingError(
            f"rank {rank} could not reach the store of rank 0 at MASTER_ADDR={host} MASTER_PORT={port} within "
            f"rendezvous.timeout={timeout:g} seconds: rank 0 did not come, or the address is wrong "
            f"({_first_line(error)})"
        ) from None
    return store


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket on loopback only; torch's own would listen on every interface of the host."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"rank 0 cannot serve the store on MASTER_ADDR={host} MASTER_PORT={port}: {error.strerror}; "
            "choose a free port"
        ) from None
    listener.listen(4096)
    return listener


def is_loopback(host: str) -> bool:
    """Whether `host` means this host alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def stay_on_loopback() -> None:
    """All ranks are on this host: let gloo and NCCL's bootstrap listen on loopback unless the user chose."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
