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
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from megascale import config as configuration
from megascale.core.calls import READER, Call, CallRecord
from megascale.core.exit_record import ExitKind
from megascale.core.layout import Layout, lay_out
from megascale.core.untrusted_files import is_small_file
from megascale.errors import MegascaleError
from megascale.observe.hang.call_waits import (
    Wait,
    are_calls_on_devices,
    list_waits,
    select_own_records,
    select_records,
)
from megascale.observe.hang.departure import Departure, find_departures
from megascale.observe.hang.evidence import collect_evidence
from megascale.observe.hang.scene import RankEvidence, Scene
from megascale.observe.hang.sentences import (
    conjugate_wait,
    describe_position,
    describe_positions,
    describe_stacks,
    describe_waits,
    format_call,
    list_ranks,
)

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
_READER_STATES = {"running": "runs", "stopped": "is stopped", "gone": "is gone", "unknown": "is on another host"}


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
        subjects.append(list_ranks(hang.ranks, limit=len(hang.ranks)))
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
    records = select_records(scene)
    members: dict[str, list[int]] = {}
    for rank in sorted(records):
        for group in records[rank].groups:
            members.setdefault(group, []).append(rank)
    waits = tuple(sorted(list_waits(scene, records, members), key=lambda wait: -wait.seconds))
    has_dead_process = any(evidence.process in ("gone", "stopped") for evidence in scene.ranks.values())
    if scene.moving and not has_dead_process:
        sentence = f"{list_ranks(sorted(scene.moving))} made progress while watched"
        return Hang("none", waits=waits, evidence=(sentence,))
    judge = _Judge(scene, records, members, waits=waits, departures=_find_departures(scene, records, layout))
    for find_cause in (
        judge.find_lost_processes,
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


def _has_lost_peer(evidence: RankEvidence) -> bool:
    """Return whether a rank ended because another rank had ended or hung."""
    if evidence.status is not None:
        record = evidence.status.exit
    else:
        record = None
    return record is not None and record.kind is ExitKind.LOST_PEER


def _find_departures(scene: Scene, records: Mapping[int, CallRecord], layout: Layout | None) -> dict[int, Departure]:
    """Return the departures by rank.

    The records of this package's recorder are used if all ranks have one, because flight records lack steps and the
    calls in replayed CUDA graphs.
    """
    recorder_records = select_own_records(scene)
    if not recorder_records.keys() >= records.keys():
        return find_departures(records, layout)
    steps_ahead = 0
    if are_calls_on_devices(scene):
        steps_ahead = 1  # the host is up to one step ahead of the hanging call
    return find_departures(recorder_records, layout, steps_ahead)


class _UnmatchedLaunch(NamedTuple):
    """A call that `rank` launched, and members of its group that did not launch it."""

    rank: int
    call: Call
    absent_ranks: list[int]


@dataclass
class _Judge:
    """Tests of the evidence. Each `find_...` tests for one cause and returns the verdict, or None.

    Attributes:
        records: record of each rank's calls.
        members: ranks with a record, by group.
        waits: all waits, the longest first.
        departures: departures of ranks whose calls differ from the calls that were due, by rank.
    """

    scene: Scene
    records: Mapping[int, CallRecord]
    members: Mapping[str, list[int]]
    waits: tuple[Wait, ...]
    departures: Mapping[int, Departure]

    def find_lost_processes(self) -> Hang | None:
        """Find processes that are gone or stopped, unless all processes are gone."""
        all_evidence = list(self.scene.ranks.values())
        if not any(evidence.process in ("running", "stopped") for evidence in all_evidence):
            return None
        dead = [evidence for evidence in all_evidence if evidence.process == "gone" and not _has_finished(evidence)]
        if dead:
            # Prefer ranks that did not end because of another rank.
            blamed = [evidence for evidence in dead if not _has_lost_peer(evidence)] or dead
            ranks = tuple(evidence.rank for evidence in blamed)
            messages = [
                f"rank {evidence.rank} reported: {evidence.status.message}"
                for evidence in blamed
                if evidence.status and evidence.status.message
            ]
            return self._blame("dead", ranks, f"the process of {list_ranks(ranks)} is gone", messages)
        stopped = tuple(evidence.rank for evidence in all_evidence if evidence.process == "stopped")
        if stopped:
            reason = f"the process of {list_ranks(stopped)} is stopped (state T: SIGSTOP or a debugger)"
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
        reason = f"{list_ranks(ranks)} did not answer when asked for a stack"
        return self._blame("silent", ranks, reason, describe_positions(self.scene, ranks))

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
        details += describe_positions(self.scene, ranks)
        return self._blame("reader", ranks, f"{list_ranks(ranks)} got no samples", details)

    def find_departed(self) -> Hang | None:
        """Find ranks whose calls differ from the calls that were due."""
        if not self.departures:
            return None
        ranks = tuple(sorted(self.departures))
        first = self.departures[ranks[0]]
        sentences = [f"rank {rank}: {self.departures[rank].sentence}" for rank in ranks]
        details = sentences[1:] + describe_positions(self.scene, ranks)
        unanswered = tuple(rank for rank in self._list_unanswered() if rank not in ranks)
        if unanswered:
            details.append(f"{list_ranks(unanswered)} did not answer when asked for a stack")
            details += describe_stacks(self.scene, unanswered)
        hang = self._blame(first.kind, ranks, sentences[0], details)
        return replace(hang, group=first.due.group, op=first.due.op, sequence=first.due.sequence)

    def find_busy(self) -> Hang | None:
        """Find awaited ranks that are not waiting, or that wait in a call that all other members have left."""
        awaited = {member for wait in self.waits for member in wait.on}
        waiting = {wait.rank for wait in self.waits if not self._is_abandoned(wait)}
        ranks = tuple(sorted(awaited - waiting))
        if not ranks:
            return None
        reason = f"{list_ranks(ranks)} is in no collective while others wait"
        return self._blame("busy", ranks, reason, describe_positions(self.scene, ranks))

    def find_absent(self) -> Hang | None:
        """Find ranks without any record."""
        ranks = tuple(sorted(set(range(self.scene.world)) - set(self.records)))
        if not ranks or not self.records:
            return None
        return self._blame("silent", ranks, f"{list_ranks(ranks)} left no record, and all other ranks did", [])

    def find_cycle(self) -> Hang | None:
        """Find ranks that wait for each other in different calls."""
        awaited_by_rank = {wait.rank: set(wait.on) for wait in self.waits if not wait.all_came}
        ranks = tuple(sorted(rank for rank in awaited_by_rank if rank in _find_awaited(rank, awaited_by_rank)))
        if not ranks:
            return None
        reason = (
            f"{list_ranks(ranks)} wait for each other in different calls: one of them made an additional call or "
            "skipped one"
        )
        return self._blame("mismatched collective", ranks, reason, describe_positions(self.scene, ranks))

    def find_network_fault(self) -> Hang | None:
        """Find a call that all members have joined and no member has left."""
        complete_waits = [wait for wait in self.waits if wait.all_came]
        if not complete_waits:
            return None
        longest = complete_waits[0]
        sentence = (
            f"{list_ranks(self.members.get(longest.group, []))} all started {format_call(longest)} and none has left "
            f"it for {longest.seconds:.0f} s: check the links between their hosts"
        )
        evidence = (sentence,) + tuple(describe_waits(self.waits))
        return Hang(
            "network",
            group=longest.group,
            op=longest.op,
            sequence=longest.sequence,
            waits=self.waits,
            evidence=evidence,
        )

    def _list_unanswered(self) -> tuple[int, ...]:
        return tuple(evidence.rank for evidence in self.scene.ranks.values() if evidence.answered is False)

    def _is_abandoned(self, wait: Wait) -> bool:
        """Return whether all other members with a record have left the call of a waiting rank."""
        peers = [member for member in self.members.get(wait.group, []) if member != wait.rank]
        return bool(peers) and all(self.records[peer].groups[wait.group].finished >= wait.sequence for peer in peers)

    def _blame(self, kind: str, ranks: tuple[int, ...], reason: str, details: list[str]) -> Hang:
        """Return the verdict that `ranks` caused the hang, with a call in which another rank waits for them.

        The call is the one with the longest wait for `ranks`. Without such a wait, it is the call with the longest wait
        in a group that contains one of `ranks`, or a call that another rank launched on its device.

        Args:
            reason: first sentence of the evidence.
            details: further sentences.
        """
        outside_waits = [wait for wait in self.waits if wait.rank not in ranks]
        waits_for_ranks = [wait for wait in outside_waits if set(wait.on) & set(ranks)]
        group_waits = [wait for wait in outside_waits if set(self.members.get(wait.group, ())) & set(ranks)]
        evidence = [reason]
        call: Call | Wait | None = None
        if waits_for_ranks or group_waits:
            longest = (waits_for_ranks + group_waits)[0]
            call = longest
            waiters = [wait.rank for wait in outside_waits if wait.group == longest.group]
            state = f"{list_ranks(longest.on)} did not join it"
            if longest.all_came:
                state = "all joined it, and it is under way"
            subject = f"{list_ranks(waiters)} {conjugate_wait(waiters)} in {format_call(longest)}"
            evidence.append(f"{subject} for {longest.seconds:.0f} s: {state}")
        else:
            launch = self._find_unmatched_launch(ranks)
            if launch is not None:
                call = launch.call
                evidence.append(
                    f"rank {launch.rank} launched {call.op} (call {call.sequence} of {call.group}), "
                    f"{list_ranks(launch.absent_ranks)} did not join it"
                )
        evidence += details + describe_stacks(self.scene, ranks)
        evidence += [line for line in describe_waits(self.waits) if line not in evidence]
        if call is None:
            return Hang(kind, ranks, group="", op="", sequence=0, waits=self.waits, evidence=tuple(evidence))
        return Hang(
            kind,
            ranks,
            group=call.group,
            op=call.op,
            sequence=call.sequence,
            waits=self.waits,
            evidence=tuple(evidence),
        )

    def _find_unmatched_launch(self, ranks: tuple[int, ...]) -> _UnmatchedLaunch | None:
        """Find the first call that another rank launched and that some of `ranks` are members of but did not launch.

        On devices this call hangs, although the hosts, which run ahead of their devices, do not wait in a call.
        """
        # Number of started calls, by group and rank.
        started: dict[str, dict[int, int]] = {}
        for rank in ranks:
            if rank in self.records:
                for group, counts in self.records[rank].groups.items():
                    started.setdefault(group, {})[rank] = counts.started
        for rank in sorted(self.records.keys() - set(ranks)):
            for call in self.records[rank].calls:
                counts_of_members = started.get(call.group, {})
                absent_ranks = [member for member, count in counts_of_members.items() if count < call.sequence]
                if absent_ranks:
                    return _UnmatchedLaunch(rank, call, absent_ranks)
        return None


def _has_finished(evidence: RankEvidence) -> bool:
    return evidence.status is not None and evidence.status.phase == "done"


def _find_awaited(rank: int, awaited_by_rank: Mapping[int, set[int]]) -> set[int]:
    """Return the ranks for which `rank` waits, directly or through others."""
    awaited: set[int] = set()
    frontier = set(awaited_by_rank.get(rank, ()))
    while frontier:
        awaited |= frontier
        frontier = {target for source in frontier for target in awaited_by_rank.get(source, ())} - awaited
    return awaited
