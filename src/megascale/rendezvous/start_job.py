"""Start of a job on one rank: meet the other ranks, agree on the settings, make and warm the groups."""

from __future__ import annotations

import atexit
import json
import os
import platform
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import megascale
from megascale import torch_private
from megascale.config.parts import OPTIMIZERS
from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.grid import Grid
from megascale.core.schedule_registry import chunk_map_of
from megascale.errors import ConfigError, FitError, MegascaleError, TrainingError
from megascale.rendezvous.agree import agree, wait_for_readers
from megascale.rendezvous.group_plan import DIRECTIONS, STATE_KINDS
from megascale.rendezvous.group_sockets import list_new_sockets, list_sockets
from megascale.rendezvous.groups import FAILED_KEYS_SECONDS, Groups, describe_lost_peer, make_groups
from megascale.rendezvous.restarts import is_under_torchrun, open_start
from megascale.rendezvous.stores import (
    ExternalStore,
    StoreFault,
    StoreFenced,
    StoreRequest,
    Superseded,
    first_line,
    has_agent_store,
    open_store,
)

if TYPE_CHECKING:
    from megascale.config import Config, OverlapConfig, ParallelConfig, RendezvousConfig

# Above this number of ranks gloo connects on demand instead of making its full mesh (every rank to every rank).
_GLOO_MESH = 256


class _Stopwatch:
    """Seconds by phase of the start."""

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self._began = time.perf_counter()

    def end_phase(self, phase: str) -> None:
        """Note that `phase` has ended and the next one begins."""
        ended = time.perf_counter()
        self.timings[phase] = ended - self._began
        self._began = ended


def initialise(config: Config, *, rank: int, world: int, local_rank: int, device: torch.device | str) -> Groups:
    """Meet the other `world - 1` ranks and make this rank's groups.

    Args:
        config: the resolved configuration, which must be equal on every rank; the sections `parallel`, `overlap` and
            `rendezvous`, `train.name`, `optimizer.name` and `model.tied_embeddings` are used.
        rank, world, local_rank: as torchrun's RANK, WORLD_SIZE, LOCAL_RANK.
        device: device of this rank's tensors; on "cuda" without an index, `local_rank` is the index.

    Raises:
        ConfigError: ranks differ in settings, versions or world size; an address is wrong; a password or certificate
            is refused.
        FitError: `parallel` does not fit the world.
        TrainingError: a rank or the store did not come within `rendezvous.timeout` seconds.
    """
    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", local_rank if device.index is None else device.index)
        torch.cuda.set_device(device)
    stopwatch = _Stopwatch()
    settings = config.rendezvous
    store = _meet(settings, config.train.name, job_facts(config), rank=rank, world=world, stopwatch=stopwatch)
    try:
        grid = _grid(config.parallel, world)
        sockets = list_sockets()
        _make_default_group(store, rank, world, device=device, group_timeout=settings.group_timeout)
        stopwatch.end_phase("world")
        if device.type == "cuda":
            gloo_sockets = list_new_sockets(sockets)  # later ones are NCCL's, which has a call to end its operations
        groups = make_groups(
            grid,
            rank,
            chunk_map=chunk_map_of(config.parallel),
            tied=config.model.tied_embeddings,
            device=device,
            timeout=timedelta(seconds=settings.group_timeout),
            store=dist.PrefixStore("job", store),
            channels=_channels(config.overlap),
            late_kinds=() if OPTIMIZERS[config.optimizer.name].communicates else STATE_KINDS,
        )
        if device.type != "cuda":
            gloo_sockets = list_new_sockets(sockets)
        groups.sockets = gloo_sockets
        groups.root_store = store
        _warm_default_group(groups)
    except BaseException as error:
        _abandon(store, error, (rank, world) if isinstance(error, FitError) else None)
        if isinstance(error, StoreFault):
            raise TrainingError(str(error)) from None
        reason = describe_lost_peer(error)
        if reason is None:
            raise
        lost = TrainingError(
            f"rank {rank} lost contact with another of the {world} ranks while they connected ({reason}): one ended or "
            "hangs, or its network broke; look at the log of the rank that stopped first, and where "
            f"rendezvous.group_timeout={settings.group_timeout:g} seconds are too few raise it"
        )
        raise attach_record(lost, ExitKind.LOST_PEER) from error
    groups.timings = stopwatch.timings | groups.timings
    atexit.register(_close_at_exit, weakref.ref(groups))
    return groups


def _meet(
    settings: RendezvousConfig,
    run_name: str,
    facts: Mapping[str, str],
    *,
    rank: int,
    world: int,
    stopwatch: _Stopwatch,
) -> dist.Store:
    """Return the job's store once all ranks have come and agreed."""
    deadline = time.monotonic() + settings.timeout
    while True:
        remaining = max(0.1, deadline - time.monotonic())
        store = open_store(StoreRequest(settings, run_name, rank=rank, world=world, timeout=remaining))
        stopwatch.end_phase("connect")
        try:
            if has_agent_store() and not isinstance(store, ExternalStore):
                store = open_start(store, rank, world, timeout=remaining, configured_timeout=settings.timeout)
                remaining = max(0.1, deadline - time.monotonic())
            agree(store, rank, world, facts, remaining, settings.timeout, restarts=is_under_torchrun())
            if isinstance(store, ExternalStore):
                store.seal()
            stopwatch.end_phase("agree")
            return store
        except BaseException as error:
            _abandon(store, error, (rank, world) if isinstance(error, MegascaleError) else None)
            if isinstance(error, Superseded):
                continue
            if isinstance(error, dist.DistError):
                raise TrainingError(f"the start broke off on rank {rank}: {first_line(error)}") from None
            raise


def _abandon(store: dist.Store, error: BaseException, readers: tuple[int, int] | None) -> None:
    """Leave the store after a failed start.

    The keys in an external store expire soon. With `readers` = (rank, world), rank 0 keeps serving its own store until
    the other ranks have read why the start failed.
    """
    with suppress(dist.DistError, ConfigError):
        if not isinstance(store, ExternalStore):
            if readers is not None:
                wait_for_readers(store, *readers)
        elif not isinstance(error, StoreFenced):
            store.expire_soon(FAILED_KEYS_SECONDS)
    if isinstance(store, ExternalStore):
        store.close()


def _grid(parallel: ParallelConfig, world: int) -> Grid:
    return Grid.from_config(parallel, world)


def _channels(overlap: OverlapConfig) -> dict[str, int | None]:
    """Return the largest number of NCCL channels by kind of group; None leaves the choice to NCCL."""
    channels: dict[str, int | None] = dict.fromkeys(DIRECTIONS, overlap.max_channels("pipeline"))
    channels |= dict.fromkeys(("data_gather", "data_reduce"), overlap.max_channels("data"))
    return channels


def _make_default_group(
    store: dist.Store, rank: int, world: int, *, device: torch.device, group_timeout: float
) -> None:
    if world > _GLOO_MESH:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if device.type == "cuda":
        _set_watchdog(is_kept="MEGASCALE_ORDERS" in os.environ)
    with torch_private.share_gloo_loop():
        dist.init_process_group(
            # No device is bound to the default group: see groups._new_group.
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("torch", store),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group_timeout),
        )


def _set_watchdog(is_kept: bool) -> None:
    """Set how torch's watchdog of NCCL reacts to errors and time-outs, unless the environment does.

    Args:
        is_kept: the process outlives a failed attempt and aborts its communicators. The watchdog must not end it for
            the errors that follow, and must end soon itself, since leaving a group waits for it. The driver then
            judges ranks that hang.
    """
    if not is_kept:
        # After a time-out torch's watchdog sleeps four times as long before it ends the process: 60 s by default.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "5000")
        return
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100")


def _warm_default_group(groups: Groups) -> None:
    began = time.perf_counter()
    if groups.grid.world_size > 1:
        dist.all_reduce(torch.ones(1, device=groups.device))
        if groups.device.type == "cuda":
            torch.cuda.synchronize(groups.device)
    groups.timings["warm world"] = time.perf_counter() - began


def _close_at_exit(reference: weakref.ref[Groups]) -> None:
    """Close the store of a process that ends without `shutdown`: torch's threads must not wait in Python code."""
    groups = reference()
    if groups is not None and isinstance(groups.root_store, ExternalStore):
        groups.root_store.close()


def job_facts(config: Config) -> dict[str, str]:
    """Return the facts that must be equal on every rank: versions first, then every setting; nothing secret."""
    facts = {"megascale": megascale.__version__, "torch": torch.__version__, "python": platform.python_version()}
    for name, section in config.model_dump(mode="json").items():
        for key, value in section.items():
            facts[f"{name}.{key}"] = json.dumps(value)
    if "MEGASCALE_NODE" in os.environ:  # an agent gives its trainers a folder of their machine
        del facts["train.runs"]
    return facts
