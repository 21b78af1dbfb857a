"""Loading from staged snapshots that services still hold in memory: this host's own, else a copy on a peer's host."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megascale.checkpoint.background.service_protocol import ListHeld, Open, Opened
from megascale.checkpoint.format.chunks import TensorShard
from megascale.checkpoint.format.index import CheckpointIndex, join
from megascale.checkpoint.format.mapping import map_shared
from megascale.checkpoint.format.write_plan import data_file
from megascale.checkpoint.loader import Accept, LoadReport, fill_shards
from megascale.checkpoint.object_collectives import Peers
from megascale.services.conversation import Conversation


@dataclass(frozen=True)
class Held:
    """A save that is complete in the memory of the hosts of a group.

    Attributes:
        step, generation: which.
        holders: for each process that saved, the processes of this group whose host has its snapshot.
        copies: how many of the snapshots only a peer's copy can give.
    """

    step: int
    generation: str
    holders: list[list[int]]
    copies: int

    @property
    def sequence(self) -> int:
        """Number of the save in its folder."""
        return int(self.generation[:8])


def find_held(sock: Conversation | None, peers: Peers, identity: str) -> Held | None:
    """The newest save whose snapshots are all in memory somewhere; collective. None for a host without a service."""
    mine = []
    if sock is not None:
        with contextlib.suppress(OSError):
            answer = sock.request(ListHeld())
            mine = [(h.rank, h.replica, h.generation, h.ranks, h.step) for h in answer.held if h.identity == identity]
    saves: dict[str, dict[int, tuple[list[int], list[int]]]] = {}
    ranks: dict[str, tuple[int, int]] = {}
    for member, held in enumerate(peers.all_gather(mine, list[tuple[int, bool, str, int, int]])):
        for rank, replica, generation, count, step in held:
            own, copies = saves.setdefault(generation, {}).setdefault(rank, ([], []))
            (copies if replica else own).append(member)
            ranks[generation] = (count, step)
    for generation in sorted(saves, reverse=True):
        snapshots = saves[generation]
        count, step = ranks[generation]
        if len(snapshots) == count:
            holders = [snapshots[r][0] or snapshots[r][1] for r in range(count)]
            return Held(step, generation, holders, sum(not snapshots[r][0] for r in range(count)))
    return None


def load_held(
    sock: Conversation | None,
    held: Held,
    shards: Sequence[TensorShard],
    peers: Peers,
    report: LoadReport | None = None,
    *,
    accept: Accept | None = None,
    complete: bool = False,
) -> dict[str, Any] | str:
    """Fill shards from memory; the saved state, or what is damaged (the same on all). Collective.

    `accept`, `complete`: as for `loader.load`.
    """
    snapshots: dict[int, tuple[memoryview, Opened, bytes]] = {}
    opening = threading.Lock()  # several rounds are read at a time

    def open_image(rank: int) -> tuple[memoryview, Opened, bytes]:
        with opening:
            if rank not in snapshots:
                assert sock is not None, "a process without a service holds no snapshot"
                message = sock.request(Open(rank, held.generation))
                (handle,), index = sock.files, bytes(sock.body)
                view = memoryview(map_shared(handle, message.size, writable=False))
                os.close(handle)
                snapshots[rank] = (view, message, index)
            return snapshots[rank]

    problem, parts, state = None, {}, "{}"
    try:
        for rank, members in enumerate(held.holders):
            if members[0] == peers.rank:
                _, message, table = open_image(rank)
                index = CheckpointIndex.from_bytes(table).with_generation("", np.array(message.crcs, np.uint32))
                parts[rank] = (index.to_bytes(), message.state if rank == 0 else "")
    except OSError as error:
        problem = str(error)
    answers = peers.all_gather((problem, parts), tuple[str | None, dict[int, tuple[bytes, str]]])
    wrong = next((p for p, _ in answers if p), None)
    if wrong:
        return wrong
    found = {rank: part for _, offered in answers for rank, part in offered.items()}
    state = found[0][1]
    whole = join([CheckpointIndex.from_bytes(found[rank][0]) for rank in range(len(held.holders))])
    holders = {f"-{data_file(rank)}": members for rank, members in enumerate(held.holders)}

    def read(file: str, start: int, stop: int) -> memoryview:
        view, _, _ = open_image(int(file.removeprefix("-").split(".")[0]))
        return view[start:stop]

    name = f"memory, step {held.step}"
    record = json.loads(state)
    new_optimizer = accept(record, name) if accept is not None else False
    holders = {name: members for name, members in holders.items() if name in whole.files}
    damage = fill_shards(
        whole,
        shards,
        peers,
        read,
        name=name,
        state=record,
        holders=holders,
        report=report,
        complete=complete,
        new_optimizer=new_optimizer,
    )
    return record if damage is None else damage
