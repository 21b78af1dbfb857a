"""The messages between trainers and checkpoint services, and the location of a host's service. No torch.

Within a host: a Unix socket in a folder that only its user may enter. Between hosts: TCP, where both ends prove that
they know the run's token before any other message (services/conversation.py); the token itself is never sent. Contents
are checked by checksum, not encrypted.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from typing import Annotated

from msgspec import Meta

from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.services.conversation import Done, ErrorReply
from megascale.services.framing import PROTOCOL_VERSION
from megascale.services.host_service import ServiceLocation, make_private_base_folder, make_private_folder
from megascale.services.messages import Count, Message, Name, Path, Port, Record, Schema, Text

NAME = "checkpoint"
LIMIT = 64 << 20  # bytes of a message: a snapshot's checksums, the state saved with it
INDEX = 1 << 30  # bytes of a snapshot's index from another host
State = Annotated[str, Meta(max_length=LIMIT // 2)]
Crcs = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=LIMIT // 8)]
SlotCount = Annotated[int, Meta(ge=1, le=64)]
Token = Annotated[str, Meta(max_length=256)]
Ranks = Annotated[tuple[Count, ...], Meta(max_length=4096)]


class SnapshotMessage(Message, frozen=True):
    """The fields that identify one process's snapshot (see snapshot_memory.py::Slot).

    Attributes:
        rank: process.
        slot: number of its slot.
        ranks: processes of the save.
        size: bytes of the file.
        base_sequence: number of the save that the run began from, 0: none.
    """

    rank: Count
    slot: Count
    step: Count
    generation: Name
    identity: Name
    state: State
    ranks: Count
    size: Count
    base_sequence: Count


# Requests of a trainer --------------------------------------------------------------------------------------------


class Register(Message, frozen=True):
    """Ask for the service's identity. With a token: take replicas from holders of it, at the address `listen`."""

    token: Token = ""
    listen: Name = "127.0.0.1"


class Goodbye(Message, frozen=True):
    """Report the end of the run: the service may end as soon as its work is done."""


class Allocate(Message, frozen=True):
    """Ask for memory for `slots` snapshots of `size` bytes of one process. Attached: the index of its file."""

    rank: Count
    size: Count
    slots: SlotCount


class AwaitPages(Message, frozen=True):
    """Ask whether the pages of a slot's memory are in place; the reply comes when they are, or after a moment."""

    rank: Count
    slot: Count


class InvalidateSlot(Message, frozen=True):
    """Announce that the trainer is about to overwrite a slot."""

    rank: Count
    slot: Count


class StageSnapshot(SnapshotMessage, frozen=True):
    """Announce that a slot is filled, or with `follow` is being filled, as `StagedChunks` then report.

    Attributes:
        persist: also write the snapshot to `storage`, which needs `required_bytes`, and keep `keep` checkpoints.
        local_ranks: processes of this host.
        leader: this process's host commits.
        plan: name of the plan (`StorePlan`).
        peer: address of the service that keeps the replica, None: no replica; it knows `token`.
        drops_up_to: free the memory of processes of which only saves up to this number are left, 0: none.
    """

    persist: bool
    storage: Path
    required_bytes: Count
    keep: Count
    local_ranks: Ranks
    leader: bool
    plan: Name
    peer: tuple[Name, Port] | None = None
    token: Token = ""
    follow: bool = False
    drops_up_to: Count = 0


class StagedChunks(Message, frozen=True):
    """Report the number of chunks whose elements are in place."""

    rows: Count


class StorePlan(Message, frozen=True):
    """Hand over the plan of this name. Attached: `index_bytes` of the index, then torch's form of it."""

    plan: Name
    index_bytes: Count


class AwaitPruning(Message, frozen=True):
    """Ask for a reply once the checkpoints that a commit made superfluous are removed."""


class AwaitCommit(Message, frozen=True):
    """Ask for a reply once a save is committed or given up."""

    generation: Name


class ListSnapshots(Message, frozen=True):
    """Ask for the snapshots in memory."""


class OpenSnapshot(Message, frozen=True):
    """Ask for one snapshot: its memory, its chunks, the state saved with it."""

    rank: Count
    generation: Name


# Replies of the service -------------------------------------------------------------------------------------------


class Registered(Message, frozen=True):
    """The service's name, its process id, and the port on which it takes replicas (0: none)."""

    service: Name
    pid: Count
    port: Port = 0


class Allocated(Message, frozen=True):
    """The generation of the snapshot in each slot. Attached: the slots' memory, as open files."""

    generations: Annotated[tuple[Name, ...], Meta(max_length=64)]


class PagesReady(Message, frozen=True):
    """Report whether the pages are in place."""

    ready: bool


class Released(Message, frozen=True):
    """Report that a slot may be overwritten; `replica` is the error of its replica."""

    seconds: float
    replica: Text | None = None


class SaveResult(Message, frozen=True):
    """The result of a save. `reason` says why it is not committed, `record` has the fault as a code."""

    committed: bool
    bytes: Count = 0
    reason: Text = ""
    record: ExitRecord = NO_RECORD


class SnapshotInfo(Record, frozen=True):
    """A snapshot in memory; `replica`: it is another host's."""

    rank: Count
    replica: bool
    step: Count
    generation: Name
    identity: Name
    ranks: Count


class SnapshotList(Message, frozen=True):
    """All complete snapshots of a service."""

    snapshots: Annotated[tuple[SnapshotInfo, ...], Meta(max_length=1 << 16)]
    service: Name


class OpenedSnapshot(Message, frozen=True):
    """A snapshot. Attached: its index, and its memory as an open file."""

    state: State
    crcs: Crcs
    step: Count
    size: Count


# Between services -------------------------------------------------------------------------------------------------


class Replicate(SnapshotMessage, frozen=True):
    """Announce a replica of a snapshot. Attached: its index.

    Its `size` bytes follow, some of which may still be staged meanwhile, and then `Checksums`.

    Attributes:
        slots: number of slots of its process.
    """

    slots: SlotCount


class Checksums(Message, frozen=True):
    """CRC-32 of each chunk of a replica, once all of it is sent."""

    crcs: Crcs


class Replicated(Message, frozen=True):
    """Report whether the replica arrived undamaged."""

    is_complete: bool


TO_SERVICE = Schema(
    Register,
    Goodbye,
    Allocate,
    AwaitPages,
    InvalidateSlot,
    StageSnapshot,
    StagedChunks,
    StorePlan,
    AwaitPruning,
    AwaitCommit,
    ListSnapshots,
    OpenSnapshot,
    limit=LIMIT,
)
FROM_SERVICE = Schema(
    Done,
    ErrorReply,
    Registered,
    Allocated,
    PagesReady,
    Released,
    SaveResult,
    SnapshotList,
    OpenedSnapshot,
    limit=LIMIT,
)
COPIES = Schema(Replicate, Checksums, Replicated, limit=LIMIT)


def private_folder(run: pathlib.Path | str, node: str | None = None) -> pathlib.Path:
    """Return this user's and host's folder for the sockets of one run (see make_private_folder).

    Args:
        node: name of the node where a launcher runs several nodes on one host, each a host of its own; None: this
            process's node.
    """
    if node is None:
        node = os.environ.get("MEGASCALE_NODE", "")
    # The version keeps this process from a lingering service that speaks another version of the protocol.
    identity = f"{pathlib.Path(run).absolute()}\0{node}\0{PROTOCOL_VERSION}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return make_private_folder(make_private_base_folder() / name)


def locate_service(folder: pathlib.Path) -> ServiceLocation:
    """Return the location of the service in `private_folder`."""
    return ServiceLocation(folder, NAME)
