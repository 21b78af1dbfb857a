"""The driver: one loop that watches a job's nodes, decides by rules and the escalation policy, and records why.

The driver holds no trainer and no device. If it is killed and started again, it reads its journal, waits for the agents
to reconnect, and continues, while training runs on. All work except lengthy investigations runs on one thread with one
asyncio loop. docs/architecture.md follows a heartbeat through the parts of the driver to an action.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megascale.config import Config
from megascale.core.events import Event
from megascale.errors import EXIT_INTERRUPTED
from megascale.resilience.cluster.base import Cluster
from megascale.resilience.driver.diagnosis.diagnosis import Diagnosis
from megascale.resilience.driver.diagnosis.investigations import RankInvestigation, SlowMachineSearch
from megascale.resilience.driver.diagnosis.observations import Observations
from megascale.resilience.driver.launch_checks import JobFiles
from megascale.resilience.driver.nodes import Nodes
from megascale.resilience.driver.operations import Operations
from megascale.resilience.driver.process import DeferredGarbageCollection, LoopTasks
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.escalation import list_past_uses
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.missing_replicas import MissingReplicas
from megascale.resilience.driver.recovery.placement import Placement
from megascale.resilience.driver.recovery.recovery import Recovery, SelfChecks
from megascale.resilience.driver.recovery.response import Response
from megascale.resilience.driver.recovery.spare_processes import SpareProcesses
from megascale.resilience.driver.state.audit_log import AuditLog
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED, JobEvent, JobState, Phase
from megascale.resilience.driver.state.journal import Journal
from megascale.resilience.driver.state.journal_reader import Entry
from megascale.resilience.driver.telemetry.admission import Admission, Announcement
from megascale.resilience.driver.telemetry.agent_server import AgentServer, AgentTelemetry
from megascale.resilience.driver.telemetry.membership import Adoption, ClusterNotices, LostNodes
from megascale.resilience.driver.telemetry.trainer_files import FaultForwarding, ReceivedFiles
from megascale.resilience.protocol.agent_channel import DriverTls
from megascale.resilience.protocol.contact import make_token

TICK_SECONDS = 0.25  # seconds between iterations of the loop when nothing happens
COALESCE_SECONDS = 0.02  # seconds for which the loop waits after an event, to handle simultaneous events together
LEAVE_SECONDS = 10.0  # seconds that agents get to end
CALM_SECONDS = 3.0  # seconds that training must run before spares are tested and requested


class Driver:
    """The driver of one job: builds its parts, and runs the loop.

    Args:
        config: the resolved configuration; `resilience` and the layout are used.
        cluster: provides the nodes.
        overrides: further settings of the trainers' command line.
        state: the state of the job, either a new one or the journal's.
        log_line: called with each line for the terminal: (source, text).
        is_journal_doubtful: the journal may be older than the running trainers, so the driver asks the agents first
            (telemetry/membership.py).
        job_files: the contents of the files that the settings name.

    Attributes:
        is_leaving: the loop ends soon without touching the job, since another driver continues it.
        slowest_seconds: duration of the slowest iteration.
        limits: the configuration section [resilience].
    """

    def __init__(
        self,
        run: Path,
        config: Config,
        cluster: Cluster,
        overrides: Sequence[str],
        journal: Journal,
        state: JobState,
        log_line: Callable[[str, str], None] = lambda source, text: None,
        is_journal_doubtful: bool = False,
        job_files: JobFiles = JobFiles(),
    ) -> None:
        self.run_folder = run
        self.journal = journal
        self.log_line = log_line
        self._is_journal_doubtful = is_journal_doubtful
        self.is_leaving = False
        self.slowest_seconds = 0.0
        journal.report = lambda text: log_line("driver", text)
        self.audit_log = AuditLog(run, journal, log_line)
        self.tasks = LoopTasks()
        self.settings = RunningSettings(run, config)
        self.limits = self.settings.limits
        self.job = Job(state, journal, self._record_refusal, self.tasks.wake.set)
        self.job.apply(JobEvent.OPENED, epoch=journal.epoch)
        self._build_recovery(cluster, overrides, job_files)
        self._build_diagnosis()
        self._build_telemetry(make_token(run))

    def _build_recovery(self, cluster: Cluster, overrides: Sequence[str], files: JobFiles) -> None:
        """Build the parts that start, place and recover ranks. Each part gets the parts on which it acts."""
        record_event = self.record_event
        self.nodes = Nodes(self.job, cluster, self.tasks, self.limits, record_event)
        self.attempts = Attempts(
            job=self.job,
            nodes=self.nodes,
            settings=self.settings,
            record_event=record_event,
            overrides=overrides,
            files=files,
        )
        self.recovery = Recovery(
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            settings=self.settings,
            record_event=record_event,
            uses=list_past_uses(self.journal.events(), time.time(), time.monotonic()),
        )
        self.self_checks = SelfChecks(
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            recovery=self.recovery,
            settings=self.settings,
            record_event=record_event,
        )
        self.missing_replicas = MissingReplicas(
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            settings=self.settings,
            record_event=record_event,
        )
        self.spare_processes = SpareProcesses(
            job=self.job, nodes=self.nodes, attempts=self.attempts, settings=self.settings
        )
        self.placement = Placement(
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            recovery=self.recovery,
            self_checks=self.self_checks,
            missing_replicas=self.missing_replicas,
            settings=self.settings,
            record_event=record_event,
            configured_names=files.nodes,
        )
        self.response = Response(
            run=self.run_folder,
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            recovery=self.recovery,
            settings=self.settings,
            tasks=self.tasks,
            record_event=record_event,
        )
        self.operations = Operations(
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            recovery=self.recovery,
            settings=self.settings,
            record_event=record_event,
        )

    def _build_diagnosis(self) -> None:
        """Build the parts that observe ranks and judge them by rules."""
        self.rank_investigation = RankInvestigation(job=self.job, nodes=self.nodes, settings=self.settings)
        slow_machines = SlowMachineSearch(run=self.run_folder, job=self.job, tasks=self.tasks)
        self.observations = Observations(
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            response=self.response,
            settings=self.settings,
            record_event=self.record_event,
            list_slow_findings=slow_machines.list_findings,
        )
        self.diagnosis = Diagnosis(
            job=self.job,
            observations=self.observations,
            rank_investigation=self.rank_investigation,
            slow_machines=slow_machines,
            response=self.response,
            tasks=self.tasks,
            record_event=self.record_event,
        )

    def _build_telemetry(self, token: bytes) -> None:
        """Build the parts that exchange messages with agents."""
        config = self.settings.config
        self.received_files = ReceivedFiles(self.run_folder, lambda: self.settings.config.to_toml())
        self.fault_forwarding: FaultForwarding | None = None
        if self.limits.faults:
            self.fault_forwarding = FaultForwarding(
                run=self.run_folder, job=self.job, nodes=self.nodes, taken_faults=self.received_files.taken_faults
            )
        self.lost_nodes = LostNodes(
            job=self.job,
            nodes=self.nodes,
            recovery=self.recovery,
            response=self.response,
            observations=self.observations,
            window=self.limits.window,
        )
        self.cluster_notices = ClusterNotices(
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            response=self.response,
            record_event=self.record_event,
        )
        self.adoption = Adoption(
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            response=self.response,
            window=self.limits.window,
            record_event=self.record_event,
        )
        self.announcement = Announcement(
            run=self.run_folder,
            job=self.job,
            journal=self.journal,
            cluster=self.nodes.cluster,
            limits=self.limits,
            token=token,
            record_event=self.record_event,
        )
        self.admission = Admission(
            job=self.job,
            nodes=self.nodes,
            adoption=self.adoption,
            announcement=self.announcement,
            tasks=self.tasks,
            record_event=self.record_event,
            device=config.train.device,
            offer_fields=_make_offer_fields(self.run_folder, config),
        )
        self.telemetry = AgentTelemetry(
            job=self.job,
            nodes=self.nodes,
            attempts=self.attempts,
            observations=self.observations,
            response=self.response,
            self_checks=self.self_checks,
            adoption=self.adoption,
            lost_nodes=self.lost_nodes,
            rank_investigation=self.rank_investigation,
            received_files=self.received_files,
            tasks=self.tasks,
            log_line=self.log_line,
        )
        self.agent_server = AgentServer(self.job.state.name, token, self.admission, self.telemetry)

    def record_event(self, kind: Event | str, **details: Any) -> Entry:
        """Write an event of the present attempt into the audit log."""
        return self.audit_log.record(str(kind), attempt=self.job.state.attempt, **details)

    def _record_refusal(self, reason: str) -> None:
        """Record an event that the table of transitions does not allow (state/job_state.py)."""
        self.record_event(Event.TRANSITION_REFUSED, action="refused", evidence=(reason,))

    # start, loop and end --------------------------------------------------------------------------------------------

    async def open(self, tls: DriverTls | None = None, port: int | None = None) -> None:
        """Listen for agents, on `port` instead of the configured port if it is given."""
        port = self.limits.port if port is None else port
        self.announcement.address = await self.agent_server.open(self.limits.listen, port, tls)

    def announce(self, api_url: str) -> None:
        """Announce the addresses of this driver to agents and commands."""
        self.announcement.api_url = api_url
        self.announcement.publish()

    def hand_over(self) -> None:
        """End soon without touching the job: another driver follows."""
        self.is_leaving = True
        self.tasks.wake.set()

    async def run(self) -> int:
        """Work until the job has ended; return its exit code. Raise JournalFenced when another driver takes over."""
        current_time = time.monotonic()
        # A new job is WAITING and has no placement.
        takes_over = self._is_journal_doubtful or self.job.phase is not Phase.WAITING or bool(self.job.state.placement)
        if self._is_journal_doubtful:
            self.adoption.wait_for_agents(current_time)
        event = Event.DRIVER_TOOK_OVER if takes_over else Event.DRIVER_STARTED
        text = f"epoch {self.journal.epoch}; the job is {self.job.phase}"
        self.record_event(event, evidence=(text,), pid=os.getpid())
        self.nodes.start_missing_agents(current_time)
        garbage = DeferredGarbageCollection()
        try:
            await self._loop(current_time, garbage)
            if self.is_leaving:
                text = "it hands the job over to another driver; training continues"
                self.record_event(Event.DRIVER_ENDED, evidence=(text,))
                return EXIT_INTERRUPTED
            await self._dismiss_agents()
        finally:
            garbage.close()
            self.tasks.cancel()
            await self.agent_server.close()
            await self.nodes.cluster.close()
            await asyncio.to_thread(self.received_files.close)
        return self.job.state.exit_code

    async def _loop(self, current_time: float, garbage: DeferredGarbageCollection) -> None:
        """Repeat `run_iteration` until the job has ended or another driver follows.

        Agents' messages wait while this loop or a garbage collection is busy. `forgive_delay` then counts no node as
        silent for that time.
        """
        last_renewal = 0.0  # of the journal's lease
        due = current_time  # when the next iteration should begin
        while self.job.phase not in ENDED and not self.is_leaving:
            if time.monotonic() - last_renewal > min(1.0, self.limits.lease / 3):
                self.journal.renew()
                self.job.flush()
                last_renewal = time.monotonic()
            began = time.monotonic()
            if began - due > self.limits.window / 2:  # A shorter delay cannot make a node seem silent.
                self.lost_nodes.forgive_delay(began - due)
            self.run_iteration(began)
            if self.job.phase in ENDED:
                break
            duration = time.monotonic() - began
            self.slowest_seconds = max(self.slowest_seconds, duration)
            # The pause grows with the duration of an iteration, up to a second, so that other tasks of the event loop
            # get four fifths of the time.
            pause = min(1.0, max(TICK_SECONDS, 4 * duration))
            pause = min(pause, self.lost_nodes.compute_next_silence(time.monotonic(), TICK_SECONDS))
            due = time.monotonic() + pause
            try:
                async with asyncio.timeout(pause):
                    await self.tasks.wake.wait()
                    await asyncio.sleep(COALESCE_SECONDS)
            except TimeoutError:
                pass
            self.tasks.wake.clear()
            collection_seconds = garbage.collect_if_due()
            if collection_seconds:
                self.lost_nodes.forgive_delay(collection_seconds)
                due += collection_seconds

    def run_iteration(self, current_time: float) -> None:
        """Examine the whole job once, and act on it."""
        self.nodes.iteration_time = current_time
        self.cluster_notices.handle()
        if self.adoption.is_waiting and not self.adoption.decide(current_time):
            return
        self.lost_nodes.find_lost_nodes(current_time)
        if self.job.is_at_work:
            self.diagnosis.judge(current_time)
            if self.fault_forwarding is not None:
                self.fault_forwarding.send_new_faults()
            if self.job.is_running and current_time - self.job.phase_entered >= CALM_SECONDS:
                self.self_checks.test_spares()
                self.spare_processes.prepare()
                self.recovery.refill_spares(current_time)
            self.missing_replicas.check_degraded_job()
        elif self.job.phase is Phase.STOPPING:
            self.placement.check_stopped(current_time)
        elif self.job.phase is Phase.DIAGNOSING:
            self.self_checks.collect_results(current_time)
        if self.job.phase is Phase.WAITING:
            self.placement.assign_ranks(current_time)

    async def _dismiss_agents(self) -> None:
        """Order all agents to end, and ensure that they have ended."""
        for node in self.nodes.all():
            self.nodes.order(node, do="leave")
        deadline = time.monotonic() + LEAVE_SECONDS
        while time.monotonic() < deadline:
            if not any(node.channel and node.state.is_present for node in self.nodes.all()):
                break
            await asyncio.sleep(0.02)
        running = [info.name for info in self.nodes.cluster.nodes() if info.has_agent]
        await asyncio.gather(*(self.nodes.cluster.fence(name) for name in running))
        self.record_event(Event.DRIVER_ENDED, evidence=(f"the job is {self.job.phase}: {self.job.state.reason}",))


def _make_offer_fields(run: Path, config: Config) -> dict[str, str]:
    """Return the constant fields of the `JobOffer` for joining nodes.

    A marker file in the checkpoint folder shows that all nodes share the folder (cluster/remote.py).
    """
    checkpoints = run / "checkpoints"
    marker = next((file.name for file in sorted(checkpoints.glob(".shared-*"))), "")
    limits = config.resilience.model_dump_json()
    return {"limits": limits, "marker": marker, "checkpoints": str(checkpoints) if marker else ""}
