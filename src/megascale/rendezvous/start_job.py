"""Start of a job on one rank: meet the other ranks, compare the settings, make the groups and warm them up."""

from __future__ import annotations

import atexit
import json
import os
import platform
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import megascale
from megascale import torch_private
from megascale.core.communicator_memory import MAX_CONNECTED_RANKS, WORLD_CHANNELS
from megascale.core.exit_record import ExitKind, attach_record
from megascale.core.grid import Grid
from megascale.core.process_orders import ORDERS_VARIABLE
from megascale.core.schedule_registry import chunk_map_of
from megascale.core.stopwatch import Stopwatch
from megascale.core.terminal import call_interruptibly
from megascale.errors import ConfigError, FitError, MegascaleError, TrainingError
from megascale.rendezvous.agree import agree, wait_for_readers
from megascale.rendezvous.group_options import (
    MAX_GLOO_MESH_RANKS,
    choose_group_options,
)
from megascale.rendezvous.group_sockets import list_new_sockets, list_sockets
from megascale.rendezvous.groups import (
    FAILED_KEYS_SECONDS,
    Groups,
    describe_lost_peer,
    make_groups,
    make_side_group,
    reuse_prepared,
)
from megascale.rendezvous.prepared_groups import WORLD, GroupPreparation
from megascale.rendezvous.restarts import is_under_torchrun, open_start
from megascale.rendezvous.stores import (
    ExternalStore,
    StoreFault,
    StoreFenced,
    StoreRequest,
    Superseded,
    has_agent_store,
    open_store,
    summarise_error,
)

if TYPE_CHECKING:
    from megascale.config import Config, RendezvousConfig

# A call gets this time even if rendezvous.timeout has passed, since its error then names what is missing.
_MIN_WAIT_SECONDS = 0.1
# Counts, in the store of a start, the ranks that have prepared its groups during the attempt before.
_PREPARED_KEY = "start/prepared"


def initialise(
    config: Config,
    *,
    rank: int,
    world: int,
    local_rank: int,
    device: torch.device | str,
    check: Callable[[], None] | None = None,
    name_suffix: str = "",
    exchanges_state: bool = False,
    preparation: GroupPreparation | None = None,
) -> Groups:
    """Meet the other `world - 1` ranks and make this rank's groups.

    Args:
        config: the resolved configuration, which must be equal on every rank; the sections `parallel`, `overlap` and
            `rendezvous`, `train.name`, `optimizer.name` and `model.tied_embeddings` are used.
        rank, world, local_rank: torchrun's RANK, WORLD_SIZE and LOCAL_RANK.
        device: device of this rank's tensors. "cuda" without an index means the device with the index `local_rank`.
        check: called while this rank waits for the store's server. It raises an error if the start must end.
        name_suffix: as for `make_groups`, equal on every rank.
        exchanges_state: whether the ranks will exchange their state through the default group, equal on every rank.
            They then have a side group. A job of few ranks with `rendezvous.concurrent_connections` also connects them
            while groups are made.
        preparation: groups that this rank has prepared during the attempt before. All ranks use theirs, or none.

    Raises:
        ConfigError: ranks differ in settings, versions or world size; an address is wrong; a password or certificate
            is refused.
        FitError: `parallel` does not fit the world.
        TrainingError: a rank or the store did not come within `rendezvous.timeout` seconds.
    """
    device = torch.device(device)
    if device.type == "cuda":
        if device.index is None:
            device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    stopwatch = Stopwatch()
    settings = config.rendezvous
    if preparation is not None and not _is_usable(preparation, config, rank, world, device=device, suffix=name_suffix):
        preparation.abandon("the next attempt has other ranks, or not all groups were complete")
    meet_ranks = partial(
        _meet_ranks,
        settings,
        config.train.name,
        collect_shared_settings(config),
        rank=rank,
        world=world,
        stopwatch=stopwatch,
        check=check,
        is_prepared=preparation is not None and preparation.is_warm,
    )
    options = choose_group_options(config)
    store = call_interruptibly(meet_ranks)
    try:
        _check_interfaces()
        preparation = _agree_on_preparation(store, preparation, config, world)
        grid = Grid.from_config(config.parallel, world)
        earlier_sockets = list_sockets()
        _make_default_group(
            store, rank, world, device=device, group_timeout=settings.group_timeout, preparation=preparation
        )
        side_group = None
        if exchanges_state and world > 1:
            side_group = make_side_group(
                world,
                timedelta(seconds=settings.group_timeout),
                name_suffix=name_suffix,
                preparation=preparation,
            )
        stopwatch.end_phase("world")
        if device.type == "cuda":
            # Sockets that are opened later are NCCL's, which has its own abort.
            gloo_sockets = list_new_sockets(earlier_sockets)
        concurrent_call = None
        if settings.concurrent_connections and world > 1 and preparation is None:
            connects_pairs = exchanges_state and world <= MAX_CONNECTED_RANKS
            concurrent_call = partial(_connect_default_group, device, connects_pairs)
        groups = make_groups(
            grid,
            rank,
            chunk_map=chunk_map_of(config.parallel),
            tied=config.model.tied_embeddings,
            device=device,
            timeout=timedelta(seconds=settings.group_timeout),
            store=dist.PrefixStore("job", store),
            max_channels=options.max_channels,
            late_kinds=options.late_kinds,
            warm_calls=options.warm_calls,
            name_suffix=name_suffix,
            concurrent_call=concurrent_call,
            preparation=preparation,
        )
        if device.type != "cuda":  # `make_groups` has opened gloo sockets too.
            gloo_sockets = list_new_sockets(earlier_sockets)
        groups.sockets = gloo_sockets
        groups.side = side_group
        groups.root_store = store
        if preparation is not None:
            groups.sockets = preparation.sockets | gloo_sockets
            groups.preparation = preparation
            preparation.hand_over()
        elif concurrent_call is None:
            _warm_default_group(groups)
    except BaseException as error:
        _leave_failed_start(store, error, rank=rank, world=world, is_shared=isinstance(error, FitError))
        if isinstance(error, StoreFault):
            raise TrainingError(str(error)) from None
        reason = describe_lost_peer(error)
        if reason is None:
            raise
        lost_peer_error = TrainingError(
            f"rank {rank} lost contact with another of the {world} ranks while they connected ({reason}): one ended or "
            "hangs, or its network broke; look at the log of the rank that stopped first, or raise "
            f"--rendezvous.group_timeout={settings.group_timeout:g} if the time is too short"
        )
        raise attach_record(lost_peer_error, ExitKind.LOST_PEER) from error
    groups.timings = stopwatch.timings | groups.timings
    atexit.register(_close_at_exit, weakref.ref(groups))
    return groups


def _meet_ranks(
    settings: RendezvousConfig,
    run_name: str,
    shared_settings: Mapping[str, str],
    *,
    rank: int,
    world: int,
    stopwatch: Stopwatch,
    check: Callable[[], None] | None,
    is_prepared: bool,
) -> dist.Store:
    """Return the job's store once all ranks are present and have equal settings.

    A start that another rank 0 supersedes is left, and the next one is joined.

    Args:
        is_prepared: whether this rank has prepared its groups, which the store counts.
    """
    deadline = time.monotonic() + settings.timeout
    while True:
        remaining = max(_MIN_WAIT_SECONDS, deadline - time.monotonic())
        store = open_store(StoreRequest(settings, run_name, rank=rank, world=world, timeout=remaining, check=check))
        stopwatch.end_phase("connect")
        try:
            # torchrun's agent serves one store to all starts of its processes, so each start gets keys of its own.
            if has_agent_store() and not isinstance(store, ExternalStore):
                store = open_start(store, rank, world, timeout=remaining, configured_timeout=settings.timeout)
                remaining = max(_MIN_WAIT_SECONDS, deadline - time.monotonic())
            if is_prepared:
                store.add(_PREPARED_KEY, 1)
            agree(
                store,
                rank,
                world=world,
                shared_settings=shared_settings,
                timeout=remaining,
                configured_timeout=settings.timeout,
                may_restart=is_under_torchrun(),
            )
            if isinstance(store, ExternalStore):
                store.seal()  # From now on no other process can join the job.
            stopwatch.end_phase("agree")
            return store
        except BaseException as error:
            _leave_failed_start(store, error, rank=rank, world=world, is_shared=isinstance(error, MegascaleError))
            if isinstance(error, Superseded):
                continue
            if isinstance(error, dist.DistError):
                raise TrainingError(f"the start broke off on rank {rank}: {summarise_error(error)}") from None
            raise


def _leave_failed_start(store: dist.Store, error: BaseException, *, rank: int, world: int, is_shared: bool) -> None:
    """Leave the store after a failed start. The keys in an external store expire soon.

    Args:
        is_shared: whether every rank raises this error. Rank 0 then keeps serving its own store until the other ranks
            have read why the start failed.
    """
    with suppress(dist.DistError, ConfigError):
        if not isinstance(store, ExternalStore):
            if is_shared:
                wait_for_readers(store, rank, world)
        elif not isinstance(error, StoreFenced):
            store.expire_soon(FAILED_KEYS_SECONDS)
    if isinstance(store, ExternalStore):
        store.close()


def _is_usable(
    preparation: GroupPreparation, config: Config, rank: int, world: int, *, device: torch.device, suffix: str
) -> bool:
    """Return whether this rank can use the groups that it has prepared."""
    return preparation.is_warm and preparation.target.matches(config, rank, world, device=device, name_suffix=suffix)


def _agree_on_preparation(
    store: dist.Store, preparation: GroupPreparation | None, config: Config, world: int
) -> GroupPreparation | None:
    """Return the preparation if all ranks use theirs, else drop it and return None. The same on all ranks."""
    if not config.rendezvous.prepared_groups:
        return None
    count = store.add(_PREPARED_KEY, 0)  # all ranks have counted before the verdict
    if preparation is not None and count == world:
        return preparation
    if preparation is not None:
        preparation.abandon(f"{count} of {world} ranks have prepared their groups")
        preparation.finish_abort()
    return None


def _make_default_group(
    store: dist.Store,
    rank: int,
    world: int,
    *,
    device: torch.device,
    group_timeout: float,
    preparation: GroupPreparation | None,
) -> None:
    """Make torch's default group: gloo for the CPU and, on a GPU, NCCL. `preparation` may have its backends."""
    if world > MAX_GLOO_MESH_RANKS:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    if device.type == "cuda":
        hide_false_warnings()
        # An agent sets this variable for processes that may take part in several attempts.
        set_watchdog(is_persistent=ORDERS_VARIABLE in os.environ)
    timeout = timedelta(seconds=group_timeout)
    backend = "gloo"
    options = None
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        options = torch_private.make_nccl_options(timeout, WORLD_CHANNELS)
    chosen_backends: AbstractContextManager[None] = torch_private.share_gloo_loop()
    if preparation is not None:
        chosen_backends = reuse_prepared(preparation, WORLD)
    with chosen_backends:
        dist.init_process_group(
            backend,  # No device is bound to the default group: see groups._make_group.
            store=dist.PrefixStore("torch", store),
            rank=rank,
            world_size=world,
            timeout=timeout,
            pg_options=options,
        )


def warm_up_nccl(device: torch.device) -> None:
    """Load NCCL with a communicator of this process alone. No default group may exist."""
    hide_false_warnings()
    set_watchdog(is_persistent=ORDERS_VARIABLE in os.environ)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.all_reduce(torch.ones(1, device=device))
        torch.cuda.synchronize(device)
    finally:
        dist.destroy_process_group()


def hide_false_warnings() -> None:
    """Let torch print no warning that does not hold for this package's groups, unless the environment asks for it.

    Each NCCL group reads the variable when it is made.
    """
    # Torch warns that unbatched sends and receives of one group run one after the other. Each direction of a pipeline
    # has a group of its own, in which all transfers have one order.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")


def set_watchdog(is_persistent: bool) -> None:
    """Set how torch's NCCL watchdog reacts to errors and time-outs, unless the environment already sets it.

    Args:
        is_persistent: whether the process outlives a failed attempt. Such a process aborts its communicators, and the
            watchdog must not end the process for the errors that follow. Leaving a group waits for the watchdog, so it
            must stop soon. The driver handles ranks that hang.
    """
    if not is_persistent:
        # After a time-out torch's watchdog sleeps four times as long before it ends the process: 60 s by default.
        os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "5000")
        return
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "100")


def _warm_default_group(groups: Groups) -> None:
    """Run one all-reduce over all ranks, so that the first step does not pay for connections."""
    start = time.perf_counter()
    if groups.grid.world_size > 1:
        _connect_default_group(groups.device, connects_pairs=False)
    groups.timings["warm world"] = time.perf_counter() - start


def _connect_default_group(device: torch.device, connects_pairs: bool) -> None:
    """Connect all ranks by an all-reduce. Any thread may call this function.

    Args:
        connects_pairs: whether to connect each pair of ranks too, for exchanges.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has a current device
    token = torch.ones(1, device=device)
    dist.all_reduce(token)
    if connects_pairs:
        counts = [1] * dist.get_world_size()
        sent = token.new_ones(len(counts))
        dist.all_to_all_single(torch.empty_like(sent), sent, counts, counts)  # with counts, as a load does
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _close_at_exit(reference: weakref.ref[Groups]) -> None:
    """Close the store of a process that ends without `shutdown`.

    A thread of torch that waits in the Python code of the store would keep the interpreter from ending.
    """
    groups = reference()
    if groups is not None and isinstance(groups.root_store, ExternalStore):
        groups.root_store.close()


def collect_shared_settings(config: Config) -> dict[str, str]:
    """Return the values that must be equal on all ranks, without secrets: versions first, then every setting."""
    shared_settings = {
        "megascale": megascale.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    for name, section in config.model_dump(mode="json").items():
        for key, value in section.items():
            shared_settings[f"{name}.{key}"] = json.dumps(value)
    if "MEGASCALE_NODE" in os.environ:  # The trainers' agent sets train.runs to a folder of its own machine.
        del shared_settings["train.runs"]
    return shared_settings


def _check_interfaces() -> None:
    """Raise ConfigError if GLOO_SOCKET_IFNAME names a network interface that this host lacks."""
    value = os.environ.get("GLOO_SOCKET_IFNAME", "")
    interfaces = [name for _, name in socket.if_nameindex()]
    for name in value.split(",") if value else []:
        interface = name.partition(":")[0]  # eth0:1 is another address of eth0
        if interface not in interfaces:
            raise ConfigError(
                f"GLOO_SOCKET_IFNAME={value} names the network interface {name!r}, which this host lacks; it has "
                f"{', '.join(interfaces)}. Set one of them on this host, or unset the variable"
            )
