"""Messages between trainers and checkpoint services, and the location of a host's service. Needs no torch.

Trainers reach the service of their host on a Unix socket, in a folder that only its user may enter. Services of
different hosts use TCP. Both ends first prove that they know the run's token, which is never sent
(services/conversation.py). Contents have checksums and are not encrypted.
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
from megascale.services.messages import Count, Message, Name, Path, Port, Record, Schema, Text
from megascale.services.service_location import ServiceLocation, make_private_base_folder, make_private_folder

NAME = "checkpoint"
SERVICE_MODULE = "megascale.checkpoint.background.service"  # module that a service's process runs
MAX_MESSAGE_BYTES = 64 << 20  # for a snapshot's checksums and its saved state
MAX_INDEX_BYTES = 1 << 30  # of the index of a snapshot from another host
State = Annotated[str, Meta(max_length=MAX_MESSAGE_BYTES // 2)]
Crcs = Annotated[tuple[Annotated[int, Meta(ge=0, lt=1 << 32)], ...], Meta(max_length=MAX_MESSAGE_BYTES // 8)]
SlotCount = Annotated[int, Meta(ge=1, le=64)]
StreamCount = Annotated[int, Meta(ge=1, le=64)]
Token = Annotated[str, Meta(max_length=256)]
Ranks = Annotated[tuple[Count, ...], Meta(max_length=4096)]


class SnapshotMessage(Message, frozen=True):
    """Fields that describe the snapshot of one rank (see snapshot_memory.py::Slot).

    Attributes:
        slot: number of the slot among the rank's slots.
        step: step of the saved state.
        identity: identity of the checkpoints folder.
        state: saved state besides tensors, as JSON.
        ranks: number of ranks that save.
        size: size of the rank's file in bytes.
        base_generation: generation of the save from which the run started, or an empty text.
    """

    rank: Count
    slot: Count
    step: Count
    generation: Name
    identity: Name
    state: State
    ranks: Count
    size: Count
    base_generation: Name


# Requests of a trainer --------------------------------------------------------------------------------------------


class Register(Message, frozen=True):
    """Ask for the service's name. With a token, the service also accepts replicas at the address `listen`."""

    token: Token = ""
    listen: Name = "127.0.0.1"


class Goodbye(Message, frozen=True):
    """Report the end of the run. The service may end as soon as it has no work.

    Attributes:
        keeps_snapshots: whether a service with a complete snapshot or replica goes on as before. Set by a start that
            was refused, since a later start may load the snapshot.
    """

    keeps_snapshots: bool = False


class Allocate(Message, frozen=True):
    """Ask for memory for `slots` snapshots of one rank. Body: the index of the rank's file; empty if it is unknown.

    Attributes:
        size: number of bytes that a snapshot needs.
        reserved: number of bytes that new memory has for a snapshot if `spare` bytes of the host then stay free.
            Otherwise, and if it is 0, new memory has `size` bytes.
        spare: see `reserved`.
        optional: whether to reply without memory if an ended process with this rank has memory that does not suffice.
            The host may lack memory for both, and the rank's first `Allocate` with an index replaces it.
        memories: identities of memory that this trainer has mapped. The service returns it if it suffices.
    """

    rank: Count
    size: Count
    slots: SlotCount
    reserved: Count = 0
    spare: Count = 0
    optional: bool = False
    memories: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()


class AwaitPages(Message, frozen=True):
    """Ask whether the pages of a slot are populated. The reply comes when they are, or after half a second."""

    rank: Count
    slot: Count


class InvalidateSlot(Message, frozen=True):
    """Announce that the trainer is about to overwrite a slot."""

    rank: Count
    slot: Count


class StageSnapshot(SnapshotMessage, frozen=True):
    """Announce that a slot has a copy of the state.

    Attributes:
        persist: whether to write the snapshot to `storage` too.
        storage: URL of the checkpoints folder.
        required_bytes: size of the whole checkpoint.
        keep: number of checkpoints to keep after the commit.
        local_ranks: ranks of this host.
        leader: whether this rank's service commits the save.
        plan: name of the plan (`StorePlan`).
        peer: host and port of the service that keeps the replica, or None for no replica.
        token: token of that service.
        follow: whether the copy is still under way. `StagedChunks` then report its progress.
        drops_up_to: number of a save. The service frees the memory of ranks that have no later save; 0: of none.
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
    """Report the number of chunks that are copied."""

    rows: Count


class StorePlan(Message, frozen=True):
    """Send the plan of this name. Body: the index (`index_bytes`), then the index in torch's format."""

    plan: Name
    index_bytes: Count


class AwaitPruning(Message, frozen=True):
    """Ask for a reply once pruning after a commit has ended."""


class AwaitCommit(Message, frozen=True):
    """Ask for a reply once a save is committed or given up."""

    generation: Name


class ListSnapshots(Message, frozen=True):
    """Ask for the snapshots in memory."""


class OpenSnapshot(Message, frozen=True):
    """Ask for one snapshot: its memory, its index and its saved state."""

    rank: Count
    generation: Name


# Replies of the service -------------------------------------------------------------------------------------------


class Registered(Message, frozen=True):
    """Reply with the service's name, its process id, and the port on which it accepts replicas (0: no port)."""

    service: Name
    pid: Count
    port: Port = 0


class Allocated(Message, frozen=True):
    """Reply with the generation of the snapshot in each slot. Files: the memory of each slot."""

    generations: Annotated[tuple[Name, ...], Meta(max_length=64)]


class PagesReady(Message, frozen=True):
    """Reply whether all pages are populated."""

    ready: bool


class Released(Message, frozen=True):
    """Report that a slot may be overwritten. `seconds` is the service's time, `replica` the error of the replica."""

    seconds: float
    replica: Text | None = None


class SaveResult(Message, frozen=True):
    """Result of a save. `reason` says why it is not committed, and `record` is the record of the fault."""

    committed: bool
    bytes: Count = 0
    reason: Text = ""
    record: ExitRecord = NO_RECORD


class SnapshotInfo(Record, frozen=True):
    """Description of a snapshot in memory. `replica` is whether it is a replica from another host."""

    rank: Count
    replica: bool
    step: Count
    generation: Name
    identity: Name
    ranks: Count


class SnapshotList(Message, frozen=True):
    """Reply with all complete snapshots of a service."""

    snapshots: Annotated[tuple[SnapshotInfo, ...], Meta(max_length=1 << 16)]
    service: Name


class OpenedSnapshot(Message, frozen=True):
    """Reply with a snapshot. Body: its index. File: its memory."""

    state: State
    crcs: Crcs
    step: Count
    size: Count


# Between services -------------------------------------------------------------------------------------------------


class Replicate(SnapshotMessage, frozen=True):
    """Announce a replica of a snapshot. Body: the index of the snapshot.

    The bytes of the snapshot follow, and then `Checksums`. With several streams, the receiver first replies
    `ReplicaReady`. The sender then opens the other streams, each of which begins with `ReplicaStream`.

    Attributes:
        slots: number of slots of the rank.
        streams: number of connections that carry the bytes, this one included. Segments of the snapshot go to them in
            turn.
        segment_bytes: size of a segment.
        transfer: random name of the transfer, which the other streams give.
    """

    slots: SlotCount
    streams: StreamCount
    segment_bytes: Annotated[int, Meta(ge=1)]
    transfer: Name


class ReplicaReady(Message, frozen=True):
    """Reply that the memory for a replica is reserved, and that the other streams may begin."""


class ReplicaStream(Message, frozen=True):
    """Begin another stream of a replica. The stream's segments follow.

    Attributes:
        transfer: name of the transfer.
        stream: number of the stream, from 1.
    """

    transfer: Name
    stream: StreamCount


class Checksums(Message, frozen=True):
    """Send the CRC-32 of each chunk of a replica, after its bytes."""

    crcs: Crcs


class Replicated(Message, frozen=True):
    """Reply whether the replica arrived undamaged."""

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
    limit=MAX_MESSAGE_BYTES,
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
    limit=MAX_MESSAGE_BYTES,
)
BETWEEN_SERVICES = Schema(
    Replicate, ReplicaReady, ReplicaStream, Checksums, Replicated, ErrorReply, limit=MAX_MESSAGE_BYTES
)


def private_folder(run: pathlib.Path | str, node: str | None = None) -> pathlib.Path:
    """Return this user's folder on this host for the service of one run (see make_private_folder).

    Args:
        node: name of the node, if a launcher runs several nodes on one host. Each of them has its own service.
            Default: the node of this process.
    """
    if node is None:
        node = os.environ.get("MEGASCALE_NODE", "")
    # The folder depends on the version, so that this process does not find a service with another protocol version.
    identity = f"{pathlib.Path(run).absolute()}\0{node}\0{PROTOCOL_VERSION}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return make_private_folder(make_private_base_folder() / name)


def locate_service(folder: pathlib.Path) -> ServiceLocation:
    """Return the location of the service in `private_folder`."""
    return ServiceLocation(folder, NAME)
