"""What the driver concludes from a view: processes that ended badly, heartbeats that are missing, starts too slow.

Pure functions from a view to verdicts; each verdict carries the sentences that led to it.
"""

from __future__ import annotations

from megascale.core.events import Event
from megascale.errors import EXIT_BAD_DATA, EXIT_CANNOT_FIT, EXIT_USAGE
from megascale.resilience.verdicts import Verdict
from megascale.resilience.view import View


def judge(view: View) -> list[Verdict]:
    """All verdicts on `view`, in no order."""
    return [*_exits(view), *_missing(view), *_slow_start(view)]


def _exits(view: View) -> list[Verdict]:
    bad = [(m, w) for m, w in view.workers() if w.state == "signalled" or (w.state == "exited" and w.code)]
    # A rank that lost contact with another suffers from what ended the other one.
    causes = [(m, w) for m, w in bad if "lost contact" not in w.message + w.stderr_tail] or []
    found = []
    for member, worker in causes:
        how = f"signal {worker.code}" if worker.state == "signalled" else f"exit code {worker.code}"
        evidence = [
            f"rank {worker.rank} (process {worker.pid} on {member.node}) ended with {how} in step {worker.step}"
        ]
        last = worker.message or next((t for t in reversed(worker.stderr_tail.splitlines()) if t.strip()), "")
        if last:
            evidence.append(f"its last words: {last[:300]}")
        if worker.state == "exited" and worker.code in (EXIT_USAGE, EXIT_CANNOT_FIT, EXIT_BAD_DATA):
            found.append(
                Verdict(Event.PROCESS_EXIT, (member.node,), (worker.rank,), "stop", tuple(evidence), person=True)
            )
        else:
            found.append(Verdict(Event.PROCESS_EXIT, (member.node,), (worker.rank,), "respawn", tuple(evidence)))
    if bad and not causes:
        ranks = tuple(w.rank for _, w in bad)
        evidence = [f"rank {w.rank} on {m.node} ended: {w.message[:200] or 'lost contact'}" for m, w in bad[:8]]
        found.append(Verdict(Event.PROCESS_EXIT, (), ranks, "respawn", tuple(evidence)))
    return found


def _missing(view: View) -> list[Verdict]:
    found = []
    for member in view.members:
        silent = view.now - member.last_seen
        if silent > view.window and member.ranks:
            evidence = (f"no heartbeat from {member.node} for {silent:.1f} s; resilience.window is {view.window:g} s",)
            found.append(Verdict(Event.MISSED_HEARTBEAT, (member.node,), member.ranks, "respawn", evidence))
    return found


def _slow_start(view: View) -> list[Verdict]:
    if view.phase != "starting" or view.now - view.started <= view.first_step:
        return []
    text = f"no step within resilience.first_step={view.first_step:g} s of the start"
    return [Verdict(Event.START_TOO_SLOW, (), (), "respawn", (text,))]
