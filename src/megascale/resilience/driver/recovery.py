"""Recovery: starting and asking for agents, noticing that they are gone, and the recovery action for each fault."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.config import Config, ResilienceConfig
from megascale.core.events import Event
from megascale.core.preflight import wave
from megascale.errors import EXIT_FAILED
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.driver import escalation, progress
from megascale.resilience.driver.escalation import Situation, Use
from megascale.resilience.driver.job_state import ENDED, JobState, Phase
from megascale.resilience.driver.journal import Entry
from megascale.resilience.driver.lasting_journal import LastingJournal
from megascale.resilience.driver.nodes import Node, NodeState
from megascale.resilience.rules.offenders import repeated
from megascale.resilience.rules.verdicts import Verdict
from megascale.resilience.rules.view import View

# Agents that are started and have not come: each then imports everything for its trainers, and many at once on few
# cores all come too late.
WAVE = wave(os.cpu_count() or 1)
JOIN = 60.0  # seconds in which an agent that was started must come
CALM = 3.0  # seconds that training must run before spares are looked after
REFILL = 30.0  # seconds between requests for nodes in place of spares


class Recovery:
    """A part of Driver."""

    run_folder: Path
    config: Config
    limits: ResilienceConfig
    cluster: Cluster
    words: list[str]
    journal: LastingJournal
    job: JobState
    nodes: dict[str, Node]
    uses: list[Use]
    incidents: list[tuple[float, str, str]]
    reasons: dict[str, str]  # why each node was last blamed
    order: int
    started: float
    _entered: float
    _asked: float = 0.0
    _requests: int = 0
    _on_their_way: int = 0  # agents started that have not come yet
    _unexplained: bool = False  # the last recovery blamed no node so far
    _first_bad: float | None
    _to_evict: list[str]
    _first_steps: dict[int, int]
    _checks: int  # self-checks that spares were asked for
    _refilled: list[float]  # when new spares were asked for

    def note(self, kind: Event | str, **about: Any) -> Entry:
        raise NotImplementedError

    def enter(self, phase: Phase, **changes: Any) -> None:
        raise NotImplementedError

    def set_state(self, node: Node, state: NodeState, why: str) -> None:
        raise NotImplementedError

    def fail(self, why: str, code: int = EXIT_FAILED) -> None:
        raise NotImplementedError

    def spawn(self, work: Any) -> None:
        raise NotImplementedError

    def act(self, verdicts: list[Verdict]) -> None:
        raise NotImplementedError

    def view(self, now: float) -> View:
        raise NotImplementedError

    def suspend(self, goal: Phase, why: str, *, save: bool = False, **changes: Any) -> None:
        raise NotImplementedError

    # nodes ----------------------------------------------------------------------------------------------------------

    def begin_nodes(self, now: float) -> None:
        """At the driver's start: have agents on as many nodes as the job and its spares take."""
        wanted = self.limits.nodes + self.limits.spares
        for info in self.cluster.nodes():
            node = self.nodes.setdefault(info.name, Node(info.name, info.address))
            if node.state is NodeState.EVICTED or wanted <= 0:
                continue
            if info.running:
                wanted -= 1
                node.state, node.deadline = NodeState.JOINING, now + JOIN
            elif info.alive:
                wanted -= 1
                self.start_agent(node, "started with the driver")
        for _ in range(wanted):
            self._ask_for_node()
        self._asked = now

    def start_agent(self, node: Node, why: str) -> None:
        """Start a node's agent (again), in the background."""
        self.set_state(node, NodeState.JOINING, why)
        node.deadline = float("inf")  # until it is started
        if node.channel is not None:
            node.channel.close()
            node.channel = None
        self.spawn(self._start_agent(node))

    async def _start_agent(self, node: Node) -> None:
        async with self._wave():
            started = await self.cluster.start_agent(node.name)
            # Another start of the same node may be waiting for its turn; whichever comes last has the deadline.
            node.deadline = time.monotonic() + JOIN if started else 0.0  # it will not come
            await self._coming(node)

    @contextlib.asynccontextmanager
    async def _wave(self) -> AsyncIterator[None]:
        """Room among the agents that are on their way."""
        while self._on_their_way >= WAVE:
            await asyncio.sleep(0.05)
        self._on_their_way += 1
        try:
            yield
        finally:
            self._on_their_way -= 1

    async def _coming(self, node: Node) -> None:
        """Until an agent that was started has come, or is not waited for any more (its time is over, or another start
        of the node took its place)."""
        deadline = node.deadline
        while node.state is NodeState.JOINING and node.deadline == deadline and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    def _ask_for_node(self) -> None:
        self._requests += 1
        self.spawn(self._request())

    async def _request(self) -> None:
        waiting = True
        try:
            async with self._wave():
                name = await self.cluster.request()
                self._requests, waiting = self._requests - 1, False
                if name is None:
                    return
                node = self.nodes.setdefault(name, Node(name))
                if node.state is not NodeState.UP:
                    self.set_state(node, NodeState.JOINING, "requested")
                    node.deadline = time.monotonic() + JOIN
                await self._coming(node)
        finally:
            self._requests -= waiting

    def watch_nodes(self, now: float) -> None:
        """Nodes that are silent are lost; the rules judge those whose ranks run."""
        judged = set(self.job.placement if self.job.phase in (Phase.STARTING, Phase.RUNNING) else ())
        for node in list(self.nodes.values()):
            if node.name in judged:
                continue
            if node.state is NodeState.UP and now - node.last_seen > self.limits.window:
                why = f"no message from {node.name} for {now - node.last_seen:.1f} s"
            elif node.state is NodeState.JOINING and now > node.deadline:
                why = f"the agent of {node.name} did not come"
            else:
                continue
            if self.job.phase in ENDED or self.job.goal in ENDED:
                self.lose(node, why)
            else:
                self.missing(node, why)

    def keep_spares(self, now: float) -> None:
        """While training runs: have spares tested, and have new ones in place of those that were used."""
        if self.job.phase is not Phase.RUNNING or now - self._entered < CALM:
            return
        spares = [n for n in self.nodes.values() if n.usable and n.name not in self.job.placement]
        for node in spares:
            if self.limits.test_spares and not node.tested and not node.checking:
                self._checks += 1
                node.checking = self._checks  # far below the numbers of orders to stop
                self.order_to(node, do="diagnose", order=node.checking, grace_period=self.limits.grace_period)
        there = sum(n.state in (NodeState.UP, NodeState.JOINING) for n in self.nodes.values()) + self._requests
        missing = self.limits.nodes + self.limits.spares - there
        self._refilled = [t for t in self._refilled if now - t < self.limits.budget_seconds]
        if missing <= 0 or not self.limits.replenish_wait or len(self._refilled) >= self.limits.replacements:
            return
        if self._refilled and now - self._refilled[-1] < REFILL:
            return
        self._refilled.append(now)
        text = f"{there} nodes are there; asking for {missing} to have {self.limits.spares} spare again"
        self.note(Event.NODE_REQUESTED, evidence=(text,))
        for _ in range(missing):
            self._ask_for_node()

    def missing(self, node: Node, why: str) -> None:
        """A node is gone while the job goes on: recover it; one that goes missing again and again is evicted."""
        running = self.job.phase in (Phase.STARTING, Phase.RUNNING) and node.name in self.job.placement
        verdict = Verdict(Event.NODE_LOST, (node.name,), self.job.ranks(node.name), "respawn", (why,))
        verdict = repeated(self.view(time.monotonic()), [verdict])[0]
        if running:
            self.act([verdict])
        else:
            self.reasons[node.name] = "; ".join(verdict.evidence)
            self.lose(node, self.reasons[node.name])
            self.incidents.append((time.monotonic(), node.name, str(verdict.kind)))
            self.recover_node(node.name, evict=verdict.action == "evict")

    def lose(self, node: Node, why: str) -> None:
        """A node is gone."""
        self.set_state(node, NodeState.LOST, why)
        if node.channel is not None:
            node.channel.close()
            node.channel = None
        self.note(Event.NODE_LOST, nodes=(node.name,), evidence=(why,))

    # recovery -------------------------------------------------------------------------------------------------------

    def recover(self, blamed: tuple[str, ...], evict: frozenset[str]) -> None:
        """After a fault: choose a recovery action for each node to blame, stop what runs, start again."""
        actions = {name: self.recover_node(name, name in evict) for name in blamed or ("",)}
        if self.job.phase is not Phase.STOPPING:  # recover_node may have ended the job
            why = ", ".join(f"{action} {name}".strip() for name, action in actions.items())
            self.suspend(Phase.WAITING, why)

    def recover_node(self, name: str, evict: bool) -> str:
        """Choose and begin the recovery action for one node ("": for all, none to blame); returns it."""
        node = self.nodes.get(name)
        known = {info.name: info for info in self.cluster.nodes()}
        spares = [n for n in self.nodes.values() if n.usable and n.name not in self.job.placement]
        silent = node is not None and time.monotonic() - node.last_seen > self.limits.window
        at = Situation(
            node=name,
            evict=evict,
            reachable=node is None or (node.state is NodeState.UP and node.channel is not None and not silent),
            alive=node is None or (name in known and known[name].alive),
            running=name in known and known[name].running,
            spares=len(spares),
            tested=sum(bool(n.tested) for n in spares),
            now=time.monotonic(),
        )
        choice = escalation.choose(self.limits, at, self.uses)
        if node is not None and name not in self.job.placement and choice.action == "spare":
            choice = replace(choice, action="replenish")  # a spare that is lost: have a new one
        why, explains = choice.why, bool(name) and self._unexplained
        if explains:
            # Ranks had lost contact with nobody known to blame; it was this node, so that retry costs no budget.
            escalation.give_back(self.uses)
            why = (*why, f"{name} explains why ranks had lost contact; that retry does not count")
        self._unexplained = not name
        self.uses.append(Use(at.now, choice.action, name))
        nodes = (name,) if name else ()
        self.note(Event.RECOVERY_ACTION, action=choice.action, nodes=nodes, evidence=why, explains=explains)
        if choice.action == "stop":
            step, times = progress.same_end(self.job)
            again = f"; each of the last {times} starts ended in step {step}" if step and times > 1 else ""
            self.fail("no recovery action is left: " + "; ".join(choice.why) + again)
        elif choice.action == "respawn":
            for each in [node] if node is not None else [self.nodes[n] for n in self.job.placement]:
                self.start_agent(each, "respawn")
        elif choice.action != "retry" and node is not None:
            self._take_out(node, evict, self.reasons.get(name, choice.why[-1]))
            if choice.action == "replenish":
                self._ask_for_node()
        return choice.action

    def _take_out(self, node: Node, evict: bool, why: str) -> None:
        if evict:
            self.set_state(node, NodeState.EVICTED, why)
            self.note(Event.NODE_EVICTED, nodes=(node.name,), evidence=(why,))
        elif node.state is not NodeState.LOST:
            self.set_state(node, NodeState.LOST, why)
        if node.channel is not None:
            node.channel.close()
            node.channel = None
        self.spawn(self.cluster.fence(node.name))

    def order_to(self, node: Node, **order: Any) -> None:
        """Send an order, if the node is there."""
        if node.channel is not None:
            with contextlib.suppress(ConnectionError):
                node.channel.send_message(epoch=self.journal.epoch, **order)
