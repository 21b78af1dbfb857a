"""The heartbeat: what an agent sends the driver about its node: workers, logs, devices, traffic.

It comes over a network, so every type, range and length is checked as it is read (services/messages.py), and a driver
keeps many, so names that all of them say are kept once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from megascale.core.exit_record import NO_RECORD, ExitRecord
from megascale.services.messages import Count, Facts, Finite, Given, Message, Name, Part, Text, Whole

MAX_BYTES = 256 * 1024
TAIL = 4000  # characters of stderr_tail
_ITEMS = Meta(max_length=256)
Tail = Annotated[str, Meta(max_length=TAIL)]
Rank = Annotated[int, Meta(ge=0, lt=10**9)]


class Worker(Part, frozen=True):
    """One trainer process as its agent sees it.

    Attributes:
        rank, pid: its rank in the world; process id on its node.
        state: "running", "exited" (by itself) or "signalled" (ended by a signal).
        code: exit code, or the number of the signal; 0 while it runs.
        phase, step, action, microbatch: its last entry in the status file (core/status.py).
        status_age: seconds since that entry changed, on the agent's monotonic clock.
        message: its status message, such as the error it failed with.
        rss: resident memory in bytes.
        cpu_seconds: CPU time used so far.
        stopped: whether a signal (SIGSTOP) or a debugger holds it.
        stderr_tail: the last lines it wrote, when it ended badly; else empty.
        exit: the fault that ended it, as it recorded it.
        error: the exception that ended it, "TYPE: TEXT".
        ended_age: seconds since it ended, on the agent's monotonic clock; 0 while it runs.
        by_agent: its agent ended it, or what the agent started it from did; it did not end by itself.
    """

    rank: Count
    pid: Count
    state: Literal["running", "exited", "signalled"]
    code: Whole = 0
    phase: Name = ""
    step: Whole = 0
    action: Name = ""
    microbatch: Whole = -1
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


class LogMatch(Part, frozen=True):
    """A line of a trainer's log that matched a pattern since the last heartbeat. age: seconds since it was seen."""

    rank: Count
    pattern: Name
    line: Text
    age: Finite = 0.0


class GpuReport(Part, frozen=True):
    """Health of one device. temperature in degrees Celsius; ecc_errors: uncorrected since boot.

    xid: the last error that the agent was notified of, one that a machine does not outlive (core/xid.py) before others;
    0: none. recovery: what its driver says that it needs, such as "reset"; "": nothing. unanswered: seconds for which
    its driver has not answered, 0 as long as it does; all but the Xid is what it said before.
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


class NetworkTraffic(Part, frozen=True):
    """One network interface since the last heartbeat, from samples some milliseconds apart.

    Attributes:
        rx_bytes_per_s, tx_bytes_per_s: mean.
        rx_min, rx_max, tx_min, tx_max: slowest and fastest sample, bytes/s.
        errors: receive and transmit errors and drops in the interval.
        samples: how many there were.
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
    """A node's state.

    Attributes:
        job, attempt: what its workers belong to.
        node: the node's name.
        sequence: counts up over the agent's life.
        sent_ns: the sender's clock, for display only: clocks may be minutes apart.
        address, pod: where it is.
        hardware, versions: facts such as {"cpu": "..."} and {"torch": "2.13.0"}.
        workers, logs, gpus, traffic: see the classes.
        checksums: "step:rank" -> hexadecimal checksum of that rank's parameters after that step.
        step_seconds: rank -> recent compute seconds a step (communication waits excluded).
        disks: folder -> bytes that may still be written to its disk; looked at when a worker has ended badly.
        leaving: its agent ends, and starts no ranks any more.
    """

    job: Given
    attempt: Count
    node: Given
    sequence: Count
    sent_ns: Count
    address: Name = ""
    pod: Name = ""
    hardware: Facts = field(default_factory=dict)
    versions: Facts = field(default_factory=dict)
    workers: Annotated[tuple[Worker, ...], _ITEMS] = ()
    logs: Annotated[tuple[LogMatch, ...], _ITEMS] = ()
    gpus: Annotated[tuple[GpuReport, ...], _ITEMS] = ()
    traffic: Annotated[tuple[NetworkTraffic, ...], _ITEMS] = ()
    checksums: Facts = field(default_factory=dict)
    step_seconds: Annotated[dict[Rank, Finite], _ITEMS] = field(default_factory=dict)
    disks: Annotated[dict[Name, Finite], _ITEMS] = field(default_factory=dict)
    leaving: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether nothing of the job runs on the node, nor will under this agent."""
        return self.leaving and all(worker.state != "running" for worker in self.workers)


def truncate(text: str, limit: int = 2000) -> str:
    """`text` cut to what a heartbeat may hold, keeping its end; bytes that are no text (of a file's name) as "?"."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= limit else "..." + text[len(text) - limit + 3 :]
