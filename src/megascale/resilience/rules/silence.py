"""Missing heartbeats, a missing first step, and missing progress (hangs)."""

from __future__ import annotations

from collections.abc import Sequence

from megascale.core.events import Event
from megascale.core.status import FAILED_IN_STEP, UNOBSERVED
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.table import quick_rule
from megascale.resilience.rules.view import NodeView, Verdict, View

# A phase of another trainer may last this many times its longest usual duration without a change. The agents then watch
# whether its ranks progress, so the limit can be shorter than for this package's trainer.
FOREIGN_GRACE_PERIOD = 2.5
HANG_FLOOR = 10.0  # least seconds without a change before a hang; hangs must be noticed within 15 s
LONG_PHASE_FLOOR = 60.0  # the same for long phases: a checkpoint larger than the last one is not a hang
_LONG_PHASES = ("save", "evaluate", "load")
_MAX_LISTED_RANKS = 12  # ranks in a sentence
_MAX_DESCRIBED_RANKS = 8  # ranks with a sentence each
MAX_STEPS_AHEAD = 2  # steps by which a rank may be ahead of the last step that all ranks have completed
WITNESS_LIMIT = 4  # nodes whose history is searched if another node is silent
FIRST_STEP = "first step"  # a phase of its own, since the first step of an attempt compiles and warms up


@quick_rule
def judge_heartbeats(view: View) -> list[Verdict]:
    """Return a verdict for each node with ranks that has been silent for longer than the window."""
    holders = [member for member in view.members if member.ranks]
    silent = [member for member in holders if view.time - member.last_seen > view.window]
    if not silent:
        return []
    training_time = _find_training_time(view, [member for member in holders if member not in silent])
    if training_time is not None and view.time - training_time <= view.window:
        return [_judge_silent_agent(view, member) for member in silent]
    if len(holders) > 1 and len(silent) == len(holders):
        # If all nodes are silent, the driver's network or host is the likely cause, so the nodes get a second window.
        silent = [member for member in silent if view.time - member.last_seen > 2 * view.window]
    return [_judge_silent_node(view, member, holders) for member in silent]


def _judge_silent_node(view: View, member: NodeView, holders: list[NodeView]) -> Verdict:
    """Return the verdict on a silent node whose ranks may have failed with it."""
    seconds = view.time - member.last_seen
    evidence = [f"no heartbeat from {member.node} for {seconds:.1f} s; resilience.window is {view.window:g} s"]
    if not member.connected:
        evidence.append("its connection has closed too")
    if len(holders) > 1 and not any(peer.heartbeat for peer in holders if peer is not member):
        evidence.append("no other node has sent a heartbeat either")
    return Verdict(
        Event.MISSED_HEARTBEAT,
        nodes=(member.node,),
        ranks=member.ranks,
        action="recover",
        evidence=tuple(evidence),
    )


def _judge_silent_agent(view: View, member: NodeView) -> Verdict:
    """Return an alert about a silent agent whose ranks must still train, since the job trains."""
    seconds = view.time - member.last_seen
    text = (
        f"no heartbeat from {member.node} for {seconds:.1f} s, but the job trains, which it cannot without rank "
        f"{member.ranks[0]} there: its agent is delayed, or cannot reach the driver; the agent's log shows why"
    )
    return Verdict(Event.AGENT_SILENT, nodes=(member.node,), ranks=member.ranks, action="alert", evidence=(text,))


def _find_training_time(view: View, peers: list[NodeView]) -> float | None:
    """Return a time after which all ranks must have trained, by the history of reachable nodes; None if unknown.

    A step needs every rank, and a rank begins step n only with the result of step n - 2 (train/loop.py). So if a node
    is in step n, all ranks have completed step n - 2. They did so after the last heartbeat in which the node was in a
    step below n - 2, whose time is returned.
    """
    if view.phase != "running":
        return None
    times: list[float] = []  # one per node whose history shows such a time
    for member in peers[:WITNESS_LIMIT]:
        steps = [(time, _find_training_step(heartbeat.workers)) for time, heartbeat in member.history]
        steps = [(time, step) for time, step in steps if step >= 0]
        if not steps:
            continue
        _, newest_step = steps[-1]
        earlier_times = [time for time, step in steps if step < newest_step - MAX_STEPS_AHEAD]
        if earlier_times:
            times.append(earlier_times[-1])
    return max(times, default=None)


def _find_training_step(workers: Sequence[Worker]) -> int:
    """Return the earliest step in which a node's ranks train, save or evaluate; -1 if a rank is in another phase."""
    for worker in workers:
        if worker.phase not in ("train", "save", "evaluate") or worker.state != "running":
            return -1
    return min((worker.step for worker in workers), default=-1)


@quick_rule
def judge_slow_start(view: View) -> list[Verdict]:
    """Return a verdict, with the ranks that are furthest behind, if no step came within resilience.first_step."""
    if view.phase != "starting" or view.time - view.started <= view.first_step:
        return []
    workers = [worker for _, worker in view.workers()]
    if any(worker.phase == UNOBSERVED for worker in workers):
        return _judge_unobserved_start(view)
    phases = ("", "start", "load", "train")  # in the order of a start
    positions = {worker.rank: phases.index(worker.phase) for worker in workers if worker.phase in phases}
    lowest_position = min(positions.values(), default=0)
    behind = tuple(rank for rank, position in positions.items() if position == lowest_position)
    absent = sorted(set(range(view.grid.world_size)) - {worker.rank for worker in workers})
    evidence = [f"no step within resilience.first_step={view.first_step:g} s of the start"]
    if absent:
        evidence.append(f"nothing was received from ranks {absent[:_MAX_LISTED_RANKS]}")
    elif len(behind) < view.grid.world_size:
        slowest_phase = phases[lowest_position] or "before start"
        evidence.append(f"ranks {list(behind)[:_MAX_LISTED_RANKS]} are still in phase {slowest_phase!r}")
    ranks = tuple(absent) or behind
    return [Verdict(Event.START_TOO_SLOW, ranks=ranks, action="recover", evidence=tuple(evidence))]


def _judge_unobserved_start(view: View) -> list[Verdict]:
    """Return the verdict on a start of another trainer whose ranks show no step: it may be healthy, or hang."""
    ages = [compute_status_age(view, member, worker) for member, worker in view.workers()]
    text = (
        f"no step was seen within resilience.first_step={view.first_step:g} s: no line of the logs matched "
        "a progress pattern; set foreign.patterns, or call megascale.watch.step in the trainer"
    )
    if min(ages) <= view.first_step:
        text += "; its logs or its collectives grow, so it continues"
        return [Verdict(Event.START_TOO_SLOW, action="alert", evidence=(text,))]
    observation = f"no log has grown and no rank has made a further collective for {min(ages):.0f} s"
    return [Verdict(Event.HANG, action="recover", evidence=(text, observation))]


@quick_rule
def judge_hang(view: View) -> list[Verdict]:
    """Return a verdict if no rank has changed its status within the time that is allowed for its phase.

    If one rank hangs, its peers soon wait for it, so only a halt of all ranks is a hang. The driver examines the ranks
    to find the rank that began the hang (driver/diagnosis/diagnosis.py).
    """
    return find_hang(view)


def find_hang(view: View, lead: float = 0.0) -> list[Verdict]:
    """Return the verdict of `judge_hang` if no rank moves for another `lead` seconds."""
    if view.phase == "starting":
        # Loading may wait for storage, but a first step that takes far longer than earlier first steps is a hang.
        phases = {worker.phase for _, worker in view.workers()}
        if FIRST_STEP not in view.usual_durations or phases != {"train"}:
            return []
    elif view.phase != "running":
        return []
    running = [(member, worker) for member, worker in view.workers() if worker.state == "running"]
    if not running or len(running) < len(view.workers()):
        return []
    if any(worker.phase == "train" for _, worker in running):
        # Ranks of another trainer that print nothing are judged by the ranks that print their steps.
        running = [(member, worker) for member, worker in running if worker.phase != UNOBSERVED]
    # The other ranks may wait for a stopped process in any phase, such as a save.
    ages = [compute_status_age(view, member, worker) for member, worker in running]
    stopped_ages = [age for age, (_, worker) in zip(ages, running, strict=True) if worker.stopped]
    is_stopped = view.phase == "running" and any(age + lead > HANG_FLOOR for age in stopped_ages)
    limits = [HANG_FLOOR if is_stopped else compute_allowed_age(view, worker) for _, worker in running]
    if any(age + lead <= limit for age, limit in zip(ages, limits, strict=True)):
        return []
    # The evidence names the limit of the rank that exceeds its own limit most.
    worst_index = max(range(len(running)), key=lambda index: ages[index] - limits[index])
    limit = limits[worst_index]
    if is_stopped:
        allowance = f"a process is stopped, for which {limit:g} s are allowed"
    else:
        _, worst_worker = running[worst_index]
        phase = worst_worker.phase
        allowance = f"phase {phase!r} may last {limit:.1f} s without change, {view.grace_period:g} x the longest usual"
    steps = sorted({worker.step for _, worker in running})
    oldest = sorted(range(len(running)), key=lambda index: ages[index])[-_MAX_DESCRIBED_RANKS:]
    noun = "step" if len(steps) == 1 else "steps"
    evidence = [
        f"no rank has moved for {min(ages):.1f} s (the first stopped {max(ages):.1f} s ago); {allowance}",
        f"ranks are in {noun} {', '.join(map(str, steps[:_MAX_DESCRIBED_RANKS]))}",
    ]
    for index in oldest:
        member, worker = running[index]
        evidence.append(f"rank {worker.rank} on {member.node}: {_describe_position(worker)} for {ages[index]:.1f} s")
    return [Verdict(Event.HANG, action="recover", evidence=tuple(evidence))]


def compute_status_age(view: View, member: NodeView, worker: Worker) -> float:
    """Return the seconds since a worker's status changed: the age in the heartbeat, and the age of the heartbeat."""
    return worker.status_age + max(0.0, view.time - member.last_seen - view.interval)


def compute_allowed_age(view: View, worker: Worker) -> float:
    """Return the seconds that a worker's phase may last without a change. A phase without history has `first_step`."""
    if worker.phase in ("start", "", "done", "failed", FAILED_IN_STEP, UNOBSERVED):
        return view.first_step
    if view.phase == "starting":
        usual = view.usual_durations.get(FIRST_STEP, view.first_step)
        return min(view.first_step, max(LONG_PHASE_FLOOR, view.grace_period * usual))
    longest = view.usual_durations.get(worker.phase)
    if longest is None:
        return view.first_step
    if worker.phase in _LONG_PHASES:
        floor = LONG_PHASE_FLOOR
    else:
        floor = HANG_FLOOR
    return max(floor, view.grace_period * longest)


def _describe_position(worker: Worker) -> str:
    """Return where a rank stands, such as "train step 7, forward of micro-batch 3"."""
    position = f"{worker.phase} step {worker.step}"
    if worker.action:
        position += f", {worker.action}"
        if worker.microbatch >= 0:
            position += f" of micro-batch {worker.microbatch}"
    return position
