"""What does not come: heartbeats, a first step, progress."""

from __future__ import annotations

from collections.abc import Sequence

from megascale.core.events import Event
from megascale.core.status import FAILED_IN_STEP
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.table import quick
from megascale.resilience.rules.verdicts import Verdict
from megascale.resilience.rules.view import RankView, View

# A phase may go without change for this many times the longest that is usual, and never less than the floor.
GRACE_PERIOD = 5.0
FLOOR = 10.0  # seconds; a hang must be known within 15
_LONG_PHASES = ("save", "evaluate", "load")
LONG_FLOOR = 60.0  # a larger checkpoint or evaluation than the last one is no hang
AHEAD = 2  # steps by which a rank may be ahead of the last one that all have done
WITNESSES = 4  # nodes whose history is looked through where one is silent
FIRST_STEP = "first step"  # an attempt's first step, as a phase of its own: it compiles and warms up


@quick
def heartbeats(view: View) -> list[Verdict]:
    """Nodes with ranks that have been silent for longer than the window."""
    placed = [m for m in view.members if m.ranks]
    silent = [m for m in placed if view.time - m.last_seen > view.window]
    trained = _trained_until(view, [m for m in placed if m not in silent]) if silent else None
    if trained is not None and view.time - trained <= view.window:
        return [_only_its_agent(view, member) for member in silent]
    # All at once is more likely this driver's own network or a pause of its host: they get as long again.
    if len(placed) > 1 and len(silent) == len(placed):
        silent = [m for m in silent if view.time - m.last_seen > 2 * view.window]
    found = []
    for member in silent:
        seconds = view.time - member.last_seen
        evidence = [f"no heartbeat from {member.node} for {seconds:.1f} s; resilience.window is {view.window:g} s"]
        if not member.connected:
            evidence.append("its connection is gone too")
        if not any(m.heartbeat for m in placed if m is not member) and len(placed) > 1:
            evidence.append("no other node has sent one either")
        found.append(Verdict(Event.MISSED_HEARTBEAT, (member.node,), member.ranks, "recover", tuple(evidence)))
    return found


def _trained_until(view: View, others: list[RankView]) -> float | None:
    """A time until which all ranks certainly trained, by what nodes that are heard have done; None: it is not known.

    A step needs every rank, and a rank goes on to the next but one only with its result (train/loop.py): all have taken
    part in the step before the last of those that these nodes stand in, and that one had not begun when they were last
    seen before it.
    """
    found: list[float] = []
    for member in others[:WITNESSES] if view.phase == "running" else ():
        steps = [(at, step) for at, h in member.history if (step := _step(h.workers)) >= 0]
        found += [at for at, step in steps if step < steps[-1][1] - AHEAD][-1:]
    return max(found, default=None)


def _step(workers: Sequence[Worker]) -> int:
    """The step that a node's ranks are in, or that they save or evaluate; -1 where one has not come so far."""
    training = all(w.phase in ("train", "save", "evaluate") and w.state == "running" for w in workers)
    return min((w.step for w in workers), default=-1) if training else -1


def _only_its_agent(view: View, member: RankView) -> Verdict:
    seconds = view.time - member.last_seen
    text = (
        f"no heartbeat from {member.node} for {seconds:.1f} s, but the job trains, which it cannot without rank "
        f"{member.ranks[0]} there: its agent is held up, or cannot reach the driver; its log says what took long"
    )
    return Verdict(Event.AGENT_SILENT, (member.node,), member.ranks, "alert", (text,))


@quick
def slow_start(view: View) -> list[Verdict]:
    """No step within the time that a start may take; the ranks that are furthest behind are named."""
    if view.phase != "starting" or view.time - view.started <= view.first_step:
        return []
    text = f"no step within resilience.first_step={view.first_step:g} s of the start"
    order = ("", "start", "load", "train")
    workers = [w for _, w in view.workers()]
    late = [w for w in workers if w.phase in order]
    least = min((order.index(w.phase) for w in late), default=0)
    behind = tuple(w.rank for w in late if order.index(w.phase) == least)
    absent = sorted(set(range(view.grid.world_size)) - {w.rank for w in workers})
    evidence = [text]
    if absent:
        evidence.append(f"nothing was received from ranks {absent[:12]}")
    elif len(behind) < view.grid.world_size:
        evidence.append(f"ranks {list(behind)[:12]} are still in phase {order[least] or 'before start'!r}")
    return [Verdict(Event.START_TOO_SLOW, (), tuple(absent) or behind, "recover", tuple(evidence))]


@quick
def hang(view: View) -> list[Verdict]:
    """Nothing moves: every rank's last status is older than its phase may go without a new one.

    A rank in a long compute changes no status, but its peers stop too, so only all together is a hang. Who began it is
    for the hang verdict to say (driver/diagnosis/hang_diagnosis.py).
    """
    if view.phase == "starting":
        # Loading may wait for storage; but a first step that stands still for far longer than the job's others is none.
        if FIRST_STEP not in view.usual_durations or any(w.phase != "train" for _, w in view.workers()):
            return []
    elif view.phase != "running":
        return []
    running = [(m, w) for m, w in view.workers() if w.state == "running"]
    if not running or len(running) < len(view.workers()):
        return []
    # Nobody works in a stopped process: whatever the others stand at, a save for example, they may stand there for it.
    held = any(w.stopped and age(view, m, w) > FLOOR for m, w in running) and view.phase == "running"
    ages = [(age(view, m, w), FLOOR if held else allowed(view, w), m, w) for m, w in running]
    if any(old <= limit for old, limit, _, _ in ages):
        return []
    _, limit, _, first = max(ages, key=lambda item: item[0] - item[1])
    oldest = max(old for old, _, _, _ in ages)
    steps = sorted({w.step for _, w in running})
    evidence = [
        f"no rank has moved for {min(old for old, _, _, _ in ages):.1f} s (the first stopped {oldest:.1f} s ago); "
        + (
            f"a process is stopped, for which {limit:g} s are allowed"
            if held
            else f"phase {first.phase!r} may stand still for {limit:.1f} s, {GRACE_PERIOD:g} x the longest usual"
        ),
        f"ranks stand in step{'s' * (len(steps) > 1)} {', '.join(map(str, steps[:8]))}",
    ]
    evidence += [
        f"rank {w.rank} on {m.node}: {_position(w)} for {old:.1f} s" for old, _, m, w in sorted(ages, key=_age)[-8:]
    ]
    return [Verdict(Event.HANG, (), (), "recover", tuple(evidence))]


def age(view: View, member: RankView, worker: Worker) -> float:
    """Seconds since a worker's status changed: the agent's count, and what has passed since its heartbeat."""
    return worker.status_age + max(0.0, view.time - member.last_seen - view.interval)


def allowed(view: View, worker: Worker) -> float:
    """Seconds that a worker's phase may go without change. What was never seen may last as long as a first step."""
    if worker.phase in ("start", "", "done", "failed", FAILED_IN_STEP):
        return view.first_step
    if view.phase == "starting":
        return min(
            view.first_step, max(LONG_FLOOR, GRACE_PERIOD * view.usual_durations.get(FIRST_STEP, view.first_step))
        )
    longest = view.usual_durations.get(worker.phase)
    if longest is None:
        return view.first_step
    return max(LONG_FLOOR if worker.phase in _LONG_PHASES else FLOOR, GRACE_PERIOD * longest)


def _age(item: tuple[float, float, RankView, Worker]) -> float:
    return item[0]


def _position(worker: Worker) -> str:
    at = f", {worker.action}" + (f" of micro-batch {worker.microbatch}" if worker.microbatch >= 0 else "")
    return f"{worker.phase} step {worker.step}{at if worker.action else ''}"
