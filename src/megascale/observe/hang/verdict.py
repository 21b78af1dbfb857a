"""The verdict on a hang: which rank caused it, and which ranks wait for it in which collective.

`explain_hang` is a pure function of the evidence. It tests for these causes, in this order:

1. a process that is gone or stopped;
2. a rank that did not answer, since a rank that hangs often cannot report it (MegaScale section 5.2);
3. a rank that waits for its samples;
4. a rank whose calls depart from its schedule, its siblings or its previous step (a mismatched collective, a missing
   send);
5. a rank that is in no collective while others wait for it;
6. a rank without any record;
7. ranks that wait for each other in different calls;
8. the network, if every member has joined the call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megascale import config as configuration
from megascale.core.calls import READER, Call, CallRecord
from megascale.core.exit_record import ExitKind
from megascale.core.layout import Layout, lay_out
from megascale.core.untrusted_files import is_small_file
from megascale.errors import MegascaleError
from megascale.observe.hang.departure import Departure, find_departures
from megascale.observe.hang.evidence import collect_evidence
from megascale.observe.hang.scene import RankEvidence, Scene

KINDS = {
    "none": "nothing hangs",
    "dead": "a process is gone",
    "stopped": "a process is stopped",
    "silent": "a rank does not answer",
    "reader": "a rank gets no samples",
    "mismatched collective": "ranks of one group call different collectives",
    "missing send": "a rank did not send what its schedule lists",
    "missing call": "a rank skipped a collective",
    "busy": "a rank is in no collective while others wait for it",
    "network": "every rank joined the call and none leaves it",
}
_MAX_LISTED_RANKS = 12
_MAX_WAIT_LINES = 12
_READER_STATES = {"running": "runs", "stopped": "is stopped", "gone": "is gone", "unknown": "is on another host"}


@dataclass(frozen=True)
class Wait:
    """A rank's wait in a call, or for samples. The names of the fields are keys in the output of `megascale hang`.

    Attributes:
        rank: the waiting rank.
        group, op, sequence: group, operation and number of the call. For samples the group is READER.
        on: awaited ranks: the members that have not joined the call. If all have joined, the other ranks in the call.
        all_came: whether every member has joined the call.
        seconds: duration of the wait: this host's time minus the begin by the rank's clock.
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
        ranks: ranks that caused the hang; empty for "none" and "network".
        group, op, sequence: the call in which other ranks wait for `ranks`; empty without such a call.
        waits: all waiting ranks, the longest wait first.
        evidence: sentences, the decisive one first.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    group: str = ""
    op: str = ""
    sequence: int = 0
    waits: tuple[Wait, ...] = ()
    evidence: tuple[str, ...] = ()


def examine_run(folder: Path, ask: bool = True, watch_seconds: float = 0.5) -> tuple[Scene, Hang]:
    """Collect the evidence of a run folder, and return it with the verdict. Raises DataError if the folder has no run.

    Args:
        ask: signal the ranks on this host for their stacks and flight records.
        watch_seconds: time to watch for progress.
    """
    scene = collect_evidence(folder, ask, watch_seconds)
    return scene, explain_hang(scene, load_layout(folder, scene.world))


def load_layout(folder: Path, world: int) -> Layout | None:
    """Return the layout of the run in `folder`; None if its configuration is missing or does not fit `world` ranks."""
    file = folder / "config.toml"
    if not is_small_file(file):
        return None
    try:
        config = configuration.load(file, keep_unknown_parts=True)
        if config.foreign.command:
            return None  # the ranks of another trainer do not follow a schedule of this package
        return lay_out(config, world)
    except (MegascaleError, ValueError, RecursionError):
        return None


def format_headline(hang: Hang) -> str:
    """Return the verdict as one line."""
    subjects = []
    if hang.ranks:
        subjects.append(_list_ranks(hang.ranks, limit=len(hang.ranks)))
    if hang.group and hang.group != READER:
        subjects.append(f"{hang.op or 'call'} number {hang.sequence} of {hang.group}")
    subject = ", ".join(subjects)
    if hang.group == READER:
        subject += " while reading"
    return f"{hang.kind}{': ' if subject else ''}{subject.strip()} ({KINDS[hang.kind]})"


def make_record(scene: Scene, hang: Hang) -> dict[str, Any]:
    """Return the verdict and the position of each rank, for `megascale hang --json`."""
    ranks: list[dict[str, Any]] = []
    for rank in range(scene.world):
        evidence = scene.ranks.get(rank)
        if evidence is None:
            ranks.append({"rank": rank, "process": "unknown", "place": "left no record"})
            continue
        ranks.append(
            {
                "rank": rank,
                "process": evidence.process,
                "place": describe_position(evidence),
                "answered": evidence.answered,
                "stack": list(evidence.stack),
            }
        )
    return {**dataclasses.asdict(hang), "world": scene.world, "by_rank": ranks}


def explain_hang(scene: Scene, layout: Layout | None = None) -> Hang:
    """Return the verdict on the evidence. `layout`, if known, provides each rank's schedule and stage."""
    records = _select_records(scene)
    members: dict[str, list[int]] = {}
    for rank in sorted(records):
        for group in records[rank].groups:
            members.setdefault(group, []).append(rank)
    waits = tuple(sorted(_list_waits(scene, records, members), key=lambda wait: -wait.seconds))
    is_process_lost = any(item.process in ("gone", "stopped") for item in scene.ranks.values())
    if scene.moving and not is_process_lost:  # ranks that made progress, so nothing hangs
        sentence = f"{_list_ranks(sorted(scene.moving))} made progress while watched"
        return Hang("none", waits=waits, evidence=(sentence,))
    judge = _Judge(scene, records, members, waits, _find_departures(scene, records, layout))
    for find_cause in (
        judge.find_gone_or_stopped,
        judge.find_silent,
        judge.find_readers,
        judge.find_departed,
        judge.find_busy,
        judge.find_absent,
        judge.find_cycle,
        judge.find_network_fault,
    ):
        hang = find_cause()
        if hang is not None:
            return hang
    return Hang("none", waits=waits, evidence=("no rank waits for another",))


def _select_records(scene: Scene) -> dict[int, CallRecord]:
    """Return the record of each rank's calls.

    For calls on devices it is the record of torch's flight recorder, since the rank's own record does not contain which
    calls have finished.
    """
    own_records = _select_own_records(scene)
    flights = {rank: item.flight for rank, item in scene.ranks.items() if item.flight is not None}
    if not flights or (own_records and not _is_on_devices(scene)):
        return own_records
    records = {}
    for rank, flight in flights.items():
        if rank in own_records:
            waiting = own_records[rank].waiting
        else:
            waiting = None
        # The flight recorder does not record waits for samples, so take them from the rank's own record.
        is_reading = waiting is not None and waiting.group == READER
        if is_reading:
            records[rank] = replace(flight.record, waiting=waiting)
        else:
            records[rank] = flight.record
    return records


def _select_own_records(scene: Scene) -> dict[int, CallRecord]:
    return {rank: item.record for rank, item in scene.ranks.items() if item.record is not None}


def _has_lost_peer(evidence: RankEvidence) -> bool:
    """Return whether a rank ended because another rank had ended or hung."""
    if evidence.status is not None:
        record = evidence.status.exit
    else:
        record = None
    return record is not None and record.kind is ExitKind.LOST_PEER


def _is_on_devices(scene: Scene) -> bool:
    """Return whether calls ran on devices and all ranks with a record have a flight record."""
    flights = {rank: item.flight for rank, item in scene.ranks.items() if item.flight is not None}
    return any(flight.device for flight in flights.values()) and flights.keys() >= _select_own_records(scene).keys()


def _find_departures(scene: Scene, records: Mapping[int, CallRecord], layout: Layout | None) -> dict[int, Departure]:
    """Return the departed ranks.

    The ranks' own records are used if all ranks have one, because flight records lack steps and the calls of replays.
    """
    own_records = _select_own_records(scene)
    if own_records.keys() >= records.keys():
        # On devices the host is up to one step ahead of the hanging call.
        return find_departures(own_records, layout, steps_ahead=1 if _is_on_devices(scene) else 0)
    return find_departures(records, layout)


def _list_waits(scene: Scene, records: Mapping[int, CallRecord], members: Mapping[str, list[int]]) -> list[Wait]:
    """Return the waits of all ranks that are not gone. `members` are the recorded ranks of each group."""
    waits = []
    for rank, record in records.items():
        waiting = record.waiting
        if waiting is None or scene.ranks[rank].process == "gone":
            continue
        if waiting.start_ns:
            seconds = max(0.0, (scene.now_ns - waiting.start_ns) / 1e9)
        else:
            seconds = 0.0
        if waiting.group == READER:
            waits.append(Wait(rank, READER, "read", record.step, on=(), all_came=False, seconds=seconds))
            continue
        peers = [member for member in members[waiting.group] if member != rank]
        absent = [m for m in peers if records[m].groups[waiting.group].started < waiting.sequence]
        # A size of 0 means unknown. Otherwise members without a record may be absent.
        size = record.groups[waiting.group].size
        all_came = not absent and (size == 0 or len(peers) + 1 >= size)
        awaited = absent
        if all_came:
            peers_in_call = [m for m in peers if _is_in_call(records[m], waiting.group, waiting.sequence)]
            awaited = peers_in_call or peers
        call = record.find_call(waiting.group, waiting.sequence)
        op = call.op if call else ""
        waits.append(
            Wait(
                rank=rank,
                group=waiting.group,
                op=op,
                sequence=waiting.sequence,
                on=tuple(awaited),
                all_came=all_came,
                seconds=seconds,
            )
        )
    return waits


def _is_in_call(record: CallRecord, group: str, sequence: int) -> bool:
    waiting = record.waiting
    return waiting is not None and (waiting.group, waiting.sequence) == (group, sequence)


def _list_ranks(ranks: Sequence[int], limit: int = _MAX_LISTED_RANKS) -> str:
    text = ", ".join(map(str, ranks[:limit]))
    if len(ranks) > limit:
        text += f" and {len(ranks) - limit} more"
    return f"rank{'s' if len(ranks) != 1 else ''} {text}"


def _conjugate_wait(ranks: Sequence[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"


@dataclass
class _Judge:
    """Tests of the evidence. Each `find_...` tests for one cause and returns the verdict, or None.

    Attributes:
        records: record of each rank's calls.
        members: recorded ranks of each group.
        waits: all waits, the longest first.
        departures: ranks whose calls differ from the calls that were due.
    """

    scene: Scene
    records: Mapping[int, CallRecord]
    members: Mapping[str, list[int]]
    waits: tuple[Wait, ...]
    departures: Mapping[int, Departure]

    def find_gone_or_stopped(self) -> Hang | None:
        """Find processes that are gone or stopped, unless all processes are gone."""
        alive = [item for item in self.scene.ranks.values() if item.process in ("running", "stopped")]
        if not alive:
            return None
        dead = [item for item in self.scene.ranks.values() if item.process == "gone" and not _has_finished(item)]
        if dead:
            # Prefer ranks that did not end because of another rank.
            first_dead = [item for item in dead if not _has_lost_peer(item)] or dead
            ranks = tuple(item.rank for item in first_dead)
            messages = [
                f"rank {item.rank} reported: {item.status.message}"
                for item in first_dead
                if item.status and item.status.message
            ]
            return self._blame("dead", ranks, f"the process of {_list_ranks(ranks)} is gone", messages)
        stopped = tuple(item.rank for item in alive if item.process == "stopped")
        if stopped:
            reason = f"the process of {_list_ranks(stopped)} is stopped (state T: SIGSTOP or a debugger)"
            pids = " ".join(str(self.scene.ranks[rank].pid) for rank in stopped if self.scene.ranks[rank].pid)
            return self._blame("stopped", stopped, reason, [f"kill -CONT {pids} resumes it"])
        return None

    def find_silent(self) -> Hang | None:
        """Find ranks that did not answer the request for their stack, unless a rank departed.

        A departure explains the hang better: a rank that waits inside a call of the GPU driver may be unable to answer,
        although another rank departed.
        """
        ranks = self._list_unanswered()
        if not ranks or self.departures:
            return None
        reason = f"{_list_ranks(ranks)} did not answer when asked for a stack"
        return self._blame("silent", ranks, reason, self._describe_positions(ranks))

    def find_readers(self) -> Hang | None:
        """Find ranks that wait for their samples."""
        ranks = tuple(wait.rank for wait in self.waits if wait.group == READER)
        if not ranks:
            return None
        details = []
        for rank in ranks:
            waiting = self.records[rank].waiting
            if waiting is not None and waiting.pid:
                state = _READER_STATES[self.scene.ranks[rank].reader]
                details.append(f"its reader, process {waiting.pid}, {state}")
        details += self._describe_positions(ranks)
        return self._blame("reader", ranks, f"{_list_ranks(ranks)} got no samples", details)

    def find_departed(self) -> Hang | None:
        """Find ranks whose calls differ from the calls that were due."""
        if not self.departures:
            return None
        ranks = tuple(sorted(self.departures))
        first = self.departures[ranks[0]]
        sentences = [f"rank {rank}: {self.departures[rank].sentence}" for rank in ranks]
        details = sentences[1:] + self._describe_positions(ranks)
        silent = tuple(rank for rank in self._list_unanswered() if rank not in ranks)
        if silent:
            details += [f"{_list_ranks(silent)} did not answer when asked for a stack"] + self._describe_stacks(silent)
        hang = self._blame(first.kind, ranks, sentences[0], details)
        return replace(hang, group=first.due.group, op=first.due.op, sequence=first.due.sequence)

    def find_busy(self) -> Hang | None:
        """Find awaited ranks that are not waiting, or that wait in a call that all other members have left."""
        awaited = {member for wait in self.waits for member in wait.on}
        blocked = {wait.rank for wait in self.waits if not self._is_abandoned(wait)}
        ranks = tuple(sorted(awaited - blocked))
        if not ranks:
            return None
        reason = f"{_list_ranks(ranks)} is in no collective while others wait"
        return self._blame("busy", ranks, reason, self._describe_positions(ranks))

    def find_absent(self) -> Hang | None:
        """Find ranks without any record."""
        ranks = tuple(sorted(set(range(self.scene.world)) - set(self.records)))
        if not ranks or not self.records:
            return None
        return self._blame("silent", ranks, f"{_list_ranks(ranks)} left no record, and all other ranks did", [])

    def find_cycle(self) -> Hang | None:
        """Find ranks that wait for each other in different calls."""
        awaited = {wait.rank: set(wait.on) for wait in self.waits if not wait.all_came}
        ranks = tuple(sorted(rank for rank in awaited if rank in _find_reachable(rank, awaited)))
        if not ranks:
            return None
        reason = (
            f"{_list_ranks(ranks)} wait for each other in different calls: one of them made an additional call or "
            "skipped one"
        )
        return self._blame("mismatched collective", ranks, reason, self._describe_positions(ranks))

    def find_network_fault(self) -> Hang | None:
        """Find a call that all members have joined and no member has left."""
        complete_waits = [wait for wait in self.waits if wait.all_came]
        if not complete_waits:
            return None
        longest = complete_waits[0]
        sentence = (
            f"{_list_ranks(self.members.get(longest.group, []))} all started {_format_call(longest)} and none has left "
            f"it for {longest.seconds:.0f} s: check the links between their hosts"
        )
        evidence = (sentence,) + tuple(self._describe_waits())
        return Hang("network", (), longest.group, longest.op, longest.sequence, self.waits, evidence)

    def _list_unanswered(self) -> tuple[int, ...]:
        return tuple(item.rank for item in self.scene.ranks.values() if item.answered is False)

    def _is_abandoned(self, wait: Wait) -> bool:
        """Return whether all other members have left the call of a waiting rank."""
        peers = [member for member in self.members.get(wait.group, []) if member != wait.rank]
        return bool(peers) and all(self.records[m].groups[wait.group].finished >= wait.sequence for m in peers)

    def _blame(self, kind: str, ranks: tuple[int, ...], reason: str, details: list[str]) -> Hang:
        """Return the verdict that `ranks` caused the hang, with a call in which another rank waits for them.

        The call is the one with the longest wait for `ranks`, or else with the longest wait in a group that
        contains one of them.

        Args:
            reason: first sentence of the evidence.
            details: further sentences.
        """
        outside_waits = [wait for wait in self.waits if wait.rank not in ranks]
        waits_for_ranks = [wait for wait in outside_waits if set(wait.on) & set(ranks)]
        waits_in_same_group = [wait for wait in outside_waits if set(self.members.get(wait.group, ())) & set(ranks)]
        evidence = [reason]
        group, op, sequence = "", "", 0
        if waits_for_ranks or waits_in_same_group:
            longest = (waits_for_ranks + waits_in_same_group)[0]
            group, op, sequence = longest.group, longest.op, longest.sequence
            waiters = [wait.rank for wait in outside_waits if wait.group == group]
            state = f"{_list_ranks(longest.on)} did not join it"
            if longest.all_came:
                state = "all joined it, and it is under way"
            subject = f"{_list_ranks(waiters)} {_conjugate_wait(waiters)} in {_format_call(longest)}"
            evidence.append(f"{subject} for {longest.seconds:.0f} s: {state}")
        else:
            launch = self._find_unmatched_launch(ranks)
            if launch is not None:
                rank, call, absent = launch
                group, op, sequence = call.group, call.op, call.sequence
                evidence.append(
                    f"rank {rank} launched {op} (call {sequence} of {group}), {_list_ranks(absent)} did not join it"
                )
        evidence += details + self._describe_stacks(ranks)
        evidence += [line for line in self._describe_waits() if line not in evidence]
        return Hang(kind, ranks, group, op, sequence, self.waits, tuple(evidence))

    def _find_unmatched_launch(self, ranks: tuple[int, ...]) -> tuple[int, Call, list[int]] | None:
        """Find the first call that another rank launched and that some of `ranks` are members of but did not launch.

        On devices this call hangs, although the hosts, which run ahead of their devices, do not wait in a call.

        Returns:
            The other rank, the call and the members of `ranks` that did not launch it.
        """
        started: dict[str, dict[int, int]] = {}
        for rank in ranks:
            if rank in self.records:
                for group, counts in self.records[rank].groups.items():
                    started.setdefault(group, {})[rank] = counts.started
        for rank in sorted(self.records.keys() - set(ranks)):
            for call in self.records[rank].calls:
                absent = [r for r, count in started.get(call.group, {}).items() if count < call.sequence]
                if absent:
                    return rank, call, absent
        return None

    def _describe_waits(self) -> list[str]:
        """Return a line per call in which ranks wait, with the awaited ranks, the longest wait first."""
        waiters: dict[tuple[str, int, tuple[int, ...]], list[int]] = {}
        for wait in self.waits:
            key = (wait.group, wait.sequence, () if wait.all_came else wait.on)
            waiters.setdefault(key, []).append(wait.rank)
        lines = []
        for (group, sequence, awaited), ranks in list(waiters.items())[:_MAX_WAIT_LINES]:
            target = f" for {_list_ranks(awaited)}" if awaited else ""
            lines.append(f"{_list_ranks(sorted(ranks))} {_conjugate_wait(ranks)}{target} in {group} call {sequence}")
        return lines

    def _describe_positions(self, ranks: tuple[int, ...]) -> list[str]:
        return [
            f"rank {rank} is at {describe_position(self.scene.ranks[rank])}"
            for rank in ranks
            if rank in self.scene.ranks and not self._is_foreign(rank)
        ]

    def _is_foreign(self, rank: int) -> bool:
        """Return whether a rank runs another trainer, which writes no position."""
        return self.scene.ranks[rank].is_foreign and self.scene.ranks[rank].status is None

    def _describe_stacks(self, ranks: tuple[int, ...]) -> list[str]:
        stacks = [(rank, self.scene.ranks[rank].stack) for rank in ranks if rank in self.scene.ranks]
        return [f"stack of rank {rank}: {' < '.join(stack[:4])}" for rank, stack in stacks if stack]


def _has_finished(evidence: RankEvidence) -> bool:
    return evidence.status is not None and evidence.status.phase == "done"


def _format_call(wait: Wait) -> str:
    return f"{wait.op or 'call'} (call {wait.sequence} of {wait.group})"


def describe_position(evidence: RankEvidence) -> str:
    """Describe the position of a rank: step and action in training, otherwise its phase and step."""
    record, status = evidence.record, evidence.status
    if status:
        phase = status.phase
    else:
        phase = "an unknown phase"
    if record is None or not record.action or phase not in ("train", "an unknown phase"):
        return f"{phase}, step {status.step if status else 0}"
    text = f"step {record.step}, {record.action}"
    if record.microbatch >= 0:
        text += f", chunk {record.chunk}, micro-batch {record.microbatch}"
    return text


def _find_reachable(rank: int, awaited: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks for which `rank` waits, directly or through others."""
    reachable: set[int] = set()
    frontier = set(awaited.get(rank, ()))
    while frontier:
        reachable |= frontier
        frontier = {target for source in frontier for target in awaited.get(source, ())} - reachable
    return reachable
