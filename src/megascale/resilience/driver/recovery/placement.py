"""Placement: which nodes hold which ranks, and the way there: every node has stopped before any starts."""

from __future__ import annotations

import re

from megascale.core.events import Event
from megascale.errors import EXIT_BAD_DATA
from megascale.resilience.driver.job_files import unknown_nodes
from megascale.resilience.driver.nodes.nodes import Nodes, Note
from megascale.resilience.driver.recovery import escalation
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.recovery import Recovery
from megascale.resilience.driver.recovery.self_checks import SelfChecks
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED, NodeState, Phase
from megascale.resilience.driver.state.transitions import JobEvent

ASK_AGAIN = 5.0  # seconds between requests for nodes: one may be refused at once
TOGETHER = 10.0  # seconds to wait at the first start for all that were asked for, spares too


def _natural(name: str) -> list[tuple[int, str]]:
    """n2 before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


class Placement:
    """Args:
    job, nodes, attempts: what is placed where, stopped and started.
    recovery: takes out nodes that do not stop.
    checks: what a stop may lead to.
    settings: in force.
    note: writes an event down.
    asked: nodes in rank order, as resilience.placement has them; empty: in the order of their names.
    """

    def __init__(
        self,
        job: Job,
        nodes: Nodes,
        attempts: Attempts,
        recovery: Recovery,
        checks: SelfChecks,
        settings: RunningSettings,
        note: Note,
        asked: tuple[str, ...] = (),
    ) -> None:
        self._job, self._nodes, self._attempts, self._recovery, self._checks = job, nodes, attempts, recovery, checks
        self._settings, self._note, self._asked = settings, note, asked
        self._told_of_asked = False
        self._unreached: dict[str, float] = {}  # nodes that may still run ranks, and since when that holds up a start
        self._there = ""  # what was there when nodes were last asked for

    def check_stopped(self, now: float) -> None:
        """Whether all nodes have stopped; then on to the goal."""
        job, limits, order = self._job.state, self._settings.limits, self._attempts.order
        final = job.goal in ENDED or job.goal is Phase.PAUSED
        waited = [self._nodes[name] for name in job.placement if self._nodes[name].acknowledged != order]
        limit = (limits.grace_period if job.save else 0.0) + 2 * limits.window
        for node in waited:
            # One that was cut off and is back has its time from then on.
            if node.state is NodeState.UP and now - max(self._job.entered, node.joined) > limit:
                self._nodes.lose(node, f"{node.name} did not stop its processes within {limit:g} s")
                if not final:
                    self._recovery.recover_node(node.name, evict=True)
        # One that is lost runs nothing any more (it was fenced) and is not waited for; a joining one may still run.
        if any(node.state is NodeState.UP for node in waited):
            return
        if self._job.state.goal is not Phase.STARTING:  # recover_node may have ended the job
            self._job.apply(JobEvent.STOPPED)
            if self._job.phase is Phase.DIAGNOSING:
                self._checks.begin()
        elif waited or any(not self._nodes[name].remains for name in job.placement):
            self._job.apply(JobEvent.GAP)  # one that has stopped may be lost since, while others may still run
        elif not self._others_may_run(now):
            self._attempts.begin(now)

    def _others_may_run(self, now: float) -> bool:
        """Whether a node that nobody reaches may still run ranks that are to start elsewhere."""
        held = {node.name for node in self._nodes.held(now)}
        if freed := tuple(sorted(self._unreached.keys() - held)):
            waited = now - min(self._unreached[name] for name in freed)
            text = f"what ran on {', '.join(freed)} has ended its ranks for certain: waited {waited:.1f} s for that"
            self._note(Event.RANKS_FENCED, nodes=freed, evidence=(text,))
        self._unreached = {name: self._unreached.get(name, now) for name in held}
        return bool(held)

    def place(self, now: float) -> None:
        """Give every rank a node, when there are enough: the old ones where they still serve, spares in the gaps."""
        self._evict_what_was_asked_for()
        if self._job.phase is not Phase.WAITING:
            return
        job, nodes, limits = self._job.state, self._nodes, self._settings.limits
        wanted, waited = limits.nodes, now - self._job.entered
        free = [nodes[n] for n in sorted(nodes.names(), key=self._order) if n not in job.placement]
        lost = {nodes.switch(n) for n in job.placement if n not in nodes or not nodes[n].usable} - {""}
        # Those that passed first, and those under the switch of what they replace.
        free = sorted((n for n in free if n.usable), key=lambda n: (not n.tested, nodes.switch(n.name) not in lost))
        kept = [nodes.known(name) for name in job.placement]
        usable = sum(n.keeps for n in kept) + len(free)
        coming = nodes.requests or nodes.is_coming(nodes.all())
        if nodes.is_coming(kept):
            return  # the recovery action is under way
        if not kept and coming and (usable < wanted or waited < TOGETHER or self._asked_are_coming()):
            return  # nodes that start together are placed in the order of their names, or in the one asked for
        if not kept and usable >= wanted and self._must_wait_for_asked(waited):
            return
        data, count = job.data, len(kept) or wanted
        if usable >= wanted:
            data, count = wanted * job.ranks_per_node // self._attempts.model_ranks, wanted
        if usable < count:
            if coming:
                return
            if limits.replenish_wait and waited < limits.replenish_wait:
                self._ask_for(count - usable, f"{usable} of {count} nodes are there", now)
                return
            sizes = [
                size
                for size in escalation.data_sizes(self._settings.config, job.ranks_per_node, usable)
                if size[0] < job.data
            ]
            if not sizes:
                self._attempts.fail(f"{usable} usable nodes are too few and none came: the job needs {count}")
                return
            data, count = sizes[0]
            why = f"{usable} usable nodes: data parallelism goes from {job.data} to {data} on {count} nodes"
            self._recovery.shrink(why)
        in_file = len(self._asked) == count > len(kept)  # a first start, or all the nodes again that the file is for
        if in_file:
            taken = set(self._asked)
            free = [n for n in nodes.all() if n.usable and n.name not in taken]
            free.sort(key=lambda n: (not n.tested, _natural(n.name)))
        wished = [nodes.get(name) for name in self._asked] if in_file else list(kept)
        chosen = [n if n is not None and n.usable else None for n in wished]
        chosen += [None] * (count - len(chosen))
        for i, name in enumerate(job.placement):  # a drained node keeps its ranks where no other can take them
            if wished == kept and kept[i].keeps and chosen[i] is None and chosen.count(None) > len(free):
                chosen[i] = nodes[name]
        if count < len(chosen):
            chosen = [n for n in chosen if n is not None]
        filled = [n if n is not None else free.pop(0) for n in chosen[:count] if n is not None or free]
        names = tuple(n.name for n in filled)
        self._there = ""
        self._attempts.stop(JobEvent.PLACED, job.why or "first start", placement=names, data=data)

    def _order(self, name: str) -> tuple[str, list[tuple[int, str]]]:
        """Nodes under one switch are neighbours."""
        return self._nodes.switch(name), _natural(name)

    def _must_wait_for_asked(self, waited: float) -> bool:
        """Whether nodes of the placement are unheard of that may come yet; ends the job where they should have.

        A cluster that knows its nodes beforehand has them all in its list: one that does not come is replaced.
        """
        unknown = [name for name in self._asked if name not in self._nodes]
        if not unknown or self._nodes.cluster.foreseen(len(self._asked)):
            return False
        limits = self._settings.limits
        if waited >= limits.replenish_wait:
            there = sorted(self._nodes.names(), key=_natural)
            self._attempts.fail(unknown_nodes(str(limits.placement), unknown, there), EXIT_BAD_DATA)
        elif not self._told_of_asked:
            self._told_of_asked = True
            why = f"waiting up to {limits.replenish_wait:g} s for {', '.join(unknown[:5])} of resilience.placement"
            self._note(Event.NODE_REQUESTED, evidence=(why,))
        return True

    def _asked_are_coming(self) -> bool:
        """Whether a node that the placement names may still come."""
        seen = [self._nodes.get(name) for name in self._asked]
        return self._nodes.is_coming(node for node in seen if node) or bool(self._nodes.requests and None in seen)

    def _evict_what_was_asked_for(self) -> None:
        """Nodes that a person wanted out, now that their trainers have saved."""
        while self._job.phase is Phase.WAITING and self._job.state.evicting:
            *rest, name = self._job.state.evicting
            self._job.apply(JobEvent.EVICTING, evicting=tuple(rest))
            self._recovery.recover_node(name, evict=True)

    def _ask_for(self, missing: int, there: str, now: float) -> None:
        if now - self._nodes.asked > min(ASK_AGAIN, self._settings.limits.window):
            self._nodes.asked = now
            if there != self._there:
                self._there = there
                self._note(Event.NODE_REQUESTED, evidence=(f"{there}; asking for {missing}",))
            for _ in range(missing):
                self._nodes.ask_for_one()
