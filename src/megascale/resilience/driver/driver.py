"""The driver: one loop that watches a job's nodes, decides by rules and the escalation policy, and writes down why.

It holds no process and no device: killed and started again it reads its journal, waits for the agents to come back,
and goes on; training does not notice. One thread on one asyncio loop does it all, but for looks that take long.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megascale.config import Config
from megascale.core.events import Event
from megascale.errors import EXIT_FAILED, EXIT_INTERRUPTED
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.driver import hot_update
from megascale.resilience.driver.adoption import Adoption
from megascale.resilience.driver.agent_server import AgentServer
from megascale.resilience.driver.audit_log import AuditLog
from megascale.resilience.driver.driver_garbage import OldGarbage
from megascale.resilience.driver.job_state import ENDED, JobState, Phase
from megascale.resilience.driver.journal import Entry
from megascale.resilience.driver.lasting_journal import LastingJournal
from megascale.resilience.driver.metrics_tail import MetricsTail
from megascale.resilience.driver.nodes import Node, NodeState
from megascale.resilience.driver.phase_durations import PhaseDurations
from megascale.resilience.protocol import agent_channel
from megascale.resilience.protocol.contact import Contact, make_token, write_contact
from megascale.resilience.protocol.heartbeat import Heartbeat
from megascale.resilience.rules.exits import failed_start
from megascale.resilience.rules.silence import FIRST_STEP
from megascale.resilience.rules.verdicts import Verdict

log = logging.getLogger("megascale.driver")

TICK = 0.25  # seconds between looks when nothing happens
COALESCE = 0.02  # seconds in which what happens together is looked at together
GONE = 0.1  # grace period, seconds, after a connection has closed in which its agent may come again or end
LEAVE = 10.0  # seconds that agents get to end


class Driver(Adoption):
    """Args:
    run: the run folder.
    config: resolved; `resilience` and the layout are used.
    cluster: where nodes come from.
    words: the trainers' command line (without the program's name).
    journal: held by this driver.
    job: where it stands: new, or as the journal remembers it.
    say: called with each line for the terminal: (who, text).
    unsure: the journal may be behind what runs, so the agents are asked first (adoption.py).
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        cluster: Cluster,
        words: list[str],
        journal: LastingJournal,
        job: JobState,
        say: Callable[[str, str], None] = lambda who, text: None,
        unsure: bool = False,
    ) -> None:
        self.run_folder, self.config, self.cluster, self.words = run, config, cluster, words
        self.limits = config.resilience
        self.journal, self.job, self.say, self.unsure = journal, job, say, unsure
        journal.say = lambda text: say("driver", text)
        self.audit_log = AuditLog(run, journal, say)
        self.nodes: dict[str, Node] = {row.name: Node.from_row(row) for row in journal.nodes()}
        self.token = make_token(run)
        self.agent_server = AgentServer(job.name, self.token, self)
        self.uses = self.audit_log.uses()
        self.incidents: list[tuple[float, str, str]] = []
        self.past: list[tuple[float, Verdict]] = []
        self.metrics_tail = MetricsTail(run)
        self.phase_durations = PhaseDurations()
        self._checks = 0
        self.reasons: dict[str, str] = {}
        self._refilled: list[float] = []
        # Answers to stop orders of a driver before are none to ours; no clock: it may be set back.
        self.order = (1 + secrets.randbits(30)) << 20
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
        self.address = await self.agent_server.open(self.limits.listen, self.limits.port)

    def announce(self, api_url: str) -> None:
        """Write down where agents and commands reach this driver."""
        self.api_url = api_url
        write_contact(
            self.run_folder, Contact(self.job.name, self.journal.epoch, os.getpid(), self.address, self.api_url)
        )

    async def run(self) -> int:
        """Work until the job has ended; returns its exit code. Raises Fenced when another driver has taken over."""
        now = time.monotonic()
        took_over = self.unsure or self.job.phase is not Phase.WAITING or bool(self.job.placement)
        if self.unsure:
            self.doubt(now)
        event = Event.DRIVER_TOOK_OVER if took_over else Event.DRIVER_STARTED
        self.note(event, evidence=(f"epoch {self.journal.epoch}; the job is {self.job.phase}",), pid=os.getpid())
        for node in self.nodes.values():
            node.last_seen, node.deadline = now, now + self.limits.window
        self.begin_nodes(now)
        renewed, due, garbage = 0.0, now, OldGarbage()
        try:
            while self.job.phase not in ENDED:
                if time.monotonic() - renewed > min(1.0, self.limits.lease / 3):
                    self.journal.renew()
                    renewed = time.monotonic()
                looked = time.monotonic()
                late = looked - due
                if late > self.limits.window / 2:  # what is shorter cannot make a node that beats seem silent
                    self._forgive(late)
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
                stood = garbage.tidy()
                if stood:
                    self._forgive(stood)
                    due += stood
            await self._farewell()
        finally:
            garbage.close()
            for task in self._tasks:
                task.cancel()
            await self.agent_server.close()
        return self.job.exit_code

    def _next_silence(self) -> float:
        """Seconds until the first node whose heartbeats come now would count as silent."""
        now = time.monotonic()
        left = (self.nodes[name].last_seen + self.limits.window - now for name in self.job.placement)
        return max(0.01, min((seconds for seconds in left if seconds > 0), default=TICK))

    def _forgive(self, late: float) -> None:
        """A driver that was held up (a slow disk, a host without CPU) received nothing meanwhile: that is no silence of
        the nodes."""
        now = time.monotonic()
        for node in self.nodes.values():
            node.last_seen = min(now, node.last_seen + late)

    async def _farewell(self) -> None:
        """Let all agents go, and make sure that they have gone."""
        for node in self.nodes.values():
            self.order_to(node, do="leave")
        deadline = time.monotonic() + LEAVE
        while any(n.channel for n in self.nodes.values()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for info in self.cluster.nodes():
            if info.running:
                await self.cluster.fence(info.name)
        self.note(Event.DRIVER_ENDED, evidence=(f"the job is {self.job.phase}: {self.job.why}",))

    def spawn(self, work: Any) -> None:
        """Run a coroutine as a task of the loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a task of the driver failed", exc_info=task.exception())
        self._wake.set()

    # telemetry from agents --------------------------------------------------------------------------------------------

    def joined(self, channel: agent_channel.AgentChannel, hello: dict[str, Any]) -> str:
        """A node's agent has come, or come again."""
        if hello["epoch"] > self.journal.epoch:
            self._adopt(hello)
        name, now = hello["node"], time.monotonic()
        if self.job.phase in ENDED:
            return f"the job is {self.job.phase}"
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name)
        if node.channel is not None:
            node.channel.close()  # a connection that broke unnoticed, or an agent started anew
        again, node.boot = node.boot not in ("", hello["boot"]), hello["boot"]
        node.channel, node.last_seen, node.attempt = channel, now, hello["attempt"]
        node.address = hello["address"]
        node.facts = {"pod": hello["pod"], "hardware": hello["hardware"], "versions": hello["versions"]}
        channel.send_message(do="welcome", epoch=self.journal.epoch, version=agent_channel.VERSION)
        if node.state is not NodeState.UP and node.state is not NodeState.EVICTED:
            self.set_state(node, NodeState.UP, "its agent came")
            self.note(Event.NODE_JOINED, nodes=(name,), evidence=(f"{name} at {node.address} joined",))
        self.handle_held(node, hello)
        if again or node.attempt < self.job.attempt:
            node.forget_attempt()
        if not self.unsure:
            self.catch_up(node)
        self._wake.set()
        return ""

    def _adopt(self, hello: dict[str, Any]) -> None:
        """A node knows a newer driver than the journal does: the journal was removed, or is an older one.

        Its epoch is taken over; Fenced if another driver is in office. Attempts: see `_begin_attempt`.
        """
        before, theirs = self.journal.epoch, hello["epoch"]
        self.journal.raise_epoch(hello["epoch"] + 1)
        self.announce(self.api_url)
        text = (
            f"{hello['node']} knows a driver of epoch {theirs} and attempt {hello['attempt']}, the journal only epoch "
            f"{before}: it was removed or is an old one; this driver goes on as epoch {self.journal.epoch}"
        )
        self.note(Event.JOURNAL_DAMAGED, nodes=(hello["node"],), evidence=(text,))

    def catch_up(self, node: Node) -> None:
        """Order a node that comes (again) to do what it has missed."""
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

    def beat(self, name: str, channel: agent_channel.AgentChannel, heartbeat: Heartbeat) -> None:
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
        """Phase durations: how long trainers were in a phase without any change, of those that then went on."""
        starting = self.job.phase is Phase.STARTING
        if before is None or before.attempt != after.attempt or not (starting or self.job.phase is Phase.RUNNING):
            return
        for old, new in zip(before.workers, after.workers, strict=False):
            moved = (old.phase, old.step, old.action) != (new.phase, new.step, new.action)
            if not moved or old.rank != new.rank or not old.phase:
                continue
            if not starting:
                self.phase_durations.add(old.phase, old.status_age)
            elif old.phase == "train":  # longer than any other step
                self.phase_durations.add(FIRST_STEP, old.status_age)

    def received(self, name: str, channel: agent_channel.AgentChannel, message: dict[str, Any]) -> None:
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
                self.handle_report(node, message)
        elif message["do"] == "failed":
            why, number = f"{name}: {str(message.get('why'))[:500]}", message.get("errno")
            self.act([failed_start(name, self.job.ranks(name), why, number if type(number) is int else 0)])
        elif message["do"] == "lines":
            for line in message.get("lines", [])[:200]:
                self.say(f"rank {message.get('rank')}", str(line))
        self._wake.set()

    def left(self, name: str, channel: agent_channel.AgentChannel) -> None:
        """A connection ended; the node may come back within the window."""
        if self.nodes[name].channel is channel:
            self.nodes[name].channel = None
            self.spawn(self._look_after(self.nodes[name]))
            self._wake.set()

    async def _look_after(self, node: Node) -> None:
        """A connection closed: if the cluster says that no agent runs there any more, there is no need to wait."""
        await asyncio.sleep(GONE)
        if self.unsure:
            return
        info = next((each for each in self.cluster.nodes() if each.name == node.name), None)
        if info is None or info.running or node.channel is not None or node.state is not NodeState.UP:
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
        if self.unsure and not self.decide(now):
            return
        self.watch_nodes(now)
        phase = self.job.phase
        if phase in (Phase.STARTING, Phase.RUNNING):
            self.judge(now)
            self.keep_spares(now)
        elif phase is Phase.STOPPING:
            self.check_stopped(now)
        elif phase is Phase.DIAGNOSING:
            self.check_diagnosed(now)
        if self.job.phase is Phase.WAITING:
            self.place(now)

    # state ----------------------------------------------------------------------------------------------------------

    def note(self, kind: Event | str, **about: Any) -> Entry:
        """Write an event down."""
        return self.audit_log.note(str(kind), attempt=self.job.attempt, **about)

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
            self.config, changed = hot_update.apply(self.run_folder, self.config, settings)
            self.job = replace(self.job, updating=True)
            self.note(Event.UPDATED, evidence=changed)
        self.note(Event.RESTARTED, evidence=(why,))
        self.suspend(Phase.WAITING, why, save=True, fresh=tuple(self.nodes))
        return True

    def undo_update(self, verdict: Verdict) -> None:
        """New settings brought no step: go back to those before, and start again."""
        self.config = hot_update.undo(self.run_folder)
        self.job = replace(self.job, updating=False)
        text = "the new settings brought no step and are taken back: " + "; ".join(verdict.evidence[:2])
        self.note(Event.UPDATE_UNDONE, evidence=(text,))
        self.suspend(Phase.WAITING, text)


def _stages(heartbeat: Heartbeat | None) -> list[tuple[int, str, str]]:
    """What of a heartbeat is worth a look at once."""
    return [(w.rank, w.state, w.phase) for w in heartbeat.workers] if heartbeat is not None else []
