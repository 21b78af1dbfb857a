"""The driver: one loop that watches all nodes of a job, decides by rules and ladder, and writes down why.

It holds no process and no device: killed and started again it reads its journal, waits for the agents to come back,
and goes on; training does not notice. Everything runs in one thread on one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.config import Config
from megascale.core.events import Event
from megascale.core.grid import Grid
from megascale.core.heartbeat import Heartbeat
from megascale.errors import EXIT_FAILED, EXIT_INTERRUPTED
from megascale.resilience import hangs, rules, update, wire
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.contact import Contact, make_token, write_contact
from megascale.resilience.diary import Diary
from megascale.resilience.figures import Figures
from megascale.resilience.intake import Intake
from megascale.resilience.journal import Entry, Journal
from megascale.resilience.learning import Stays
from megascale.resilience.machine import ENDED, Job, Phase
from megascale.resilience.nodes import Node, NodeState
from megascale.resilience.placing import Placing
from megascale.resilience.verdicts import SEVERITY, Verdict
from megascale.resilience.view import View

log = logging.getLogger("megascale.driver")

TICK = 0.25  # seconds between looks when nothing happens
COALESCE = 0.02  # seconds in which what happens together is looked at together
SETTLE = 0.3  # seconds after a first bad end in which others of the same cause show
THOROUGH = 1.0  # seconds between looks at the history of all nodes
GONE = 0.1  # seconds after a connection has closed in which its agent may come again or end
LEAVE = 10.0  # seconds that agents get to end


class Driver(Placing):
    """Args:
    run: the run folder.
    config: resolved; `resilience` and the layout are used.
    cluster: where nodes come from.
    words: the trainers' command line (without the program's name).
    journal: held by this driver.
    job: where it stands: new, or as the journal remembers it.
    say: called with each line for the terminal: (who, text).
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        cluster: Cluster,
        words: list[str],
        journal: Journal,
        job: Job,
        say: Callable[[str, str], None] = lambda who, text: None,
    ) -> None:
        self.run_folder, self.config, self.cluster, self.words = run, config, cluster, words
        self.limits = config.resilience
        self.journal, self.job, self.say = journal, job, say
        self.diary = Diary(run, journal, say)
        self.nodes: dict[str, Node] = {row.name: Node.from_row(row) for row in journal.nodes()}
        self.token = make_token(run)
        self.intake = Intake(job.name, self.token, self)
        self.uses = self.diary.uses()
        self.incidents: list[tuple[float, str, str]] = []
        self.past: list[tuple[float, Verdict]] = []
        self.figures = Figures(run)
        self._looked = self._looking = 0.0
        self._explaining = False
        self.stays = Stays()
        self._checks = 0
        self.reasons: dict[str, str] = {}
        self._refilled: list[float] = []
        self.order = int(time.time() * 1000)  # stop orders of a driver before are not answers to ours
        self.started = time.monotonic()
        self._entered = time.monotonic()
        self._first_bad: float | None = None
        self._to_evict: list[str] = []
        self._first_steps: dict[int, int] = {}
        self._noted: set[tuple[Any, ...]] = set()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.address: tuple[str, int] = ("", 0)
        self.api_url = ""

    # life -----------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen for agents."""
        self.address = await self.intake.open(self.limits.listen, self.limits.port)

    def announce(self, api_url: str) -> None:
        """Tell agents and commands where to come."""
        self.api_url = api_url
        write_contact(
            self.run_folder, Contact(self.job.name, self.journal.epoch, os.getpid(), self.address, self.api_url)
        )

    async def run(self) -> int:
        """Work until the job has ended; returns its exit code. Raises Fenced when another driver has taken over."""
        now = time.monotonic()
        took_over = self.job.phase is not Phase.WAITING or bool(self.job.placement)
        event = Event.DRIVER_TOOK_OVER if took_over else Event.DRIVER_STARTED
        self.note(event, evidence=(f"epoch {self.journal.epoch}; the job is {self.job.phase}",), pid=os.getpid())
        for node in self.nodes.values():
            node.last_seen, node.deadline = now, now + self.limits.window
        self.begin_nodes(now)
        renewed, due = 0.0, now
        try:
            while self.job.phase not in ENDED:
                if time.monotonic() - renewed > min(1.0, self.limits.lease / 3):
                    self.journal.renew()
                    renewed = time.monotonic()
                looked = time.monotonic()
                self._forgive(looked, due)
                self.step(looked)
                if self.job.phase in ENDED:
                    break
                # However many nodes there are, looking at them takes a part of the time only.
                pause = min(1.0, max(TICK, 4 * (time.monotonic() - looked)))
                pause = min(pause, self._next_silence())
                due = time.monotonic() + pause
                try:
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
                        await asyncio.sleep(COALESCE)
                except TimeoutError:
                    pass
                self._wake.clear()
            await self._farewell()
        finally:
            for task in self._tasks:
                task.cancel()
            await self.intake.close()
        return self.job.exit_code

    def _next_silence(self) -> float:
        """Seconds until the first node that is heard now would count as silent."""
        now = time.monotonic()
        left = (self.nodes[name].last_seen + self.limits.window - now for name in self.job.placement)
        return max(0.01, min((seconds for seconds in left if seconds > 0), default=TICK))

    def _forgive(self, now: float, due: float) -> None:
        """A driver that was held up (a slow disk, a host without CPU) heard nobody meanwhile: that is not the nodes'
        silence."""
        late = now - due
        if late > self.limits.window / 2:  # what is shorter cannot make a node that beats seem silent
            for node in self.nodes.values():
                node.last_seen = min(now, node.last_seen + late)

    async def _farewell(self) -> None:
        """Let all agents go, and make sure that they have gone."""
        for node in self.nodes.values():
            self.order_to(node, do="leave")
        deadline = time.monotonic() + LEAVE
        while any(n.channel for n in self.nodes.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for place in self.cluster.places():
            if place.running:
                await self.cluster.fence(place.name)
        self.note(Event.DRIVER_ENDED, evidence=(f"the job is {self.job.phase}: {self.job.why}",))

    def spawn(self, work: Any) -> None:
        """Run a coroutine beside the loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the driver failed", exc_info=task.exception())
        self._wake.set()

    # what agents say ------------------------------------------------------------------------------------------------

    def joined(self, channel: wire.Channel, hello: dict[str, Any]) -> str:
        """A node's agent has come, or come again."""
        if hello["epoch"] > self.journal.epoch:
            self.journal.renew()  # raises if it is true that another has taken over
            return f"this driver has epoch {self.journal.epoch}, the node knows {hello['epoch']}"
        name, now = hello["node"], time.monotonic()
        if self.job.phase in ENDED:
            return f"the job is {self.job.phase}"
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name)
        if node.channel is not None:
            node.channel.close()  # a connection that broke without a word, or an agent started anew
        again, node.boot = node.boot not in ("", hello["boot"]), hello["boot"]
        node.channel, node.last_seen, node.attempt = channel, now, hello["attempt"]
        node.address = hello["address"]
        node.facts = {"pod": hello["pod"], "hardware": hello["hardware"], "versions": hello["versions"]}
        channel.tell(do="welcome", epoch=self.journal.epoch)
        if node.state is not NodeState.UP and node.state is not NodeState.EVICTED:
            self.set_state(node, NodeState.UP, "its agent came")
            self.note(Event.NODE_JOINED, nodes=(name,), evidence=(f"{name} at {node.address} joined",))
        if again or node.attempt < self.job.attempt:
            node.forget_attempt()
        self._catch_up(node, again)
        self._wake.set()
        return ""

    def _catch_up(self, node: Node, again: bool) -> None:
        """Tell a node that comes (again) what it has missed."""
        phase, placed = self.job.phase, node.name in self.job.placement
        if phase is Phase.STOPPING:
            self.send_stop(node)
        elif phase is Phase.STARTING and placed and node.attempt < self.job.attempt:
            self.send_start(node)
        elif phase is Phase.RUNNING and placed and node.attempt != self.job.attempt:
            why = f"the agent of {node.name} came back without the processes of attempt {self.job.attempt}"
            self.act([Verdict(Event.AGENT_RESTARTED, (node.name,), self.job.ranks(node.name), "respawn", (why,))])
        elif phase in (Phase.WAITING, Phase.PAUSED) or not placed:
            self.send_stop(node)

    def beat(self, name: str, channel: wire.Channel, heartbeat: Heartbeat) -> None:
        """A heartbeat, already checked."""
        node, now = self.nodes[name], time.monotonic()
        if channel is not node.channel:
            return
        before = node.heartbeat
        node.beat(heartbeat, now)
        self._learn(before, heartbeat)
        if _stages(before) != _stages(heartbeat):
            self._wake.set()

    def _learn(self, before: Heartbeat | None, after: Heartbeat) -> None:
        """How long trainers stay in a phase without any change, as long as they then go on."""
        if before is None or before.attempt != after.attempt or self.job.phase is not Phase.RUNNING:
            return  # a first step is longer than any other
        for old, new in zip(before.workers, after.workers, strict=False):
            moved = (old.phase, old.step, old.action) != (new.phase, new.step, new.action)
            if moved and old.rank == new.rank and old.phase:
                self.stays.add(old.phase, old.status_age)

    def told(self, name: str, channel: wire.Channel, message: dict[str, Any]) -> None:
        """Any other message of a node."""
        node = self.nodes[name]
        if channel is not node.channel:
            return
        node.last_seen = time.monotonic()
        if message["do"] == "stopped" and message.get("order") == self.order:
            node.acknowledged, node.port = self.order, int(message.get("port", 0))
        elif message["do"] == "diagnosed":
            if message.get("order") == self.order:
                node.report = message
            elif message.get("order") == node.checking:
                node.checking = 0
                self.heed_report(node, message)
        elif message["do"] == "failed":
            why = f"{name}: {str(message.get('why'))[:500]}"
            self.act([Verdict(Event.PROCESS_EXIT, (name,), self.job.ranks(name), "respawn", (why,))])
        elif message["do"] == "lines":
            for line in message.get("lines", [])[:200]:
                self.say(f"rank {message.get('rank')}", str(line))
        self._wake.set()

    def left(self, name: str, channel: wire.Channel) -> None:
        """A connection ended; the node may come back within the window."""
        if self.nodes[name].channel is channel:
            self.nodes[name].channel = None
            self.spawn(self._look_after(self.nodes[name]))
            self._wake.set()

    async def _look_after(self, node: Node) -> None:
        """A connection closed: if the cluster says that no agent runs there any more, there is no need to wait."""
        await asyncio.sleep(GONE)
        place = next((p for p in self.cluster.places() if p.name == node.name), None)
        if place is None or place.running or node.channel is not None or node.state is not NodeState.UP:
            return
        if self.job.phase not in ENDED and self.job.goal not in ENDED:
            self.missing(node, f"the agent of {node.name} has ended: its connection closed and no process is there")

    def refused(self, peer: str, node: str, why: str) -> None:
        """Somebody was turned away."""
        key = ("refused", peer.rpartition(":")[0], node, why.split(";")[0])
        if key not in self._noted and len(self._noted) < 10_000:
            self._noted.add(key)
            self.note(Event.MESSAGE_REFUSED, action="refused", evidence=(f"{node or peer}: {why}",), peer=peer)

    # the loop -------------------------------------------------------------------------------------------------------

    def step(self, now: float) -> None:
        """Look at everything once and do what follows."""
        self.watch_nodes(now)
        phase = self.job.phase
        if phase in (Phase.STARTING, Phase.RUNNING):
            self._judge(now)
            self.keep_spares(now)
        elif phase is Phase.STOPPING:
            self.check_stopped(now)
        elif phase is Phase.DIAGNOSING:
            self.check_diagnosed(now)
        if self.job.phase is Phase.WAITING:
            self.place(now)

    def view(self, now: float) -> View:
        """What the rules judge."""
        job, parallel, holders = self.job, self.config.parallel, set(self.job.placement)
        each = job.ranks_per_node
        placed = [
            self.nodes[name].member(tuple(range(i * each, (i + 1) * each))) for i, name in enumerate(job.placement)
        ]
        spares = [n.member(()) for n in self.nodes.values() if n.name not in holders and n.usable]
        return View(
            job=job.name,
            attempt=job.attempt,
            phase=job.phase.value,
            now=now,
            started=self.started,
            members=placed + spares,
            grid=Grid(parallel.tensor, job.data, parallel.pipeline, job.ranks_per_node),
            window=self.limits.window,
            interval=self.limits.interval,
            first_step=self.limits.first_step,
            learned=self.stays.usual(),
            incidents=list(self.incidents),
            past=list(self.past),
            metrics=self.figures.read(),
        )

    def _judge(self, now: float) -> None:
        view = self.view(now)
        workers = [w for _, w in view.workers()]
        self._progress(now, workers)
        if len(workers) == self.job.world and all(w.state == "exited" and not w.code for w in workers):
            self.enter(Phase.DONE, why="every rank ended well", exit_code=0)
            self.note(Event.JOB_DONE, evidence=(f"all {self.job.world} ranks ended with exit code 0",))
            return
        bad = [w for w in workers if w.state == "signalled" or w.code]
        if bad and self._first_bad is None:
            self._first_bad = now
        ended = sum(w.state != "running" for w in workers)
        if bad and ended < self.job.world and now - (self._first_bad or now) < SETTLE:
            return
        # Of a job so large that it takes long, the history is looked at less often: silence must be seen in time.
        thorough = now - self._looked > max(THOROUGH, 10 * self._looking)
        verdicts = rules.judge(view, thorough)
        if thorough:
            self._looked, self._looking = now, time.monotonic() - now
        hang = next((v for v in verdicts if v.kind == Event.HANG), None)
        if hang is not None and not self._explaining:
            self._explaining = True
            self.spawn(self._explain(hang, view))
        self.act([v for v in verdicts if v.kind != Event.HANG])

    async def _explain(self, hang: Verdict, view: View) -> None:
        """Find out who began a hang, beside the loop: ranks are asked for their stacks."""
        try:
            found = await asyncio.to_thread(hangs.refine, hang, view, self.run_folder)
        finally:
            self._explaining = False
        if self.job.attempt == view.attempt:
            self.act([found])

    def _progress(self, now: float, workers: list[Any]) -> None:
        """The furthest step, and whether this attempt has done its first."""
        for w in workers:
            if w.phase not in ("train", "save", "evaluate", "done"):
                continue
            first = self._first_steps.setdefault(w.rank, w.step if w.phase == "train" else w.step - 1)
            if w.step > self.job.step:
                self.job = replace(self.job, step=w.step)
            if self.job.phase is Phase.STARTING and (w.step > first or w.phase != "train"):
                self.enter(Phase.RUNNING, updating=False)
                took = now - self.started
                self.note(
                    Event.FIRST_STEP,
                    evidence=(f"first step of attempt {self.job.attempt} after {took:.2f} s",),
                    seconds=took,
                    step=w.step,
                )

    def act(self, verdicts: list[Verdict]) -> None:
        """Write verdicts down, each once an attempt, and act on the hardest."""
        fresh = []
        for verdict in verdicts:
            key = (self.job.attempt, verdict.kind, verdict.nodes, verdict.ranks, verdict.action)
            if key in self._noted:
                continue
            self._noted.add(key)
            fresh.append(verdict)
            self.note(
                verdict.kind,
                action=verdict.action,
                nodes=verdict.nodes,
                ranks=verdict.ranks,
                evidence=verdict.evidence,
                person=verdict.person,
            )
            self.reasons |= {
                node: f"{verdict.kind}: {verdict.evidence[0]}" for node in verdict.nodes if verdict.evidence
            }
            self.incidents += [(time.monotonic(), node, str(verdict.kind)) for node in verdict.nodes]
        hard = [v for v in fresh if SEVERITY[v.action] >= SEVERITY["respawn"]]
        if not hard or self.job.phase not in (Phase.STARTING, Phase.RUNNING):
            return
        self.past += [(time.monotonic(), v) for v in hard]
        worst = max(hard, key=lambda v: SEVERITY[v.action])
        if any(v.kind == Event.CHECKSUM_MISMATCH for v in hard):
            self.job = replace(self.job, distrust=True)
        if self.job.updating and worst.kind in (Event.USER_ERROR, Event.OUT_OF_MEMORY, Event.NONFINITE_LOSS):
            self._undo_update(worst)
        elif worst.action == "stop":
            self.fail("; ".join(worst.evidence[:3]), self._code_of(worst))
        elif worst.action == "diagnose":
            self.suspend(Phase.DIAGNOSING, "self-checks after: " + worst.evidence[0])
        else:
            evict = {n for v in hard if v.action == "evict" for n in v.nodes}
            blamed = tuple(dict.fromkeys(n for v in hard for n in v.nodes))
            self.recover(blamed, frozenset(evict))

    def _code_of(self, verdict: Verdict) -> int:
        """The job's exit code for a verdict that ends it: that of the process at fault."""
        codes = [
            w.code
            for n in self.nodes.values()
            if n.heartbeat
            for w in n.heartbeat.workers
            if w.rank in verdict.ranks and w.state == "exited" and w.code
        ]
        return codes[0] if codes else EXIT_FAILED

    # state ----------------------------------------------------------------------------------------------------------

    def note(self, kind: Event | str, **about: Any) -> Entry:
        """Write an event down."""
        return self.diary.note(str(kind), attempt=self.job.attempt, **about)

    def enter(self, phase: Phase, **changes: Any) -> None:
        """Move the job to another phase and remember it."""
        self.job = self.job.move(phase, **changes)
        self.journal.save_job(self.job)
        self._entered = time.monotonic()
        self._wake.set()

    def set_state(self, node: Node, state: NodeState, why: str) -> None:
        """Move a node to another state and remember it."""
        node.state, node.why, node.since = state, why, time.time()
        self.journal.save_node(node.row())

    def fail(self, why: str, code: int = EXIT_FAILED) -> None:
        """End the job: a person is needed."""
        self.note(Event.JOB_FAILED, action="stop", evidence=(why,), exit_code=code)
        self.suspend(Phase.FAILED, why, exit_code=code)

    # what people ask ------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Save and end; launching again goes on."""
        if self.job.phase in ENDED:
            return
        self.note(Event.JOB_INTERRUPTED, action="stop", evidence=("a person interrupted the driver",))
        save = self.job.phase is Phase.RUNNING  # before the first step there is nothing new to save
        self.suspend(Phase.INTERRUPTED, "interrupted", save=save, exit_code=EXIT_INTERRUPTED)

    def restart(self, why: str, settings: Sequence[str] = ()) -> bool:
        """Save, import the code anew, and start again, with `settings` (section.key=value) changed.

        False if the job does not run. ConfigError, and nothing has happened, for settings that cannot be changed.
        """
        if self.job.phase is not Phase.RUNNING:
            return False
        if settings:
            self.config, changed = update.apply(self.run_folder, self.config, settings)
            self.job = replace(self.job, updating=True)
            self.note(Event.UPDATED, evidence=changed)
        self.note(Event.RESTARTED, evidence=(why,))
        self.suspend(Phase.WAITING, why, save=True, fresh=tuple(self.nodes))
        return True

    def _undo_update(self, verdict: Verdict) -> None:
        """New settings brought no step: go back to those before, and start again."""
        self.config = update.undo(self.run_folder)
        self.job = replace(self.job, updating=False)
        text = "the new settings brought no step and are taken back: " + "; ".join(verdict.evidence[:2])
        self.note(Event.UPDATE_UNDONE, evidence=(text,))
        self.suspend(Phase.WAITING, text)


def _stages(heartbeat: Heartbeat | None) -> list[tuple[int, str, str]]:
    """What of a heartbeat is worth a look at once."""
    return [(w.rank, w.state, w.phase) for w in heartbeat.workers] if heartbeat is not None else []
