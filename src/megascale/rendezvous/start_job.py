"""Start of a job on one rank: find the others, agree, make and warm the groups.

The default store is torch's TCPStore on MASTER_ADDR:MASTER_PORT (torchrun's agent store included); with
`rendezvous.url=redis://...` it is the Redis store. All the rest is the same code.
"""

from __future__ import annotations

import atexit
import errno
import ipaddress
import json
import logging
import os
import platform
import socket
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

import megascale
from megascale import torch_private
from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.grid import Grid
from megascale.core.ports import LISTENER
from megascale.core.secrets import PASSWORD_VARIABLE
from megascale.errors import ConfigError, FitError, MegascaleError, TrainingError
from megascale.rendezvous.agree import agree, see_off
from megascale.rendezvous.group_plan import DIRECTIONS
from megascale.rendezvous.groups import AFTERLIFE, Groups, describe_lost_peer, make_groups
from megascale.rendezvous.redis_store import RedisStore
from megascale.rendezvous.resp import Address
from megascale.rendezvous.restarts import has_agent_store, is_under_torchrun, open_start
from megascale.rendezvous.store_errors import StoreFault, StoreFenced, Superseded

if TYPE_CHECKING:
    from megascale.config import Config

log = logging.getLogger(__name__)
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

    store = _meet(config, rank, world, lap)
    try:
        groups = _start_groups(config, store, rank, world, device, lap)
    except BaseException as error:
        _abandon(store, error, (rank, world) if isinstance(error, FitError) else None)
        if isinstance(error, StoreFault):
            raise TrainingError(str(error)) from None
        why = describe_lost_peer(error)
        if why is None:
            raise
        lost = TrainingError(
            f"rank {rank} lost contact with another of the {world} ranks while they connected ({why}): one ended or "
            "hangs, or its network broke; look at the log of the rank that stopped first, and where "
            f"rendezvous.group_timeout={config.rendezvous.group_timeout:g} seconds are too few raise it"
        )
        raise attach_record(lost, ExitKind.LOST_PEER) from error
    groups.timings = {**timings, **groups.timings}
    atexit.register(_at_exit, weakref.ref(groups))
    return groups


def _meet(config: Config, rank: int, world: int, lap: Callable[[str], None]) -> dist.Store:
    """The job's store, once all ranks have come and agreed."""
    settings = config.rendezvous
    deadline = time.monotonic() + settings.timeout
    facts = job_facts(config)
    while True:
        remaining = max(0.1, deadline - time.monotonic())
        store = open_store(config, rank, world, remaining)
        lap("connect")
        try:
            if has_agent_store() and not isinstance(store, RedisStore):
                store = open_start(store, rank, world, remaining, settings.timeout)
                remaining = max(0.1, deadline - time.monotonic())
            agree(store, rank, world, facts, remaining, settings.timeout, restarts=is_under_torchrun())
            if isinstance(store, RedisStore):
                store.seal()
            lap("agree")
            return store
        except BaseException as error:
            _abandon(store, error, (rank, world) if isinstance(error, MegascaleError) else None)
            if isinstance(error, Superseded):
                continue
            if isinstance(error, dist.DistError):
                raise TrainingError(f"the start broke off on rank {rank}: {_first_line(error)}") from None
            raise


def _abandon(store: dist.Store, error: BaseException, others: tuple[int, int] | None) -> None:
    """After a failed start: leave nothing in a Redis server for long, or, with `others` = (rank, world), stay until
    the others have read in rank 0's store what is wrong with the start."""
    with suppress(dist.DistError, ConfigError):
        if not isinstance(store, RedisStore):
            if others is not None:
                see_off(store, *others)
        elif not isinstance(error, StoreFenced):
            store.expire_soon(AFTERLIFE)
    if isinstance(store, RedisStore):
        store.close()


def _start_groups(
    config: Config, store: dist.Store, rank: int, world: int, device: torch.device, lap: Callable[[str], None]
) -> Groups:
    """The default group, then the grid's groups, all warm."""
    settings = config.rendezvous
    layout = config.parallel
    grid = Grid.of_world(world, layout.tensor, layout.pipeline, layout.data, layout.gpus_per_host)
    if world > _GLOO_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if device.type == "cuda":
        # After a time-out torch's watchdog sleeps four times as long before it ends the process: 60 s by default.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "5000")
    group_timeout = timedelta(seconds=settings.group_timeout)
    with torch_private.gloo_loop_shared():
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
        channels={
            **dict.fromkeys(DIRECTIONS, config.overlap.max_channels("pipeline")),
            **dict.fromkeys(("data_gather", "data_reduce"), config.overlap.max_channels("data")),
        },
    )
    groups.root_store = store
    began = time.perf_counter()
    if world > 1:
        dist.all_reduce(torch.ones(1, device=device))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    groups.timings["warm world"] = time.perf_counter() - began
    return groups


def _at_exit(groups: weakref.ref[Groups]) -> None:
    """A process that ends without `shutdown`: torch's threads must not wait in a store that runs in Python."""
    left = groups()
    if left is not None and isinstance(left.root_store, RedisStore):
        left.root_store.close()


def job_facts(config: Config) -> dict[str, str]:
    """What must be equal on every rank: versions first, then every setting; nothing secret."""
    facts = {"megascale": megascale.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for name, section in config.model_dump(mode="json").items():
        for key, value in section.items():
            facts[f"{name}.{key}"] = json.dumps(value)
    if "MEGASCALE_NODE" in os.environ:  # an agent gives its trainers a folder of their machine
        del facts["train.runs"]
    return facts


def open_store(config: Config, rank: int, world: int, timeout: float) -> dist.Store:
    """The job's store, reached within `timeout` seconds."""
    if urlsplit(config.rendezvous.url).scheme == "env":
        return _tcp_store(rank, world, timeout, config.rendezvous.timeout)
    return _redis_store(config, rank, timeout)


def _redis_store(config: Config, rank: int, timeout: float) -> dist.Store:
    """The Redis store, opened by rank 0."""
    settings = config.rendezvous
    secret = settings.password.get_secret_value() if settings.password else os.environ.get(PASSWORD_VARIABLE)
    address = Address.parse(
        settings.url, secret, ca=settings.tls_ca, certificate=settings.tls_certificate, key=settings.tls_key
    )
    if is_loopback(address.host):
        stay_on_loopback()
    job, attempt = job_name(config)
    limit = timedelta(seconds=timeout)
    try:
        return RedisStore.open(address, job, attempt, owner=rank == 0, timeout=limit, expiry=settings.expiry)
    except StoreFenced as error:
        raise TrainingError(str(error)) from None
    except StoreFault as error:
        raise TrainingError(
            f"{_first_line(error)}; rank {rank} tried for rendezvous.timeout={settings.timeout:g} seconds: is the "
            f"server up and rendezvous.url={settings.url} right?"
        ) from None
    except dist.DistError:
        raise TrainingError(
            f"rank 0 did not open job {job!r} attempt {attempt} at {address} within "
            f"rendezvous.timeout={settings.timeout:g} seconds (rank {rank} waited): look at rank 0's log, and give "
            "every rank the same MEGASCALE_JOB and MEGASCALE_ATTEMPT"
        ) from None


def job_name(config: Config) -> tuple[str, int]:
    """What tells this job and this attempt of it from others on the same server, equal on all ranks.

    From MEGASCALE_JOB and MEGASCALE_ATTEMPT, which a launcher sets; else the run's name with torchrun's id and
    MASTER_ADDR:MASTER_PORT, and attempt 0. torchrun's restart count differs between nodes: a node that is restarted
    for another's failure does not count it. Rank 0 tells starts with the same attempt apart (RedisStore.open).
    """
    env = os.environ
    place = f"{env.get('TORCHELASTIC_RUN_ID', '')}@{env.get('MASTER_ADDR', '')}:{env.get('MASTER_PORT', '')}"
    job = env.get("MEGASCALE_JOB") or f"{config.train.name}-{place}"
    attempt = env.get("MEGASCALE_ATTEMPT") or "0"
    if not attempt.isdigit():
        raise ConfigError(f"MEGASCALE_ATTEMPT={attempt!r} is not a number; count attempts from 0")
    return job, int(attempt)


def _tcp_store(rank: int, world: int, timeout: float, named: float) -> dist.Store:
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
    if os.environ.get("USE_LIBUV") == "0":
        # That server does not wake ranks that wait for a key made by compare_set.
        raise ConfigError("USE_LIBUV=0 asks for torch's old TCPStore server, which loses wake-ups; unset USE_LIBUV")
    serve = rank == 0 and not has_agent_store()
    loopback = is_loopback(host)
    if loopback:
        stay_on_loopback()
    held = os.environ.pop(LISTENER, None)
    listener = None
    if serve and not loopback:
        log.warning(
            "MASTER_ADDR=%s: other machines reach the job's store (torch's TCPStore, port %s), and nothing protects "
            "it: keep it on a network that only the job's machines reach, or use rendezvous.url=rediss://... with a "
            "password (docs/security.md)",
            host,
            port,
        )
    if serve and loopback:
        listener = socket.socket(fileno=int(held)) if held else listen(host, int(port))
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
            failed = ConfigError(
                f"rank 0 cannot serve the store on MASTER_ADDR={host} MASTER_PORT={port}: {_first_line(error)}; "
                "choose a free port and an address of this host"
            )
            # torch tells by these words only (its DistNetworkError has no errno).
            taken = "EADDRINUSE" in str(error) or "address already in use" in str(error).lower()
            failed.errno = errno.EADDRINUSE if taken else 0
            raise failed from None
        raise TrainingError(
            f"rank {rank} could not reach the store of rank 0 at MASTER_ADDR={host} MASTER_PORT={port} within "
            f"rendezvous.timeout={named:g} seconds: rank 0 did not come, or the address is wrong "
            f"({_first_line(error)})"
        ) from None
    return store


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on loopback only; torch's own would listen on every interface of the host."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(4096)
    except OSError as error:
        listener.close()
        failed = ConfigError(
            f"rank 0 cannot serve the store on MASTER_ADDR={host} MASTER_PORT={port}: {error.strerror}; "
            "choose a free port"
        )
        failed.errno = error.errno or 0
        raise failed from None
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
