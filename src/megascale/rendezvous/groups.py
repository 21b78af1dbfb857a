"""Process groups of a rank: their creation, warm-up, abort and shutdown.

A rank creates its groups in the order of the plan (`group_plan`). Only the members of a group synchronise, and there is
no global barrier. One timed transfer warms up each communicator, so that the first training step does not pay for
connections. The start-up line reports the times. Communicators of NCCL may be made at the same time, in threads.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.core.chunk_map import ChunkMap
from megascale.core.grid import Coordinate, Grid
from megascale.errors import TrainingError
from megascale.rendezvous.abort import GroupAbort, list_groups
from megascale.rendezvous.agree import format_ranks
from megascale.rendezvous.concurrent_calls import call_concurrently
from megascale.rendezvous.group_options import WarmCall
from megascale.rendezvous.group_plan import DIRECTIONS, GroupSpec, plan_rank_groups
from megascale.rendezvous.group_sockets import cut_connections
from megascale.rendezvous.prepared_groups import SIDE, EarlierGroups, GroupPreparation
from megascale.rendezvous.stores import ExternalStore, StoreFault

log = logging.getLogger(__name__)
# Names of torch 2.13, and of earlier releases.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
FAILED_KEYS_SECONDS = 60.0  # lifetime of the keys of a failed run, so that every rank can read the reason
_ABORT_SECONDS = 30.0  # limit for the abort of communicators
_LEAVE_SECONDS = 10.0  # limit for waits for the other ranks or for the store at the end of a run


@dataclass(frozen=True)
class P2PChannel:
    """Communicator for one direction of one pipeline edge.

    Attributes:
        group: group of two ranks that serves only this channel.
        peer: global rank at the other end.
    """

    group: dist.ProcessGroup
    peer: int


@dataclass
class Groups:
    """Process groups of one rank.

    Attributes:
        grid, rank, coordinate: the layout and this rank's coordinate in it.
        device: device of this rank's tensors.
        world: the default group (cpu:gloo and, on a GPU, cuda:nccl).
        by_kind: groups by the kinds of `group_plan.list_group_axes`. A kind whose axes have size 1 is absent. The kind
            `embedding` joins the stages of the model's first and last chunk, for tied embeddings.
        p2p: pipeline P2P channels by use and by the stage at the other end. `send_forward` sends activations to that
            stage, and `recv_backward` receives their gradients. `recv_forward` and `send_backward` are the other ends.
        side: a second group of all ranks on the CPU, for collectives of another thread; None without an exchange of
            state.
        timings: seconds by phase of the start.
        store: store for small values that ranks exchange outside of tensors.
        root_store: store that holds the keys of `store` and of torch; `shutdown` uses it.
        sockets: gloo's connections by descriptor; `abort` uses them.
        group_abort: aborts NCCL's communicators.
        preparation: made the backends of these groups during the attempt before; None if they are new.
    """

    grid: Grid
    rank: int
    coordinate: Coordinate
    device: torch.device
    world: dist.ProcessGroup | None = None
    by_kind: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    p2p: dict[tuple[str, int], P2PChannel] = field(default_factory=dict)
    side: dist.ProcessGroup | None = None
    timings: dict[str, float] = field(default_factory=dict)
    store: dist.Store | None = None
    root_store: dist.Store | None = field(default=None, repr=False)
    sockets: dict[int, str] = field(default_factory=dict, repr=False)
    group_abort: GroupAbort = field(default_factory=GroupAbort, repr=False)
    preparation: GroupPreparation | None = field(default=None, repr=False)

    def report(self) -> str:
        """Return the start-up line: seconds in total and milliseconds by phase."""
        phases = [f"{phase} {seconds * 1e3:.0f}" for phase, seconds in self.timings.items()]
        text = f"start-up {sum(self.timings.values()):.2f} s (ms: {', '.join(phases)})"
        if self.preparation is not None:
            text += f"; the groups were made during the attempt before ({self.preparation.describe()})"
        return text


def make_groups(
    grid: Grid,
    rank: int,
    *,
    chunk_map: ChunkMap | None = None,
    tied: bool = False,
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(minutes=10),
    store: dist.Store | None = None,
    max_channels: Mapping[str, int | None] | None = None,
    late_kinds: Collection[str] = (),
    warm_calls: Mapping[str, WarmCall] | None = None,
    name_suffix: str = "",
    concurrent_call: Callable[[], None] | None = None,
    preparation: GroupPreparation | None = None,
) -> Groups:
    """Make the groups of this rank and warm them up.

    The default group must exist and have `grid.world_size` ranks. Each of them must call this function with the same
    arguments except `rank`.

    Args:
        chunk_map: stage of each model chunk. Default: one chunk per stage.
        tied: whether the stages of the model's first and last chunk share a tied embedding.
        timeout: time after which collectives on these groups fail.
        store: becomes `Groups.store`.
        max_channels: largest number of NCCL channels by kind of group. For None or a missing kind, NCCL chooses.
        late_kinds: kinds of groups that the job may never use. They are not warmed up, and NCCL makes their
            communicators in their first call.
        warm_calls: collective that warms up a group, by kind of group; for a missing kind an all-reduce. NCCL connects
            ranks for one algorithm at its first use. A small all-reduce may use another one than a step's collectives.
        name_suffix: end of the groups' names in torch. torch's symmetric memory caches ranks and store by this name, so
            a process that makes groups again needs another suffix.
        concurrent_call: runs in a thread while NCCL makes the communicators of all groups at the same time. It may use
            the default group, whose kernels are the only ones meanwhile. If None, communicators are made one after the
            other.
        preparation: has the backends of all groups, which are warmed up; None for new ones. Equal on every rank.

    Raises:
        TrainingError: a member did not come within `timeout`, or ended. The message names the group's ranks.
    """
    device = torch.device(device)
    groups = Groups(grid, rank, grid.coordinate(rank), device, dist.group.WORLD, store=store)
    start = time.perf_counter()
    specs = plan_rank_groups(grid, rank, chunk_map, tied)
    channel_limits = max_channels or {}
    new_groups = []
    for spec in specs:
        with _explain_failure(spec, rank, timeout):
            new_group = _make_group(
                spec,
                device,
                timeout=timeout,
                max_channels=channel_limits.get(spec.kind),
                is_connected_later=concurrent_call is not None or spec.kind in late_kinds,
                name_suffix=name_suffix,
                preparation=preparation,
            )
        new_groups.append(new_group)
    groups.timings["groups"] = time.perf_counter() - start
    if concurrent_call is not None:
        start = time.perf_counter()
        calls = {"world": concurrent_call}
        if device.type == "cuda":
            for spec, group in zip(specs, new_groups, strict=True):
                if spec.kind not in late_kinds:
                    calls[spec.name] = partial(_connect_group, spec, group, rank, device=device, timeout=timeout)
        call_concurrently(calls)
        groups.timings["connections"] = time.perf_counter() - start
    for spec, group in zip(specs, new_groups, strict=True):
        if spec.kind in late_kinds or preparation is not None:
            _store_group(groups, spec, group)
            continue
        start = time.perf_counter()
        with _explain_failure(spec, rank, timeout):
            _warm_group(spec, group, rank, device=device, call=(warm_calls or {}).get(spec.kind, "all_reduce"))
        if spec.kind in DIRECTIONS:
            phase = "warm P2P channels"
        else:
            phase = f"warm {spec.kind}"
        groups.timings[phase] = groups.timings.get(phase, 0.0) + time.perf_counter() - start
        _store_group(groups, spec, group)
    return groups


def describe_lost_peer(error: BaseException) -> str | None:
    """Return why torch could not reach another rank, or None if `error` has another cause.

    The text has at most 200 characters.
    """
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else type(error).__name__
    is_from_gloo = "/gloo/" in text  # gloo raises RuntimeError; its messages name a source file
    if isinstance(error, StoreFault) or not (isinstance(error, dist.DistError) or is_from_gloo):
        return None
    # gloo's messages start with a source file in brackets, and end with sentences of advice.
    return re.sub(r"^\[\S*\] ", "", text).split(". ")[0][:200]


@contextmanager
def _explain_failure(spec: GroupSpec, rank: int, timeout: timedelta) -> Iterator[None]:
    """Raise TrainingError with the ranks that this rank waited for, if torch could not reach one of them."""
    try:
        yield
    except RuntimeError as error:
        reason = describe_lost_peer(error)
        if reason is None:
            raise
        noun = "ranks" if len(spec.ranks) > 2 else "rank"  # spec.ranks includes this rank
        peers = f"{noun} {format_ranks(set(spec.ranks) - {rank})}"
        raise TrainingError(
            f"rank {rank} could not meet {peers} in group {spec.name} ({reason}): "
            "one of them ended or hangs, or its network broke; look at its log, or raise "
            f"--rendezvous.group_timeout={timeout.total_seconds():g} if the time is too short"
        ) from error


def _store_group(groups: Groups, spec: GroupSpec, group: dist.ProcessGroup) -> None:
    """Store the group that `spec` describes in `groups`. The kind of a P2P channel is a direction."""
    if spec.kind not in DIRECTIONS:
        groups.by_kind[spec.kind] = group
        return
    sender, receiver = spec.ranks
    if sender == groups.rank:
        use = f"send_{spec.kind}"
        peer = receiver
    else:
        use = f"recv_{spec.kind}"
        peer = sender
    groups.p2p[use, groups.grid.coordinate(peer).pipeline] = P2PChannel(group, peer)


def _make_group(
    spec: GroupSpec,
    device: torch.device,
    *,
    timeout: timedelta,
    max_channels: int | None,
    is_connected_later: bool,
    name_suffix: str,
    preparation: GroupPreparation | None,
) -> dist.ProcessGroup:
    """Return a group of `spec.ranks`, which only these ranks must call. `preparation` may have its backends.

    On CUDA the group is bound to the device, so that NCCL makes the communicator at once. If `is_connected_later`, the
    caller makes it (`_connect_group`), or NCCL in the first call. The default group is not bound to the device: torch
    would then split each new communicator from the default group's, and every rank of the world would have to take
    part.
    """
    is_cuda = device.type == "cuda"
    options = None
    if is_cuda and max_channels is not None:
        options = torch_private.make_nccl_options(timeout, max_channels)
    chosen_backends: AbstractContextManager[None] = torch_private.share_gloo_loop()
    if preparation is not None:
        chosen_backends = reuse_prepared(preparation, spec.name)
    connects_now = is_cuda and not is_connected_later and preparation is None
    with torch_private.name_process_group(spec.name + name_suffix), chosen_backends:
        group = dist.new_group(
            sorted(spec.ranks),
            timeout=timeout,
            backend="nccl" if is_cuda else "gloo",
            use_local_synchronization=True,
            pg_options=options,
            group_desc=spec.kind,
            device_id=device if connects_now else None,
        )
    assert isinstance(group, dist.ProcessGroup)
    if is_cuda and preparation is not None and not is_connected_later:
        group.bound_device_id = device
    return group


def make_side_group(
    world: int, timeout: timedelta, *, name_suffix: str, preparation: GroupPreparation | None
) -> dist.ProcessGroup:
    """Return a second group of all ranks, on the CPU. Collective. `preparation` may have its backend."""
    chosen_backends: AbstractContextManager[None] = torch_private.share_gloo_loop()
    if preparation is not None:
        chosen_backends = reuse_prepared(preparation, SIDE)
    with torch_private.name_process_group(SIDE + name_suffix), chosen_backends:
        group = dist.new_group(
            list(range(world)), timeout=timeout, backend="gloo", use_local_synchronization=True, group_desc="side"
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def reuse_prepared(preparation: GroupPreparation, name: str) -> AbstractContextManager[None]:
    """Return a context in which torch gives the group that is made the prepared backends of this name."""
    backends = preparation.backends[name]
    return torch_private.reuse_backends(gloo=backends.get("cpu"), nccl=backends.get("cuda"))


def _connect_group(
    spec: GroupSpec, group: dist.ProcessGroup, rank: int, *, device: torch.device, timeout: timedelta
) -> None:
    """Make the communicator of a group. Its members must call this function; other threads may connect other groups."""
    with _explain_failure(spec, rank, timeout):
        torch_private.connect_nccl(group, device)


def _warm_group(spec: GroupSpec, group: dist.ProcessGroup, rank: int, *, device: torch.device, call: WarmCall) -> None:
    """Run one transfer of the kind for which the group is used, for a group other than a P2P channel `call`.

    NCCL connects point-to-point and collective channels separately.
    """
    token = torch.ones(1, device=device)
    if spec.kind not in DIRECTIONS:
        _warm_collective(token, len(spec.ranks), group, call=call)
    elif rank == spec.ranks[0]:
        dist.send(token, spec.ranks[1], group=group)
    else:
        dist.recv(token, spec.ranks[0], group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _warm_collective(token: torch.Tensor, size: int, group: dist.ProcessGroup, *, call: WarmCall) -> None:
    """Run a collective of a group of `size` ranks with one element (`token`) per rank."""
    if call == "all_gather":
        _all_gather(token.new_empty(size), token, group=group)
    elif call == "reduce_scatter":
        _reduce_scatter(token, token.new_ones(size), group=group)
    else:
        dist.all_reduce(token, group=group)


def abort(groups: Groups) -> None:
    """Start to end all calls of this rank that wait for a peer. Any thread may call this function, also repeatedly.

    Calls of gloo raise an error. Kernels of NCCL end with undefined results, and later calls raise. The groups cannot
    be used afterwards, and the caller leaves them with `shutdown(groups, failed=True)`.
    """
    cut_connections(groups.sockets)
    if groups.device.type == "cuda" and dist.is_initialized():
        groups.group_abort.start()


def leave(groups: Groups) -> EarlierGroups:
    """Leave all groups without an abort, after a step that all ranks have completed. The caller aborts them later.

    torch and `shutdown` do not know the groups any more.
    """
    earlier_groups = EarlierGroups(list_groups())
    torch_private.forget_groups()
    return earlier_groups


def abandon(device: torch.device) -> None:
    """Leave the groups of a start that failed half-way, so that this process can start again."""
    if not dist.is_initialized():
        return
    if device.type == "cuda":
        group_abort = GroupAbort()
        group_abort.start()
        group_abort.finish(_ABORT_SECONDS)
    torch_private.abort_process_group()


def shutdown(groups: Groups, failed: bool = False) -> None:
    """Leave all groups and the store. Every rank calls this function at the end.

    The last rank that leaves removes the job's keys from an external store.

    Args:
        failed: whether the run failed and peers may be lost. No rank then waits for another, and the keys expire after
            `FAILED_KEYS_SECONDS`.
    """
    if dist.is_initialized():
        if failed:
            if groups.device.type == "cuda":
                groups.group_abort.start()
                groups.group_abort.finish(_ABORT_SECONDS)
            torch_private.abort_process_group()  # on a GPU this only removes the aborted groups from torch's tables
        else:
            dist.destroy_process_group()
    store = groups.root_store
    groups.root_store = None
    groups.store = None
    groups.world = None
    if store is None:
        return
    try:
        store.set_timeout(timedelta(seconds=_LEAVE_SECONDS))
        if not failed:
            _leave_store(store, groups)
        elif isinstance(store, ExternalStore):
            store.expire_soon(FAILED_KEYS_SECONDS)
    except dist.DistError as error:
        # The run's results are saved; only the removal of keys failed.
        log.warning("rank %d could not sign off at the store: %s", groups.rank, str(error).splitlines()[0])
    if isinstance(store, ExternalStore):
        store.close()


def _leave_store(store: dist.Store, groups: Groups) -> None:
    """Sign off at the store. The last rank removes the keys, or releases rank 0, which serves the store."""
    is_last = store.add("left", 1) == groups.grid.world_size
    if isinstance(store, ExternalStore):
        if is_last:
            store.remove_all()
    elif is_last:
        store.set("all left", "1")
    elif groups.rank == 0:
        # Rank 0 serves the store, which must answer the last calls of the other ranks.
        store.wait(["all left"], timedelta(seconds=_LEAVE_SECONDS))
