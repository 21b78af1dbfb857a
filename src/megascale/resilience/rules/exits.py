"""Processes that ended: why, whose fault it is, and what follows.

A machine's fault is met by starting again; a user's mistake by stopping with its text, as starting again would only
repeat it. What tells them apart: an exception on many ranks at once, or the same one on the same step twice, is in the
code or the data; one on a single rank that does not come back, or comes back different, is the machine's.

What decides, in this order: the number of the system call's error that the process reported, its signal, its own words
(status message and exception), the room on its disks, and last what its log ends with. Who ended first, by itself,
names the cause: others that its end broke off, or that were ended with it, are not asked.
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile

from megascale.core.events import Event
from megascale.core.failure import DISK_FULL_ERRNOS, MIN_FREE_BYTES
from megascale.errors import EXIT_BAD_DATA, EXIT_CANNOT_FIT, EXIT_INTERRUPTED, EXIT_USAGE
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.silence import FIRST_STEP
from megascale.resilience.rules.table import quick
from megascale.resilience.rules.verdicts import Action, Verdict
from megascale.resilience.rules.view import RankView, View

LAST_WORDS = "its last words: "
_CALM = re.compile(
    r"\s*\d{4}-\d\d-\d\dT\S+ attempt \d+ rank \d+ (INFO|DEBUG) "
)  # a rank log's line that tells of no trouble
_LACKING = re.compile(r"(?:\w+: )?rank (\d+) on \S+: ")  # what all say when a rank does not fit on its node
_LOST = "lost contact"  # what a rank says that suffers from another's end
_ASKED = "it or another rank was asked to (SIGTERM, SIGINT), and all have saved"
_MEMORY_FULL = 0.9  # of a node's memory in use by its trainers before a SIGKILL is put down to want of memory
PORTS = 5  # ports taken in a row after which a person is needed


@dataclass(frozen=True)
class Cause:
    """Why a process ended.

    Attributes:
        kind: event name.
        words: for people.
        action: what follows the first time.
        again: what follows when the same happened before on the same node or in the same step.
    """

    kind: Event
    words: str
    action: Action
    again: Action


OUT_OF_MEMORY = Cause(Event.OUT_OF_MEMORY, "it ran out of memory", "recover", "stop")
# At a job's first start it is the settings' fault, and the job stops; after a first step it is the node's.
NODE_MEMORY = Cause(Event.OUT_OF_MEMORY, "its node has too little free memory", "recover", "evict")
DISK_FULL = Cause(Event.DISK_FULL, "the disk is full", "recover", "stop")
PORT_TAKEN = Cause(Event.PORT_TAKEN, "another process took the port of its store", "recover", "recover")
NUMBERS = Cause(Event.NONFINITE_LOSS, "the loss is no number", "diagnose", "stop")
GRADIENTS = Cause(Event.NONFINITE_GRADIENT, "its gradients are not finite", "diagnose", "stop")
CHECKSUM = Cause(Event.CHECKSUM_MISMATCH, "weights changed that nobody wrote to", "diagnose", "evict")
DEVICE = Cause(Event.CUDA_ERROR, "its device reported an error", "recover", "diagnose")
NETWORK = Cause(Event.NETWORK_ERROR, "its network broke", "recover", "diagnose")
CRASH = Cause(Event.SEGMENTATION_FAULT, "it crashed in native code", "recover", "diagnose")
KILLED = Cause(Event.PROCESS_KILLED, "somebody killed it", "recover", "recover")
ASKED = Cause(Event.PROCESS_EXIT, "its agent was told to end, and it has saved", "recover", "recover")
CODE = Cause(Event.USER_ERROR, "an exception in Python code", "recover", "stop")
OTHER = Cause(Event.PROCESS_EXIT, "for no reason that is known", "recover", "recover")

# Looked for in this order in its own words, or else in the end of its log. A full disk is known by errno and statvfs;
# these words of it are our own (checkpoint/storage/base.py), made from the errno of another process.
_DISK = re.compile(r"the disk of .* is full")
_TEXTS: tuple[tuple[str, Cause], ...] = (
    (r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|MemoryError", OUT_OF_MEMORY),
    (r"flipped bit", CHECKSUM),
    (r"the loss of step \d+ is (nan|-?inf)", NUMBERS),
    (r"the gradients of \d+ steps in a row.* are not finite", GRADIENTS),
    (r"device-side assert", CODE),
    (r"CUDA error|CUBLAS_STATUS|cuDNN error|uncorrectable|NVLink|Xid", DEVICE),
    (r"NCCL error|ncclSystemError|ncclRemoteError|Connection (reset|refused|closed)|ECONNRESET|Broken pipe", NETWORK),
    (r"Segmentation fault|Bus error|Illegal instruction", CRASH),
)
_SIGNALS: dict[int, Cause] = {
    signal.SIGSEGV: CRASH,
    signal.SIGBUS: CRASH,
    signal.SIGILL: CRASH,
    signal.SIGFPE: CRASH,
    signal.SIGABRT: CRASH,
    signal.SIGKILL: KILLED,
    signal.SIGTERM: KILLED,
    signal.SIGINT: KILLED,
    signal.SIGHUP: KILLED,
}
# Where what a process wrote about its end begins.
_ENDING = re.compile(r"Traceback \(most recent call last\)|terminate called|Fatal Python error")
_BEFORE = 5  # lines before that which may belong to it, of an abort
_LAST = 10  # lines, where nothing marks an end
# What another rank's end can bring about, when it comes after it.
_FOLLOWS = frozenset({Event.PROCESS_KILLED, Event.NETWORK_ERROR, Event.PROCESS_EXIT})
_ENDED = (signal.SIGTERM, signal.SIGHUP)  # signals that launchers send to the other ranks after one has failed
# Exceptions that are no mistake in code.
_EXPECTED = ("TrainingError", "MegascaleError", "KeyboardInterrupt")


@quick
def processes(view: View) -> list[Verdict]:
    """A verdict for each cause among the processes that ended badly; those that lost a peer are not to blame.

    Nor are those that ended as they were asked to: SIGTERM to one rank, as of a pod that is deleted, ends all of them
    together, and whose machine it was may be known only later.
    """
    bad = [(m, w) for m, w in view.workers() if w.state == "signalled" or (w.state == "exited" and w.code)]
    guilty = [(m, w) for m, w in bad if not (w.by_agent or _asked(w) or _LOST in w.message + _said(w))]
    # Those that an agent did not end but what it starts them from, only where nobody ended by itself.
    guilty = guilty or [(m, w) for m, w in bad if w.by_agent and w.error]
    if FIRST_STEP in view.usual_durations:
        guilty = [(m, w) for m, w in guilty if not _told_by_another(w)]
    if bad and not guilty:
        # Who ended first is not among those that can speak: the network, or a rank whose node is silent.
        evidence = [
            f"rank {w.rank} on {m.node} ended: {_ASKED if _asked(w) else w.message[:200] or _LOST}" for m, w in bad[:8]
        ]
        return [Verdict(Event.PROCESS_EXIT, (), tuple(w.rank for _, w in bad), "recover", tuple(evidence))]
    by_cause: dict[Cause, list[tuple[RankView, Worker]]] = {}
    for member, worker in guilty:
        by_cause.setdefault(cause_of(member, worker), []).append((member, worker))
    # Signals that a launcher sends to survivors are no cause of their own.
    if len(by_cause) > 1 and all(worker.code in _ENDED for _, worker in by_cause.get(KILLED, ())):
        by_cause.pop(KILLED, None)
    first = min((_ended(m, w) for m, w in guilty), default=0.0)
    for cause in list(by_cause):
        later = all(_ended(m, w) > first for m, w in by_cause[cause])
        aborted = all(w.state == "signalled" and w.code == signal.SIGABRT for _, w in by_cause[cause])
        if later and (cause.kind in _FOLLOWS or aborted):
            del by_cause[cause]
    return [_verdict(view, cause, ended) for cause, ended in by_cause.items()]


def _told_by_another(worker: Worker) -> bool:
    """Whether it ended since another rank does not fit on its node, which that one tells all."""
    named = _LACKING.match(worker.message or worker.error)
    fits = worker.code == EXIT_CANNOT_FIT and worker.errno != errno.ENOMEM
    return fits and named is not None and int(named[1]) != worker.rank


def _asked(worker: Worker) -> bool:
    return worker.state == "exited" and worker.code == EXIT_INTERRUPTED


def cause_of(member: RankView, worker: Worker) -> Cause:
    """Why a process ended, from the error it reported, its signal, its exit code and what it said."""
    if worker.errno in DISK_FULL_ERRNOS or _DISK.search(worker.message + "\n" + worker.error):
        return DISK_FULL
    if worker.errno == errno.EADDRINUSE:
        return PORT_TAKEN
    if worker.errno == errno.ENOMEM:
        return NODE_MEMORY if worker.code == EXIT_CANNOT_FIT else OUT_OF_MEMORY
    if _asked(worker):
        return ASKED
    said = worker.message + "\n" + _said(worker)
    for pattern, cause in _TEXTS:
        if re.search(pattern, said):
            return cause
    if worker.state == "signalled":
        if worker.code == signal.SIGKILL and _memory_share(member) > _MEMORY_FULL:
            return OUT_OF_MEMORY
        if worker.code == signal.SIGBUS and full_disks(member):
            return DISK_FULL  # a file mapped into memory that has no room to come into being
        return _SIGNALS.get(worker.code, OTHER)
    if worker.code in (EXIT_USAGE, EXIT_CANNOT_FIT, EXIT_BAD_DATA):
        return CODE
    if full_disks(member):
        return DISK_FULL
    if "Traceback (most recent call" in said or (worker.error and not worker.error.startswith(_EXPECTED)):
        return CODE
    return OTHER


def _said(worker: Worker) -> str:
    """What a process said of its end: the exception that it reported, else the end of its log.

    Of one that a signal ended only an abort says why, on its last lines. What stands in the log before any other signal
    is older than it.
    """
    if worker.state == "signalled" and worker.code != signal.SIGABRT:
        return ""
    if worker.error and worker.state == "exited":
        return worker.error
    lines = worker.stderr_tail.splitlines()
    begins = [number for number, line in enumerate(lines) if _ENDING.search(line)]
    before = _BEFORE if worker.state == "signalled" else 0
    return "\n".join(lines[max(0, begins[-1] - before) :] if begins else lines[-_LAST:])


def _ended(member: RankView, worker: Worker) -> float:
    """When a process ended, on the driver's clock."""
    received = next((when for when, h in reversed(member.history) if h is member.heartbeat), member.last_seen)
    return received - worker.ended_age


def full_disks(member: RankView) -> list[str]:
    """Disks of a member without room, in words."""
    disks = member.heartbeat.disks if member.heartbeat is not None else {}
    return [
        f"the disk of {folder} has {left:,.0f} bytes left" for folder, left in disks.items() if left < MIN_FREE_BYTES
    ]


def judge_failed_start(node: str, ranks: tuple[int, ...], why: str, number: int) -> Verdict:
    """A node whose agent could not start its ranks. `number`: errno, 0 if it is unknown."""
    kind = Event.DISK_FULL if number in DISK_FULL_ERRNOS else Event.PROCESS_EXIT
    return Verdict(kind, (node,), ranks, "recover", (why,))


def _memory_share(member: RankView) -> float:
    """Most of the node's memory that its trainers held together in the last heartbeats, from 0 to 1; 0 if unknown."""
    heartbeat = member.heartbeat
    try:
        total = int(heartbeat.hardware["memory_bytes"]) if heartbeat else 0
    except (KeyError, ValueError):
        total = 0
    if not total:
        return 0.0
    return max((sum(w.rss for w in h.workers) for _, h in member.history), default=0) / total


def _verdict(view: View, cause: Cause, ended: list[tuple[RankView, Worker]]) -> Verdict:
    nodes = tuple(dict.fromkeys(m.node for m, _ in ended))
    ranks = tuple(w.rank for _, w in ended)
    evidence = [_sentence(m, w, cause) for m, w in ended[:8]]
    words = list(dict.fromkeys(last_message(w) for _, w in ended))
    evidence += [LAST_WORDS + text for text in words[:4] if text]
    action, person = cause.action, False
    if cause is DISK_FULL:
        evidence += dict.fromkeys(text for m, _ in ended for text in full_disks(m))
    settings = cause is CODE and any(w.code in (EXIT_USAGE, EXIT_CANNOT_FIT, EXIT_BAD_DATA) for _, w in ended)
    if settings or (cause is NODE_MEMORY and FIRST_STEP not in view.usual_durations):
        action = "stop"
        evidence.append("its exit code says that settings or data are wrong; starting again would say the same")
    elif cause is PORT_TAKEN:
        tries = 1 + _in_a_row(cause, (v for _, v in reversed(view.past)))
        if tries >= PORTS:
            action = "stop"
            evidence.append(
                f"{tries} ports in a row were taken: something on {', '.join(nodes)} takes every port; end it, or let "
                "the ranks meet through Redis (rendezvous.url=redis://HOST:PORT)"
            )
        else:
            evidence.append(f"another port is next, number {tries + 1} of {PORTS}")
    elif cause is CODE and _many(view, ended):
        action = "stop"
        evidence.append("the same exception on several ranks at once is in the code or the data, not in a machine")
    elif cause is CODE and view.grid.world_size == 1 and _before(view, cause, nodes, words):
        action = "stop"
    elif _before(view, cause, nodes, words):
        action = cause.again
        if cause is NODE_MEMORY and len({m.node for m in view.members if m.ranks}) == 1:
            action = "stop"
        if action == "stop":
            evidence.append("the same has ended an earlier start: it would come again")
        else:
            evidence.append("it has happened on this node before")
    elif cause is NODE_MEMORY:
        evidence.append("the same settings have trained before, so it is this node's: something else holds its memory")
    elif cause is CODE:
        evidence.append("on one rank only and for the first time: it may be the machine's, so once more")
    person = action == "stop"
    return Verdict(cause.kind, nodes, ranks, action, tuple(evidence), person)


def _in_a_row(cause: Cause, past: Iterable[Verdict]) -> int:
    """How many of the newest verdicts were this."""
    return sum(1 for _ in takewhile(lambda verdict: verdict.kind == cause.kind, past))


def _many(view: View, ended: list[tuple[RankView, Worker]]) -> bool:
    """Whether at least two ranks, on two nodes where there are two, say the same."""
    texts = [_plain(last_message(w)) for _, w in ended]
    return len(ended) > 1 and any(texts.count(text) > 1 for text in texts if text)


def _before(view: View, cause: Cause, nodes: tuple[str, ...], words: list[str]) -> bool:
    """Whether an earlier attempt ended for this cause: with the same words, or, a machine's cause, on this node."""
    plain = {_plain(text) for text in words if text}
    for _, past in view.past:
        if past.kind != cause.kind:
            continue
        said = {_plain(line.removeprefix(LAST_WORDS)) for line in past.evidence if line.startswith(LAST_WORDS)}
        if cause.again == "stop":
            if plain & said or (not plain and not said):
                return True
        elif set(past.nodes) & set(nodes):
            return True
    return False


def _plain(text: str) -> str:
    """Return words without what differs from rank to rank (addresses, ranks, sizes); of a full disk which one it is."""
    if disk := _DISK.search(text):
        return disk[0]
    return re.sub(r"0x[0-9a-f]+|\brank \d+|\b\d+(\.\d+)? ?([KMGT]i?B|bytes)\b", "#", text)


def last_message(worker: Worker) -> str:
    """What a process said last: its message, else the last line of stderr that says something; "" if all is well."""
    if worker.message or worker.error:
        return (worker.message or worker.error)[:300]
    lines = [line.strip() for line in worker.stderr_tail.splitlines() if line.strip() and not _CALM.match(line)]
    for line in reversed(lines):
        if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line) or line.startswith(("error:", "Fatal")):
            return line[:300]
    return lines[-1][:300] if lines else ""


def _sentence(member: RankView, worker: Worker, cause: Cause) -> str:
    how = f"exit code {worker.code}"
    if worker.state == "signalled":
        try:
            how = f"signal {signal.Signals(worker.code).name}"
        except ValueError:
            how = f"signal {worker.code}"
    who = f"rank {worker.rank} (process {worker.pid} on {member.node})"
    return f"{who} ended with {how} in step {worker.step}: {cause.words}"
