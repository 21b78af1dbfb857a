"""What people may ask of a driver, through the API, the commands or a signal."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megascale.core.events import Event
from megascale.errors import EXIT_INTERRUPTED
from megascale.resilience.driver.nodes.nodes import Nodes, Note
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.recovery import Recovery
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import ENDED, NodeState, Phase
from megascale.resilience.driver.state.transitions import JobEvent, NodeEvent

# Seconds in which a second signal to end is the first one once more: Slurm sends it to all processes of a job, and the
# batch script hands on its own.
ONCE = 2.0


class Operations:
    """Args:
    job, nodes, attempts, recovery: what people change.
    settings: in force.
    note: writes an event down.
    """

    def __init__(
        self, job: Job, nodes: Nodes, attempts: Attempts, recovery: Recovery, settings: RunningSettings, note: Note
    ) -> None:
        self._job, self._nodes, self._attempts, self._recovery = job, nodes, attempts, recovery
        self._settings, self._note = settings, note

    def interrupt(self) -> None:
        """Save and end; launching again goes on. Asked again while it saves, it ends without."""
        if self._job.phase in ENDED:
            return
        saving = self._job.state.save and self._job.state.goal is Phase.INTERRUPTED and self._job.ending
        if saving and time.monotonic() - self._job.entered < ONCE:
            return
        self._note(Event.JOB_INTERRUPTED, action="stop", evidence=("a person interrupted the driver",))
        save = self._job.phase is Phase.RUNNING  # before the first step there is nothing new to save
        self._attempts.stop(JobEvent.INTERRUPTED, "interrupted", save=save, exit_code=EXIT_INTERRUPTED)

    def restart(self, why: str, settings: Sequence[str] = ()) -> bool:
        """Save, import the code anew, and start again, with `settings` (section.key=value) changed.

        False if the job does not run. ConfigError, and nothing has happened, for settings that cannot be changed.
        """
        if self._job.phase is not Phase.RUNNING:
            return False
        updating = self._job.state.updating
        if settings:
            self._note(Event.UPDATED, evidence=self._settings.change(settings))
            updating = True
        self._note(Event.RESTARTED, evidence=(why,))
        fresh = tuple(self._nodes.names())
        self._attempts.stop(JobEvent.RESTARTED, why, save=True, fresh=fresh, updating=updating)
        return True

    def pause(self, why: str) -> bool:
        """Let the trainers save and stop; the nodes stay. False if there is nothing to pause now."""
        if self._job.phase not in (Phase.WAITING, Phase.STARTING, Phase.RUNNING):
            return False
        self._note(Event.PAUSED, evidence=(why,))
        self._attempts.stop(JobEvent.PAUSED, why, save=self._job.phase is Phase.RUNNING)
        return True

    def resume(self, why: str) -> bool:
        """Go on after a pause. False if the job is not paused."""
        if self._job.phase is not Phase.PAUSED:
            return False
        self._note(Event.CONTINUED, evidence=(why,))
        return self._job.apply(JobEvent.RESUMED, why=why)

    def evict(self, name: str, why: str) -> None:
        """Take a node out; its ranks move."""
        phase, holds = self._job.phase, name in self._job.state.placement
        self._note(Event.EVICTION_ASKED, nodes=(name,), evidence=(why,))
        if holds and phase is Phase.RUNNING:  # nothing is broken: the trainers save first
            self._recovery.reasons[name] = f"a person: {why}"
            self._job.apply(JobEvent.EVICTING, evicting=(*self._job.state.evicting, name))
            self._attempts.stop(JobEvent.RESTARTED, f"evict {name}: {why}", save=True)
        elif holds and phase is Phase.STARTING:
            self._recovery.recover((name,), frozenset({name}))
        else:
            self._nodes.take_out(self._nodes[name], True, why)

    def cordon(self, name: str, on: bool, why: str) -> None:
        """Keep a node from getting anything new, or allow it again (an evicted one too)."""
        self._note(Event.NODE_CORDONED if on else Event.NODE_UNCORDONED, nodes=(name,), evidence=(why,))
        node = self._nodes.change(name, NodeEvent.CORDONED if on else NodeEvent.UNCORDONED)
        if not on:
            self._nodes.cluster.unblock(name)
        if not on and node.state in (NodeState.EVICTED, NodeState.LOST):
            self._nodes.start(node, why)
