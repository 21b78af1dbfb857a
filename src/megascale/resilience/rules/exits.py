"""Processes that ended: the cause, the rank at fault, and the action.

After a fault of a machine the job starts again. After a mistake of the user it stops with the message, since the next
start would fail alike. The spread of an exception decides between the two. An exception on several ranks at once, or
the same exception again, comes from the code or the data. Any other exception may come from the machine.

The cause follows, in this order, from the record of the process (core/exit_record.py), messages of other programs
(foreign_messages.py), the signal, the exit code, and the space on the disks of the node. Only processes that ended by
themselves show the cause, not processes that ended in consequence.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from megascale.core.events import Event
from megascale.core.exit_record import ExitKind
from megascale.core.failure import DISK_FULL_ERRNOS, MIN_FREE_BYTES, name_signal
from megascale.core.status import UNOBSERVED
from megascale.errors import EXIT_BAD_DATA, EXIT_CANNOT_FIT, EXIT_INTERRUPTED, EXIT_USAGE
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.foreign_messages import END_MARK, EXCEPTION_LINE, Fault, find_fault
from megascale.resilience.rules.silence import FIRST_STEP
from megascale.resilience.rules.table import quick_rule
from megascale.resilience.rules.view import Action, NodeView, Verdict, View

PORT_LIMIT = 5  # ports taken in a row after which a person is needed
# If trainers use a larger fraction of their node's memory than this, a SIGKILL counts as lack of memory.
_FULL_MEMORY = 0.9
_MAX_LISTED_RANKS = 8  # processes with a sentence each in a verdict's evidence
_MAX_LISTED_MESSAGES = 4  # different last messages in a verdict's evidence
_MESSAGE_CHARACTERS = 300  # of a last message that are kept
_INNOCENT_CHARACTERS = 200  # of the message of a rank that lost its peer
_LINES_BEFORE_MARK = 5  # lines before the mark of an abort that may belong to its message
_LINES_WITHOUT_MARK = 10  # last lines that are searched in a log without a mark
_INTERRUPTED = "this or another rank was ended by SIGTERM or SIGINT, and all ranks have saved"
_LOST_PEER = "lost contact"


@dataclass(frozen=True)
class Cause:
    """The cause of a process's end.

    Attributes:
        action: action at the first occurrence.
        repeated: action at a repetition. With the action "stop", only an equal message counts as a repetition. With
            other actions an end on the same node counts.
    """

    kind: Event
    description: str
    action: Action
    repeated: Action


OUT_OF_MEMORY = Cause(Event.OUT_OF_MEMORY, "it ran out of memory", "recover", "stop")
# At a job's first start the settings are at fault, and the job stops. After a first step the node is at fault.
HOST_MEMORY = Cause(Event.OUT_OF_MEMORY, "its node has too little free memory", "recover", "evict")
DISK_FULL = Cause(Event.DISK_FULL, "the disk is full", "recover", "stop")
PORT_TAKEN = Cause(Event.PORT_TAKEN, "another process took the port of its store", "recover", "recover")
LOSS = Cause(Event.NONFINITE_LOSS, "the loss is NaN or infinite", "diagnose", "stop")
GRADIENTS = Cause(Event.NONFINITE_GRADIENT, "its gradients are not finite", "diagnose", "stop")
CHECKSUM = Cause(Event.CHECKSUM_MISMATCH, "weights changed without a write", "diagnose", "evict")
WRONG_BITS = Cause(Event.REPLAY_MISMATCH, "it computed other bits than another replica", "evict", "evict")
DEVICE = Cause(Event.CUDA_ERROR, "its device reported an error", "recover", "diagnose")
NETWORK = Cause(Event.NETWORK_ERROR, "its network failed", "recover", "diagnose")
CRASH = Cause(Event.SEGMENTATION_FAULT, "it crashed in native code", "recover", "diagnose")
KILLED = Cause(Event.PROCESS_KILLED, "another process killed it", "recover", "recover")
INTERRUPTED = Cause(Event.PROCESS_EXIT, "its agent was ordered to end, and it has saved", "recover", "recover")
CODE_ERROR = Cause(Event.USER_ERROR, "an exception in Python code", "recover", "stop")
UNKNOWN = Cause(Event.PROCESS_EXIT, "the cause is unknown", "recover", "recover")

_CAUSES_BY_RECORD = {
    ExitKind.DISK_FULL: DISK_FULL,
    ExitKind.PORT_TAKEN: PORT_TAKEN,
    ExitKind.HOST_MEMORY: HOST_MEMORY,
    ExitKind.OUT_OF_MEMORY: OUT_OF_MEMORY,
    ExitKind.WEIGHTS_CHANGED: CHECKSUM,
    ExitKind.WRONG_BITS: WRONG_BITS,
    ExitKind.NONFINITE_LOSS: LOSS,
    ExitKind.NONFINITE_GRADIENT: GRADIENTS,
}
_CAUSES_BY_FAULT = {
    Fault.OUT_OF_MEMORY: OUT_OF_MEMORY,
    Fault.CODE: CODE_ERROR,
    Fault.DEVICE: DEVICE,
    Fault.NETWORK: NETWORK,
    Fault.CRASH: CRASH,
}
_CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT)
_END_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_CAUSES_BY_SIGNAL: dict[int, Cause] = {**dict.fromkeys(_CRASH_SIGNALS, CRASH), **dict.fromkeys(_END_SIGNALS, KILLED)}
_REFUSALS = (EXIT_USAGE, EXIT_CANNOT_FIT, EXIT_BAD_DATA)
# Events that may be a consequence of the earlier end of another rank.
_CONSEQUENCES = frozenset({Event.PROCESS_KILLED, Event.NETWORK_ERROR, Event.PROCESS_EXIT})
_LAUNCHER_SIGNALS = (signal.SIGTERM, signal.SIGHUP)  # Launchers send them to the other ranks after one rank has failed.

EndedRanks = list[tuple[NodeView, Worker]]  # processes that ended, each with its node


@quick_rule
def judge_ended_processes(view: View) -> list[Verdict]:
    """Return a verdict for each cause among the processes that failed.

    Ranks that lost a peer are not to blame, and neither are ranks that SIGTERM ended. The deletion of a pod, for
    example, sends SIGTERM to all ranks of a node, and the driver may learn of the deletion only later.
    """
    failed = [(member, worker) for member, worker in view.workers() if _has_failed(worker)]
    guilty = _select_guilty(view, failed)
    if failed and not guilty:
        # The rank that ended first sent no report: the network is at fault, or the rank's node is silent.
        evidence = tuple(
            f"rank {worker.rank} on {member.node} ended: {_describe_innocent(worker)}"
            for member, worker in failed[:_MAX_LISTED_RANKS]
        )
        ranks = tuple(worker.rank for _, worker in failed)
        return [Verdict(Event.PROCESS_EXIT, ranks=ranks, action="recover", evidence=evidence)]
    causes = _group_by_cause(guilty)
    return [_judge(view, cause, ended) for cause, ended in causes.items()]


def _has_failed(worker: Worker) -> bool:
    """Return True if a signal or an error ended the process. `Worker.code` is then the signal or the exit code."""
    return worker.state == "signalled" or (worker.state == "exited" and worker.code != 0)


def _has_ended_by_itself(worker: Worker) -> bool:
    """Return True unless the agent, SIGTERM or SIGINT, or the loss of another rank ended the process."""
    return not (worker.by_agent or _was_interrupted(worker) or worker.exit.kind is ExitKind.LOST_PEER)


def _select_guilty(view: View, failed: EndedRanks) -> EndedRanks:
    """Return the processes that ended by themselves and not in consequence of the end of another process."""
    guilty_ranks = [(member, worker) for member, worker in failed if _has_ended_by_itself(worker)]
    if not guilty_ranks:
        # A process that ended together with its agent's fork server has an error in its record. It counts only if no
        # process ended by itself.
        guilty_ranks = [(member, worker) for member, worker in failed if worker.by_agent and worker.error]
    if FIRST_STEP not in view.usual_durations:
        return guilty_ranks
    # All ranks end with EXIT_CANNOT_FIT if one of them does not fit on its node. The job has trained before, so the
    # settings are right and only that rank's node is at fault. The record of that rank names the rank itself or -1. The
    # records of ranks that ended in consequence name the rank at fault.
    selected = []
    for member, worker in guilty_ranks:
        if worker.code != EXIT_CANNOT_FIT or worker.exit.rank in (-1, worker.rank):
            selected.append((member, worker))
    return selected


def _group_by_cause(guilty: EndedRanks) -> dict[Cause, EndedRanks]:
    """Group processes by the cause of their end, without causes that are consequences of other causes.

    Kills by signals that launchers send are consequences. Events of _CONSEQUENCES and aborts are consequences if all of
    them came after the first end, since libraries abort a process whose peer is gone.
    """
    causes: dict[Cause, EndedRanks] = {}
    for member, worker in guilty:
        causes.setdefault(find_cause(member, worker), []).append((member, worker))
    if len(causes) > 1 and all(worker.code in _LAUNCHER_SIGNALS for _, worker in causes.get(KILLED, ())):
        causes.pop(KILLED, None)
    first_end = min((_compute_end_time(member, worker) for member, worker in guilty), default=0.0)
    for cause in list(causes):
        is_later = all(_compute_end_time(member, worker) > first_end for member, worker in causes[cause])
        is_abort = all(worker.state == "signalled" and worker.code == signal.SIGABRT for _, worker in causes[cause])
        if is_later and (cause.kind in _CONSEQUENCES or is_abort):
            del causes[cause]
    return causes


def _was_interrupted(worker: Worker) -> bool:
    return worker.state == "exited" and worker.code == EXIT_INTERRUPTED


def _describe_innocent(worker: Worker) -> str:
    """Return how a process ended that is not to blame."""
    if _was_interrupted(worker):
        return _INTERRUPTED
    return worker.message[:_INNOCENT_CHARACTERS] or _LOST_PEER


def find_cause(member: NodeView, worker: Worker) -> Cause:
    """Return the cause of a process's end, from its record, messages of other programs, its signal and exit code."""
    if worker.exit.kind in _CAUSES_BY_RECORD:
        return _CAUSES_BY_RECORD[worker.exit.kind]
    if _was_interrupted(worker):
        return INTERRUPTED
    end_message = _find_end_message(worker)
    fault = find_fault(f"{worker.message}\n{end_message}")
    if fault is not None:
        return _CAUSES_BY_FAULT[fault]
    if worker.state == "signalled":
        if worker.code == signal.SIGKILL and _compute_memory_share(member) > _FULL_MEMORY:
            return OUT_OF_MEMORY
        if worker.code == signal.SIGBUS and list_full_disks(member):
            return DISK_FULL  # A file that is mapped into memory needs disk space when it is first written.
        return _CAUSES_BY_SIGNAL.get(worker.code, UNKNOWN)
    if worker.code in _REFUSALS:
        return CODE_ERROR
    if list_full_disks(member):
        return DISK_FULL
    if worker.exit.kind is ExitKind.EXCEPTION or (worker.exit.kind is ExitKind.UNKNOWN and _has_end_mark(end_message)):
        return CODE_ERROR
    return UNKNOWN


def _has_end_mark(text: str) -> bool:
    """Return True if a text has a line with which Python or C++ begins the message about a process's end."""
    return re.search(END_MARK.pattern, text) is not None


def _find_end_message(worker: Worker) -> str:
    """Return a process's message about its end: the exception that it reported, else the end of its log.

    The end of the log begins at the last mark (`_has_end_mark`). Before SIGABRT, lines ahead of the mark may have the
    reason. The log before any other signal has no reason for it, so the result is "".
    """
    if worker.state == "signalled" and worker.code != signal.SIGABRT:
        return ""
    if worker.error and worker.state == "exited":
        return worker.error
    lines = worker.stderr_tail.splitlines()
    marks = [number for number, line in enumerate(lines) if _has_end_mark(line)]
    if not marks:
        return "\n".join(lines[-_LINES_WITHOUT_MARK:])
    if worker.state == "signalled":
        lines_before = _LINES_BEFORE_MARK
    else:
        lines_before = 0
    return "\n".join(lines[max(0, marks[-1] - lines_before) :])


def _compute_end_time(member: NodeView, worker: Worker) -> float:
    """Return when a process ended, on the driver's clock.

    `Worker.ended_age` is the time since the end when its heartbeat was sent. The node may have sent other messages
    since, so `last_seen` serves only if the history lacks the heartbeat.
    """
    received = member.last_seen
    for time, heartbeat in member.history:
        if heartbeat is member.heartbeat:
            received = time
    return received - worker.ended_age


def list_full_disks(member: NodeView) -> list[str]:
    """Return a sentence per full disk of a node."""
    if member.heartbeat is not None:
        disks = member.heartbeat.disks
    else:
        disks = {}
    return [
        f"the disk of {folder} has {space:,.0f} bytes left" for folder, space in disks.items() if space < MIN_FREE_BYTES
    ]


def judge_failed_start(node: str, ranks: tuple[int, ...], reason: str, errno_value: int) -> Verdict:
    """Return the verdict on a node whose agent could not start its ranks. errno_value: 0 if unknown."""
    if errno_value in DISK_FULL_ERRNOS:
        kind = Event.DISK_FULL
    else:
        kind = Event.PROCESS_EXIT
    return Verdict(kind, nodes=(node,), ranks=ranks, action="recover", evidence=(reason,))


def _compute_memory_share(member: NodeView) -> float:
    """Return the largest fraction of the node's memory that its trainers used in the last heartbeats, 0 if unknown."""
    try:
        if member.heartbeat:
            total = int(member.heartbeat.hardware["memory_bytes"])
        else:
            total = 0
    except (KeyError, ValueError):
        total = 0
    if not total:
        return 0.0
    used = [sum(worker.rss for worker in heartbeat.workers) for _, heartbeat in member.history]  # bytes
    return max(used, default=0) / total


# verdicts -------------------------------------------------------------------------------------------------------------


def _judge(view: View, cause: Cause, ended: EndedRanks) -> Verdict:
    """Return the verdict on processes that ended for one cause."""
    nodes = tuple(dict.fromkeys(member.node for member, _ in ended))
    distinct_messages = list(dict.fromkeys(get_last_message(worker) for _, worker in ended))
    evidence = []
    refusal = _find_refusal(ended)
    if refusal is not None:
        # The reason of a job's end quotes the first evidence only.
        message = get_last_message(refusal)
        evidence.append(f"rank {refusal.rank} reported: {message}")
        distinct_messages.remove(message)
    evidence += [_describe(member, worker, cause) for member, worker in ended[:_MAX_LISTED_RANKS]]
    evidence += [f"its last message: {text}" for text in distinct_messages[:_MAX_LISTED_MESSAGES] if text]
    if cause is DISK_FULL:
        evidence += dict.fromkeys(text for member, _ in ended for text in list_full_disks(member))
    messages = tuple(dict.fromkeys(_normalise(worker) for _, worker in ended if get_last_message(worker)))
    action, explanation = _choose_action(view, cause, ended=ended, nodes=nodes, messages=messages)
    if explanation:
        evidence.append(explanation)
    return Verdict(
        kind=cause.kind,
        nodes=nodes,
        ranks=tuple(worker.rank for _, worker in ended),
        action=action,
        evidence=tuple(evidence),
        needs_person=action == "stop",
        messages=messages,
    )


def _find_refusal(ended: EndedRanks) -> Worker | None:
    """Return the first process that refused to go on and says why, else None. Its record names no other rank."""
    for _, worker in ended:
        is_own_refusal = worker.exit.kind is ExitKind.REFUSED and worker.exit.rank in (-1, worker.rank)
        if is_own_refusal and get_last_message(worker):
            return worker
    return None


def _choose_action(
    view: View, cause: Cause, *, ended: EndedRanks, nodes: tuple[str, ...], messages: Sequence[str]
) -> tuple[Action, str]:
    """Return the action for processes that ended for one cause, and the sentence that explains it.

    nodes, messages: nodes and normalised last messages of the processes `ended`.
    """
    is_refused = cause is CODE_ERROR and any(worker.code in _REFUSALS for _, worker in ended)
    never_fitted = cause is HOST_MEMORY and FIRST_STEP not in view.usual_durations
    if is_refused or never_fitted:
        return "stop", "its exit code says that settings or data are wrong; another start would fail alike"
    if cause is PORT_TAKEN:
        return _choose_port_action(view, nodes)
    if cause is CODE_ERROR and _is_on_several_ranks(ended):
        return "stop", "the same exception on several ranks at once is in the code or the data, not in a machine"
    is_repeated = _is_repeated(view, cause, nodes=nodes, messages=messages)
    if cause is WRONG_BITS:
        return _choose_replay_action(view, nodes, is_repeated)
    if cause is CODE_ERROR and view.grid.world_size == 1 and is_repeated:
        return "stop", ""  # With one rank, the message itself explains the stop.
    if is_repeated:
        is_only_node = len({member.node for member in view.members if member.ranks}) == 1
        action: Action
        if cause is HOST_MEMORY and is_only_node:
            action = "stop"
        else:
            action = cause.repeated
        if action == "stop":
            return action, "the same fault has ended an earlier start, and would occur again"
        return action, "it has happened on this node before"
    if cause is HOST_MEMORY:
        return cause.action, (
            "the same settings have trained before, so the node is at fault: another program holds its memory"
        )
    if cause is CODE_ERROR:
        return (
            cause.action,
            "it occurred on one rank only and for the first time: the machine may be at fault, so the job starts again",
        )
    return cause.action, ""


def _choose_port_action(view: View, nodes: tuple[str, ...]) -> tuple[Action, str]:
    """Return the action after another process took the port of a rank's store, and the sentence that explains it."""
    taken_ports = 1  # ports taken in a row, this one included
    for _, past_verdict in reversed(view.past):
        if past_verdict.kind != PORT_TAKEN.kind:
            break
        taken_ports += 1
    if taken_ports < PORT_LIMIT:
        return PORT_TAKEN.action, f"the next start takes another port, number {taken_ports + 1} of {PORT_LIMIT}"
    return "stop", (
        f"{taken_ports} ports in a row were taken: a process on {', '.join(nodes)} takes every port; end it, or let "
        "the ranks meet through Redis (rendezvous.url=redis://HOST:PORT)"
    )


def _choose_replay_action(view: View, nodes: tuple[str, ...], is_repeated: bool) -> tuple[Action, str]:
    """Return the action for ranks that computed other bits than another replica, and the sentence that explains it."""
    if view.replay_action == "stop":
        return "stop", "resilience.replay_action=stop"
    if len(nodes) == 1:
        return "evict", ""
    if is_repeated:
        return "stop", "self-checks after the first mismatch have not found which of these nodes is faulty"
    return "diagnose", "one of these nodes is faulty, and the replays do not tell which"


def _is_on_several_ranks(ended: EndedRanks) -> bool:
    """Return True if at least two ranks have the same message."""
    messages = [_normalise(worker) for _, worker in ended if get_last_message(worker)]
    return len(set(messages)) < len(messages)


def _is_repeated(view: View, cause: Cause, *, nodes: tuple[str, ...], messages: Sequence[str]) -> bool:
    """Return True if an earlier attempt ended for this cause.

    If a repetition stops the job, the earlier end must have the same message, or neither end has one. For other causes
    it must be on the same node.
    """
    for _, past in view.past:
        if past.kind != cause.kind:
            continue
        if cause.repeated == "stop":
            if set(messages) & set(past.messages) or not (messages or past.messages):
                return True
        elif set(past.nodes) & set(nodes):
            return True
    return False


def _normalise(worker: Worker) -> str:
    """Return a process's last message without addresses, ranks and sizes, or the full disk of its record."""
    if worker.exit.kind is ExitKind.DISK_FULL and worker.exit.subject:
        return f"disk {worker.exit.subject}"
    return re.sub(r"0x[0-9a-f]+|\brank \d+|\b\d+(\.\d+)? ?([KMGT]i?B|bytes)\b", "#", get_last_message(worker))


def get_last_message(worker: Worker) -> str:
    """Return a process's own report, else the last line of its log that names an error, else its last line, else "".

    INFO and DEBUG lines of this package's logging are left out.
    """
    if worker.message or worker.error:
        return (worker.message or worker.error)[:_MESSAGE_CHARACTERS]
    lines = [line.strip() for line in worker.stderr_tail.splitlines()]
    lines = [line for line in lines if line and not is_info_line(line)]
    for line in reversed(lines):
        if re.search(EXCEPTION_LINE.pattern, line):
            return line[:_MESSAGE_CHARACTERS]
    return lines[-1][:_MESSAGE_CHARACTERS] if lines else ""


def is_info_line(line: str) -> bool:
    """Return True for an INFO or DEBUG line of this package's logging (train/telemetry.py)."""
    # TIME attempt 3 rank 0 INFO MESSAGE
    fields = line.split(maxsplit=6)
    return len(fields) > 5 and (fields[1], fields[3]) == ("attempt", "rank") and fields[5] in ("INFO", "DEBUG")


def _describe(member: NodeView, worker: Worker, cause: Cause) -> str:
    """Return a sentence with rank, process, node, end, step and cause."""
    end = f"exit code {worker.code}"
    if worker.state == "signalled":
        end = f"signal {name_signal(worker.code)}"
    process = f"rank {worker.rank} (process {worker.pid} on {member.node})"
    step = "" if worker.phase == UNOBSERVED else f" in step {worker.step}"
    description = cause.description
    if cause is UNKNOWN and worker.exit.kind is ExitKind.REFUSED:
        description = "its message names the cause"
    return f"{process} ended with {end}{step}: {description}"
