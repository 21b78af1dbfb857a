"""Processes that ended: why, whose fault it is, and what follows.

A machine's fault is met by starting again; a user's mistake by stopping with its text, as starting again would only
repeat it. What tells them apart: an exception on many ranks at once, or the same one on the same step twice, is in the
code or the data; one on a single rank that does not come back, or comes back different, is the machine's.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from megascale.core.events import Event
from megascale.core.heartbeat import Worker
from megascale.errors import EXIT_BAD_DATA, EXIT_CANNOT_FIT, EXIT_USAGE
from megascale.resilience.verdicts import Action, Verdict
from megascale.resilience.view import Member, View

LAST_WORDS = "its last words: "
_LOST = "lost contact"  # what a rank says that suffers from another's end
_MEMORY_FULL = 0.9  # of a node's memory in use by its trainers before a SIGKILL is put down to want of memory


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


OUT_OF_MEMORY = Cause(Event.OUT_OF_MEMORY, "it ran out of memory", "respawn", "stop")
DISK_FULL = Cause(Event.DISK_FULL, "the disk is full", "respawn", "stop")
NUMBERS = Cause(Event.NONFINITE_LOSS, "the loss is no number", "diagnose", "stop")
CHECKSUM = Cause(Event.CHECKSUM_MISMATCH, "weights changed that nobody wrote to", "diagnose", "evict")
DEVICE = Cause(Event.CUDA_ERROR, "its device reported an error", "respawn", "diagnose")
NETWORK = Cause(Event.NETWORK_ERROR, "its network broke", "respawn", "diagnose")
CRASH = Cause(Event.SEGMENTATION_FAULT, "it crashed in native code", "respawn", "diagnose")
KILLED = Cause(Event.PROCESS_KILLED, "somebody killed it", "respawn", "respawn")
CODE = Cause(Event.USER_ERROR, "an exception in Python code", "respawn", "stop")
OTHER = Cause(Event.PROCESS_EXIT, "for no reason that is known", "respawn", "respawn")

# Looked for in this order in the message and the end of stderr.
_TEXTS: tuple[tuple[str, Cause], ...] = (
    (r"out of memory|OutOfMemoryError|can't allocate memory|Cannot allocate memory|MemoryError", OUT_OF_MEMORY),
    (r"No space left on device|the disk of .* is full|Disk quota exceeded|File too large", DISK_FULL),
    (r"flipped bit", CHECKSUM),
    (r"the loss of step \d+ is (nan|-?inf)", NUMBERS),
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
}


def processes(view: View) -> list[Verdict]:
    """A verdict for each cause among the processes that ended badly; those that lost a peer are not to blame."""
    bad = [(m, w) for m, w in view.workers() if w.state == "signalled" or (w.state == "exited" and w.code)]
    guilty = [(m, w) for m, w in bad if _LOST not in w.message + w.stderr_tail]
    if bad and not guilty:
        # Who ended first is not among those that can speak: the network, or a rank whose node is silent.
        evidence = [f"rank {w.rank} on {m.node} ended: {w.message[:200] or _LOST}" for m, w in bad[:8]]
        return [Verdict(Event.PROCESS_EXIT, (), tuple(w.rank for _, w in bad), "respawn", tuple(evidence))]
    by_cause: dict[Cause, list[tuple[Member, Worker]]] = {}
    for member, worker in guilty:
        by_cause.setdefault(cause_of(member, worker), []).append((member, worker))
    # Signals that a launcher sends to survivors are no cause of their own.
    if len(by_cause) > 1:
        by_cause.pop(KILLED, None) if all(w.code == signal.SIGTERM for _, w in by_cause.get(KILLED, ())) else None
    return [_verdict(view, cause, ended) for cause, ended in by_cause.items()]


def cause_of(member: Member, worker: Worker) -> Cause:
    """Why a process ended, from its signal, its exit code and what it said."""
    said = worker.message + "\n" + worker.stderr_tail
    for pattern, cause in _TEXTS:
        if re.search(pattern, said):
            return cause
    if worker.state == "signalled":
        if worker.code == signal.SIGKILL and _memory_share(member) > _MEMORY_FULL:
            return OUT_OF_MEMORY
        return _SIGNALS.get(worker.code, OTHER)
    if worker.code in (EXIT_USAGE, EXIT_CANNOT_FIT, EXIT_BAD_DATA) or "Traceback (most recent call" in said:
        return CODE
    return OTHER


def _memory_share(member: Member) -> float:
    """Most of the node's memory that its trainers held together in the last heartbeats, from 0 to 1; 0 if unknown."""
    heartbeat = member.heartbeat
    try:
        total = int(heartbeat.hardware["memory_bytes"]) if heartbeat else 0
    except (KeyError, ValueError):
        total = 0
    if not total:
        return 0.0
    return max((sum(w.rss for w in h.workers) for _, h in member.history), default=0) / total


def _verdict(view: View, cause: Cause, ended: list[tuple[Member, Worker]]) -> Verdict:
    nodes = tuple(dict.fromkeys(m.node for m, _ in ended))
    ranks = tuple(w.rank for _, w in ended)
    evidence = [_sentence(m, w, cause) for m, w in ended[:8]]
    words = list(dict.fromkeys(last_words(w) for _, w in ended))
    evidence += [LAST_WORDS + text for text in words[:4] if text]
    action, person = cause.action, False
    if cause is CODE and any(w.code in (EXIT_USAGE, EXIT_CANNOT_FIT, EXIT_BAD_DATA) for _, w in ended):
        action = "stop"
        evidence.append("its exit code says that settings or data are wrong; starting again would say the same")
    elif cause is CODE and _many(view, ended):
        action = "stop"
        evidence.append("the same exception on several ranks at once is in the code or the data, not in a machine")
    elif cause is CODE and view.grid.world == 1 and _before(view, cause, nodes, words):
        action = "stop"
    elif _before(view, cause, nodes, words):
        action = cause.again
        if action == "stop":
            evidence.append("the same has ended an earlier start: it would come again")
        else:
            evidence.append("it has happened on this node before")
    elif cause is CODE:
        evidence.append("on one rank only and for the first time: it may be the machine's, so once more")
    person = action == "stop"
    return Verdict(cause.kind, nodes, ranks, action, tuple(evidence), person)


def _many(view: View, ended: list[tuple[Member, Worker]]) -> bool:
    """Whether at least two ranks, on two nodes where there are two, say the same."""
    texts = [_plain(last_words(w)) for _, w in ended]
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
    """Words without the numbers that differ from rank to rank: addresses, ranks, sizes."""
    return re.sub(r"0x[0-9a-f]+|\brank \d+|\b\d+(\.\d+)? ?([KMGT]i?B|bytes)\b", "#", text)


def last_words(worker: Worker) -> str:
    """What a process said last: its message, else the last line of stderr that says something."""
    if worker.message:
        return worker.message[:300]
    lines = [line.strip() for line in worker.stderr_tail.splitlines() if line.strip()]
    for line in reversed(lines):
        if re.match(r"[\w.]+(Error|Exception|Interrupt|Exit)\b", line) or line.startswith(("error:", "Fatal")):
            return line[:300]
    return lines[-1][:300] if lines else ""


def _sentence(member: Member, worker: Worker, cause: Cause) -> str:
    how = f"exit code {worker.code}"
    if worker.state == "signalled":
        try:
            how = f"signal {signal.Signals(worker.code).name}"
        except ValueError:
            how = f"signal {worker.code}"
    who = f"rank {worker.rank} (process {worker.pid} on {member.node})"
    return f"{who} ended with {how} in step {worker.step}: {cause.words}"
