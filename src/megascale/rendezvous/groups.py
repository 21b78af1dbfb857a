"""Makes the process groups that the grid declares, in the plan's order, with local synchronisation only.

No global barrier is used here: a rank that is done goes on while others still meet. Each communicator is warmed by
one timed transfer, so that the first training step does not pay for connections, and the times are kept for the
start-up print.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.core.grid import Coordinate, Grid
from megascale.errors import TrainingError
from megascale.rendezvous.agree import ranges
from megascale.rendezvous.group_plan import DIRECTIONS, GroupSpec, plan_groups, rank_groups
from megascale.rendezvous.store_errors import StoreFault

__all__ = [
    "GroupSpec",
    "Groups",
    "P2PChannel",
    "describe_lost_peer",
    "make_groups",
    "plan_groups",
    "rank_groups",
    "shutdown",
]


log = logging.getLogger(__name__)
AFTERLIFE = 60.0  # seconds that the keys of a failed run stay, so that every rank can still read what went wrong
_LEAVE = 10.0  # seconds that the end of a run waits for the others or for the store


@dataclass(frozen=True)
class P2PChannel:
    """One direction of one pipeline edge.

    Attributes:
        group: a communicator of two ranks that carries nothing else.
        peer: the global rank at the other end.
    """

    group: dist.ProcessGroup
    peer: int


@dataclass
class Groups:
    """What one rank holds. A group is None where its axes have size 1: there is nobody to talk to.

    Attributes:
        grid, rank, coordinate: the layout and this rank's place in it.
        device: where this rank's tensors live.
        world: the default group (cpu:gloo beside cuda:nccl on a GPU).
        tensor: ranks of one tensor-parallel group.
        data_gather, data_reduce: two communicators over the same data-parallel ranks, so that gathering
            parameters and reducing gradients do not queue behind each other.
        model: tensor x pipeline: the ranks that hold one copy of the model (gradient norm, non-finite flag).
        stage: tensor x data: all ranks of one pipeline stage (LAMB's norms over shards).
        embedding: first and last stage, for tied embeddings.
        send_forward, recv_forward, send_backward, recv_backward: pipeline P2P channels. `send_forward` carries
            activations to the next stage, `recv_backward` their gradients back. With virtual stages the last
            stage's next is the first.
        timings: seconds by phase of the start.
        store: for small agreements outside of tensors.
        root_store: what `store` and torch's keys lie in; for `shutdown`.
    """

    grid: Grid
    rank: int
    coordinate: Coordinate
    device: torch.device
    world: dist.ProcessGroup | None = None
    tensor: dist.ProcessGroup | None = None
    data_gather: dist.ProcessGroup | None = None
    data_reduce: dist.ProcessGroup | None = None
    model: dist.ProcessGroup | None = None
    stage: dist.ProcessGroup | None = None
    embedding: dist.ProcessGroup | None = None
    send_forward: P2PChannel | None = None
    recv_forward: P2PChannel | None = None
    send_backward: P2PChannel | None = None
    recv_backward: P2PChannel | None = None
    timings: dict[str, float] = field(default_factory=dict)
    store: dist.Store | None = None
    root_store: Any = field(default=None, repr=False)

    def p2p_channels(self) -> list[P2PChannel]:
        """The P2P channels this rank has."""
        all_four = (self.send_forward, self.recv_forward, self.send_backward, self.recv_backward)
        return [p2p_channel for p2p_channel in all_four if p2p_channel is not None]

    def report(self) -> str:
        """One line for the start-up print: where the time went, in milliseconds."""
        parts = [f"{phase} {seconds * 1e3:.0f}" for phase, seconds in self.timings.items()]
        return f"start-up {sum(self.timings.values()):.2f} s (ms: {', '.join(parts)})"


def make_groups(
    grid: Grid,
    rank: int,
    *,
    virtual_stages: int = 1,
    tied: bool = False,
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(minutes=10),
    store: dist.Store | None = None,
    channels: Mapping[str, int | None] | None = None,
) -> Groups:
    """Make and warm the groups of this rank; the default group must exist and span `grid.world` ranks.

    Every rank of the world must call this with the same arguments but `rank`. `store` is only handed on.
    Collectives on these groups abort after `timeout`. `channels`: most NCCL channels by kind of group, None or a
    kind left out for NCCL's own choice.

    Raises:
        TrainingError: a member did not come within `timeout`, or ended; names the group's ranks.
    """
    device = torch.device(device)
    groups = Groups(grid, rank, grid.coordinate(rank), device, dist.group.WORLD, store=store)
    began = time.perf_counter()
    specs = rank_groups(grid, rank, virtual_stages, tied)
    made = []
    for spec in specs:
        with _meeting(spec, rank, timeout):
            made.append((spec, _new_group(spec, device, timeout, (channels or {}).get(spec.kind))))
    groups.timings["groups"] = time.perf_counter() - began
    for spec, group in made:
        began = time.perf_counter()
        with _meeting(spec, rank, timeout):
            _warm(spec, group, rank, device)
        phase = "warm P2P channels" if spec.kind in DIRECTIONS else f"warm {spec.kind}"
        groups.timings[phase] = groups.timings.get(phase, 0.0) + time.perf_counter() - began
        _place(groups, spec, group)
    return groups


def describe_lost_peer(error: BaseException) -> str | None:
    """Why torch could not reach another rank, in short; None if `error` is something else."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, StoreFault) or not (isinstance(error, dist.DistError) or "/gloo/" in text):
        return None
    # gloo puts its source file in front and advice behind.
    return re.sub(r"^\[\S*\] ", "", text).split(". ")[0][:200]


@contextmanager
def _meeting(spec: GroupSpec, rank: int, timeout: timedelta) -> Iterator[None]:
    """Tell whom this rank waited for, should the group not come about."""
    try:
        yield
    except RuntimeError as error:
        why = describe_lost_peer(error)
        if why is None:
            raise
        others = ranges(set(spec.ranks) - {rank})
        raise TrainingError(
            f"rank {rank} could not meet rank{'s' * (len(spec.ranks) > 2)} {others} in group {spec.name} ({why}): one "
            f"of them ended or hangs, or its network broke; look at its log, and where {timeout.total_seconds():g} "
            "seconds are too few raise --rendezvous.group_timeout"
        ) from error


def _place(groups: Groups, spec: GroupSpec, group: dist.ProcessGroup) -> None:
    if spec.kind not in DIRECTIONS:
        setattr(groups, spec.kind, group)
        return
    sender, receiver = spec.ranks
    if sender == groups.rank:
        setattr(groups, f"send_{spec.kind}", P2PChannel(group, receiver))
    else:
        setattr(groups, f"recv_{spec.kind}", P2PChannel(group, sender))


def _new_group(
    spec: GroupSpec, device: torch.device, timeout: timedelta, channels: int | None = None
) -> dist.ProcessGroup:
    """A communicator among `spec.ranks` alone.

    On CUDA the device is bound here and not on the default group: a bound default group makes torch split each new
    communicator from the world's, a call that every rank of the world would have to join.
    """
    options = None
    if device.type == "cuda" and channels is not None:
        options = torch_private.nccl_options(timeout, channels)
    with torch_private.process_group_named(spec.name), torch_private.gloo_loop_shared():
        group = dist.new_group(
            sorted(spec.ranks),
            timeout=timeout,
            backend="nccl" if device.type == "cuda" else "gloo",
            use_local_synchronization=True,
            pg_options=options,
            group_desc=spec.kind,
            device_id=device if device.type == "cuda" else None,
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _warm(spec: GroupSpec, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """One transfer of the kind the group is for. Lanes send along their direction: NCCL connects point-to-point
    and collective channels separately."""
    token = torch.ones(1, device=device)
    if spec.kind in DIRECTIONS:
        sender, receiver = spec.ranks
        if rank == sender:
            dist.send(token, receiver, group=group)
        else:
            dist.recv(token, sender, group=group)
    else:
        dist.all_reduce(token, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def shutdown(groups: Groups, failed: bool = False) -> None:
    """Leave all groups and the store; every rank calls it at the end.

    The last rank to leave removes the job's keys from a Redis server. With `failed` (an error is under way, peers
    may be lost) nothing waits for anybody, and rank 0 lets the keys expire within a minute.
    """
    if dist.is_initialized():
        if failed:
            torch_private.abort_process_group()
        else:
            dist.destroy_process_group()
    store, groups.root_store, groups.store, groups.world = groups.root_store, None, None, None
    if store is None:
        return
    try:
        store.set_timeout(timedelta(seconds=_LEAVE))
        if not failed:
            _leave(store, groups)
        elif hasattr(store, "expire_soon"):
            store.expire_soon(AFTERLIFE)
    except dist.DistError as error:
        # The work is done and saved; only the tidying is not.
        log.warning("rank %d could not sign off at the store: %s", groups.rank, str(error).splitlines()[0])
    if hasattr(store, "close"):
        store.close()


def _leave(store: Any, groups: Groups) -> None:
    last = store.add("left", 1) == groups.grid.world_size
    if hasattr(store, "remove_all"):
        if last:
            store.remove_all()
    elif last:
        store.set("all left", "1")
    elif groups.rank == 0:
        # Rank 0 serves the store: the others' last calls must find it.
        store.wait(["all left"], timedelta(seconds=_LEAVE))
