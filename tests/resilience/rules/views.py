"""Views of a driver for tests of the rules: workers, heartbeats, and a job's view of them."""

from __future__ import annotations

from collections import deque

from megascale.core.grid import Grid
from megascale.resilience import rules
from megascale.resilience.protocol.heartbeat import Heartbeat, Worker
from megascale.resilience.rules.view import HISTORY_LENGTH, Incident, NodeView, Verdict, View

WINDOW = 5.0


def worker(rank: int, **changes) -> Worker:
    return Worker(**({"rank": rank, "pid": 100 + rank, "state": "running", "phase": "train", "step": 10} | changes))


def heartbeat(node: int, sequence: int, workers, **changes) -> Heartbeat:
    return Heartbeat("job", 1, f"node-{node}", sequence, changes.pop("sent_ns", 0), workers=tuple(workers), **changes)


def view(beats: dict[int, list[Heartbeat]], grid: Grid | None = None, **changes) -> View:
    """A running job whose node n sent `beats[n]`, one a second, the last just now."""
    members = []
    current = changes.pop("now", 1000.0)
    for node, sent in beats.items():
        times = [current - len(sent) + 1 + i for i in range(len(sent))]
        history = deque(zip(times, sent, strict=True), maxlen=HISTORY_LENGTH)
        ranks = tuple(w.rank for w in sent[-1].workers) if sent else (node,)
        last = sent[-1] if sent else None
        members.append(NodeView(f"node-{node}", ranks, times[-1] if sent else current, last, history))
    standard = {"usual_durations": {"train": 0.2, "save": 1.0, "evaluate": 1.0}, "phase": "running", "started": 0.0}
    grid = grid or Grid(data=max(1, sum(len(m.ranks) for m in members)), ranks_per_host=1)
    if "incidents" in changes:
        changes["incidents"] = [Incident(*incident) for incident in changes["incidents"]]
    fixed = {"window": WINDOW, "interval": 1.0, "first_step": 60.0}
    return View("job", 1, time=current, members=members, grid=grid, **(standard | fixed | changes))


def one(result: list[Verdict], kind: str) -> Verdict:
    matching = [v for v in result if v.kind == kind]
    assert len(matching) == 1, [(v.kind, v.evidence) for v in result]
    assert matching[0].evidence
    return matching[0]


def ended(*workers: Worker, **changes) -> list[Verdict]:
    """Verdicts on two nodes of one rank each, `workers` in place of the calm ones."""
    state = {w.rank: w for w in (worker(0), worker(1))} | {w.rank: w for w in workers}
    return rules.judge(view({r: [heartbeat(r, 1, [w])] for r, w in state.items()}, **changes))


def trace(error: str) -> str:
    return f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{error}\n'
