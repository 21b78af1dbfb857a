"""Who waits for whom, in which collective, and which rank began it: a pure function of the evidence.

Ranks that wait accuse others; a rank that nobody can excuse is named. In order of weight: a process that is gone or
stopped; one that did not answer; a rank that waits for its samples; a rank whose calls depart from its schedule, from
its siblings' or from its own step before (a mismatched collective, a missing send); a rank that stands in no collective
while others wait for it; and, where every member came to the call, the network. Silence accuses: ranks that wait can
say so, the one that hangs often cannot (MegaScale section 5.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megascale.core.calls import READER, Call, CallRecord, Waiting
from megascale.core.exit_record import ExitKind
from megascale.core.layout import Layout
from megascale.observe.hang.departure import Departure, departures
from megascale.observe.hang.scene import RankEvidence, Scene

KINDS = {
    "none": "nothing hangs",
    "dead": "a process is gone",
    "stopped": "a process is stopped",
    "silent": "a rank does not answer",
    "reader": "a rank gets no samples",
    "mismatched collective": "ranks of one group call different collectives",
    "missing send": "a rank did not send what its schedule lists",
    "missing call": "a rank left out a collective",
    "busy": "a rank is in no collective while others wait for it",
    "network": "every rank came to the call and nobody leaves it",
}


@dataclass(frozen=True)
class Wait:
    """A rank that waits.

    Attributes:
        rank: who waits.
        group, op, sequence: in which call; group is READER for samples.
        on: the ranks it waits for: those that have not come to the call, or, once all came, those still in it.
        all_came: whether every member has started the call.
        seconds: for how long, by the rank's own clock against the looker's.
    """

    rank: int
    group: str
    op: str
    sequence: int
    on: tuple[int, ...]
    all_came: bool
    seconds: float


@dataclass(frozen=True)
class Hang:
    """The verdict.

    Attributes:
        kind: one of KINDS.
        ranks: which ranks began it; empty for "none" and "network".
        group, op, sequence: the call in which the others wait for them; empty where there is none.
        waits: all that wait, the longest first.
        evidence: sentences a person understands, the decisive one first.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    group: str = ""
    op: str = ""
    sequence: int = 0
    waits: tuple[Wait, ...] = ()
    evidence: tuple[str, ...] = ()


def explain_hang(scene: Scene, layout: Layout | None = None) -> Hang:
    """The verdict over the evidence; `layout` (if known) says what each rank's schedule lists."""
    records = _records(scene)
    members = _members(records)
    waits = sorted(_waits(scene, records, members), key=lambda w: -w.seconds)
    if scene.moving and not any(e.process in ("gone", "stopped") for e in scene.ranks.values()):
        ranks = _list(sorted(scene.moving))
        return Hang("none", waits=tuple(waits), evidence=(f"{ranks} moved on while being looked at",))
    judge = _Judge(scene, records, members, tuple(waits), _departures(scene, records, layout))
    tests = (judge.lost, judge.silent, judge.reader, judge.departed, judge.busy, judge.absent, judge.circle)
    for test in (*tests, judge.network):
        hang = test()
        if hang is not None:
            return hang
    return Hang("none", waits=tuple(waits), evidence=("no rank waits for another",))


def _records(scene: Scene) -> dict[int, CallRecord]:
    """Each rank's calls; on devices from the flight recorder, which alone knows which calls have finished."""
    flights = {r: e.flight for r, e in scene.ranks.items() if e.flight is not None}
    own = _own_records(scene)
    if not flights or not (not own or _on_devices(scene, own)):
        return own
    # No recorder sees a rank wait for samples.
    reads = {r: e.waiting for r, e in own.items() if e.waiting is not None and e.waiting.group == READER}
    return {r: replace(f.record, waiting=reads.get(r, f.record.waiting)) for r, f in flights.items()}


def _own_records(scene: Scene) -> dict[int, CallRecord]:
    return {r: e.record for r, e in scene.ranks.items() if e.record is not None}


def _on_devices(scene: Scene, own: Mapping[int, CallRecord]) -> bool:
    """Whether calls ran on devices and flight recorders tell of all ranks that left a record."""
    flights = {r: e.flight for r, e in scene.ranks.items() if e.flight is not None}
    return any(f.device for f in flights.values()) and flights.keys() >= own.keys()


def _departures(scene: Scene, records: Mapping[int, CallRecord], layout: Layout | None) -> dict[int, Departure]:
    """Of the ranks' own records where there are any: they alone know steps, and calls that a replay makes.

    On devices the host is up to a step ahead of what hangs.
    """
    own = _own_records(scene)
    if own.keys() >= records.keys():
        return departures(own, layout, ahead=1 if _on_devices(scene, own) else 0)
    return departures(records, layout)


def _members(records: Mapping[int, CallRecord]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for rank in sorted(records):
        for group in records[rank].groups:
            members.setdefault(group, []).append(rank)
    return members


def _waits(scene: Scene, records: Mapping[int, CallRecord], members: Mapping[str, list[int]]) -> list[Wait]:
    found = []
    for rank, record in records.items():
        waiting = record.waiting
        if waiting is None or scene.ranks[rank].process == "gone":
            continue
        seconds = max(0.0, (scene.now_ns - waiting.since_ns) / 1e9) if waiting.since_ns else 0.0
        if waiting.group == READER:
            found.append(Wait(rank, READER, "read", record.step, (), False, seconds))
            continue
        call = record.find_call(waiting.group, waiting.sequence)
        others = [m for m in members[waiting.group] if m != rank]
        behind = [m for m in others if records[m].groups[waiting.group].started < waiting.sequence]
        size = record.groups[waiting.group].size
        all_came = not behind and (not size or len(others) + 1 >= size)
        inside = [m for m in others if _inside(records[m].waiting, waiting)] or others
        on = tuple(behind if behind or not all_came else inside)
        found.append(
            Wait(rank, waiting.group, call.op if call else "", waiting.sequence, on, all_came, seconds),
        )
    return found


def _inside(one: Waiting | None, other: Waiting) -> bool:
    return one is not None and (one.group, one.sequence) == (other.group, other.sequence)


def _list(ranks: list[int] | tuple[int, ...], limit: int = 12) -> str:
    shown = ", ".join(map(str, ranks[:limit])) + (f" and {len(ranks) - limit} more" if len(ranks) > limit else "")
    return f"rank{'s' * (len(ranks) != 1)} {shown}"


@dataclass
class _Judge:
    """One test a method, each a Hang or None."""

    scene: Scene
    records: Mapping[int, CallRecord]
    members: Mapping[str, list[int]]
    waits: tuple[Wait, ...]
    departed_at: Mapping[int, Departure]

    def lost(self) -> Hang | None:
        """Processes that are gone or stopped, unless all are (then only their last words tell)."""
        alive = [e for e in self.scene.ranks.values() if e.process in ("running", "stopped")]
        if not alive:
            return None
        stopped = [e.rank for e in alive if e.process == "stopped"]
        gone = [e for e in self.scene.ranks.values() if e.process == "gone" and not (e.status and _ended(e))]
        if gone:
            first = [
                e
                for e in gone
                if not (e.status and e.status.exit is not None and e.status.exit.kind is ExitKind.LOST_PEER)
            ] or gone
            ranks = tuple(e.rank for e in first)
            said = [f"rank {e.rank} said: {e.status.message}" for e in first if e.status and e.status.message]
            return self._name("dead", ranks, f"the process of {_list(ranks)} is gone", said)
        if stopped:
            why = f"the process of {_list(stopped)} is stopped (state T: SIGSTOP or a debugger)"
            return self._name("stopped", tuple(stopped), why, [f"kill -CONT {self._pids(stopped)} lets it go on"])
        return None

    def silent(self) -> Hang | None:
        """Ranks that were asked for their stack and did not answer, unless a rank departed: who holds others up by
        standing still leaves no such trace, and who waits inside a driver's call may be unable to answer."""
        ranks = self._unanswered()
        if not ranks or self.departed_at:
            return None
        return self._name("silent", ranks, f"{_list(ranks)} did not answer when asked for a stack", self._places(ranks))

    def reader(self) -> Hang | None:
        """Ranks that wait for their samples."""
        ranks = tuple(w.rank for w in self.waits if w.group == READER)
        if not ranks:
            return None
        more = []
        for rank in ranks:
            waiting, state = self.records[rank].waiting, self.scene.ranks[rank].reader
            if waiting is not None and waiting.pid:
                known = {"running": "runs", "stopped": "is stopped", "gone": "is gone", "unknown": "is elsewhere"}
                more.append(f"its reader, process {waiting.pid}, {known[state]}")
        return self._name("reader", ranks, f"{_list(ranks)} got no samples", more + self._places(ranks))

    def departed(self) -> Hang | None:
        """Ranks whose calls are not those that were due."""
        if not self.departed_at:
            return None
        ranks = tuple(sorted(self.departed_at))
        first = self.departed_at[ranks[0]]
        sentences = [f"rank {r}: {self.departed_at[r].sentence}" for r in ranks]
        mute = tuple(r for r in self._unanswered() if r not in ranks)
        also = [f"{_list(mute)} did not answer when asked for a stack", *self._stacks(mute)] if mute else []
        hang = self._name(first.kind, ranks, sentences[0], [*sentences[1:], *self._places(ranks), *also])
        due = first.due
        return Hang(hang.kind, ranks, due.group, due.op, due.sequence, self.waits, hang.evidence)

    def busy(self) -> Hang | None:
        """Ranks that others wait for and that themselves wait for nobody, or for a call that all others have left."""
        accused = {m for w in self.waits for m in w.on}
        waiting = {w.rank for w in self.waits}
        stale = {w.rank for w in self.waits if self._left_alone(w)}
        ranks = tuple(sorted((accused - waiting) | (accused & stale)))
        if not ranks:
            return None
        return self._name("busy", ranks, f"{_list(ranks)} is in no collective while others wait", self._places(ranks))

    def absent(self) -> Hang | None:
        """Ranks that left nothing at all."""
        ranks = tuple(sorted(set(range(self.scene.world)) - set(self.records)))
        if not ranks:
            return None
        return self._name("silent", ranks, f"{_list(ranks)} left no record: silence where all others left one", [])

    def circle(self) -> Hang | None:
        """Ranks that wait for each other in different calls: one of them made a call too many or left one out."""
        on = {w.rank: set(w.on) for w in self.waits if not w.all_came}
        reach = {rank: _reached(rank, on) for rank in on}
        ranks = tuple(sorted(rank for rank in on if rank in reach[rank]))
        if not ranks:
            return None
        why = f"{_list(ranks)} wait for each other in different calls: one of them made one too many or left one out"
        return self._name("mismatched collective", ranks, why, self._places(ranks))

    def network(self) -> Hang | None:
        """A call to which all members came and which nobody leaves."""
        stuck = [w for w in self.waits if w.all_came]
        if not stuck:
            return None
        first = stuck[0]
        group = self.members.get(first.group, [])
        text = (
            f"{_list(group)} all started {_call(first)} and none has left it for {first.seconds:.0f} s: look at the "
            "links between their hosts"
        )
        return Hang("network", (), first.group, first.op, first.sequence, self.waits, (text, *self._chain()))

    def _unanswered(self) -> tuple[int, ...]:
        return tuple(e.rank for e in self.scene.ranks.values() if e.answered is False)

    def _left_alone(self, wait: Wait) -> bool:
        others = [m for m in self.members.get(wait.group, []) if m != wait.rank]
        return bool(others) and all(self.records[m].groups[wait.group].finished >= wait.sequence for m in others)

    def _name(self, kind: str, ranks: tuple[int, ...], why: str, more: list[str]) -> Hang:
        """A verdict on `ranks`; the call is the one in which somebody has waited for them longest."""
        direct = [w for w in self.waits if w.rank not in ranks and set(w.on) & set(ranks)]
        on_way = [w for w in self.waits if w.rank not in ranks and set(self.members.get(w.group, ())) & set(ranks)]
        found = next(iter([*direct, *on_way]), None)
        evidence, call = [why], ("", "", 0)
        if found is not None:
            call = (found.group, found.op, found.sequence)
            waiters = [w.rank for w in self.waits if w.group == found.group and w.rank not in ranks]
            came = "all came, it is under way" if found.all_came else f"{_list(found.on)} did not come to it"
            evidence.append(f"{_list(waiters)} {_verb(waiters)} in {_call(found)} for {found.seconds:.0f} s: {came}")
        elif (launched := self._launched_alone(ranks)) is not None:
            rank, one, behind = launched
            call = (one.group, one.op, one.sequence)
            text = f"{_list((rank,))} launched {one.op} (call {one.sequence} of {one.group})"
            evidence.append(f"{text}, {_list(behind)} did not come to it")
        evidence += more + self._stacks(ranks)
        evidence += [line for line in self._chain() if line not in evidence]
        return Hang(kind, ranks, *call, self.waits, tuple(evidence))

    def _launched_alone(self, ranks: tuple[int, ...]) -> tuple[int, Call, list[int]] | None:
        """Another rank, the first call that it launched and some of `ranks`, members too, did not, and those. On
        devices it is what hangs: what all launched ends, and hosts, which are ahead, wait for no call."""
        started: dict[str, dict[int, int]] = {}
        for rank in ranks:
            for group, counts in self.records[rank].groups.items() if rank in self.records else ():
                started.setdefault(group, {})[rank] = counts.started
        least = {group: min(of.values()) for group, of in started.items()}
        for rank in sorted(self.records.keys() - set(ranks)):
            for call in self.records[rank].calls:
                if least.get(call.group, call.sequence) < call.sequence:
                    return rank, call, [r for r, n in started[call.group].items() if n < call.sequence]
        return None

    def _chain(self) -> list[str]:
        """Who waits for whom, one line a group of waiters, the oldest first."""
        lines: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
        for w in self.waits:
            lines.setdefault((w.group, w.sequence, () if w.all_came else w.on), []).append(w.rank)
        texts = []
        for (group, sequence, on), ranks in lines.items():
            target = f"{_verb(ranks)} for {_list(on)}" if on else _verb(ranks)
            texts.append(f"{_list(sorted(ranks))} {target} in {group} call {sequence}")
        return texts[:12]

    def _places(self, ranks: tuple[int, ...]) -> list[str]:
        return [f"rank {r} stands at {describe_position(self.scene.ranks[r])}" for r in ranks if r in self.scene.ranks]

    def _stacks(self, ranks: tuple[int, ...]) -> list[str]:
        known = [(r, self.scene.ranks[r].stack) for r in ranks if r in self.scene.ranks]
        return [f"stack of rank {r}: {' < '.join(stack[:4])}" for r, stack in known if stack]

    def _pids(self, ranks: list[int]) -> str:
        records = (self.scene.ranks[r].record for r in ranks)
        return " ".join(str(record.pid) for record in records if record)


def _ended(what: RankEvidence) -> bool:
    return what.status is not None and what.status.phase == "done"


def _call(wait: Wait) -> str:
    return f"{wait.op or 'call'} (call {wait.sequence} of {wait.group})"


def describe_position(what: RankEvidence) -> str:
    """Where a rank stands, in words."""
    record, status = what.record, what.status
    phase = status.phase if status else "an unknown phase"
    if record is None or not record.action or phase not in ("train", "an unknown phase"):
        return f"{phase}, step {status.step if status else 0}"
    part = "" if record.microbatch < 0 else f", chunk {record.chunk}, micro-batch {record.microbatch}"
    return f"step {record.step}, {record.action}{part}"


def _verb(ranks: list[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


def _reached(rank: int, on: Mapping[int, set[int]]) -> set[int]:
    """Ranks for which `rank` waits, directly or through others."""
    found: set[int] = set()
    left = set(on.get(rank, ()))
    while left:
        found |= left
        left = {other for one in left for other in on.get(one, ())} - found
    return found
