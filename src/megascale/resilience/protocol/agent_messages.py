"""Messages between driver and agents apart from heartbeats: greetings, orders and their results."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from megascale.observe.hang.scene import MAX_EVIDENCE_BYTES
from megascale.resilience.protocol.heartbeat import MAX_BYTES, Heartbeat, Rank
from megascale.services.messages import (
    Count,
    Finite,
    Integer,
    Labels,
    Message,
    Name,
    NonEmptyName,
    Path,
    Port,
    Record,
    Schema,
    Text,
)

MESSAGE_BYTES = MAX_BYTES + 1024  # limit of a message; the longest message is a heartbeat, of at most MAX_BYTES
STATE_CHARACTERS = 200_000  # characters of a job's state
SETTINGS_CHARACTERS = 200_000  # characters of a configuration
PIECE_BYTES = 64 * 1024  # bytes of a file that are sent at once
FAULT_CHARACTERS = 4096  # characters of a fault that a trainer injects into itself
FAULT_FILE = r"[0-9]{20}-[0-9a-f]{6}\.json"
REPORT_CHARACTERS = 50_000  # characters of a self-check's report
_State = Annotated[str, Meta(max_length=STATE_CHARACTERS)]
_LONG_LIST = Meta(max_length=4096)  # entries, above the number of ranks of a node
_Settings = Annotated[str, Meta(max_length=SETTINGS_CHARACTERS)]


# From an agent ----------------------------------------------------------------------------------------------------


class RunningTrainers(Record, frozen=True):
    """State from which a driver with a lost journal adopts the running trainers (driver/telemetry/membership.py).

    Attributes:
        state: the job's state when the trainers were started (JobState.to_json).
        stepped: the trainers have completed a step.
    """

    state: _State
    stepped: bool = False


class Hello(Message, frozen=True):
    """The first message of an agent on a connection.

    Attributes:
        version: release and protocol version of MegaScale (agent_channel.VERSION).
        boot: random name of the agent's process.
        pod: name of the node's pod or container, or "".
        epoch: newest epoch of a driver whose orders the agent has obeyed.
        attempt: attempt whose processes the agent has.
        trainers: the running trainers, None if there are none.
        metrics_problem: why the node does not serve its metrics page, or "".
    """

    job: NonEmptyName
    node: NonEmptyName
    version: Name
    address: Name
    boot: Name
    pod: Name = ""
    epoch: Count = 0
    attempt: Count = 0
    pid: Count = 0
    hardware: Labels = field(default_factory=dict)
    versions: Labels = field(default_factory=dict)
    trainers: RunningTrainers | None = None
    metrics_problem: Text = ""


class Join(Message, frozen=True):
    """Request of a node that was started by a person, systemd or a container to join the job.

    The fields mean the same as in `Hello`. The driver answers `JobOffer` or `Refuse` and closes the connection.
    """

    job: NonEmptyName
    node: NonEmptyName
    version: Name
    address: Name
    hardware: Labels = field(default_factory=dict)
    versions: Labels = field(default_factory=dict)


class Stopped(Message, frozen=True):
    """Acknowledgement that the `Stop` with number `order` is done, or that it cannot be done.

    Attributes:
        port: a free port for the next attempt's store.
        codes: exit codes by rank.
        leave_seconds: seconds until all ranks had ended or had left their attempt.
        files_seconds: further seconds until the remaining lines of their files were sent.
        exit_seconds: further seconds until the kernel had freed the memory of killed ranks.
        problem: why ranks still run, although they were killed; empty if all have ended or have left their attempt.
    """

    order: Count
    attempt: Count
    port: Port
    codes: Annotated[dict[Rank, Integer], _LONG_LIST] = field(default_factory=dict)
    leave_seconds: Finite = 0.0
    files_seconds: Finite = 0.0
    exit_seconds: Finite = 0.0
    problem: Text = ""


class StartFailed(Message, frozen=True, tag="failed"):
    """An attempt could not be started. errno: error number of a failed system call, 0 for other failures."""

    attempt: Count
    reason: Text
    errno: Count = 0


class Diagnosed(Message, frozen=True):
    """Result of the self-checks of the `Diagnose` with number `order`: their exit code, JSON report and stderr."""

    order: Count
    code: Integer
    report: Annotated[str, Meta(max_length=REPORT_CHARACTERS)] = ""
    stderr: Text = ""


class Lines(Message, frozen=True):
    """New lines of a rank's log."""

    rank: Count
    lines: Annotated[tuple[Text, ...], Meta(max_length=200)]


class StepFigures(Record, frozen=True):
    """Metrics of a step; `seconds` is its duration. Loss and gradient norm may be NaN or infinite."""

    step: Count
    loss: float
    grad_norm: float
    seconds: float


class Steps(Message, frozen=True):
    """Completed steps in order. With `replaces_earlier` the driver drops the steps of earlier messages."""

    steps: Annotated[tuple[StepFigures, ...], Meta(max_length=512)]
    replaces_earlier: bool = False


class FileData(Message, frozen=True):
    """A piece of a file that trainers wrote.

    Attributes:
        name: path relative to the run folder.
        start: offset of the piece in the sender's file, in bytes.
        first: the first piece after a start of the sender, or after the file was truncated.
        skipped_bytes: number of bytes directly before the piece that the sender leaves out.
        has_more: the file continues after the piece.
        replaces_file: the piece is the complete file.
    """

    name: NonEmptyName
    start: Count
    data: Annotated[bytes, Meta(max_length=PIECE_BYTES)]
    first: bool = False
    skipped_bytes: Count = 0
    has_more: bool = False
    replaces_file: bool = False


class Evidence(Message, frozen=True):
    """Evidence about one rank, which answers the `Explain` with number `order` (agent.py::collect_evidence).

    Attributes:
        data: compressed evidence, empty if the rank left no record.
        moving: the rank made progress during the observation.
        must_store: the rank writes to another folder than the run folder, so the driver stores the evidence there.
    """

    order: Count
    rank: Rank
    data: Annotated[bytes, Meta(max_length=MAX_EVIDENCE_BYTES)] = b""
    moving: bool = False
    must_store: bool = False


# From the driver, each with its epoch -----------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """The driver accepts the agent; `version` is that of the driver, as in `Hello`."""

    epoch: Count
    version: Name


class Refuse(Message, frozen=True):
    """The driver rejects the agent."""

    reason: Text


class JobOffer(Message, frozen=True, tag="described"):
    """The job that a node may join, with the fields of a JobDescription.

    Attributes:
        limits: the configuration section [resilience] as JSON.
        checkpoints: folder of checkpoints shared by all nodes, "": the settings name a location.
        marker: name of a file in that folder by which a node verifies that it sees the same folder.
    """

    epoch: Count
    version: Name
    limits: _Settings
    checkpoints: Path = ""
    marker: Name = ""


class Start(Message, frozen=True):
    """Order to start the ranks of an attempt.

    Attributes:
        ranks: ranks of this node; local rank i is the i-th.
        master: (host, port) of the job's store.
        settings: the configuration as TOML.
        words: overrides (--section.key=value) on the trainers' command line.
        env: variables added to the trainers' environment.
        fresh: whether to use a new fork server.
        forward: rank of this node whose log lines are sent to the driver, or None.
        state: the job's state, for `RunningTrainers`.
        identity: random name of the run, which the node stores in its run folder; "" before the run has one.
        prepares: whether to start processes that only wait for the next attempt. `attempt` is the present one.
    """

    epoch: Count
    attempt: Count
    job: NonEmptyName
    ranks: Annotated[tuple[Rank, ...], _LONG_LIST]
    world: Count
    master: tuple[Name, Port]
    settings: _Settings
    words: Annotated[tuple[Path, ...], _LONG_LIST] = ()
    env: Annotated[dict[Name, Path], Meta(max_length=256)] = field(default_factory=dict)
    fresh: bool = False
    forward: Count | None = None
    state: _State = ""
    identity: Name = ""
    prepares: bool = False


class PrepareGroups(Message, frozen=True, tag="prepare_groups"):
    """Order to make the groups of the next attempt while the present one trains (core/process_orders.py).

    Attributes:
        number: number of the preparation, higher than those of earlier ones.
        ranks: ranks of this node in the next attempt, by local rank.
        world, data: number of ranks and data-parallel size of the next attempt; a world of 0 drops prepared groups.
        master: (host, port) of the present attempt's store.
    """

    epoch: Count
    attempt: Count
    number: Count
    ranks: Annotated[tuple[Rank, ...], _LONG_LIST] = ()
    world: Count = 0
    data: Count = 0
    master: tuple[Name, Port] = ("", 0)


class Stop(Message, frozen=True):
    """Order to end the trainers and answer `Stopped`.

    Attributes:
        how: "save": save a checkpoint first. "keep": keep the processes that leave the attempt in time. "leave": as
            "keep", but complete the step first. "kill": end the processes at once.
        grace_period: seconds that the trainers have to save.
        forget: whether to end this node's checkpoint services too, since their memory is not trusted.
        joins_at_once: with "leave", whether prepared nodes join at once, so that no rank copies its state to memory.
    """

    epoch: Count
    order: Count
    how: Literal["save", "keep", "leave", "kill"]
    grace_period: Finite
    forget: bool = False
    joins_at_once: bool = False


class Diagnose(Message, frozen=True):
    """Order to run the self-checks for at most `grace_period` seconds and answer `Diagnosed`."""

    epoch: Count
    order: Count
    grace_period: Finite


class Explain(Message, frozen=True):
    """Order to send `Evidence` of each rank, since the trainers make no progress.

    Attributes:
        history: number of collective calls per rank to include.
        watch: seconds for which the ranks are observed for progress.
    """

    epoch: Count
    order: Count
    history: Count
    watch: Annotated[float, Meta(ge=0, le=10)] = 0.5


class FileStored(Message, frozen=True, tag="kept"):
    """The driver has written a file up to offset `end` of the sender's file."""

    epoch: Count
    name: NonEmptyName
    end: Count


class Inject(Message, frozen=True):
    """Order to put a fault request into the folder of trainers that do not read the run folder."""

    epoch: Count
    name: Annotated[str, Meta(pattern=f"^{FAULT_FILE}$")]
    fault: Annotated[str, Meta(max_length=FAULT_CHARACTERS)]


class HeartbeatReceived(Message, frozen=True, tag="heard"):
    """The driver received heartbeat `sequence`, so the agent's ranks may continue (agent/rank_lease.py)."""

    epoch: Count
    sequence: Count


class NodeReleased(Message, frozen=True, tag="parted"):
    """The driver removes the node from the job and closes the connection; the node's ranks must end."""

    epoch: Count


class Leave(Message, frozen=True):
    """The job has ended, or the node is no longer needed."""

    epoch: Count


Order = (
    Start | Stop | PrepareGroups | Diagnose | Explain | FileStored | Inject | HeartbeatReceived | NodeReleased | Leave
)

FROM_AGENT = Schema(
    Hello, Join, Heartbeat, Stopped, StartFailed, Diagnosed, Lines, Steps, FileData, Evidence, limit=MESSAGE_BYTES
)
FROM_DRIVER = Schema(
    Welcome,
    Refuse,
    JobOffer,
    Start,
    Stop,
    PrepareGroups,
    Diagnose,
    Explain,
    FileStored,
    Inject,
    HeartbeatReceived,
    NodeReleased,
    Leave,
    limit=MESSAGE_BYTES,
)
