"""The heartbeat: what an agent sends the driver about its node: workers, logs, devices, traffic.

Plain data with a strict JSON form. It comes over a network, so reading it checks every type and size before
anything else sees it, and a driver reads thousands a second, so the checks are written out field by field.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

MAX_BYTES = 256 * 1024
TAIL = 4000  # characters of stderr_tail
_TEXT = 2000
_ITEMS = 256


@dataclass(frozen=True, slots=True)  # a driver keeps many
class Worker:
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
        stderr_tail: the last lines it wrote, when it ended badly; else empty.
        errno: of the system call that its last exception is about (core/failure.py), 0: none, or it reported none.
        error: that exception, "TYPE: TEXT".
        ended_age: seconds since it ended, on the agent's monotonic clock; 0 while it runs.
        by_agent: its agent ended it, or what the agent started it from did; it did not end by itself.
    """

    rank: int
    pid: int
    state: Literal["running", "exited", "signalled"]
    code: int = 0
    phase: str = ""
    step: int = 0
    action: str = ""
    microbatch: int = -1
    status_age: float = 0.0
    message: str = ""
    rss: int = 0
    cpu_seconds: float = 0.0
    stderr_tail: str = ""
    errno: int = 0
    error: str = ""
    ended_age: float = 0.0
    by_agent: bool = False


@dataclass(frozen=True, slots=True)
class LogMatch:
    """A line of a trainer's log that matched a pattern since the last heartbeat. age: seconds since it was seen."""

    rank: int
    pattern: str
    line: str
    age: float = 0.0


@dataclass(frozen=True, slots=True)
class GpuReport:
    """Health of one device. temperature in degrees Celsius; ecc_errors: uncorrected since boot.

    xid: the last error that the agent was notified of, one that a machine does not outlive (core/xid.py) before others;
    0: none. recovery: what its driver says that it needs, such as "reset"; "": nothing.
    """

    index: int
    name: str
    temperature: float = 0.0
    power_watts: float = 0.0
    ecc_errors: int = 0
    xid: int = 0
    throttled: bool = False
    recovery: str = ""


@dataclass(frozen=True, slots=True)
class NetworkTraffic:
    """One network interface since the last heartbeat, from samples some milliseconds apart.

    Attributes:
        rx_bytes_per_s, tx_bytes_per_s: mean.
        rx_min, rx_max, tx_min, tx_max: slowest and fastest sample, bytes/s.
        errors: receive and transmit errors and drops in the interval.
        samples: how many there were.
    """

    interface: str
    rx_bytes_per_s: float = 0.0
    tx_bytes_per_s: float = 0.0
    rx_min: float = 0.0
    rx_max: float = 0.0
    tx_min: float = 0.0
    tx_max: float = 0.0
    errors: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class Heartbeat:
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
    """

    job: str
    attempt: int
    node: str
    sequence: int
    sent_ns: int
    address: str = ""
    pod: str = ""
    hardware: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    workers: tuple[Worker, ...] = ()
    logs: tuple[LogMatch, ...] = ()
    gpus: tuple[GpuReport, ...] = ()
    traffic: tuple[NetworkTraffic, ...] = ()
    checksums: dict[str, str] = field(default_factory=dict)
    step_seconds: dict[int, float] = field(default_factory=dict)
    disks: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> str:
        """One line of JSON; cut nothing, so the agent must keep within the limits (see `fit`)."""
        record = _plain(self)
        for name in ("workers", "logs", "gpus", "traffic"):
            record[name] = [_plain(item) for item in record[name]]
        return json.dumps(record, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> Heartbeat:
        """Read what `to_json` wrote. Raises ValueError with the reason for anything else."""
        if len(text) > MAX_BYTES:
            raise ValueError(f"a heartbeat of {len(text)} bytes is over the {MAX_BYTES} allowed")
        try:
            record = json.loads(text, parse_constant=_no_constant)
        except RecursionError:
            raise ValueError("nested too deeply") from None
        return _heartbeat(record)


def _plain(item: Any) -> dict[str, Any]:
    return {name: getattr(item, name) for name in item.__slots__}


def fit(text: str, limit: int = _TEXT) -> str:
    """`text` cut to what a heartbeat may hold, keeping its end."""
    return text if len(text) <= limit else "..." + text[len(text) - limit + 3 :]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number that a heartbeat may hold")


_BIG = 1 << 63
Check = Callable[[Any, str], Any]


def _int(value: Any, name: str) -> int:
    if type(value) is not int or not -_BIG <= value < _BIG:
        raise ValueError(f"{name} is not a whole number of 64 bits")
    return value


def _count(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < _BIG:
        raise ValueError(f"{name} is not a whole number from 0")
    return value


def _float(value: Any, name: str) -> float:
    if type(value) is float and math.isfinite(value):
        return value
    if type(value) is int and -_BIG <= value < _BIG:
        return float(value)
    raise ValueError(f"{name} is not a finite number")


def _bool(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise ValueError(f"{name} is neither true nor false")
    return value


def _text(limit: int, least: int = 0) -> Check:
    def check(value: Any, name: str) -> str:
        if type(value) is not str or not least <= len(value) <= limit:
            raise ValueError(f"{name} is not a text of {least} to {limit} characters")
        return value

    return check


def _one_of(*known: str) -> Check:
    def check(value: Any, name: str) -> str:
        if type(value) is not str or value not in known:
            raise ValueError(f"{name} is none of {', '.join(known)}")
        return value

    return check


def _table(key: Check, value: Check) -> Check:
    def check(found: Any, name: str) -> dict[Any, Any]:
        if type(found) is not dict or len(found) > _ITEMS:
            raise ValueError(f"{name} is not a table of at most {_ITEMS} entries")
        return {key(k, name): value(v, name) for k, v in found.items()}

    return check


def _rank_key(value: Any, name: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) < 10):
        raise ValueError(f"{name} has a key that is no rank")
    return int(value)


def _record(make: type[Any], **checks: Check) -> Check:
    expected = checks.keys()
    plan = tuple(checks.items())

    def check(found: Any, name: str) -> Any:
        if type(found) is not dict or found.keys() != expected:
            wrong = sorted(found.keys() ^ expected) if type(found) is dict else type(found).__name__
            raise ValueError(f"{name} does not have exactly the expected fields: {str(wrong)[:200]}")
        return make(*[test(found[field_name], field_name) for field_name, test in plan])

    return check


def _list(item: Check) -> Check:
    def check(found: Any, name: str) -> tuple[Any, ...]:
        if type(found) is not list or len(found) > _ITEMS:
            raise ValueError(f"{name} is not a list of at most {_ITEMS} items")
        return tuple([item(part, name) for part in found])

    return check


def _name(value: Any, name: str) -> str:
    if type(value) is not str or len(value) > 200:
        raise ValueError(f"{name} is not a text of 0 to 200 characters")
    return sys.intern(value)  # "train", "mlx5_0": thousands of heartbeats say the same few words


_short = _name
_long = _text(_TEXT)

_worker = _record(
    Worker,
    rank=_count,
    pid=_count,
    state=_one_of("running", "exited", "signalled"),
    code=_int,
    phase=_short,
    step=_int,
    action=_short,
    microbatch=_int,
    status_age=_float,
    message=_long,
    rss=_count,
    cpu_seconds=_float,
    stderr_tail=_text(TAIL),
    errno=_count,
    error=_long,
    ended_age=_float,
    by_agent=_bool,
)
_log = _record(LogMatch, rank=_count, pattern=_short, line=_long, age=_float)
_gpu = _record(
    GpuReport,
    index=_count,
    name=_short,
    temperature=_float,
    power_watts=_float,
    ecc_errors=_count,
    xid=_count,
    throttled=_bool,
    recovery=_short,
)
_traffic = _record(
    NetworkTraffic,
    interface=_short,
    rx_bytes_per_s=_float,
    tx_bytes_per_s=_float,
    rx_min=_float,
    rx_max=_float,
    tx_min=_float,
    tx_max=_float,
    errors=_count,
    samples=_count,
)
_fields = _record(
    Heartbeat,
    job=_text(200, 1),
    attempt=_count,
    node=_text(200, 1),
    sequence=_count,
    sent_ns=_count,
    address=_short,
    pod=_short,
    hardware=_table(_short, _short),
    versions=_table(_short, _short),
    workers=_list(_worker),
    logs=_list(_log),
    gpus=_list(_gpu),
    traffic=_list(_traffic),
    checksums=_table(_short, _short),
    step_seconds=_table(_rank_key, _float),
    disks=_table(_short, _float),
)


def _heartbeat(record: Any) -> Heartbeat:
    return _fields(record, "the heartbeat")
