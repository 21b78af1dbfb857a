"""Groups of the next attempt, made by a thread while ranks still train the present attempt.

A thread of each rank meets the others in the present attempt's store and constructs torch's backends. All ranks then
warm up the new communicators at one step boundary. The next attempt gives the backends to its groups, on all ranks or
on none (`start_job.initialise`).

NCCL's kernels of two communicators may deadlock if ranks launch them in different orders, since a kernel keeps its SMs
until its peers have launched theirs. Construction launches no kernel that waits for a peer, but may wait for an idle
device. That wait ends, since ranks launch a step's kernels in one order or in one graph, and so no kernel needs a later
one. First calls and aborts run at a step boundary, between an idle device and the next launch, without kernels of other
communicators. All ranks enter the boundary of the first calls after the same step, which the step's sum chooses.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megascale import torch_private
from megascale.core.communicator_memory import MAX_CONNECTED_RANKS, WORLD_CHANNELS, estimate_prepared_groups
from megascale.core.grid import Grid
from megascale.core.schedule_registry import chunk_map_of
from megascale.core.stopwatch import Stopwatch
from megascale.errors import TrainingError
from megascale.rendezvous.abort import GroupAbort
from megascale.rendezvous.group_options import (
    MAX_GLOO_MESH_RANKS,
    GroupOptions,
    WarmCall,
    choose_group_options,
)
from megascale.rendezvous.group_plan import DIRECTIONS, GroupSpec, plan_rank_groups
from megascale.rendezvous.group_sockets import (
    Endpoint,
    cut_connections,
    list_listeners,
    list_new_sockets,
    list_sockets,
    select_connections,
    select_internet_sockets,
)
from megascale.rendezvous.stores import open_client, summarise_error

if TYPE_CHECKING:
    from megascale.config import Config

log = logging.getLogger("megascale.train")  # whose lines are in the logs of ranks
WORLD = "world"  # name of the default group in `GroupPreparation.backends`
SIDE = "side/0"  # name of the second group of all ranks, on the CPU only
_POLL_SECONDS = 0.2  # longest time until a thread that waits in the store notices that the preparation was abandoned
_SPARE_BYTES = 1 << 29  # of a GPU, for allocations of a step, in addition to a second set of communicators
_FAILED_KEY = "failed"  # names a rank that has abandoned the preparation, and its reason
_ABORT_SECONDS = 30.0  # limit for the abort of communicators
FIRST_CALLS_SECONDS = 10.0  # limit for the first calls of all groups


class Abandoned(Exception):
    """The preparation was abandoned."""


@dataclass(frozen=True)
class GroupTarget:
    """The attempt and the rank for which groups are prepared.

    Attributes:
        config: the resolved configuration with the data-parallel size of that attempt.
        name_suffix: end of the groups' names in torch, which is unique per attempt (`core/group_names.py`).
    """

    config: Config
    rank: int
    world: int
    device: torch.device
    name_suffix: str

    def matches(self, config: Config, rank: int, world: int, *, device: torch.device, name_suffix: str) -> bool:
        """Return whether an attempt needs the groups of this rank and layout."""
        if (self.config.parallel, self.config.overlap) != (config.parallel, config.overlap):
            return False
        expected = (self.rank, self.world, self.device, self.name_suffix)
        return expected == (rank, world, device, name_suffix)


@dataclass(eq=False)
class GroupPreparation:
    """Preparation of this rank's groups for the next attempt. A thread of its own makes the backends.

    Attributes:
        target: attempt and rank of the groups.
        address: host and port of the present attempt's store, which rank 0 serves.
        number: number of the preparation, which separates its keys in the store from those of others.
        is_joining: whether this process trains in no attempt yet. Its thread waits for the step boundary itself.
        server_store: store of the present attempt; its reference keeps the server of rank 0 until the groups end.
        backends: backends by name of the group ("world" for the default group) and by type of device.
        sockets: gloo's connections by descriptor.
        failure: why the preparation has failed or was abandoned, "" while it has not.
    """

    target: GroupTarget
    address: tuple[str, int]
    number: int
    is_joining: bool = False
    server_store: dist.Store | None = field(default=None, repr=False)
    backends: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)
    sockets: dict[int, str] = field(default_factory=dict, init=False, repr=False)
    failure: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._connected = threading.Event()
        self._boundary = threading.Event()  # set when the thread may launch the first calls
        self._ended = threading.Event()
        self._is_warm = False
        self._store: dist.Store | None = None
        self._specs: list[GroupSpec] = []
        self._options: GroupOptions = choose_group_options(self.target.config)
        self._abort: GroupAbort | None = None
        self._stopwatch = Stopwatch()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="megascale-groups", daemon=True).start()

    @property
    def is_connected(self) -> bool:
        """Return whether all ranks have made their communicators, which are not warmed up yet."""
        return self._connected.is_set() and not self._ended.is_set()

    @property
    def is_warm(self) -> bool:
        """Return whether the groups are complete and were not abandoned."""
        with self._lock:
            return self._is_warm and not self.failure

    @property
    def has_ended(self) -> bool:
        """Return whether the groups are complete, or the preparation has failed or was abandoned."""
        return self._ended.is_set()

    def wait(self, seconds: float = FIRST_CALLS_SECONDS) -> None:
        """Wait until the preparation has ended, and drop it if its first calls take longer than `seconds`.

        A peer that has dropped its groups may never make the calls that this process waits for.
        """
        self._boundary.wait()
        self._await_end(seconds)

    def warm_up(self, seconds: float) -> bool:
        """Make the first calls of all groups at a step boundary, at most for `seconds`, and return whether they ended.

        All ranks that train must call this function after the same step. The device must be idle, and the caller
        launches nothing meanwhile.
        """
        if self.target.rank == 0 and self._store is not None:
            try:
                self._store.set("boundary", "1")  # the joining ranks wait for it
            except dist.DistError as error:
                self.abandon(f"the store failed: {summarise_error(error)}")
        self._boundary.set()
        self._await_end(seconds)
        return self.is_warm

    def _await_end(self, seconds: float) -> None:
        """Wait for the end of the first calls, and drop the groups if they take longer than `seconds`."""
        if not self._ended.wait(seconds):
            self.abandon(f"the first calls took longer than {seconds:g} s")

    def abandon(self, reason: str) -> None:
        """End the preparation, or drop its complete groups. Any thread may call this function, also repeatedly.

        Calls that wait for a peer end: connections of gloo are cut, and communicators of NCCL are aborted.
        """
        with self._lock:
            if self.failure:
                return
            self.failure = reason
        self._ended.set()
        self._boundary.set()
        cut_connections(self.sockets)
        self._start_abort()
        log.warning("prepared groups of attempt%s are dropped: %s", self.target.name_suffix, reason)

    def finish_abort(self) -> None:
        """Wait until the communicators of an abandoned preparation are aborted. Raises TrainingError if they hang."""
        if self._abort is not None:
            self._abort.finish(_ABORT_SECONDS)
        self.backends = {}

    def hand_over(self) -> None:
        """Drop the backends, which belong to groups of an attempt now. The store stays open for them."""
        self.backends = {}

    def describe(self) -> str:
        """Return the seconds of the preparation by phase."""
        return self._stopwatch.describe()

    # the thread -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Make the communicators, wait for the step boundary, and make the first calls."""
        try:
            if self.target.device.type == "cuda":
                torch.cuda.set_device(self.target.device)
            self._connect()
            self._connected.set()
            self._await_boundary()
            self._stopwatch.end_phase("wait for the step boundary")
            self._make_first_calls()
            self._stopwatch.end_phase("first calls")
            with self._lock:
                self._is_warm = not self.failure
            self._ended.set()
        except Abandoned:
            pass
        except TrainingError as error:
            self.abandon(str(error))
        except Exception as error:
            self.abandon(f"{type(error).__name__}: {summarise_error(error)}")
        finally:
            if self.failure:
                self._tell_others()
                self._start_abort()  # also of communicators that were made after the abandonment

    def _tell_others(self) -> None:
        """Let the other ranks end their preparation too. The first failure counts."""
        if self._store is not None:
            with suppress(dist.DistError):  # the store may have ended with rank 0
                self._store.compare_set(_FAILED_KEY, "", f"rank {self.target.rank}: {self.failure}")

    def _check(self) -> None:
        """Raise Abandoned if this rank has abandoned the preparation."""
        if self.failure:
            raise Abandoned

    def _check_others(self) -> None:
        """Raise TrainingError if another rank has abandoned the preparation."""
        assert self._store is not None
        if self._store.check([_FAILED_KEY]):
            raise TrainingError(self._store.get(_FAILED_KEY).decode())

    def _connect(self) -> None:
        """Meet the other ranks and make the backends of all groups, with NCCL's communicators."""
        target = self.target
        settings = target.config.rendezvous
        grid = Grid.from_config(target.config.parallel, target.world)
        tied = target.config.model.tied_embeddings
        self._specs = plan_rank_groups(grid, target.rank, chunk_map_of(target.config.parallel), tied)
        store = open_client(self.address, target.world, timeout=settings.timeout, check=self._check)
        self._store = dist.PrefixStore(f"prepared/{self.number}", store)
        self._check_memory(grid)
        self._meet("present")
        log.info("all ranks make the groups of attempt%s", target.name_suffix)
        self._stopwatch.end_phase("meet")
        if target.world > MAX_GLOO_MESH_RANKS:
            os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
        timeout = timedelta(seconds=settings.group_timeout)
        earlier_sockets = list_sockets()
        self._add_gloo(WORLD, range(target.world), timeout)
        self._add_gloo(SIDE, range(target.world), timeout)
        if target.device.type != "cuda":
            for spec in self._specs:
                self._add_gloo(spec.name, sorted(spec.ranks), timeout)
        new_sockets = select_internet_sockets(list_new_sockets(earlier_sockets))
        self._store.set(f"listeners/{target.rank}", json.dumps(sorted(list_listeners())))
        if target.device.type == "cuda":
            self._make_nccl_backends(timeout)  # NCCL's sockets, which are opened later, have its own abort
        self._stopwatch.end_phase("communicators")
        self._meet("connected")
        self._note_sockets(new_sockets)
        self._stopwatch.end_phase("others' communicators")

    def _check_memory(self, grid: Grid) -> None:
        """Raise TrainingError if the GPU has too little free memory for a second set of communicators."""
        if self.target.device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self.target.device)
        needed = estimate_prepared_groups(self.target.config, grid)
        log.info(
            "groups of attempt%s: estimate %.2f GiB of the GPU, which has %.2f GiB free",
            self.target.name_suffix,
            needed / 2**30,
            free / 2**30,
        )
        if free < needed + _SPARE_BYTES:
            raise TrainingError(
                f"rendezvous.prepared_groups=true needs {(needed + _SPARE_BYTES) / 2**30:.1f} GiB of the GPU, and "
                f"{free / 2**30:.1f} GiB are free"
            )

    def _meet(self, name: str) -> None:
        """Wait until all ranks have called this function with the same name. Raises Abandoned."""
        assert self._store is not None
        if self._store.add(f"{name}/count", 1) == self.target.world:
            self._store.set(name, "1")
        self._await_key(name)

    def _await_key(self, name: str) -> None:
        """Wait until a key is set. Raises Abandoned."""
        assert self._store is not None
        while True:
            self._check()
            begin = time.monotonic()
            try:
                self._store.wait([name], timedelta(seconds=_POLL_SECONDS))
                return
            except dist.DistStoreError:
                if time.monotonic() - begin < _POLL_SECONDS / 2:  # another error than the end of the time
                    raise
            self._check_others()

    def _add_gloo(self, name: str, ranks: Sequence[int], timeout: timedelta) -> None:
        """Make the gloo backend of a group. It connects to the members, which make theirs in the same order."""
        self._check()
        assert self._store is not None
        members = list(ranks)
        store = dist.PrefixStore(f"{name}/cpu", self._store)
        rank = members.index(self.target.rank)
        self.backends[name] = {"cpu": torch_private.make_gloo_backend(store, rank, len(members), timeout)}

    def _note_sockets(self, new_sockets: Mapping[int, str]) -> None:
        """Note gloo's connections among the sockets that were opened while gloo's backends were made.

        Each of them leads to an endpoint on which a rank listens. Other threads may have opened sockets meanwhile.
        """
        assert self._store is not None
        _, store_port = self.address
        listeners_by_rank: list[set[Endpoint]] = []
        for rank in range(self.target.world):
            listeners = json.loads(self._store.get(f"listeners/{rank}"))
            listeners_by_rank.append({(host, port) for host, port in listeners if port != store_port})
        local_listeners = listeners_by_rank[self.target.rank]
        self.sockets = select_connections(new_sockets, local_listeners, set().union(*listeners_by_rank))
        if self.failure:
            cut_connections(self.sockets)

    def _make_nccl_backends(self, timeout: timedelta) -> None:
        """Make NCCL's backends, and one communicator after the other."""
        target = self.target
        self._add_nccl(WORLD, range(target.world), timeout, channels=WORLD_CHANNELS)
        for spec in self._specs:
            self.backends[spec.name] = {}
            channels = self._options.max_channels.get(spec.kind)
            self._add_nccl(spec.name, sorted(spec.ranks), timeout, channels=channels)
        late_names = {spec.name for spec in self._specs if spec.kind in self._options.late_kinds}
        for name, backends in self.backends.items():
            if name not in late_names and "cuda" in backends:
                self._check()
                torch_private.connect_nccl_backend(backends["cuda"], target.device)

    def _add_nccl(self, name: str, ranks: Sequence[int], timeout: timedelta, *, channels: int | None) -> None:
        """Make the NCCL backend of a group, without its communicator."""
        self._check()
        assert self._store is not None
        members = list(ranks)
        self.backends[name]["cuda"] = torch_private.make_nccl_backend(
            dist.PrefixStore(f"{name}/cuda", self._store),
            members.index(self.target.rank),
            members,
            name=name + self.target.name_suffix,
            timeout=timeout,
            channels=channels,
        )

    def _await_boundary(self) -> None:
        """Wait until the ranks that train have reached the step boundary."""
        if self.is_joining:
            self._await_key("boundary")
            self._boundary.set()
        else:
            while not self._boundary.wait(_POLL_SECONDS):
                self._check_others()
        self._check()

    def _make_first_calls(self) -> None:
        """Make the first call of each group, and exchange an element between all pairs of a small job."""
        device = self.target.device
        if device.type != "cuda":
            self._call_groups("cpu")
            return
        # The default stream belongs to the trainer. A stream of its own ends with these calls alone.
        stream = torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            self._call_groups("cuda")
        stream.synchronize()

    def _call_groups(self, device_type: str) -> None:
        world, device = self.target.world, self.target.device
        backend = self.backends[WORLD][device_type]
        token = torch.ones(1, device=device)
        backend.allreduce([token]).wait()
        if world <= MAX_CONNECTED_RANKS:
            counts = [1] * world
            sent = torch.ones(world, device=device)
            backend.alltoall_base(torch.empty_like(sent), sent, counts, counts).wait()
        for spec in self._specs:
            if spec.kind not in self._options.late_kinds:
                self._check()
                call = self._options.warm_calls.get(spec.kind, "all_reduce")
                warm_backend(self.backends[spec.name][device_type], spec, self.target.rank, device=device, call=call)

    def _start_abort(self) -> None:
        """Start to abort NCCL's communicators that exist."""
        if self.target.device.type != "cuda":
            return
        pairs = [(name, backends["cuda"]) for name, backends in list(self.backends.items()) if "cuda" in backends]
        group_abort = GroupAbort()
        group_abort.start(pairs)
        self._abort = group_abort


def warm_backend(backend: Any, spec: GroupSpec, rank: int, *, device: torch.device, call: WarmCall) -> None:
    """Run one transfer on a backend that has no group yet, of the kind for which its group is used."""
    token = torch.ones(1, device=device)
    members = sorted(spec.ranks)
    size = len(members)
    if spec.kind in DIRECTIONS:
        sender, receiver = spec.ranks
        if rank == sender:
            work = backend.send([token], members.index(receiver), 0)
        else:
            work = backend.recv([token], members.index(sender), 0)
    elif call == "all_gather":
        work = backend._allgather_base(token.new_empty(size), token)
    elif call == "reduce_scatter":
        work = backend._reduce_scatter_base(token, token.new_ones(size))
    else:
        work = backend.allreduce([token])
    work.wait()


@dataclass(eq=False)
class EarlierGroups:
    """Groups of an attempt that ranks have left without an abort, which follows after the next attempt's second step.

    Attributes:
        groups: pairs of a name and a process group.
    """

    groups: list[tuple[str, Any]]
    _abort: GroupAbort = field(default_factory=GroupAbort, init=False, repr=False)

    def start_abort(self) -> None:
        """Start to abort the groups. Only the first call has an effect."""
        self._abort.start(self.groups)

    def finish_abort(self) -> None:
        """Wait for the aborts and drop the groups. Raises TrainingError if one fails or hangs."""
        self._abort.finish(_ABORT_SECONDS)
        self.groups = []
