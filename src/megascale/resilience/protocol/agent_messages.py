"""What driver and agents say to each other, besides heartbeats: greetings, orders and what came of them."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from megascale.observe.hang.sent_evidence import MAX_EVIDENCE_BYTES
from megascale.resilience.protocol.heartbeat import MAX_BYTES, Heartbeat, Rank
from megascale.services.messages import (
    Count,
    Facts,
    Finite,
    Given,
    Message,
    Name,
    Part,
    Path,
    Port,
    Schema,
    Text,
    Whole,
)

LIMIT = MAX_BYTES + 1024
STATE = 200_000  # characters of a job's state
SETTINGS = 200_000  # characters of a configuration
PIECE = 64 * 1024  # bytes of a file that are sent at once
FAULT = 4096  # characters of a fault that a trainer injects into itself
FAULT_FILE = r"[0-9]{20}-[0-9a-f]{6}\.json"
REPORT = 50_000  # characters of a self-check's report
_State = Annotated[str, Meta(max_length=STATE)]
_MANY = Meta(max_length=4096)
_Settings = Annotated[str, Meta(max_length=SETTINGS)]


# From an agent ----------------------------------------------------------------------------------------------------


class RunningTrainers(Part, frozen=True):
    """What a driver must know to go on with the trainers that run, should its journal be lost (membership.py).

    Attributes:
        state: the job as the trainers were started (JobState.to_json).
        stepped: whether they have done a step.
    """

    state: _State
    stepped: bool = False


class Hello(Message, frozen=True):
    """An agent comes, or comes again.

    Attributes:
        version: of MegaScale and its protocol (agent_channel.VERSION).
        boot: names one life of the agent.
        epoch: newest driver that it has obeyed.
        attempt: of which it holds processes.
    """

    job: Given
    node: Given
    version: Name
    address: Name
    boot: Name
    pod: Name = ""
    epoch: Count = 0
    attempt: Count = 0
    pid: Count = 0
    hardware: Facts = field(default_factory=dict)
    versions: Facts = field(default_factory=dict)
    held: RunningTrainers | None = None


class Join(Message, frozen=True):
    """A node that nobody but a person, systemd or a container has told anything asks in, before its agent starts.

    Fields as those of `Hello`. The driver answers `Described` or `Refuse` and hangs up.
    """

    job: Given
    node: Given
    version: Name
    address: Name
    hardware: Facts = field(default_factory=dict)
    versions: Facts = field(default_factory=dict)


class Stopped(Message, frozen=True):
    """Stop order `order` is carried out; `port` is free for the next attempt's store. codes: exit code of each rank."""

    order: Count
    attempt: Count
    port: Port
    codes: Annotated[dict[Rank, Whole], _MANY] = field(default_factory=dict)


class StartFailed(Message, frozen=True, tag="failed"):
    """An attempt could not be started; errno: of the system call that it is about, 0: none."""

    attempt: Count
    reason: Text
    errno: Count = 0


class Diagnosed(Message, frozen=True):
    """Result of the self-checks that order `order` asked for. code: their exit code; report: JSON; said: in words."""

    order: Count
    code: Whole
    report: Annotated[str, Meta(max_length=REPORT)] = ""
    stderr: Text = ""


class Lines(Message, frozen=True):
    """New lines of a rank's log."""

    rank: Count
    lines: Annotated[tuple[Text, ...], Meta(max_length=200)]


class StepFigures(Part, frozen=True):
    """What a step gave: its loss and gradient norm (which may be no numbers), and its seconds."""

    step: Count
    loss: float
    grad_norm: float
    seconds: float


class Steps(Message, frozen=True):
    """Steps that the trainers have done, in order; anew: those told before do not count any more."""

    steps: Annotated[tuple[StepFigures, ...], Meta(max_length=512)]
    replaces_earlier: bool = False


class FileData(Message, frozen=True):
    """A piece of a file that trainers wrote.

    Attributes:
        name: in the run folder.
        start: position of the piece in the sender's file.
        first: the first of a session, or of a file that was begun anew.
        left_out: bytes before it that are not sent.
        more: whether the file went on after it.
        whole: the file is replaced by it.
    """

    name: Given
    start: Count
    data: Annotated[bytes, Meta(max_length=PIECE)]
    first: bool = False
    left_out: Count = 0
    has_more: bool = False
    replaces_file: bool = False


class Evidence(Message, frozen=True):
    """What is known of one rank that stands still, for `Explain` order `order` (rank_evidence.py).

    moving: it came further while it was looked at. data: compressed; empty: the rank left no record. keep: it writes
    elsewhere than into the run folder, which is to have what is known of it.
    """

    order: Count
    rank: Rank
    data: Annotated[bytes, Meta(max_length=MAX_EVIDENCE_BYTES)] = b""
    moving: bool = False
    keep: bool = False


# From the driver, each with its epoch -----------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The agent is in; version: of the driver, as in `Hello`."""

    epoch: Count
    version: Name


class Refuse(Message, frozen=True):
    """The agent is not wanted."""

    reason: Text


class JobOffer(Message, frozen=True):
    """The job that a node asked into, as given.py has it.

    Attributes:
        limits: the section [resilience], as JSON.
        checkpoints: folder that all nodes share for checkpoints, "": the settings name a place.
        marker: name of a file in it, by which a node sees that it is the same folder and not one of the same name.
    """

    epoch: Count
    version: Name
    limits: _Settings
    checkpoints: Path = ""
    marker: Name = ""


class Start(Message, frozen=True):
    """Start the ranks of an attempt.

    Attributes:
        ranks: of this node; local rank i is the i-th.
        master: (host, port) of the job's store.
        settings: the configuration in force, as TOML.
        words: further settings of the trainers' command line.
        env: added to the trainers' environment.
        fresh: with a new fork server.
        forward: rank whose log is passed on, None: none here.
        state: the job, for `HeldTrainers`.
        identity: the run's random name, "" before it has one: for a node whose run folder has not seen it.
    """

    epoch: Count
    attempt: Count
    job: Given
    ranks: Annotated[tuple[Rank, ...], _MANY]
    world: Count
    master: tuple[Name, Port]
    settings: _Settings
    words: Annotated[tuple[Path, ...], _MANY] = ()
    env: Annotated[dict[Name, Path], Meta(max_length=256)] = field(default_factory=dict)
    fresh: bool = False
    forward: Count | None = None
    state: _State = ""
    identity: Name = ""


class Stop(Message, frozen=True):
    """End the trainers and say `Stopped`.

    Attributes:
        how: let them save first, or not.
        grace_period: seconds that they have for it.
        forget: end this node's checkpoint services too: what they hold in memory is not trusted.
    """

    epoch: Count
    order: Count
    how: Literal["save", "kill"]
    grace_period: Finite
    forget: bool = False


class Diagnose(Message, frozen=True):
    """Run the self-checks for at most `grace_period` seconds and say `Diagnosed`."""

    epoch: Count
    order: Count
    grace_period: Finite


class Explain(Message, frozen=True):
    """The trainers stand still: say `Evidence` of each rank, with its last `history` calls, after `watch` seconds in
    which it may move."""

    epoch: Count
    order: Count
    history: Count
    watch: Annotated[float, Meta(ge=0, le=10)] = 0.5


class Kept(Message, frozen=True):
    """The driver has written a file to position `end` of the sender's."""

    epoch: Count
    name: Given
    end: Count


class Inject(Message, frozen=True):
    """Trainers that write elsewhere than into the run folder are to find a file there that asks for a fault."""

    epoch: Count
    name: Annotated[str, Meta(pattern=f"^{FAULT_FILE}$")]
    fault: Annotated[str, Meta(max_length=FAULT)]


class Heard(Message, frozen=True):
    """Heartbeat `sequence` has come: the agent's ranks may run on (agent/rank_lease.py)."""

    epoch: Count
    sequence: Count


class Parted(Message, frozen=True):
    """The driver gives this node up and hangs up: its ranks must end, others may get them."""

    epoch: Count


class Leave(Message, frozen=True):
    """The job is over, or the node is not needed any more."""

    epoch: Count


Order = Start | Stop | Diagnose | Explain | Kept | Inject | Heard | Parted | Leave

FROM_AGENT = Schema(
    Hello, Join, Heartbeat, Stopped, StartFailed, Diagnosed, Lines, Steps, FileData, Evidence, limit=LIMIT
)
FROM_DRIVER = Schema(
    Welcome, Refuse, JobOffer, Start, Stop, Diagnose, Explain, Kept, Inject, Heard, Parted, Leave, limit=LIMIT
)
