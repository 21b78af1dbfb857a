"""The half of the driver that moves things: which nodes hold which ranks, stopping, starting, mending, evicting."""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.config import Config, ResilienceConfig
from megascale.core.events import Event
from megascale.errors import EXIT_FAILED
from megascale.resilience import ladder
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.journal import Entry, Journal
from megascale.resilience.ladder import Situation, Use
from megascale.resilience.machine import ENDED, Job, Phase
from megascale.resilience.nodes import Node, NodeState
from megascale.resilience.rules.offenders import repeated
from megascale.resilience.verdicts import Verdict
from megascale.resilience.view import View

JOIN = 60.0  # seconds in which an agent that was started must come
CALM = 3.0  # seconds that training must run before spares are looked after
REFILL = 30.0  # seconds between requests for nodes in place of spares
TOGETHER = 10.0  # seconds to wait at the first start for all that were asked for, spares too


def _natural(name: str) -> list[tuple[int, str]]:
    """n2 before n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


class Placing:
    """See Driver, which is this and the other half."""

    run_folder: Path
    config: Config
    limits: ResilienceConfig
    cluster: Cluster
    words: list[str]
    journal: Journal
    job: Job
    nodes: dict[str, Node]
    uses: list[Use]
    incidents: list[tuple[float, str, str]]
    reasons: dict[str, str]  # what was last held against each node
    order: int
    started: float
    _entered: float
    _asked: float = 0.0
    _requests: int = 0
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

    # nodes ----------------------------------------------------------------------------------------------------------

    def begin_nodes(self, now: float) -> None:
        """At the driver's start: have agents on as many nodes as the job and its spares take."""
        wanted = self.limits.nodes + self.limits.spares
        for place in self.cluster.places():
            node = self.nodes.setdefault(place.name, Node(place.name, place.address))
            if node.state is NodeState.EVICTED or wanted <= 0:
                continue
            if place.running:
                wanted -= 1
                node.state, node.deadline = NodeState.JOINING, now + JOIN
            elif place.alive:
                wanted -= 1
                self.start_agent(node, "started with the driver")
        for _ in range(wanted):
            self._ask_for_node()
        self._asked = now

    def start_agent(self, node: Node, why: str) -> None:
        """Start a node's agent (again), in the background."""
        self.set_state(node, NodeState.JOINING, why)
        node.deadline = time.monotonic() + JOIN
        if node.channel is not None:
            node.channel.close()
            node.channel = None
        self.spawn(self._start_agent(node))

    async def _start_agent(self, node: Node) -> None:
        if not await self.cluster.start_agent(node.name):
            node.deadline = 0.0  # it will not come

    def _ask_for_node(self) -> None:
        self._requests += 1
        self.spawn(self._request())

    async def _request(self) -> None:
        try:
            name = await self.cluster.request()
        finally:
            self._requests -= 1
        if name is None:
            return
        node = self.nodes.setdefault(name, Node(name))
        if node.state is not NodeState.UP:
            self.set_state(node, NodeState.JOINING, "requested")
            node.deadline = time.monotonic() + JOIN

    def watch_nodes(self, now: float) -> None:
        """Nodes that are silent are lost; the rules judge those whose ranks run."""
        judged = set(self.job.placement if self.job.phase in (Phase.STARTING, Phase.RUNNING) else ())
        for node in list(self.nodes.values()):
            if node.name in judged:
                continue
            if node.state is NodeState.UP and now - node.last_seen > self.limits.window:
                why = f"no word from {node.name} for {now - node.last_seen:.1f} s"
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
                self.order_to(node, do="diagnose", order=node.checking, patience=self.limits.patience)
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
        """A node is gone while the job goes on: mend it; one that goes missing again and again is evicted."""
        running = self.job.phase in (Phase.STARTING, Phase.RUNNING) and node.name in self.job.placement
        verdict = Verdict(Event.NODE_LOST, (node.name,), self.job.ranks(node.name), "respawn", (why,))
        verdict = repeated(self.view(time.monotonic()), [verdict])[0]
        if running:
            self.act([verdict])
        else:
            self.reasons[node.name] = "; ".join(verdict.evidence)
            self.lose(node, self.reasons[node.name])
            self.incidents.append((time.monotonic(), node.name, str(verdict.kind)))
            self.mend(node.name, evict=verdict.action == "evict")

    def lose(self, node: Node, why: str) -> None:
        """A node is gone."""
        self.set_state(node, NodeState.LOST, why)
        if node.channel is not None:
            node.channel.close()
            node.channel = None
        self.note(Event.NODE_LOST, nodes=(node.name,), evidence=(why,))

    # recovery -------------------------------------------------------------------------------------------------------

    def recover(self, blamed: tuple[str, ...], evict: frozenset[str]) -> None:
        """After a fault: choose a rung for each node to blame, stop what runs, start again."""
        step, job = self.job.step, self.job
        better = step > job.best
        self.job = replace(job, best=max(step, job.best), fruitless=0 if better else job.fruitless + 1)
        if self.job.fruitless >= self.limits.fruitless:
            self.fail(
                f"{self.job.fruitless} starts in a row brought no step beyond {job.best} "
                f"(resilience.fruitless={self.limits.fruitless}): starting again does not help"
            )
            return
        rungs = {name: self.mend(name, name in evict) for name in blamed or ("",)}
        if self.job.phase is not Phase.STOPPING:  # mend may have ended the job
            why = ", ".join(f"{rung} {name}".strip() for name, rung in rungs.items())
            self.suspend(Phase.WAITING, why)

    def mend(self, name: str, evict: bool) -> str:
        """Choose and begin the ladder's rung for one node ("": for all, none to blame); returns the rung."""
        node = self.nodes.get(name)
        places = {place.name: place for place in self.cluster.places()}
        spares = [n for n in self.nodes.values() if n.usable and n.name not in self.job.placement]
        silent = node is not None and time.monotonic() - node.last_seen > self.limits.window
        at = Situation(
            node=name,
            evict=evict,
            reachable=node is None or (node.state is NodeState.UP and node.channel is not None and not silent),
            alive=node is None or (name in places and places[name].alive),
            running=name in places and places[name].running,
            spares=len(spares),
            tested=sum(bool(n.tested) for n in spares),
            now=time.time(),
        )
        choice = ladder.choose(self.limits, at, self.uses)
        if node is not None and name not in self.job.placement and choice.rung == "spare":
            choice = replace(choice, rung="replenish")  # a spare that is lost: have a new one
        why, explains = choice.why, bool(name) and self._unexplained
        if explains:
            # Ranks had lost contact with nobody known to blame; it was this node, so that retry costs no budget.
            self.uses.remove(next(use for use in reversed(self.uses) if not use.node))
            why = (*why, f"{name} explains why ranks had lost contact; that retry does not count")
        self._unexplained = not name
        self.uses.append(Use(at.now, choice.rung, name))
        nodes = (name,) if name else ()
        self.note(Event.LADDER, action=choice.rung, nodes=nodes, evidence=why, explains=explains)
        if choice.rung == "stop":
            self.fail("the ladder has no rung left: " + "; ".join(choice.why))
        elif choice.rung == "respawn":
            for each in [node] if node is not None else [self.nodes[n] for n in self.job.placement]:
                self.start_agent(each, "respawn")
        elif choice.rung != "retry" and node is not None:
            self._take_out(node, evict, self.reasons.get(name, choice.why[-1]))
            if choice.rung == "replenish":
                self._ask_for_node()
        return choice.rung

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

    def order_to(self, node: Node, **order: Any) -> None:
        """Send an order, if the node is there."""
        if node.channel is not None:
            with contextlib.suppress(ConnectionError):
                node.channel.tell(epoch=self.journal.epoch, **order)

    def send_stop(self, node: Node) -> None:
        """Have a node end its trainers (and self-checks) and say so."""
        node.checking = 0
        save = self.job.save and self.job.phase is Phase.STOPPING
        how = {"how": "save" if save else "kill", "patience": self.limits.patience, "forget": self.job.distrust}
        self.order_to(node, do="stop", order=self.order, **how)

    def check_stopped(self, now: float) -> None:
        """Whether all nodes have stopped; then on to the goal."""
        job, final = self.job, self.job.goal in ENDED or self.job.goal is Phase.PAUSED
        waited = [self.nodes[name] for name in job.placement if self.nodes[name].acknowledged != self.order]
        limit = (self.limits.patience if job.save else 0.0) + 2 * self.limits.window
        for node in waited:
            if node.state is NodeState.UP and now - self._entered > limit:
                self.lose(node, f"{node.name} did not stop its processes within {limit:g} s")
                if not final:
                    self.mend(node.name, evict=True)
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
            self.mend(self._to_evict.pop(), evict=True)
        job, limits = self.job, self.limits
        whole = limits.nodes
        free = [self.nodes[n] for n in sorted(self.nodes, key=_natural) if n not in job.placement]
        free = sorted((n for n in free if n.usable), key=lambda n: not n.tested)  # those that passed first
        kept = [self.nodes[name] for name in job.placement]
        usable = sum(n.usable for n in kept) + len(free)
        coming = self._requests or any(n.state is NodeState.JOINING for n in self.nodes.values())
        if any(n.state is NodeState.JOINING for n in kept):
            return  # what the ladder chose is under way
        if not kept and coming and (usable < whole or now - self._entered < TOGETHER):
            return  # nodes that start together are placed in the order of their names
        data, count = job.data, len(kept) or whole
        if usable >= whole:
            data, count = whole * job.ranks_per_node // self._model, whole
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
            sizes = [s for s in ladder.data_sizes(self.config, job.ranks_per_node, usable) if s[0] < job.data]
            if not sizes:
                self.fail(f"{usable} usable nodes are too few and none came: the job needs {count}")
                return
            data, count = sizes[0]
            why = f"{usable} usable nodes: data parallelism goes from {job.data} to {data} on {count} nodes"
            self.uses.append(Use(time.time(), "shrink", ""))
            self.note(Event.LADDER, action="shrink", evidence=(why,))
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
        self.enter(Phase.STARTING, attempt=self.job.attempt + 1, master=(first.address, first.port))
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
        )

    # self-checks ----------------------------------------------------------------------------------------------------

    def _begin_diagnosis(self) -> None:
        self.order += 1
        for node in self.nodes.values():
            node.report = None
            self.order_to(node, do="diagnose", order=self.order, patience=self.limits.patience)

    def check_diagnosed(self, now: float) -> None:
        """When all results are there: take out the nodes that failed, start again."""
        asked = [n for n in self.nodes.values() if n.usable]
        late = now - self._entered > self.limits.patience + self.limits.window
        if any(n.report is None for n in asked) and not late:
            return
        for node in asked:
            self.heed_report(node, node.report or {"code": 1, "said": "no result in time"})
        if self.job.phase is Phase.DIAGNOSING:
            self.enter(Phase.WAITING)

    def heed_report(self, node: Node, report: dict[str, Any]) -> None:
        """Take in the result of a node's self-checks; one that failed is taken out."""
        said = str(report.get("said", "")).strip()[-500:]
        passed = not report.get("code")
        node.tested = time.time() if passed else 0.0
        verdict = "passed" if passed else f"failed: {said or 'see its report'}"
        role = "" if node.name in self.job.placement else "spare "
        self.note(
            Event.NODE_DIAGNOSED,
            nodes=(node.name,),
            action="none" if passed else "evict",
            evidence=(f"self-checks of {role}{node.name} {verdict}",),
            report=report.get("report", ""),
        )
        if not passed:
            self.reasons[node.name] = f"self-checks {verdict}"
            self.mend(node.name, evict=True)

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
