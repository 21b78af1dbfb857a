"""The response to verdicts: each verdict is recorded once, and the driver acts on the most severe one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megascale.core.events import Event
from megascale.core.python_process import module_command
from megascale.errors import EXIT_FAILED
from megascale.resilience.driver.nodes import Nodes
from megascale.resilience.driver.process import LoopTasks
from megascale.resilience.driver.recovery import escalation
from megascale.resilience.driver.recovery.attempts import Attempts
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.recovery.recovery import Recovery
from megascale.resilience.driver.state.audit_log import RecordEvent
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import JobEvent
from megascale.resilience.protocol.heartbeat import Worker
from megascale.resilience.rules.view import SEVERITY, Incident, Verdict

log = logging.getLogger("megascale.driver")

SAMPLES_TIMEOUT = 30.0  # seconds for the search for the samples of a step
_KILL_SECONDS = 5.0  # to wait for the end of a killed process
_LISTED_WINDOWS = 16  # windows of one file that a sentence lists
_ERROR_CHARACTERS = 300  # at the end of the search's error output
_LONG_EVIDENCE = 3  # sentences of evidence in the reason of a failed job
_SHORT_EVIDENCE = 2  # the same of the last verdict in a reason that has a sentence of its own
# Faults after which copies of the state in memory are not trusted.
_DISTRUSTED = (Event.CHECKSUM_MISMATCH, Event.REPLAY_MISMATCH)
# Faults that new settings may cause.
_SETTINGS_FAULTS = (Event.USER_ERROR, Event.OUT_OF_MEMORY, Event.NONFINITE_LOSS)


@dataclass(kw_only=True, eq=False)
class Response:
    """Records verdicts and acts on them.

    Attributes:
        run: the run folder, whose samples are looked up.
        nodes: all nodes.
        attempts: stops the trainers.
        recovery: chooses the recovery action of each node to blame.
        tasks: runs lengthy work.
        record_event: writes an event into the audit log.
        incidents: verdicts that named a node, over all attempts, oldest first.
        past_verdicts: (time, verdict) of the verdicts that ended earlier attempts, oldest first.
    """

    run: Path
    job: Job
    nodes: Nodes
    attempts: Attempts
    recovery: Recovery
    settings: RunningSettings
    tasks: LoopTasks
    record_event: RecordEvent
    incidents: list[Incident] = field(default_factory=list)
    past_verdicts: list[tuple[float, Verdict]] = field(default_factory=list)
    _recorded: set[tuple[Any, ...]] = field(default_factory=set, init=False)  # keys of recorded verdicts (`_is_new`)
    _is_ending: bool = field(default=False, init=False)  # The job fails once the samples of its last step are known.

    def act(self, verdicts: Sequence[Verdict]) -> None:
        """Record verdicts, each once per attempt, and act on the most severe."""
        new_verdicts = [verdict for verdict in map(self._soften, verdicts) if self._is_new(verdict)]
        for verdict in new_verdicts:
            self.record_event(
                verdict.kind,
                action=verdict.action,
                nodes=verdict.nodes,
                ranks=verdict.ranks,
                evidence=verdict.evidence,
                person=verdict.needs_person,
            )
            if verdict.evidence:
                reason = f"{verdict.kind}: {verdict.evidence[0]}"
                self.recovery.reasons |= dict.fromkeys(verdict.nodes, reason)
            self.add_incident(verdict)
        severe = [verdict for verdict in new_verdicts if SEVERITY[verdict.action] >= SEVERITY["recover"]]
        if severe and not self._is_ending and self.job.is_at_work:
            current_time = time.monotonic()
            self.past_verdicts += [(current_time, verdict) for verdict in severe]
            self._end_attempt(severe)

    def add_incident(self, verdict: Verdict) -> None:
        """Remember the nodes that a verdict named."""
        current_time = time.monotonic()
        self.incidents += [Incident(current_time, node, str(verdict.kind)) for node in verdict.nodes]

    def _soften(self, verdict: Verdict) -> Verdict:
        """Return an alert in place of the eviction of a slow node, if no spare can take its ranks."""
        if verdict.kind != Event.SLOW_NODE or verdict.action != "evict" or self.nodes.list_spares():
            return verdict
        text = "no spare is available to take its ranks, so it continues; it is evicted once there is one"
        return replace(verdict, action="alert", evidence=verdict.evidence + (text,))

    def _is_new(self, verdict: Verdict) -> bool:
        """Return True for the first such verdict of the attempt, and remember it."""
        key = (self.job.state.attempt, verdict.kind, verdict.nodes, verdict.ranks, verdict.action)
        is_new = key not in self._recorded
        self._recorded.add(key)
        return is_new

    def _list_workers(self) -> list[Worker]:
        """Return all ranks as last seen."""
        return [worker for node in self.nodes.all() for worker in node.workers]

    def _end_attempt(self, verdicts: list[Verdict]) -> None:
        """End the present attempt because of severe verdicts."""
        worst = max(verdicts, key=lambda verdict: SEVERITY[verdict.action])
        self.attempts.timeline.begin_recovery(worst, self.nodes.all(), time.monotonic())
        distrust = self.job.state.distrust or any(verdict.kind in _DISTRUSTED for verdict in verdicts)
        # New settings with which no step has completed are undone before the fault counts as one of the job.
        if self.job.state.updating and worst.kind in _SETTINGS_FAULTS:
            self.job.apply(JobEvent.START_ENDED, distrust=distrust)
            self._undo_update(worst)
            return
        end_step = escalation.find_end_step(verdicts, self._list_workers())
        progress = escalation.compute_progress(self.job.state, end_step)
        self.job.apply(JobEvent.START_ENDED, distrust=distrust, **progress)
        limit = self.settings.limits.no_progress_limit
        if worst.action == "stop":
            reason = "; ".join(worst.evidence[:_LONG_EVIDENCE])
            self.fail(reason, code=self._find_exit_code(worst), end_step=end_step)
        elif self.job.state.starts_without_progress >= limit:
            reason = escalation.explain_no_progress(self.job.state, limit)
            last_verdict = "; ".join(worst.evidence[:_SHORT_EVIDENCE])
            self.fail(f"{reason}; the last: {last_verdict}", code=EXIT_FAILED, end_step=end_step)
        elif worst.action == "diagnose":
            self.attempts.stop(JobEvent.DIAGNOSED, f"self-checks after: {worst.evidence[0]}")
        else:
            blamed = tuple(dict.fromkeys(name for verdict in verdicts for name in verdict.nodes))
            evict = frozenset(name for verdict in verdicts if verdict.action == "evict" for name in verdict.nodes)
            self.recovery.recover(blamed, evict)

    def _undo_update(self, verdict: Verdict) -> None:
        """Return to the previous settings, since the new ones brought no step, and start again."""
        self.settings.undo()
        reason = f"the new settings brought no step and are taken back: {'; '.join(verdict.evidence[:_SHORT_EVIDENCE])}"
        self.record_event(Event.UPDATE_UNDONE, evidence=(reason,))
        self.attempts.stop(JobEvent.RESTARTED, reason, updating=False)

    def fail(self, reason: str, *, code: int, end_step: int) -> None:
        """End the job. If it failed within a step, first record the step and its samples."""
        if not end_step or self.settings.config.foreign.command:  # another trainer's samples are unknown
            self.attempts.fail(reason, code)
            return
        self._is_ending = True
        self.tasks.spawn(self._fail_in_step(reason, code, end_step))

    async def _fail_in_step(self, reason: str, code: int, end_step: int) -> None:
        """Find the samples of the step in which the job failed, record them, and end the job."""
        samples: dict[str, Any] = {}
        try:
            sentence, samples = await find_samples(self.run, end_step)
        except Exception as error:  # The job must end even if this fails.
            log.warning("the samples of step %d cannot be determined", end_step, exc_info=True)
            sentence = f"its samples cannot be determined: {error!r}"
        finally:
            self._is_ending = False
        if not self.job.is_at_work:
            return  # A person has ended the job meanwhile.
        step, count = escalation.count_equal_ends(self.job.state)
        ends = f"each of the last {count} starts ended in step {end_step}"
        if count <= 1:
            ends = f"it ended in step {end_step}"
        evidence = (f"{ends}: {sentence}",)
        self.record_event(Event.FATAL_STEP, evidence=evidence, step=step, times=count, samples=samples.get("samples"))
        self.attempts.fail(f"{reason}; {ends}: {sentence}", code)

    def _find_exit_code(self, verdict: Verdict) -> int:
        """Return the exit code of the process at fault, which becomes the job's exit code."""
        codes = [
            worker.code
            for worker in self._list_workers()
            if worker.rank in verdict.ranks and worker.state == "exited" and worker.code
        ]
        return codes[0] if codes else EXIT_FAILED


async def find_samples(run: Path, step: int) -> tuple[str, dict[str, Any]]:
    """Return the samples that a step trains: (a sentence, the output of `megascale data samples --json`).

    A separate process finds the samples, since this package does not import the data's. If it cannot find them, the
    sentence gives the reason and the output is empty.
    """
    process = await asyncio.create_subprocess_exec(
        *module_command("megascale.cli.main", "data", "samples", str(run), f"--step={step}", "--json"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(SAMPLES_TIMEOUT):
            out, errors = await process.communicate()
        if process.returncode:
            reason = errors.decode(errors="replace").strip()[-_ERROR_CHARACTERS:]
            return f"its samples cannot be determined: {reason}", {}
        samples = json.loads(out)
    except (TimeoutError, ValueError) as error:
        reason = str(error) or f"the search took over {SAMPLES_TIMEOUT:g} s"
        return f"its samples cannot be determined: {reason}", {}
    finally:
        if process.returncode is None:
            process.kill()
            with contextlib.suppress(TimeoutError):  # the kernel cannot end a process that waits for a failed device
                async with asyncio.timeout(_KILL_SECONDS):
                    await process.wait()
    return describe_samples(run, step, samples), samples


def describe_samples(run: Path, step: int, samples: dict[str, Any]) -> str:
    """Return a sentence for the output of `megascale data samples --json`."""
    windows_by_file: dict[tuple[str, int], list[int]] = {}  # (file, epoch) -> windows
    for sample in samples["samples"]:
        windows_by_file.setdefault((sample["file"], sample["epoch"]), []).append(sample["window"])
    phrases = []
    for (file, epoch), windows in windows_by_file.items():
        listed = ", ".join(map(str, windows[:_LISTED_WINDOWS]))
        if len(windows) > _LISTED_WINDOWS:
            listed += f" and {len(windows) - _LISTED_WINDOWS} more"
        phrases.append(f"windows {listed} of {file} (epoch {epoch})")
    first = samples["first"]
    last = first + samples["count"] - 1
    return (
        f"it trains samples {first} to {last}: {'; '.join(phrases)}; `megascale data samples {run} --step {step}` "
        "lists them"
    )
