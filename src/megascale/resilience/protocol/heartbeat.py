"""The heartbeat: an agent's report to the driver about trainers, logs, GPUs and network traffic of its node.

Heartbeats come over a network, so every type, range and length is checked during decoding (services/messages.py).
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.services.messages import Count, Finite, Integer, Labels, Message, Name, NonEmptyName, Record, Text

MAX_BYTES = 256 * 1024  # of an encoded heartbeat
TAIL_CHARACTERS = 4000  # characters of stderr_tail
TEXT_CHARACTERS = 2000  # characters of a text that `truncate` keeps by default
_LIST_LIMIT = Meta(max_length=256)
Tail = Annotated[str, Meta(max_length=TAIL_CHARACTERS)]
Rank = Annotated[int, Meta(ge=0, lt=10**9)]


class RankStart(Record, frozen=True):
    """The progress of a rank's start (core/status.py::StartReport). Ages are seconds, on the clock of its host.

    Attributes:
        process_age: age of the trainer process.
        groups_age, state_age: seconds since it had its communicators, and its model, optimizer and data; -1 before.
        step, source, is_reused, is_standing, kept_step: as in StartReport.
        left_age: seconds since it had completed the last step of the attempt before, -1 if no order ended that attempt.
        stepped_age: seconds since it had completed its first step, -1 before.
        doubt: why this process replaced one that had survived the fault, "" if it replaced none.
    """

    process_age: Finite
    groups_age: Finite = -1.0
    state_age: Finite = -1.0
    step: Count = 0
    source: Name = ""
    is_reused: bool = False
    is_standing: bool = False
    left_age: Finite = -1.0
    stepped_age: Finite = -1.0
    kept_step: Count = 0
    doubt: Name = ""


class Worker(Record, frozen=True):
    """One trainer process.

    Attributes:
        rank, pid: rank in the world; process id on the node.
        state: "running", "exited" (without a signal) or "signalled" (ended by a signal).
        code: exit code, or number of the signal; 0 while the process runs.
        phase, step, action, microbatch: newest record of the status file (core/status.py).
        status_age: seconds since that record changed, on the agent's monotonic clock.
        message: message of the status file, such as the error that the trainer failed with.
        rss: resident memory in bytes.
        cpu_seconds: CPU time used.
        stopped: the process is stopped by a signal (SIGSTOP) or a debugger.
        stderr_tail: end of the log of a process that failed, else empty.
        exit: the fault that ended it, as the process recorded it.
        error: the exception that ended it, as "TYPE: TEXT".
        ended_age: seconds since the process ended, on the agent's monotonic clock; 0 while it runs.
        by_agent: the agent or its fork server ended the process.
        completed_steps: number of complete steps, the last of which is `step`, if the program reports a step at the
            step's end; 0 if it reports a step at the begin.
        start: progress of its start; None from some seconds after its first step on.
    """

    rank: Count
    pid: Count
    state: Literal["running", "exited", "signalled"]
    code: Integer = 0
    phase: Name = ""
    step: Integer = 0
    action: Name = ""
    microbatch: Integer = -1
    status_age: Finite = 0.0
    message: Text = ""
    rss: Count = 0
    cpu_seconds: Finite = 0.0
    stopped: bool = False
    stderr_tail: Tail = ""
    exit: ExitRecord = NO_RECORD
    error: Text = ""
    ended_age: Finite = 0.0
    by_agent: bool = False
    completed_steps: Count = 0
    start: RankStart | None = None


class LogMatch(Record, frozen=True):
    """A line of a trainer's log that matched a pattern since the last heartbeat, read `age` seconds ago."""

    rank: Count
    pattern: Name
    line: Text
    age: Finite = 0.0


class GpuReport(Record, frozen=True):
    """Health of one GPU.

    Attributes:
        temperature: degrees Celsius.
        ecc_errors: uncorrected errors since boot.
        xid: the last Xid error, 0 if there was none. A fatal Xid (core/gpus.py) hides later ones.
        throttled: heat or a power brake reduces the clocks.
        recovery: action that the NVIDIA driver recommends, such as "reset", "" if none.
        silent_seconds: time for which the NVIDIA driver has not answered. All values but `xid` are older than that.
    """

    index: Count
    name: Name
    temperature: Finite = 0.0
    power_watts: Finite = 0.0
    ecc_errors: Count = 0
    xid: Count = 0
    throttled: bool = False
    recovery: Name = ""
    silent_seconds: Finite = 0.0


class NetworkTraffic(Record, frozen=True):
    """Traffic of one network interface since the last heartbeat, from samples some milliseconds apart.

    Attributes:
        rx_bytes_per_s, tx_bytes_per_s: mean rates.
        rx_min, rx_max, tx_min, tx_max: slowest and fastest sample in bytes/s.
        errors: receive and transmit errors and drops.
    """

    interface: Name
    rx_bytes_per_s: Finite = 0.0
    tx_bytes_per_s: Finite = 0.0
    rx_min: Finite = 0.0
    rx_max: Finite = 0.0
    tx_min: Finite = 0.0
    tx_max: Finite = 0.0
    errors: Count = 0
    samples: Count = 0


class Heartbeat(Message, frozen=True):
    """The state of a node.

    Attributes:
        job, attempt: job and attempt that the workers belong to.
        sequence: number of the heartbeat, increasing over the agent's life.
        sent_ns: the sender's wall clock, for display only, since clocks of machines differ.
        hardware, versions: facts such as {"cpu": "..."} and {"torch": "2.13.0"}.
        workers, logs, gpus, traffic: see the classes.
        checksums: "step:rank" -> hexadecimal checksum of that rank's parameters after that step.
        step_seconds: rank -> compute seconds per step, without communication waits.
        disks: folder -> free bytes on its disk; filled after a worker failed.
        leaving: the agent is ending and starts no more ranks.
        saved_step: step of the newest complete checkpoint of another trainer; 0 if unknown.
        prepared: all processes that were to be prepared for the next attempt wait for it.
        groups: number of the newest preparation of groups that these processes have ended, with or without success.
    """

    job: NonEmptyName
    attempt: Count
    node: NonEmptyName
    sequence: Count
    sent_ns: Count
    address: Name = ""
    pod: Name = ""
    hardware: Labels = field(default_factory=dict)
    versions: Labels = field(default_factory=dict)
    workers: Annotated[tuple[Worker, ...], _LIST_LIMIT] = ()
    logs: Annotated[tuple[LogMatch, ...], _LIST_LIMIT] = ()
    gpus: Annotated[tuple[GpuReport, ...], _LIST_LIMIT] = ()
    traffic: Annotated[tuple[NetworkTraffic, ...], _LIST_LIMIT] = ()
    checksums: Labels = field(default_factory=dict)
    step_seconds: Annotated[dict[Rank, Finite], _LIST_LIMIT] = field(default_factory=dict)
    disks: Annotated[dict[Name, Finite], _LIST_LIMIT] = field(default_factory=dict)
    leaving: bool = False
    saved_step: Count = 0
    prepared: bool = False
    groups: Count = 0

    @property
    def is_finished(self) -> bool:
        """True if no process of the job runs on the node and this agent starts no more."""
        return self.leaving and all(worker.state != "running" for worker in self.workers)


def truncate(text: str, limit: int = TEXT_CHARACTERS) -> str:
    """Return the last `limit` characters of `text`, with "?" for characters that UTF-8 cannot encode.

    A shortened text begins with "...", which counts too.
    """
    text = text.encode(errors="replace").decode()
    if len(text) <= limit:
        return text
    return "..." + text[len(text) - limit + 3 :]
