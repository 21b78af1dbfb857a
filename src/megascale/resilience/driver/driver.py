"""The driver: one loop that watches a job's nodes, decides by rules and the escalation policy, and writes down why.

It holds no process and no device: killed and started again it reads its journal, waits for the agents to come back,
and goes on; training does not notice. One thread on one asyncio loop does it all, but for looks that take long.

It is put together from parts, each of which knows only what it is given, in this order:

    job            the state, changed by the table in state/transitions.py, each change in the journal first
    nodes          agents: started, asked for, ordered, given up
    attempts       every stop and every start of trainers
    recovery       the recovery action for each node to blame
    checks         nodes that test themselves
    placement      which nodes hold which ranks
    seen           what was seen, as the rules judge it
    response       what follows from verdicts
    standing       what agents know of ranks that stand still
    diagnosis      when the rules look at what
    files          what agents on other machines send of their trainers' files
    faults         faults on purpose, for trainers that do not see the run folder
    lost           nodes that are gone
    notices        what the cluster says of the job by itself
    adoption       what agents hold of a job that the journal has lost
    operations     what people ask for
    telemetry      what agents send
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megascale.config import Config
from megascale.core.events import Event
from megascale.errors import EXIT_INTERRUPTED
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.driver.audit_log import AuditLog
from megascale.resilience.driver.diagnosis.diagnosis import Diagnosis
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.diagnosis.slow_look import SlowLook
from megascale.resilience.driver.diagnosis.standing_ranks import StandingRanks
from megascale.resilience.driver.job_files import JobFiles
from megascale.resilience.driver.nodes.agent_server import AgentServer
from megascale.resilience.driver.nodes.nodes import Nodes
from megascale.resilience.driver.nodes.passed_faults import PassedFaults
from megascale.resilience.driver.nodes.received_files import ReceivedFiles
from megascale.resilience.driver.operations import Operations
from megascale.resilience.driver.process.driver_garbage import OldGarbage
from megascale.resilience.driver.process.loop_tasks import LoopTasks
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.placement import Placement
from megascale.resilience.driver.recovery.recovery import Recovery
from megascale.resilience.driver.recovery.self_checks import SelfChecks
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED, JobState, Phase
from megascale.resilience.driver.state.journal import Entry
from megascale.resilience.driver.state.lasting_journal import LastingJournal
from megascale.resilience.driver.state.transitions import JobEvent
from megascale.resilience.driver.telemetry.adoption import Adoption
from megascale.resilience.driver.telemetry.agent_telemetry import AgentTelemetry
from megascale.resilience.driver.telemetry.cluster_notices import ClusterNotices
from megascale.resilience.driver.telemetry.lost_nodes import LostNodes
from megascale.resilience.driver.telemetry.response import Response
from megascale.resilience.protocol.agent_channel import DriverTls
from megascale.resilience.protocol.agent_messages import Hello
from megascale.resilience.protocol.contact import Contact, make_token, write_contact
from megascale.resilience.protocol.given import JobDescription

TICK = 0.25  # seconds between looks when nothing happens
COALESCE = 0.02  # seconds in which what happens together is looked at together
LEAVE = 10.0  # seconds that agents get to end
CALM = 3.0  # seconds that training must run before spares are looked after


class Driver:
    """Args:
    run: the run folder.
    config: resolved; `resilience` and the layout are used.
    cluster: where nodes come from.
    words: further settings of the trainers' command line.
    journal: held by this driver.
    job: where it stands: new, or as the journal remembers it.
    say: called with each line for the terminal: (who, text).
    unsure: the journal may be behind what runs, so the agents are asked first (telemetry/adoption.py).
    files: what the settings name: nodes in rank order, environment of trainers.
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
        files: JobFiles = JobFiles(),
    ) -> None:
        self.run_folder, self.journal, self.say, self._unsure = run, journal, say, unsure
        journal.say = lambda text: say("driver", text)
        self.token = make_token(run)
        self.audit_log = AuditLog(run, journal, say)
        self.tasks = LoopTasks()
        settings = self.settings = RunningSettings(run, config)
        limits = self.limits = settings.limits
        note, tasks = self.note, self.tasks
        self.job = Job(job, journal, self._refused, tasks.wake.set)
        self.job.apply(JobEvent.OPENED, epoch=journal.epoch)
        self.nodes = Nodes(self.job, cluster, tasks, limits, note)
        self.attempts = Attempts(self.job, self.nodes, settings, words, note, files)
        common = (self.job, self.nodes, self.attempts)
        self.recovery = Recovery(*common, settings, self.audit_log.uses(), note)
        self.checks = SelfChecks(*common, self.recovery, settings, note)
        self.placement = Placement(*common, self.recovery, self.checks, settings, note, files.nodes)
        self.seen = Observations(*common, settings, note)
        self.response = Response(run, *common, self.recovery, self.seen, settings, tasks, note)
        self.standing = StandingRanks(self.job, self.nodes, settings)
        self.diagnosis = Diagnosis(
            self.job, self.seen, self.standing, self.response.act, tasks, note, SlowLook(run, self.job, tasks)
        )
        self.files = ReceivedFiles(run, lambda: settings.config.to_toml())
        self.faults = PassedFaults(run, self.job, self.nodes, self.files.taken) if limits.faults else None
        self.lost = LostNodes(self.job, self.nodes, self.recovery, self.seen, self.response, limits.window)
        self.notices = ClusterNotices(*common, self.response, note)
        self.adoption = Adoption(*common, self.response, limits.window, note)
        self.operations = Operations(*common, self.recovery, settings, note)
        self.telemetry = AgentTelemetry(
            *(*common, self.seen, self.response, self.checks, self.adoption, self.lost),
            *(self.standing, self.files, tasks, self._outgrown, say, note),
            *(config.train.device, _described(run, config)),
        )
        self.agent_server = AgentServer(job.name, self.token, self.telemetry)
        self.address: tuple[str, int] = ("", 0)
        self.api_url = ""
        self.leaving = False
        self.slowest = 0.0  # seconds that the slowest look at everything took

    def note(self, kind: Event | str, **about: Any) -> Entry:
        """Write an event down."""
        return self.audit_log.note(str(kind), attempt=self.job.state.attempt, **about)

    def _refused(self, why: str) -> None:
        self.note(Event.TRANSITION_REFUSED, action="refused", evidence=(why,))

    # life -----------------------------------------------------------------------------------------------------------

    async def open(self, tls: DriverTls | None = None, port: int | None = None) -> None:
        """Listen for agents, on another port than the settings' if one is given."""
        port = self.limits.port if port is None else port
        self.address = await self.agent_server.open(self.limits.listen, port, tls)

    def announce(self, api_url: str) -> None:
        """Say where agents and commands reach this driver."""
        self.api_url = api_url
        contact = Contact(self.job.state.name, self.journal.epoch, os.getpid(), self.address, api_url)
        write_contact(self.run_folder, contact)
        description = JobDescription(contact.job, contact.epoch, self.address, self.limits)
        self.nodes.cluster.announce(description, self.token)

    def hand_over(self) -> None:
        """End soon without touching the job: another driver follows."""
        self.leaving = True
        self.tasks.wake.set()

    def _outgrown(self, hello: Hello) -> None:
        """A node knows a newer driver than the journal does: the journal was removed, or is an older one.

        Its epoch is taken over; Fenced if another driver has the newer epoch. Attempts: see `Attempts.begin`.
        """
        before, theirs = self.journal.epoch, hello.epoch
        self.journal.raise_epoch(theirs + 1)
        self.job.apply(JobEvent.OPENED, epoch=self.journal.epoch)
        self.announce(self.api_url)
        text = (
            f"{hello.node} knows a driver of epoch {theirs} and attempt {hello.attempt}, the journal only epoch "
            f"{before}: it was removed or is an old one; this driver goes on as epoch {self.journal.epoch}"
        )
        self.note(Event.JOURNAL_DAMAGED, nodes=(hello.node,), evidence=(text,))

    async def run(self) -> int:
        """Work until the job has ended; returns its exit code. Raises Fenced when another driver has taken over."""
        now = time.monotonic()
        took_over = self._unsure or self.job.phase is not Phase.WAITING or bool(self.job.state.placement)
        if self._unsure:
            self.adoption.doubt(now)
        event = Event.DRIVER_TOOK_OVER if took_over else Event.DRIVER_STARTED
        self.note(event, evidence=(f"epoch {self.journal.epoch}; the job is {self.job.phase}",), pid=os.getpid())
        self.nodes.begin(now)
        garbage = OldGarbage()
        try:
            await self._loop(now, garbage)
            if self.leaving:
                self.note(Event.DRIVER_ENDED, evidence=("it hands the job over to another driver; training goes on",))
                return EXIT_INTERRUPTED
            await self._farewell()
        finally:
            garbage.close()
            self.tasks.cancel()
            await self.agent_server.close()
            await self.nodes.cluster.close()
            await asyncio.to_thread(self.files.close)
        return self.job.state.exit_code

    async def _loop(self, now: float, garbage: OldGarbage) -> None:
        renewed, due = 0.0, now
        while self.job.phase not in ENDED and not self.leaving:
            if time.monotonic() - renewed > min(1.0, self.limits.lease / 3):
                self.journal.renew()
                self.job.flush()
                renewed = time.monotonic()
            looked = time.monotonic()
            late = looked - due
            if late > self.limits.window / 2:  # what is shorter cannot make a node that beats seem silent
                self.lost.forgive(late)
            self.step(looked)
            if self.job.phase in ENDED:
                break
            took = time.monotonic() - looked
            self.slowest = max(self.slowest, took)
            # However many nodes there are, looking at them takes a part of the time only.
            pause = min(1.0, max(TICK, 4 * took))
            pause = min(pause, self.lost.next_silence(time.monotonic(), TICK))
            due = time.monotonic() + pause
            try:
                async with asyncio.timeout(pause):
                    await self.tasks.wake.wait()
                    await asyncio.sleep(COALESCE)
            except TimeoutError:
                pass
            self.tasks.wake.clear()
            stood = garbage.tidy()
            if stood:
                self.lost.forgive(stood)
                due += stood

    def step(self, now: float) -> None:
        """Look at everything once and do what follows."""
        self.notices.handle()
        if self.adoption.unsure and not self.adoption.decide(now):
            return
        self.lost.watch(now)
        phase = self.job.phase
        if phase in (Phase.STARTING, Phase.RUNNING):
            self.diagnosis.judge(now)
            if self.faults is not None:
                self.faults.look()
            if self.job.phase is Phase.RUNNING and now - self.job.entered >= CALM:
                self.checks.test_spares()
                self.recovery.refill(now)
        elif phase is Phase.STOPPING:
            self.placement.check_stopped(now)
        elif phase is Phase.DIAGNOSING:
            self.checks.check(now)
        if self.job.phase is Phase.WAITING:
            self.placement.place(now)

    async def _farewell(self) -> None:
        """Let all agents go, and make sure that they have gone."""
        for node in self.nodes.all():
            self.nodes.order(node, do="leave")
        deadline = time.monotonic() + LEAVE
        while any(node.channel and not node.given_up for node in self.nodes.all()) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        running = [info.name for info in self.nodes.cluster.nodes() if info.running]
        await asyncio.gather(*(self.nodes.cluster.fence(name) for name in running))
        self.note(Event.DRIVER_ENDED, evidence=(f"the job is {self.job.phase}: {self.job.state.why}",))


def _described(run: Path, config: Config) -> dict[str, str]:
    """What a node that asks into the job is told of it."""
    checkpoints = run / "checkpoints"
    marker = next((file.name for file in sorted(checkpoints.glob(".shared-*"))), "")
    limits = config.resilience.model_dump_json()
    return {"limits": limits, "marker": marker, "checkpoints": str(checkpoints) if marker else ""}
