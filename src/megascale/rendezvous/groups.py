"""The process groups that the grid declares, made in the plan's order, with local synchronisation only.

No global barrier is used here: a rank that is done goes on while others still meet. Each communicator is warmed by
one timed transfer, so that the first training step does not pay for connections. The start-up line reports the times.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.core.chunk_map import ChunkMap
from megascale.core.grid import Coordinate, Grid
from megascale.errors import TrainingError
from megascale.rendezvous.abort import GroupAbort
from megascale.rendezvous.agree import format_ranks
from megascale.rendezvous.group_plan import DIRECTIONS, GroupSpec, rank_groups
from megascale.rendezvous.group_sockets import cut_connections
from megascale.rendezvous.stores import ExternalStore, StoreFault

log = logging.getLogger(__name__)
FAILED_KEYS_SECONDS = 60.0  # seconds that the keys of a failed run stay, so that every rank can read the reason
_ABORT_SECONDS = 30.0  # seconds that a failed run waits for the abort of its communicators
_LEAVE_SECONDS = 10.0  # seconds that the end of a run waits for the other ranks or for the store


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
    """Process groups of one rank.

    Attributes:
        grid, rank, coordinate: the layout and this rank's coordinate in it.
        device: device of this rank's tensors.
        world: the default group (cpu:gloo and, on a GPU, cuda:nccl).
        by_kind: groups by the kinds of `group_plan.group_axes`; a kind whose axes have size 1 is absent. The kind
            embedding joins the stages of the model's first and last chunk, for tied embeddings.
        p2p: pipeline P2P channels, by use and stage at the other end. `send_forward` carries activations to a stage,
            `recv_backward` their gradients back, and `recv_forward` and `send_backward` are the other ends.
        timings: seconds by phase of the start.
        store: for small agreements outside of tensors.
        root_store: the store that holds the keys of `store` and of torch; for `shutdown`.
        sockets: gloo's connections, for `abort`.
        group_abort: the abort of NCCL's communicators.
    """

    grid: Grid
    rank: int
    coordinate: Coordinate
    device: torch.device
    world: dist.ProcessGroup | None = None
    by_kind: dict[str, dist.ProcessGroup] = field(default_factory=dict)
    p2p: dict[tuple[str, int], P2PChannel] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    store: dist.Store | None = None
    root_store: dist.Store | None = field(default=None, repr=False)
    sockets: dict[int, str] = field(default_factory=dict, repr=False)
    group_abort: GroupAbort = field(default_factory=GroupAbort, repr=False)

    def report(self) -> str:
        """Return the start-up line: milliseconds by phase."""
        phases = [f"{phase} {seconds * 1e3:.0f}" for phase, seconds in self.timings.items()]
        return f"start-up {sum(self.timings.values()):.2f} s (ms: {', '.join(phases)})"


def make_groups(
    grid: Grid,
    rank: int,
    *,
    chunk_map: ChunkMap | None = None,
    tied: bool = False,
    device: torch.device | str = "cpu",
    timeout: timedelta = timedelta(minutes=10),
    store: dist.Store | None = None,
    channels: Mapping[str, int | None] | None = None,
    late_kinds: Collection[str] = (),
) -> Groups:
    """Make and warm the groups of this rank; the default group must exist and span `grid.world_size` ranks.

    Every rank of the world must call this with the same arguments but `rank`.

    Args:
        chunk_map: stage of each model chunk; default: one chunk per stage.
        timeout: time after which collectives on these groups abort.
        store: becomes `Groups.store`.
        channels: largest number of NCCL channels by kind of group; None or a missing kind leaves the choice to NCCL.
        late_kinds: kinds of groups that may never be used; NCCL makes their communicators in their first call.

    Raises:
        TrainingError: a member did not come within `timeout`, or ended; names the group's ranks.
    """
    device = torch.device(device)
    groups = Groups(grid, rank, grid.coordinate(rank), device, dist.group.WORLD, store=store)
    began = time.perf_counter()
    specs = rank_groups(grid, rank, chunk_map, tied)
    members = []
    for spec in specs:
        with _explain_failure(spec, rank, timeout):
            is_late = spec.kind in late_kinds
            members.append(_new_group(spec, device, timeout, (channels or {}).get(spec.kind), is_late))
    groups.timings["groups"] = time.perf_counter() - began
    for spec, group in zip(specs, members, strict=True):
        if spec.kind in late_kinds:
            _assign(groups, spec, group)
            continue
        began = time.perf_counter()
        with _explain_failure(spec, rank, timeout):
            _warm(spec, group, rank, device)
        if spec.kind in DIRECTIONS:
            phase = "warm P2P channels"
        else:
            phase = f"warm {spec.kind}"
        groups.timings[phase] = groups.timings.get(phase, 0.0) + time.perf_counter() - began
        _assign(groups, spec, group)
    return groups


def describe_lost_peer(error: BaseException) -> str | None:
    """Return why torch could not reach another rank, at most 200 characters; None if `error` has another cause."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, StoreFault) or not (isinstance(error, dist.DistError) or "/gloo/" in text):
        return None
    # gloo puts its source file in front and advice behind.
    return re.sub(r"^\[\S*\] ", "", text).split(". ")[0][:200]


@contextmanager
def _explain_failure(spec: GroupSpec, rank: int, timeout: timedelta) -> Iterator[None]:
    """Name the ranks that this rank waited for if the group cannot be made."""
    try:
        yield
    except RuntimeError as error:
        reason = describe_lost_peer(error)
        if reason is None:
            raise
        peers = format_ranks(set(spec.ranks) - {rank})
        raise TrainingError(
            f"rank {rank} could not meet rank{'s' * (len(spec.ranks) > 2)} {peers} in group {spec.name} ({reason}): "
            "one of them ended or hangs, or its network broke; look at its log, and where "
            f"{timeout.total_seconds():g} seconds are too few raise --rendezvous.group_timeout"
        ) from error


def _assign(groups: Groups, spec: GroupSpec, group: dist.ProcessGroup) -> None:
    """Store the group that `spec` describes in `groups`."""
    if spec.kind not in DIRECTIONS:
        groups.by_kind[spec.kind] = group
        return
    sender, receiver = spec.ranks
    if sender == groups.rank:
        use, peer = f"send_{spec.kind}", receiver
    else:
        use, peer = f"recv_{spec.kind}", sender
    groups.p2p[use, groups.grid.coordinate(peer).pipeline] = P2PChannel(group, peer)


def _new_group(
    spec: GroupSpec, device: torch.device, timeout: timedelta, channels: int | None = None, is_late: bool = False
) -> dist.ProcessGroup:
    """Return a communicator among `spec.ranks` alone. NCCL makes it at once, or with `is_late` in the first call.

    On CUDA the device is bound here and not on the default group: a bound default group makes torch split each new
    communicator from the world's, a call that every rank of the world would have to join.
    """
    options = None
    if device.type == "cuda" and channels is not None:
        options = torch_private.make_nccl_options(timeout, channels)
    with torch_private.name_process_group(spec.name), torch_private.share_gloo_loop():
        group = dist.new_group(
            sorted(spec.ranks),
            timeout=timeout,
            backend="nccl" if device.type == "cuda" else "gloo",
            use_local_synchronization=True,
            pg_options=options,
            group_desc=spec.kind,
            device_id=device if device.type == "cuda" and not is_late else None,
        )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _warm(spec: GroupSpec, group: dist.ProcessGroup, rank: int, device: torch.device) -> None:
    """Run one transfer of the group's kind: NCCL connects point-to-point and collective channels separately."""
    token = torch.ones(1, device=device)
    if spec.kind not in DIRECTIONS:
        dist.all_reduce(token, group=group)
    elif rank == spec.ranks[0]:
        dist.send(token, spec.ranks[1], group=group)
    else:
        dist.recv(token, spec.ranks[0], group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def abort(groups: Groups) -> None:
    """Begin to end all calls of this rank that wait for a peer; may be called from any thread, and again.

    Calls of gloo end with an error. Kernels of NCCL end and leave undefined results; later calls raise. The groups are
    of no use afterwards; `shutdown` with `failed` then leaves them.
    """
    cut_connections(groups.sockets)
    if groups.device.type == "cuda" and dist.is_initialized():
        groups.group_abort.start()


def shutdown(groups: Groups, failed: bool = False) -> None:
    """Leave all groups and the store; every rank calls it at the end.

    The last rank to leave removes the job's keys from an external store. With `failed` (an error is being raised,
    peers may be lost) no rank waits for another, and the keys expire after `FAILED_KEYS_SECONDS`.
    """
    if dist.is_initialized():
        if failed:
            if groups.device.type == "cuda":
                groups.group_abort.start()
                groups.group_abort.finish(_ABORT_SECONDS)
            torch_private.abort_process_group()  # on a GPU it only clears torch's tables of groups
        else:
            dist.destroy_process_group()
    store = groups.root_store
    groups.root_store = groups.store = groups.world = None
    if store is None:
        return
    try:
        store.set_timeout(timedelta(seconds=_LEAVE_SECONDS))
        if not failed:
            _leave(store, groups)
        elif isinstance(store, ExternalStore):
            store.expire_soon(FAILED_KEYS_SECONDS)
    except dist.DistError as error:
        # The run's results are saved; only the removal of keys failed.
        log.warning("rank %d could not sign off at the store: %s", groups.rank, str(error).splitlines()[0])
    if isinstance(store, ExternalStore):
        store.close()


def _leave(store: dist.Store, groups: Groups) -> None:
    is_last = store.add("left", 1) == groups.grid.world_size
    if isinstance(store, ExternalStore):
        if is_last:
            store.remove_all()
    elif is_last:
        store.set("all left", "1")
    elif groups.rank == 0:
        # Rank 0 serves the store, which must answer the last calls of the other ranks.
        store.wait(["all left"], timedelta(seconds=_LEAVE_SECONDS))
