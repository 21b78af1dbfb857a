"""What trainers and checkpoint services say to each other, and where a host's service is found. No torch.

Local: a Unix socket in a folder that only this user may enter. Between hosts: TCP, where both sides prove that they
know the run's token before anything else is said (services/conversation.py; the token itself never travels there).
Contents are checked by checksum, not encrypted.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from typing import Annotated

from msgspec import Meta

from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.services.conversation import Done, ErrorReply
from megascale.services.framing import FORM
from megascale.services.host_service import ServiceLocation
from megascale.services.messages import Count, Message, Name, Part, Path, Port, Schema, Text
from megascale.services.private_folder import make_private, private_base

NAME = "checkpoint"
LIMIT = 64 << 20  # bytes of a message: a snapshot's checksums, the state saved with it
INDEX = 1 << 30  # bytes of a snapshot's index, from another host
State = Annotated[str, Meta(max_length=LIMIT // 2)]
Crcs = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=LIMIT // 8)]
_Token = Annotated[str, Meta(max_length=256)]
_Ranks = Annotated[tuple[Count, ...], Meta(max_length=4096)]


# A trainer's questions --------------------------------------------------------------------------------------------


class Register(Message, frozen=True):
    """Who are you? With a token: take copies from those who know it, at the address `listen`."""

    token: _Token = ""
    listen: Name = "127.0.0.1"


class Goodbye(Message, frozen=True):
    """The run is over: end as soon as the work is done."""


class Allocate(Message, frozen=True):
    """Memory for `slots` snapshots of `size` bytes of one process. Beside it: the index of its file."""

    rank: Count
    size: Count
    slots: Annotated[int, Meta(ge=1, le=64)]


class AwaitPages(Message, frozen=True):
    """Are the pages of a slot's memory in place? Answered at once if so, else after a moment."""

    rank: Count
    slot: Count


class Fill(Message, frozen=True):
    """The trainer is about to overwrite a slot."""

    rank: Count
    slot: Count


class Staged(Message, frozen=True):
    """A slot is filled, or with `follow` is being filled, of which `Rows` tell.

    Attributes:
        step, generation, identity, state, ranks: what the snapshot is (see format/staged_file.py::Slot).
        size: bytes of the file.
        persist: also write it to `storage`, where it needs `needed` bytes, and leave `keep` checkpoints.
        above: number of the save that the run began from, 0: none.
        local: processes of this host.
        leader: this process's host commits.
        plan: name of the plan (`Plan`).
        peer: where the copy goes, None: nowhere; to those who know `token`.
    """

    rank: Count
    slot: Count
    step: Count
    generation: Name
    identity: Name
    state: State
    ranks: Count
    size: Count
    persist: bool
    storage: Path
    needed: Count
    keep: Count
    above: Count
    local: _Ranks
    leader: bool
    plan: Name
    peer: tuple[Name, Port] | None = None
    token: _Token = ""
    follow: bool = False


class Rows(Message, frozen=True):
    """So many chunks have their elements."""

    rows: Count


class Plan(Message, frozen=True):
    """The whole plan by this name. Beside it: `index_bytes` of the index, then torch's form of it."""

    plan: Name
    index_bytes: Count


class Pruned(Message, frozen=True):
    """Answer when the checkpoints that a commit made superfluous are gone."""


class Wait(Message, frozen=True):
    """Answer when a save is committed or given up."""

    generation: Name


class ListHeld(Message, frozen=True):
    """What lies in memory there?"""


class Open(Message, frozen=True):
    """One snapshot: its memory, its chunks, the state saved with it."""

    rank: Count
    generation: Name


# The service's answers --------------------------------------------------------------------------------------------


class Registered(Message, frozen=True):
    """The service's name, its process id, and the port where it takes copies (0: none)."""

    service: Name
    pid: Count
    port: Port = 0


class Allocated(Message, frozen=True):
    """What each slot holds. Beside it: the slots' memory, as open files."""

    held: Annotated[tuple[Name, ...], Meta(max_length=64)]


class PagesReady(Message, frozen=True):
    """Whether they are."""

    ready: bool


class Released(Message, frozen=True):
    """The slot may be filled anew. replica: what went wrong with the copy."""

    seconds: float
    replica: Text | None = None


class Outcome(Message, frozen=True):
    """What became of a save."""

    committed: bool
    bytes: Count = 0
    why: Text = ""
    record: ExitRecord = NO_RECORD


class HeldSnapshot(Part, frozen=True):
    """A snapshot in memory; replica: another host's."""

    rank: Count
    replica: bool
    step: Count
    generation: Name
    identity: Name
    ranks: Count


class HeldSnapshots(Message, frozen=True):
    """All of them."""

    held: Annotated[tuple[HeldSnapshot, ...], Meta(max_length=1 << 16)]
    service: Name


class Opened(Message, frozen=True):
    """A snapshot. Beside it: its index, and its memory as an open file."""

    state: State
    crcs: Crcs
    step: Count
    size: Count


# Between services -------------------------------------------------------------------------------------------------


class Replicate(Message, frozen=True):
    """A copy of a snapshot comes: beside this its index, after it `size` bytes, which may still be completed while they
    are sent, and `Checksums`. slots: how many its process has."""

    rank: Count
    slot: Count
    slots: Annotated[int, Meta(ge=1, le=64)]
    size: Count
    above: Count
    step: Count
    generation: Name
    identity: Name
    state: State
    ranks: Count


class Checksums(Message, frozen=True):
    """Of each chunk of a copy, once all of it is sent."""

    crcs: Crcs


class Replicated(Message, frozen=True):
    """Whether it arrived undamaged."""

    whole: bool


TO_SERVICE = Schema(
    Register, Goodbye, Allocate, AwaitPages, Fill, Staged, Rows, Plan, Pruned, Wait, ListHeld, Open, limit=LIMIT
)
FROM_SERVICE = Schema(
    Done, ErrorReply, Registered, Allocated, PagesReady, Released, Outcome, HeldSnapshots, Opened, limit=LIMIT
)
COPIES = Schema(Replicate, Checksums, Replicated, limit=LIMIT)


def private_folder(run: pathlib.Path | str, node: str | None = None) -> pathlib.Path:
    """A folder of this user and host for the sockets of one run (see make_private).

    node: its name where a launcher plays several nodes on one host, each a host of its own; default: this process's.
    """
    node = os.environ.get("MEGASCALE_NODE", "") if node is None else node
    # A service that lingers from a version with another form of the protocol is not talked to.
    identity = f"{pathlib.Path(run).absolute()}\0{node}\0{FORM}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return make_private(private_base() / name)


def locate_service(folder: pathlib.Path) -> ServiceLocation:
    """The place of the service in `private_folder`."""
    return ServiceLocation(folder, NAME)
