"""Looking for slow machines in a running job's recorded spans, in a process of its own: `megascale stragglers RUN
--json`.

That reads every rank's every step, where heartbeats carry a rank's last one once a second. Spans of nodes with folders
of their own come through their agents. Where none are recorded the rules have the heartbeats alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Any

from megascale.core import strict_json
from megascale.core.python_process import module_command
from megascale.resilience.driver.process.loop_tasks import LoopTasks
from megascale.resilience.driver.state.job import Job
from megascale.resilience.driver.state.job_state import Phase
from megascale.resilience.rules.view import SlowFinding

log = logging.getLogger("megascale.driver")

EVERY = 20.0  # seconds between looks, and ten times what the last one took
MOST = 300.0  # seconds that a look may take
_NICE = 10  # training goes first
_TEXT = 500  # characters of a sentence, and how many of them
_SENTENCES, _FINDINGS = 8, 64


class SlowLook:
    """Args:
    run: whose spans are read.
    job: is looked at while it runs.
    tasks: for the process.
    """

    def __init__(self, run: Path, job: Job, tasks: LoopTasks) -> None:
        self._run, self._job, self._tasks = run, job, tasks
        self._looking = False
        self._next = 0.0
        self._found: tuple[int, tuple[SlowFinding, ...]] = (0, ())

    def found(self) -> tuple[SlowFinding, ...]:
        """What the last look at the present attempt found."""
        attempt, findings = self._found
        return findings if attempt == self._job.state.attempt else ()

    def consider(self, now: float) -> None:
        """Look, if it is time; `now`: the driver's monotonic clock."""
        if self._job.phase is not Phase.RUNNING:
            self._next = now + EVERY  # a first look when there is something to see
        elif not self._looking and now >= self._next and (self._run / "spans").is_dir():
            self._looking = True
            self._tasks.spawn(self._look(self._job.state.attempt))

    async def _look(self, attempt: int) -> None:
        began = time.monotonic()
        try:
            self._found = (attempt, await self._ask(attempt))
        except (OSError, ValueError, TypeError, KeyError) as error:
            log.warning("slow machines cannot be looked for: %s", error)
        finally:
            self._looking = False
            took = time.monotonic() - began
            self._next = time.monotonic() + max(EVERY, 10 * took)

    async def _ask(self, attempt: int) -> tuple[SlowFinding, ...]:
        words = module_command("megascale", "stragglers", str(self._run), "--json")
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        try:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
            async with asyncio.timeout(MOST):
                out, _ = await process.communicate()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
        if process.returncode:
            return ()  # no roll-ups yet, or none at all
        return findings(strict_json.loads(out), attempt)


def findings(told: dict[str, Any], attempt: int) -> tuple[SlowFinding, ...]:
    """What `megascale stragglers --json` said, of persistent ranks and of links that are one rank's; none of another
    attempt. ValueError, KeyError or TypeError if it is something else."""
    if told["attempt"] != attempt:
        return ()
    found = [
        SlowFinding(
            int(one["rank"]), float(one["slower"]), str(one["cause"])[:_TEXT], float(one["confidence"]),
            tuple(str(text)[:_TEXT] for text in one["evidence"][:_SENTENCES]),
        )
        for one in told["slow_ranks"]
        if one["state"] == "persistent"
    ]  # fmt: skip
    found += [
        SlowFinding(
            int(one["ranks"][0]), float(one["share"]), "link", float(one["confidence"]),
            tuple(str(text)[:_TEXT] for text in one["evidence"][:_SENTENCES]),
        )
        for one in told["slow_links"]
        if len(one["ranks"]) == 1
    ]  # fmt: skip
    return tuple(found[:_FINDINGS])
