"""Placement: which nodes hold which ranks, stopping, starting, testing, and what people ask for nodes."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

from megascale.core.events import Event
from megascale.resilience.driver import escalation
from megascale.resilience.driver.escalation import Use
from megascale.resilience.driver.job_state import ENDED, Phase
from megascale.resilience.driver.nodes import Node, NodeState
from megascale.resilience.driver.recovery import Recovery
from megascale.resilience.protocol.agent_messages import Diagnosed

TOGETHER = 10.0  # seconds to wait at the first start for all that were asked for, spares too


def _natural(name: str) -> list[tuple[int, str]]:
    """n2 before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


class Placement(Recovery):
    """A part of Driver."""

    # stopping -------------------------------------------------------------------------------------------------------

    def suspend(self, goal: Phase, why: str, *, save: bool = False, **changes: Any) -> None:
        """Stop all trainers, then go to `goal`."""
        if self.job.phase is Phase.PAUSED or (self.job.phase is Phase.WAITING and goal is not Phase.STARTING):
            self.enter(goal, why=why, **changes)
            return
        self.order += 1
        self.enter(Phase.STOPPING, goal=goal, save=save, why=why, **changes)
        for node in self.nodes.values():
            self.send_stop(node)

    def send_stop(self, node: Node) -> None:
        """Have a node end its trainers (and self-checks) and say so."""
        node.checking = 0
        save = self.job.save and self.job.phase is Phase.STOPPING
        how = {"how": "save" if save else "kill", "grace_period": self.limits.grace_period, "forget": self.job.distrust}
        self.order_to(node, do="stop", order=self.order, **how)

    def check_stopped(self, now: float) -> None:
        """Whether all nodes have stopped; then on to the goal."""
        job, final = self.job, self.job.goal in ENDED or self.job.goal is Phase.PAUSED
        waited = [self.nodes[name] for name in job.placement if self.nodes[name].acknowledged != self.order]
        limit = (self.limits.grace_period if job.save else 0.0) + 2 * self.limits.window
        for node in waited:
            if node.state is NodeState.UP and now - self._entered > limit:
                self.lose(node, f"{node.name} did not stop its processes within {limit:g} s")
                if not final:
                    self.recover_node(node.name, evict=True)
        # One that is lost runs nothing any more (it was fenced) and is not waited for; a joining one may still run.
        if any(node.state is NodeState.UP for node in waited):
            return
        if job.goal is not Phase.STARTING:
            self.enter(job.goal)
            if job.goal is Phase.DIAGNOSING:
                self._begin_diagnosis()
        elif waited:
            self.enter(Phase.WAITING)
        else:
            self._begin_attempt(now)

    # starting -------------------------------------------------------------------------------------------------------

    def place(self, now: float) -> None:
        """Give every rank a node, when there are enough: the old ones where they still serve, spares in the gaps."""
        while self._to_evict:
            self.recover_node(self._to_evict.pop(), evict=True)
        job, limits = self.job, self.limits
        wanted = limits.nodes
        free = [self.nodes[n] for n in sorted(self.nodes, key=_natural) if n not in job.placement]
        free = sorted((n for n in free if n.usable), key=lambda n: not n.tested)  # those that passed first
        kept = [self.nodes[name] for name in job.placement]
        usable = sum(n.usable for n in kept) + len(free)
        coming = self._requests or any(n.state is NodeState.JOINING for n in self.nodes.values())
        if any(n.state is NodeState.JOINING for n in kept):
            return  # the recovery action is under way
        if not kept and coming and (usable < wanted or now - self._entered < TOGETHER):
            return  # nodes that start together are placed in the order of their names
        data, count = job.data, len(kept) or wanted
        if usable >= wanted:
            data, count = wanted * job.ranks_per_node // self._model, wanted
        if usable < count:
            if coming:
                return
            if limits.replenish_wait and now - self._entered < limits.replenish_wait:
                if now - self._asked > limits.window:
                    self._asked = now
                    self.note(
                        Event.NODE_REQUESTED,
                        evidence=(f"{usable} of {count} nodes are there; asking for {count - usable}",),
                    )
                    for _ in range(count - usable):
                        self._ask_for_node()
                return
            sizes = [s for s in escalation.data_sizes(self.config, job.ranks_per_node, usable) if s[0] < job.data]
            if not sizes:
                self.fail(f"{usable} usable nodes are too few and none came: the job needs {count}")
                return
            data, count = sizes[0]
            why = f"{usable} usable nodes: data parallelism goes from {job.data} to {data} on {count} nodes"
            self.uses.append(Use(time.monotonic(), "shrink", ""))
            self.note(Event.RECOVERY_ACTION, action="shrink", evidence=(why,))
        placement = [n if n.usable else None for n in kept]
        placement += [None] * (count - len(placement))
        if count < len(placement):
            placement = [n for n in placement if n is not None]
        filled = [n if n is not None else free.pop(0) for n in placement[:count] if n is not None or free]
        names = tuple(n.name for n in filled)
        self.job = replace(job, placement=names, data=data)
        self.suspend(Phase.STARTING, job.why or "first start")

    @property
    def _model(self) -> int:
        return self.config.parallel.tensor * self.config.parallel.pipeline

    def _begin_attempt(self, now: float) -> None:
        first = self.nodes[self.job.placement[0]]
        self.started, self._first_bad, self._first_steps, self._unexplained = now, None, {}, False
        # Agents may know more than a journal that was lost: a number that they have had starts nothing.
        attempt = 1 + max(self.job.attempt, *(node.attempt for node in self.nodes.values()))
        self.enter(Phase.STARTING, attempt=attempt, master=(first.address, first.port))
        for node in self.nodes.values():
            node.forget_attempt()
        for name in self.job.placement:
            self.send_start(self.nodes[name])
        self.job = replace(self.job, fresh=(), distrust=False)
        self.note(
            Event.ATTEMPT_STARTED,
            nodes=self.job.placement,
            evidence=(
                f"attempt {self.job.attempt}: {self.job.world} ranks on {', '.join(self.job.placement)}, "
                f"data parallelism {self.job.data}",
            ),
        )

    def send_start(self, node: Node) -> None:
        """Have a node start its ranks of the current attempt."""
        job = self.job
        ranks = job.ranks(node.name)
        words = list(self.words)
        if job.data * self._model != self.limits.nodes * job.ranks_per_node:
            words.append(f"--parallel.data={job.data}")
        node.last_seen = max(node.last_seen, self.started)
        self.order_to(
            node,
            do="start",
            attempt=job.attempt,
            job=job.name,
            ranks=list(ranks),
            world=job.world,
            master=list(job.master),
            words=words,
            env={},
            fresh=node.name in job.fresh,
            forward=0 if 0 in ranks else None,
            state=job.to_json(),
        )

    # self-checks ----------------------------------------------------------------------------------------------------

    def _begin_diagnosis(self) -> None:
        self.order += 1
        for node in self.nodes.values():
            node.report = None
            self.order_to(node, do="diagnose", order=self.order, grace_period=self.limits.grace_period)

    def check_diagnosed(self, now: float) -> None:
        """When all results are there: take out the nodes that failed, start again."""
        asked = [n for n in self.nodes.values() if n.usable]
        late = now - self._entered > self.limits.grace_period + self.limits.window
        if any(n.report is None for n in asked) and not late:
            return
        for node in asked:
            self.handle_report(node, node.report or Diagnosed(self.order, 1, said="no result in time"))
        if self.job.phase is Phase.DIAGNOSING:
            self.enter(Phase.WAITING)

    def handle_report(self, node: Node, report: Diagnosed) -> None:
        """Take in the result of a node's self-checks; one that failed is taken out."""
        said = report.said.strip()[-500:]
        passed = not report.code
        node.tested = time.time() if passed else 0.0
        verdict = "passed" if passed else f"failed: {said or 'see its report'}"
        role = "" if node.name in self.job.placement else "spare "
        self.note(
            Event.NODE_DIAGNOSED,
            nodes=(node.name,),
            action="none" if passed else "evict",
            evidence=(f"self-checks of {role}{node.name} {verdict}",),
            report=report.report,
        )
        if not passed:
            self.reasons[node.name] = f"self-checks {verdict}"
            self.recover_node(node.name, evict=True)

    # what people ask ------------------------------------------------------------------------------------------------

    def evict(self, name: str, why: str) -> None:
        """Take a node out; its ranks move."""
        node, phase = self.nodes[name], self.job.phase
        self.note(Event.EVICTION_ASKED, nodes=(name,), evidence=(why,))
        if name in self.job.placement and phase is Phase.RUNNING:
            self.reasons[name] = f"a person: {why}"
            self._to_evict.append(name)  # nothing is broken: the trainers save first
            self.suspend(Phase.WAITING, f"evict {name}: {why}", save=True)
        elif name in self.job.placement and phase is Phase.STARTING:
            self.recover((name,), frozenset({name}))
        else:
            self._take_out(node, True, why)

    def cordon(self, name: str, on: bool, why: str) -> None:
        """Keep a node from getting anything new, or allow it again (an evicted one too)."""
        node = self.nodes[name]
        node.cordoned = on
        self.note(Event.NODE_CORDONED if on else Event.NODE_UNCORDONED, nodes=(name,), evidence=(why,))
        if not on and node.state in (NodeState.EVICTED, NodeState.LOST):
            self.start_agent(node, why)
        self.set_state(node, node.state, node.why)

    def pause(self, why: str) -> bool:
        """Let the trainers save and stop; the nodes stay. False if there is nothing to pause now."""
        if self.job.phase not in (Phase.WAITING, Phase.STARTING, Phase.RUNNING):
            return False
        self.note(Event.PAUSED, evidence=(why,))
        self.suspend(Phase.PAUSED, why, save=self.job.phase is Phase.RUNNING)
        return True

    def resume(self, why: str) -> bool:
        """Go on after a pause. False if the job is not paused."""
        if self.job.phase is not Phase.PAUSED:
            return False
        self.note(Event.CONTINUED, evidence=(why,))
        self.enter(Phase.WAITING, why=why)
        return True
