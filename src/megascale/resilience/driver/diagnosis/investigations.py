"""Investigations that take longer than an iteration of the loop: ranks that do not progress, and slow machines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.layout import Layout, lay_out
from megascale.core.python_process import module_command
from megascale.errors import DataError, MegascaleError
from megascale.observe.hang.scene import RankEvidence, Scene, unpack_evidence
from megascale.resilience.driver.nodes import Nodes
from megascale.resilience.driver.process import LoopTasks
from megascale.resilience.driver.recovery.hot_update import RunningSettings
from megascale.resilience.driver.state.job import Job
from megascale.resilience.protocol.agent_messages import Evidence
from megascale.resilience.rules.view import SlowFinding

log = logging.getLogger("megascale.driver")

ANSWER_TIMEOUT = 15.0  # seconds for the agents' answers; the stack of a process that hangs takes up to five seconds
WATCH_SECONDS = 0.5  # seconds for which a rank is watched for progress
CALL_LIMIT = 2048  # collective calls that each rank reports
LARGE_JOB_CALL_LIMIT = 256  # the same in a job of more than LARGE_JOB_RANKS ranks
LARGE_JOB_RANKS = 512

SEARCH_INTERVAL = 20.0  # seconds between searches, and at least ten times the duration of the last one
SEARCH_TIMEOUT = 300.0  # seconds for a search
_NICE = 10  # nice value of the searching process, since training has priority
_SENTENCE_LIMIT = 500  # characters of a sentence of a finding
_SENTENCE_COUNT = 8  # sentences per finding
_FINDING_COUNT = 64  # findings per search


@dataclass(kw_only=True, eq=False)
class RankInvestigation:
    """Asks the agents about ranks that do not progress, and assembles the answers as a `Scene` (observe/hang/scene.py).

    Attributes:
        settings: the settings in force, which determine the layout of the ranks.
    """

    job: Job
    nodes: Nodes
    settings: RunningSettings
    _order: int = field(default=0, init=False)  # number of the last order to the agents
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)  # An agent answers only its last order.
    _answers: dict[int, Evidence] = field(default_factory=dict, init=False)  # by rank
    _missing: set[int] = field(default_factory=set, init=False)  # ranks without an answer
    _is_complete: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    @property
    def is_running(self) -> bool:
        """True while the agents are being asked."""
        return self._lock.locked()

    async def gather(self, watch: float = WATCH_SECONDS) -> tuple[Scene, Layout | None]:
        """Ask all agents. Return the answers that came in time, and the layout of the ranks (None if unknown).

        Args:
            watch: seconds for which the agents watch the ranks for progress.
        """
        async with self._lock:
            state = self.job.state
            self._send_orders(watch)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_TIMEOUT):
                    if self._missing:
                        await self._is_complete.wait()
            answers = self._answers
            self._missing = set()
            scene = await asyncio.to_thread(_assemble_scene, answers, state.world)
            return scene, self._lay_out(state.data, state.world)

    def _send_orders(self, watch: float) -> None:
        """Order the connected agents to report about their ranks, and note the ranks whose answers are missing."""
        state = self.job.state
        self._order += 1
        self._answers = {}
        self._missing = set()
        self._is_complete.clear()
        calls = LARGE_JOB_CALL_LIMIT if state.world > LARGE_JOB_RANKS else CALL_LIMIT
        for name in state.placement:
            node = self.nodes[name]
            if node.channel is not None:  # A lost node does not answer.
                self._missing |= set(state.ranks(name))
                self.nodes.order(node, do="explain", order=self._order, history=calls, watch=watch)

    def receive(self, node: str, evidence: Evidence) -> None:
        """Take the answer about one rank."""
        if evidence.order == self._order and evidence.rank in self.job.state.ranks(node):
            self._answers[evidence.rank] = evidence
            self._missing.discard(evidence.rank)
            if not self._missing:
                self._is_complete.set()

    def _lay_out(self, data: int, world: int) -> Layout | None:
        """Return the layout of the ranks with the present data-parallel size, None if it is unknown."""
        config = self.settings.config
        if config.foreign.command:
            return None  # The layouts of another trainer are unknown.
        parallel = config.parallel.model_copy(update={"data": data})
        try:
            return lay_out(config.model_copy(update={"parallel": parallel}), world)
        except MegascaleError:
            return None


def _assemble_scene(answers: dict[int, Evidence], world: int) -> Scene:
    """Return the readable answers as one scene."""
    ranks: dict[int, RankEvidence] = {}
    for rank, evidence in sorted(answers.items()):
        if evidence.data:
            with contextlib.suppress(DataError):
                ranks[rank] = unpack_evidence(evidence.data)
    moving = frozenset(rank for rank, evidence in answers.items() if evidence.moving)
    return Scene(ranks, world, moving, time.time_ns())


@dataclass(kw_only=True, eq=False)
class SlowMachineSearch:
    """Searches the recorded spans of a running job for slow machines, in a process: `megascale stragglers RUN --json`.

    Spans have every step of every rank; heartbeats carry only a rank's last step once per second. Agents send the spans
    of nodes that do not see the run folder. Without recorded spans the rules have only the heartbeats.
    """

    run: Path
    job: Job
    tasks: LoopTasks
    _is_searching: bool = field(default=False, init=False)
    _next_search: float = field(default=0.0, init=False)  # monotonic seconds
    _result: tuple[int, tuple[SlowFinding, ...]] = field(default=(0, ()), init=False)  # (attempt, findings)

    def list_findings(self) -> tuple[SlowFinding, ...]:
        """Return the findings of the last search in the present attempt."""
        attempt, findings = self._result
        return findings if attempt == self.job.state.attempt else ()

    def start_if_due(self, current_time: float) -> None:
        """Start a search if it is due at `current_time`, in monotonic seconds."""
        if not self.job.is_running:
            self._next_search = current_time + SEARCH_INTERVAL  # The first search waits until there are spans.
        elif not self._is_searching and current_time >= self._next_search and (self.run / "spans").is_dir():
            self._is_searching = True
            self.tasks.spawn(self._search(self.job.state.attempt))

    async def _search(self, attempt: int) -> None:
        """Search once, and choose the time of the next search."""
        start_time = time.monotonic()
        try:
            self._result = (attempt, await self._run_command(attempt))
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("the search for slow machines failed: %s", error)
        finally:
            self._is_searching = False
            duration = time.monotonic() - start_time
            self._next_search = time.monotonic() + max(SEARCH_INTERVAL, 10 * duration)

    async def _run_command(self, attempt: int) -> tuple[SlowFinding, ...]:
        """Run `megascale stragglers` and return its findings."""
        command = module_command("megascale", "stragglers", str(self.run), "--json")
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *command, stdin=null, stdout=asyncio.subprocess.PIPE, stderr=null
        )
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            async with asyncio.timeout(SEARCH_TIMEOUT):
                out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if process.returncode:
            return ()  # The spans have no roll-ups yet.
        return parse_findings(strict_json.loads(out), attempt)


def parse_findings(output: dict[str, Any], attempt: int) -> tuple[SlowFinding, ...]:
    """Return the persistently slow ranks, and the slow links of a single rank, of `megascale stragglers --json`.

    Output about another attempt has no findings.

    Raises:
        ValueError, KeyError, TypeError: the output has another form.
    """
    if output["attempt"] != attempt:
        return ()
    findings = [
        SlowFinding(
            rank=int(record["rank"]),
            slower=float(record["slower"]),
            cause=str(record["cause"])[:_SENTENCE_LIMIT],
            confidence=float(record["confidence"]),
            evidence=_shorten(record["evidence"]),
        )
        for record in output["slow_ranks"]
        if record["state"] == "persistent"
    ]
    findings += [
        SlowFinding(
            rank=int(record["ranks"][0]),
            slower=float(record["share"]),
            cause="link",
            confidence=float(record["confidence"]),
            evidence=_shorten(record["evidence"]),
        )
        for record in output["slow_links"]
        if len(record["ranks"]) == 1
    ]
    return tuple(findings[:_FINDING_COUNT])


def _shorten(sentences: list[Any]) -> tuple[str, ...]:
    """Limit the number and the lengths of sentences, since another process wrote them."""
    return tuple(str(sentence)[:_SENTENCE_LIMIT] for sentence in sentences[:_SENTENCE_COUNT])
