"""Operations that a person orders through the API, a command or a signal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from megascale.core.events import Event
from megascale.errors import EXIT_INTERRUPTED
from megascale.resilience.driver.nodes import Nodes
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.recovery import Recovery
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED, JobEvent, NodeEvent, Phase

# Seconds in which a second signal counts as a repetition of the first. Slurm sends a signal to all processes of a job,
# and the batch script passes its own signal on to the driver.
REPEATED_SIGNAL_SECONDS = 2.0


@dataclass(kw_only=True, eq=False)
class Operations:
    """Carries out the orders of people.

    Attributes:
        nodes: all nodes.
        attempts: stops the trainers.
        recovery: moves the ranks of evicted nodes.
        record_event: writes an event into the audit log.
    """

    job: Job
    nodes: Nodes
    attempts: Attempts
    recovery: Recovery
    settings: RunningSettings
    record_event: RecordEvent

    def interrupt(self) -> None:
        """Save and end; the next launch continues. A second order while trainers save ends them without saving."""
        if self.job.phase in ENDED:
            return
        is_saving = self.job.state.save and self.job.state.goal is Phase.INTERRUPTED and self.job.is_ending
        if is_saving and time.monotonic() - self.job.phase_entered < REPEATED_SIGNAL_SECONDS:
            return
        self.record_event(Event.JOB_INTERRUPTED, action="stop", evidence=("a person interrupted the driver",))
        save = self.job.is_running  # Before the first step there is nothing new to save.
        reason = "a person ended it; the same command resumes from the newest saved state"
        self.attempts.stop(JobEvent.INTERRUPTED, reason, save=save, exit_code=EXIT_INTERRUPTED)

    def restart(self, reason: str, settings: Sequence[str] = ()) -> bool:
        """Save, then start again with newly imported code and with `settings` (section.key=value) changed.

        Return False if the job does not run. Raise ConfigError, with nothing changed, for settings that are fixed.
        """
        if not self.job.is_running:
            return False
        updating = self.job.state.updating
        if settings:
            self.record_event(Event.UPDATED, evidence=self.settings.change(settings))
            updating = True
        self.record_event(Event.RESTARTED, evidence=(reason,))
        fresh = tuple(self.nodes.names())
        self.attempts.stop(JobEvent.RESTARTED, reason, save=True, fresh=fresh, updating=updating)
        return True

    def pause(self, reason: str) -> bool:
        """Let the trainers save and stop; the nodes stay. Return False if there is nothing to pause."""
        if self.job.phase is not Phase.WAITING and not self.job.is_at_work:
            return False
        self.record_event(Event.PAUSED, evidence=(reason,))
        self.attempts.stop(JobEvent.PAUSED, reason, save=self.job.is_running)
        return True

    def resume(self, reason: str) -> bool:
        """Continue after a pause; return False if the job is not paused."""
        if self.job.phase is not Phase.PAUSED:
            return False
        self.record_event(Event.CONTINUED, evidence=(reason,))
        return self.job.apply(JobEvent.RESUMED, reason=reason)

    def evict(self, name: str, reason: str) -> None:
        """Take a node out of the job; its ranks move to another one."""
        phase = self.job.phase
        has_ranks = name in self.job.state.placement
        self.record_event(Event.EVICTION_ASKED, nodes=(name,), evidence=(reason,))
        if has_ranks and self.job.is_running:  # All trainers work, so they save first.
            self.recovery.reasons[name] = f"a person: {reason}"
            self.job.apply(JobEvent.EVICTING, evicting=self.job.state.evicting + (name,))
            self.attempts.stop(JobEvent.RESTARTED, f"evict {name}: {reason}", save=True)
        elif has_ranks and phase is Phase.STARTING:
            self.recovery.recover((name,), frozenset({name}))
        else:
            self.nodes.take_out(self.nodes[name], evict=True, reason=reason)

    def cordon(self, name: str, reason: str) -> None:
        """Give a node no new ranks from now on."""
        self.record_event(Event.NODE_CORDONED, nodes=(name,), evidence=(reason,))
        self.nodes.change(name, NodeEvent.CORDONED)

    def uncordon(self, name: str, reason: str) -> None:
        """Allow a node to get ranks again, an evicted node too."""
        self.record_event(Event.NODE_UNCORDONED, nodes=(name,), evidence=(reason,))
        node = self.nodes.change(name, NodeEvent.UNCORDONED)
        self.nodes.cluster.unblock(name)
        if node.state.is_excluded:
            self.nodes.start_in_background(node, reason)
